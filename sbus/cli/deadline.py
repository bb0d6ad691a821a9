"""Waiting on the bus, on the clock and on whoever reads our output, all at once."""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterator

from sbus.client.blocking import Bus
from sbus.client.blocking.waiting import MAX_POLL_MS
from sbus.errors import TimedOut

__all__ = ["Deadline", "at_most", "wait"]


class Deadline:
    """A moment after which it is too late; never, without a number of seconds."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds that are left; None if it is never too late."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left == 0.0


def wait(bus: Bus, seconds: float | None, output: int | None = None) -> bool:
    """Wait until something has come from the bus.

    :param seconds: how long at most.
    :param output: a descriptor that is written to.
    :returns: whether something has come (which may be the end of the connection).
    :raises BrokenPipeError: if nobody reads from the output any more.
    """
    deadline = Deadline(seconds)
    poll = select.poll()
    try:
        with at_most(seconds, "connecting again"):  # if the connection is lost, and to be made again
            poll.register(bus, select.POLLIN)
    except TimedOut:
        return False
    if output is not None:
        poll.register(output, 0)  # an error or a hang-up is always told
    left = deadline.left
    ready = poll.poll(None if left is None else min(left * 1000, MAX_POLL_MS))
    if any(fd == output for fd, _ in ready):
        raise BrokenPipeError
    return bool(ready)


_RETRY_INTERVAL = 0.05
"""Seconds until the signal comes again, as one that comes just before a system call does not break that off."""


class _TooLate(BaseException):
    """Nobody but `at_most` is to catch this."""


@contextlib.contextmanager
def at_most(seconds: float | None, what: str) -> Iterator[None]:
    """Let something take so long, whatever it waits for. One may be within another: the time of that goes on.

    :param what: it, for the text of the error.
    :raises sbus.errors.TimedOut: if it was broken off.
    """
    if seconds is None:
        yield
        return

    is_running = True

    def too_late(*_: object) -> None:
        nonlocal is_running
        if is_running:
            is_running = False
            raise _TooLate

    before = signal.signal(signal.SIGALRM, too_late)
    began, outer = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    try:
        signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 1e-6), MAX_POLL_MS), _RETRY_INTERVAL)
        yield
    except _TooLate:
        raise TimedOut(f"the time is up: {what} is not done after {seconds:g} seconds") from None
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-6), _RETRY_INTERVAL)
