"""Journals for tests: a clock that can be set, and what a journal holds, as plain Python."""

from __future__ import annotations

from typing import Any

from sbus.journal.reading import JournalReader, read

__all__ = ["Clock", "messages", "rows"]


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
