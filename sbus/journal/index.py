"""The index of a segment: which batches are whole, and how far readers may read.

The index is a file of records of 64 bytes, each with its own checksum. 64 divides the size of a sector, so no record
lies in two of them. A record stands for the header of the segment (`HEAD`), for a batch of rows (`BATCH`), or for a
sync (`SYNC`). Invariants:

* The record of a batch is written before the batch. Bytes of ``.arrows`` without a record mean nothing.
* The record of the header is synced before ``.arrows`` gets its first byte. So an index without it, beside rows, is
  damaged.
* A sync record is written after everything before it, in both files, was synced. Readers read up to the last sync
  record and ignore the rest.
* Before the last sync record, every record is whole and continues where the record before it ended. If not, the file
  is damaged.
* The index of a closed segment ends with a sync record.

The last sync record itself is not synced until the next sync. A power cut can take it back, and readers then see fewer
rows until the writer opens the journal again; it finds the rows and adds the record once more.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import pyarrow as pa

from sbus.errors import JournalError
from sbus.journal.layout import BAD_DISK, INDEX, LATEST, Segment, open_plain, read_blocks
from sbus.journal.schema import KINDS, Kind

__all__ = [
    "BATCH",
    "HEAD",
    "RECORD_SIZE",
    "REPAIR",
    "SYNC",
    "Index",
    "Record",
    "check_end",
    "ends_with_sync",
    "is_headless",
    "last_sync",
    "open_rows",
    "parse_records",
    "read_index",
    "read_record",
    "scan",
    "unsynced_records",
]

_FORMAT = struct.Struct("<4sIQQQIIqqII")
RECORD_SIZE = _FORMAT.size
"""Bytes in a record."""

REPAIR = "restore it from a copy, or run 'sbus journal repair', which says what is lost"
"""The remedy for damage, as the end of an error."""

_CHECKED_AT_ONCE = 1 << 24
"""Bytes that are read to be checked. The bytes of a longer record are checked in such pieces before they take memory: a
small file with a hole can have a record of 8 GiB."""

_MOST_BYTES = 1 << 33
"""More bytes than a batch has: its keys and its payloads have less than 2 GiB each."""

_MOST = 1 << 63
"""More than any offset or number of a row."""
_DAMAGED = KINDS.index(Kind.DAMAGED)

HEAD, BATCH, SYNC = b"head", b"rows", b"sync"

_TAIL_BYTES = (
    256 * RECORD_SIZE
)  # the first read when looking for the last sync record; each further one is 4 times as long


class Record(NamedTuple):
    """A record, without its checksum.

    :ivar type: `HEAD`, `BATCH` or `SYNC`.
    :ivar kind: the kind of all rows of the batch; in a sync record, of the last row before it.
    :ivar start: the offset of the first byte in ``.arrows``; in a sync record the same as `end`.
    :ivar end: the offset after the last byte.
    :ivar first_seq: the number of the first row; in a sync record, of the first row that readers may not see.
    :ivar rows: the number of rows; 0 unless the record stands for a batch.
    :ivar crc: the CRC-32 of the bytes; 0 in a sync record.
    :ivar min_time: the time of the first row, in µs since the epoch.
    :ivar max_time: the time of the last row; in a sync record, of the last row before it.
    """

    type: bytes
    kind: Kind
    start: int
    end: int
    first_seq: int
    rows: int
    crc: int
    min_time: int
    max_time: int

    @property
    def next_seq(self) -> int:
        """The number of the row that follows."""
        return self.first_seq + self.rows

    def sync(self) -> Record:
        """Return the sync record that belongs after this one."""
        return Record(SYNC, self.kind, self.end, self.end, self.next_seq, 0, 0, self.max_time, self.max_time)

    def pack(self) -> bytes:
        """Return the bytes of the record, with the checksum."""
        kind, start, end, first_seq, rows, crc, min_time, max_time = self[1:]
        index = KINDS.index(kind)
        data = _FORMAT.pack(self.type, index, start, end, first_seq, rows, crc, min_time, max_time, 0, 0)
        return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def _unpack(data: bytes, at: int) -> Record | None:
    """Return the record at an offset, or None if its checksum is wrong or its numbers are impossible."""
    type_, kind, start, end, first_seq, rows, crc, min_time, max_time, _, stated = _FORMAT.unpack_from(data, at)
    if zlib.crc32(data[at : at + RECORD_SIZE - 4]) != stated or kind >= len(KINDS):
        return None
    # A row takes some bytes, and a reader takes the bytes of a batch into memory.
    if not (rows <= end - start <= _MOST_BYTES or (kind == _DAMAGED and start <= end)):
        return None
    if not (
        -LATEST <= min_time <= LATEST and -LATEST <= max_time <= LATEST and end < _MOST and first_seq + rows < _MOST
    ):
        return None
    return Record(type_, KINDS[kind], start, end, first_seq, rows, crc, min_time, max_time)


def parse_records(data: bytes) -> list[Record | None]:
    """Parse the content of an index.

    :returns: the records; None for a damaged one. An incomplete record at the end is left out.
    """
    return [_unpack(data, at) for at in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE)]


def scan(fd: int) -> Iterator[tuple[int, Record | None]]:
    """Yield the records of an index, each with its offset; None for a damaged one, or for many that are zeros.

    An incomplete record at the end is left out, and so are zeros there. Memory does not grow with the file.
    """
    end = 0
    for start, data in read_blocks(fd):
        if start > end:
            yield end, None
        end = start + len(data)
        for number, record in enumerate(parse_records(data)):
            yield start + number * RECORD_SIZE, record


class Index(NamedTuple):
    """The part of an index that readers may use.

    :ivar header: the record of the header; None if nothing was synced yet.
    :ivar batches: the records of the batches, in order.
    """

    header: Record | None
    batches: list[Record]

    @property
    def last(self) -> Record | None:
        """The record of the last batch; None if there is none."""
        return self.batches[-1] if self.batches else None


def read_index(segment: Segment) -> Index:
    """Read the index of a segment up to the last sync record.

    :raises FileNotFoundError: if the segment is gone.
    :raises JournalError: if a record before the last sync record is damaged, or the end of a closed segment's index is.
    """
    check_end(segment)
    whole: list[Record] = []
    is_whole = True
    with open_plain(segment.path(INDEX)) as file:
        for _, record in scan(file.fileno()):
            is_whole = is_whole and record is not None and _follows(record, whole, segment)
            if record is not None and is_whole:
                whole.append(record)
            elif segment.closed or (record and record.type == SYNC):
                raise JournalError(f"{segment.path(INDEX)}: a record in it is damaged: {REPAIR}")
    while whole and whole[-1].type != SYNC:
        whole.pop()
    return Index(whole[0] if whole else None, [record for record in whole if record.type == BATCH])


def _follows(record: Record, before: list[Record], segment: Segment) -> bool:
    """Return whether a record can follow others: the first is that of the header, and no row is left out."""
    if not before:
        return record.type == HEAD and record.start == 0
    last = before[-1]
    next_seq = segment.first_seq if last.type == HEAD else last.next_seq
    return record.type != HEAD and record.start >= last.end and record.first_seq == next_seq


def last_sync(segment: Segment) -> Record | None:
    """Return the last sync record of a segment; None if there is none yet.

    Only the end of the index is read.

    :raises FileNotFoundError: if the segment is gone.
    """
    with open_plain(segment.path(INDEX)) as file:
        end = os.fstat(file.fileno()).st_size // RECORD_SIZE * RECORD_SIZE
        length = _TAIL_BYTES
        while end > 0:
            start = max(0, end - length)
            found: Record | None = None
            for _, data in read_blocks(file.fileno(), start, end):
                for at in range(len(data) // RECORD_SIZE * RECORD_SIZE - RECORD_SIZE, -1, -RECORD_SIZE):
                    if data.startswith(SYNC, at) and (record := _unpack(data, at)):
                        found = record
                        break
            if found is not None:
                return found
            end = start
            length *= 4
    return None


def unsynced_records(segment: Segment) -> list[Record]:
    """Return the whole records after the last sync record: the writer makes sure of their rows, or cuts them off.

    :raises FileNotFoundError: if there is no index.
    """
    found: list[Record] = []
    is_whole = True
    with open_plain(segment.path(INDEX)) as file:
        for _, record in scan(file.fileno()):
            if record is not None and record.type == SYNC:
                found, is_whole = [], True
                continue
            is_whole = is_whole and record is not None
            if record is not None and is_whole:
                found.append(record)
    return found


def check_end(segment: Segment) -> None:
    """Check the end of a closed segment's index, or the beginning of an open segment's index.

    The records after the last whole sync record were synced too. Ignoring them would hide the loss.

    :raises FileNotFoundError: if the segment is gone.
    :raises JournalError: if the index does not end with a sync record.
    """
    if segment.closed and not ends_with_sync(segment):
        raise JournalError(f"{segment.path(INDEX)}: it does not end like the index of a closed segment: {REPAIR}")
    if not segment.closed and is_headless(segment):
        raise JournalError(
            f"{segment.path(INDEX)}: its first record is missing or damaged, but the segment has rows: {REPAIR}"
        )


def is_headless(segment: Segment) -> bool:
    """Return whether an index has lost its first record: the segment has rows, so it had one.

    :raises FileNotFoundError: if the segment is gone.
    """
    has_rows = os.stat(segment.path()).st_size > 0  # checked first: a writer appends to the index first
    with open_plain(segment.path(INDEX)) as file:
        first = next(iter(parse_records(file.read(RECORD_SIZE))), None)
    return has_rows and not (first and first.type == HEAD)


def ends_with_sync(segment: Segment) -> bool:
    """Return whether an index has nothing after its last sync record: no row that a writer could find to be whole.

    :raises FileNotFoundError: if the segment is gone.
    """
    with open_plain(segment.path(INDEX)) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - RECORD_SIZE))
        data = file.read()
    return size % RECORD_SIZE == 0 and data.startswith(SYNC) and _unpack(data, 0) is not None


def open_rows(segment: Segment) -> IO[bytes]:
    """Open the rows of a segment, to be read with read(2).

    A memory map would end the process with SIGBUS on a disk with a bad sector, or when the owner of the file cuts it.

    :raises FileNotFoundError: if the segment is gone.
    :raises JournalError: if they are no plain file.
    """
    return open_plain(segment.path())


def read_record(path: str, file: IO[bytes], record: Record) -> pa.Buffer:
    """Return the bytes that a record stands for.

    :raises JournalError: if they are missing or damaged.
    :raises OSError: if they cannot be read for another reason, such as a lack of memory.
    """
    fd = file.fileno()
    size = os.fstat(fd).st_size
    if record.end > size:
        raise JournalError(f"{path}: it ends at byte {size}, before the rows do: {REPAIR}")
    length = record.end - record.start
    data: bytes | bytearray | None = None
    try:
        if length <= _CHECKED_AT_ONCE:
            data = os.pread(fd, length, record.start)
        elif _checksum(fd, record) == record.crc:
            data = _read_long(fd, record)
    except MemoryError:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path) from None
    except OSError as e:
        if e.errno not in BAD_DISK:
            raise OSError(e.errno, e.strerror, path) from None
        what = f"the bytes {record.start} to {record.end} cannot be read: {e.strerror}"
        raise JournalError(f"{path}: {what}: {REPAIR}") from e
    if data is None or zlib.crc32(data) != record.crc:
        raise JournalError(
            f"{path}: the bytes {record.start} to {record.end} are damaged "
            f"({record.rows} rows from {record.first_seq}): {REPAIR}"
        )
    return pa.py_buffer(data)


def _checksum(fd: int, record: Record) -> int:
    """Return the CRC-32 of the bytes that a record stands for."""
    crc = 0
    for at in range(record.start, record.end, _CHECKED_AT_ONCE):
        crc = zlib.crc32(os.pread(fd, min(_CHECKED_AT_ONCE, record.end - at), at), crc)
    return crc


def _read_long(fd: int, record: Record) -> bytearray:
    """Return the bytes of a record of any length: one call reads less than 2 GiB. Missing ones are zeros."""
    data = bytearray(record.end - record.start)
    rest = memoryview(data)
    while rest and (count := os.preadv(fd, [rest], record.end - len(rest))):
        rest = rest[count:]
    return data
