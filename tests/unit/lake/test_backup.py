"""Backup and restore as the page on operations says: a copy of the lake with its state, made between two batches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sbus.errors import LakeError
from sbus.lake.maintenance import compact
from sbus.lake.opening import open_table
from sbus.lake.table import Hour
from tests.support.lakes import archive, row, rows_of

NOW = Hour("2026-02-02", 0).start.timestamp()


def batch(number: int) -> list:
    return [row("one", 10 * number + n, n // 5) for n in range(10)]


def resume(location: Path, last: int) -> None:
    """Archive what the state does not know as done, as the archive does when it is started."""
    table = open_table(str(location))
    for number in range(table.state.settled() + 1, last + 1):
        archive(table, number, batch(number))


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_a_copy_goes_on_where_it_ends(tmp_path, format_):
    """The lake is lost after more batches and a compaction; the copy archives these batches again, each row once."""
    if format_ == "delta":
        pytest.importorskip("deltalake", reason="the extra delta is not installed")
    lake, backup = tmp_path / "lake", tmp_path / "backup"
    backup.mkdir()
    table = open_table(str(lake), format=format_)
    for number in range(3):
        archive(table, number, batch(number))
    compact(table, now=NOW)
    archive(table, 3, batch(3))
    subprocess.run(["cp", "-a", lake, f"{lake}.sbus", backup], check=True)
    for number in range(4, 7):
        archive(table, number, batch(number))
    compact(table, now=NOW)
    expected = rows_of(table)
    shutil.rmtree(lake)
    shutil.rmtree(f"{lake}.sbus")
    subprocess.run(["cp", "-a", backup / "lake", backup / "lake.sbus", tmp_path], check=True)
    resume(lake, 6)
    assert rows_of(open_table(str(lake))) == expected
    compact(open_table(str(lake)), now=NOW)
    assert rows_of(open_table(str(lake))) == expected


def test_a_mixed_copy_is_refused(tmp_path):
    """An old state beside a newer lake of plain Parquet would archive rows twice that are compacted: it is refused."""
    table = open_table(str(tmp_path / "lake"))
    archive(table, 0, batch(0))
    shutil.copytree(table.state.checkpoint, tmp_path / "old")
    for number in (1, 2):
        archive(table, number, batch(number))
    compact(table, now=NOW)
    shutil.rmtree(table.state.checkpoint)
    shutil.copytree(tmp_path / "old", table.state.checkpoint)
    before = rows_of(table)
    with pytest.raises(LakeError, match="restore both from one copy"):
        resume(tmp_path / "lake", 2)
    assert rows_of(table) == before
