"""The client without its I/O: what to send for a wish, and who gets what arrives.

A shell (Twisted, asyncio, blocking) owns the socket. It sends the packets that this core gives it,
in order, and feeds it what arrives. The core knows the subscriptions, the settings and the replies
that are awaited; so when a connection is lost it can say what to send on the next one to be where
it was, and who waits in vain.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from sbus.errors import InvalidKey, PacketTooLong, UsageError, Violation, ViolationReason
from sbus.index import PatternIndex
from sbus.keys import CURRENT, EARLY, Dialect, PeerCredentials, SecretKey, matches_open
from sbus.packets import CMSG, DEFAULT_MAX_PACKET, MSG, SUB, UNSUB, build
from sbus.routes import RouteCache

__all__ = ["ClientCore", "Message", "Sink", "Waiter", "as_bytes", "find_dialect"]

_WHOAMI = b"!/cred/whoami"
_NOBODY = PeerCredentials(0, 0, 0)


class Message(NamedTuple):
    """A message as it was published: its routing key and its payload, both bytes."""

    key: bytes
    payload: bytes


class Waiter(Protocol):
    """Somebody who waits for something: one of the two is called, once."""

    def succeed(self, value: bytes) -> None:
        """It is here."""

    def fail(self, error: Exception) -> None:
        """It will never be."""


class Sink(Protocol):
    """Where the messages of one subscription go."""

    pattern: bytes

    def deliver(self, message: Message) -> None:
        """A message has come."""


def as_bytes(text: bytes | str) -> bytes:
    """Bytes as they are; text as UTF-8."""
    return text.encode() if isinstance(text, str) else bytes(text)


def find_dialect(name: str) -> Dialect:
    """The dialect of this name.

    :raises UsageError: if there is none.
    """
    for dialect in (CURRENT, EARLY):
        if dialect.name == name:
            return dialect
    raise UsageError(f"dialect={name!r}: say 'current' or 'early'")


class ClientCore:
    """The state of one client.

    :param dialect: the revision of the protocol that the server speaks.
    :param max_packet: bytes in the longest packet that the server takes.
    :param on_control: called with (key, payload) of control messages that nobody here knows.
    """

    def __init__(
        self,
        dialect: Dialect = CURRENT,
        max_packet: int = DEFAULT_MAX_PACKET,
        on_control: Callable[[bytes, bytes], object] | None = None,
    ) -> None:
        self.dialect = dialect
        self.max_packet = max_packet
        self.on_control = on_control
        self._sinks: dict[bytes, list[Sink]] = {}
        self._index: PatternIndex[Sink] = PatternIndex(dialect)
        self._cache: RouteCache[Sink] = RouteCache(dialect)
        self._secret: dict[bytes, SecretKey] = {}
        self._settings: dict[bytes, bytes] = {}
        self._waiting: deque[Waiter | None] = deque()  # for answers to whoami; None: asked with `control`
        self._fences: dict[bytes, Waiter] = {}

    # --- what to send ------------------------------------------------------------------------

    def publish(self, key: bytes | str, payload: bytes) -> bytes:
        """The packet that publishes a message.

        :raises InvalidKey: if nobody may publish with this key.
        :raises PacketTooLong: if it does not fit.
        """
        if isinstance(key, str):
            key = key.encode()
        if b"!" in key or b"\0" in key:
            self._check(key, "routing key")
        return self._sized(b"MSG %b\0%b" % (key, payload))

    def subscribe(self, pattern: bytes | str, sink: Sink) -> list[bytes]:
        """The packets that make the server send what the pattern matches; `sink` will get it.

        :raises InvalidKey: if nobody may use this pattern.
        """
        pattern = sink.pattern = as_bytes(pattern)
        secret = self._check(pattern, "pattern")
        packet = self._sized(build(SUB, pattern))
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
        :raises UsageError: in a dialect without control messages.
        """
        key = as_bytes(key)
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

    def greeting(self) -> list[bytes]:
        """What to send on a new connection to be where the old one was: the settings and the subscriptions."""
        settings = [build(CMSG, key) for key in self._settings.values()]
        return settings + [build(SUB, pattern) for pattern in self._sinks]

    def lost(self) -> list[Waiter]:
        """The connection is gone, and the replies with it.

        :returns: who waits for one; to be told when all else is in order, as they may ask again at once.
        """
        waiting = [waiter for waiter in self._waiting if waiter is not None]
        waiting += self._fences.values()
        self._waiting.clear()
        self._fences.clear()
        return waiting

    def sinks(self) -> Iterator[Sink]:
        """All that is subscribed."""
        return (sink for sinks in tuple(self._sinks.values()) for sink in tuple(sinks))

    # --- what arrives ------------------------------------------------------------------------

    def receive(self, packets: Iterable[bytes]) -> None:
        """Packets have arrived: give each message to the sinks that want it, each reply to who waits for it.

        A sink must not raise exceptions.
        """
        routes = self._cache.routes
        for packet in packets:
            end = packet.find(b"\0", 4)
            if end > 0 and packet[:4] == b"MSG ":
                key = packet[4:end]
                sinks = routes.get(key)
                if sinks is None:
                    sinks = self._route(key)
                if sinks:
                    message = Message(key, packet[end + 1 :])
                    for sink in sinks:
                        sink.deliver(message)
            else:
                self._receive_other(packet)

    def wanting(self, key: bytes) -> tuple[Sink, ...]:
        """The sinks that want messages with this key."""
        sinks = self._cache.routes.get(key)
        return self._route(key) if sinks is None else sinks

    def _route(self, key: bytes) -> tuple[Sink, ...]:
        fence = self._fences.pop(key, None)
        if fence is not None:
            fence.succeed(b"")
            return ()
        try:
            secret = self.dialect.check(key)
        except Violation:
            return ()  # no server sends such a key; nobody can have subscribed to it
        if not secret:
            return self._cache.remember(key, None, self._index.route(key, None))
        wanting = [
            s for pattern, wanted in self._secret.items() if _reaches(wanted, secret) for s in self._sinks[pattern]
        ]
        return self._cache.remember(key, secret, tuple(wanting))

    def _receive_other(self, packet: bytes) -> None:
        verb, _, rest = packet.partition(b" ")
        if verb != CMSG:
            return  # nothing that a server sends: ignored, as a newer server may know more than we do
        key, _, payload = rest.partition(b"\0")
        if key == _WHOAMI:
            waiter = self._waiting.popleft() if self._waiting else None
            if waiter is not None:
                waiter.succeed(payload)
                return
        if self.on_control is not None:
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
