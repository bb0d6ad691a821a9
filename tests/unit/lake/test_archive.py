"""The archive without Spark: each row of the journals gets into the lake once, in its hour, whatever fails."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sbus.errors import JournalError, LakeError
from sbus.journal.consumers import consumers
from sbus.journal.layout import ARROWS, INDEX, SUMMARY, list_segments
from sbus.journal.reader import JournalReader, read
from sbus.journal.retention import retain
from sbus.journal.schema import COLUMN_NAMES, Kind, decode, encode
from sbus.lake.check import check
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.maintenance import compact
from sbus.lake.merge import Limits
from sbus.lake.opening import open_table
from sbus.lake.staging import stage
from sbus.lake.table import Hour, Table
from tests.support.archived import MIDNIGHT, archived, files, messages, recorded
from tests.support.journals import Clock, NewJournal
from tests.support.waiting import wait_until
from tests.unit.lake.archives import HOUR, failing, put_away


def remove(journal: Any, segments: int) -> None:
    """Delete the oldest segments, whatever consumers have."""
    for segment in list_segments(journal.directory)[:segments]:
        for suffix in (SUMMARY, INDEX, ARROWS):
            os.unlink(segment.path(suffix))


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


# --- files ----------------------------------------------------------------------------------------


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


# --- the command ----------------------------------------------------------------------------------


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
