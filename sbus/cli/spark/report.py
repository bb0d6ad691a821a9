"""``sbus spark report``: the traffic of a period on one page."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime, timedelta

import click

from sbus.cli.options import COUNT, pluralize
from sbus.cli.spark.job import Duration, Job, Progress, Time, to_run, with_job
from sbus.errors import UsageError

__all__ = ["report"]


@click.command(
    short_help="Show the traffic of a period on one HTML page.",
    epilog="""\
\b
Examples:
  sbus spark report --lake=/srv/lake --output=yesterday.html --since=2026-01-30 --until=2026-01-31
  sbus spark report --lake=/srv/lake --last=1h --pattern='plant/berlin/'
  sbus spark report --journal=/var/lib/sbus/journal --depth=3
""",
)
@click.option("--since", type=Time(), metavar="TIME", help="Where the period begins, as in 2026-01-31T12:00 (UTC).")
@click.option("--until", type=Time(), metavar="TIME", help="Where it ends.  [default: with the last row]")
@click.option(
    "--last", type=Duration(0.001), metavar="TIME", help="How long it is, instead of --since.  [default: 24h]"
)
@click.option("--pattern", metavar="PATTERN", default="", help="Only messages that this would be subscribed to.")
@click.option(
    "--depth",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Segments of the key that make a prefix.  [default: as many as tell keys apart]",
)
@click.option("--top", type=COUNT, metavar="N", default=12, show_default=True, help="The longest that a list may be.")
@click.option("--title", metavar="TEXT", default="Traffic report", show_default=True, help="What is written on top.")
@click.option(
    "--output", "-o", metavar="FILE", default="report.html", show_default=True, help="Where the page is written to."
)
@to_run
@with_job
def report(
    job: Job,
    since: datetime | None,
    until: datetime | None,
    last: float | None,
    pattern: str,
    depth: int | None,
    top: int,
    title: str,
    output: str,
) -> None:
    """Show the traffic of a period on one page: a single HTML file that needs nothing else.

    It tells what stands out; traffic over time; who fell silent against the usual rhythm, and when nothing was
    recorded, which is not the same; what changed against the period of the same length before; the top keys; and the
    sizes of payloads. It opens in any browser, also on a phone or without a network, and prints well.
    """
    if since is not None and last is not None:
        raise UsageError("say --since or --last, not both: each tells where the period begins")
    try:
        most = timedelta(seconds=86400 if last is None else last)
        if since is None and until is not None:
            since = until - most
        # The period before belongs to it, too.
        first = since - (until - since) if since is not None and until is not None else None
    except OverflowError:
        raise UsageError(
            "the period before this one, as long as it, would begin before the year 1: report on a shorter one"
        ) from None
    with job.session("report") as spark:
        from sbus.spark.jobs.tables import key_matches, load_rows
        from sbus.spark.report import measure, render

        began = time.monotonic()
        rows = load_rows(spark, journals=job.journal, lake=job.lake, since=first, until=until)
        progress = Progress()
        figures = measure(
            rows,
            start=since,
            end=until,
            last=most,
            wanted=key_matches(pattern),
            pattern=pattern,
            depth=depth,
            top=top,
            progress=lambda step: progress.show(f"measuring: {step}"),
        )
        progress.clear()
        source = job.lake if job.lake is not None else ", ".join(job.journal)
        write(output, render(figures, source=source, title=title, now=datetime.now(UTC)))
    click.echo(
        f"{output}: {pluralize(figures.totals.messages, 'message')} of {pluralize(figures.totals.keys, 'key')}, "
        f"{pluralize(figures.silence_count, 'unusual silence')}, {time.monotonic() - began:.0f} s",
        err=True,
    )


def write(path: str, page: str) -> None:
    """Put the page where it belongs when it is complete, for who writes it alone: keys may tell secrets.

    :raises OSError: if it cannot be written.
    """
    parts = f"{path}.tmp"
    try:
        with open(os.open(parts, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(parts, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(parts)
        raise
