"""The lake: recorded rows as Parquet files by hour, each batch of them put there exactly once.

This is the only module that knows how the lake is laid out. A table format takes its place with a class of the same
methods::

    <lake>/date=2026-01-31/hour=07/0000000042.parquet    what batch 42 has of that hour (UTC)
    <lake>/_sbus/batches/0000000042.json                 the files of batch 42
    <lake>/_sbus/checkpoint/                             how far the job is: Spark's own
    <lake>/_sbus/staging/                                what is being written
    <lake>/_sbus/lock                                    held by the one job that writes

A batch is written to a directory of its own in `staging`, wherever the executors are; then this process moves its files
to where they belong, and renaming a file is all or nothing. As the names depend on the batch's number alone, a batch
that is written again, because something was killed half-way, replaces itself; and as its list of files is written
before the first is moved, files that it does not have any more are known and go. Names that begin with ``_`` are
skipped by Spark and others that read the directory as a table.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.errors import LakeError
from sbus.journal import disk
from sbus.journal.layout import read_object

__all__ = ["Lake"]

_SCHEMA = "journal string, seq long, time timestamp, kind string, key string, payload binary, date date, hour int"
_COLUMNS = ("journal", "seq", "time", "kind", "key", "payload")
_DAY = 86_400_000_000  # µs
_HOUR = 3_600_000_000
_REMEMBERED = 100
"""Lists of files that are kept: of as many batches as Spark can go back to."""
_MODE = 0o600

_SETTINGS = {
    "spark.sql.parquet.compression.codec": "zstd",
    # The default is a type without statistics, so that nothing could be skipped by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Rows come by journal and time, so a task sees few hours at a time: files may be open for all of them, and only
    # what has more than so many is sorted first.
    "spark.sql.maxConcurrentOutputFileWriters": "8",
}


class Lake:
    """A lake in a directory that this process and all executors see under one path.

    :param directory: it; for writing it is made if it is not there.
    :raises LakeError: if that is not the path of a directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(directory):
            raise LakeError(
                f"{directory}: a lake is a directory, not a URL: mount it on all machines, and give its path"
            )
        self.directory = Path(os.path.abspath(directory))
        self._state = self.directory / "_sbus"
        self.checkpoint = self._state / "checkpoint"
        """Where Spark writes down how far the job is."""
        self._batches = self._state / "batches"
        self._staging = self._state / "staging"

    # --- writing ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one who writes, and put away what an interrupted job has left.

        :raises LakeError: if another process writes it, or its state is missing.
        :raises OSError: if it cannot be written.
        """
        _make_directories(self._staging)
        lock = os.open(self._state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LakeError(
                    f"{self.directory}: another job writes this lake: stop it, or name another lake"
                ) from None
            if not (self.checkpoint / "offsets").exists() and any(self.directory.glob("date=*")):
                raise LakeError(
                    f"{self.directory}: it has rows, but nothing says from where ({self.checkpoint} is missing): "
                    "restore that from a copy, or name another lake"
                )
            for left in self._staging.iterdir():
                shutil.rmtree(left, ignore_errors=True)  # who wrote there may not have ended yet
            yield
        finally:
            os.close(lock)

    def write(self, rows: DataFrame, batch: int, *, writers: int = 1) -> None:
        """Put a batch into the lake; once more, and it replaces itself.

        :param rows: with the columns of a journal.
        :param batch: its number; all batches with higher ones are taken back.
        :param writers: how many tasks write, each with hours of its own.
        """
        staged = self._staging / f"{batch:010}-{uuid.uuid4().hex}"
        time = F.unix_micros("time")
        placed = rows.select(
            *_COLUMNS,
            # Independent of the session's time zone.
            F.date_from_unix_date(F.floor(time / _DAY).cast("int")).alias("date"),
            F.lpad((F.floor(time / _HOUR) % 24).cast("string"), 2, "0").alias("hour"),
        )
        if writers == 1:
            # Reading and writing then overlap, in Python and in the JVM, and nothing is shuffled or sorted.
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
        """Move the files of a batch to where they belong, and see to it that they stay there.

        It may be interrupted anywhere, also by a power cut, and done again with the same batch or, if what Spark knew
        of it is lost, with one of this number that has other rows.

        :param batch: its number.
        :param staged: a directory with a Parquet file for each hour, in a directory that is named as in the lake.
        """
        files = {
            f"{path.parent.relative_to(staged)}/{batch:010}.parquet": path for path in staged.glob("*/*/*.parquet")
        }
        claims = {number: self._claimed(number) for number in self._numbers() if number >= batch}
        stale = set().union(*claims.values()) - files.keys()
        self._manifest(batch, stale | files.keys())
        for number in claims.keys() - {batch}:
            disk.remove(self._claim_path(number))
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
            self._manifest(batch, files)
        shutil.rmtree(staged, ignore_errors=True)
        disk.remove(self._claim_path(batch - _REMEMBERED))

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._batches)
        except FileNotFoundError:
            return []
        return sorted(int(name.removesuffix(".json")) for name in names if name.endswith(".json"))

    def _claim_path(self, batch: int) -> str:
        return str(self._batches / f"{batch:010}.json")

    def _claimed(self, batch: int) -> set[str]:
        return set(read_object(self._claim_path(batch))["files"])

    def _manifest(self, batch: int, files: Collection[str]) -> None:
        _make_directories(self._batches)
        disk.replace(self._claim_path(batch), json.dumps({"files": sorted(files)}).encode() + b"\n", _MODE)

    # --- reading ------------------------------------------------------------------------------

    def read(self, spark: SparkSession, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """What was archived, with the columns of a journal.

        Only the directories of the hours between these times are looked into.

        :param since: rows before it are left out; a time without a zone is in UTC.
        :param until: this one, and what comes after it, is left out.
        :raises LakeError: if there is no lake, or nothing in it yet.
        """
        hours = sorted(self.directory.glob("date=*/hour=*"))
        if not hours:
            raise LakeError(f"{self.directory}: there is no lake, or nothing in it yet: run sbus spark archive first")
        since, until = _in_utc(since), _in_utc(until)
        first = None if since is None else f"{since:date=%Y-%m-%d/hour=%H}"
        last = None if until is None else f"{until:date=%Y-%m-%d/hour=%H}"
        wanted = [
            path
            for path in hours
            if (name := str(path.relative_to(self.directory)))
            and (first is None or name >= first)
            and (last is None or name <= last)
        ]
        reader = spark.read.schema(_SCHEMA).option("basePath", str(self.directory))
        # Without any hour between the times, the conditions below leave nothing of another one.
        rows = reader.parquet(*map(str, wanted or hours[:1]))
        if since is not None:
            rows = rows.where(F.col("time") >= F.lit(since))
        if until is not None:
            rows = rows.where(F.col("time") < F.lit(until))
        return rows.select(*_COLUMNS)


def _in_utc(time: datetime | None) -> datetime | None:
    if time is None:
        return None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


@contextlib.contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    for name, value in _SETTINGS.items():
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
    """Make a directory and those above it that are missing, for good; others than their owner have no way in."""
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
