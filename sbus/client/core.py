"""The client without its I/O: packets to send, and replies expected.

Theory of operation
-------------------

A *backend* (Twisted, asyncio, blocking) owns the socket. It sends the packets that the core returns, in that order,
and passes every packet that it receives to `ClientCore.receive`. The core never waits, never reads a clock and never
touches a file descriptor, so one set of unit tests covers three libraries.

==========================  ==========================================================================================
where                       what the core knows
==========================  ==========================================================================================
`sbus.client.choices`       what this client has chosen: the settings in force and the patterns.
                            `ClientCore.resync_packets` makes the first packets of every connection of them, the first
                            one included
`sbus.client.dispatch`      which subscriptions get a message: the server sends one copy to a client, so the client
                            routes again, with the server's own trie and route cache. Messages with one route are
                            delivered as one list
`sbus.client.questions`     the waiters for replies: the server answers in order, so they are a queue. A plain
                            ``control("!/cred/whoami")`` takes a place in it, because its reply arrives too
`sbus.client.extensions`    what goes beyond the original protocol, which a server may ignore
`sbus.client.agreement`     the longest packet, and whether large messages travel in sealed memory
                            (`ClientCore.publish`)
==========================  ==========================================================================================

Invariants:

* A waiter is completed exactly once: by its reply, or, after `ClientCore.disconnected`, by the backend. `disconnected`
  returns the waiters instead of completing them: a completed waiter may call the client again, which must find the
  outbox and the subscriptions of the next connection in place.
* Identical patterns share one subscription at the server. ``SUB`` is sent for the first and ``UNSUB`` for the last.
* Every packet is checked before it is returned. The server disconnects a client for a malformed packet, so a mistake
  raises `InvalidKey` or `PacketTooLong` here and never reaches the socket.
* A received packet that is longer than the buffer is a loss, as if the server had reported it, at its place among the
  messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sbus.client.agreement import Agreement, PacketLimit, is_limit
from sbus.client.arguments import as_bytes, check_callback, check_payload
from sbus.client.choices import Choices
from sbus.client.denials import Denial
from sbus.client.dispatch import Batch, Dispatcher, Message, Sink, Waiter, only_named
from sbus.client.extensions import Extensions
from sbus.client.losses import Lost, lost_of
from sbus.client.payloads import Arena, Buffer, Outgoing, flat
from sbus.client.watches import MAX_WATCHED_KEY, Watch
from sbus.errors import InvalidKey, NotAllowed, PacketTooLong, UsageError, Violation, ViolationReason
from sbus.protocol.bundles import MAX_BUNDLE
from sbus.protocol.controls import (
    BUNDLE,
    BUNDLE_ON,
    BYE,
    BYE_ON,
    CHAIN,
    CHAIN_ON,
    DENIED,
    DENIED_ON,
    INTEREST,
    LAST,
    PAYLOAD,
    PAYLOAD_ON,
    PROBE,
    RECEIPTS_ON,
    SENDER,
    SENDER_ON,
    WHOAMI,
)
from sbus.protocol.keys import CURRENT, Dialect, SecretKey
from sbus.protocol.packets import CMSG, DEFAULT_MAX_PACKET, MSG, SUB, UNSUB, build
from sbus.routing.runs import build_messages
from sbus.syscalls.memfd import Memfd
from sbus.syscalls.sockets import LONGEST_PACKET

__all__ = ["Batch", "ClientCore", "Message", "Sink", "Waiter"]

_OWN_CONTROLS = {
    BUNDLE: "connect with bundles=True, or bundles=False",
    BYE: "see ConnectionLost.reason",
    DENIED: "connect with on_denied=",
    INTEREST: "use watch_subscribers",
    PROBE: "use has_subscribers",
    LAST: "use subscribe with last=True",
    PAYLOAD: "connect with payloads=True",
    SENDER: "connect or subscribe with sender=True",
}
"""Control messages that the client sends itself, and what the application does instead."""


def _quoted(key: bytes) -> str:
    """Return a key in quotes, for readers who have not written it as Python's bytes; a long one is cut off."""
    return f"{key.decode('utf-8', 'backslashreplace')!r:.200}"


def _own_ids() -> tuple[int, int, int]:
    """Return the GID, UID and PID of this process, in the order of secret keys."""
    return os.getegid(), os.geteuid(), os.getpid()


class ClientCore:
    """The state of one client; see the theory of operation above.

    :param dialect: the revision of the protocol that the server speaks.
    :param max_packet: bytes in the longest packet that the server takes, unless it says so itself.
    :param on_control: called with (key, payload) of control messages that the core does not handle.
    :param bundles: ask the server for bundles, if the dialect has them.
    :param bye: ask the server to give the reason before it disconnects this client, if the dialect has that.
    :param on_lost: called with each loss that the server reports, in its place among the messages; None: do not ask
        for such reports.
    :param on_denied: called with each denial that no call and no reader gets; None: do not ask for denials, so that the
        server disconnects this client for what it may not do.
    :param refuse: called with a subscription that the server has refused, and the error; it ends the subscription, and
        returns whether a reader or a caller gets the error.
    :param sender: ask the server who published each message.
    :param give_up: called with the error if the server does not name senders.
    :param on_truncated: called with each packet that was too long to receive, in its place.
    :param payloads: ask the server for large messages, if the dialect has them.
    :param make_room: called with the bytes in the longest packet that may come and may be sent, once that is known.
    :ivar on_name_change: called when the server says that this client's name has changed, after `observe_name`.
    :ivar on_settled: called on each connection when it is known how long a packet the server takes, and when it is
        known whether it takes payloads.
    :ivar max_packet: bytes in the longest packet that can be sent on this connection.
    :ivar longest_plain: bytes in the longest packet of a message that certainly travels in a packet.
    :ivar bundle_limit: bytes in the longest bundle that may be sent; 0 while none may.
    :ivar packet_limit: the agreement about the longest packet.
    :ivar payloads: the agreement about large messages.
    :ivar extensions: the requests beyond the original protocol.
    """

    def __init__(
        self,
        dialect: Dialect = CURRENT,
        max_packet: int = DEFAULT_MAX_PACKET,
        on_control: Callable[[bytes, bytes], object] | None = None,
        *,
        bundles: bool = False,
        bye: bool = False,
        on_lost: Callable[[Lost], object] | None = None,
        on_denied: Callable[[Denial], object] | None = None,
        refuse: Callable[[Sink, NotAllowed], bool] = lambda _, __: False,
        sender: bool = False,
        give_up: Callable[[UsageError], object] = lambda _: None,
        on_truncated: Callable[[Lost], object] = lambda _: None,
        make_room: Callable[[int], object] = lambda _: None,
        payloads: bool = False,
    ) -> None:
        self.dialect = dialect
        self.bundle_limit = 0
        self.max_packet = max_packet
        self.packet_limit = PacketLimit(max_packet)
        self.payloads = Agreement(payloads and dialect.control, self._settled)
        self.on_settled: Callable[[], object] = lambda: None
        self.longest_plain = 0  # bytes of the longest packet of a message that needs no closer look
        self._make_room = make_room
        self.on_control = on_control
        self.on_name_change: Callable[[], object] | None = None
        self._choices = Choices()  # without the patterns, which the dispatcher has: see `snapshot`
        asked = {
            BUNDLE_ON: bundles,
            BYE_ON: bye,
            DENIED_ON: on_denied is not None,
            RECEIPTS_ON: on_lost is not None,
            SENDER_ON: sender,
            PAYLOAD_ON: payloads,
        }
        for key, wanted in asked.items():
            if wanted and dialect.control:
                self._choices = self._choices.with_control(key)
        self._limit()
        self._dispatcher = Dispatcher(dialect, self._receive_control, lambda packet: on_truncated(lost_of(packet)))
        self.extensions = Extensions(
            on_lost, self._dispatcher, give_up, on_denied, refuse, self.payloads, self.learn_limit
        )
        self._ids = _own_ids()  # at the time of connecting
        self.process = self._dispatcher.process
        self.sinks = self._dispatcher.sinks
        self.sinks_for = self._dispatcher.sinks_for
        self.rebuild_routes = self._dispatcher.rebuild

    # --- packets to send ---------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: Buffer) -> bytes:
        """Return the packet that publishes a message.

        :raises InvalidKey: if the protocol does not allow the key.
        :raises PacketTooLong: if the packet exceeds `max_packet`, or the payload the server's limit.
        :raises UsageError: if the payload is not bytes.
        :raises OSError: if the kernel has no memory or descriptor for a large payload.
        """
        if packets := build_messages([(key, payload)], 0, self.longest_plain):  # type: ignore[list-item]
            return packets[0]
        arena = Arena(self.payloads.most)
        packet = self._build(key, payload, arena)
        arena.seal()
        return packet

    def publish_many(self, messages: Iterable[tuple[bytes | str, Buffer]]) -> list[bytes]:
        """Return the packets that publish messages, (key, payload) each.

        :raises: as `publish`.
        """
        pairs: list[Any] = list(messages)
        packets = build_messages(pairs, 0, self.longest_plain)
        if len(packets) == len(pairs):
            return packets
        arena = Arena(self.payloads.most)
        while len(packets) < len(pairs):
            message = pairs[len(packets)]
            try:
                key, payload = message
            except (TypeError, ValueError):
                raise UsageError(f"a message to publish is a pair (key, payload), not {message!r:.60}") from None
            packets.append(self._build(key, payload, arena))
            packets += build_messages(pairs, len(packets), self.longest_plain)
        arena.seal()
        return packets

    def _build(self, key: bytes | str, payload: Buffer, arena: Arena) -> bytes:
        """Return the packet of a message that may be large or wrong; a large payload goes to the arena."""
        key = self.check_key(key)
        check_payload(payload)
        threshold = self.payloads.threshold
        if threshold is None or memoryview(payload).nbytes < threshold:
            packet: bytes = b"MSG %b\0%b" % (key, payload)  # type: ignore[str-format]
            if len(packet) > self.max_packet:
                can_ask = self.dialect.control and not self.payloads.is_wanted
                raise self._too_long(len(packet), "connect with payloads=True, " if can_ask else "")
            if len(packet) > MAX_BUNDLE and self.is_open:
                raise self._not_known(len(packet))
            return packet
        view = flat(payload)
        self.check_size(view.nbytes)
        return self.build_range(key, *arena.write(view), view.nbytes)

    def check_key(self, key: bytes | str) -> bytes:
        """Return a routing key as bytes.

        :raises InvalidKey: if the protocol does not allow it.
        """
        key = as_bytes(key, "routing key")
        if b"!" in key or b"\0" in key:
            self._check(key, "routing key")
        return key

    def check_size(self, size: int) -> None:
        """Check the size of a payload that goes into sealed memory.

        :raises PacketTooLong: if it exceeds what the server takes, or if that is not known yet (`may_learn_limit`).
        """
        if self.payloads.is_open:
            raise self._not_known(size)
        if self.payloads.least is not None and size > self.payloads.most:
            raise PacketTooLong(
                f"{ViolationReason.PACKET_TOO_LONG.value}: {size} bytes of payload, and the limit is "
                f"{self.payloads.most}; send it in parts, or have the operator raise the limit of the bus "
                "(--max-payload)"
            )

    def build_range(self, key: bytes, memory: Memfd, offset: int, length: int) -> bytes:
        """Return the packet of a large message; a plain one, if the server takes no payloads.

        :raises PacketTooLong: if it exceeds `max_packet`, or what the server takes.
        """
        self.check_size(length)
        message = Outgoing.of(key, memory, offset, length)
        if self.payloads.least is None:
            return self.plain(message)
        self._sized(message.packet)
        return message

    def plain(self, message: Outgoing) -> bytes:
        """Return the packet of the same message with its bytes.

        :raises PacketTooLong: if it exceeds `max_packet`.
        """
        if len(message) > self.max_packet:
            raise self._too_long(len(message))
        return message.plain()

    def subscribe(self, pattern: bytes | str, sink: Sink, *, last: bool = False, sender: bool = False) -> list[bytes]:
        """Subscribe a sink to a pattern.

        :param last: ask for the last values of matching keys too.
        :param sender: ask for senders, on this connection and later ones, and take only messages whose sender is known.
        :returns: the packets to send; without `last` and `sender`, none if another sink has the same pattern.
        :raises InvalidKey: if the protocol does not allow the pattern.
        :raises PacketTooLong: if the pattern does not fit a packet.
        :raises UsageError: for `last` and `sender`, in a dialect without control messages; for a coroutine function as
            the callback.
        """
        pattern = as_bytes(pattern, "pattern")
        secret = self._check(pattern, "pattern")
        self._sized(build(UNSUB, pattern))  # longer than SUB by two bytes
        if sink.callback is not None:
            check_callback(sink.callback, "a callback")
        if last:
            self._control(LAST, pattern)
        packets = self._ask_senders(sink) if sender else []
        sink.pattern = pattern
        is_first = self._dispatcher.add(sink, secret, joins_later=last)
        if last:
            return packets + self.extensions.subscribe_last(sink, is_first=is_first, choices=self._choices)
        return [*packets, build(SUB, pattern)] if is_first else packets

    def _ask_senders(self, sink: Sink) -> list[bytes]:
        question = self._control(SENDER_ON)
        only_named(sink)
        if SENDER_ON in self._choices.controls:
            return []
        self._choices = self._choices.with_control(SENDER_ON)
        return [question, *self.extensions.ask_senders()]

    def unsubscribe(self, sink: Sink) -> list[bytes]:
        """End a subscription.

        :returns: the packets to send; none if another sink has the same pattern, or if this one has ended before.
        """
        return self.extensions.unsubscribe(sink, is_last=self._dispatcher.remove(sink))

    def control(self, key: bytes | str, payload: bytes | None = None) -> bytes:
        """Return the packet of a control message.

        A setting is also put in force for later connections.

        :raises InvalidKey: if the key contains a NUL.
        :raises UsageError: in a dialect without control messages, and for those that the client sends itself:
            ``bundle``, ``bye``, ``denied``, ``interest``, ``payload``, ``probe``, ``last``, ``sender``.
        """
        key = as_bytes(key)
        if instead := _OWN_CONTROLS.get(key.partition(b"/")[0]):
            raise UsageError(f"the client sends {key.decode(errors='replace'):.80} itself: {instead}")
        if payload is not None:
            check_payload(payload)
        packet = self._control(key, payload)
        self._choices = self._choices.with_control(key)
        if key == WHOAMI:
            self.extensions.questions.ask(WHOAMI, b"", None)
        return packet

    def _control(self, key: bytes, payload: bytes | None = None) -> bytes:
        if not self.dialect.control:
            raise UsageError("the early dialect has no control messages: settings and whoami need a current server")
        if b"\0" in key:
            raise InvalidKey(f"the control message {_quoted(key)} contains a NUL, which ends a key")
        return self._sized(build(CMSG, key, payload))

    def whoami(self, waiter: Waiter) -> list[bytes]:
        """Ask for this client's credentials; `waiter` gets the payload of the reply.

        :raises UsageError: in a dialect without control messages.
        """
        packet = self._control(WHOAMI)
        self.extensions.questions.ask(WHOAMI, b"", waiter)
        return [packet]

    def observe_name(self, on_change: Callable[[], object]) -> list[bytes]:
        """Have the server say on this connection when this client's name changes; a server may not know that.

        On a bus with a master the name begins with that of the bus's link, which changes with the link.
        """
        if not self.dialect.control:
            return []
        self.on_name_change = on_change
        return [build(CMSG, CHAIN_ON)]

    def fence(self, waiter: Waiter) -> list[bytes]:
        """Complete `waiter` once the server has handled every packet sent before these.

        The early dialect has no control messages: there the fence is a message to a random key of this client, between
        ``SUB`` and ``UNSUB``. No subscription sees it.
        """
        if self.dialect.control:
            return self.whoami(waiter)
        key = b"fence.%b" % os.urandom(12).hex().encode()
        self._dispatcher.expect(key, waiter)
        return [build(SUB, key), build(MSG, key, b""), build(UNSUB, key)]

    def probe(self, key: bytes | str, waiter: Waiter) -> list[bytes]:
        """Ask how many clients would get a message; `waiter` gets the number, or `UsageError` if the server ignores it.

        :raises InvalidKey: if the protocol does not allow the key.
        :raises UsageError: in a dialect without control messages.
        """
        key = as_bytes(key)
        self._check(key, "routing key")
        self._control(PROBE, key)
        return self.extensions.probe(key, waiter)

    def probe_request(self, key: bytes | str, waiter: Waiter) -> list[bytes]:
        """Ask as `probe` does about the key of a request.

        :returns: the packets to send; none if the server does not say.
        """
        if self._check(as_bytes(key), "routing key") or PROBE in self.extensions.questions.ignored:
            return []  # about secret keys it says the same to everybody
        return self.probe(key, waiter)

    def watch(self, watch: Watch) -> list[bytes]:
        """Have the server report whether anybody subscribes to a key.

        :returns: the packets to send; none if the key has another watch.
        :raises InvalidKey: if the protocol does not allow the key.
        :raises UsageError: in a dialect without control messages, for a long key, and for too many keys.
        """
        self._check(watch.key, "routing key")
        self._control(INTEREST, watch.key)
        if len(watch.key) > MAX_WATCHED_KEY:
            raise UsageError(f"{len(watch.key)} bytes in a key, and at most {MAX_WATCHED_KEY} can be watched")
        return self.extensions.watch(watch)

    # --- connections -------------------------------------------------------------------------

    def connected(self, max_sendable: int) -> None:
        """Note a new connection, which can send packets of `max_sendable` bytes."""
        self.packet_limit.restart(max_sendable)
        self._ids = _own_ids()
        self.extensions.connected(has_subscriptions=any(True for _ in self.sinks()))
        self._limit()

    def can_send(self, max_sendable: int) -> None:
        """Note that the socket can send longer packets now."""
        self.packet_limit.sendable = max_sendable
        self._limit()

    def _limit(self) -> None:
        self.max_packet = self.packet_limit.longest
        threshold = self.payloads.threshold
        # A packet is at least five bytes longer than its payload.
        self.longest_plain = self.max_packet if threshold is None else min(self.max_packet, threshold + 4)
        if self.is_open:
            self.longest_plain = min(self.longest_plain, MAX_BUNDLE)

    def _settled(self) -> None:
        self._limit()
        self.on_settled()

    @property
    def holds(self) -> bool:
        """Whether messages for the next server wait until it has said what it takes."""
        return self.asks_limit or self.payloads.is_wanted

    @property
    def is_settled(self) -> bool:
        """Whether it is known what this server takes."""
        return (self.packet_limit.is_known or not self.asks_limit) and self.payloads.is_settled

    @property
    def asks_limit(self) -> bool:
        """Whether the server is asked for its limit."""
        return BYE_ON in self._choices.controls

    @property
    def is_open(self) -> bool:
        """Whether a limit that the server is asked for is unknown, on this connection and the one before."""
        return (self.asks_limit and self.packet_limit.is_open) or self.payloads.is_open

    @property
    def may_learn_limit(self) -> bool:
        """Whether the server may still say that longer messages than is known can be sent."""
        return (self.asks_limit and not self.packet_limit.is_known) or self.payloads.is_open

    @property
    def longest_payload(self) -> int:
        """Bytes of the longest payload, as far as is known."""
        return max(self.max_packet, self.payloads.most)

    @property
    def changes(self) -> int:
        """How often a change has begun that the client has to send to the server."""
        return self.extensions.questions.count + self.extensions.watches.changes + self._dispatcher.changes

    def state(self) -> Choices:
        """Return what this client has chosen so far: settings in force, watched keys and patterns."""
        return replace(
            self._choices,
            watched=self.extensions.watches.keys(),
            patterns=tuple(self._dispatcher.pattern_counts().items()),
            last=self.extensions.snapshots.patterns(),
        )

    def resync_packets(self) -> list[bytes]:
        """Return the first packets of a connection, those of `state`, and expect their replies.

        Secret patterns with IDs that this process no longer has, as after a fork, are given up first: the server would
        disconnect the client for them.
        """
        changed = [field for field, (was, now) in enumerate(zip(self._ids, _own_ids(), strict=True)) if was != now]
        stale = {
            pattern
            for pattern, secret in self._dispatcher.secret_patterns().items()
            if any(secret[field] for field in changed)
        }
        for sink in self.sinks():
            if sink.pattern in stale:
                self.unsubscribe(sink)
        choices = self.state()
        self.extensions.restart(choices)
        return choices.packets()

    def refusal(self, packet: bytes) -> PacketTooLong | None:
        """Return the error for a packet that was made for an earlier connection; None if the server takes it."""
        try:
            if isinstance(packet, Outgoing) and self.payloads.least is not None:
                self.check_size(packet.length)
                packet = packet.packet
            self._sized(packet)
        except PacketTooLong as error:
            return error
        return None

    def check_taken(self, packets: list[bytes]) -> None:
        """Check packets that were made for an earlier connection.

        :raises PacketTooLong: if this server does not take one of them.
        """
        for packet in packets:
            if (error := self.refusal(packet)) is not None:
                raise error

    def disconnected(self) -> list[Waiter]:
        """Forget the connection and the replies expected on it.

        :returns: the waiters to fail, once the caller's own state is consistent: they may call the client at once.
        """
        self.bundle_limit = 0
        return self.extensions.disconnected() + self._dispatcher.take_awaited()

    # --- received packets --------------------------------------------------------------------

    def receive(self, packets: list[bytes]) -> None:
        """Process received packets: messages for sinks, replies for waiters."""
        self.process(Batch(self.extensions.mark_start(packets)))

    def learn_limit(self, payload: bytes = b"") -> None:
        """Note the server's answer to ``bye/on``: the longest packet, or nothing for the usual limit.

        Without an answer, call it with nothing, too.
        """
        self.packet_limit.learn(payload)
        if self.packet_limit.said:
            self._make_room(min(self.packet_limit.said, LONGEST_PACKET))
        self._settled()

    def _receive_control(self, key: bytes, payload: bytes) -> None:
        if key == BYE_ON and self.asks_limit:
            self.learn_limit(payload)
        if key == BUNDLE_ON and BUNDLE_ON in self._choices.controls and is_limit(payload):
            self._make_room(min(int(payload), LONGEST_PACKET))
            self.bundle_limit = min(int(payload), self.packet_limit.sendable)
            self.extensions.answered.add("bundle")
        elif not self.extensions.handle(key, payload) and not self._name_received(key) and self.on_control is not None:
            self.on_control(key, payload)

    def _name_received(self, key: bytes) -> bool:
        """Handle what the server says of a changed name; return whether the application has not asked for it."""
        if key not in (CHAIN, CHAIN_ON) or self.on_name_change is None:
            return False
        if key == CHAIN:
            self.on_name_change()
        return CHAIN_ON not in self._choices.controls

    # --- checks ------------------------------------------------------------------------------

    def _check(self, key: bytes, what: str) -> SecretKey | None:
        if b"\0" in key:
            raise InvalidKey(f"the {what} {_quoted(key)} contains a NUL, which ends a key")
        try:
            return self.dialect.check(key)
        except Violation as violation:
            raise InvalidKey(f"the {what} {_quoted(key)} is not allowed: {violation}", violation.reason) from None

    def _sized(self, packet: bytes) -> bytes:
        if len(packet) > self.max_packet:
            raise self._too_long(len(packet))
        return packet

    def _not_known(self, size: int) -> PacketTooLong:
        return PacketTooLong(f"it is not known yet whether the bus takes {size} bytes")

    def _too_long(self, size: int, remedy: str = "") -> PacketTooLong:
        return self.packet_limit.error(size, remedy, is_asked=self.asks_limit)
