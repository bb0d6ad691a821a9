"""The descriptors of this process: their limit and number, and the three standard ones.

A process may be started with descriptors 0 to 2 closed (cron jobs, supervisors, ``0<&- 1>&-``). The next files that it
opens get these numbers. A daemon that then connects its standard descriptors to /dev/null, as daemons do, closes its
own socket or epoll instance, and any warning that is printed goes into a client's connection. So each daemon calls
`fill_standard` before it opens anything, and `above_standard` for a socket that it inherits.
"""

from __future__ import annotations

import fcntl
import os
import resource
import sys
from contextlib import suppress

__all__ = [
    "above_standard",
    "descriptor_limit",
    "fill_standard",
    "open_descriptors",
    "raise_limit",
    "room_for",
    "to_null",
]

_DIRECTORY = "/proc/self/fd"
_HIGH = 16_384
"""A number that is high enough to be looked at: the kernel makes its table of files as long as the highest one."""
_FIRST_FREE = 3
"""The first descriptor after the standard ones."""


def open_descriptors() -> int:
    """Return the number of open descriptors; 0 without /proc.

    The size of the directory is their number since Linux 6.2 (proc(5)), and 0 before. Listing them takes 1 µs for each.
    """
    try:
        return os.stat(_DIRECTORY).st_size or len(os.listdir(_DIRECTORY)) - 1  # one of those listed it
    except OSError:
        return 0


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have (RLIMIT_NOFILE, getrlimit(2))."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_limit() -> None:
    """Have as many descriptors as the process may give itself: the hard limit (getrlimit(2)).

    The soft limit, 1,024 as a rule, is there for programs that use select(2). It stays if the kernel refuses: the hard
    one may be above fs.nr_open by now (proc_sys_fs(5)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for(count: int, descriptor: int) -> int:
    """Return the number of further descriptors that this process may open, up to `count`.

    As the kernel gives out the lowest free number, all numbers are free above one that is, except in a process that had
    many more descriptors open. Looking at one costs 1 µs.

    :param descriptor: any that is open.
    """
    limit = descriptor_limit()
    first = min(limit - count, _HIGH)
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(first, 0))
        os.close(found)
        if found == first:
            return count
    except OSError:
        pass
    return min(count, max(0, limit - open_descriptors()))


def fill_standard() -> None:
    """Connect each standard descriptor that is closed to /dev/null, so that nothing else takes its number."""
    while (null := os.open(os.devnull, os.O_RDWR)) < _FIRST_FREE:
        os.set_inheritable(null, True)  # as standard descriptors are
    os.close(null)


def to_null(descriptor: int) -> None:
    """Connect a standard descriptor to /dev/null; its old file is closed, and its number stays occupied."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def above_standard(descriptor: int) -> int:
    """Move a descriptor out of the numbers of the standard ones, which it leaves to /dev/null.

    :returns: its number, the same if it was no standard one.
    """
    if descriptor >= _FIRST_FREE:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    to_null(descriptor)
    return moved
