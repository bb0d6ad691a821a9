"""A long report from the counts of closed hours has the figures of one from all rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from sbus.lake.plain import PlainTable
from sbus.spark.jobs.lake import Lake
from sbus.spark.report import measure
from tests.support.lakes import archive, row

HOURS = 14 * 24


@pytest.mark.slow
def test_counts_give_the_same_report(spark, tmp_path):
    """Totals, traffic, top keys, silences, gaps and changes are equal; the current hour is read from its rows."""
    table = PlainTable(tmp_path / "lake")
    rows, seq = [("one", 0, *row("one", 0, 0)[2:3], "start", "", b'{"reason": "new"}')], 1
    for hour in range(0, HOURS, 6):
        for key in range(4):
            if key == 3 and hour > HOURS - 50:
                continue
            if 198 <= hour < 210:
                continue
            rows.append(row("one", seq, hour, f"plant/{key}", b"x" * (key * 11)))
            seq += 1
        if hour == 216:
            for kind, payload in (
                ("lost", b"70 7000 70 queue-full"),
                ("lost", b"? ? ? reconnect"),
                ("clock", b'{"step": -7200.0}'),
                ("damaged", b'{"rows": 3, "last": 900}'),
            ):
                rows.append(("one", seq, *row("one", seq, hour)[2:3], kind, "", payload))
                seq += 1
        if hour == 210:
            rows.append(("one", seq, *row("one", seq, hour)[2:3], "reconnect", "", b'{"reason": "the bus"}'))
            seq += 1
    newest = [each for each in rows if each[2] >= row("one", 0, HOURS - 6)[2]]
    rows = rows[: -len(newest)]
    for batch in range(4):
        archive(table, batch, rows[batch * len(rows) // 4 : (batch + 1) * len(rows) // 4])
    archive(table, 4, newest, done=False)
    lake = Lake(tmp_path / "lake")
    end = datetime(2026, 1, 31, tzinfo=UTC) + timedelta(hours=HOURS)
    start = end - timedelta(days=7)
    whole = measure(lake.read(spark), start=start, end=end)
    counted = measure(lake.read(spark), start=start, end=end, hourly=lake.hourly(spark, last=end - start))
    assert len(list((table.state.directory / "cube").glob("*.counts.parquet"))) == HOURS // 6 - 2 - 1
    assert whole.silences
    assert whole.gaps
    assert {(loss.kind, loss.reason): (loss.number, loss.unknown) for loss in whole.losses} == {
        ("lost", "queue-full"): (70, 0),
        ("lost", "reconnect"): (0, 1),
        ("damaged", ""): (3, 0),
    }
    assert [step.step for step in whole.steps] == [-7_200_000_000]
    assert replace(counted, sizes=whole.sizes) == whole
    assert [each.messages for each in counted.sizes] == [each.messages for each in whole.sizes]
    assert [each.largest for each in counted.sizes] == [each.largest for each in whole.sizes]
