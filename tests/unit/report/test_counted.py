"""A report from counts of hours: percentiles, what is removed meanwhile, and a full disk."""

from __future__ import annotations

import statistics
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import LakeError, StorageError, UsageError
from sbus.journal.clock import from_datetime
from sbus.lake.hourly import hourly
from sbus.lake.plain import PlainTable
from sbus.report import LakeRows, measure
from sbus.report.engine.silences import find_silences
from sbus.report.engine.sizes import percentiles, sizes_of
from sbus.report.engine.store import load_counts, opened, select_keys
from sbus.report.engine.windows import windows_of
from sbus.report.spans import Span
from tests.support.lakes import Row, archive, row

_START = datetime(2026, 1, 31, tzinfo=UTC)
_HOURS = 14 * 24
_SINCE, _UNTIL = _START + timedelta(days=7), _START + timedelta(days=14)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> PlainTable:
    """Two weeks with a message every four hours of each of 20 keys; two of them stop, one rests for two days."""
    table = PlainTable(tmp_path_factory.mktemp("counted") / "lake")
    rows: list[Row] = []
    for hour in range(0, _HOURS, 4):
        for number in range(20):
            if (number < 2 and hour >= _HOURS - 60) or (number == 7 and _HOURS - 100 <= hour < _HOURS - 52):
                continue
            rows.append(row("one", len(rows), hour, f"site/{number // 2}/{number}"))
    archive(table, 0, rows)
    return table


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=20))
def test_percentiles_are_those_of_the_values_one_by_one(counts):
    """Values with their counts have the percentiles of the values that they stand for."""
    values = sorted(value for value, n in counts for _ in range(n))
    found = percentiles(counts, (0, 0.5, 0.95, 1))
    assert (found[0], found[1], found[3]) == (values[0], statistics.median(values), values[-1])
    if len(values) > 1:
        assert found[2] == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])


def test_sizes_are_by_label():
    """All messages come first, then each label that has some; every message is in one bin."""
    sizes, bins = sizes_of([("a/", 0, 2, 0), ("a/", 12, 1, 12), (None, 4, 3, 12)], ["a/", "b/"])
    assert [(each.label, each.messages, each.mean, each.largest) for each in sizes] == [
        (None, 6, 4, 12),
        ("a/", 3, 4, 12),
    ]
    assert bins == [(0, 0, 2), (4, 5, 3), (12, 15, 1)]


@pytest.mark.slow
def test_silences_do_not_depend_on_the_parts(lake):
    """Keys and prefixes are looked at in parts of bounded size; the silences are the same in one part and in many."""
    windows = windows_of(Span(from_datetime(_SINCE), from_datetime(_UNTIL)))

    def silences(**how):
        with LakeRows(lake).counted(windows.period) as counts, opened() as database:
            assert counts is not None
            load_counts(database, counts, windows)
            select_keys(database, None)
            return find_silences(database, windows, {}, {"one": windows.period.end}, 12, 1000, **how)

    whole, count = silences()
    assert [(each.scope, each.is_prefix, each.end is None) for each in whole] == [
        ("site/0/", True, True),
        ("site/3/7", False, False),
    ]
    assert silences(max_part=1000) == (whole, count)


def test_windows_that_are_not_hours_take_rows(lake):
    """Counts cannot be divided: shorter windows, and a period that begins within an hour, take rows."""

    class Uncounted(LakeRows):
        def counted(self, period):
            raise AssertionError(period)

    uncounted = Uncounted(lake)
    assert measure(uncounted, start=_UNTIL - timedelta(days=1), end=_UNTIL).totals.messages == 108
    assert measure(uncounted, start=_SINCE + timedelta(minutes=1), end=_UNTIL).totals.messages > 500


def test_errors_of_a_period_are_those_of_rows(lake):
    """A period without rows is an error that names the remedy."""
    far = timedelta(days=700)
    with pytest.raises(UsageError, match="there are no rows between"):
        measure(LakeRows(lake), start=_SINCE + far, end=_UNTIL + far)


def test_counts_that_are_gone_are_found_missing(lake):
    """Compaction can remove counts while they are read: that is an error of its own, after which one reads again."""
    windows = windows_of(Span(from_datetime(_SINCE), from_datetime(_UNTIL)))
    with hourly(lake, _SINCE, _UNTIL) as counts, opened() as database:
        assert counts is not None
        Path(counts.counts[3]).unlink()
        with pytest.raises(FileNotFoundError):
            load_counts(database, counts, windows)


@pytest.mark.slow
def test_what_is_replaced_meanwhile_is_read_again(lake):
    """The report reads again, a few times; then it says why it gave up."""

    class Replaced(LakeRows):
        left = 2

        def extent(self, latest):
            self.left -= 1
            if self.left >= 0:
                raise FileNotFoundError("part-0.parquet")
            return super().extent(latest)

    assert measure(Replaced(lake), start=_SINCE, end=_UNTIL) == measure(LakeRows(lake), start=_SINCE, end=_UNTIL)
    never = Replaced(lake)
    never.left = 3
    with pytest.raises(LakeError, match="try again"):
        measure(never, start=_SINCE, end=_UNTIL)


def test_no_room_is_an_error_with_a_remedy(lake, monkeypatch, tmp_path):
    """A temporary directory that takes no files is named."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with hourly(lake, _SINCE, _UNTIL) as counts:
        assert counts is None
    with pytest.raises(StorageError, match=r"make room in .*missing"):
        measure(LakeRows(lake), start=_SINCE, end=_UNTIL)
    monkeypatch.setattr(tempfile, "tempdir", None)
