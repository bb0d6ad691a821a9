"""Pace: the bus reads a client more slowly when its user publishes above ``max_rate``.

A policy gives the rates (``max_rate``). The clients of a user that have a rate in common share a bucket, so that more
connections bring no more messages; a client takes from the buckets of all its rates. A batch is handled as far as the
buckets have tokens. Then the bus stops reading the client, and further packets wait in its socket. The client reserves
its next tokens before they are there, and waits for them: a client that reserves later waits longer. So no client of a
user starves another one, and a user wakes the bus as often with many clients as with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from sbus.server.bus.buckets import Buckets

__all__ = ["Pace", "Paces"]

_BURST_SECONDS = 0.025
"""Seconds' worth of messages in a full bucket: a user who begins sends no more than this beyond the rate. The rate must
hold within a twentieth in each second. Tokens that were waited for go back after the same time: otherwise many clients
that were blocked meanwhile would have saved them."""


class Paces:
    """The buckets of all users with a rate.

    :param clock: its seconds fill the buckets, and it calls when there are tokens again.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._buckets: dict[float, Buckets] = {}

    def of(self, uid: int, rates: Iterable[float], on_tokens: Callable[[], None]) -> Pace:
        """Return the pace of a client of this user.

        :param rates: messages a second, each of all clients of the user that have this rate.
        :param on_tokens: called when a client that waits may be read again.
        """
        return Pace({rate: self._of(rate) for rate in rates}, uid, self._clock, on_tokens)

    def _of(self, rate: float) -> Buckets:
        buckets = self._buckets.get(rate)
        if buckets is None:
            bounds = rate, _burst(rate)
            buckets = self._buckets[rate] = Buckets(lambda _: bounds, self._clock.seconds, math.inf)
        return buckets

    def forget_all(self) -> None:
        """Forget the buckets: a new policy has other rates."""
        self._buckets.clear()


class Pace:
    """The pace of one client.

    :ivar is_waiting: whether the client waits for tokens, and must not be read.
    """

    __slots__ = ("_buckets", "_clock", "_on_tokens", "_taken", "_timer", "_uid", "_until", "is_waiting")

    def __init__(
        self, buckets: dict[float, Buckets], uid: int, clock: IReactorTime, on_tokens: Callable[[], None]
    ) -> None:
        self._buckets = buckets
        self._uid = uid
        self._clock = clock
        self._on_tokens = on_tokens
        self._taken = 0  # tokens for the next messages
        self._until = 0.0  # when they go back
        self._timer: IDelayedCall | None = None
        self.is_waiting = False

    def quota(self) -> int:
        """Return the messages that may be handled now."""
        if self._taken and self._clock.seconds() > self._until:
            self.spend(0)
        return self._taken or max(0, int(min(each.level(self._uid) for each in self._buckets.values())))

    def spend(self, messages: int) -> None:
        """Count messages that were handled."""
        for buckets in self._buckets.values():
            buckets.take(self._uid, messages - self._taken)
        self._taken = 0

    def wait(self) -> None:
        """Wait for half of the smallest bucket: a timer for each message would cost more than the messages."""
        self._taken = max(1, int(_burst(min(self._buckets)) / 2))
        wait = max(-each.take(self._uid, self._taken) / rate for rate, each in self._buckets.items())
        self._until = self._clock.seconds() + max(0.0, wait) + _BURST_SECONDS
        self.is_waiting = True
        self._timer = self._clock.callLater(max(0.0, wait), self._has_tokens)

    def _has_tokens(self) -> None:
        self._timer = None
        self.is_waiting = False
        self._on_tokens()

    def stop(self) -> None:
        """Make no more calls."""
        self.spend(0)
        self.is_waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _burst(rate: float) -> float:
    return max(1.0, rate * _BURST_SECONDS)
