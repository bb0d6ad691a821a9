"""The archive job on Spark: each row of the journals gets into the lake once, in its hour, whatever fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pyarrow.parquet as pq
import pytest

from sbus.errors import JournalError, LakeError, SparkError
from sbus.journal.consumers import consumers
from sbus.journal.digests import Digest
from sbus.journal.index import read_index
from sbus.journal.layout import list_segments
from sbus.journal.retention import retain
from sbus.journal.schema import COLUMN_NAMES, Kind
from sbus.lake.checkpoint import Checkpoint
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from tests.support.archived import MIDNIGHT, archived, files, messages, recorded
from tests.support.journals import Clock

HOUR = 3_600_000_000


def put_away(spark, journals, lake: Path, **how) -> Archive:
    """Archive the rows that are there now."""
    with Archive(spark, [str(journal) for journal in journals], Lake(lake), **how) as archive:
        while not archive.wait(30):
            pass
    return archive


def test_every_row_gets_into_the_directory_of_its_hour(spark, new_journal, tmp_path):
    """Messages, digests and gaps are archived; the last microsecond of a day is in another hour than the next one.

    Numbers and times are stored as differences.
    """
    clock = Clock(MIDNIGHT - HOUR)
    journal = new_journal(clock=clock)
    journal.append_gap(Kind.START, {"patterns": [""]})
    journal.append(messages(1000))
    journal.append_lost(b"70 7000 70 queue-full")
    journal.append_digest(b"camera/1", digest := Digest(6_220_800, "ab" * 32))
    journal.append([(b"last", b"")], MIDNIGHT - 1)
    journal.append([(b"first", b"")], MIDNIGHT)
    journal.sync()
    done = put_away(spark, [journal.directory], tmp_path / "lake")
    assert archived(tmp_path / "lake") == recorded(journal.directory)
    assert [str(path.parent.relative_to(tmp_path / "lake")) for path in files(tmp_path / "lake")] == [
        "date=2026-01-30/hour=23",
        "date=2026-01-31/hour=00",
    ]
    assert [row["payload"] for row in archived(tmp_path / "lake") if row["kind"] == "lost"] == [
        b"70 7000 70 queue-full"
    ]
    assert [row["payload"] for row in archived(tmp_path / "lake") if row["kind"] == "digest"] == [digest.pack()]
    assert (done.rows, done.batches) == (1005, 1)
    group = pq.ParquetFile(files(tmp_path / "lake")[0]).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    for name in ("seq", "time"):
        assert "DELTA_BINARY_PACKED" in columns[name].encodings
        assert not columns[name].has_dictionary_page


@pytest.mark.slow
def test_a_later_run_takes_what_is_new(spark, new_journal, tmp_path):
    """A restarted job archives the new rows of known and new journals, with one file for each batch and hour. It
    reports to the journals what is safe. Rows that were deleted before they were archived are an error.
    """
    one, two = new_journal("one", clock=Clock(MIDNIGHT)), new_journal("two", clock=Clock(MIDNIGHT + HOUR // 2))
    one.append(messages(10))
    one.sync()
    put_away(spark, [tmp_path / "o*"], tmp_path / "lake")
    assert consumers(one.directory) == {"archive": 10}
    one.append(messages(5))
    one.sync()
    two.append(messages(20))
    two.sync()
    put_away(spark, [one.directory, two.directory], tmp_path / "lake", consumer="other")
    assert archived(tmp_path / "lake") == recorded(one.directory, two.directory)
    assert 2 <= len(files(tmp_path / "lake")) <= 3
    assert consumers(one.directory) == {"archive": 10, "other": 15}
    assert consumers(two.directory) == {"other": 20}
    one.append(messages(3))
    one.roll()
    one.append(messages(3))
    one.roll()
    retain(one.directory, keep_bytes=1, force=True)
    with pytest.raises(JournalError, match=r"rows 15 to 17 of the journal in .* are deleted"):
        put_away(spark, [one.directory, two.directory], tmp_path / "lake")


def failing(operations: Iterator[int]):
    """Let each commit fail at the next of the given file operations, until there are no more."""
    from sbus.lake import plain as module

    real = {name: getattr(module, name) for name in ("_move", "_sync")}
    left = [next(operations, 1000)]

    def run(name):
        def operation(*args):
            if not left[0]:
                left[0] = next(operations, 1000)
                raise OSError(errno.EIO, "the disk is broken")
            left[0] -= 1
            return real[name](*args)

        return operation

    return mock.patch.multiple(module, **{name: run(name) for name in real})


@pytest.mark.slow
def test_a_batch_that_failed_half_way_is_done_again(spark, new_journal, tmp_path):
    """The files of the failed batch that are in the lake are replaced, and the error is one line."""
    journal = new_journal(clock=(clock := Clock(MIDNIGHT)))
    for _ in range(3):
        journal.append(messages(10))
        clock.time += HOUR
    journal.sync()
    with failing(iter([1, 4])):
        for _ in range(2):
            with pytest.raises(SparkError, match=r"^Spark: .*the disk is broken$"):
                put_away(spark, [journal.directory], tmp_path / "lake")
            # The job is known as one that needs all rows, so that nothing is deleted.
            assert consumers(journal.directory) == {"archive": 0}
        # What is recorded meanwhile is no part of the batch that is to be done again.
        journal.append(messages(7))
        journal.sync()
        done = put_away(spark, [journal.directory], tmp_path / "lake")
    assert archived(tmp_path / "lake") == recorded(journal.directory)
    assert done.rows == 37
    assert len(files(tmp_path / "lake")) == 4


@pytest.mark.slow
def test_checkpoint_files_torn_by_a_power_cut_are_planned_again(spark, new_journal, tmp_path):
    """If Spark's newest files are empty or incomplete after a power cut, no row is lost, and none is there twice."""
    journal = new_journal()
    lake = tmp_path / "lake"
    journal.append(messages(60))
    journal.sync()
    put_away(spark, [journal.directory], lake, max_rows=20)
    checkpoint = Lake(lake).checkpoint
    last = Checkpoint(checkpoint).last_done()
    (checkpoint / "commits" / str(last)).write_bytes(b"")
    (checkpoint / "offsets" / str(last)).write_bytes(b"v1\n{")
    (checkpoint / "commits" / str(last - 1)).unlink()
    journal.append(messages(40))
    journal.sync()
    put_away(spark, [journal.directory], lake, max_rows=25)
    assert archived(lake) == recorded(journal.directory)


def logs(checkpoint: Path, **batches: dict[int, str]) -> None:
    """Write the files that Spark would write: for each log, a file for each batch."""
    for log, lines in batches.items():
        (checkpoint / log).mkdir(parents=True)
        for batch, line in lines.items():
            (checkpoint / log / str(batch)).write_text(f"v1\n{{}}\n{line}\n" if line else "")
    (checkpoint / "metadata").write_text('{"id": "1"}')


def test_commits_without_any_plan_are_removed(tmp_path):
    """Checksums and commits without their files are removed, because Spark would report a second writer."""
    logs(tmp_path, offsets={0: ""}, commits={0: "{}"})
    checkpoint = Checkpoint(tmp_path)
    checkpoint.repair()
    assert checkpoint.last_done() == -1
    assert list((tmp_path / "commits").iterdir()) == []


def begin(journals, lake: Lake, **how) -> None:
    """Start the job, as far as it gets without Spark: to its first query."""
    spark = mock.Mock()
    spark.readStream.format.side_effect = SparkError("far enough")
    with pytest.raises(SparkError, match="far enough"):
        Archive(spark, journals, lake, **how).start()


def test_a_restarted_job_tells_journals_what_is_on_the_disk(new_journal, tmp_path):
    """The last batch that is done is synced before it is reported to the journals."""
    journal = new_journal()
    journal.append(messages(3))
    journal.sync()
    lake = Lake(tmp_path / "lake")
    logs(lake.checkpoint, offsets={0: json.dumps({journal.id: 3})}, commits={0: "{}"})
    happened: list[object] = []
    with (
        mock.patch.object(Checkpoint, "sync", lambda _, batch: happened.append(batch)),
        mock.patch("sbus.journal.reports.advance", lambda _, *report, **lake: happened.append((report, lake))),
    ):
        begin([journal.directory], lake)
    assert happened == [0, (("archive", 3), {"identity": lake.table.state.fields()["id"]})]


def test_consumers_that_cannot_be_read_stop_nothing(new_journal, tmp_path, caplog):
    """The job starts although it cannot read which lake a name belongs to; nothing is reported, and one line warns."""
    journals = [new_journal(name) for name in ("one", "two")]
    unreadable = Path(journals[0].directory) / "consumers" / "archive.json"
    unreadable.mkdir(parents=True)
    begin([journal.directory for journal in journals], Lake(tmp_path / "lake"))
    assert caplog.text.count("(Is a directory), so retention keeps the rows") == 1
    assert unreadable.is_dir()
    assert consumers(journals[1].directory) == {"archive": 0}


@pytest.mark.slow
def test_a_journal_that_cannot_be_written_is_archived_all_the_same(spark, new_journal, tmp_path, caplog, monkeypatch):
    """A journal that cannot be written is archived, with one warning that its retention keeps the rows.

    The report is repeated until it succeeds, even without new rows.
    """
    now = [0.0]
    monkeypatch.setattr("sbus.journal.reports.time", SimpleNamespace(monotonic=lambda: now[0]))
    journal = new_journal()
    journal.append(messages(10))
    journal.sync()
    (Path(journal.directory) / "consumers").write_text("in the way")
    with Archive(spark, [journal.directory], Lake(tmp_path / "lake"), every=0.1) as archive:
        while not archive.rows:
            assert not archive.wait(0.05)
        assert archived(tmp_path / "lake") == recorded(journal.directory)
        assert caplog.text.count("so retention keeps the rows") == 1
        (Path(journal.directory) / "consumers").unlink()
        archive.wait(0.05)
        assert consumers(journal.directory) == {}
        now[0] += 10
        archive.wait(0.05)
        assert consumers(journal.directory) == {"archive": 10}


@pytest.mark.slow
def test_it_goes_on_without_what_is_gone_only_if_told(spark, new_journal, tmp_path):
    """For a missing journal or deleted rows, the job ends with an error that names the option to go on."""
    lake = tmp_path / "lake"
    journals = [new_journal(name, segment_bytes=1) for name in ("one", "two")]
    for journal in journals:
        journal.append(messages(5))
        journal.sync()
    put_away(spark, [tmp_path / "*"], lake)
    left, gone = journals
    gone.close()
    shutil.rmtree(gone.directory)
    with pytest.raises(JournalError, match=f"{gone.id} is missing; .*--allow-loss"):
        put_away(spark, [tmp_path / "*"], lake)
    left.append(messages(3))
    left.append(messages(2))
    left.sync()
    retain(left.directory, keep_bytes=1, force=True)
    put_away(spark, [tmp_path / "*"], lake, fail_on_data_loss=False)
    assert [row["seq"] for row in archived(lake) if row["journal"] == left.id] == [
        0,
        1,
        2,
        3,
        4,
        8,
        9,
    ]


@pytest.mark.slow
def test_a_damaged_batch_does_not_stop_the_archive(spark, new_journal, tmp_path):
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
        put_away(spark, [journal.directory], lake)
    for count, lost in ((21, 10), (0, 0)):
        job = put_away(spark, [journal.directory], lake, fail_on_data_loss=False)
        assert (job.rows, job.lost) == (count, lost)
        rows = archived(lake)
        assert [row["seq"] for row in rows] == [*range(11), *range(20, 30)]
        assert [json.loads(row["payload"])["rows"] for row in rows if row["kind"] == "damaged"] == [10]
    assert consumers(journal.directory) == {"archive": 30}


def test_another_lake_under_the_same_name(new_journal, tmp_path):
    """A second lake under the first one's consumer name is refused before it takes a row; under another it is not."""
    journal = new_journal()
    journal.append(messages(3))
    journal.sync()
    begin([journal.directory], Lake(tmp_path / "one"))
    spark = mock.Mock()
    with pytest.raises(JournalError, match=r"the consumer 'archive' is another lake.*two: .*--consumer=NAME"):
        Archive(spark, [journal.directory], Lake(tmp_path / "two")).start()
    assert not spark.mock_calls
    begin([journal.directory], Lake(tmp_path / "two"), consumer="two")
    assert consumers(journal.directory) == {"archive": 0, "two": 0}


@pytest.mark.slow
def test_many_tasks_share_an_hour(spark, new_journal, tmp_path):
    """Several tasks write files of one hour and batch. A batch that fewer write again has only theirs."""
    journals = [new_journal(name, clock=Clock(MIDNIGHT)) for name in ("one", "two")]
    for journal in journals:
        for hour in range(2):
            for _ in range(2):
                journal.append(messages(100), MIDNIGHT + hour * HOUR)
                journal.roll()
    rows = spark.read.format("sbus").options(senders=True, partitionBytes=1).load(str(tmp_path / "*"))
    lake = Lake(tmp_path / "lake")
    with lake.table.writing():
        for writers, most in ((3, 6), (1, 2)):
            lake.write(rows, 0, writers=writers)
            assert archived(Path(lake.location)) == recorded(*(journal.directory for journal in journals))
            assert most - 2 < len(files(Path(lake.location))) <= most


@pytest.mark.slow
def test_a_lake_is_read_by_the_hours_that_are_wanted(spark, new_journal, tmp_path):
    """Spark does not open the files of other hours; the rows have the columns of a journal."""
    journal = new_journal(clock=Clock(MIDNIGHT))
    for hour in range(4):
        journal.append(messages(2), MIDNIGHT + hour * HOUR)
    journal.sync()
    put_away(spark, [journal.directory], tmp_path / "lake")
    lake = Lake(tmp_path / "lake")
    assert lake.read(spark).columns == list(COLUMN_NAMES)
    assert lake.read(spark).count() == 8
    rows = lake.read(spark, datetime(2026, 1, 31, 1, tzinfo=UTC), datetime(2026, 1, 31, 2, 59))
    assert sorted(row.seq for row in rows.collect()) == [2, 3, 4, 5]
    assert ["hour=01" in name or "hour=02" in name for name in rows.inputFiles()] == [True, True]
    assert lake.read(spark, datetime(2027, 1, 1)).count() == 0
    with pytest.raises(LakeError, match="it is empty: run sbus archive"):
        Lake(tmp_path / "nowhere").read(spark)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_archive_by_root_leaves_the_lake_to_its_owner(spark, new_journal, tmp_path):
    """All that root's archive writes to a lake of another user, with Spark's checkpoint, belongs to that user."""
    journal = new_journal(clock=Clock(MIDNIGHT))
    journal.append(messages(10))
    journal.sync()
    lake = tmp_path / "lake"
    lake.mkdir(0o750)
    for path in (lake, Path(journal.directory)):
        os.chown(path, 12345, 12346)
    put_away(spark, [journal.directory], lake)
    assert len(archived(lake)) == 10
    for path in (lake, *lake.rglob("*"), *(Path(journal.directory) / "consumers").rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346), path
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(lake)} == {0o640}
