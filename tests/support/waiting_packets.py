"""The packets that wait in a receiver's queue, as plain values."""

from __future__ import annotations

from typing import Any

from sbus.flood import Reply, SendQueue
from sbus.flood.receipts import Receipt

__all__ = ["waiting_in"]


def waiting_in(queue: SendQueue) -> dict[str, Any]:
    """Return the queue in order of arrival, as plain values.

    ``packets`` has tuples (whether it is a reply, packet). ``receipts`` has tuples (index of the packet that it
    stands before, messages, bytes, cause).
    """
    packets: list[tuple[bool, bytes]] = []
    receipts: list[tuple[int, int, int, str]] = []
    for packet in [*([queue.head] if queue.head else []), *(queue._backlog or ()), *queue.pending]:
        if type(packet) is Receipt:
            receipts.append((len(packets), packet.messages, packet.size, packet.why.value))
        else:
            packets.append((type(packet) is Reply, bytes(packet)))
    return {"packets": packets, "receipts": receipts, "lost": queue.lost, "conflated": queue.conflated}
