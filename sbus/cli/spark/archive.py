"""``sbus spark archive``: copy journals into a lake, once or continuously."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from sbus.cli.output import Progress, pluralize
from sbus.cli.spark.job import Job, job_options, pass_job, stop_on_signals
from sbus.cli.types import COUNT, Duration
from sbus.errors import SparkError

if TYPE_CHECKING:
    from sbus.spark.jobs.archive import Archive

__all__ = ["archive"]

_POLL_INTERVAL = 0.25
"""Seconds between two looks at the job's progress."""


@click.command(
    short_help="Copy journals into a lake of Parquet files.",
    epilog="""\
\b
Examples:
  sbus spark archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
  sbus spark archive --journal='/shared/journals/*' --lake=/srv/lake --every=1m
""",
)
@click.option("--once", is_flag=True, help="Archive the rows that are there, and exit.")
@click.option(
    "--every",
    type=Duration(),
    metavar="TIME",
    default="10s",
    show_default=True,
    help="Time from one batch to the next, such as 500ms, 10s or 1m.",
)
@click.option("--max-rows", type=COUNT, metavar="N", help="Maximum number of rows in a batch.  [default: 10000000]")
@click.option(
    "--consumer",
    metavar="NAME",
    help="Name under which the journals keep the archive's position; each lake of a journal needs its own.  "
    "[default: archive]",
)
@click.option(
    "--allow-loss",
    is_flag=True,
    help="Continue if journals or rows were deleted before they were archived, or are damaged.",
)
@job_options
@pass_job
def archive(job: Job, once: bool, every: float, max_rows: int | None, consumer: str | None, allow_loss: bool) -> None:
    """Copy the rows of journals into a lake, and continue with new ones.

    Every row gets there exactly once, even if the command is killed: run it again, and it resumes
    where it stopped. The lake is a directory of Parquet files by date and hour (UTC), with at most
    one file per hour and batch. Once rows are safely in the lake, the recorder may delete them from
    the journal (--keep-bytes, --keep-days).

    Ctrl-C finishes the current batch and exits; a second Ctrl-C exits at once.
    """
    journals, directory = job.need_journals(), job.need_lake()
    with job.session("archive") as spark:
        from sbus.spark.jobs.archive import CONSUMER, MAX_ROWS, Archive
        from sbus.spark.jobs.lake import Lake

        start = time.monotonic()
        running = Archive(
            spark,
            journals,
            Lake(directory),
            every=None if once else every,
            max_rows=max_rows or MAX_ROWS,
            consumer=consumer or CONSUMER,
            fail_on_data_loss=not allow_loss,
        )
        with stop_on_signals() as stop, running:
            progress = Progress()
            try:
                while not running.wait(_POLL_INTERVAL):
                    if stop.is_due(is_busy=running.is_busy, done=running.batches):
                        break
                    progress.show(_format_progress(running, start))
            except SparkError:
                # A service manager often signals all processes of a service, so Spark may be gone before this one.
                if not stop.is_made:
                    raise
            finally:
                progress.clear()
    click.echo(_format_progress(running, start), err=True)


def _format_progress(running: Archive, start: float) -> str:
    seconds = time.monotonic() - start
    return (
        f"archived {pluralize(running.rows, 'row')} in {pluralize(running.batches, 'batch')}, {seconds:.0f} s "
        f"({running.rows / max(seconds, 1e-3):,.0f} rows/s)"
    )
