"""``sbus explain``: who would get a message, and who would not, and why."""

from __future__ import annotations

import json
from typing import Any

import click

from sbus.cli.admin.connection import Admin, admin_option, json_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import Nothing, pluralize, printable_text
from sbus.cli.patterns import show_mismatch
from sbus.cli.types import BYTES, COUNT
from sbus.errors import SbusError
from sbus.journal.keytext import from_text
from sbus.protocol.explain import explain as explain_mismatch
from sbus.protocol.keys import DIALECTS, Dialect

__all__ = ["explain"]


@click.command(
    short_help="List the clients that would get a message, and those that would not.",
    epilog="""\
\b
Examples:
  sbus explain sensors/kitchen/temperature
  sbus explain sensors/kitchen/temperature --receiver 12    why client 12 does not get it
""",
)
@click.argument("key", type=BYTES)
@click.option("--publisher", type=COUNT, metavar="NUMBER", help="As if this client published it.")
@click.option("--receiver", type=COUNT, metavar="NUMBER", help="Say why this client would not get it.")
@admin_option
@json_option
@connection_options
@pass_target
def explain(
    target: Target, key: bytes, publisher: int | None, receiver: int | None, admin: str | None, as_json: bool
) -> None:
    """Say who would get a message with KEY now, by which pattern, and who would not, and why.

    The status is 0 if a client would get it, and 3 if none would.
    """
    found = Admin(target, admin).get("/v1/explain", key=key, publisher=publisher, receiver=receiver, limit=1000)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for line in _lines(found, key, DIALECTS[target.dialect]):
            click.echo(printable_text(line))
    if not found["total"]:
        raise Nothing("nobody would receive it")


def _lines(found: dict[str, Any], key: bytes, dialect: Dialect) -> list[str]:
    lines = [f"{found['key']}: {pluralize(found['total'], 'client')} would get it"]
    if found["is_secret"]:
        lines[0] += " (secret)"
    for row in found["receivers"]:
        line = f"  + {_who(row)} by {row['pattern'] or 'the empty pattern'}"
        if row["is_congested"]:
            line += f", behind {pluralize(row['queue_messages'], 'message')} that wait"
        lines.append(line)
    lines += _more(found["total"], len(found["receivers"]))
    for row in found["others"]:
        lines.append(f"  - {_who(row)}: {row['text']}")
    lines += _more(found["others_total"], len(found["others"]))
    for row in found.get("compared", ()):
        lines.append(f"      {row['pattern'] or 'the empty pattern'}: {row['why']}")
        lines += (f"        {line}" for line in _carets(row, key, dialect))
    return lines


def _carets(row: dict[str, Any], key: bytes, dialect: Dialect) -> list[str]:
    """Return where matching stops; nothing if the bus has cut the pattern, so that it would be another place."""
    try:
        pattern = from_text(row["pattern"])
        mismatch = explain_mismatch(pattern, key, dialect)
    except SbusError:
        return []
    return show_mismatch(pattern, key, mismatch) if mismatch is not None and mismatch.reason == row["why"] else []


def _who(row: dict[str, Any]) -> str:
    observer = ", an observer" if row["is_observer"] else ""
    return f"client {row['client']} (pid {row['pid']}, uid {row['uid']}{observer})"


def _more(total: int, printed: int) -> list[str]:
    return [f"    and {total - printed:,} more"] if total > printed else []
