"""Temporary directories for sockets: a socket's path has at most 107 bytes, and ``$TMPDIR`` may be longer than that."""

from __future__ import annotations

import os
import tempfile

from sbus.errors import AddressError

__all__ = ["fits_socket", "new_socket_directory"]

_LONGEST_PATH = 107
_ROOM = 32
"""Bytes for the name of a socket in the directory."""


def new_socket_directory(prefix: str = "sbus-") -> str:
    """Make a temporary directory in which the paths of sockets are short enough, and return its path.

    It is where temporary files usually are if that is short, else in another directory for them.

    :raises AddressError: if none of them can be used.
    """
    parents = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm"]
    for parent in parents:
        random = 8  # bytes that `mkdtemp` adds
        if parent and len(os.fsencode(parent)) + len(f"/{prefix}/") + random + _ROOM <= _LONGEST_PATH:
            try:
                return tempfile.mkdtemp(prefix=prefix, dir=parent)
            except OSError:
                continue
    raise AddressError(
        f"no place for a socket: its path has at most {_LONGEST_PATH} bytes, so {parents[0]} is too long, and "
        f"{', '.join(parents[2:])} cannot be written: set TMPDIR to a directory with a short path"
    )


def fits_socket(path: str) -> bool:
    """Return whether a path is short enough for a socket."""
    return len(os.fsencode(path)) <= _LONGEST_PATH
