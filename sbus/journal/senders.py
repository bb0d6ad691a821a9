"""The publishers of messages: one column on the disk, five for readers.

A batch stores the bus's own text, ``<number> <credentials>``, or null if the publisher is not known. The column is
run-end encoded: one value for consecutive messages of one publisher. So a single publisher takes no space for each
message, and a message that is alone in its batch takes 180 bytes more. `split` makes the readers' columns from it, and
parses each distinct publisher once.

Rejected: storing the five columns. Their frames take 700 bytes in each batch, and a quiet bus has a batch for each
message. Rejected: dictionaries. The dictionaries of a segment never change after its header, so that each batch can be
read by itself (`sbus.journal.schema`), but publishers come and go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["STORED", "TYPES", "Senders", "encode_senders", "is_sender", "split"]

STORED = pa.run_end_encoded(pa.int32(), pa.binary())
"""The type of the column on the disk."""

TYPES = {
    "sender_uid": pa.int64(),  # Spark and Delta have no unsigned numbers
    "sender_gid": pa.int64(),
    "sender_pid": pa.int32(),
    "sender_number": pa.int64(),
    "sender_chain": pa.utf8(),
}
"""The columns of readers, with their types."""

_NAME = re.compile(
    rb"([0-9]{1,18}) (?:-|"
    rb"((?:!/cred/[0-9]+/[0-9]+/[0-9]+/)+)?"  # links
    rb"!/cred/([0-9]{1,10})/([0-9]{1,10})/([0-9]{1,9}))"
)

_Values = tuple[int | None, int | None, int | None, int | None, str | None]


class Senders(NamedTuple):
    """The publishers of the messages of a batch.

    :ivar names: the publisher of each run of messages, in the bus's text form; null or empty: unknown.
    :ivar ends: for each run, the number of messages up to its last one; runs are not empty.
    """

    names: pa.BinaryArray
    ends: pa.Int32Array


def is_sender(name: bytes) -> bool:
    """Return whether readers know a publisher by this name."""
    return _NAME.fullmatch(name) is not None


def encode_senders(senders: Senders | None, rows: int) -> pa.RunEndEncodedArray:
    """Return the stored column for a number of rows; without `senders`, no publisher is known."""
    if senders is None:
        senders = Senders(pa.nulls(1, pa.binary()), pa.array([rows], pa.int32()))
    return pa.RunEndEncodedArray.from_arrays(senders.ends, senders.names)


def split(stored: pa.RunEndEncodedArray, names: Sequence[str]) -> dict[str, pa.Array]:
    """Return readers' columns, made from the stored one.

    :param names: the names of the columns to make; others are ignored.
    """
    runs = stored.values.dictionary_encode()
    known = [_parse(name) for name in runs.dictionary.to_pylist()]
    rows = pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(stored.run_ends, runs.indices))
    return {
        name: pa.array([sender[number] for sender in known], type_).take(rows)
        for number, (name, type_) in enumerate(TYPES.items())
        if name in names
    }


def _parse(name: bytes) -> _Values:
    found = _NAME.fullmatch(name)
    if found is None:
        return None, None, None, None, None
    number, chain, gid, uid, pid = found.groups()
    if uid is None:
        return None, None, None, int(number), None
    return int(uid), int(gid), int(pid), int(number), None if chain is None else chain[:-1].decode()
