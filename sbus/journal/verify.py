"""Verification: checks every checksum, row number, time and summary of a journal.

It reads everything that readers may see, takes no locks, and may run beside the writer and beside retention. What
either of them does meanwhile is not reported as a problem.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from errno import ENOENT
from itertools import zip_longest
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError
from sbus.journal.consumers import consumers
from sbus.journal.index import REPAIR, Index, read_index
from sbus.journal.layout import ARROWS, INDEX, SUMMARY, Segment, list_segments, open_plain, read_identity
from sbus.journal.reader import Slice, read
from sbus.journal.schema import END_OF_STREAM, MESSAGES, Kind
from sbus.journal.summary import Summary, key_range, may_list, read_summary

__all__ = ["Verified", "problems_of", "verify"]


class Verified(NamedTuple):
    """The result for one segment.

    :ivar segment: the segment.
    :ivar rows: the number of rows that could be read.
    :ivar problems: the problems, a sentence each.
    """

    segment: Segment
    rows: int
    problems: list[str]


def verify(directory: str | os.PathLike[str], report: Callable[[str], object]) -> Iterator[Verified]:
    """Check a journal, segment by segment, and yield the result for each.

    :param report: called with a sentence about each problem of the journal as a whole.
    :raises JournalError: if there is no journal.
    """
    journal_id = read_identity(os.fspath(directory)).id
    try:
        consumers(directory)
    except JournalError as e:
        report(str(e))
    segments = list_segments(os.fspath(directory))
    next_seq, time, epoch = None, 0, 0
    for segment, after in zip_longest(segments, segments[1:]):
        if next_seq is not None and segment.first_seq != next_seq:
            report(f"{segment.path()}: it begins with row {segment.first_seq}, but row {next_seq} should follow")
        if segment.epoch == epoch and segment.first_time < time:
            report(f"{segment.path()}: it begins before the end of the segment before it")
        check = _Check(segment, journal_id)
        try:
            check()
        except FileNotFoundError as e:
            # Retention removes the .arrows first. If it is there, something else removed the other file.
            if os.path.exists(segment.path()):
                report(f"{e.filename}: it is missing: {REPAIR}")
            next_seq = None
            continue
        except JournalError as e:
            check.problems.append(str(e))
        # A segment without rows, which its writer failed to remove, does no harm: the next begins with the same row.
        if not segment.closed and not check.problems and after and after.first_seq != segment.first_seq:
            report(
                f"{segment.path()}: it is not closed, but another one follows: start a recorder on this journal once"
            )
        yield Verified(segment, check.rows, check.problems)
        next_seq, time, epoch = check.next_seq, check.last_time, segment.epoch


def problems_of(segment: Segment, journal_id: str) -> list[str]:
    """Return the problems of one segment, a sentence each."""
    check = _Check(segment, journal_id)
    try:
        check()
    except (FileNotFoundError, JournalError) as e:
        check.problems.append(str(e))
    return check.problems


class _Check:
    """Checks one segment."""

    def __init__(self, segment: Segment, journal_id: str) -> None:
        self.problems: list[str] = []
        self.rows = 0
        self.next_seq: int | None = None
        self.last_time = segment.first_time
        self._segment = segment
        self._journal_id = journal_id
        self._kinds: Counter[str] = Counter()

    def __call__(self) -> None:
        index = read_index(self._segment)
        last = index.last
        if last is None:
            return
        self.next_seq = last.next_seq
        keys, least, greatest = key_range(self._keys(index))
        if self._segment.closed:
            self._check_end(last.end)
            summary = read_summary(self._segment)
            found = Summary(
                first_seq=self._segment.first_seq,
                rows=self.rows,
                min_time=self._segment.first_time,
                max_time=self.last_time,
                size=last.end + len(END_OF_STREAM),
                kinds=dict(self._kinds),
                keys=keys,
                min_key=least,
                max_key=greatest,
            )
            listed = summary.keys
            if listed is not None and may_list(listed, math.inf) and not may_list(listed):
                summary = summary._replace(keys=keys)  # an earlier release listed long keys, however many bytes
            for name, stated, true in zip(Summary._fields, summary, found, strict=True):
                if stated != true:
                    self._problem(SUMMARY, f"its {name} is {stated!r:.200}, but should be {true!r:.200}")

    def _problem(self, suffix: str, what: str) -> None:
        self.problems.append(f"{self._segment.path(suffix)}: {what}")

    def _keys(self, index: Index) -> Iterator[pa.Array]:
        """Check all rows; yield the keys of the messages, batch by batch."""
        seq = self._segment.first_seq
        for record in index.batches:
            if record.first_seq != seq:
                self._problem(INDEX, f"a batch begins with row {record.first_seq}, but row {seq} should follow")
            seq = record.next_seq
            if record.kind is Kind.DAMAGED:
                self.rows += record.rows
                self._kinds[record.kind.value] += record.rows
                self.last_time = max(self.last_time, record.max_time)
                continue
            try:
                part = Slice(self._segment, self._journal_id, record.first_seq, record.next_seq)
                (batch,) = read(part, index=index._replace(batches=[record]))
            except JournalError as e:
                if not os.path.exists(self._segment.path()):
                    raise FileNotFoundError(ENOENT, os.strerror(ENOENT), self._segment.path()) from None
                self.problems.append(str(e))
                continue
            self.rows += batch.num_rows
            self._kinds[record.kind.value] += batch.num_rows
            times = batch.column("time").cast(pa.int64())
            if (times[0].as_py(), times[-1].as_py()) != (record.min_time, record.max_time):
                self._problem(INDEX, f"the times of the rows from {record.first_seq} are not those of its record")
            if record.min_time < self.last_time or _falls(times):
                self._problem(ARROWS, f"the time goes back in the rows from {record.first_seq}")
            self.last_time = record.max_time
            if batch.column("kind").unique().to_pylist() != [record.kind]:
                self._problem(ARROWS, f"the rows from {record.first_seq} are not of the kind {record.kind}")
            if record.kind in MESSAGES:
                yield batch.column("key")

    def _check_end(self, end: int) -> None:
        with open_plain(self._segment.path()) as file:
            file.seek(end)
            if file.read(len(END_OF_STREAM) + 1) != END_OF_STREAM:
                self._problem(ARROWS, "it does not end with the end-of-stream marker, right behind the last batch")


def _falls(times: pa.Array) -> bool:
    return bool(pc.any(pc.less(times[1:], times[:-1])).as_py())
