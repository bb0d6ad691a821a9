"""Read journals as a stream, batch by batch.

The offsets contain everything that a restart needs.

Theory of operation
-------------------

Spark drives the reader: it asks for `latestOffset`, writes that offset to its checkpoint, asks for the partitions
between two offsets, and calls `read` on the executors. After a crash it repeats the last step with the same offsets.
`sbus.journal.following` says what an offset is, and plans the batches; this module puts that into Spark's words.

*A consumer* (`sbus.journal.consumers`) is a stream with that option. Before the first row is read, the stream registers
with each journal; then it reports how far it is done, so that retention waits for it:

* Spark calls `commit` with the end of a batch when it has planned the next one.
* A run of availableNow plans no batch after its last one. It asks for one, though, and starts from what is done.

A name belongs to one checkpoint. The ID for that is made with the first offset, and each later offset repeats it, so a
stream that was killed is still the same, and one with a new checkpoint is another. The stream registers once Spark has
written the offset with the ID.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

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

from sbus.errors import JournalError
from sbus.journal.consumers import advance, check_consumer
from sbus.journal.following import Follower, Offset
from sbus.journal.reports import Reports
from sbus.journal.snapshot import Snapshot
from sbus.spark.datasource.options import LATEST, StreamOptions
from sbus.spark.datasource.scan import JournalPartition, Scan

__all__ = ["SbusStreamReader"]

_ID = "consumer"
"""Where an offset has the ID of the stream as a consumer; its other names are those of journals."""


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
        self._registered: set[str] = set()
        self._reports: Reports | None = None

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

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the offset up to which to read now.

        :param start: the offset up to which everything is read.
        :param limit: how much to read at most.
        :raises sbus.errors.JournalError: if rows were deleted before they were read, unless ``failOnDataLoss`` is
            false.
        """
        done = _rows(start)
        if not done:
            self.options.read.start.check(self._follower.journals())
        if self._follower.target is not None:
            self._report(start)
        end = self._follower.next(done, is_limited=not isinstance(limit, ReadAllAvailable))
        return end if self.options.consumer is None else {**end, _ID: start.get(_ID) or uuid4().hex}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[JournalPartition]:
        """Plan the tasks that read the rows from one offset to another.

        :raises sbus.errors.JournalError: if some of these rows were deleted, unless ``failOnDataLoss`` is false; or if
            the stream cannot register as a consumer.
        """
        self._register(start, end)
        ranges = list(self._follower.ranges(_rows(start), _rows(end)))
        return self.scan.partitions(ranges) if ranges else []

    def commit(self, end: dict[str, Any]) -> None:
        """Report to the journals that all rows before an offset are done."""
        self._report(end)

    def _register(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Make retention wait for this stream, from where it starts in each journal of an offset."""
        name = self.options.consumer
        missing = _rows(end).keys() - self._registered
        if name is None or _ID not in end or not missing:
            return
        journals = self._follower.journals()
        for journal_id in sorted(missing & journals.keys()):
            directory = journals[journal_id].directory
            try:
                check_consumer(directory, name, end[_ID], "this stream")
                advance(directory, name, start.get(journal_id, end[journal_id]), identity=end[_ID])
            except OSError as e:
                raise JournalError(
                    f"{directory}: the consumer {name!r} cannot be registered there ({e.strerror}): let this user "
                    "write to the directory consumers in it, or leave out the option consumer"
                ) from None
        self._registered |= missing

    def _report(self, offset: dict[str, Any]) -> None:
        name = self.options.consumer
        if name is not None and _ID in offset:
            if self._reports is None:
                self._reports = Reports(name, offset[_ID], "this stream")
            self._reports.send(self._follower.journals(), _rows(offset))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a partition."""
        return self.scan.read(partition)

    def _start_of(self, journal: Snapshot, is_late: bool) -> int:
        """Return where reading starts in a journal; one that joins later is read from its start."""
        start = self.options.read.start
        if is_late and journal.id not in start.rows and start.of(journal.id) == LATEST:
            return journal.start()
        return start.resolve(journal)


def _rows(offset: dict[str, Any]) -> Offset:
    """Return the journals of an offset of Spark, with their rows."""
    return {name: row for name, row in offset.items() if name != _ID}
