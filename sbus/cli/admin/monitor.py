"""``sbus monitor``: the messages that are published, with their publishers and receivers."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import click

from sbus.cli.admin.connection import Admin, Refused, admin_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import escape, pluralize, printable_text, speaks_utf8
from sbus.cli.patterns import warn_of_impossible
from sbus.cli.types import BYTES, COUNT, Size
from sbus.errors import InvalidKey, Violation
from sbus.protocol.keys import DIALECTS

__all__ = ["monitor"]

_ALL_MISSED = {
    "budget": "the bus may spend a tenth of its time on monitors",
    "reader": "this command was too slow",
}


@click.command(
    short_help="Watch the messages on a bus.",
    epilog="""\
\b
Examples:
  sbus monitor
  sbus monitor 'sensors/' --head=200
  sbus monitor --unrouted          keys without subscribers
""",
)
@click.argument("pattern", type=BYTES, default="")
@click.option(
    "--head",
    type=Size(0, 4096),
    default=64,
    show_default=True,
    metavar="SIZE",
    help="Bytes to show of each payload; at most 4096.",
)
@click.option("--count", "-n", type=COUNT, metavar="N", help="Stop after N messages, or after N seconds of --unrouted.")
@click.option("--unrouted", is_flag=True, help="Show the keys without subscribers instead, every second.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each message.")
@admin_option
@connection_options
@pass_target
def monitor(
    target: Target, pattern: bytes, head: int, count: int | None, unrouted: bool, as_json: bool, admin: str | None
) -> None:
    """Show each message whose key matches PATTERN: its publisher, its receivers, and how many lost it.

    It is for root and the user of the bus. Of secret messages it shows the address and the size. It
    says how many messages it could not show: the bus spends at most a tenth of its time on it.
    """
    if not pattern.startswith(b"!"):  # part of the address of secret messages will do
        _check(pattern, target)
    bus = Admin(target, admin)
    if unrouted:
        _show_unrouted(bus, count, as_json)
        return
    printed = 0
    for name, data in _messages(bus, pattern, head):
        if name != "messages":
            continue
        for message in data["messages"]:
            click.echo(json.dumps(message) if as_json else _line(message))
            printed += 1
            if printed == count:
                return
        _report_missed(data["missed"])


def _messages(bus: Admin, pattern: bytes, head: int) -> Iterator[tuple[str, Any]]:
    try:
        yield from bus.events(monitor=pattern, head=head)
    except Refused as e:
        if "monitor=" not in str(e):
            raise
        raise Refused(
            "only root and the server's user may see what is published: run it as one of them, or look at --unrouted"
        ) from None


def _check(pattern: bytes, target: Target) -> None:
    try:
        DIALECTS[target.dialect].check(pattern)
    except Violation as e:
        raise InvalidKey(f"the pattern {escape(pattern)} is not allowed: {e}") from None
    warn_of_impossible([pattern], DIALECTS[target.dialect])


def _show_unrouted(bus: Admin, count: int | None, as_json: bool) -> None:
    printed = 0
    for name, data in bus.events(unrouted=1):
        if name != "unrouted":
            continue
        printed += 1
        for row in data["keys"]:
            if as_json:
                click.echo(json.dumps(row))
            else:
                click.echo(printable_text(f"{row['messages']:>8,}  {row['key']}"))
        if data["others"]:
            click.echo(f"sbus: {pluralize(data['others'], 'message')} of more keys not printed", err=True)
        _report_missed({"budget": data["missed"]})
        if printed == count:
            return


def _report_missed(missed: dict[str, int]) -> None:
    for why, number in missed.items():
        if number:
            click.echo(f"sbus: {pluralize(number, 'message')} not printed: {_ALL_MISSED[why]}", err=True)


def _line(message: dict[str, Any]) -> str:
    at = message["time"]
    clock = f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03}"
    who = message["publisher"]
    source = f"client {who['client']} pid {who['pid']} uid {who['uid']}"
    if who["listener"] not in ("", "main"):
        source += f" at {who['listener']}"
    sender = message.get("sender")  # not from an older server
    if sender is not None and (sender["uid"], sender["pid"]) not in ((who["uid"], who["pid"]), (None, None)):
        source += f" for client {sender['number']} pid {sender['pid']} uid {sender['uid']} of another bus"
    got = pluralize(message["receivers"] - message["lost"], "receiver") if message["receivers"] else "nobody"
    if message["lost"]:
        got += f", lost by {', '.join(map(str, message['lost_by']))}"
        if message["lost"] > len(message["lost_by"]):
            got += f" and {message['lost'] - len(message['lost_by'])} more"
    line = printable_text(f"{clock}  {message['key']}  {message['size']} B  from {source}  to {got}")
    if message["head"] is None:
        return f"{line}  (secret)"
    head = base64.b64decode(message["head"])
    text = escape(head, ascii_only=not speaks_utf8())
    return f"{line}  {text}{'...' if len(head) < message['size'] else ''}" if head else line
