"""Time-outs of a blocking command.

A command waits for several things at once. ``sbus sub --timeout=5 | head -1`` must end when five seconds are over,
when the server goes away, and when ``head`` has exited, and it must do so at once and not at its next message.

*Waiting for messages* is one poll(2) in `wait_readable`: on the connection, and on the output with no events asked for.
The kernel reports an error or a hang-up of a descriptor in any case, so a pipe whose reader has gone wakes the command
although there is nothing to write. That ends it as SIGPIPE would have.

*Everything else that may block* has no descriptor to poll: publishing to a server that does not read, a line from
standard input, reconnecting. `time_limit` interrupts it with SIGALRM and an exception that is not an `Exception`, so
that no handler on the way mistakes it for an error of its own. A signal that arrives just before a system call does not
interrupt that call, therefore the timer repeats every 50 ms until the block has ended. A thread with a time-out was no
alternative: it cannot interrupt a system call of the main thread.

Limits nest: when an inner limit ends, it restores what is left of the outer one. Longer waits than poll(2) accepts are
cut to that, and the caller's loop repeats them. Signals reach only the main thread, where commands do all their work.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Iterator

from sbus.client.blocking import Bus
from sbus.client.blocking.waiting import MAX_POLL_MS
from sbus.errors import TimedOut

__all__ = ["Deadline", "time_limit", "wait_readable"]


class Deadline:
    """A moment in the future, or never.

    :param seconds: seconds from now; None for never.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0; None for never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.left == 0.0


def wait_readable(bus: Bus, seconds: float | None, output: int | None = None) -> bool:
    """Wait for messages from the bus, or for the end of the connection.

    :param seconds: seconds to wait; None for no limit.
    :param output: a descriptor to watch for the end of its reader.
    :returns: whether there may be something to read; False when the time is up.
    :raises BrokenPipeError: if the reader of the output has gone.
    """
    deadline = Deadline(seconds)
    poll = select.poll()
    reconnects = bus.state == "reconnecting"
    try:
        with time_limit(seconds, "reconnecting"):  # asking for the descriptor reconnects after a loss
            poll.register(bus, select.POLLIN)
    except TimedOut:
        return False
    if reconnects:
        return True  # what came with the new connection is in memory, which no poll shows
    if output is not None:
        poll.register(output, 0)  # errors and hang-ups are always reported
    left = deadline.left
    ready = poll.poll(None if left is None else min(left * 1000, MAX_POLL_MS))
    if any(fd == output for fd, _ in ready):
        raise BrokenPipeError
    return bool(ready)


_ALARM_INTERVAL = 0.05
"""Seconds until SIGALRM repeats, in case it came just before a system call."""


class _AlarmRang(BaseException):
    """The time is up; only `time_limit` catches this."""


@contextlib.contextmanager
def time_limit(seconds: float | None, activity: str) -> Iterator[None]:
    """Interrupt a block after some time, whatever it waits for. Limits may be nested.

    :param seconds: seconds until then; None for no limit.
    :param activity: the block's activity, for the text of the error, such as ``publishing``.
    :raises sbus.errors.TimedOut: if the block was interrupted.
    """
    if seconds is None:
        yield
        return

    is_running = True

    def on_alarm(*_: object) -> None:
        nonlocal is_running
        if is_running:
            is_running = False
            raise _AlarmRang

    before = signal.signal(signal.SIGALRM, on_alarm)
    start, outer = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    try:
        signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 1e-6), MAX_POLL_MS), _ALARM_INTERVAL)
        yield
    except _AlarmRang:
        raise TimedOut(f"timed out: {activity} did not finish within {seconds:g} seconds") from None
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - start), 1e-6), _ALARM_INTERVAL)
