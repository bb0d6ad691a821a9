"""One Parquet file with the columns of a lake, for pandas, DuckDB, Polars and other readers of Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from sbus.errors import UsageError
from sbus.interchange.damaged import explained
from sbus.interchange.rows import SENDER_COLUMNS, Row, Selection, sender_text
from sbus.journal.keytext import from_text
from sbus.journal.resizing import resized
from sbus.journal.schema import COLUMN_NAMES, MESSAGES, schema
from sbus.journal.senders import TYPES
from sbus.lake.encoding import new_writer
from sbus.lake.staging import LIMITS, as_stored

__all__ = ["IS_TEXT", "read", "write"]

IS_TEXT = False
_BATCH_ROWS = 16_384
"""Rows read at a time."""


def write(file: IO[bytes], chosen: Selection) -> int:
    """Write rows to a file; return their number."""
    columns = [name for name in COLUMN_NAMES if chosen.has_senders or name not in TYPES]
    whole = schema(chosen.reader.id)
    waiting = [pa.RecordBatch.from_pylist([], pa.schema([whole.field(name) for name in columns]))]
    count = filled = 0
    # A file without rows has the columns, too.
    with new_writer(pa.PythonFile(file, "w"), as_stored(waiting).schema, is_sorted=True) as writer:
        for batch in resized(chosen.batches(columns)):
            waiting.append(batch)
            count += batch.num_rows
            filled += batch.nbytes
            if filled >= LIMITS.group_bytes:
                writer.write_table(as_stored(waiting), LIMITS.group_bytes)
                waiting, filled = [], 0
        if len(waiting) > 1 or (waiting and waiting[0].num_rows):
            writer.write_table(as_stored(waiting), LIMITS.group_bytes)
    return count


def read(path: str) -> Iterator[Row]:
    """Yield the rows of a file that `write` wrote, or of any file with ``time``, ``key`` and ``payload``.

    Keys that are text have the form of a lake's. In a file without ``kind``, every row is a message.

    :raises UsageError: if it is not a Parquet file, lacks a column, or has rows of several journals.
    """
    with explained(path, "Parquet", "export it again"), pq.ParquetFile(path, memory_map=True) as file:
        yield from _rows(path, file)


def _rows(path: str, file: pq.ParquetFile) -> Iterator[Row]:
    names = set(file.schema_arrow.names)
    if missing := {"time", "key", "payload"} - names:
        raise UsageError(f"{path}: it has no column {sorted(missing)[0]!r}: a row needs time, key and payload")
    if not pa.types.is_timestamp(file.schema_arrow.field("time").type):
        raise UsageError(f"{path}: its column 'time' is no timestamp: convert it, as with to_timestamp() in DuckDB")
    if not _holds_keys(file.schema_arrow.field("key").type):
        raise UsageError(
            f"{path}: its column 'key' is neither text nor binary data: convert it, as with CAST in DuckDB"
        )
    wanted = [name for name in ("journal", "seq", "time", "kind", "key", "payload", *SENDER_COLUMNS) if name in names]
    journals: set[str] = set()
    number = 0
    for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = batch.num_rows
        if "journal" in columns:
            journals.update(columns["journal"].unique().to_pylist())
            if len(journals) > 1:
                raise UsageError(f"{path}: it has rows of several journals: import those of one at a time")
        keys = [_key(key) for key in columns["key"].to_pylist()]
        senders = [columns[name].to_pylist() if name in columns else [None] * rows for name in SENDER_COLUMNS]
        found = zip(
            columns["seq"].to_pylist() if "seq" in columns else range(number, number + rows),
            columns["time"].cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64()).to_pylist(),
            columns["kind"].to_pylist() if "kind" in columns else ["message"] * rows,
            keys,
            columns["payload"].cast(pa.binary()).to_pylist(),
            zip(*senders, strict=True),
            strict=True,
        )
        number += rows
        for seq, time, kind, key, payload, sender in found:
            if time is None or key is None or payload is None:
                raise UsageError(f"{path}: a row without time, key or payload: leave it out, or give it one")
            yield Row(seq, time, kind, key if kind in MESSAGES else b"", payload, sender_text(*sender))


def _holds_keys(type_: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    is_text = types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)
    is_binary = types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_)
    return bool(is_text or is_binary or types.is_fixed_size_binary(type_) or types.is_null(type_))


def _key(key: bytes | str | None) -> bytes | None:
    if isinstance(key, str):
        return from_text(key) if "\\" in key else key.encode()
    return key
