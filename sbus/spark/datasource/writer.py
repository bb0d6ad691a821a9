"""Publish the rows of a DataFrame or a stream to a bus.

Each row is sent at least once, in order within a partition.

A task connects, publishes its rows, and ends with a fence: it succeeds only after the server has handled all of its
messages, and any error fails it. Spark can run a failed task again, and a stream can repeat its last batch after a
crash. Then some messages are published twice, but none is lost.

With the option ``id``, a row's id becomes the last segment of its key, so a receiver in any language recognises a
repeat by the key alone, whatever the payload. Rejected: an id before the payload, which every receiver would have to
remove; a field of the payload, which only JSON has, and which SQL can add.
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
from pyspark.sql.types import BinaryType, StringType, StructType, VarcharType

from sbus.client.blocking import connect
from sbus.client.denials import raise_denied
from sbus.errors import UsageError
from sbus.journal.keytext import from_text
from sbus.protocol.keys import find_dialect
from sbus.spark.datasource.options import WriteOptions

__all__ = ["Published", "SbusStreamWriter", "SbusWriter", "table_columns"]

_FENCE_TIMEOUT = 300.0
"""Seconds for a bus to handle the messages of a task; slow receivers that block the publisher add to it."""


@dataclass
class Published(WriterCommitMessage):
    """The result of a task.

    :ivar messages: the number of messages that it has published.
    """

    messages: int


class SbusWriter(DataSourceArrowWriter):
    """Publish a DataFrame.

    :raises sbus.errors.UsageError: if its columns are not those of `table_columns`, or the mode is overwrite.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise UsageError("format('sbus'): published messages cannot be overwritten: use mode('append')")
        _check(schema, options)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of a partition."""
        return publish(self.options, iterator)


class SbusStreamWriter(DataSourceStreamArrowWriter):
    """Publish a stream.

    :raises sbus.errors.UsageError: if its columns are not those of `table_columns`, or the output mode is complete.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise UsageError(
                "format('sbus'): the output mode complete would publish everything again each time: "
                "use outputMode('append') or outputMode('update')"
            )
        _check(schema, options)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of a partition of a batch."""
        return publish(self.options, iterator)


def table_columns(options: WriteOptions) -> StructType:
    """Return the columns of a table that publishes.

    The columns are text: Spark casts what is inserted, and binary data stays unchanged. The key is a VARCHAR, which no
    query returns, so Spark casts the columns of every INSERT, and thereby adds the comments, which hold the options of
    the table. Its length is that of the longest key as text: four characters (``\\xNN``) per byte.
    """
    columns = StructType().add("key", VarcharType(4 * options.max_packet)).add("payload", StringType())
    return columns if options.id is None else columns.add(options.id, StringType())


def publish(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Published:
    """Publish rows, and wait until the bus has handled them.

    :raises sbus.errors.UsageError: for a null, a text that is no key, or a message that does not fit into a packet; the
        batches before it are published by then.
    :raises sbus.errors.ConnectError: if there is no bus.
    :raises sbus.errors.Disconnected: if the connection to the bus is lost.
    :raises sbus.errors.NotAllowed: if the bus refuses a row.
    """
    count = 0
    bus = None
    separator = find_dialect(options.dialect).separator
    try:
        for batch in batches:
            keys, payloads = keys_of(batch.column("key")), payloads_of(batch.column("payload"))
            if options.id is not None:
                ids = ids_of(batch.column(options.id), options)
                keys = [b"%b%b%b" % (key, separator, id_) for key, id_ in zip(keys, ids, strict=True)]
            if bus is None:  # a partition without rows needs no connection
                bus = connect(
                    options.address,
                    dialect=options.dialect,
                    max_packet=options.max_packet,
                    on_denied=raise_denied,
                )
            bus.publish_many(zip(keys, payloads, strict=True))
            count += len(keys)
        if bus is not None:
            bus.fence(_FENCE_TIMEOUT)
    finally:
        if bus is not None:
            bus.close()
    return Published(count)


def keys_of(column: pa.Array) -> list[bytes]:
    r"""Return routing keys: bytes as they are, text as in `sbus.journal.keytext`.

    :raises sbus.errors.UsageError: for a null, or a backslash that does not begin ``\xNN``.
    """
    _refuse_nulls(column, "key", "filter them out first (where key IS NOT NULL)")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        if pc.any(pc.match_substring(column, "\\")).as_py():
            distinct = column.dictionary_encode()
            keys = [from_text(text) for text in distinct.dictionary.to_pylist()]
            return [keys[index] for index in distinct.indices.to_pylist()]
        column = column.cast(pa.binary())
    return list(column.to_pylist())


def ids_of(column: pa.Array, options: WriteOptions) -> list[bytes]:
    """Return the ids of rows, as segments of keys.

    :raises sbus.errors.UsageError: for a null, or an id that is not one segment of a key.
    """
    name = str(options.id)
    _refuse_nulls(column, name, "give each row an id that is the same when Spark computes the row again")
    ids = keys_of(column)
    separator = find_dialect(options.dialect).separator
    for id_ in ids:
        if not id_ or separator in id_:
            raise UsageError(
                f"format('sbus'): the column {name} has {id_.decode(errors='replace')!r}, which is not one segment of "
                f"a key: use ids without {separator.decode()!r}, such as replace({name}, '{separator.decode()}', '-')"
            )
    return ids


def payloads_of(column: pa.Array) -> list[bytes]:
    """Return payloads: bytes as they are, text as UTF-8.

    :raises sbus.errors.UsageError: for a null.
    """
    _refuse_nulls(column, "payload", "replace it, for an empty payload with coalesce(payload, X'')")
    return list(column.cast(pa.binary()).to_pylist())


def _refuse_nulls(column: pa.Array, name: str, advice: str) -> None:
    if column.null_count:
        raise UsageError(
            f"format('sbus'): the column {name} is NULL in {column.null_count} of {len(column)} rows, and NULL cannot "
            f"be sent: {advice}"
        )


def _check(schema: StructType, options: WriteOptions) -> None:
    names, wanted = schema.fieldNames(), table_columns(options).fieldNames()
    others = [name for name in names if name not in wanted]
    missing = [name for name in wanted if name not in names]
    if others or missing:
        found = [f"there is no column {name}" for name in missing] + [f"{name} cannot be sent" for name in others]
        advice = "" if options.id else "; the option id names a column of ids"
        raise UsageError(
            f"format('sbus'): {', '.join(found)}: publish the columns {' and '.join(wanted)} alone, "
            f"such as df.select({', '.join(map(repr, wanted))}){advice}"
        )
    for field in schema:
        if not isinstance(field.dataType, StringType | BinaryType):
            raise UsageError(
                f"format('sbus'): the column {field.name} is {field.dataType.simpleString()}, and only string and "
                f"binary can be sent: convert it, such as with CAST({field.name} AS STRING) or to_json(…)"
            )
