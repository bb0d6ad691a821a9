"""``sbus spark demo``: the whole pipeline at work."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click

from sbus.cli.output import has_colors
from sbus.cli.spark.job import Job, job_options, pass_job
from sbus.cli.stopping import stop_on_signals
from sbus.cli.types import Duration
from sbus.errors import UsageError

__all__ = ["demo"]

_COLORS = {"alert": "red", "report": "green", "archive": "green", "recorder": "yellow", "query": "cyan"}


@click.command(short_help="Watch the whole pipeline at work, in under three minutes.")
@click.option(
    "--seconds",
    type=Duration(5.0, 3600.0),
    default=80.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the plant runs, from 5 seconds to 1 hour.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for all files; must be new or empty.  [default: a temporary directory]",
)
@job_options
@pass_job
def demo(job: Job, seconds: float, directory: Path | None) -> None:
    """Run the whole pipeline with simulated data.

    The demo starts a bus, a plant that sends telemetry, a recorder, a streaming query that detects a
    fault and publishes an alert, and a client that prints it; then it runs the archive and the report.

    The journal, the lake, the logs and the report stay in one directory. Ctrl-C stops everything
    cleanly. If the demo fails, a temporary directory is removed; give one to keep the logs.
    """
    if job.journal or job.lake:
        raise UsageError("the demo makes its own journal and lake: leave out --journal and --lake")
    is_temporary = directory is None
    directory = _prepare(directory)
    try:
        _run(job, seconds, directory)
    except BaseException as error:
        if is_temporary and not isinstance(error, KeyboardInterrupt):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _run(job: Job, seconds: float, directory: Path) -> None:
    """Run the demo, and print what happens."""
    start = time.monotonic()
    colored = has_colors()

    def say(source: str, text: str) -> None:
        name = f"{source:>9}"
        if colored:
            name = click.style(name, fg=_COLORS.get(source, "blue"), bold=True)
            text = click.style(text, fg="red", bold=True) if source == "alert" else text
        click.echo(f"{time.monotonic() - start:5.1f} s {name}  {text}")

    say("", f"the demo's files are in {directory}")
    say("", "starting Spark")
    with stop_on_signals() as stop, job.session("demo") as spark:
        from sbus.spark.demo.show import run

        outcome = run(spark, directory, seconds=seconds, say=say, stop=lambda: stop.is_made)
    if outcome.report is None:
        raise KeyboardInterrupt
    click.echo(
        f"\nOpen {outcome.report.as_uri()}\n\nNext steps:\n"
        f"  sbus journal ls {directory / 'journal'}\n"
        f"  sbus spark traffic --lake={directory / 'lake'} --window=10s --depth=2\n"
        f"  sbus spark replay --lake={directory / 'lake'} --speed=max --socket=..."
    )


def _prepare(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="sbus-demo-"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"--directory {directory}: it is not empty: name a new directory")
    return directory.resolve()
