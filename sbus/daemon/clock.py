"""Timers that do not follow the wall clock.

Twisted's reactors take the time of their delayed calls from ``time.time``. When the wall clock is set back by an hour,
a time-out of 30 seconds waits an hour; when it is set forward, all time-outs end at once. A process of its own gives
its reactor the monotonic clock (clock_gettime(2), ``CLOCK_MONOTONIC``) instead. A program that embeds a bus keeps its
reactor's clock: it is not the bus's to change.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["use_monotonic_clock"]


def use_monotonic_clock(reactor: Any) -> bool:
    """Make the delayed calls of a reactor follow the monotonic clock, before there is any.

    :returns: whether they do. Not so if the reactor has delayed calls already (their times are of the other clock), or
        takes its time from elsewhere, as the asyncio reactor does, whose event loop is monotonic anyway.
    """
    if getattr(reactor, "seconds", None) is time.monotonic:
        return True
    if reactor.getDelayedCalls() or reactor.seconds is not time.time:
        return False
    reactor.seconds = time.monotonic
    return True
