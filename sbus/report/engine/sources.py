"""Where the rows of a report come from: journals, or a lake. Both have the same few questions to answer.

Rows that are far ahead of this machine's clock were recorded by another one that was wrong. A period that nobody named
must not end with them, so each source says where its plausible rows end, and how many follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError, JournalMissing
from sbus.journal.clock import as_utc, from_datetime, to_datetime
from sbus.journal.keytext import as_text_array
from sbus.journal.reader import JournalReader
from sbus.journal.resizing import resized
from sbus.journal.slices import Slice, read, read_with_ends
from sbus.journal.snapshot import OnDamage, open_journals
from sbus.lake.hourly import Hourly, hourly
from sbus.lake.maintenance import by_hour
from sbus.lake.merge import Limits, iter_rows
from sbus.lake.table import DataFile, Table, open_parquet
from sbus.report.spans import Span

__all__ = ["Extent", "JournalRows", "LakeRows", "Source"]

_COLUMNS = ["journal", "seq", "time", "kind", "key", "payload", "sender_uid", "sender_number", "host"]
_HOUR = timedelta(hours=1)
_BATCH_ROWS = 1 << 16
"""Rows of a batch: as many as those of a lake have."""


class Extent(NamedTuple):
    """The time of some rows, in µs since the epoch.

    :ivar first: the least time; None without rows.
    :ivar last: the greatest time that is not ahead of the clock; None without such rows.
    :ivar ahead: the number of rows that are.
    """

    first: int | None
    last: int | None
    ahead: int


class Source(Protocol):
    """The questions of a report about its rows."""

    def extent(self, latest: int) -> Extent:
        """Return the time of all rows; those after `latest` (µs since the epoch) are ahead of the clock."""

    def rows(self, span: Span) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a time, and maybe others, in batches of bounded size.

        :returns: the columns of a journal that reports need, keys as text.
        :raises FileNotFoundError: if a file of a lake has been replaced meanwhile.
        """

    def counted(self, period: Span) -> AbstractContextManager[Hourly | None]:
        """Return counts by the hour of a period and the one before, for a block; None if there are none."""


class JournalRows:
    """The rows of journals.

    Where a journal is damaged, one row of the kind ``damaged`` stands in place of each batch that cannot be read. A
    journal of which not even the end is known is left out.

    :param paths: directories, or patterns of them.
    :param on_damage: called for each damage; None: damage is an error.
    """

    def __init__(self, paths: Iterable[str], on_damage: OnDamage | None = None) -> None:
        """
        :raises JournalError: if a journal is missing, or two directories have the same one.
        """
        self._on_damage = on_damage
        self._readers: list[JournalReader] = [*open_journals(paths, on_damage=on_damage).values()]

    def _report(self, journal: JournalReader, damage: JournalError) -> None:
        if self._on_damage is None or isinstance(damage, JournalMissing):
            raise damage
        self._on_damage(journal.directory, damage)

    def extent(self, latest: int) -> Extent:
        """
        :raises JournalError: if not even the end of a single journal is known.
        """
        found = [extent for reader in self._readers if (extent := self._extent(reader, latest)) is not None]
        if not found:
            raise JournalError("none of the journals can be read")
        return _joined(found)

    def _extent(self, reader: JournalReader, latest: int) -> Extent | None:
        try:
            return Extent(*reader.extent(latest))
        except JournalError as e:
            self._report(reader, e)
        try:
            return Extent(*JournalReader(reader.directory, skip_damaged=True).extent(latest))
        except JournalError:
            return None

    def rows(self, span: Span) -> Iterator[pa.RecordBatch]:
        for reader in self._readers:
            try:
                parts = reader.plan(reader.start(), reader.end(), min_time=span.start, max_time=span.end - 1)
            except JournalError as e:
                self._report(reader, e)
                continue
            for part in parts:
                # A recorder writes small batches, and each has a fixed cost.
                large = resized(self._read(reader, part), min_rows=_BATCH_ROWS, min_bytes=Limits().batch_bytes)
                yield from map(_as_in_lakes, large)

    def _read(self, reader: JournalReader, part: Slice) -> Iterator[pa.RecordBatch]:
        next_seq = part.start_seq
        try:
            for end, rows in read_with_ends(part, _COLUMNS):
                next_seq = end
                yield rows
        except JournalError as e:
            self._report(reader, e)
            yield from read(replace(part, start_seq=next_seq, skip_damaged=True), _COLUMNS)

    def counted(self, period: Span) -> AbstractContextManager[Hourly | None]:
        return nullcontext()


class LakeRows:
    """The rows of a lake."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def extent(self, latest: int) -> Extent:
        hours = [files for _, files in by_hour(self._table.files())]
        if not hours:
            return Extent(None, None, 0)
        first = min((time for file in hours[0] for time in self._ends(file)), default=None)
        ahead = 0
        for files in reversed(hours):
            found = [self._split(file, latest) for file in files]
            ahead += sum(number for _, number in found)
            if times := [last for last, _ in found if last is not None]:
                return Extent(first, max(times), ahead)
        return Extent(first, None, ahead)

    def _ends(self, file: DataFile) -> list[int]:
        """Return the least and the greatest time in a file, by its footer if that has them."""
        with open_parquet(self._table, file) as parquet:
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
            place = parquet.schema_arrow.get_field_index("time")
            known = [group.column(place).statistics for group in groups if group.num_rows]
            if all(each is not None and each.has_min_max for each in known):
                times = [from_datetime(as_utc(time)) for each in known for time in (each.min, each.max)]
            else:
                times = [time for some in _times(parquet) for time in pc.min_max(some).as_py().values()]
        return [min(times), max(times)] if times else []

    def _split(self, file: DataFile, latest: int) -> tuple[int | None, int]:
        """Return the greatest time in a file up to `latest`, None if there is none, and the number of rows after it."""
        ends = self._ends(file)
        if not ends or ends[1] <= latest:
            return (ends[1] if ends else None), 0
        last, ahead = None, 0
        with open_parquet(self._table, file) as parquet:
            if ends[0] > latest:
                return None, int(parquet.metadata.num_rows)
            for times in _times(parquet):
                some = times.filter(pc.less_equal(times, latest))
                ahead += len(times) - len(some)
                if len(some):
                    last = max(last or 0, pc.max(some).as_py())
        return last, ahead

    def rows(self, span: Span) -> Iterator[pa.RecordBatch]:
        for hour, files in by_hour(self._table.files()):
            if hour.start < to_datetime(span.end) and hour.start + _HOUR > to_datetime(span.start):
                for file in files:
                    with open_parquet(self._table, file) as parquet:
                        yield from iter_rows(parquet, Limits(), _COLUMNS)

    def counted(self, period: Span) -> AbstractContextManager[Hourly | None]:
        return hourly(self._table, to_datetime(period.start), to_datetime(period.end))


def _joined(extents: Iterable[Extent]) -> Extent:
    found = list(extents)
    return Extent(
        min((each.first for each in found if each.first is not None), default=None),
        max((each.last for each in found if each.last is not None), default=None),
        sum(each.ahead for each in found),
    )


def _as_in_lakes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a journal with text instead of dictionaries and of keys in bytes."""
    columns = {
        name: column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
    columns["key"] = as_text_array(columns["key"])
    return pa.RecordBatch.from_pydict(columns)


def _times(parquet: object) -> Iterator[pa.Array]:
    for batch in parquet.iter_batches(columns=["time"], use_threads=False):  # type: ignore[attr-defined]
        yield batch.column(0).cast(pa.int64())
