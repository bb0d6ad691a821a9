"""``sbus replay``: publish what a journal has recorded on a bus again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

import click

from sbus.cli.combined import combined
from sbus.cli.journal.options import journals_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import Progress, pluralize
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.stopping import stop_on_signals
from sbus.cli.types import BYTES, Speed, Time
from sbus.distribution import needs
from sbus.errors import UsageError
from sbus.journal import clock

if TYPE_CHECKING:
    from sbus.replay import Replay

__all__ = ["replay", "replay_options", "run"]

replay_options = combined(
    click.option(
        "--pattern",
        type=RECORDED_PATTERN,
        metavar="PATTERN",
        default="",
        help="Publish only messages whose key matches PATTERN.",
    ),
    click.option(
        "--since",
        type=Time(),
        metavar="TIME",
        help="Skip messages before TIME, such as 2026-01-31T12:00 (UTC) or -1h.",
    ),
    click.option("--until", type=Time(), metavar="TIME", help="Stop before TIME."),
    click.option(
        "--speed",
        type=Speed(),
        metavar="FACTOR|max",
        default="1",
        show_default=True,
        help="1 keeps the original timing, 2 is twice as fast, max is as fast as the bus accepts messages.",
    ),
    click.option("--prefix", type=BYTES, metavar="TEXT", default="", help="Put TEXT in front of every key."),
)
"""The options of every replay."""


@click.command(
    short_help="Publish a recording again.",
    epilog="""\
\b
Examples:
  sbus replay --journal=/var/lib/sbus/journal --speed=10 --socket=/tmp/test.sock
  sbus replay --journal=/var/lib/sbus/journal --pattern=plant/ --since=2026-01-31T06:00 --prefix=replay/
""",
)
@journals_option()
@replay_options
@connection_options
@pass_target
def replay(
    target: Target,
    journal: tuple[str, ...],
    pattern: bytes,
    since: datetime | None,
    until: datetime | None,
    speed: float,
    prefix: bytes,
) -> None:
    """Publish recorded messages on a bus again, in order.

    The messages come from journals; "sbus spark replay" takes them from a lake.

    Gaps in the recording are reported, because messages may be missing there. The command exits
    when the bus has handled every message. Ctrl-C stops it cleanly; a second Ctrl-C exits at
    once.

    All rows are checked before the first message is published. If a journal is damaged, each
    damaged one is reported, and nothing is published.

    A recorder on that bus records the messages again: replay onto a separate bus, or with a
    --prefix that it does not record.
    """
    if not journal:
        raise UsageError("no journal is named: give --journal=DIR; for a lake, use sbus spark replay --lake=DIR")
    with needs("recorder"):
        from sbus.protocol.keys import CURRENT, OpenPattern
        from sbus.replay import JournalRows, publish
    start, end = (None if time is None else clock.from_datetime(time) for time in (since, until))
    wanted = OpenPattern(pattern, CURRENT.separator).matches if pattern else None
    rows = JournalRows(journal, start, end, wanted)
    run(target, speed, lambda bus, **choices: publish(rows, rows.total(), bus, prefix=prefix, **choices))


def run(target: Target, speed: float, publish: Callable[..., Replay]) -> None:
    """Replay, with progress on a terminal and a summary.

    :param publish: called with the connection and with `speed`, `stop` and `progress`.
    :raises KeyboardInterrupt: if it was stopped: the exit status is that of Ctrl-C.
    """
    progress = Progress()
    with target.connect(payloads=True) as bus, stop_on_signals() as stop:

        def report(state: Replay) -> None:
            bus.get_ready()  # it may have refused a message
            progress.show(_format_progress(state, speed))

        progress.show("sorting")
        done = publish(bus, speed=speed or None, stop=lambda: stop.is_made, progress=report)
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
        raise KeyboardInterrupt


def _format_progress(state: Replay, speed: float) -> str:
    text = f"published {state.messages:,} of {state.total:,} messages ({state.bytes:,} bytes) in {state.seconds:.1f} s"
    if not speed:
        return f"{text}, {state.messages / max(state.seconds, 1e-3):,.0f} messages/s"
    late = 1000 * state.late_sum / max(state.messages, 1)
    return f"{text}; {late:.1f} ms late on average, {1000 * state.late:.1f} ms at most"
