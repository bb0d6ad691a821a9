"""Measure the Spark jobs scan, archive and traffic over journals of growing size.

    python benchmarks/spark_archive.py                     # a million rows of 64-byte payloads
    python benchmarks/spark_archive.py --rows 10000000     # about 1.2 GB of journal and 0.4 GB of lake
    python benchmarks/spark_archive.py --segment-bytes 1000000   # many segments

Each line is a journal: rows, segments, seconds to plan a read of all of it, and rows a second of each job. Sessions are
started before, and the first job is run once on a small journal, so that what is measured is the work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from sbus.journal.reader import JournalReader
from sbus.journal.writer import JournalWriter
from sbus.lake.job import MAX_ROWS
from sbus.spark import get_session
from sbus.spark.jobs.archive import Archive
from sbus.spark.jobs.lake import Lake
from sbus.spark.jobs.traffic import traffic

BATCH = 16_384
START = 1_769_860_800_000_000  # µs since 1970
RATE = 100_000
"""Rows per second of recorded time."""


def record(directory: Path, rows: int, size: int, segment_bytes: int) -> None:
    """Write a journal: 150 keys, payloads that compress to about half."""
    keys = [b"sensors/room%d/%s" % (n // 3, (b"temperature", b"humidity", b"power")[n % 3]) for n in range(150)]
    pool = os.urandom(1 << 20).hex().encode()
    journal = JournalWriter.open(directory, segment_bytes=segment_bytes)
    for first in range(0, rows, BATCH):
        numbers = range(first, min(first + BATCH, rows))
        messages = [(keys[n % 150], pool[(at := n * 67 % (len(pool) - size)) : at + size]) for n in numbers]
        journal.append(messages, [START + n * 1_000_000 // RATE for n in numbers])
    journal.close()


def timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def measure(spark: SparkSession, home: Path, rows: int, size: int, segment_bytes: int, max_rows: int) -> str:
    journal, lake = home / "journal", Lake(home / "lake")
    record(journal, rows, size, segment_bytes)
    reader = JournalReader(journal)
    segments = len(reader.segments())
    plan = timed(lambda: reader.plan(reader.start(), reader.end()))
    source = spark.read.format("sbus").option("journal", str(journal))

    def archive() -> None:
        with Archive(spark, [str(journal)], lake, max_rows=max_rows) as running:
            while not running.wait(60):
                pass

    def to_nowhere(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    scan = rows / timed(lambda: to_nowhere(source.load()))
    archived = rows / timed(archive)
    live = rows / timed(lambda: to_nowhere(traffic(source.load())))
    stored = rows / timed(lambda: to_nowhere(traffic(lake.read(spark))))
    sizes = [
        sum(f.stat().st_size for f in home.glob(p)) / rows for p in ("journal/*.arrows", "lake/date=*/*/*.parquet")
    ]
    files = len(list((home / "lake").glob("date=*/*/*.parquet")))
    shutil.rmtree(home)
    return (
        f"{rows:>12,} {segments:>9,} "
        f"{plan:>8.4f} {scan:>11,.0f} {archived:>11,.0f} {live:>16,.0f} {stored:>13,.0f} "
        f"{sizes[0]:>8.0f} {sizes[1]:>6.0f} {files:>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000], help="rows of the journals")
    parser.add_argument("--size", type=int, default=64, help="bytes of a payload")
    parser.add_argument("--segment-bytes", type=int, default=128 << 20, help="bytes of a segment")
    parser.add_argument("--max-rows", type=int, default=MAX_ROWS, help="rows in a batch of the archive")
    parser.add_argument("--master", default="local[*]", help="where Spark runs")
    parser.add_argument("--directory", help="where to work (default: the directory for temporary files)")
    given = parser.parse_args()
    spark = get_session("benchmark", master=given.master)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        measure(spark, Path(directory) / "first", 50_000, given.size, given.segment_bytes, given.max_rows)
        print(
            "        rows  segments   plan s      scan/s   archive/s  traffic journal  traffic lake"
            "  journal   lake  files"
        )
        for rows in given.rows:
            line = measure(spark, Path(directory) / "one", rows, given.size, given.segment_bytes, given.max_rows)
            print(line, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
