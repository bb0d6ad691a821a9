"""``sbus spark replay``: publish a recording on a bus again."""

from __future__ import annotations

from datetime import datetime

import click

from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.replay import replay_options, run
from sbus.cli.spark.job import Job, job_options, pass_job

__all__ = ["replay"]


@click.command(
    short_help="Publish a recording again.",
    epilog="""\
\b
Examples:
  sbus spark replay --lake=/srv/lake --pattern=plant/berlin/ --since=2026-01-31T06:00 --until=2026-01-31T07:00
  sbus spark replay --journal=/var/lib/sbus/journal --speed=10 --socket=/tmp/test.sock
  sbus spark replay --lake=/srv/lake --speed=max --prefix=replay/
""",
)
@replay_options
@job_options
@connection_options
@pass_target
@pass_job
def replay(
    job: Job,
    target: Target,
    pattern: bytes,
    since: datetime | None,
    until: datetime | None,
    speed: float,
    prefix: bytes,
) -> None:
    """Publish archived or recorded messages on a bus again, in order.

    The messages come from a lake (--lake) or from journals (--journal). Of journals alone,
    "sbus replay" needs neither Spark nor Java.

    Gaps in the recording are reported, because messages may be missing there. The command exits
    when the bus has handled every message. Ctrl-C stops it cleanly; a second Ctrl-C exits at
    once.

    A recorder on that bus records the messages again: replay onto a separate bus, or with a
    --prefix that it does not record.
    """
    with job.session("replay") as spark:
        from sbus.spark.jobs.replay import replay as publish
        from sbus.spark.jobs.tables import key_matches, load_rows
        from sbus.spark.rows import is_message

        rows = load_rows(spark, journals=job.journal, lake=job.lake, state=job.state, since=since, until=until)
        rows = rows.where(~is_message() | key_matches(pattern))
        run(target, speed, lambda bus, **choices: publish(rows, bus, prefix=prefix, **choices))
