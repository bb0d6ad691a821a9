"""Less garbage collection: objects made at startup are left out, and full collections are rare.

.. rubric:: Theory of operation

A full collection visits every object that can be in a cycle of references: on a bus with thousands of clients,
everything that they hold. It takes up to 0.1 s, and the server serves nobody meanwhile. The interpreter starts one
whenever the number of such objects has grown by a quarter: clients that connect, or queues that grow, cause one after
the other.

Only cycles that have lived for some time need a full collection, and clients that have gone leave none. So full
collections can wait: the interpreter starts at most one in `INTERVAL` seconds. Until then, its threshold for them is
out of reach; when the time is up, the next collection of the middle generation puts the threshold back. The frequent
collections of young objects continue as always.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["INTERVAL", "RareCollections", "collect_less"]

INTERVAL = 60.0
"""Minimum interval between two full collections, in seconds."""
_FULL = 2
"""The generation of a full collection."""
_NEVER = 2**31 - 1
"""A threshold that no generation reaches."""


class RareCollections:
    """Keeps full collections apart, as one of `gc.callbacks`.

    :param clock: returns the time in seconds; it never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thresholds = gc.get_threshold()
        self._hold()

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Note the start or the end of a collection, as `gc.callbacks` specifies.

        :param phase: ``start`` or ``stop``.
        :param info: facts about the collection, among them its ``generation``.
        """
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
    """Leave the objects made so far out of later collections, and keep full ones apart.

    Call it once, when the process has started: the modules alone make a full collection 30 ms longer.
    """
    gc.collect()
    gc.freeze()
    gc.callbacks.append(RareCollections())
