"""The users whom a process trusts as itself: root, and its own user.

In a user namespace without a mapping for every user, the kernel reports the overflow UID for all users without one
(user_namespaces(7)). A process with that UID, as in images with ``USER nobody``, cannot tell its own user's processes
from theirs. So it has no own user.
"""

from __future__ import annotations

import functools
import os

from sbus.syscalls.sockets import overflow_ids

__all__ = ["has_own_user", "is_own_user", "is_owner"]

_ALL_IDS = 2**32 - 1
"""The IDs that a namespace can map: all but the last one."""


def is_own_user(uid: int) -> bool:
    """Return whether the UID of a peer is that of this process, and proves it.

    The process's user is looked up again each time: twistd --uid and --euid change it after the start.
    """
    return uid == os.geteuid() and uid != _shared_uid()


def is_owner(uid: int) -> bool:
    """Return whether the UID of a peer is that of root, or of this process; see `is_own_user`."""
    return uid == 0 or is_own_user(uid)


def has_own_user() -> bool:
    """Return whether the UID of this process proves anything."""
    return is_own_user(os.geteuid())


@functools.cache
def _shared_uid() -> int | None:
    """Return the UID that stands for all users without a mapping; None if there are none."""
    try:
        with open("/proc/self/uid_map") as file:
            mapped = sum(int(line.split()[2]) for line in file)
    except (OSError, ValueError, IndexError):
        return None  # a kernel without user namespaces
    return overflow_ids()[0] if mapped < _ALL_IDS else None
