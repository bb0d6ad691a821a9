"""Measure what decoding payloads costs Spark: ``payloadFormat`` and ``decode`` beside Spark's own ``from_json``.

::

    python benchmarks/spark_payloads.py
    python benchmarks/spark_payloads.py --rows 2 --directory /dev/shm

It writes a journal of JSON objects with four fields, and reads it in turns: the payloads alone, with ``from_json``, and
with ``payloadFormat`` and ``decode``. A figure is the CPU time of a row, of this process and all that it has started:
Java and its Python workers. It needs the extra ``spark``, Java, and 250 bytes of disk a row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.journal.clock import SECOND
from sbus.journal.writer import JournalWriter
from sbus.spark import decode, get_session

BATCH = 10_000
FIELDS = "temperature DOUBLE, unit STRING, at TIMESTAMP, n BIGINT"
_WARMING = 2
"""Rounds before the measurement, for the JVM to compile; the first takes three times as long."""


def write(directory: str, rows: int) -> None:
    """Write a journal of readings in JSON, of about 90 bytes each."""
    journal = JournalWriter.open(directory)
    for batch in range(rows // BATCH):
        numbers = range(batch * BATCH, (batch + 1) * BATCH)
        readings = [{"temperature": n / 7, "unit": "C", "at": "2026-01-31T12:00:00Z", "n": n} for n in numbers]
        keys = [b"hosts/%03d" % (n % 100) for n in numbers]
        journal.append(
            [(key, json.dumps(one).encode()) for key, one in zip(keys, readings, strict=True)], batch * SECOND
        )
    journal.close()


def queries(spark: SparkSession, directory: str) -> dict[str, Callable[[], DataFrame]]:
    """The reads to compare; each looks at every value."""
    read = spark.read.format("sbus").options(journal=directory, gaps="false")
    payloads = read.schema("payload BINARY").load()
    spark_own = payloads.select(F.from_json(F.decode("payload", "UTF-8"), FIELDS).alias("value"))
    decoded = payloads.select(decode("payload", FIELDS).alias("decoded")).select("decoded.value", "decoded.problem")
    option = read.option("payloadFormat", "json").schema(f"value STRUCT<{FIELDS}>, problem STRING").load()

    def summed(values: DataFrame) -> DataFrame:
        names = [f"value.{name}" for name in ("temperature", "unit", "at", "n")]
        return values.agg(*(F.max(name) for name in names))

    return {
        "payloads alone": lambda: payloads.agg(F.sum(F.length("payload"))),
        "from_json": lambda: summed(spark_own),
        "payloadFormat": lambda: summed(option),
        "decode": lambda: summed(decoded),
    }


def cpu() -> float:
    """Return the CPU seconds of this process, and of all that descend from it and are there."""
    ticks: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        ticks[int(entry.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    mine = {os.getpid()}
    while more := {pid for pid, (parent, _) in ticks.items() if parent in mine} - mine:
        mine |= more
    return sum(ticks[pid][1] for pid in mine) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=float, default=1, help="millions of rows (1)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is done; figures are medians (5)")
    parser.add_argument("--directory", help="where the journal is written, and removed again")
    arguments = parser.parse_args()
    rows = int(arguments.rows * 1e6) // BATCH * BATCH
    directory = tempfile.mkdtemp(prefix="sbus-bench-", dir=arguments.directory)
    try:
        write(f"{directory}/journal", rows)
        spark = get_session("payloads", master="local[2]")
        found: dict[str, list[float]] = {}
        for turn in range(_WARMING + arguments.rounds):
            for name, query in queries(spark, f"{directory}/journal").items():
                before = cpu()
                query().collect()
                if turn >= _WARMING:
                    found.setdefault(name, []).append((cpu() - before) / rows * 1e6)
        for name, figures in found.items():
            print(
                f"{name:<16} {statistics.median(figures):6.2f} µs CPU a row ({min(figures):.2f} to {max(figures):.2f})"
            )
        spark.stop()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
