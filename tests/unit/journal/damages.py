"""A journal of forty rows, and ways to damage it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sbus.journal.index import read_index
from sbus.journal.layout import list_segments
from sbus.journal.reader import JournalReader, read

ROWS = 40
"""Rows of the journal: two segments, and four batches of five rows in each."""


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def damage_batch(directory: Path, number: int) -> None:
    """Overwrite 64 bytes in the middle of a batch of the first segment."""
    segment = list_segments(str(directory))[0]
    batch = read_index(segment).batches[number]
    overwrite(segment.path(), (batch.start + batch.end) // 2 // 64 * 64, b"\xa5" * 64)


def all_rows(directory: Path, *, skip_damaged: bool, **how: Any) -> list[dict[str, Any]]:
    reader = JournalReader(directory, skip_damaged=skip_damaged)
    parts = reader.plan(reader.start(), reader.end(), **how)
    return [row for part in parts for batch in read(part) for row in batch.to_pylist()]


def covered(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers that rows stand for."""
    numbers: list[int] = []
    for row in rows:
        count = json.loads(row["payload"])["rows"] if row["kind"] == "damaged" else 1
        numbers.extend(range(row["seq"], row["seq"] + count))
    return numbers


def messages_of(rows: list[dict[str, Any]]) -> set[int]:
    for row in rows:
        if row["kind"] == "message":
            assert row["payload"] == b"payload %d" % row["seq"] * 20
    return {row["seq"] for row in rows if row["kind"] == "message"}
