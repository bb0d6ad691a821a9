"""What goes into a lake, and its content, read without Spark and without the code that wrote it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sbus.journal.keytext import as_text
from tests.support.journals import rows as rows_of_journal

__all__ = ["MIDNIGHT", "archived", "files", "messages", "recorded"]

MIDNIGHT = int(datetime(2026, 1, 31, tzinfo=UTC).timestamp()) * 1_000_000
"""In µs since the epoch."""


def messages(count: int) -> list[tuple[bytes, bytes]]:
    """Different messages, with keys and payloads that are not text."""
    return [(b"a/\xff/%d" % number, bytes((number % 256,)) * (number % 7)) for number in range(count)]


def files(lake: Path) -> list[Path]:
    """The Parquet files of a lake, sorted."""
    return sorted(lake.glob("date=*/hour=*/*.parquet"))


def archived(lake: Path) -> list[dict[str, Any]]:
    """The rows of a lake, by journal and seq, with duplicates; each must be in the directory of its hour."""
    found = []
    for path in files(lake):
        for row in pq.read_table(path, partitioning=None).to_pylist():
            assert f"{row['time']:date=%Y-%m-%d/hour=%H}" == str(path.parent.relative_to(lake))
            found.append(row)
    return sorted(found, key=lambda row: (row["journal"], row["seq"]))


def recorded(*journals: str | Path) -> list[dict[str, Any]]:
    """The rows of journals in the form that they have in a lake."""
    found = [row | {"key": as_text(row["key"])} for journal in journals for row in rows_of_journal(journal)]
    return sorted(found, key=lambda row: (row["journal"], row["seq"]))
