"""The bytes that a log may grow by.

A token bucket: `LogBudget` holds 1.4 s' worth of the rate at most, and half the rate comes back in each second. The
last sums of the two limiters of a process (`Rank.LAST`) may take more than there is, 0.3 s' worth each. So in any four
seconds or longer the log grows by no more than the rate: 1.4 + 2 × 0.3 + 0.5 × 4 = 4.

Each line has a rank, and a line of a low rank must leave room for those of higher ranks. So a storm of ordinary lines
delays neither the sums nor the first line of another kind.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from twisted.logger import LogEvent, LogLevel, eventAsJSON

from sbus.daemon.log_text import line_of

__all__ = ["DEFAULT_RATE", "LogBudget", "Rank", "json_size", "text_size"]

DEFAULT_RATE = 10_000
"""Bytes per second that a log may grow by."""
_CAPACITY = 1.4
"""Seconds' worth of the rate that the bucket holds."""
_REFILL = 0.5
"""The part of the rate that comes back."""
_LONGEST = 0.3
"""Seconds' worth of the rate in the longest line."""


class Rank(enum.Enum):
    """The importance of a line. The value is the part of the bucket that the line must leave."""

    ORDINARY = 0.6
    FIRST_OF_USER = 0.45
    SUM = 0.3
    FIRST = 0.0
    LAST = -1.0


def text_size(event: LogEvent) -> int:
    """Return the bytes of an event in a log in text."""
    return len((line_of(event) or "").encode(errors="replace"))


def json_size(event: LogEvent) -> int:
    """Return the bytes of an event in a log in JSON, or of its text if that is longer."""
    return max(len(eventAsJSON(event).encode(errors="replace")) + 2, text_size(event))


class LogBudget:
    """The bytes that one log may grow by; several limiters can share it.

    :param seconds: the time; only differences count.
    :param rate: bytes per second.
    :param size: returns the bytes that an event takes in the log.
    :param level: the name of the least level of events that are logged; the others cost nothing and are in no sum.
    :ivar longest: bytes of the longest line.
    """

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        rate: int = DEFAULT_RATE,
        size: Callable[[LogEvent], int] = text_size,
        level: str = "debug",
    ) -> None:
        self.rate = rate
        self.level = LogLevel.lookupByName(level)
        self.size = size
        self.longest = int(_LONGEST * rate)
        self._seconds = seconds
        self._capacity = self._balance = _CAPACITY * rate
        self._at = seconds()

    def has(self, size: int, rank: Rank) -> bool:
        """Return whether a line of this rank and this size may be written now."""
        now = self._seconds()
        self._balance = min(self._capacity, self._balance + max(0.0, now - self._at) * _REFILL * self.rate)
        self._at = now
        return rank is Rank.LAST or self._balance - size >= rank.value * self._capacity

    def take(self, size: int, rank: Rank) -> bool:
        """Take the bytes of a line; return False, and take nothing, if they are not there."""
        if not self.has(size, rank):
            return False
        self._balance -= size
        return True
