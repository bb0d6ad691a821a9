"""Slices of segments, and how their rows are read.

A `Slice` is plain data: `sbus.journal.reader.JournalReader.plan` makes it, and `read` yields its rows in this process
or in another. Before `read` hands out rows, it checks the CRC-32 of their batch, and that their numbers and times are
those of the index: the owner of a journal can put any rows in it, with the right checksum.

Damage is an error, unless the slice has `Slice.skip_damaged`: then one row of the kind ``damaged`` stands in place of
each batch that cannot be read, and states how many of the slice's rows it had.

Rejected: memory maps. They save a tenth of the time. But a bad sector of the disk, or the owner of a file who cuts it,
ends a process with SIGBUS, and with it the archive of other journals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError, JournalUnreadable
from sbus.journal.index import REPAIR, Index, Record, open_rows, read_index, read_record
from sbus.journal.layout import ARROWS, BAD_DISK, INDEX, SUMMARY, Segment, list_segments, read_identity
from sbus.journal.salvage import find_header, salvage_index
from sbus.journal.schema import FORMAT, FORMATS, Format, Kind, damaged_row, decode, read_header

__all__ = ["Slice", "load", "raise_missing", "read", "read_batch", "read_with_ends"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one segment, for `read` in this process or another.

    :ivar segment: the segment.
    :ivar journal_id: the ID of its journal.
    :ivar start_seq: the number of the first row.
    :ivar end_seq: the number after the last row.
    :ivar min_time: batches that end before this time are left out, in µs since the epoch; None: no limit.
    :ivar max_time: batches that begin after this time are left out; None: no limit.
    :ivar kinds: rows of other kinds are left out; None: all kinds.
    :ivar skip_damaged: whether a row of the kind ``damaged`` stands for a batch that cannot be read; else it is an
        error.
    :ivar host: the host of the journal; None: unknown.
    """

    segment: Segment
    journal_id: str
    start_seq: int
    end_seq: int
    min_time: int | None = None
    max_time: int | None = None
    kinds: frozenset[str] | None = None
    skip_damaged: bool = False
    host: str | None = None

    def may_need(self, batch: Record) -> bool:
        """Return whether a batch may hold rows of this slice."""
        return (
            batch.next_seq > self.start_seq
            and batch.first_seq < self.end_seq
            and (self.min_time is None or batch.max_time >= self.min_time)
            and (self.max_time is None or batch.min_time <= self.max_time)
            and (self.kinds is None or batch.kind in self.kinds)
        )


_T = TypeVar("_T")


def load(segment: Segment, do: Callable[[Segment], _T]) -> _T:
    """Call `do`; raise a `JournalError` if the segment is gone."""
    try:
        return do(segment)
    except FileNotFoundError:
        raise_missing(segment)


def raise_missing(segment: Segment) -> NoReturn:
    """Raise the error that says why a segment, or a file of it, is no longer there."""
    segments = list_segments(segment.directory)
    if not segments or segment.first_seq < segments[0].first_seq:
        raise JournalError(f"{segment.path()}: was deleted by retention: it began with row {segment.first_seq}")
    suffixes = (ARROWS, INDEX, SUMMARY) if segment.closed else (ARROWS, INDEX)
    missing = next((path for path in map(segment.path, suffixes) if not os.path.exists(path)), segment.path())
    raise JournalError(f"{missing}: it is missing: {REPAIR}")


def read(part: Slice, columns: Sequence[str] | None = None, *, index: Index | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice, batch by batch; only publishers are copied.

    :param columns: the names of the columns to return, in this order; None: all (`sbus.journal.schema.COLUMNS`).
    :param index: the index of the segment, if the caller has it; it needs only the batches of this slice.
    :raises JournalError: if the segment is missing, damaged, or has another schema or journal.
    """
    if part.skip_damaged:
        yield from _read_leniently(part, columns)
        return
    for _, rows in read_with_ends(part, columns, index=index):
        yield rows


def read_with_ends(
    part: Slice, columns: Sequence[str] | None = None, *, index: Index | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the same rows, each batch with the number after that of its last row; damage is an error in any case.

    :raises JournalError: as `read` does.
    """
    path = part.segment.path(ARROWS)
    if index is None:
        index = load(part.segment, read_index)
    with load(part.segment, open_rows) as file:
        format_ = _check_header(path, file, index, part.journal_id)
        next_seq = part.start_seq
        for batch in index.batches:
            if batch.next_seq <= part.start_seq or batch.first_seq >= part.end_seq:
                continue
            if batch.first_seq > next_seq:
                break
            next_seq = batch.next_seq
            if part.may_need(batch):
                yield min(part.end_seq, batch.next_seq), _rows_of(part, batch, path, file, columns, format_)
    if next_seq < part.end_seq:
        raise JournalError(f"{path}: row {next_seq} is missing in it: {REPAIR}")


def _rows_of(
    part: Slice, batch: Record, path: str, file: IO[bytes], columns: Sequence[str] | None, format_: Format
) -> pa.RecordBatch:
    """Return the rows of a batch that are in the slice."""
    first, end = max(part.start_seq, batch.first_seq), min(part.end_seq, batch.next_seq)
    if batch.kind is Kind.DAMAGED:
        reason = "damaged on the disk"
        return damaged_row(part.journal_id, first, end - first, batch.min_time, reason, columns, part.host)
    rows = read_batch(path, file, batch, part.journal_id, format_, columns, part.host)
    return rows.slice(first - batch.first_seq, end - first)


def read_batch(
    path: str,
    file: IO[bytes],
    batch: Record,
    journal_id: str,
    format_: Format,
    columns: Sequence[str] | None = None,
    host: str | None = None,
) -> pa.RecordBatch:
    """Return all rows of a batch.

    :param path: the name of the file, for errors.
    :param columns: the names of the columns to return, in this order; None: all.
    :param host: the host of the journal; None: unknown.
    :raises JournalError: if the batch is damaged, or the values returned are not those of its record.
    """
    data = read_record(path, file, batch)
    try:
        rows = decode(data, journal_id, columns, format_, host)
        _check(rows, batch)
    except ValueError as e:
        raise JournalError(
            f"{path}: the bytes {batch.start} to {batch.end} are not {batch.rows} rows from {batch.first_seq} ({e}): "
            f"{REPAIR}"
        ) from e
    return rows


def _check(rows: pa.RecordBatch, batch: Record) -> None:
    """Check the rows of a batch against its record.

    :raises ValueError: if they are not those.
    """
    if rows.num_rows != batch.rows:
        raise ValueError(f"{rows.num_rows} rows")
    names = rows.schema.names
    if "seq" in names and not rows.column("seq").equals(pa.arange(batch.first_seq, batch.next_seq)):
        raise ValueError("they have other numbers")
    if "time" in names:
        extent = pc.min_max(rows.column("time"), skip_nulls=False)
        least, greatest = extent["min"].value, extent["max"].value
        if least is None or least < batch.min_time or greatest > batch.max_time:
            raise ValueError("they have other times")


def _read_leniently(part: Slice, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice, and a row of the kind ``damaged`` in place of what cannot be read.

    :raises JournalMissing: if the journal as a whole was moved away: its rows are not lost.
    :raises JournalUnreadable: if this user may not read them: nor are they.
    :raises OSError: if they cannot be read for another reason than damage, such as too many open files: nor are they.
    """
    path, next_seq, time = part.segment.path(ARROWS), part.start_seq, part.segment.first_time

    def lost(end: int, reason: object) -> Iterator[pa.RecordBatch]:
        if end > next_seq and (part.kinds is None or Kind.DAMAGED in part.kinds):
            yield damaged_row(part.journal_id, next_seq, end - next_seq, time, str(reason), columns, part.host)

    try:
        index = salvage_index(part.segment, part.journal_id)
        file = open_rows(part.segment)
    except (OSError, JournalError) as e:
        if not _is_damage(e):
            raise
        read_identity(part.segment.directory)
        yield from lost(part.end_seq, f"{path}: {e.strerror or e}" if isinstance(e, OSError) else e)
        return
    with file:
        header = find_header(file, part.journal_id, index.header)
        for batch in index.batches if header is not None else ():
            if batch.next_seq <= part.start_seq or batch.first_seq >= part.end_seq:
                continue
            end = min(part.end_seq, batch.next_seq)
            time = batch.min_time
            if part.may_need(batch):
                try:
                    assert header is not None
                    rows = _rows_of(part, batch, path, file, columns, header[1])
                except (JournalError, pa.ArrowException) as e:
                    if not _is_damage(e):
                        raise
                    yield from lost(end, e)
                else:
                    yield rows
            next_seq = end
    yield from lost(part.end_seq, f"{path}: the rows are missing in it")


def _is_damage(error: Exception) -> bool:
    """Return whether an error means that rows are lost."""
    if isinstance(error, OSError):
        return error.errno in BAD_DISK or isinstance(error, FileNotFoundError)
    return not isinstance(error, JournalUnreadable | MemoryError)


def _check_header(path: str, file: IO[bytes], index: Index, journal_id: str) -> Format:
    """Return the format of a segment.

    :raises JournalError: if this package cannot read it, or its schema is not that of the journal.
    """
    if not index.header:
        return FORMATS[FORMAT]
    format_, stated = read_header(read_record(path, file, index.header), path)
    expected = format_.schema(journal_id)
    if not stated.equals(expected, check_metadata=True):
        theirs, ours = (s.to_string(show_schema_metadata=True) for s in (stated, expected))
        raise JournalError(f"{path}: a segment of another schema or journal: it has {theirs!r}, not {ours!r}")
    return format_
