"""The clock of turns measures work, and nothing that the server does for all."""

from __future__ import annotations

import gc
import time

from sbus.server.bus.work_clock import work_clock


def test_full_collections_are_left_out():
    """A full garbage collection is charged to nobody, and other work is."""
    clock = work_clock()
    held: list[list[int]] = [[] for _ in range(200_000)]
    began, cpu = clock(), time.thread_time_ns()
    gc.collect()
    took = time.thread_time_ns() - cpu
    assert clock() - began < took / 4
    assert len(held) == 200_000
    began, cpu = clock(), time.thread_time_ns()
    sum(range(300_000))
    assert clock() - began > (time.thread_time_ns() - cpu) / 2
    assert work_clock() is clock
