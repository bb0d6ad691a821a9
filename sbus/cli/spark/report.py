"""``sbus spark report``: a period's traffic on one HTML page."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TextIO

import click

from sbus.cli.output import Progress, pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.spark.alerts import Alert, AlertRule, run_alerts
from sbus.cli.spark.job import Job, job_options, pass_job
from sbus.cli.types import COUNT, Duration, Time
from sbus.errors import StorageError, UsageError
from sbus.extras import needs
from sbus.journal.keytext import as_text

if TYPE_CHECKING:
    from sbus.spark.report import Report

__all__ = ["report"]

_HOURLY_FROM = timedelta(days=6)
"""The length of a period from which on its windows can be whole hours, so that counts by the hour are enough."""
_ATTEMPTS = 3
"""How often counts are read because compaction replaces some of them meanwhile."""


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

    A report of six days or more on a lake uses counts by the hour that are kept beside it. It takes
    seconds, and starts neither Spark nor Java.
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
        subject = Subject(first, since, until, length, pattern, depth, top)
        figures = None
        if job.lake is not None and not job.journal and last_of(since, until, length) >= _HOURLY_FROM:
            figures = by_counts(job, subject)
        if figures is None:
            figures = by_spark(job, subject)
        source = job.lake if job.lake is not None else ", ".join(job.journal)
        # The page first: an alert that fails must not cost it.
        write(output, render(figures, source=source, title=title, now=datetime.now(UTC)))
    click.echo(
        f"{output}: {pluralize(figures.totals.messages, 'message')} of {pluralize(figures.totals.keys, 'key')}, "
        f"{pluralize(figures.silence_count, 'unusual silence')}, {time.monotonic() - begun:.0f} s",
        err=True,
    )
    run_alerts(alerts, figures)


@dataclass(frozen=True, slots=True)
class Subject:
    """What to report on.

    :ivar first: the start of the period before, if it is known.
    :ivar since: the start of the period, or None.
    :ivar until: its end, or None.
    :ivar length: its length, if the start is not given.
    """

    first: datetime | None
    since: datetime | None
    until: datetime | None
    length: timedelta
    pattern: bytes
    depth: int | None
    top: int


def by_counts(job: Job, subject: Subject) -> Report | None:
    """Return the figures, from counts of the lake's hours; those of closed hours are made if they are missing.

    :returns: None if it takes rows: no windows of whole hours, or a lake that cannot be written.
    """
    from sbus.lake.hourly import hourly
    from sbus.lake.opening import open_table
    from sbus.spark.jobs.tables import key_filter
    from sbus.spark.report import measure_counted
    from sbus.spark.runtime.session import parse_conf

    assert job.lake is not None
    parse_conf(job.conf)  # refused here too, though it is for Spark
    table = open_table(job.lake, state=job.state)
    progress = Progress()
    for _ in range(_ATTEMPTS):
        progress.show("counting: hours that are not counted yet")
        with (
            contextlib.suppress(FileNotFoundError),
            hourly(table, subject.since, subject.until, subject.length) as counts,
        ):
            if counts is None:
                break
            figures = measure_counted(
                counts,
                start=subject.since,
                end=subject.until,
                last=subject.length,
                wanted=key_filter(subject.pattern),
                pattern=as_text(subject.pattern),
                depth=subject.depth,
                top=subject.top,
                progress=lambda step: progress.show(f"measuring: {step}"),
            )
            progress.clear()
            return figures
    progress.clear()
    return None


def by_spark(job: Job, subject: Subject) -> Report:
    """Return the figures, computed by Spark from the rows."""
    with job.session("report") as spark:
        from sbus.spark.jobs.tables import key_matches, load_rows
        from sbus.spark.report import measure

        rows = load_rows(
            spark, journals=job.journal, lake=job.lake, state=job.state, since=subject.first, until=subject.until
        )
        progress = Progress()
        figures = measure(
            rows,
            start=subject.since,
            end=subject.until,
            last=subject.length,
            wanted=key_matches(subject.pattern),
            pattern=as_text(subject.pattern),
            depth=subject.depth,
            top=subject.top,
            progress=lambda step: progress.show(f"measuring: {step}"),
        )
        progress.clear()
        return figures


def last_of(since: datetime | None, until: datetime | None, length: timedelta) -> timedelta:
    """Return about how long the period will be."""
    if since is None:
        return length
    return (until or datetime.now(UTC)) - since


def check_writable(path: str) -> None:
    """Check that a page can be written to its place; one that is there stays.

    :raises StorageError: if it cannot.
    """
    with _beside(path) as temporary:
        _create(temporary).close()


def write(path: str, page: str) -> None:
    """Write the page to its place once it is complete.

    :raises StorageError: if it cannot be written; a page from before stays.
    """
    with _beside(path) as temporary:
        with _create(temporary) as file:
            file.write(page)
        os.replace(temporary, path)


@contextlib.contextmanager
def _beside(path: str) -> Iterator[str]:
    """Yield the name of a temporary file beside a page; the file is removed unless it was renamed.

    :raises StorageError: for an `OSError` in the block, with the remedy.
    """
    temporary = f"{path}.tmp"
    try:
        yield temporary
    except OSError as e:
        room = "make room there, or " if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(
            f"cannot write the report to {path}: {e.strerror}: {room}name another file (--output)"
        ) from e
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _create(path: str) -> TextIO:
    """Create a file that only its owner can read, because keys may reveal secrets."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8")
