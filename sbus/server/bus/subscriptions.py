"""Subscriptions: checking, counting and charging them, and dropping those of clients that leave.

.. rubric:: Theory of operation

A subscription reaches the router if the dialect, the permissions, and the limits of the client and of its user permit
it. Each pattern is charged to both (`sbus.server.bus.memory.pattern_memory`) until the client takes it back or leaves
(`sbus.server.bus.departure`).

Dropping a pattern changes the index and the routes, so dropping many is a chore (`PatternDrop`). Until the last one is
dropped, the receiver is *muted*: no look-up finds it. Routes that contain it stay as they are, at no cost to others;
instead its queue is deaf. When the server stops, the routes are dropped all together, and nothing waits for a turn
(`Subscriptions.finish`).

Rejected: forgetting the routes of a muted receiver. Only its patterns identify them, so all routes were forgotten, and
one client that came and left with many patterns kept the route cache cold for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IReactorTime

from sbus.errors import Violation, ViolationReason
from sbus.fair import Scheduler
from sbus.protocol.keys import Dialect, SecretKey
from sbus.protocol.patterns import pattern_cost
from sbus.routing.cost import MatchCost
from sbus.server.asks.interest import Interest
from sbus.server.asks.upstream import Upstream
from sbus.server.bus.guard import Guard
from sbus.server.bus.memory import pattern_memory
from sbus.server.bus.router import Router
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import Receiver
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Events, redact
from sbus.server.core.users import User

__all__ = ["PatternDrop", "Subscriptions"]

_FINISHED_AT_ONCE = 512
"""Patterns that are dropped in one turn of the reactor when the server has stopped: about 5 ms."""


class PatternDrop:
    """The patterns of a receiver that takes no more messages, to be dropped: a chore of its user."""

    __slots__ = ("_subscriptions", "receiver")

    def __init__(self, subscriptions: Subscriptions, receiver: Receiver) -> None:
        self._subscriptions = subscriptions
        self.receiver = receiver

    def run(self, until: int) -> bool:
        """See `sbus.fair.Entry`."""
        subscriptions, patterns = self._subscriptions, self.receiver.patterns
        while subscriptions.muted.get(self.receiver) is self:  # else it has come back, or all are dropped
            subscriptions.drop_some(self.receiver, 1)  # which takes 15 µs, or more than a millisecond with many routes
            if patterns and subscriptions.scheduler.clock() >= until:
                return False
        return True

    def describe(self) -> dict[str, Any]:
        """See `sbus.fair.Entry`."""
        return {"patterns": list(self.receiver.patterns), "receiver": getattr(self.receiver, "number", 0)}


class Subscriptions:
    """The subscriptions of all receivers.

    :param router: has the patterns of all subscriptions.
    :param interest: the watched keys, which count as patterns.
    :param flush: sends the messages that were handed over.
    :param forget_user: called with the user of a receiver that has left, when its last pattern is dropped.
    :ivar muted: the receivers that take no more messages, and whose patterns are being dropped.
    """

    def __init__(
        self,
        router: Router,
        interest: Interest,
        upstream: Upstream,
        guard: Guard,
        limits: Limits,
        dialect: Dialect,
        counters: Counters,
        events: Events,
        scheduler: Scheduler,
        clock: IReactorTime,
        flush: Callable[[], None],
        forget_user: Callable[[User], None],
    ) -> None:
        self.scheduler = scheduler
        self.muted = router.muted
        self._router = router
        self._interest = interest
        self._upstream = upstream
        self._guard = guard
        self._limits = limits
        self._dialect = dialect
        self._counters = counters
        self._events = events
        self._clock = clock
        self._flush = flush
        self._forget_user = forget_user

    def subscribe(self, client: Receiver, pattern: bytes, beside: int = 0) -> None:
        """Subscribe a client; identical subscriptions are counted.

        :param beside: the bytes of memory for which the client's user must have room as well.
        :raises Violation: if the client may not subscribe to the pattern, or has too many.
        """
        if client in self.muted:
            self.drop_some(client, len(client.patterns))  # a subscriber of the program that subscribes again
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
            if not client.user.may_hold(memory + beside):
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
        elif beside and not client.user.may_hold(beside):
            raise Violation(ViolationReason.USER_MEMORY)
        client.patterns[pattern] = (count + 1, secret)
        for notify in self._events.subscribed:
            notify(client, redact(self._dialect, pattern))

    def unsubscribe(self, client: Receiver, pattern: bytes) -> None:
        """Take one subscription back; an unknown one is ignored and counted."""
        if self._upstream.is_chained:
            pattern = self._upstream.local(pattern)
        count, secret = client.patterns.get(pattern, (0, None)) if client not in self.muted else (0, None)
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

    # --- of receivers that leave -------------------------------------------------------------

    def drop_all(self, receiver: Receiver) -> None:
        """Give a receiver no more messages, and drop its patterns in turns of its user."""
        if receiver in self.muted:
            return
        self._flush()
        chore = self.muted[receiver] = PatternDrop(self, receiver)
        if receiver.queue is not None:
            receiver.queue.deafen()
        self.scheduler.do(receiver.user.lines, chore)

    def drop_some(self, receiver: Receiver, most: int) -> None:
        """Drop some patterns of a receiver at once, without a turn; if it was muted and has no more, forget it."""
        for pattern in tuple(islice(receiver.patterns, most)):
            self.drop(receiver, pattern)
        if not receiver.patterns and self.muted.pop(receiver, None) is not None:
            self._interest.left(receiver)
            self._forget_user(receiver.user)

    def finish(self) -> defer.Deferred[None]:
        """Drop all patterns of muted receivers in slices, without turns; fires when nothing is left."""
        done: defer.Deferred[None] = defer.Deferred()
        self._finish(done)
        return done

    def _finish(self, done: defer.Deferred[None]) -> None:
        left = _FINISHED_AT_ONCE
        while self.muted and left > 0:
            receiver, chore = next(iter(self.muted.items()))
            receiver.user.lines.chores.pop(chore, None)
            count = min(left, len(receiver.patterns))
            self.drop_some(receiver, count)
            left -= count + 1
        if self.muted:
            self._clock.callLater(0, self._finish, done)
        else:
            done.callback(None)

    # --- limits ------------------------------------------------------------------------------

    def check_user_patterns(self, user: User) -> None:
        """Make room for one more pattern, or one more watch, of a user who has as many as one user may have.

        :raises Violation: if there is none.
        """
        if user.patterns < user.share.patterns.most or not user.has_pattern_limits:
            return
        # Patterns that are still being dropped must not count against connected clients.
        client = next((each for each in self.muted if each.user is user and each.patterns), None)
        if client is not None:
            self.drop_some(client, 1)
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
