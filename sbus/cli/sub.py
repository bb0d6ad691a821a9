"""``sbus sub``: print what is published."""

from __future__ import annotations

import sys
import time
from typing import BinaryIO

import click

from sbus.cli.deadline import Deadline, wait
from sbus.cli.options import AS_BYTES, COUNT, SECONDS, Target, to_connect, with_target
from sbus.cli.output import FORMAT_HELP, Printer, ReceivedMessage, as_json, as_text, custom, has_colors, raw, shown
from sbus.client.blocking import Bus
from sbus.errors import SbusError, TimedOut

__all__ = ["printer", "sub"]

_FORMATS = "".join(f"\n  {line}" for line in FORMAT_HELP.splitlines())


def printer(output_json: bool, output_raw: bool, output_format: str | None, with_time: bool) -> Printer:
    """What the options say of how messages are printed.

    :raises click.UsageError: if they contradict each other.
    """
    if output_json + output_raw + (output_format is not None) > 1:
        raise click.UsageError("--json, --raw and --format exclude each other.")
    if with_time and (output_json or output_raw or output_format is not None):
        raise click.UsageError("--time is for text: --json has the time, and in a --format write %t.")
    if output_json:
        return as_json
    if output_raw:
        return raw
    if output_format is None:
        return as_text(with_time=with_time, colored=has_colors())
    try:
        return custom(output_format)
    except ValueError as e:
        raise click.BadParameter(f"{e} (see --help)", param_hint="--format") from None


@click.command(
    short_help="Print what is published.",
    epilog=f"""\
\b
In a FORMAT:{_FORMATS}

\b
Examples:
  sbus sub 'sensors/*/temperature' 'alarms/'
  sbus sub --json --count 10 'sensors/' | jq .payload
  sbus sub --raw --count 1 camera/picture >picture.jpeg
  sbus sub --format '%t %s bytes under %k' ''
""",
)
@click.argument("patterns", type=AS_BYTES, nargs=-1, required=True, metavar="PATTERN...")
@click.option("--json", "output_json", is_flag=True, help="Print an object a line: time, key, payload, encoding.")
@click.option("--raw", "output_raw", is_flag=True, help="Print the payloads alone, byte for byte.")
@click.option("--format", "output_format", metavar="FORMAT", help="Print what FORMAT says; see below.")
@click.option("--time", "with_time", is_flag=True, help="Print before each message when it came.")
@click.option("--count", "-n", type=COUNT, metavar="N", help="End after N messages.")
@click.option("--timeout", "-t", type=SECONDS, metavar="SECONDS", help="End after so long, with status 124.")
@click.option(
    "--soft",
    type=click.Choice(["queue", "discard", "block", "error"]),
    help="What the server does when our socket is full.",
)
@click.option(
    "--hard", type=click.Choice(["discard", "block", "error"]), help="What it does when its queue for us is full."
)
@click.option("--order", type=click.Choice(["queue", "stack", "random"]), help="In which order it sends its queue.")
@click.option("--reconnect", is_flag=True, help="When the connection is lost, connect and subscribe again.")
@click.option("--verbose", "-v", is_flag=True, help="Say on standard error when the subscriptions are in force.")
@to_connect
@with_target
def sub(
    target: Target,
    patterns: tuple[bytes, ...],
    output_json: bool,
    output_raw: bool,
    output_format: str | None,
    with_time: bool,
    count: int | None,
    timeout: float | None,
    soft: str | None,
    hard: str | None,
    order: str | None,
    reconnect: bool,
    verbose: bool,
) -> None:
    """Print what is published under keys that match a PATTERN.

    In a pattern '*' stands for anything up to the next '/'. One that ends with '/' matches all
    that is below it, and the empty one everything.

    A line is the key, a space and the payload. What could harm a terminal is escaped, and a space
    in the key is \\x20.
    """
    show = printer(output_json, output_raw, output_format, with_time)
    deadline = Deadline(timeout)

    def on_gap(error: Exception) -> None:
        click.echo(f"sbus: connected again; messages may have been missed: {error}", err=True)

    with target.connect(reconnect=reconnect, on_gap=on_gap) as bus:
        bus.flood_control(soft=soft, hard=hard, order=order)
        for pattern in patterns:
            bus.subscribe(pattern)
        if verbose:
            bus.fence(deadline.left)
            click.echo(f"sbus: subscribed to {' '.join(map(shown, patterns))} at {target.address}", err=True)
        printed = _follow(bus, show, sys.stdout.buffer, count, deadline)
    if count is None or printed < count:
        raise TimedOut(f"the time is up: {printed} messages came in {timeout:g} seconds")


def _follow(bus: Bus, show: Printer, output: BinaryIO, count: int | None, deadline: Deadline) -> int:
    """Print messages until there were enough or the time is up; returns how many.

    What is printed is flushed whenever nothing more is there to be printed.
    """
    printed = 0
    while printed != count and not deadline.has_passed:
        try:
            messages = bus.get_ready()
        except SbusError:
            output.flush()
            raise
        if not messages:
            output.flush()
            wait(bus, deadline.left, output.fileno())
        now = time.time()
        for message in messages[: None if count is None else count - printed]:
            printed += 1
            output.write(show(ReceivedMessage(printed, now, message)))
    output.flush()
    return printed
