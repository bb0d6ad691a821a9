"""The index of a segment: which batches are whole, and up to where readers may see them.

A file of records of 64 bytes each, so that none straddles a sector, and each with a checksum of its own. One stands for
the header of the segment, one for each batch, written just before what it stands for; and a *sync* record says that
everything before it is on the disk for good. Readers see nothing beyond the last of those.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

from sbus.errors import JournalError
from sbus.journal.layout import INDEX, Segment
from sbus.journal.schema import KINDS, Kind

__all__ = ["BATCH", "HEAD", "RECORD", "SYNC", "Index", "Record", "last_sync", "parse", "read_index"]

_FORMAT = struct.Struct("<4sIQQQIIqqII")
RECORD = _FORMAT.size
"""Bytes in a record."""

HEAD, BATCH, SYNC = b"head", b"rows", b"sync"

_TAIL = 256 * RECORD  # what is read at first when the last sync record is looked for


class Record(NamedTuple):
    """A record, without its checksum.

    :ivar type: `HEAD`, `BATCH` or `SYNC`.
    :ivar kind: of all rows of the batch; in a sync record, of the last row before it.
    :ivar start: first byte in ``.arrows`` (for a sync record the same as `end`).
    :ivar end: the byte behind the last.
    :ivar first_seq: of the first row; in a sync record the next seq, the first that readers may not see.
    :ivar rows: how many rows; 0 if it is not a batch.
    :ivar crc: CRC-32 of the bytes; 0 in a sync record.
    :ivar min_time: of the first row, µs since 1970.
    :ivar max_time: of the last row; in a sync record, of the last row before it.
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
        return self.first_seq + self.rows

    def pack(self) -> bytes:
        """The record's bytes, with its checksum."""
        kind, start, end, first_seq, rows, crc, min_time, max_time = self[1:]
        index = KINDS.index(kind)
        data = _FORMAT.pack(self.type, index, start, end, first_seq, rows, crc, min_time, max_time, 0, 0)
        return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def _unpacked(data: bytes, at: int) -> Record | None:
    """The record there, or None if it is not whole."""
    fields = _FORMAT.unpack_from(data, at)
    if zlib.crc32(data[at : at + RECORD - 4]) != fields[-1] or fields[1] >= len(KINDS):
        return None
    return Record(fields[0], KINDS[fields[1]], *fields[2:9])


def parse(data: bytes) -> list[Record | None]:
    """The records in an index; None for each that is damaged. A part of a record at the end is left out."""
    return [_unpacked(data, at) for at in range(0, len(data) - RECORD + 1, RECORD)]


class Index(NamedTuple):
    """What readers may see of a segment: its batches in order, and the sync record that says so (None: nothing yet)."""

    header: Record | None
    batches: list[Record]
    sync: Record | None


def read_index(segment: Segment) -> Index:
    """What readers may see of a segment.

    :raises FileNotFoundError: if it is gone.
    :raises JournalError: if a record before the last sync record is damaged, or that itself in a closed segment.
    """
    with open(segment.path(INDEX), "rb") as file:
        data = file.read()
    records = parse(data)
    if segment.closed and (len(data) % RECORD or not (records and (end := records[-1]) and end.type == SYNC)):
        # What comes after the last sync record that is whole was synced too: to leave it out would hide it.
        raise JournalError(
            f"{segment.path(INDEX)}: it does not end like that of a closed segment: restore it from a copy"
        )
    while records and not ((last := records[-1]) and last.type == SYNC):
        records.pop()
    if not records:
        return Index(None, [], None)
    if any(record is None for record in records):
        raise JournalError(f"{segment.path(INDEX)}: a record in it is damaged: restore it from a copy")
    whole = [record for record in records if record is not None]
    return Index(whole[0], [record for record in whole if record.type == BATCH], whole[-1])


def last_sync(segment: Segment) -> Record | None:
    """The last sync record of a segment, found from the end of its index; None if there is none yet.

    :raises FileNotFoundError: if the segment is gone.
    """
    with open(segment.path(INDEX), "rb") as file:
        end = os.fstat(file.fileno()).st_size // RECORD * RECORD
        length = _TAIL
        while end > 0:
            start = max(0, end - length)
            file.seek(start)
            data = file.read(end - start)
            for at in range(len(data) - RECORD, -1, -RECORD):
                if data.startswith(SYNC, at) and (record := _unpacked(data, at)):
                    return record
            end = start
            length *= 4
    return None
