"""The queue of a transport without flood control.

It is first in, first out, with a high-water mark for producers.
"""

from __future__ import annotations

from collections.abc import Sequence

from zope.interface import implementer

from sbus.flood.interfaces import IPacketQueue
from sbus.routing.runs import total_size

__all__ = ["HIGH_WATER", "FifoQueue"]

HIGH_WATER = 64 << 10
"""Bytes in the queue above which a streaming producer is paused; it is resumed when the queue is empty."""


@implementer(IPacketQueue)
class FifoQueue:
    """Packets in order of arrival (`IPacketQueue`)."""

    __slots__ = ("_packets", "_size")

    def __init__(self) -> None:
        self._packets: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._packets)

    def is_high(self) -> bool:
        """Return whether the queue is above the high-water mark."""
        return self._size > HIGH_WATER

    def write(self, packet: bytes) -> None:
        self._packets.append(packet)
        self._size += len(packet)

    def take(self, count: int) -> list[bytes]:
        return self._packets[:count]

    def ack(self, taken: list[bytes], sent: int) -> None:
        del self._packets[:sent]
        self._size -= total_size(taken[:sent])

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """End the connection.

        A stream of packets with a hole in it would mislead the protocol.
        """
        return False

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        self._packets.clear()
        self._size = 0
