"""The route cache: keys that were looked up, with their receivers.

Theory of operation
-------------------

Nearly every message has a key that was seen before. The cache maps such a key to its route (`sbus.routing.route`), so
the common case costs one dictionary look-up instead of a walk through the trie.

Invariants:

* A cached route is what the trie would return now. Every change of a subscription passes through `affected` or
  `forget` before the next look-up.
* Equal routes are one object (`remember` shares them and counts their uses). That is what makes two keys with the
  same receivers recognisable as one run (`sbus.routing.runs`), by comparing pointers.
* The size is bounded three times: in keys (16,384), in receivers summed over all routes (2^20), and in bytes of memory.
  At any of these limits the cache is emptied; the keys in use are back after one look-up each, which costs no more than
  the look-ups that filled it. Keys of more than 1,024 bytes are never cached, so a bound on keys is a bound on memory.

Invalidation is the interesting part. A change of one subscription must forget the routes that it touches and few
others, and its cost must not depend on the number of routes that it leaves alone. Keys are therefore grouped by their
first two segments (a secret key by its IDs), and

* a pattern without wildcards, such as ``a/b/c``, forgets one key;
* a pattern such as ``a/b/*`` or ``a/b/`` forgets the group ``a``, ``b``;
* a pattern such as ``a/*``, ``a/*/c`` or ``a/`` forgets all groups below ``a``;
* the empty pattern, and a pattern with a wildcard in its first segment, forget everything;
* a secret pattern forgets the group of each set of IDs that it reads from.

To forget a group costs what filling it cost, once.

The server forgets only if a change touches many routes. Few of them are looked up again at once (`affected`,
`replace`), so that a user who subscribes and leaves all day, even to everything, keeps other users' routes in the cache
and pays for keeping them right. Wildcards in the first segment are compared with the first segments of the cached keys
for that, and ``*`` touches only keys of one segment. Where more routes change, each that is forgotten has a price,
which the user who subscribes pays (`sbus.server.bus.router`), and the new keys of a batch are looked up together.

Rejected: forgetting everything at each change. It would be correct, but one client that subscribes and leaves all day
would keep the cache cold for all others. With groups, 5,000 changes of subscriptions a second leave the routes of other
clients in place (``docs/performance.rst``, "Growth").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials, SecretKey
from sbus.routing.route import Route

__all__ = ["LONGEST_KEY", "RouteCache"]

S = TypeVar("S")

LONGEST_KEY = 1024
"""Size limit of a cached key, in bytes; longer keys are looked up each time."""

_FIRSTS = 4
"""First segments that are compared with a wildcard, for each key that may be affected."""


_ROUTE = 640
"""Bytes of memory that a route takes, beside its key and 8 for each receiver: table entries, a group of its own."""


class RouteCache(Generic[S]):
    """A bounded table from keys to routes.

    :ivar routes: the table itself, for hot loops to read; only this class writes it.
    :ivar overflown: the routes forgotten because the cache was full, since the counter was last set to 0.
    :param max_keys: the limit for keys.
    :param max_receivers: the limit for receivers, summed over all routes.
    :param max_bytes: the limit for memory, in bytes.
    """

    def __init__(
        self,
        dialect: Dialect = CURRENT,
        max_keys: int = 16_384,
        max_receivers: int = 1 << 20,
        max_bytes: int = 64 << 20,
    ) -> None:
        self.routes: dict[bytes, Route[S]] = {}
        self._dialect = dialect
        self._max_keys = max_keys
        self._max_receivers = max_receivers
        self._max_bytes = max_bytes
        self._receivers = 0
        self._key_bytes = 0
        self.overflown = 0
        self._groups: dict[bytes, dict[bytes, dict[bytes, None]]] = {}
        self._shared: dict[tuple[S, ...], Route[S]] = {}

    def remember(self, key: bytes, secret: SecretKey | None, receivers: tuple[S, ...]) -> Route[S]:
        """Keep a route.

        :returns: the route of these receivers: equal ones are one object.
        """
        if len(key) > LONGEST_KEY:
            return Route(receivers)
        if (
            len(self.routes) >= self._max_keys
            or self._receivers + len(receivers) > self._max_receivers
            or self.memory() + _ROUTE + len(key) + 8 * len(receivers) > self._max_bytes
        ):
            self.overflown += len(self.routes)
            self.clear()
        route = self._hold(key, receivers)
        if secret:
            first, second = b"!", secret.ids
        else:
            first, _, rest = key.partition(self._dialect.separator)
            second = rest.partition(self._dialect.separator)[0]
        self._groups.setdefault(first, {}).setdefault(second, {})[key] = None
        return route

    def memory(self) -> int:
        """Return an upper bound of the memory that the routes take, in bytes: equal routes are counted each."""
        return _ROUTE * len(self.routes) + self._key_bytes + 8 * self._receivers

    def affected(
        self, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials, limit: int
    ) -> list[bytes] | None:
        """Return the cached keys whose routes a new or ended subscription to this pattern may have changed.

        :returns: None if that are more than `limit` keys, or too many to find out.
        """
        keys: list[bytes] = []
        groups: Iterable[Iterable[bytes]]
        if secret:
            if _is_plain(secret.rest, self._dialect.separator):
                found = (b"!/cred/%b/%b" % (ids, secret.rest) for ids in secret.readers(peer))
                return [key for key in found if key in self.routes]
            seconds = self._groups.get(b"!", {})
            groups = (seconds.get(ids, ()) for ids in secret.readers(peer))
        elif _is_plain(pattern, self._dialect.separator):
            return [pattern] if pattern in self.routes else []
        elif len(self._groups) > _FIRSTS * limit:
            return None
        else:
            groups = self._groups_below(pattern)
        for group in groups:
            keys += islice(group, limit + 1)
            if len(keys) > limit:
                return None
        return keys

    def _groups_below(self, pattern: bytes) -> Iterator[Iterable[bytes]]:
        """Yield groups that contain all cached keys that a pattern with a wildcard matches, and some others."""
        first, separator, rest = pattern.partition(self._dialect.separator)
        second, further, _ = rest.partition(self._dialect.separator)
        prefix, star, _ = first.partition(b"*")
        if star or not pattern:
            firsts = [known for known in self._groups if known.startswith(prefix) and known != b"!"]
        else:
            firsts = [first] if first in self._groups else []
        for known in firsts:
            seconds = self._groups[known]
            if star and not separator:  # keys of one segment
                if known in seconds.get(b"", ()):
                    yield (known,)
            elif further and b"*" not in second:
                yield seconds.get(second, ())
            else:
                yield from seconds.values()

    def replace(self, key: bytes, receivers: tuple[S, ...]) -> None:
        """Change the route of a cached key.

        If its groups were needed, those of the new one are made as well: the user who subscribes pays for them.
        """
        before = self.routes[key]
        if before.receivers == receivers:
            return
        self._drop(key)
        route = self._hold(key, receivers)
        if before.has_groups:
            _ = route.groups
        if self._receivers > self._max_receivers or self.memory() > self._max_bytes:
            self.clear()

    def forget(self, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> int:
        """Forget the routes that a new or ended subscription to this pattern may have changed.

        :returns: the number of routes forgotten.
        """
        before = len(self.routes)
        if before:
            self._forget(pattern, secret, peer)
        return before - len(self.routes)

    def _forget(self, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        if secret:
            plain = _is_plain(secret.rest, self._dialect.separator)
            for ids in secret.readers(peer):
                if plain:
                    self._forget_key(b"!/cred/%b/%b" % (ids, secret.rest), b"!", ids)
                else:
                    self._forget_group(b"!", ids)
            return
        first, separator, rest = pattern.partition(self._dialect.separator)
        second, further, _ = rest.partition(self._dialect.separator)
        if _is_plain(pattern, self._dialect.separator):
            self._forget_key(pattern, first, second)
        elif not separator or b"*" in first:
            self.clear()
        elif not further or b"*" in second:
            for seconds in tuple(self._groups.get(first, ())):
                self._forget_group(first, seconds)
        else:
            self._forget_group(first, second)

    def clear(self) -> None:
        """Forget all routes: 2 ms if the cache is full."""
        self.routes.clear()
        self._groups.clear()
        self._shared.clear()
        self._receivers = 0
        self._key_bytes = 0

    def _forget_key(self, key: bytes, first: bytes, second: bytes) -> None:
        if key in self.routes:
            self._drop(key)
            group = self._groups[first][second]
            del group[key]
            if not group:
                self._forget_group(first, second)

    def _forget_group(self, first: bytes, second: bytes) -> None:
        groups = self._groups.get(first)
        group = groups.pop(second, None) if groups else None
        if groups is None or group is None:
            return
        for key in group:
            self._drop(key)
        if not groups:
            del self._groups[first]

    def _hold(self, key: bytes, receivers: tuple[S, ...]) -> Route[S]:
        route = self._shared.get(receivers)
        if route is None:
            route = self._shared[receivers] = Route(receivers)
        route.uses += 1
        self.routes[key] = route
        self._receivers += len(receivers)
        self._key_bytes += len(key)
        return route

    def _drop(self, key: bytes) -> None:
        route = self.routes.pop(key)
        self._receivers -= len(route.receivers)
        self._key_bytes -= len(key)
        route.uses -= 1
        if not route.uses:
            del self._shared[route.receivers]


def _is_plain(pattern: bytes, separator: bytes) -> bool:
    """Return whether a pattern matches exactly one key: the one with the same bytes."""
    return bool(pattern) and b"*" not in pattern and not pattern.endswith(separator)
