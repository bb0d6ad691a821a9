"""Which rows a query wants, and what can be skipped for it: compared with plain Python, row by row."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
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

from sbus.journal.keytext import as_text
from sbus.journal.schema import KINDS
from sbus.protocol.keys import CURRENT, EARLY, matches
from sbus.spark.datasource.filters import Range, RowFilter

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KEYS = [b"", b"a", b"a/", b"a/b", b"a/bc", b"a/b/c", b"b", b"\xff/a", b"a\\b", "ä".encode()]
TEXTS = [as_text(key) for key in KEYS]
PATTERNS = [b"", b"*", b"a/", b"a/*", b"a/b*", b"*/b", b"b", b"\xff/", b"a\\*"]


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows as they stand in a journal."""
    names = pa.dictionary(pa.int8(), pa.utf8())
    fields = {"journal": names, "seq": pa.int64(), "time": pa.timestamp("us", tz="UTC")}
    fields |= {"kind": names, "key": pa.binary(), "payload": pa.binary()}
    arrays = [pa.array([row[name] for row in rows], kind) for name, kind in fields.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(fields))


def wanted(*filters: Filter, pattern: bytes | None = None, gaps: bool = True, raw_keys: bool = False) -> RowFilter:
    """What a query with these conditions wants; all of them must be understood."""
    result = RowFilter(pattern, gaps, raw_keys, CURRENT)
    assert result.push(filters) == []
    return result


# --- rows ---------------------------------------------------------------------------------------------------

ROWS = st.fixed_dictionaries(
    {
        "journal": st.sampled_from(["x", "y"]),
        "seq": st.integers(0, 5),
        "time": st.integers(0, 5).map(at),
        "kind": st.sampled_from([str(kind) for kind in KINDS]),
        "key": st.sampled_from(KEYS),
        "payload": st.sampled_from([b"", b"p", b"q"]),
    }
).map(lambda row: row if row["kind"] == "message" else {**row, "key": b""})

VALUES = {
    "journal": st.sampled_from(["x", "y", "z"]),
    "seq": st.integers(-1, 6),
    "time": st.integers(-1, 6).map(at),
    "kind": st.sampled_from([*map(str, KINDS), "else"]),
    "key": st.sampled_from(TEXTS),
    "payload": st.sampled_from([b"p", b"q", b"r"]),
}

MEANING: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda found, value: found == value,
    EqualNullSafe: lambda found, value: found == value,
    GreaterThan: lambda found, value: found > value,
    GreaterThanOrEqual: lambda found, value: found >= value,
    LessThan: lambda found, value: found < value,
    LessThanOrEqual: lambda found, value: found <= value,
    In: lambda found, value: found in value,
    StringStartsWith: lambda found, value: found.startswith(value),
    StringEndsWith: lambda found, value: found.endswith(value),
    StringContains: lambda found, value: value in found,
}


@st.composite
def conditions(draw: st.DrawFn) -> Filter:
    """A condition such as Spark hands over."""
    column = draw(st.sampled_from(list(VALUES)))
    kinds: list[Any] = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, In]
    kinds += [StringStartsWith, StringEndsWith, StringContains] if column in ("journal", "kind", "key") else []
    kind = draw(st.sampled_from([*kinds, IsNull, IsNotNull]))
    if kind in (IsNull, IsNotNull):
        one: Filter = kind((column,))
    elif kind is In:
        one = In((column,), draw(st.lists(VALUES[column], max_size=3)))  # type: ignore[arg-type]
    elif kind in (StringStartsWith, StringEndsWith, StringContains):
        one = kind((column,), draw(st.sampled_from(["", "a", "a/", "b", "m"])))
    else:
        one = kind((column,), draw(VALUES[column]))
    return Not(one) if draw(st.booleans()) else one


def holds(one: Any, row: dict[str, Any]) -> bool:
    if isinstance(one, Not):
        return not holds(one.child, row)
    if isinstance(one, IsNull | IsNotNull):
        return isinstance(one, IsNotNull)
    found = row[one.attribute[0]]
    return MEANING[type(one)](as_text(found) if one.attribute[0] == "key" else found, one.value)


def is_wanted(row: dict[str, Any], filters: list[Filter], pattern: bytes | None, gaps: bool) -> bool:
    if row["kind"] != "message":
        if not gaps:
            return False
    elif pattern is not None and not matches(pattern, row["key"]):
        return False
    return all(holds(one, row) for one in filters)


@given(
    st.lists(ROWS, min_size=1, max_size=20),
    st.lists(conditions(), max_size=3),
    st.none() | st.sampled_from(PATTERNS),
    st.booleans(),
)
def test_rows(rows: list[dict[str, Any]], filters: list[Filter], pattern: bytes | None, gaps: bool):
    """Exactly the rows are left for which all conditions hold; and nothing with such a row is ever skipped."""
    query = wanted(*filters, pattern=pattern, gaps=gaps)
    expected = [row for row in rows if is_wanted(row, filters, pattern, gaps)]
    assert query.filter(batch(rows)).to_pylist() == expected
    for row in expected:
        time = (row["time"] - EPOCH) // timedelta(microseconds=1)
        assert query.seqs.intersect(row["seq"], row["seq"]) == Range(row["seq"], row["seq"])
        assert query.times.intersect(time, time) == Range(time, time)
        assert query.wants_journal(row["journal"])
        assert query.wants_kind(row["kind"])
        if row["kind"] == "message":
            assert query.wants_keys([b"nothing", row["key"]])
            assert query.wants_keys_between(row["key"], row["key"])
            assert query.wants_keys_between(b"", row["key"])
            assert query.wants_keys_between(row["key"], b"\xff\xff")


@given(st.lists(ROWS, min_size=1, max_size=5), st.lists(conditions(), max_size=3), st.sampled_from(PATTERNS))
def test_columns(rows: list[dict[str, Any]], filters: list[Filter], pattern: bytes):
    """The columns that a query says it needs are all that it needs."""
    query = wanted(*filters, pattern=pattern)
    whole = batch(rows)
    assert query.filter(whole.select(query.columns)).num_rows == query.filter(whole).num_rows


def test_raw_keys():
    """With keys as bytes conditions on them speak of bytes."""
    rows = [{"journal": "x", "seq": 0, "time": EPOCH, "kind": "message", "key": key, "payload": b""} for key in KEYS]
    found = wanted(EqualTo(("key",), b"\xff/a"), raw_keys=True).filter(batch(rows))
    assert found.column("key").to_pylist() == [b"\xff/a"]
    found = wanted(GreaterThanOrEqual(("key",), b"b"), raw_keys=True).filter(batch(rows))
    assert found.column("key").to_pylist() == [b"b", b"\xff/a", "ä".encode()]


def test_secret_keys_match_no_pattern():
    """A pattern never matches a reserved key, as on the bus; in a dialect without them there are none."""
    assert not RowFilter(b"", True, False, CURRENT).wants_keys([b"!/cred/0/0/0/x"])
    assert RowFilter(b"", True, False, EARLY).wants_keys([b"!/cred/0/0/0/x"])


def test_more_keys_than_are_remembered(monkeypatch: pytest.MonkeyPatch):
    """However many different keys there are, each is matched, and they are not all kept."""
    monkeypatch.setattr("sbus.spark.datasource.filters._KNOWN_KEYS", 10)
    query = wanted(pattern=b"a/*")
    for start in range(0, 100, 20):
        keys = [b"a/%d" % i if i % 2 else b"b/%d" % i for i in range(start, start + 20)]
        assert [query.wants_keys([key]) for key in keys] == [False, True] * 10
    assert len(query._matched) <= 11


# --- what is skipped ----------------------------------------------------------------------------------------


def test_bounds():
    """Conditions on time and seq together bound what is read, to the microsecond."""
    query = wanted(
        GreaterThan(("time",), at(10)),
        LessThan(("time",), at(20)),
        LessThanOrEqual(("time",), at(30)),
        In(("seq",), [7, 3, 5]),  # type: ignore[arg-type]
        GreaterThanOrEqual(("seq",), 4),
        Not(EqualTo(("seq",), 5)),
    )
    assert query.times == Range(10_000_001, 19_999_999)
    assert query.seqs == Range(4, 7)


def test_skipping_by_kind_and_journal():
    """Kinds and journals that no row can be of are not wanted."""
    assert [k for k in KINDS if wanted(EqualTo(("kind",), "stop")).wants_kind(k)] == ["stop"]
    assert [k for k in KINDS if wanted(gaps=False).wants_kind(k)] == ["message"]
    # Gaps have the empty key.
    assert [k for k in KINDS if wanted(StringStartsWith(("key",), "a/")).wants_kind(k)] == ["message"]
    assert [j for j in ("x", "y") if wanted(Not(EqualTo(("journal",), "y"))).wants_journal(j)] == ["x"]


def test_skipping_by_keys():
    """A segment whose keys are known is wanted if one of them is."""
    query = wanted(StringStartsWith(("key",), "a/"), pattern=b"*/b*")
    assert query.wants_keys([b"b/b", b"a/bc"])
    assert not query.wants_keys([b"b/b", b"a/c"])
    assert not query.wants_keys([])


@pytest.mark.parametrize(
    ("query", "wants"),
    [
        (wanted(EqualTo(("key",), "a/b")), [True, False, False]),
        (wanted(In(("key",), ("b", "x/y"))), [False, True, True]),
        (wanted(StringStartsWith(("key",), "x/")), [False, False, True]),
        (wanted(StringStartsWith(("key",), "\\xf")), [True, True, True]),  # half of an escape
        (wanted(EqualTo(("key",), "\\xff")), [False, False, False]),
        (wanted(Not(EqualTo(("key",), "a/b"))), [True, True, True]),
        (wanted(pattern=b"x/*/z"), [False, False, True]),
        (wanted(pattern=b"b"), [False, True, False]),
        (wanted(pattern=b"b/"), [False, True, False]),
        (wanted(pattern=b""), [True, True, True]),
        (wanted(EqualTo(("key",), "a/b"), pattern=b"x/"), [False, False, False]),
        (wanted(EqualTo(("key",), b"x/y"), raw_keys=True), [False, False, True]),
    ],
)
def test_skipping_by_the_least_and_greatest_key(query: RowFilter, wants: list[bool]):
    """A segment with so many keys that only the ends are known is skipped if what is wanted lies beyond them."""
    segments = [(b"a", b"az"), (b"b", b"c"), (b"x", b"x/z")]
    assert [query.wants_keys_between(least, greatest) for least, greatest in segments] == wants


# --- what goes back to Spark --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("payload", "inner"), b"x"),
        EqualTo(("else",), 1),
        EqualTo(("key",), None),
        In(("key",), ("a", None)),
        Not(In(("seq",), (1, None))),
        EqualTo(("seq",), True),
        GreaterThan(("seq",), 1.5),
        EqualTo(("time",), 5),
    ],
    ids=str,
)
def test_what_is_not_understood(one: Filter):
    """A condition that is not understood to the last case is left to Spark, and nothing is skipped for it."""
    query = RowFilter(None, True, False, CURRENT)
    other = EqualTo(("kind",), "message")
    assert query.push([one, other]) == [one]
    assert query.conditions == {"kind": [other]}
