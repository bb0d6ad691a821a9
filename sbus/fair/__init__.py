"""Fairness: who is served next, for how long, and what waits for its turn. It knows no sockets and no bus."""

from sbus.fair.lines import Entry, Lines, Reader
from sbus.fair.scheduler import Scheduler

__all__ = ["Entry", "Lines", "Reader", "Scheduler"]
