"""``sbus spark report``: the former name of ``sbus report``, for one release."""

from __future__ import annotations

from typing import Any

import click

from sbus.cli.report import report as current
from sbus.cli.spark.job import Job, job_options, pass_job

__all__ = ["report"]

_OF_JOBS = {"journal", "lake", "state", "metrics_file"}
"""Options that it shares with all jobs."""


@click.command(hidden=True)
@job_options
@pass_job
def report(job: Job, /, **choices: Any) -> None:
    """Write a period's traffic to one HTML page: the former name of "sbus report"."""
    click.echo("sbus: sbus spark report will be gone in the next release: use sbus report", err=True)
    sources = {"journal": tuple(job.journal), "lake": job.lake, "state": job.state, "metrics_file": job.metrics_file}
    click.get_current_context().invoke(current, **choices, **sources)


report.params += [param for param in current.params if param.name not in _OF_JOBS]
