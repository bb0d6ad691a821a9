"""Lakes of Delta tables: each batch is there once, in all its hours, for every program that reads Delta."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

pytest.importorskip("deltalake", reason="the extra delta is not installed")

import pyarrow as pa
from deltalake import DeltaTable

from sbus.errors import LakeError
from sbus.lake.delta import DeltaLake
from sbus.lake.maintenance import compact, forget, prune
from sbus.lake.opening import open_table
from sbus.lake.plain import PlainTable
from sbus.lake.table import Hour
from tests.support.lakes import archive, row, rows_of

NOW = Hour("2026-02-02", 0).start.timestamp()


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    """A lake with three hours, of six batches."""
    table = DeltaLake(str(tmp_path / "lake"))
    for batch in range(6):
        archive(table, batch, [row("one", 10 * batch + n, (batch + n) // 5) for n in range(10)])
    return table


def test_a_batch_that_is_archived_again_is_there_once(lake):
    """A commit that is repeated after a crash finds its transaction in the log, and adds nothing."""
    before = rows_of(lake)
    assert len(before) == 60
    archive(lake, 5, [row("one", 50 + n, (5 + n) // 5) for n in range(10)])
    assert rows_of(lake) == before
    assert DeltaTable(lake.location).transaction_version(lake.state.identity("delta")) == 5
    assert not list(lake.state.staging.iterdir())


def test_only_its_own_orphans_are_deleted(lake):
    """A file in an hour that no commit names goes after a week. What else is in the directory stays, such as a lake."""
    before = rows_of(lake)
    other = PlainTable(Path(lake.location) / "inner")
    archive(other, 0, [row("two", 0, 0)])
    file = Path(lake.location) / lake.files()[0].name
    for name in ("old.parquet", "young.parquet"):
        shutil.copy(file, file.with_name(name))
    eight_days_ago = time.time() - 8 * 86400
    for path in Path(lake.location).glob("**/*.parquet"):
        if path.name != "young.parquet":
            os.utime(path, (eight_days_ago, eight_days_ago))
    assert lake.vacuum(lake.grace) == 1
    assert [Path(each.name).name for each in lake.unnamed()] == ["young.parquet"]
    assert rows_of(other) == [row("two", 0, 0)]
    assert rows_of(lake) == before


def test_the_log_has_statistics_of_each_file(lake):
    """Rows, and the least and greatest seq and time, from the footers: readers skip files by them. No key is there."""
    found = pa.table(DeltaTable(lake.location).get_add_actions(flatten=True)).to_pylist()
    rows = rows_of(lake)
    assert sum(each["num_records"] for each in found) == len(rows)
    assert min(each["min.seq"] for each in found) == 0
    assert max(each["max.time"] for each in found) == rows[-1][2]
    assert "a/b" not in "".join(path.read_text() for path in Path(lake.location, "_delta_log").glob("*.json"))


def test_compaction_is_a_commit(lake):
    """Each hour becomes one file; the version before still has the old ones, which vacuum deletes when they are due."""
    before, version = rows_of(lake), DeltaTable(lake.location).version()
    old = lake.files()
    assert compact(lake, now=NOW).hours == 3
    assert rows_of(lake) == before
    assert len(lake.files()) == 3
    assert DeltaTable(lake.location, version=version).to_pyarrow_table().num_rows == len(before)
    assert [event.what for event in lake.history()][-3:] == ["compact"] * 3
    assert lake.vacuum(3600) == 0
    assert lake.vacuum(0) == len(old)
    assert rows_of(lake) == before
    (lake.state.directory / "staging").mkdir(exist_ok=True)
    assert (lake.state.directory / "lake.json").exists()


def test_two_rewrites_of_one_version(lake, monkeypatch):
    """Of two machines that rewrite the same version of a table the second is refused; a batch in between is not."""
    files = lake.files()
    real, stale = lake._table, DeltaTable(lake.location)
    assert lake.replace(files[:1], {files[0].hour: []}, "forget", "")
    archive(lake, 6, [row("one", 100, 0)])
    monkeypatch.setattr(lake, "_table", lambda: stale)
    assert not lake.replace(files[:1], {files[0].hour: []}, "forget", "")
    monkeypatch.setattr(lake, "_table", real)
    assert not lake.replace(files[:1], {files[0].hour: []}, "forget", "")  # the file is gone
    assert len(rows_of(lake)) == 61 - 5


@pytest.mark.parametrize("meanwhile", ["optimize", "batch"])
def test_a_change_between_the_look_at_a_table_and_a_rewrite(lake, monkeypatch, meanwhile):
    """After Delta's own optimize, a rewrite changes nothing, and doubles no row; after a batch, it takes effect."""
    before, real = rows_of(lake), lake._commit

    def late(*args, **how):
        monkeypatch.setattr(lake, "_commit", real)
        if meanwhile == "optimize":
            assert DeltaTable(lake.location).optimize.compact()["numFilesRemoved"]
        else:
            archive(lake, 6, [row("one", 100, 0)])
        return real(*args, **how)

    monkeypatch.setattr(lake, "_commit", late)
    done = compact(lake, now=NOW)
    assert (done.hours, done.left > 0) == ((0, True) if meanwhile == "optimize" else (3, False))
    assert [each for each in rows_of(lake) if each[1] < 100] == before


@pytest.mark.parametrize("change", [lambda lake: forget(lake, b"people/jo"), lambda lake: prune(lake, 0)])
def test_files_that_were_replaced_meanwhile_are_left(lake, monkeypatch, change):
    """Messages to forget or prune may be in the new files, so the command does not report that nothing is left."""
    archive(lake, 6, [row("one", 100, 1, "people/jo")])
    real = lake._commit

    def late(*args, **how):
        monkeypatch.setattr(lake, "_commit", real)
        DeltaTable(lake.location).optimize.compact()
        return real(*args, **how)

    monkeypatch.setattr(lake, "_commit", late)
    assert change(lake).left > 0
    assert any(each[4] == "people/jo" for each in rows_of(lake))
    assert change(lake).left == 0
    assert not any(each[4] == "people/jo" for each in rows_of(lake))


def test_pruning_and_forgetting(lake):
    """Old hours go in one commit; a key that is forgotten is in no file and in no commit any more."""
    archive(lake, 6, [row("one", 100, 1, "people/jo"), row("one", 101, 2)])
    assert forget(lake, b"people/jo").dropped == 1
    for path in (*Path(lake.location).rglob("*"), *lake.state.directory.rglob("*")):
        assert not path.is_file() or b"people/jo" not in path.read_bytes()
    version = DeltaTable(lake.location).version()
    assert prune(lake, 1, now=Hour("2026-02-01", 2).start.timestamp()).hours == 2
    assert DeltaTable(lake.location).version() == version + 1
    assert {file.hour.hour for file in lake.files()} == {2}


def test_another_archive_is_refused(lake, tmp_path):
    """A table belongs to one state: with another one, batches would be numbered from 0 again, and rows lost."""
    other = DeltaLake(lake.location, tmp_path / "state")
    with pytest.raises(LakeError, match="another archive writes to this table"):
        archive(other, 0, [row("one", 1000, 0)])


def test_the_format_of_a_lake_is_known(lake, tmp_path):
    """A lake is opened in its own format; another one is refused."""
    assert isinstance(open_table(lake.location), DeltaLake)
    assert isinstance(open_table(str(tmp_path / "new")), PlainTable)
    assert isinstance(open_table(str(tmp_path / "new"), format="delta"), DeltaLake)
    with pytest.raises(LakeError, match="this lake has the format delta, not parquet"):
        open_table(lake.location, format="parquet")
    with pytest.raises(LakeError, match="--format=delta"):
        open_table("s3://bucket/lake", format="parquet")


def test_a_commit_is_synced_before_it_counts(lake, monkeypatch):
    """The plan of the batch, its files, its commit and the directories are on the disk when the batch is done."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    archive(lake, 6, [row("one", 100, 1)])
    (file,) = [file for file in lake.files() if "0000000006" in file.name]
    names = [os.path.relpath(path, lake.location) for path in synced]
    assert names[0] == "../lake.sbus/checkpoint/offsets/6"
    commit = f"_delta_log/{DeltaTable(lake.location).version():020}.json"
    assert names.index(commit) > names.index(os.path.dirname(file.name))
    assert names[-1] == "_delta_log"
    assert json.loads(Path(lake.location, commit).read_text().splitlines()[0])["commitInfo"]["sbus"] == "batch"


def test_a_commit_that_was_not_synced_is_when_it_comes_again(lake, monkeypatch):
    """A run that was killed between its commit and the sync is repeated: only then the batch counts as done."""
    monkeypatch.setattr(DeltaLake, "_settle_log", lambda *args: None)
    archive(lake, 6, [row("one", 100, 1)])
    monkeypatch.undo()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    archive(lake, 6, [row("one", 100, 1)])
    names = [os.path.relpath(path, lake.location) for path in synced]
    assert f"_delta_log/{DeltaTable(lake.location).version():020}.json" in names
    assert names[-1] == "_delta_log"
