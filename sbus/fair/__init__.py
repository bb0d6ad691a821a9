"""Fairness: the user who is served next, its time, and the work that waits. It knows no sockets and no bus."""

from sbus.fair.lines import Entry, Lines, Reader
from sbus.fair.scheduler import Scheduler

__all__ = ["Entry", "Lines", "Reader", "Scheduler"]
