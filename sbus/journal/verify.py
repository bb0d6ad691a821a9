"""Whether a journal is what it should be: every checksum, row number, time and summary."""

from __future__ import annotations

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
from sbus.journal.index import Index, read_index
from sbus.journal.layout import ARROWS, INDEX, Segment, identity, list_segments
from sbus.journal.reader import Slice, read
from sbus.journal.schema import END, Kind
from sbus.journal.summary import Summary, key_range, read_summary

__all__ = ["Verified", "verify"]


class Verified(NamedTuple):
    """What was found in a segment.

    :ivar segment: which one.
    :ivar rows: how many of its rows could be read.
    :ivar problems: what is wrong, a sentence each.
    """

    segment: Segment
    rows: int
    problems: list[str]


def verify(directory: str | os.PathLike[str], tell: Callable[[str], object]) -> Iterator[Verified]:
    """Check a journal, segment by segment; somebody may write it meanwhile.

    :param tell: is told, in a sentence each, what is wrong with the journal as a whole.
    :raises JournalError: if there is no journal.
    """
    journal_id = identity(os.fspath(directory))
    try:
        consumers(directory)
    except JournalError as e:
        tell(str(e))
    segments = list_segments(os.fspath(directory))
    next_seq, time = None, 0
    for segment, after in zip_longest(segments, segments[1:]):
        if next_seq is not None and segment.first_seq != next_seq:
            tell(f"{segment.path()}: it begins with row {segment.first_seq}, but row {next_seq} should follow")
        if segment.first_time < time:
            tell(f"{segment.path()}: it begins before the end of the segment before it")
        # One without rows, which its writer could not remove, is in nobody's way: the next begins with the same row.
        if not segment.closed and after and after.first_seq != segment.first_seq:
            tell(f"{segment.path()}: it is not closed, but another one follows: open the journal for writing once")
        check = _Check(segment, journal_id)
        try:
            check()
        except FileNotFoundError as e:
            # Retention deletes the .arrows first: while that is there, it was not retention.
            if os.path.exists(segment.path()):
                tell(f"{e.filename}: it is missing: restore it from a copy")
            next_seq = None
            continue
        except JournalError as e:
            check.problems.append(str(e))
        yield Verified(segment, check.rows, check.problems)
        next_seq, time = check.next_seq, check.last_time


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
        if index.sync is None:
            return
        self.next_seq = index.sync.next_seq
        keys, least, greatest = key_range(self._keys(index))
        if self._segment.closed:
            self._check_end(index.sync.end)
            summary = read_summary(self._segment)
            found = Summary(
                first_seq=self._segment.first_seq,
                rows=self.rows,
                min_time=self._segment.first_time,
                max_time=self.last_time,
                size=index.sync.end + len(END),
                kinds=dict(self._kinds),
                keys=keys,
                min_key=least,
                max_key=greatest,
            )
            for name, told, true in zip(Summary._fields, summary, found, strict=True):
                if told != true:
                    self._wrong(".json", f"its {name} is {told!r}, but should be {true!r}")

    def _wrong(self, suffix: str, what: str) -> None:
        self.problems.append(f"{self._segment.path(suffix)}: {what}")

    def _keys(self, index: Index) -> Iterator[pa.Array]:
        """Read all rows; gives the keys of messages, batch by batch."""
        seq = self._segment.first_seq
        for record in index.batches:
            if record.first_seq != seq:
                self._wrong(INDEX, f"a batch begins with row {record.first_seq}, but row {seq} should follow")
            seq = record.next_seq
            try:
                part = Slice(self._segment, self._journal_id, record.first_seq, record.next_seq)
                (batch,) = read(part, index=index._replace(batches=[record]))
            except JournalError as e:
                if not os.path.exists(self._segment.path()):
                    raise FileNotFoundError(ENOENT, os.strerror(ENOENT), self._segment.path()) from None
                self.problems.append(str(e))
                continue
            self.rows += batch.num_rows
            self._kinds[record.kind] += batch.num_rows
            times = batch.column("time").cast(pa.int64())
            if (times[0].as_py(), times[-1].as_py()) != (record.min_time, record.max_time):
                self._wrong(INDEX, f"the times of the rows from {record.first_seq} are not those of its record")
            if record.min_time < self.last_time or _falls(times):
                self._wrong(ARROWS, f"the time goes back in the rows from {record.first_seq}")
            self.last_time = record.max_time
            if not batch.column("seq").equals(pa.arange(record.first_seq, record.next_seq)):
                self._wrong(ARROWS, f"the rows from {record.first_seq} are not numbered one after the other")
            if batch.column("kind").unique().to_pylist() != [record.kind]:
                self._wrong(ARROWS, f"the rows from {record.first_seq} are not of the kind {record.kind}")
            if record.kind is Kind.MESSAGE:
                yield batch.column("key")

    def _check_end(self, end: int) -> None:
        with open(self._segment.path(), "rb") as file:
            file.seek(end)
            if file.read(len(END) + 1) != END:
                self._wrong(ARROWS, "it does not end with the mark of a closed segment, right behind its last batch")


def _falls(times: pa.Array) -> bool:
    return bool(pc.any(pc.less(times[1:], times[:-1])).as_py())
