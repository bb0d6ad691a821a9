"""Departure: the end of a client, in four steps.

.. rubric:: Theory of operation

====================  =============================================================================================
step                  what happens
====================  =============================================================================================
1 input stops         nothing more of the client is handled; what it sent before it closed has been
2 farewell            at its place in the mail, if anything waits there for the client: it gets no message any more
                      (`SendQueue.deafen`); a client that is disconnected gets its last receipt and the reason
3 patterns            a chore of its user: the index and the routes change for each one (`PatternDrop`)
4 forget              the client is in no table any more, and observers hear of it
====================  =============================================================================================

A client ends in one of three ways, which differ in the second step alone: the server disconnects it; it shuts down
writing, and gets what is queued as long as it reads; or its connection is lost, and what waits for it is lost, too.
Whichever comes first begins the departure, and the lost connection ends it. A client that shuts down reading ends as a
receiver only.

A client whose patterns are still being dropped is *muted*: no look-up finds it. Routes that contain it stay as they
are, so that it costs others nothing; its queue is deaf instead. When the server stops, the routes are dropped all
together, and nothing waits for a turn (`Departures.finish`).

Invariant: after the fourth step nothing of the client is charged, routed or referred to.

Rejected: to forget the routes of a muted receiver. Nothing says which these are but its patterns, so all were
forgotten, and one client that came and left with many patterns kept the route cache cold for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.fair import Scheduler
from sbus.server.core.interfaces import Receiver
from sbus.server.core.users import User

__all__ = ["BYE_PATIENCE", "Departures", "PatternDrop", "discardable"]

BYE_PATIENCE = 1.0
"""Seconds for which the last packets of a connection are tried if they do not fit the socket."""
_DISCARDED, _LEAST_DISCARDED = 262_144, 64
"""Packets to discard of all clients together, about a tenth of a second, and of each one at least."""
_DROPPED_AT_ONCE = 16
"""Patterns that are dropped between two looks at the clock: each takes 15 µs, or a millisecond with many routes."""
_FINISHED_AT_ONCE = 512
"""Patterns that are dropped in one turn of the reactor when the server has stopped: about 5 ms."""


def discardable(clients: int) -> int:
    """Return the packets to discard of one client that is disconnected, in case all of them are."""
    return max(_LEAST_DISCARDED, _DISCARDED // max(1, clients))


class PatternDrop:
    """The patterns of a receiver that takes no message any more, to be dropped: a chore of its user."""

    __slots__ = ("_departures", "receiver")

    def __init__(self, departures: Departures, receiver: Receiver) -> None:
        self._departures = departures
        self.receiver = receiver

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        departures, patterns = self._departures, self.receiver.patterns
        while departures.receivers.get(self.receiver) is self:  # else it has come back, or another one has dropped all
            departures.drop(self.receiver, _DROPPED_AT_ONCE)
            if patterns and departures.scheduler.clock() >= until:
                return False
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"patterns": list(self.receiver.patterns), "receiver": getattr(self.receiver, "number", 0)}


class Departures:
    """The receivers that have left, and whose patterns are being dropped.

    :param drop: drops one pattern of a receiver.
    :param mute: has no look-up find a receiver any more.
    :param on_left: called when the last pattern of a receiver is dropped.
    :ivar receivers: these receivers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: IReactorTime,
        *,
        drop: Callable[[Receiver, bytes], None],
        mute: Callable[[Receiver], None],
        on_left: Callable[[Receiver], None],
    ) -> None:
        self.scheduler = scheduler
        self.receivers: dict[Receiver, PatternDrop] = {}
        self._clock = clock
        self._drop = drop
        self._mute = mute
        self._on_left = on_left

    def add(self, receiver: Receiver) -> None:
        """Drop the patterns of a receiver that takes no more messages: at once, or in turns of its user."""
        if receiver in self.receivers:
            return
        self._mute(receiver)
        chore = self.receivers[receiver] = PatternDrop(self, receiver)
        self.scheduler.do(receiver.user.lines, chore)

    def drop(self, receiver: Receiver, most: int) -> None:
        """Drop some patterns of a receiver that has left."""
        for pattern in tuple(islice(receiver.patterns, most)):
            self._drop(receiver, pattern)
        if not receiver.patterns and self.receivers.pop(receiver, None) is not None:
            self._on_left(receiver)

    def of(self, user: User) -> Receiver | None:
        """Return a receiver of this user, if there is one."""
        return next((receiver for receiver in self.receivers if receiver.user is user), None)

    def finish(self) -> defer.Deferred[None]:
        """Drop all patterns in slices, and wait for no turn; fires when nothing is left."""
        done: defer.Deferred[None] = defer.Deferred()
        self._finish(done)
        return done

    def _finish(self, done: defer.Deferred[None]) -> None:
        left = _FINISHED_AT_ONCE
        while self.receivers and left > 0:
            receiver, chore = next(iter(self.receivers.items()))
            receiver.user.lines.chores.pop(chore, None)
            count = min(left, len(receiver.patterns))
            self.drop(receiver, count)
            left -= count + 1
        if self.receivers:
            self._clock.callLater(0, self._finish, done)
        else:
            done.callback(None)
