"""Time-outs that only a stalled receiver reaches.

The kernel reports a socket as writable when three quarters of its send buffer have been read. A receiver that takes a
few small messages a second, without a pause, needs longer for that than a block time-out lasts. Its reading is still
visible: the kernel counts the bytes that the peer has not read (``SIOCOUTQ``). A `StallTimer` compares that count, and
anything else that the owner samples, a few times within the time-out. A count that has changed is progress.

Rejected: trying to send. It fails until the kernel reports the socket as writable, so it shows nothing new.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

__all__ = ["SAMPLES", "StallTimer"]

SAMPLES = 4
"""Samples within one time-out. Progress is noticed a quarter of the time-out late at most, in the receiver's favour."""


class StallTimer:
    """Calls once when a sample has not changed, and no other progress was noted, for the whole time-out.

    :param timeout: seconds without progress.
    :param sample: returns a value that changes when the receiver makes progress.
    :param on_stall: called once; the timer is over then.
    """

    __slots__ = ("_clock", "_last", "_on_stall", "_progress_at", "_sample", "_timeout", "_timer")

    def __init__(
        self, clock: IReactorTime, timeout: float, sample: Callable[[], object], on_stall: Callable[[], object]
    ) -> None:
        self._clock = clock
        self._timeout = timeout
        self._sample = sample
        self._on_stall = on_stall
        self._last = sample()
        self._progress_at = clock.seconds()
        self._timer: IDelayedCall | None = clock.callLater(timeout / SAMPLES, self._look)

    def progressed(self) -> None:
        """Note progress that the sample may not show."""
        self._progress_at = self._clock.seconds()

    def cancel(self) -> None:
        """Stop; a second call does nothing."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _look(self) -> None:
        now = self._clock.seconds()
        sample = self._sample()
        if sample != self._last:
            self._last = sample
            self._progress_at = now
        left = self._progress_at + self._timeout - now
        # Rounding can leave less than the clock can count, and the timer would run again and again.
        if left > self._timeout * 1e-9:
            self._timer = self._clock.callLater(min(left, self._timeout / SAMPLES), self._look)
        else:
            self._timer = None
            self._on_stall()
