"""Read journals as a table, and where Spark permits it no more than a query can use.

Theory of operation
-------------------

A reader with `PushingReader.pushFilters` gets the conditions of a query, and one with ``pushLimit`` its limit, before
it plans. Both only help to read less: Spark checks each row, and counts, once more.

*From which Spark on.* Spark 4.3 keeps the plan that follows from conditions with the result of ``load()``. A second
query on that DataFrame, or the other side of a union, then silently gets the rows of the first. The change that
brought ``pushLimit`` (SPARK-58551) keeps each plan with its own query. So a Spark whose readers have that method is one
whose conditions can be taken, whatever its version, and `test_filters_of_queries_on_one_table` fails if it is not.

*Only when Spark asks.* Spark refuses each query on a reader that takes conditions unless
``spark.sql.python.filterPushdown.enabled`` is true, and by default it is not. A data source cannot see the setting. But
Spark has a program of its own for asking, and only there the reader takes conditions.
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
"""The program with which Spark asks a reader what it can use of a query."""


class SbusReader(DataSourceReader):
    """Read journals as a table.

    It has all rows that are safe on the disk when the query is planned.

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
        """Leave out rows for which these conditions do not hold, and have Spark check the others."""
        self.scan.narrow(filters)
        return filters

    def pushLimit(self, limit: int) -> bool:
        """Read no more than this number of rows in each task."""
        self.scan.limit = limit
        return True


def reader_class() -> type[SbusReader]:
    """Return the class of the reader for the program that runs."""
    return PushingReader if keeps_plans_apart(DataSourceReader) and _is_asking() else SbusReader


def keeps_plans_apart(reader: type) -> bool:
    """Return whether Spark keeps the plan for each query with that query.

    :param reader: its base class of readers.
    """
    return hasattr(reader, "pushLimit")


def _is_asking() -> bool:
    """Return whether Spark asks: the program runs as a module, or in a fork of Spark's daemon."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ASKING in sys.modules or getattr(main, "name", None) == ASKING
