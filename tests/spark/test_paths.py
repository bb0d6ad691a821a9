"""Journals and lakes whose paths have characters that mean something to Spark, DuckDB or Delta's library."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sbus.errors import LakeError
from sbus.journal.writer import JournalWriter
from sbus.lake.archive import Archive
from sbus.lake.maintenance import compact, forget
from sbus.lake.opening import open_table
from sbus.report import JournalRows, LakeRows, measure
from sbus.spark.jobs.archive import Archive as SparkArchive
from sbus.spark.jobs.lake import Lake
from sbus.spark.jobs.tables import load_rows
from tests.support.archived import MIDNIGHT
from tests.support.journals import Clock
from tests.support.lakes import rows_of

WEEK = datetime(2026, 1, 26, tzinfo=UTC), datetime(2026, 2, 2, tzinfo=UTC)
COMMON = "l[1] {a,b}*:#&='\"~$HOME;^+ü]%"
"""Characters of patterns and URLs, and a percent sign that begins no code."""
NAMES = {"parquet": f"{COMMON}?%20 ", "delta": f"{COMMON}? "}
DECOYS = ("l1 a", "l[1] ab", "x")
"""Names beside it that it would match as a pattern."""


def record(directory: Path, count: int) -> None:
    journal = JournalWriter.open(directory, clock=Clock(MIDNIGHT))
    for number in range(count):
        journal.append([(b"plant/%d" % (number % 2), b"x")])
    journal.sync()
    journal.close()


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_characters_stand_for_themselves(tmp_path: Path, format: str) -> None:
    """Whatever their paths are, a journal is archived, and its lake read, reported, compacted and cleaned."""
    home = tmp_path / NAMES[format]
    record(home / "journal", 10)
    for decoy in DECOYS:
        shutil.copytree(home, tmp_path / decoy)
    table = open_table(str(home / "lake"), format=format)
    with Archive([str(home / "journal")], table) as archive:
        while not archive.wait():
            pass
    assert archive.rows == 10
    for decoy in DECOYS:
        shutil.copytree(home / "lake", tmp_path / decoy / "lake")
    for source in (LakeRows(table), JournalRows([str(home / "journal")])):
        assert measure(source, start=WEEK[0], end=WEEK[1]).totals.messages == 10
    compact(table)
    forget(table, b"plant/1")
    assert len(rows_of(open_table(str(home / "lake")))) == 5
    assert len(table.history()) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([home.name, *DECOYS])


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_characters_stand_for_themselves_in_spark(spark, tmp_path: Path, format: str) -> None:
    """Spark's archive and its readers take them as they are, too, and read a lake whose files others have replaced."""
    home = tmp_path / NAMES[format]
    record(home / "journal", 10)
    for decoy in DECOYS:
        shutil.copytree(home, tmp_path / decoy)
    lake = Lake(home / "lake", format=format)
    with SparkArchive(spark, [str(home / "journal")], lake) as archive:
        archive.wait()
    assert archive.rows == 10
    for decoy in DECOYS:
        shutil.copytree(home / "lake", tmp_path / decoy / "lake")
    assert lake.read(spark).count() == 10
    assert load_rows(spark, journals=[str(home / "journal")]).count() == 10
    assert spark.read.format("sbus").load(str(home / "journal")).count() == 10
    compact(lake.table)
    forget(lake.table, b"plant/1")
    assert Lake(home / "lake").read(spark).count() == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([home.name, *DECOYS])


@pytest.mark.parametrize("name", ["a%20b", "a\\b"])
def test_a_path_that_a_delta_table_cannot_have(tmp_path: Path, name: str) -> None:
    """Delta's library takes these for parts of a URL: the error says so, and names the remedy."""
    with pytest.raises(LakeError, match=r"a Delta table cannot have a path with .*choose another path, or"):
        open_table(str(tmp_path / name / "lake"), format="delta")
