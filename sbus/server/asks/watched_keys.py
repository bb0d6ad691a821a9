"""Watched keys of one user, as a tree of segments, and the walks that find those that a pattern matches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from sbus.routing.trie import split_pattern
from sbus.server.core.interfaces import Client
from sbus.server.core.users import User

__all__ = ["MAX_WALKS", "Walk", "Watch", "WatchedKeys"]

MAX_WALKS = 64
"""Walks that may wait for one user before one walk over all watched keys replaces them."""
_SEGMENTS = 256
"""Segments below one node that a walk looks at in one step."""


class Watch:
    """A key that a client watches.

    :ivar cost: the bytes that the key counts toward the limits on patterns.
    :ivar value: the latest answer, 0 or 1, sent or about to be sent.
    :ivar is_open: whether the answer depends on subscriptions; else it is always 1.
    :ivar is_over: whether the client has stopped watching.
    :ivar sent: the answer that was sent last.
    """

    __slots__ = ("client", "cost", "is_open", "is_over", "key", "sent", "value")

    def __init__(self, client: Client, key: bytes, cost: int, is_open: bool) -> None:
        self.client = client
        self.key = key
        self.cost = cost
        self.is_open = is_open
        self.is_over = False
        self.value = 1
        self.sent = -1


class _Node:
    """A segment of watched keys: the segments below it, and the watches of the key that ends here."""

    __slots__ = ("children", "watches")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.watches: dict[Watch, None] = {}


def _walk(root: _Node, pattern: bytes, separator: bytes) -> Iterator[Watch | int]:
    """Yield the watches whose key the pattern matches, and between them the steps that finding them takes.

    The tree may change while the walk is suspended. The walk may then find watches that are over, and miss new ones.
    """
    segments = split_pattern(pattern, separator) if pattern else []
    if segments is None:
        return
    end, below = len(segments), not pattern or pattern.endswith(separator)
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        text, is_prefix = segments[depth] if depth < end else (b"", below)
        if depth >= end and (depth > end or not below):
            yield from tuple(node.watches)
        if not is_prefix:
            if depth < end and (child := node.children.get(text)):
                stack.append((child, depth + 1))
            yield 1
            continue
        names = list(node.children)
        for at in range(0, len(names) + 1, _SEGMENTS):
            some = names[at : at + _SEGMENTS]
            found = [node.children.get(name) for name in some if name.startswith(text)]
            stack += [(child, depth + 1) for child in found if child is not None]
            yield 1 + len(some)


class Walk:
    """A walk that has begun or waits.

    :ivar steps: what `_walk` yields.
    :ivar concerns: the answer of the watches that the change can concern; None for both.
    """

    __slots__ = ("concerns", "steps")

    def __init__(self, steps: Iterator[Watch | int], concerns: int | None) -> None:
        self.steps = steps
        self.concerns = concerns


class WatchedKeys:
    """The watches of one user's clients, and the walks that wait for them.

    :param walk: continues the walks until the clock shows a time; returns whether all are done.
    :ivar count: the number of watches.
    :ivar zeros: the number of those whose answer is 0.
    :ivar walks: the walks that wait, the oldest first.
    """

    __slots__ = ("_is_full", "_is_stale", "_root", "_separator", "_walk", "count", "user", "walks", "zeros")

    def __init__(self, user: User, separator: bytes, walk: Callable[[WatchedKeys, int], bool]) -> None:
        self.user = user
        self.count = 0
        self.zeros = 0
        self.walks: deque[Walk] = deque()
        self._separator = separator
        self._walk = walk
        self._root = _Node()
        self._is_full = False
        self._is_stale = False

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        return self._walk(self, until)

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"user": self.user.uid, "walks": len(self.walks)}

    def add(self, watch: Watch) -> None:
        """Add a watch, whose answer is known."""
        node = self._root
        for segment in watch.key.split(self._separator):
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = _Node()
            node = child
        node.watches[watch] = None
        self.count += 1
        self.zeros += not watch.value

    def remove(self, watch: Watch) -> None:
        """Remove a watch; walks that have begun may still find it."""
        node, way = self._root, []
        for segment in watch.key.split(self._separator):
            way.append((node, segment))
            node = node.children[segment]
        del node.watches[watch]
        self.count -= 1
        self.zeros -= not watch.value
        for parent, segment in reversed(way):
            child = parent.children[segment]
            if child.children or child.watches:
                break
            del parent.children[segment]

    def answer(self, watch: Watch, value: int) -> None:
        """Change the answer of a watch."""
        if value != watch.value:
            self.zeros += 1 if watch.value else -1
            watch.value = value

    def enqueue(self, pattern: bytes, concerns: int | None) -> bool:
        """Add a walk, or make sure that a walk over everything begins after this.

        :param pattern: the changed pattern; the empty one for a walk over everything.
        :param concerns: see `Walk`.
        :returns: False if there is no watch with such an answer.
        """
        if concerns is not None and (self.zeros if concerns == 0 else self.count - self.zeros) == 0:
            return False
        if self._is_full:
            self._is_stale = True
        elif len(self.walks) < MAX_WALKS:
            self.walks.append(Walk(_walk(self._root, pattern, self._separator), concerns))
        else:
            self.walks.clear()
            self._is_full = True
            self.walks.append(Walk(_walk(self._root, b"", self._separator), None))
        return True

    def finish(self) -> None:
        """Remove the first walk, which has ended.

        If it was one over everything, and something has changed since it began, it begins again.
        """
        self.walks.popleft()
        if self._is_full:
            self._is_full, self._is_stale = self._is_stale, False
            if self._is_full:
                self.walks.append(Walk(_walk(self._root, b"", self._separator), None))
