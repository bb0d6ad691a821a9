"""Times of a journal: whole microseconds (µs) since the epoch, 1970-01-01 UTC.

Everything that handles the times of rows converts, adds and prints them with this module. Times between programs, in
files and in the parameters of functions are integers of µs, so that no rounding of a float can move a row to the other
side of a limit. A `datetime.datetime` always carries its zone.

The module needs nothing but the standard library.
"""

from __future__ import annotations

import time as _time
from datetime import UTC, datetime, timedelta

__all__ = [
    "DAY",
    "EPOCH",
    "HOUR",
    "MINUTE",
    "SECOND",
    "as_utc",
    "format_local",
    "format_utc",
    "from_datetime",
    "from_seconds",
    "now",
    "parse",
    "to_datetime",
    "to_seconds",
    "uptime",
]

SECOND = 1_000_000
"""µs in a second."""
MINUTE = 60 * SECOND
"""µs in a minute."""
HOUR = 60 * MINUTE
"""µs in an hour."""
DAY = 24 * HOUR
"""µs in a day."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The time 0."""


def now() -> int:
    """Return the current time in µs since the epoch."""
    return _time.time_ns() // 1000


def uptime() -> int:
    """Return the µs that have passed since the machine was started.

    It cannot be set, and continues while the machine sleeps (``CLOCK_BOOTTIME``, :manpage:`clock_gettime(2)`).
    """
    return _time.clock_gettime_ns(_time.CLOCK_BOOTTIME) // 1000


def from_seconds(seconds: float) -> int:
    """Convert seconds, of a time or of a duration, to µs, rounding to the nearest."""
    return round(seconds * SECOND)


def to_seconds(micros: int) -> float:
    """Convert µs to seconds; a time of our days keeps every microsecond."""
    return micros / SECOND


def from_datetime(time: datetime) -> int:
    """Convert a `datetime` to µs since the epoch, without rounding.

    :raises TypeError: if the `datetime` has no time zone.
    """
    return (time - EPOCH) // timedelta(microseconds=1)


def to_datetime(micros: int) -> datetime:
    """Convert µs since the epoch to a `datetime` in UTC, without rounding.

    :raises OverflowError: if the time is not in the years 1 to 9999.
    """
    return EPOCH + timedelta(microseconds=micros)


def as_utc(time: datetime) -> datetime:
    """Return the same moment in UTC; without a zone it counts as UTC already.

    :raises OverflowError: if the moment is not in the years 1 to 9999 of UTC.
    """
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def parse(text: str) -> datetime:
    """Parse a date or time of ISO 8601; without a zone it is in UTC.

    :raises ValueError: if the text is no such time.
    """
    time = datetime.fromisoformat(text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def format_utc(micros: int, timespec: str = "milliseconds") -> str:
    """Format µs since the epoch as UTC, such as ``2026-01-31T12:00:00.000Z``.

    :param timespec: the precision, as for `datetime.datetime.isoformat`.
    """
    return to_datetime(micros).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def format_local(micros: int, timespec: str = "milliseconds") -> str:
    """Format µs since the epoch in the zone of this machine.

    The result is such as ``2026-01-31T13:00:00.000+01:00``.

    :param timespec: the precision, as for `datetime.datetime.isoformat`.
    """
    return to_datetime(micros).astimezone().isoformat(timespec=timespec)
