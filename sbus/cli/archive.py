"""``sbus archive``: copy journals into a lake, once or continuously, without Spark."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sbus.cli.archiving import Choices, archive_options, run
from sbus.cli.job_metrics import ArchiveMetrics, JobMetrics
from sbus.cli.journal.options import journals_option
from sbus.cli.lake.options import state_option
from sbus.distribution import needs

if TYPE_CHECKING:
    from sbus.lake.archive import Archive

__all__ = ["archive"]


@click.command(
    short_help="Copy journals into a lake of Parquet files, or a Delta table.",
    epilog="""\
\b
Examples:
  sbus archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
  sbus archive --journal='/shared/journals/*' --lake=/srv/lake --every=1m
  sbus archive --journal=/var/lib/sbus/journal --lake=s3://bucket/lake
""",
)
@journals_option("journals", required=True)
@click.option(
    "--lake",
    "-l",
    "location",
    required=True,
    metavar="DIR",
    help="Lake to write: a directory, or the URL of a Delta table.",
)
@state_option
@click.option("--metrics-file", metavar="FILE", help="File to write metrics to, in Prometheus's text format.")
@archive_options
def archive(
    journals: tuple[str, ...], location: str, state: str | None, metrics_file: str | None, **options: Any
) -> None:
    """Copy the rows of journals into a lake, and continue with new ones.

    Every row gets there exactly once, even if the command is killed: run it again, and it resumes
    where it stopped. The lake is a directory of Parquet files by date and hour (UTC), or a Delta
    table, which can be in object storage. Once rows are safely in the lake, the recorder may delete
    them from the journal (--keep-bytes, --keep-days). Closed hours are merged into few large files.

    If the storage fails, for example on a full disk, or a journal was moved away, the command says so,
    and tries again after 1 s, 2 s, and so on up to 5 minutes.

    A journal that is damaged is archived up to the damage. The command says so, continues with the
    others, and looks whether it was repaired; if it was not, the exit status is 1.

    Ctrl-C finishes the current batch and exits; a second Ctrl-C exits at once. Spark is not needed,
    only the extra "recorder", or "delta" for a Delta table: pip install 'sbusd[delta]'.
    """
    choices = Choices(**options)
    labels = {"lake": location if "://" in location else os.path.abspath(location)}
    metrics = ArchiveMetrics(metrics_file, labels)
    with JobMetrics("archive", metrics_file, labels).measured():
        with needs("recorder"):
            from sbus.journal.reader import find_journals
            from sbus.lake.archive import Archive
            from sbus.lake.opening import open_table
        find_journals(journals)
        table = open_table(location, format=choices.table_format, state=state)
        table.state.mode = choices.mode

        def new_archive() -> Archive:
            return Archive(journals, table, leaves_damaged=True, **choices.settings())

        run(new_archive, choices, metrics, room=f"the lake ({location})")
