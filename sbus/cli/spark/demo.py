"""``sbus spark demo``: everything at once, to be watched."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from sbus.cli.output import has_colors
from sbus.cli.spark.job import Job, end_by_signals, to_run, with_job
from sbus.errors import UsageError

__all__ = ["demo"]

_COLORS = {"alert": "red", "report": "green", "archive": "green", "recorder": "yellow", "query": "cyan"}


@click.command(short_help="See all of it at work, in under three minutes.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=5, max=3600),
    default=80,
    show_default=True,
    help="How long the plant is watched.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where everything is kept; it must be new or empty.  [default: a temporary directory]",
)
@to_run
@with_job
def demo(job: Job, seconds: float, directory: Path | None) -> None:
    """Run a bus, a plant that sends telemetry, a recorder, a streaming query that finds a fault and says so on the bus,
    a client that shows it, the archive and the report.

    Everything is kept in a directory, to be looked at: the journal, the lake, the logs, and the report. Ctrl-C ends
    all of it in order.
    """
    if job.journal or job.lake:
        raise UsageError("the demo has a journal and a lake of its own: leave out --journal and --lake")
    directory = _prepare(directory)
    began = time.monotonic()
    colored = has_colors()

    def say(who: str, what: str) -> None:
        name = f"{who:>9}"
        if colored:
            name = click.style(name, fg=_COLORS.get(who, "blue"), bold=True)
            what = click.style(what, fg="red", bold=True) if who == "alert" else what
        click.echo(f"{time.monotonic() - began:5.1f} s {name}  {what}")

    say("", f"everything is kept in {directory}")
    say("", "Spark is starting")
    with end_by_signals() as stop, job.session("demo") as spark:
        from sbus.spark.demo.show import run

        outcome = run(spark, directory, seconds=seconds, say=say, stop=lambda: stop.is_wanted)
    if outcome.report is None:
        raise KeyboardInterrupt
    click.echo(
        f"\nOpen {outcome.report.as_uri()}\n\nGo on from here:\n"
        f"  sbus journal ls {directory / 'journal'}\n"
        f"  sbus spark traffic --lake={directory / 'lake'} --window=10s --depth=2\n"
        f"  sbus spark replay --lake={directory / 'lake'} --speed=max --socket=..."
    )


def _prepare(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="sbus-demo-"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"--directory {directory}: it is not empty: name a new one")
    return directory.resolve()
