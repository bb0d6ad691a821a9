"""What a reader leaves out if Spark hands over the conditions and the limit of a query. Without a session of Spark."""

from __future__ import annotations

import pickle
import sys
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from sbus.journal.clock import HOUR
from sbus.journal.schema import KINDS, Kind
from sbus.journal.summary import MAX_KEYS, Summary
from sbus.journal.writer import JournalWriter
from sbus.protocol.keys import CURRENT
from sbus.spark.datasource.conditions import Conditions
from sbus.spark.datasource.filters import RowFilter
from sbus.spark.datasource.options import ReadOptions
from sbus.spark.datasource.reader import ASKING, PushingReader, SbusReader, keeps_plans_apart, reader_class
from sbus.spark.datasource.scan import schema
from tests.support.journals import Clock
from tests.unit.spark.test_filters import ROWS, batch, summary

AT = ("time",)
KEY = ("key",)
KIND = ("kind",)
SEQ = ("seq",)


def at(hour: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> JournalWriter:
    """Five segments of an hour each: a gap, then messages with the hour in their key, the last with many keys."""
    clock = Clock(0)
    journal = JournalWriter.open(tmp_path_factory.mktemp("five") / "journal", clock=clock)
    for hour in range(5):
        clock.time = hour * HOUR
        if hour != 2:
            journal.append_gap(Kind.START, {})
        names = [b"hour/%d" % hour, b"all", b"\xff\\"] * 2 if hour < 4 else [b"x/%04d" % i for i in range(MAX_KEYS + 1)]
        journal.append([(name, b"") for name in names], clock.time + 1)
        journal.roll()
    journal.close()
    return journal


def read(journal: JournalWriter, *filters: Filter, limit: int | None = None, **options: str) -> list[dict[str, Any]]:
    """Read as Spark does, where the reader goes to other processes."""
    parsed = ReadOptions.parse({"journal": journal.directory, **options})
    reader = PushingReader(parsed, schema(raw_keys=parsed.raw_keys))
    assert reader.pushFilters(list(filters)) == list(filters)
    if limit is not None:
        assert reader.pushLimit(limit)
    partitions = reader.partitions()
    worker = pickle.loads(pickle.dumps(reader))
    return [row for part in partitions for rows in worker.read(part) for row in rows.to_pylist()]


def touched(journal: JournalWriter, *filters: Filter, **options: str) -> list[int]:
    """The segments that are planned."""
    parsed = ReadOptions.parse({"journal": journal.directory, **options})
    reader = PushingReader(parsed, schema(raw_keys=parsed.raw_keys))
    reader.pushFilters(list(filters))
    planned = {part.segment.name: part for partition in reader.partitions() for part in partition.slices}
    return [part.segment.first_time // HOUR for _, part in sorted(planned.items())]


PRUNED: list[tuple[list[Filter], list[int]]] = [
    ([], [0, 1, 2, 3, 4]),
    ([GreaterThanOrEqual(AT, at(1.5)), LessThan(AT, at(3))], [1, 2]),
    ([EqualTo(AT, at(3))], [2, 3]),
    ([In(AT, (at(1.5), at(2.5)))], [1, 2]),
    ([GreaterThan(AT, at(3)), IsNotNull(AT)], [3, 4]),
    ([LessThan(AT, at(0))], []),
    ([GreaterThan(SEQ, 6), LessThanOrEqual(SEQ, 13)], [1]),
    ([EqualTo(KIND, "start")], [0, 1, 3, 4]),
    ([Not(In(KIND, ("message", "digest")))], [0, 1, 3, 4]),
    ([EqualTo(KIND, "lost")], []),
    ([EqualTo(KEY, "hour/2")], [2]),
    ([In(KEY, ("hour/0", "hour/3", "none"))], [0, 3]),
    ([StringStartsWith(KEY, "hour/")], [0, 1, 2, 3]),
    ([StringEndsWith(KEY, "/1"), StringContains(KEY, "our")], [1, 4]),
    ([EqualTo(KEY, "\\xff\\x5c")], [0, 1, 2, 3]),
    ([EqualTo(KEY, "x/0007")], [4]),
    ([StringStartsWith(KEY, "y")], []),
    ([Not(EqualTo(KEY, "")), EqualTo(KIND, "start")], []),
    ([EqualTo(("journal",), "another")], []),
    ([EqualTo(("host",), "another")], []),
    ([EqualTo(KEY, "no\\key")], [4]),
    # Not understood, so nothing is left out.
    ([EqualTo(("value", "t"), 1), GreaterThan(AT, datetime(1971, 1, 1))], [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize(("filters", "segments"), PRUNED, ids=[str(filters) for filters, _ in PRUNED])
def test_segments_that_a_query_reads(journal: JournalWriter, filters: list[Filter], segments: list[int]):
    """Conditions on time, number, kind, key, journal and host leave out segments without such rows."""
    assert touched(journal, *filters) == segments


def test_conditions_add_to_the_options(journal: JournalWriter):
    """A row has to meet both."""
    assert touched(journal, GreaterThan(AT, at(2.5)), since="1970-01-01T01:00", until="1970-01-01T04:00") == [2, 3]
    assert touched(journal, EqualTo(KEY, "hour/1"), pattern="hour/*", until="1970-01-01T01:00") == []
    rows = read(journal, EqualTo(KEY, "hour/1"), pattern="hour/*", rawKeys="false")
    assert [row["seq"] for row in rows] == [8, 11]
    assert [row["key"] for row in read(journal, EqualTo(KEY, b"\xff\\"), rawKeys="true")] == [b"\xff\\"] * 8


def test_rows_that_a_query_gets(journal: JournalWriter):
    """Rows are left out before they reach Spark."""
    assert len(read(journal)) == 4 * 6 + 4 + MAX_KEYS + 1
    assert [row["seq"] for row in read(journal, EqualTo(KEY, "hour/2"))] == [14, 17]
    assert [row["seq"] for row in read(journal, GreaterThan(SEQ, 5), LessThan(SEQ, 9))] == [6, 7, 8]
    assert {row["kind"] for row in read(journal, EqualTo(KIND, "start"))} == {"start"}
    assert [row["key"] for row in read(journal, GreaterThan(KEY, "x/0998"))] == ["x/0999", "x/1000"]


def test_a_limit(journal: JournalWriter):
    """With a limit, a task reads as many rows, and stops."""
    assert [row["seq"] for row in read(journal, limit=3)] == [0, 1, 2]
    assert len(read(journal, limit=3, pattern="x/")) == 3
    assert len(read(journal, limit=10**6)) == len(read(journal))


def test_when_conditions_are_taken(monkeypatch: pytest.MonkeyPatch):
    """A reader takes conditions in the program with which Spark asks for them, of a Spark that keeps plans apart."""

    class Newer(DataSourceReader):
        def pushLimit(self, limit: int) -> bool:
            return False

        def read(self, partition: Any) -> Any:
            return iter(())

    assert keeps_plans_apart(Newer)
    assert keeps_plans_apart(DataSourceReader) == hasattr(DataSourceReader, "pushLimit")
    assert not hasattr(SbusReader, "pushLimit") or hasattr(DataSourceReader, "pushLimit")
    monkeypatch.setattr("sbus.spark.datasource.reader.DataSourceReader", Newer)
    monkeypatch.delitem(sys.modules, ASKING, raising=False)
    assert reader_class() is SbusReader
    monkeypatch.setitem(sys.modules, ASKING, ModuleType(ASKING))
    assert reader_class() is PushingReader


def compared(column: str, values: st.SearchStrategy[Any], *others: type[Filter]) -> st.SearchStrategy[Filter]:
    """Conditions on a column."""
    attribute = st.just((column,))
    kinds: tuple[type[Any], ...] = (
        EqualTo,
        EqualNullSafe,
        GreaterThan,
        GreaterThanOrEqual,
        LessThan,
        LessThanOrEqual,
        *others,
    )
    plain = st.one_of(
        *(st.builds(kind, attribute, values) for kind in kinds),
        st.builds(In, attribute, st.lists(values, max_size=3).map(tuple)),
        st.builds(IsNull, attribute),
        st.builds(IsNotNull, attribute),
    )
    return plain | st.builds(Not, plain)


TEXTS = st.sampled_from(
    ["", "a", "a/", "a/b", "a/bc", "b", "\\xff/a", "\\xff", "\\x", "a\\x5cb", "\\x5c", "ä", "/", "c"]
)
STRINGS = (StringStartsWith, StringEndsWith, StringContains)
CONDITIONS = st.one_of(
    compared("key", TEXTS, *STRINGS),
    compared("kind", st.sampled_from([*map(str, KINDS), "none"]), *STRINGS),
    compared("time", st.integers(-1, 6).map(lambda micros: datetime.fromtimestamp(micros / 1e6, UTC))),
)


def holds(condition: Filter, row: dict[str, Any]) -> bool:
    """Evaluate a condition, of a row without nulls, as plainly as possible."""
    match condition:
        case Not(child):
            return not holds(child, row)
        case IsNull():
            return False
        case IsNotNull():
            return True
    value, other = row[condition.attribute[0]], condition.value  # type: ignore[attr-defined]
    operations = {
        EqualTo: lambda: value == other, EqualNullSafe: lambda: value == other, In: lambda: value in other,
        GreaterThan: lambda: value > other, GreaterThanOrEqual: lambda: value >= other,
        LessThan: lambda: value < other, LessThanOrEqual: lambda: value <= other,
        StringStartsWith: lambda: value.startswith(other), StringEndsWith: lambda: value.endswith(other),
        StringContains: lambda: other in value,
    }  # fmt: skip
    return operations[type(condition)]()


@given(
    st.lists(ROWS, min_size=1, max_size=10),
    st.lists(CONDITIONS, max_size=3),
    st.sampled_from([None, b"", b"a/", b"*/b"]),
    st.booleans(),
)
def test_no_row_is_lost(rows: list[dict[str, Any]], conditions: list[Filter], pattern: bytes | None, with_keys: bool):
    """A row that Spark would keep is neither left out nor in a segment that is skipped."""
    plain = RowFilter(pattern, True, CURRENT)
    narrow = plain.narrowed(Conditions(conditions))
    selected = plain.filter(batch(rows)).to_pylist()
    text = [{**row, "key": row["key"].replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")} for row in selected]
    kept = [
        row for row, as_spark in zip(selected, text, strict=True) if all(holds(one, as_spark) for one in conditions)
    ]
    found = narrow.filter(batch(rows).select(["seq", "payload", *narrow.columns])).column("seq").to_pylist()
    full = narrow.filter(batch(rows)).to_pylist()
    assert found == [row["seq"] for row in full]
    assert all(row in full for row in kept)
    assert all(row in selected for row in full)
    for row in kept:
        assert narrow.kinds is None or row["kind"] in narrow.kinds
    if kept:
        whole: Summary = summary(rows, with_keys=with_keys)
        assert narrow.may_select(whole) or not narrow.can_skip_segments
