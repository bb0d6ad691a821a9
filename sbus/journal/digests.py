"""Rows of the kind ``digest``: messages whose payload was too long to be kept.

The payload of such a row is a JSON object with the ``length`` of the message's payload, in bytes, and its ``sha256`` in
hexadecimal digits. So whoever has the payload elsewhere can tell that it is the same.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sbus.journal.schema import MESSAGES, Kind

__all__ = ["Digest", "is_message", "payload_lengths"]


class Digest(NamedTuple):
    """The digest of a payload.

    :ivar length: its length in bytes.
    :ivar sha256: its SHA-256, in hexadecimal digits.
    """

    length: int
    sha256: str

    def pack(self) -> bytes:
        """Return the payload of the row."""
        return json.dumps(self._asdict()).encode()


def is_message(kinds: pa.Array) -> pa.BooleanArray:
    """Return which rows are messages.

    :param kinds: the column ``kind``, or its dictionary.
    """
    return pc.is_in(kinds, pa.array(sorted(MESSAGES), pa.utf8()))


def payload_lengths(rows: pa.RecordBatch) -> pa.Int64Array:
    """Return the bytes in the payload of each message, as the bus delivered it.

    :param rows: messages, with the columns ``kind`` and ``payload``.
    """
    payloads = rows.column("payload")
    lengths = pc.cast(pc.binary_length(payloads), pa.int64())
    is_digest = pc.equal(rows.column("kind"), str(Kind.DIGEST))
    if not is_digest.true_count:
        return lengths
    stated = [_stated_length(payload) for payload in payloads.filter(is_digest).to_pylist()]
    return pc.replace_with_mask(lengths, is_digest, pa.array(stated, pa.int64()))


def _stated_length(payload: bytes) -> int:
    """Return the length that a digest states, or the digest's own length if it states none (an imported row)."""
    try:
        length = json.loads(payload)["length"]
    except (ValueError, TypeError, KeyError, RecursionError):
        length = None
    return length if type(length) is int and 0 <= length < 1 << 63 else len(payload)
