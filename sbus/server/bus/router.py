"""The router: the index of subscriptions, with the route cache kept in step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sbus.fair import Entry, Lines, Scheduler
from sbus.protocol.keys import Dialect, SecretKey
from sbus.routing.cache import LONGEST_KEY, RouteCache
from sbus.routing.route import Route
from sbus.routing.trie import PatternIndex
from sbus.server.asks.upstream import Upstream
from sbus.server.core.interfaces import PatternEvents, Receiver

__all__ = ["Router"]


_REFRESHED = 256
"""Cached routes that are looked up again at once when a subscription changes; more are forgotten. They take 1 ms."""
_REFRESHED_RECEIVERS = 8_192
"""Receivers in these routes at most: 1 ms too. Routes to more are looked up when they are needed, and charged to the
user who has changed them (row ``flip``)."""
_BLAMED = 1_024
"""Keys whose next look-up is paid for by a user other than the publisher; beyond, they are forgotten."""
_KEPT = 5_000
"""Nanoseconds to pay for a new route, in addition to its look-up: once the cache is full, all keys have to be looked up
again. If the user whose key is one too many paid for all, another user could fill the cache up to there, and wait."""
_CHANGED = 40_000
"""Nanoseconds to pay for each cached route that a subscription changes: more than its look-up costs the next publisher,
so that a user who changes everybody's routes all day pays for it first."""


class Router:
    """Finds the receivers of a routing key.

    It does not check credentials or limits: the registry does that before a pattern gets here.

    :param scheduler: charges users for the routes of others that they change.
    :param cache_bytes: bytes of memory that the route cache may take.
    :ivar dialect: the revision of the protocol.
    :ivar upstream: knows which secret keys mean something else on a bus with a master; their routes are not cached.
    :ivar listeners: they are called for each open subscription that comes or goes.
    :ivar muted: receivers that get nothing, although they still have subscriptions, each with the chore that drops
        these; cached routes may contain them.
    :ivar index: the patterns; other modules only read it.
    :ivar misses: keys that were not in the cache, since the start.
    :ivar routes: the cache, key → route, for hot loops; only the router changes it.
    """

    def __init__(self, dialect: Dialect, scheduler: Scheduler, *, cache_bytes: int = 64 << 20) -> None:
        self.dialect = dialect
        self._scheduler = scheduler
        self._changers: dict[bytes, Lines] = {}
        self.index: PatternIndex[Receiver] = PatternIndex(dialect)
        self._cache: RouteCache[Receiver] = RouteCache(dialect, max_bytes=cache_bytes)
        self.listeners: tuple[PatternEvents, ...] = ()
        self.muted: dict[Receiver, Entry] = {}
        self.misses = 0
        self.upstream: Upstream | None = None
        self.routes = self._cache.routes
        self._is_caching = True

    def route(self, key: bytes) -> Route[Receiver]:
        """Return the receivers that are subscribed to a key, each once.

        :raises Violation: if the protocol forbids the key.
        """
        route = self.routes.get(key) if len(key) <= LONGEST_KEY else None
        if route is None:
            changer = self._changers.pop(key, None) if self._changers else None
            if changer is None or not self._scheduler.is_busy:
                return self._find(key)
            began = self._scheduler.clock()
            route = self._find(key)
            _ = route.groups
            kept = _KEPT if key in self.routes else 0
            self._scheduler.shift(changer, self._scheduler.clock() - began + kept)
        return route

    def _find(self, key: bytes) -> Route[Receiver]:
        """Look up a key that is not in the cache."""
        secret = self.dialect.check(key)
        self.misses += 1
        if secret is not None and self.upstream is not None and self.upstream.is_chained:
            chained = self.upstream.receivers(key, self._look_up_secret)
            if chained is not None:
                if not chained:
                    self.upstream.count_secret(key)
                return Route(chained, self._cache.all_groups)
        receivers = self._look_up(key, secret)
        if not self._is_caching:
            return Route(receivers, self._cache.all_groups)
        if len(key) <= LONGEST_KEY:
            self._scheduler.add(_KEPT)
        return self._cache.remember(key, secret, receivers)

    def _look_up(self, key: bytes, secret: SecretKey | None) -> tuple[Receiver, ...]:
        found, _ = self.index.look_up(key, secret)
        if self.muted:
            found = tuple(receiver for receiver in found if receiver not in self.muted)
        return found

    def _look_up_secret(self, key: bytes) -> tuple[Receiver, ...]:
        return self._look_up(key, self.dialect.check(key))

    def judge_by(self, zone_of: Callable[[bytes], Hashable] | None) -> None:
        """Have routes only of keys that are judged alike, by their zones."""
        self._cache.clear()
        self._cache.zone_of = zone_of

    def forget_verdicts(self) -> None:
        """Forget what classes of clients may publish."""
        self._cache.forget_verdicts()

    def forget_routes(self) -> None:
        """Empty the cache: keys have got another meaning."""
        self._scheduler.add(_KEPT * len(self.routes))
        self._cache.clear()

    def _changed(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Keep the cache in step with a receiver's subscription that has come or gone."""
        if not self.routes:
            return
        peer = receiver.peer
        keys = self._cache.affected(pattern, secret, peer, _REFRESHED)
        if keys is None:
            forgotten = self._cache.forget(pattern, secret, peer)
            if self._scheduler.is_busy and receiver.queue is not None:
                receiver.user.lines.deficit -= _CHANGED * forgotten
            return
        if sum(len(self.routes[key].receivers) for key in keys if key in self.routes) > _REFRESHED_RECEIVERS:
            self._cache.forget(pattern, secret, peer)
            if receiver.queue is not None:
                self._blame(keys, receiver.user.lines)
            return
        for key in keys:
            if key in self.routes:  # the cache empties itself if the new routes are too long together
                self._cache.replace(key, self._look_up(key, self.dialect.check(key) if secret else None))

    def _blame(self, keys: list[bytes], changer: Lines) -> None:
        """Let a user pay for the next look-up of these keys, by any publisher."""
        if len(self._changers) > _BLAMED:
            self._changers.clear()
        for key in keys:
            self._changers[key] = changer

    def add(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Add the subscription of a receiver to a pattern that it is not subscribed to.

        :param secret: the result of `Dialect.check` for the pattern.
        """
        self.index.subscribe(receiver, pattern, secret, receiver.peer)
        self._changed(receiver, pattern, secret)
        if self.listeners and not secret:
            for listener in self.listeners:
                listener.added(receiver, pattern)

    def stop_caching(self) -> None:
        """Forget all routes, and keep no more: subscriptions come and go more quickly, look-ups take longer."""
        self._is_caching = False
        self._cache.clear()

    def start_caching(self) -> None:
        """Keep routes again."""
        self._is_caching = True

    def remove(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Take an `add` back."""
        self.index.unsubscribe(receiver, pattern, secret, receiver.peer)
        self._changed(receiver, pattern, secret)
        if self.listeners and not secret:
            for listener in self.listeners:
                listener.removed(receiver, pattern)

    def open_tables(self, key: bytes) -> tuple[list[dict[Receiver, int]], int]:
        """Return the subscribers of an open key in one table for each pattern, and the steps that finding them took.

        Muted receivers are among them. The route cache is not used or changed.
        """
        return self.index.open_tables(key)

    def look_up(self, key: bytes) -> tuple[Receiver, ...]:
        """Return the receivers of a key as `route` does, without a look at the route cache and without a change to it.

        :raises Violation: if the protocol forbids the key.
        """
        secret, chained = self.dialect.check(key), None
        if secret is not None and self.upstream is not None:
            chained = self.upstream.receivers(key, self._look_up_secret)
        return self._look_up(key, secret) if chained is None else chained
