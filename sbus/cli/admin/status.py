"""``sbus status``: the figures of a bus."""

from __future__ import annotations

import json
from typing import Any

import click

from sbus.cli.admin.connection import Admin, Refused, admin_option, json_option
from sbus.cli.admin.words import format_ago, format_bytes, format_span
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import pluralize
from sbus.cli.tables import format_table

__all__ = ["status"]


@click.command(
    short_help="Show the figures of a bus.",
    epilog="""\
\b
Example:
  sbus status
""",
)
@admin_option
@json_option
@connection_options
@pass_target
def status(target: Target, admin: str | None, as_json: bool) -> None:
    """Show the figures of the bus: clients, messages, queues, losses and limits, and the policy in force."""
    bus = Admin(target, admin)
    found = bus.get("/v1/status")
    if as_json:
        click.echo(json.dumps(found))
        return
    for line in format_table([*_rows(found), ("policy", _policy(bus))], "<"):
        click.echo(line)


def _policy(bus: Admin) -> str:
    """Return the policy in force in words."""
    try:
        found = bus.get("/v1/policy")
    except Refused:
        return "none"  # or the server is older than policies
    return (
        f"{found['path']}: {pluralize(found['rules'], 'rule')}, default {found['default']}, mode {found['mode']}, "
        f"generation {found['generation']}"
    )


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    counters = found["counters"]
    rows = [
        ("sbus", f"{found['version']}, process {found['pid']}, up {format_ago(found['started_at'])}"),
        ("clients", f"{found['clients']:,} of {found['clients_limit']:,}, from {pluralize(found['users'], 'user')}"),
        ("published", f"{pluralize(counters['published'], 'message')}, {format_bytes(counters['published_bytes'])}"),
        ("unrouted", f"{counters['unrouted']:,} of these without a subscriber"),
        ("copies", f"{counters['routed']:,}, {format_bytes(counters['routed_bytes'])}"),
        ("dropped", f"{counters['dropped']:,} copies{_by(counters['dropped_by'])}"),
        ("conflated", f"{counters['conflated']:,} copies"),
        (
            "queues",
            f"{pluralize(found['queues'], 'receiver')} behind, {pluralize(found['queue_messages'], 'message')}, "
            f"{format_bytes(found['queue_bytes'])} of {format_bytes(found['queue_limit_bytes'])}, "
            f"the longest {format_bytes(found['queue_largest_bytes'])}",
        ),
        (
            "held",
            f"{pluralize(found['held_publishers'], 'publisher')} now, "
            f"{format_span(found['held_seconds'])} since the start",
        ),
        ("memory", f"{format_bytes(found['memory_bytes'])} of {format_bytes(found['memory_limit_bytes'])}"),
        ("each user", _user_limits(found["limits_per_user"])),
        ("refused", f"{counters['refused']:,} connections{_by(counters['refused_by'])}"),
        ("violations", f"{counters['violations']:,}{_by(counters['violations_by'])}"),
        ("denied", f"{counters.get('denied', 0):,}{_by(counters.get('denied_by', {}))}"),
    ]
    if found["last_values"] is not None:
        rows.append(("last values", f"{found['last_values']:,}"))
    rows += [(name, "connected" if is_up else "NOT CONNECTED") for name, is_up in found["attached"].items()]
    return rows


def _user_limits(limits: dict[str, Any]) -> str:
    of_some = "".join(f" (UID {uid}: {most:,})" for uid, most in limits.get("clients_of", {}).items())
    return (
        f"at most {pluralize(limits['clients'], 'client')}{of_some}, "
        f"{limits['accepts_per_second']:,} connections a second, "
        f"{pluralize(limits['patterns'], 'pattern')}, {limits['match_steps']:,} match steps, "
        f"{format_bytes(limits['memory_bytes'])} of memory"
    )


def _by(reasons: dict[str, int]) -> str:
    named = ", ".join(f"{why} {count:,}" for why, count in reasons.items() if count)
    return f" ({named})" if named else ""
