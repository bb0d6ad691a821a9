"""Reading journals: which rows there are, where they are, and the rows themselves, while somebody writes or nobody.

Readers take no locks. They see whole batches up to the last sync, so that nothing they have seen is ever taken back.
Right after a power cut `JournalReader.end` may be a little less than it was, until the recorder has opened the journal
again: the rows are there, but what said that they are safe is not.
"""

from __future__ import annotations

import bisect
import glob
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import pyarrow as pa

from sbus.errors import JournalError
from sbus.journal.index import Index, Record, last_sync, read_index
from sbus.journal.layout import ARROWS, CLOSED, INDEX, Segment, identity, is_journal, list_segments
from sbus.journal.schema import decode, read_header, schema
from sbus.journal.summary import Summary, read_summary

__all__ = ["JournalReader", "Slice", "find_journals", "read"]


_SETTLED = 1_000_000_000  # ns, more than any file system rounds its times by


def find_journals(patterns: Iterable[str]) -> list[str]:
    """The directories of journals that these paths and globs name, sorted, each once.

    :raises JournalError: naming the path that is none, or the glob that finds none.
    """
    found: set[str] = set()
    for pattern in patterns:
        if glob.has_magic(pattern) and not is_journal(pattern):
            matches = [path for path in glob.glob(pattern) if is_journal(path)]
            if not matches:
                raise JournalError(f"{pattern}: no journal is found there")
        else:
            identity(pattern)
            matches = [pattern]
        found.update(map(os.path.realpath, matches))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one segment, to be read by `read`, in this process or another.

    :ivar segment: which one.
    :ivar journal_id: of its journal.
    :ivar start_seq: the first row.
    :ivar end_seq: the one behind the last.
    :ivar min_time: batches that are wholly before it are left out (µs since 1970).
    :ivar max_time: batches that are wholly after it are left out.
    :ivar kinds: rows of other kinds are left out; None for all.
    """

    segment: Segment
    journal_id: str
    start_seq: int
    end_seq: int
    min_time: int | None = None
    max_time: int | None = None
    kinds: frozenset[str] | None = None

    def wants(self, batch: Record) -> bool:
        """Whether there may be something in this batch that is wanted."""
        return (
            batch.next_seq > self.start_seq
            and batch.first_seq < self.end_seq
            and (self.min_time is None or batch.max_time >= self.min_time)
            and (self.max_time is None or batch.min_time <= self.max_time)
            and (self.kinds is None or batch.kind in self.kinds)
        )


class JournalReader:
    """Finds rows in one journal.

    :ivar directory: of the journal.
    :ivar id: of the journal.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """
        :raises JournalError: if there is no journal, or one of a format that is not known.
        """
        self.directory = os.path.abspath(directory)
        self.id = identity(self.directory)
        self._listed: list[Segment] = []
        self._listed_at = -1  # when the directory had changed last, in ns since 1970

    def segments(self) -> list[Segment]:
        """What there is, oldest first; nothing but names is read, and not even those if the directory is as it was."""
        try:
            changed = os.stat(self.directory).st_mtime_ns
        except FileNotFoundError:
            changed = -1
        if changed < 0 or changed != self._listed_at:
            # Of a change in this very moment the time does not tell whether another one followed.
            self._listed_at = changed if time.time_ns() - changed > _SETTLED else -1
            self._listed = list_segments(self.directory)
        return list(self._listed)

    def start(self) -> int:
        """The seq of the first row that is still there."""
        segments = self.segments()
        return segments[0].first_seq if segments else 0

    def end(self) -> int:
        """The seq of the first row that readers may not see yet; all before it are there or were deleted."""
        return self._look()[1]

    def _look(self) -> tuple[list[Segment], int]:
        """The segments, and the end of what readers may see in them."""
        segments = self.segments()
        while segments:
            newest = segments[-1]
            try:
                sync = last_sync(newest)
            except FileNotFoundError:  # retention spares the newest: there are newer ones by now
                segments = self.segments()
                if segments and segments[-1] == newest:
                    _gone(newest)
            else:
                # What comes before the newest segment was safe before that was begun.
                return segments, sync.next_seq if sync else newest.first_seq
        return [], 0

    def _look_from(self, start_seq: int) -> tuple[list[Segment], int]:
        """The same, if this row is still there, or yet to come."""
        segments, end = self._look()
        if segments and start_seq < segments[0].first_seq:
            raise JournalError(
                f"{self.directory}: was deleted by retention: rows {start_seq} to {segments[0].first_seq - 1}"
            )
        return segments, end

    def seq_at_time(self, moment: int) -> int:
        """The seq of the first row whose time is this or later (µs since 1970); `end` if there is none yet."""
        segments, end = self._look()
        following = bisect.bisect_left(segments, moment, key=lambda segment: segment.first_time)
        if following:
            segment = segments[following - 1]
            for batch in _looked_into(segment, read_index).batches:
                if batch.max_time >= moment:
                    return self._seq_in(segment, batch, moment)
        return segments[following].first_seq if following < len(segments) else end

    def _seq_in(self, segment: Segment, batch: Record, moment: int) -> int:
        if batch.min_time >= moment:
            return batch.first_seq
        rows = next(read(Slice(segment, self.id, batch.first_seq, batch.next_seq), ["time"]))
        return batch.first_seq + bisect.bisect_left(rows.column(0).cast(pa.int64()).to_pylist(), moment)

    def plan(
        self,
        start_seq: int,
        end_seq: int,
        *,
        min_time: int | None = None,
        max_time: int | None = None,
        kinds: Collection[str] | None = None,
        wanted: Callable[[Summary], bool] | None = None,
        split_bytes: int | None = None,
    ) -> list[Slice]:
        """What to read to get these rows, in order; at least one slice for every segment that is touched.

        Without `wanted` and `split_bytes` nothing but names is read, and how far the newest segment goes, however much
        the journal holds.

        :param start_seq: the first row.
        :param end_seq: the one behind the last, at most `end`.
        :param min_time: rows before it (µs since 1970) are not needed, but may come.
        :param max_time: rows after it are not needed, but may come.
        :param kinds: rows of other kinds do not come.
        :param wanted: of a closed segment, whether it may have something that is needed.
        :param split_bytes: segments are cut into slices of about so many bytes.
        :raises JournalError: if rows of these were deleted by retention, or are not to be seen yet.
        """
        if start_seq >= end_seq:
            return []
        segments, end = self._look_from(start_seq)
        if end_seq > end:
            raise JournalError(f"{self.directory}: row {end_seq - 1} is not there yet: the last one is {end - 1}")
        whole = Slice(
            segments[0], self.id, start_seq, end_seq, min_time, max_time, None if kinds is None else frozenset(kinds)
        )
        slices: list[Slice] = []
        first = bisect.bisect_right(segments, start_seq, key=_first_seq) - 1
        behind = bisect.bisect_left(segments, end_seq, key=_first_seq)
        for segment, following in zip(segments[first:behind], [*segments[first + 1 :], None], strict=False):
            ends = following.first_seq if following else end_seq
            if (
                ends > segment.first_seq
                and (max_time is None or segment.first_time <= max_time)
                and (min_time is None or not following or following.first_time >= min_time)
                and not (wanted and segment.closed and not wanted(_looked_into(segment, read_summary)))
            ):
                part = replace(
                    whole,
                    segment=segment,
                    start_seq=max(start_seq, segment.first_seq),
                    end_seq=min(end_seq, ends),
                )
                slices += [part] if split_bytes is None else self._split(part, split_bytes)
        return slices

    def _split(self, part: Slice, size: int) -> Iterator[Slice]:
        start_seq, start = part.start_seq, None
        for batch in _looked_into(part.segment, read_index).batches:
            if not part.wants(batch):
                continue
            if start is None:
                start = batch.start
            if batch.end - start >= size:
                end_seq = min(batch.next_seq, part.end_seq)
                yield replace(part, start_seq=start_seq, end_seq=end_seq)
                start_seq, start = end_seq, None
        if start is not None:
            yield replace(part, start_seq=start_seq)

    def limit(self, start_seq: int, max_rows: int | None = None, max_bytes: int | None = None) -> int:
        """How far to read at most: the seq behind the last row of so many rows and bytes, but at least one row.

        Bytes are counted by whole batches; one that is longer than `max_bytes` is read by itself.

        :raises JournalError: if the first row was deleted by retention.
        """
        segments, end = self._look_from(start_seq)
        if max_rows is not None:
            end = min(end, start_seq + max(max_rows, 1))
        if max_bytes is None:
            return end
        left = max_bytes
        first = bisect.bisect_right(segments, start_seq, key=_first_seq) - 1
        for segment in segments[max(first, 0) :]:
            for batch in _looked_into(segment, read_index).batches:
                if batch.next_seq <= start_seq:
                    continue
                if batch.first_seq >= end:
                    return end
                left -= batch.end - batch.start
                if left < 0:
                    return min(end, batch.first_seq if batch.first_seq > start_seq else batch.next_seq)
        return end


def _first_seq(segment: Segment) -> int:
    return segment.first_seq


_T = TypeVar("_T")


def _looked_into(segment: Segment, look: Callable[[Segment], _T]) -> _T:
    try:
        return look(segment)
    except FileNotFoundError:
        _gone(segment)


def _gone(segment: Segment) -> NoReturn:
    """Say why a segment is not there that was there."""
    segments = list_segments(segment.directory)
    if not segments or segment.first_seq < segments[0].first_seq:
        raise JournalError(f"{segment.path()}: was deleted by retention: it began with row {segment.first_seq}")
    suffixes = (ARROWS, INDEX, CLOSED) if segment.closed else (ARROWS, INDEX)
    missing = next((path for path in map(segment.path, suffixes) if not os.path.exists(path)), segment.path())
    raise JournalError(f"{missing}: it is missing: restore it from a copy")


def read(part: Slice, columns: Sequence[str] | None = None, *, index: Index | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, straight out of the file: nothing is copied.

    :param columns: the names of those that are wanted, in this order; all of them without it.
    :param index: of the segment, if it has been read already; the batches of this slice will do.
    :raises JournalError: if the segment is missing, damaged, or of another schema or journal.
    """
    path = part.segment.path(ARROWS)
    if index is None:
        index = _looked_into(part.segment, read_index)
    try:
        file = pa.memory_map(path)
    except FileNotFoundError:
        _gone(part.segment)
    with file:
        _check_header(path, file, index, part.journal_id)
        next_seq = part.start_seq
        for batch in index.batches:
            if batch.next_seq <= part.start_seq or batch.first_seq >= part.end_seq:
                continue
            if batch.first_seq > next_seq:
                break
            next_seq = batch.next_seq
            if part.wants(batch):
                rows = decode(_bytes_of(path, file, batch), part.journal_id, columns)
                start = max(part.start_seq - batch.first_seq, 0)
                yield rows.slice(start, min(part.end_seq, batch.next_seq) - batch.first_seq - start)
    if next_seq < part.end_seq:
        raise JournalError(f"{path}: row {next_seq} is missing in it: restore it from a copy")


def _check_header(path: str, file: pa.MemoryMappedFile, index: Index, journal_id: str) -> None:
    if not index.header:
        return
    try:
        told = read_header(_bytes_of(path, file, index.header))
    except pa.ArrowInvalid as e:
        raise JournalError(f"{path}: it does not begin with an Arrow schema ({e}): restore it from a copy") from None
    wanted = schema(journal_id)
    if not told.equals(wanted, check_metadata=True):
        theirs, ours = (s.to_string(show_schema_metadata=True) for s in (told, wanted))
        raise JournalError(f"{path}: a segment of another schema or journal: it has {theirs!r}, not {ours!r}")


def _bytes_of(path: str, file: pa.MemoryMappedFile, record: Record) -> pa.Buffer:
    if record.end > file.size():
        raise JournalError(f"{path}: it ends at byte {file.size()}, before its rows do: restore it from a copy")
    file.seek(record.start)
    data = file.read_buffer(record.end - record.start)
    if zlib.crc32(data) != record.crc:
        raise JournalError(
            f"{path}: the bytes {record.start} to {record.end} are damaged "
            f"({record.rows} rows from {record.first_seq}): restore it from a copy"
        )
    return data
