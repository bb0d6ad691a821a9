"""Publishers: the messages of each user, and their prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from sbus.lake.cube import UNKNOWN
from sbus.report.figures import Publisher

__all__ = ["MAX_PREFIXES", "publishers_of"]

MAX_PREFIXES = 3
"""The maximal number of prefixes for each user."""


def publishers_of(
    users: Iterable[tuple[int, int, int, int]], prefixes: Iterable[tuple[int, str, int]], top: int
) -> tuple[list[Publisher], int]:
    """Arrange the counts; return nothing if no publisher is known.

    :param users: the publisher, and its messages, bytes and keys.
    :param prefixes: the publisher, a prefix and its messages, the busiest first.
    """
    named: dict[int, list[tuple[str, int]]] = {}
    for uid, text, n in prefixes:
        named.setdefault(uid, []).append((text, n))
    found = [Publisher(uid, n, size, keys, named[uid]) for uid, n, size, keys in users]
    if all(each.uid == UNKNOWN for each in found):
        return [], 0
    found.sort(key=lambda each: (-each.messages, each.uid))
    return found[:top], len(found)
