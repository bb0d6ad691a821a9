"""Who published the messages: one column on the disk, five for readers.

A batch stores the bus's own words, ``<number> <credentials>``, and null where nobody is known. They are run-end
encoded: once for all messages in a row of one publisher. So one publisher takes nothing for each message, and a message
that comes alone takes 180 bytes more. `split` makes the columns of readers from that, each distinct publisher once.

Rejected: to store the five columns. Their frames take 700 bytes in each batch, and a quiet bus has a batch for each
message. Rejected: dictionaries. Those of a segment never change after its header, so that each batch can be read by
itself (`sbus.journal.schema`), and publishers come and go.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["STORED", "TYPES", "Senders", "encode_senders", "split"]

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

_NAME = re.compile(rb"([0-9]{1,18}) (?:-|(?:(!/.+)/)?!/cred/([0-9]{1,10})/([0-9]{1,10})/([0-9]{1,9}))")

_Values = tuple[int | None, int | None, int | None, int | None, str | None]


class Senders(NamedTuple):
    """The publishers of the messages of a batch.

    :ivar names: for each run of messages its publisher, in the bus's words; null or empty: unknown.
    :ivar ends: for each run, the number of messages up to its last one; runs are not empty.
    """

    names: pa.BinaryArray
    ends: pa.Int32Array


def encode_senders(senders: Senders | None, rows: int) -> pa.RunEndEncodedArray:
    """Return the column that is stored, for a number of rows; None: nobody is known."""
    if senders is None:
        senders = Senders(pa.nulls(1, pa.binary()), pa.array([rows], pa.int32()))
    return pa.RunEndEncodedArray.from_arrays(senders.ends, senders.names)


def split(stored: pa.RunEndEncodedArray, names: Sequence[str]) -> dict[str, pa.Array]:
    """Return columns of readers, made from the one that is stored.

    :param names: which ones.
    """
    runs = stored.values.dictionary_encode()
    known = [_parse(name) for name in runs.dictionary.to_pylist()]
    columns = {}
    for number, (name, type_) in enumerate(TYPES.items()):
        if name in names:
            values = pa.array([sender[number] for sender in known], type_).take(runs.indices)
            columns[name] = pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(stored.run_ends, values))
    return columns


def _parse(name: bytes) -> _Values:
    found = _NAME.fullmatch(name)
    if found is None:
        return None, None, None, None, None
    number, chain, gid, uid, pid = found.groups()
    if uid is None:
        return None, None, None, int(number), None
    return int(uid), int(gid), int(pid), int(number), None if chain is None else chain.decode()
