"""Back-pressure: the publishers that one receiver holds back, and the clock that says for how long it may.

A receiver that chose to block stops publishers from being read while it cannot take more. They go
on when its queue has emptied far enough. If nothing leaves the queue for the whole block time-out,
the receiver is the one that misbehaves: it is disconnected and they go on. That also ends two
clients that block each other, and one that blocks itself.
"""

from __future__ import annotations

from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime

__all__ = ["Backpressure", "Publisher"]


class Publisher(Protocol):
    """A client that can be held back."""

    def block_on(self, receiver: Any) -> None:
        """Publish no more, for this receiver's sake."""

    def unblock(self, receiver: Any) -> None:
        """Go on, as far as this receiver is concerned."""


class Backpressure:
    """Whom one receiver holds back.

    :param receiver: passed to the publishers; its ``block_timed_out()`` is called at the time-out.
    :param timeout: seconds.
    """

    __slots__ = ("_clock", "_moved", "_receiver", "_timeout", "_timer", "_until_empty", "_until_room")

    def __init__(self, receiver: Any, clock: IReactorTime, timeout: float) -> None:
        self._receiver = receiver
        self._clock = clock
        self._timeout = timeout
        self._until_empty: set[Publisher] = set()
        self._until_room: set[Publisher] = set()
        self._timer: Any = None
        self._moved = 0.0

    def block_on(self, publisher: Publisher, until_empty: bool) -> None:
        """Hold a publisher back, until the receiver's queue is empty or else has room."""
        (self._until_empty if until_empty else self._until_room).add(publisher)
        publisher.block_on(self._receiver)
        if self._timer is None:
            self._moved = self._clock.seconds()
            self._timer = self._clock.callLater(self._timeout, self._time_is_up)

    def on_drained(self, room: bool, empty: bool) -> None:
        """Packets have left the queue."""
        self._moved = self._clock.seconds()
        if empty:
            self.release()
        elif room:
            roomy, self._until_room = self._until_room - self._until_empty, set()
            self._let_go(roomy)

    def release(self) -> None:
        """Let everyone go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.reconsider()

    def reconsider(self) -> None:
        """Let everyone go, as it may be that they need not wait; if they must after all, no time was won by it."""
        publishers = self._until_empty | self._until_room
        self._until_empty, self._until_room = set(), set()
        self._let_go(publishers)

    def discard(self, publisher: Publisher) -> None:
        """A publisher is gone."""
        self._until_empty.discard(publisher)
        self._until_room.discard(publisher)

    def _let_go(self, publishers: set[Publisher]) -> None:
        for publisher in publishers:
            publisher.unblock(self._receiver)

    def _time_is_up(self) -> None:
        self._timer = None
        if not self._until_empty and not self._until_room:
            return
        left = self._moved + self._timeout - self._clock.seconds()
        if left > 0:
            self._timer = self._clock.callLater(left, self._time_is_up)
        else:
            self._receiver.block_timed_out()
