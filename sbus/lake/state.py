"""The local directory beside a lake: locks, identity, staged files, history.

For a lake in a directory it is ``_sbus`` in there. For one in object storage it is a directory of this machine, because
locks and renames need a file system.

Three locks, each taken with flock(2), so that it ends with its process:

* ``lock``: the one archive that writes, for as long as it runs.
* ``maintenance.lock``: compaction, ``prune`` and ``forget``, one at a time; for as long as one runs.
* ``commit.lock``: the moment in which the set of files changes, in milliseconds. Whoever holds one of the others waits
  for it; nothing waits for another lock while it holds this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbus.errors import LakeError
from sbus.journal import disk
from sbus.journal.layout import read_object
from sbus.lake.checkpoint import Checkpoint

__all__ = ["FILE_MODE", "State", "make_directories"]

FILE_MODE = 0o600


class State:
    """The state of a lake.

    :param directory: where it is; made when it is first written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint = directory / "checkpoint"
        """The checkpoint of the archive, written by Spark."""
        self.staging = directory / "staging"
        """Where executors write batches."""
        self._identity = directory / "lake.json"
        self._history = directory / "history.jsonl"

    @contextlib.contextmanager
    def locked(self, name: str, refusal: str | None = None) -> Iterator[None]:
        """Hold a lock.

        :param name: its file.
        :param refusal: the error if another process holds it; None: wait.
        :raises sbus.errors.LakeError: if another process holds the lock, and `refusal` is given.
        """
        make_directories(self.directory)
        lock = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
            except BlockingIOError:
                raise LakeError(refusal) from None
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def maintaining(self) -> Iterator[None]:
        """Hold the lock of compaction, ``prune`` and ``forget``.

        :raises sbus.errors.LakeError: if another process holds it.
        """
        with self.locked(
            "maintenance.lock",
            f"{self.directory}: another process compacts or prunes this lake: try again when it is done",
        ):
            yield

    def settled(self) -> int:
        """Return the number of the last batch that cannot be written again; -1 if there is none.

        Its marks are synced, so that a power cut cannot take them back either.
        """
        checkpoint = Checkpoint(self.checkpoint)
        done = checkpoint.last_done()
        if done >= 0:
            checkpoint.sync(done)
        return done

    # --- identity -----------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        """Return what ``lake.json`` says; nothing, if there is none.

        :raises sbus.errors.JournalError: if it is damaged.
        """
        try:
            return read_object(str(self._identity))
        except FileNotFoundError:
            return {}

    def identity(self, format_: str) -> str:
        """Return the ID of the lake, 32 hexadecimal digits; it is made when it is first asked for.

        Call this with the writer's lock held.

        :param format_: the table format, which is kept with it.
        :raises sbus.errors.JournalError: if the file that has it is damaged.
        :raises OSError: if it cannot be written.
        """
        found = self.fields().get("id")
        if isinstance(found, str):
            return found
        made = uuid.uuid4().hex
        data = json.dumps({"id": made, "format": format_}).encode() + b"\n"
        disk.replace(str(self._identity), data, FILE_MODE)
        return made

    # --- history ------------------------------------------------------------------------------

    def note(self, what: str, note: str) -> None:
        """Add a line to the history; after a crash the last one may be missing."""
        line = json.dumps({"time": round(time.time(), 3), "what": what, "note": note}).encode() + b"\n"
        fd = os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def notes(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the history; a torn one is left out."""
        try:
            lines = self._history.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, and sync each into its parent.

    Only their owner can open them.
    """
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        disk.sync_directory(str(path.parent))
