"""``sbus sub``: print messages as they are published."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, BinaryIO

import click

from sbus.cli.deadline import Deadline, wait_readable
from sbus.cli.messages import FORMAT_HELP, MessageFormat, Printer, ReceivedMessage, copied, message_options, saved
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import escape, pluralize
from sbus.cli.types import BYTES, COUNT, SECONDS
from sbus.client.blocking import Bus
from sbus.client.connecting import is_absent
from sbus.errors import ConnectError, Disconnected, SbusError, TimedOut
from sbus.journal import clock
from sbus.protocol.controls import HardChoice, OrderChoice, SoftChoice, choices

__all__ = ["sub"]

_SOFT, _HARD, _ORDERS = (choices(group) for group in (b"blocking/soft", b"blocking/hard", b"order"))


@click.command(
    short_help="Print messages as they are published.",
    epilog=f"""\
\b
Directives of FORMAT:{FORMAT_HELP}

\b
Examples:
  sbus sub 'sensors/*/temperature' 'alarms/'
  sbus sub --json --count 10 'sensors/' | jq .payload
  sbus sub --raw --count 1 camera/picture >picture.jpeg
  sbus sub --format '%t %s bytes under %k' ''
  sbus sub --last --receipts 'state/'
  sbus sub --sender 'pump/'
  sbus sub --save pictures 'camera/'
""",
)
@click.argument("patterns", type=BYTES, nargs=-1, required=True, metavar="PATTERN...")
@message_options(noun="message", moment="arrival time")
@click.option(
    "--save",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write each payload to a file in DIR, and print the file's name in its place.",
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Exit after N messages.")
@click.option("--timeout", "-t", type=SECONDS, metavar="SECONDS", help="Exit after SECONDS, with status 124.")
@click.option(
    "--soft",
    type=click.Choice(_SOFT),
    help=f"Action of the server when this client's socket is full.  [default: {_SOFT[0]}]",
)
@click.option(
    "--hard",
    type=click.Choice(_HARD),
    help=f"Action of the server when its queue for this client is full.  [default: {_HARD[0]}]",
)
@click.option(
    "--order",
    type=click.Choice(_ORDERS),
    help=f"The order in which the server sends queued messages.  [default: {_ORDERS[0]}]",
)
@click.option("--last", is_flag=True, help="Print the last values first, as far as the server keeps them.")
@click.option("--sender", is_flag=True, help="Print the publisher of each message before its key.")
@click.option("--receipts", is_flag=True, help="Report lost messages where they are missing.")
@click.option("--reconnect", is_flag=True, help="Reconnect and subscribe again when the connection is lost.")
@click.option("--verbose", "-v", is_flag=True, help="Report on standard error when the subscriptions are in force.")
@connection_options
@pass_target
def sub(
    target: Target,
    patterns: tuple[bytes, ...],
    message_format: MessageFormat,
    save: str | None,
    count: int | None,
    timeout: float | None,
    soft: SoftChoice | None,
    hard: HardChoice | None,
    order: OrderChoice | None,
    last: bool,
    sender: bool,
    receipts: bool,
    reconnect: bool,
    verbose: bool,
) -> None:
    """Print messages whose key matches a PATTERN.

    In a pattern, '*' matches everything up to the next '/'. A pattern that ends with '/' matches
    every key below it, and the empty pattern matches every key.

    Each line has the key, a space and the payload. Control characters are escaped, and a space in
    the key is printed as \\x20. With --sender, the name of its publisher and a space precede it.

    With --save, the name of a file is the number of the message and its key, in which every
    byte but letters, digits, '.', '_' and '-' is written as %XX. A file is never overwritten.
    """
    from sbus.daemon.heap import keep_memory

    keep_memory()
    sender = message_format.wants_sender(sender)
    show = message_format.printer()
    if save is not None and (message_format.json or message_format.raw or message_format.template is not None):
        raise click.UsageError("--save prints the names of files: leave out --json, --raw and --format.")
    show = copied(show) if save is None else saved(show, save)
    deadline = Deadline(timeout, "subscribing")

    def on_gap(error: Exception) -> None:
        click.echo(f"sbus: connected again; messages may have been missed: {error}", err=True)

    on_lost = message_format.show_lost if receipts else None
    with contextlib.ExitStack() as connection:
        bus = connection.enter_context(
            _connect(target, deadline, reconnect=reconnect, on_gap=on_gap, on_lost=on_lost, sender=sender)
        )
        # A server that accepts and closes would otherwise keep the first packets waiting without end.
        with deadline.applied(), bus.limit(deadline.left):
            bus.flood_control(soft=soft, hard=hard, order=order)
            for pattern in patterns:
                bus.subscribe(pattern, last=last)
            if verbose:
                _fence(bus, reconnect, deadline)
        named = " ".join(escape(pattern) or "every key" for pattern in patterns)
        report = f"sbus: subscribed to {named} at {target.address}" if verbose else None
        printed = _follow(bus, show, sys.stdout.buffer, count, deadline, report)
    if count is None or printed < count:
        raise TimedOut(f"timed out: {pluralize(printed, 'message')} came within {timeout:g} s")


def _connect(target: Target, deadline: Deadline, *, reconnect: bool, **settings: Any) -> Bus:
    """Connect, also for large messages; with `reconnect`, wait for a server, and report that there is none yet."""
    settings["payloads"] = True
    if reconnect:
        try:
            return target.connect(timeout=0, reconnect=True, **settings)
        except ConnectError as e:
            if is_absent(e):
                click.echo(f"sbus: waiting: {e}", err=True)
        except TimedOut:
            pass
    return target.connect_by(deadline, reconnect=reconnect, **settings)


def _fence(bus: Bus, reconnect: bool, deadline: Deadline) -> None:
    """Wait until the subscriptions are in force, on the next connection if this one is lost."""
    while True:
        try:
            bus.fence(deadline.left)
            return
        except Disconnected:
            if not reconnect:
                raise


def _follow(
    bus: Bus, show: Printer, output: BinaryIO, count: int | None, deadline: Deadline, report: str | None
) -> int:
    """Print messages until `count` of them have come or the deadline has passed.

    The output is flushed whenever no further message is waiting.

    :param report: a line for standard error, once it is known that the server has not refused.
    :returns: the number of messages printed.
    """
    printed = 0
    is_waiting = False
    while printed != count and not deadline.has_passed:
        try:
            messages = bus.get_ready()
        except SbusError:
            output.flush()
            raise
        if report is not None:
            click.echo(report, err=True)
            report = None
        if not messages:
            output.flush()
            if bus.state == "reconnecting" and not is_waiting:
                click.echo(f"sbus: waiting: the bus at {bus.address} has gone", err=True)
            is_waiting = bus.state == "reconnecting"
            wait_readable(bus, deadline.left, output.fileno())
        now = clock.now()
        for message in messages[: None if count is None else count - printed]:
            printed += 1
            output.write(show(ReceivedMessage(printed, now, message)))
    output.flush()
    return printed
