"""Whether a journal's directory is still where it was opened.

A writer has its files open, so it would not notice that its directory was renamed. A path names the same directory as
long as the numbers of the device and the inode are the same (stat(2)).
"""

from __future__ import annotations

import errno
import os

__all__ = ["JournalMoved", "Place"]


class JournalMoved(OSError):
    """The directory of a journal is no longer where it was opened."""


class Place:
    """A path, and the directory that it names now.

    :param directory: the path.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._identity = _identity(directory)

    def check(self) -> None:
        """Check that the path still names the same directory.

        :raises JournalMoved: if it names another one, or none.
        """
        found = _identity(self._directory)
        if found == self._identity:
            return
        what = "its directory was moved away or removed" if found is None else "another directory is in its place"
        raise JournalMoved(
            errno.ENOENT, f"{what}: move it back, or make an empty directory there to begin a new journal"
        )

    def find(self, lock: int) -> str | None:
        """Return where the directory is now; None if it was removed.

        :param lock: a descriptor of a file in it.
        """
        path = os.path.dirname(os.readlink(f"/proc/self/fd/{lock}"))
        return path if _identity(path) == self._identity else None


def _identity(directory: str) -> tuple[int, int] | None:
    """Return the numbers of the device and the inode of a directory; None if there is none."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
