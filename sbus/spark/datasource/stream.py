"""A journal, or many, as a stream: each offset says how far every journal is read, and nothing else is remembered.

An offset is ``{"<journal id>": <next seq>}``. A journal joins the stream with an offset that says where its reading
starts, and a batch without rows; its rows come with later offsets. So where reading starts stands in the checkpoint
before the first row is read, and a query that is started again, after whatever happened, reads the same rows in the
same batches as if it had never ended.
"""

from __future__ import annotations

import logging
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
from sbus.spark.datasource.options import EARLIEST, LATEST, StreamOptions
from sbus.spark.datasource.scan import JournalPartition, Scan
from sbus.spark.datasource.snapshot import Snapshot, open_journals

__all__ = ["SbusStreamReader", "share"]

_log = logging.getLogger("sbus.spark")

Offset = dict[str, int]


class SbusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads journals while they are written.

    :param options: what is read, from where on, and how much at a time.
    :param schema: the columns that are wanted.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self.options = options
        self.scan = Scan(options.read, schema)
        self._target: Offset | None = None
        self._known: dict[str, Snapshot] = {}
        self._told: set[str] = set()  # losses; many triggers may meet the same one

    def initialOffset(self) -> Offset:
        """Before any journal has joined."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """What the options say; a limit in rows stands for both, as Spark knows limits of one kind only."""
        if self.options.max_rows is not None:
            return ReadMaxRows(self.options.max_rows)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on, nothing new is seen."""
        self._target = self.reportLatestOffset()

    def reportLatestOffset(self) -> Offset:
        """How far the journals can be read."""
        return {journal_id: journal.end() for journal_id, journal in sorted(self._journals().items())}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far to read now.

        :param start: how far is read already.
        :param limit: how much to read at most.
        :raises sbus.errors.JournalError: if rows are gone that are not read yet, unless ``failOnDataLoss`` is false.
        """
        journals = self._journals()
        offset = dict(start)
        behind: dict[str, tuple[int, int]] = {}
        for journal_id, journal in journals.items():
            end = journal.end()
            if self._target is not None:
                if journal_id not in self._target:
                    continue  # it has come too late for this run
                end = min(end, self._target[journal_id])
            if journal_id not in start:
                offset[journal_id] = self._first(journal, end, is_new=not start)
                continue
            offset[journal_id] = first = self._without_loss(journal, start[journal_id])
            if first < end:
                behind[journal_id] = (first, end)
        for journal_id in start.keys() - journals.keys():
            self._report_loss(f"the journal {journal_id}, which was read up to row {start[journal_id]}, is gone")
        offset.update(self._limited(journals, behind, limit))
        return dict(sorted(offset.items()))

    def partitions(self, start: Offset, end: Offset) -> list[JournalPartition]:
        """The tasks that read the rows from one offset to another.

        :raises sbus.errors.JournalError: if rows of these are gone, unless ``failOnDataLoss`` is false.
        """
        ranges = {journal_id: (start.get(journal_id, last), last) for journal_id, last in end.items()}
        ranges = {journal_id: (first, last) for journal_id, (first, last) in ranges.items() if first < last}
        if not ranges:
            return []
        journals = self._journals()
        found = []
        for journal_id, (first, last) in ranges.items():
            if journal_id not in journals:
                self._report_loss(f"the journal {journal_id}, whose rows {first} to {last - 1} are to be read, is gone")
                continue
            journal = journals[journal_id]
            found.append((journal, self._without_loss(journal, first), last))
        return self.scan.partitions(found)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition."""
        return self.scan.read(partition)

    # --- how ----------------------------------------------------------------------------------

    def _journals(self) -> dict[str, Snapshot]:
        self._known = open_journals(self.options.read.journals, self._known)
        return self._known

    def _first(self, journal: Snapshot, end: int, *, is_new: bool) -> int:
        """Where reading starts in a journal that joins the stream.

        :param end: where its rows that may be seen now end.
        :param is_new: whether it joins as the query starts; all that a later one has is new.
        """
        start = self.options.start
        if start == LATEST and is_new:
            return end
        if start in (EARLIEST, LATEST):
            return min(journal.start(), end)
        return min(journal.seq_at_time(int(start)), end)

    def _without_loss(self, journal: Snapshot, seq: int) -> int:
        """Where to go on reading a journal of which this is the next row."""
        first = journal.start()
        if first <= seq:
            return seq
        self._report_loss(f"the rows {seq} to {first - 1} of the journal in {journal.directory} are deleted")
        return first

    def _report_loss(self, what: str) -> None:
        if self.options.fail_on_data_loss:
            raise JournalError(
                f"{what}: put them back, or go on without them with the option failOnDataLoss=false (--allow-loss of "
                "the archive); to keep rows until they are read, see --keep-bytes and --keep-days of the recorder"
            )
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s; going on without them (failOnDataLoss=false)", what)

    def _limited(self, journals: dict[str, Snapshot], behind: dict[str, tuple[int, int]], limit: ReadLimit) -> Offset:
        """Where to stop reading each journal that is not read to its end.

        :param behind: the next seq and the end of each.
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
    """Share out a number fairly: nobody gets more than the wish, and who wishes more gets at least as much.

    :returns: what each gets; together `total`, or all that is wished.
    """
    shares = dict.fromkeys(wishes, 0)
    waiting = sorted(wishes, key=lambda name: wishes[name])
    while waiting and total:
        name = waiting.pop(0)
        shares[name] = min(wishes[name], total // (len(waiting) + 1))
        total -= shares[name]
    return shares
