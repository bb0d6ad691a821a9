"""``sbus spark traffic``: messages, bytes and rates, of what was archived or of what is going on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from sbus.cli.spark.job import Duration, Job, Progress, Time, end_by_signals, to_run, watched, with_job
from sbus.cli.tables import Writer, output_to
from sbus.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["traffic"]

_POLL_INTERVAL = 0.25
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
    "--window", type=Duration(0.001), metavar="TIME", default="1m", show_default=True, help="What is measured together."
)
@click.option(
    "--depth",
    type=click.IntRange(0, 2**31 - 1),
    metavar="N",
    default=1,
    show_default=True,
    help="Segments of the key that make a prefix; 0: all keys together.",
)
@click.option("--since", type=Time(), metavar="TIME", help="Leave out what came before, as in 2026-01-31T12:00 (UTC).")
@click.option("--until", type=Time(), metavar="TIME", help="Leave out what came then and later.")
@click.option("--live", is_flag=True, help="Measure what is recorded from now on (or --since), on and on.")
@click.option(
    "--late",
    type=Duration(),
    metavar="TIME",
    default="10s",
    show_default=True,
    help="With --live: how much later than others a journal's rows may come; so long does a window wait.",
)
@click.option(
    "--every",
    type=Duration(),
    metavar="TIME",
    default="5s",
    show_default=True,
    help="With --live: time between two looks.",
)
@click.option("--output", "-o", metavar="FILE", help="Write FILE.csv, .json (an object a line) or .parquet.")
@to_run
@with_job
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
    """Measure what was archived (--lake) or recorded (--journal), by windows of time and prefixes of keys.

    Of each: messages, bytes of payload, messages a second, how many different keys, the sizes that 50, 95 and 99
    per cent of the payloads do not exceed, and how many gaps the recording has there: where that is not 0, messages
    may be missing.

    With --live a window is told when it is over. Ctrl-C ends it.
    """
    if live and (job.lake or until):
        raise UsageError(
            "--live measures what journals record from now on: it goes with --journal, not --lake or --until"
        )
    if bool(job.lake) == bool(job.journal):
        raise UsageError("say what to measure: --lake=DIR, or --journal=DIR (one or several)")
    if job.journal:
        job.need_journals()
    with output_to(output, grows=live) as writer, job.session("traffic") as spark:
        began = time.monotonic()
        if live:
            count = _live(spark, job, writer, window, depth, since, late, every)
        else:
            from sbus.spark.jobs.tables import load_rows
            from sbus.spark.jobs.traffic import traffic as measure

            found = load_rows(spark, journals=job.journal, lake=job.lake, since=since, until=until)
            measured = measure(found, window=window, depth=depth)
            rows = _plain(measured.orderBy("time", "prefix"))
            with watched(spark):
                first = list(islice(rows, 1))
            count = writer.write(chain(first, rows))
    click.echo(f"measured {count:,} windows and prefixes in {time.monotonic() - began:.0f} s", err=True)


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

    start = "latest" if since is None else since.isoformat()
    rows = (
        spark.readStream.format("sbus")
        .option("journal", "\n".join(job.journal))
        .option("startingOffsets", start)
        .load()
    )
    measured = measure(rows, window=window, depth=depth, watermark=late)
    count = batches = 0
    progress = Progress()

    def put(rows: DataFrame, batch: int) -> None:
        nonlocal count, batches
        if stop.is_due(is_busy=True, done=batches):
            return  # it would be interrupted half way
        progress.clear()
        count += writer.write(_plain(rows.orderBy("time", "prefix")))
        batches += 1

    with tempfile.TemporaryDirectory(prefix="sbus-traffic-", ignore_cleanup_errors=True) as state:
        stream = measured.writeStream.outputMode("append").foreachBatch(put)
        # Executors write there too: on a cluster it must be a place that they share.
        if spark.conf.get(_CHECKPOINTS, None) is None:
            stream = stream.option("checkpointLocation", state)
        with end_by_signals() as stop:
            query = stream.trigger(processingTime=f"{every * 1000:.0f} milliseconds").start()
            try:
                while not query.awaitTermination(_POLL_INTERVAL):  # type: ignore[arg-type]
                    if stop.is_due(is_busy=query.status["isTriggerActive"], done=batches):
                        break
                    progress.show("waiting for the first window to be over" if not count else "")
                progress.clear()
            finally:
                query.stop()
    return count


def _plain(measured: DataFrame) -> Iterator[dict[str, Any]]:
    """The rows, one partition in memory at a time, with times that know their zone."""
    from pyspark.sql import functions as F

    for row in measured.withColumn("time", F.unix_micros("time")).toLocalIterator():
        found = row.asDict()
        seconds, micros = divmod(found["time"], 1_000_000)
        found["time"] = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
        yield found
