"""A log file with a bounded number of older ones beside it.

`BoundedLogFile` differs from Twisted's ``LogFile`` in how it rotates. That one closes and renames the file. It goes on
writing to the same file, without a bound, if it may not rename: as after ``twistd --uid=`` in a directory of root's. If
there is no descriptor left to open the new file, it is closed for good. This one copies the file to ``NAME.1`` and
empties it, so it stays open and keeps its owner; if it cannot be copied, its newer half is kept.

Another program may rotate the log: logrotate(8) moves the file away, puts an empty one in its place or none, and sends
SIGUSR1. So at each rotation the file at the path counts. If it is not the one that is open, the log continues there.
`OutputFiles` does the same for standard output and standard error where they were redirected to files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from twisted.logger import ILogObserver, LogEvent
from zope.interface import implementer

from sbus.daemon.log_text import line_of

__all__ = ["BoundedLogFile", "OutputFiles"]

_MODE = 0o666


@implementer(ILogObserver)
class BoundedLogFile:
    """An observer that writes events to a file, as text.

    :param path: the file; it is appended to.
    :param size: bytes at which it is rotated.
    :param files: files that are kept, this one included; the older ones are ``NAME.1`` and up, the newest first.
    :raises OSError: if the file cannot be opened.
    """

    def __init__(self, path: str | Path, size: int, files: int) -> None:
        self.path = os.path.abspath(path)
        self._limit = size
        self._older = files - 1
        self._lock = threading.Lock()  # threads log, too
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        self._size = os.fstat(self._fd).st_size

    def __call__(self, event: LogEvent) -> None:
        """Write an event (`ILogObserver`)."""
        if text := line_of(event):
            self.write(text.encode(errors="backslashreplace"))

    def write(self, data: bytes) -> None:
        """Write; rotate first if the file would become too large.

        :raises OSError: if the disk is full.
        """
        with self._lock:
            if self._size and self._size + len(data) > self._limit:
                with contextlib.suppress(OSError):
                    self._reopen()
            if self._size and self._size + len(data) > self._limit:
                self._rotate()
            self._size += os.write(self._fd, data)

    def rotate(self) -> None:
        """Begin a new file now, or continue in the one that is at the path instead of the open one.

        :raises OSError: if the file was moved or removed, and no new one can be opened: the log continues in the old
            one.
        """
        with self._lock:
            if not self._reopen():
                self._rotate()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _reopen(self) -> bool:
        fd = _opened_again(self.path, self._fd, os.O_RDWR)
        if fd is None:
            return False
        os.close(self._fd)
        self._fd, self._size = fd, os.fstat(fd).st_size
        return True

    def _rotate(self) -> None:
        size = os.fstat(self._fd).st_size
        kept = b""
        try:
            self._remove_oldest()
            if self._older:
                self._copy(size)
        except OSError:
            half = min(self._limit // 2, 1 << 30)  # one read returns less than 2 GiB
            kept = os.pread(self._fd, half, max(0, size - half)).partition(b"\n")[2]
        os.ftruncate(self._fd, 0)
        self._size = os.write(self._fd, kept) if kept else 0

    def _remove_oldest(self) -> None:
        """Make place for ``NAME.1``; files of a larger `files` of earlier are removed too."""
        for number in sorted(self._numbers(), reverse=True):
            if number >= self._older:
                os.remove(f"{self.path}.{number}")
            else:
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")

    def _numbers(self) -> list[int]:
        prefix = os.path.basename(self.path) + "."
        ends = (name.removeprefix(prefix) for name in os.listdir(os.path.dirname(self.path)) if name.startswith(prefix))
        return [int(end) for end in ends if end.isdecimal() and end[0] != "0"]

    def _copy(self, size: int) -> None:
        mode = os.fstat(self._fd).st_mode & 0o777
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(f"{self.path}.1", "wb", opener=lambda path, _: os.open(path, flags, mode)) as copy:
            os.fchmod(copy.fileno(), mode)
            at = 0
            while at < size and (copied := os.sendfile(copy.fileno(), self._fd, at, size - at)):
                at += copied


class OutputFiles:
    """Standard output and standard error, as far as they are files, by the paths that these had at the start."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{fd}")
                if stat.S_ISREG(os.fstat(fd).st_mode) and os.path.samestat(os.fstat(fd), os.stat(path)):
                    self._paths[fd] = path

    def rotate(self) -> None:
        """Go on in the file at the path, where that is another one than the open one.

        :raises OSError: if no file can be opened there: the output continues in the old one.
        """
        for fd, path in self._paths.items():
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue  # a daemon's standard descriptors lead to /dev/null
            new = _opened_again(path, fd, os.O_WRONLY)
            if new is not None:
                os.dup2(new, fd)
                os.close(new)


def _opened_again(path: str, fd: int, access: int) -> int | None:
    """Open the file at a path for appending, unless it is the open one; a new file gets the old one's owner and mode.

    :param access: ``O_RDWR`` or ``O_WRONLY``.
    :returns: a descriptor; None if the path leads to the open file.
    :raises OSError: if it cannot be opened.
    """
    old = os.fstat(fd)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(old, os.stat(path)):
            return None
    flags = access | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        new = os.open(path, flags | os.O_CREAT, stat.S_IMODE(old.st_mode))
    with contextlib.suppress(OSError):  # another user than root may not give files away
        os.fchown(new, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(new, stat.S_IMODE(old.st_mode))
    return new
