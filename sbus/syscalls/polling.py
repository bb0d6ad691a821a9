"""Waiting for one descriptor with poll(2), which takes any descriptor; select(2) fails from 1024 on."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["MAX_POLL_MS", "has_hung_up", "is_readable", "is_writable", "poll_until"]

MAX_POLL_MS = 2**31 - 1
"""Milliseconds of the longest timeout that poll(2) takes."""


def is_readable(descriptor: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Wait until reading would not block; also an error and the end of the file count.

    :param seconds: seconds to wait; None for no limit.
    """
    return _poll(descriptor, select.POLLIN, seconds)


def is_writable(descriptor: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Wait until writing would not block; see `is_readable`."""
    return _poll(descriptor, select.POLLOUT, seconds)


def has_hung_up(descriptor: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Wait until the other end is closed, which may have left something to read; see `is_readable`."""
    return _poll(descriptor, 0, seconds)


def _poll(descriptor: FileDescriptorLike, events: int, seconds: float | None) -> bool:
    return poll_until(descriptor, events, None if seconds is None else time.monotonic() + seconds)


def poll_until(descriptor: FileDescriptorLike, events: int, deadline: float | None) -> bool:
    """Wait for events of poll(2), or for an error or a hang-up, which are always reported.

    :param deadline: when to give up, in the time of `time.monotonic`; None for no limit.
    :returns: False if the deadline has passed first.
    """
    poll = select.poll()
    poll.register(descriptor, events)
    if deadline is None:
        return bool(poll.poll())
    while True:
        left = max(0.0, deadline - time.monotonic()) * 1000
        if poll.poll(min(left, MAX_POLL_MS)):
            return True
        if left <= MAX_POLL_MS:
            return False
