"""How rows are divided among tasks and batches, without a session of Spark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, LongType, StructType

from sbus.journal.layout import Segment, list_segments
from sbus.journal.resizing import resized
from sbus.journal.schema import decode, encode
from sbus.journal.senders import split
from sbus.journal.snapshot import Snapshot
from sbus.journal.writer import JournalWriter
from sbus.spark.datasource.options import ReadOptions, StreamOptions
from sbus.spark.datasource.reader import SbusReader
from sbus.spark.datasource.scan import JournalPartition, Scan, schema
from sbus.spark.datasource.stream import SbusStreamReader
from tests.support.journals import NewJournal

MIB = 1 << 20


def rows_of(lengths: list[int], first_seq: int, journal: str = "j") -> pa.RecordBatch:
    """A batch of a journal, with payloads of these lengths."""
    data = encode("message", first_seq, 0, [b"k"] * len(lengths), [b"p" * length for length in lengths])  # type: ignore[arg-type]
    return decode(data, journal)


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=30), max_size=12))
def test_sizes_of_batches(lengths: list[list[int]]):
    """All rows come in order; no batch is large unless it has a single row, and hardly any is small."""
    batches: list[pa.RecordBatch] = []
    for one in lengths:
        batches.append(rows_of(one, sum(batch.num_rows for batch in batches)))
    found = list(resized(batches, min_rows=10, min_bytes=1000, max_bytes=2000))
    assert [seq for batch in found for seq in batch.column("seq").to_pylist()] == list(range(sum(map(len, lengths))))
    assert all(batch.num_rows <= 40 for batch in found)
    # A batch is cut evenly by rows, so with rows of uneven length its parts may be up to some times as large.
    assert all(batch.nbytes <= 2000 * 2 or batch.num_rows == 1 for batch in found if batch.nbytes)
    if all(batch.nbytes <= 2000 for batch in batches):  # none is cut
        for one, following in pairwise(found):
            # Batches that are joined share the dictionaries that each of them had, which are less than half of it.
            assert one.num_rows + following.num_rows > 10 or one.nbytes + following.nbytes > 450


def test_batches_of_many_journals():
    """Batches are joined up to the number of journals that one byte can tell apart."""
    ids = [f"j{number}" for number in range(300)]
    found = list(resized(rows_of([1], seq, journal) for seq, journal in enumerate(ids)))
    assert [journal for batch in found for journal in batch.column("journal").to_pylist()] == ids
    assert len(found) == 3


def planned(journal: JournalWriter, **options: Any) -> list[JournalPartition]:
    reader = Snapshot(journal.directory)
    return Scan(ReadOptions((journal.directory,), **options), schema(raw_keys=False)).partitions(
        [(reader, reader.start(), reader.end())]
    )


def size_of(segment: Segment) -> int:
    return os.stat(segment.path()).st_size


def ranges(partitions: list[JournalPartition]) -> list[tuple[int, int]]:
    """The first seq of each task and the one after its last; tasks and their slices are contiguous."""
    slices = [piece for partition in partitions for piece in partition.slices]
    assert all(one.end_seq == other.start_seq for one, other in pairwise(slices))
    return [(partition.slices[0].start_seq, partition.slices[-1].end_seq) for partition in partitions]


def test_sizes_of_tasks(new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch):
    """Small segments share a task, a large one is divided, and exactly one task reads each row."""
    journal = new_journal()
    for count in (1, 1, 1, 20, 1, 1):
        for _ in range(count):
            journal.append([(b"k", b"p" * 1000)] * 100)
        journal.roll()
    assert ranges(planned(journal)) == [(0, 2500)]
    found = ranges(planned(journal, partition_bytes=500_000))
    assert 4 <= len(found) <= 8
    assert (found[0][0], found[-1][1]) == (0, 2500)
    # By default, the size of a task follows from that of all segments.
    totals: list[int] = []

    def eighth(self: Scan, total: int) -> int:
        totals.append(total)
        return total // 8

    monkeypatch.setattr(Scan, "_task_bytes", eighth)
    assert 6 <= len(ranges(planned(journal))) <= 12
    assert totals == [sum(size_of(segment) for segment in list_segments(journal.directory))]


def test_bytes_of_a_task(monkeypatch: pytest.MonkeyPatch):
    """By default, each core gets four tasks if there is enough to do, and no task is tiny or huge."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def task_bytes(total: int, **options: Any) -> int:
        return Scan(ReadOptions(("j",), **options), schema(raw_keys=False))._task_bytes(total)

    assert [task_bytes(400 * MIB, parallelism=cores) // MIB for cores in (None, 1, 4)] == [50, 100, 25]
    assert [task_bytes(total * MIB) // MIB for total in (0, 64, 72, 1024, 10_000)] == [8, 8, 9, 128, 128]


def test_segments_of_usual_size_are_not_opened_to_plan(new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch):
    """With many segments a task reads a whole one, so planning reads only names, however large they are."""
    journal = new_journal()
    for _ in range(20):
        journal.append([(b"k", b"p" * 1000)])
        journal.roll()
    largest = max(size_of(segment) for segment in list_segments(journal.directory))

    def refuse(_: object) -> None:
        raise AssertionError("an index was read")

    # The newest segment says how far the journal may be read; that is looked at.
    monkeypatch.setattr("sbus.journal.reader.read_index", refuse)
    monkeypatch.setattr("sbus.journal.reader.read_summary", refuse)
    assert ranges(planned(journal, partition_bytes=largest)) == [(i, i + 1) for i in range(20)]


@pytest.mark.parametrize("is_stream", [False, True], ids=["table", "stream"])
def test_publishers_are_read_only_for_who_asks(
    new_journal: NewJournal, monkeypatch: pytest.MonkeyPatch, is_stream: bool
):
    """A scan without their columns does not decode them; one that names some decodes those alone."""
    journal = new_journal()
    journal.append([(b"k", b"p")] * 3)
    journal.sync()
    decoded: list[str] = []

    def noting(stored: pa.RunEndEncodedArray, names: Sequence[str]) -> dict[str, pa.Array]:
        decoded.extend(names)
        return split(stored, names)

    monkeypatch.setattr("sbus.journal.schema.split", noting)
    options, end = {"journal": journal.directory}, {Snapshot(journal.directory).id: 3}
    for columns, expected in (
        (schema(raw_keys=False, senders=False), []),
        (StructType().add("sender_pid", IntegerType()).add("seq", LongType()), ["sender_pid"]),
    ):
        reader: SbusReader | SbusStreamReader
        if is_stream:
            reader = SbusStreamReader(StreamOptions.parse(options), columns)
            partitions = reader.partitions(dict.fromkeys(end, 0), end)
        else:
            reader = SbusReader(ReadOptions.parse(options), columns)
            partitions = reader.partitions()
        batches = [batch for partition in partitions for batch in reader.read(partition)]
        assert [batch.schema.names for batch in batches] == [columns.fieldNames()]
        assert decoded == expected
