"""``sbus policy diff``: what one policy allows, and another does not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from sbus.cli.output import escape, printable_text
from sbus.cli.policy.options import (
    describe,
    dialect_option,
    json_option,
    load_policy,
    reason_row,
    reason_text,
    user_text,
    who_row,
)
from sbus.policy.comparing import Change, SettingChange, compare, compare_settings

__all__ = ["diff"]


@click.command(
    short_help="Compare two policies by what they allow.",
    epilog="""\
\b
Example:
  sbus policy diff /etc/sbus/policy.toml new.toml
""",
)
@click.argument("old", type=click.Path())
@click.argument("new", type=click.Path())
@dialect_option
@json_option
@click.pass_context
def diff(ctx: click.Context, old: str, new: str, dialect: str, as_json: bool) -> None:
    """Compare two policies by what they allow: one example for each change, and settings that differ.

    A line begins with "-" if a client loses a right, and with "+" if one gains it. The client is
    described by what the rules ask for; "any other user" is one that no rule names. The status is 0
    if the policies allow the same, else 1. No bus is needed.
    """
    before, after = load_policy(old, dialect), load_policy(new, dialect)
    changes, settings = list(compare(before, after)), list(compare_settings(before, after))
    if as_json:
        click.echo(json.dumps({"changes": list(map(_row, changes)), "settings": list(map(_setting_row, settings))}))
    else:
        for line in (*(line for each in changes for line in _lines(each)), *_setting_lines(settings)):
            click.echo(printable_text(line))
    ctx.exit(1 if changes or settings else 0)


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
