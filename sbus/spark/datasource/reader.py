"""Read journals as a table and, where Spark permits it, only what a query can use.

Theory of operation
-------------------

Before Spark plans a query, it passes the conditions to a reader with `PushingReader.pushFilters`, and the limit to one
with ``pushLimit``. Both only reduce the rows that are read: Spark still checks and counts every row.

*Since which Spark.* Spark 4.3 keeps the plan for a query's conditions with the result of ``load()``. A second query on
that DataFrame, or the other side of a union, then silently gets the rows of the first. The change that added
``pushLimit`` (SPARK-58551) keeps each plan with its own query. So the reader takes conditions only if Spark's readers
have that method, whatever the version; `test_filters_of_queries_on_one_table` fails if that is not enough.

*Only when Spark asks.* Spark refuses every query on a reader that takes conditions unless
``spark.sql.python.filterPushdown.enabled`` is true; the default is false, and a data source cannot see the setting. But
Spark asks in a separate program, and only there does the reader take conditions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from sbus.journal.snapshot import open_journals
from sbus.spark.datasource.one_line import in_one_line
from sbus.spark.datasource.options import ReadOptions
from sbus.spark.datasource.scan import JournalPartition, Scan

__all__ = ["ASKING", "PushingReader", "SbusReader", "keeps_plans_apart", "reader_class"]

ASKING = "pyspark.sql.worker.data_source_pushdown_filters"
"""The program in which Spark passes conditions to a reader."""


class SbusReader(DataSourceReader):
    """Read journals as a table.

    The table has all rows that are safe on the disk when Spark plans the query.

    :param options: which rows to read.
    :param schema: which columns to read.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.scan = Scan(options, schema)

    @in_one_line()
    def partitions(self) -> list[JournalPartition]:
        """Plan the tasks."""
        journals = open_journals(self.scan.options.journals).values()
        start, end = self.scan.options.start, self.scan.options.end
        return self.scan.partitions((journal, start.resolve(journal), end.resolve(journal)) for journal in journals)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a partition."""
        return self.scan.read(partition)


class PushingReader(SbusReader):
    """Read journals as a table, and only as much as a query can use."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Skip rows for which these conditions do not hold; return all of them, so that Spark checks the rest."""
        self.scan.narrow(filters)
        return filters

    def pushLimit(self, limit: int) -> bool:
        """Read at most `limit` rows in each task."""
        self.scan.limit = limit
        return True


def reader_class() -> type[SbusReader]:
    """Return the class of the reader for the running program."""
    return PushingReader if keeps_plans_apart(DataSourceReader) and _is_asking() else SbusReader


def keeps_plans_apart(reader: type) -> bool:
    """Return whether Spark keeps each plan with its own query.

    :param reader: Spark's base class of readers.
    """
    return hasattr(reader, "pushLimit")


def _is_asking() -> bool:
    """Return whether this is the program in which Spark asks, run as a module or in a fork of Spark's daemon."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ASKING in sys.modules or getattr(main, "name", None) == ASKING
