"""Traffic by window and prefix: Spark measures what plain Python counts, in a table and live."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner

from sbus.cli import tables as spark_output
from sbus.cli.main import cli
from sbus.cli.tables import open_writer
from sbus.errors import UsageError
from sbus.journal.digests import Digest
from sbus.journal.schema import MESSAGES
from sbus.spark.jobs.traffic import traffic

NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()) * 1_000_000
SECOND = 1_000_000

Row = tuple[int, str, str, int]
"""Time in µs after noon, kind, key, size of the payload; for ``lost``, the messages."""


def by_hand(rows: list[Row], window: float, depth: int) -> dict[tuple[int, str | None], dict[str, Any]]:
    """The expected rows, by the beginning of the window (µs after noon) and the prefix."""
    length = round(window * SECOND)
    sizes: dict[tuple[int, str], list[int]] = defaultdict(list)
    keys = defaultdict(set)
    gaps: dict[int, int] = defaultdict(int)
    lost: dict[int, int] = defaultdict(int)
    for time, kind, key, size in rows:
        start = (NOON + time) // length * length - NOON
        gaps[start] += kind not in MESSAGES
        lost[start] += size if kind == "lost" else 0
        if kind in MESSAGES:
            prefix = "/".join(key.split("/")[:depth])
            sizes[start, prefix].append(size)
            keys[start, prefix].add(key)
    found: dict[tuple[int, str | None], dict[str, Any]] = {
        (start, prefix): {
            "messages": len(all_sizes),
            "bytes": sum(all_sizes),
            "rate": len(all_sizes) / window,
            "keys": len(keys[start, prefix]),
            **{f"p{p}": sorted(all_sizes)[math.ceil(len(all_sizes) * p / 100) - 1] for p in (50, 95, 99)},
            "gaps": gaps[start],
            "lost": lost[start],
        }
        for (start, prefix), all_sizes in sizes.items()
    }
    for start, count in gaps.items():
        if not any(start == other for other, _ in sizes):
            found[start, None] = {"messages": 0, "bytes": 0, "rate": 0.0, "keys": 0, "gaps": count, "lost": lost[start]}
            found[start, None] |= {"p50": None, "p95": None, "p99": None}
    return found


def collected(measured) -> dict[tuple[int, str | None], dict[str, Any]]:
    from pyspark.sql import functions as F

    found = {}
    for row in measured.withColumn("time", F.unix_micros("time") - NOON).collect():
        values = row.asDict()
        place = values.pop("time"), values.pop("prefix")
        assert place not in found
        found[place] = values
    return found


def receipt(messages: int) -> bytes:
    """The payload of a row of kind ``lost``; with 0 messages, one of unknown number."""
    return b"%d 70 90 queue-full" % messages if messages else b"? ? ? reconnect"


def payload(kind: str, size: int) -> bytes:
    """The payload of a row."""
    return receipt(size) if kind == "lost" else Digest(size, "ab" * 32).pack() if kind == "digest" else bytes(size)


def as_frame(spark, rows: list[Row]):
    from pyspark.sql import functions as F

    frame = spark.createDataFrame(
        [(NOON + time, kind, key, payload(kind, size)) for time, kind, key, size in rows],
        "micros long, kind string, key string, payload binary",
    )
    return frame.withColumn("time", F.timestamp_micros("micros"))


@pytest.mark.parametrize(
    ("window", "depth"),
    [(60.0, 2), *(pytest.param(*place, marks=pytest.mark.slow) for place in ((60.0, 1), (0.5, 0)))],
)
def test_windows_and_prefixes_are_counted(spark, window, depth):
    """A key with too few segments is its own prefix; windows begin at whole multiples of their length."""
    rows: list[Row] = [
        (0, "message", "a/b/c", 3),
        (59 * SECOND + 999_999, "message", "a/b/d", 5),
        (60 * SECOND, "message", "a/b/c", 0),
        (61 * SECOND, "message", "a", 7),
        (61 * SECOND, "digest", "a/b/e", 6_220_800),
        (62 * SECOND, "message", "", 1),
        (63 * SECOND, "message", "/x", 1),
        (64 * SECOND, "reconnect", "", 20),
        (65 * SECOND, "full", "", 20),
        (66 * SECOND, "lost", "", 1_000),
        (66 * SECOND, "lost", "", 24),
        (67 * SECOND, "lost", "", 0),
        (200 * SECOND, "stop", "", 20),
        (201 * SECOND, "lost", "", 7),
        *((300 * SECOND + n, "message", f"many/{n % 50}", n % 400) for n in range(800)),
    ]
    frame = as_frame(spark, rows)
    # Parquet leaves out what it does not know.
    assert traffic(frame).columns == spark_output.schema().names
    measured, expected = collected(traffic(frame, window=window, depth=depth)), by_hand(rows, window, depth)
    for place, values in expected.items():
        # What is counted approximately, within three standard deviations.
        assert measured[place].pop("keys") == pytest.approx(values.pop("keys"), rel=0.06)
    assert measured == expected


def test_a_window_that_cannot_be_is_refused(spark):
    """The error for a window or depth out of range names the range."""
    frame = as_frame(spark, [(0, "message", "a", 1)])
    with pytest.raises(UsageError, match="1 ms to 366 days"):
        traffic(frame, window=0)
    with pytest.raises(UsageError, match="0 or more"):
        traffic(frame, depth=-1)


@pytest.mark.slow
def test_a_stream_tells_a_window_once_it_is_over(spark, new_journal, tmp_path):
    """A live query gives the same rows as a table, and leaves out windows that can still grow."""
    rows: list[Row] = [(n * SECOND // 10, "message", f"k{n % 3}/x", n % 9) for n in range(600)]
    journal = new_journal(clock=lambda: NOON)
    journal.append([(key.encode(), bytes(size)) for _, _, key, size in rows], [NOON + time for time, *_ in rows])
    journal.sync()
    emitted: list[Any] = []
    stream = (
        spark.readStream.format("sbus").option("journal", journal.directory).option("maxRowsPerTrigger", 300).load()
    )
    query = (
        traffic(stream, window=10.0, watermark=5.0)
        .writeStream.foreachBatch(lambda frame, _: emitted.append(collected(frame)))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    expected = by_hand(rows, 10.0, 1)
    # The last row is of second 59.9, so what ended by second 54.9 is over.
    assert {place: values for batch in emitted for place, values in batch.items()} == {
        place: values for place, values in expected.items() if place[0] < 50 * SECOND
    }
    assert sum(map(len, emitted)) == 15


def test_the_command_is_emitted_what_is_missing():
    """Wrong usage ends before Spark starts: with status 2, or 1 for a missing journal."""
    run = CliRunner().invoke
    assert "--lake=DIR, or --journal=DIR" in run(cli, ["spark", "traffic"]).output
    assert run(cli, ["spark", "traffic"]).exit_code == 2
    assert "not --lake" in run(cli, ["spark", "traffic", "--live", "--lake=x", "--journal=y"]).output
    assert "give a time" in run(cli, ["spark", "traffic", "--lake=x", "--window=fast"]).output
    assert "is not a time" in run(cli, ["spark", "traffic", "--lake=x", "--since=noon"]).output
    for early in ("0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00"):
        assert "is not a time" in run(cli, ["spark", "traffic", "--lake=x", f"--until={early}"]).output
    assert "is not in the range" in run(cli, ["spark", "traffic", "--lake=x", "--depth=3000000000"]).output
    missing = run(cli, ["spark", "traffic", "--journal=/nowhere"])
    assert (missing.exit_code, missing.output) == (
        1,
        "sbus: /nowhere: this is no journal (it has no journal.json): name the directory that the recorder writes\n",
    )


ROWS: list[dict[str, Any]] = [
    {"time": datetime(2026, 1, 31, 12, tzinfo=UTC), "prefix": "a,\x1b", "messages": 1234, "rate": 20.5, "p50": None},
    {
        "time": datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC),
        "prefix": None,
        "messages": 1,
        "rate": 0.0,
        "p50": 3,
    },
]


def test_a_table_harms_no_terminal(capsys):
    """The table shows control characters of keys as text, and aligns numbers."""
    with open_writer(None) as writer:
        assert writer.write(ROWS) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["time", "prefix", "messages", "rate", "p50"]
    assert lines[1].split() == ["2026-01-31T12:00:00Z", "a,\\x1b", "1,234", "20.5", "-"]
    assert lines[2].split() == ["2026-01-31T12:00:00.500Z", "-", "1", "0.0", "3"]
    assert len({len(line) for line in lines}) == 1


def test_files_hold_what_was_measured(tmp_path):
    """In text formats a time ends with Z; in Parquet it is a timestamp in UTC."""
    import pyarrow.parquet as pq

    for name in ("t.csv", "t.json", "t.parquet"):
        with open_writer(str(tmp_path / name)) as writer:
            assert writer.write(ROWS) == 2
    assert (tmp_path / "t.csv").read_text() == (
        'time,prefix,messages,rate,p50\n2026-01-31T12:00:00Z,"a,\x1b",1234,20.5,\n2026-01-31T12:00:00.500Z,,1,0.0,3\n'
    )
    assert [json.loads(line)["messages"] for line in (tmp_path / "t.json").read_text().splitlines()] == [1234, 1]
    found = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS


def test_a_parquet_file_has_its_columns_whatever_the_rows_are(tmp_path):
    """A Parquet file can have no rows, or a part with gaps only, without prefixes and percentiles."""
    import pyarrow.parquet as pq

    gap = {"time": ROWS[0]["time"], "prefix": None, "messages": 0, "bytes": 0, "rate": 0.0, "keys": 0}
    gap |= {"p50": None, "p95": None, "p99": None, "gaps": 1, "lost": 0}
    full = gap | {"prefix": "a", "messages": 1, "rate": 0.1, "p50": 3, "p95": 3, "p99": 3}
    rows = [*[gap] * 65_536, full]
    for name, some in (("none", []), ("gaps", rows)):
        with open_writer(str(tmp_path / f"{name}.parquet")) as writer:
            assert writer.write(some) == len(some)
    none, gaps = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("none", "gaps"))
    assert none.column_names == list(gap)
    assert none.schema == gaps.schema
    assert none.num_rows == 0
    assert gaps.slice(65_535).to_pylist() == [gap, full]


def test_what_keeps_a_file_from_being_made_is_emitted(tmp_path, monkeypatch):
    """If the file cannot be made, the error is that one, and not a failed clean-up."""

    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="not yours"), open_writer(str(tmp_path / "t.csv")):
        pass


def test_a_file_is_there_when_it_is_complete(tmp_path):
    """A failed job leaves an older file unchanged; a live job appends to it."""
    path = tmp_path / "t.csv"
    path.write_text("old\n")
    with pytest.raises(ZeroDivisionError), open_writer(str(path)) as writer:
        writer.write({"number": 1 / number} for number in (1, 0))
    assert [other.name for other in tmp_path.iterdir()] == ["t.csv"]
    with open_writer(str(path), grows=True) as writer:
        writer.write(ROWS[1:])
        assert path.read_text() == "old\n2026-01-31T12:00:00.500Z,,1,0.0,3\n"
    with pytest.raises(UsageError, match="cannot grow"), open_writer("t.parquet", grows=True):
        pass
    with pytest.raises(UsageError, match=r"ends with \.csv, \.json, \.parquet"), open_writer("t.txt"):
        pass
