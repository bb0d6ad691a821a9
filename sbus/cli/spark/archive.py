"""``sbus spark archive``: copy journals into a lake, once or continuously, on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sbus.cli.archiving import Choices, archive_options, run
from sbus.cli.job_metrics import ArchiveMetrics
from sbus.cli.spark.job import Job, job_options, pass_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sbus.spark.jobs.archive import Archive

__all__ = ["archive"]


@click.command(
    short_help="Copy journals into a lake, on a cluster.",
    epilog="""\
\b
Examples:
  sbus spark archive --master=spark://host:7077 --journal='/shared/journals/*' --lake=/shared/lake
  sbus spark archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
""",
)
@archive_options
@job_options
@pass_job
def archive(job: Job, /, **options: Any) -> None:
    """Copy the rows of journals into a lake, and continue with new ones, on Spark.

    This is "sbus archive" for a cluster: one machine needs no Spark for it. Both write the same lakes,
    and either resumes where the other stopped.

    If Spark or the storage fails, for example on a full disk, or a journal was moved away, the command
    says so, and tries again after 1 s, 2 s, and so on up to 5 minutes.

    Ctrl-C finishes the current batch and exits; a second Ctrl-C exits at once.
    """
    choices = Choices(**options)
    journals, location = job.need_journals(), job.need_lake()
    metrics = ArchiveMetrics(job.metrics_file, job.labels())
    with job.session("archive") as spark:
        from sbus.spark.jobs.archive import Archive
        from sbus.spark.jobs.lake import Lake

        lake = Lake(location, format=choices.table_format, state=job.state, mode=choices.mode)

        def new_archive() -> Archive:
            return Archive(spark, journals, lake, **choices.settings())

        run(
            new_archive,
            choices,
            metrics,
            room=f"the lake ({location}) and for Spark's temporary files (spark.local.dir)",
            is_alive=lambda: _is_alive(spark),
        )


def _is_alive(spark: SparkSession) -> bool:
    """Return whether the JVM is there, and would run another query."""
    try:
        return not spark.sparkContext._jsc.sc().isStopped()
    except Exception:
        return False
