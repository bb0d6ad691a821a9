"""Maintenance by root, and a lake for a group: owner, permissions and ACLs of all that is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("deltalake")

from deltalake import DeltaTable

from sbus.errors import LakeError
from sbus.lake.archive import Archive
from sbus.lake.cube import update
from sbus.lake.maintenance import by_hour, compact, forget, prune
from sbus.lake.opening import open_table
from sbus.lake.place import Place
from sbus.lake.state import State
from sbus.lake.table import Table
from tests.support.acls import acl, acl_of, set_acl, with_acls
from tests.support.lakes import archive, row

__all__ = ["with_acls"]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
formats = pytest.mark.parametrize("format", ["parquet", "delta"])
USER, GROUP, READER = 12345, 12346, 12347
_INTERVAL = 5
"""Commits after which Delta's library summarizes the log of a lake here; otherwise it does after a hundred."""


def entries(lake: Path) -> Iterator[Path]:
    """All that is in a lake, and the lake itself."""
    for directory in (lake, lake.with_name(f"{lake.name}.sbus")):
        yield directory
        yield from directory.rglob("*")


def fill(lake: Path, format: str, batches: range = range(2)) -> Table:
    table = open_table(str(lake), format=format)
    for batch in batches:
        rows = [row("j" * 32, batch * 100 + hour * 10 + n, hour, f"plant/{n}") for hour in range(3) for n in range(4)]
        archive(table, batch, rows)
    return table


def new_lake(lake: Path, format: str) -> Table:
    """Make a lake with two batches, whose log is summarized often."""
    table = fill(lake, format)
    if format == "delta":
        DeltaTable(lake).alter.set_table_properties({"delta.checkpointInterval": str(_INTERVAL)})
    return table


def adopt_checkpoint(table: Table) -> None:
    """Do what the archive does after the batches that these tests imitate."""
    for path in (table.state.checkpoint, *table.state.checkpoint.rglob("*"), table.state.staging):
        os.chown(path, USER, GROUP)
        path.chmod(0o750 if path.is_dir() else 0o640)


def everything(table: Table, lake: Path, format: str) -> None:
    """Do all that writes to a lake."""
    fill(lake, format, range(2, 4))
    table = open_table(str(lake))
    table.state.identity(format)
    table.pin(table.files())
    update(table, dict(by_hour(table.files())))
    compact(table)
    forget(table, b"plant/1")
    fill(lake, format, range(4, 5))
    prune(table, 0.0, now=table.files()[0].hour.start.timestamp() + 3600)
    with table.state.maintaining():
        table.vacuum(0)
    if format == "delta":  # its library also summarizes its log
        fill(lake, format, range(5, 5 + _INTERVAL))
        assert list(lake.glob("_delta_log/*.checkpoint.parquet"))


@as_root
@formats
def test_what_root_does_to_a_lake_leaves_it_to_its_owner(tmp_path: Path, format: str) -> None:
    """After root's maintenance all of a lake has the owner, the group and the permissions that it had."""
    lake = tmp_path / "lake"
    table = new_lake(lake, format)
    for path in entries(lake):
        os.chown(path, USER, GROUP)
        path.chmod(0o750 if path.is_dir() else 0o640)
    everything(table, lake, format)
    adopt_checkpoint(table)
    assert len(list(entries(lake))) > 30
    for path in entries(lake):
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (USER, GROUP), path
        assert stat.S_IMODE(status.st_mode) == (0o750 if path.is_dir() else 0o640), path


@as_root
@formats
@pytest.mark.slow
def test_what_root_does_to_a_lake_keeps_its_acls(with_acls: Path, format: str) -> None:
    """A user who was let in by ACLs can read all of the lake after root's maintenance, and root's archive."""
    lake = with_acls / "lake"
    table = new_lake(lake, format)
    given = {True: acl(READER), False: acl(READER, own=6, other_user=4, group=4, mask=4)}
    for path in entries(lake):
        os.chown(path, USER, GROUP)
        set_acl(path, given[path.is_dir()])
        if path.is_dir():
            set_acl(path, acl(READER), default=True)
    everything(table, lake, format)
    for path in entries(lake):
        if table.state.checkpoint in (path, *path.parents):
            continue
        found = acl_of(path)
        assert found is not None, path
        if path.is_dir():
            assert (found, acl_of(path, default=True)) == (acl(READER), acl(READER)), path
        elif path.suffix == ".parquet" and "date=2026-01-31/hour=01" in str(path):
            assert found in (given[False], acl(READER, own=6, mask=6)), path


@formats
def test_rewriting_keeps_the_permissions_of_files(tmp_path: Path, format: str) -> None:
    """The files that compaction and forgetting write have the permissions of those that they replace."""
    lake = tmp_path / "lake"
    table = fill(lake, format)
    files = {file.name for file in table.files()}
    for name in files:
        (lake / name).chmod(0o644)
        (lake / name).parent.chmod(0o2755)
    compact(table)
    forget(table, b"plant/1")
    found = {file.name for file in table.files()}
    assert found
    assert not found & files
    for name in found:
        assert stat.S_IMODE((lake / name).stat().st_mode) == 0o644
        assert stat.S_IMODE((lake / name).parent.stat().st_mode) == 0o2755


@pytest.mark.parametrize(
    ("prepare", "mode", "directories"),
    [
        (None, None, 0o700),
        (0o755, None, 0o700),
        (0o700, None, 0o700),
        (0o750, None, 0o750),
        (0o2770, None, 0o770),
        (None, 0o640, 0o750),
        (0o2750, 0o644, 0o755),
    ],
)
def test_permissions_of_a_new_lake(tmp_path: Path, prepare: int | None, mode: int | None, directories: int) -> None:
    """A lake is its owner's alone, unless a mode is asked for or its directory was made for a group only."""
    state = State(Place(tmp_path / "lake"))
    if prepare is not None:
        (tmp_path / "lake").mkdir()
        (tmp_path / "lake").chmod(prepare)
    state.mode = mode
    with state.locked("lock"):
        state.apply_mode()
    assert (state.directory_mode, state.file_mode) == (directories, directories & 0o666)
    assert stat.S_IMODE(state.directory.stat().st_mode) & 0o777 == directories
    assert stat.S_IMODE((state.directory / "lock").stat().st_mode) == directories & 0o666


def test_a_mode_for_a_lake_that_is_there(tmp_path: Path) -> None:
    """A mode that is asked for later holds for what is new from then on, also without being asked for again."""
    lake = tmp_path / "lake"
    table = fill(lake, "parquet")
    before = {file.name for file in table.files()}
    table.state.mode = 0o640
    table.state.apply_mode()
    fill(lake, "parquet", range(2, 3))
    for file in table.files():
        mode = stat.S_IMODE((lake / file.name).stat().st_mode)
        assert mode == (0o600 if file.name in before else 0o640)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (lake, table.state.directory)] == [0o750, 0o750]


def test_a_snapshot_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance leaves the snapshot of a reader whose lock it may not look at, and goes on."""
    lake = tmp_path / "lake"
    table = fill(lake, "parquet")
    pinned = table.pin(table.files())

    def refused(path: str) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr("sbus.lake.pins.is_locked", refused)
    compact(table)
    assert all(map(os.path.exists, pinned))


@as_root
def test_the_checkpoint_of_an_archive_by_root_belongs_to_the_owner(tmp_path: Path) -> None:
    """What Spark has written there as root goes to the owner of the lake."""
    state = State(Place(tmp_path / "lake"))
    tmp_path.joinpath("lake").mkdir(0o700)
    os.chown(tmp_path / "lake", USER, GROUP)
    state.make_checkpoint()
    (state.checkpoint / "offsets" / "0").write_text("v1\n")
    (state.checkpoint / "sources" / "0").mkdir(parents=True)
    state.adopt_checkpoint()
    for path in (state.directory, *state.directory.rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (USER, GROUP), path


def _planted(lake: Path, victim: Path, name: str) -> None:
    """Make a directory of files, and a link to it in the state of a lake."""
    (victim / "home").mkdir(parents=True)
    (victim / "home" / "file").write_text("precious")
    (victim / "top").write_text("precious")
    place = lake.with_name("lake.sbus") / name
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        shutil.rmtree(place)
    place.symlink_to(victim)


@pytest.mark.parametrize("name", ["staging", "cube", "readers", "retired", "retired/00000000000000000001-aa"])
def test_a_link_in_the_state(name: str, tmp_path: Path) -> None:
    """Whoever owns a lake cannot make root delete anything elsewhere by what maintenance and archives tidy up."""
    lake, victim = tmp_path / "lake", tmp_path / "victim"
    table = new_lake(lake, "parquet")
    table.state.make_checkpoint()
    _planted(lake, victim, name)
    said = set()
    for work in (
        lambda: compact(table, now=time.time()),
        lambda: forget(table, b"plant/1"),
        lambda: prune(table, 1),
        lambda: table.vacuum(0),
        lambda: contextlib.ExitStack().enter_context(table.writing()),
    ):
        try:
            work()
        except LakeError as e:
            said.add(str(e).partition(": ")[2])
    assert said <= {f"{name} in it is no directory, or a link to one, which is not followed: make a directory there"}
    assert sorted(path.name for path in victim.rglob("*")) == ["file", "home", "top"]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/offsets", "checkpoint/commits", "batches"])
def test_a_link_in_place_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """An archive does not begin, so it removes no file that it takes for a torn one of its own."""
    lake, victim = tmp_path / "lake", tmp_path / "victim"
    table = new_lake(lake, "parquet")
    table.state.make_checkpoint()
    _planted(lake, victim, name)
    (victim / "17").write_text("precious")
    (victim / "offsets").mkdir()
    with pytest.raises(LakeError, match=f"{name} in it is no directory, or a link"), Archive([], table):
        pass
    assert (victim / "17").read_text() == "precious"


def test_a_link_in_a_delta_table(tmp_path: Path) -> None:
    """Files that the log of one table does not name are not deleted in another one."""
    table = fill(tmp_path / "lake", "delta")
    other = fill(tmp_path / "other", "delta")
    (tmp_path / "lake" / "date=2026-02-01").symlink_to(next((tmp_path / "other").glob("date=*")))
    before = other.files()
    assert table.sweep() == []
    assert all((tmp_path / "other" / file.name).exists() for file in before)
