"""Read journals as a stream, batch by batch.

The offsets contain everything that a restart needs.

Theory of operation
-------------------

Spark drives the reader: it asks for `latestOffset`, writes that offset to its checkpoint, asks for the partitions
between two offsets, and calls `read` on the executors. After a crash it repeats the last step with the same offsets.
`sbus.journal.following` says what an offset is, and plans the batches; this module puts that into Spark's words.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from sbus.journal.following import Follower, Offset
from sbus.journal.snapshot import Snapshot
from sbus.spark.datasource.options import LATEST, StreamOptions
from sbus.spark.datasource.scan import JournalPartition, Scan

__all__ = ["SbusStreamReader"]


class SbusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Read journals while they are written.

    :param options: what to read, from where on, and how much at a time.
    :param schema: which columns to read.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self.options = options
        self.scan = Scan(options.read, schema)
        self._follower = Follower(
            options.read.journals,
            max_rows=options.max_rows,
            max_bytes=options.max_bytes,
            max_delay=options.max_delay,
            fail_on_data_loss=options.fail_on_data_loss,
            start_of=self._start_of,
        )

    def initialOffset(self) -> Offset:
        """Return the offset before any journal has joined."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit from the options.

        If there are two, it is the one in rows, because Spark takes only one kind.
        """
        if self.options.max_rows is not None:
            return ReadMaxRows(self.options.max_rows)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Read up to where the journals are now, and no further."""
        self._follower.target = self.reportLatestOffset()

    def reportLatestOffset(self) -> Offset:
        """Return how far the journals can be read."""
        return self._follower.ends()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the offset up to which to read now.

        :param start: the offset up to which everything is read.
        :param limit: how much to read at most.
        :raises sbus.errors.JournalError: if rows were deleted before they were read, unless ``failOnDataLoss`` is
            false.
        """
        if not start:
            self.options.read.start.check(self._follower.journals())
        return self._follower.next(start, is_limited=not isinstance(limit, ReadAllAvailable))

    def partitions(self, start: Offset, end: Offset) -> list[JournalPartition]:
        """Plan the tasks that read the rows from one offset to another.

        :raises sbus.errors.JournalError: if some of these rows were deleted, unless ``failOnDataLoss`` is false.
        """
        ranges = list(self._follower.ranges(start, end))
        return self.scan.partitions(ranges) if ranges else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a partition."""
        return self.scan.read(partition)

    def _start_of(self, journal: Snapshot, is_late: bool) -> int:
        """Return where reading starts in a journal; one that joins later is read from its start."""
        start = self.options.read.start
        if is_late and journal.id not in start.rows and start.of(journal.id) == LATEST:
            return journal.start()
        return start.resolve(journal)
