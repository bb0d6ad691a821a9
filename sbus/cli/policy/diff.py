"""``sbus policy diff``: what one policy allows, and another does not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from sbus.cli.admin.connection import Admin, admin_option
from sbus.cli.options import Target, connection_options, pass_target
from sbus.cli.output import escape, printable_text
from sbus.cli.policy.options import (
    describe,
    json_option,
    load_policy,
    reason_row,
    reason_text,
    user_text,
    who_row,
)
from sbus.cli.policy.running import Lost, RunningBus
from sbus.policy import Identity
from sbus.policy.comparing import Change, SettingChange, compare, compare_settings

__all__ = ["diff"]


@click.command(
    short_help="Compare the rights that two policies give.",
    epilog="""\
\b
Examples:
  sbus policy diff /etc/sbus/policy.toml new.toml
  sbus policy diff new.toml                    # with the policy of the bus, for its clients
""",
)
@click.argument("policies", type=click.Path(), nargs=-1, required=True, metavar="[OLD] NEW")
@json_option
@admin_option
@connection_options
@pass_target
@click.pass_context
def diff(ctx: click.Context, target: Target, policies: tuple[str, ...], as_json: bool, admin: str | None) -> None:
    """Compare two policies by what they allow: one example for each change, and settings that differ.

    A line begins with "-" if a client loses a right, and with "+" if one gains it. The client is
    described by what the rules ask for; "any other user" is one that no rule names. The status is 0
    if the policies allow the same, else 1. Two policies need no bus.

    Without OLD, NEW is compared with the policy that is in force on the bus, for the clients that are
    connected: their subscriptions that would end, and an example for each right that one would lose or gain.
    """
    if len(policies) > 2:
        raise click.UsageError("Give one policy or two.")
    after = load_policy(policies[-1])
    lost: list[Lost] = []
    clients: set[Identity] | None = None
    if len(policies) == 2:
        before = load_policy(policies[0])
    else:
        running = RunningBus(Admin(target, admin))
        before, clients, lost = running.policy(), running.identities, list(running.lost(after))
    changes, settings = list(compare(before, after, clients)), list(compare_settings(before, after))
    if as_json:
        rows = {"changes": list(map(_row, changes)), "settings": list(map(_setting_row, settings))}
        click.echo(json.dumps({"lost": list(map(_lost_row, lost)), **rows} if clients is not None else rows))
    else:
        for line in (*map(_lost_line, lost), *(line for each in changes for line in _lines(each))):
            click.echo(printable_text(line))
        for line in _setting_lines(settings):
            click.echo(printable_text(line))
    ctx.exit(1 if changes or settings or lost else 0)


def _lost_line(each: Lost) -> str:
    place = f" ({each.verdict.where})" if each.verdict.where else ""
    pattern = escape(each.pattern) or "every key"
    return (
        f"! client {each.client} (pid {each.pid}, {user_text(each.who.uid)}) would lose its subscription to {pattern}: "
        f"{each.verdict.rule}{place}"
    )


def _lost_row(each: Lost) -> dict[str, object]:
    return {
        "client": each.client,
        "pid": each.pid,
        **who_row(each.who),
        "pattern": each.pattern.decode(errors="backslashreplace"),
        "rule": each.verdict.rule,
        "where": each.verdict.where,
    }


def _lines(change: Change) -> Iterator[str]:
    sign = "+" if change.after.is_allowed else "-"
    yield f"{sign} {change.verb} {escape(change.key) or 'every key'}: {describe(change.who)}"
    yield f"    old: {reason_text(change.why_before)}"
    yield f"    new: {reason_text(change.why_after)}"


def _row(change: Change) -> dict[str, object]:
    return {
        "verb": change.verb,
        "key": change.key.decode(errors="backslashreplace"),
        "client": who_row(change.who),
        "is_allowed": change.after.is_allowed,
        "old": reason_row(change.why_before),
        "new": reason_row(change.why_after),
    }


def _setting_lines(settings: list[SettingChange]) -> Iterator[str]:
    for each in settings:
        who = describe(each.who) if each.who is not None else None
        if each.uid is not None:
            who = user_text(each.uid)
        before, after = (_value(value) for value in (each.before, each.after))
        yield f"~ {each.setting} {before} -> {after}" + (f": {who}" if who else "")


def _value(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def _setting_row(each: SettingChange) -> dict[str, object]:
    return {
        "setting": each.setting,
        "client": None if each.who is None else who_row(each.who),
        "uid": each.uid,
        "old": each.before,
        "new": each.after,
    }
