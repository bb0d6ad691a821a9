"""Plain Parquet: a lake is a directory that any program can read as it is.

Theory of operation
-------------------

Directories alone say which files are the table: every change is one rename.

*A batch* comes as staged files. `PlainTable.commit` writes its *manifest*: its files, and those in older manifests with
this number or a higher one. It syncs the files, renames each to its place, and removes the others in the manifest. A
name depends on the batch, the hour and a number alone. So a batch that comes again replaces its own files, also with
other rows (after a power cut), any call of a commit can be its last, and a reader sees the old file or the new one.

*A rewrite* (compaction, ``forget``, ``prune``) builds a new directory of an hour in ``retired``, with new files and
hard links to the others, and exchanges the two with one call. A reader that lists the hour has one or the other
open. The old one is deleted after `sbus.lake.table.GRACE`. No name is used twice, so a late reader gets an error.

*Only settled batches are rewritten*: their mark is synced, so they never come again. ``floor.json`` has the last of
them; a checkpoint from a backup brings an earlier one, which is refused.

Rejected: a manifest that readers follow, as other programs would see rows twice; moving files one by one, or two
renames of directories, as there is a moment with too many rows or too few.

============================================================  ==========================================================
in ``<lake>``                                                 what it is
============================================================  ==========================================================
``date=2026-01-31/hour=07/0000000042.parquet``                the rows of batch 42 in that hour (UTC)
``date=2026-01-31/hour=07/0000000042-1.parquet``              more of them: several tasks, or too many for one file
``date=2026-01-31/hour=06/0000000041-0f3c9ab1-000.parquet``   compacted: the rows of batches up to 41
============================================================  ==========================================================

============================================================  ==========================================================
in ``<lake>.sbus``                                            what it is
============================================================  ==========================================================
``batches/0000000042.json``                                   the manifest of batch 42, one of the last hundred
``floor.json``                                                the last batch that was compacted
``retired/<time>-<id>/``                                      the directory of an hour as it was before a change
``checkpoint/``                                               the progress of the archive
``staging/``, ``work/``                                       files that are being written
============================================================  ==========================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from sbus.errors import LakeError
from sbus.journal import disk
from sbus.journal.layout import read_object
from sbus.lake.checkpoint import KEPT
from sbus.lake.exchange import exchange
from sbus.lake.pins import Pins
from sbus.lake.place import Place
from sbus.lake.state import State
from sbus.lake.table import DataFile, Event, Hour, Table, staged_files
from sbus.ownership import access_of, adopt, at, create

__all__ = ["PlainTable"]

_OF_BATCH = re.compile(r"([0-9]+)(?:-[0-9]+)?\.parquet")
"""The name of a batch's file."""
_OF_BATCHES = re.compile(r"([0-9]{10,})(?:-[0-9]+|-[0-9a-f]{8}-[0-9]+)?\.parquet")
"""The name of any file of the lake, with its batch; after a rewrite, with the last batch whose rows it may have."""
_TOMBSTONE = "deleted.parquet"
"""It stays in a directory whose files are deleted early: a reader that is just listing it fails, and misses nothing."""


class PlainTable(Table):
    """A lake of plain Parquet files.

    :param directory: an absolute path that this process and all executors share.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.format = "parquet"
        self.location = str(directory)
        self.state = State(Place(directory))
        self._pins = Pins(directory, self.state)

    @property
    def _batches(self) -> Path:
        return self.state.directory / "batches"

    @property
    def _retired(self) -> Path:
        return self.state.directory / "retired"

    @property
    def _floor(self) -> Path:
        return self.state.directory / "floor.json"

    # --- batches --------------------------------------------------------------------------------

    def commit(self, batch: int, staged: Path) -> None:
        self.state.check_mark()
        if batch <= self._read_floor():
            raise LakeError(
                f"{self.location}: batch {batch} is to be archived again, but the lake has it, and has compacted it: "
                f"the checkpoint in {self.state.directory} is older than the lake; restore both from one copy"
            )
        files = {
            f"{hour}/{batch:010}{f'-{number}' if number else ''}.parquet": path
            for hour, paths in staged_files(staged)
            for number, path in enumerate(paths)
        }
        manifests = {number: self._read_manifest(number) for number in self._list_numbers() if number >= batch}
        stale = set().union(*manifests.values()) - files.keys()
        self._write_manifest(batch, stale | files.keys())
        for number in manifests.keys() - {batch}:
            disk.remove(self._manifest_path(number))
        for path in files.values():
            _sync(path)
        with self.state.locked("commit.lock"):
            for name, path in files.items():
                target = self.directory / name
                self.state.make_directories(target.parent)
                adopt(path, at(target, self.state.file_mode))
                _move(path, target)
            for name in stale:
                disk.remove(str(self.directory / name))
            for directory in {(self.directory / name).parent for name in stale | files.keys()}:
                if directory.exists():
                    disk.sync_directory(str(directory))
        if stale:
            self._write_manifest(batch, files)
        shutil.rmtree(staged, ignore_errors=True)
        disk.remove(self._manifest_path(batch - KEPT))

    def last_batch(self, done: int, files: Sequence[DataFile]) -> int:
        # A batch replaces the files in its manifest, and adds to all others.
        known = set().union(*(self._read_manifest(number) for number in self._list_numbers() if number > done))
        return max([done, *(_last_in(file) for file in files if file.name not in known)])

    def _list_numbers(self) -> list[int]:
        try:
            names = os.listdir(self._batches)
        except FileNotFoundError:
            return []
        return sorted(int(name.removesuffix(".json")) for name in names if name.endswith(".json"))

    def _manifest_path(self, batch: int) -> str:
        return str(self._batches / f"{batch:010}.json")

    def _read_manifest(self, batch: int) -> set[str]:
        path = self._manifest_path(batch)
        files = read_object(path).get("files")
        if not isinstance(files, list) or not all(map(_is_of_batch, files)):
            # These files may be removed, even by root, and the manifest may be another user's: the lake's owner.
            raise LakeError(f"{path}: it does not list files of a batch: restore lake and state from one copy")
        return set(files)

    def _write_manifest(self, batch: int, files: Collection[str]) -> None:
        self.state.make_directories(self._batches)
        data = json.dumps({"files": sorted(files)}).encode() + b"\n"
        disk.replace(self._manifest_path(batch), data, self.state.file_mode)

    # --- rewrites -------------------------------------------------------------------------------

    def replace(self, old: Sequence[DataFile], new: Mapping[Hour, Sequence[Path]], what: str, note: str) -> bool:
        highest = max(map(_last_in, old), default=-1)
        names: dict[Hour, set[str]] = {hour: set() for hour in new}
        for file in old:
            names[file.hour].add(os.path.basename(file.name))
        for paths in new.values():
            for path in paths:
                _sync(path)
        with self.state.locked("commit.lock"):
            there = {hour: self._names(hour) for hour in names}
            if any(gone - there[hour] for hour, gone in names.items()):
                return False
            if highest > self._read_floor():
                data = json.dumps({"batch": highest}).encode() + b"\n"
                disk.replace(str(self._floor), data, self.state.file_mode)
            for hour, gone in names.items():
                self._replace_hour(hour, gone, there[hour] - gone, new[hour], max(highest, 0))
        self.state.note(what, note)
        return True

    def _names(self, hour: Hour) -> set[str]:
        try:
            return {name for name in os.listdir(self.directory / hour.directory) if name.endswith(".parquet")}
        except FileNotFoundError:
            return set()

    def _replace_hour(self, hour: Hour, gone: set[str], kept: set[str], new: Sequence[Path], batch: int) -> None:
        place = self.directory / hour.directory
        access = at(place / min(gone), self.state.file_mode)
        retired = self._retired / f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}"
        self.state.make_directories(self._retired)
        if not kept and not new:
            _move(place, retired)
        else:
            retired.mkdir(0o700)
            adopt(retired, access_of(place))
            token = uuid.uuid4().hex[:8]
            for number, path in enumerate(new):
                adopt(path, access)
                _move(path, retired / f"{batch:010}-{token}-{number:03}.parquet")
            for name in kept:
                _link(place / name, retired / name)
            disk.sync_directory(str(retired))
            _exchange(str(retired), str(place))
        disk.sync_directory(str(place.parent))
        disk.sync_directory(str(self._retired))
        try:
            os.rmdir(place.parent)  # a day without hours
        except OSError:
            pass

    def _read_floor(self) -> int:
        try:
            batch = read_object(str(self._floor)).get("batch")
        except FileNotFoundError:
            return -1
        if not isinstance(batch, int):
            raise LakeError(f"{self._floor}: it names no batch: restore lake and state from one copy")
        return batch

    def vacuum(self, grace: float) -> int:
        deleted = 0
        self._pins.remove_dead()
        now = time.time_ns()
        with contextlib.suppress(FileNotFoundError), self.state.inside("retired") as retired:
            for directory in sorted(retired.iterdir()):
                age = (now - int(directory.name.partition("-")[0])) / 1e9
                # A clock that was set back must not keep it for good.
                if 0 <= age < max(grace, 0):
                    continue
                with contextlib.suppress(NotADirectoryError), disk.inside(str(directory)) as found:
                    deleted += self._delete_in(Path(found), has_tombstone=grace <= 0)
                if grace > 0:
                    shutil.rmtree(directory, ignore_errors=True)
        return deleted

    def _delete_in(self, directory: Path, *, has_tombstone: bool) -> int:
        paths = [path for path in directory.iterdir() if path.name != _TOMBSTONE]
        if has_tombstone:
            with contextlib.suppress(FileExistsError):
                os.close(create(directory / _TOMBSTONE, self.state.file_mode))
        for path in paths:
            disk.remove(str(path))
        return len(paths)

    def unnamed(self) -> list[DataFile]:
        return []  # all files are the table

    def sweep(self) -> list[DataFile]:
        return []

    def history(self) -> list[Event]:
        return [
            Event(None, float(line.get("time", 0)), str(line.get("what", "")), str(line.get("note", "")))
            for line in self.state.notes()
        ]

    # --- reading --------------------------------------------------------------------------------

    def files(self) -> list[DataFile]:
        found = []
        for place in sorted(self.directory.glob("date=*/hour=*")):
            try:
                hour = Hour.parse(str(place.relative_to(self.directory)))
            except ValueError:
                continue
            found += self._list_hour(hour, place)
        return found

    def _list_hour(self, hour: Hour, place: Path) -> list[DataFile]:
        while True:
            try:
                fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return []
            try:
                # The entries of one directory, also if another one takes its place now.
                return [file for name in sorted(os.listdir(fd)) if (file := _data_file(hour, name, fd))]
            except FileNotFoundError:
                continue  # it was retired, and its files are being deleted
            finally:
                os.close(fd)

    def open(self, name: str) -> pa.NativeFile:
        return pa.OSFile(str(self.directory / name))

    def pin(self, files: Sequence[DataFile]) -> list[str]:
        return self._pins.pin([file.name for file in files])


def _data_file(hour: Hour, name: str, directory: int) -> DataFile | None:
    if not name.endswith(".parquet") or name.startswith(("_", ".")):
        return None
    status = os.stat(name, dir_fd=directory)
    found = _OF_BATCH.fullmatch(name)
    batch = int(found[1]) if found else None
    return DataFile(f"{hour.directory}/{name}", hour, status.st_size, status.st_mtime, batch)


def _last_in(file: DataFile) -> int:
    """Return the last batch that a file has rows of; -1 if its name does not say."""
    found = _OF_BATCHES.fullmatch(os.path.basename(file.name))
    return int(found[1]) if found else -1


def _is_of_batch(name: object) -> bool:
    """Return whether this is the path, in a lake, of a file that a batch has brought."""
    directory, _, file = name.rpartition("/") if isinstance(name, str) else ("", "", "")
    try:
        return Hour.parse(directory).directory == directory and bool(_OF_BATCH.fullmatch(file))
    except ValueError:
        return False


def _sync(path: Path) -> None:
    disk.sync_file(path)


def _move(path: Path, target: Path) -> None:
    os.replace(path, target)


def _link(path: Path, target: Path) -> None:
    os.link(path, target)


def _exchange(one: str, other: str) -> None:
    exchange(one, other)
