"""Lakes from before publishers were recorded: they gain the columns, and no old file is written again for that."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("deltalake", reason="the extra delta is not installed")

from deltalake import DeltaTable

from sbus.journal.senders import TYPES
from sbus.lake import delta
from sbus.lake.check import check
from sbus.lake.encoding import LATER
from sbus.lake.hourly import hourly
from sbus.lake.maintenance import compact, forget
from sbus.lake.merge import Limits, iter_rows
from sbus.lake.plain import PlainTable
from sbus.lake.table import Hour, Table, open_parquet
from tests.support.lakes import archive, row, rows_of

NOW = Hour("2026-02-02", 0).start.timestamp()
ALICE = (1000, 100, 42, 17, None)
LINKED = (1001, 100, 43, 9, "!/cred/0/0/4711")


def plain(directory: Path) -> Table:
    return PlainTable(directory)


def of_delta(directory: Path) -> Table:
    return delta.DeltaLake(str(directory))


def old(table: Table) -> Table:
    """Fill a lake as an earlier version does, with two batches."""
    for batch in range(2):
        archive(table, batch, [row("one", 10 * batch + n, n // 5) for n in range(10)])
    if isinstance(table, delta.DeltaLake):
        forget_columns(Path(table.location, "_delta_log", f"{0:020}.json"))
    return table


def forget_columns(commit: Path) -> None:
    """Remove from the commit that made a table the columns that earlier versions lack."""
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    [metadata] = [action["metaData"] for action in actions if "metaData" in action]
    schema = json.loads(metadata["schemaString"])
    schema["fields"] = [field for field in schema["fields"] if field["name"] not in LATER]
    metadata["schemaString"] = json.dumps(schema)
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


@pytest.fixture(params=[plain, of_delta], ids=["plain", "delta"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    """A lake of an earlier version."""
    make: Callable[[Path], Table] = request.param
    return old(make(tmp_path / "lake"))


@pytest.fixture
def delta_lake(tmp_path: Path) -> delta.DeltaLake:
    """The same in a Delta table."""
    table = old(of_delta(tmp_path / "lake"))
    assert isinstance(table, delta.DeltaLake)
    return table


def senders(table: Table) -> dict[int, tuple[Any, ...]]:
    """Return the publisher of each row."""
    found: dict[int, tuple[Any, ...]] = {}
    for file in table.files():
        with open_parquet(table, file) as parquet:
            for batch in iter_rows(parquet, Limits()):
                found |= {each["seq"]: tuple(each[name] for name in TYPES) for each in batch.to_pylist()}
    return found


EXPECTED = {**dict.fromkeys(range(20), (None,) * 5), 20: ALICE, 21: ALICE, 22: LINKED}


def grown(table: Table) -> Table:
    """The lake with rows of today."""
    archive(table, 2, [row("one", 20, 0), row("one", 21, 1)], sender=ALICE)
    archive(table, 3, [row("one", 22, 1)], sender=LINKED)
    return table


def test_old_files_stay(lake: Table) -> None:
    """New rows have publishers, old ones have none, and the old files are the ones that were there."""
    before = {file.name: (file.size, file.changed) for file in lake.files()}
    assert senders(grown(lake)) == EXPECTED
    assert before.items() <= {file.name: (file.size, file.changed) for file in lake.files()}.items()
    found = list(check(lake))[-1]
    assert (found.rows, found.problems, found.holes) == (23, [], {})


def test_compaction(lake: Table) -> None:
    """Files of both ages become one, and each row keeps its publisher; rows that are out of order, too."""
    archive(grown(lake), 4, [row("two", 1, 0), row("one", 23, 0), row("two", 0, 0)], sender=ALICE)
    before = rows_of(lake)
    assert compact(lake, now=NOW).hours == 2
    assert rows_of(lake) == before
    assert len(lake.files()) == 2
    assert senders(lake) == EXPECTED | {0: ALICE, 1: ALICE, 23: ALICE}  # of the second journal, 0 and 1


def test_compaction_before_the_first_rows_of_today(lake: Table) -> None:
    """A lake of an earlier version can be compacted, and have publishers after that."""
    compact(lake, now=NOW)
    assert senders(grown(lake)) == EXPECTED


def test_forgetting(lake: Table) -> None:
    """The rows that stay keep their publishers."""
    archive(grown(lake), 4, [row("one", 23, 0, "people/jo")], sender=LINKED)
    assert forget(lake, b"people/jo").dropped == 1
    assert senders(lake) == EXPECTED


def test_counts(lake: Table) -> None:
    """The counts of hours have files of both ages."""
    day = datetime(2026, 1, 31, tzinfo=UTC)
    with hourly(grown(lake), day, day + timedelta(days=1)) as counted:
        assert counted is not None
        tables = [pq.read_table(path).to_pylist() for path in counted.counts]
    assert sum(each["n"] for table in tables for each in table) == 23


def test_delta_for_every_program(delta_lake: delta.DeltaLake) -> None:
    """Any reader of Delta finds the columns; the log says when they came, and how many nulls each new file has."""
    before = DeltaTable(delta_lake.location)
    found = DeltaTable(grown(delta_lake).location)
    assert before.version() + 3 == found.version()
    assert {each["seq"]: tuple(each[name] for name in TYPES) for each in found.to_pyarrow_table().to_pylist()} == (
        EXPECTED
    )
    polars = pytest.importorskip("polars", reason="the extra interop is not installed")
    for uid, seqs in ((1000, [20, 21]), (1001, [22])):  # also by the statistics of the log
        assert polars.scan_delta(delta_lake.location).filter(sender_uid=uid).collect()["seq"].sort().to_list() == seqs
    assert [event.what for event in delta_lake.history()][-3:] == ["columns", "batch", "batch"]
    (newest, *_) = sorted(Path(delta_lake.location, "_delta_log").glob("*.json"))[-1:]
    (added,) = [json.loads(line)["add"] for line in newest.read_text().splitlines() if '"add"' in line]
    counts = json.loads(added["stats"])["nullCount"]
    assert [counts[name] for name in TYPES] == [0, 0, 0, 0, 0]


def test_two_processes_add_the_columns(delta_lake: delta.DeltaLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds that they are there."""
    stale = delta_lake._create()
    grown(delta_lake)
    monkeypatch.setattr(delta_lake, "_create", lambda: stale)
    archive(delta_lake, 4, [row("one", 23, 0)], sender=ALICE)
    monkeypatch.undo()
    assert senders(delta_lake) == EXPECTED | {23: ALICE}
