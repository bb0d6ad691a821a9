"""``sbus spark archive``: journals into a lake, once or on and on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from sbus.cli.options import COUNT, pluralize
from sbus.cli.spark.job import Duration, Job, Progress, end_by_signals, to_run, with_job
from sbus.errors import SparkError

if TYPE_CHECKING:
    from sbus.spark.jobs.archive import Archive

__all__ = ["archive"]

_POLL_INTERVAL = 0.25
"""Seconds between two looks at what the job has done."""


@click.command(
    short_help="Put journals into a lake of Parquet files, exactly once.",
    epilog="""\
\b
Examples:
  sbus spark archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
  sbus spark archive --journal='/shared/journals/*' --lake=/srv/lake --every=1m
""",
)
@click.option("--once", is_flag=True, help="Archive what is there, and end.")
@click.option(
    "--every", type=Duration(), metavar="TIME", default="10s", show_default=True, help="From one batch to the next."
)
@click.option("--max-rows", type=COUNT, metavar="N", help="Rows in the largest batch.  [default: ten million]")
@click.option(
    "--consumer",
    metavar="NAME",
    help="Under which name the journals are told what may be deleted: two lakes of one need two.  [default: archive]",
)
@click.option("--allow-loss", is_flag=True, help="Go on without journals and rows that are gone and not archived yet.")
@to_run
@with_job
def archive(job: Job, once: bool, every: float, max_rows: int | None, consumer: str | None, allow_loss: bool) -> None:
    """Put what the journals hold into the lake, and go on with what is recorded.

    Every row gets there exactly once, whatever is killed meanwhile: the same command takes up where it was. The
    lake is a directory of Parquet files by date and hour (UTC), with at most one file an hour and batch. What is safe
    there may then be deleted from the journals by the recorder's --keep-bytes and --keep-days.

    Ctrl-C ends it when the batch in hand is done; a second one at once.
    """
    journals, directory = job.need_journals(), job.need_lake()
    with job.session("archive") as spark:
        from sbus.spark.jobs.archive import CONSUMER, MAX_ROWS, Archive
        from sbus.spark.jobs.lake import Lake

        began = time.monotonic()
        running = Archive(
            spark,
            journals,
            Lake(directory),
            every=None if once else every,
            max_rows=max_rows or MAX_ROWS,
            consumer=consumer or CONSUMER,
            fail_on_data_loss=not allow_loss,
        )
        with end_by_signals() as stop, running:
            progress = Progress()
            try:
                while not running.wait(_POLL_INTERVAL):
                    if stop.is_due(is_busy=running.is_busy, done=running.batches):
                        break
                    progress.show(_told(running, began))
            except SparkError:
                # Who stops a service often sends the signal to all of its processes, so Spark may be gone before us.
                if not stop.is_wanted:
                    raise
            finally:
                progress.clear()
    click.echo(_told(running, began), err=True)


def _told(running: Archive, began: float) -> str:
    seconds = time.monotonic() - began
    return (
        f"archived {pluralize(running.rows, 'row')} in {pluralize(running.batches, 'batch')}, {seconds:.0f} s "
        f"({running.rows / max(seconds, 1e-3):,.0f} rows/s)"
    )
