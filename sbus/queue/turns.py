"""When the turns of a service begin: one after the other, each once enough has come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall

__all__ = ["Turns"]

_MOST_PATIENCE = 0.02
"""Seconds for which a turn waits for more messages."""
_LONGEST_TIMER = 60.0
"""Seconds after which a turn begins in any case: if the wall clock was set, delays may be over."""


class Turns:
    """Runs turns.

    A sync of the disk costs as much for one job as for a thousand. So a turn waits until as much has come as the last
    one has sent, but at most half as long as its write took.

    :param turn: runs one turn.
    :ivar expected: messages that will come because of the last turn.
    """

    def __init__(self, reactor: Any, turn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._reactor = reactor
        self._turn = turn
        self._lock = defer.DeferredLock()
        self._timer: IDelayedCall | None = None
        self.expected = 0
        self._patience = 0.0
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        """Whether a turn waits for the disk."""
        return bool(self._lock.locked)

    def came(self, count: int) -> None:
        """Begin a turn if as much has come as is expected, else soon."""
        self.expected -= count
        self.begin(0.0 if self.expected <= 0 else self._patience)

    def wrote(self, seconds: float) -> None:
        """Note how long a write took."""
        self._patience = min(_MOST_PATIENCE, seconds / 2)

    def begin(self, delay: float = 0.0) -> None:
        """Begin a turn within `delay` seconds."""
        delay = max(0.0, min(delay, _LONGEST_TIMER))
        if self._timer is None or not self._timer.active():
            self._timer = self._reactor.callLater(delay, self._begin)
        elif self._reactor.seconds() + delay < self._timer.getTime():
            self._timer.reset(delay)

    def _begin(self) -> None:
        if not self._lock.waiting:
            self.run()

    def run(self) -> defer.Deferred[bool]:
        """Run a turn after the one that is under way.

        :returns: a Deferred that fires when all changes so far are on the disk, with False if there are no more turns.
        """
        return self._lock.run(lambda: defer.Deferred.fromCoroutine(self._take()))

    async def _take(self) -> bool:
        if self._is_over:
            return False
        await self._turn()
        return True

    def end(self, close: Callable[[], object]) -> defer.Deferred[None]:
        """Run a last turn, and close its resources; others that wait do nothing."""

        async def take_last() -> None:
            await self._take()
            self._is_over = True
            close()

        return self._lock.run(lambda: defer.Deferred.fromCoroutine(take_last()))
