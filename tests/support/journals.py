"""Journals for tests: a clock that can be set, and what a journal holds, as plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.journal.reader import JournalReader, read
from sbus.journal.writer import JournalWriter

__all__ = ["Clock", "NewJournal", "messages", "new_journal", "rows"]

NewJournal = Callable[..., JournalWriter]


class Clock:
    """Tells the time in µs since 1970 that it was set to."""

    def __init__(self, time: int = 1_700_000_000_000_000) -> None:
        self.time = time

    def __call__(self) -> int:
        return self.time


def rows(directory: Any, start_seq: int | None = None, end_seq: int | None = None, **how: Any) -> list[dict[str, Any]]:
    """The rows of a journal that readers may see, or those from one seq up to another."""
    reader = JournalReader(directory)
    start_seq = reader.start() if start_seq is None else start_seq
    end_seq = reader.end() if end_seq is None else end_seq
    return [row for part in reader.plan(start_seq, end_seq, **how) for batch in read(part) for row in batch.to_pylist()]


def messages(directory: Any, *args: Any, **how: Any) -> list[tuple[bytes, bytes]]:
    """Key and payload of these rows."""
    return [(row["key"], row["payload"]) for row in rows(directory, *args, **how)]


@pytest.fixture
def new_journal(tmp_path: Path) -> Iterator[NewJournal]:
    """Open a journal for writing: ``new_journal("name", segment_bytes=1000)``; at the end of the test it is closed.

    What is appended is seen by readers after `sync`, `roll` or `close`.
    """
    mine: list[JournalWriter] = []

    def open_journal(name: str = "journal", **options: Any) -> JournalWriter:
        mine.append(JournalWriter.open(tmp_path / name, **options))
        return mine[-1]

    yield open_journal
    for journal in mine:
        journal.close()
