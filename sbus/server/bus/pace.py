"""Pace: a client whose user may send only so many messages a second is read more slowly.

A policy gives the rate (``max_rate``). The clients of a user with the same rate share a bucket, so that more
connections bring no more messages. A batch is handled as far as the bucket has tokens; then the client is not read
until there are some again, and what it sends waits in its socket.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.server.bus.buckets import Buckets

__all__ = ["Pace", "Paces"]

_BURST_SECONDS = 0.025
"""Seconds' worth of messages in a full bucket: a user who begins sends no more than this beyond the rate, which is to
hold within a twentieth in each second."""


class Paces:
    """The buckets of all users with a rate.

    :param clock: its seconds fill the buckets, and it calls when there are tokens again.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._buckets: dict[float, Buckets] = {}

    def of(self, uid: int, rate: float, on_tokens: Callable[[], None]) -> Pace:
        """Return the pace of a client of this user.

        :param rate: messages a second of all clients of the user that have this rate.
        :param on_tokens: called when a client that waits may be read again.
        """
        buckets = self._buckets.get(rate)
        if buckets is None:
            bounds = rate, _burst(rate)
            buckets = self._buckets[rate] = Buckets(lambda _: bounds, self._clock.seconds, math.inf)
        return Pace(buckets, uid, rate, self._clock, on_tokens)

    def forget_all(self) -> None:
        """Forget the buckets: a new policy has other rates."""
        self._buckets.clear()


class Pace:
    """The pace of one client.

    :ivar is_waiting: whether the client waits for tokens, and must not be read.
    """

    __slots__ = ("_buckets", "_clock", "_on_tokens", "_rate", "_timer", "_uid", "is_waiting")

    def __init__(
        self, buckets: Buckets, uid: int, rate: float, clock: IReactorTime, on_tokens: Callable[[], None]
    ) -> None:
        self._buckets = buckets
        self._uid = uid
        self._rate = rate
        self._clock = clock
        self._on_tokens = on_tokens
        self._timer: IDelayedCall | None = None
        self.is_waiting = False

    def quota(self) -> int:
        """Return the messages that may be handled now."""
        return max(0, int(self._buckets.level(self._uid)))

    def spend(self, messages: int) -> None:
        """Count messages that were handled."""
        self._buckets.take(self._uid, messages)

    def wait(self) -> None:
        """Wait until half a bucket is full: a timer for each message would cost more than the messages."""
        wanted = max(1.0, _burst(self._rate) / 2)
        self.is_waiting = True
        self._timer = self._clock.callLater(
            max(0.0, wanted - self._buckets.level(self._uid)) / self._rate, self._has_tokens
        )

    def _has_tokens(self) -> None:
        self._timer = None
        self.is_waiting = False
        self._on_tokens()

    def stop(self) -> None:
        """Call nobody any more."""
        self.is_waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _burst(rate: float) -> float:
    return max(1.0, rate * _BURST_SECONDS)
