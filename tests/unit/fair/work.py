"""Work for the lines of users."""

from __future__ import annotations

from sbus.fair import Lines
from tests.unit.fair.fakes import Machine, Reader, Work

FOREVER = float("inf")


def busy(machine: Machine) -> None:
    """Have two users send, so that the time of everybody is measured."""
    for _ in range(2):
        machine.scheduler.change(Lines())
    assert machine.scheduler.is_busy


def crowd(machine: Machine, packets: int) -> None:
    """Have another user send some packets between two slices."""
    machine.scheduler.begin(Lines(), packets)


def add(machine: Machine, lines: Lines, line: str, length: int, steps: float = FOREVER) -> Work | Reader:
    """Give a user work in one of its lines."""
    if line == "readers":
        reader = Reader(machine, lines, steps, length, line)
        reader.wait()
        return reader
    work = Work(machine, steps, length, line)
    if line == "mail":
        machine.scheduler.append(lines, work)
    else:
        machine.scheduler.add_chore(lines, work)
    return work


LINES = ("mail", "chores", "readers")
