"""Where a read begins and ends in each journal: the options ``startingOffsets`` and ``endingOffsets``.

As with Spark's Kafka source, a position is ``earliest``, ``latest``, or an object of JSON with a number for each
journal: the number of a row, -2 for the earliest and -1 for the latest. Instead of a number, a time may stand, alone or
in the object: the first row at or after it. An ending position is the first row that is not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sbus.daemon.moments import moment
from sbus.errors import JournalError, UsageError
from sbus.journal.clock import from_datetime
from sbus.journal.reader import JournalReader

__all__ = ["EARLIEST", "FROM_THE_FIRST", "LATEST", "TO_THE_LAST", "Positions"]

EARLIEST = "earliest"
LATEST = "latest"

_NUMBERS = {-2: EARLIEST, -1: LATEST}


@dataclass(frozen=True, slots=True)
class Positions:
    """A position in each journal.

    :ivar default: `EARLIEST`, `LATEST`, or a time in µs since the epoch: for the journals that the others leave out.
    :ivar times: likewise, by the ID of a journal.
    :ivar rows: the number of a row, by the ID of a journal.
    """

    default: str | int = EARLIEST
    times: Mapping[str, str | int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, default: str) -> Positions:
        """Parse the value of an option.

        :param default: `EARLIEST` or `LATEST`, for the journals that a JSON object leaves out.
        :raises ValueError: if the text is no position.
        :raises OverflowError: if it is a time that is not in the years 1 to 9999.
        """
        if not text.lstrip().startswith("{"):
            return cls(_moment(text))
        times: dict[str, str | int] = {}
        rows: dict[str, int] = {}
        for journal_id, value in json.loads(text).items():
            if isinstance(value, str):
                times[journal_id] = _moment(value)
            elif not isinstance(value, int) or isinstance(value, bool) or value < min(_NUMBERS):
                raise ValueError(f"{value!r} is no row")
            elif value in _NUMBERS:
                times[journal_id] = _NUMBERS[value]
            else:
                rows[journal_id] = value
        return cls(default, times, rows)

    def of(self, journal_id: str) -> str | int:
        """Return `EARLIEST`, `LATEST` or the time of a journal that has no row here."""
        return self.times.get(journal_id, self.default)

    def resolve(self, journal: JournalReader) -> int:
        """Return the number of a row of this journal, from its first to the one after its last.

        :raises sbus.errors.JournalError: if the row of the option was deleted, or is not there yet.
        """
        first, end = journal.start(), journal.end()
        row = self.rows.get(journal.id)
        if row is not None:
            if not first <= row <= end:
                why = "was deleted" if row < first else "is not there yet"
                raise JournalError(
                    f"the row {row} of the journal in {journal.directory} {why}: it has the rows {first} to {end - 1}; "
                    f"give a position from {first} to {end}, or earliest or latest"
                )
            return row
        position = self.of(journal.id)
        if position == EARLIEST:
            return min(first, end)
        if position == LATEST:
            return end
        return min(max(journal.seq_at_time(int(position)), first), end)

    def check(self, journals: Iterable[str]) -> None:
        """Check that the journals exist which the option names.

        :raises sbus.errors.UsageError: if one does not.
        """
        known = sorted(journals)
        for journal_id in sorted({*self.times, *self.rows}.difference(known)):
            raise UsageError(
                f"format('sbus'): offsets: there is no journal {journal_id!r}; those that are read are "
                f"{', '.join(known) or 'none'}"
            )


FROM_THE_FIRST = Positions(EARLIEST)
TO_THE_LAST = Positions(LATEST)


def _moment(text: str) -> str | int:
    return text.lower() if text.lower() in (EARLIEST, LATEST) else from_datetime(moment(text))
