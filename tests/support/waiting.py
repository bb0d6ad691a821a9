"""Waiting for something that no event announces: that a condition holds, or that a process stands still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["paused", "wait_until"]

T = TypeVar("T")


def wait_until(
    look: Callable[[], T], is_right: Callable[[T], object] = bool, *, timeout: float = 20.0, pause: float = 0.01
) -> T:
    """Look again and again until what is found is right, and return it.

    :param timeout: seconds after which the test fails, with what was found last.
    :param pause: seconds between two looks.
    """
    deadline = time.monotonic() + timeout
    while not is_right(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(pause)
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Make a process stand still, all its threads, until the body ends.

    A process goes on for some time after SIGSTOP: the one thread that takes the signal may have to wait for a CPU.
    The body may end the process.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: {_state(thread) for thread in Path(f"/proc/{pid}/task").iterdir()} == {"T"}, pause=0)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _state(thread: Path) -> str:
    """Return the letter for a thread's state, as in proc_pid_stat(5); "T", as for a stopped one, if it has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"
