"""The orders of a queue: those of the protocol, and the containers that keep them.

.. rubric:: Theory of operation

An order counts only for a backlog, that is, for packets that a flush has left:

=================  ===================================================================================================
container          how it keeps packets
=================  ===================================================================================================
`FifoBacklog`      in the order of arrival, replies included: a list with an empty front. Whole slices go in and out
                   with one call, and a packet's memory is freed as soon as it is sent. It has receipts
                   (`sbus.flood.receipts`) between its packets, and can replace a message in its place.
`StackBacklog`     in a list that is sent from its end; replies go first, in the order of their questions
`PriorityBacklog`  in a heap, for any other order; replies go first as well
`SharedBacklog`    in a line for each user, for a link (`sbus.flood.shared`); replies go first as well
=================  ===================================================================================================

All hand out packets with `take`, and `ack` reports the number of them that the socket accepted; the others are back in
their place. All but the last iterate in the order of arrival, so that a change of the order can build one from another.

A heap is expensive: a message in and out takes 16 to 24 times as long as with a list (benchmarks/micro), and messages
that the receiver never reads need no rank. So messages come to a `PriorityBacklog` unranked, and are ranked when the
next one is to be sent. Ranks take memory. If the receiver's user has none left, only the oldest messages have a rank,
as many as are to be sent, and the order is that of these.

A packet takes `PRICE` bytes in a backlog beyond its own (CPython, 64 bits): 40 for the header of the bytes object and
its rounding, and two list entries, since up to half of the list is an empty front. A ranked message takes `RANKED`
bytes more: a tuple of a rank and an arrival, these two numbers, and their places in the heap and in the dictionary.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from zope.interface import implementer

from sbus.flood.interfaces import IQueueOrder
from sbus.flood.naming import Mark, Signed, mark_of, sign, sign_each
from sbus.flood.receipts import Receipt
from sbus.flood.shared import SharedBacklog
from sbus.routing.runs import find_type, untracked

__all__ = [
    "ORDERS",
    "PRICE",
    "RANKED",
    "REPLY",
    "Backlog",
    "FifoBacklog",
    "Order",
    "PriorityBacklog",
    "Reply",
    "StackBacklog",
    "new_backlog",
]


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


_STACK = Order(b"order/stack", lambda arrival, size, newest: -arrival, newest_first=True)
ORDERS = (
    Order(b"order/queue", lambda arrival, size, newest: arrival, newest_first=False, arrival=True),
    _STACK,
    Order(b"order/random", _largest_first, newest_first=None),
)
"""The orders of the protocol; the first is the default."""
SHARED = Order(b"order/shared", lambda arrival, size, newest: arrival, newest_first=False)
"""The order of a link's queue, users in turn (`sbus.flood.shared`). No client can choose it by name."""
PRICE = 64
"""Bytes of memory that a packet takes in a backlog, besides its own."""
REPLY = 16
"""Bytes of memory that a reply takes more than a message: it has a header for the garbage collector."""
RANKED = 192
"""Bytes that the rank of a message takes."""
_HEAP_AT_ONCE = 8
"""New entries that exceed this fraction (one over it) of a heap are put in place by building the whole heap."""
_SPARE = 64
"""Ranked messages that were sent, and whose room a backlog may keep in any case."""


class FifoBacklog:
    """A backlog in order of arrival, replies and receipts included.

    A *place* is the number of packets that were added to the backlog before a packet: it stays valid while others come
    and go.

    :ivar marks: the places of the receipts.
    """

    ranked = unranked = 0
    """See `PriorityBacklog`."""

    __slots__ = ("_base", "_front", "_packets", "_signed", "_taken", "marks")

    def __init__(self, packets: Iterator[bytes]) -> None:
        self._packets: list[Any] = untracked(list(packets))
        self._base = 0
        self._front = 0
        self._taken = 0
        self._signed = 0  # the place before which all messages are signed
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

    def replace(
        self, packets: list[bytes], places: Mapping[bytes, int], may_grow: Callable[[int], bool]
    ) -> tuple[list[bytes], int]:
        """Put messages in the places of others; see `sbus.flood.latest.KeyIndex.replace`.

        :param places: where a message of each key may stand.
        """
        stored, base, start = self._packets, self._base, self.start
        left, shrunk = [], 0
        for packet in packets:
            key = packet[: packet.find(b"\0") + 1]
            place = places.get(key, -1)
            if place >= start:
                waiting = stored[place - base]  # a strategy that drops the next message moves the replies before it
                if (type(waiting) is bytes or isinstance(waiting, Signed)) and waiting.startswith(key):
                    more = len(packet) - len(waiting)
                    if more <= 0:
                        shrunk -= more
                    elif not may_grow(more):
                        left.append(packet)
                        continue
                    stored[place - base] = packet
                    continue
            left.append(packet)
        return left, shrunk

    def mark(self, receipt: Receipt) -> None:
        """Add a receipt after all packets."""
        self.marks.append(self.end)
        self._packets.append(receipt)

    def last_mark(self) -> tuple[Receipt, int] | None:
        """Return the last receipt, and the number of messages after it; None without one."""
        if not self.marks:
            return None
        receipt: Receipt = self[self.marks[-1]]
        return receipt, self.end - self.marks[-1] - 1 - receipt.replies

    def marks_within(self, count: int) -> list[tuple[int, Receipt]]:
        """Return the receipts among the next `count` packets, each with its index."""
        first = self._base + self._front
        return [(place - first, self[place]) for place in self.marks[: bisect_left(self.marks, first + count)]]

    def rank(self, most: int) -> None:
        """Do nothing: no message has a rank."""

    def sign_all(self, last: Mark | None) -> Mark | None:
        """Give each unsigned message the mark of the one before it.

        :param last: the mark of the messages before the first signed one.
        :returns: the mark of the last message.
        """
        packets = self._packets
        at = max(self._signed - self._base, self._front)
        last = next((mark_of(each) for each in reversed(packets[self._front : at]) if isinstance(each, Signed)), last)
        packets[at:] = sign_each(packets[at:], last)
        self._signed = self.end
        return next((mark_of(each) for each in reversed(packets) if isinstance(each, Signed)), last)

    def _pass_on(self, dropped: Signed, at: int) -> None:
        """Give the message after a dropped one the mark of that one, if it has none."""
        for place in range(at, len(self._packets)):
            packet = self._packets[place]
            if type(packet) is bytes:
                self._packets[place] = sign(packet, mark_of(dropped))
            if type(packet) is bytes or isinstance(packet, Signed):
                return

    def remove_marks(self) -> list[Receipt]:
        """Take out and return all receipts; every place becomes invalid."""
        receipts = [self[place] for place in self.marks]
        self._packets = untracked([packet for packet in self if type(packet) is not Receipt])
        self._base = self._front = self._taken = self._signed = 0
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
                if isinstance(packet, Signed):
                    self._pass_on(packet, at + 1)
                self.ack(1)
                return packet  # type: ignore[no-any-return]
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


class StackBacklog:
    """A backlog that is sent newest first.

    Replies go first, in the order of their questions.
    """

    ranked = unranked = 0

    __slots__ = ("_messages", "_replies", "_taken")

    marks: Sequence[int] = ()
    """This order knows no places for receipts; see `FifoBacklog.marks`."""

    def __init__(self, packets: Iterator[bytes]) -> None:
        messages, replies = _split(packets)
        self._messages = messages
        self._replies = deque(replies)  # each with the number of messages before it
        self._taken = (0, 0)  # the number of replies, and of messages that were there then

    def __len__(self) -> int:
        return len(self._messages) + len(self._replies)

    def __iter__(self) -> Iterator[bytes]:
        at, messages = 0, iter(self._messages)
        for before, reply in self._replies:
            yield from islice(messages, max(0, before - at))
            yield reply
            at = max(at, before)
        yield from messages

    def rank(self, most: int) -> None:
        """Do nothing: no message has a rank."""

    def pop_message(self) -> bytes | None:
        """See `FifoBacklog.pop_message`."""
        return self._messages.pop() if self._messages else None

    def push(self, packets: list[bytes]) -> None:
        """Add messages, or one reply."""
        if type(packets[0]) is Reply:
            self._replies.append((len(self._messages), packets[0]))
        else:
            self._messages += packets

    def take(self, count: int) -> list[bytes]:
        """See `FifoBacklog.take`."""
        taken = [reply for _, reply in islice(self._replies, count)]
        self._taken = len(taken), len(self._messages)
        if left := count - len(taken):
            taken += self._messages[: -left - 1 : -1]
        return taken

    def ack(self, sent: int) -> None:
        """See `FifoBacklog.ack`; packets that have come since `take` stay."""
        replies, end = self._taken
        for _ in range(min(sent, replies)):
            self._replies.popleft()
        if sent > replies:
            del self._messages[end - (sent - replies) : end]


class PriorityBacklog:
    """A backlog ordered by a sort key.

    Replies go first, in the order of their questions. Messages that were taken and not sent stay sorted, before the
    heap: for a receiver that takes a few packets at a time, thousands need not be put back each time.

    The heap holds the ranks. A dictionary maps arrivals to messages, in the order of arrival: to sort 65,000 messages
    by arrival for the next order would stall the server for 20 ms.
    """

    __slots__ = (
        "_arrival",
        "_first",
        "_gone",
        "_heap",
        "_key",
        "_ranked",
        "_replies",
        "_taken",
        "_unranked",
        "newest_first",
    )

    marks: Sequence[int] = ()
    """This order knows no places for receipts; see `FifoBacklog.marks`."""

    def __init__(self, packets: Iterator[bytes], order: IQueueOrder, newest_first: bool) -> None:
        self._key = order.rank
        self.newest_first = newest_first
        self._arrival = 0
        self._heap: list[tuple[Any, int]] = []  # rank, arrival
        self._first: list[tuple[Any, int]] = []
        self._ranked: dict[int, bytes] = {}
        self._gone = 0  # messages that were sent, whose room the dictionary may still take
        messages, replies = _split(packets)
        self._unranked = deque(messages)
        self._replies = deque((before + 0.5, reply) for before, reply in replies)  # between two arrivals
        self._taken = 0  # replies

    def __len__(self) -> int:
        return len(self._ranked) + len(self._replies) + len(self._unranked)

    def __iter__(self) -> Iterator[bytes]:
        if not self._replies:
            return chain(self._ranked.values(), self._unranked)
        unranked = enumerate(self._unranked, self._arrival + 1)
        return (packet for _, packet in heapq.merge(self._ranked.items(), unranked, self._replies))

    @property
    def ranked(self) -> int:
        """The number of messages that have a rank."""
        return len(self._ranked)

    @property
    def unranked(self) -> int:
        """The number of messages that have none."""
        return len(self._unranked)

    def pop_message(self) -> bytes | None:
        """See `FifoBacklog.pop_message`; call `rank` before."""
        self._sort(1)
        return self._ranked.pop(self._first.pop(0)[1]) if self._first else None

    def push(self, packets: list[bytes]) -> None:
        """Add messages, or one reply."""
        if type(packets[0]) is Reply:
            self._replies.append((self._arrival + len(self._unranked) + 0.5, packets[0]))
        else:
            self._unranked += packets

    def rank(self, most: int) -> None:
        """Put the oldest messages without a rank into their places, one by one, or all together if that is less work.

        :param most: the number of messages at most.
        """
        waiting, heap, before = self._unranked, self._heap, self._arrival
        key, newest_first = self._key, self.newest_first
        entries = [
            (key(arrival, len(packet), newest_first), arrival)
            for arrival, packet in enumerate(islice(waiting, most), before + 1)
        ]
        for _, arrival in entries:  # not earlier: if the order raises, the next call ranks the same packets again
            self._ranked[arrival] = waiting.popleft()
        self._arrival += len(entries)
        if len(entries) * _HEAP_AT_ONCE > len(heap):
            heap += entries
            heapq.heapify(heap)
        else:
            for entry in entries:
                heapq.heappush(heap, entry)

    def _sort(self, count: int) -> None:
        """Have the next `count` messages, or all, stand sorted at the front of `_first`."""
        first, heap = self._first, self._heap
        if not (count and heap) or (len(first) >= count and not heap[0] < first[count - 1]):
            return
        if not first or not heap[0] < first[-1]:  # nothing has come that goes before these
            while len(first) < count and heap:
                first.append(heapq.heappop(heap))
            return
        merged: list[tuple[Any, int]] = []
        at = 0
        while len(merged) < count and (heap or at < len(first)):
            if at < len(first) and not (heap and heap[0] < first[at]):
                merged.append(first[at])
                at += 1
            else:
                merged.append(heapq.heappop(heap))
        first[:at] = merged

    def take(self, count: int) -> list[bytes]:
        """See `FifoBacklog.take`; call `rank` before."""
        taken = [packet for _, packet in islice(self._replies, count)]
        self._taken = len(taken)
        count -= len(taken)
        self._sort(count)
        taken += [self._ranked[arrival] for _, arrival in islice(self._first, count)]
        return taken

    def ack(self, sent: int) -> None:
        """See `FifoBacklog.ack`."""
        for _ in range(min(sent, self._taken)):
            self._replies.popleft()
        messages = max(0, sent - self._taken)
        for _, arrival in self._first[:messages]:
            del self._ranked[arrival]
        del self._first[:messages]
        self._gone += messages
        if self._gone > len(self._ranked) + _SPARE:
            self._ranked = dict(self._ranked)  # it does not shrink by itself
            self._gone = 0


Backlog = FifoBacklog | StackBacklog | PriorityBacklog | SharedBacklog


def _split(packets: Iterator[bytes]) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Return the messages, and the replies, each with the number of messages before it."""
    waiting = list(packets)
    messages: list[bytes] = []
    replies = []
    start, at = 0, find_type(waiting, Reply, 0)
    while at >= 0:
        messages += waiting[start:at]
        replies.append((len(messages), waiting[at]))
        start, at = at + 1, find_type(waiting, Reply, at + 1)
    return messages + waiting[start:], replies


def new_backlog(packets: Iterator[bytes], order: IQueueOrder, newest_first: bool) -> Backlog:
    """Return a backlog with an order.

    :param packets: its packets, in the order of arrival.
    :param newest_first: see `IQueueOrder.rank`.
    """
    if order.arrival:
        return FifoBacklog(packets)
    if order is _STACK:
        return StackBacklog(packets)
    if order is SHARED:
        return SharedBacklog(packets)
    return PriorityBacklog(packets, order, newest_first)
