"""Pattern drops: the patterns of receivers that take no more messages are dropped in turns of their users.

Dropping a pattern changes the index and the routes, so many patterns are a chore (`PatternDrop`). Until the last one is
dropped, the receiver is *muted*: no look-up finds it. Routes that contain it stay as they are, at no cost to others;
its queue is deaf instead. When the server stops, the routes are dropped all together, and nothing waits for a turn
(`PatternDrops.finish`).

Rejected: forgetting the routes of a muted receiver. Only its patterns identify them, so all routes were forgotten, and
one client that came and left with many patterns kept the route cache cold for all others.
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

__all__ = ["PatternDrop", "PatternDrops"]

_FINISHED_AT_ONCE = 512
"""Patterns that are dropped in one turn of the reactor when the server has stopped: about 5 ms."""


class PatternDrop:
    """The patterns of a receiver that takes no more messages, to be dropped: a chore of its user."""

    __slots__ = ("_drops", "receiver")

    def __init__(self, drops: PatternDrops, receiver: Receiver) -> None:
        self._drops = drops
        self.receiver = receiver

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        drops, patterns = self._drops, self.receiver.patterns
        while drops.muted.get(self.receiver) is self:  # else it has come back, or another one has dropped all
            drops.drop(self.receiver, 1)  # which takes 15 µs, or more than a millisecond with many routes
            if patterns and drops.scheduler.clock() >= until:
                return False
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"patterns": list(self.receiver.patterns), "receiver": getattr(self.receiver, "number", 0)}


class PatternDrops:
    """The receivers that take no more messages, and whose patterns are being dropped.

    :param flush: sends the messages that were handed over.
    :param drop: drops one pattern of a receiver.
    :param on_dropped: called when the last pattern of a receiver is dropped.
    :ivar muted: these receivers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: IReactorTime,
        *,
        flush: Callable[[], None],
        drop: Callable[[Receiver, bytes], None],
        on_dropped: Callable[[Receiver], None],
    ) -> None:
        self.scheduler = scheduler
        self.muted: dict[Receiver, PatternDrop] = {}
        self._clock = clock
        self._flush = flush
        self._drop = drop
        self._on_dropped = on_dropped

    def add(self, receiver: Receiver) -> None:
        """Keep messages that are published from now on from a receiver, and drop its patterns, in turns of its user."""
        if receiver in self.muted:
            return
        self._flush()
        chore = self.muted[receiver] = PatternDrop(self, receiver)
        if receiver.queue is not None:
            receiver.queue.deafen()
        self.scheduler.do(receiver.user.lines, chore)

    def drop(self, receiver: Receiver, most: int) -> None:
        """Drop some patterns of a receiver at once, without a turn."""
        for pattern in tuple(islice(receiver.patterns, most)):
            self._drop(receiver, pattern)
        if not receiver.patterns and self.muted.pop(receiver, None) is not None:
            self._on_dropped(receiver)

    def of(self, user: User) -> Receiver | None:
        """Return a receiver of this user that still has patterns, if there is one."""
        return next((receiver for receiver in self.muted if receiver.user is user and receiver.patterns), None)

    def finish(self) -> defer.Deferred[None]:
        """Drop all patterns in slices, without turns; fires when nothing is left."""
        done: defer.Deferred[None] = defer.Deferred()
        self._finish(done)
        return done

    def _finish(self, done: defer.Deferred[None]) -> None:
        left = _FINISHED_AT_ONCE
        while self.muted and left > 0:
            receiver, chore = next(iter(self.muted.items()))
            receiver.user.lines.chores.pop(chore, None)
            count = min(left, len(receiver.patterns))
            self.drop(receiver, count)
            left -= count + 1
        if self.muted:
            self._clock.callLater(0, self._finish, done)
        else:
            done.callback(None)
