"""``sbus get``: print last values."""

from __future__ import annotations

import sys

import click

from sbus.cli.messages import FORMAT_HELP, MessageFormat, ReceivedMessage, message_options
from sbus.cli.options import Target, connection_options, pass_target, timeout_option
from sbus.cli.output import Nothing, escape
from sbus.cli.types import BYTES
from sbus.client.core import Message
from sbus.errors import UsageError
from sbus.journal import clock

__all__ = ["get"]


@click.command(
    short_help="Print the last values of keys.",
    epilog=f"""\
\b
Directives of FORMAT:{FORMAT_HELP}

\b
Examples:
  sbus get 'state/'
  sbus get --raw state/door
""",
)
@click.argument("patterns", type=BYTES, nargs=-1, required=True, metavar="PATTERN...")
@message_options(noun="value", moment="arrival time")
@timeout_option
@click.option("--sender", is_flag=True, help="Print the publisher of each value before its key.")
@connection_options
@pass_target
def get(
    target: Target, patterns: tuple[bytes, ...], message_format: MessageFormat, timeout: float, sender: bool
) -> None:
    """Print the last message of each key that matches a PATTERN, and exit.

    The server has them for the patterns of its option --last-value. The status is 3 if there is
    none.
    """
    sender = message_format.wants_sender(sender)
    show = message_format.printer()
    values: dict[bytes, Message] = {}

    def keep(message: Message) -> None:
        if message.is_last_value:
            values[message.key] = message

    with target.connect(timeout=timeout, sender=sender) as bus:
        for pattern in patterns:
            bus.subscribe(pattern, keep, last=True)
        bus.fence(timeout)
        if "last" not in bus.extensions:
            raise UsageError(f"the server at {target.address} has no last values: it is older than this command")
    now = clock.now()
    for number, message in enumerate(values.values(), 1):
        sys.stdout.buffer.write(show(ReceivedMessage(number, now, message)))
    sys.stdout.buffer.flush()
    if not values:
        raise Nothing(f"no last value matches {' '.join(map(escape, patterns))}: see --last-value of the server")
