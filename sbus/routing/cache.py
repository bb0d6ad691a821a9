"""The route cache: keys that were looked up, with their receivers.

Theory of operation
-------------------

Most messages have a key that was seen before. The cache maps it to its route (`sbus.routing.route`), so they cost one
dictionary look-up.

A change of one subscription must forget the routes that it touches and few others, at a cost that does not depend on
the others. So keys are grouped by their first two segments, and secret keys by their IDs:

=======================================  =============================================================================
a change of the pattern                  touches
=======================================  =============================================================================
``a/b/c``                                one key
``a/b/*``, ``a/b/``                      the group ``a``, ``b``
``a/*``, ``a/*/c``, ``a/``               all groups below ``a``
the empty one, or ``*`` in its first     all groups whose first segment matches; all routes if there are many
segment
a secret one                             the group of each set of IDs that it reads from
=======================================  =============================================================================

The router (`sbus.server.bus.router`) looks up the touched routes again at once, if they are few (`affected`,
`replace`). So a user who subscribes to everything and leaves, all day, pays for it, and other users' routes stay. Else
the router forgets them (`forget`), and that user pays for the next look-ups.

Invariants:

* A cached route is the trie's answer at this moment, except for departing receivers. Every change of a subscription
  passes through `affected` or `forget` before the next look-up.
* Routes with equal receivers and zones are one object: `remember` shares them and counts their uses. So
  `sbus.routing.runs` compares pointers.
* The cache holds at most 16,384 keys, 2^20 receivers of all routes together, and a size in bytes. At a limit it is
  emptied: the keys in use are back after one look-up each. Keys longer than `LONGEST_KEY` are never cached.

Rejected: forgetting everything at each change, which would keep the cache cold for all others; with groups, 5,000
changes a second leave their routes in place (``docs/performance.rst``, "Growth").
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials, SecretKey
from sbus.routing.route import Groups, Route

__all__ = ["LONGEST_KEY", "RouteCache"]

S = TypeVar("S")

LONGEST_KEY = 1024
"""Size limit of a cached key, in bytes; longer keys are looked up each time."""

_FIRSTS = 4
"""First segments that are compared with a wildcard, for each key that may be affected."""


_ROUTE = 640
"""Bytes of memory that a route takes, beside its key and 8 for each receiver: table entries, a separate group."""
_VERDICTS = 1_024
"""Bytes of memory that its verdicts take, where keys are judged (`sbus.routing.route.MAX_CLASSES`)."""


class RouteCache(Generic[S]):
    """A bounded table from keys to routes.

    :ivar routes: the table itself, for hot loops to read; only this class writes it.
    :ivar all_groups: the groups of all routes, kept or not.
    :ivar zone_of: returns the zone of a key; None if nobody judges keys. Call `clear` before changing it.
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
        self._groups: dict[bytes, dict[bytes, dict[bytes, None]]] = {}
        self._shared: dict[tuple[Hashable, tuple[S, ...]], Route[S]] = {}
        self.all_groups = Groups()
        self.zone_of: Callable[[bytes], Hashable] | None = None

    def remember(self, key: bytes, secret: SecretKey | None, receivers: tuple[S, ...]) -> Route[S]:
        """Keep a route.

        :returns: the route of these receivers: equal ones are one object.
        """
        zone = None if self.zone_of is None else self.zone_of(key)
        if len(key) > LONGEST_KEY:
            return Route(receivers, self.all_groups, zone)
        if (
            len(self.routes) >= self._max_keys
            or self._receivers + len(receivers) > self._max_receivers
            or self.memory() + self._each() + len(key) + 8 * len(receivers) > self._max_bytes
        ):
            self.clear()
        route = self._hold(key, receivers, zone)
        if secret:
            first, second = b"!", secret.ids
        else:
            first, _, rest = key.partition(self._dialect.separator)
            second = rest.partition(self._dialect.separator)[0]
        self._groups.setdefault(first, {}).setdefault(second, {})[key] = None
        return route

    def memory(self) -> int:
        """Return an upper bound of the memory that the routes take, in bytes: equal routes are counted each."""
        return self._each() * len(self.routes) + self._key_bytes + 8 * self._receivers

    def _each(self) -> int:
        return _ROUTE if self.zone_of is None else _ROUTE + _VERDICTS

    def forget_verdicts(self) -> None:
        """Forget the verdicts on classes of clients: 1 ms if the cache is full."""
        for route in self._shared.values():
            route.forget_verdicts()

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
        route = self._hold(key, receivers, before.zone)
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

    def _hold(self, key: bytes, receivers: tuple[S, ...], zone: Hashable) -> Route[S]:
        route = self._shared.get((zone, receivers))
        if route is None:
            route = self._shared[zone, receivers] = Route(receivers, self.all_groups, zone)
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
            del self._shared[route.zone, route.receivers]


def _is_plain(pattern: bytes, separator: bytes) -> bool:
    """Return whether a pattern matches exactly one key: the one with the same bytes."""
    return bool(pattern) and b"*" not in pattern and not pattern.endswith(separator)
