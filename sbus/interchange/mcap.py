"""MCAP files, which Foxglove, rosbag2 and their tools read and write.

Theory of operation
-------------------

*Export.* Rows keep their order. A topic is a key as text (`sbus.journal.keytext`), or ``!/`` and the kind of a gap; no
key begins with that. MCAP describes a message only by its channel, so each channel stands for a key, a publisher and a
form of payload. Foxglove shows only JSON objects, so there are four forms:

==========  ==============================  ==================================
form        payload                         data in the file
==========  ==============================  ==================================
``object``  a JSON object                   the payload
``value``   other JSON, such as ``21.5``    ``{"value":`` the payload ``}``
``text``    other UTF-8                     ``{"value":"…"}``
``bytes``   other bytes                     the payload, as octet-stream
==========  ==============================  ==================================

The file has the profile ``sbus``. The metadata of a channel has its kind, form and publisher, so import restores every
byte. ``log_time`` is the time of the row in ns, and ``sequence`` its number.

*Import.* A file with that profile is read in its order. In any other file, each topic is a key, byte for byte, and each
message a payload; rows are ordered by ``log_time``, and schemas are ignored.

The writer keeps an index of each chunk in memory: about 100 bytes for each channel in the chunk. `_CHUNK_BYTES` bounds
the total: a million rows of 4,000 keys take 5 MB.

Rejected: publishers as messages among the others. Sorting or filtering such a file would assign messages to the wrong
publisher.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any, NoReturn, cast

from mcap.reader import make_reader
from mcap.records import Channel, Header, Message
from mcap.stream_reader import StreamReader
from mcap.writer import Writer

from sbus.errors import UsageError
from sbus.interchange.damaged import explained
from sbus.interchange.rows import Row, Selection
from sbus.journal.keytext import as_text, from_text
from sbus.journal.schema import KINDS, MESSAGES
from sbus.version import __version__

__all__ = ["IS_TEXT", "read", "write"]

_PROFILE = "sbus"
IS_TEXT = False
_CHUNK_BYTES = 4 << 20
"""Size of a chunk, which a reader decompresses at once."""
_MAX_CHANNELS = 65_535
"""MCAP numbers channels with 16 bits."""
_NS = 1000
"""Nanoseconds in a microsecond."""
_OBJECT, _VALUE, _TEXT, _BYTES = "object", "value", "text", "bytes"
_BEFORE, _AFTER = b'{"value":', b"}"


def write(file: IO[bytes], chosen: Selection, *, max_channels: int = _MAX_CHANNELS) -> int:
    """Write rows to a file; return their number.

    :param max_channels: the maximum number of channels.
    :raises UsageError: if there are more pairs of a key and a publisher than MCAP has channels.
    """
    writer = Writer(cast(IO[bytes], _Counted(file)), chunk_size=_CHUNK_BYTES)
    writer.start(_PROFILE, f"sbus {__version__}")
    schema = writer.register_schema("sbus", "jsonschema", b'{"type":"object","properties":{}}')
    channels: dict[tuple[str, bytes, bytes, str], int] = {}
    count = 0
    for row in chosen.rows():
        form, data = _encoded(row.payload)
        key = row.kind, row.key, row.sender, form
        channel = channels.get(key)
        if channel is None:
            if len(channels) == max_channels:
                raise UsageError(
                    f"more than {max_channels:,} pairs of a key and a publisher, which MCAP cannot number: export "
                    "fewer (--pattern, --since), or leave the publishers out (--no-sender)"
                )
            metadata = {"kind": row.kind, "form": form}
            if row.sender:
                metadata["sender"] = row.sender.decode()
            is_bytes = form == _BYTES
            channel = channels[key] = writer.register_channel(
                as_text(row.key) if row.kind in MESSAGES else f"!/{row.kind}",
                "application/octet-stream" if is_bytes else "json",
                0 if is_bytes else schema,
                metadata,
            )
        time = row.time * _NS
        writer.add_message(channel, time, data, time, row.seq & 0xFFFFFFFF)
        count += 1
    writer.finish()
    return count


class _Counted:
    """An output that counts the bytes written, because a pipe has no position."""

    def __init__(self, file: IO[bytes]) -> None:
        self.flush = file.flush
        self._write = file.write
        self._size = 0

    def write(self, data: bytes) -> int:
        self._write(data)
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size


def _encoded(payload: bytes) -> tuple[str, bytes]:
    """Return the form of a payload, and its data."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return _BYTES, payload
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _TEXT, json.dumps({"value": text}, separators=(",", ":")).encode()
    return (_OBJECT, payload) if isinstance(value, dict) else (_VALUE, _BEFORE + payload + _AFTER)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is Python's, and not JSON")


def _decoded(form: str, data: bytes) -> bytes:
    """Return the payload; the inverse of `_encoded`."""
    if form == _VALUE:
        return data[len(_BEFORE) : -len(_AFTER)]
    return str(json.loads(data)["value"]).encode() if form == _TEXT else data


def read(path: str) -> Iterator[Row]:
    """Yield the rows of a file.

    :raises UsageError: if it is not an MCAP file, or is truncated or damaged.
    """
    with open(path, "rb") as file:
        if not file.seekable():
            raise UsageError(f"{path}: the index of an MCAP file is at its end: save it to a file, and import that")
        with explained(path, "MCAP", "'mcap recover' saves what is whole"):
            records = StreamReader(file, validate_crcs=True).records
            header = next(records)
            if isinstance(header, Header) and header.profile == _PROFILE:
                yield from _own(records)
            else:
                file.seek(0)
                yield from _foreign(file)


def _own(records: Iterator[Any]) -> Iterator[Row]:
    """Yield the rows of a file that `write` wrote, in its order."""
    channels: dict[int, tuple[str, bytes, str, bytes]] = {}
    for record in records:
        if isinstance(record, Channel) and record.id not in channels:
            kind = record.metadata.get("kind", "message")
            if kind not in KINDS:
                raise UsageError(f"the topic {record.topic} is of the kind {kind!r}: install a newer version of sbus")
            key = from_text(record.topic) if kind in MESSAGES else b""
            form, sender = record.metadata.get("form", _BYTES), record.metadata.get("sender", "")
            channels[record.id] = kind, key, form, sender.encode()
        elif isinstance(record, Message):
            kind, key, form, sender_ = channels[record.channel_id]
            yield Row(record.sequence, record.log_time // _NS, kind, key, _decoded(form, record.data), sender_)


def _foreign(file: IO[bytes]) -> Iterator[Row]:
    """Yield the messages of another program's file, ordered by time, or without a chunk index in file order."""
    reader = make_reader(file, validate_crcs=True)
    summary = reader.get_summary()
    in_order = summary is not None and bool(summary.chunk_indexes)
    for _, channel, message in reader.iter_messages(log_time_order=in_order):
        yield Row(message.sequence, message.log_time // _NS, "message", channel.topic.encode(), message.data)
