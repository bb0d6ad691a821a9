"""Rows of a journal: columns, kinds, formats on disk, encoding and decoding.

*Columns.* `COLUMNS` is the only list of the columns that readers get. The command line, Spark and the documentation
take the names and types from there. A segment has the same columns, except those of the publisher and of the host.
It has one column, ``sender``, in which a run of messages takes as much space as a single one
(`sbus.journal.senders`). The host, the same for all rows, is in ``journal.json``.

*Bytes.* A segment is an Arrow IPC stream. It begins with a *header*: the schema, the dictionaries of the columns
``journal`` and ``kind``, and a batch without rows. The dictionaries never change, so the message of a batch holds only
their indices; it can be written, moved and decoded by itself.

*Formats.* A journal and each of its segments name the format that they were written in. Only the newest, `FORMAT`, is
written; all those in `FORMATS` can be read. Rows of an older format pass through the `Format.upcast` of that format and
of each one after it, so the code that handles rows knows a single format.

To change the columns: add the new `Format` to `FORMATS`, raise `FORMAT`, keep the columns of the old format as its
`Format.columns`, and give the old format an `Format.upcast`. Commit a small journal of the old format beside
``tests/unit/journal/data/format-1``, so that a test reads it. The index (`sbus.journal.index`) and the
summary (`sbus.journal.summary`) are the same in all formats.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import JournalError
from sbus.journal.senders import STORED, TYPES, Senders, encode_senders, split

__all__ = [
    "COLUMNS",
    "COLUMN_NAMES",
    "END_OF_STREAM",
    "FORMAT",
    "FORMATS",
    "GAPS",
    "KINDS",
    "MAX_DAMAGED",
    "MESSAGES",
    "Column",
    "Format",
    "Kind",
    "damaged_row",
    "decode",
    "encode",
    "find_format",
    "header",
    "read_header",
    "schema",
]

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The end-of-stream marker of Arrow's IPC streaming format."""


class Kind(enum.StrEnum):
    """The meaning of a row: a message, a gap, or a step of the clock."""

    MESSAGE = "message"  # a message of the bus
    START = "start"  # recording started
    STOP = "stop"  # the recorder was stopped
    RECONNECT = "reconnect"  # the connection to the bus was lost, and is back
    FULL = "full"  # the disk could not be written for a time: it was full, or failed
    LOST = "lost"  # the bus dropped messages for the recorder
    CLOCK = "clock"  # the clock was set: the times of the rows before and behind this one are not comparable
    DAMAGED = "damaged"  # rows that were recorded, and that the disk has damaged; one row stands for all of them
    DIGEST = "digest"  # a message whose payload was too long to be kept: the row has its length and SHA-256


KINDS = tuple(Kind)
"""Every kind, at the index that it has in the dictionary."""

MESSAGES = frozenset({Kind.MESSAGE, Kind.DIGEST})
"""The kinds of messages of the bus."""

GAPS = frozenset(KINDS) - MESSAGES - {Kind.CLOCK}
"""The kinds of gaps: messages may be missing before such a row, and of `Kind.DAMAGED` in its place."""

MAX_DAMAGED = 2**32 - 1
"""The most rows that a ``damaged`` row stands for: a record of the index counts rows with 32 bits."""

_NAMES = pa.dictionary(pa.int8(), pa.utf8())
_TIME = pa.timestamp("us", tz="UTC")


class Column(NamedTuple):
    """One column of a journal.

    :ivar name: the name of the column.
    :ivar arrow_type: the type of the column.
    :ivar meaning: what the column holds, in words.
    :ivar nullable: whether it has nulls.
    """

    name: str
    arrow_type: pa.DataType
    meaning: str
    nullable: bool = False

    @property
    def stored_type(self) -> pa.DataType:
        """The type in the message of a batch: for a dictionary, the type of its indices."""
        return self.arrow_type.index_type if pa.types.is_dictionary(self.arrow_type) else self.arrow_type


_OF_ALL_FORMATS = (
    Column("journal", _NAMES, "the ID of the journal, 32 hexadecimal digits: the same in every row"),
    Column(
        "seq",
        pa.int64(),
        "the number of the row in its journal: from 0, without holes, gaps included; a ``damaged`` row has the "
        "first of the numbers that it stands for",
    ),
    Column(
        "time",
        _TIME,
        "when the recorder received the message, or when the gap ended, by the clock of that moment; it never "
        "goes back within an epoch, which a ``clock`` row begins; the order of rows is ``seq``",
    ),
    Column(
        "kind",
        _NAMES,
        "``message``; ``digest``, a message whose payload was too long to be kept; the kind of a gap: ``start``, "
        "``stop``, ``reconnect``, ``full``, ``lost``, ``damaged``; or ``clock``",
    ),
    Column("key", pa.binary(), "the key of a message; empty for a gap"),
    Column(
        "payload",
        pa.binary(),
        "the payload of a message; for ``lost``, the receipt of the bus: ``<messages> <bytes> <total> <why>``; for "
        "``digest`` and ``clock``, and for other gaps, a JSON object",
    ),
)
_SENDER = Column("sender", STORED, "the publisher of the message, as the bus names it", nullable=True)

COLUMNS = (
    *_OF_ALL_FORMATS,
    Column("sender_uid", TYPES["sender_uid"], "the user who published the message, according to the kernel", True),
    Column("sender_gid", TYPES["sender_gid"], "the group of the publishing process", True),
    Column("sender_pid", TYPES["sender_pid"], "the process ID of the publisher", True),
    Column(
        "sender_number",
        TYPES["sender_number"],
        "the number of the publisher's connection at its bus; 0 for the program around the bus, with the others null",
        True,
    ),
    Column(
        "sender_chain",
        TYPES["sender_chain"],
        "the name of the link from the publisher's bus to its master, such as ``!/cred/0/0/4711``; null for a client "
        "of the root bus, or of a bus without a master",
        True,
    ),
    Column("host", _NAMES, "the name of the machine on which the journal began; null if unknown", True),
)
"""The columns of a journal, in their order."""

COLUMN_NAMES = tuple(column.name for column in COLUMNS)
"""The names of the columns, in their order."""

Upcast = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True)
class Format:
    """One version of the format on disk.

    :ivar version: the number in ``journal.json`` and in the metadata of each segment's schema.
    :ivar columns: the columns of a segment of this format.
    :ivar kinds: the dictionary of the column ``kind``.
    :ivar upcast: turns rows of this format into rows of the next one; None for the newest format.
    """

    version: int
    columns: tuple[Column, ...]
    kinds: tuple[str, ...]
    upcast: Upcast | None = None

    @cached_property
    def stored_schema(self) -> pa.Schema:
        """The schema of the messages of batches: indices in place of dictionaries."""
        return pa.schema([pa.field(column.name, column.stored_type, column.nullable) for column in self.columns])

    def schema(self, journal_id: str) -> pa.Schema:
        """Return the schema of the segments of a journal.

        Its metadata names the format and the journal.
        """
        return _schema(self.columns, self.version, journal_id)

    def header(self, journal_id: str) -> bytes:
        """Return the bytes that every segment of a journal begins with."""
        stored = self.stored_schema
        empty = pa.RecordBatch.from_arrays([pa.array([], type_) for type_ in stored.types], schema=stored)
        sink = pa.BufferOutputStream()
        writer = pa.ipc.new_stream(sink, self.schema(journal_id))
        writer.write_batch(self._with_dictionaries(empty, journal_id))
        length = sink.tell()
        writer.close()
        return bytes(sink.getvalue()[:length])

    def decode(self, data: pa.Buffer, journal_id: str, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Decode the message of a batch; the rows keep this format. Nothing is copied.

        Its writer can have put anything in it, with the right checksum: even offsets that lead out of the batch. All
        columns are checked, so that a batch that is whole for one reader is whole for all of them.

        :param columns: the names of the columns to return, in this order; None: all.
        :raises ValueError: if it has no such rows.
        """
        try:
            rows = self._with_dictionaries(pa.ipc.read_record_batch(data, self.stored_schema), journal_id)
            rows.validate(full=True)
        except (pa.ArrowException, OSError, EOFError) as e:
            raise ValueError(" ".join(str(e).split())) from e
        return rows if columns is None else rows.select(columns)

    def _with_dictionaries(self, stored: pa.RecordBatch, journal_id: str) -> pa.RecordBatch:
        whole = self.schema(journal_id)
        dictionaries = {"journal": pa.array([journal_id]), "kind": pa.array(self.kinds, pa.utf8())}
        arrays = [
            pa.DictionaryArray.from_arrays(stored.column(name), dictionaries[name], safe=False)
            if name in dictionaries
            else stored.column(name)
            for name in whole.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=whole)


def _schema(columns: Sequence[Column], version: int, journal_id: str) -> pa.Schema:
    fields = [pa.field(column.name, column.arrow_type, column.nullable) for column in columns]
    return pa.schema(fields, metadata={"sbus.format": str(version), "sbus.journal": journal_id})


def _with_todays_kinds(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Lift rows of a format with fewer kinds: the indices of those that it has are the same."""
    kinds = pa.DictionaryArray.from_arrays(rows.column("kind").indices, pa.array(KINDS, pa.utf8()))
    return rows.set_column(rows.schema.get_field_index("kind"), rows.schema.field("kind"), kinds)


def _with_nobody(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Lift rows of a format without publishers."""
    return rows.append_column(_SENDER.name, encode_senders(None, rows.num_rows))


FORMAT = 5
"""The newest format, which this package writes."""

FORMATS = {
    1: Format(1, _OF_ALL_FORMATS, tuple(map(str, KINDS[:5])), _with_todays_kinds),
    2: Format(2, _OF_ALL_FORMATS, tuple(map(str, KINDS[:6])), _with_todays_kinds),
    3: Format(3, _OF_ALL_FORMATS, tuple(map(str, KINDS[:8])), _with_nobody),
    4: Format(4, (*_OF_ALL_FORMATS, _SENDER), tuple(map(str, KINDS[:8])), _with_todays_kinds),
    5: Format(5, (*_OF_ALL_FORMATS, _SENDER), tuple(map(str, KINDS))),
}
"""Every format that this package can read, by its version."""


def find_format(version: object, where: str) -> Format:
    """Return the format with this version.

    :param version: as found in a file.
    :param where: the file or directory, for the error.
    :raises JournalError: if this package cannot read that format, with the remedy.
    """
    if isinstance(version, int) and version in FORMATS:
        return FORMATS[version]
    if isinstance(version, int) and version > FORMAT:
        raise JournalError(
            f"{where}: written in format {version}, but this version of sbus reads formats up to {FORMAT}: "
            "install a newer version of sbus"
        )
    raise JournalError(f"{where}: there is no journal format {version!r}: restore it from a copy")


@lru_cache(maxsize=128)  # every batch needs it, and to make it takes longer than to check a short batch
def schema(journal_id: str) -> pa.Schema:
    """Return the schema of the rows that readers get."""
    return _schema(COLUMNS, FORMAT, journal_id)


def header(journal_id: str) -> bytes:
    """Return the bytes that a new segment of a journal begins with."""
    return FORMATS[FORMAT].header(journal_id)


def read_header(data: pa.Buffer | bytes, where: str) -> tuple[Format, pa.Schema]:
    """Return the format and the schema that the header of a segment states.

    :param where: the file, for errors.
    :raises JournalError: if this package cannot read the format, or the bytes are no header.
    """
    try:
        stated = pa.ipc.open_stream(data).schema
    except (pa.ArrowException, OSError) as e:
        raise JournalError(f"{where}: it does not begin with an Arrow schema ({e}): restore it from a copy") from None
    version = (stated.metadata or {}).get(b"sbus.format", b"")
    return find_format(int(version) if version.isdigit() else version.decode("ascii", "replace"), where), stated


def encode(
    kind: Kind,
    first_seq: int,
    times: int | Sequence[int],
    keys: Sequence[bytes] | pa.Array,
    payloads: Sequence[bytes] | pa.Array,
    ends: Sequence[int] | None = None,
    senders: Senders | None = None,
    format_: Format | None = None,
) -> pa.Buffer:
    """Encode rows of one kind as the message of a batch.

    :param first_seq: the number of the first row.
    :param times: µs since the epoch: one time for all rows, or one for each.
    :param keys: the key of each row.
    :param payloads: the payload of each row.
    :param ends: if a time stands for several rows, the number of rows up to the last one with that time, for each time.
    :param senders: the publishers of the rows; None: no publisher is known.
    :param format_: the format of the segment, if it has today's kinds; None: the newest.
    :raises ValueError: if the rows hold 2 GiB or more.
    """
    rows = len(keys)
    columns = [
        _constant(0, rows),
        pa.arange(first_seq, first_seq + rows),
        _times(times, ends, rows),
        _constant(KINDS.index(kind), rows),
        keys if isinstance(keys, pa.Array) else pa.array(keys, pa.binary()),
        payloads if isinstance(payloads, pa.Array) else pa.array(payloads, pa.binary()),
        encode_senders(senders, rows),
    ]
    if any(isinstance(column, pa.ChunkedArray) for column in columns):
        raise ValueError("a batch cannot hold 2 GiB: append fewer messages at a time")
    stored = (format_ or FORMATS[FORMAT]).stored_schema
    return pa.RecordBatch.from_arrays(columns[: len(stored)], schema=stored).serialize()


def _times(times: int | Sequence[int], ends: Sequence[int] | None, rows: int) -> pa.Array:
    if isinstance(times, int):
        return pa.repeat(pa.scalar(times, _TIME), rows)
    if ends is None or len(ends) == rows:
        return pa.array(times, _TIME)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(times, pa.int64()))
    return pc.run_end_decode(runs).cast(_TIME)


def _constant(index: int, rows: int) -> pa.Array:
    """Return an array of `rows` int8 values that are all `index`."""
    return pa.Array.from_buffers(pa.int8(), rows, [None, pa.py_buffer(bytes((index,)) * rows)])


def decode(
    data: pa.Buffer,
    journal_id: str,
    columns: Sequence[str] | None = None,
    format_: Format | None = None,
    host: str | None = None,
) -> pa.RecordBatch:
    """Decode the message of a batch into the columns of readers.

    Of rows in the newest format, only the columns of the publisher are copied.

    :param columns: the names of the columns to return, in this order; None: all.
    :param format_: the format of the segment; None: the newest.
    :param host: the host of the journal; None: unknown.
    :raises ValueError: if the message has no such rows.
    """
    wanted = schema(journal_id)
    if columns is not None:
        wanted = pa.schema([wanted.field(name) for name in columns], metadata=wanted.metadata)
    of_sender = [name for name in wanted.names if name in TYPES]
    format_ = format_ or FORMATS[FORMAT]
    if format_.upcast is None:
        stored = [name for name in wanted.names if name in format_.stored_schema.names] or ["seq"]
        rows = format_.decode(data, journal_id, stored + [_SENDER.name] * bool(of_sender))
    else:
        rows = format_.decode(data, journal_id)
    while format_.upcast is not None:
        rows = format_.upcast(rows)
        format_ = FORMATS[format_.version + 1]
    made = split(rows.column(_SENDER.name), of_sender) if of_sender else {}
    if "host" in wanted.names:
        made["host"] = _named(host, rows.num_rows)
    arrays = [made[name] if name in made else rows.column(name) for name in wanted.names]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _named(name: str | None, rows: int) -> pa.DictionaryArray:
    """Return a column that has one name, or null, in all rows."""
    indices = pa.nulls(rows, pa.int8()) if name is None else _constant(0, rows)
    return pa.DictionaryArray.from_arrays(indices, pa.array([] if name is None else [name], pa.utf8()))


def damaged_row(
    journal_id: str,
    first_seq: int,
    rows: int,
    time: int,
    reason: str,
    columns: Sequence[str] | None = None,
    host: str | None = None,
) -> pa.RecordBatch:
    """Return the row of the kind ``damaged`` that readers get in place of rows that cannot be read.

    :param first_seq: the number of the first of these rows.
    :param rows: their number.
    :param time: the time of the first of them, or of a row before it, in µs since the epoch.
    :param reason: what is wrong, in words.
    :param columns: the names of the columns to return, in this order; None: all.
    :param host: the host of the journal; None: unknown.
    """
    details = {"rows": rows, "last": first_seq + rows - 1, "reason": reason}
    data = encode(Kind.DAMAGED, first_seq, time, [b""], [json.dumps(details).encode()])
    return decode(data, journal_id, columns, host=host)


def damaged_rows(payload: bytes) -> int:
    """Return how many rows a row of the kind ``damaged`` stands for; 1 if it does not say."""
    try:
        rows = json.loads(payload)["rows"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1
    return min(rows, MAX_DAMAGED) if isinstance(rows, int) and rows >= 1 else 1
