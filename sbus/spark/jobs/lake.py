"""The lake as Spark writes and reads it, in any table format.

Spark writes the rows of a batch to a new directory in ``staging``, as one or several Parquet files for each hour. The
table format (`sbus.lake.table`) then adds these files to the lake, exactly once. Nothing here knows the layout of a
lake.

Each task reads a part of the batch and writes a file for each hour in that part, so the tasks share an hour as they
share the rows, without a shuffle. Rows come by journal and time, so a task has few files open at a time. A small batch
is one part (`sbus.spark.datasource.scan`), and has one file for each hour. A lake with rows and without a checkpoint is
refused: the job could not know which rows are there, and would write them twice.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.errors import LakeError
from sbus.journal.clock import DAY, HOUR, as_utc
from sbus.journal.schema import COLUMN_NAMES
from sbus.lake.merge import Limits, iter_rows
from sbus.lake.opening import open_table
from sbus.lake.table import Hour, Staged, Table, look_at_staged
from sbus.spark.datasource.scan import schema
from sbus.spark.jobs.paths import AS_THEY_ARE, url

__all__ = ["Lake"]

_LISTINGS = 10
"""How often files are listed at most because compaction has replaced some of them meanwhile."""

_WRITE_SETTINGS = {
    "spark.sql.parquet.compression.codec": "zstd",
    # The default type has no statistics, so a reader could not skip row groups by time.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Files that a task has open, one for each hour; only a task with more hours sorts its rows first.
    "spark.sql.maxConcurrentOutputFileWriters": "8",
}
_ENCODINGS = {
    # Numbers and times rise: as differences they take about a byte. Only pages of version 2 have that encoding.
    "parquet.writer.version": "PARQUET_2_0",
    "parquet.enable.dictionary#seq": "false",
    "parquet.enable.dictionary#time": "false",
}


class Lake:
    """A lake in a directory that this process and all executors see under one path.

    :param directory: the directory; a job that writes makes it if it is missing.
    :param format: the table format of a new lake; None: the one that the lake has, or ``parquet``.
    :param state: the directory of the lake's state, for a lake in object storage.
    :param mode: the permissions of new files; None: those of the lake, and ``0600`` in a new one.
    :raises sbus.errors.LakeError: if the lake has another format.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: str | None = None,
        state: str | os.PathLike[str] | None = None,
        mode: int | None = None,
    ) -> None:
        self.table = open_table(os.fspath(directory), format=format, state=state)
        self.table.state.mode = mode
        self.location = self.table.location
        """The directory, or the URL."""

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the job, written by Spark."""
        return self.table.state.checkpoint

    # --- writing ------------------------------------------------------------------------------

    def write(self, rows: DataFrame, batch: int, *, writers: int = 1) -> Staged:
        """Put a batch into the lake; written again, it replaces itself.

        :param rows: with the columns of a journal.
        :param batch: the number of the batch; batches with higher numbers are removed.
        :param writers: the most tasks that write; each writes a file for each of its hours.
        :returns: what it has.
        """
        staged = self.table.state.staging / f"{batch:010}-{uuid.uuid4().hex}"
        us = F.unix_micros("time")
        placed = rows.select(
            *COLUMN_NAMES,
            # Independent of the session's time zone.
            F.date_from_unix_date(F.floor(us / DAY).cast("int")).alias("date"),
            F.lpad((F.floor(us / HOUR) % 24).cast("string"), 2, "0").alias("hour"),
        )
        placed = placed.coalesce(writers)
        with _settings(rows.sparkSession):
            placed.write.partitionBy("date", "hour").option("maxRecordsPerFile", 0).option(
                "mapreduce.fileoutputcommitter.marksuccessfuljobs", "false"
            ).options(**_ENCODINGS).parquet(url(staged))
        found = look_at_staged(staged)
        self.table.commit(batch, staged)
        return found

    # --- reading ------------------------------------------------------------------------------

    def read(self, spark: SparkSession, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """Return the archived rows, with the columns of a journal.

        Spark opens only the directories of the hours between the two times.

        :param since: leave out the rows before this time; a time without a zone is in UTC.
        :param until: leave out the rows at or after this time.
        :raises sbus.errors.LakeError: if there is no lake, or the lake is empty.
        """
        since = None if since is None else as_utc(since)
        until = None if until is None else as_utc(until)
        rows = self._load(spark, self._list(since, until))
        if since is not None:
            rows = rows.where(F.col("time") >= F.lit(since))
        if until is not None:
            rows = rows.where(F.col("time") < F.lit(until))
        return rows.select(*COLUMN_NAMES)

    def _list(self, since: datetime | None, until: datetime | None) -> list[str]:
        """Return paths of the files with the hours between two times, which stay readable."""
        for _ in range(_LISTINGS):
            files = self.table.files()
            if not files:
                break
            between = [
                file
                for file in files
                if (since is None or file.hour >= Hour.of(since)) and (until is None or file.hour <= Hour.of(until))
            ]
            try:
                # Spark needs a path: if no hour is between the times, the conditions leave no row of the first file.
                return self.table.pin(between or files[:1])
            except FileNotFoundError:
                continue  # compaction has just replaced it
        else:
            raise LakeError(f"{self.location}: its files change faster than they can be listed: try again")
        raise LakeError(f"{self.location}: there is no lake, or it is empty: run sbus archive first")

    def _load(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame:
        """Read files of the lake; Spark itself cannot reach object storage without jars that are not on PyPI."""
        columns = schema(raw_keys=False)
        if "://" not in self.location:
            return spark.read.schema(columns).options(**AS_THEY_ARE).parquet(*map(url, paths))
        table = self.table
        names = spark.createDataFrame([(path.removeprefix(f"{self.location}/"),) for path in paths], "name string")
        tasks = min(len(paths), 4 * spark.sparkContext.defaultParallelism)
        return names.repartition(tasks).mapInArrow(lambda batches: _read(table, batches), columns)


def _read(table: Table, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the files that the rows of the batches name, on an executor."""
    for batch in batches:
        for name in batch.column("name").to_pylist():
            with pq.ParquetFile(table.open(name), pre_buffer=False, buffer_size=1 << 20) as parquet:
                yield from iter_rows(parquet, Limits(), COLUMN_NAMES)


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
