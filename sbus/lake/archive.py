"""Archive journals to a lake, exactly once, in this process.

Theory of operation
-------------------

An archive takes rows in batches. `sbus.journal.following` plans them, `sbus.lake.staging` writes their files, and the
table adds the files to the lake. Every row reaches the lake exactly once, whatever is killed at any moment:

1. *A batch has fixed rows.* It has exactly the rows between two offsets, which never change. The archive syncs the end
   offset to the checkpoint before it reads the rows.
2. *A batch has a fixed place.* A batch that runs again replaces its own files, and never adds to those of another batch
   (`sbus.lake.table.Table.commit`).
3. *A batch is repeated until it is done.* The archive marks a batch as done after it has synced the files. If it ends
   before that, the next start runs the batch again.
4. *Rows are deleted only after they are safe.* The archive reports to a journal after it has synced the mark
   (`sbus.journal.reports`). Until then, retention keeps the rows.

``sbus spark archive`` is the same job on a cluster, with the same checkpoint: either continues where the other stopped,
even in the middle of a batch. They share all modules except the one that writes the files; a lock excludes one while
the other runs.

Everything runs in the thread that calls `Archive.wait`, one batch per call. Between two calls nothing happens, so a
caller that stops calling stops the archive.
"""

from __future__ import annotations

import shutil
import time
import uuid

from sbus.journal.following import Offset
from sbus.journal.reader import read
from sbus.journal.resizing import resized
from sbus.journal.schema import COLUMN_NAMES
from sbus.lake.job import LOOK_INTERVAL, ArchiveJob
from sbus.lake.staging import stage
from sbus.lake.table import Staged, look_at_staged

__all__ = ["Archive"]


class Archive(ArchiveJob):
    """An archive in this process. Each call of `wait` runs one batch, or waits for the next."""

    is_busy = False
    """Always false: between two calls no batch runs."""

    _look_at = 0.0

    def _begin(self) -> None:
        if self._every is None:
            self._follower.target = self._follower.ends()

    def wait(self, seconds: float | None = None) -> bool:
        is_time = time.monotonic() >= self._look_at
        if is_time and self._run_batch():
            return False
        if self._every is None:
            return True
        if is_time:
            self._look_at = time.monotonic() + min(self._every, LOOK_INTERVAL)
        if self._reports.is_due:
            self._report()
        if self.upkeep is not None:
            self.upkeep.poll()
        left = max(0.0, self._look_at - time.monotonic())
        time.sleep(left if seconds is None else min(left, seconds))
        return False

    def _run_batch(self) -> bool:
        """Run the next batch, if there is one; return whether there was."""
        batch, mode = self._done + 1, self._table.state.file_mode
        if self._checkpoint.is_planned(batch):
            end = self._checkpoint.offsets(batch)
        else:
            end = self._follower.next(self._offset)
            if end == self._offset:
                return False
            self._checkpoint.plan(batch, end, mode)
        staged = self._write(batch, end)
        self._checkpoint.mark(batch, mode)
        self._account(batch, end, staged)
        self._report()
        return True

    def _write(self, batch: int, end: Offset) -> Staged:
        """Put a batch into the lake, and return what it has."""
        staged = self._table.state.staging / f"{batch:010}-{uuid.uuid4().hex}"
        try:
            stage(
                staged,
                [
                    resized(rows for part in journal.plan(first, last) for rows in read(part, COLUMN_NAMES))
                    for journal, first, last in self._follower.ranges(self._offset, end)
                ],
            )
            found = look_at_staged(staged)
            self._table.commit(batch, staged)
            return found
        finally:
            shutil.rmtree(staged, ignore_errors=True)
