"""The lock of a journal's writer, and the directory that it is in.

flock(2) holds the lock, so the kernel releases it however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from sbus import ownership
from sbus.errors import JournalLocked
from sbus.journal import disk
from sbus.journal.layout import LOCK, link_error, read_identity

__all__ = ["locked", "make_directory", "take_lock"]


def make_directory(directory: str, mode: int) -> None:
    """Make the directory of a journal, if there is none, with exactly these permissions; all may enter its parents."""
    disk.make_directories(os.path.dirname(directory), 0o755)
    disk.make_directories(directory, mode)


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of an existing journal's writer.

    :raises JournalLocked: if a writer has the journal open.
    :raises JournalError: if there is no journal.
    """
    directory = os.path.abspath(directory)
    read_identity(directory)
    lock = take_lock(directory, 0o600, "stop it first, or, if it is a child process of a bus (--record), the bus")
    try:
        yield
    finally:
        os.close(lock)


def take_lock(directory: str, mode: int, remedy: str = "stop it, or record into another directory") -> int:
    """Lock a journal for writing.

    :param remedy: what to do if another process holds the lock.
    :returns: a descriptor that holds the lock until it is closed.
    :raises JournalLocked: if another process holds it.
    :raises JournalError: if a link is in its place.
    """
    path = os.path.join(directory, LOCK)
    try:
        fd = ownership.open_or_create(path, os.O_RDWR, mode)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise link_error(path) from None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        disk.write(fd, b"%-10d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 10, 0).decode("ascii", "replace").strip() or "of unknown ID"
        os.close(fd)
        raise JournalLocked(f"{directory}: process {holder} writes this journal: {remedy}") from None
    except OSError:
        os.close(fd)
        raise
    return fd
