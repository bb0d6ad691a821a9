"""Lakes of both formats, of one journal: every program finds the same rows in them, row by row."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake", reason="the extra delta is not installed")

import pyarrow.dataset as ds
from deltalake import DeltaTable

from sbus.journal.schema import COLUMN_NAMES
from sbus.lake.archive import Archive as NativeArchive
from sbus.lake.cube import update
from sbus.lake.maintenance import by_hour, compact, forget
from sbus.lake.plain import PlainTable
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from tests.support.archived import MIDNIGHT, archived, recorded
from tests.support.journals import Clock
from tests.support.objects import object_storage

HOUR = 3_600_000_000

Rows = list[dict[str, Any]]


def put_away(spark, journal, lake: Lake, consumer: str, max_rows: int = 40) -> None:
    """Archive the rows that are there now."""
    with Archive(spark, [str(journal)], lake, max_rows=max_rows, consumer=consumer) as archive:
        while not archive.wait(30):
            pass


def by_seq(rows: Rows) -> Rows:
    return sorted(({name: row[name] for name in COLUMN_NAMES} for row in rows), key=lambda row: row["seq"])


def by_spark(frame) -> Rows:
    rows = [row.asDict() for row in frame.collect()]
    return by_seq([
        row | {"time": row["time"].astimezone(UTC), "payload": bytes(row["payload"])} for row in rows
    ])  # fmt: skip


def of_delta_by_polars(location: str) -> Rows:
    polars = pytest.importorskip("polars", reason="the extra interop is not installed")
    return by_seq(polars.read_delta(location).to_dicts())


def of_delta_by_duckdb(location: str) -> Rows:
    """DuckDB's own reader of Delta is an extension that it downloads, so the log is read by deltalake."""
    duckdb = pytest.importorskip("duckdb", reason="the extra interop is not installed")
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        files = DeltaTable(location).file_uris()
        return by_seq(connection.read_parquet(files).to_arrow_table().to_pylist())


@pytest.fixture
def journal(new_journal):
    clock = Clock(MIDNIGHT)
    journal = new_journal(clock=clock)
    for _ in range(3):
        journal.append([(b"a/\xff/%d" % (number % 5), bytes((number,)) * (number % 7)) for number in range(30)])
        clock.time += HOUR
    journal.sync()
    return journal


@pytest.mark.slow
def test_every_program_reads_the_same_rows(spark, journal, tmp_path):
    """Polars, DuckDB and Spark find in a Delta lake, before and after compaction, what the plain lake has; older
    versions stay readable.
    """
    plain, delta = Lake(tmp_path / "plain"), Lake(tmp_path / "delta", format="delta")
    put_away(spark, journal.directory, plain, "plain", 1000)
    put_away(spark, journal.directory, delta, "delta")
    expected = by_seq(recorded(journal.directory))
    version = DeltaTable(delta.location).version()
    assert by_seq(archived(tmp_path / "plain")) == expected
    for _ in range(2):
        assert of_delta_by_polars(delta.location) == expected
        assert of_delta_by_duckdb(delta.location) == expected
        assert by_spark(delta.read(spark)) == expected
        assert by_seq(ds.dataset(tmp_path / "plain", partitioning="hive", format="parquet").to_table().to_pylist()) == (
            expected
        )
        compact(plain.table)
        compact(delta.table)
    assert len(plain.table.files()) == len(delta.table.files()) == 3
    assert by_seq(DeltaTable(delta.location, version=version).to_pyarrow_table().to_pylist()) == expected
    only = delta.read(spark, datetime(2026, 1, 31, 1, tzinfo=UTC), datetime(2026, 1, 31, 2, tzinfo=UTC))
    assert by_spark(only) == expected[30:60]


@pytest.mark.slow
def test_a_lake_in_object_storage(spark, journal, tmp_path):
    """The archive writes to a bucket through the driver, and the command compacts it there."""
    with object_storage() as bucket:
        lake = Lake(f"{bucket}/lake", state=tmp_path / "state")
        put_away(spark, journal.directory, lake, "bucket")
        journal.append([(b"more", b"")])
        journal.sync()
        put_away(spark, journal.directory, lake, "bucket")
        expected = by_seq(recorded(journal.directory))
        assert of_delta_by_polars(lake.location) == expected
        assert by_spark(lake.read(spark)) == expected
        command = [sys.executable, "-m", "sbus.cli", "lake", "compact", lake.location, f"--state={tmp_path}/state"]
        subprocess.run(command, check=True)
        assert of_delta_by_polars(lake.location) == expected
        assert len(lake.table.files()) == 4


@pytest.mark.slow
def test_a_reader_that_was_planned_before_compaction(spark, journal, tmp_path):
    """A DataFrame of a plain lake gives the same rows after its files were replaced and deleted."""
    lake = Lake(tmp_path / "lake")
    put_away(spark, journal.directory, lake, "archive")
    frame = lake.read(spark)
    compact(lake.table)
    lake.table.vacuum(0)
    assert by_spark(frame) == by_seq(recorded(journal.directory))
    assert Path(lake.location).exists()


@pytest.mark.slow
def test_spark_reads_a_lake_as_it_is(spark, journal, tmp_path):
    """Spark's own reader of Parquet finds each row once by the directory and by patterns, after all that is done to a
    lake; the table of readers in ``tests/unit/lake/test_readers.py`` has the other programs.
    """
    table = PlainTable(tmp_path / "lake")
    with NativeArchive([journal.directory], table, max_rows=40) as job:
        while not job.wait():
            pass
    expected = [row["seq"] for row in by_seq(recorded(journal.directory))]
    for change in (
        lambda: None,
        lambda: table.pin(table.files()),
        lambda: compact(table),
        lambda: forget(table, b"no"),
    ):
        change()
        update(table, dict(by_hour(table.files())))
        for way in ("", "/*/*/*.parquet"):
            assert sorted(row.seq for row in spark.read.parquet(f"{table.location}{way}").collect()) == expected
        found = spark.read.option("recursiveFileLookup", True).option("pathGlobFilter", "*.parquet")
        assert sorted(row.seq for row in found.parquet(table.location).collect()) == expected
