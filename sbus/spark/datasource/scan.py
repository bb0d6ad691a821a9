"""Read parts of journals for Spark: split into tasks, filtered, in Spark's types.

Theory of operation
-------------------

The readers of tables and of streams use a `Scan`. The driver plans, the executors read.

*Planning.* `Scan.partitions` gets ranges of rows, one for each journal. The journal reader turns a range into slices,
one for each segment, and leaves out the segments that cannot have a selected row: by the times in their names, and for
a pattern by their summaries (`sbus.spark.datasource.filters`). A plan without a pattern opens no segment but the
newest, so its cost grows with the number of segments, not of rows.

*Tasks.* Slices in a row are put into one task until it has enough bytes: a quarter of a core's part of the work, but
between 8 MiB, below which starting a task costs more than it saves, and 128 MiB. Only a segment that is more than 1.5
times that large is itself divided, which takes a look into its index.

*Reading.* A task reads its slices in order. Each batch costs Spark a fixed time, so `resized` joins small batches and
cuts large ones. The task then filters, decodes dictionaries, and turns keys into text unless the option ``rawKeys``
asks for bytes.

Invariants: the partitions of a plan hold every selected row of the ranges exactly once; rows of one journal stay in
their order within a partition; a batch names at most 127 journals, because a journal's place in the dictionary is one
byte.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StringType, StructType

from sbus.errors import UsageError
from sbus.journal.keytext import as_text_array
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, Slice, read
from sbus.journal.resizing import resized
from sbus.journal.schema import COLUMNS, Kind
from sbus.journal.senders import TYPES
from sbus.spark.datasource.conditions import Conditions
from sbus.spark.datasource.filters import RowFilter
from sbus.spark.datasource.options import ReadOptions
from sbus.spark.datasource.payloads import PROBLEM, VALUE, PayloadParser

__all__ = ["JournalPartition", "Scan", "described", "schema"]

_MIN_TASK_BYTES = 8 << 20
"""Bytes below which dividing a task does not pay."""
_MAX_TASK_BYTES = 128 << 20
"""Bytes that are always enough for a task."""


def schema(*, raw_keys: bool, senders: bool = True) -> StructType:
    """Return the columns of a journal in Spark's types.

    :param senders: whether to include the columns of publishers.
    """
    columns = StructType()
    for column in COLUMNS:
        if column.name in TYPES and not senders:
            continue
        kind = column.arrow_type.value_type if pa.types.is_dictionary(column.arrow_type) else column.arrow_type
        is_text = column.name == "key" and not raw_keys
        columns = columns.add(column.name, StringType() if is_text else from_arrow_type(kind))
    return columns


def described(options: ReadOptions) -> StructType | str:
    """Return the columns of a read: those of a journal, and those of typed payloads, in Spark's DDL if need be.

    The columns of publishers are read only if the caller or a schema asks for them: Spark does not pass a query's
    columns to a source in Python, and they would make every query a quarter slower.

    :raises sbus.errors.UsageError: if the type of the payloads is missing.
    """
    columns = schema(raw_keys=options.raw_keys, senders=options.senders)
    if options.payload_format is None:
        return columns
    if options.payload_format == "text":
        return columns.add(VALUE, StringType()).add(PROBLEM, StringType())
    if not options.payload_schema:
        raise UsageError(
            f"format('sbus'): payloadFormat={options.payload_format!r}: give the fields of the payloads with "
            "payloadSchema, such as 'temperature DOUBLE, unit STRING', or a schema with a column value"
        )
    # Only Spark's own process can parse this.
    ddl = ", ".join(f"{column.name} {column.dataType.simpleString()}" for column in columns)
    return f"{ddl}, {VALUE} STRUCT<{options.payload_schema}>, {PROBLEM} STRING"


class JournalPartition(InputPartition):
    """The rows that one task reads.

    :ivar slices: parts of journals, in the order of their rows.
    """

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        self.slices = slices


class Scan:
    """Turn rows of journals into those of a DataFrame.

    :param options: which rows to read.
    :param columns: which columns to read: all, or some in any order.
    :ivar limit: the most rows that each task reads; None: no limit.
    :raises sbus.errors.UsageError: if a journal does not have one of the columns.
    """

    def __init__(self, options: ReadOptions, columns: StructType) -> None:
        _check(columns, options)
        self.schema = columns
        self.options = options
        self.filter = RowFilter(options.pattern, options.gaps, options.dialect, options.since, options.until)
        self.limit: int | None = None

    def narrow(self, filters: Iterable[Filter]) -> None:
        """Leave out rows for which the conditions of a query do not hold; not all of them need be understood."""
        self.filter = self.filter.narrowed(Conditions(filters, raw_keys=self.options.raw_keys))

    # --- on the driver -----------------------------------------------------------------------

    def partitions(self, ranges: Iterable[tuple[JournalReader, int, int]]) -> list[JournalPartition]:
        """Plan the tasks that read the selected rows of some ranges.

        :param ranges: for each journal the sequence number of the first row, and of the row after the last.
        :raises sbus.errors.JournalError: if rows of a range are gone.
        """
        ranges = list(self._narrowed(ranges))
        slices = [piece for one in ranges for piece in self._plan(*one)]
        sizes = {piece.segment: _size(piece.segment) for piece in slices}
        task_bytes = self._task_bytes(sum(sizes.values()))
        if any(size > 1.5 * task_bytes for size in sizes.values()):
            slices = [piece for one in ranges for piece in self._plan(*one, split_bytes=task_bytes)]
        pieces = Counter(piece.segment for piece in slices)
        partitions: list[JournalPartition] = []
        task: list[Slice] = []
        filled = 0.0
        for piece in slices:
            size = sizes.get(piece.segment, 0) / pieces[piece.segment]
            if task and filled + size > task_bytes:
                partitions.append(JournalPartition(tuple(task)))
                task, filled = [], 0.0
            task.append(piece)
            filled += size
        if task:
            partitions.append(JournalPartition(tuple(task)))
        return partitions

    def _narrowed(self, ranges: Iterable[tuple[JournalReader, int, int]]) -> Iterator[tuple[JournalReader, int, int]]:
        """Yield the ranges without rows that the conditions of a query rule out by their journal or number."""
        conditions = self.filter.conditions
        least, greatest = conditions.span("seq")
        for journal, first, end in ranges:
            if conditions.allow("journal", journal.id) and conditions.allow("host", journal.host):
                first = first if least is None else max(first, least)
                yield journal, first, end if greatest is None else min(end, greatest + 1)

    def _plan(self, journal: JournalReader, first: int, end: int, split_bytes: int | None = None) -> list[Slice]:
        rows = self.filter
        return journal.plan(
            first,
            end,
            min_time=rows.since,
            max_time=rows.max_time,
            kinds=rows.kinds,
            wanted=rows.may_select if rows.can_skip_segments else None,
            split_bytes=split_bytes,
        )

    def _task_bytes(self, total: int) -> int:
        """Return about how many bytes of journals one task reads, out of a total."""
        if self.options.partition_bytes is not None:
            return self.options.partition_bytes
        at_a_time = self.options.parallelism or os.cpu_count() or 1
        return min(_MAX_TASK_BYTES, max(_MIN_TASK_BYTES, total // (4 * at_a_time)))

    # --- on the executors --------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the selected rows of a partition, in the order of the journals.

        :raises sbus.errors.JournalError: if a segment is gone, damaged or of another schema.
        """
        if not isinstance(partition, JournalPartition):
            return  # Spark makes a partition of its own if there is nothing to read
        names = self.schema.fieldNames()
        parsed = [name for name in names if name in (VALUE, PROBLEM)] if self.options.payload_format else []
        needed = ["payload", "kind"] if parsed else []
        wanted = [*(name for name in names if name not in parsed), *self.filter.columns, *needed]
        columns = list(dict.fromkeys(wanted)) or ["seq"]
        parser = self._parser() if parsed else None
        types = to_arrow_schema(self.schema, timezone="UTC")
        left = self.limit
        for batch in resized(batch for piece in partition.slices for batch in read(piece, columns)):
            rows = self.filter.filter(batch)
            if left is not None:
                rows = rows.slice(0, left)
                left -= rows.num_rows
            if rows.num_rows:
                found: dict[str, pa.Array] = {}
                if parser is not None:
                    is_message = pc.equal(rows.column("kind"), str(Kind.MESSAGE))
                    found[VALUE], found[PROBLEM] = parser.parse(rows.column("payload"), is_message)
                arrays = [found[name] if name in found else self._converted(name, rows) for name in names]
                yield pa.RecordBatch.from_arrays(arrays, schema=types)
            if left == 0:
                return

    def _parser(self) -> PayloadParser:
        format_ = self.options.payload_format
        assert format_ is not None
        return PayloadParser(
            format_, self.schema[VALUE].dataType if VALUE in self.schema.fieldNames() else StringType()
        )

    def _converted(self, name: str, rows: pa.RecordBatch) -> pa.Array:
        column = rows.column(name)
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        if name == "key" and not self.options.raw_keys:
            return as_text_array(column)
        return column


def _size(segment: Segment) -> int:
    try:
        return os.stat(segment.path()).st_size
    except FileNotFoundError:
        return 0  # the task that reads it reports what has become of it


def _check(columns: StructType, options: ReadOptions) -> None:
    available = schema(raw_keys=options.raw_keys)
    if options.payload_format is not None:
        available = available.add(PROBLEM, StringType())
        if PROBLEM in columns.fieldNames() and VALUE not in columns.fieldNames() and options.payload_format != "text":
            raise UsageError("format('sbus'): the column problem needs the column value, whose type it is about")
    for field in columns:
        if field.name == VALUE and options.payload_format is not None:
            PayloadParser(options.payload_format, field.dataType)  # raises if the type is not possible
            continue
        if field.name not in available.fieldNames() or available[field.name].dataType != field.dataType:
            choices = ", ".join(f"{column.name} {column.dataType.simpleString().upper()}" for column in available)
            raise UsageError(
                f"format('sbus'): a journal has no column {field.name} {field.dataType.simpleString().upper()}: "
                f"choose from {choices}"
            )
