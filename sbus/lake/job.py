"""The part of an archive that does not depend on what writes its files: options, start and accounting."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sbus.errors import LakeError
from sbus.journal.following import Follower, Offset
from sbus.journal.layout import is_journal
from sbus.journal.reports import Reports
from sbus.lake.checkpoint import Checkpoint
from sbus.lake.table import Lost, Staged, Table
from sbus.lake.upkeep import Upkeep

__all__ = ["LOOK_INTERVAL", "MAX_ROWS", "ArchiveJob"]

_log = logging.getLogger("sbus.lake")

_CONSUMER = "archive"
"""The default name of an archive as a consumer of journals."""

MAX_ROWS = 10_000_000
"""The default maximum number of rows in a batch."""

LOOK_INTERVAL = 1.0
"""Seconds between two checks whether a batch is full before its time."""


class ArchiveJob(abc.ABC):
    """An archive of journals. It runs from `start` to `stop`; a ``with`` block calls both.

    :param journals: paths and globs.
    :param table: the lake to write.
    :param every: seconds from one batch to the next; None: archive the rows that are there at the start, and end.
    :param max_rows: the maximum number of rows in a batch.
    :param max_bytes: about the maximum number of bytes of journals in a batch; None: no limit. A batch starts when it
        is full, or after `every` seconds.
    :param consumer: the name under which the job reports to the journals; each lake of a journal needs its own.
    :param fail_on_data_loss: whether the job fails if rows were deleted before they were archived, or are damaged.
        Otherwise it continues, and a row of the kind ``damaged`` replaces damaged ones.
    :param leaves_damaged: whether a damaged journal waits in front of the damage while the others are archived; else
        damage is an error.
    :param compacts: whether to compact closed hours as well (`sbus.lake.upkeep`).
    :ivar rows: rows archived since the start.
    :ivar batches: batches with rows since the start.
    :ivar lost: rows that were deleted before they were archived, or are damaged, since the start.
    """

    def __init__(
        self,
        journals: Sequence[str],
        table: Table,
        *,
        every: float | None = None,
        max_rows: int = MAX_ROWS,
        max_bytes: int | None = None,
        consumer: str = _CONSUMER,
        fail_on_data_loss: bool = True,
        leaves_damaged: bool = False,
        compacts: bool = False,
    ) -> None:
        self.rows = 0
        self.batches = 0
        self.lost = 0
        self.upkeep = Upkeep(table) if compacts else None
        self._table = table
        self._follower = Follower(
            journals,
            max_rows=max_rows,
            max_bytes=max_bytes,
            max_delay=every,
            fail_on_data_loss=fail_on_data_loss,
            leaves_damaged=leaves_damaged,
        )
        self._every = every
        self._consumer = consumer
        self._checkpoint = Checkpoint(table.state.checkpoint)
        self._reports = Reports(consumer, "", table.location)
        self._resources = contextlib.ExitStack()
        self._done = -1
        self._offset: Offset = {}

    def start(self) -> None:
        """Lock the lake, find where to continue, and begin.

        :raises sbus.errors.SbusError: if a journal is missing, the lake is in a journal or cannot be written, or
            another lake has this name as a consumer of a journal.
        :raises sbus.errors.StorageError: if the lake or its state is gone, perhaps for a while.
        """
        journals = self._follower.journals()
        _check_is_no_journal(self._table.location)
        self._table.state.check_same()
        self._new_reports().check(journals)  # before a lake is made that would be refused
        with contextlib.ExitStack() as starting:
            files = starting.enter_context(self._table.writing())
            state = self._table.state
            self._checkpoint = Checkpoint(state.checkpoint)  # the lock may have moved it
            self._reports = self._new_reports()
            self._checkpoint.repair()
            self._done = self._checkpoint.last_done()
            last = self._table.last_batch(self._done, files)
            if last > self._done or (last >= 0 and not self._checkpoint.is_planned(last)):
                raise LakeError(
                    f"{self._table.location}: the lake has batch {last}, but {state.checkpoint} lacks its offset or "
                    "its commit: restore the state, or lake and state from one copy"
                )
            if self._done >= 0:
                # Spark does not sync its files, and the report below lets retention delete rows.
                self._checkpoint.sync(self._done)
            self._offset = self._checkpoint.offsets(self._done)
            self._reports.send(journals, self._offset)
            self._begin()
            self._resources = starting.pop_all()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Begin to archive, from the offset on."""

    @abc.abstractmethod
    def wait(self, seconds: float | None = None) -> bool:
        """Let the job work.

        :param seconds: the maximum time; None: no limit, or until the next batch.
        :returns: whether an archive that ends has archived everything.
        :raises sbus.errors.SbusError: if the job has failed.
        :raises OSError: if something cannot be written.
        """

    @property
    @abc.abstractmethod
    def is_busy(self) -> bool:
        """Whether a batch is running."""

    @property
    def lag(self) -> int:
        """The number of rows in the journals that are not in the lake yet."""
        journals, ends = self._follower.journals(), self._follower.ends()
        return sum(
            max(0, ends[name] - self._offset.get(name, journal.start()))
            for name, journal in journals.items()
            if name in ends
        )

    @property
    def damaged(self) -> list[str]:
        """The directories of the journals that wait in front of damage, sorted."""
        return sorted(self._follower.damaged)

    @property
    def done_at(self) -> float:
        """The time at which the last batch was done, in seconds since the epoch; 0 before the first."""
        return self._checkpoint.done_at(self._done)

    def stop(self) -> None:
        """Stop the job. A batch that is not done runs again at the next start."""
        if self.upkeep is not None:
            self.upkeep.stop()
        self._resources.close()

    def _new_reports(self) -> Reports:
        """Return reports of the lake as it is now; one that has not been made yet has no ID."""
        return Reports(self._consumer, str(self._table.state.fields().get("id", "")), self._table.location)

    def _account(self, batch: int, end: Offset, staged: Staged) -> None:
        """Count a batch that is done and synced, and name the rows that it lacks because they are damaged.

        :param staged: what it has in the lake.
        """
        numbers = sum(last - self._offset.get(journal_id, last) for journal_id, last in end.items())
        self.lost += numbers - (staged.rows - len(staged.lost))
        journals = self._follower.journals()
        for journal_id, first, rows in _joined(staged.lost):
            where = journals[journal_id].directory if journal_id in journals else journal_id
            what = f"the rows {first} to {first + rows - 1} of the journal in {where} are damaged"
            _log.warning("%s: in the lake, rows of the kind damaged stand for them", what)
        self.rows += staged.rows
        self.batches += staged.rows > 0
        self._done, self._offset = batch, end

    def _report(self) -> None:
        """Report to the journals which rows are safe in the lake."""
        self._reports.send(self._follower.journals(), self._offset)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _joined(lost: Iterable[Lost]) -> list[Lost]:
    """Join damaged rows that follow one another in a journal."""
    joined: list[Lost] = []
    for each in lost:
        before = joined[-1] if joined else None
        if before and (before.journal, before.first_seq + before.rows) == (each.journal, each.first_seq):
            joined[-1] = before._replace(rows=before.rows + each.rows)
        else:
            joined.append(each)
    return joined


def _check_is_no_journal(location: str) -> None:
    """Check that a lake is not in a journal.

    :raises LakeError: if it is.
    """
    if "://" in location:
        return
    lake = Path(os.path.realpath(location))
    for directory in (lake, *lake.parents):
        if is_journal(str(directory)):
            raise LakeError(f"{location}: {directory} is a journal: name another directory for the lake")
