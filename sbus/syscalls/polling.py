"""Waiting for one descriptor with poll(2), which takes any descriptor; select(2) fails from 1024 on."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["MAX_POLL_MS", "is_readable", "is_writable"]

MAX_POLL_MS = 2**31 - 1
"""Milliseconds of the longest timeout that poll(2) takes."""


def is_readable(descriptor: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Wait until reading would not block; also an error and the end of the file count.

    :param seconds: seconds to wait, at most 24 days; None for no limit.
    """
    return _poll(descriptor, select.POLLIN, seconds)


def is_writable(descriptor: FileDescriptorLike, seconds: float | None = 0.0) -> bool:
    """Wait until writing would not block; see `is_readable`."""
    return _poll(descriptor, select.POLLOUT, seconds)


def _poll(descriptor: FileDescriptorLike, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if seconds is None else min(seconds * 1000, MAX_POLL_MS)))
