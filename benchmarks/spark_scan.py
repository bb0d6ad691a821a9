"""Measure how fast Spark reads journals, and plans a read of many segments.

::

    python benchmarks/spark_scan.py
    python benchmarks/spark_scan.py --rows 10 --directory /dev/shm

It writes a journal of 64-byte messages, reads it in several ways, and then plans reads of a journal of many small
segments. Nothing else should run on the machine. It needs the extra ``spark``, Java, and 150 bytes of disk a row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.journal import disk
from sbus.journal.clock import HOUR, SECOND, format_utc
from sbus.journal.writer import JournalWriter
from sbus.spark import get_session
from sbus.spark.datasource.options import ReadOptions, StreamOptions
from sbus.spark.datasource.reader import SbusReader
from sbus.spark.datasource.scan import schema
from sbus.spark.datasource.stream import SbusStreamReader

BATCH = 10_000
HOSTS = 100
_WARMING = 3
"""Runs before the measurement, for the JVM to compile; the first takes several times as long."""


def write(directory: str, rows: int) -> None:
    """Write a journal of `rows` messages of 64 bytes, from 100 hosts with 10 sensors each."""
    journal = JournalWriter.open(directory)
    payload = b"p" * 64
    batch = [(b"hosts/%03d/sensor/%d" % (i % HOSTS, i // HOSTS % 10), payload) for i in range(BATCH)]
    for i in range(rows // BATCH):
        journal.append(batch, i * SECOND)
    journal.close()


def write_segments(directory: str, count: int) -> None:
    """Write a journal of `count` segments of two messages each, without syncs."""
    journal = JournalWriter.open(directory, clock=lambda: 0)
    with patch.object(disk, "sync"), patch.object(disk, "sync_directory"), patch("os.fsync"):
        for i in range(count):
            journal.append([(b"hosts/%03d" % (i % HOSTS), b"p"), (b"common", b"p")], i * SECOND)
            journal.roll()
        journal.close()


QUERIES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "count by key prefix, all columns": lambda frame: frame.groupBy(F.substring_index("key", "/", 2)).count(),
    "count by key prefix, of keys alone": lambda frame: frame.groupBy(F.substring_index("key", "/", 2)).count(),
    "bytes by host and minute": lambda frame: frame.groupBy(F.split("key", "/")[1], F.window("time", "1 minute")).agg(
        F.sum(F.length("payload"))
    ),
    "one key of a thousand by a pattern": lambda frame: frame,
    "one host by a pattern": lambda frame: frame,
    "a minute": lambda frame: frame,
}
OPTIONS = {
    "one key of a thousand by a pattern": {"pattern": "hosts/042/sensor/7"},
    "one host by a pattern": {"pattern": "hosts/042/"},
    "a minute": {"since": "1970-01-01T00:01", "until": "1970-01-01T00:02"},
}
SCHEMAS = {"count by key prefix, of keys alone": "key STRING"}


def scan(spark: SparkSession, directory: str, rows: int, rounds: int) -> Iterator[str]:
    """Measure the seconds and the rows per second of each query."""
    for name, query in QUERIES.items():
        reader = spark.read.format("sbus").option("journal", directory).options(**OPTIONS.get(name, {}))
        frame = query((reader.schema(SCHEMAS[name]) if name in SCHEMAS else reader).load())
        times = []
        for _ in range(_WARMING):
            frame.write.format("noop").mode("overwrite").save()
        for _ in range(rounds):
            before = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            times.append(time.perf_counter() - before)
        seconds = statistics.median(times)
        yield f"{name:<36} {seconds:7.2f} s {rows / seconds / 1e6:8.2f} million rows/s of the journal"


def plan(directory: str, rounds: int) -> Iterator[str]:
    """Measure the milliseconds that planning takes without Spark."""
    last = len([name for name in Path(directory).iterdir() if name.suffix == ".arrows"]) * SECOND

    def batch(**options: str) -> Callable[[], int]:
        def read() -> int:
            reader = SbusReader(ReadOptions.parse({"journal": directory, **options}), schema(raw_keys=False))
            return sum(len(partition.slices) for partition in reader.partitions())

        return read

    def stream() -> int:
        reader = SbusStreamReader(StreamOptions.parse({"journal": directory}), schema(raw_keys=False))
        [journal_id] = (end := reader.reportLatestOffset())
        start = {journal_id: end[journal_id] - 20}
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        return sum(len(partition.slices) for partition in reader.partitions(start, end))

    for name, work in {
        "all": batch(),
        "the last hour": batch(since=format_utc(last - HOUR)),
        "a pattern (reads the summary of each segment)": batch(pattern="hosts/042"),
        "the next batch of a stream, 10 segments": stream,
    }.items():
        times = []
        for _ in range(rounds):
            before = time.perf_counter()
            slices = work()
            times.append(time.perf_counter() - before)
        yield f"{name:<52} {statistics.median(times) * 1000:7.0f} ms, {slices} slices"


@contextmanager
def folder(where: str | None) -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="sbus-bench-", dir=where)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=float, default=5, help="millions of rows (5)")
    parser.add_argument("--segments", type=int, default=10_000, help="segments of which a read is planned (10000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is done; figures are medians (3)")
    parser.add_argument("--master", default="local[2]", help="Spark's master (local[2])")
    parser.add_argument("--directory", help="where the journals are written, and removed again")
    arguments = parser.parse_args()
    with folder(arguments.directory) as directory:
        journal, many = str(directory / "journal"), str(directory / "many")
        rows = int(arguments.rows * 1e6) // BATCH * BATCH
        if arguments.segments:
            write_segments(many, arguments.segments)
            print(f"Planning, {arguments.segments} segments:")
            for line in plan(many, arguments.rounds):
                print(" ", line)
        if rows:
            write(journal, rows)
            spark = get_session("scan", master=arguments.master)
            print(f"Scanning, {rows} rows, {arguments.master}:")
            for line in scan(spark, journal, rows, arguments.rounds):
                print(" ", line, flush=True)
            spark.stop()


if __name__ == "__main__":
    main()
