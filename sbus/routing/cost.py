"""The cost of a set of patterns for one look-up, kept up to date as patterns come and go.

A look-up visits every node of the trie that matches its key so far. Literal segments lead to one node; a wildcard
leads to one more, and wildcards after wildcards multiply (`sbus.routing.trie`). `MatchCost` computes, for the patterns
of one user, the largest number of steps that any key can make a look-up take. The server refuses a subscription that
would raise it above a limit, so that the cost of a look-up is bounded by the number of users, whatever their patterns
are.

The bound. Let f(node) be the largest number of steps below a node, over all keys. One segment of a key matches at most
one literal child, and at most one prefix child of each length; the look-up probes each length once. So::

    f(node) = 1 + max(f of literal children) + sum over lengths (weight(length) + max(f of the prefixes that long))

It is exact for a node's literals, and an upper bound for prefixes: the longest prefixes of two lengths need not match
the same segment. ``weight`` is 1, and 1 more for each 256 bytes, which must be cut out of the key and hashed.

Patterns without wildcards cost nothing here: together they lead to one node at each depth of the key. Adding or
removing a pattern costs its number of segments, times the number of different values of f at a node.
"""

from __future__ import annotations

from sbus.routing.trie import split_pattern

__all__ = ["MatchCost"]

_LITERAL = -1
"""The group of a node's literal children; a prefix is in the group of its length."""
_WEIGHT_BYTES = 256


class _Node:
    """A node of this user's patterns alone.

    :ivar children: (is it a prefix, text) → node.
    :ivar costs: group → {f: how many children of the group have it}.
    :ivar cost: f of this node.
    :ivar counted: the cost that the parent has counted for this node; 0 before it has.
    :ivar ends: patterns that end here, counted.
    """

    __slots__ = ("children", "cost", "costs", "counted", "ends")

    def __init__(self) -> None:
        self.children: dict[tuple[bool, bytes], _Node] | None = None
        self.costs: dict[int, dict[int, int]] | None = None
        self.cost = 1
        self.counted = 0
        self.ends = 0

    def replace(self, group: int, old: int, new: int) -> None:
        """A child's cost has changed; 0 stands for no child."""
        if self.costs is None:
            self.costs = {}
        counts = self.costs.get(group)
        before = _share(group, counts)
        if counts is None:
            counts = self.costs[group] = {}
        if old:
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if new:
            counts[new] = counts.get(new, 0) + 1
        self.cost += _share(group, counts) - before
        if not counts:
            del self.costs[group]


def _share(group: int, counts: dict[int, int] | None) -> int:
    """The part of one group in the cost of its node."""
    if not counts:
        return 0
    return max(counts) + (0 if group == _LITERAL else 1 + group // _WEIGHT_BYTES)


class MatchCost:
    """The largest number of steps that one look-up takes among a set of patterns.

    :param separator: the byte between two segments.
    """

    __slots__ = ("_root", "_separator")

    def __init__(self, separator: bytes = b"/") -> None:
        self._root = _Node()
        self._separator = separator

    @property
    def steps(self) -> int:
        """The bound, in steps of `sbus.routing.trie.PatternIndex.look_up`; 0 without wildcards."""
        return self._root.cost - 1

    def add(self, pattern: bytes) -> None:
        """Add a pattern; the same pattern may be added several times."""
        self._change(pattern, 1)

    def remove(self, pattern: bytes) -> None:
        """Take back one `add`.

        :raises KeyError: if there was none.
        """
        self._change(pattern, -1)

    def _change(self, pattern: bytes, by: int) -> None:
        if b"*" not in pattern:
            return
        segments = split_pattern(pattern, self._separator)
        if segments is None:
            return  # it matches nothing
        node = self._root
        way = [node]
        for text, prefix in segments:
            if node.children is None:
                if by < 0:
                    raise KeyError(pattern)
                node.children = {}
            child = node.children.get((prefix, text))
            if child is None:
                if by < 0:
                    raise KeyError(pattern)
                child = node.children[prefix, text] = _Node()
            node = child
            way.append(node)
        if by < 0 and not node.ends:
            raise KeyError(pattern)
        node.ends += by
        self._update(way, segments)

    @staticmethod
    def _update(way: list[_Node], segments: list[tuple[bytes, bool]]) -> None:
        """Carry a change of the last node up to the root, and remove the nodes that nothing needs now."""
        for at in range(len(segments) - 1, -1, -1):
            parent, child, (text, prefix) = way[at], way[at + 1], segments[at]
            is_needed = child.ends or child.children
            cost = child.cost if is_needed else 0
            if cost == child.counted:
                return
            parent.replace(len(text) if prefix else _LITERAL, child.counted, cost)
            child.counted = cost
            if not is_needed:
                assert parent.children is not None
                del parent.children[prefix, text]
