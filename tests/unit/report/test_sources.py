"""The rows of a report from journals and from a lake: their time, what is ahead of the clock, and both are equal."""

from __future__ import annotations

import shutil
import socket
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from sbus.errors import JournalError, UsageError
from sbus.journal.clock import HOUR, MINUTE, SECOND, from_datetime
from sbus.journal.reader import JournalReader, read
from sbus.journal.schema import Kind
from sbus.lake.archive import Archive
from sbus.lake.plain import PlainTable
from sbus.report import JournalRows, LakeRows, measure
from sbus.report.engine.sources import Extent
from tests.support.journals import Clock, NewJournal
from tests.support.lakes import archive, row

START = from_datetime(datetime(2026, 1, 31, tzinfo=UTC))
LATE = from_datetime(datetime(2100, 1, 1, tzinfo=UTC))


def filled(new_journal: NewJournal, name: str = "journal", **options):
    """A journal of four hours with two keys, one gap, and a clock that is wrong for a moment."""
    clock = Clock(START)
    journal = new_journal(name, clock=clock, **options)
    journal.append_gap(Kind.START, {"ended": "new"})
    for number in range(240):
        clock.time = START + number * MINUTE
        journal.append([(b"plant/a", bytes(number % 70)), (b"plant/\xff", b"")])
        if number == 100:
            journal.append_gap(Kind.RECONNECT, {"reason": "test"})
    return journal, clock


def test_the_extent_of_a_journal(new_journal, tmp_path):
    """It is that of all epochs; rows of a clock that was wrong for a time are counted, in whatever segment they are."""
    journal, clock = filled(new_journal, segment_bytes=9000)
    clock.time = LATE
    journal.append([(b"late", b"")] * 3, [LATE - SECOND, LATE, LATE])
    clock.time = START + 240 * MINUTE
    journal.append([(b"plant/a", b"")])
    journal.close()
    reader = JournalReader(str(tmp_path / "journal"))
    assert len(reader.segments()) > 3
    assert reader.extent(LATE) == (START, LATE, 0)
    assert reader.extent(LATE - 1) == (START, LATE - SECOND, 2)
    assert reader.extent(LATE - HOUR) == (START, START + 240 * MINUTE, 3)
    times = [time for part in reader.plan(0, reader.end()) for rows in read(part, ["time"])
             for time in rows[0].cast(pa.int64()).to_pylist()]  # fmt: skip
    for latest in (START - 1, START, START + 100 * MINUTE, START + 100 * MINUTE + 1):
        good = [time for time in times if time <= latest]
        assert reader.extent(latest) == (START, max(good, default=None), len(times) - len(good))


def test_the_extent_of_an_empty_journal(new_journal, tmp_path):
    """It has no time."""
    new_journal().close()
    assert JournalReader(str(tmp_path / "journal")).extent(LATE) == (None, None, 0)


def test_the_extent_of_a_lake(tmp_path):
    """The greatest time up to a limit is found, also within a file, and the rows after it are counted."""
    table = PlainTable(tmp_path / "lake")
    assert LakeRows(table).extent(LATE) == Extent(None, None, 0)
    archive(table, 0, [row("one", number, hour) for number, hour in enumerate((0, 3, 3, 5))])
    archive(table, 1, [row("one", 10 + number, 24 * 365 * 74) for number in range(2)])
    first, third, fifth = START, START + 3 * HOUR + 2, START + 5 * HOUR + 3
    rows = LakeRows(table)
    assert rows.extent(START + 100 * HOUR) == Extent(first, fifth, 2)
    assert rows.extent(fifth - 1) == Extent(first, third, 3)
    assert rows.extent(third - 1) == Extent(first, third - 1, 4)
    assert rows.extent(START - 1) == Extent(first, None, 6)
    with pytest.raises(UsageError, match="all 6 rows are more than an hour ahead of this machine's clock"):
        measure(rows, now=datetime(2020, 1, 1, tzinfo=UTC))
    assert measure(rows, now=datetime(2026, 2, 1, tzinfo=UTC)).ahead == 2


@pytest.mark.slow
def test_a_journal_and_its_lake_give_the_same_report(new_journal, tmp_path):
    """Whether rows come from a journal, with its small batches and keys of bytes, or from a lake."""
    journal, _ = filled(new_journal, segment_bytes=9000)
    journal.close()
    source = JournalRows([str(tmp_path / "journal")])
    table = PlainTable(tmp_path / "lake")
    with Archive([str(tmp_path / "journal")], table) as job:
        while not job.wait():
            pass
    mine, theirs = (measure(each, last=timedelta(hours=2)) for each in (source, LakeRows(table)))
    assert mine.totals.messages == 2 * 121
    assert {key.key for key in mine.top_messages} == {"plant/a", "plant/\\xff"}
    assert [recording.host for recording in mine.journals.values()] == [socket.gethostname()]
    assert mine == theirs


@pytest.mark.parametrize("until", [None, datetime(2026, 1, 31, 2, tzinfo=UTC)], ids=["rows", "counts"])
def test_hosts_of_older_rows(tmp_path, until):
    """The host of a journal is that of its newer rows, as those archived by an earlier version do not say it."""
    table = PlainTable(tmp_path / "lake")
    archive(table, 0, [row(journal, number, 0) for journal in ("one", "two") for number in range(9)])
    archive(table, 1, [row("one", number, 1) for number in range(9, 20)], sender=(None,) * 5, host="pump-3")
    since = until and until - timedelta(hours=2)
    found = measure(LakeRows(table), start=since, end=until, now=datetime(2026, 2, 1, tzinfo=UTC))
    assert {journal: found.name_of(journal) for journal in found.journals} == {"one": "pump-3", "two": "journal two"}


def test_a_copy_of_a_journal_is_refused(new_journal, tmp_path):
    """Each of its rows would count twice."""
    journal, _ = filled(new_journal)
    journal.close()
    (tmp_path / "copy").symlink_to(tmp_path / "journal")
    latest = from_datetime(datetime(2027, 1, 1, tzinfo=UTC))
    linked = JournalRows([str(tmp_path / "journal"), str(tmp_path / "copy")])
    assert linked.extent(latest) == JournalRows([str(tmp_path / "journal")]).extent(latest)
    (tmp_path / "copy").unlink()
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")
    with pytest.raises(JournalError, match="leave out the copy"):
        JournalRows([str(tmp_path / "journal"), str(tmp_path / "copy")])
