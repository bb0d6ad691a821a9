"""The lake: recorded rows as Parquet files by hour, each batch exactly once.

Theory of operation
-------------------

This is the only module that knows the layout of a lake. A table format can replace it with a class that has the same
methods::

    <lake>/date=2026-01-31/hour=07/0000000042.parquet    the rows of batch 42 in that hour (UTC)
    <lake>/_sbus/batches/0000000042.json                 the manifest of batch 42: its files
    <lake>/_sbus/checkpoint/                             the progress of the job, written by Spark
    <lake>/_sbus/staging/                                files that are being written
    <lake>/_sbus/lock                                    held by the one job that writes

Executors write a batch to a new directory in ``staging``. Then `Lake.commit` runs in the driver:

1. write the manifest: the union of the files of this batch and of all files in older manifests with this number or a
   higher one;
2. remove the manifests with higher numbers;
3. sync the staged files, and rename each to its place;
4. remove the files that are in the manifest and not in this batch; sync the directories;
5. if step 4 removed any, write the manifest again, with the files of this batch only.

Invariants:

* *A file name depends on the number of the batch and the hour alone.* A batch that is written again replaces its own
  files, and a rename is atomic, so a reader sees the old file or the new one and never a part.
* *Every file in the lake is in a manifest before it is there.* So a batch that comes again with other rows finds the
  files that it does not have any more, and removes them. A batch comes with other rows only if a power cut took back
  what Spark had planned, and then it takes all later batches with it, which step 1 covers.
* *A commit can be interrupted after any call and repeated*, with the same rows or with others. Until step 3 no row of
  the lake has changed; from there on, repeating it leads to the same files. The tests interrupt it after each call.
* *One writer.* A lock on ``_sbus/lock``, which ends with its process, refuses a second job.

Spark asks for at most the last hundred batches again, so older manifests are removed. Names that begin with ``_`` are
skipped by Spark and by other programs that read the directory as a table.

A batch is written by one task unless many hours wait. One task overlaps reading in Python with writing in the JVM, and
needs no shuffle; the rows come by journal and time, so it has few files open at a time. A lake with rows and
without a checkpoint is refused: the job could not know which rows are there, and would write them twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, IntegerType

from sbus.errors import LakeError
from sbus.journal import disk
from sbus.journal.clock import DAY, HOUR, as_utc
from sbus.journal.layout import read_object
from sbus.journal.schema import COLUMN_NAMES
from sbus.spark.datasource.scan import schema

__all__ = ["Lake"]

_KEPT_MANIFESTS = 100
"""Manifests that are kept: as many as Spark can go back batches."""
_FILE_MODE = 0o600

_WRITE_SETTINGS = {
    "spark.sql.parquet.compression.codec": "zstd",
    # The default type has no statistics, so a reader could not skip row groups by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Files that a task has open, one for each hour; only a task with more hours sorts its rows first.
    "spark.sql.maxConcurrentOutputFileWriters": "8",
}


class Lake:
    """A lake in a directory that this process and all executors see under one path.

    :param directory: the directory; a job that writes makes it if it is missing.
    :raises sbus.errors.LakeError: if it is a URL and not a path.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(directory):
            raise LakeError(
                f"{directory}: a lake is a directory, not a URL: mount it on all machines, and give its path"
            )
        self.directory = Path(os.path.abspath(directory))
        self._state = self.directory / "_sbus"
        self.checkpoint = self._state / "checkpoint"
        """The checkpoint of the job, written by Spark."""
        self._identity = self._state / "lake.json"
        self._batches = self._state / "batches"
        self._staging = self._state / "staging"

    # --- writing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the lake for writing, and remove the staged files of an interrupted job.

        :raises sbus.errors.LakeError: if another process holds the lock, or the checkpoint is missing.
        :raises OSError: if the lake cannot be written.
        """
        _make_directories(self._staging)
        lock = os.open(self._state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LakeError(
                    f"{self.directory}: another job writes to this lake: stop it, or name another lake"
                ) from None
            if not (self.checkpoint / "offsets").exists() and any(self.directory.glob("date=*")):
                raise LakeError(
                    f"{self.directory}: it has rows, but nothing says from where ({self.checkpoint} is missing): "
                    "restore that from a copy, or name another lake"
                )
            for left in self._staging.iterdir():
                shutil.rmtree(left, ignore_errors=True)  # an executor may still be writing there
            yield
        finally:
            os.close(lock)

    def identity(self) -> str:
        """Return the ID of the lake, 32 hexadecimal digits; it is made when it is first asked for.

        Call this while the lake is `locked`.

        :raises sbus.errors.JournalError: if the file that has it is damaged.
        :raises OSError: if it cannot be written.
        """
        try:
            found = read_object(str(self._identity)).get("id")
        except FileNotFoundError:
            found = None
        if isinstance(found, str):
            return found
        made = uuid.uuid4().hex
        disk.replace(str(self._identity), json.dumps({"id": made}).encode() + b"\n", _FILE_MODE)
        return made

    def write(self, rows: DataFrame, batch: int, *, writers: int = 1) -> None:
        """Put a batch into the lake; written again, it replaces itself.

        :param rows: with the columns of a journal.
        :param batch: the number of the batch; batches with higher numbers are removed.
        :param writers: the number of tasks that write; each writes different hours.
        """
        staged = self._staging / f"{batch:010}-{uuid.uuid4().hex}"
        time = F.unix_micros("time")
        placed = rows.select(
            *COLUMN_NAMES,
            # Independent of the session's time zone.
            F.date_from_unix_date(F.floor(time / DAY).cast("int")).alias("date"),
            F.lpad((F.floor(time / HOUR) % 24).cast("string"), 2, "0").alias("hour"),
        )
        if writers == 1:
            # One task overlaps reading in Python with writing in the JVM, without a shuffle or a sort.
            placed = placed.coalesce(1)
        else:
            order = ("date", "hour", "journal", "seq")
            placed = placed.repartition(writers, "date", "hour").sortWithinPartitions(*order)
        with _settings(rows.sparkSession):
            placed.write.partitionBy("date", "hour").option("maxRecordsPerFile", 0).option(
                "mapreduce.fileoutputcommitter.marksuccessfuljobs", "false"
            ).parquet(str(staged))
        self.commit(batch, staged)

    def commit(self, batch: int, staged: Path) -> None:
        """Move the staged files of a batch to their places, and sync them.

        The theory of operation above explains the order.

        :param batch: the number of the batch.
        :param staged: a directory with one Parquet file for each hour, in subdirectories named as in the lake.
        """
        files = {
            f"{path.parent.relative_to(staged)}/{batch:010}.parquet": path for path in staged.glob("*/*/*.parquet")
        }
        manifests = {number: self._read_manifest(number) for number in self._list_numbers() if number >= batch}
        stale = set().union(*manifests.values()) - files.keys()
        self._write_manifest(batch, stale | files.keys())
        for number in manifests.keys() - {batch}:
            disk.remove(self._manifest_path(number))
        for path in files.values():
            _sync(path)
        for name, path in files.items():
            target = self.directory / name
            _make_directories(target.parent)
            _move(path, target)
        for name in stale:
            disk.remove(str(self.directory / name))
        for directory in {(self.directory / name).parent for name in stale | files.keys()}:
            if directory.exists():
                disk.sync_directory(str(directory))
        if stale:
            self._write_manifest(batch, files)
        shutil.rmtree(staged, ignore_errors=True)
        disk.remove(self._manifest_path(batch - _KEPT_MANIFESTS))

    def _list_numbers(self) -> list[int]:
        try:
            names = os.listdir(self._batches)
        except FileNotFoundError:
            return []
        return sorted(int(name.removesuffix(".json")) for name in names if name.endswith(".json"))

    def _manifest_path(self, batch: int) -> str:
        return str(self._batches / f"{batch:010}.json")

    def _read_manifest(self, batch: int) -> set[str]:
        return set(read_object(self._manifest_path(batch))["files"])

    def _write_manifest(self, batch: int, files: Collection[str]) -> None:
        _make_directories(self._batches)
        disk.replace(self._manifest_path(batch), json.dumps({"files": sorted(files)}).encode() + b"\n", _FILE_MODE)

    # --- reading ------------------------------------------------------------------------------

    def read(self, spark: SparkSession, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """Return the archived rows, with the columns of a journal.

        Spark opens only the directories of the hours between the two times.

        :param since: leave out the rows before this time; a time without a zone is in UTC.
        :param until: leave out the rows at or after this time.
        :raises sbus.errors.LakeError: if there is no lake, or the lake is empty.
        """
        hours = sorted(self.directory.glob("date=*/hour=*"))
        if not hours:
            raise LakeError(f"{self.directory}: there is no lake, or it is empty: run sbus spark archive first")
        since = None if since is None else as_utc(since)
        until = None if until is None else as_utc(until)
        first = None if since is None else f"{since:date=%Y-%m-%d/hour=%H}"
        last = None if until is None else f"{until:date=%Y-%m-%d/hour=%H}"
        between = [
            path
            for path in hours
            if (name := str(path.relative_to(self.directory)))
            and (first is None or name >= first)
            and (last is None or name <= last)
        ]
        columns = schema(raw_keys=False).add("date", DateType()).add("hour", IntegerType())
        reader = spark.read.schema(columns).option("basePath", str(self.directory))
        # Spark needs a path: if no hour is between the times, the conditions below leave no row of the first one.
        rows = reader.parquet(*map(str, between or hours[:1]))
        if since is not None:
            rows = rows.where(F.col("time") >= F.lit(since))
        if until is not None:
            rows = rows.where(F.col("time") < F.lit(until))
        return rows.select(*COLUMN_NAMES)


@contextlib.contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in _WRITE_SETTINGS}
    for name, value in _WRITE_SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def _make_directories(path: Path) -> None:
    """Make a directory and its missing parents, and sync each into its parent.

    Only their owner can open them.
    """
    if not path.is_dir():
        _make_directories(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        disk.sync_directory(str(path.parent))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move(path: Path, target: Path) -> None:
    os.replace(path, target)
