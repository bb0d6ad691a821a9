"""``sbus spark report``: the former name of ``sbus report``, for one release."""

from __future__ import annotations

from typing import Any

import click

from sbus.cli.report import report as current
from sbus.cli.spark.job import Job, job_options, pass_job

__all__ = ["report"]

_OWN = {"journal", "lake", "state", "metrics_file"}
"""Options of `current` that are among those of every job."""


@job_options
@pass_job
@click.pass_context
def _report(ctx: click.Context, job: Job, **choices: Any) -> None:
    """Write a period's traffic to one HTML page: the former name of "sbus report"."""
    click.echo("sbus: sbus spark report will be gone in the next release: use sbus report", err=True)
    sources = {"journal": tuple(job.journal), "lake": job.lake, "state": job.state, "metrics_file": job.metrics_file}
    ctx.invoke(current, **choices, **sources)


report = click.command("report", hidden=True)(_report)
report.params += [param for param in current.params if param.name not in _OWN]
