"""Lists of all patterns, with every change, for clients of root and of the server's user.

.. rubric:: Theory of operation

A *link* to another bus wants to know what the clients of this one are subscribed to. It asks for the list
(``CMSG interest/patterns``), gets each open pattern of all other clients, a mark at the end, and from then on every
change. Observers' patterns are left out, and so are those of subscribers inside the program.

The patterns are counted while there is a listener, and only then: when the first one comes, the clients that are there
are counted in slices. Until a client has been counted, its changes are none of the list's business.

Each listener has an agenda, an ordered table of patterns that may have changed for it, and a set of the patterns that
it knows. A pattern that has gone before the listener learnt of it leaves the agenda, so that it is bounded by the
patterns that are there or that the listener knows.

The patterns of the agenda are compared with the set only when the listener's queue has room: a listener that
reads slowly gets the sum of all changes, and the server keeps a pattern once. Sending is work of the listener's user.

Each change has a number. Numbers never fall on the way to a listener: when it gets a change with a number, it has got
all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime

from sbus.fair import Scheduler
from sbus.protocol import controls
from sbus.server.asks.interest import Subscriptions
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.limits import MAX_REPLIES

__all__ = ["PatternLists"]

_SENT_AT_ONCE = 64
"""Patterns that a listener gets in one step."""
_COUNTED_AT_ONCE = 16_384
"""Patterns that are counted in one turn of the reactor, about: 5 ms."""


class _Flush(Protocol):
    def __call__(self) -> None: ...


class _Listener:
    """A client that gets the list.

    :ivar agenda: the patterns that may have changed, each with the number of its last change; None is the mark.
    :ivar known: the patterns that the client knows of, each with the number by which it has learnt of it.
    :ivar has_room: whether its queue had room when it was looked at last.
    :ivar is_waiting: whether it stands among the chores of its user.
    """

    __slots__ = ("_lists", "agenda", "client", "has_room", "is_waiting", "known")

    def __init__(self, lists: PatternLists, client: Client) -> None:
        self._lists = lists
        self.client = client
        self.agenda: dict[bytes | None, int] = {}
        self.known: dict[bytes, int] = {}
        self.is_waiting = False
        self.has_room = True

    def note(self, pattern: bytes | None, number: int) -> None:
        self.agenda.pop(pattern, None)
        self.agenda[pattern] = number

    def on_room(self) -> None:
        self._lists.go_on_soon(self)

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        self.is_waiting = False
        self._lists.go_on(self, until)
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"client": self.client.number, "patterns": len(self.agenda)}


class PatternLists:
    """The listeners of one bus, and the patterns that they get.

    :param clients: the connected clients by their numbers.
    :param observers: the receivers whose patterns do not count.
    :ivar flush: sends what was queued for listeners.
    """

    def __init__(
        self,
        router: Subscriptions,
        clients: Mapping[int, Client],
        observers: set[Receiver],
        clock: IReactorTime,
        scheduler: Scheduler,
        flush: _Flush,
    ) -> None:
        self.flush = flush
        self._router = router
        self._clients = clients
        self._observers = observers
        self._clock = clock
        self._scheduler = scheduler
        self._listeners: dict[Receiver, _Listener] = {}
        self._counts: dict[bytes, int] = {}
        self._uncounted: dict[Receiver, None] = {}
        self._number = 0
        self._is_due = False

    def start(self, client: Client) -> None:
        """Send a client the list, and then every change; if it has asked before, begin again."""
        self.forget(client)
        if not self._listeners:
            self._router.listeners = (*self._router.listeners, self)
            self._uncounted = dict.fromkeys(self._clients.values())
            self._count_on()
        listener = self._listeners[client] = _Listener(self, client)
        listener.agenda = dict.fromkeys(self._counts, self._number)
        client.on_room = (*client.on_room, listener.on_room)
        if not self._uncounted:
            listener.note(None, self._number)
        if self._send(listener):
            self._wait(listener)

    def forget(self, client: Receiver) -> None:
        """Forget a listener that has disconnected, or stopped reading."""
        listener = self._listeners.pop(client, None)
        if listener is None:
            return
        hooks = listener.client.on_room
        listener.client.on_room = tuple(hook for hook in hooks if hook != listener.on_room)
        listener.agenda.clear()
        listener.client.user.lines.chores.pop(listener, None)
        if not self._listeners:
            self._router.listeners = tuple(each for each in self._router.listeners if each is not self)
            self._counts = {}
            self._uncounted = {}

    def observed(self, client: Client, is_observer: bool) -> None:
        """A client has become an observer, or is none any more."""
        if self._listeners and client not in self._uncounted:
            for pattern, (_, secret) in client.patterns.items():
                if secret is None:
                    self._change(client, pattern, -1 if is_observer else 1)
            self._send_all()

    def number_of(self, client: Client, pattern: bytes) -> int:
        """Return the number by which a listener has learnt, or will learn, of a pattern; 0 if it does not."""
        listener = self._listeners.get(client)
        if listener is None:
            return 0
        return listener.known.get(pattern) or listener.agenda.get(pattern, 0)

    def added(self, receiver: Receiver, pattern: bytes) -> None:
        """See `sbus.server.core.interfaces.SubscriptionListener`."""
        self._changed(receiver, pattern, 1)

    def removed(self, receiver: Receiver, pattern: bytes) -> None:
        """See `sbus.server.core.interfaces.SubscriptionListener`."""
        self._changed(receiver, pattern, -1)

    # --- counting ----------------------------------------------------------------------------

    def _changed(self, receiver: Receiver, pattern: bytes, by: int) -> None:
        if receiver in self._uncounted or receiver in self._observers or not getattr(receiver, "number", 0):
            return
        self._change(receiver, pattern, by)
        self._send_all()

    def _change(self, receiver: Receiver, pattern: bytes, by: int) -> None:
        count = self._counts.get(pattern, 0) + by
        if count:
            self._counts[pattern] = count
        else:
            del self._counts[pattern]
        if count > 2 or (count == 2 and by < 0):
            return  # no listener sees a difference: at most one of these clients is the listener
        self._number += 1
        for listener in self._listeners.values():
            if not count and pattern not in listener.known:
                listener.agenda.pop(pattern, None)  # else patterns that come and go would pile up
            elif listener.client is not receiver:
                listener.note(pattern, self._number)

    def _count_on(self) -> None:
        """Count the patterns of some of the clients that were there before the first listener."""
        left = _COUNTED_AT_ONCE
        while self._uncounted and left > 0:
            client = next(iter(self._uncounted))
            del self._uncounted[client]
            if client not in self._observers:
                for pattern, (_, secret) in client.patterns.items():
                    if secret is None:
                        self._change(client, pattern, 1)
            left -= 1 + len(client.patterns)
        if self._uncounted:
            self._clock.callLater(0, self._count_later)

    def _count_later(self) -> None:
        if self._uncounted:
            self._count_on()
            if not self._uncounted:
                for listener in self._listeners.values():
                    listener.note(None, self._number)
            self._send_all()
            self.flush()

    # --- sending -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        for listener in self._waiting():
            if self._send(listener):
                self._wait(listener)
        if not self._is_due:  # a client that leaves does so outside of every batch
            self._is_due = True
            self._clock.callLater(0, self._flush_now)

    def _flush_now(self) -> None:
        self._is_due = False
        self.flush()

    def _waiting(self) -> Iterable[_Listener]:
        return [listener for listener in self._listeners.values() if listener.agenda]

    def go_on(self, listener: _Listener, until: int) -> None:
        """Send a listener more, in a turn of its user."""
        if self._listeners.get(listener.client) is listener:
            while self._send(listener) and self._scheduler.clock() < until:
                pass
            if listener.has_room and listener.agenda:
                self._wait(listener)
            self.flush()

    def go_on_soon(self, listener: _Listener) -> None:
        """Go on in a turn: the listener's queue has room."""
        listener.has_room = True
        if listener.agenda:
            self._wait(listener)

    def _wait(self, listener: _Listener) -> None:
        if not listener.is_waiting:
            listener.is_waiting = True
            self._scheduler.add_chore(listener.client.user.lines, listener)

    def _send(self, listener: _Listener) -> bool:
        """Send a listener some of what its agenda has, as far as its queue has room.

        :returns: whether there is more to send, and room for it.
        """
        client, agenda = listener.client, listener.agenda
        for _ in range(_SENT_AT_ONCE):
            if not agenda:
                return False
            listener.has_room = client.waiting_replies < MAX_REPLIES or self._has_flushed(listener)
            if not listener.has_room:
                return False  # `on_room` comes back
            pattern = next(iter(agenda))
            number = agenda.pop(pattern)
            if pattern is None:
                client.notify(controls.INTEREST_PATTERNS, b"")
                continue
            own = pattern in client.patterns and client not in self._observers and client not in self._uncounted
            is_there = self._counts.get(pattern, 0) > own
            if is_there is not (pattern in listener.known):
                if is_there:
                    listener.known[pattern] = number
                else:
                    del listener.known[pattern]
                client.notify(controls.INTEREST_PATTERN, b"%b %d %b" % (b"+" if is_there else b"-", number, pattern))
        return bool(agenda)

    def _has_flushed(self, listener: _Listener) -> bool:
        """Send what is queued for a listener; return whether there is room now."""
        queue = listener.client.queue
        if queue is None or queue.is_congested:
            return False
        self.flush()
        return listener.client.waiting_replies < MAX_REPLIES
