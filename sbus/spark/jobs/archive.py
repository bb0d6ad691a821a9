"""Archive journals to a lake, exactly once.

Theory of operation
-------------------

The job is one streaming query of Spark: the source is `sbus.spark.datasource.stream`, and each batch goes to
`Lake.write`. Every row gets into the lake exactly once, whatever is killed and whenever. The argument has four steps:

1. *A batch has fixed rows.* Spark writes the offset of a batch to its checkpoint before the batch runs. The source
   reads exactly the rows between two offsets, and these never change.
2. *A batch has a fixed place.* The lake names files by the number of the batch. A batch that runs again replaces its
   own files, and never adds to those of another one.
3. *A batch is repeated until it is done.* Spark marks it as done only after `Lake.write` has returned, which is after
   its files are synced. If anything ends in between, the next start runs it again. So no batch is left out, and by
   step 2 none is there twice.
4. *Rows are deleted only after they are safe.* A journal learns how far it is archived only after the mark is synced
   (`Checkpoint.sync`). Until then, retention keeps the rows, and a batch that runs again finds them. If a power cut
   takes back marks or offsets that were not synced, their batches are planned again, perhaps with other limits; the
   lake then removes what the old ones had put there.

What drives it: Spark calls ``_write`` from a thread of its own. The program that runs the job calls `Archive.wait`
repeatedly; each call notes the batches that are done by now and reports them to the journals, in
``consumers/<name>.json``. Nothing depends on when that happens: a report that is late only delays retention. A report
that fails, because the journal cannot be written, is tried again every 10 seconds.

A consumer's name belongs to one lake (`sbus.lake.reports`).

At the start the last batch that is done is synced before anything is reported, because the process before may have
ended between the mark and the sync.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence
from types import TracebackType

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sbus.journal.clock import HOUR
from sbus.journal.reader import JournalReader
from sbus.journal.snapshot import open_journals
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.reports import CONSUMER, Reports
from sbus.lake.upkeep import Upkeep
from sbus.spark.jobs.lake import Lake
from sbus.spark.jobs.paths import url
from sbus.spark.runtime.errors import translate_errors

__all__ = ["CONSUMER", "MAX_ROWS", "Archive"]

MAX_ROWS = 10_000_000
"""Rows in the largest batch, by default."""

_LOOK_INTERVAL = 1.0
"""Seconds after which the source looks whether a batch is full before its time."""


class Archive:
    """The job: it runs from `start` to `stop`; as a context manager, it does both.

    :param spark: a session with the data source ``sbus`` (`sbus.spark.get_session`).
    :param journals: paths and globs.
    :param lake: the lake to write.
    :param every: seconds from one batch to the next; None: archive the rows that are there at the start, and end.
    :param max_rows: the largest number of rows in a batch.
    :param max_bytes: about the largest number of bytes of journals in a batch; None: no limit. A batch starts when it
        is as large as it may be, or after `every` seconds.
    :param consumer: the name under which the job reports to the journals; each lake of a journal needs its own.
    :param fail_on_data_loss: whether the job fails if rows were deleted before they are archived, or are damaged; else
        it goes on, and a row of the kind ``damaged`` stands in place of damaged ones.
    :param compacts: whether to compact closed hours meanwhile (`sbus.lake.upkeep`).
    :ivar rows: rows that are in the lake since the start.
    :ivar batches: the batches that they came in.
    """

    def __init__(
        self,
        spark: SparkSession,
        journals: Sequence[str],
        lake: Lake,
        *,
        every: float | None = None,
        max_rows: int = MAX_ROWS,
        max_bytes: int | None = None,
        consumer: str = CONSUMER,
        fail_on_data_loss: bool = True,
        compacts: bool = False,
    ) -> None:
        self.rows = 0
        self.batches = 0
        self.upkeep = Upkeep(lake.table) if compacts else None
        self._spark = spark
        self._journals = list(journals)
        self._lake = lake
        self._every = every
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._consumer = consumer
        self._fail_on_data_loss = fail_on_data_loss
        self._checkpoint = Checkpoint(lake.checkpoint)
        self._writing = lake.locked()
        self._query: StreamingQuery | None = None
        self._done = -1
        self._reports: Reports | None = None

    def start(self) -> None:
        """Start the query.

        :raises sbus.errors.SbusError: if a journal is missing, the lake cannot be written, or another lake is the
            consumer of a journal under this name.
        """
        journals = open_journals(self._journals)
        self._writing.__enter__()
        try:
            self._checkpoint = Checkpoint(self._lake.checkpoint)  # the lock may have moved it
            self._reports = Reports(self._consumer, self._lake.identity(), self._lake.location)
            self._reports.check(journals)
            self._checkpoint.repair()
            self._done = self._checkpoint.last_done()
            if self._done >= 0:
                # Spark does not sync its files, and the report below lets retention delete rows.
                self._checkpoint.sync(self._done)
            self._reports.send(journals, self._checkpoint.offsets(self._done))
            reader = (
                self._spark.readStream.format("sbus")
                .option("journal", "\n".join(self._journals))
                .option("maxRowsPerTrigger", self._max_rows)
                .option("failOnDataLoss", self._fail_on_data_loss)
                .option("senders", True)
            )
            if self._max_bytes is not None:
                reader = reader.option("maxBytesPerTrigger", self._max_bytes)
            if self._every is not None:
                reader = reader.option("maxTriggerDelay", f"{self._every:.3f}s")
            rows = reader.load()
            writer = rows.writeStream.queryName("archive").option("checkpointLocation", url(self._lake.checkpoint))
            if self._every is None:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=f"{min(self._every, _LOOK_INTERVAL) * 1000:.0f} milliseconds")
            self._query = writer.foreachBatch(self._write).start()
        except BaseException:
            self._writing.__exit__(None, None, None)
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job to end, and report to the journals what is safe by then.

        :param seconds: the longest wait; None: no limit.
        :returns: whether the job has ended.
        :raises sbus.errors.SbusError: if the job has failed.
        """
        assert self._query is not None
        with translate_errors():
            has_ended = self._query.awaitTermination(seconds)  # type: ignore[arg-type]
        self._note_done_batches()
        if self.upkeep is not None:
            self.upkeep.poll()
        return has_ended is not False

    @property
    def lag(self) -> int:
        """Rows that are in the journals and not yet in the lake."""
        offsets = self._checkpoint.offsets(self._done)
        journals = open_journals(self._journals)
        return sum(max(0, journal.end() - offsets.get(name, journal.start())) for name, journal in journals.items())

    @property
    def is_busy(self) -> bool:
        """Whether a batch is running."""
        return self._query is not None and bool(self._query.status["isTriggerActive"])

    def stop(self) -> None:
        """Stop the job; a batch that is not done runs again at the next start."""
        query, self._query = self._query, None
        if query is None:
            return
        try:
            with contextlib.suppress(Py4JError, OSError):  # the JVM is gone, and the query with it
                query.stop()
            if self.upkeep is not None:
                self.upkeep.stop()
            with contextlib.suppress(OSError):  # the lake is gone: the next start reports what is there then
                self._note_done_batches()
                self._lake.table.state.adopt_checkpoint()
        finally:
            self._writing.__exit__(None, None, None)

    def __enter__(self) -> Archive:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _write(self, rows: DataFrame, batch: int) -> None:
        """Write a batch; Spark calls this in a thread of its own."""
        self._lake.write(rows, batch, writers=self._writers(batch))

    def _writers(self, batch: int) -> int:
        """Return the number of tasks to write a batch with.

        Each hour is one file, and a task keeps two cores busy.
        """
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

    def _note_done_batches(self) -> None:
        """Count the finished batches, sync their marks, and report them to the journals."""
        done = self._checkpoint.last_done()
        if self._reports is None or (done <= self._done and not self._reports.is_due):
            return
        if done > self._done:
            self._lake.table.state.adopt_checkpoint()
            self._checkpoint.sync(done)
        before = self._checkpoint.offsets(self._done)
        for batch in range(self._done + 1, done + 1):
            offsets = self._checkpoint.offsets(batch) or before
            rows = sum(end - before.get(journal_id, end) for journal_id, end in offsets.items())
            self.rows += rows
            self.batches += rows > 0
            before = offsets
        self._done = done
        self._reports.send(open_journals(self._journals), before)


def _hours(journal: JournalReader, start: int, end: int) -> set[int]:
    """Return the approximate hours of some rows, from the names of their segments."""
    segments = journal.segments()
    first = max(0, bisect.bisect_right(segments, start, key=lambda segment: segment.first_seq) - 1)
    last = bisect.bisect_left(segments, end, key=lambda segment: segment.first_seq)
    # Not the hours between them: a clock that was wrong once would make that millions.
    return {segment.first_time // HOUR for segment in segments[first:last]}
