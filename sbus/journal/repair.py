"""Repair: makes a damaged journal readable again, and reports the lost rows.

Every row that can be read stays as it is, with its number. In place of each batch that cannot be read, the index gets a
record of the kind ``damaged`` that covers its rows, so that readers get one row that says how many they were. What is
replaced is first copied into the directory ``damaged`` of the journal.

Invariants:

* *No number of a row changes*, so what consumers have recorded stays right.
* *Each step leaves the journal readable as before or better*, in this order: the copies are synced; the damaged bytes
  are overwritten, which no reader could use; the index is replaced in one step; the summary is written again. A repair
  that is interrupted is repeated.
* *Nothing is guessed.* If the journal no longer states which row is the last one, repair says so and changes nothing:
  a number could be used twice.

The damaged bytes are overwritten with a row of the kind ``damaged`` of exactly their length, so that programs that read
the ``.arrows`` by themselves get past them. That needs a segment of a format that has this kind; in an older one the
bytes stay.

Repair holds the writer's lock. Readers may run beside it.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import zip_longest
from typing import IO, NamedTuple

import pyarrow as pa

from sbus.errors import JournalError
from sbus.journal import disk
from sbus.journal.index import (
    BATCH,
    Index,
    Record,
    is_headless,
    last_sync,
    open_rows,
    read_index,
    read_record,
    unsynced_records,
)
from sbus.journal.layout import (
    ARROWS,
    IDENTITY,
    INDEX,
    SUMMARY,
    Segment,
    list_segments,
    open_plain,
    read_blocks,
    read_identity,
)
from sbus.journal.salvage import find_header, salvage_index
from sbus.journal.schema import END_OF_STREAM, FORMAT, MAX_DAMAGED, Format, Kind, encode
from sbus.journal.segment import SegmentWriter
from sbus.journal.slices import read_batch
from sbus.journal.summary import read_summary
from sbus.journal.verify import problems_of

__all__ = ["DAMAGED", "Lost", "Repaired", "repair"]

DAMAGED = "damaged"
"""The directory in a journal that keeps the damaged parts."""
_FILE_MODE = 0o600
_PAGE = 4096
"""Bytes that are read at once from a file with bad sectors."""


class Lost(NamedTuple):
    """Rows that are beyond reading.

    :ivar first_seq: the number of the first row.
    :ivar rows: their number.
    :ivar min_time: the time of the first of them, or of a row before it, in µs since the epoch.
    :ivar max_time: the time of the last of them, or of a row before it.
    """

    first_seq: int
    rows: int
    min_time: int
    max_time: int


class Repaired(NamedTuple):
    """The damage of one segment.

    :ivar segment: the segment.
    :ivar lost: the rows that are lost; empty if all of them could be read.
    :ivar kept: the paths of the copies of the damaged parts.
    """

    segment: Segment
    lost: list[Lost]
    kept: list[str]


def repair(directory: str | os.PathLike[str], *, dry_run: bool = False) -> Iterator[Repaired]:
    """Repair a journal, and yield the damage, segment by segment; undamaged segments are left out.

    The caller holds the writer's lock (`sbus.journal.lock.locked`), unless `dry_run`.

    :param dry_run: whether to change nothing.
    :raises JournalError: if there is no journal, or it cannot be known which row is the last one.
    :raises OSError: if the journal cannot be read or written; the call may be repeated.
    """
    directory = os.path.abspath(directory)
    identity = read_identity(directory)
    segments = list_segments(directory)
    for segment, following in zip_longest(segments, segments[1:]):
        end_seq = following.first_seq if following else _end_of(segment, identity.id)
        if end_seq is None:
            continue
        one = _Repair(segment, identity.id, end_seq)
        if not one.is_damaged:
            continue
        if not dry_run:
            if one.lost and read_identity(directory).format.version < FORMAT:
                fields = {**identity.fields, "format": FORMAT}
                disk.replace(os.path.join(directory, IDENTITY), json.dumps(fields).encode() + b"\n", _FILE_MODE)
            one.apply()
        yield Repaired(segment, one.lost, one.kept)


def _end_of(segment: Segment, journal_id: str) -> int | None:
    """Return the number after the last row of the newest segment; None if it has no synced row.

    :raises JournalError: if it cannot be known.
    """
    stated: set[int] = set()
    try:
        if sync := last_sync(segment):
            stated.add(sync.next_seq)
        is_lost = is_headless(segment)
    except FileNotFoundError:
        is_lost = True
    if not segment.closed and not stated:
        if not is_lost:
            return None
        if found := salvage_index(segment, journal_id).last:
            stated.add(found.next_seq)
    if segment.closed:
        try:
            stated.add(read_summary(segment).last_seq + 1)
        except JournalError:
            pass
    if not stated:
        raise JournalError(
            f"{segment.path()}: nothing states which row of the journal is the last one: restore its index or summary "
            f"from a copy, or give its rows up: move its files ({segment.name}.*) elsewhere, and from now on record "
            "into another directory"
        )
    return max(stated)


class _Repair:
    """Finds the damage in one segment, and repairs it.

    :ivar is_damaged: whether anything is.
    :ivar lost: the rows that are lost.
    :ivar kept: the copies that `apply` has made.
    """

    def __init__(self, segment: Segment, journal_id: str, end_seq: int) -> None:
        self.lost: list[Lost] = []
        self.kept: list[str] = []
        self._segment = segment
        self._journal_id = journal_id
        self._end_seq = end_seq
        self._format: Format | None = None
        self._overwrite: list[tuple[int, bytes]] = []  # offset and bytes
        self._asides: list[tuple[int, int]] = []  # offsets of the damaged bytes
        index_is_whole = self._index_is_whole()
        # An open segment without its index is searched like a closed one.
        index = salvage_index(segment if index_is_whole else segment._replace(closed=True), journal_id)
        self._records = self._check(index)
        self.is_damaged = (
            not index_is_whole
            or bool(self._overwrite or self._asides)
            or (segment.closed and bool(problems_of(segment, journal_id)))  # of its summary: all else is checked above
        )

    def _index_is_whole(self) -> bool:
        try:
            index = read_index(self._segment)
        except (JournalError, FileNotFoundError):
            return False
        return index.last is not None and index.last.next_seq == self._end_seq

    def _check(self, index: Index) -> list[Record]:
        """Return the records of the repaired index, without the last sync record."""
        path = self._segment.path(ARROWS)
        with open_rows(self._segment) as file:
            header = find_header(file, self._journal_id, index.header)
            if header is None or index.header is None:
                raise JournalError(
                    f"{path}: nothing states the format of its rows: restore it or its index from a copy, or give its "
                    f"rows up: move its files ({self._segment.name}.*) elsewhere, and repair again"
                )
            head, self._format = header
            records = [head._replace(first_seq=self._segment.first_seq, min_time=self._segment.first_time,
                                     max_time=self._segment.first_time)]  # fmt: skip
            try:
                read_record(path, file, head)
            except JournalError:
                self._overwrite.append((0, self._format.header(self._journal_id)))
                self._asides.append((0, head.end))
            at, seq, time = head.end, self._segment.first_seq, self._segment.first_time
            for record in index.batches:
                records.append(self._check_batch(path, file, record))
                at, seq, time = record.end, record.next_seq, record.max_time
        if self._end_seq - seq > MAX_DAMAGED:
            raise JournalError(
                f"{path}: {self._end_seq - seq} rows are missing after row {seq - 1}, more than a journal can lose: "
                "move the files of a later segment that do not belong to the journal elsewhere, and repair again"
            )
        if seq < self._end_seq:
            end = max(at, os.stat(path).st_size - len(END_OF_STREAM))
            records.append(self._lose(Record(BATCH, Kind.DAMAGED, at, end, seq, self._end_seq - seq, 0, time, time)))
        return records

    def _check_batch(self, path: str, file: IO[bytes], record: Record) -> Record:
        if record.kind is Kind.DAMAGED and not record.crc:
            return self._lose(record)  # the index had no record of it
        if record.kind is Kind.DAMAGED:
            return record  # an earlier repair
        try:
            assert self._format is not None
            read_batch(path, file, record, self._journal_id, self._format)
        except JournalError:
            return self._lose(record)
        return record

    def _lose(self, record: Record) -> Record:
        """Note rows as lost, and return the record that stands for them."""
        assert self._format is not None
        self.lost.append(Lost(record.first_seq, record.rows, record.min_time, record.max_time))
        length = record.end - record.start
        data = _padded_row(record, length, self._format) if Kind.DAMAGED in self._format.kinds else None
        if length:
            self._asides.append((record.start, record.end))
        if data is not None:
            self._overwrite.append((record.start, data))
        # 1: not 0, by which `_check_batch` knows a record that is in no index yet.
        crc = zlib.crc32(data) if data is not None else 1
        return record._replace(kind=Kind.DAMAGED, crc=crc)

    def apply(self) -> None:
        """Keep copies of the damaged parts, and repair the segment."""
        self._keep()
        fd = disk.open_existing(self._segment.path(ARROWS))
        try:
            mode = os.fstat(fd).st_mode & 0o777
            for at, data in self._overwrite:
                disk.write(fd, data, at)
            disk.sync(fd)
        finally:
            os.close(fd)
        records = [*self._records, self._records[-1].sync(), *self._unsynced()]
        data = b"".join(record.pack() for record in records)
        disk.replace(self._segment.path(INDEX), data, mode)
        # Writes the end of the stream and the summary. A damaged open segment is closed, as by the next writer.
        SegmentWriter.reopen(self._segment, self._journal_id, mode).finish()

    def _unsynced(self) -> list[Record]:
        """Return the records of rows that a killed writer had not synced yet: the next one may find them whole."""
        if not self._segment.closed:
            with suppress(FileNotFoundError):
                return unsynced_records(self._segment)
        return []

    def _keep(self) -> None:
        """Copy the files to be replaced into the directory `DAMAGED`."""
        home = os.path.join(self._segment.directory, DAMAGED)
        if not os.path.isdir(home):
            # Copies of rows are as open as the rows.
            disk.make_directories(home, stat.S_IMODE(os.stat(self._segment.directory).st_mode))
        with disk.inside(home) as found:
            for suffix in (INDEX, SUMMARY):
                if os.path.exists(path := self._segment.path(suffix)):
                    with open_plain(path) as file:
                        fd = file.fileno()
                        self._copy(found, suffix, read_blocks(fd), os.fstat(fd).st_size)
            with open_plain(self._segment.path(ARROWS)) as file:
                for start, end in self._asides:
                    parts = _read_what_can_be(file.fileno(), start, end)
                    self._copy(found, f"-{start}-{end}.bytes", parts, end - start)
            disk.sync_directory(found)

    def _copy(self, home: str, suffix: str, parts: Iterable[tuple[int, bytes]], size: int) -> None:
        """Make a file of parts, each with its offset; there are zeros between them."""
        path, number = os.path.join(home, self._segment.name + suffix), 1
        while os.path.exists(path):  # of an earlier repair
            number += 1
            path = os.path.join(home, f"{self._segment.name}{suffix}.{number}")
        fd = disk.create(path, stat.S_IMODE(os.stat(self._segment.path(ARROWS)).st_mode))
        try:
            for at, data in parts:
                disk.write(fd, data, at)
            disk.truncate(fd, size)
            disk.sync(fd)
        except OSError:
            disk.remove(path)  # the next repair makes another one
            raise
        finally:
            os.close(fd)
        self.kept.append(os.path.join(self._segment.directory, DAMAGED, os.path.basename(path)))


def _padded_row(record: Record, length: int, format_: Format) -> bytes | None:
    """Return a row of the kind ``damaged`` that takes exactly `length` bytes; None if it cannot."""

    def row(payload: bytes) -> pa.Buffer:
        return encode(Kind.DAMAGED, record.first_seq, record.min_time, [b""], [payload], format_=format_)

    room = length - row(b"").size
    if room < 0:
        return None
    details = {"rows": record.rows, "last": record.next_seq - 1, "reason": "damaged on the disk"}
    # Without the index, the number of rows is what shows which row is behind them.
    choices = (json.dumps(each).encode() for each in (details, {"rows": record.rows}))
    payload = next((each for each in choices if len(each) <= room), b"").ljust(room)
    data = row(payload).to_pybytes()
    return data if len(data) == length else None


def _read_what_can_be(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the pages of a range that can be read, each with its offset in the range."""
    for at in range(start, min(end, os.fstat(fd).st_size), _PAGE):
        try:
            yield at - start, os.pread(fd, min(_PAGE, end - at), at)
        except OSError:
            pass
