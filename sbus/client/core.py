"""The client without its I/O: what to send for a wish, and who gets what arrives.

A shell (Twisted, asyncio, blocking) owns the socket. It sends the packets that this core gives it,
in order, and feeds it what arrives. The core knows the subscriptions, the settings and the replies
that are awaited; so when a connection is lost it can say what to send on the next one to be where
it was, and who waits in vain.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from sbus.errors import InvalidKey, PacketTooLong, UsageError, Violation, ViolationReason
from sbus.protocol.bundles import unbundle
from sbus.protocol.keys import CURRENT, EARLY, Dialect, PeerCredentials, SecretKey, matches_open
from sbus.protocol.packets import CMSG, DEFAULT_MAX_PACKET, MSG, SUB, UNSUB, build
from sbus.routing.cache import RouteCache
from sbus.routing.runs import build_messages, next_messages
from sbus.routing.trie import PatternIndex

__all__ = ["Batch", "ClientCore", "Message", "Sink", "Waiter", "as_bytes", "find_dialect"]

_WHOAMI = b"!/cred/whoami"
_BUNDLES = b"bundle/on"
_RUN = 512
"""Messages that are handed on as one list at most."""
_NOBODY = PeerCredentials(0, 0, 0)


class Message(NamedTuple):
    """A message as it was published: its routing key and its payload, both bytes."""

    key: bytes
    payload: bytes


class Waiter(Protocol):
    """Somebody who waits for something: one of the two is called, once."""

    def set_result(self, value: bytes) -> None:
        """It is here."""

    def set_exception(self, error: Exception) -> None:
        """It will never be."""


class Sink(Protocol):
    """Where the messages of one subscription go.

    :ivar callback: who is called with each of them; None if they are kept until somebody reads them.
    """

    pattern: bytes
    callback: Callable[[Message], Any] | None

    def deliver(self, messages: list[Message]) -> None:
        """Messages have come, in this order; the list is others' too, and not to be changed.

        A sink with a callback, and all that want the same messages, get them one by one.
        """


class Batch:
    """Packets that have come, and how far they are dealt with.

    Who reads on from within a callback goes on where it stands.

    :ivar at: index of the next packet.
    """

    __slots__ = ("at", "packets")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = unbundle(packets)
        self.at = 0

    def __len__(self) -> int:
        return len(self.packets) - self.at

    def take(self) -> list[bytes]:
        """What is not dealt with yet; nothing is left then."""
        rest = self.packets[self.at :]
        self.at = len(self.packets)
        return rest


def as_bytes(text: bytes | str) -> bytes:
    """Bytes as they are; text as UTF-8."""
    return text.encode() if isinstance(text, str) else bytes(memoryview(text))


def find_dialect(name: str) -> Dialect:
    """The dialect of this name.

    :raises UsageError: if there is none.
    """
    for dialect in (CURRENT, EARLY):
        if dialect.name == name:
            return dialect
    raise UsageError(f"dialect={name!r}: say 'current' or 'early'")


def _own_ids() -> tuple[int, int, int]:
    """GID, UID and PID, as in our private keys, as far as we know ourselves."""
    return os.getegid(), os.geteuid(), os.getpid()


class ClientCore:
    """The state of one client.

    :param dialect: the revision of the protocol that the server speaks.
    :param max_packet: bytes in the longest packet that the server takes.
    :param on_control: called with (key, payload) of control messages that nobody here knows.
    :param bundles: ask the server for bundles, where the dialect has such a question.
    :ivar bundle_limit: bytes in the longest bundle that may be sent; 0 as long as none may.
    """

    def __init__(
        self,
        dialect: Dialect = CURRENT,
        max_packet: int = DEFAULT_MAX_PACKET,
        on_control: Callable[[bytes, bytes], object] | None = None,
        *,
        bundles: bool = False,
    ) -> None:
        self.dialect = dialect
        self.max_packet = max_packet
        self.bundle_limit = 0
        self._longest = self._max_sendable = max_packet
        self.on_control = on_control
        self._sinks: dict[bytes, list[Sink]] = {}
        self._index: PatternIndex[Sink] = PatternIndex(dialect)
        self._cache: RouteCache[Sink] = RouteCache(dialect)
        self._secret: dict[bytes, SecretKey] = {}
        self._settings: dict[bytes, bytes] = {}
        if bundles and dialect.control:
            self._settings[b"bundle"] = _BUNDLES
        self._waiting: deque[Waiter | None] = deque()  # for answers to whoami; None: asked with `control`
        self._fences: dict[bytes, Waiter] = {}
        self._ids = _own_ids()  # when it was connected

    # --- what to send ------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes) -> bytes:
        """The packet that publishes a message.

        :raises InvalidKey: if nobody may publish with this key.
        :raises PacketTooLong: if it does not fit.
        """
        if packets := build_messages([(key, payload)], 0, self.max_packet):
            return packets[0]
        key = as_bytes(key)
        if b"!" in key or b"\0" in key:
            self._check(key, "routing key")
        return self._sized(b"MSG %b\0%b" % (key, payload))

    def publish_many(self, messages: Iterable[tuple[bytes | str, bytes]]) -> list[bytes]:
        """The packets that publish messages, (key, payload) each.

        :raises: as `publish`.
        """
        messages = list(messages)
        packets = build_messages(messages, 0, self.max_packet)
        while len(packets) < len(messages):
            key, payload = messages[len(packets)]
            packets.append(self.publish(key, payload))
            packets += build_messages(messages, len(packets), self.max_packet)
        return packets

    def subscribe(self, pattern: bytes | str, sink: Sink) -> list[bytes]:
        """The packets that make the server send what the pattern matches; `sink` will get it.

        :raises InvalidKey: if nobody may use this pattern.
        """
        pattern = sink.pattern = as_bytes(pattern)
        secret = self._check(pattern, "pattern")
        packet = build(SUB, pattern)
        self._sized(build(UNSUB, pattern))  # which is longer
        sinks = self._sinks.setdefault(pattern, [])
        sinks.append(sink)
        if secret:
            self._secret[pattern] = secret
            self._cache.clear()
        else:
            self._index.subscribe(sink, pattern, None, _NOBODY)
            self._cache.forget(pattern, None, _NOBODY)
        return [packet] if len(sinks) == 1 else []

    def unsubscribe(self, sink: Sink) -> list[bytes]:
        """The packets that end a subscription; none if another sink has the same pattern, or if it has ended."""
        sinks = self._sinks.get(sink.pattern, [])
        if sink not in sinks:
            return []
        sinks.remove(sink)
        if sink.pattern in self._secret:
            self._cache.clear()
        else:
            self._index.unsubscribe(sink, sink.pattern, None, _NOBODY)
            self._cache.forget(sink.pattern, None, _NOBODY)
        if sinks:
            return []
        del self._sinks[sink.pattern]
        self._secret.pop(sink.pattern, None)
        return [build(UNSUB, sink.pattern)]

    def control(self, key: bytes | str, payload: bytes | None = None) -> bytes:
        """The packet that is this control message.

        A setting (``blocking/…``, ``order/…``, ``echo/…``) is remembered and sent again after a reconnect.

        :raises InvalidKey: if the key holds a NUL.
        :raises UsageError: in a dialect without control messages; if it is about bundles.
        """
        key = as_bytes(key)
        if key.startswith(b"bundle/"):
            raise UsageError("the client sees to bundles itself: connect with bundles=True, or bundles=False")
        packet = self._control(key, payload)
        kind = key.rpartition(b"/")[0]
        if kind in (b"blocking/soft", b"blocking/hard", b"echo"):
            self._settings[kind] = key
        elif kind == b"order":
            # order/random keeps the direction that queue or stack chose before it.
            if key != b"order/random":
                self._settings.pop(b"order/random", None)
                self._settings[kind] = key
            else:
                self._settings[key] = key
        elif key == _WHOAMI:
            self._waiting.append(None)
        return packet

    def _control(self, key: bytes, payload: bytes | None = None) -> bytes:
        if not self.dialect.control:
            raise UsageError("the early dialect has no control messages: settings and whoami need a current server")
        if b"\0" in key:
            raise InvalidKey(f"the control message {key!r} holds a NUL, which ends a key")
        return self._sized(build(CMSG, key, payload))

    def whoami(self, waiter: Waiter) -> list[bytes]:
        """The packets that ask the server who we are; `waiter` gets the answer, word for word.

        :raises UsageError: in a dialect without control messages.
        """
        packet = self._control(_WHOAMI)
        self._waiting.append(waiter)
        return [packet]

    def fence(self, waiter: Waiter) -> list[bytes]:
        """The packets whose reply proves that everything sent before is in force.

        In the early dialect, which has no replies, it is a message to ourselves.
        """
        if self.dialect.control:
            return self.whoami(waiter)
        key = b"fence.%b" % os.urandom(12).hex().encode()
        self._fences[key] = waiter
        return [build(SUB, key), build(MSG, key, b""), build(UNSUB, key)]

    def connected(self, max_sendable: int) -> None:
        """There is a connection, whose socket can send packets of so many bytes."""
        self._max_sendable = max_sendable
        self._ids = _own_ids()
        self.max_packet = min(self._longest, max_sendable)

    def resync_packets(self) -> list[bytes]:
        """What to send first on each connection, to be where the old one was: the settings and the subscriptions.

        Not those to private keys of who we are no longer, as after a fork: nobody may subscribe to what is not his.
        """
        changed = [field for field, (was, now) in enumerate(zip(self._ids, _own_ids(), strict=True)) if was != now]
        for pattern in [p for p, secret in self._secret.items() if any(secret[field] for field in changed)]:
            for sink in tuple(self._sinks[pattern]):
                self.unsubscribe(sink)
        settings = [build(CMSG, key) for key in self._settings.values()]
        return settings + [build(SUB, pattern) for pattern in self._sinks]

    def lost(self) -> list[Waiter]:
        """The connection is gone, and the replies with it.

        :returns: who waits for one; to be told when all else is in order, as they may ask again at once.
        """
        waiting = [waiter for waiter in self._waiting if waiter is not None]
        waiting += self._fences.values()
        self.bundle_limit = 0
        self._waiting.clear()
        self._fences.clear()
        return waiting

    def sinks(self) -> Iterator[Sink]:
        """All that is subscribed."""
        return (sink for sinks in tuple(self._sinks.values()) for sink in tuple(sinks))

    # --- what arrives ------------------------------------------------------------------------

    def receive(self, packets: list[bytes]) -> None:
        """Packets have arrived: give each message to the sinks that want it, each reply to who waits for it.

        A sink must not raise exceptions.
        """
        self.go_on(Batch(packets))

    def go_on(self, batch: Batch) -> None:
        """Deal with what is left of a batch, as `receive` does."""
        packets, routes = batch.packets, self._cache.routes
        while (at := batch.at) < len(packets):
            sinks, messages = next_messages(packets, at, min(at + _RUN, len(packets)), routes, Message)
            if sinks is None:
                batch.at = at + 1
                self._receive_one(packets[at])
                continue
            for sink in sinks:
                if sink.callback is not None:
                    self._call(batch, sinks, messages)
                    break
            else:
                batch.at = at + len(messages)
                for sink in sinks:
                    sink.deliver(messages)

    def _call(self, batch: Batch, sinks: tuple[Sink, ...], messages: list[Message]) -> None:
        """Deliver one by one, as a callback may read on, or change what goes where."""
        for message in messages:
            batch.at = at = batch.at + 1
            alone = [message]
            for sink in sinks:
                sink.deliver(alone)
            if batch.at != at or self._cache.routes.get(message.key) is not sinks:
                return

    def sinks_for(self, key: bytes) -> tuple[Sink, ...]:
        """The sinks that want messages with this key."""
        sinks = self._cache.routes.get(key)
        return self._route(key) if sinks is None else sinks

    def _route(self, key: bytes) -> tuple[Sink, ...]:
        fence = self._fences.pop(key, None)
        if fence is not None:
            fence.set_result(b"")
            return ()
        try:
            secret = self.dialect.check(key)
        except Violation:
            return ()  # no server sends such a key; nobody can have subscribed to it
        if not secret:
            return self._cache.remember(key, None, _callbacks_last(self._index.route(key, None)))
        wanting = [
            s for pattern, wanted in self._secret.items() if _reaches(wanted, secret) for s in self._sinks[pattern]
        ]
        return self._cache.remember(key, secret, _callbacks_last(wanting))

    def _receive_one(self, packet: bytes) -> None:
        """Deal with a packet of whatever kind: also with a message whose way is not known."""
        verb, _, rest = packet.partition(b" ")
        key, nul, payload = rest.partition(b"\0")
        if verb == MSG and nul:
            messages = [Message(key, payload)]
            for sink in self._route(key):
                sink.deliver(messages)
        elif verb == CMSG:
            self._receive_control(key, payload)
        # Anything else is nothing that a server sends: ignored, as a newer server may know more than we do.

    def _receive_control(self, key: bytes, payload: bytes) -> None:
        if key == _WHOAMI:
            waiter = self._waiting.popleft() if self._waiting else None
            if waiter is not None:
                waiter.set_result(payload)
                return
        if key == _BUNDLES and b"bundle" in self._settings and payload.isdigit() and len(payload) < 10:
            self.bundle_limit = min(int(payload), self._max_sendable)
        elif self.on_control is not None:
            self.on_control(key, payload)

    # --- checks ------------------------------------------------------------------------------

    def _check(self, key: bytes, what: str) -> SecretKey | None:
        if b"\0" in key:
            raise InvalidKey(f"the {what} {key!r} holds a NUL, which ends a key")
        try:
            return self.dialect.check(key)
        except Violation as violation:
            raise InvalidKey(f"the {what} {key!r} is not allowed: {violation}", violation.reason) from None

    def _sized(self, packet: bytes) -> bytes:
        if len(packet) > self.max_packet:
            raise PacketTooLong(
                f"{ViolationReason.PACKET_TOO_LONG.value}: {len(packet)} bytes, and the limit is {self.max_packet}; "
                "send it in parts, or raise the limit here and at the server (--max-packet)"
            )
        return packet


def _reaches(wanted: SecretKey, key: SecretKey) -> bool:
    """Whether a secret pattern of ours is why we got this key: that empty fields are ours the server has checked."""
    return all(not mine or mine == its for mine, its in zip(wanted[:3], key[:3], strict=True)) and matches_open(
        wanted.rest, key.rest
    )


def _callbacks_last(sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """These sinks, those with a callback behind the others.

    A callback may read on, and by then whoever keeps messages must have got the one that it was called with.
    """
    return tuple(sorted(sinks, key=lambda sink: sink.callback is not None))
