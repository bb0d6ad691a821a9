"""Where the state of a lake is: beside it, or inside where it must be; moved once, and never mixed up."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sbus.errors import LakeError, StorageError
from sbus.lake.maintenance import compact
from sbus.lake.opening import open_existing, open_table
from sbus.lake.place import LOCKS, Place
from sbus.lake.plain import PlainTable
from sbus.lake.table import Hour, Table
from tests.support.disks import mounted
from tests.support.lakes import archive, row, rows_of

NOW = Hour("2026-02-02", 0).start.timestamp()


def write(table: Table, batch: int) -> None:
    """Do what an archive does that is started for one batch."""
    with table.writing():
        archive(table, batch, [row("one", 10 * batch + n, n // 5) for n in range(10)])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A lake of an earlier version, with three batches."""
    table = PlainTable(tmp_path / "lake")
    for batch in range(3):
        write(table, batch)
    shutil.rmtree(tmp_path / "lake/_sbus")
    (tmp_path / "lake.sbus/marked").unlink()
    (tmp_path / "lake.sbus").rename(tmp_path / "lake/_sbus")
    return tmp_path / "lake"


def test_a_new_lake_has_only_rows_in_it(tmp_path: Path) -> None:
    """All files below the directory are files of rows; the rest is beside it."""
    table = PlainTable(tmp_path / "lake")
    write(table, 0)
    found = {str(path.relative_to(tmp_path / "lake")) for path in (tmp_path / "lake").rglob("*") if path.is_file()}
    assert found == {file.name for file in table.files()}
    assert (tmp_path / "lake.sbus/lake.json").exists()


def test_the_state_of_an_earlier_version_is_moved(old: Path) -> None:
    """The next archive moves it and goes on; maintenance leaves it where it is."""
    before = rows_of(PlainTable(old))
    compact(PlainTable(old), now=NOW)
    assert (old / "_sbus/checkpoint").exists()
    table = PlainTable(old)
    write(table, 3)
    assert not (old / "_sbus/checkpoint").exists()
    assert table.state.settled() == 3
    assert set(rows_of(table)) > set(before)


@pytest.mark.parametrize("name", LOCKS)
def test_a_state_in_use_is_not_moved(old: Path, name: str) -> None:
    """While another process holds one of its locks, or a query reads a snapshot, it stays inside, and works there."""
    with PlainTable(old).state.locked(name):
        Place(old).move_out()
        assert (old / "_sbus/lake.json").exists()
    table = PlainTable(old)
    table.pin(table.files())
    write(table, 3)
    assert (old / "_sbus/lake.json").exists()
    assert table.state.settled() == 3


def test_a_crash_behind_the_move(old: Path) -> None:
    """If the machine stops between the move and the mark, the next archive goes on, and marks the lake."""
    Place(old).move_out()
    assert not (old / "_sbus").exists()
    table = PlainTable(old)
    write(table, 3)
    assert len(rows_of(table)) == 40
    assert (old / "_sbus" / str(table.state.fields()["id"])).is_dir()


def test_an_empty_lake_of_an_earlier_version(old: Path) -> None:
    """All its hours were pruned: it is moved and goes on, because nothing says that it ever had the mark."""
    for hour in old.glob("date=*"):
        shutil.rmtree(hour)
    write(PlainTable(old), 3)
    assert len(rows_of(PlainTable(old))) == 10


def test_who_waits_for_a_lock_takes_the_one_that_was_moved(old: Path) -> None:
    """A process that has opened a lock before the move waits for the archive all the same."""
    table = PlainTable(old)
    assert table.state.directory == old / "_sbus"
    Place(old).move_out()
    with table.state.locked("commit.lock"):
        assert not (old / "_sbus").exists()
        with pytest.raises(LakeError, match="held"), PlainTable(old).state.locked("commit.lock", "held"):
            pass


def test_an_earlier_version_cannot_write(old: Path) -> None:
    """It looks for its locks in the lake, and finds directories that it cannot open."""
    write(PlainTable(old), 3)
    for name in LOCKS:
        with pytest.raises(IsADirectoryError):
            os.open(old / "_sbus" / name, os.O_RDWR | os.O_CREAT)


def test_a_state_without_its_lake(tmp_path: Path) -> None:
    """If the rows are removed and the state is not, an archive is refused: it would go on in an empty lake."""
    table = PlainTable(tmp_path / "lake")
    write(table, 0)
    shutil.rmtree(tmp_path / "lake")
    with pytest.raises(LakeError, match=r"its rows are gone, but its state is there.*remove .*lake\.sbus"):
        write(table, 1)
    shutil.rmtree(tmp_path / "lake.sbus")
    write(table, 0)
    assert len(rows_of(table)) == 10


@pytest.mark.parametrize("format_", ["parquet", "delta"])
@pytest.mark.parametrize("replaced", [None, "directory", "file", "link"])
def test_a_lake_that_is_moved_away_while_it_is_written(tmp_path: Path, replaced: str | None, format_: str) -> None:
    """The archive does not go on in an empty lake, which would be in the way when the lake is put back; and no command
    takes for a lake what is there meanwhile.
    """
    lake, away, other = tmp_path / "lake", tmp_path / "away", tmp_path / "other"
    other.mkdir()
    table = open_table(str(lake), format=format_)
    with table.writing():
        archive(table, 0, [row("one", 0, 0)])
        lake.rename(away)
        if replaced == "directory":
            lake.mkdir()
        elif replaced == "file":
            lake.write_text("not mounted")
        elif replaced == "link":
            lake.symlink_to(other)
        with pytest.raises(StorageError, match="its rows are gone, but its state is there"):
            archive(table, 1, [row("one", 1, 1)])
    with pytest.raises(StorageError, match="its rows are gone, but its state is there"):
        write(table, 1)
    if replaced != "link":  # by its name, that is another lake
        with pytest.raises(StorageError, match="its rows are gone, but its state is there"):
            open_existing(str(lake))
    if replaced == "directory":
        lake.rmdir()
    else:
        lake.unlink(missing_ok=True)
    assert os.listdir(other) == []
    assert sorted(os.listdir(tmp_path)) == ["away", "lake.sbus", "other"]
    away.rename(lake)
    write(table, 1)
    assert len(rows_of(table)) == 11


def test_a_link_to_a_lake_that_is_changed_while_it_is_written(tmp_path: Path) -> None:
    """The rows of one lake do not get into another one."""
    link = tmp_path / "link"
    for name in ("one", "two"):
        write(PlainTable(tmp_path / name), 0)
    link.symlink_to("one")
    table = PlainTable(link)
    with table.writing():
        link.unlink()
        link.symlink_to("two")
        with pytest.raises(StorageError, match="its rows are gone, but its state is there"):
            archive(table, 1, [row("one", 1, 1)])
    assert len(rows_of(PlainTable(tmp_path / "two"))) == 10


def test_the_state_of_another_lake(tmp_path: Path) -> None:
    """A lake that was moved to the place of another one, without its state, is not written."""
    for name in ("one", "two"):
        write(PlainTable(tmp_path / name), 0)
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "two").rename(tmp_path / "one")
    with pytest.raises(LakeError, match=r"one\.sbus is the state of another lake"):
        write(PlainTable(tmp_path / "one"), 1)
    shutil.rmtree(tmp_path / "one.sbus")
    (tmp_path / "two.sbus").rename(tmp_path / "one.sbus")
    write(PlainTable(tmp_path / "one"), 1)


def test_a_lake_has_one_state_under_all_its_names(tmp_path: Path) -> None:
    """A link to a lake leads to the same state."""
    write(PlainTable(tmp_path / "lake"), 0)
    (tmp_path / "link").symlink_to("lake")
    table = PlainTable(tmp_path / "link")
    write(table, 1)
    assert table.state.directory == tmp_path / "lake.sbus"
    assert len(rows_of(table)) == 20


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("is_bound", [False, True])
def test_a_lake_that_is_a_mount_point(tmp_path: Path, is_bound: bool) -> None:
    """Its state is inside, on the same file system, also if a directory of the file system above is mounted there."""
    with mounted(tmp_path / "disk", "2m") as disk:
        lake = disk / "a lake"
        lake.mkdir()
        if is_bound:
            (disk / "real").mkdir()
            subprocess.run(["mount", "--bind", disk / "real", lake], check=True)
        else:
            subprocess.run(["mount", "-t", "tmpfs", "none", lake], check=True)
        try:
            table = open_table(str(lake))
            write(table, 0)
            assert table.state.directory == lake / "_sbus"
            compact(table, now=NOW)
            write(table, 1)
            assert table.state.directory == lake / "_sbus"
            assert len(rows_of(table)) == 20
        finally:
            subprocess.run(["umount", lake], check=True)
