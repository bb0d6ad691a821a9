"""``sbus users``: the users of a bus, and what they take."""

from __future__ import annotations

import json

import click

from sbus.cli.admin.connection import Admin, admin_option, json_option
from sbus.cli.admin.words import echo_table, format_bytes, name_of
from sbus.cli.options import Target, connection_options, pass_target

__all__ = ["users"]

_NAMES = {-1: "(recorder)", -2: "(link)", -3: "(services)"}
"""Users of the server's own processes (`sbus.server.core.users`), by UID."""


@click.command(
    short_help="List the users of a bus.",
    epilog="""\
\b
Example:
  sbus users
""",
)
@admin_option
@json_option
@connection_options
@pass_target
def users(target: Target, admin: str | None, as_json: bool) -> None:
    """List the users with a client, with their clients, patterns, queues and memory; most memory first.

    "at most" is the number of clients that the user may have (--user-clients). The other limits of one user, which
    "sbus status" shows, apply to those with "yes" under "limits".
    """
    found = Admin(target, admin).get("/v1/users")
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = (
        {
            **row,
            "name": name_of(row["uid"]),
            "at most": row.get("clients_limit"),
            "queued": format_bytes(row["queue_bytes"]),
            "memory": format_bytes(row["memory_bytes"]),
            "limits": "none" if row["is_exempt"] else "yes",
        }
        for row in sorted(found["users"], key=lambda row: -row["memory_bytes"])
    )
    numbers = dict.fromkeys(("clients", "at most", "patterns", "queues", "queued", "memory"), ">")
    echo_table({"uid": ">", "name": "<", **numbers, "limits": "<"}, rows)
