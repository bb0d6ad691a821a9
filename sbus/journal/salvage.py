"""The readable parts of a damaged segment, and the places of the rest.

`salvage_index` is the index of a segment as far as it is known: damaged records are left out, batches whose records are
lost are looked for in ``.arrows``, and what is not found becomes a record of the kind ``damaged`` that covers the lost
rows. So the records that it returns follow one another without a hole, as those of an undamaged index do.

If the header and its record are lost as well, the first batch shows the format: the headers of all formats are known.

A batch that is found without its record has no checksum to compare. It counts as whole if it decodes, its values are
valid, its rows have exactly the numbers that are missing, and its times do not fall. A ``damaged`` row states how many
numbers it stands for. Damage that hits the record of a batch and its bytes alike in this way is not detected; it takes
two accidents.

Rejected: to search a damaged region for the next message by its first bytes. Payloads may contain any bytes, also those
of a message.
"""

from __future__ import annotations

import os
import zlib
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError, JournalUnreadable
from sbus.journal.index import BATCH, HEAD, SYNC, Index, Record, open_rows, scan
from sbus.journal.layout import INDEX, Segment, open_plain
from sbus.journal.schema import FORMATS, KINDS, Format, Kind, damaged_rows

__all__ = ["find_header", "salvage_index"]


def salvage_index(segment: Segment, journal_id: str) -> Index:
    """Return the known facts about the batches of a segment, whatever is damaged.

    :returns: the index; its batches have no holes between them, but may end before the segment does.
    :raises FileNotFoundError: if there is no ``.arrows``.
    :raises OSError: if the segment cannot be read.
    :raises JournalError: if its ``.arrows`` is no plain file, or this user may not read it.
    """
    try:
        with open_plain(segment.path(INDEX)) as file:
            records = [record for _, record in scan(file.fileno()) if record]
    except JournalUnreadable:
        raise
    except (FileNotFoundError, JournalError):
        records = []
    # A writer appends to the index first, and keeps it. Without its first record, no writer is appending here.
    is_searched = segment.closed or not any(record.type in (HEAD, SYNC) for record in records)
    if not is_searched:
        while records and records[-1].type != SYNC:
            records.pop()
    with open_rows(segment) as arrows:
        header = next((record for record in records if record.type == HEAD), None)
        found = find_header(arrows, journal_id, header) or _find_header_before_rows(arrows, journal_id, segment)
        if found is None:
            return Index(None, [])
        head, format_ = found
        finder = _Finder(arrows, format_, segment, head)
        for record in records:
            if record.type != HEAD:
                finder.add(record)
        if is_searched:
            finder.search(os.fstat(arrows.fileno()).st_size, None)
        return Index(head, finder.batches)


def find_header(arrows: IO[bytes], journal_id: str, record: Record | None) -> tuple[Record, Format] | None:
    """Return the record of a segment's header, and the format that the segment is written in.

    :param record: the record in the index, if it is whole. Its checksum of the header identifies the format
        even if the header itself is damaged.
    :returns: None if neither the record nor the header identifies the format.
    """
    for version in sorted(FORMATS, reverse=True):
        data = FORMATS[version].header(journal_id)
        crc = zlib.crc32(data)
        if record is not None and (record.end, record.crc) == (len(data), crc):
            return record, FORMATS[version]
        arrows.seek(0)
        if record is None and arrows.read(len(data)) == data:
            return _head(data), FORMATS[version]
    if record is None:
        return None
    # Another version of Arrow may have written the same header in other bytes. Their checksum says that they are whole.
    arrows.seek(0)
    data = arrows.read(record.end)
    if zlib.crc32(data) != record.crc:
        return None
    version = (pa.ipc.open_stream(data).schema.metadata or {}).get(b"sbus.format", b"")
    known = FORMATS.get(int(version)) if version.isdigit() else None
    return None if known is None else (record, known)


def _head(data: bytes) -> Record:
    """Return the record of a header."""
    return Record(HEAD, Kind.MESSAGE, 0, len(data), 0, 0, zlib.crc32(data), 0, 0)


def _find_header_before_rows(arrows: IO[bytes], journal_id: str, segment: Segment) -> tuple[Record, Format] | None:
    """Return the same, if the first batch of a segment follows where the header of a format would end."""
    for version in sorted(FORMATS, reverse=True):
        head = _head(FORMATS[version].header(journal_id))
        if _Finder(arrows, FORMATS[version], segment, head).parse(os.fstat(arrows.fileno()).st_size) is not None:
            return head, FORMATS[version]
    return None


class _Finder:
    """Puts records in order, and finds the missing ones between them.

    :ivar batches: the records so far, without holes.
    """

    def __init__(self, arrows: IO[bytes], format_: Format, segment: Segment, head: Record) -> None:
        self.batches: list[Record] = []
        self._arrows = arrows
        self._format = format_
        self._at = head.end
        self._seq = segment.first_seq
        self._time = segment.first_time

    def add(self, record: Record) -> None:
        """Add the next record that is whole; one that contradicts those before it is left out."""
        if record.start < self._at or record.first_seq < self._seq:
            return
        if record.start > self._at or record.first_seq > self._seq:
            self.search(record.start, record.first_seq)
            self._lose(record)
        if record.type == BATCH:
            self._append(record)

    def _append(self, record: Record) -> None:
        self.batches.append(record)
        self._at, self._seq, self._time = record.end, record.next_seq, record.max_time

    def _lose(self, following: Record) -> None:
        """Cover the rows before a record that were not found."""
        rows = following.first_seq - self._seq
        if rows:
            time = self._time
            self._append(Record(BATCH, Kind.DAMAGED, self._at, following.start, self._seq, rows, 0, time, time))
        self._at = following.start

    def search(self, end: int, end_seq: int | None) -> None:
        """Search ``.arrows`` for batches from where the last one ended.

        :param end: the offset at which to stop.
        :param end_seq: the number after the last row that is missing; None: unknown.
        """
        if end <= self._at or (end_seq is not None and end_seq <= self._seq):
            return
        while self._at < end and (found := self.parse(end)) is not None:
            if end_seq is not None and found.next_seq > end_seq:
                break
            self._append(found)

    def parse(self, end: int) -> Record | None:
        """Return the record of the batch at the place of the next one; None if there is none with the next number.

        :param end: the offset that it does not pass.
        """
        try:
            self._arrows.seek(self._at)
            message = pa.ipc.read_message(self._arrows)
            length = self._arrows.tell() - self._at
            rows = pa.ipc.read_record_batch(message, self._format.stored_schema)
            rows.validate(full=True)
            count = rows.num_rows
            kinds = rows.column("kind").unique().to_pylist()
            times = rows.column("time").cast(pa.int64())
            if (
                self._at + length > end
                or not count
                or not rows.column("seq").equals(pa.arange(self._seq, self._seq + count))
                or len(kinds) != 1
                or not 0 <= kinds[0] < len(KINDS)
                or pc.any(pc.less(times[1:], times[:-1])).as_py()
            ):
                return None
            self._arrows.seek(self._at)
            crc = zlib.crc32(self._arrows.read(length))
        except (pa.ArrowException, EOFError, OSError, ValueError):
            return None
        kind = KINDS[kinds[0]]
        if kind is Kind.DAMAGED:  # one row, as `sbus.journal.repair` and `JournalWriter.append_copies` write it
            count = damaged_rows(rows.column("payload")[0].as_py())
        least, greatest = times[0].as_py(), times[-1].as_py()
        return Record(BATCH, kind, self._at, self._at + length, self._seq, count, crc, least, greatest)
