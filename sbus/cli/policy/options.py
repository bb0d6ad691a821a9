"""The common parts of the commands of ``sbus policy``: options, and the text of clients and rules."""

from __future__ import annotations

import grp
from typing import Any

import click

from sbus.cli.admin.words import name_of
from sbus.policy import Identity, Policy, load
from sbus.policy.reasons import Reason
from sbus.policy.rules import UNNAMED

__all__ = [
    "describe",
    "json_option",
    "load_policy",
    "reason_row",
    "reason_text",
    "user_text",
    "who_row",
]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def load_policy(path: str, listeners: tuple[str, ...] = ()) -> Policy:
    """Load a policy, of a bus with these listeners if there are some."""
    return load(path, listeners=listeners or None)


def describe(who: Identity) -> str:
    """Return a client in words: user, groups and socket."""
    words = [user_text(who.uid)]
    if groups := _groups(who):
        words.append(f"{'groups' if len(groups) > 1 else 'group'} {', '.join(map(_group_name, groups))}")
    if not who.is_proven:
        words.append("whose IDs prove nothing")
    return ", ".join([*words, f"socket {who.listener}"])


def user_text(uid: int) -> str:
    """Return a user in words."""
    name = name_of(uid)
    return "any other user" if uid == UNNAMED else f"uid {uid} ({name})" if name else f"uid {uid}"


def _groups(who: Identity) -> list[int]:
    """Return the groups, the primary one first."""
    return [who.gid, *sorted(who.groups - {who.gid})] if who.gid != UNNAMED else []


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


def who_row(who: Identity) -> dict[str, Any]:
    """Return a client as a JSON object; without a UID, it is any user whom no rule names."""
    return {
        "uid": None if who.uid == UNNAMED else who.uid,
        "user": name_of(who.uid) or None,
        "groups": _groups(who),
        "listener": who.listener,
        "is_proven": who.is_proven,
    }


def reason_row(reason: Reason) -> dict[str, Any]:
    """Return a reason as a JSON object."""
    pattern = None if reason.pattern is None else reason.pattern.decode(errors="backslashreplace")
    return {
        "rule": reason.rule,
        "where": reason.where,
        "field": reason.field,
        "pattern": pattern,
        "text": reason.text,
        "decides": reason.decides,
    }


def reason_text(reason: Reason) -> str:
    """Return a reason as a line."""
    place = f"{reason.rule} ({reason.where})" if reason.where else reason.rule
    if reason.pattern is None:
        return f"{place}: {reason.text}"
    field = "" if reason.field == reason.rule else f"{reason.field} "
    return f'{place}: {field}"{reason.pattern.decode(errors="backslashreplace")}": {reason.text}'
