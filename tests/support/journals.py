"""Journals for tests: a clock that can be set, and rows as plain Python."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sbus.journal.index import RECORD_SIZE, open_rows, read_index, read_record
from sbus.journal.layout import IDENTITY, INDEX, list_segments
from sbus.journal.reader import JournalReader, read
from sbus.journal.schema import FORMAT, FORMATS
from sbus.journal.writer import JournalWriter

__all__ = ["DAMAGE", "FORGED", "Clock", "NewJournal", "damage", "forge", "messages", "new_journal", "rows"]

NewJournal = Callable[..., JournalWriter]

DAMAGE = ("rows", "index", "no index", "journal.json")
"""What `damage` can do."""

FORGED = {"payload": 1 << 20, "seq": 0, "time": 1 << 62}
"""What `forge` can do: for a column, the value that no row of the batch has; of payloads, the first offset."""


class Clock:
    """A clock that can be set: returns `time`, in µs since the epoch."""

    def __init__(self, time: int = 1_700_000_000_000_000) -> None:
        self.time = time

    def __call__(self) -> int:
        return self.time


def rows(directory: Any, start_seq: int | None = None, end_seq: int | None = None, **how: Any) -> list[dict[str, Any]]:
    """Return the visible rows of a journal, or those from `start_seq` to before `end_seq`."""
    reader = JournalReader(directory)
    start_seq = reader.start() if start_seq is None else start_seq
    end_seq = reader.end() if end_seq is None else end_seq
    return [row for part in reader.plan(start_seq, end_seq, **how) for batch in read(part) for row in batch.to_pylist()]


def damage(directory: Any, what: str = "rows") -> None:
    """Damage a journal: the last bytes of its second batch, that batch's record, or a whole file.

    :param what: one of `DAMAGE`.
    """
    (segment,) = list_segments(str(directory))
    batch = read_index(segment).batches[1]
    if what == "no index":
        os.unlink(segment.path(INDEX))
        return
    path, at = {
        "rows": (segment.path(), batch.end - 8),
        "index": (segment.path(INDEX), 2 * RECORD_SIZE),
        "journal.json": (os.path.join(directory, IDENTITY), 0),
    }[what]
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 8)


def forge(directory: Any, column: str) -> None:
    """Overwrite the first value of a column in the second batch of a journal; the record gets the right checksum.

    :param column: one of `FORGED`.
    """
    segment = list_segments(str(directory))[0]
    batch = read_index(segment).batches[1]
    with open_rows(segment) as arrows:
        data = read_record(segment.path(), arrows, batch)
    values = pa.ipc.read_record_batch(data, FORMATS[FORMAT].stored_schema).column(column).buffers()[1]
    at = values.address - data.address
    body = bytearray(data)
    width = 4 if column == "payload" else 8
    body[at : at + width] = FORGED[column].to_bytes(width, "little")
    for path, start, content in (
        (segment.path(), batch.start, bytes(body)),
        (segment.path(INDEX), 2 * RECORD_SIZE, batch._replace(crc=zlib.crc32(body)).pack()),
    ):
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(content)


def messages(directory: Any, *args: Any, **how: Any) -> list[tuple[bytes, bytes]]:
    """Return key and payload of the same rows."""
    return [(row["key"], row["payload"]) for row in rows(directory, *args, **how)]


@pytest.fixture
def new_journal(tmp_path: Path) -> Iterator[NewJournal]:
    """Return a function that opens a journal for writing, ``new_journal("name", segment_bytes=1000)``.

    Readers see appended rows after `sync`, `roll` or `close`. The end of the test closes the journal.
    """
    mine: list[JournalWriter] = []

    def open_journal(name: str = "journal", **options: Any) -> JournalWriter:
        mine.append(JournalWriter.open(tmp_path / name, **options))
        return mine[-1]

    yield open_journal
    for journal in mine:
        journal.close()
