"""What a row of a journal is, and how rows become bytes of an Arrow IPC stream and come back.

A segment begins with a *header*: the schema, the dictionaries and a batch without rows. As the dictionaries never
change after it, the message of a batch can be written, moved and read by itself: all that it holds of a dictionary
column are its indices.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import pyarrow as pa

__all__ = ["END", "FORMAT", "GAPS", "KINDS", "Kind", "decode", "encode", "header", "read_header", "schema"]

FORMAT = 1
"""The version of the format that this package writes, and the only one that it reads."""

END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end-of-stream marker of Arrow's IPC streaming format."""


class Kind(enum.StrEnum):
    """What a row tells."""

    MESSAGE = "message"  # came over the bus
    START = "start"  # recording began
    STOP = "stop"  # recording ended as it should
    RECONNECT = "reconnect"  # the connection to the bus was lost, and is back
    FULL = "full"  # nothing could be written for a time, for lack of space or another error of the disk


KINDS = tuple(Kind)
"""Every kind at the place that its index has in the dictionary."""

GAPS = frozenset(KINDS) - {Kind.MESSAGE}
"""The kinds before whose rows messages may be missing."""

_NAMES = pa.dictionary(pa.int8(), pa.utf8())
_TIME = pa.timestamp("us", tz="UTC")

# The same columns with bare indices: what stands in the message of a batch.
_STORED = pa.schema(
    [
        pa.field("journal", pa.int8(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time", _TIME, nullable=False),
        pa.field("kind", pa.int8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)


def schema(journal_id: str) -> pa.Schema:
    """The schema of every segment of this journal; its metadata says of which format and journal it is."""
    fields = [field.with_type(_NAMES) if field.type == pa.int8() else field for field in _STORED]
    return pa.schema(fields, metadata={"sbus.format": str(FORMAT), "sbus.journal": journal_id})


def _dictionaries(journal_id: str) -> dict[str, pa.Array]:
    return {"journal": pa.array([journal_id]), "kind": pa.array(list(KINDS), pa.utf8())}


def header(journal_id: str) -> bytes:
    """What a segment of this journal begins with."""
    stored = _STORED.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema=_STORED)]
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, schema(journal_id))
    writer.write_batch(_dressed(stored[0], schema(journal_id), _dictionaries(journal_id)))
    length = sink.tell()
    writer.close()
    return bytes(sink.getvalue()[:length])


def read_header(data: pa.Buffer) -> pa.Schema:
    """The schema that a segment's header tells.

    :raises pyarrow.ArrowInvalid: if it is no header.
    """
    return pa.ipc.open_stream(data).schema


def encode(
    kind: Kind, first_seq: int, times: int | Sequence[int], keys: Sequence[bytes], payloads: Sequence[bytes]
) -> pa.Buffer:
    """Rows of one kind as the message of a batch.

    :param times: µs since 1970, one for all rows or one for each.
    :raises ValueError: if the rows hold 2 GiB or more.
    """
    rows = len(keys)
    columns = [
        _constant(0, rows),
        pa.arange(first_seq, first_seq + rows),
        pa.repeat(pa.scalar(times, _TIME), rows) if isinstance(times, int) else pa.array(times, _TIME),
        _constant(KINDS.index(kind), rows),
        pa.array(keys, pa.binary()),
        pa.array(payloads, pa.binary()),
    ]
    if any(isinstance(column, pa.ChunkedArray) for column in columns):
        raise ValueError("a batch cannot hold 2 GiB: append fewer messages at a time")
    return pa.RecordBatch.from_arrays(columns, schema=_STORED).serialize()


def _constant(index: int, rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.int8(), rows, [None, pa.py_buffer(bytes((index,)) * rows)])


def decode(data: pa.Buffer, journal_id: str, columns: Sequence[str] | None = None) -> pa.RecordBatch:
    """The rows that `encode` has made a message of; nothing is copied.

    :param columns: the names of those that are wanted, in this order; all of them without it.
    """
    stored = pa.ipc.read_record_batch(data, _STORED)
    wanted = schema(journal_id)
    if columns is not None:
        wanted = pa.schema([wanted.field(name) for name in columns], metadata=wanted.metadata)
    return _dressed(stored, wanted, _dictionaries(journal_id))


def _dressed(stored: pa.RecordBatch, wanted: pa.Schema, dictionaries: dict[str, pa.Array]) -> pa.RecordBatch:
    """The columns that are wanted, with their dictionaries."""
    arrays = [
        pa.DictionaryArray.from_arrays(stored.column(name), dictionaries[name], safe=False)
        if name in dictionaries
        else stored.column(name)
        for name in wanted.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)
