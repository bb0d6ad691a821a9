"""The open descriptors of this process, to find those that a test leaks."""

from __future__ import annotations

import contextlib
import os

__all__ = ["descriptors"]


def descriptors() -> dict[str, str]:
    """Return the open descriptors of this process, and what they are.

    A test that leaks none ends with some of those with which it began: the garbage collector may have closed others,
    which earlier tests have left behind.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found
