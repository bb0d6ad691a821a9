"""Kill the archive and the writer of the journal while both run: no row is lost, and none is in the lake twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbus.journal.consumers import consumers
from sbus.journal.reader import JournalReader
from sbus.journal.schema import COLUMN_NAMES
from sbus.lake.opening import open_table
from sbus.lake.table import open_parquet
from tests.support.archived import recorded

SEED = int(os.environ.get("SBUS_KILLS_SEED", "1"))
KILLS = int(os.environ.get("SBUS_KILLS", "3"))
"""Raise it for a long run by hand."""


@pytest.mark.parametrize("format_", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_whatever_is_killed_every_row_is_archived_once(tmp_path: Path, format_: str) -> None:
    """The writer of the journal and the archive are killed at any moment. At last both run to their end, and the lake
    has the rows of the journal, which knows that.
    """
    if format_ == "delta":
        pytest.importorskip("deltalake", reason="the extra delta is not installed")
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    command = [sys.executable, "-m", "tests.support.kills", str(SEED), str(KILLS), format_, str(journal), str(lake)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * KILLS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    table = open_table(str(lake))
    rows = []
    for file in table.files():
        with open_parquet(table, file) as parquet:
            rows += parquet.read(columns=list(COLUMN_NAMES)).to_pylist()
    assert sorted(rows, key=lambda row: row["seq"]) == recorded(journal)
    assert len(rows) > 10 * KILLS
    assert consumers(journal) == {"archive": JournalReader(journal).end()}
