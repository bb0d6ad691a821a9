"""Where the state of a lake in a directory is: beside it, so that nothing in the lake looks like data.

Theory of operation
-------------------

Programs read a lake by its directory or by a pattern such as ``**/*.parquet``, and some take hidden names, too. So the
state of ``/srv/lake`` is ``/srv/lake.sbus``. In the lake are the files of rows, and the *mark*: empty directories,
which no program takes for data::

    /srv/lake/_sbus/<ID of the lake>/    which state belongs to it
    /srv/lake/_sbus/lock/ …              in the place of the locks of earlier versions, which cannot open them

The mark protects the rows. An archive is refused if it finds the mark of another lake, or if the state knows that it
has marked a lake, and the lake has neither mark nor rows: it would go on in a lake that lacks what is done.

The state stays *inside*, in ``/srv/lake/_sbus``, if the directory above cannot be written, or is on another file system
(the lake is a mount point). Readers must then name ``date=*``.

A lake of an earlier version has its state inside, too. The next archive moves it with one rename, under all its locks,
so a crash leaves it at one place or the other. `Place.find` looks at both each time, so a process that waited for a
lock takes the one that was moved. While a query reads pinned files (`sbus.lake.pins`), or if the rename fails, the
state stays where it is until the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from sbus import ownership
from sbus.errors import LakeError, StorageError
from sbus.journal import disk
from sbus.syscalls.locks import is_locked

__all__ = ["ID", "LOCKS", "Place"]

LOCKS = ("lock", "maintenance.lock", "commit.lock")
"""The files of the locks of a lake (`sbus.lake.state`)."""

_INSIDE = "_sbus"
_MARKED = "marked"
"""The file in the state that says that the lake has the mark."""
ID = re.compile(r"[0-9a-f]{32}")
"""The ID of a lake."""


class Place:
    """The place of the state of a lake.

    :param lake: the directory of the lake; links lead to the one place that all its names share.
    """

    def __init__(self, lake: Path) -> None:
        self._named = lake
        self.lake = Path(os.path.realpath(lake))
        self._inside = self.lake / _INSIDE
        self._beside = self.lake.parent / f"{self.lake.name}.sbus"

    def find(self) -> Path:
        """Return the directory of the state, which need not be there yet."""
        if _is_state(self._inside):
            return self._inside
        return self._beside if self._beside.is_dir() or self._can_be_beside() else self._inside

    def make(self, mode: int) -> None:
        """Make the directories of the lake and of its state; the state has the owner of the lake.

        :param mode: the permissions.
        :raises sbus.errors.StorageError: if the lake is gone, and its state is not: nothing may be in the way when it
            is put back.
        """
        found = self.find()
        self.check_there()
        disk.make_directories(str(self.lake), mode)
        if found == self._beside and not found.is_dir():
            disk.make_directories(str(found), mode)
            ownership.adopt(found, ownership.new_in(self.lake, mode | self.lake.stat().st_mode & 0o2000))
        disk.make_directories(str(found), mode)

    def move_out(self) -> None:
        """Move the state of an earlier version out of the lake, if nobody uses it."""
        if self.find() != self._inside or not _is_state(self._inside) or not self._can_be_beside():
            return
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for name in LOCKS:
                lock = ownership.open_or_create(self._inside / name, os.O_RDWR, 0o600)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(is_locked(str(path)) for path in (self._inside / "readers").glob("*.lock")):
                return
            os.rename(self._inside, self._beside)
            disk.sync_directory(str(self._beside.parent))
            disk.sync_directory(str(self.lake))

    def check(self, identity: str, *, has_rows: bool, has_archived: bool) -> None:
        """Check that the state belongs to the lake.

        :param identity: the ID in the state.
        :param has_rows: whether the lake has files.
        :param has_archived: whether the state knows batches as done.
        :raises sbus.errors.LakeError: if it does not, with the remedy.
        :raises sbus.errors.StorageError: if the rows are gone.
        """
        if self.find() == self._inside:
            return
        try:
            marks = [name for name in os.listdir(self._inside) if ID.fullmatch(name)]
        except FileNotFoundError:
            marks = []
        if marks and identity not in marks:
            raise LakeError(
                f"{self.lake}: {self._beside} is the state of another lake ({identity}, not {marks[0]}): put the state "
                "of this lake in its place; a lake and its state are moved and copied together"
            )
        if not marks and has_archived and not has_rows and (self._beside / _MARKED).exists():
            raise self._is_gone()

    def check_there(self) -> None:
        """Check that the path of a lake that was marked still leads to the same directory.

        :raises sbus.errors.StorageError: if it does not.
        """
        is_there = self.lake.is_dir() and os.path.realpath(self._named) == str(self.lake)
        if (self._beside / _MARKED).exists() and not is_there:
            raise self._is_gone()

    def check_mark(self, identity: str) -> None:
        """Check that the lake is still where it was marked: it can be moved away while an archive writes it.

        :param identity: the ID in the state.
        :raises sbus.errors.StorageError: if it is not.
        """
        self.check_there()
        if (self._beside / _MARKED).exists() and not (self._inside / identity).is_dir():
            raise self._is_gone()

    def _is_gone(self) -> StorageError:
        return StorageError(
            f"{self.lake}: its rows are gone, but its state is there, so they would not be archived again: put the "
            f"lake back; or, to archive all that the journals have, stop the archive, remove {self._beside}, and run "
            "'sbus journal release JOURNAL NAME' for each journal"
        )

    def mark(self, identity: str, mode: int) -> None:
        """Make the mark of the lake."""
        if self.find() == self._beside:
            for name in (*LOCKS, identity):
                disk.make_directories(str(self._inside / name), mode)
            if not (self._beside / _MARKED).exists():
                disk.replace(str(self._beside / _MARKED), b"", mode & 0o666)

    def _can_be_beside(self) -> bool:
        if not self.lake.name:
            return False
        above = self.lake.parent
        if not above.exists():
            return True  # it is made with the lake
        if not os.access(above, os.W_OK | os.X_OK):
            return False
        return not self.lake.exists() or (
            self.lake.stat().st_dev == above.stat().st_dev and not _is_mount_point(self.lake)
        )


def _is_state(directory: Path) -> bool:
    return (directory / "lake.json").exists() or (directory / "checkpoint").exists()


def _is_mount_point(path: Path) -> bool:
    """Return whether something is mounted there, perhaps a part of the same file system."""
    escaped = str(path)
    for character in ("\\", " ", "\t", "\n"):
        escaped = escaped.replace(character, f"\\{ord(character):03o}")
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="surrogateescape") as mounts:
        return any(line.split(" ")[4] == escaped for line in mounts)
    return False
