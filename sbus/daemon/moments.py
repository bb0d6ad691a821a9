"""Times of rows, as options of the programs and of Spark give them.

Apart from `sbus.daemon.values`, since the server has no such option and imports nothing of the journal.
"""

from __future__ import annotations

from datetime import datetime

from sbus.daemon.values import duration
from sbus.errors import UsageError
from sbus.journal import clock

__all__ = ["moment"]


def moment(text: str) -> datetime:
    """Parse a time: a date or time of ISO 8601, by default in UTC, or how long ago it was, such as ``-15m``.

    The second form needs a unit, because in other programs ``-1`` and ``-2`` stand for the ends of a stream.

    :returns: the time in UTC.
    :raises ValueError: if the text is no such time.
    :raises OverflowError: if the time is not in the years 1 to 9999 of UTC.
    """
    if not text.startswith("-"):
        return clock.as_utc(clock.parse(text))
    if not text[-1:].isalpha():
        raise ValueError(f"{text!r} has no unit")
    try:
        ago = duration("time")(text[1:])
    except UsageError as e:
        raise ValueError(str(e)) from None
    return clock.to_datetime(clock.now() - clock.from_seconds(ago))
