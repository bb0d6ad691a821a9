"""A set of patterns that finds those that cover a pattern, and those that share a key with it.

It is a trie over the segments of `sbus.protocol.patterns.Shape`. To find covers, a walk follows at each node the
branches whose segment takes the pattern's: the literal, and one prefix of each length. To find what shares a key, it
also follows the branches that the pattern's segment takes, which are neighbours in a sorted list. So only a ``*`` in
the pattern makes a walk branch widely, and only as widely as the set does. Both walks are exact; a property test
compares them with a comparison of all pairs.

A pattern has a list of values, which belong to whoever added it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from sbus.protocol.patterns import Shape

__all__ = ["ShapeIndex"]

V = TypeVar("V")


class _Node(Generic[V]):
    """A place in the trie.

    :ivar children: the branches, by their segment: a literal, or a prefix with its ``*``.
    :ivar lengths: the lengths of the prefixes among the branches.
    :ivar names: the sorted segments of the branches; None if a branch came since they were sorted.
    """

    __slots__ = ("below", "children", "here", "lengths", "names")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[V]] = {}
        self.lengths: set[int] = set()
        self.names: list[bytes] | None = None
        self.here: list[V] = []
        self.below: list[V] = []

    def wider(self, part: bytes) -> Iterator[_Node[V]]:
        """Yield the branches whose segment takes all that this one takes."""
        literal = part.removesuffix(b"*")
        if literal == part and part in self.children:
            yield self.children[part]
        for length in self.lengths:
            if length <= len(literal) and (child := self.children.get(literal[:length] + b"*")):
                yield child

    def narrower(self, part: bytes) -> Iterator[_Node[V]]:
        """Yield the branches whose segment this one, which ends with ``*``, takes, and which it is not."""
        literal = part[:-1]
        if self.names is None:
            self.names = sorted(self.children)
        for at in range(bisect_left(self.names, literal), len(self.names)):
            name = self.names[at]
            if not name.startswith(literal):
                return
            if name != part:
                yield self.children[name]


class ShapeIndex(Generic[V]):
    """A multimap from shapes to values."""

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()

    def add(self, shape: Shape, value: V) -> None:
        """Add a value to those of a shape."""
        node = self._root
        for part in shape.parts:
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
                node.names = None
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
            elif depth < len(parts):
                yield from node.below
                part = parts[depth]
                both = (node.wider(part), node.narrower(part)) if part.endswith(b"*") else (node.wider(part),)
                stack.append(chain.from_iterable(both))
            elif is_below:
                yield from node.below
                if depth > len(parts):
                    yield from node.here
                stack.append(iter(node.children.values()))
            else:
                yield from node.here
