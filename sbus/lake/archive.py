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
   (`sbus.journal.reports`). Until then, retention keeps the rows.

The checkpoint is that of ``sbus spark archive``, which is the same job on a cluster: either goes on where the other
was, also in the middle of a batch. They share all modules but the one that writes the files; one lock keeps them apart.

Everything runs in the thread that calls `Archive.wait`, one batch in each call. So nothing happens between two calls,
and a caller that stops calling has stopped the archive.
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

__all__ = ["Archive"]


class Archive(ArchiveJob):
    """An archive in this process; each call of `wait` is one batch, or waits for it."""

    is_busy = False
    """Never between two calls."""

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
        """Do the next batch, if there is one; return whether there was."""
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
        self._account(batch, end)
        self._report()
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
