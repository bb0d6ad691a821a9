"""The writer of one segment: appends, syncs, closes, and repairs it.

A segment is two files that grow together (`sbus.journal.index` describes the second). What `SegmentWriter` guarantees:

* A batch is visible to readers only after `SegmentWriter.sync`: first both files are synced, and only then is the sync
  record written.
* No power cut takes the index and leaves bytes of rows: both names are synced before anything is written.
* An `OSError` leaves the segment as it was before the call, or marks it `SegmentWriter.suspect`. A suspect segment
  takes no more batches: its writer closes the files and calls `SegmentWriter.reopen`.
* Synced bytes are never changed and never cut off, even if they are damaged.
* An ``.arrows`` that has bytes, but no index or one without its first record, is damaged: its name reaches the disk
  after that of the index, and its bytes after that record. When files are removed, the ``.arrows`` goes first.

There is one way back from every accident, `SegmentWriter.reopen`. It serves for a segment that a crash left open, and
for one whose disk has failed. Nothing that it keeps is safe before the next sync; `SegmentWriter.finish` makes it so.
"""

from __future__ import annotations

import errno
import os
import resource
import zlib
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from sbus import ownership
from sbus.errors import JournalError
from sbus.journal import disk
from sbus.journal.index import BATCH, HEAD, RECORD_SIZE, SYNC, Record, last_sync, scan
from sbus.journal.layout import ARROWS, INDEX, SUMMARY, Segment, list_segments, read_blocks
from sbus.journal.schema import END_OF_STREAM, MESSAGES, Format, Kind, decode, header, read_header
from sbus.journal.summary import Summary, key_range

__all__ = ["SegmentWriter", "remove_leftovers", "remove_segment"]


class SegmentWriter:
    """Appends to one segment; made by `create` or `reopen`.

    :ivar segment: the segment.
    :ivar size: the length of the ``.arrows`` file in bytes, as far as it is in use.
    :ivar next_seq: the number that the next row gets.
    :ivar last: the record that was added last.
    :ivar suspect: whether the content of the files is in doubt. The segment must then be reopened.
    :ivar torn: the bytes of incomplete batches that `reopen` cut off.
    :ivar damaged: whether `reopen` found that synced bytes are missing or damaged.
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

    @classmethod
    def create(cls, segment: Segment, journal_id: str, mode: int) -> SegmentWriter:
        """Begin a segment.

        :param mode: the permissions of the files.
        :raises OSError: if that fails; there is then no such segment.
        """
        remove_segment(segment)  # an earlier attempt may have failed to begin it, and then to remove it
        index = disk.create(segment.path(INDEX), mode)
        try:
            disk.sync_directory(segment.directory)  # so that no power cut leaves an .arrows without its index
            arrows = disk.create(segment.path(ARROWS), mode)
        except OSError:
            os.close(index)
            raise
        writer = cls(segment, journal_id, mode, arrows, index)
        try:
            disk.sync_directory(segment.directory)
            writer._add(HEAD, Kind.MESSAGE, 0, header(journal_id), segment.first_time, segment.first_time)
        except OSError:
            writer._discard()
            raise
        return writer

    @classmethod
    def reopen(cls, segment: Segment, journal_id: str, mode: int) -> SegmentWriter:
        """Open and repair a segment that was not closed, or that is suspect.

        1. Everything up to the last sync record stays. Its records are written again, byte for byte, because the last
           sync record itself was not synced.
        2. Of what follows, each batch stays whose record and bytes agree. Both are written again in place. After a
           failed fsync(2), the kernel may mark pages as clean that it could not write, and another sync would report
           success without writing them. Writing the same bytes makes the pages dirty again; and if this attempt fails
           in the middle, the next one finds the same bytes.
        3. The rest is cut off, but for the end-of-stream marker of a close that failed later: the summary may be there,
           and a segment with a summary is not opened again.

        :param mode: the permissions of files that have to be created.
        :raises FileNotFoundError: if it has rows, but no index or one without its first record; nothing is changed.
        :raises OSError: if that fails; it may be tried again.
        """
        arrows = disk.open_existing(segment.path(ARROWS))
        try:
            # Rows without an index have lost it: `_recover` would cut all of them off.
            if os.fstat(arrows).st_size:
                index = disk.open_existing(segment.path(INDEX))
            else:
                index = ownership.open_or_create(segment.path(INDEX), os.O_RDWR, mode)
        except OSError:
            os.close(arrows)
            raise
        writer = cls(segment, journal_id, mode, arrows, index)
        try:
            writer._recover()
        except OSError:
            writer.close_files()
            raise
        return writer

    def _recover(self) -> None:
        size = os.fstat(self._arrows).st_size
        sync: Record | None = None
        unsynced: list[Record | None] = []
        is_whole = True  # up to the sync record
        for at, record in scan(self._index):
            unsynced.append(record)
            if record and record.type == SYNC:
                sync, is_whole, self._index_size = record, is_whole and None not in unsynced, at + RECORD_SIZE
                unsynced.clear()
        if sync:
            self._advance_to(sync)
            # The last sync record itself was not synced, and a sync that failed may have dropped its page.
            for at, data in read_blocks(self._index, 0, self._index_size):
                disk.write(self._index, data, at)
            self._synced_seq = sync.next_seq
            # What was synced is never cut off nor replaced: reading the rows in question reports the damage.
            self.damaged = size < self.size or not is_whole
        elif size and not (unsynced and unsynced[0] and unsynced[0].type == HEAD):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.segment.path(INDEX))
        for record in unsynced:
            if not record or (record.start, record.first_seq) != (self.size, self.next_seq):
                break
            body = self._read_body(record)
            if body is None:
                break
            # The same bytes again: see step 2 of the module's docstring.
            disk.write(self._index, record.pack(), self._index_size)
            disk.write(self._arrows, body, self.size)
            self._index_size += RECORD_SIZE
            self._advance_to(record)
        if self._index_size:  # otherwise nothing is kept, and `finish` removes both files, the index last
            disk.truncate(self._index, self._index_size)
        if size > self.size and os.pread(self._arrows, len(END_OF_STREAM) + 1, self.size) != END_OF_STREAM:
            self.torn = size - self.size
            disk.truncate(self._arrows, self.size)

    def add(self, kind: Kind, rows: int, data: pa.Buffer, min_time: int, max_time: int) -> None:
        """Append a batch.

        :param kind: the kind of all its rows.
        :param rows: the number of rows.
        :param data: the batch, encoded by `sbus.journal.schema.encode` with `next_seq` as the first number.
        :param min_time: the time of the first row, in µs since the epoch.
        :param max_time: the time of the last row.
        :raises OSError: if the batch cannot be written; the segment is then as it was, or suspect.
        """
        self._add(BATCH, kind, rows, data, min_time, max_time)

    def _add(self, type_: bytes, kind: Kind, rows: int, data: pa.Buffer | bytes, min_time: int, max_time: int) -> None:
        end = self.size + len(data)
        longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if longest != resource.RLIM_INFINITY and end + len(END_OF_STREAM) > longest:
            raise disk.too_long()  # otherwise there would be no room for the end-of-stream marker
        record = Record(type_, kind, self.size, end, self.next_seq, rows, zlib.crc32(data), min_time, max_time)
        self._append(record, data)

    def _append(self, record: Record, data: pa.Buffer | bytes) -> None:
        try:
            disk.write(self._index, record.pack(), self._index_size)
            if record.type == HEAD:
                disk.sync(self._index)  # so that a power cut never leaves rows with an empty index
            disk.write(self._arrows, data, self.size)
        except BaseException:
            try:
                disk.truncate(self._arrows, self.size)
                disk.truncate(self._index, self._index_size)
            except OSError:
                self.suspect = True
            raise
        self._index_size += RECORD_SIZE
        self._advance_to(record)

    def _advance_to(self, record: Record) -> None:
        self.size = record.end
        self.next_seq = record.next_seq
        self.last = record

    def sync(self) -> None:
        """Sync everything that was appended, and then make it visible to readers.

        :raises OSError: if that fails; the state of the disk is unknown, and the segment may be suspect.
        """
        if self._synced_seq < self.next_seq:
            self._flush()
            self._append_sync_record()

    def _flush(self) -> None:
        try:
            disk.sync(self._arrows)
            disk.sync(self._index)
        except OSError:
            self.suspect = True
            raise

    def _append_sync_record(self) -> None:
        assert self.last is not None
        self._append(self.last.sync(), b"")
        self._synced_seq = self.next_seq

    def finish(self) -> None:
        """Close the segment: sync it, write its summary, close its files.

        A segment without rows is removed.

        :raises OSError: if that fails; the segment is then suspect.
        """
        if self.next_seq == self.segment.first_seq:
            self._discard()
            return
        self.suspect = True
        try:
            if os.fstat(self._arrows).st_size >= self.size:
                disk.write(self._arrows, END_OF_STREAM, self.size)
            self._flush()
            if self._synced_seq < self.next_seq:
                self._append_sync_record()
                disk.sync(self._index)
            disk.replace(self.segment.path(SUMMARY), self._summary().pack(), self._mode)
        finally:
            self.close_files()
        self.suspect = False

    def close_files(self) -> None:
        """Close the descriptors, and leave the files as they are."""
        for fd in (self._arrows, self._index):
            if fd >= 0:
                os.close(fd)
        self._arrows = self._index = -1

    def _discard(self) -> None:
        self.close_files()
        try:
            remove_segment(self.segment)
        except OSError:
            pass  # without rows it is invisible to readers, and the next writer removes it

    def _summary(self) -> Summary:
        records = [record for _, record in scan(self._index) if record]
        batches = [record for record in records if record.type == BATCH]
        kinds: Counter[str] = Counter()
        for batch in batches:
            kinds[batch.kind] += batch.rows
        keys, least, greatest = key_range(self._keys(batches, self._read_format(records)))
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

    def _read_format(self, records: list[Record]) -> Format | None:
        """Return the format of the segment; None if the header is damaged.

        A segment that was reopened may have an older format.
        """
        if not records or records[0].type != HEAD or (body := self._read_body(records[0])) is None:
            return None
        try:
            return read_header(body, self.segment.path())[0]
        except JournalError:
            return None

    def _keys(self, batches: list[Record], format_: Format | None) -> Iterator[pa.Array | None]:
        if format_ is None or sum(batch.rows for batch in batches) != self.next_seq - self.segment.first_seq:
            yield None
            return
        for batch in batches:
            if batch.kind in MESSAGES:
                body = self._read_body(batch)
                try:
                    yield body and decode(pa.py_buffer(body), self._journal_id, ["key"], format_).column(0)
                except ValueError:
                    yield None

    def _read_body(self, record: Record) -> bytes | None:
        """Return the bytes that a record stands for; None if they are missing or differ."""
        body = os.pread(self._arrows, record.end - record.start, record.start)
        return body if len(body) == record.end - record.start and zlib.crc32(body) == record.crc else None


def remove_segment(segment: Segment) -> None:
    """Remove the files of a segment, the ``.arrows`` first: by it a segment is listed."""
    if os.path.lexists(segment.path(ARROWS)):
        disk.remove(segment.path(ARROWS))
        disk.sync_directory(segment.directory)  # likewise
    for suffix in (INDEX, SUMMARY):
        disk.remove(segment.path(suffix))


def remove_leftovers(directory: str) -> Segment | None:
    """Remove the remains of an interrupted deletion or creation.

    These are temporary files, and an index or a summary without an ``.arrows``.

    :returns: the newest segment, if it has lost its ``.arrows``. No deletion does that to the newest segment, so its
        other files stay until another segment follows.
    """
    names = set(os.listdir(directory))
    newest = max((segment.first_seq for segment in list_segments(directory)), default=-1)
    lost: Segment | None = None
    for name in sorted(names):
        base, suffix = os.path.splitext(name)
        part = None
        if suffix in (INDEX, SUMMARY) and base + ARROWS not in names:
            part = Segment.named(directory, base, closed=base + SUMMARY in names)
        if part and part.first_seq > newest and (part.closed or last_sync(part)):
            lost = part
        elif part or suffix == ".tmp":
            disk.remove(os.path.join(directory, name))
    return lost
