"""The descriptors that this process may still open."""

from __future__ import annotations

import os
import resource
import sys

__all__ = ["descriptor_limit", "open_descriptors"]

_DIRECTORY = "/proc/self/fd"


def open_descriptors() -> int:
    """Return the number of open descriptors; 0 without /proc.

    The size of the directory is their number since Linux 6.2 (proc(5)), and 0 before. To list them takes 1 µs for each.
    """
    try:
        return os.stat(_DIRECTORY).st_size or len(os.listdir(_DIRECTORY)) - 1  # one of those listed it
    except OSError:
        return 0


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have (RLIMIT_NOFILE, getrlimit(2))."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
