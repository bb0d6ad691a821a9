"""Subscriptions: permitted, within the limits, and counted.

A subscription reaches the router once all have permitted it: the dialect, the permissions, and the limits of the client
and of its user. Each pattern is charged to both (`sbus.server.bus.memory.pattern_memory`), and has an end: the client
takes it back, or leaves (`sbus.server.bus.departure`).
"""

from __future__ import annotations

from sbus.errors import Violation, ViolationReason
from sbus.protocol.keys import Dialect, SecretKey
from sbus.protocol.patterns import pattern_cost
from sbus.routing.cost import MatchCost
from sbus.server.asks.interest import Interest
from sbus.server.asks.upstream import Upstream
from sbus.server.bus.guard import Guard
from sbus.server.bus.memory import pattern_memory
from sbus.server.bus.pattern_drops import PatternDrops
from sbus.server.bus.router import Router
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import Receiver
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Events, redact
from sbus.server.core.users import User

__all__ = ["Subscriptions"]


class Subscriptions:
    """The subscriptions of all receivers.

    :param router: has the patterns of all subscriptions.
    :param drops: the receivers that take no more messages, and may still have patterns.
    :param interest: the watched keys, which count as patterns.
    """

    def __init__(
        self,
        router: Router,
        drops: PatternDrops,
        interest: Interest,
        upstream: Upstream,
        guard: Guard,
        limits: Limits,
        dialect: Dialect,
        counters: Counters,
        events: Events,
    ) -> None:
        self._router = router
        self._drops = drops
        self._interest = interest
        self._upstream = upstream
        self._guard = guard
        self._limits = limits
        self._dialect = dialect
        self._counters = counters
        self._events = events

    def subscribe(self, client: Receiver, pattern: bytes) -> None:
        """Subscribe a client; identical subscriptions are counted.

        :raises Violation: if the client may not subscribe to the pattern, or has too many.
        """
        if client in self._drops.muted:
            self._drops.drop(client, len(client.patterns))  # a subscriber of the program that comes back
        if self._upstream.is_chained:
            pattern = self._upstream.local(pattern)
        count, secret = client.patterns.get(pattern, (0, None))
        if not count:
            secret = self._dialect.check(pattern)
            cost = pattern_cost(pattern, self._dialect.separator)
            if client.pattern_bytes + cost > self._limits.max_pattern_bytes:  # to judge 200,000 segments takes 30 ms
                raise Violation(ViolationReason.TOO_MANY_PATTERN_BYTES)
            verdict = self._guard.permissions.check_subscription(client, pattern, secret)
            if len(client.patterns) + self._interest.count(client) >= self._limits.max_patterns:
                raise Violation(ViolationReason.TOO_MANY_PATTERNS)
            self.check_user_patterns(client.user)
            memory = pattern_memory(pattern, self._dialect.separator, secret)
            if not client.user.may_hold(memory):
                raise Violation(ViolationReason.USER_MEMORY)
            self._add_match_cost(client.user, pattern, secret)
            try:
                self._router.add(client, pattern, secret)
            except BaseException:
                _match_cost(client.user, secret).remove(_matched(pattern, secret))
                raise
            client.pattern_bytes += cost
            client.pattern_memory += memory
            client.user.charge_memory(memory)
            client.user.patterns += 1
            if self._upstream.link is not None and secret is None:
                self._upstream.subscribed(client, pattern)
            self._guard.subscribed(client, pattern, verdict)
        client.patterns[pattern] = (count + 1, secret)
        for notify in self._events.subscribed:
            notify(client, redact(self._dialect, pattern))

    def unsubscribe(self, client: Receiver, pattern: bytes) -> None:
        """Take one subscription back; an unknown one is ignored and counted."""
        if self._upstream.is_chained:
            pattern = self._upstream.local(pattern)
        count, secret = client.patterns.get(pattern, (0, None)) if client not in self._drops.muted else (0, None)
        if not count:
            self._counters.unknown_unsubscriptions += 1
            return
        if count > 1:
            client.patterns[pattern] = (count - 1, secret)
        else:
            self.drop(client, pattern)
        for notify in self._events.unsubscribed:
            notify(client, redact(self._dialect, pattern))

    def revoke(self, client: Receiver, pattern: bytes) -> None:
        """End a subscription that is no longer allowed, however often the client has subscribed."""
        self.drop(client, pattern)
        for notify in self._events.unsubscribed:
            notify(client, redact(self._dialect, pattern))

    def drop(self, client: Receiver, pattern: bytes) -> None:
        """Remove a pattern of a client, however often the client has subscribed to it."""
        _, secret = client.patterns.pop(pattern)
        cost = pattern_cost(pattern, self._dialect.separator)
        client.pattern_bytes -= cost
        memory = pattern_memory(pattern, self._dialect.separator, secret)
        client.pattern_memory -= memory
        client.user.charge_memory(-memory)
        client.user.patterns -= 1
        _match_cost(client.user, secret).remove(_matched(pattern, secret))
        self._router.remove(client, pattern, secret)
        self._upstream.unsubscribed(client, pattern)

    def check_user_patterns(self, user: User) -> None:
        """Make room for one more pattern, or one more watch, of a user who has as many as one user may have.

        :raises Violation: if there is none.
        """
        if user.patterns < user.share.patterns.most or not user.has_pattern_limits:
            return
        # Patterns that are still being dropped must not count against connected clients.
        if (client := self._drops.of(user)) is not None:
            self._drops.drop(client, 1)
        if user.patterns >= user.share.patterns.most:
            raise Violation(ViolationReason.TOO_MANY_USER_PATTERNS)

    def _add_match_cost(self, user: User, pattern: bytes, secret: SecretKey | None) -> None:
        """Count the steps of a pattern for its user.

        :raises Violation: if they are too many; nothing is counted then.
        """
        cost, matched = _match_cost(user, secret), _matched(pattern, secret)
        before = cost.steps
        cost.add(matched)
        # A pattern that adds no step is never refused: a user who was exempt may have more than the limit.
        if before < cost.steps > self._limits.max_match_steps and user.has_pattern_limits:
            cost.remove(matched)
            raise Violation(ViolationReason.TOO_MANY_MATCH_STEPS)


def _match_cost(user: User, secret: SecretKey | None) -> MatchCost:
    return user.secret_match_cost if secret else user.match_cost


def _matched(pattern: bytes, secret: SecretKey | None) -> bytes:
    """Return the part of a pattern that is matched segment by segment."""
    return secret.rest if secret else pattern
