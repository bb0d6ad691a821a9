"""The archive: journals to a lake, exactly once.

Spark writes down up to where a batch reads before it runs, and that it is done after the lake has it; a batch in
between is done again after whatever has happened, with the same rows, and the lake puts it in its own place. When it is
known on the disk that a batch is done, the journals are told, so that their retention may delete the rows.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sbus.journal.consumers import advance
from sbus.journal.reader import JournalReader
from sbus.spark.datasource.snapshot import open_journals
from sbus.spark.jobs.checkpoint import Checkpoint, Offsets
from sbus.spark.jobs.lake import Lake
from sbus.spark.runtime.errors import translate_errors

__all__ = ["CONSUMER", "MAX_ROWS", "Archive"]

CONSUMER = "archive"
"""The name under which the archive is known to journals."""
MAX_ROWS = 10_000_000
"""Rows in the largest batch."""

_HOUR = 3_600_000_000  # µs
_RETRY_INTERVAL = 10.0  # seconds until a journal that could not be told is told again

_log = logging.getLogger("sbus.spark")


class Archive:
    """A job that archives, from `start` on; as a context manager it is stopped at the end.

    :param spark: the session, which knows the data source ``sbus``.
    :param journals: paths and globs.
    :param lake: where to.
    :param every: seconds from one batch to the next; None: what is there when it starts is archived, and it ends.
    :param max_rows: rows in the largest batch, at most.
    :param consumer: under which name the journals are told what is safe. Two lakes of one journal need two.
    :param fail_on_data_loss: whether it fails if rows are gone that are not archived; else it goes on without them.
    :ivar rows: how many rows have got into the lake since the start.
    :ivar batches: in how many batches.
    """

    def __init__(
        self,
        spark: SparkSession,
        journals: Sequence[str],
        lake: Lake,
        *,
        every: float | None = None,
        max_rows: int = MAX_ROWS,
        consumer: str = CONSUMER,
        fail_on_data_loss: bool = True,
    ) -> None:
        self.rows = 0
        self.batches = 0
        self._spark = spark
        self._journals = list(journals)
        self._lake = lake
        self._every = every
        self._max_rows = max_rows
        self._consumer = consumer
        self._fail_on_data_loss = fail_on_data_loss
        self._checkpoint = Checkpoint(lake.checkpoint)
        self._writing = lake.writing()
        self._query: StreamingQuery | None = None
        self._done = -1
        self._reported: Offsets = {}
        self._unwritable: set[str] = set()  # the directories of journals of which that was said
        self._tell_again = math.inf

    def start(self) -> None:
        """Begin.

        :raises sbus.errors.SbusError: if a journal is not there, or the lake cannot be written.
        """
        journals = open_journals(self._journals)
        self._writing.__enter__()
        try:
            self._checkpoint.mend()
            self._done = self._checkpoint.done()
            if self._done >= 0:
                # Spark has not asked the disk to keep it. Who trusts the report may delete rows for good, so it must
                # not be that a power cut makes Spark plan them once more.
                self._checkpoint.keep(self._done)
            self._report(journals, self._checkpoint.offsets(self._done))
            rows = (
                self._spark.readStream.format("sbus")
                .option("journal", "\n".join(self._journals))
                .option("maxRowsPerTrigger", self._max_rows)
                .option("failOnDataLoss", self._fail_on_data_loss)
                .load()
            )
            writer = rows.writeStream.queryName("archive").option("checkpointLocation", str(self._lake.checkpoint))
            if self._every is None:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=f"{self._every * 1000:.0f} milliseconds")
            self._query = writer.foreachBatch(self._write).start()
        except BaseException:
            self._writing.__exit__(None, None, None)
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job to end, and tell the journals what has become safe.

        :param seconds: how long at most.
        :returns: whether it has ended.
        :raises sbus.errors.SbusError: if it has failed.
        """
        assert self._query is not None
        with translate_errors():
            has_ended = self._query.awaitTermination(seconds)  # type: ignore[arg-type]
        self._settle()
        return has_ended is not False

    @property
    def is_busy(self) -> bool:
        """Whether it is in the middle of a batch."""
        return self._query is not None and bool(self._query.status["isTriggerActive"])

    def stop(self) -> None:
        """End the job; a batch that is not done is done again at the next start."""
        if self._query is not None:
            with contextlib.suppress(Py4JError):  # the JVM is gone, and the query with it
                self._query.stop()
            self._settle()
            self._query = None
            self._writing.__exit__(None, None, None)

    def __enter__(self) -> Archive:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _write(self, rows: DataFrame, batch: int) -> None:
        """One batch; called by Spark, in another thread."""
        self._lake.write(rows, batch, writers=self._writers(batch))

    def _writers(self, batch: int) -> int:
        """How many tasks can write a batch with some gain: each hour is one file, and a task keeps two cores busy."""
        most = self._spark.sparkContext.defaultParallelism // 2
        if most < 2:
            return 1
        journals = open_journals(self._journals)
        ends, starts = self._checkpoint.offsets(batch), self._checkpoint.offsets(batch - 1)
        hours: set[int] = set()
        for journal_id, end in ends.items():
            start = starts.get(journal_id, end)
            if start < end and journal_id in journals:
                hours |= _hours(journals[journal_id], start, end)
        return max(1, min(most, len(hours)))

    def _settle(self) -> None:
        """Take note of the batches that are done by now."""
        done = self._checkpoint.done()
        if done <= self._done and time.monotonic() < self._tell_again:
            return
        if done > self._done:
            self._checkpoint.keep(done)
        before = self._checkpoint.offsets(self._done)
        for batch in range(self._done + 1, done + 1):
            offsets = self._checkpoint.offsets(batch) or before
            rows = sum(end - before.get(journal_id, end) for journal_id, end in offsets.items())
            self.rows += rows
            self.batches += rows > 0
            before = offsets
        self._done = done
        self._report(open_journals(self._journals), before)

    def _report(self, journals: Mapping[str, JournalReader], offsets: Offsets) -> None:
        """Tell the journals up to where their rows are safe."""
        self._tell_again = math.inf
        for journal_id, journal in journals.items():
            following = offsets.get(journal_id, 0)
            if self._reported.get(journal_id) == following:
                continue
            try:
                advance(journal.directory, self._consumer, following)
            except OSError as e:
                self._tell_again = time.monotonic() + _RETRY_INTERVAL
                if journal.directory not in self._unwritable:
                    self._unwritable.add(journal.directory)
                    _log.warning(
                        "%s: what is archived cannot be written down there (%s), so its retention does not learn of it",
                        journal.directory,
                        os.strerror(e.errno or 0),
                    )
            else:
                self._reported[journal_id] = following
                self._unwritable.discard(journal.directory)


def _hours(journal: JournalReader, start: int, end: int) -> set[int]:
    """About which hours these rows are of, by the names of the segments."""
    segments = journal.segments()
    first = max(0, bisect.bisect_right(segments, start, key=lambda segment: segment.first_seq) - 1)
    last = bisect.bisect_left(segments, end, key=lambda segment: segment.first_seq)
    times = [segment.first_time for segment in segments[first:last]]
    return set(range(times[0] // _HOUR, times[-1] // _HOUR + 1)) if times else set()
