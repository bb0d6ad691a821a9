"""The pattern trie: the subscribers of a key, among many patterns.

Theory of operation
-------------------

Patterns are split at the separator and kept in a trie. Within a segment, only its end may follow a ``*``, so each step
of a pattern is a *literal* or a *prefix*. A node finds both with dictionary look-ups: one for the literal, and one for
each distinct length of its prefixes.

A look-up costs by the number of nodes that the key reaches, whatever the number of patterns and subscribers. Wildcards
after wildcards multiply: the 16,384 patterns of ``a`` and ``*`` in 14 segments make 16,384 nodes, and one key reaches
them all. `sbus.routing.cost` bounds that for each user.

==========================  ==========================================================================================
pattern                     where it stands
==========================  ==========================================================================================
``a/b``, ``a*``, ``a/``     in the open trie
a secret one                in the secret trie, in which only secret keys are looked up: one entry under its ``<rest>``,
                            with the IDs of its subscriber and those that the pattern names. The leaf compares them.
the empty one, ``a/*b``     beside the tries: the first matches every key, the second none
==========================  ==========================================================================================

Invariants:

* The result equals `sbus.protocol.keys.matches` applied to every pattern.
* A route has each subscriber once, however many of its patterns match.
* A node counts subscriptions, since two patterns of one client may end at one node (``a*`` and ``a**``).
* A node exists while it, or a node below it, has a subscriber. `PatternIndex.unsubscribe` takes time by the pattern's
  depth: a node counts its prefixes by length, so that removing one does not visit its neighbours.
* No mistake in matching wildcards can show a secret message to an open pattern, which is not in the secret trie.

Rejected: one trie for each combination of IDs. A secret pattern was in up to eight of them and cost 27 kB, so 16,384
patterns took 437 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials, SecretKey
from sbus.speedups import choose

__all__ = ["PatternIndex", "split_pattern"]

K = TypeVar("K")
S = TypeVar("S")

Ids = tuple[bytes, bytes, bytes]


def split_pattern(pattern: bytes, separator: bytes) -> list[tuple[bytes, bool]] | None:
    """Split a pattern that is not empty into its segments.

    :returns: a list of (literal or prefix, whether it is a prefix); the empty segment after a trailing separator is
        left out. None if the pattern can match nothing.
    """
    steps = []
    for part in pattern.split(separator):
        literal, star, rest = part.partition(b"*")
        if rest.strip(b"*"):
            return None
        steps.append((literal, bool(star)))
    if pattern.endswith(separator):
        steps.pop()
    return steps


class _Node:
    """A place in the trie: its children, and the tables of subscribers here (``a/b``) and below (``a/b/``).

    :ivar lengths: the lengths of `prefixes`, ascending; `same_length` counts the prefixes of each length.
    """

    __slots__ = ("below", "here", "lengths", "literals", "prefixes", "same_length")

    def __init__(self) -> None:
        self.literals: dict[bytes, _Node] | None = None
        self.prefixes: dict[bytes, _Node] | None = None
        self.lengths: tuple[int, ...] = ()
        self.same_length: dict[int, int] | None = None
        self.here: dict[Any, Any] | None = None
        self.below: dict[Any, Any] | None = None

    def is_empty(self) -> bool:
        return not (self.literals or self.prefixes or self.here or self.below)


def _collect(root: _Node, key: bytes, separator: bytes, tables: list[dict[Any, Any]]) -> int:
    """Append to `tables` each table that the key reaches.

    :returns: the steps taken: nodes reached and prefixes probed.
    """
    steps, start, nodes = 1, 0, [root]
    while True:
        end = key.find(separator, start)
        segment = key[start:] if end < 0 else key[start:end]
        slices: dict[int, bytes] = {}  # a long prefix is cut and hashed once for all nodes
        following = []
        for node in nodes:
            if node.literals is not None and (child := node.literals.get(segment)):
                following.append(child)
            if node.prefixes is not None:
                for length in node.lengths:
                    if length > len(segment):
                        break
                    steps += 1
                    prefix = slices.get(length)
                    if prefix is None:
                        prefix = slices[length] = segment[:length]
                    if child := node.prefixes.get(prefix):
                        following.append(child)
        steps += len(following)
        if not following:
            return steps
        if end < 0:
            tables += [node.here for node in following if node.here]
            return steps
        tables += [node.below for node in following if node.below]
        nodes = following
        start = end + 1


def _collect_readers(
    table: dict[Ids, dict[tuple[Any, int], int]], gid: bytes, uid: bytes, pid: bytes, found: dict[Any, Any]
) -> int:
    """Add to `found` the subscribers of one table that may read a secret key with these IDs, some of them empty.

    An ID of the key is the subscriber's own, or it is empty in both the key and the pattern.

    :returns: the steps taken: the entries looked at.
    """
    empty = (not gid) + 2 * (not uid) + 4 * (not pid)
    steps = 0
    for ids, holders in table.items():
        steps += 1
        if (not gid or ids[0] == gid) and (not uid or ids[1] == uid) and (not pid or ids[2] == pid):
            steps += len(holders)
            for subscriber, spelled in holders:
                if not spelled & empty:
                    found[subscriber] = 1
    return steps


if TYPE_CHECKING:
    Node, collect, collect_readers = _Node, _collect, _collect_readers
else:
    Node, collect, collect_readers = choose(
        "sbus.routing._trie", Node=_Node, collect=_collect, collect_readers=_collect_readers
    )


class _Trie:
    """Patterns without regard to reserved keys (rules 1 to 4 of matching), each with a table of subscribers.

    :ivar everything: the table of the empty pattern.
    :ivar nothing: the table of the patterns that can match nothing.
    """

    __slots__ = ("_root", "_separator", "everything", "nothing")

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._root: _Node = Node()
        self.everything: dict[Any, Any] = {}
        self.nothing: dict[Any, Any] = {}

    def is_empty(self) -> bool:
        return not self.everything and not self.nothing and self._root.is_empty()

    def add(self, pattern: bytes) -> dict[Any, Any]:
        """Return the table of a pattern, made if it is not there; the caller puts a subscriber into it."""
        if not pattern:
            return self.everything
        steps = split_pattern(pattern, self._separator)
        if steps is None:
            return self.nothing
        node = self._root
        for text, prefix in steps:
            if prefix:
                if node.prefixes is None or node.same_length is None:
                    node.prefixes, node.same_length = {}, {}
                child = node.prefixes.get(text)
                if child is None:
                    child = node.prefixes[text] = Node()
                    if len(text) not in node.same_length:
                        node.lengths = tuple(sorted((*node.lengths, len(text))))
                    node.same_length[len(text)] = node.same_length.get(len(text), 0) + 1
            else:
                if node.literals is None:
                    node.literals = {}
                child = node.literals.get(text)
                if child is None:
                    child = node.literals[text] = Node()
            node = child
        if pattern.endswith(self._separator):
            if node.below is None:
                node.below = {}
            return node.below
        if node.here is None:
            node.here = {}
        return node.here

    def way(self, pattern: bytes) -> tuple[dict[Any, Any], list[tuple[_Node, bytes, bool]]]:
        """Find the table of a pattern, for taking a subscriber out of it, and the way to it, for `prune`.

        :raises KeyError: if the pattern is not there.
        """
        way: list[tuple[_Node, bytes, bool]] = []
        if not pattern:
            return self.everything, way
        steps = split_pattern(pattern, self._separator)
        if steps is None:
            return self.nothing, way
        node = self._root
        for text, prefix in steps:
            children = node.prefixes if prefix else node.literals
            if children is None:
                raise KeyError(pattern)
            way.append((node, text, prefix))
            node = children[text]
        table = node.below if pattern.endswith(self._separator) else node.here
        if table is None:
            raise KeyError(pattern)
        return table, way

    @staticmethod
    def prune(way: list[tuple[_Node, bytes, bool]]) -> None:
        """Remove the nodes at the end of a way that no longer hold anything."""
        for parent, text, prefix in reversed(way):
            children = parent.prefixes if prefix else parent.literals
            assert children is not None
            if not children[text].is_empty():
                return
            del children[text]
            if prefix:
                assert parent.same_length is not None
                _discount(parent.same_length, len(text))
                if len(text) not in parent.same_length:
                    parent.lengths = tuple(length for length in parent.lengths if length != len(text))

    def tables(self, key: bytes) -> tuple[list[dict[Any, Any]], int]:
        """Return every table whose pattern matches the key, and the steps it took to find them."""
        tables = [self.everything] if self.everything else []
        return tables, collect(self._root, key, self._separator, tables)

    def walk(self, key: bytes) -> Iterator[tuple[bytes, dict[Any, Any]] | None]:
        """Yield each pattern that matches the key, with its table, and None after each node: for slices.

        Patterns that differ only in the number of their last ``*`` are one. Changes between two slices may be missing.
        """
        if self.everything:
            yield b"", self.everything
        segments = key.split(self._separator)
        reached: list[tuple[_Node, list[bytes]]] = [(self._root, [])]
        for depth, segment in enumerate(segments, 1):
            following: list[tuple[_Node, list[bytes]]] = []
            for node, way in reached:
                if node.literals is not None and (child := node.literals.get(segment)):
                    following.append((child, [*way, segment]))
                if node.prefixes is not None:
                    for length in node.lengths:
                        if length <= len(segment) and (child := node.prefixes.get(segment[:length])):
                            following.append((child, [*way, segment[:length] + b"*"]))
                yield None
            for node, way in following:
                pattern = self._separator.join(way)
                if depth < len(segments) and node.below:
                    yield pattern + self._separator, node.below
                elif depth == len(segments) and node.here:
                    yield pattern, node.here
            reached = following


def _discount(counts: dict[K, int], key: K) -> None:
    count = counts[key] - 1
    if count:
        counts[key] = count
    else:
        del counts[key]


class PatternIndex(Generic[S]):
    """The patterns of all subscribers. A subscriber is any hashable object.

    Patterns and keys must have passed `Dialect.check`. The index does not check credentials; a policy does, before a
    pattern gets here.
    """

    def __init__(self, dialect: Dialect = CURRENT) -> None:
        self._open = _Trie(dialect.separator)
        self._secret = _Trie(dialect.separator)

    def subscribe(self, subscriber: S, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        """Add a subscription.

        :param secret: the result of `Dialect.check` for the pattern.
        :param peer: the subscriber's credentials.
        """
        if not secret:
            table = self._open.add(pattern)
            table[subscriber] = table.get(subscriber, 0) + 1
            return
        holders = self._secret.add(secret.rest).setdefault(_ids(peer), {})
        holder = (subscriber, _spelled(secret))
        holders[holder] = holders.get(holder, 0) + 1

    def unsubscribe(self, subscriber: S, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        """Undo one `subscribe` with the same arguments.

        :raises KeyError: if there is no such subscription.
        """
        if not secret:
            table, way = self._open.way(pattern)
            _discount(table, subscriber)
            if not table:
                self._open.prune(way)
            return
        table, way = self._secret.way(secret.rest)
        holders = table[_ids(peer)]
        _discount(holders, (subscriber, _spelled(secret)))
        if not holders:
            del table[_ids(peer)]
            if not table:
                self._secret.prune(way)

    def route(self, key: bytes, secret: SecretKey | None) -> tuple[S, ...]:
        """Return the subscribers of a key, each once.

        :param secret: the result of `Dialect.check` for the key.
        """
        return self.look_up(key, secret)[0]

    def look_up(self, key: bytes, secret: SecretKey | None) -> tuple[tuple[S, ...], int]:
        """Return the subscribers of a key, as `route` does, and the steps that finding them took."""
        found: dict[S, Any] = {}
        if not secret:
            tables, steps = self._open.tables(key)
            for table in tables:
                found.update(table)
                steps += len(table)
            return tuple(found), steps
        tables, steps = self._secret.tables(secret.rest)
        for table in tables:
            if all(secret[:3]):
                holders = table.get(secret[:3], {})
                found.update((subscriber, 1) for subscriber, _ in holders)
                steps += len(holders)
            else:
                steps += collect_readers(table, secret.gid, secret.uid, secret.pid, found)
        return tuple(found), steps

    def open_tables(self, key: bytes) -> tuple[list[dict[S, Any]], int]:
        """Return one table of subscribers for each pattern that matches an open key, and the steps to find them."""
        return self._open.tables(key)

    def walk_open(self, key: bytes) -> Iterator[tuple[bytes, dict[S, Any]] | None]:
        """Yield each open pattern whose text matches a key, with its subscribers, and None after each node."""
        return self._open.walk(key)

    def secret_holders(self, secret: SecretKey) -> list[dict[Ids, dict[tuple[S, int], int]]]:
        """Return the holders of secret patterns whose ``<rest>`` matches that of a key, by their IDs."""
        return self._secret.tables(secret.rest)[0]

    def open_subscribers(self, pattern: bytes) -> dict[S, Any]:
        """Return the subscribers of an open pattern.

        :raises KeyError: if there are none.
        """
        return self._open.way(pattern)[0]

    def is_empty(self) -> bool:
        """Return whether there is no subscription at all."""
        return self._open.is_empty() and self._secret.is_empty()


def _ids(peer: PeerCredentials) -> Ids:
    return b"%d" % peer.gid, b"%d" % peer.uid, b"%d" % peer.pid


def _spelled(secret: SecretKey) -> int:
    """Which IDs a secret pattern spells out, as bits; such an ID matches no empty field of a key."""
    return (secret.gid != b"") + 2 * (secret.uid != b"") + 4 * (secret.pid != b"")
