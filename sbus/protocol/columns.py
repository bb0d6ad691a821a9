"""Messages as columns: the keys and payloads of received packets, without an object for each message.

A program that only stores messages, such as the recorder, need not look at them one by one. `collect` copies the keys
and payloads of packets, and of the packets in bundles, into four growing buffers. They have the layout of Arrow's
``binary`` type: the bytes of all values one behind the other, and the offset at which each of them ends, as native
32-bit integers, with a 0 in front.

With an object for each message and one for each of its parts, recording a bundled message took 1.2 µs of CPU time; with
columns it takes a fifth of that.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from sbus.protocol.bundles import MAGIC, unbundle
from sbus.speedups import choose

__all__ = ["Columns", "collect"]

_ZERO = bytes(4)


class Columns:
    """Keys and payloads, in columns.

    :ivar keys: the bytes of all keys.
    :ivar key_ends: their offsets.
    :ivar payloads: the bytes of all payloads.
    :ivar payload_ends: their offsets.
    """

    __slots__ = ("key_ends", "keys", "payload_ends", "payloads")

    def __init__(self) -> None:
        self.keys = bytearray()
        self.key_ends = bytearray(_ZERO)
        self.payloads = bytearray()
        self.payload_ends = bytearray(_ZERO)

    @property
    def rows(self) -> int:
        """The number of messages."""
        return len(self.key_ends) // 4 - 1

    @property
    def size(self) -> int:
        """The bytes in all keys and payloads."""
        return len(self.keys) + len(self.payloads)

    def add(
        self, packets: list[bytes], at: int, offset: int, *, max_rows: int, max_bytes: int
    ) -> tuple[int, int, bytes | None]:
        """Add messages, up to the first packet that is not a message; see `collect`."""
        return collect(
            packets, at, offset, self.keys, self.key_ends, self.payloads, self.payload_ends, max_rows, max_bytes
        )


def _collect(
    packets: list[bytes],
    at: int,
    offset: int,
    keys: bytearray,
    key_ends: bytearray,
    payloads: bytearray,
    payload_ends: bytearray,
    max_rows: int,
    max_bytes: int,
) -> tuple[int, int, bytes | None]:
    """Copy messages into columns, until a packet is no message or the columns are full.

    :param packets: as received, with bundles. A bundle with bad framing is a packet that is no message.
    :param at: the index of the packet to begin with.
    :param offset: the place in that packet, if it is a bundle that an earlier call has begun; else 0.
    :param max_rows: the number of rows at which the columns are full.
    :param max_bytes: the bytes in keys and payloads together at which they are full; the message that reaches this is
        copied whole. Below 2 GiB, with the longest packet added.
    :returns: the index and the offset to go on with, and the packet that is no message, which lies before that place;
        None at the end of the packets or if the columns are full.
    """
    rows, other = len(key_ends) // 4 - 1, None
    new_key_ends, new_payload_ends = [], []
    while at < len(packets) and rows < max_rows and len(keys) + len(payloads) < max_bytes:
        packet, end = packets[at], 0
        if packet[:4] == MAGIC and (offset or unbundle([packet]) != [packet]):
            offset = offset or 4
            end = offset + 4 + int.from_bytes(packet[offset : offset + 4], "little")
            part, offset = packet[offset + 4 : end], 0 if end == len(packet) else end
        else:
            part = packet
        at += not offset
        key, nul, payload = part[4:].partition(b"\0")
        if part[:4] != b"MSG " or not nul:
            other = part
            break
        keys += key
        payloads += payload
        new_key_ends.append(len(keys))
        new_payload_ends.append(len(payloads))
        rows += 1
    key_ends += struct.pack(f"={len(new_key_ends)}i", *new_key_ends)
    payload_ends += struct.pack(f"={len(new_payload_ends)}i", *new_payload_ends)
    return at, offset, other


collect = _collect
if not TYPE_CHECKING:
    (collect,) = choose("sbus.protocol._columns", collect=_collect)
