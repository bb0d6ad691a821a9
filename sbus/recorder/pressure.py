"""The choice between blocking publishers and losing messages, while the recorder lags behind.

The recorder's *lag* is the age of the oldest message that is not in the journal yet, wherever it waits. The age of
messages here is known. For messages in the bus and in the kernel, the recorder asks: the bus answers a question after
everything that it has queued before, so the age of a question without an answer is a lower bound of the lag.

While the lag is below ``max_lag`` the recorder has chosen ``blocking/hard/block``: once its queue in the bus is full,
the bus reads its publishers no faster than the recorder takes their messages, and nothing is lost. Above it the
recorder chooses ``blocking/hard/discard``: the bus lets the publishers continue at once, drops messages that do not
fit, and sends a receipt for them. Below half of ``max_lag`` it chooses to block again.

So a disk that fails, or a recorder that stays too slow, blocks publishers not much longer than ``max_lag``. A recorder
that is stopped as a process cannot choose; the ``--block-timeout`` of the bus ends that.

Rejected: to go by the length of the queue. The bus does not report it, and a queue that is full but moves fast does
no harm. Rejected: to discard from the start and to enlarge the queue. A burst of a second at 400,000 messages a second
needs more than any queue of the bus has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

__all__ = ["Pressure"]

_CHECKS = 10
"""Checks in the time of ``max_lag``."""
_MAX_INTERVAL = 0.5
"""Seconds between two checks at most."""


class Pressure:
    """Chooses the hard strategy of one connection.

    :param reactor: provides the timer.
    :param max_lag: seconds of lag up to which publishers may be blocked.
    :param ask: sends a question to the bus; fires when the answer is there.
    :param choose: sends the choice of a hard strategy.
    :param waiting: returns the age in seconds of the oldest message here that is not in the journal; 0 without one.
    :ivar is_blocking: whether publishers may be blocked.
    :ivar lag: the newest lag, in seconds.
    """

    _log = Logger(namespace="sbus.recorder")

    def __init__(
        self,
        reactor: IReactorTime,
        max_lag: float,
        *,
        ask: Callable[[], defer.Deferred[None]],
        choose: Callable[[Literal["block", "discard"]], object],
        waiting: Callable[[], float],
    ) -> None:
        self.is_blocking = True
        self.lag = 0.0
        self._reactor = reactor
        self._max_lag = max_lag
        self._interval = min(max_lag / _CHECKS, _MAX_INTERVAL)
        self._ask = ask
        self._choose = choose
        self._waiting = waiting
        self._asked: float | None = None  # when the question without an answer was sent
        self._timer: IDelayedCall | None = None
        self._has_traffic = False
        self._stopped = False
        choose("block")

    def note_traffic(self) -> None:
        """Check the lag at intervals, for as long as messages come."""
        self._has_traffic = True
        if self._timer is None and not self._stopped:
            self._timer = self._reactor.callLater(self._interval, self._check)

    def stop(self) -> None:
        """Make no choice from now on."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        asked = 0.0 if self._asked is None else self._reactor.seconds() - self._asked
        self.lag = max(asked, self._waiting())
        if self.is_blocking and self.lag > self._max_lag:
            self.is_blocking = False
            self._choose("discard")
            self._log.warn(
                "the recorder is {lag:.1f} s behind (--max-lag): the bus blocks no more publishers for it, and drops "
                "what its queue cannot take",
                lag=self.lag,
            )
        elif not self.is_blocking and self.lag < self._max_lag / 2:
            self.is_blocking = True
            self._choose("block")
            self._log.info("the recorder has caught up: the bus may block publishers for it again")
        if self._asked is None and self._has_traffic:
            self._has_traffic = False
            self._asked = self._reactor.seconds()
            self._ask().addCallbacks(self._answered, lambda _: None)
        if not self._stopped and (self._asked is not None or self.lag or self._has_traffic or not self.is_blocking):
            self._timer = self._reactor.callLater(self._interval, self._check)

    def _answered(self, _: None) -> None:
        self._asked = None
