"""``sbus spark``: archive, analyse and replay recordings with Apache Spark."""

from __future__ import annotations

import click

from sbus.cli.group import LazyGroup
from sbus.cli.spark.job import job_options

__all__ = ["spark"]

_MODULES = {
    "archive": "sbus.cli.spark.archive",
    "traffic": "sbus.cli.spark.traffic",
    "report": "sbus.cli.spark.report",
    "replay": "sbus.cli.spark.replay",
    "demo": "sbus.cli.spark.demo",
}


@click.group(
    cls=LazyGroup,
    modules=_MODULES,
    short_help="Archive, analyse and replay recordings.",
    epilog="""\
\b
Examples:
  sbus spark archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
  sbus spark traffic --lake=/srv/lake --window=5m --depth=2
  sbus spark replay --lake=/srv/lake --pattern='plant/' --speed=10
""",
)
@job_options
def spark() -> None:
    """Archive, analyse and replay recordings with Apache Spark.

    Spark runs on this machine or, with --master, on a cluster. The commands need Java 17 or 21,
    and the extra "spark": pip install 'sbusd[spark]'.
    """
