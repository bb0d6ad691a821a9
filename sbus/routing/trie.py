"""The pattern trie: the subscribers of a key, among many patterns.

Theory of operation
-------------------

Patterns are split at the separator and kept in a trie. Within a segment a ``*`` can only be followed by the segment's
end (the protocol has no backtracking, so anything else matches nothing). Each step of a pattern is therefore either a
*literal* or a *prefix*, and a node finds both with dictionary look-ups: one for the literal, and one for each distinct
length of its prefixes.

Looking up a key costs by the key's depth, and by the number of distinct beginnings of wildcard patterns that match its
own beginning. It does not depend on the number of patterns or subscribers. The worst case that one client can create
with its 16,384 patterns is 14 segments of ``a`` and ``*`` in all combinations: the first look-up of a key of 14
segments ``a`` then takes 25 ms, and the route cache answers from then on.

Invariants:

* The result equals `sbus.protocol.keys.matches` applied to every pattern; a property test compares the two.
* Each subscriber appears once in a route, however many of its patterns match.
* Subscriptions are counted per node, since two patterns of one client may end at one node (``a*`` and ``a**``).
* `unsubscribe` removes the nodes that it leaves empty, so memory follows the patterns that exist. It takes time by the
  pattern's depth; a node counts its prefixes by length, so that removing one does not visit its neighbours.
* Secret patterns live in tries of their own, one for each ``<gid>/<uid>/<pid>`` that they read from. The IDs in a key
  select the one trie to look in. An open pattern is in none of these, so no mistake in matching wildcards can show it
  a secret message.

Patterns that match every key (the empty one) or none (``a/*b``) are counted beside the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials, SecretKey

__all__ = ["PatternIndex"]

K = TypeVar("K")
S = TypeVar("S")


class _Node(Generic[S]):
    """A node of the trie.

    :ivar literals: the children for literal segments.
    :ivar prefixes: the children for segments that end with ``*``, by what stands before the ``*``.
    :ivar lengths: the distinct lengths of `prefixes`, ascending, in bytes.
    :ivar same_length: the number of prefixes of each length.
    :ivar here: the subscribers of patterns that end here (``a/b``), with the number of such patterns.
    :ivar below: the same for patterns that end with a separator (``a/b/``).
    """

    __slots__ = ("below", "here", "lengths", "literals", "prefixes", "same_length")

    def __init__(self) -> None:
        self.literals: dict[bytes, _Node[S]] | None = None
        self.prefixes: dict[bytes, _Node[S]] | None = None
        self.lengths: tuple[int, ...] = ()
        self.same_length: dict[int, int] | None = None
        self.here: dict[S, int] | None = None
        self.below: dict[S, int] | None = None

    def is_empty(self) -> bool:
        return not (self.literals or self.prefixes or self.here or self.below)


class _Trie(Generic[S]):
    """Patterns and their subscribers, by rules 1 to 4 of matching.

    What is reserved is not considered.
    """

    __slots__ = ("_everything", "_nothing", "_root", "_separator")

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._root: _Node[S] = _Node()
        self._everything: dict[S, int] = {}
        self._nothing: dict[S, int] = {}

    def is_empty(self) -> bool:
        return not self._everything and not self._nothing and self._root.is_empty()

    def _steps(self, pattern: bytes) -> Iterator[tuple[bytes, bool]] | None:
        """Return the pattern's segments as tuples (text, whether it is a prefix).

        The result is None if the pattern matches nothing.
        """
        steps = []
        for part in pattern.split(self._separator):
            literal, star, rest = part.partition(b"*")
            if rest.strip(b"*"):
                return None
            steps.append((literal, bool(star)))
        if not pattern.endswith(self._separator):
            return iter(steps)
        return iter(steps[:-1])

    def add(self, pattern: bytes, subscriber: S) -> None:
        if not pattern:
            self._everything[subscriber] = self._everything.get(subscriber, 0) + 1
            return
        steps = self._steps(pattern)
        if steps is None:
            self._nothing[subscriber] = self._nothing.get(subscriber, 0) + 1
            return
        node = self._root
        for text, prefix in steps:
            if prefix:
                if node.prefixes is None or node.same_length is None:
                    node.prefixes, node.same_length = {}, {}
                child = node.prefixes.get(text)
                if child is None:
                    child = node.prefixes[text] = _Node()
                    if len(text) not in node.same_length:
                        node.lengths = tuple(sorted((*node.lengths, len(text))))
                    node.same_length[len(text)] = node.same_length.get(len(text), 0) + 1
            else:
                if node.literals is None:
                    node.literals = {}
                child = node.literals.get(text)
                if child is None:
                    child = node.literals[text] = _Node()
            node = child
        if pattern.endswith(self._separator):
            if node.below is None:
                node.below = {}
            node.below[subscriber] = node.below.get(subscriber, 0) + 1
        else:
            if node.here is None:
                node.here = {}
            node.here[subscriber] = node.here.get(subscriber, 0) + 1

    def remove(self, pattern: bytes, subscriber: S) -> None:
        """Undo one `add`, and remove the nodes that it leaves empty."""
        if not pattern:
            _discount(self._everything, subscriber)
            return
        steps = self._steps(pattern)
        if steps is None:
            _discount(self._nothing, subscriber)
            return
        way: list[tuple[_Node[S], bytes, bool]] = []
        node = self._root
        for text, prefix in steps:
            children = node.prefixes if prefix else node.literals
            if children is None:
                raise KeyError(pattern)
            way.append((node, text, prefix))
            node = children[text]
        subscribers = node.below if pattern.endswith(self._separator) else node.here
        if subscribers is None:
            raise KeyError(pattern)
        _discount(subscribers, subscriber)
        for parent, text, prefix in reversed(way):
            if not node.is_empty():
                return
            if prefix:
                assert parent.prefixes is not None
                assert parent.same_length is not None
                del parent.prefixes[text]
                _discount(parent.same_length, len(text))
                if len(text) not in parent.same_length:
                    parent.lengths = tuple(sorted(parent.same_length))
            else:
                assert parent.literals is not None
                del parent.literals[text]
            node = parent

    def collect(self, key: bytes, found: dict[S, int]) -> None:
        """Add all subscribers of the key to `found`."""
        found.update(self._everything)
        find, width = key.find, len(self._separator)
        nodes = [self._root]
        start = 0
        while True:
            end = find(self._separator, start)
            segment = key[start:] if end < 0 else key[start:end]
            following = []
            for node in nodes:
                if node.literals is not None and (child := node.literals.get(segment)):
                    following.append(child)
                if node.prefixes is not None:
                    for length in node.lengths:
                        if length > len(segment):
                            break
                        if child := node.prefixes.get(segment[:length]):
                            following.append(child)
            if not following:
                return
            if end < 0:
                for node in following:
                    if node.here:
                        found.update(node.here)
                return
            for node in following:
                if node.below:
                    found.update(node.below)
            nodes = following
            start = end + width


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
        self._dialect = dialect
        self._open: _Trie[S] = _Trie(dialect.separator)
        self._secret: dict[bytes, _Trie[S]] = {}

    def subscribe(self, subscriber: S, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        """Add a subscription.

        :param secret: what `Dialect.check` returned for the pattern.
        :param peer: the credentials of the subscriber.
        """
        if not secret:
            self._open.add(pattern, subscriber)
            return
        for ids in secret.readers(peer):
            trie = self._secret.get(ids)
            if trie is None:
                trie = self._secret[ids] = _Trie(self._dialect.separator)
            trie.add(secret.rest, subscriber)

    def unsubscribe(self, subscriber: S, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        """Undo one `subscribe` with the same arguments.

        :raises KeyError: if there is no such subscription.
        """
        if not secret:
            self._open.remove(pattern, subscriber)
            return
        for ids in secret.readers(peer):
            trie = self._secret[ids]  # exists until its last subscription ends
            trie.remove(secret.rest, subscriber)
            if trie.is_empty():
                del self._secret[ids]

    def route(self, key: bytes, secret: SecretKey | None) -> tuple[S, ...]:
        """Return the subscribers of a key, each once.

        :param secret: what `Dialect.check` returned for the key.
        """
        found: dict[S, int] = {}
        if not secret:
            self._open.collect(key, found)
        elif trie := self._secret.get(secret.ids):
            trie.collect(secret.rest, found)
        return tuple(found)

    def is_empty(self) -> bool:
        """Return whether there is no subscription at all."""
        return self._open.is_empty() and not self._secret
