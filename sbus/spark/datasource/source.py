"""The data source ``sbus``: passes Spark's calls to the readers and writers.

Theory of operation
-------------------

Spark registers the class `SbusDataSource` and makes an instance of it wherever it needs one: in Python processes that
it starts for the planning of a query, and again on the executors. Instances and readers are pickled. So nothing is kept
between two calls; every decision follows from the options, and the state of a stream is in its offsets.

``schema`` is called at ``load()``, in a process of its own. It checks the options and opens the journals, so that a
misspelt option or a missing journal fails there and not in the middle of a query.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from sbus.journal.snapshot import open_journals
from sbus.spark.datasource.catalog import recall, remember, table_options
from sbus.spark.datasource.one_line import in_one_line
from sbus.spark.datasource.options import ReadOptions, StreamOptions, WriteOptions
from sbus.spark.datasource.reader import SbusReader, reader_class
from sbus.spark.datasource.scan import described
from sbus.spark.datasource.stream import SbusStreamReader
from sbus.spark.datasource.writer import SbusStreamWriter, SbusWriter

__all__ = ["SbusDataSource"]


class SbusDataSource(DataSource):
    """``format("sbus")``; docs/pipeline/4-datasource.rst lists the options."""

    @classmethod
    def name(cls) -> str:
        """The name that ``format`` takes, and ``USING`` in SQL."""
        return "sbus"

    @in_one_line()
    def schema(self) -> StructType | str:
        """Check the options, and return the columns of a journal, and those of its payloads.

        A schema with fewer columns reads only those.
        """
        table = table_options(self.options)
        options = ReadOptions.parse_any(self.options if table is None else table)
        journals = open_journals(options.journals)
        for positions in (options.start, options.end):
            positions.check(journals)
        columns = described(options)
        return columns if table is None else remember(columns, table)

    @in_one_line()
    def reader(self, schema: StructType) -> SbusReader:
        """Read journals as a table."""
        return reader_class()(ReadOptions.parse(self._options(schema)), schema)

    @in_one_line()
    def streamReader(self, schema: StructType) -> SbusStreamReader:
        """Read journals while they are written."""
        return SbusStreamReader(StreamOptions.parse(self._options(schema)), schema)

    def _options(self, schema: StructType) -> Mapping[str, str]:
        """Return the options of a read; those of a table in Spark's catalog come first from where it was created."""
        return {**recall(schema), **{name.lower(): value for name, value in self.options.items()}}

    @in_one_line()
    def writer(self, schema: StructType, overwrite: bool) -> SbusWriter:
        """Publish a DataFrame."""
        return SbusWriter(WriteOptions.parse(self.options), schema, overwrite)

    @in_one_line()
    def streamWriter(self, schema: StructType, overwrite: bool) -> SbusStreamWriter:
        """Publish a stream."""
        return SbusStreamWriter(WriteOptions.parse(self.options), schema, overwrite)
