"""Every program that reads a lake of plain Parquet finds each row once, however it names the files."""

from __future__ import annotations

import glob
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from sbus.lake.archive import Archive
from sbus.lake.cube import update
from sbus.lake.maintenance import by_hour, compact, forget
from sbus.lake.plain import PlainTable
from sbus.lake.staging import stage
from tests.support.journals import Clock, NewJournal

START = int(datetime(2026, 1, 31, tzinfo=UTC).timestamp()) * 1_000_000
HOUR = 3_600_000_000
ROWS = 90

WAYS = ["", "*/*/*.parquet", "**/*.parquet"]


def by_duckdb(where: str) -> list[int]:
    duckdb = pytest.importorskip("duckdb", reason="the extra interop is not installed")
    with duckdb.connect() as connection:
        return [seq for (seq,) in connection.execute("SELECT seq FROM read_parquet(?)", [where]).fetchall()]


def by_polars(where: str) -> list[int]:
    polars = pytest.importorskip("polars", reason="the extra interop is not installed")
    return polars.scan_parquet(where).select("seq").collect()["seq"].to_list()


def expanded(where: str) -> str | list[str]:
    """What a program without patterns of its own gets from its user."""
    return glob.glob(where, recursive=True) if "*" in where else where


def by_pandas(where: str) -> list[int]:
    pandas = pytest.importorskip("pandas", reason="the extra interop is not installed")
    return pandas.read_parquet(expanded(where), columns=["seq"])["seq"].tolist()


def by_pyarrow(where: str) -> list[int]:
    return ds.dataset(expanded(where), format="parquet", partitioning="hive").to_table(["seq"])["seq"].to_pylist()


READERS: list[Callable[[str], list[int]]] = [by_duckdb, by_polars, by_pandas, by_pyarrow]


@pytest.fixture
def table(new_journal: NewJournal, tmp_path: Path) -> PlainTable:
    """A lake of three hours and several batches."""
    journal = new_journal(clock=(clock := Clock(START)))
    for _ in range(3):
        journal.append([(b"gone" if number % 10 == 0 else b"kept", b"x") for number in range(ROWS // 3)])
        clock.time += HOUR
    journal.sync()
    table = PlainTable(tmp_path / "lake")
    with Archive([journal.directory], table, max_rows=20) as job:
        while not job.wait():
            pass
    return table


def archiving(table: PlainTable) -> None:
    """A batch is staged, and not yet committed."""
    rows = pq.read_table(table.open(table.files()[0].name))
    stage(table.state.staging / "0000000099-staged", [rows.to_batches()])


def reading(table: PlainTable) -> None:
    table.pin(table.files())


def reported(table: PlainTable) -> None:
    update(table, dict(by_hour(table.files())))


def compacted(table: PlainTable) -> None:
    compact(table)


def forgotten(table: PlainTable) -> None:
    forget(table, b"gone")


def fresh(table: PlainTable) -> None:
    pass


STATES = [fresh, archiving, reading, reported, compacted, forgotten]


@pytest.mark.parametrize(
    ("reader", "way"),
    [
        # make test has each program and each way.
        pytest.param(reader, way, marks=[] if at % len(WAYS) == place else pytest.mark.slow)
        for at, reader in enumerate(READERS)
        for place, way in enumerate(WAYS)
    ],
    ids=lambda value: value or "the directory" if isinstance(value, str) else value.__name__,
)
def test_each_row_once(table: PlainTable, reader: Callable[[str], list[int]], way: str) -> None:
    """A program finds the rows of the lake by its directory and by both patterns: fresh, while a batch is staged, while
    a query reads a snapshot, counted for a report, compacted, and after a key was forgotten.
    """
    for prepare in STATES:
        prepare(table)
        expected = [seq for seq in range(ROWS) if prepare is not forgotten or seq % (ROWS // 3) % 10]
        assert sorted(reader(f"{table.location}/{way}".rstrip("/"))) == expected, prepare.__name__
