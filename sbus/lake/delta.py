"""Delta Lake: a log says which files are the table, in a directory or in object storage.

Theory of operation
-------------------

`DeltaLake.commit` moves or uploads the staged files of a batch, and adds them with one commit of the package
``deltalake`` to the log.

* *Exactly once.* The commit names the ID of the lake as its application, and the number of the batch as the version of
  its transaction. A batch whose version the log has is not added again, and a second writer cannot slip in between.
* *The plan is durable before the commit is*, or a power cut could leave the commit and take the plan, and other rows
  would be taken for archived.
* *Atomic over hours.* A reader sees a batch, or a compaction, in all hours or in none.
* *Durable.* In a directory, the files are synced, then the commit.
* *Files never change.* Each name has a random part. `DeltaLake.vacuum` deletes a file without a commit when it
  is a week old.
* *Rewrites do not overlap.* Each is committed to the version of the table in which it found its old files, or is tried
  again. Its transaction ``<id>/maintenance``, whose version rises by one each time, keeps out earlier releases.

Statistics come from the footers, without keys: after ``forget`` the log has nothing of a message.

The state (`sbus.lake.state`) is a local directory. The table names it by the ID of the lake, so another one cannot
write to it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake._internal import DeltaFileSystemHandler
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction

from sbus.errors import LakeError, StorageError
from sbus.journal import disk
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.encoding import LATER
from sbus.lake.place import Place
from sbus.lake.state import State
from sbus.lake.table import DataFile, Event, Hour, Table, staged_files
from sbus.ownership import Access, adopt, at, new_in

__all__ = ["DeltaLake"]

_PARTITIONS = ["date", "hour"]
_SCHEMA = pa.schema(
    [
        ("journal", pa.string()),
        ("seq", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("kind", pa.string()),
        ("key", pa.string()),
        ("payload", pa.binary()),
        ("date", pa.date32()),
        ("hour", pa.int32()),
        *LATER.items(),
    ]
)
_STATISTICS = ("journal", "seq", "time", "kind")
_OWNER = "sbus.lake"
"""The property of the table that has the ID of the lake."""
_ADDED = {"sbus": "columns", "note": "of publishers and hosts"}
_UNREADABLE = re.compile(r"%[0-9A-Fa-f]{2}|\\")
"""The characters of a path that the ``deltalake`` package takes for a part of a URL, however they are written."""
_LAST_CHECKPOINT = "_last_checkpoint"
"""The file of the log that names its last summary."""
_NEWEST = 8
"""Files at the end of the log that a killed run may have written: a commit, a checkpoint of several parts."""
_BLOCK = 8 << 20
"""Bytes of a file that are read at a time."""
_CREDENTIALS = ("AWS_", "AZURE_", "GOOGLE_")
"""The variables of the environment that reach object storage."""
_COMPACTED = "compacted"
"""The beginning of the names of files that compaction, ``prune`` and ``forget`` write."""
_REWRITES = 10
"""Attempts to commit a rewrite while batches are committed at the same time."""
_ORPHAN_HOURS = 168
"""Hours after which a file that no commit names is an orphan."""


class DeltaLake(Table):
    """A lake in a Delta table.

    :param location: a directory or a URL.
    :param state: the directory of the state; None: beside the directory, or, for a URL, below the user's state
        directory.
    :param credentials: the variables to use instead of the environment's.
    """

    format = "delta"
    grace = 7 * 86400.0
    """Versions of the table can be read for as long."""

    def __init__(self, location: str, state: Path | None = None, credentials: Mapping[str, str] | None = None) -> None:
        self._credentials = credentials
        self.location = location.rstrip("/")
        self._is_local = "://" not in location
        if self._is_local and (found := _UNREADABLE.search(location)):
            raise LakeError(
                f"{location}: a Delta table cannot have a path with {found[0]}, which the library for Delta decodes: "
                "choose another path, or a lake of --format=parquet"
            )
        if state is not None:
            self.state = State(state)
        else:
            self.state = State(Place(Path(location)) if self._is_local else _default_state(self.location))
        self._log = Path(location) / "_delta_log"

    def __reduce__(self) -> tuple[type[DeltaLake], tuple[str, Path, Mapping[str, str] | None]]:
        credentials = self._credentials
        if credentials is None and not self._is_local:  # the environment of executors is another one
            credentials = {name: value for name, value in os.environ.items() if name.startswith(_CREDENTIALS)}
        return DeltaLake, (self.location, self.state.directory, credentials)  # executors open files

    # --- batches --------------------------------------------------------------------------------

    def commit(self, batch: int, staged: Path) -> None:
        self.state.check_mark()
        table = self._with_today_columns(self._create())
        owner = self._owner(table)
        application = self.state.identity(self.format)
        if owner != application:
            raise LakeError(
                f"{self.location}: another archive writes to this table (its ID is {owner}, and that of "
                f"{self.state.directory} is {application}): use its state directory, or name another lake"
            )
        last = table.transaction_version(application)
        if last is None or last < batch:
            Checkpoint(self.state.checkpoint).sync_plan(batch)
            try:
                actions = [
                    self._add(path, Hour.parse(hour), batch, data_change=True)
                    for hour, paths in staged_files(staged)
                    for path in paths
                ]
                if actions:
                    self._commit(table, actions, "batch", f"batch {batch}", Transaction(application, batch))
            except (DeltaError, OSError) as e:
                if self._is_local and isinstance(e, OSError):
                    raise
                raise _unreachable(self.location, e) from None
        elif self._is_local:  # a run that was killed may have committed it, and not synced
            newest = sorted(name for name in os.listdir(self._log) if name[0].isdigit())[-_NEWEST:]
            self._settle_log([*newest, _LAST_CHECKPOINT], self._access_of_last())
        shutil.rmtree(staged, ignore_errors=True)

    def last_batch(self, done: int, files: Sequence[DataFile]) -> int:
        try:
            version = self._table().transaction_version(self.state.identity(self.format))
        except StorageError:
            raise
        except LakeError:
            return done  # there is no table yet
        if version is None or Checkpoint(self.state.checkpoint).is_planned(version):
            return done  # `commit` notices that the table has it
        return max(done, version)

    def _add(
        self, path: Path, hour: Hour, batch: int | None, *, data_change: bool, old: DataFile | None = None
    ) -> AddAction:
        """Move or upload a file, and return the action that adds it.

        :param old: a file that it replaces.
        """
        with pq.ParquetFile(path) as parquet:
            statistics = _statistics(parquet.metadata)
        size = path.stat().st_size
        label = _COMPACTED if batch is None else f"{batch:010}"
        name = f"{hour.directory}/{label}-{uuid.uuid4().hex}.parquet"
        self._put(path, name, old)
        return AddAction(
            name,
            size,
            {"date": hour.date, "hour": str(hour.hour)},
            int(time.time() * 1000),
            data_change,
            json.dumps(statistics),
        )

    def _put(self, path: Path, name: str, old: DataFile | None) -> None:
        if self._is_local:
            like = None if old is None else Path(self.location) / old.name
            target = Path(self.location) / name
            disk.sync_file(path)
            self.state.make_directories(target.parent)
            adopt(path, at(like or target, self.state.file_mode))
            os.replace(path, target)
            disk.sync_directory(str(target.parent))
        else:
            # PyArrow's own stream hands buffers to the library, which takes bytes alone.
            sink = cast(
                "IO[bytes]", DeltaFileSystemHandler(self.location, self._options).open_output_stream(name, None)
            )
            with open(path, "rb") as source:
                while block := source.read(_BLOCK):
                    sink.write(block)
            sink.close()

    def _commit(
        self,
        table: DeltaTable,
        actions: Sequence[AddAction | RemoveAction],
        what: str,
        note: str,
        transaction: Transaction,
        retries: int | None = None,
    ) -> None:
        """Commit actions.

        :param retries: how often to try again after another process has committed a version meanwhile; None for the
            library's default.
        :raises deltalake.exceptions.CommitFailedError: if every try has failed, or the other commit conflicts.
        """
        with self._writing_log():
            table.create_write_transaction(
                list(actions),
                "append",
                _SCHEMA,
                _PARTITIONS,
                commit_properties=CommitProperties(
                    custom_metadata={"sbus": what, "note": note},
                    max_commit_retries=retries,
                    app_transactions=[transaction],
                ),
            )

    @contextlib.contextmanager
    def _writing_log(self) -> Iterator[None]:
        """Give the files that the library writes to the log their access, and sync them: the library does neither."""
        if not self._is_local:
            yield
            return
        before = {file.name: file.inode() for file in os.scandir(self._log)}
        of_last = self._access_of_last()
        yield
        new = sorted(file.name for file in os.scandir(self._log) if before.get(file.name) != file.inode())
        self._settle_log(new, of_last)

    def _access_of_last(self) -> Access:
        """Return the access of the only file that the library replaces; it adds all others."""
        return at(self._log / _LAST_CHECKPOINT, self.state.file_mode)

    def _settle_log(self, names: Sequence[str], of_last: Access) -> None:
        """Give files of the log their access, and sync them."""
        of_new = new_in(self._log, self.state.file_mode)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a temporary file of another process
                adopt(self._log / name, of_last if name == _LAST_CHECKPOINT else of_new)
                disk.sync_file(self._log / name)
        disk.sync_directory(str(self._log))

    # --- rewrites -------------------------------------------------------------------------------

    def replace(self, old: Sequence[DataFile], new: Mapping[Hour, Sequence[Path]], what: str, note: str) -> bool:
        is_loss = what != "compact"
        now = int(time.time() * 1000)
        replaced = {file.hour: file for file in reversed(old)}
        actions: list[AddAction | RemoveAction] = [
            RemoveAction(
                file.name,
                data_change=is_loss,
                deletion_timestamp=now,
                size=file.size,
                partition_values={"date": file.hour.date, "hour": str(file.hour.hour)},
            )
            for file in old
        ]
        for attempt in range(_REWRITES):
            table = self._with_today_columns(self._table())
            if not {file.name for file in old} <= {file.name for file in _files(table)}:
                return False  # another process has rewritten them meanwhile
            if not attempt:
                actions += [
                    self._add(path, hour, None, data_change=is_loss, old=replaced.get(hour))
                    for hour, paths in new.items()
                    for path in paths
                ]
            application = f"{self._owner(table)}/maintenance"
            version = table.transaction_version(application)
            transaction = Transaction(application, 0 if version is None else version + 1)
            try:
                # The library would also commit to a newer version, in which the old files may be gone.
                self._commit(table, actions, what, note, transaction, retries=0)
            except CommitFailedError:
                continue
            return True
        return False

    def vacuum(self, grace: float) -> int:
        try:
            table = self._table()
        except LakeError:
            return 0
        hours = max(0, round(grace / 3600))
        with self._writing_log():
            deleted = table.vacuum(hours, dry_run=False, enforce_retention_duration=False)
        # The library takes everything in the directory for its own, even another lake or a journal.
        old = set(table.vacuum(_ORPHAN_HOURS, dry_run=True, enforce_retention_duration=False, full=True))
        orphans = [file for file in self.unnamed() if file.name in old]
        for file in orphans:
            self._delete(file)
        return len(deleted) + len(orphans)

    def unnamed(self) -> list[DataFile]:
        try:
            table = self._table()
        except LakeError:
            return []
        named = {file.name for file in _files(table)}
        found = []
        for name, size in self._list():
            with contextlib.suppress(ValueError):
                hour = Hour.parse(os.path.dirname(name))
                if name.endswith(".parquet") and name not in named:
                    found.append(DataFile(name, hour, size, 0.0))
        return found

    def _list(self) -> Iterator[tuple[str, int]]:
        """Yield all files in the hours of the table, with their sizes."""
        if self._is_local:
            for path in Path(self.location).glob("date=*/hour=*/*"):
                if path.parent.is_symlink() or path.parent.parent.is_symlink():
                    continue  # what is unnamed here may have a name there
                with contextlib.suppress(FileNotFoundError):
                    yield str(path.relative_to(self.location)), path.stat().st_size
            return
        for file in self._files.get_file_info(pafs.FileSelector("", recursive=True)):
            if file.type == pafs.FileType.File:
                yield file.path, file.size

    def sweep(self) -> list[DataFile]:
        left = []
        for file in self.unnamed():
            if not self._is_mine(file):
                left.append(file)
            else:
                self._delete(file)
        return left

    def _delete(self, file: DataFile) -> None:
        if self._is_local:
            disk.remove(str(Path(self.location) / file.name))
        else:
            self._files.delete_file(file.name)

    def _is_mine(self, file: DataFile) -> bool:
        """Return whether only holders of the locks of this state can have begun the change that a file is of."""
        # Another machine, with a state of its own, may be compacting a table in object storage.
        is_batch = not os.path.basename(file.name).startswith(_COMPACTED)
        return self._is_local or (is_batch and self._owner(self._table()) == self.state.fields().get("id"))

    def history(self) -> list[Event]:
        found = [
            Event(
                int(entry["version"]),
                entry["timestamp"] / 1000,
                str(entry.get("sbus", entry["operation"])),
                str(entry.get("note", "")),
            )
            for entry in self._commits()
        ]
        return sorted(found, key=lambda event: event.version or 0)

    def _commits(self) -> Iterator[dict[str, Any]]:
        """Yield what the log says of each commit that it still has."""
        table = self._table()
        if not self._is_local:
            yield from table.history()
            return
        # The library finds none in a directory whose path has a "#" or a "?".
        for path in self._log.glob("*.json"):
            if path.stem.isdecimal():
                for line in path.read_bytes().splitlines():
                    if entry := json.loads(line).get("commitInfo"):
                        yield {"version": path.stem, **entry}

    # --- reading --------------------------------------------------------------------------------

    def files(self) -> list[DataFile]:
        try:
            return _files(self._table())
        except LakeError:
            return []

    def open(self, name: str) -> pa.NativeFile:
        if self._is_local:
            return pa.OSFile(str(Path(self.location) / name))
        return self._files.open_input_file(name)

    def pin(self, files: Sequence[DataFile]) -> list[str]:
        # A file that was replaced stays for the grace.
        return [f"{self.location}/{file.name}" for file in files]

    # --- parts ----------------------------------------------------------------------------------

    @property
    def _options(self) -> dict[str, str] | None:
        return None if self._credentials is None else dict(self._credentials)

    @functools.cached_property
    def _files(self) -> pafs.FileSystem:
        return pafs.PyFileSystem(DeltaStorageHandler(self.location, self._options))

    def _table(self) -> DeltaTable:
        try:
            return DeltaTable(self.location, storage_options=self._options)
        except TableNotFoundError:
            raise LakeError(f"{self.location}: there is no lake, or it is empty: run sbus archive first") from None
        except (DeltaError, OSError) as e:
            raise _unreachable(self.location, e) from None

    def _create(self) -> DeltaTable:
        try:
            if DeltaTable.is_deltatable(self.location, self._options):
                return DeltaTable(self.location, storage_options=self._options)
            if self._is_local:
                self.state.make_directories(self._log)
            with self._writing_log():
                DeltaTable.create(
                    self.location,
                    _SCHEMA,
                    mode="ignore",
                    partition_by=_PARTITIONS,
                    name="sbus",
                    configuration={_OWNER: self.state.identity(self.format)},
                    raise_if_key_not_exists=False,
                    storage_options=self._options,
                )
            return DeltaTable(self.location, storage_options=self._options)
        except (DeltaError, OSError) as e:
            raise _unreachable(self.location, e) from None

    def _with_today_columns(self, table: DeltaTable) -> DeltaTable:
        """Add the columns that a table of an earlier version lacks, in a separate commit.

        The files do not change: readers of Delta return null for columns that a file lacks.
        """
        there = {field.name for field in table.schema().fields}
        missing = [field for field in Schema.from_arrow(_SCHEMA).fields if field.name not in there]
        if not missing:
            return table
        try:
            with self._writing_log():
                table.alter.add_columns(missing, commit_properties=CommitProperties(custom_metadata=_ADDED))
        except CommitFailedError:
            return self._table()  # another process has just added them
        return table

    def _owner(self, table: DeltaTable) -> str:
        return str(table.metadata().configuration.get(_OWNER))


def _unreachable(location: str, error: Exception) -> StorageError:
    return StorageError(f"{location}: {' '.join(str(error).split())}: check the address and the credentials")


def _default_state(location: str) -> Path:
    """Return the state directory of a URL: below that of the user, by the URL."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "sbus" / "lakes" / urllib.parse.quote(location, safe="")


def _files(table: DeltaTable) -> list[DataFile]:
    rows = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    found = [
        DataFile(
            row["path"],
            Hour(row["partition.date"].isoformat(), row["partition.hour"]),
            row["size_bytes"],
            row["modification_time"] / 1000,
        )
        for row in rows
    ]
    return sorted(found, key=lambda file: (file.hour, file.name))


def _statistics(metadata: pq.FileMetaData) -> dict[str, object]:
    """Return the statistics of a file as the log has them, from its footer."""
    least: dict[str, object] = {}
    greatest: dict[str, object] = {}
    names = metadata.schema.names
    for name in _STATISTICS:
        found = [
            metadata.row_group(group).column(names.index(name)).statistics for group in range(metadata.num_row_groups)
        ]
        if found and all(each is not None and each.has_min_max for each in found):
            least[name] = _plain(min(each.min for each in found))
            greatest[name] = _plain(max(each.max for each in found))
    return {
        "numRecords": metadata.num_rows,
        "minValues": least,
        "maxValues": greatest,
        "nullCount": {name: count for name in names if (count := _nulls(metadata, names.index(name))) is not None},
    }


def _nulls(metadata: pq.FileMetaData, column: int) -> int | None:
    """Return the number of nulls in a column of a file; None if the footer does not say."""
    found = [metadata.row_group(group).column(column).statistics for group in range(metadata.num_row_groups)]
    return sum(each.null_count for each in found) if all(each and each.has_null_count for each in found) else None


def _plain(value: object) -> object:
    return value.isoformat(timespec="microseconds").replace("+00:00", "Z") if isinstance(value, datetime) else value
