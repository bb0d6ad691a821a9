"""Which subscriptions get which message: the receiving half of the client core."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from sbus.client.payloads import Missing
from sbus.errors import Violation
from sbus.protocol.bundles import unbundle
from sbus.protocol.keys import Dialect, PeerCredentials, SecretKey, matches_open
from sbus.protocol.notices import DENIED, LONGEST_DENIED, LOST, SENDER
from sbus.protocol.packets import CMSG, FMSG, MSG, Split, Truncated, build
from sbus.routing.cache import RouteCache
from sbus.routing.route import Route
from sbus.routing.runs import next_messages
from sbus.routing.trie import PatternIndex

if TYPE_CHECKING:
    from sbus.client.identity import Sender

__all__ = [
    "LASTING",
    "AwaitableWaiter",
    "Batch",
    "Dispatcher",
    "Message",
    "OwnCallback",
    "Result",
    "Sink",
    "Waiter",
    "is_of_application",
    "only_named",
]

T = TypeVar("T")
Result: TypeAlias = T | Awaitable[T]
"""The result of a call: the value itself (blocking), a coroutine (asyncio) or a Deferred (Twisted)."""

_MESSAGES = (MSG + b" ", FMSG + b" ")
LASTING = (
    *_MESSAGES,
    build(CMSG, LOST, b""),
    build(CMSG, SENDER),  # a sender, and the answer to ``sender/on``
    *(build(CMSG, DENIED, verb) for verb in _MESSAGES),
)
"""The beginnings of packets that stay valid when the connection is lost: messages and what explains them."""
_MAX_SHOWN = 200
"""Bytes of a payload that are shown: they fit two lines of a terminal."""
_MAX_RUN = 512
"""Messages in the longest run that is delivered as one list."""
_NO_CREDENTIALS = PeerCredentials(0, 0, 0)
"""Open patterns match alike for every subscriber, so the index never looks at these."""


class Message(NamedTuple):
    """A message as it was published: its routing key and its payload, both bytes.

    With ``payloads=True`` the payload of a large message is a read-only `memoryview`; ``bytes(message.payload)`` copies
    it (:doc:`/payloads`).
    """

    key: bytes
    payload: bytes

    @property
    def sender(self) -> Sender | None:
        """The publisher as the server knows it; None unless this client asks for it (``sender=True``)."""
        return None

    @property
    def is_last_value(self) -> bool:
        """Whether it was published before this client subscribed (``subscribe(…, last=True)``)."""
        return False

    def __repr__(self) -> str:
        """Return one line for people, with the beginning of a long payload."""
        payload = repr(bytes(self.payload[:_MAX_SHOWN]))
        if len(self.payload) > _MAX_SHOWN:
            payload += f"... ({len(self.payload):,} bytes)"
        sender = "" if self.sender is None else f", sender={self.sender}"
        last = ", is_last_value=True" if self.is_last_value else ""
        return f"{type(self).__name__}(key={self.key!r}, payload={payload}{sender}{last})"


class Waiter(Protocol):
    """The receiving end of one result; exactly one of the two methods is called, once."""

    def set_result(self, value: bytes) -> None:
        """Complete with a value."""

    def set_exception(self, error: Exception) -> None:
        """Complete with an error."""


class AwaitableWaiter(Waiter, Awaitable[bytes], Protocol):
    """A waiter that a coroutine of the backend can await."""


class Sink(Protocol):
    """The receiving end of one subscription.

    :ivar pattern: the pattern subscribed to; the core sets it.
    :ivar callback: the function to call with each message, or None for a sink that keeps messages until they are read.
    """

    pattern: bytes
    callback: Callable[[Message], object] | None

    def deliver(self, messages: list[Message]) -> None:
        """Take messages, in order.

        It must neither raise nor change the list, which other sinks get too.

        If a sink of a route has a callback, every sink of that route gets its messages one at a time.
        """

    def begin(self) -> None:
        """Take messages from here on; earlier ones that others keep are older than this subscription."""


def only_named(sink: Sink) -> None:
    """Make a sink take only messages whose sender is known, and none from before the server began to name senders."""
    deliver = sink.deliver

    def deliver_named(messages: list[Message]) -> None:
        if messages[0].sender is not None:  # all in a list have the same one
            deliver(messages)

    sink.deliver = deliver_named  # type: ignore[method-assign]


class OwnCallback:
    """A callback of this library, which does not read: no callback of the application has to wait for it to return.

    :param take: takes each message.
    """

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[Message], object]) -> None:
        self._take = take

    def __call__(self, message: Message) -> None:
        self._take(message)


def is_of_application(sink: Sink) -> bool:
    """Return whether a subscription is the application's, and not one of this library."""
    return not isinstance(sink.callback, OwnCallback)


class Batch:
    """Packets that were received together, and how far they are processed.

    A callback may read on while its message is being delivered. The nested call then continues at the position,
    so that no packet is processed twice.

    :ivar packets: the packets, bundles taken apart.
    :ivar position: index of the next packet to process.
    """

    __slots__ = ("packets", "position")

    def __init__(self, packets: list[bytes]) -> None:
        self.packets = unbundle(packets)
        self.position = 0

    def __len__(self) -> int:
        return len(self.packets) - self.position

    def extend(self, packets: list[bytes]) -> None:
        """Add packets that were received after these, also while they are being processed."""
        self.packets += unbundle(packets)

    def take(self) -> list[bytes]:
        """Remove and return the packets that are not processed yet."""
        rest = self.packets[self.position :]
        self.position = len(self.packets)
        return rest


class Dispatcher:
    """The subscriptions of one client, and the delivery of messages to them.

    :param dialect: the revision of the protocol, which says how keys match patterns.
    :param on_control: called with the key and the payload of each control message.
    :param on_truncated: called in the place of each packet that was longer than the buffer.
    :ivar changes: how often adding or removing a sink has begun.
    :ivar intercept: sees each packet first, if it is not None; returns whether the packet is dealt with.
    :ivar kind: the class of the messages that it makes now (`sbus.client.senders`).
    :ivar find_kind: returns the class of the messages after a notice; None before notices count.
    """

    def __init__(
        self,
        dialect: Dialect,
        on_control: Callable[[bytes, bytes], object],
        on_truncated: Callable[[Truncated], object],
    ) -> None:
        self._dialect = dialect
        self._on_control = on_control
        self._on_truncated = on_truncated
        self._sinks: dict[bytes, list[Sink]] = {}
        self._index: PatternIndex[Sink] = PatternIndex(dialect)
        self._cache: RouteCache[Sink] = RouteCache(dialect)
        self._secret: dict[bytes, SecretKey] = {}
        self._joining: set[Sink] = set()
        self._awaited: dict[bytes, Waiter] = {}
        self.changes = 0
        self.intercept: Callable[[bytes], bool] | None = None
        self.kind: type[Message] = Message
        self.find_kind: Callable[[bytes], type[Message]] | None = None

    # --- subscriptions -----------------------------------------------------------------------

    def add(self, sink: Sink, secret: SecretKey | None, *, joins_later: bool = False) -> bool:
        """Add a sink under its pattern.

        :param secret: the parsed pattern if it is a secret one, else None.
        :param joins_later: whether an open pattern gets no message before `join` is called.
        :returns: whether it is the first sink with this pattern.
        """
        self.changes += 1
        pattern = sink.pattern
        sinks = self._sinks.setdefault(pattern, [])
        sinks.append(sink)
        if secret:
            self._secret[pattern] = secret
            self._cache.clear()
        else:
            self._joining.add(sink)
            if not joins_later:
                self.join(sink)
        return len(sinks) == 1

    def begin(self, sink: Sink) -> None:
        """Note that messages from here on are for a sink, if it waits for `join`."""
        if sink in self._joining:
            sink.begin()

    def join(self, sink: Sink) -> None:
        """Deliver messages to a sink from now on, if it has waited for that."""
        if sink in self._joining:
            self._joining.remove(sink)
            self._index.subscribe(sink, sink.pattern, None, _NO_CREDENTIALS)
            self._cache.forget(sink.pattern, None, _NO_CREDENTIALS)

    def remove(self, sink: Sink) -> bool:
        """Remove a sink; one that is not here is ignored.

        :returns: whether it was the last sink with its pattern.
        """
        sinks = self._sinks.get(sink.pattern, [])
        if sink not in sinks:
            return False
        self.changes += 1
        sinks.remove(sink)
        if sink.pattern in self._secret:
            self._cache.clear()
        elif sink in self._joining:
            self._joining.remove(sink)
        else:
            self._index.unsubscribe(sink, sink.pattern, None, _NO_CREDENTIALS)
            self._cache.forget(sink.pattern, None, _NO_CREDENTIALS)
        if sinks:
            return False
        del self._sinks[sink.pattern]
        self._secret.pop(sink.pattern, None)
        return True

    def rebuild(self) -> None:
        """Rebuild the routes: an exception from a signal handler may have interrupted a change to them."""
        self._sinks = {pattern: sinks for pattern, sinks in self._sinks.items() if sinks}
        self._secret = {pattern: parsed for pattern, parsed in self._secret.items() if pattern in self._sinks}
        self._cache.clear()
        self._index = PatternIndex(self._dialect)
        for sink in self.sinks():
            if sink.pattern not in self._secret and sink not in self._joining:
                self._index.subscribe(sink, sink.pattern, None, _NO_CREDENTIALS)

    def sinks(self) -> Iterator[Sink]:
        """Iterate over all sinks; sinks may be added and removed meanwhile."""
        return (sink for sinks in tuple(self._sinks.values()) for sink in tuple(sinks))

    def sinks_at(self, pattern: bytes) -> list[Sink]:
        """Return the sinks with a pattern; for one as long as a denial cuts it, those whose patterns begin with it."""
        if len(pattern) < LONGEST_DENIED:
            return list(self._sinks.get(pattern, ()))
        return [sink for each in tuple(self._sinks) if each.startswith(pattern) for sink in self._sinks[each]]

    def pattern_counts(self) -> dict[bytes, int]:
        """Return each pattern with its number of sinks, in order of subscription."""
        return {pattern: len(sinks) for pattern, sinks in self._sinks.items()}

    def secret_patterns(self) -> dict[bytes, SecretKey]:
        """Return the secret patterns and what they parse to."""
        return dict(self._secret)

    # --- early fences ------------------------------------------------------------------------

    def expect(self, key: bytes, waiter: Waiter) -> None:
        """Complete `waiter` with the next message with this key; no sink gets it."""
        self._awaited[key] = waiter

    def take_awaited(self) -> list[Waiter]:
        """Remove and return the waiters of `expect`."""
        waiters = list(self._awaited.values())
        self._awaited.clear()
        return waiters

    # --- delivery ----------------------------------------------------------------------------

    def process(self, batch: Batch) -> None:
        """Deliver the rest of a batch to its sinks and to `on_control`."""
        packets, routes = batch.packets, self._cache.routes
        while (position := batch.position) < len(packets):
            if self.intercept is not None:
                batch.position = position + 1
                packet = packets[position]
                if not self.intercept(packet.whole() if isinstance(packet, Split) else packet):
                    self._process_one(packet)
                continue
            route, messages = next_messages(packets, position, position + _MAX_RUN, routes, self.kind)
            if route is None:
                batch.position = position + 1
                self._process_one(packets[position])
                continue
            sinks = route.receivers
            if sinks and sinks[-1].callback is not None:
                self._deliver_singly(batch, route, messages)
                continue
            batch.position = position + len(messages)
            for sink in sinks:
                sink.deliver(messages)

    def _deliver_singly(self, batch: Batch, route: Route[Sink], messages: list[Message]) -> None:
        """Deliver one message at a time: a callback may read on or change the routes."""
        for message in messages:
            batch.position = position = batch.position + 1
            single = [message]
            for sink in route.receivers:
                sink.deliver(single)
            if batch.position != position or self._cache.routes.get(message.key) is not route:
                return

    def _process_one(self, packet: bytes) -> None:
        """Process a packet of any kind, including a message without a cached route."""
        verb, _, rest = packet.partition(b" ")
        key, nul, payload = rest.partition(b"\0")
        if verb == MSG and nul:
            if isinstance(packet, Split):
                payload = cast(bytes, packet.payload)
            messages = [self.kind(key, payload)]
            for sink in self._route(key):
                sink.deliver(messages)
        elif verb == CMSG:
            if key == SENDER and self.find_kind is not None:
                self.kind = self.find_kind(payload)
            else:
                self._on_control(key, payload)
        elif verb == FMSG:
            self._on_truncated(Missing.in_place_of(packet))
        elif isinstance(packet, Truncated):
            self._on_truncated(packet)
        # Ignore other packets: a newer server may send kinds that this client does not know.

    def sinks_for(self, key: bytes) -> tuple[Sink, ...]:
        """Return the sinks whose patterns match a key."""
        route = self._cache.routes.get(key)
        return self._route(key) if route is None else route.receivers

    def _route(self, key: bytes) -> tuple[Sink, ...]:
        if (waiter := self._awaited.pop(key, None)) is not None:
            waiter.set_result(b"")
            return ()
        try:
            secret = self._dialect.check(key)
        except Violation:
            return ()  # no server forwards such a key, and no pattern can match it
        if not secret:
            return self._cache.remember(key, None, _callbacks_last(self._index.route(key, None))).receivers
        matching = [
            sink
            for pattern, parsed in self._secret.items()
            if _matches_secret(parsed, secret)
            for sink in self._sinks[pattern]
        ]
        return self._cache.remember(key, secret, _callbacks_last(matching)).receivers


def _matches_secret(pattern: SecretKey, key: SecretKey) -> bool:
    """Return whether a secret pattern of this client matches a received key.

    The server has already compared empty IDs with this client's own, so only given IDs are compared here.
    """
    ids_match = all(not wanted or wanted == given for wanted, given in zip(pattern[:3], key[:3], strict=True))
    return ids_match and matches_open(pattern.rest, key.rest)


def _callbacks_last(sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Order sinks so that those with a callback come last.

    A callback may read on. By then the sinks that keep messages must already have the message it was called with.
    """
    return tuple(sorted(sinks, key=lambda sink: sink.callback is not None))
