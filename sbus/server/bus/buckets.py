"""Token buckets of users: how much of something each may have at once, and how much per second.

They outlive the connections: otherwise a user who connects and leaves would always find a full one. A bucket that has
filled up again is forgotten, at the latest when the number of buckets has doubled: one takes about 200 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Buckets"]


class Buckets:
    """One token bucket for each user.

    :param bounds_of: returns the tokens a second that fill a user's bucket, and those in a full one; both may change
        at any time.
    :param clock: seconds of the monotonic clock.
    :param debt: tokens that a user may owe at most.
    """

    def __init__(
        self, bounds_of: Callable[[int], tuple[float, float]], clock: Callable[[], float], debt: float = 0.0
    ) -> None:
        self._bounds_of = bounds_of
        self._clock = clock
        self._debt = debt
        self._levels: dict[int, tuple[float, float]] = {}  # by UID: the tokens, and when they were counted
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._levels)

    def level(self, uid: int) -> float:
        """Return the tokens that a user has; below 0: its debt."""
        rate, burst = self._bounds_of(uid)
        now = self._clock()
        tokens, counted_at = self._levels.get(uid, (burst, now))
        return min(burst, tokens + (now - counted_at) * rate)

    def take(self, uid: int, tokens: float) -> float:
        """Take tokens from a user; return the rest, or below 0 its debt."""
        left = max(-self._debt, self.level(uid) - tokens)
        self._levels[uid] = left, self._clock()
        if len(self._levels) >= self._sweep_at:
            self._levels = {each: level for each, level in self._levels.items() if not self._is_full(each)}
            self._sweep_at = max(64, 2 * len(self._levels))
        return left

    def _is_full(self, uid: int) -> bool:
        return self.level(uid) >= self._bounds_of(uid)[1]
