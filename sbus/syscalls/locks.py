"""Locks on files (flock(2)) that end with the process that holds them: whether one is held."""

from __future__ import annotations

import fcntl
import os

__all__ = ["is_locked"]


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether another process holds the exclusive lock of a file; False if there is no such file.

    :raises OSError: if the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
