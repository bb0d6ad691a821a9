"""The writing end of one segment: how batches are added, made safe, and what happens after a crash or a failed disk.

There is one way back from every accident, `SegmentWriter.reopen`: what was synced stays as it is; of what came after
it, the batches whose record and bytes agree are written once more where they are (a kernel that failed to write a page
takes it for written ever after), and the rest is cut off.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from sbus.journal import disk
from sbus.journal.index import BATCH, HEAD, RECORD, SYNC, Record, parse
from sbus.journal.layout import ARROWS, CLOSED, INDEX, Segment
from sbus.journal.schema import END, Kind, decode, header
from sbus.journal.summary import Summary, key_range

__all__ = ["SegmentWriter", "remove_segment"]


class SegmentWriter:
    """Appends to one segment; `create` or `reopen` makes one.

    :ivar segment: which one.
    :ivar size: bytes that its ``.arrows`` holds.
    :ivar next_seq: the seq that its next row gets.
    :ivar last: the record of what was added last.
    :ivar suspect: whether it is in doubt what the files hold: then it must be reopened.
    :ivar torn: bytes that `reopen` has cut off.
    :ivar damaged: whether `reopen` has found that something is missing of what was synced once.
    """

    def __init__(self, segment: Segment, journal_id: str, mode: int, arrows: int, index: int) -> None:
        self.segment = segment
        self.size = 0
        self.next_seq = segment.first_seq
        self.last: Record | None = None
        self.suspect = False
        self.torn = 0
        self.damaged = False
        self._journal_id = journal_id
        self._mode = mode
        self._arrows = arrows
        self._index = index
        self._index_size = 0
        self._synced_seq = segment.first_seq
        self._is_named = False  # whether its names are known to be on the disk

    @classmethod
    def create(cls, segment: Segment, journal_id: str, mode: int) -> SegmentWriter:
        """Begin a segment.

        :raises OSError: then it is not there.
        """
        remove_segment(segment)  # what is left of one that could not be begun nor removed
        index = disk.create(segment.path(INDEX), mode)
        try:
            arrows = disk.create(segment.path(ARROWS), mode)
        except OSError:
            os.close(index)
            raise
        writer = cls(segment, journal_id, mode, arrows, index)
        try:
            writer._add(HEAD, Kind.MESSAGE, 0, header(journal_id), segment.first_time, segment.first_time)
        except OSError:
            writer._discard()
            raise
        return writer

    @classmethod
    def reopen(cls, segment: Segment, journal_id: str, mode: int) -> SegmentWriter:
        """Take up a segment that was not closed, or that is suspect.

        :raises OSError: if that cannot be done now; it may be tried again.
        """
        arrows = os.open(segment.path(ARROWS), os.O_RDWR | os.O_CLOEXEC)
        try:
            index = os.open(segment.path(INDEX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        except OSError:
            os.close(arrows)
            raise
        writer = cls(segment, journal_id, mode, arrows, index)
        try:
            writer._recover()
        except OSError:
            writer.abandon()
            raise
        return writer

    def _recover(self) -> None:
        records = self._read_index()
        safe = max((i + 1 for i, record in enumerate(records) if record and record.type == SYNC), default=0)
        size = os.fstat(self._arrows).st_size
        if safe and (sync := records[safe - 1]):
            self._index_size = safe * RECORD
            self._took(sync)
            # The last sync record itself was not synced, and a failed one may have dropped it.
            disk.write(self._index, os.pread(self._index, self._index_size, 0), 0)
            self._synced_seq = sync.next_seq
            # What was promised is never cut, nor made up for: who reads it is told what is the matter.
            self.damaged = size < self.size or None in records[:safe]
        for record in records[safe:]:
            if not record or (record.start, record.first_seq) != (self.size, self.next_seq):
                break
            body = self._body(record)
            if body is None:
                break
            # The very same bytes, so that a failure in the middle spoils nothing: the next attempt finds them too.
            disk.write(self._index, record.pack(), self._index_size)
            disk.write(self._arrows, body, self.size)
            self._index_size += RECORD
            self._took(record)
        disk.truncate(self._index, self._index_size)
        if size > self.size:
            self.torn = size - self.size if os.pread(self._arrows, len(END) + 1, self.size) != END else 0
            disk.truncate(self._arrows, self.size)

    def add(self, kind: Kind, rows: int, data: pa.Buffer, min_time: int, max_time: int) -> None:
        """Add a batch.

        :param data: as `sbus.journal.schema.encode` makes it, from `next_seq` on.
        :raises OSError: if it cannot be written; the segment is then as it was, or suspect.
        """
        self._add(BATCH, kind, rows, data, min_time, max_time)

    def _add(self, type_: bytes, kind: Kind, rows: int, data: pa.Buffer | bytes, min_time: int, max_time: int) -> None:
        end = self.size + len(data)
        record = Record(type_, kind, self.size, end, self.next_seq, rows, zlib.crc32(data), min_time, max_time)
        self._append(record, data)

    def _append(self, record: Record, data: pa.Buffer | bytes) -> None:
        try:
            disk.write(self._index, record.pack(), self._index_size)
            disk.write(self._arrows, data, self.size)
        except BaseException:
            try:
                disk.truncate(self._index, self._index_size)
                disk.truncate(self._arrows, self.size)
            except OSError:
                self.suspect = True
            raise
        self._index_size += RECORD
        self._took(record)

    def _took(self, record: Record) -> None:
        self.size = record.end
        self.next_seq = record.next_seq
        self.last = record

    def sync(self) -> None:
        """Get everything onto the disk, and then tell readers of it.

        :raises OSError: if it is not known to be there; the segment may then be suspect.
        """
        if self._synced_seq < self.next_seq:
            self._flush()
            self._tell()

    def _flush(self) -> None:
        try:
            disk.sync(self._arrows)
            disk.sync(self._index)
            if not self._is_named:
                disk.sync_directory(self.segment.directory)
                self._is_named = True
        except OSError:
            self.suspect = True
            raise

    def _tell(self) -> None:
        assert self.last is not None
        kind, time = self.last.kind, self.last.max_time
        self._append(Record(SYNC, kind, self.size, self.size, self.next_seq, 0, 0, time, time), b"")
        self._synced_seq = self.next_seq

    def finish(self) -> None:
        """Close the segment for ever, and let go of it; one without rows is removed.

        :raises OSError: if that cannot be done; the segment is then suspect.
        """
        if self.next_seq == self.segment.first_seq:
            self._discard()
            return
        self.suspect = True
        try:
            if os.fstat(self._arrows).st_size >= self.size:
                disk.write(self._arrows, END, self.size)
            self._flush()
            if self._synced_seq < self.next_seq:
                self._tell()
                disk.sync(self._index)
            disk.replace(self.segment.path(CLOSED), self._summary().pack(), self._mode)
        finally:
            self.abandon()
        self.suspect = False

    def abandon(self) -> None:
        """Let go of the files as they are."""
        for fd in (self._arrows, self._index):
            if fd >= 0:
                os.close(fd)
        self._arrows = self._index = -1

    def _discard(self) -> None:
        self.abandon()
        try:
            remove_segment(self.segment)
        except OSError:
            pass  # it has no rows, so nobody sees it, and the next who opens the journal removes it

    def _summary(self) -> Summary:
        batches = [record for record in self._read_index() if record and record.type == BATCH]
        kinds: Counter[str] = Counter()
        for batch in batches:
            kinds[batch.kind] += batch.rows
        keys, least, greatest = key_range(self._keys(batches))
        assert self.last is not None
        return Summary(
            first_seq=self.segment.first_seq,
            rows=self.next_seq - self.segment.first_seq,
            min_time=self.segment.first_time,
            max_time=self.last.max_time,
            size=os.fstat(self._arrows).st_size,
            kinds=dict(kinds),
            keys=keys,
            min_key=least,
            max_key=greatest,
        )

    def _keys(self, batches: list[Record]) -> Iterator[pa.Array | None]:
        if sum(batch.rows for batch in batches) != self.next_seq - self.segment.first_seq:
            yield None
        for batch in batches:
            if batch.kind is Kind.MESSAGE:
                body = self._body(batch)
                yield body and decode(pa.py_buffer(body), self._journal_id, ["key"]).column(0)

    def _body(self, record: Record) -> bytes | None:
        """What a record stands for, or None if that is not there, or is something else."""
        body = os.pread(self._arrows, record.end - record.start, record.start)
        return body if len(body) == record.end - record.start and zlib.crc32(body) == record.crc else None

    def _read_index(self) -> list[Record | None]:
        return parse(os.pread(self._index, os.fstat(self._index).st_size, 0))


def remove_segment(segment: Segment) -> None:
    """Remove the files of a segment, first the one that it is known by."""
    for suffix in (ARROWS, INDEX, CLOSED):
        disk.remove(segment.path(suffix))
