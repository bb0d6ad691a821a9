"""The data source ``sbus``: what Spark asks for, handed to the readers and writers.

Spark makes an instance wherever it needs one, in processes of its own, and sends it around; so all is decided by the
options alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sbus.spark.datasource.options import ReadOptions, StreamOptions, WriteOptions
from sbus.spark.datasource.scan import JournalPartition, Scan, schema
from sbus.spark.datasource.snapshot import open_journals
from sbus.spark.datasource.stream import SbusStreamReader
from sbus.spark.datasource.writer import SbusStreamWriter, SbusWriter

__all__ = ["SbusDataSource", "SbusReader"]


class SbusDataSource(DataSource):
    """``format("sbus")``; see docs/pipeline/4-datasource.rst for the options."""

    @classmethod
    def name(cls) -> str:
        """What it is called in ``format``, and after ``USING`` in SQL."""
        return "sbus"

    def schema(self) -> StructType:
        """The columns of a journal; fewer are read if a schema with fewer is given.

        Spark asks for this at ``load()``, so what is wrong with a read is said there.
        """
        options = ReadOptions.parse_any(self.options)
        open_journals(options.journals)
        return schema(raw_keys=options.raw_keys)

    def reader(self, schema: StructType) -> SbusReader:
        """Reads journals as a table."""
        return SbusReader(ReadOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> SbusStreamReader:
        """Reads journals while they are written."""
        return SbusStreamReader(StreamOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> SbusWriter:
        """Publishes a DataFrame."""
        return SbusWriter(WriteOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> SbusStreamWriter:
        """Publishes a stream."""
        return SbusStreamWriter(WriteOptions.parse(self.options), schema, overwrite)


class SbusReader(DataSourceReader):
    """Reads journals as a table, with all rows that may be seen when it is planned.

    :param options: what is read.
    :param schema: the columns that are wanted.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.scan = Scan(options, schema)

    def partitions(self) -> list[JournalPartition]:
        """The tasks."""
        journals = open_journals(self.scan.options.journals).values()
        return self.scan.partitions((journal, journal.start(), journal.end()) for journal in journals)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition."""
        return self.scan.read(partition)
