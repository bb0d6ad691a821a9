"""The times that rows get: they never fall within an epoch, and a step of the clock is noticed.

How steps are noticed: a row that is more than 60 s earlier than the one before it shows a step back, also one that was
made while no recorder ran. Steps forward, and small ones, show when the clock is compared with the time since the
machine was started (`sbus.journal.clock.uptime`); this is done with each append. A row that waited for the disk may be
older than a step, so a step forward is noted with the first row that is younger.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sbus.journal.clock import SECOND, to_seconds

__all__ = ["EPOCH_STEP", "TOLERANCE", "RowClock", "Step"]

TOLERANCE = 1 * SECOND
"""How far the clock may step without a warning and a row, in µs: NTP slews smaller differences."""
EPOCH_STEP = 60 * SECOND
"""How far the clock may step without beginning a new epoch, in µs."""


class Step(NamedTuple):
    """The change of the clock since the last append.

    :ivar size: how far it was set, in µs.
    :ivar offset: its new distance from the time that has really passed, in µs; see `RowClock.offset`.
    """

    size: int
    offset: int


class RowClock:
    """Chooses the times of the rows of one journal; the writer reports each append.

    :param clock: returns the time, in µs since the epoch.
    :param elapsed: returns the time that has really passed, in µs from any origin; None: steps forward are not noticed.
    :param warn: called with a sentence about a clock that went back.
    :ivar last: the time of the newest row.
    :ivar offset: the distance of the clock from `elapsed` when a row was last appended, in µs; None before that.
    :ivar is_behind: whether the clock is behind the newest row.
    """

    def __init__(
        self, clock: Callable[[], int], elapsed: Callable[[], int] | None, warn: Callable[[str], object]
    ) -> None:
        self.last = 0
        self.offset: int | None = None
        self.is_behind = False
        self.read = clock
        self._elapsed = elapsed
        self._warn = warn

    def now(self) -> int:
        """Return the time by the clock of the newest row, in µs since the epoch.

        A step of the clock that no row has shown yet is left out.
        """
        if self._elapsed is None or self.offset is None:
            return self.read()
        return self._elapsed() + self.offset

    def on_one_clock(self, times: int | Sequence[int]) -> tuple[int | Sequence[int], bool]:
        """Find out whether the clock was set back far before these times, or between them.

        :returns: the times, of which those before a step between them are lowered to the last one; and whether there
            was a step, so that a new epoch begins.
        """
        first, last = (times, times) if isinstance(times, int) else (times[0], times[-1])
        if max(self.last, first) - min(first, last) <= EPOCH_STEP:
            return times, False
        if not isinstance(times, int) and first > last:
            times = [min(time, last) for time in times]
        return times, True

    def step(self, first: int) -> Step | None:
        """Return the step of the clock since the last append; None if no row that is to be appended can show it.

        :param first: the time of the row that is to be appended.
        """
        if self._elapsed is None:
            return None
        time = self.read()
        offset = time - self._elapsed()
        size = 0 if self.offset is None else offset - self.offset
        if size > TOLERANCE and time - first > size // 2:
            return None  # that row is older than the step
        return Step(size, offset)

    def rising(self, times: int | Sequence[int]) -> int | list[int]:
        """Return the times with each one raised to the one before it."""
        first = times if isinstance(times, int) else times[0]
        is_behind = first < self.last - TOLERANCE
        if is_behind and not self.is_behind:
            behind = to_seconds(self.last - first)
            self._warn(
                f"the clock went back by {behind:g} s: until it has caught up, rows get the time of the row before"
            )
        self.is_behind = is_behind
        if isinstance(times, int):
            return max(times, self.last)
        return list(itertools.accumulate(times, max, initial=self.last))[1:]
