"""The reader of a journal: finds rows, and returns them as Arrow batches.

Reading has two steps. `JournalReader.plan` chooses slices from names, and if asked from summaries; a `Slice` may be
pickled and sent to another process. `read` then yields the Arrow batches of the segment of a slice, as they are in the
file.

Readers take no locks and change nothing. They may run beside the writer and beside retention, in any process that may
read the files. Invariants:

* A reader sees whole batches up to the last sync, and no row that could still be taken back. So an offset that a reader
  has handed out stays valid. There is one exception in the other direction: after a power cut `JournalReader.end` may
  be less than it was, until the recorder opens the journal again; the rows are there, but the record that made them
  visible is lost.
* Only the newest segment can be open. Everything in the segments before it was synced before it was begun.
* Every batch is checked against its CRC-32 before its rows are handed out. A damaged batch is an error that names the
  rows, or, for a reader that asks for it, one row of the kind ``damaged`` in place of those rows.
* A segment that retention deletes in the meantime is an error that says so, unless it was opened already.
"""

from __future__ import annotations

import bisect
import glob
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

import pyarrow as pa

from sbus.errors import JournalError, JournalMissing
from sbus.journal.index import Index, Record, check_end, ends_with_sync, last_sync, read_index
from sbus.journal.layout import Segment, is_journal, list_segments, read_identity
from sbus.journal.salvage import salvage_index
from sbus.journal.slices import Slice, load, raise_missing, read
from sbus.journal.summary import Summary, read_summary

__all__ = ["JournalReader", "Slice", "find_journals", "read"]

_MTIME_TICK = 1_000_000_000
"""In ns: more than any file system rounds the times of its files by."""


def find_journals(patterns: Iterable[str]) -> list[str]:
    """Find the journals that paths and globs name.

    :returns: the real paths of their directories, sorted, each once.
    :raises JournalMissing: if a path is no journal, or a glob finds none; a damaged one is found, too.
    """
    found: set[str] = set()
    for pattern in patterns:
        if glob.has_magic(pattern) and not is_journal(pattern):
            matches = [path for path in glob.glob(pattern) if is_journal(path)]
            if not matches:
                raise JournalMissing(f"{pattern}: no journal is found there")
        else:
            try:
                read_identity(pattern)
            except JournalMissing:
                raise
            except JournalError:
                pass  # it is damaged: those who open it say so
            matches = [pattern]
        found.update(map(os.path.realpath, matches))
    return sorted(found)


class JournalReader:
    """Finds rows in one journal.

    :param directory: the directory of the journal.
    :param skip_damaged: whether damage is no error: see `Slice.skip_damaged`.
    :ivar directory: its absolute path.
    :ivar id: the ID of the journal, 32 hexadecimal digits.
    :ivar host: the name of the machine that it was begun on; None if it does not say.
    """

    def __init__(self, directory: str | os.PathLike[str], *, skip_damaged: bool = False) -> None:
        """
        :raises JournalError: if there is no journal, or this package cannot read its format.
        """
        self.directory = os.path.abspath(directory)
        identity = read_identity(self.directory)
        self.id, self.host = identity.id, identity.host
        self._skip_damaged = skip_damaged
        self._listed: list[Segment] = []
        self._listed_at = -1  # the mtime of the directory when it was listed, in ns; -1: not to be trusted

    def segments(self) -> list[Segment]:
        """List the segments, the oldest first.

        A program that follows a journal asks for them again and again, so this lists the directory only when its mtime
        has changed. An mtime of the last second is not trusted: another change in the same tick would not show.
        """
        try:
            changed = os.stat(self.directory).st_mtime_ns
        except FileNotFoundError:
            changed = -1
        if changed < 0 or changed != self._listed_at:
            self._listed_at = changed if time.time_ns() - changed > _MTIME_TICK else -1
            self._listed = list_segments(self.directory)
        return self._listed

    def start(self) -> int:
        """Return the number of the first row that is still there."""
        segments = self.segments()
        return segments[0].first_seq if segments else 0

    def end(self) -> int:
        """Return the number after the last row that readers may see.

        Every row before it is there, or was deleted by retention.
        """
        return self._visible()[1]

    def is_older_than(self, seq: int) -> bool:
        """Return whether the journal is an older copy of one that somebody has read up to a row.

        :param seq: the number after that row.
        """
        segments, end = self._visible()
        if end >= seq or not segments:
            return end < seq
        try:
            # After a power cut there may be fewer rows to see, but more in the file, until a writer opens the journal.
            return ends_with_sync(segments[-1])
        except (JournalError, FileNotFoundError):
            return True  # without the index, nothing more can be found

    def _visible(self) -> tuple[list[Segment], int]:
        """Return the segments, and the number after the last row that readers may see."""
        segments = self.segments()
        while segments:
            newest = segments[-1]
            try:
                end = self._end_of(newest)
            except FileNotFoundError:  # retention keeps the newest segment, so there must be a newer one by now
                segments = self.segments()
                if segments and segments[-1] == newest:
                    raise_missing(newest)
            else:
                return segments, end
        return [], 0

    def _end_of(self, newest: Segment) -> int:
        """Return the number after the last visible row of the newest segment."""
        try:
            check_end(newest)
            last = last_sync(newest)
        except (JournalError, FileNotFoundError):
            if not self._skip_damaged:
                raise
            try:
                return read_summary(newest).last_seq + 1
            except (JournalError, FileNotFoundError):  # only a closed segment has a summary
                last = salvage_index(newest, self.id).last
        # If the newest segment has no sync record yet, everything before it is visible.
        return last.next_seq if last else newest.first_seq

    def _visible_from(self, start_seq: int) -> tuple[list[Segment], int]:
        """Return the same.

        :raises JournalError: if retention has deleted the row `start_seq`.
        """
        segments, end = self._visible()
        if segments and start_seq < segments[0].first_seq:
            raise JournalError(
                f"{self.directory}: was deleted by retention: rows {start_seq} to {segments[0].first_seq - 1}"
            )
        return segments, end

    def seq_at_time(self, moment: int) -> int:
        """Return the number of the first row at or after a time; else `end`.

        All rows before it are earlier. If the clock was set back, rows after it may be earlier too.

        :param moment: the time, in µs since the epoch.
        """
        segments, end = self._visible()
        for segment, following in zip_longest(segments, segments[1:]):
            if segment.first_time >= moment:
                return min(segment.first_seq, end)
            if not following or following.epoch != segment.epoch or following.first_time >= moment:
                for batch in self._index(segment).batches:
                    if batch.max_time >= moment:
                        return self._seq_in(segment, batch, moment)
        return end

    def _seq_in(self, segment: Segment, batch: Record, moment: int) -> int:
        if batch.min_time >= moment:
            return batch.first_seq
        rows = next(
            read(Slice(segment, self.id, batch.first_seq, batch.next_seq, skip_damaged=self._skip_damaged), ["time"])
        )
        return batch.first_seq + bisect.bisect_left(rows.column(0).cast(pa.int64()).to_pylist(), moment)

    def extent(self, latest: int) -> tuple[int | None, int | None, int]:
        """Return the least time, the greatest one that is not after `latest`, and the number of rows after it.

        A time is None if there is no such row. Of each epoch, whose times never fall, only the end is read.

        :param latest: in µs since the epoch, as the times are.
        """
        segments, end = self._visible()
        segments = [segment for segment in segments if segment.first_seq < end]
        last: int | None = None
        after = 0
        for _, epoch in itertools.groupby(segments, lambda segment: segment.epoch):
            batches = (batch for segment in reversed(list(epoch)) for batch in reversed(self._index(segment).batches))
            for batch in batches:
                if batch.min_time > latest:
                    after += batch.rows
                    continue
                times = [batch.max_time]
                if batch.max_time > latest:
                    [part] = self.plan(batch.first_seq, batch.next_seq)
                    times = [time for rows in read(part, ["time"]) for time in rows[0].cast(pa.int64()).to_pylist()]
                    after += sum(time > latest for time in times)
                last = max(time for time in (last, *times) if time is not None and time <= latest)
                break
        return min((segment.first_time for segment in segments), default=None), last, after

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
        """Return the slices that hold a range of rows, in order.

        There is at least one slice for each segment concerned.

        Without `wanted` and `split_bytes` this reads only names and the end of the newest index, whatever the size of
        the journal.

        :param start_seq: the number of the first row.
        :param end_seq: the number after the last row; at most `end`.
        :param min_time: earlier rows are not needed, but may be included; in µs since the epoch.
        :param max_time: later rows are not needed, but may be included.
        :param kinds: rows of other kinds are left out; None: all kinds.
        :param wanted: returns, from the summary of a closed segment, whether rows of that segment may be needed.
        :param split_bytes: the size at which a segment is split into several slices, in bytes.
        :raises JournalError: if retention has deleted some of the rows, or readers may not see all of them yet.
        """
        if start_seq >= end_seq:
            return []
        segments, end = self._visible_from(start_seq)
        if end_seq > end:
            raise JournalError(f"{self.directory}: row {end_seq - 1} is not there yet: the last one is {end - 1}")
        only = None if kinds is None else frozenset(kinds)
        whole = Slice(segments[0], self.id, start_seq, end_seq, min_time, max_time, only, self._skip_damaged, self.host)
        slices: list[Slice] = []
        first = bisect.bisect_right(segments, start_seq, key=_first_seq) - 1
        behind = bisect.bisect_left(segments, end_seq, key=_first_seq)
        for segment, following in zip(segments[first:behind], [*segments[first + 1 :], None], strict=False):
            ends = following.first_seq if following else end_seq
            if (
                ends > segment.first_seq
                and (max_time is None or segment.first_time <= max_time)
                and (
                    min_time is None
                    or not following
                    or following.epoch != segment.epoch
                    or following.first_time >= min_time
                )
                and not (wanted and segment.closed and not self._is_wanted(segment, wanted))
            ):
                part = replace(
                    whole,
                    segment=segment,
                    start_seq=max(start_seq, segment.first_seq),
                    end_seq=min(end_seq, ends),
                )
                slices += [part] if split_bytes is None else self._split(part, split_bytes)
        return slices

    def _index(self, segment: Segment) -> Index:
        if self._skip_damaged:
            return load(segment, lambda segment: salvage_index(segment, self.id))
        return load(segment, read_index)

    def _is_wanted(self, segment: Segment, wanted: Callable[[Summary], bool]) -> bool:
        try:
            return wanted(load(segment, read_summary))
        except JournalError:
            if not self._skip_damaged:
                raise
            return True

    def _split(self, part: Slice, size: int) -> Iterator[Slice]:
        start_seq, start = part.start_seq, None
        for batch in self._index(part.segment).batches:
            if not part.may_need(batch):
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
        """Return the number after the last row of a read of limited size.

        Such a read has one row at least.

        :param start_seq: the number of the first row.
        :param max_rows: the limit on rows; None: no limit.
        :param max_bytes: the limit on bytes, counted in whole batches; a batch that is longer is read alone. None: no
            limit.
        :raises JournalError: if retention has deleted the first row.
        """
        segments, end = self._visible_from(start_seq)
        if max_rows is not None:
            end = min(end, start_seq + max(max_rows, 1))
        if max_bytes is None:
            return end
        left = max_bytes
        first = bisect.bisect_right(segments, start_seq, key=_first_seq) - 1
        for segment in segments[max(first, 0) :]:
            for batch in self._index(segment).batches:
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
