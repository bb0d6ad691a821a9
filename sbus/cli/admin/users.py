"""``sbus users``: the users of a bus, and their parts of its limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import click

from sbus.cli.admin.connection import Admin, admin_option, json_option
from sbus.cli.admin.words import echo_table, format_bytes, name_of
from sbus.cli.options import Target, connection_options, pass_target

__all__ = ["users"]


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
    """List the users with a client, and the parts of their shares that they use; most memory first.

    "connects" is how often the user may connect at once now, and how many of these come back in a second. "denied"
    counts what the user had no permission for; --json has the rules. The last column says where the limits come from:
    the default, an option of the server, or a table of its policy. Root and the server's own user have none.
    """
    found = Admin(target, admin).get("/v1/users")
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = (
        {
            **row,
            "name": name_of(row["uid"]),
            "clients": _of(row["clients"], row.get("clients_limit"), str),
            "patterns": _of(row["patterns"], row.get("patterns_limit"), str),
            "memory": _of(row["memory_bytes"], row.get("memory_limit_bytes"), format_bytes),
            "connects": row.get("accepts_limit") and f"{row['accepts_left']}, {row['accepts_limit']}/s",
            "queued": format_bytes(row["queue_bytes"]),
            "denied": sum(row.get("denied", {}).values()),
            "limits": _sources(row.get("limits_from")),
        }
        for row in sorted(found["users"], key=lambda row: -row["memory_bytes"])
    )
    numbers = dict.fromkeys(("clients", "patterns", "memory", "connects", "queues", "queued", "denied"), ">")
    echo_table({"uid": ">", "name": "<", **numbers, "limits": "<"}, rows)


def _of(used: int, most: int | None, in_words: Callable[[int], str]) -> str:
    return in_words(used) if most is None else f"{in_words(used)} of {in_words(most)}"


def _sources(limits: Mapping[str, str] | None) -> str:
    """Return where the limits of a user come from: once if it is one place, else by limit."""
    if limits is None:
        return "none"
    first, *others = set(limits.values())
    if not others:
        return first
    return ", ".join(f"{name}: {source}" for name, source in limits.items() if source != "default")
