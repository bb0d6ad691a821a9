"""Flood control: what becomes of messages that a receiver cannot take at once.

A receiver has one `SendQueue`. Packets for it gather there while a batch is handled, and are
flushed when the batch ends. As long as the socket takes everything nothing else happens. What a
flush leaves behind *is* the blocked state, and only then the receiver's strategies and order count:
the soft strategy decides about a message whose receiver's socket is full, the hard strategy about
one for whose queue is at a limit, the order about which of the waiting messages goes first.

This module does no I/O. A queue acts on the world through its `Receiver`.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy

__all__ = [
    "HARD_STRATEGIES",
    "ORDERS",
    "SOFT_STRATEGIES",
    "Order",
    "QueueLimits",
    "Receiver",
    "Reply",
    "SendQueue",
    "SharedBudget",
    "Strategy",
    "Verdict",
]


class Verdict(enum.Enum):
    """What a strategy says of a message that cannot be sent at once."""

    KEEP = "keep it in the queue, as far as there is room"
    DROP = "drop it for this receiver"
    BLOCK = "keep it in any case, and hold its publisher back"
    CLOSE = "disconnect the receiver"


@implementer(ISoftStrategy, IHardStrategy)
class Strategy:
    """A strategy that always says the same; soft or hard, by its selector."""

    def __init__(self, selector: bytes, always: Verdict) -> None:
        self.selector = selector
        self.always: Verdict | None = always

    def __repr__(self) -> str:
        return f"<Strategy {self.selector.decode()}>"

    def decide(self, queue: SendQueue, packet: bytes) -> Verdict:
        assert self.always is not None
        return self.always


@implementer(IQueueOrder)
class Order:
    """An order given by a sort key, see `sbus.interfaces.IQueueOrder`."""

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


def _largest_first(arrival: int, size: int, newest_first: bool) -> tuple[int, int]:
    return -size, -arrival if newest_first else arrival


SOFT_STRATEGIES = (
    Strategy(b"blocking/soft/queue", Verdict.KEEP),
    Strategy(b"blocking/soft/discard", Verdict.DROP),
    Strategy(b"blocking/soft/block", Verdict.BLOCK),
    Strategy(b"blocking/soft/error", Verdict.CLOSE),
)
"""The strategies of the protocol for a full socket; the first is the default."""

HARD_STRATEGIES = (
    Strategy(b"blocking/hard/discard", Verdict.DROP),
    Strategy(b"blocking/hard/block", Verdict.BLOCK),
    Strategy(b"blocking/hard/error", Verdict.CLOSE),
)
"""The strategies of the protocol for a queue at its limit; the first is the default."""

ORDERS = (
    Order(b"order/queue", lambda arrival, size, newest: arrival, newest_first=False, arrival=True),
    Order(b"order/stack", lambda arrival, size, newest: -arrival, newest_first=True),
    Order(b"order/random", _largest_first, newest_first=None),
)
"""The orders of the protocol; the first is the default."""


class Reply(bytes):
    """An answer of the server's to the receiver itself: no flood control counts, delays or drops it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for one receiver: messages, and bytes in packets."""

    messages: int = 65_536
    bytes: int = 64 << 20


class SharedBudget:
    """The limit of all queues together, in bytes, and each receiver's fair share of it."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit
        self.bytes = 0
        self._waiting: dict[Hashable, int] = {}

    def enter(self, user: Hashable) -> None:
        """A receiver of this user's has a queue now."""
        self._waiting[user] = self._waiting.get(user, 0) + 1

    def leave(self, user: Hashable) -> None:
        """A receiver of this user's has no queue any more."""
        self._waiting[user] -= 1
        if not self._waiting[user]:
            del self._waiting[user]

    def share(self, user: Hashable) -> int:
        """What a receiver of this user's may hold: the limit, by users with a queue, by their receivers with one."""
        return self.limit // (max(len(self._waiting), 1) * max(self._waiting.get(user, 1), 1))


class Receiver(Protocol):
    """What a queue asks of the connection it belongs to, and tells it."""

    def mayBlock(self) -> bool:
        """Whether this receiver may hold back the client that is publishing right now."""

    def block(self, until_empty: bool) -> None:
        """Hold that client back, until the queue is empty or else at its low-water mark."""

    def moved(self, room: bool, empty: bool) -> None:
        """Packets have left a queue that had waited; is it below its low-water mark, is it empty?"""

    def congested(self, now: bool) -> None:
        """The queue has begun, or ceased, to wait for the socket."""

    def dropped(self, packets: int, size: int) -> None:
        """So many messages, of so many bytes, were dropped for this receiver."""

    def misbehaved(self, reason: CloseReason) -> None:
        """By its own choice this receiver is to be disconnected."""


class _Arrivals:
    """Waiting packets in order of arrival, replies among them."""

    __slots__ = ("_packets",)

    def __init__(self, packets: Iterator[bytes]) -> None:
        self._packets = deque(packets)

    def __len__(self) -> int:
        return len(self._packets)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._packets)

    def pop_message(self) -> bytes | None:
        for i, packet in enumerate(self._packets):
            if type(packet) is not Reply:
                del self._packets[i]
                return packet
        return None

    def push(self, packets: list[bytes]) -> None:
        self._packets.extend(packets)

    def take(self, count: int) -> list[bytes]:
        return list(islice(self._packets, count))

    def done(self, sent: int) -> None:
        pop = self._packets.popleft
        for _ in range(sent):
            pop()


class _Ranked:
    """Waiting packets in an order given by a sort key; replies first, in the order asked."""

    __slots__ = ("_arrival", "_heap", "_newest_first", "_rank", "_replies", "_taken")

    def __init__(self, packets: Iterator[bytes], order: IQueueOrder, newest_first: bool) -> None:
        self._rank = order.rank
        self._newest_first = newest_first
        self._arrival = 0
        self._heap: list[tuple[Any, int, bytes]] = []
        self._replies: deque[tuple[Any, int, bytes]] = deque()
        self._taken: list[tuple[Any, int, bytes]] = []
        self.push(list(packets))

    def __len__(self) -> int:
        return len(self._heap) + len(self._replies)

    def __iter__(self) -> Iterator[bytes]:
        entries = sorted([*self._replies, *self._heap], key=lambda entry: entry[1])
        return (packet for _, _, packet in entries)

    def pop_message(self) -> bytes | None:
        return heapq.heappop(self._heap)[2] if self._heap else None

    def push(self, packets: list[bytes]) -> None:
        for packet in packets:
            self._arrival += 1
            if type(packet) is Reply:
                self._replies.append((None, self._arrival, packet))
            else:
                rank = self._rank(self._arrival, len(packet), self._newest_first)
                heapq.heappush(self._heap, (rank, self._arrival, packet))

    def take(self, count: int) -> list[bytes]:
        replies, heap = self._replies, self._heap
        self._taken = [
            replies.popleft() if replies else heapq.heappop(heap) for _ in range(min(count, len(replies) + len(heap)))
        ]
        return [packet for _, _, packet in self._taken]

    def done(self, sent: int) -> None:
        for entry in reversed(self._taken[sent:]):
            if type(entry[2]) is Reply:
                self._replies.appendleft(entry)
            else:
                heapq.heappush(self._heap, entry)
        self._taken = []


@implementer(IPacketQueue)
class SendQueue:
    """The packets on their way to one receiver; an `IPacketQueue` with flood control.

    :ivar pending: packets of the batch in hand, which nobody has tried to send yet; hot loops
        append to it directly while the queue is not `congested`.
    :ivar is_congested: a flush has left something behind; everything new goes through `offer`.
    :ivar messages: how many messages wait (replies and `pending` aside).
    :ivar size: how many bytes these have.
    :ivar replies: how many replies wait.
    :ivar watch: called with the packets that were sent, if somebody wants to know.
    """

    __slots__ = (
        "_backlog",
        "_budget",
        "_hard",
        "_is_arranged",
        "_limits",
        "_newest_first",
        "_order",
        "_receiver",
        "_refused",
        "_reply_pending",
        "_soft",
        "_user",
        "is_congested",
        "messages",
        "pending",
        "replies",
        "size",
        "watch",
    )

    def __init__(self, receiver: Receiver, limits: QueueLimits, budget: SharedBudget, user: Hashable = None) -> None:
        self.pending: list[bytes] = []
        self.is_congested = False
        self.messages = 0
        self.size = 0
        self.replies = 0
        self._receiver = receiver
        self._limits = limits
        self._budget = budget
        self._user = user
        self._backlog: _Arrivals | _Ranked | None = None
        self._soft: ISoftStrategy = SOFT_STRATEGIES[0]
        self._hard: IHardStrategy = HARD_STRATEGIES[0]
        self._order: IQueueOrder = ORDERS[0]
        self._newest_first = False
        self._is_arranged = True
        self._reply_pending = False
        self._refused: list[bytes] = []
        self.watch: Callable[[list[bytes]], None] | None = None

    def __len__(self) -> int:
        return len(self.pending) + (len(self._backlog) if self._backlog is not None else 0)

    @property
    def may_hold_back(self) -> bool:
        """Whether the strategies in force can hold a publisher back."""
        return self._soft.always in (Verdict.BLOCK, None) or self._hard.always in (Verdict.BLOCK, None)

    def choose(self, *, soft: ISoftStrategy | None = None, hard: IHardStrategy | None = None) -> None:
        """Use other strategies from now on; what waits stays."""
        self._soft = soft or self._soft
        self._hard = hard or self._hard

    def arrange(self, order: IQueueOrder) -> None:
        """Use another order from now on, for what waits too.

        What waits is arranged when the next packet is wanted: who only asks, and takes nothing,
        must not keep the server busy with it.
        """
        if order is self._order:
            return
        if order.newestFirst is not None:
            self._newest_first = order.newestFirst
        self._order = order
        self._is_arranged = False

    def _ordered(self, backlog: _Arrivals | _Ranked) -> _Arrivals | _Ranked:
        if not self._is_arranged:
            self._is_arranged = True
            backlog = self._backlog = self._arranged(iter(backlog))
        return backlog

    def _arranged(self, packets: Iterator[bytes]) -> _Arrivals | _Ranked:
        if self._order.arrival:
            return _Arrivals(packets)
        return _Ranked(packets, self._order, self._newest_first)

    def write(self, packet: bytes) -> None:
        """Send a reply: it is kept whatever happens, and counted apart."""
        reply = Reply(packet)
        if self._backlog is None:
            self.pending.append(reply)
            self._reply_pending = True
        else:
            self.replies += 1
            self._backlog.push([reply])

    def offer(self, packets: list[bytes]) -> None:
        """Messages have come for a receiver that is congested: keep what the strategies let in."""
        backlog = self._backlog
        assert backlog is not None, "only a congested queue is offered messages"
        if self._soft.always is Verdict.KEEP and not self._reply_pending:
            size = sum(map(len, packets))
            if not self._lacks_room(len(packets), size):
                backlog.push(packets)
                self._count(len(packets), size)
                return
        dropped = dropped_size = 0
        for packet in packets:
            if type(packet) is Reply:
                if self._backlog is not None:
                    self.replies += 1
                    self._backlog.push([packet])
            elif self._backlog is None or not self._admit(packet):
                dropped += 1
                dropped_size += len(packet)
        if dropped:
            self._receiver.dropped(dropped, dropped_size)
        if self._backlog is not None and not self._backlog:
            self._relax()  # nothing was kept, and a strategy has dropped what waited before
            self._receiver.moved(True, True)

    def drop_next(self) -> bool:
        """For strategies: drop the message that would be sent next, to make room. Whether there was one."""
        packet = self._ordered(self._backlog).pop_message() if self._backlog is not None else None
        if packet is None:
            return False
        self._count(-1, -len(packet))
        self._receiver.dropped(1, len(packet))
        return True

    def _admit(self, packet: bytes) -> bool:
        """Ask the strategies about one message; whether it was kept (or nobody is left to keep it for)."""
        receiver, size = self._receiver, len(packet)
        soft = self._soft.always or self._soft.decide(self, packet)
        may_block = soft is Verdict.BLOCK and receiver.mayBlock()
        if soft is Verdict.DROP:
            return False
        if soft is Verdict.CLOSE:
            return self._close(CloseReason.SOCKET_FULL)
        hold = may_block
        if not may_block and self._lacks_room(1, size):
            if soft is Verdict.BLOCK:
                return False  # toward a publisher that it may not hold back
            hard = self._hard.always or self._hard.decide(self, packet)
            if hard is Verdict.CLOSE:
                return self._close(CloseReason.QUEUE_FULL)
            hold = hard is Verdict.BLOCK and receiver.mayBlock()
            if hard is not Verdict.KEEP and not hold:
                return False
        assert self._backlog is not None
        self._backlog.push([packet])
        self._count(1, size)
        if hold:
            receiver.block(may_block)
        return True

    def _lacks_room(self, messages: int, size: int) -> bool:
        limits, budget = self._limits, self._budget
        return (
            self.messages + messages > limits.messages
            or self.size + size > limits.bytes
            or (budget.bytes + size > budget.limit and self.size + size > budget.share(self._user))
        )

    def _count(self, messages: int, size: int) -> None:
        self.messages += messages
        self.size += size
        self._budget.bytes += size

    def _close(self, reason: CloseReason) -> bool:
        self._receiver.misbehaved(reason)
        self.abandon()
        return False

    def take(self, count: int) -> list[bytes]:
        """The next packets to send, at most `count`; call `done` before anything else."""
        if self._backlog is not None:
            return self._ordered(self._backlog).take(count)
        taken = self.pending
        if len(taken) <= count:
            self.pending = []
            return taken
        self.pending = taken[count:]
        return taken[:count]

    def done(self, taken: list[bytes], sent: int) -> None:
        """Of what was taken so many were sent. What a first flush leaves is offered to flood control."""
        if self.watch is not None and sent:
            refused = set(map(id, self._refused))
            packets = [p for p in taken[:sent] if id(p) not in refused] if refused else taken[:sent]
            if packets:
                self.watch(packets)
        if self._refused:
            self._refused = []
        if self._backlog is not None:
            self._backlog.done(sent)
            if sent:
                self._sent(taken[:sent] if sent < len(taken) else taken)
            return
        if sent == len(taken):
            if not self.pending:
                self._reply_pending = False
            return
        left = taken[sent:] + self.pending
        self.pending = []
        self._backlog = self._arranged(iter(()))
        self._is_arranged = True
        self.is_congested = True
        self._budget.enter(self._user)
        self._receiver.congested(True)
        self.offer(left)
        self._reply_pending = False

    def _sent(self, packets: list[bytes]) -> None:
        messages = len(packets)
        size = sum(map(len, packets))
        if self.replies:
            replies = [p for p in packets if type(p) is Reply]
            self.replies -= len(replies)
            messages -= len(replies)
            size -= sum(map(len, replies))
        self._count(-messages, -size)
        empty = not self._backlog
        room = self.messages <= self._limits.messages // 4 and self.size <= self._limits.bytes // 4
        if empty:
            self._relax()
        self._receiver.moved(room, empty)

    def _relax(self) -> None:
        self._backlog = None
        self.is_congested = False
        self._budget.leave(self._user)
        self._receiver.congested(False)

    def refused(self, packet: bytes) -> bool:
        """A packet of what was taken that the socket will never take: drop it, as its receiver is not to blame."""
        self._refused.append(packet)
        if type(packet) is not Reply:
            self._receiver.dropped(1, len(packet))
        return True

    def abandon(self, taken: Sequence[bytes] = ()) -> None:
        """Nobody will get what waits, nor what was taken and is not `done`: drop and count it."""
        messages = self.messages
        size = self.size
        for packet in (*taken, *self.pending) if self._backlog is None else ():
            if type(packet) is not Reply:
                messages += 1
                size += len(packet)
        for packet in self._refused:  # of what was taken; counted already
            if type(packet) is not Reply:
                messages -= 1
                size -= len(packet)
        self.pending = []
        self._refused = []
        self._reply_pending = False
        if self._backlog is not None:
            self._count(-self.messages, -self.size)
            self.replies = 0
            self._relax()
        if messages:
            self._receiver.dropped(messages, size)
