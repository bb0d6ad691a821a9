"""``sbus spark traffic``: messages, bytes and rates, recorded or live."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING

import click

from sbus.cli.output import Progress
from sbus.cli.spark.job import Job, job_options, pass_job, show_tasks
from sbus.cli.stopping import stop_on_signals
from sbus.cli.tables import Row, Writer, open_writer
from sbus.cli.types import Duration, Time
from sbus.errors import UsageError
from sbus.journal import clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["traffic"]

_POLL_INTERVAL = 0.25
"""Seconds between two looks at the query."""
_CHECKPOINTS = "spark.sql.streaming.checkpointLocation"


@click.command(
    short_help="Measure messages, bytes and rates by time and key.",
    epilog="""\
\b
Examples:
  sbus spark traffic --lake=/srv/lake --since=2026-01-31 --window=1h
  sbus spark traffic --lake=/srv/lake --depth=2 --output=traffic.csv
  sbus spark traffic --journal=/var/lib/sbus/journal --live --window=10s
""",
)
@click.option(
    "--window",
    type=Duration(0.001),
    metavar="TIME",
    default="1m",
    show_default=True,
    help="Length of a window, such as 500ms, 10s, 5m or 1h.",
)
@click.option(
    "--depth",
    type=click.IntRange(0, 2**31 - 1),
    metavar="N",
    default=1,
    show_default=True,
    help="Key segments in a prefix; 0 measures all keys together.",
)
@click.option(
    "--since", type=Time(), metavar="TIME", help="Skip rows before TIME, such as 2026-01-31T12:00 (UTC) or -7d."
)
@click.option("--until", type=Time(), metavar="TIME", help="Stop before TIME.")
@click.option("--live", is_flag=True, help="Measure rows as they are recorded, from now on or from --since.")
@click.option(
    "--late",
    type=Duration(),
    metavar="TIME",
    default="10s",
    show_default=True,
    help="With --live: how far rows of one journal may lag behind another's; windows are printed this much later.",
)
@click.option(
    "--every",
    type=Duration(),
    metavar="TIME",
    default="5s",
    show_default=True,
    help="With --live: time between updates.",
)
@click.option("--output", "-o", metavar="FILE", help="Write to FILE, as .csv, .json (one object per line) or .parquet.")
@job_options
@pass_job
def traffic(
    job: Job,
    window: float,
    depth: int,
    since: datetime | None,
    until: datetime | None,
    live: bool,
    late: float,
    every: float,
    output: str | None,
) -> None:
    """Measure traffic by time window and key prefix.

    The rows come from a lake (--lake) or from journals (--journal).

    Columns: messages; payload bytes; messages per second; different keys; the 50th, 95th and 99th
    percentile of payload sizes, in bytes; gaps in the recording, and messages that the bus dropped in
    them. Where there are gaps, messages may be missing.

    With --live, each window is printed when it is over. Ctrl-C exits.
    """
    if live and (job.lake or until):
        raise UsageError(
            "--live measures journals while they are recorded: use it with --journal, not --lake or --until"
        )
    if bool(job.lake) == bool(job.journal):
        raise UsageError("nothing to measure: give either --lake=DIR, or --journal=DIR once or more")
    if job.journal:
        job.need_journals()
    with open_writer(output, grows=live) as writer, job.session("traffic") as spark:
        start = time.monotonic()
        if live:
            count = _live(spark, job, writer, window, depth, since, late, every)
        else:
            from sbus.spark.jobs.tables import load_rows
            from sbus.spark.jobs.traffic import traffic as measure

            source = load_rows(spark, journals=job.journal, lake=job.lake, state=job.state, since=since, until=until)
            measured = measure(source, window=window, depth=depth)
            rows = _result_rows(measured.orderBy("time", "prefix"))
            with show_tasks(spark):
                first = list(islice(rows, 1))
            count = writer.write(chain(first, rows))
    click.echo(f"measured {count:,} windows and prefixes in {time.monotonic() - start:.0f} s", err=True)


def _live(
    spark: SparkSession,
    job: Job,
    writer: Writer,
    window: float,
    depth: int,
    since: datetime | None,
    late: float,
    every: float,
) -> int:
    from sbus.spark.jobs.traffic import traffic as measure

    offsets = "latest" if since is None else since.isoformat()
    rows = (
        spark.readStream.format("sbus")
        .option("journal", "\n".join(job.journal))
        .option("startingOffsets", offsets)
        .load()
    )
    measured = measure(rows, window=window, depth=depth, watermark=late)
    count = batches = 0
    progress = Progress()

    def write_batch(rows: DataFrame, batch: int) -> None:
        nonlocal count, batches
        if stop.is_due(is_busy=True, done=batches):
            return  # the query is about to be stopped, in the middle of this batch
        progress.clear()
        count += writer.write(_result_rows(rows.orderBy("time", "prefix")))
        batches += 1

    with tempfile.TemporaryDirectory(prefix="sbus-traffic-", ignore_cleanup_errors=True) as state:
        stream = measured.writeStream.outputMode("append").foreachBatch(write_batch)
        # Executors write checkpoints too, so a cluster needs a directory that they share; --conf names it.
        if spark.conf.get(_CHECKPOINTS, None) is None:
            stream = stream.option("checkpointLocation", state)
        with stop_on_signals() as stop:
            query = stream.trigger(processingTime=f"{every * 1000:.0f} milliseconds").start()
            try:
                while not query.awaitTermination(_POLL_INTERVAL):  # type: ignore[arg-type]
                    if stop.is_due(is_busy=query.status["isTriggerActive"], done=batches):
                        break
                    progress.show("waiting for the end of the first window" if not count else "")
                progress.clear()
            finally:
                query.stop()
    return count


def _result_rows(measured: DataFrame) -> Iterator[Row]:
    """Yield the results, with times in UTC; one partition at a time is in memory."""
    from pyspark.sql import functions as F

    for row in measured.withColumn("time", F.unix_micros("time")).toLocalIterator():
        result = row.asDict()
        result["time"] = clock.to_datetime(result["time"])
        yield result
