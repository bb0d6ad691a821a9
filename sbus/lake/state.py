"""The local directory beside a lake: locks, identity, staged files, history.

For a lake in a directory, `sbus.lake.place` says where it is. For one in object storage it is a directory of this
machine, because locks and renames need a file system.

Three locks, each taken with flock(2), so that it ends with its process:

* ``lock``: the one archive that writes, for as long as it runs.
* ``maintenance.lock``: compaction, ``prune`` and ``forget``, one at a time; for as long as one runs.
* ``commit.lock``: the moment in which the set of files changes, in milliseconds. A process that holds one of the others
  waits for it; none waits for another lock while it holds this one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbus import ownership
from sbus.errors import LakeError, StorageError
from sbus.journal import disk
from sbus.journal.clock import to_seconds
from sbus.journal.layout import LATEST, read_object
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.place import ID, Place

__all__ = ["State"]


class State:
    """The state of a lake.

    The permissions of its directory are those of all that is new in the lake; plain files lack those to execute them.

    :param place: where it is: a directory, or that of a lake in a directory; made when it is first written.
    :ivar mode: the permissions of files that are asked for; None: those of a lake that is there. Those of a new one
        are then ``0600``, but in a directory that is there and admits nobody but its group, that group may read.
    """

    def __init__(self, place: Path | Place) -> None:
        self._place = place
        self._settled: str | None = None  # the ID that `settle` found
        self.mode: int | None = None

    @property
    def directory(self) -> Path:
        """The directory; an archive that starts may move it (`Place.move_out`)."""
        return self._place.find() if isinstance(self._place, Place) else self._place

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the archive."""
        return self.directory / "checkpoint"

    @property
    def staging(self) -> Path:
        """Where the files of a batch are written before they are committed."""
        return self.directory / "staging"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[Path]:
        """Yield a path of a directory in the state, to delete in it; it leads to no other place throughout the block.

        Root deletes here in directories of other users, who can put links there.

        :raises FileNotFoundError: if there is no such directory.
        :raises sbus.errors.LakeError: if a link is in its place.
        """
        state = str(self.directory)
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(state).st_uid in (0, os.geteuid()):
                state = os.path.realpath(state)
        with contextlib.ExitStack() as opened:
            try:
                above = opened.enter_context(disk.inside(state))
                found = opened.enter_context(disk.inside(os.path.join(above, name)))
            except NotADirectoryError as e:
                raise LakeError(f"{self.directory}: {name} in it is {e.strerror}: make a directory there") from None
            yield Path(found)

    def settle(self, format_: str, *, has_rows: bool) -> None:
        """Check that the state belongs to the lake, and mark the lake.

        Call this with the writer's lock held.

        :param has_rows: whether the lake has files.
        :raises sbus.errors.LakeError: if it belongs to another one.
        """
        identity = self.identity(format_)
        if isinstance(self._place, Place):
            has_archived = Checkpoint(self.checkpoint).last_done() >= 0
            self._place.check(identity, has_rows=has_rows, has_archived=has_archived)
            self._place.mark(identity, self.directory_mode)
        self._settled = identity

    def check_same(self) -> None:
        """Check that the state is still the one that `settle` found, if it was called.

        :raises sbus.errors.StorageError: if it was moved away or removed; a new state in its place would be in the way
            when it is put back.
        """
        if self._settled is not None and self.fields().get("id") != self._settled:
            raise StorageError(
                f"{self.directory}: the state of the lake is gone, so nothing says which rows the lake has: put the "
                "state back, and the lake if it was moved too; or start the archive again, with the new place of both "
                "or with another lake"
            )

    def check_mark(self) -> None:
        """Check that the lake and its state are still in their places.

        :raises sbus.errors.StorageError: if one of them was moved away or removed.
        """
        self.check_same()
        if isinstance(self._place, Place):
            self._place.check_mark(str(self.fields().get("id")))

    def move_out(self) -> None:
        """Move the state of an earlier version out of the lake, if nobody uses it."""
        if isinstance(self._place, Place):
            self._place.move_out()

    @contextlib.contextmanager
    def locked(self, name: str, refusal: str | None = None) -> Iterator[None]:
        """Hold a lock.

        :param name: its file.
        :param refusal: the error if another process holds it; None: wait.
        :raises sbus.errors.LakeError: if another process holds the lock, and `refusal` is given.
        """
        while True:
            self.make_directories(self.directory)
            lock = ownership.open_or_create(self.directory / name, os.O_RDWR, self.file_mode)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
                except BlockingIOError:
                    raise LakeError(refusal) from None
                if not _is_at(lock, self.directory / name):
                    continue  # the state was moved meanwhile
                yield
                return
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

    # --- permissions --------------------------------------------------------------------------

    @property
    def directory_mode(self) -> int:
        """The permissions of directories that are new in the lake."""
        try:
            return stat.S_IMODE(self.directory.stat().st_mode) & 0o777
        except FileNotFoundError:
            pass
        if self.mode is not None:
            return ownership.directory_mode(self.mode)
        try:
            prepared = stat.S_IMODE(self._place.lake.stat().st_mode) if isinstance(self._place, Place) else 0
        except FileNotFoundError:
            return 0o700
        return 0o700 if prepared & 0o007 else 0o700 | prepared & 0o070

    @property
    def file_mode(self) -> int:
        """The permissions of files that are new in the lake."""
        return self.directory_mode & 0o666

    def make_directories(self, path: Path) -> None:
        """Make a directory of the lake or its state, and its missing parents, and sync each into its parent."""
        mode = self.directory_mode
        if isinstance(self._place, Place):
            self._place.make(mode)
        disk.make_directories(str(path), mode)

    def apply_mode(self) -> None:
        """Give new files the requested permissions, also in a lake that is there already.

        :raises OSError: if the lake belongs to another user.
        """
        if self.mode is None:
            return
        wanted = ownership.directory_mode(self.mode)
        for directory in [self.directory, *([self._place.lake] if isinstance(self._place, Place) else [])]:
            found = stat.S_IMODE(directory.stat().st_mode)
            if found & 0o777 != wanted:
                directory.chmod(found & ~0o777 | wanted)

    def make_checkpoint(self) -> None:
        """Make the directories of the checkpoint before Spark does, so that they belong to the owner of the lake."""
        for name in ("offsets", "commits"):
            self.make_directories(self.checkpoint / name)

    def adopt_checkpoint(self) -> None:
        """Give what Spark has written as root to the checkpoint to the owner of the lake."""
        if os.geteuid() or self.checkpoint.stat().st_uid == 0:
            return
        for directory, folders, files in os.walk(self.checkpoint):
            for name in (*folders, *files):
                path = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):  # Spark has removed it in the meantime
                    status = os.lstat(path)
                    if status.st_uid == 0:
                        ownership.adopt(path, ownership.new_in(directory, stat.S_IMODE(status.st_mode)))

    # --- identity -----------------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``lake.json``, which include the ID; return no fields if there is no such file.

        :raises sbus.errors.SbusError: if it is damaged.
        """
        path = str(self.directory / "lake.json")
        try:
            found = read_object(path)
        except FileNotFoundError:
            return {}
        id_ = found.get("id")
        if not (isinstance(id_, str) and ID.fullmatch(id_)):
            raise LakeError(f"{path}: it has no lake ID: restore it from a copy")
        return found

    def identity(self, format_: str) -> str:
        """Return the ID of the lake, 32 hexadecimal digits; it is made when it is first asked for.

        Call this with the writer's lock held.

        :param format_: the table format, which is kept with it.
        :raises sbus.errors.SbusError: if ``lake.json`` is damaged.
        :raises OSError: if it cannot be written.
        """
        if found := self.fields():
            return str(found["id"])
        made = uuid.uuid4().hex
        data = json.dumps({"id": made, "format": format_}).encode() + b"\n"
        disk.replace(str(self.directory / "lake.json"), data, self.file_mode)
        return made

    # --- history ------------------------------------------------------------------------------

    def note(self, what: str, note: str) -> None:
        """Add a line to the history; after a crash the last one may be missing."""
        line = json.dumps({"time": round(time.time(), 3), "what": what, "note": note}).encode() + b"\n"
        fd = ownership.open_or_create(self.directory / "history.jsonl", os.O_WRONLY | os.O_APPEND, self.file_mode)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def notes(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the history; one that is torn, or has no time, is left out."""
        try:
            lines = (self.directory / "history.jsonl").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                if isinstance(found, dict) and 0 <= found["time"] <= to_seconds(LATEST):
                    yield found


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
