"""The queue of packets on their way to one receiver, in which flood control happens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.flood.budget import QueueLimits, SharedBudget
from sbus.flood.interfaces import IHardStrategy, IPacketQueue, IQueueOrder, ISoftStrategy, Verdict
from sbus.flood.orders import ORDERS, FifoBacklog, PriorityBacklog, Reply
from sbus.flood.strategies import HARD_STRATEGIES, SOFT_STRATEGIES
from sbus.routing.runs import total_size

__all__ = ["Receiver", "SendQueue"]


class Receiver(Protocol):
    """What a queue asks of the connection it belongs to, and tells it."""

    def mayBlock(self) -> bool:
        """Whether this receiver may hold back the client that is publishing right now."""

    def block(self, until_empty: bool) -> None:
        """Hold that client back, until the queue is empty or else at its low-water mark."""

    def on_drained(self, room: bool, empty: bool) -> None:
        """Packets have left a queue that had waited; is it below its low-water mark, is it empty?"""

    def congested(self, now: bool) -> None:
        """The queue has begun, or ceased, to wait for the socket."""

    def dropped(self, packets: int, size: int) -> None:
        """So many messages, of so many bytes, were dropped for this receiver."""

    def on_overflow(self, reason: CloseReason) -> None:
        """By its own choice this receiver is to be disconnected."""


@implementer(IPacketQueue)
class SendQueue:
    """The packets on their way to one receiver; an `IPacketQueue` with flood control.

    :ivar pending: packets of the batch in hand, which nobody has tried to send yet; hot loops
        append to it directly while the queue is not `congested`.
    :ivar is_congested: a flush has left something behind; everything new goes through `enqueue`.
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
        "_oversized",
        "_receiver",
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
        self._backlog: FifoBacklog | PriorityBacklog | None = None
        self._soft: ISoftStrategy = SOFT_STRATEGIES[0]
        self._hard: IHardStrategy = HARD_STRATEGIES[0]
        self._order: IQueueOrder = ORDERS[0]
        self._newest_first = False
        self._is_arranged = True
        self._reply_pending = False
        self._oversized: list[bytes] = []
        self.watch: Callable[[list[bytes]], None] | None = None

    def __len__(self) -> int:
        return len(self.pending) + (len(self._backlog) if self._backlog is not None else 0)

    @property
    def can_block(self) -> bool:
        """Whether the strategies in force can hold a publisher back."""
        return self._soft.always in (Verdict.BLOCK, None) or self._hard.always in (Verdict.BLOCK, None)

    def set_strategies(self, *, soft: ISoftStrategy | None = None, hard: IHardStrategy | None = None) -> None:
        """Use other strategies from now on; what waits stays."""
        self._soft = soft or self._soft
        self._hard = hard or self._hard

    def set_order(self, order: IQueueOrder) -> None:
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

    def _ordered(self, backlog: FifoBacklog | PriorityBacklog) -> FifoBacklog | PriorityBacklog:
        if not self._is_arranged:
            self._is_arranged = True
            backlog = self._backlog = self._arranged(iter(backlog))
        return backlog

    def _arranged(self, packets: Iterator[bytes]) -> FifoBacklog | PriorityBacklog:
        if self._order.arrival:
            return FifoBacklog(packets)
        return PriorityBacklog(packets, self._order, self._newest_first)

    def write(self, packet: bytes) -> None:
        """Send a reply: it is kept whatever happens, and counted apart."""
        reply = Reply(packet)
        if self._backlog is None:
            self.pending.append(reply)
            self._reply_pending = True
        else:
            self.replies += 1
            self._backlog.push([reply])

    def enqueue(self, packets: list[bytes]) -> None:
        """Messages have come for a receiver that is congested: keep what the strategies let in."""
        backlog = self._backlog
        assert backlog is not None, "only a congested queue is offered messages"
        if not self._reply_pending:
            soft, size = self._soft.always, total_size(packets)
            holds = soft is Verdict.BLOCK and self._receiver.mayBlock()
            if holds or (soft is Verdict.KEEP and not self._lacks_room(len(packets), size)):
                backlog.push(packets)
                self._count(len(packets), size)
                if holds:
                    self._receiver.block(True)
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
            self._receiver.on_drained(True, True)

    def has_room(self, messages: int, size: int, copies: int) -> bool:
        """Whether it is certain that so many messages will be kept without anybody being held back for it.

        :param size: their bytes.
        :param copies: the bytes of all their copies, as other receivers' count toward the limit of all too.
        """
        limits, budget = self._limits, self._budget
        return (
            self._soft.always is Verdict.KEEP
            and self.messages + messages <= limits.messages
            and self.size + size <= limits.bytes
            and budget.bytes + copies <= budget.limit
        )

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
        self._receiver.on_overflow(reason)
        self.discard_all()
        return False

    def take(self, count: int) -> list[bytes]:
        """The next packets to send, at most `count`; call `ack` before anything else."""
        if self._backlog is not None:
            return self._ordered(self._backlog).take(count)
        taken = self.pending
        if len(taken) <= count:
            self.pending = []
            return taken
        self.pending = taken[count:]
        return taken[:count]

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Of what was taken so many were sent. What a first flush leaves is offered to flood control."""
        if self.watch is not None and sent:
            refused = set(map(id, self._oversized))
            packets = [p for p in taken[:sent] if id(p) not in refused] if refused else taken[:sent]
            if packets:
                self.watch(packets)
        if self._oversized:
            self._oversized = []
        if self._backlog is not None:
            self._backlog.ack(sent)
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
        self.enqueue(left)
        self._reply_pending = False

    def _sent(self, packets: list[bytes]) -> None:
        messages = len(packets)
        size = total_size(packets)
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
        self._receiver.on_drained(room, empty)

    def _relax(self) -> None:
        self._backlog = None
        self.is_congested = False
        self._budget.leave(self._user)
        self._receiver.congested(False)

    def reject_oversized(self, packet: bytes) -> bool:
        """A packet of what was taken that the socket will never take: drop it, as its receiver is not to blame."""
        self._oversized.append(packet)
        if type(packet) is not Reply:
            self._receiver.dropped(1, len(packet))
        return True

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """Nobody will get what waits, nor what was taken and is not `ack`: drop and count it."""
        messages = self.messages
        size = self.size
        for packet in (*taken, *self.pending) if self._backlog is None else ():
            if type(packet) is not Reply:
                messages += 1
                size += len(packet)
        for packet in self._oversized:  # of what was taken; counted already
            if type(packet) is not Reply:
                messages -= 1
                size -= len(packet)
        self.pending = []
        self._oversized = []
        self._reply_pending = False
        if self._backlog is not None:
            self._count(-self.messages, -self.size)
            self.replies = 0
            self._relax()
        if messages:
            self._receiver.dropped(messages, size)
