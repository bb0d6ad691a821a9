"""How much may wait: for one receiver, and for all of them together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["QueueLimits", "SharedBudget"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for one receiver: messages, and bytes in packets."""

    messages: int = 65_536
    bytes: int = 64 << 20


class SharedBudget:
    """The limit of all queues together, in bytes, and each receiver's fair share of it."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit
        self.bytes = 0
        self._waiting: dict[Hashable, int] = {}

    def enter(self, user: Hashable) -> None:
        """A receiver of this user's has a queue now."""
        self._waiting[user] = self._waiting.get(user, 0) + 1

    def leave(self, user: Hashable) -> None:
        """A receiver of this user's has no queue any more."""
        self._waiting[user] -= 1
        if not self._waiting[user]:
            del self._waiting[user]

    def share(self, user: Hashable) -> int:
        """What a receiver of this user's may hold: the limit, by users with a queue, by their receivers with one."""
        return self.limit // (max(len(self._waiting), 1) * max(self._waiting.get(user, 1), 1))
