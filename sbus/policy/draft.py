"""A policy that is written from the access rules of another bus: its rules, and the entries that were not converted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence

from sbus.errors import Violation
from sbus.policy.shapes import ShapeIndex
from sbus.protocol.explain import never_matches
from sbus.protocol.keys import CURRENT
from sbus.protocol.patterns import Shape, shape

__all__ = ["Draft", "is_possible", "share_a_key"]


def is_possible(pattern: str) -> bool:
    """Return whether a rule of a policy may have this pattern."""
    data = pattern.encode()
    if b"\0" in data or data.startswith(b"!/") or ("*" in pattern and never_matches(data, CURRENT) is not None):
        return False
    try:
        CURRENT.check(data)
    except Violation:
        return False
    return True


def share_a_key(some: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether a key matches a pattern of both."""
    index: ShapeIndex[None] = ShapeIndex()
    for each in _shapes(others):
        index.add(each, None)
    return any(True for each in _shapes(some) for _ in index.sharing(each))


def _shapes(patterns: Iterable[str]) -> list[Shape]:
    return [found for each in patterns if (found := shape(each.encode())) is not None]


class Draft:
    """A policy, closed by default, as text.

    :param paths: the files that are converted; the first one's name begins the names of the rules.
    :param heading: lines of comment for the top.
    """

    def __init__(self, paths: Sequence[str], heading: Iterable[str]) -> None:
        stem, _ = os.path.splitext(os.path.basename(paths[0]))
        self._stem = re.sub(r"[^A-Za-z0-9_.-]", "-", stem)[:50]
        self._rules = 0
        self._lines = [*(f"# Converted from {_one_line(path)}." for path in paths), *(f"# {line}" for line in heading)]
        self._lines += ["version = 1", 'default = "deny"']

    def comment(self, source: str, why: str) -> None:
        """Note an entry that was not converted, or changed."""
        self._lines += ["", f"# {_one_line(source)}", f"#   {why}"]

    def rule(self, source: str, why: str, **fields: Iterable[str]) -> None:
        """Add a rule.

        :param source: the entry in the other bus's rules.
        :param why: how it differs from that; empty: it does not.
        :param fields: the lists of the rule, by name; an empty one is left out.
        """
        self._rules += 1
        self._lines += ["", f"# {_one_line(source)}", *([f"#   {why}"] if why else [])]
        self._lines += ["[[rule]]", f'name = "{self._stem}-{self._rules}"']
        for field, values in fields.items():
            if words := list(dict.fromkeys(values)):
                self._lines.append(f"{field} = [{', '.join(map(_string, words))}]")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
