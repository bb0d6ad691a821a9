"""The router: the index of subscriptions, with the route cache kept in step."""

from __future__ import annotations

from collections.abc import Callable

from sbus.protocol.keys import Dialect, SecretKey
from sbus.routing.cache import RouteCache
from sbus.routing.trie import PatternIndex
from sbus.server.interfaces import Receiver

__all__ = ["Router"]


class Router:
    """Finds the receivers of a routing key.

    It checks neither credentials nor limits: the registry does that before a pattern gets here.

    :param on_first: called with a pattern when its first subscriber comes.
    :param on_last: called with a pattern when its last subscriber is gone. Subscribers of a pattern are counted only
        if one of the two is given. Two clients with the same secret pattern count as subscribers of one pattern.
    :ivar routes: the cache, key → receivers, for hot loops; only the router changes it.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        on_first: Callable[[bytes], None] | None = None,
        on_last: Callable[[bytes], None] | None = None,
    ) -> None:
        self._dialect = dialect
        self._index: PatternIndex[Receiver] = PatternIndex(dialect)
        self._cache: RouteCache[Receiver] = RouteCache(dialect)
        self._on_first = on_first
        self._on_last = on_last
        self._subscribers: dict[bytes, int] | None = {} if on_first or on_last else None
        self.routes = self._cache.routes

    def route(self, key: bytes) -> tuple[Receiver, ...]:
        """Return the receivers that are subscribed to a key, each once.

        :raises Violation: if the protocol forbids the key.
        """
        receivers = self.routes.get(key)
        if receivers is None:
            secret = self._dialect.check(key)
            receivers = self._cache.remember(key, secret, self._index.route(key, secret))
        return receivers

    def add(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Add the subscription of a receiver to a pattern that it is not subscribed to.

        :param secret: the result of `Dialect.check` for the pattern.
        """
        self._index.subscribe(receiver, pattern, secret, receiver.peer)
        self._cache.forget(pattern, secret, receiver.peer)
        if self._subscribers is not None:
            count = self._subscribers[pattern] = self._subscribers.get(pattern, 0) + 1
            if count == 1 and self._on_first is not None:
                self._on_first(pattern)

    def remove(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Take an `add` back."""
        self._index.unsubscribe(receiver, pattern, secret, receiver.peer)
        self._cache.forget(pattern, secret, receiver.peer)
        if self._subscribers is not None:
            self._subscribers[pattern] -= 1
            if not self._subscribers[pattern]:
                del self._subscribers[pattern]
                if self._on_last is not None:
                    self._on_last(pattern)

    def is_empty(self) -> bool:
        """Return whether nothing is subscribed to anything."""
        return self._index.is_empty()
