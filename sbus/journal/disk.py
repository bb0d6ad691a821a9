"""How the journal gets bytes onto the disk: whole, in place, and for good.

All that writes goes through here, so that tests can let each step fail.
"""

from __future__ import annotations

import os

__all__ = ["create", "remove", "replace", "sync", "sync_directory", "truncate", "write"]

CHUNK = 1 << 20


def create(path: str, mode: int) -> int:
    """Create a file that must not be there, for reading and writing, with exactly this mode; returns its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask is
    except OSError:
        os.close(fd)
        remove(path)
        raise
    return fd


def write(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of it at this offset.

    :raises OSError: if it cannot be; a part of it may then be written.
    """
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, at)
        rest = rest[written:]
        at += written


def truncate(fd: int, length: int) -> None:
    """Let a file end there."""
    os.ftruncate(fd, length)


def sync(fd: int) -> None:
    """Return when the file's content is on the disk; after an error nothing is known of what was not synced before."""
    os.fdatasync(fd)


def sync_directory(path: str) -> None:
    """Return when the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def replace(path: str, data: bytes, mode: int) -> None:
    """Write a small file so that at any moment it is the old one or the new one, and the new one for good."""
    temporary = f"{path}.tmp"
    remove(temporary)
    fd = create(temporary, mode)
    try:
        try:
            write(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        remove(temporary)
        raise
    sync_directory(os.path.dirname(path))
