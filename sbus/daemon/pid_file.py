"""A pid file that says the truth: it is locked while its process runs.

The number alone does not say whether a daemon runs. After a crash the file stays, and the kernel gives the number to
another process; in a container it is PID 1 each time, the very process that reads the file. So the daemon holds a lock
on the file (flock(2)), which ends with it however it ends. The lock also reaches across the PID namespaces of
containers that share the directory.

Other programs write pid files without a lock. Such a file is stale if its process does not run, or was started after
the file was written. An empty file is stale, too: a crash of the machine leaves one.

After it has dropped its privileges, a daemon may be unable to remove its file. It empties the file instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

from sbus.errors import UsageError

__all__ = ["PidFile", "PidFileInUse"]

_CLOCK_SLACK = 2.0
"""Seconds by which the times of a process and a file may differ: files have the time of the last tick."""
_LONGEST = 32
"""Bytes of the longest number that is looked at."""


class PidFileInUse(UsageError):
    """The process of a pid file runs."""


class PidFile:
    """The file with the ID of this process.

    :param path: where it is.
    :param option: the option that gave the path, for errors.
    """

    def __init__(self, path: str, option: str = "--pidfile") -> None:
        self.path = os.path.abspath(path)
        self._option = option
        self._fd: int | None = None

    def check(self) -> None:
        """Check that the file can be written, and is not that of a process that runs.

        :raises PidFileInUse: if the process runs.
        :raises UsageError: if it cannot be written.
        """
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            directory = os.path.dirname(self.path)
            if not os.path.isdir(directory):
                raise self._unwritable(errno.ENOENT) from None
            if not os.access(directory, os.W_OK | os.X_OK):
                raise self._unwritable(errno.EACCES) from None
        except OSError as error:
            raise self._unwritable(error.errno) from None
        else:
            try:
                self._claim(fd)
            finally:
                os.close(fd)

    def write(self, *, replace: bool = True) -> None:
        """Write this process's ID, and lock the file until `remove` or the end of the process.

        :param replace: whether the stale file of a process that has ended may be there.
        :raises UsageError: if the file is that of a process that runs, exists although it may not, or cannot be
            written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        while True:
            try:
                fd = os.open(self.path, flags | (0 if replace else os.O_EXCL), 0o644)
            except FileExistsError:
                raise UsageError(
                    f"the pid file {self.path} exists: stop the process that it names, or replace the file (-r) if it "
                    "has ended"
                ) from None
            except OSError as error:
                raise self._unwritable(error.errno) from None
            try:
                self._claim(fd)
                if self._is_at_path(fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    self._fd = fd
                    return
            except OSError as error:
                os.close(fd)
                raise self._unwritable(error.errno) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its process ended and removed it meanwhile

    def remove(self) -> None:
        """Remove the file, unless another one is in its place; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if self._is_at_path(fd):
                os.unlink(self.path)
        except OSError:
            with contextlib.suppress(OSError):  # what the file system does not take now, the lock says anyway
                os.ftruncate(fd, 0)
        os.close(fd)

    def _claim(self, fd: int) -> None:
        """Lock the file.

        :raises UsageError: if it is another process's, or no pid file at all.
        """
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError(f"the pid file {self.path} is not a file: choose another path ({self._option})")
        text = os.pread(fd, _LONGEST, 0).strip()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(text) from None
        if text and not text.isdigit():
            raise UsageError(
                f"the pid file {self.path} has something else than a number in it: choose another path ({self._option})"
            )
        if text and _runs(int(text), os.fstat(fd).st_mtime):
            raise self._in_use(text)

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _in_use(self, number: bytes) -> PidFileInUse:
        return PidFileInUse(
            f"the pid file {self.path} is that of process {number.decode(errors='replace')}, which runs: stop that "
            f"first, or choose another file ({self._option})"
        )

    def _unwritable(self, number: int | None) -> UsageError:
        return UsageError(
            f"cannot write the pid file {self.path}: {os.strerror(number or 0)}: choose another path ({self._option})"
        )


def _runs(pid: int, written: float) -> bool:
    """Return whether a process runs, is another one than this, and is older than a file.

    :param written: when the file with its ID was written, in seconds since 1970.
    """
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True  # hidden from this user (proc(5), hidepid)
    state, start = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    return state != b"Z" and time.time() - age <= written + _CLOCK_SLACK
