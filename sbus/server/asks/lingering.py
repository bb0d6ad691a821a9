"""Subscriptions that ended a moment ago, and still count for the keys that clients watch.

A subscriber that reconnects must not make the answer of a watched key flap. So a subscription lingers for `LINGER`
seconds after its end. Look-ups among lingering wildcards are not bounded by `Limits.max_match_steps`; therefore at most
`MAX_LINGERING` patterns with wildcards of one receiver linger, and the oldest ones end early.
"""

from __future__ import annotations

from collections import OrderedDict

from sbus.protocol.keys import Dialect
from sbus.routing.trie import PatternIndex
from sbus.server.core.interfaces import Receiver

__all__ = ["LINGER", "MAX_LINGERING", "Lingering"]

LINGER = 0.1
"""Seconds for which a subscription lingers."""
MAX_LINGERING = 1024
"""Patterns with wildcards of one receiver that linger at one time."""


class Lingering:
    """Ended subscriptions to open patterns, with the time at which each stops lingering."""

    def __init__(self, dialect: Dialect) -> None:
        self._dues: OrderedDict[tuple[Receiver, bytes], float] = OrderedDict()
        self._wild: dict[Receiver, OrderedDict[bytes, None]] = {}
        self._index: PatternIndex[Receiver] = PatternIndex(dialect)

    def __bool__(self) -> bool:
        return bool(self._dues)

    @property
    def first_due(self) -> float:
        """The time at which the oldest one stops lingering."""
        return next(iter(self._dues.values()))

    def add(self, receiver: Receiver, pattern: bytes, is_wild: bool, now: float) -> bytes | None:
        """Let a subscription linger.

        :returns: a pattern that stops lingering early because of it.
        """
        self.discard(receiver, pattern)
        self._index.subscribe(receiver, pattern, None, receiver.peer)
        self._dues[receiver, pattern] = now + LINGER
        if not is_wild:
            return None
        wild = self._wild.setdefault(receiver, OrderedDict())
        wild[pattern] = None
        if len(wild) <= MAX_LINGERING:
            return None
        oldest = next(iter(wild))
        self.discard(receiver, oldest)
        return oldest

    def discard(self, receiver: Receiver, pattern: bytes) -> None:
        """Stop the lingering of a subscription, if it does: it is back."""
        if self._dues.pop((receiver, pattern), None) is None:
            return
        self._index.unsubscribe(receiver, pattern, None, receiver.peer)
        wild = self._wild.get(receiver)
        if wild is not None:
            wild.pop(pattern, None)
            if not wild:
                del self._wild[receiver]

    def expire(self, now: float, limit: int) -> list[bytes]:
        """Remove those whose time is up, at most `limit`; return their patterns, each once."""
        patterns: dict[bytes, None] = {}
        for _ in range(limit):
            if not self._dues or self.first_due > now:
                break
            receiver, pattern = next(iter(self._dues))
            self.discard(receiver, pattern)
            patterns[pattern] = None
        return list(patterns)

    def look_up(self, key: bytes) -> tuple[tuple[Receiver, ...], int]:
        """Return the receivers whose lingering subscriptions match an open key, and the steps to find them."""
        return self._index.look_up(key, None)
