"""Offsets, limits and joining journals: the stream reader without a session of Spark."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from sbus.errors import JournalError
from sbus.journal.following import share
from sbus.journal.layout import list_segments
from sbus.journal.schema import Kind
from sbus.journal.segment import remove_segment
from sbus.journal.snapshot import Snapshot
from sbus.journal.writer import JournalWriter
from sbus.spark.datasource.options import StreamOptions
from sbus.spark.datasource.scan import schema
from sbus.spark.datasource.stream import SbusStreamReader
from tests.support.examples import examples
from tests.support.journals import NewJournal

ALL = ReadAllAvailable()


def stream(*journals: Any, **options: str) -> SbusStreamReader:
    """A reader such as Spark makes one for each start of a query."""
    paths = ",".join(getattr(journal, "directory", str(journal)) for journal in journals)
    return SbusStreamReader(StreamOptions.parse({"journal": paths, **options}), schema(raw_keys=False))


def record(journal: JournalWriter, count: int, *, at: int | None = None) -> None:
    """Append and sync messages, numbered by their seq."""
    journal.append([(b"k", b"%d" % (journal.next_seq + i)) for i in range(count)], at)
    journal.sync()


def delete_oldest(journal: JournalWriter, count: int) -> None:
    """Delete segments as retention does."""
    for segment in list_segments(journal.directory)[:count]:
        remove_segment(segment)


def rows(reader: SbusStreamReader, start: dict[str, int], end: dict[str, int]) -> dict[str, list[int]]:
    """The seqs of each journal in a batch, by its ID."""
    found: dict[str, list[int]] = {}
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            for row in batch.to_pylist():
                found.setdefault(row["journal"], []).append(row["seq"])
    return found


def run(reader: SbusStreamReader, offset: dict[str, int]) -> Iterator[tuple[dict[str, list[int]], dict[str, int]]]:
    """The rows and the offset of each batch, until everything is read."""
    while (end := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
        yield rows(reader, offset, end), end
        offset = end


def test_a_journal_joins_before_it_is_read(new_journal: NewJournal):
    """The first batch has no rows and says where reading starts; all rows come with the next."""
    journal = new_journal()
    record(journal, 5)
    reader = stream(journal)
    assert reader.initialOffset() == {}
    batches = list(run(reader, {}))
    assert batches == [({}, {journal.id: 0}), ({journal.id: [0, 1, 2, 3, 4]}, {journal.id: 5})]


def test_nothing_new(new_journal: NewJournal):
    """Without new rows, the offset stays the same, and there is nothing to read."""
    journal = new_journal()
    record(journal, 5)
    journal.append([(b"not", b"synced")])
    reader = stream(journal)
    offset = {journal.id: 5}
    assert reader.latestOffset(offset, ALL) == offset
    assert reader.partitions(offset, offset) == []
    assert reader.reportLatestOffset() == offset


def test_a_batch_is_the_same_whenever_it_is_read(new_journal: NewJournal):
    """A batch that is read again has the same rows, whatever was recorded, rolled and closed since."""
    journal = new_journal()
    record(journal, 5)
    record(journal, 5)
    start, end = {journal.id: 3}, {journal.id: 8}
    before = rows(stream(journal), start, end)
    record(journal, 5)
    journal.roll()
    record(journal, 5)
    journal.close()
    assert before == rows(stream(journal), start, end) == {journal.id: [3, 4, 5, 6, 7]}


def test_where_to_start(new_journal: NewJournal):
    """A stream starts at the first row there is, at the end, or at the first row of a time."""
    journal = new_journal()
    for second in range(5):
        record(journal, 2, at=second * 1_000_000)
        journal.roll()
    delete_oldest(journal, 2)
    record(journal, 1, at=9_500_000)
    assert stream(journal).latestOffset({}, ALL) == {journal.id: 4}
    assert stream(journal, startingOffsets="latest").latestOffset({}, ALL) == {journal.id: 11}
    for clock, seq in (("00:00:00", 4), ("00:00:03", 6), ("00:00:09.5", 10), ("00:00:09.500001", 11)):
        reader = stream(journal, startingOffsets=f"1970-01-01T{clock}Z")
        assert reader.latestOffset({}, ALL) == {journal.id: seq}


def test_where_to_start_is_settled_with_the_first_offset(new_journal: NewJournal):
    """A stream from the end that is started again, before it has read anything, goes on from the first end."""
    journal = new_journal()
    record(journal, 5)
    offset = stream(journal, startingOffsets="latest").latestOffset({}, ALL)
    record(journal, 2)
    batches = list(run(stream(journal, startingOffsets="latest"), offset))
    assert batches == [({journal.id: [5, 6]}, {journal.id: 7})]


def test_a_journal_that_appears_is_read_from_its_beginning(new_journal: NewJournal, tmp_path: Path):
    """A journal that appears later is read from its start, even by a stream that started at the end."""
    old = new_journal("a/journal")
    record(old, 3)
    reader = stream(f"{tmp_path}/*/journal", startingOffsets="latest")
    offset = reader.latestOffset({}, ALL)
    assert offset == {old.id: 3}
    late = new_journal("b/journal")
    record(late, 2)
    record(old, 1)
    batches = list(run(reader, offset))
    # What is known already does not wait for the new one.
    assert batches == [({old.id: [3]}, {old.id: 4, late.id: 0}), ({late.id: [0, 1]}, {old.id: 4, late.id: 2})]


def test_available_now(new_journal: NewJournal, tmp_path: Path):
    """With the trigger AvailableNow, rows and journals that appear after the start are not read."""
    journal = new_journal("a")
    record(journal, 5)
    reader = stream(f"{tmp_path}/*", maxRowsPerTrigger="2")
    reader.prepareForTriggerAvailableNow()
    record(journal, 5)
    late = new_journal("b")
    record(late, 5)
    seqs = [found.get(journal.id, []) for found, _ in run(reader, {})]
    assert seqs == [[], [0, 1], [2, 3], [4]]
    # A later run goes on there.
    again = stream(f"{tmp_path}/*")
    again.prepareForTriggerAvailableNow()
    assert [found for found, _ in run(again, {journal.id: 5})] == [
        {journal.id: [5, 6, 7, 8, 9]},
        {late.id: [0, 1, 2, 3, 4]},
    ]


def test_limits(new_journal: NewJournal):
    """A limit in rows holds exactly; one in bytes at whole batches, with at least one; the engine may lift both."""
    journal = new_journal()
    for _ in range(4):
        record(journal, 10)
    joined = {journal.id: 0}
    reader = stream(journal, maxRowsPerTrigger="15")
    assert reader.getDefaultReadLimit() == ReadMaxRows(15)
    assert [end[journal.id] for _, end in run(reader, joined)] == [15, 30, 40]
    reader = stream(journal, maxBytesPerTrigger="1")
    assert reader.getDefaultReadLimit() == ReadMaxBytes(1)
    assert [end[journal.id] for _, end in run(reader, joined)] == [10, 20, 30, 40]
    reader = stream(journal, maxBytesPerTrigger="1", maxRowsPerTrigger="4")
    assert [end[journal.id] for _, end in run(reader, joined)][:4] == [4, 8, 10, 14]
    assert reader.latestOffset(joined, ALL) == {journal.id: 40}
    assert stream(journal).getDefaultReadLimit() == ALL


def test_a_batch_starts_by_time_rows_or_bytes(new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch):
    """With a delay, a batch waits for it, unless as many rows or bytes are there as it may have."""
    now = [100.0]
    monkeypatch.setattr("sbus.journal.following.time.monotonic", lambda: now[0])
    journal = new_journal()
    for limit in ({"maxRowsPerTrigger": "15"}, {"maxBytesPerTrigger": "1000"}):
        reader = stream(journal, maxTriggerDelay="60s", **limit)
        offset = {journal.id: journal.next_seq}
        record(journal, 1)
        limits = reader.getDefaultReadLimit()
        offset = reader.latestOffset(offset, limits)
        assert offset == {journal.id: journal.next_seq}
        record(journal, 10)
        assert reader.latestOffset(offset, limits) == offset
        record(journal, 10)
        full = reader.latestOffset(offset, limits)
        assert offset[journal.id] < full[journal.id] < journal.next_seq
        assert reader.latestOffset(full, limits) == full
        now[0] += 60
        assert reader.latestOffset(full, limits) == {journal.id: journal.next_seq}


def test_limits_of_several_journals(new_journal: NewJournal):
    """A limit is divided among the journals that are behind; what one does not need goes to the others."""
    small, large = new_journal("small"), new_journal("large")
    record(small, 2)
    record(large, 100)
    reader = stream(small, large, maxRowsPerTrigger="10")
    end = reader.latestOffset({small.id: 0, large.id: 0}, reader.getDefaultReadLimit())
    assert end == {small.id: 2, large.id: 8}
    end = reader.latestOffset(end, reader.getDefaultReadLimit())
    assert end == {small.id: 2, large.id: 18}


@given(st.integers(0, 100), st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=6))
def test_sharing(total: int, wishes: dict[str, int]):
    """Shares add up to the total or to all wishes; none exceeds its wish, and a larger wish never gets less."""
    shares = share(total, wishes)
    assert sum(shares.values()) == min(total, sum(wishes.values()))
    assert all(0 <= shares[name] <= wish for name, wish in wishes.items())
    unserved = [shares[name] for name, wish in wishes.items() if shares[name] < wish]
    assert all(max(shares.values()) - one <= 1 for one in unserved)


ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.sampled_from(["sync", "roll", "reopen"]), st.integers(0, 2), st.none()),
    st.tuples(st.just("trigger"), st.none(), st.booleans()),
    st.tuples(st.sampled_from(["restart", "replay"]), st.none(), st.none()),
)


@settings(max_examples=examples(50))
@given(st.lists(ACTIONS, max_size=30), st.integers(1, 7), st.booleans())
def test_every_row_once(actions: list[tuple[str, Any, Any]], limit: int, by_bytes: bool):
    """Across new rows, new segments and restarts, each row of each journal comes once and in order."""
    options = {"maxBytesPerTrigger" if by_bytes else "maxRowsPerTrigger": str(limit * (500 if by_bytes else 1))}
    with tempfile.TemporaryDirectory() as directory:
        journals: dict[int, JournalWriter] = {}
        found: dict[str, list[int]] = {}
        offset: dict[str, int] = {}
        last: tuple[dict[str, int], dict[str, int], dict[str, list[int]]] | None = None
        reader: SbusStreamReader | None = None

        def trigger(unlimited: bool) -> bool:
            nonlocal offset, last, reader
            reader = reader or stream(f"{directory}/*", **options)
            end = reader.latestOffset(offset, ALL if unlimited else reader.getDefaultReadLimit())
            read = rows(reader, offset, end)
            if not (unlimited or by_bytes):
                assert sum(map(len, read.values())) <= limit
            for journal_id, seqs in read.items():
                found.setdefault(journal_id, []).extend(seqs)
            last = (offset, end, read)
            offset, before = end, offset
            return end != before

        for action, which, value in [*actions, ("sync", 0, None)]:
            if which is not None and which not in journals:
                journals[which] = JournalWriter.open(f"{directory}/{which}")
            if action == "append":
                journals[which].append([(b"k", b"")] * value)
            elif action == "sync":
                journals[which].sync()
            elif action == "roll":
                journals[which].roll()
            elif action == "reopen":
                journals[which].close()
                journals[which] = JournalWriter.open(f"{directory}/{which}")
            elif action == "restart":
                reader = None
            elif action == "replay" and last is not None:
                assert rows(stream(f"{directory}/*"), last[0], last[1]) == last[2]
            elif action == "trigger" and journals:
                trigger(value)
        for journal in journals.values():
            journal.close()
        while trigger(False):
            pass
        assert offset == {journal.id: journal.next_seq for journal in journals.values()}
        assert found == {journal.id: list(range(journal.next_seq)) for journal in journals.values() if journal.next_seq}


# --- what is listed again ------------------------------------------------------------------------------------


def test_a_directory_that_has_not_changed_is_not_listed_again(new_journal: NewJournal):
    """The list of segments is reused while the directory is unchanged; added rows are seen."""
    journal = new_journal()
    record(journal, 1)
    long_ago = time.time() - 60
    os.utime(journal.directory, (long_ago, long_ago))
    first = Snapshot(journal.directory)
    record(journal, 1)
    second = Snapshot(journal.directory, first)
    assert second.segments() is first.segments()
    assert second.end() == 2
    journal.roll()
    record(journal, 1)
    third = Snapshot(journal.directory, second)
    assert [segment.closed for segment in third.segments()] == [True, False]
    assert third.end() == 3


def test_a_directory_that_has_just_changed_is_listed_again(new_journal: NewJournal):
    """A directory that changed within the last second is listed again, because its time stamp may not show a change."""
    journal = new_journal()
    record(journal, 1)
    soon = time.time() + 60  # it counts as just changed, however slow this test is
    os.utime(journal.directory, (soon, soon))
    first = Snapshot(journal.directory)
    journal.roll()
    record(journal, 1)
    os.utime(journal.directory, (soon, soon))
    assert Snapshot(journal.directory, first).end() == 2


# --- what is gone -------------------------------------------------------------------------------------------


def segments(journal: JournalWriter, count: int) -> None:
    """Write a number of closed segments of two rows each."""
    for second in range(count):
        record(journal, 2, at=second * 1_000_000)
        journal.roll()


def test_rows_that_are_deleted_before_they_are_read(new_journal: NewJournal):
    """Deleted rows are an error with the remedy; with failOnDataLoss=false, reading goes on after them."""
    journal = new_journal()
    segments(journal, 4)
    delete_oldest(journal, 2)
    old, end = {journal.id: 1}, {journal.id: 8}
    words = rf"rows 1 to 3 of the journal in {journal.directory} are deleted: .*failOnDataLoss=false"
    with pytest.raises(JournalError, match=words):
        stream(journal).latestOffset(old, ALL)
    with pytest.raises(JournalError, match=words):
        stream(journal).partitions(old, end)
    lenient = stream(journal, failOnDataLoss="false")
    assert lenient.latestOffset(old, ALL) == end
    assert rows(lenient, old, end) == {journal.id: [4, 5, 6, 7]}


def test_a_journal_that_is_gone(new_journal: NewJournal, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A journal that is gone is an error, or with failOnDataLoss=false one warning."""
    gone, stays = new_journal("a/journal"), new_journal("b/journal")
    record(gone, 5)
    record(stays, 1)
    glob = f"{tmp_path}/*/journal"
    offset, end = {gone.id: 2, stays.id: 0}, {gone.id: 5, stays.id: 1}
    gone.close()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(JournalError, match=rf"the journal {gone.id} is missing; it was read up to row 2: name"):
        stream(glob).latestOffset(offset, ALL)
    with pytest.raises(JournalError, match=rf"the journal {gone.id} is missing; its rows 2 to 4 were not read"):
        stream(glob).partitions(offset, end)
    lenient = stream(glob, failOnDataLoss="false")
    for _ in range(3):
        assert lenient.latestOffset(offset, ALL) == {gone.id: 2, stays.id: 1}
    assert [record.getMessage()[:40] for record in caplog.records] == [f"the journal {gone.id}"[:40]]
    assert rows(lenient, offset, end) == {stays.id: [0]}


def test_a_copy_of_a_journal(new_journal: NewJournal, tmp_path: Path):
    """Two copies of a journal are an error, because its rows would be read twice."""
    journal = new_journal("one")
    record(journal, 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(JournalError, match=r"/one and .*/two are the same journal \(\w+\): leave out the copy"):
        stream(f"{tmp_path}/*").latestOffset({}, ALL)


def test_pattern_and_gaps(new_journal: NewJournal):
    """A stream reads only the rows that the options select; offsets count all rows."""
    journal = new_journal()
    journal.append_gap(Kind.START, {})
    journal.append([(b"a/1", b""), (b"b/1", b""), (b"a/2", b"")])
    journal.append_gap(Kind.STOP, {})
    journal.sync()
    start, end = {journal.id: 0}, {journal.id: 5}
    assert stream(journal, pattern="a/").latestOffset(start, ALL) == end
    found = [rows(stream(journal, **options), start, end)[journal.id] for options in ({}, {"pattern": "a/"})]
    assert found == [[0, 1, 2, 3, 4], [1, 3]]
    assert rows(stream(journal, pattern="a/", gaps="true"), start, end) == {journal.id: [0, 1, 3, 4]}
