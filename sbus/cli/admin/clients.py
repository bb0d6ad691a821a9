"""``sbus clients``: the clients of a bus, and those that have left."""

from __future__ import annotations

import json

import click

from sbus.admin.pages import CLIENT_SORTS
from sbus.cli.admin.connection import Admin, admin_option, json_option, limit_option
from sbus.cli.admin.words import echo_table, format_ago, name_of
from sbus.cli.options import Target, connection_options, pass_target

__all__ = ["clients"]

_COLUMNS = {
    "client": ">",
    "pid": ">",
    "uid": ">",
    "user": "<",
    "listener": "<",
    "up": ">",
    "patterns": ">",
    "queue": ">",
    "bytes": ">",
    "lost": ">",
    "strategy": "<",
    "blocked by": "<",
}
_CLOSED = {"client": ">", "pid": ">", "uid": ">", "user": "<", "listener": "<", "ago": ">", "lost": ">", "reason": "<"}


@click.command(
    short_help="List the clients of a bus.",
    epilog="""\
\b
Examples:
  sbus clients --sort=queue     the slowest receivers first
  sbus clients --closed         why connections have ended
""",
)
@click.option(
    "--sort",
    type=click.Choice(CLIENT_SORTS),
    default="number",
    show_default=True,
    help="Sort by this; the highest first.",
)
@limit_option
@click.option("--closed", is_flag=True, help="List the connections that have ended, the last one first.")
@admin_option
@json_option
@connection_options
@pass_target
def clients(target: Target, sort: str, limit: int, closed: bool, admin: str | None, as_json: bool) -> None:
    """List the clients of the bus, or with --closed those that have left and why.

    A strategy is what happens when the socket of the client is full, and when its queue is.
    """
    bus = Admin(target, admin)
    found = bus.get("/v1/closed", limit=limit) if closed else bus.get("/v1/clients", sort=sort, limit=limit)
    if as_json:
        click.echo(json.dumps(found))
    elif closed:
        rows = (
            {
                **row,
                "user": name_of(row["uid"]),
                "ago": format_ago(row["closed_at"]),
                "lost": row["lost_messages"],
            }
            for row in found["closed"]
        )
        echo_table(_CLOSED, rows)
    else:
        echo_table(
            _COLUMNS,
            (
                {
                    **row,
                    "user": name_of(row["uid"]),
                    "up": format_ago(row["connected_at"]),
                    "queue": row["queue_messages"],
                    "bytes": row["queue_bytes"],
                    "lost": row["lost_messages"],
                    "strategy": f"{row['soft_strategy']}/{row['hard_strategy']}",
                    "blocked by": ",".join(map(str, row["blocked_by"])),
                }
                for row in found["clients"]
            ),
        )
