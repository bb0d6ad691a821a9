"""A log file with a bounded number of older ones beside it.

`BoundedLogFile` differs from Twisted's ``LogFile`` in how it rotates. That one closes and renames the file. It goes on
writing to the same file, without a bound, if it may not rename: as after ``twistd --uid=`` in a directory of root's. If
there is no descriptor left to open the new file, it is closed for good. This one copies the file to ``NAME.1`` and
empties it, so it stays open and keeps its owner; if it cannot be copied, its newer half is kept.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from twisted.logger import ILogObserver, LogEvent, formatEventAsClassicLogText
from zope.interface import implementer

__all__ = ["BoundedLogFile"]


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
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._fd).st_size

    def __call__(self, event: LogEvent) -> None:
        """Write an event (`ILogObserver`)."""
        if text := formatEventAsClassicLogText(event):
            self.write(text.encode(errors="backslashreplace"))

    def write(self, data: bytes) -> None:
        """Write; rotate first if the file would become too large.

        :raises OSError: if the disk is full.
        """
        with self._lock:
            if self._size and self._size + len(data) > self._limit:
                self._rotate()
            self._size += os.write(self._fd, data)

    def rotate(self) -> None:
        """Begin a new file now."""
        with self._lock:
            self._rotate()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _rotate(self) -> None:
        contents = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        kept = b""
        try:
            self._remove_oldest()
            if self._older:
                self._copy(contents)
        except OSError:
            kept = contents[-self._limit // 2 :].partition(b"\n")[2]
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

    def _copy(self, contents: bytes) -> None:
        mode = os.fstat(self._fd).st_mode & 0o777
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(f"{self.path}.1", "wb", opener=lambda path, _: os.open(path, flags, mode)) as copy:
            os.fchmod(copy.fileno(), mode)
            copy.write(contents)
