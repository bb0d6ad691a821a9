"""Read journals as a stream, batch by batch.

The offsets contain everything that a restart needs.

Theory of operation
-------------------

An offset is ``{"<journal id>": <next seq>}``: for each journal the sequence number of the first row that is not read
yet. Spark drives the reader: it asks for `latestOffset`, writes that offset to its checkpoint, asks for the partitions
between two offsets, and calls `read` on the executors. After a crash it repeats the last step with the same offsets.

Invariants:

* *The offsets decide everything.* The reader keeps nothing between two triggers but the list of directories. A query
  that is started again reads the same rows in the same batches.
* *A journal joins without rows.* The first offset that names a journal says where reading starts in it; its rows come
  with later offsets. So the start is in the checkpoint before the first row is read. If a journal joined together with
  its first rows, a crash between the two could start it at another row, because ``latest`` or a time mean something
  else a moment later.
* *Only safe rows are read.* An offset never passes the end of what the recorder has synced, so a power cut cannot take
  back a row that a stream has seen.
* *Loss is an error.* If rows between two offsets were deleted, the query fails unless ``failOnDataLoss`` is false; then
  the reader warns once for each loss. The same holds for damaged rows; in their place stands a row of the kind
  ``damaged``, which says how many they are.

With a limit, `share` divides rows among the journals that are behind: a journal with little to read gets all of it, and
the others share the rest evenly, so one busy journal does not starve the others.
"""

from __future__ import annotations

import logging
import math
import time
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

from sbus.errors import JournalError
from sbus.spark.datasource.options import LATEST, StreamOptions
from sbus.spark.datasource.scan import JournalPartition, Scan
from sbus.spark.datasource.snapshot import Snapshot, open_journals

__all__ = ["SbusStreamReader", "share"]

_log = logging.getLogger("sbus.spark")

Offset = dict[str, int]


class SbusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Read journals while they are written.

    :param options: what to read, from where on, and how much at a time.
    :param schema: which columns to read.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self.options = options
        self.scan = Scan(options.read, schema)
        self._target: Offset | None = None
        self._known: dict[str, Snapshot] = {}
        self._next_at = -math.inf  # when a batch may start with fewer rows than it could have
        self._reported: set[str] = set()  # losses: every trigger meets the same one again

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
        self._target = self.reportLatestOffset()

    def reportLatestOffset(self) -> Offset:
        """Return how far the journals can be read."""
        return {journal_id: journal.end() for journal_id, journal in sorted(self._journals().items())}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the offset up to which to read now.

        :param start: the offset up to which everything is read.
        :param limit: how much to read at most.
        :raises sbus.errors.JournalError: if rows were deleted before they were read, unless ``failOnDataLoss`` is
            false.
        """
        journals = self._journals()
        if not start:
            self.options.read.start.check(journals)
        offset = dict(start)
        behind: dict[str, tuple[int, int]] = {}
        for journal_id, journal in journals.items():
            end = journal.end()
            if self._target is not None:
                if journal_id not in self._target:
                    continue  # it appeared after this run began
                end = min(end, self._target[journal_id])
            if journal_id not in start:
                offset[journal_id] = self._first(journal, end, is_new=not start)
                continue
            offset[journal_id] = first = self._without_loss(journal, start[journal_id])
            if first < end:
                behind[journal_id] = (first, end)
        for journal_id in start.keys() - journals.keys():
            self._report_loss(f"the journal {journal_id} is gone; it was read up to row {start[journal_id]}")
        if behind and not self._is_due(journals, behind):
            behind = {}
        offset.update(self._limited(journals, behind, limit))
        return dict(sorted(offset.items()))

    def partitions(self, start: Offset, end: Offset) -> list[JournalPartition]:
        """Plan the tasks that read the rows from one offset to another.

        :raises sbus.errors.JournalError: if some of these rows were deleted, unless ``failOnDataLoss`` is false.
        """
        ranges = {journal_id: (start.get(journal_id, last), last) for journal_id, last in end.items()}
        ranges = {journal_id: (first, last) for journal_id, (first, last) in ranges.items() if first < last}
        if not ranges:
            return []
        journals = self._journals()
        found = []
        for journal_id, (first, last) in ranges.items():
            if journal_id not in journals:
                self._report_loss(f"the journal {journal_id} is gone; its rows {first} to {last - 1} were not read")
                continue
            journal = journals[journal_id]
            found.append((journal, self._without_loss(journal, first), last))
        return self.scan.partitions(found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a partition."""
        return self.scan.read(partition)

    # --- parts ----------------------------------------------------------------------------------

    def _journals(self) -> dict[str, Snapshot]:
        self._known = open_journals(
            self.options.read.journals, self._known, skip_damaged=not self.options.fail_on_data_loss
        )
        return self._known

    def _first(self, journal: Snapshot, end: int, *, is_new: bool) -> int:
        """Return where reading starts in a journal that joins the stream.

        :param end: the end of the rows that are safe on the disk now.
        :param is_new: whether it joins at the start of the query; a journal that appears later is read from its start.
        """
        start = self.options.read.start
        if not is_new and journal.id not in start.rows and start.of(journal.id) == LATEST:
            return min(journal.start(), end)
        return min(start.resolve(journal), end)

    def _without_loss(self, journal: Snapshot, seq: int) -> int:
        """Return the next row to read, after reporting deleted rows before it."""
        first = journal.start()
        if first <= seq:
            return seq
        self._report_loss(f"the rows {seq} to {first - 1} of the journal in {journal.directory} are deleted")
        return first

    def _report_loss(self, what: str) -> None:
        if self.options.fail_on_data_loss:
            raise JournalError(
                f"{what}: restore from a copy, or go on without them with failOnDataLoss=false (the archive: "
                "--allow-loss); to keep rows until they are read, see --keep-bytes and --keep-days of the recorder"
            )
        if what not in self._reported:
            self._reported.add(what)
            _log.warning("%s; going on without them (failOnDataLoss=false)", what)

    def _is_due(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]]) -> bool:
        """Return whether to start a batch now; if so, the time until the next one begins."""
        delay = self.options.max_delay
        if delay is None or self._target is not None:
            return True
        now = time.monotonic()
        if now < self._next_at and not self._is_full(journals, behind):
            return False
        self._next_at = now + delay
        return True

    def _is_full(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]]) -> bool:
        """Return whether the rows that wait make a batch of the largest size."""
        rows, most = self.options.max_rows, self.options.max_bytes
        if rows is not None and sum(end - first for first, end in behind.values()) >= rows:
            return True
        return most is not None and any(
            journals[journal_id].limit(first, max_bytes=max(1, most // len(behind))) < end
            for journal_id, (first, end) in behind.items()
        )

    def _limited(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]], limit: ReadLimit) -> Offset:
        """Return where to stop reading each journal that is behind, under a limit.

        :param behind: for each, the next row and the end.
        """
        if isinstance(limit, ReadAllAvailable):
            return {journal_id: end for journal_id, (_, end) in behind.items()}
        ends: Offset = {}
        rows = {journal_id: end - first for journal_id, (first, end) in behind.items()}
        if self.options.max_rows is not None:
            rows = share(self.options.max_rows, rows)
        for journal_id, count in rows.items():
            first, end = behind[journal_id]
            ends[journal_id] = min(end, first + count)
            if self.options.max_bytes is not None and count:
                allowed = max(1, self.options.max_bytes // len(rows))
                ends[journal_id] = min(ends[journal_id], journals[journal_id].limit(first, max_bytes=allowed))
        return ends


def share(total: int, wishes: dict[str, int]) -> dict[str, int]:
    """Divide a number fairly.

    Small requests are met in full, and the others share the rest evenly.

    :param wishes: what each can use at most.
    :returns: what each gets; the sum is `total`, or the sum of all wishes if that is less.
    """
    shares = dict.fromkeys(wishes, 0)
    waiting = sorted(wishes, key=lambda name: wishes[name])
    while waiting and total:
        name = waiting.pop(0)
        shares[name] = min(wishes[name], total // (len(waiting) + 1))
        total -= shares[name]
    return shares
