"""``sbus spark``: what is done with journals on Spark."""

from __future__ import annotations

import click

from sbus.cli.spark import archive as spark_archive
from sbus.cli.spark import demo as spark_demo
from sbus.cli.spark import replay as spark_replay
from sbus.cli.spark import report as spark_report
from sbus.cli.spark import traffic as spark_traffic
from sbus.cli.spark.job import to_run

__all__ = ["spark"]


@click.group(
    short_help="Archive, measure and replay what was recorded.",
    epilog="""\
\b
Examples:
  sbus spark archive --journal=/var/lib/sbus/journal --lake=/srv/lake --once
  sbus spark traffic --lake=/srv/lake --window=5m --depth=2
  sbus spark report --lake=/srv/lake --last=24h --output=report.html
  sbus spark replay --lake=/srv/lake --pattern='plant/' --speed=10
""",
)
@to_run
def spark() -> None:
    """Work on journals with Apache Spark, on this machine or (--master) on a cluster.

    It needs the extra "spark" (pip install 'sbus[spark]') and Java 17 or 21.
    """


_COMMANDS = (
    spark_archive.archive,
    spark_traffic.traffic,
    spark_report.report,
    spark_replay.replay,
    spark_demo.demo,
)

for _command in _COMMANDS:
    spark.add_command(_command)
