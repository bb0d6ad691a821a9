"""Archive journals to a lake on a cluster, exactly once: `sbus.lake.archive` as a streaming query of Spark.

Theory of operation
-------------------

The source is `sbus.spark.datasource.stream`, and each batch goes to `Lake.write`. The four steps of `sbus.lake.archive`
are the same here:

1. *A batch has fixed rows.* Spark writes the offset of a batch to its checkpoint before the batch runs.
2. *A batch has a fixed place.* The lake names files by the number of the batch. Other tasks may divide a batch that
   runs again differently; it still has the same rows, and replaces all its files.
3. *A batch is repeated until it is done.* Spark marks it as done after `Lake.write` has returned, which is after its
   files are synced.
4. *Rows are deleted only after they are safe.* A journal learns how far it is archived after the mark is synced
   (`sbus.lake.checkpoint.Checkpoint.sync`). If a power cut takes back marks or offsets that were not synced, their
   batches are planned again, perhaps with other limits; the lake then removes what the old ones had put there.

Spark drives it: it calls ``_write`` from its own thread. The program that runs the job calls `Archive.wait` repeatedly;
each call notes the batches that are done by now and reports them. Nothing depends on when that happens: a report that
is late only delays retention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sbus.lake.job import LOOK_INTERVAL, ArchiveJob
from sbus.lake.table import Staged
from sbus.spark.jobs.lake import Lake
from sbus.spark.jobs.paths import url
from sbus.spark.runtime.errors import translate_errors
from sbus.spark.runtime.shipping import is_local

__all__ = ["Archive"]


class Archive(ArchiveJob):
    """An archive that is a query of Spark.

    :param spark: a session with the data source ``sbus`` (`sbus.spark.get_session`).
    :param lake: the lake to write.
    :param how: the other arguments of `ArchiveJob`.
    """

    def __init__(self, spark: SparkSession, journals: Sequence[str], lake: Lake, **how: Any) -> None:
        super().__init__(journals, lake.table, **how)
        self._spark = spark
        self._lake = lake
        self._query: StreamingQuery | None = None
        self._written: dict[int, Staged] = {}  # of batches that are not counted yet

    def _begin(self) -> None:
        asked = self._follower
        reader = (
            self._spark.readStream.format("sbus")
            .option("journal", "\n".join(asked.paths))
            .option("maxRowsPerTrigger", asked.max_rows)
            .option("failOnDataLoss", asked.fail_on_data_loss)
            .option("senders", True)
            .option("parallelism", self._spark.sparkContext.defaultParallelism)
        )
        if asked.max_bytes is not None:
            reader = reader.option("maxBytesPerTrigger", asked.max_bytes)
        if self._every is not None:
            reader = reader.option("maxTriggerDelay", f"{self._every:.3f}s")
        rows = reader.load()
        writer = rows.writeStream.queryName("archive").option("checkpointLocation", url(self._lake.checkpoint))
        if self._every is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{min(self._every, LOOK_INTERVAL) * 1000:.0f} milliseconds")
        self._query = writer.foreachBatch(self._write).start()

    def wait(self, seconds: float | None = None) -> bool:
        assert self._query is not None
        with translate_errors():
            has_ended = self._query.awaitTermination(seconds)  # type: ignore[arg-type]
        self._note_done_batches()
        if self.upkeep is not None:
            self.upkeep.poll()
        return has_ended is not False

    @property
    def is_busy(self) -> bool:
        return self._query is not None and bool(self._query.status["isTriggerActive"])

    def stop(self) -> None:
        query, self._query = self._query, None
        if query is None:
            return
        try:
            with contextlib.suppress(Py4JError, OSError):  # the JVM is gone, and the query with it
                query.stop()
            with contextlib.suppress(OSError):  # the lake is gone: the next start reports what is there then
                self._note_done_batches()
                self._table.state.adopt_checkpoint()
        finally:
            super().stop()

    def _write(self, rows: DataFrame, batch: int) -> None:
        """Write a batch; Spark calls this in its own thread."""
        self._written[batch] = self._lake.write(rows, batch, writers=self._writers)

    @property
    def _writers(self) -> int:
        """The most tasks that write a batch."""
        context = self._spark.sparkContext
        tasks = context.defaultParallelism
        # A task reads in Python and writes in Java at once, which takes two cores; on a cluster, the operator has
        # chosen how many a task has.
        return max(1, tasks // 2) if is_local(str(context.master)) else tasks

    def _note_done_batches(self) -> None:
        """Count the finished batches, sync their marks, and report them to the journals."""
        done = self._checkpoint.last_done()
        if done > self._done:
            self._table.state.adopt_checkpoint()
            self._checkpoint.sync(done)
        elif not self._reports.is_due:
            return
        for batch in range(self._done + 1, done + 1):
            self._account(batch, self._checkpoint.offsets(batch) or self._offset, self._written.pop(batch))
        self._report()
