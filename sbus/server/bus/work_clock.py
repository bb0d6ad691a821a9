"""The clock that measures what is done in a turn: CPU time of the server's thread, full garbage collections aside.

A full collection visits what all clients hold, which takes tens of milliseconds on a large bus. It takes place when
somebody makes one object more, which is no fault of that client: charged with it, the client would wait for a hundred
turns.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import cache

__all__ = ["work_clock"]

_FULL = 2
"""The generation of a full collection."""


class _WorkClock:
    """Returns the CPU time of the thread that made it, in nanoseconds, without full collections."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._began = self._collected = 0

    def __call__(self) -> int:
        return time.thread_time_ns() - self._collected

    def collection(self, phase: str, info: dict[str, int]) -> None:
        """Note the start or the end of a collection (`gc.callbacks`)."""
        if info["generation"] != _FULL or threading.get_ident() != self._thread:
            return
        now = time.thread_time_ns()
        if phase == "start":
            self._began = now
        else:
            self._collected += now - self._began


@cache
def work_clock() -> Callable[[], int]:
    """Return the clock of this process; call it in the thread of the reactor."""
    clock = _WorkClock()
    gc.callbacks.append(clock.collection)
    return clock
