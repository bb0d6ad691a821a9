"""Pins for slow readers: hard links that keep files readable for as long as a process lives.

Spark lists the files of a query when it is planned, and opens them minutes later. Compaction may have put another
directory in their place by then. So a reader links the files that it has listed into its own directory::

    <lake>.sbus/readers/<id>/date=2026-01-31/hour=07/0000000042.parquet
    <lake>.sbus/readers/<id>.lock         locked by the process for as long as it lives

Links take no space until their files are replaced. `Pins.remove_dead` removes the directories of processes that have
ended. A reader without the right to make links reads the files under their own names; if they are replaced meanwhile,
its query fails and has to be repeated.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from sbus import ownership
from sbus.lake.state import State
from sbus.syscalls.locks import is_locked

__all__ = ["Pins"]

_CANNOT_LINK = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
    errno.EMLINK,
    errno.EOPNOTSUPP,
    errno.ENOSPC,
    errno.EDQUOT,
}

_mine: dict[Path, Path] = {}
"""The directory of this process for each lake."""


class Pins:
    """The pinned files of the readers of a lake.

    :param directory: the lake.
    :param state: its state.
    """

    def __init__(self, directory: Path, state: State) -> None:
        self._lake = directory
        self._state = state

    @property
    def _readers(self) -> Path:
        return self._state.directory / "readers"

    def pin(self, names: Sequence[str]) -> list[str]:
        """Return paths under which files stay readable for as long as this process lives.

        :param names: paths in the lake.
        :raises FileNotFoundError: if one of them is gone.
        """
        try:
            mine = self._directory()
            return [self._link(mine, name) for name in names]
        except OSError as e:
            if e.errno not in _CANNOT_LINK:
                raise
            return [str(self._lake / name) for name in names]

    def _link(self, mine: Path, name: str) -> str:
        source, target = self._lake / name, mine / name
        for directory in (target.parent.parent, target.parent):
            if not directory.is_dir():
                with contextlib.suppress(FileExistsError):
                    ownership.make_directory(directory, self._state.directory_mode)
        try:
            os.link(source, target)
        except FileExistsError:
            if not os.path.samefile(source, target):  # its batch was written again
                target.unlink()
                os.link(source, target)
        return str(target)

    def _directory(self) -> Path:
        found = _mine.get(self._lake)
        if found is not None:
            return found
        made = self._readers / uuid.uuid4().hex
        # Under this lock no other process takes the file for that of a reader that has ended.
        with self._state.locked("commit.lock"):
            self._state.make_directories(made)
            lock = ownership.create(f"{made}.lock", self._state.file_mode)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _mine[self._lake] = made
        atexit.register(_forget, os.getpid(), made)
        return made

    def remove_dead(self) -> int:
        """Remove the pins of processes that have ended.

        :returns: how many living readers there are.
        """
        living = 0
        with (
            contextlib.suppress(FileNotFoundError),
            self._state.locked("commit.lock"),
            self._state.inside("readers") as readers,
        ):
            for entry in sorted(readers.iterdir()):
                if entry.suffix == ".lock":
                    continue
                try:
                    is_alive = is_locked(f"{entry}.lock")
                except PermissionError:  # of another user, who removes it
                    is_alive = True
                if is_alive:
                    living += 1
                else:
                    shutil.rmtree(entry, ignore_errors=True)
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        os.unlink(f"{entry}.lock")
        return living


def _forget(pid: int, directory: Path) -> None:
    if os.getpid() == pid:  # a forked child leaves them to its parent
        shutil.rmtree(directory, ignore_errors=True)
        Path(f"{directory}.lock").unlink(missing_ok=True)
