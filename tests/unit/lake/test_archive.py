"""The archive without Spark: each row of the journals gets into the lake once, in its hour, whatever fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sbus.cli.main import cli
from sbus.errors import JournalError, LakeError
from sbus.journal.consumers import consumers
from sbus.journal.following import Follower
from sbus.journal.index import read_index
from sbus.journal.layout import ARROWS, INDEX, SUMMARY, list_segments
from sbus.journal.reader import JournalReader, read
from sbus.journal.retention import retain
from sbus.journal.schema import COLUMN_NAMES, Kind, decode, encode
from sbus.journal.writer import JournalWriter
from sbus.lake import plain
from sbus.lake.archive import Archive
from sbus.lake.check import check
from sbus.lake.checkpoint import KEPT, Checkpoint
from sbus.lake.maintenance import compact, forget
from sbus.lake.merge import Limits
from sbus.lake.opening import open_table
from sbus.lake.staging import stage
from sbus.lake.table import Hour, Table
from tests.support.archived import MIDNIGHT, archived, files, messages, recorded
from tests.support.journals import DAMAGE, FORGED, Clock, NewJournal, damage, forge
from tests.support.waiting import wait_until

HOUR = 3_600_000_000


def put_away(journals: Any, lake: Path, **how: Any) -> Archive:
    """Archive the rows that are there now."""
    with Archive([str(getattr(each, "directory", each)) for each in journals], open_table(str(lake)), **how) as job:
        while not job.wait():
            pass
    return job


def remove(journal: Any, segments: int) -> None:
    """Delete the oldest segments, whatever consumers have."""
    for segment in list_segments(journal.directory)[:segments]:
        for suffix in (SUMMARY, INDEX, ARROWS):
            os.unlink(segment.path(suffix))


@contextmanager
def failing(name: str, after: int) -> Iterator[None]:
    """Let a file operation of the lake fail after some that succeed."""
    left, real = [after], getattr(plain, name)

    def run(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "the disk is broken")
        real(*args)

    with mock.patch.object(plain, name, run):
        yield


def test_every_row_gets_into_the_directory_of_its_hour(new_journal: NewJournal, tmp_path: Path) -> None:
    """Messages and gaps are archived; the last microsecond of a day is in another hour than the next one.

    Numbers and times are stored as differences, and payloads that repeat have a dictionary.
    """
    journal = new_journal(clock=Clock(MIDNIGHT - HOUR))
    journal.append_gap(Kind.START, {"patterns": [""]})
    journal.append(messages(1000))
    journal.append_lost(b"70 7000 70 queue-full")
    journal.append([(b"last", b""), (b"first", b"")], [MIDNIGHT - 1, MIDNIGHT])
    journal.sync()
    lake = tmp_path / "lake"
    done = put_away([journal], lake)
    assert archived(lake) == recorded(journal.directory)
    assert [str(path.parent.relative_to(lake)) for path in files(lake)] == [
        "date=2026-01-30/hour=23",
        "date=2026-01-31/hour=00",
    ]
    assert (done.rows, done.batches) == (1004, 1)
    group = pq.ParquetFile(files(lake)[0]).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    for name in ("seq", "time"):
        assert "DELTA_BINARY_PACKED" in columns[name].encodings
    assert columns["payload"].has_dictionary_page
    assert group.column(0).statistics.min == journal.id


def test_a_later_run_takes_what_is_new(new_journal: NewJournal, tmp_path: Path) -> None:
    """A restarted job archives the new rows of known and new journals. It reports to the journals what is safe. Rows
    that were deleted before they were archived are an error.
    """
    lake = tmp_path / "lake"
    one, two = new_journal("one", clock=Clock(MIDNIGHT)), new_journal("two", clock=Clock(MIDNIGHT + HOUR // 2))
    one.append(messages(10))
    one.sync()
    put_away([tmp_path / "o*"], lake)
    assert consumers(one.directory) == {"archive": 10}
    one.append(messages(5))
    one.sync()
    two.append(messages(20))
    two.sync()
    put_away([one, two], lake, consumer="other")
    assert archived(lake) == recorded(one.directory, two.directory)
    assert consumers(one.directory) == {"archive": 10, "other": 15}
    for _ in range(2):
        one.append(messages(3))
        one.roll()
    retain(one.directory, keep_bytes=1, force=True)
    with pytest.raises(JournalError, match=r"rows 15 to 17 of the journal in .* are deleted"):
        put_away([one, two], lake)
    put_away([one, two], lake, fail_on_data_loss=False)
    assert {row["seq"] for row in archived(lake) if row["journal"] == one.id} == {*range(15), *range(18, 21)}


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


def test_a_check_beside_compaction(new_journal: NewJournal, tmp_path: Path) -> None:
    """A file that is replaced while the lake is checked is no fault: the new one is read."""
    lake = tmp_path / "lake"
    journal = new_journal(clock=Clock(MIDNIGHT))
    for _ in range(3):
        journal.append(messages(10))
        journal.sync()
        put_away([journal], lake)
    table = open_table(str(lake))
    opened: list[str] = []

    def open_late(name: str, real: Any = table.open) -> Any:
        if len(opened) == 1:
            compact(open_table(str(lake)))
        opened.append(name)
        return real(name)

    with mock.patch.object(table, "open", open_late):
        found = list(check(table))[-1]
    assert (found.files, found.rows, found.problems) == (1, 30, [])
    assert len(opened) == 3


def test_a_journal_that_is_not_named(new_journal: NewJournal, tmp_path: Path) -> None:
    """An archive of fewer journals than before names the one that is missing, and the remedy."""
    one, two = new_journal("one"), new_journal("two")
    put_away([one, two], tmp_path / "lake")
    with pytest.raises(JournalError, match=rf"journal {two.id} is missing; .* row 0: name its directory as well"):
        put_away([one], tmp_path / "lake")


@pytest.mark.parametrize("place", ["journal", "journal/lake", "link"])
def test_a_lake_in_a_journal(place: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """A lake in a journal is refused before anything is written there."""
    journal = new_journal("journal")
    os.symlink("journal", tmp_path / "link")
    before = sorted(os.listdir(journal.directory))
    with pytest.raises(LakeError, match=r"journal is a journal: name another directory for the lake"):
        put_away([journal], tmp_path / place)
    assert sorted(os.listdir(journal.directory)) == before
    assert not (tmp_path / "journal.sbus").exists()


@pytest.mark.parametrize("name", ["_move", "_sync"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_batch_that_failed_half_way_is_done_again(
    new_journal: NewJournal, tmp_path: Path, name: str, after: int
) -> None:
    """It has the same rows, whatever is recorded meanwhile, and replaces its files that are in the lake already."""
    journal = new_journal(clock=(clock := Clock(MIDNIGHT)))
    for _ in range(3):
        journal.append(messages(10))
        clock.time += HOUR
    journal.sync()
    lake = tmp_path / "lake"
    with failing(name, after), pytest.raises(OSError, match="broken"):
        put_away([journal], lake)
    # The job is known as one that needs all rows, so that nothing is deleted.
    assert consumers(journal.directory) == {"archive": 0}
    assert not list((tmp_path / "lake.sbus/staging").iterdir())
    journal.append(messages(7))
    journal.sync()
    done = put_away([journal], lake)
    assert archived(lake) == recorded(journal.directory)
    assert (done.rows, done.batches) == (37, 2)


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
    before = archived(lake)
    shutil.rmtree(f"{lake}.sbus")
    shutil.move(tmp_path / "old", f"{lake}.sbus")
    with pytest.raises(LakeError, match=r"the lake has batch \d+, "):
        put_away([journal], lake)
    assert archived(lake) == before


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
    before = archived(lake)
    shutil.rmtree(f"{lake}.sbus")
    shutil.move(tmp_path / "old", f"{lake}.sbus")
    with pytest.raises(LakeError, match=r"the lake has batch \d+, "):
        put_away([journal], lake)
    assert archived(lake) == before


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
    before = archived(lake)
    shutil.rmtree(f"{lake}.sbus")
    shutil.move(tmp_path / "old", f"{lake}.sbus")
    with pytest.raises(LakeError, match=r"the lake has batch \d+, "):
        put_away([journal], lake)
    assert archived(lake) == before


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


def test_a_damaged_batch_does_not_stop_the_archive(new_journal: NewJournal, tmp_path: Path) -> None:
    """64 damaged bytes end the job, and cost their batch alone if loss is allowed; a row in the lake counts it."""
    journal = new_journal(clock=Clock(MIDNIGHT))
    for _ in range(3):
        journal.append(messages(10))
    journal.roll()
    (segment,) = list_segments(journal.directory)
    batch = read_index(segment).batches[1]
    with open(segment.path(), "r+b") as file:
        file.seek((batch.start + batch.end) // 2)
        file.write(b"\xa5" * 64)
    lake = tmp_path / "lake"
    with pytest.raises(JournalError, match=r"10 rows from 10.*sbus journal repair"):
        put_away([journal], lake)
    for _ in range(2):
        put_away([journal], lake, fail_on_data_loss=False)
        rows = archived(lake)
        assert [row["seq"] for row in rows] == [*range(11), *range(20, 30)]
        assert [json.loads(row["payload"])["rows"] for row in rows if row["kind"] == "damaged"] == [10]
    assert consumers(journal.directory) == {"archive": 30}


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_damaged_rows_are_named(format_: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """Where loss is allowed, the log names the damaged rows, once, and the last line has their number."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            for _ in range(4):
                journal.append(messages(10))
                journal.append_copies(Kind.CLOCK, [b""], [b'{"step": 1}'], [MIDNIGHT])
    (segment,) = list_segments(str(tmp_path / "a"))
    for batch in read_index(segment).batches[2:4]:
        with open(segment.path(), "r+b") as file:
            file.seek(batch.end - 8)
            file.write(b"\xa5" * 8)
    metrics = tmp_path / "metrics"
    arguments = ["archive", f"--journal={tmp_path}/[ab]", f"--lake={tmp_path}/lake", "--once", "--allow-loss"]
    arguments += [f"--format={format_}", f"--metrics-file={metrics}"]
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    named, last = done.stderr.splitlines()
    assert named == (
        f"the rows 11 to 21 of the journal in {tmp_path}/a are damaged: in the lake, rows of the kind damaged stand "
        "for them"
    )
    assert last.startswith("archived 79 rows in 1 batch, ")
    assert last.endswith(" rows/s), 11 rows lost")
    lake = re.escape(str(tmp_path / "lake"))
    assert re.search(rf'^sbus_archive_lost_rows_total\{{lake="{lake}"\}} 11.0$', metrics.read_text(), re.M)
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.fullmatch(r"archived 0 rows in 0 batches, \d+ s \(0 rows/s\)\n", done.stderr)


@pytest.mark.parametrize("what", [*DAMAGE, *FORGED])
def test_damaged_journals_do_not_hold_up_the_others(what: str, new_journal: NewJournal, tmp_path: Path) -> None:
    """A damaged journal is archived up to the damage, and from there on once it is whole again; each is reported."""
    names = ("a", "b", "c")
    for name in names:
        journal = new_journal(name, clock=Clock(MIDNIGHT))
        for _ in range(3):
            journal.append(messages(10))
        journal.close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    for name in ("a", "b"):
        (forge if what in FORGED else damage)(tmp_path / name, what)
    lake = tmp_path / "lake"
    arguments = ["archive", f"--journal={tmp_path}/[abc]", f"--lake={lake}", "--once", "--max-rows=12"]
    kept = 10 if what == "rows" or what in FORGED else 0
    for _ in range(2):
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 1
        assert result.stderr.endswith(
            f"sbus: 2 journals could not be archived beyond damage: {tmp_path}/a, {tmp_path}/b\n"
        )
        assert len(archived(lake)) == 2 * kept + 30
        assert consumers(str(tmp_path / "c")) == {"archive": 30}
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "copy" / name, tmp_path / name, dirs_exist_ok=True)
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sorted((row["journal"], row["seq"]) for row in archived(lake)) == sorted(
        (JournalReader(tmp_path / name).id, seq) for name in names for seq in range(30)
    )


@pytest.mark.parametrize("suffix", ["journal.json", "arrows", "idx"])
def test_a_journal_that_may_not_be_read(
    suffix: str, new_journal: NewJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up no other one, and its rows follow once the user may read it."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
    real = os.open

    def fail(name: Any, *args: Any, **how: Any) -> int:
        if str(name).startswith(f"{tmp_path}/a/") and str(name).endswith(suffix):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return real(name, *args, **how)

    lake = tmp_path / "lake"
    arguments = ["archive", f"--journal={tmp_path}/[ab]", f"--lake={lake}", "--once"]
    with monkeypatch.context() as patching:
        patching.setattr("sbus.journal.layout.os.open", fail)
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (result.exit_code, len(archived(lake))) == (1, 10)
    assert result.stderr.endswith(f"sbus: 1 journal could not be archived beyond damage: {tmp_path}/a\n")
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (result.exit_code, len(archived(lake))) == (0, 20)


def test_rows_that_wait_for_a_repair_fill_no_batch(new_journal: NewJournal, tmp_path: Path) -> None:
    """However many they are, the rows of other journals wait for the next batch as ever."""
    for name in ("a", "b"):
        with new_journal(name) as journal:
            for _ in range(3):
                journal.append(messages(10))
    damage(tmp_path / "a")
    follower = Follower([f"{tmp_path}/[ab]"], max_rows=15, max_delay=3600, leaves_damaged=True)
    ends = {JournalReader(tmp_path / name).id: end for name, end in (("a", 10), ("b", 30))}
    follower.next({})
    assert (follower.next(ends), len(follower.damaged)) == (ends, 1)
    with JournalWriter.open(tmp_path / "b") as journal:
        journal.append(messages(1))
    assert follower.next(ends) == ends


def test_a_repaired_journal_fills_a_batch(new_journal: NewJournal, tmp_path: Path) -> None:
    """Where loss is allowed, a journal that can be opened again is no longer damaged: all its rows can be read."""
    for name in ("a", "b"):
        with new_journal(name) as journal:
            for _ in range(3):
                journal.append(messages(10))
    a, b = (JournalReader(tmp_path / name).id for name in ("a", "b"))
    identity = (tmp_path / "a" / "journal.json").read_bytes()
    damage(tmp_path / "a", "journal.json")
    follower = Follower([f"{tmp_path}/[ab]"], max_rows=30, max_delay=3600, fail_on_data_loss=False, leaves_damaged=True)
    assert follower.next({b: 0}) == {b: 30}
    assert [*follower.damaged] == [f"{tmp_path}/a"]
    (tmp_path / "a" / "journal.json").write_bytes(identity)
    assert follower.next({a: 0, b: 30}) == {a: 30, b: 30}
    assert follower.damaged == {}


def test_damage_that_hides_the_size_of_a_batch(
    new_journal: NewJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where loss is allowed, nothing waits for a repair, and no warning says that."""
    with new_journal() as journal:
        journal.append(messages(10))
    (segment,) = list_segments(journal.directory)
    os.unlink(segment.path())
    os.mkdir(segment.path())
    lake = tmp_path / "lake"
    put_away([journal], lake, max_bytes=1000, fail_on_data_loss=False, leaves_damaged=True)
    assert [json.loads(row["payload"])["rows"] for row in archived(lake)] == [10]
    (said,) = caplog.messages
    assert said.startswith("the rows 0 to 9 of the journal in ")


def test_journals_are_missing_beside_one_that_cannot_be_opened(new_journal: NewJournal, tmp_path: Path) -> None:
    """It may be one of those that are missing, but not two of them."""
    ids: dict[str, str] = {}
    for name in ("a", "b", "c"):
        with new_journal(name) as journal:
            ids[name] = journal.id
    follower = Follower([f"{tmp_path}/*"], leaves_damaged=True)
    start = follower.next({})
    os.mkdir(tmp_path / "x")
    (tmp_path / "x" / "journal.json").write_text("{")
    shutil.rmtree(tmp_path / "b")
    assert follower.next(start) == start
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(JournalError) as caught:
        follower.next(start)
    first, second = sorted((ids["b"], ids["c"]))
    assert str(caught.value).startswith(
        f"the journal {first} is missing; it was read up to row 0; "
        f"the journal {second} is missing; it was read up to row 0; "
        "1 of them may be among those that cannot be opened: name its directory as well"
    )


def test_the_log_shows_no_control_characters(new_journal: NewJournal, tmp_path: Path) -> None:
    """It names directories of journals, which other users have named."""
    name = "j\x1b[31m\n"
    new_journal(name).close()
    (tmp_path / name / "consumers").touch()
    arguments = ["archive", f"--journal={tmp_path}/*", f"--lake={tmp_path}/lake", "--once"]
    done = subprocess.run([sys.executable, "-m", "sbus", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    said, _ = done.stderr.splitlines()
    assert said.startswith(f"{tmp_path}/j\\x1b[31m\\x0a: the progress of the consumer 'archive' cannot be written")


def test_an_archive_that_follows_takes_what_was_repaired(
    new_journal: NewJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The damage is logged once, and the archive takes the rows behind it as soon as it is repaired."""
    for name in ("a", "b"):
        with new_journal(name, clock=Clock(MIDNIGHT)) as journal:
            for _ in range(3):
                journal.append(messages(10))
    identity = (tmp_path / "a" / "journal.json").read_bytes()
    with Archive([str(tmp_path / "[ab]")], open_table(str(tmp_path / "lake")), every=0.001, leaves_damaged=True) as job:

        def works(rows: int, *damaged: Path) -> bool:
            job.wait(0.001)
            return (job.rows, job.lag, job.damaged) == (rows, 0, [*map(str, damaged)])

        wait_until(lambda: works(60))
        damage(tmp_path / "a", "journal.json")
        with JournalWriter.open(tmp_path / "b", clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
        wait_until(lambda: works(70, tmp_path / "a"))
        (tmp_path / "a" / "journal.json").write_bytes(identity)
        with JournalWriter.open(tmp_path / "a", clock=Clock(MIDNIGHT)) as journal:
            journal.append(messages(10))
        wait_until(lambda: works(80))
    (said,) = caplog.messages
    assert said == (
        f"{tmp_path}/a/journal.json: it is damaged (no JSON object): restore it from a copy; "
        "the rows of this journal from there on wait for that"
    )


def test_a_damaged_row_is_one_row_and_no_hole(new_journal: NewJournal, tmp_path: Path) -> None:
    """The archive counts the rows that the lake has; the check finds no row missing where one stands for many."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    journal.append(messages(20))
    journal.append_copies(Kind.DAMAGED, [b""], [b'{"rows": 500}'], [MIDNIGHT])
    journal.append(messages(10))
    journal.sync()
    job = put_away([journal], lake)
    assert (job.rows, job.batches, job.lost) == (31, 1, 500)
    assert consumers(journal.directory) == {"archive": 530}
    (*_, found) = check(open_table(str(lake)))
    assert (found.rows, found.problems, found.holes) == (31, [], {})


def test_rows_that_were_deleted_are_counted(new_journal: NewJournal, tmp_path: Path) -> None:
    """An archive that may go on without them says how many there were, and counts as archived what the lake has."""
    journal, lake = new_journal(segment_bytes=1), tmp_path / "lake"
    journal.append(messages(10))
    journal.sync()
    put_away([journal], lake)
    for _ in range(3):
        journal.append(messages(10))
    journal.sync()
    remove(journal, 3)
    with pytest.raises(JournalError, match="the rows 10 to 29 of the journal in"):
        put_away([journal], lake)
    job = put_away([journal], lake, fail_on_data_loss=False)
    assert (job.rows, job.lost, job.lag) == (10, 20, 0)
    assert job.done_at == pytest.approx(time.time(), abs=60)
    assert len(archived(lake)) == 20


def test_rows_that_are_deleted_once_they_are_archived_are_not_lost(
    new_journal: NewJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither are they counted as lost if that happens before their batch is counted."""
    journal, lake = new_journal(segment_bytes=1), tmp_path / "lake"
    for _ in range(3):
        journal.append(messages(10))
    journal.sync()
    real = Checkpoint.mark

    def mark(*args: Any) -> None:
        real(*args)
        if args[1] > 0:
            remove(journal, 2)

    monkeypatch.setattr(Checkpoint, "mark", mark)
    job = put_away([journal], lake, fail_on_data_loss=False)
    assert (job.rows, job.lost, len(archived(lake))) == (30, 0, 30)


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_archive_by_root_leaves_the_lake_to_its_owner(new_journal: NewJournal, tmp_path: Path) -> None:
    """All that root's archive writes for a lake of another user, also beside it, belongs to that user."""
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    journal.append(messages(10))
    journal.sync()
    lake.mkdir(0o750)
    for path in (lake, Path(journal.directory)):
        os.chown(path, 12345, 12346)
    put_away([journal], lake)
    beside = tmp_path / "lake.sbus"
    consumed = Path(journal.directory) / "consumers"
    for path in (lake, *lake.rglob("*"), beside, *beside.rglob("*"), *consumed.rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346), path
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(lake)} == {0o640}


# --- files --------------------------------------------------------------------------------------


def source(journal: Any) -> Iterator[pa.RecordBatch]:
    reader = JournalReader(journal.directory)
    for part in reader.plan(reader.start(), reader.end()):
        yield from read(part, COLUMN_NAMES)


@pytest.mark.parametrize("format_", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
def test_several_files_of_an_hour_and_batch(new_journal: NewJournal, tmp_path: Path, format_: str) -> None:
    """A batch with too many rows of an hour for one file has several; committed again with fewer, it has those. They
    are compacted as all others.
    """
    if format_ == "delta":
        pytest.importorskip("deltalake", reason="the extra delta is not installed")
    journal, lake = new_journal(clock=Clock(MIDNIGHT)), tmp_path / "lake"
    for _ in range(30):
        journal.append(messages(100))
    journal.sync()
    table: Table = open_table(str(lake), format=format_)
    small, large = Limits(max_bytes=1, group_bytes=40_000), Limits()
    with table.writing():
        checkpoint = Checkpoint(table.state.checkpoint)
        checkpoint.plan(0, {journal.id: 3000}, 0o600)
        for limits in (small, large, small) if format_ == "parquet" else (small,):
            staged = table.state.staging / "batch"
            stage(staged, [source(journal)], limits)
            table.commit(0, staged)
            assert (len(table.files()) > 3) == (limits is small)
            assert archived(lake) == recorded(journal.directory)
        checkpoint.mark(0, 0o600)
    assert {file.batch for file in table.files()} == {0 if format_ == "parquet" else None}
    compact(table)
    assert len(table.files()) == 1
    assert list(check(table))[-1].problems == []


def test_journals_take_turns_by_hours(new_journal: NewJournal, tmp_path: Path) -> None:
    """Rows of many journals and hours: each hour is one file, sorted by journal and number. A clock that was set back
    gives an hour rows after it was ended, and then another file.
    """
    clock = Clock(MIDNIGHT)
    journals = sorted((new_journal(str(number), clock=clock) for number in range(5)), key=lambda each: each.id)
    for _ in range(7):
        for journal in journals:
            journal.append(messages(10))
        clock.time += HOUR
    for journal in journals:
        journal.sync()
    staged = tmp_path / "staged"
    stage(staged, [source(journal) for journal in journals])
    assert len(files(staged)) == 7
    for path in files(staged):
        found = [(row["journal"], row["seq"]) for row in pq.read_table(path, partitioning=None).to_pylist()]
        assert found == sorted(found)
        assert len(found) == 50
    clock.time = MIDNIGHT
    journals[0].append(messages(10))
    journals[0].sync()
    shutil.rmtree(staged)
    stage(staged, [source(journals[0])])
    assert len(files(staged)) == 8
    assert (
        sum(pq.read_metadata(path).num_rows for path in staged.glob("*/hour=00/*")) == 21
    )  # and the step of the clock


def test_a_fleet(tmp_path: Path) -> None:
    """An hour may have rows of more journals than fit into a byte, of machines that are known and of others."""
    journals = [[decode(encode(Kind.MESSAGE, 0, MIDNIGHT, [b"k"], [b""]), f"{number:032x}", host="pump" if number % 2
                 else None)] for number in range(300)]  # fmt: skip
    stage(tmp_path / "staged", journals)
    (path,) = files(tmp_path / "staged")
    found = pq.read_table(path, partitioning=None)
    assert found["journal"].to_pylist() == [f"{number:032x}" for number in range(300)]
    assert found["host"].to_pylist() == [None, "pump"] * 150


def test_an_hour_before_1970(new_journal: NewJournal, tmp_path: Path) -> None:
    """A clock that was wrong by decades: the hour is the one that the time is in."""
    journal = new_journal(clock=Clock(0))
    journal.append([(b"k", b"")] * 2, [HOUR - 1, HOUR])
    journal.sync()
    stage(tmp_path / "staged", [source(journal)])
    assert [path.parent.name for path in files(tmp_path / "staged")] == ["hour=00", "hour=01"]
    assert Hour.parse("date=1970-01-01/hour=01").start.timestamp() == 3600


# --- the command --------------------------------------------------------------------------------


def test_it_follows_a_journal_until_a_signal(new_journal: NewJournal, tmp_path: Path) -> None:
    """New rows get into the lake without another start; SIGTERM ends it with status 0, and its metrics are there."""
    journal, lake = new_journal(), tmp_path / "lake"
    command = [
        *(sys.executable, "-m", "sbus.cli", "archive", f"--journal={journal.directory}", f"--lake={lake}"),
        *("--every=10ms", f"--metrics-file={tmp_path}/metrics"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for count in (5, 7):
                journal.append(messages(count))
                journal.sync()
                wait_until(lambda: consumers(journal.directory).get("archive"), lambda at: at == journal.next_seq)
            process.send_signal(signal.SIGTERM)
            _, text = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "archived 12 rows in" in text
    assert archived(lake) == recorded(journal.directory)
    figures = (tmp_path / "metrics").read_text()
    assert f'sbus_archive_rows_total{{lake="{lake}"}} 12.0' in figures
    assert f'sbus_archive_lag_rows{{lake="{lake}"}} 0.0' in figures
