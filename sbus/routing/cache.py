"""The route cache: routing keys that were looked up, with their receivers; bounded, and cheap to keep true.

A change of subscriptions must forget the routes it touches and few others, and may not cost by the
number of routes that it leaves alone. Keys are therefore grouped by their first two segments (a
secret key by its IDs). A pattern without wildcards forgets one key; any other the groups that its
leading literal segments allow. Forgetting a group costs what filling it cost, once.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from sbus.protocol.keys import CURRENT, Dialect, PeerCredentials, SecretKey

__all__ = ["RouteCache"]

S = TypeVar("S")

_LONGEST_KEY = 1024
"""Bytes in the longest key that is cached; longer ones are looked up each time."""


class _Shared(Generic[S]):
    """One tuple of receivers, and how many routes it is."""

    __slots__ = ("receivers", "uses")

    def __init__(self, receivers: tuple[S, ...]) -> None:
        self.receivers = receivers
        self.uses = 0


class RouteCache(Generic[S]):
    """Key → tuple of receivers, for keys that were looked up before.

    :ivar routes: the cache itself, to be read in hot loops; only this class writes it.
    :param max_keys: how many keys it holds at most.
    :param max_receivers: how many receivers, over all routes, it holds at most.

    When either is reached it starts afresh: the hot keys are back after one look-up each, which
    costs no more than the many look-ups that filled it.
    """

    def __init__(self, dialect: Dialect = CURRENT, max_keys: int = 16_384, max_receivers: int = 1 << 20) -> None:
        self.routes: dict[bytes, tuple[S, ...]] = {}
        self._dialect = dialect
        self._max_keys = max_keys
        self._max_receivers = max_receivers
        self._receivers = 0
        self._groups: dict[bytes, dict[bytes, dict[bytes, None]]] = {}
        self._shared: dict[tuple[S, ...], _Shared[S]] = {}

    def remember(self, key: bytes, secret: SecretKey | None, receivers: tuple[S, ...]) -> tuple[S, ...]:
        """Keep a route; equal routes become one tuple, so that packets in a row to the same receivers are seen as such.

        :returns: the tuple to use from now on.
        """
        if len(key) > _LONGEST_KEY:
            return receivers
        if len(self.routes) >= self._max_keys or self._receivers + len(receivers) > self._max_receivers:
            self.clear()
        shared = self._shared.get(receivers)
        if shared is None:
            shared = self._shared[receivers] = _Shared(receivers)
        shared.uses += 1
        receivers = self.routes[key] = shared.receivers
        self._receivers += len(receivers)
        if secret:
            first, second = b"!", secret.ids
        else:
            first, _, rest = key.partition(self._dialect.separator)
            second = rest.partition(self._dialect.separator)[0]
        self._groups.setdefault(first, {}).setdefault(second, {})[key] = None
        return receivers

    def forget(self, pattern: bytes, secret: SecretKey | None, peer: PeerCredentials) -> None:
        """A subscription to this pattern came or went: forget the routes that it may have changed."""
        if not self.routes:
            return
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
        """Forget everything."""
        self.routes.clear()
        self._groups.clear()
        self._shared.clear()
        self._receivers = 0

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

    def _drop(self, key: bytes) -> None:
        receivers = self.routes.pop(key)
        self._receivers -= len(receivers)
        shared = self._shared[receivers]
        shared.uses -= 1
        if not shared.uses:
            del self._shared[receivers]


def _is_plain(pattern: bytes, separator: bytes) -> bool:
    """Whether a pattern matches one key only, the one that reads like it."""
    return bool(pattern) and b"*" not in pattern and not pattern.endswith(separator)
