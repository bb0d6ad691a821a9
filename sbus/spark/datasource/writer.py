"""Publish the rows of a DataFrame or a stream to a bus: in order within a partition, and known to have arrived.

A task connects, publishes, and ends with a fence, so it does not end before the server has dealt with all of its
messages; whatever goes wrong fails the task. Spark may run a failed task again, and a stream its last batch: then
messages are published once more, never too few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructType

from sbus.client.blocking import connect
from sbus.errors import UsageError
from sbus.journal.keytext import from_text
from sbus.spark.datasource.options import WriteOptions

__all__ = ["Published", "SbusStreamWriter", "SbusWriter"]

_COLUMNS = ("key", "payload")
_FENCE_TIMEOUT = 300.0
"""Seconds that a bus may take to deal with what a task has published, held back as it may be by slow receivers."""


@dataclass
class Published(WriterCommitMessage):
    """What a task has published.

    :ivar messages: how many.
    """

    messages: int


class SbusWriter(DataSourceArrowWriter):
    """Publishes a DataFrame.

    :raises sbus.errors.UsageError: if its columns are not `key` and `payload`, or it is to overwrite.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise UsageError("format('sbus'): what was published cannot be overwritten: use mode('append')")
        _check(schema)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of a partition."""
        return publish(self.options, iterator)


class SbusStreamWriter(DataSourceStreamArrowWriter):
    """Publishes a stream.

    :raises sbus.errors.UsageError: if its columns are not `key` and `payload`, or its output mode is not append.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise UsageError(
                "format('sbus'): the output mode complete would publish everything again each time: "
                "use outputMode('append') or outputMode('update')"
            )
        _check(schema)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of a partition of a batch."""
        return publish(self.options, iterator)


def publish(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Published:
    """Publish the rows of batches with columns `key` and `payload`, and wait until the bus has them.

    :raises sbus.errors.UsageError: for a null, or what cannot be a key or does not fit a packet; what stands
        before it in earlier batches is published by then.
    :raises sbus.errors.ConnectError: if there is no bus.
    :raises sbus.errors.Disconnected: if the bus goes away.
    """
    count = 0
    bus = None
    try:
        for batch in batches:
            keys, payloads = keys_of(batch.column("key")), payloads_of(batch.column("payload"))
            if bus is None:  # a partition without rows needs none
                bus = connect(options.address, dialect=options.dialect, max_packet=options.max_packet)
            bus.publish_many(zip(keys, payloads, strict=True))
            count += len(keys)
        if bus is not None:
            bus.fence(_FENCE_TIMEOUT)
    finally:
        if bus is not None:
            bus.close()
    return Published(count)


def keys_of(column: pa.Array) -> list[bytes]:
    r"""Routing keys: bytes as they are, text as this source reads it (UTF-8, with other bytes as ``\xNN``).

    :raises sbus.errors.UsageError: for a null, or a backslash that begins no ``\xNN``.
    """
    _refuse_nulls(column, "key", "filter them out first (where key IS NOT NULL)")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        if pc.any(pc.match_substring(column, "\\")).as_py():
            distinct = column.dictionary_encode()
            keys = [from_text(text) for text in distinct.dictionary.to_pylist()]
            return [keys[index] for index in distinct.indices.to_pylist()]
        column = column.cast(pa.binary())
    return list(column.to_pylist())


def payloads_of(column: pa.Array) -> list[bytes]:
    """Payloads: bytes as they are, text as UTF-8.

    :raises sbus.errors.UsageError: for a null.
    """
    _refuse_nulls(column, "payload", "say what is meant, for an empty one coalesce(payload, X'')")
    return list(column.cast(pa.binary()).to_pylist())


def _refuse_nulls(column: pa.Array, name: str, advice: str) -> None:
    if column.null_count:
        raise UsageError(
            f"format('sbus'): the column {name} is NULL in {column.null_count} of {len(column)} rows, which cannot be "
            f"sent: {advice}"
        )


def _check(schema: StructType) -> None:
    names = schema.fieldNames()
    others = [name for name in names if name not in _COLUMNS]
    missing = [name for name in _COLUMNS if name not in names]
    if others or missing:
        found = [f"there is no column {name}" for name in missing] + [f"{name} cannot be sent" for name in others]
        raise UsageError(
            f"format('sbus'): {', '.join(found)}: publish the columns key and payload alone, "
            "such as df.select('key', 'payload')"
        )
    for field in schema:
        if not isinstance(field.dataType, StringType | BinaryType):
            raise UsageError(
                f"format('sbus'): the column {field.name} is {field.dataType.simpleString()}, and only string and "
                f"binary can be sent: make it one, such as CAST({field.name} AS STRING) or to_json(…)"
            )
