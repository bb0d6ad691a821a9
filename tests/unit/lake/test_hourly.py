"""The counts of a time: which hours they have, and where they come from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sbus.lake.hourly import hourly
from sbus.lake.plain import PlainTable
from tests.support.lakes import archive, row

_HOURS = 32
_START = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> PlainTable:
    table = PlainTable(tmp_path / "lake")
    archive(table, 0, [row("a", hour, hour) for hour in range(_HOURS)])
    return table


def found(lake, start, end):
    """The hours that are counted, from the start of the lake."""
    with hourly(lake, start, end) as counts:
        assert counts is not None
        times = [pq.read_table(path).column("first")[0].as_py() for path in counts.counts]
    return sorted((time // 1_000_000 - int(_START.timestamp())) // 3600 for time in times)


def at(hour):
    return _START + timedelta(hours=hour)


def test_both_periods_are_counted(lake):
    """The hours are those of the period and of the one before."""
    assert found(lake, at(16), at(24)) == [*range(8, 24)]
    assert found(lake, at(8), at(36)) == [*range(32)]


def test_hours_in_hand_are_counted_for_one_reader(lake):
    """The counts of an hour whose batch is not done are not kept: the batch may be written again."""
    archive(lake, 1, [row("a", 1000, _HOURS)], done=False)
    assert found(lake, at(_HOURS), at(_HOURS + 1))[-1] == _HOURS
    with hourly(lake, at(_HOURS), at(_HOURS + 1)) as counts:
        assert counts is not None
        last = Path(counts.counts[-1])
        assert last.exists()
    assert not last.exists()
    assert len(list((lake.state.directory / "cube").glob("*.counts.parquet"))) == 1


def test_a_lake_without_a_place_for_counts_takes_rows(lake, tmp_path):
    """If counts cannot be written, or there are no hours, there are no counts, and no error."""
    (lake.state.directory / "cube").write_text("in the way")
    with hourly(lake, at(0), at(24)) as counts:
        assert counts is None
    with hourly(PlainTable(tmp_path / "empty"), at(0), at(24)) as counts:
        assert counts is None
