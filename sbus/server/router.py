"""The router: the index of subscriptions, with the route cache kept in step."""

from __future__ import annotations

from typing import Protocol

from sbus.protocol.keys import Dialect, SecretKey
from sbus.routing.cache import LONGEST_KEY, RouteCache
from sbus.routing.trie import PatternIndex
from sbus.server.interfaces import Receiver

__all__ = ["Router", "SubscriptionListener"]


class SubscriptionListener(Protocol):
    """Wants to know of open subscriptions."""

    def added(self, receiver: Receiver, pattern: bytes) -> None:
        """A receiver has subscribed to an open pattern."""

    def removed(self, receiver: Receiver, pattern: bytes) -> None:
        """A receiver's subscription to an open pattern has ended."""


class Router:
    """Finds the receivers of a routing key.

    It checks neither credentials nor limits: the registry does that before a pattern gets here.

    :ivar listeners: they are called for each open subscription that comes or goes.
    :ivar steps: the steps of all look-ups, and the routes that the cache has forgotten, since the counter was last set
        to 0: the work to charge.
    :ivar routes: the cache, key → receivers, for hot loops; only the router changes it.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._index: PatternIndex[Receiver] = PatternIndex(dialect)
        self._cache: RouteCache[Receiver] = RouteCache(dialect)
        self.listeners: tuple[SubscriptionListener, ...] = ()
        self.steps = 0
        self._muted: set[Receiver] = set()
        self.routes = self._cache.routes

    def route(self, key: bytes) -> tuple[Receiver, ...]:
        """Return the receivers that are subscribed to a key, each once.

        :raises Violation: if the protocol forbids the key.
        """
        receivers = self.routes.get(key) if len(key) <= LONGEST_KEY else None
        if receivers is None:
            secret = self._dialect.check(key)
            found, steps = self._index.look_up(key, secret)
            self.steps += steps
            if self._muted:
                found = tuple(receiver for receiver in found if receiver not in self._muted)
            receivers = self._cache.remember(key, secret, found)
        return receivers

    def add(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Add the subscription of a receiver to a pattern that it is not subscribed to.

        :param secret: the result of `Dialect.check` for the pattern.
        """
        self._index.subscribe(receiver, pattern, secret, receiver.peer)
        self.steps += self._cache.forget(pattern, secret, receiver.peer)
        if self.listeners and not secret:
            for listener in self.listeners:
                listener.added(receiver, pattern)

    def mute(self, receiver: Receiver) -> None:
        """Route nothing to a receiver any more, before its subscriptions are removed."""
        self._muted.add(receiver)
        self.steps += len(self.routes)
        self._cache.clear()

    def unmute(self, receiver: Receiver) -> None:
        """Forget that a receiver was muted: its last subscription has been removed."""
        self._muted.discard(receiver)

    def remove(self, receiver: Receiver, pattern: bytes, secret: SecretKey | None) -> None:
        """Take an `add` back."""
        self._index.unsubscribe(receiver, pattern, secret, receiver.peer)
        self.steps += self._cache.forget(pattern, secret, receiver.peer)
        if self.listeners and not secret:
            for listener in self.listeners:
                listener.removed(receiver, pattern)

    def open_tables(self, key: bytes) -> tuple[list[dict[Receiver, int]], int]:
        """Return the subscribers of an open key in one table for each pattern, and the steps that finding them took.

        Muted receivers are among them. The route cache is neither asked nor changed.
        """
        return self._index.open_tables(key)

    def is_muted(self, receiver: Receiver) -> bool:
        """Return whether nothing is routed to a receiver any more."""
        return receiver in self._muted

    def is_empty(self) -> bool:
        """Return whether nothing is subscribed to anything."""
        return self._index.is_empty()
