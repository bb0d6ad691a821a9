"""The archive's state: a lost, older or damaged one brings no row twice, and none is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sbus.errors import JournalError, LakeError
from sbus.journal.consumers import consumers
from sbus.journal.writer import JournalWriter
from sbus.lake.archive import Archive
from sbus.lake.checkpoint import KEPT, Checkpoint
from sbus.lake.maintenance import compact, forget
from sbus.lake.opening import open_table
from tests.support.archived import MIDNIGHT, archived, files, messages, recorded
from tests.support.journals import Clock, NewJournal
from tests.support.waiting import wait_until
from tests.unit.lake.archives import HOUR, failing, put_away


def test_an_older_copy_is_refused(new_journal: NewJournal, tmp_path: Path) -> None:
    """A journal that ends before the last archived row is refused: its next rows would be taken for archived ones."""
    lake, copy = tmp_path / "lake", tmp_path / "copy"
    journal = new_journal()
    journal.append(messages(5))
    journal.close()
    shutil.copytree(journal.directory, copy)
    again = JournalWriter.open(journal.directory)
    again.append(messages(5))
    again.close()
    put_away([journal], lake)
    shutil.rmtree(journal.directory)
    shutil.copytree(copy, journal.directory)
    with pytest.raises(JournalError, match=r"ends before row 10, up to which it was read before: it is an older copy"):
        put_away([journal], lake)
    with closing(JournalWriter.open(journal.directory)) as last:
        last.append(messages(1))
    with pytest.raises(JournalError, match="an older copy"):
        put_away([journal], lake)
    assert put_away([journal], lake, fail_on_data_loss=False).rows == 0


def test_checkpoint_files_torn_by_a_power_cut_are_planned_again(new_journal: NewJournal, tmp_path: Path) -> None:
    """If the newest files of the checkpoint are empty or incomplete, no row is lost, and none is there twice."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(60))
    journal.sync()
    put_away([journal], lake, max_rows=20)
    directory = open_table(str(lake)).state.checkpoint
    last = Checkpoint(directory).last_done()
    (directory / "commits" / str(last)).write_bytes(b"")
    (directory / "offsets" / str(last)).write_bytes(b"v1\n{")
    (directory / "commits" / str(last - 1)).unlink()
    journal.append(messages(40))
    journal.sync()
    put_away([journal], lake, max_rows=25)
    assert archived(lake) == recorded(journal.directory)
    (directory / "offsets" / str(Checkpoint(directory).last_done())).unlink()
    for path in (directory / "offsets").iterdir():
        path.unlink()
    put_away([journal], lake)  # repair has removed the marks without plans, and the lake replaces its files
    assert archived(lake) == recorded(journal.directory)


@pytest.mark.parametrize("damaged", [b"v1\n{", b"v1\n{}\n[1]", None])
def test_a_delta_lake_whose_newest_plan_is_lost(new_journal: NewJournal, tmp_path: Path, damaged: bytes | None) -> None:
    """The archive does not start: with another plan, it would take rows that the lake lacks for archived."""
    pytest.importorskip("deltalake", reason="the extra delta is not installed")
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(10))
    journal.sync()
    with Archive([journal.directory], open_table(str(lake), format="delta")) as job:
        while not job.wait():
            pass
    checkpoint = Checkpoint(open_table(str(lake)).state.checkpoint)
    last = checkpoint.last_done()
    plan = tmp_path / "lake.sbus/checkpoint/offsets" / str(last)
    whole = plan.read_bytes()
    if damaged is None:  # the state is an older copy than the lake
        plan.unlink()
        (plan.parent.parent / "commits" / str(last)).unlink()
    else:
        plan.write_bytes(damaged)
    journal.append(messages(5))
    journal.sync()
    for _ in range(2):
        with pytest.raises(LakeError, match=f"the lake has batch {last}, "):
            put_away([journal], lake)
    plan.write_bytes(whole)
    put_away([journal], lake)
    assert archived(lake) == recorded(journal.directory)


def assert_refused(old: Path, lake: Path, journal: Any) -> None:
    """With an old copy of its state, the archive does not start, and the lake stays as it is."""
    before = archived(lake)
    shutil.rmtree(f"{lake}.sbus")
    shutil.move(old, f"{lake}.sbus")
    with pytest.raises(LakeError, match=r"the lake has batch \d+, "):
        put_away([journal], lake)
    assert archived(lake) == before


@pytest.mark.parametrize("compacts", [False, True])
def test_an_old_state_beside_a_newer_lake(new_journal: NewJournal, tmp_path: Path, compacts: bool) -> None:
    """The archive does not start: it would add rows that the lake already has."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    for number in range(4):
        journal.append(messages(5), MIDNIGHT + number * HOUR)
        journal.sync()
        put_away([journal], lake)
        if number == 1:
            shutil.copytree(f"{lake}.sbus", tmp_path / "old")
    if compacts:
        for _ in range(2):  # rows that come late, so that an hour has several files
            journal.append(messages(5), MIDNIGHT + 3 * HOUR + 1)
            journal.sync()
            put_away([journal], lake)
        assert compact(open_table(str(lake))).hours == 1
    assert_refused(tmp_path / "old", lake, journal)


def test_a_state_that_was_copied_during_a_batch(new_journal: NewJournal, tmp_path: Path) -> None:
    """The copy has the plan of a batch that the lake has compacted since: the archive does not run that batch again."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    for number in range(2):
        journal.append(messages(5))
        journal.sync()
        if number == 1:
            with failing("_move", 0), pytest.raises(OSError, match="the disk is broken"):
                put_away([journal], lake)
            shutil.copytree(f"{lake}.sbus", tmp_path / "old")
        put_away([journal], lake)
    assert compact(open_table(str(lake))).hours == 1
    assert_refused(tmp_path / "old", lake, journal)


def test_an_old_state_beside_a_lake_that_forgot_keys(new_journal: NewJournal, tmp_path: Path) -> None:
    """Files that were rewritten again still say which batches they have, so the old state is refused."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    for number in range(3):
        journal.append([*messages(5), (b"people/jo", b""), (b"people/max", b"")])
        journal.sync()
        put_away([journal], lake)
        if number == 0:
            shutil.copytree(f"{lake}.sbus", tmp_path / "old")
    for key in (b"people/jo", b"people/max"):
        assert forget(open_table(str(lake)), key).dropped == 3
    assert_refused(tmp_path / "old", lake, journal)


def test_what_was_done_is_on_the_disk_before_it_is_reported(
    new_journal: NewJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan, the files and the mark of a batch are synced, in this order, before the journal learns of it."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(3))
    journal.sync()
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    put_away([journal], lake)
    names = [os.path.relpath(path, tmp_path) for path in synced]
    (file,) = files(lake)
    order = [
        names.index("lake.sbus/checkpoint/offsets/1.tmp"),
        next(at for at, name in enumerate(names) if name.endswith("part-00000.parquet")),
        names.index(str(file.parent.relative_to(tmp_path))),
        names.index("lake.sbus/checkpoint/commits/1.tmp"),
        len(names) - 1 - names[::-1].index("journal/consumers/archive.json.tmp"),
    ]
    assert order == sorted(order)


@pytest.mark.slow
def test_old_batches_are_forgotten(new_journal: NewJournal, tmp_path: Path) -> None:
    """The checkpoint keeps as many batches as Spark does."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(KEPT + 5))
    journal.sync()
    put_away([journal], lake, max_rows=1)
    state = open_table(str(lake)).state
    for log in ("offsets", "commits"):
        assert len(list((state.checkpoint / log).iterdir())) == KEPT
    assert len(list((state.directory / "batches").iterdir())) == KEPT


def test_another_lake_under_the_same_name(new_journal: NewJournal, tmp_path: Path) -> None:
    """A second lake under the first one's consumer name is refused before it takes a row; under another it is not."""
    journal = new_journal()
    journal.append(messages(3))
    journal.sync()
    put_away([journal], tmp_path / "one")
    with pytest.raises(JournalError, match=r"the consumer 'archive' is another lake or stream.*two: .*--consumer=NAME"):
        put_away([journal], tmp_path / "two")
    assert not files(tmp_path / "two")
    put_away([journal], tmp_path / "two", consumer="two")
    assert archived(tmp_path / "two") == recorded(journal.directory)


@pytest.mark.parametrize("text", ["{}", '{"id": 7}', '{"id": "../../made", "format": "parquet"}'])
def test_a_lake_json_without_an_id(new_journal: NewJournal, tmp_path: Path, text: str) -> None:
    """The error names the file and the remedy. The ID is not replaced, and no mark is written under a bad one."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(5))
    journal.close()
    put_away([journal], lake)
    identity = tmp_path / "lake.sbus/lake.json"
    whole = identity.read_text()
    identity.write_text(text)
    with pytest.raises(LakeError, match=r"lake\.json: it has no lake ID: restore it from a copy"):
        put_away([journal], lake)
    assert identity.read_text() == text
    assert not (tmp_path / "made").exists()
    identity.write_text(whole)
    assert put_away([journal], lake).rows == 0


def test_a_refused_lake_is_not_made(new_journal: NewJournal, tmp_path: Path) -> None:
    """It would be in the way when the lake is put back that has the name, for example on a disk that is not mounted."""
    journal = new_journal()
    put_away([journal], tmp_path / "srv/lake")
    (tmp_path / "srv").rename(tmp_path / "away")
    with pytest.raises(JournalError, match="the consumer 'archive' is another lake"):
        put_away([journal], tmp_path / "srv/lake")
    assert not (tmp_path / "srv").exists()


@pytest.mark.parametrize("what", ["srv", "srv/lake.sbus"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_it_tries_again_until_the_state_is_back(
    what: str, is_replaced: bool, new_journal: NewJournal, tmp_path: Path
) -> None:
    """Lake and state are gone for a while, or the state alone: the archive makes no other ones in their place."""
    journal, lake, place, away = new_journal(), tmp_path / "srv/lake", tmp_path / what, tmp_path / "away"
    journal.append(messages(5))
    journal.sync()
    command = [sys.executable, "-m", "sbus.cli", "archive", f"--journal={journal.directory}", f"--lake={lake}"]
    with subprocess.Popen([*command, "--every=10ms"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            wait_until(lambda: consumers(journal.directory).get("archive"), lambda at: at == 5)
            place.rename(away)
            if is_replaced:
                place.mkdir()
            journal.append(messages(7))
            journal.sync()
            lines = [process.stderr.readline() for _ in range(2)]
            if is_replaced:
                place.rmdir()
            assert not place.exists()
            away.rename(place)
            wait_until(lambda: consumers(journal.directory).get("archive"), lambda at: at == 12)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert "the state of the lake is gone" in lines[1], lines
    assert archived(lake) == recorded(journal.directory)


def test_a_lake_is_listed_once_at_the_start(new_journal: NewJournal, tmp_path: Path) -> None:
    """A large lake takes seconds to list, so the lock and the search for the last batch share one listing."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(5))
    journal.close()
    put_away([journal], lake)
    table = open_table(str(lake))
    with mock.patch.object(table, "files", side_effect=table.files) as listed:
        with Archive([str(journal.directory)], table) as job:
            assert not job.lag
        assert listed.call_count == 1


def test_a_checkpoint_without_its_last_offset(new_journal: NewJournal, tmp_path: Path) -> None:
    """It could not say where to go on, so it is refused instead of archiving everything again."""
    journal, lake = new_journal(), tmp_path / "lake"
    journal.append(messages(3))
    journal.sync()
    put_away([journal], lake)
    checkpoint = open_table(str(lake)).state.checkpoint
    (checkpoint / "offsets/1").rename(checkpoint / "offsets/2")
    (checkpoint / "offsets/2").write_text((checkpoint / "offsets/0").read_text())
    with pytest.raises(LakeError, match=r"the lake has batch \d+, "):
        put_away([journal], lake)
