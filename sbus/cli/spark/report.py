"""``sbus spark report``: a period's traffic on one HTML page."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click

from sbus.cli.output import pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.spark.alerts import Alert, AlertRule, run_alerts
from sbus.cli.spark.figures import Subject, figures_of
from sbus.cli.spark.job import Job, job_options, pass_job
from sbus.cli.types import COUNT, Duration, Time
from sbus.distribution import needs
from sbus.errors import StorageError, UsageError
from sbus.ownership import check_replaceable, replacing

__all__ = ["report"]

_MODE = 0o600
"""The permissions of a new page, which its owner alone can read, because keys may reveal secrets."""


@click.command(
    short_help="Write a period's traffic to one HTML page.",
    epilog="""\
\b
Examples:
  sbus spark report --lake=/srv/lake --output=yesterday.html --since=2026-01-30 --until=2026-01-31
  sbus spark report --lake=/srv/lake --last=1h --pattern='plant/berlin/'
  sbus spark report --journal=/var/lib/sbus/journal --depth=3
  sbus spark report --lake=/srv/lake --last=1h --alert='silent>10m:mail -s silent ops'
""",
)
@click.option("--since", type=Time(), metavar="TIME", help="Start of the period, such as 2026-01-31T12:00 (UTC).")
@click.option("--until", type=Time(), metavar="TIME", help="End of the period.  [default: the last row]")
@click.option(
    "--last",
    type=Duration(0.001),
    metavar="TIME",
    help="Length of the period, such as 1h or 7d, instead of --since.  [default: 24h]",
)
@click.option(
    "--pattern",
    type=RECORDED_PATTERN,
    metavar="PATTERN",
    default="",
    help="Report only messages whose key matches PATTERN.",
)
@click.option(
    "--depth",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Key segments in a prefix.  [default: as many as distinguish keys]",
)
@click.option(
    "--top", type=COUNT, metavar="N", default=12, show_default=True, help="Maximum number of entries in a list."
)
@click.option("--title", metavar="TEXT", default="Traffic report", show_default=True, help="Title of the page.")
@click.option("--output", "-o", metavar="FILE", default="report.html", show_default=True, help="File to write.")
@click.option(
    "--alert",
    "alerts",
    type=AlertRule(),
    multiple=True,
    metavar="RULE",
    help="Run a command if keys are silent now: 'silent>TIME:COMMAND'; it reads a line of JSON for each. Repeatable.",
)
@job_options
@pass_job
def report(
    job: Job,
    since: datetime | None,
    until: datetime | None,
    last: float | None,
    pattern: bytes,
    depth: int | None,
    top: int,
    title: str,
    output: str,
    alerts: tuple[Alert, ...],
) -> None:
    """Write a period's traffic to one HTML page that needs no other file.

    The page has highlights; traffic over time; keys that fell silent against their usual rhythm;
    periods without a recording, which are not silences; changes against the preceding period of the
    same length; the top keys; and payload sizes. It opens in any browser, without a network, and
    prints well.

    A report of six days or more on a lake uses counts by the hour that are kept beside it, if that
    much was recorded. It starts neither Spark nor Java, and takes seconds for a thousand keys.
    """
    if since is not None and last is not None:
        raise UsageError("--since and --last exclude each other: each sets the start of the period")
    try:
        length = timedelta(seconds=86400 if last is None else last)
        if since is None and until is not None:
            since = until - length
        # The preceding period is read too, to be compared.
        first = since - (until - since) if since is not None and until is not None else None
    except OverflowError:
        raise UsageError(
            "the preceding period of the same length would begin before the year 1: report on a shorter period"
        ) from None
    check_writable(output)  # now, rather than when the work is done
    begun = time.monotonic()
    with job.measured("report"):
        with needs("spark"):
            from sbus.spark.report import render
        figures = figures_of(job, Subject(first, since, until, length, pattern, depth, top))
        source = job.lake if job.lake is not None else ", ".join(job.journal)
        # The page first: an alert that fails must not cost it.
        write(output, render(figures, source=source, title=title, now=datetime.now(UTC)))
    click.echo(
        f"{output}: {pluralize(figures.totals.messages, 'message')} of {pluralize(figures.totals.keys, 'key')}, "
        f"{pluralize(figures.silence_count, 'unusual silence')}, {time.monotonic() - begun:.0f} s",
        err=True,
    )
    run_alerts(alerts, figures)


def check_writable(path: str) -> None:
    """Check that a page can be written to its place; one that is there stays.

    :raises StorageError: if it cannot.
    """
    with _explained(path):
        check_replaceable(path)


def write(path: str, page: str) -> None:
    """Write the page to its place once it is complete.

    :raises StorageError: if it cannot be written; a page from before stays.
    """
    with _explained(path), replacing(path, _MODE) as file:
        file.write(page.encode())


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Translate errors of the disk.

    :raises StorageError: for an `OSError` in the block, with the remedy.
    """
    try:
        yield
    except OSError as e:
        room = "make room there, or " if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(
            f"cannot write the report to {path}: {e.strerror}: {room}name another file (--output)"
        ) from e
