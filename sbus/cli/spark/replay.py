"""``sbus spark replay``: what was recorded, back onto a bus."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from sbus.cli.options import AS_BYTES, Target, to_connect, with_target
from sbus.cli.spark.job import Job, Progress, Time, end_by_signals, to_run, with_job

if TYPE_CHECKING:
    from sbus.spark.jobs.replay import Replay

__all__ = ["replay"]


class _Speed(click.ParamType[float]):
    """A factor; ``max`` is 0."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if value == "max":
            return 0.0
        try:
            speed = float(value)
        except ValueError:
            speed = 0.0
        if not 0 < speed <= 1e6:
            self.fail(f"{value!r} is no speed: 1 is the original rhythm, 2 twice as fast, max as fast as possible")
        return speed


@click.command(
    short_help="Publish what was recorded once more.",
    epilog="""\
\b
Examples:
  sbus spark replay --lake=/srv/lake --pattern=plant/berlin/ --since=2026-01-31T06:00 --until=2026-01-31T07:00
  sbus spark replay --journal=/var/lib/sbus/journal --speed=10 --socket=/tmp/test.sock
  sbus spark replay --lake=/srv/lake --speed=max --prefix=replay/
""",
)
@click.option("--pattern", metavar="PATTERN", default="", help="Only messages that this would be subscribed to.")
@click.option("--since", type=Time(), metavar="TIME", help="Leave out what came before, as in 2026-01-31T12:00 (UTC).")
@click.option("--until", type=Time(), metavar="TIME", help="Leave out what came then and later.")
@click.option(
    "--speed",
    type=_Speed(),
    default="1",
    show_default=True,
    help="1: in the original rhythm; 2: twice as fast; max: as fast as the bus takes it.",
)
@click.option("--prefix", type=AS_BYTES, metavar="TEXT", default="", help="Put this in front of every key.")
@to_run
@to_connect
@with_target
@with_job
def replay(
    job: Job,
    target: Target,
    pattern: str,
    since: datetime | None,
    until: datetime | None,
    speed: float,
    prefix: bytes,
) -> None:
    """Publish what was archived (--lake) or recorded (--journal) on a bus once more, in order.

    Where the recording has gaps it says so, as messages may be missing there. It ends when the bus has dealt with
    everything. Ctrl-C ends it in order; a second one at once.

    A recorder that is still running records it all again: replay onto a bus of its own, or with a --prefix that it
    does not record.
    """
    with job.session("replay") as spark:
        from sbus.spark.jobs.replay import replay as publish
        from sbus.spark.jobs.tables import key_matches, load_rows

        rows = load_rows(spark, journals=job.journal, lake=job.lake, since=since, until=until)
        rows = rows.where((rows.kind != "message") | key_matches(pattern))
        progress = Progress()
        with target.connect() as bus, end_by_signals() as stop:
            progress.show("sorting")
            done = publish(
                rows,
                bus,
                speed=speed or None,
                prefix=prefix,
                stop=lambda: stop.is_wanted,
                progress=lambda state: progress.show(_told(state, speed)),
            )
    progress.clear()
    for gap in done.gaps:
        click.echo(f"a gap in the recording ({gap.kind}) ends at {_time(gap.time)}: messages may be missing", err=True)
    if done.gap_count > len(done.gaps):
        click.echo(f"and {done.gap_count - len(done.gaps):,} more gaps", err=True)
    click.echo(_told(done, speed), err=True)
    if not done.is_complete:
        raise KeyboardInterrupt  # for the status that Ctrl-C has


def _told(state: Replay, speed: float) -> str:
    text = f"published {state.messages:,} of {state.total:,} messages ({state.bytes:,} bytes) in {state.seconds:.1f} s"
    if not speed:
        return f"{text}, {state.messages / max(state.seconds, 1e-3):,.0f} messages/s"
    late = 1000 * state.late_sum / max(state.messages, 1)
    return f"{text}; {late:.1f} ms late on average, {1000 * state.late:.1f} ms at most"


def _time(micros: int) -> str:
    seconds, rest = divmod(micros, 1_000_000)
    return (
        datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest, tzinfo=None).isoformat("T", "milliseconds") + "Z"
    )
