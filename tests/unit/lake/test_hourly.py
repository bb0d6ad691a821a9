"""The counts of a time: which hours they have, and where they come from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sbus.lake.hourly import hourly
from sbus.lake.plain import PlainTable
from tests.support.lakes import archive, row

_DAYS = 8
_START = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> PlainTable:
    table = PlainTable(tmp_path / "lake")
    archive(table, 0, [row("a", hour, hour) for hour in range(24 * _DAYS)])
    return table


def found(lake, start, end):
    """The hours that are counted, from the start of the lake."""
    with hourly(lake, start, end) as counts:
        assert counts is not None
        times = [pq.read_table(path).column("first")[0].as_py() for path in counts.counts]
    return sorted((time // 1_000_000 - int(_START.timestamp())) // 3600 for time in times)


def day(number):
    return _START + timedelta(days=number)


def test_both_periods_are_counted(lake):
    """The hours are those of the period and of the one before."""
    assert found(lake, day(4), day(6)) == [*range(2 * 24, 6 * 24)]
    assert found(lake, day(2), day(9)) == [*range(8 * 24)]


def test_hours_in_hand_are_counted_for_one_reader(lake):
    """The counts of an hour whose batch is not done are not kept: the batch may be written again."""
    archive(lake, 1, [row("a", 1000, 24 * _DAYS)], done=False)
    assert found(lake, day(_DAYS), day(_DAYS) + timedelta(hours=1))[-1] == 24 * _DAYS
    with hourly(lake, day(_DAYS), day(_DAYS) + timedelta(hours=1)) as counts:
        assert counts is not None
        last = Path(counts.counts[-1])
        assert last.exists()
    assert not last.exists()
    assert len(list((lake.state.directory / "cube").glob("*.counts.parquet"))) == 1


def test_a_lake_without_a_place_for_counts_takes_rows(lake, tmp_path):
    """If counts cannot be written, or there are no hours, there are no counts, and no error."""
    (lake.state.directory / "cube").write_text("in the way")
    with hourly(lake, day(0), day(1)) as counts:
        assert counts is None
    with hourly(PlainTable(tmp_path / "empty"), day(0), day(1)) as counts:
        assert counts is None
