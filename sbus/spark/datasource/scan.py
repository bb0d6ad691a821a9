"""Read parts of journals as Spark wants them: split into tasks of a good size, filtered, and in Spark's types.

Both readers, of batches and of streams, are thin layers over this.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from pyspark.sql.datasource import Filter, GreaterThanOrEqual, InputPartition, LessThan
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from sbus.errors import UsageError
from sbus.journal.keytext import as_text_array
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader, Slice, read
from sbus.spark.datasource.filters import RowFilter
from sbus.spark.datasource.options import ReadOptions

__all__ = ["JournalPartition", "Scan", "resized", "schema"]

_SMALLEST = 8 << 20
"""Bytes below which it does not pay to make one task two."""
_LARGEST = 128 << 20
"""Bytes that are always enough for a task."""
_MIN_BATCH_ROWS = 16_384
"""Rows in a batch below which it is joined to the next: each costs some time, whatever is in it."""
_MIN_BATCH_BYTES = 4 << 20
"""Bytes in a batch from which it is left alone, however few rows it has."""
_MAX_BATCH_BYTES = 16 << 20
"""Bytes in a batch above which it is cut: Spark needs memory for a whole one, several times."""
_JOURNALS = 127
"""Journals in a batch, at most: which it is stands in one byte of each row (see `sbus.journal.schema`)."""


def schema(*, raw_keys: bool) -> StructType:
    """The columns of a journal in Spark's types."""
    columns: dict[str, DataType] = {
        "journal": StringType(),
        "seq": LongType(),
        "time": TimestampType(),
        "kind": StringType(),
        "key": BinaryType() if raw_keys else StringType(),
        "payload": BinaryType(),
    }
    whole = StructType()
    for name, kind in columns.items():
        whole = whole.add(name, kind)
    return whole


class JournalPartition(InputPartition):
    """What one task reads.

    :ivar slices: parts of journals, in the order of their rows.
    """

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        self.slices = slices


class Scan:
    """How the rows of journals become those of a DataFrame.

    :param options: which rows are read.
    :param wanted_schema: which columns: all, or some of them in any order.
    :raises sbus.errors.UsageError: if it has columns that a journal has not.
    """

    def __init__(self, options: ReadOptions, wanted_schema: StructType) -> None:
        _check(wanted_schema, schema(raw_keys=options.raw_keys))
        self.schema = wanted_schema
        self.options = options
        self.wanted = RowFilter(options.pattern, options.gaps, options.raw_keys, options.dialect)
        if options.since is not None:
            self.push([GreaterThanOrEqual(("time",), _moment(options.since))])
        if options.until is not None:
            self.push([LessThan(("time",), _moment(options.until))])

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take over conditions; returns those that must still be checked."""
        return self.wanted.push(filters)

    # --- on the driver -----------------------------------------------------------------------

    def partitions(self, ranges: Iterable[tuple[JournalReader, int, int]]) -> list[JournalPartition]:
        """The tasks that read what is wanted.

        :param ranges: journals, with the first seq and the one behind the last.
        :raises sbus.errors.JournalError: if rows of these are gone.
        """
        ranges = list(ranges)
        slices = [piece for one in ranges for piece in self._plan(*one)]
        sizes = {piece.segment: _size(piece.segment) for piece in slices}
        most = self._most(sum(sizes.values()))
        if any(size > 1.5 * most for size in sizes.values()):
            slices = [piece for one in ranges for piece in self._plan(*one, split_bytes=most)]
        pieces = Counter(piece.segment for piece in slices)
        partitions: list[JournalPartition] = []
        together: list[Slice] = []
        filled = 0.0
        for piece in slices:
            size = sizes.get(piece.segment, 0) / pieces[piece.segment]
            if together and filled + size > most:
                partitions.append(JournalPartition(tuple(together)))
                together, filled = [], 0.0
            together.append(piece)
            filled += size
        if together:
            partitions.append(JournalPartition(tuple(together)))
        return partitions

    def _plan(self, journal: JournalReader, first: int, end: int, split_bytes: int | None = None) -> list[Slice]:
        wanted = self.wanted
        if not wanted.wants_journal(journal.id):
            return []
        if wanted.seqs.first is not None:
            first = max(first, wanted.seqs.first)
        if wanted.seqs.last is not None:
            end = min(end, wanted.seqs.last + 1)
        return journal.plan(
            first,
            end,
            min_time=wanted.times.first,
            max_time=wanted.times.last,
            kinds=wanted.kinds(),
            wanted=wanted.wants_segment if wanted.can_skip_segments else None,
            split_bytes=split_bytes,
        )

    def _most(self, total: int) -> int:
        """Bytes that a task reads at most, about.

        Unless told, each core gets some tasks if there is enough to do; and a task reads a whole segment of the usual
        size if there are many, so that none of them need be opened to plan.
        """
        if self.options.partition_bytes is not None:
            return self.options.partition_bytes
        return min(_LARGEST, max(_SMALLEST, total // (4 * (os.cpu_count() or 1))))

    # --- on the executors --------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition that are wanted, in the order of the journals.

        :raises sbus.errors.JournalError: if a segment is gone, damaged or of another schema.
        """
        if not isinstance(partition, JournalPartition):
            return  # Spark's own, where there is nothing to read
        names = self.schema.fieldNames()
        columns = list(dict.fromkeys([*names, *self.wanted.columns])) or ["seq"]
        types = to_arrow_schema(self.schema, timezone="UTC")
        for batch in resized(batch for piece in partition.slices for batch in read(piece, columns)):
            rows = self.wanted.filter(batch)
            if rows.num_rows:
                yield pa.RecordBatch.from_arrays([self._converted(name, rows) for name in names], schema=types)

    def _converted(self, name: str, rows: pa.RecordBatch) -> pa.Array:
        column = rows.column(name)
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        if name == "key" and not self.options.raw_keys:
            return as_text_array(column)
        return column


def _moment(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def _size(segment: Segment) -> int:
    try:
        return os.stat(segment.path()).st_size
    except FileNotFoundError:
        return 0  # whoever is to read it will say what has become of it


def resized(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of a good size: small ones are joined, and large ones cut."""
    waiting: list[pa.RecordBatch] = []
    journals: set[str] = set()
    rows = size = 0
    for batch in batches:
        more = batch.nbytes
        journals |= _journals(batch)
        if rows and (
            rows + batch.num_rows > 4 * _MIN_BATCH_ROWS or size + more > _MAX_BATCH_BYTES or len(journals) > _JOURNALS
        ):
            yield pa.concat_batches(waiting)
            waiting, journals, rows, size = [], _journals(batch), 0, 0
        if not rows and (batch.num_rows >= _MIN_BATCH_ROWS or more >= _MIN_BATCH_BYTES):
            step = -(-batch.num_rows // -(-more // _MAX_BATCH_BYTES))
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += more
        if rows >= _MIN_BATCH_ROWS or size >= _MIN_BATCH_BYTES:
            yield pa.concat_batches(waiting)
            waiting, journals, rows, size = [], set(), 0, 0
    if rows:
        yield pa.concat_batches(waiting)


def _journals(batch: pa.RecordBatch) -> set[str]:
    """The ids in the column of a batch, if that is read."""
    return set(batch.column("journal").dictionary.to_pylist()) if "journal" in batch.schema.names else set()


def _check(wanted: StructType, there: StructType) -> None:
    for field in wanted:
        if field.name not in there.fieldNames() or there[field.name].dataType != field.dataType:
            columns = ", ".join(f"{column.name} {column.dataType.simpleString().upper()}" for column in there)
            raise UsageError(
                f"format('sbus'): a journal has no column {field.name} {field.dataType.simpleString().upper()}: "
                f"choose from {columns}"
            )
