"""``sbus spark replay``: publish a recording on a bus again."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import Progress, pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.spark.job import Job, job_options, pass_job
from sbus.cli.stopping import stop_on_signals
from sbus.cli.types import BYTES, Speed, Time
from sbus.journal import clock

if TYPE_CHECKING:
    from sbus.spark.jobs.replay import Replay

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
@click.option(
    "--pattern",
    type=RECORDED_PATTERN,
    metavar="PATTERN",
    default="",
    help="Publish only messages whose key matches PATTERN.",
)
@click.option("--since", type=Time(), metavar="TIME", help="Skip messages before TIME, such as 2026-01-31T12:00 (UTC).")
@click.option("--until", type=Time(), metavar="TIME", help="Stop before TIME.")
@click.option(
    "--speed",
    type=Speed(),
    metavar="FACTOR|max",
    default="1",
    show_default=True,
    help="1 keeps the original timing, 2 is twice as fast, max is as fast as the bus accepts messages.",
)
@click.option("--prefix", type=BYTES, metavar="TEXT", default="", help="Put TEXT in front of every key.")
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

    The messages come from a lake (--lake) or from journals (--journal).

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
        progress = Progress()

        def report(state: Replay) -> None:
            bus.get_ready()  # it may have refused a message
            progress.show(_format_progress(state, speed))

        with target.connect() as bus, stop_on_signals() as stop:
            progress.show("sorting")
            done = publish(
                rows,
                bus,
                speed=speed or None,
                prefix=prefix,
                stop=lambda: stop.is_made,
                progress=report,
            )
    progress.clear()
    for gap in done.gaps:
        click.echo(
            f"a gap in the recording ({gap.kind}) ends at {clock.format_utc(gap.time)}: messages may be missing",
            err=True,
        )
    if done.gap_count > len(done.gaps):
        click.echo(f"and {done.gap_count - len(done.gaps):,} more gaps", err=True)
    if done.digests:
        click.echo(
            f"{pluralize(done.digests, 'message')} cannot be published again: the recording has only the length and "
            "the SHA-256 of what was longer than the recorder's --max-payload",
            err=True,
        )
    click.echo(_format_progress(done, speed), err=True)
    if not done.is_complete:
        raise KeyboardInterrupt  # the exit status is that of Ctrl-C


def _format_progress(state: Replay, speed: float) -> str:
    text = f"published {state.messages:,} of {state.total:,} messages ({state.bytes:,} bytes) in {state.seconds:.1f} s"
    if not speed:
        return f"{text}, {state.messages / max(state.seconds, 1e-3):,.0f} messages/s"
    late = 1000 * state.late_sum / max(state.messages, 1)
    return f"{text}; {late:.1f} ms late on average, {1000 * state.late:.1f} ms at most"
