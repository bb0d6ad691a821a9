"""Garbage collections that keep nobody waiting: what was there at the start is left out, and full ones are rare.

.. rubric:: Theory of operation

A full collection visits every object that can be in a cycle of references: on a bus with thousands of clients, all that
they hold. It takes 0.1 s, in which nobody is served, and the interpreter starts one whenever the number of such objects
has grown by a quarter: clients that come, or queues that grow, cause one after the other.

They are needed only for cycles that have lived for some time. What clients leave behind is in no cycle, so there is
time: at most one full collection takes place in `INTERVAL` seconds. The frequent collections, of young objects alone,
go on as always.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["INTERVAL", "RareCollections", "collect_less"]

INTERVAL = 60.0
"""Seconds between two full collections at least."""
_FULL = 2
"""The generation of a full collection."""
_NEVER = 2**31 - 1
"""A threshold that no generation reaches."""


class RareCollections:
    """Keeps full collections apart; call it as one of `gc.callbacks`.

    :param clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thresholds = gc.get_threshold()
        self._hold()

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Note the begin or the end of a collection."""
        if phase == "stop":
            if info["generation"] == _FULL:
                self._hold()
            elif info["generation"] == _FULL - 1 and self._clock() >= self._next:
                gc.set_threshold(*self._thresholds)

    def _hold(self) -> None:
        self._next = self._clock() + INTERVAL
        young, middle, _ = self._thresholds
        gc.set_threshold(young, middle, _NEVER)


def collect_less() -> None:
    """Leave what the process has made to start with out of later collections, and have few full ones from now on.

    A full collection that visits all modules takes 30 ms.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(RareCollections())
