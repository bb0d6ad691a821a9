"""Time-outs of a blocking command.

A command waits for several things at once. ``sbus sub --timeout=5 | head -1`` must end when five seconds are over,
when the server goes away, and when ``head`` has exited, and it must do so at once and not at its next message.

*Waiting for messages* is one poll(2) in `wait_readable`: on the connection, and on the output with no events asked for.
The kernel reports an error or a hang-up of a descriptor in any case, so a pipe whose reader has gone wakes the command
although there is nothing to write. That ends it as SIGPIPE would have.

*Everything else that may block* gets what is left of the `Deadline`: connecting, round trips, a server that does not
read (`sbus.client.blocking.Bus.limit`), a line of the input (`sbus.cli.streams`). No signal interrupts anything: an
alarm rings between any two statements, also between the last one and its own removal.

Longer waits than poll(2) accepts are cut to that, and the caller's loop repeats them.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sbus.errors import TimedOut
from sbus.syscalls.polling import MAX_POLL_MS

if TYPE_CHECKING:
    from sbus.client.blocking import Bus

__all__ = ["Deadline", "wait_readable"]

_RECONNECTING_MS = 50
"""Milliseconds between two looks at a connection that is being made again."""


class Deadline:
    """A moment in the future, or never.

    :param seconds: seconds from now; None for never.
    :ivar activity: what has to be done by then, for the text of the error, such as ``publishing``.
    """

    def __init__(self, seconds: float | None, activity: str = "waiting") -> None:
        self.seconds = seconds
        self.activity = activity
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0; None for never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def poll_ms(self) -> float | None:
        """Milliseconds left, at most what poll(2) accepts; None for never."""
        left = self.left
        return None if left is None else min(left * 1000, MAX_POLL_MS)

    @property
    def has_passed(self) -> bool:
        return self.left == 0.0

    def check(self) -> None:
        """Do nothing before the deadline.

        :raises TimedOut: after it.
        """
        if self.has_passed:
            raise self._timed_out()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give every `TimedOut` of a block the text of this deadline."""
        try:
            yield
        except TimedOut:
            raise self._timed_out() from None

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"timed out: {self.activity} did not finish within {self.seconds:g} s")


def wait_readable(bus: Bus, seconds: float | None, output: int | None = None) -> bool:
    """Wait for messages from the bus, or for the end of the connection.

    While the connection is being made again, the wait is short: each ``bus.get_ready()`` continues with that.

    :param seconds: seconds to wait; None for no limit.
    :param output: a descriptor to watch for the end of its reader.
    :returns: whether there may be something to read; False when the time is up.
    :raises BrokenPipeError: if the reader of the output has gone.
    """
    poll = select.poll()
    if output is not None:
        poll.register(output, 0)  # errors and hang-ups are always reported
    milliseconds = Deadline(seconds).poll_ms
    is_reconnecting = bus.state == "reconnecting"
    if is_reconnecting:
        milliseconds = _RECONNECTING_MS if milliseconds is None else min(milliseconds, _RECONNECTING_MS)
    else:
        poll.register(bus, select.POLLIN)
    ready = poll.poll(milliseconds)
    if any(fd == output for fd, _ in ready):
        raise BrokenPipeError
    return bool(ready) or is_reconnecting
