"""The bus as one open page sees it: the live tail and the keys with their last values.

Theory of operation
-------------------

Each open page has its own connection to the bus, with ``soft/discard`` and receipts: what the page does not take is
dropped for it and counted, and no other client notices. Its subscriptions are no interest (``observer/on``).

The page's stream looks at the messages a few times a second. Between two looks each pattern takes `HIGH_WATER`
messages, and then the client library stops reading its socket. That bounds this process's work at any rate of the bus,
and the receipts count the messages that were not seen. Rates of keys are therefore rates of those that were.

No message is kept. When one comes, the beginnings of its key and its payload are noted, and everything that is noted
has a bound: `MOST_KEYS` keys (the one that has been quiet longest goes first), those that went since the last report,
and for the tail the newest `MOST_LINES` messages of one look. Together these are at most 16 MB, whatever the bus
carries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.client.denials import Denial, error_of
from sbus.client.dispatch import Message
from sbus.client.losses import Lost
from sbus.client.subscription import HIGH_WATER
from sbus.client.tx import Bus, connect
from sbus.errors import SbusError
from sbus.journal import clock
from sbus.web.payloads import shown

__all__ = ["MOST_KEYS", "MOST_LINES", "BusAddress", "Keys", "Tail", "Tap"]

MOST_KEYS = 10_000
"""Keys of which a page is kept up to date."""
MOST_LINES = 200
"""Messages of the tail in one look."""
MOST_CHANGES = 2_000
"""Keys reported in one look; the others follow in the next ones."""
_KEY_BYTES = 256
"""Bytes of a key that are shown; longer ones that begin alike are one."""
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


class _Inflow(ABC):
    """The messages of a pattern, which `_note` sees one by one.

    :param last: begin with the last values.
    """

    def __init__(self, bus: Bus, pattern: bytes, *, last: bool = False) -> None:
        self._bus = bus
        self._count = 0
        self._subscription = bus.subscribe(pattern, self._take, last=last)

    def _take(self, message: Message) -> None:
        self._note(message)
        self._count += 1
        if self._count == HIGH_WATER:
            self._bus.pause_for(self._subscription)

    @abstractmethod
    def _note(self, message: Message) -> None:
        """Keep the part of a message that is shown, and no more."""

    def go_on(self) -> int:
        """Let the next messages come; return how many have come since the last call."""
        count, self._count = self._count, 0
        self._bus.resume_for(self._subscription)
        return count


class Tail(_Inflow):
    """The messages of a pattern, the newest of each look."""

    def __init__(self, bus: Bus, pattern: bytes) -> None:
        self._newest: deque[tuple[bytes, bytes, int, bool]] = deque(maxlen=MOST_LINES)
        super().__init__(bus, pattern)

    def _note(self, message: Message) -> None:
        key, payload = message.key[: _KEY_BYTES + 1], message.payload[: _LINE_BYTES + 1]
        self._newest.append((key, payload, len(message.payload), message.is_last_value))

    def look(self) -> Json | None:
        """Return the messages since the last look, or None if there are none."""
        if not (count := self.go_on()):
            return None
        now = clock.now() // 1000
        lines = [
            [now, *shown(key, _KEY_BYTES), *shown(payload, _LINE_BYTES), size, is_last_value]
            for key, payload, size, is_last_value in self._newest
        ]
        self._newest.clear()
        return {"messages": lines, "skipped": count - len(lines)}


class Keys(_Inflow):
    """The keys under a pattern: how often each was published, and its newest payload."""

    def __init__(self, bus: Bus, pattern: bytes, *, last: bool = False) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._changed: dict[bytes, tuple[int, bytes, int]] = {}
        self._removed: list[bytes] = []
        super().__init__(bus, pattern, last=last)

    def _note(self, message: Message) -> None:
        key, known, changed = message.key[: _KEY_BYTES + 1], self._known, self._changed
        if key in known:
            known.move_to_end(key)
        else:
            known[key] = None
            if len(known) > MOST_KEYS:
                oldest, _ = known.popitem(last=False)
                changed.pop(oldest, None)
                self._removed.append(oldest)
        count = changed[key][0] if key in changed else 0
        changed[key] = count + (not message.is_last_value), message.payload[: _VALUE_BYTES + 1], len(message.payload)

    def look(self) -> Json | None:
        """Return the changes since the last look, or None if there are none."""
        if not self._changed and not self._removed:
            return None
        rows = []
        for key in list(self._changed)[:MOST_CHANGES]:
            count, payload, size = self._changed.pop(key)
            rows.append([*shown(key, _KEY_BYTES), count, *shown(payload, _VALUE_BYTES), size])
        removed, self._removed = [list(shown(key, _KEY_BYTES)) for key in self._removed], []
        return {"keys": rows, "removed": removed, "limit": MOST_KEYS, "more": len(self._changed)}


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
        return None if self.tail is None else self.tail.look()

    def look_at_keys(self, *, report: bool) -> Json | None:
        """Let the next messages come.

        :param report: return the changes since the last report, or None if there are none.
        """
        if self.keys is None:
            return None
        self.keys.go_on()
        return self.keys.look() if report else None

    async def open(self) -> None:
        """Connect and subscribe; a failure is in `problem`."""
        try:
            bus = await self._address.connect(self._reactor, self._on_lost, self._on_denied)
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
                self.tail = Tail(bus, tail)
            if keys is not None:
                self.keys = Keys(bus, keys, last=bus.core.dialect.control)
        except SbusError as error:
            self.problem = str(error)

    def _on_lost(self, lost: Lost) -> None:
        self._lost += lost.messages or 0

    def _on_denied(self, denial: Denial) -> None:
        self.problem = str(error_of(denial))

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
