"""The rows that a read selects and the segments that it skips, compared with plain Python row by row."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.journal.clock import from_datetime, to_datetime
from sbus.journal.schema import KINDS, MESSAGES, Kind
from sbus.journal.summary import Summary
from sbus.protocol.keys import CURRENT, EARLY, matches
from sbus.spark.datasource.filters import _CACHED_KEYS, RowFilter

KEYS = [b"", b"a", b"a/", b"a/b", b"a/bc", b"a/b/c", b"b", b"\xff/a", b"a\\b", "ä".encode()]
PATTERNS = [b"", b"*", b"a/", b"a/*", b"a/b*", b"*/b", b"b", b"\xff/", b"a\\*"]


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Rows with the types that they have in a journal."""
    names = pa.dictionary(pa.int8(), pa.utf8())
    fields = {"journal": names, "seq": pa.int64(), "time": pa.timestamp("us", tz="UTC")}
    fields |= {"kind": names, "key": pa.binary(), "payload": pa.binary()}
    arrays = [pa.array([row[name] for row in rows], kind) for name, kind in fields.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(fields))


def new_filter(
    pattern: bytes | None = None, *, gaps: bool = True, since: int | None = None, until: int | None = None
) -> RowFilter:
    return RowFilter(pattern, gaps, CURRENT, since, until)


ROWS = st.fixed_dictionaries(
    {
        "journal": st.sampled_from(["x", "y"]),
        "seq": st.integers(0, 5),
        "time": st.integers(0, 5).map(to_datetime),
        "kind": st.sampled_from([str(kind) for kind in KINDS]),
        "key": st.sampled_from(KEYS),
        "payload": st.sampled_from([b"", b"p", b"q"]),
    }
).map(lambda row: row if row["kind"] in MESSAGES else {**row, "key": b""})

FILTERS = st.builds(
    new_filter,
    st.none() | st.sampled_from(PATTERNS),
    gaps=st.booleans(),
    since=st.none() | st.integers(-1, 6),
    until=st.none() | st.integers(-1, 6),
)


def is_selected(row: dict[str, Any], rows: RowFilter) -> bool:
    """Whether a filter selects a row, written as plainly as possible."""
    time: datetime = row["time"]
    if rows.since is not None and from_datetime(time) < rows.since:
        return False
    if rows.until is not None and from_datetime(time) >= rows.until:
        return False
    if row["kind"] not in MESSAGES:
        return rows.gaps
    return rows.pattern is None or matches(rows.pattern, row["key"])


def summary(rows: list[dict[str, Any]], *, with_keys: bool) -> Summary:
    """The summary of a segment with these rows, with all of its keys or only the least and the greatest."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    keys = sorted({row["key"] for row in rows if row["kind"] in MESSAGES})
    counts = {str(kind): sum(row["kind"] == kind for row in rows) for kind in kinds}
    ends = (keys[0], keys[-1]) if keys else (None, None)
    return Summary(0, len(rows), 0, 0, 0, counts, keys if with_keys else None, *ends)


@given(st.lists(ROWS, min_size=1, max_size=20), FILTERS)
def test_rows(rows: list[dict[str, Any]], query: RowFilter):
    """A filter leaves exactly the rows that it selects, and reads no more than the columns that it names."""
    expected = [row for row in rows if is_selected(row, query)]
    assert query.filter(batch(rows)).to_pylist() == expected
    assert query.filter(batch(rows).select(["seq", *query.columns])).num_rows == len(expected)


@given(st.lists(ROWS, min_size=1, max_size=20), FILTERS, st.booleans())
def test_no_segment_with_a_selected_row_is_skipped(rows: list[dict[str, Any]], query: RowFilter, with_keys: bool):
    """If a filter selects a row of a segment, it rules the segment out by neither its kinds, keys nor times."""
    expected = [row for row in rows if is_selected(row, query)]
    if expected:
        assert query.may_select(summary(rows, with_keys=with_keys))
    for row in expected:
        assert query.kinds is None or row["kind"] in query.kinds
        assert query.since is None or query.since <= from_datetime(row["time"])
        assert query.max_time is None or from_datetime(row["time"]) <= query.max_time
        if row["kind"] in MESSAGES:
            assert query.matches_any([b"nothing", row["key"]])
            assert query.may_match_between(row["key"], row["key"])
            assert query.may_match_between(b"", row["key"])
            assert query.may_match_between(row["key"], b"\xff\xff")


def test_secret_keys_match_no_pattern():
    """A pattern never matches a reserved key, as on the bus; the early dialect has no reserved keys."""
    assert not RowFilter(b"", True, CURRENT).matches_any([b"!/cred/0/0/0/x"])
    assert RowFilter(b"", True, EARLY).matches_any([b"!/cred/0/0/0/x"])


def test_more_keys_than_are_cached():
    """The filter matches every key, and keeps a bounded number of them."""
    query = new_filter(b"a/*")
    query._matched.update(dict.fromkeys((b"b/%d" % i for i in range(_CACHED_KEYS - 1)), False))
    found = []
    for key in (b"a/1", b"a/2", b"b/1", b"a/2"):
        found.append((query.matches_any([key]), len(query._matched)))
    assert found == [(True, _CACHED_KEYS), (True, 1), (False, 2), (True, 2)]


def test_limits_in_time():
    """The last selected time is the microsecond before `until`; without limits there is none."""
    assert (new_filter(since=10, until=20).since, new_filter(since=10, until=20).max_time) == (10, 19)
    assert new_filter().max_time is None


def test_skipping_by_kind():
    """Without gaps only messages are selected, and a segment that has none is skipped."""
    assert new_filter().kinds is None
    assert new_filter(gaps=False).kinds == frozenset({"message", "digest"})
    gap = {"kind": str(Kind.START), "key": b""}
    assert not new_filter(gaps=False).may_select(summary([gap], with_keys=True))
    assert new_filter(b"a", gaps=True).may_select(summary([gap], with_keys=True))


def test_summaries_are_of_use_with_a_pattern_or_without_gaps():
    """A read of all rows, or of a span of time, does not open summaries."""
    assert not new_filter(since=5).can_skip_segments
    assert new_filter(b"a").can_skip_segments
    assert new_filter(gaps=False).can_skip_segments


def test_skipping_by_keys():
    """A segment with a list of its keys is wanted if the pattern matches one of them."""
    query = new_filter(b"a/b*")
    assert query.matches_any([b"b/b", b"a/bc"])
    assert not query.matches_any([b"b/b", b"a/c"])
    assert not query.matches_any([])


@pytest.mark.parametrize(
    ("pattern", "selects"),
    [
        (b"a/b", [True, False, False]),
        (b"x/*/z", [False, False, True]),
        (b"b", [False, True, False]),
        (b"b/", [False, True, False]),
        (b"", [True, True, True]),
        (b"*/b", [True, True, True]),
        (None, [True, True, True]),
    ],
)
def test_skipping_by_the_least_and_greatest_key(pattern: bytes | None, selects: list[bool]):
    """A segment with only its least and greatest key known is skipped if all matching keys lie beyond them."""
    segments = [(b"a", b"az"), (b"b", b"c"), (b"x", b"x/z")]
    assert [new_filter(pattern).may_match_between(least, greatest) for least, greatest in segments] == selects
