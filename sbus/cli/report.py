"""``sbus report``: a period's traffic on one HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta

import click

from sbus.cli.alerts import Alert, AlertRule, run_alerts
from sbus.cli.damage import Damage
from sbus.cli.job_metrics import JobMetrics
from sbus.cli.journal.options import journals_option
from sbus.cli.lake.options import state_option
from sbus.cli.output import Progress, explained_writing, pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.types import COUNT, Duration, Time
from sbus.distribution import needs
from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.ownership import check_replaceable, replacing

__all__ = ["report"]

_MODE = 0o600
"""The permissions of a new page, which its owner alone can read, because keys may reveal secrets."""


@click.command(
    short_help="Write a period's traffic to one HTML page.",
    epilog="""\
\b
Examples:
  sbus report --lake=/srv/lake --output=yesterday.html --since=2026-01-30 --until=2026-01-31
  sbus report --lake=/srv/lake --last=1h --pattern='plant/berlin/'
  sbus report --journal=/var/lib/sbus/journal --depth=3
  sbus report --lake=/srv/lake --last=1h --alert='silent>10m:mail -s silent ops'
""",
)
@click.option(
    "--since", type=Time(), metavar="TIME", help="Start of the period, such as 2026-01-31T12:00 (UTC) or -7d."
)
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
@journals_option()
@click.option("--lake", "-l", metavar="DIR", help="Lake to read: its directory, or its URL.")
@state_option
@click.option("--metrics-file", metavar="FILE", help="File to write metrics to, in Prometheus's text format.")
def report(
    since: datetime | None,
    until: datetime | None,
    last: float | None,
    pattern: bytes,
    depth: int | None,
    top: int,
    title: str,
    output: str,
    alerts: tuple[Alert, ...],
    journal: tuple[str, ...],
    lake: str | None,
    state: str | None,
    metrics_file: str | None,
) -> None:
    """Write a period's traffic to one HTML page that needs no other file.

    The page has highlights; traffic over time; keys that fell silent against their usual rhythm;
    periods without a recording, which are not silences; changes against the preceding period of the
    same length; the top keys; and payload sizes. It opens in any browser, without a network, and
    prints well.

    It reads a lake (--lake) or journals (--journal), and needs the extras "recorder" and "report":
    pip install 'sbusd[recorder,report]'. Reports of a lake over six days or more use counts by the
    hour, which are kept beside it.

    Where a journal is damaged, the page shows a gap. Each damaged journal is reported, and the exit
    status is 1.
    """
    if since is not None and last is not None:
        raise UsageError("--since and --last exclude each other: each sets the start of the period")
    if bool(journal) == (lake is not None):
        raise UsageError("nothing to read, or two things: use either --lake=DIR or --journal=DIR (one or several)")
    try:
        length = timedelta(seconds=86400 if last is None else last)
        if since is None and until is not None:
            since = until - length
    except OverflowError:
        raise UsageError("the period would begin before the year 1: report on a shorter one") from None
    check_writable(output)  # now, rather than when the work is done
    begun = time.monotonic()
    with JobMetrics("report", metrics_file, _labels(journal, lake)).measured():
        with needs("recorder,report"):
            from sbus.lake.opening import open_existing
            from sbus.report import JournalRows, LakeRows, measure, render
            from sbus.report.keys import key_filter
        progress = Progress()
        damage = Damage(progress)
        figures = measure(
            JournalRows(journal, damage) if lake is None else LakeRows(open_existing(lake, state=state)),
            start=since,
            end=until,
            last=length,
            wanted=key_filter(pattern),
            pattern=as_text(pattern),
            depth=depth,
            top=top,
            progress=lambda step: progress.show(f"measuring: {step}"),
        )
        progress.clear()
        source = ", ".join(journal) if lake is None else lake
        # The page first: an alert that fails must not cost it.
        heading = os.fsencode(title).decode(errors="backslashreplace")
        write(output, render(figures, source=source, title=heading, now=datetime.now(UTC)))
        click.echo(
            f"{output}: {pluralize(figures.totals.messages, 'message')} of {pluralize(figures.totals.keys, 'key')}, "
            f"{pluralize(figures.silence_count, 'unusual silence')}, {time.monotonic() - begun:.0f} s",
            err=True,
        )
        run_alerts(alerts, figures)
        damage.check("the report is written")


def _labels(journals: Sequence[str], lake: str | None) -> dict[str, str]:
    """Return what tells the metrics of this report from those of others."""
    if lake is None:
        return {"journal": ",".join(map(os.path.abspath, journals))}
    return {"lake": lake if "://" in lake else os.path.abspath(lake)}


def check_writable(path: str) -> None:
    """Check that a page can be written to its place; one that is there stays.

    :raises StorageError: if it cannot.
    """
    with _writing(path):
        check_replaceable(path)


def write(path: str, page: str) -> None:
    """Write the page to its place once it is complete.

    :raises StorageError: if it cannot be written; a page from before stays.
    """
    with _writing(path), replacing(path, _MODE) as file:
        file.write(page.encode())


def _writing(path: str) -> AbstractContextManager[None]:
    return explained_writing("the report", path, "name another file (--output)")
