"""A machine without a bus: a clock that only work moves, a reactor that only tests turn, and work of known length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sbus.fair import Lines, Scheduler

__all__ = ["Machine", "Reader", "Work"]


class Machine:
    """A scheduler, its clock and its reactor.

    :ivar now: nanoseconds.
    :ivar calls: the calls that are due.
    :ivar log: what was done, in order: the name of the work each time.
    """

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.calls: list[Callable[[], None]] = []
        self.log: list[str] = []
        self.scheduler = Scheduler(self, lambda: self.now)

    def callLater(self, delay: float, call: Callable[[], None]) -> None:
        assert delay == 0
        self.calls.append(call)

    def turn(self, times: int = 1) -> None:
        """Make the calls that are due, and those that these ask for, some times over."""
        for _ in range(times):
            calls, self.calls = self.calls, []
            assert len(calls) <= 1  # the scheduler asks for one turn at a time
            for call in calls:
                call()

    def settle(self) -> None:
        """Turn until nothing is due."""
        while self.calls:
            self.turn()

    def batch(self, lines: Lines, took: int) -> bool:
        """Read a client of a user from its socket, which takes some time, if that is allowed; return whether it is."""
        scheduler = self.scheduler
        if scheduler.is_busy and not scheduler.may_read(lines):
            scheduler.may_pass()  # the pass ends
            return False
        if scheduler.last is not lines:
            scheduler.change(lines)
        elif scheduler.crowd:
            scheduler.count_batch()
        scheduler.begin(lines)
        self.now += took
        scheduler.end(lines)
        return True


class Work:
    """An entry or a chore that takes a number of steps of known length.

    :ivar took: nanoseconds so far.
    """

    def __init__(self, machine: Machine, steps: float, length: int, name: str = "") -> None:
        self.machine = machine
        self.left = steps
        self.length = length
        self.name = name
        self.took = 0
        self.during: Callable[[], None] | None = None

    def run(self, until: int) -> bool:
        while True:
            self.machine.now += self.length
            self.took += self.length
            self.machine.log.append(self.name)
            self.left -= 1
            if self.during is not None:
                self.during()
            if self.left <= 0:
                return True
            if self.machine.now >= until:
                return False

    def describe(self) -> dict[str, Any]:
        return {"left": self.left}


class Reader:
    """A client that has sent a number of batches of known length."""

    def __init__(self, machine: Machine, lines: Lines, batches: float, length: int, name: str = "") -> None:
        self.machine = machine
        self.lines = lines
        self.left = batches
        self.length = length
        self.name = name
        self.took = 0
        self.has_hung_up = False
        self.before: Callable[[], bool] | None = None

    def wait(self) -> None:
        self.machine.scheduler.wait(self.lines, self, self.has_hung_up)

    def read_on(self, until: int) -> None:
        if self.before is not None and not self.before():
            return
        scheduler = self.machine.scheduler
        scheduler.begin(self.lines)
        self.machine.now += self.length
        self.took += self.length
        self.machine.log.append(self.name)
        scheduler.end(self.lines)
        self.left -= 1
        if self.left > 0:
            self.wait()
