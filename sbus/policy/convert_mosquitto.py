"""Convert an ACL file of mosquitto (``acl_file``) into a policy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sbus.errors import UsageError
from sbus.policy.draft import Draft, is_possible

__all__ = ["convert"]

_HEADING = (
    "Users of mosquitto become users of this system, so each has to exist here.",
    "mosquitto lets everybody subscribe to '#', and delivers what may be read; this bus refuses such a subscription.",
)
_ACCESS = ("read", "write", "readwrite", "deny")
_FIELDS = {
    "read": ("subscribe",),
    "write": ("publish",),
    "readwrite": ("publish", "subscribe"),
    "deny": ("deny_publish", "deny_subscribe"),
}
_ANYBODY = ""


def convert(files: Sequence[tuple[str, str]]) -> str:
    """Return the policy.

    A rule that has no equivalent here is left out if it allows, and widened if it denies; a comment says so.

    :param files: the path and the text of the file.
    :raises UsageError: if there are several, as mosquitto has one.
    """
    if len(files) != 1:
        raise UsageError("mosquitto has one file of access rules: convert one at a time")
    ((path, text),) = files
    draft = Draft([path], _HEADING)
    users = list(dict.fromkeys(line.split(None, 1)[1].strip() for line in _lines(text) if re.match(r"user\s+\S", line)))
    user = ""  # rules above the first user are for clients without a name
    for line in _lines(text):
        kind, _, rest = re.sub(r"\s", " ", line, count=1).partition(" ")
        access, topic = _access(rest.strip())
        if kind == "user" and rest.strip():
            user = rest.strip()
        elif kind not in ("topic", "pattern") or not topic:
            draft.comment(line, "not converted: it is no rule that mosquitto documents")
        elif kind == "topic" and not user:
            draft.comment(line, "not converted: it is for clients without a user name, and every client has one here")
        elif kind == "topic":
            _add(draft, f"user {user}: {line}", access, topic, user)
        elif access == "deny":
            # A rule can name all users of the file, but not all others, so every name is denied.
            _add(draft, line, access, re.sub(r"%[uc][^/]*", "*", topic), _ANYBODY)
        elif "%c" in topic:
            draft.comment(line, "not converted: clients have no ID that they choose; the kernel vouches for the user")
        elif "%u" in topic:
            for each in users:
                _add(draft, f"{line} (user {each})", access, topic.replace("%u", each), each)
            draft.comment(line, "converted for the users of this file alone: add a rule for each other user")
        else:
            _add(draft, line, access, topic, _ANYBODY)
    return str(draft)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def _access(rest: str) -> tuple[str, str]:
    """Return the access and the topic, which may have spaces."""
    word, _, topic = rest.partition(" ")
    return (word, topic.strip()) if word in _ACCESS and topic.strip() else ("readwrite", rest)


def _add(draft: Draft, source: str, access: str, topic: str, user: str) -> None:
    patterns, why = _patterns(topic, access == "deny")
    if patterns:
        users = [] if user == _ANYBODY else [user]
        draft.rule(source, why, users=users, **dict.fromkeys(_FIELDS[access], patterns))
    else:
        draft.comment(source, why)


def _patterns(topic: str, is_deny: bool) -> tuple[list[str], str]:
    """Return the patterns of a topic filter, and the remarks about them."""
    why = ""
    levels = topic.split("/")
    is_below = levels[-1] == "#"
    if is_below:
        levels.pop()
    if any("#" in level or ("+" in level and level != "+") for level in levels):
        return [], "not converted: '#' stands only at the end, and '+' alone; mosquitto refuses it, too"
    if not is_deny and any("*" in level for level in levels):
        return [], "not converted: '*' is a wildcard here, so the rule would allow more"
    if not is_deny and not is_below and levels[-1] == "":
        return [], "not converted: a '/' at the end matches all keys below here, so the rule would allow more"
    if is_deny and (any("*" in level for level in levels) or (not is_below and levels[-1] == "")):
        why = "it denies more than before: '*', and '/' at the end, match more here"
    base = "/".join("*" if level == "+" or (is_deny and "*" in level) else level for level in levels)
    if levels[:1] in ([], ["+"]):
        why = "it also matches names that begin with '$', which mosquitto's wildcards do not"
    found = [base]
    if is_below:
        # 'a/#' matches 'a', too. A pattern that ends with '/', or is empty, would match more than that name.
        found = [f"{base}/", *([base] if base and (is_deny or levels[-1]) else [])] if levels else [""]
    if not all(map(is_possible, found)):
        return [], "not converted: no open key has this name"
    return found, why
