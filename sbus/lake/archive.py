"""Archive journals to a lake, exactly once, in this process.

Theory of operation
-------------------

An archive takes rows in batches. `sbus.journal.following` plans them, `sbus.lake.staging` writes their files, and the
table adds them to the lake. Every row gets there exactly once, whatever is killed and whenever:

1. *A batch has fixed rows.* Its offset is synced to the checkpoint before it is read. It has exactly the rows between
   two offsets, and these never change.
2. *A batch has a fixed place.* A batch that runs again replaces its own files, and never adds to those of another one
   (`sbus.lake.table.Table.commit`).
3. *A batch is repeated until it is done.* It is marked as done after its files are synced. If anything ends in between,
   the next start runs it again.
4. *Rows are deleted only after they are safe.* A journal learns how far it is archived after the mark is synced
   (`sbus.lake.reports`). Until then, retention keeps the rows.

The checkpoint is that of ``sbus spark archive``, which is the same job on a cluster: either goes on where the other
was, also in the middle of a batch. They share all modules but the one that writes the files; one lock keeps them apart.

Everything runs in the thread that calls `Archive.wait`, one batch in each call. So nothing happens between two calls,
and a caller that stops calling has stopped the archive.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Sequence
from types import TracebackType

from sbus.errors import LakeError
from sbus.journal.following import Follower, Offset
from sbus.journal.reader import read
from sbus.journal.resizing import resized
from sbus.journal.schema import COLUMN_NAMES
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.reports import CONSUMER, Reports
from sbus.lake.staging import stage
from sbus.lake.table import Table
from sbus.lake.upkeep import Upkeep

__all__ = ["MAX_ROWS", "Archive"]

MAX_ROWS = 10_000_000
"""Rows in the largest batch, by default."""

_LOOK_INTERVAL = 1.0
"""Seconds after which it looks whether a batch is full before its time."""


class Archive:
    """The job: it runs from `start` to `stop`; as a context manager, it does both.

    :param journals: paths and globs.
    :param table: the lake to write.
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

    is_busy = False
    """Whether a batch is running: never between two calls."""

    def __init__(
        self,
        journals: Sequence[str],
        table: Table,
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
        self.upkeep = Upkeep(table) if compacts else None
        self._table = table
        self._follower = Follower(
            journals, max_rows=max_rows, max_bytes=max_bytes, max_delay=every, fail_on_data_loss=fail_on_data_loss
        )
        self._every = every
        self._consumer = consumer
        self._checkpoint = Checkpoint(table.state.checkpoint)
        self._reports: Reports | None = None
        self._resources = contextlib.ExitStack()
        self._done = -1
        self._offset: Offset = {}
        self._look_at = 0.0

    def start(self) -> None:
        """Lock the lake, and find where to go on.

        :raises sbus.errors.SbusError: if a journal is missing, the lake cannot be written, or another lake is the
            consumer of a journal under this name.
        """
        journals = self._follower.journals()
        with contextlib.ExitStack() as starting:
            starting.enter_context(self._table.writing())
            self._checkpoint = Checkpoint(self._table.state.checkpoint)
            self._reports = Reports(
                self._consumer, self._table.state.identity(self._table.format), self._table.location
            )
            self._reports.check(journals)
            self._checkpoint.repair()
            self._done = self._checkpoint.last_done()
            if self._done >= 0:
                if not self._checkpoint.is_planned(self._done):
                    raise LakeError(
                        f"{self._table.location}: batch {self._done} is done, but its offset is missing in "
                        f"{self._table.state.checkpoint}: restore the checkpoint from a copy"
                    )
                # Spark does not sync its files, and the report below lets retention delete rows.
                self._checkpoint.sync(self._done)
            self._offset = self._checkpoint.offsets(self._done)
            self._reports.send(journals, self._offset)
            if self._every is None:
                self._follower.target = self._follower.ends()
            self._resources = starting.pop_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Do the next batch; if there is none, wait, and look after the reports and the compaction.

        :param seconds: the longest wait; None: until it is time to look for a batch.
        :returns: whether all is done, for an archive that ends.
        :raises sbus.errors.SbusError: if a batch cannot be read or committed.
        :raises OSError: if it cannot be written.
        """
        assert self._reports is not None
        is_time = time.monotonic() >= self._look_at
        if is_time and self._run_batch():
            return False
        if self._every is None:
            return True
        if is_time:
            self._look_at = time.monotonic() + min(self._every, _LOOK_INTERVAL)
        if self._reports.is_due:
            self._reports.send(self._follower.journals(), self._offset)
        if self.upkeep is not None:
            self.upkeep.poll()
        left = max(0.0, self._look_at - time.monotonic())
        time.sleep(left if seconds is None else min(left, seconds))
        return False

    @property
    def lag(self) -> int:
        """Rows that are in the journals and not yet in the lake."""
        journals = self._follower.journals()
        return sum(
            max(0, journal.end() - self._offset.get(name, journal.start())) for name, journal in journals.items()
        )

    def stop(self) -> None:
        """Stop the job; a batch that is not done runs again at the next start."""
        if self.upkeep is not None:
            self.upkeep.stop()
        self._resources.close()

    def __enter__(self) -> Archive:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run_batch(self) -> bool:
        """Do the next batch, if there is one; return whether there was."""
        assert self._reports is not None
        batch, mode = self._done + 1, self._table.state.file_mode
        if self._checkpoint.is_planned(batch):
            end = self._checkpoint.offsets(batch)
        else:
            end = self._follower.next(self._offset)
            if end == self._offset:
                return False
            self._checkpoint.plan(batch, end, mode)
        self._write(batch, end)
        self._checkpoint.mark(batch, mode)
        rows = sum(last - self._offset.get(journal_id, last) for journal_id, last in end.items())
        self.rows += rows
        self.batches += rows > 0
        self._done, self._offset = batch, end
        self._reports.send(self._follower.journals(), end)
        return True

    def _write(self, batch: int, end: Offset) -> None:
        staged = self._table.state.staging / f"{batch:010}-{uuid.uuid4().hex}"
        try:
            stage(
                staged,
                [
                    resized(rows for part in journal.plan(first, last) for rows in read(part, COLUMN_NAMES))
                    for journal, first, last in self._follower.ranges(self._offset, end)
                ],
            )
            self._table.commit(batch, staged)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
