"""JSON lines: write and read what ``sbus sub --json`` and ``sbus journal cat --json`` print.

Keys and payloads are text if they are UTF-8, and base64 otherwise, so every byte survives. Importing the module does
not import PyArrow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from sbus.client.identity import Sender
from sbus.client.losses import Lost, format_lost, parse_lost
from sbus.errors import UsageError
from sbus.journal import clock
from sbus.journal.keytext import as_text, from_text

if TYPE_CHECKING:
    from sbus.interchange.rows import Row, Selection

__all__ = ["BYTE_ORDER_MARK", "IS_TEXT", "decoded", "encoded", "is_gap", "read", "row_fields", "sender_fields", "write"]

IS_TEXT = True
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def encoded(data: bytes) -> tuple[str, str]:
    """Return bytes as text, and the encoding: ``text`` or ``base64``."""
    try:
        return data.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def decoded(fields: Mapping[str, str], name: str, encoding: str) -> bytes:
    """Return the bytes of a field.

    :param encoding: the name of the field with the encoding; if that field is missing, the encoding is ``text``.
    :raises ValueError: if the field does not have that encoding; also `KeyError`, `TypeError` or `AttributeError`.
    """
    text = fields[name].encode()
    return base64.b64decode(text, validate=True) if fields.get(encoding, "text") == "base64" else text


def is_gap(fields: object) -> bool:
    """Return whether an object stands for lost messages: a loss that ``sub`` prints, or a row without a payload."""
    if not isinstance(fields, dict) or "payload" in fields:
        return False
    return "details" in fields or ("lost" in fields and "key" not in fields)


def sender_fields(sender: Sender) -> dict[str, object]:
    """Return ``number``, ``gid``, ``uid``, ``pid`` and ``chain``."""
    return asdict(sender)


def row_fields(row: Row) -> dict[str, object]:
    """Return the object of a row.

    A message has ``key`` and ``payload``, and ``sender`` if it is known. Other rows have ``details``; a ``digest`` has
    its key and sender too.
    """
    fields: dict[str, object] = {"seq": row.seq, "kind": row.kind, "time": clock.to_seconds(row.time)}
    if row.kind in ("message", "digest"):
        fields["key"], encoding = encoded(row.key)
        if encoding != "text":
            fields["key_encoding"] = encoding
    if row.kind == "message":
        fields["payload"], fields["encoding"] = encoded(row.payload)
    if row.sender and (sender := Sender.parse(row.sender)) is not None:
        fields["sender"] = sender_fields(sender)
    if row.kind != "message":
        fields["details"] = _details(row)
    return fields


def _details(row: Row) -> object:
    """Return the payload of a gap or a digest as an object, or as text if it is none."""
    if row.kind == "lost":
        lost = parse_lost(row.payload)
        if lost is not None and format_lost(lost) == row.payload:
            return lost._asdict()
    else:
        try:
            details = json.loads(row.payload)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(details, dict):
                return details
    return as_text(row.payload)


def write(file: IO[bytes], chosen: Selection) -> int:
    """Write rows to a file; return their number."""
    count = 0
    for row in chosen.rows():
        file.write(json.dumps(row_fields(row)).encode() + b"\n")
        count += 1
    return count


def read(path: str) -> Iterator[Row]:
    """Yield the rows of a file.

    Blank lines are skipped. A line without ``kind`` is a message or a loss, as ``sbus sub --json`` prints it.

    :raises UsageError: if a line is anything else; names its number.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            try:
                yield _row(number - 1, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, UsageError):
                raise UsageError(
                    f"{path}: line {number} is no row: write an object with time, key and payload, as sub --json and "
                    "journal export do"
                ) from None


def _row(number: int, fields: dict[str, Any]) -> Row:
    from sbus.interchange.rows import Row, sender_text

    kind = fields.get("kind", "lost" if is_gap(fields) else "message")
    key = decoded(fields, "key", "key_encoding") if kind in ("message", "digest") else b""
    if kind == "message":
        payload = decoded(fields, "payload", "encoding")
    elif "details" not in fields:
        payload = format_lost(Lost(*(fields[name] for name in ("lost", "bytes", "total", "why"))))
    elif isinstance(fields["details"], str):
        payload = from_text(fields["details"])
    else:
        details = fields["details"]
        payload = format_lost(Lost(**details)) if kind == "lost" else json.dumps(details).encode()
    sender = fields.get("sender")
    return Row(
        fields.get("seq", number),
        clock.from_seconds(fields["time"]),
        kind,
        key,
        payload,
        b"" if sender is None else sender_text(**sender),
    )
