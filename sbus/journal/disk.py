"""Every call by which the journal changes files.

The journal writes, truncates, syncs and removes files here and nowhere else, so that the tests can make each step fail
or crash (``tests/support/faults.py``). A function returns only when the whole of its work is done.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from sbus import ownership

__all__ = [
    "create",
    "inside",
    "make_directories",
    "open_existing",
    "remove",
    "replace",
    "sync",
    "sync_directory",
    "sync_file",
    "too_long",
    "truncate",
    "write",
]


def create(path: str, mode: int) -> int:
    """Create a file with exactly this mode, whatever the umask (`sbus.ownership.create`).

    :returns: its descriptor, for reading and writing.
    :raises FileExistsError: if there is such a file.
    """
    return ownership.create(path, mode)


def open_existing(path: str) -> int:
    """Open a file for reading and writing.

    A link is not followed: root writes here into directories of other users, who can put links there.
    """
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def make_directories(path: str, mode: int) -> None:
    """Make a directory and its missing parents, and sync each into its parent (`sbus.ownership.make_directory`)."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_directories(parent, mode)
    with contextlib.suppress(FileExistsError):  # made meanwhile
        ownership.make_directory(path, mode)
        sync_directory(parent)


@contextlib.contextmanager
def inside(directory: str) -> Iterator[str]:
    """Yield a path that means this directory throughout the block, whatever takes its place meanwhile.

    :raises NotADirectoryError: if it is a link, or anything else.
    :raises OSError: if ``/proc`` is not mounted.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as e:
        raise NotADirectoryError(e.errno, "no directory, or a link to one, which is not followed", directory) from None
    try:
        path = f"/proc/self/fd/{fd}"
        if not os.path.isdir(path):
            raise OSError(errno.ENOSYS, "it cannot be changed safely while /proc is not mounted: mount it", directory)
        yield path
    finally:
        os.close(fd)


def write(fd: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at an offset.

    :raises OSError: if that fails; a part of `data` may then be written.
    """
    rest = memoryview(data)
    while rest:
        try:
            written = os.pwrite(fd, rest, at)
        except OSError as e:
            if e.errno == errno.EFBIG:
                raise too_long() from None
            raise
        rest = rest[written:]
        at += written


def too_long() -> OSError:
    """Return the error for a file that would exceed the limit on its length (RLIMIT_FSIZE), with the remedy."""
    remedy = "raise the limit on the length of files (prlimit --fsize, LimitFSIZE=)"
    return OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: {remedy}")


def truncate(fd: int, length: int) -> None:
    """Set the length of a file, in bytes."""
    os.ftruncate(fd, length)


def sync(fd: int) -> None:
    """Return when the content of a file is on the disk (fdatasync(2)).

    After an error, it is unknown which of the bytes written since the last sync are on the disk.
    """
    os.fdatasync(fd)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Return when the content of a file that others have written is on the disk."""
    _sync_path(path, 0)


def sync_directory(path: str) -> None:
    """Return when the names in a directory are on the disk."""
    _sync_path(path, os.O_DIRECTORY)


def _sync_path(path: str | os.PathLike[str], flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def replace(path: str, data: bytes, mode: int) -> None:
    """Replace the content of a small file atomically, and sync it.

    At any moment, also after a power cut, the file has its old content or the new one. It keeps its owner, its
    permissions and its ACL.

    :param mode: the permissions if there is no file yet.
    :raises OSError: if that fails; the file then has its old content, or the new one with a name that is not synced.
    """
    temporary = f"{path}.tmp"
    remove(temporary)
    fd = ownership.create_for(path, temporary, mode)
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
