"""The bus as one open page sees it: the live tail and the keys with their last values.

Theory of operation
-------------------

Each open page has a connection to the bus of its own, with ``soft/discard`` and receipts: what the page does not take
is dropped for it and counted, and no other client notices. Its subscriptions are no interest (``observer/on``).

The page's stream drains the subscriptions a few times a second. Between two looks the client library takes
`sbus.client.subscription.HIGH_WATER` messages and then stops reading its socket. That bounds this process's work and
memory at any rate of the bus, and the receipts say what was not seen. Rates of keys are therefore rates of what was
seen.

Everything that accumulates has a bound: `MOST_KEYS` keys (the one that has been quiet longest goes first), and for the
tail the newest `MOST_LINES` messages of one look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.client.denials import Denial
from sbus.client.losses import Lost
from sbus.client.tx import Bus, Subscription, connect
from sbus.errors import NotAllowed, SbusError
from sbus.journal import clock
from sbus.web.payloads import shown

__all__ = ["MOST_KEYS", "MOST_LINES", "BusAddress", "Keys", "Tail", "Tap"]

MOST_KEYS = 10_000
"""Keys of which a page is kept up to date."""
MOST_LINES = 200
"""Messages of the tail in one look."""
MOST_CHANGES = 2_000
"""Keys reported in one look; the others follow in the next ones."""
_LINE_BYTES = 2048
"""Bytes of a payload that the tail shows."""
_VALUE_BYTES = 256
"""Bytes of a last value that the tree shows."""

Json = dict[str, Any]


class BusAddress:
    """How to connect to the bus.

    :param address: the address, as for `sbus.client.tx.connect`.
    :param dialect: the dialect's name.
    :param max_packet: bytes in the longest packet.
    """

    def __init__(self, address: str, dialect: str, max_packet: int) -> None:
        self.address = address
        self.dialect = dialect
        self.max_packet = max_packet

    def connect(
        self,
        reactor: IReactorTime,
        on_lost: Callable[[Lost], object] | None = None,
        on_denied: Callable[[Denial], object] | None = None,
    ) -> defer.Deferred[Bus]:
        """Connect, and reconnect whenever the connection is lost.

        :raises sbus.errors.ConnectError: if there is no bus now.
        """
        return connect(
            reactor,
            self.address,
            dialect=self.dialect,
            max_packet=self.max_packet,
            timeout=None if on_lost else 2.0,
            reconnect=True,
            on_lost=on_lost,
            on_denied=on_denied,
        )


class Tail:
    """The messages of a pattern, the newest of each look."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def look(self) -> Json | None:
        """Return the messages since the last look, or None if there are none."""
        messages = drain(self._subscription)
        if not messages:
            return None
        now = clock.now() // 1000
        lines = []
        for message in messages[-MOST_LINES:]:
            key, key_encoding = shown(message.key)
            payload, encoding = shown(message.payload, _LINE_BYTES)
            lines.append([now, key, key_encoding, payload, encoding, len(message.payload), message.is_last_value])
        return {"messages": lines, "skipped": max(0, len(messages) - MOST_LINES)}


class Keys:
    """The keys under a pattern: how often each was published, and its newest payload."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._changed: dict[bytes, tuple[int, bytes]] = {}
        self._removed: list[bytes] = []

    def take(self) -> None:
        """Count what has come."""
        known, changed = self._known, self._changed
        for key, payload, is_last_value in (
            (message.key, message.payload, message.is_last_value) for message in drain(self._subscription)
        ):
            if key in known:
                known.move_to_end(key)
            else:
                known[key] = None
                if len(known) > MOST_KEYS:
                    oldest, _ = known.popitem(last=False)
                    changed.pop(oldest, None)
                    self._removed.append(oldest)
            count = changed[key][0] if key in changed else 0
            changed[key] = (count + (not is_last_value), payload)

    def look(self) -> Json | None:
        """Return the changes since the last look, or None if there are none."""
        if not self._changed and not self._removed:
            return None
        rows = []
        for key in list(self._changed)[:MOST_CHANGES]:
            count, payload = self._changed.pop(key)
            rows.append([*shown(key), count, *shown(payload, _VALUE_BYTES), len(payload)])
        removed, self._removed = [list(shown(key)) for key in self._removed], []
        return {"keys": rows, "removed": removed, "limit": MOST_KEYS, "more": len(self._changed)}


def drain(subscription: Subscription) -> list[Any]:
    """Return all messages that are here, across losses.

    :raises sbus.errors.NotAllowed: if there are none, and the bus refuses the subscription.
    """
    found: list[Any] = []
    while messages := subscription.get_ready():
        found += messages
    return found


class Tap:
    """A page's connection to the bus.

    :ivar tail: the live tail, if the page shows it.
    :ivar keys: the keys, if the page shows them.
    :ivar problem: why there are none, or not all, for people; empty if all is well.
    """

    def __init__(self, reactor: IReactorTime, address: BusAddress, tail: bytes | None, keys: bytes | None) -> None:
        self._reactor = reactor
        self._address = address
        self._patterns = (tail, keys)
        self._bus: Bus | None = None
        self._lost = 0
        self._is_closed = False
        self.tail: Tail | None = None
        self.keys: Keys | None = None
        self.problem = ""

    def look_at_tail(self) -> Json | None:
        """Return the messages of the tail since the last look, or None if there are none."""
        try:
            return None if self.tail is None else self.tail.look()
        except NotAllowed as error:
            self.tail, self.problem = None, str(error)
            return None

    def look_at_keys(self, *, report: bool) -> Json | None:
        """Count what has come.

        :param report: return the changes since the last report, or None if there are none.
        """
        try:
            if self.keys is not None:
                self.keys.take()
                return self.keys.look() if report else None
        except NotAllowed as error:
            self.keys, self.problem = None, str(error)
        return None

    async def open(self) -> None:
        """Connect and subscribe; a failure is in `problem`."""
        try:
            bus = await self._address.connect(self._reactor, self._on_lost)
        except SbusError as error:
            self.problem = str(error)
            return
        if self._is_closed:
            await bus.close()
            return
        self._bus = bus
        tail, keys = self._patterns
        try:
            if bus.core.dialect.control:
                bus.control("observer/on")
                bus.flood_control(soft="discard")
            if tail is not None:
                self.tail = Tail(bus.subscribe(tail))
            if keys is not None:
                self.keys = Keys(bus.subscribe(keys, last=bus.core.dialect.control))
        except SbusError as error:
            self.problem = str(error)

    def _on_lost(self, lost: Lost) -> None:
        self._lost += lost.messages or 0

    def take_lost(self) -> int:
        """Return the messages lost since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    @property
    def state(self) -> str:
        """``connecting``, ``connected``, ``reconnecting`` or ``closed``."""
        return "connecting" if self._bus is None else self._bus.state

    def close(self) -> None:
        """Disconnect."""
        self._is_closed = True
        bus, self._bus = self._bus, None
        if bus is not None:
            bus.close_now()
