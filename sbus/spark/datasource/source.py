"""The data source ``sbus``: passes Spark's calls to the readers and writers.

Theory of operation
-------------------

Spark registers the class `SbusDataSource` and makes an instance of it wherever it needs one: in Python processes that
it starts for the planning of a query, and again on the executors. Instances and readers are pickled. So nothing is kept
between two calls; every decision follows from the options, and the state of a stream is in its offsets.

``schema`` is called at ``load()``, in a separate process. It checks the options and opens the journals, so that a
misspelt option or a missing journal fails there and not in the middle of a query.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from sbus.errors import UsageError
from sbus.journal.snapshot import open_journals
from sbus.spark.datasource.catalog import recall, remember, table_options
from sbus.spark.datasource.one_line import in_one_line
from sbus.spark.datasource.options import ReadOptions, StreamOptions, WriteOptions
from sbus.spark.datasource.reader import SbusReader, reader_class
from sbus.spark.datasource.scan import described
from sbus.spark.datasource.stream import SbusStreamReader
from sbus.spark.datasource.writer import SbusStreamWriter, SbusWriter, table_columns

__all__ = ["SbusDataSource"]


class SbusDataSource(DataSource):
    """``format("sbus")``; docs/pipeline/4-datasource.rst lists the options."""

    @classmethod
    def name(cls) -> str:
        """The name that ``format`` takes, and ``USING`` in SQL."""
        return "sbus"

    @in_one_line()
    def schema(self) -> StructType | str:
        """Check the options, and return the columns of a journal, and those of its payloads; or those of a bus.

        A schema with fewer columns reads only those.
        """
        table = table_options(self.options)
        given = self.options if table is None else table
        if "socket" in given and "journal" not in given and "path" not in given:
            columns: StructType | str = table_columns(WriteOptions.parse(given))
            return columns if table is None else remember(columns, table)
        options = ReadOptions.parse_any(given)
        journals = open_journals(options.journals)
        for positions in (options.start, options.end):
            positions.check(journals)
        columns = described(options)
        return columns if table is None else remember(columns, table)

    @in_one_line()
    def reader(self, schema: StructType) -> SbusReader:
        """Read journals as a table."""
        return reader_class()(ReadOptions.parse(self._read_options(schema)), schema)

    @in_one_line()
    def streamReader(self, schema: StructType) -> SbusStreamReader:
        """Read journals while they are written."""
        return SbusStreamReader(StreamOptions.parse(self._read_options(schema)), schema)

    def _read_options(self, schema: StructType) -> Mapping[str, str]:
        """Return the options of a read; those of a table in Spark's catalog come first from where it was created."""
        options = {**recall(schema), **{name.lower(): value for name, value in self.options.items()}}
        if "socket" in options:
            raise UsageError(
                f"format('sbus'): this is the bus at {options['socket']}, to publish to: to read its messages, record "
                "them, and name the journal of the recorder"
            )
        return options

    def _write_options(self, schema: StructType) -> WriteOptions:
        """Return the options of a write.

        A column that was read from a table of the catalog may still have the options of that one.
        """
        table = recall(schema)
        options = {**(table if "socket" in table else {}), **{name.lower(): v for name, v in self.options.items()}}
        return WriteOptions.parse(options)

    @in_one_line()
    def writer(self, schema: StructType, overwrite: bool) -> SbusWriter:
        """Publish a DataFrame."""
        return SbusWriter(self._write_options(schema), schema, overwrite)

    @in_one_line()
    def streamWriter(self, schema: StructType, overwrite: bool) -> SbusStreamWriter:
        """Publish a stream."""
        return SbusStreamWriter(self._write_options(schema), schema, overwrite)
