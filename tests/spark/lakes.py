"""What a lake holds, read without Spark and without the code that has written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sbus.journal.keytext import as_text
from tests.support.journals import rows as rows_of_journal

__all__ = ["archived", "files", "recorded"]


def files(lake: Path) -> list[Path]:
    """Its Parquet files, sorted."""
    return sorted(lake.glob("date=*/hour=*/*.parquet"))


def archived(lake: Path) -> list[dict[str, Any]]:
    """Its rows, by journal and seq, as often as they are there; each is in the directory of its hour."""
    found = []
    for path in files(lake):
        for row in pq.read_table(path, partitioning=None).to_pylist():
            assert f"{row['time']:date=%Y-%m-%d/hour=%H}" == str(path.parent.relative_to(lake))
            found.append(row)
    return sorted(found, key=lambda row: (row["journal"], row["seq"]))


def recorded(*journals: Path) -> list[dict[str, Any]]:
    """The rows of journals, as they are to be in the lake."""
    found = [row | {"key": as_text(row["key"])} for journal in journals for row in rows_of_journal(journal)]
    return sorted(found, key=lambda row: (row["journal"], row["seq"]))
