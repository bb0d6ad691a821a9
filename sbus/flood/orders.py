"""The orders of a queue: those of the protocol, and the containers behind them.

.. rubric:: Theory of operation

An order counts only for a backlog, that is, for packets that a flush has left. `FifoBacklog` keeps the order of
arrival, replies included, in a list with an empty front: whole slices go in and out with one call, and the memory of
a packet is freed as soon as it is sent. `PriorityBacklog` keeps any other order in a heap, and the replies in front of
it, in the order of their questions.

A `FifoBacklog` also has receipts (`sbus.flood.receipts`) between its packets, and can replace a message in its place.

Both hand packets out with `take` and learn with `ack` how many of them the socket accepted; the others are back in
their place. Both iterate in the order of arrival, so that a change of the order can build one from the other.

Memory: ``PRICE`` is what a packet takes in a backlog beyond its own bytes (CPython, 64 bits). That is the header of the
bytes object and its rounding, 40 bytes, plus its place: two list entries, since up to half of the list is an empty
front, or a tuple of a rank, a number and the packet in the heap.

Costs: while a thousand messages wait, a batch of 64 in and out takes 16 to 24 times as long with the heap as with the
list (benchmarks/micro). So the default order has a container of its own.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from zope.interface import implementer

from sbus.flood.interfaces import IQueueOrder
from sbus.flood.receipts import Receipt

__all__ = ["ORDERS", "FifoBacklog", "Order", "PriorityBacklog", "Reply"]


class Reply(bytes):
    """The server's reply to the receiver itself.

    Flood control never counts, delays or drops it.
    """

    __slots__ = ()


@implementer(IQueueOrder)
class Order:
    """An order given by a sort key (`sbus.interfaces.IQueueOrder`)."""

    def __init__(
        self,
        selector: bytes,
        rank: Callable[[int, int, bool], Any],
        *,
        newest_first: bool | None,
        arrival: bool = False,
    ) -> None:
        self.selector = selector
        self.rank = rank
        self.newestFirst = newest_first
        self.arrival = arrival

    def __repr__(self) -> str:
        return f"<Order {self.selector.decode()}>"


_SIZE_SHIFT = (
    48  # one number takes half of the memory of a tuple of two; arrivals stay below it for 8 years at 10⁶ a second
)


def _largest_first(arrival: int, size: int, newest_first: bool) -> int:
    return (-size << _SIZE_SHIFT) + (-arrival if newest_first else arrival)


ORDERS = (
    Order(b"order/queue", lambda arrival, size, newest: arrival, newest_first=False, arrival=True),
    Order(b"order/stack", lambda arrival, size, newest: -arrival, newest_first=True),
    Order(b"order/random", _largest_first, newest_first=None),
)
"""The orders of the protocol; the first is the default."""


class FifoBacklog:
    """A backlog in order of arrival, replies and receipts included.

    A *place* is the number of packets that were added to the backlog before a packet: it stays valid while others come
    and go.

    :ivar marks: the places of the receipts.
    """

    PRICE = 64

    __slots__ = ("_base", "_front", "_packets", "_taken", "marks")

    def __init__(self, packets: Iterator[bytes]) -> None:
        self._packets: list[Any] = list(packets)
        self._base = 0
        self._front = 0
        self._taken = 0
        self.marks: list[int] = []

    def __len__(self) -> int:
        return len(self._packets) - self._front

    def __iter__(self) -> Iterator[Any]:
        return islice(self._packets, self._front, None)

    @property
    def start(self) -> int:
        """The place of the first packet that is not on its way to the socket."""
        return self._base + self._front + self._taken

    @property
    def end(self) -> int:
        """The place of the next packet."""
        return self._base + len(self._packets)

    def since(self, place: int) -> Iterator[tuple[int, bytes | Receipt]]:
        """Return the packets from a place on, each with its place."""
        at = max(place - self._base, self._front)
        return enumerate(self._packets[at:], self._base + at)  # islice would step over all that stands before

    def __getitem__(self, place: int) -> Any:
        return self._packets[place - self._base]

    def __setitem__(self, place: int, packet: bytes) -> None:
        self._packets[place - self._base] = packet

    def mark(self, receipt: Receipt) -> None:
        """Add a receipt behind all packets."""
        self.marks.append(self.end)
        self._packets.append(receipt)

    def last_mark(self) -> tuple[Receipt, int] | None:
        """Return the last receipt, and the number of messages behind it; None without one."""
        if not self.marks:
            return None
        receipt: Receipt = self[self.marks[-1]]
        return receipt, self.end - self.marks[-1] - 1 - receipt.replies

    def marks_within(self, count: int) -> list[tuple[int, Receipt]]:
        """Return the receipts among the next `count` packets, each with its index."""
        first = self._base + self._front
        return [(place - first, self[place]) for place in self.marks[: bisect_left(self.marks, first + count)]]

    def remove_marks(self) -> list[Receipt]:
        """Take out and return all receipts; every place becomes invalid."""
        receipts = [self[place] for place in self.marks]
        self._packets = [packet for packet in self if type(packet) is not Receipt]
        self._base = self._front = self._taken = 0
        self.marks = []
        return receipts

    def pop_message(self) -> bytes | None:
        """Take out and return the next message, or return None if there is none."""
        for at in range(self._front, len(self._packets)):
            packet: Any = self._packets[at]
            if type(packet) is not Reply and type(packet) is not Receipt:
                # The replies and receipts before it, most often none, move up.
                self._packets[self._front + 1 : at + 1] = self._packets[self._front : at]
                self.marks = [place + (place < self._base + at) for place in self.marks]
                self.ack(1)
                return bytes(packet)
        return None

    def push(self, packets: list[bytes]) -> None:
        """Add packets in their order of arrival."""
        self._packets += packets

    def take(self, count: int) -> list[Any]:
        """Return the next packets, at most `count`; call `ack` before anything else."""
        taken = self._packets[self._front : self._front + count]
        self._taken = len(taken)
        return taken

    def ack(self, sent: int) -> None:
        """Remove the first `sent` of the packets taken; the others keep their place."""
        self._taken = 0
        front = self._front + sent
        if self.marks:
            del self.marks[: bisect_left(self.marks, self._base + front)]
        if front * 2 > len(self._packets):
            del self._packets[:front]
            self._base += front
            front = 0
        else:
            self._packets[self._front : front] = [None] * sent
        self._front = front


class PriorityBacklog:
    """A backlog ordered by a sort key.

    Replies go first, in the order of their questions.
    """

    PRICE = 256

    __slots__ = ("_arrival", "_heap", "_newest_first", "_rank", "_replies", "_taken")

    marks: Sequence[int] = ()
    """This order knows no places for receipts; see `FifoBacklog.marks`."""

    def __init__(self, packets: Iterator[bytes], order: IQueueOrder, newest_first: bool) -> None:
        self._rank = order.rank
        self._newest_first = newest_first
        self._arrival = 0
        self._heap: list[tuple[Any, int, bytes]] = []
        self._replies: deque[tuple[Any, int, bytes]] = deque()
        self._taken: list[tuple[Any, int, bytes]] = []
        self._fill(packets)

    def __len__(self) -> int:
        return len(self._heap) + len(self._replies)

    def __iter__(self) -> Iterator[bytes]:
        entries = sorted([*self._replies, *self._heap], key=lambda entry: entry[1])
        return (packet for _, _, packet in entries)

    def pop_message(self) -> bytes | None:
        """See `FifoBacklog.pop_message`."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    def _fill(self, packets: Iterator[bytes]) -> None:
        """Add packets to the empty backlog: all together take half the time that they would take one by one."""
        rank, newest_first = self._rank, self._newest_first
        waiting = list(packets)
        self._arrival = len(waiting)
        if Reply in set(map(type, waiting)):
            self._replies.extend((None, at, packet) for at, packet in enumerate(waiting, 1) if type(packet) is Reply)
            messages = [(at, packet) for at, packet in enumerate(waiting, 1) if type(packet) is not Reply]
        else:
            messages = list(enumerate(waiting, 1))
        self._heap = [(rank(at, len(packet), newest_first), at, packet) for at, packet in messages]
        heapq.heapify(self._heap)

    def push(self, packets: list[bytes]) -> None:
        """See `FifoBacklog.push`."""
        for packet in packets:
            self._arrival += 1
            if type(packet) is Reply:
                self._replies.append((None, self._arrival, packet))
            else:
                rank = self._rank(self._arrival, len(packet), self._newest_first)
                heapq.heappush(self._heap, (rank, self._arrival, packet))

    def take(self, count: int) -> list[bytes]:
        """See `FifoBacklog.take`."""
        replies, heap = self._replies, self._heap
        self._taken = [
            replies.popleft() if replies else heapq.heappop(heap) for _ in range(min(count, len(replies) + len(heap)))
        ]
        return [packet for _, _, packet in self._taken]

    def ack(self, sent: int) -> None:
        """See `FifoBacklog.ack`."""
        for entry in reversed(self._taken[sent:]):
            if type(entry[2]) is Reply:
                self._replies.appendleft(entry)
            else:
                heapq.heappush(self._heap, entry)
        self._taken = []
