"""A set of patterns that finds those that cover a pattern, and those that share a key with it.

Theory of operation
-------------------

It is a trie over the segments of `sbus.protocol.patterns.Shape`. A segment of the pattern leads to few branches: the
literal, and one prefix of each length. Only a ``*`` can lead to many, all that begin like it, which are neighbours in a
sorted list. If each were visited, a client could choose patterns such as ``*/*/x`` that take time by the size of the
set. So the set *merges* neighbours, the first time that a pattern leads to them, into one node with the branches of all
of them. A walk then takes time by the length of the pattern, and by the number of different lengths of prefixes.

========  ============================================================================================================
walk      follows
========  ============================================================================================================
covering  the branches whose segment takes all that the pattern's takes
sharing   these, and all that the pattern's segment takes, merged
========  ============================================================================================================

Invariants:

* Both walks are exact; a property test compares them with a comparison of all pairs.
* Merged nodes are forgotten when they have more branches than `_MERGED` times the nodes of the trie, so their memory is
  bounded whatever clients ask for; what is needed again is merged again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import Generic, TypeVar

from sbus.protocol.patterns import Shape

__all__ = ["ShapeIndex"]

V = TypeVar("V")

_MERGED = 8
"""If 1,000 patterns differ in one number, and every prefix of it is asked for, 4.5 suffices; for 10,000 of them, 6."""


class _Node(Generic[V]):
    """A place in the trie, or several that were merged.

    :ivar children: the branches, by their segment: a literal, or a prefix with its ``*``.
    :ivar lengths: the lengths of the prefixes among the branches.
    :ivar names: the sorted segments of the branches; None if they have not been sorted.
    :ivar merged: the places that this node stands for; empty for a place. It has no branches before it is opened.
    """

    __slots__ = ("below", "children", "here", "is_open", "lengths", "merged", "names")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[V]] = {}
        self.lengths: set[int] = set()
        self.names: list[bytes] | None = None
        self.here: list[V] = []
        self.below: list[V] = []
        self.merged: tuple[_Node[V], ...] = ()
        self.is_open = True

    def wider(self, part: bytes) -> Iterator[_Node[V]]:
        """Yield the branches whose segment takes all that this one takes."""
        literal = part.removesuffix(b"*")
        if literal == part and part in self.children:
            yield self.children[part]
        for length in self.lengths:
            if length <= len(literal) and (child := self.children.get(literal[:length] + b"*")):
                yield child


def _merge(nodes: list[_Node[V]]) -> _Node[V]:
    """Return a node that stands for all of these."""
    if len(nodes) == 1:
        return nodes[0]
    found: _Node[V] = _Node()
    found.merged = tuple(place for node in nodes for place in (node.merged or (node,)))
    found.is_open = False
    for place in found.merged:
        found.here += place.here
        found.below += place.below
        found.lengths |= place.lengths
    return found


class ShapeIndex(Generic[V]):
    """A multimap from shapes to values."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()
        self._nodes = 1
        self._merged: dict[tuple[_Node[V], int, int], _Node[V]] = {}
        self._branches = 0

    def add(self, shape: Shape, value: V) -> None:
        """Add a value to those of a shape."""
        self._forget()
        node = self._root
        for part in shape.parts:
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
                node.names = None
                self._nodes += 1
                if part.endswith(b"*"):
                    node.lengths.add(len(part) - 1)
            node = child
        (node.below if shape.is_below else node.here).append(value)

    def covering(self, shape: Shape) -> Iterator[V]:
        """Yield the values of the shapes that cover this one."""
        parts, is_below = shape
        stack: list[Iterator[_Node[V]]] = [iter((self._root,))]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
            elif len(stack) <= len(parts):
                yield from node.below
                stack.append(node.wider(parts[len(stack) - 1]))
            else:
                yield from node.below if is_below else node.here

    def sharing(self, shape: Shape) -> Iterator[V]:
        """Yield the values of the shapes that match a key that this one matches."""
        parts, is_below = shape
        stack: list[Iterator[_Node[V]]] = [iter((self._root,))]
        while stack:
            node = next(stack[-1], None)
            depth = len(stack) - 1
            if node is None:
                stack.pop()
                continue
            self._open(node)
            if depth < len(parts):
                yield from node.below
                stack.append(self._sharing(node, parts[depth]))
            elif is_below:
                yield from node.below
                if depth > len(parts):
                    yield from node.here
                stack.append(iter(node.children.values()))
            else:
                yield from node.here

    def _sharing(self, node: _Node[V], part: bytes) -> Iterator[_Node[V]]:
        """Yield the branches of a node that share a segment with this one: those that it takes as one."""
        if not part.endswith(b"*"):
            yield from node.wider(part)
            return
        literal = part[:-1]
        for length in node.lengths:
            if length < len(literal) and (child := node.children.get(literal[:length] + b"*")):
                yield child
        names = node.names
        if names is None:
            names = node.names = sorted(node.children)
        low = bisect_left(names, literal)
        high = bisect_right(names, literal, low, key=lambda name: name[: len(literal)])
        if low == high:
            return
        found = self._merged.get((node, low, high))
        if found is None:
            found = self._merged[node, low, high] = _merge([node.children[name] for name in names[low:high]])
        yield found

    def _open(self, node: _Node[V]) -> None:
        """Give a merged node its branches."""
        if node.is_open:
            return
        branches: defaultdict[bytes, list[_Node[V]]] = defaultdict(list)
        for place in node.merged:
            for name, child in place.children.items():
                branches[name].append(child)
        node.children = {name: _merge(nodes) for name, nodes in branches.items()}
        node.is_open = True
        self._branches += len(node.merged) + sum(len(child.merged) + 1 for child in node.children.values())
        if self._branches > _MERGED * self._nodes:
            self._forget()

    def _forget(self) -> None:
        self._merged.clear()
        self._branches = 0
