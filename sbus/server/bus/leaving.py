"""Leaving: the subscriptions of receivers that have left are dropped in turns.

.. rubric:: Theory of operation

To drop a subscription is work: the index changes, and the routes that it touches are looked up again or forgotten. A
client can have 16,384 patterns, a user thousands of clients, and all of them can leave at the same time. So this work
has the price that a client would pay for it (`sbus.server.core.prices`): what the balance of the receiver's user pays
for is done at once, which for nearly all clients is everything, and the rest is done in turns of that user.

A receiver that waits here is *muted*: nothing that is published from then on reaches it. Routes that contain it stay as
they are, so that it costs others nothing; its queue refuses messages instead (`sbus.flood.SendQueue.deafen`), and
`sbus.server.bus.delivery` skips a receiver without a queue.

When the server stops, its routes are dropped all together, and nothing waits for a turn (`Leaving.finish`).

Rejected: to forget the routes of a muted receiver. Nothing says which these are but its patterns, so all were
forgotten, and one client that came and left with many patterns kept the route cache cold for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.server.core.interfaces import Receiver
from sbus.server.core.turns import Turns
from sbus.server.core.users import User

__all__ = ["Leaving"]

_LOOKED_AT = 32
"""Patterns of a receiver that are listed at a time."""
_FINISHED_AT_ONCE = 512
"""Patterns that are dropped in one turn of the reactor when the server stops: about 5 ms."""


class _Departure:
    """The receivers of one user that have left: they wait for a turn as one client."""

    __slots__ = ("_leave", "is_waiting", "receivers")

    def __init__(self, leave: Callable[[_Departure], None]) -> None:
        self._leave = leave
        self.is_waiting = False
        self.receivers: dict[Receiver, None] = {}

    def take_turn(self) -> None:
        """Drop some of their subscriptions (`sbus.server.core.turns`)."""
        self._leave(self)


class Leaving:
    """The receivers that have left, and have subscriptions still.

    :param turns: where they wait.
    :param clock: calls the slices of `finish`.
    :param drop: drops a pattern of a receiver, and charges its user.
    :param mute: called when a receiver has to wait.
    :param on_left: called when the last pattern of a receiver is dropped, with whether it had to wait.
    :ivar receivers: the receivers that wait.
    """

    def __init__(
        self,
        turns: Turns,
        clock: IReactorTime,
        *,
        drop: Callable[[Receiver, bytes], None],
        mute: Callable[[Receiver], None],
        on_left: Callable[[Receiver, bool], None],
    ) -> None:
        self.receivers: dict[Receiver, None] = {}
        self._turns = turns
        self._clock = clock
        self._drop = drop
        self._mute = mute
        self._on_left = on_left
        self._lines: dict[User, _Departure] = {}

    def add(self, receiver: Receiver) -> None:
        """Drop all patterns of a receiver: now, as far as the balance of its user goes, and then in turns."""
        if receiver in self.receivers:
            return
        if self._drop_some(receiver):
            self._on_left(receiver, False)
            return
        self._mute(receiver)
        self.receivers[receiver] = None
        line = self._lines.get(receiver.user)
        if line is None:
            line = self._lines[receiver.user] = _Departure(self._take_turn)
        line.receivers[receiver] = None
        self._wait(line)

    def drop(self, receiver: Receiver, limit: int) -> None:
        """Drop some patterns of a receiver that waits, whatever the balance of its user."""
        for pattern in tuple(islice(receiver.patterns, limit)):
            self._drop(receiver, pattern)
        if not receiver.patterns:
            self._forget(receiver)

    def of(self, user: User) -> Receiver | None:
        """Return a receiver of a user that waits, if there is one."""
        line = self._lines.get(user)
        return None if line is None else next(iter(line.receivers))

    def finish(self) -> defer.Deferred[None]:
        """Drop all that waits, in slices, and wait for no turn; fires when nothing is left."""
        done: defer.Deferred[None] = defer.Deferred()
        self._finish(done)
        return done

    def _finish(self, done: defer.Deferred[None]) -> None:
        left = _FINISHED_AT_ONCE
        while self.receivers and left > 0:
            receiver = next(iter(self.receivers))
            count = min(left, len(receiver.patterns))
            self.drop(receiver, count)
            left -= count + 1
        if self.receivers:
            self._clock.callLater(0, self._finish, done)
        else:
            done.callback(None)

    def _drop_some(self, receiver: Receiver) -> bool:
        """Drop patterns as far as the balance goes; return whether none is left."""
        user = receiver.user
        while receiver.patterns:
            for pattern in tuple(islice(receiver.patterns, _LOOKED_AT)):
                if user.work_left <= 0:
                    return False
                self._drop(receiver, pattern)
        return True

    def _wait(self, line: _Departure, is_first: bool = False) -> None:
        if not line.is_waiting:
            line.is_waiting = True
            self._turns.wait(next(iter(line.receivers)).user, line, is_first)

    def _take_turn(self, line: _Departure) -> None:
        line.is_waiting = False
        is_first = next(iter(line.receivers)).user.work_left <= 0
        while line.receivers:
            receiver = next(iter(line.receivers))
            if not self._drop_some(receiver):
                self._wait(line, is_first)
                return
            self._forget(receiver)

    def _forget(self, receiver: Receiver) -> None:
        """A receiver has no pattern any more."""
        del self.receivers[receiver]
        line = self._lines[receiver.user]
        del line.receivers[receiver]
        if not line.receivers:
            del self._lines[receiver.user]
            if line.is_waiting:
                self._turns.forget(receiver.user, line)
        self._on_left(receiver, True)
