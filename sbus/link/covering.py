"""A set of patterns that finds those that cover a pattern, and those that it covers.

It is a trie over the segments of `sbus.protocol.patterns.Shape`. To find a cover, a walk follows at each node the
branches whose segment takes the pattern's; to find the covered ones, the branches that the pattern's segment takes.
Wildcards can make the first walk long, so it gives up after `STEPS` nodes: an answer "not covered" may be wrong, and
costs its caller one subscription that was not necessary. Any client can subscribe to patterns that make all walks long,
at a bus that its link may share a thread with.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from sbus.protocol.patterns import Shape

__all__ = ["STEPS", "CoverIndex"]

STEPS = 256
"""Nodes that one search for a cover visits at most: about 0.1 ms."""


_NO_STARS: dict[int, int] = {}
"""The value of almost all nodes, shared because one user can have 300,000 of them."""


class _Node:
    """A node of the trie: the patterns that end here, and the branches.

    :ivar stars: the lengths of the literals before ``*`` among the branches, with their number.
    """

    __slots__ = ("below", "children", "exact", "stars")

    def __init__(self) -> None:
        self.exact: Shape | None = None
        self.below: Shape | None = None
        self.children: dict[bytes, _Node] = {}
        self.stars = _NO_STARS


class CoverIndex:
    """A set of shapes."""

    def __init__(self) -> None:
        self._root = _Node()
        self._shapes: set[Shape] = set()

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._shapes)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._shapes

    def add(self, shape: Shape) -> None:
        """Add a shape, if it is not there."""
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        node = self._root
        for part in shape.parts:
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node()
                if part.endswith(b"*"):
                    length = len(part) - 1
                    if node.stars is _NO_STARS:
                        node.stars = {}
                    node.stars[length] = node.stars.get(length, 0) + 1
            node = child
        if shape.is_below:
            node.below = shape
        else:
            node.exact = shape

    def discard(self, shape: Shape) -> None:
        """Remove a shape, if it is there."""
        if shape not in self._shapes:
            return
        self._shapes.discard(shape)
        node = self._root
        path = []
        for part in shape.parts:
            path.append((node, part))
            node = node.children[part]
        if shape.is_below:
            node.below = None
        else:
            node.exact = None
        for parent, part in reversed(path):
            child = parent.children[part]
            if child.children or child.exact or child.below:
                return
            del parent.children[part]
            if part.endswith(b"*"):
                length = len(part) - 1
                parent.stars[length] -= 1
                if not parent.stars[length]:
                    del parent.stars[length]

    def cover_of(self, shape: Shape, besides: Container[Shape] = ()) -> Shape | None:
        """Return another shape of the set that covers this one, or None.

        :param besides: shapes that are not considered.
        """
        parts, is_below = shape
        stack = [(self._root, 0)]
        steps = STEPS
        while stack and steps:
            steps -= 1
            node, at = stack.pop()
            found = node.below if at < len(parts) or is_below else None
            if found is None or found == shape or found in besides:
                found = node.exact if at == len(parts) and not is_below else None
            if found is not None and found != shape and found not in besides:
                return found
            if at == len(parts):
                continue
            part = parts[at]
            same = node.children.get(part)
            if same is not None:
                stack.append((same, at + 1))
            literal = part.removesuffix(b"*")
            for length in node.stars:
                if length < len(literal) or (length == len(literal) and len(literal) == len(part)):
                    wider = node.children.get(literal[:length] + b"*")
                    if wider is not None:
                        stack.append((wider, at + 1))
        return None

    def covered_by(self, shape: Shape) -> Iterator[Shape]:
        """Return the other shapes of the set that this one covers. The set must not change meanwhile."""
        parts, is_below = shape
        stack = [(self._root, 0)]
        while stack:
            node, at = stack.pop()
            if at < len(parts):
                part = parts[at]
                if part.endswith(b"*"):
                    literal = part[:-1]
                    stack += [(child, at + 1) for name, child in node.children.items() if name.startswith(literal)]
                elif part in node.children:
                    stack.append((node.children[part], at + 1))
                continue
            if is_below:
                if node.below is not None and node.below != shape:
                    yield node.below
                if at > len(parts) and node.exact is not None:
                    yield node.exact
                stack += [(child, at + 1) for child in node.children.values()]
            elif node.exact is not None and node.exact != shape:
                yield node.exact
