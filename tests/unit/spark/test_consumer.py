"""A stream as a consumer of journals: retention waits for it, whenever it is killed. Without a session of Spark."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import JournalError, UsageError
from sbus.journal.consumers import advance, consumers
from sbus.journal.layout import list_segments
from sbus.journal.retention import retain
from sbus.journal.writer import JournalWriter
from sbus.spark.datasource.options import ReadOptions, StreamOptions
from sbus.spark.datasource.scan import schema
from sbus.spark.datasource.stream import SbusStreamReader
from tests.support.examples import examples
from tests.support.journals import NewJournal


@dataclass
class Stream:
    """A query, and its checkpoint: calls a reader in the order in which Spark does.

    :ivar offsets: the ends of the batches that were planned.
    :ivar done: the number of batches that are done.
    :ivar rows: the seqs of the rows that were read, by journal.
    """

    journals: str
    name: str | None = "mine"
    offsets: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    rows: dict[str, list[int]] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    reader: SbusStreamReader | None = None

    def run(self, steps: int = 1000, *, available_now: bool = True) -> None:
        """Go on until there is nothing to do, or the process is killed after so many steps."""
        options = {"journal": self.journals, "maxRowsPerTrigger": "3", **self.options}
        if self.name is not None:
            options["consumer"] = self.name
        if self.reader is None:
            self.reader = SbusStreamReader(StreamOptions.parse(options), schema(raw_keys=False))
            if available_now:
                self.reader.prepareForTriggerAvailableNow()
        for _, _ in zip(range(steps), self._steps(self.reader), strict=False):
            pass
        if available_now:
            self.kill()

    def kill(self) -> None:
        """End the process; the checkpoint stays."""
        self.reader = None

    def _steps(self, reader: SbusStreamReader) -> Any:
        while True:
            start = self.offsets[self.done - 1] if self.done else reader.initialOffset()
            if self.done == len(self.offsets):
                end = reader.latestOffset(start, reader.getDefaultReadLimit())
                yield
                if end == start:
                    return
                self.offsets.append(end)
                yield
                if self.done:
                    reader.commit(start)
                    yield
            partitions = reader.partitions(start, self.offsets[self.done])
            yield
            read = [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]
            self.done += 1
            for row in read:
                self.rows.setdefault(row["journal"], []).append(row["seq"])
            yield


def add(journal: JournalWriter, count: int = 2) -> None:
    """Write a closed segment."""
    journal.append([(b"k", b"%d" % i) for i in range(count)])
    journal.roll()


def forget(directory: str) -> int:
    """Delete all that retention may, and return how many segments are left."""
    retain(directory, keep_bytes=0, warn=lambda _: None)
    return len(list_segments(directory))


def test_retention_waits_for_a_stream(new_journal: NewJournal):
    """Rows stay until a stream has done them; what it has not read stays while it is stopped."""
    journal = new_journal()
    for _ in range(3):
        add(journal)
    advance(journal.directory, "other", 6)
    stream = Stream(journal.directory)
    stream.run(3)  # it has planned where to start
    assert forget(journal.directory) == 3
    stream.run()
    assert consumers(journal.directory) == {"mine": 6, "other": 6}
    assert forget(journal.directory) == 1
    for _ in range(3):
        add(journal)
    advance(journal.directory, "other", 12)
    assert forget(journal.directory) == 3
    stream.run()
    assert stream.rows == {journal.id: list(range(12))}


def test_a_stream_that_goes_on_reports_a_batch_with_the_next(new_journal: NewJournal):
    """While a stream follows a journal, `commit` reports the batch before the one that is planned."""
    journal = new_journal()
    add(journal, 9)
    stream = Stream(journal.directory)
    stream.run(available_now=False)
    assert stream.rows == {journal.id: list(range(9))}
    assert consumers(journal.directory) == {"mine": 6}
    add(journal, 1)
    stream.run(available_now=False)
    assert consumers(journal.directory) == {"mine": 9}


def test_a_stream_from_the_end_holds_nothing_before(new_journal: NewJournal):
    """Where a stream starts is what it needs first."""
    journal = new_journal()
    add(journal)
    add(journal)
    stream = Stream(journal.directory, options={"startingOffsets": "latest"})
    stream.run()
    assert consumers(journal.directory) == {"mine": 4}


def test_a_name_belongs_to_one_checkpoint(new_journal: NewJournal):
    """Another stream, or the same query with a new checkpoint, is refused before it reads; the error has the remedy."""
    journal = new_journal()
    add(journal)
    Stream(journal.directory).run()
    again = Stream(journal.directory)
    words = (
        r"the consumer 'mine' is another lake or stream \(\w{32}\), not this stream: "
        r".*option consumer.*sbus journal release \S+ mine"
    )
    with pytest.raises(JournalError, match=words):
        again.run()
    assert again.rows == {}
    with pytest.raises(JournalError, match=words):
        again.run()
    Path(journal.directory, "consumers/mine.json").unlink()
    again.run()
    assert again.rows == {journal.id: [0, 1]}


def test_the_name_of_an_archive_is_refused(new_journal: NewJournal):
    """A stream cannot report in the name of a lake."""
    journal = new_journal()
    advance(journal.directory, "archive", 0, identity="lake")
    with pytest.raises(JournalError, match=r"the consumer 'archive' is another lake or stream \(lake\)"):
        Stream(journal.directory, "archive").run()


def test_a_stream_becomes_a_consumer(new_journal: NewJournal):
    """The option can be added to a stream that has run, and taken away again: the checkpoint serves on."""
    journal = new_journal()
    add(journal)
    stream = Stream(journal.directory, None)
    stream.run()
    stream.name = "mine"
    add(journal)
    stream.run()
    assert consumers(journal.directory) == {"mine": 4}
    stream.name = None
    add(journal)
    stream.run()
    assert stream.rows == {journal.id: list(range(6))}
    assert consumers(journal.directory) == {"mine": 4}


def test_a_journal_that_cannot_be_written(new_journal: NewJournal):
    """A stream that cannot register does not read, because retention would not wait for it."""
    journal = new_journal()
    add(journal)
    Path(journal.directory, "consumers").write_bytes(b"")
    stream = Stream(journal.directory)
    with pytest.raises(
        JournalError, match=r"the consumer 'mine' cannot be registered there \(.*\): let this user write"
    ):
        stream.run()
    assert stream.rows == {}


def test_names_of_consumers():
    """A name that no consumer can have, or one for a table, is refused with the remedy."""
    with pytest.raises(UsageError, match=r"option consumer='\.\./x': '\.\./x' is no name for a consumer: use letters"):
        StreamOptions.parse({"journal": "/j", "consumer": "../x"})
    with pytest.raises(UsageError, match=r"option consumer='x': this is for streams"):
        ReadOptions.parse({"journal": "/j", "consumer": "x"})


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("run"), st.integers(1, 9), st.booleans()),
    st.tuples(st.sampled_from(["retain", "kill"]), st.none(), st.none()),
)


@settings(max_examples=examples(50))
@given(st.lists(ACTIONS, max_size=40))
def test_no_row_is_missed(actions: list[tuple[str, Any, Any]]):
    """Wherever the stream is killed, and whenever retention runs, no row is deleted before the stream has done it."""
    with tempfile.TemporaryDirectory() as directory:
        journals = [JournalWriter.open(f"{directory}/{number}") for number in range(2)]
        for journal in journals:
            add(journal, 1)
        stream = Stream(f"{directory}/*")
        stream.run(4)
        for action, which, value in actions:
            if action == "add":
                add(journals[which], value)
            elif action == "kill":
                stream.kill()
            elif action == "retain":
                for journal in journals:
                    forget(journal.directory)
            else:
                if value:
                    stream.kill()
                stream.run(which, available_now=value)
        stream.kill()
        stream.run()
        for journal in journals:
            journal.close()
            assert stream.rows[journal.id] == list(range(journal.next_seq))
