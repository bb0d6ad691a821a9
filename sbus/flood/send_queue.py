"""The queue of packets on their way to one receiver; flood control happens here.

.. rubric:: Theory of operation

There is no separate state "blocked" that could go stale. Packets gather in `pending`, a plain list; the transport
flushes them, and *what a flush leaves is the blocked state*. Only then the queue is *congested*: the leftovers go
through flood control into a backlog with an order, counts and limits, and so does every later message, until the
backlog is empty. Then the queue is a plain list again. While no receiver is slow, flood control costs one look at
the flag `is_congested` for each receiver of a run.

What drives a queue, in this order:

1. The server appends a run of messages to `pending`, or, if the queue is congested, calls `enqueue`.
2. The transport calls `take`, sends, and calls `ack`. If an `ack` leaves something in a queue that was not congested,
   the leftovers stay in `pending` and the queue is congested from now on.
3. The server calls `settle` at once: the leftovers go through flood control like new messages. The server knows whose
   messages they are, the transport does not: that is why `ack` does not decide about them itself.
4. Each later `ack` that takes something from the backlog calls `on_drained` of the queue's owner, the only callback.

`enqueue` and `settle` return an `Outcome`, which the caller acts upon, or None if all messages were kept. Inside them
the queue calls only its strategies (and `on_drained`, if a strategy has emptied the queue). So a caller's loop never
finds the receivers changed in its middle.

.. rubric:: Invariants

* A message was delivered, is counted as dropped, or is in the queue. Never two of these.
* A reply of the server to the receiver is never dropped, delayed by a strategy, or counted as a message.
* On a congested queue `pending` is empty, except between an `ack` and the `settle` that follows it. Behind a late
  queue that may be a while: the messages in `pending` are behind those in the backlog.
* An outcome with a `block` leaves a message in the queue, so that a later `on_drained` ends the blocking.

.. rubric:: Costs

Whole runs are kept with one call if the strategies need not be asked about each message and there is room for all. The
work then depends on the number of runs, not of messages: with counts and hand-overs by the batch, a queue that waits
is twice as fast as with one call for each message. A change of the order sorts nothing until the next packet is taken:
a client that only sends control messages cannot keep the server busy with sorting a long backlog.

Low-water mark: a quarter of both limits of the queue, in messages and in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.flood.budget import QueueLimits, UserShare
from sbus.flood.interfaces import IPacketQueue, Outcome, Until, Verdict
from sbus.flood.orders import FifoBacklog, PriorityBacklog, Reply
from sbus.flood.settings import DEFAULT_SETTINGS, ClientSettings
from sbus.routing.runs import total_size

__all__ = ["QueueOwner", "SendQueue"]

_LOW_WATER = 4
"""The low-water mark is this fraction (one over it) of a queue's limits."""

_KEEP = Outcome()
_DROP = Outcome(dropped=1)
_SOCKET_FULL = Outcome(close=CloseReason.SOCKET_FULL)
_QUEUE_FULL = Outcome(close=CloseReason.QUEUE_FULL)
_BLOCK_UNTIL_EMPTY = Outcome(block=Until.EMPTY)
_BLOCK_UNTIL_ROOM = Outcome(block=Until.ROOM)


class QueueOwner(Protocol):
    """The object that a queue belongs to: the server's side of a connection."""

    def on_drained(self, has_room: bool, is_empty: bool, dropped: int, dropped_bytes: int) -> None:
        """Packets have left the queue, by the transport's doing.

        :param has_room: the queue is at its low-water mark or below.
        :param is_empty: the queue is empty, after it was congested.
        :param dropped: messages that were dropped, because they can never be sent.
        :param dropped_bytes: the bytes of these.
        """


@implementer(IPacketQueue)
class SendQueue:
    """The packets on their way to one receiver; an `IPacketQueue` with flood control.

    :param owner: the object whose `on_drained` is called.
    :param limits: the limits of this queue.
    :param user: the share of the receiver's user in the limit of all queues.

    :ivar pending: packets of the current batch that were not yet offered to the socket; the server appends to
        it directly while the queue is not congested.
    :ivar is_congested: whether a flush has left something; new messages go through `enqueue` then.
    :ivar is_late: whether messages in `pending` wait until the receiver's user has a turn (`sbus.server.late`).
    :ivar late_bytes: the bytes of these messages.
    :ivar copies: the balance of copies of the receiver's user.
    :ivar can_block: whether the strategies can block a publisher; False once the receiver is to be closed.
    :ivar messages: messages in the backlog (without replies and `pending`).
    :ivar size: the bytes of these messages' packets.
    :ivar replies: replies in the backlog.
    :ivar memory: bytes of memory that the backlog takes, replies included; charged to the user.
    :ivar settings: the receiver's choices; change them with `configure`.
    :ivar watch: called with the packets that were sent, if it is not None.
    """

    __slots__ = (
        "_backlog",
        "_dropped",
        "_dropped_bytes",
        "_is_arranged",
        "_limits",
        "_oversized",
        "_owner",
        "_price",
        "_reply_pending",
        "_user",
        "can_block",
        "copies",
        "is_congested",
        "is_late",
        "late_bytes",
        "memory",
        "messages",
        "pending",
        "replies",
        "settings",
        "size",
        "watch",
    )

    def __init__(self, owner: QueueOwner, limits: QueueLimits, user: UserShare) -> None:
        self.pending: list[bytes] = []
        self.is_congested = False
        self.is_late = False
        self.late_bytes = 0
        self.can_block = False
        self.messages = 0
        self.size = 0
        self.replies = 0
        self.memory = 0
        self.settings: ClientSettings = DEFAULT_SETTINGS
        self.watch: Callable[[list[bytes]], None] | None = None
        self._owner = owner
        self._limits = limits
        self._user = user
        self.copies = user.copies
        self._backlog: FifoBacklog | PriorityBacklog | None = None
        self._price = 0  # of a packet in the backlog, beside its bytes
        self._is_arranged = True
        self._reply_pending = False
        self._oversized: Sequence[bytes] = ()
        self._dropped = 0
        self._dropped_bytes = 0

    def __len__(self) -> int:
        return len(self.pending) + (len(self._backlog) if self._backlog is not None else 0)

    def configure(self, settings: ClientSettings) -> None:
        """Replace the settings.

        New strategies apply to new messages; a new order also applies to the backlog.
        """
        if settings.order is not self.settings.order:
            self._is_arranged = False
        self.settings = settings
        self.can_block = settings.can_block()

    def snapshot(self) -> dict[str, list[tuple[bool, bytes]]]:
        """Return the queue in order of arrival, as tuples (whether it is a reply, packet)."""
        packets = [*(self._backlog or ()), *self.pending]
        return {"packets": [(type(packet) is Reply, bytes(packet)) for packet in packets]}

    # --- in ----------------------------------------------------------------------------------

    def write(self, packet: bytes) -> None:
        """Add a reply: it is kept in any case and counted apart."""
        reply = Reply(packet)
        if self._backlog is None or self.pending:
            self.pending.append(reply)
            self._reply_pending = True
        else:
            self._keep_reply(self._backlog, reply)

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """Take messages for a congested receiver; keep those that flood control admits.

        :param may_block: whether the receiver may block the publisher of these messages.
        :returns: None if all were kept and there is nothing to do.
        """
        if self.pending:
            packets = self.pending + packets
            self.pending = []
        backlog = self._backlog
        assert backlog is not None, "only a congested queue is offered messages"
        if not self._reply_pending:
            soft, hard, size = self.settings.soft.always, self.settings.hard.always, total_size(packets)
            blocks = may_block and soft is Verdict.BLOCK
            if not may_block:  # without a publisher to block
                if soft is Verdict.BLOCK:
                    soft, hard = Verdict.KEEP, Verdict.DROP
                if hard is Verdict.BLOCK:
                    hard = Verdict.DROP
            if blocks or (soft is Verdict.KEEP and not self._lacks_room(len(packets), size)):
                backlog.push(packets)
                self._count(len(packets), size)
                return _BLOCK_UNTIL_EMPTY if blocks else None
            if soft is Verdict.DROP or (soft is Verdict.KEEP and hard is Verdict.DROP and self._is_full(packets)):
                self._dropped += len(packets)
                self._dropped_bytes += size
                return self._outcome(None, None)
        return self._enqueue_each(packets, may_block)

    def settle(self, may_block: bool) -> Outcome | None:
        """Decide about the packets that a first flush has left; see `enqueue`."""
        left, self.pending = self.pending, []
        outcome = self.enqueue(left, may_block)
        self._reply_pending = False
        return outcome

    def has_room(self, messages: int, size: int, copies: int) -> bool:
        """Return whether the queue surely keeps these messages and blocks no publisher.

        :param messages: the number of messages.
        :param size: their bytes.
        :param copies: the bytes of their copies for all receivers, which count toward the limit of all queues.
        """
        limits, budget = self._limits, self._user.budget
        return (
            self.settings.soft.always is Verdict.KEEP
            and self.messages + messages <= limits.messages
            and self.size + size <= limits.bytes
            and budget.bytes + copies <= budget.unreserved
            and self._user.has_memory(size + messages * self._price)
        )

    def drop_next(self) -> bool:
        """Drop the message that would be sent next, and return whether there was one.

        For strategies.
        """
        packet = self._ordered(self._backlog).pop_message() if self._backlog is not None else None
        if packet is None:
            return False
        self._count(-1, -len(packet))
        self._dropped += 1
        self._dropped_bytes += len(packet)
        return True

    def _enqueue_each(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        close: CloseReason | None = None
        block: Until | None = None
        remaining = iter(packets)
        try:
            for packet in remaining:
                if type(packet) is Reply:
                    if self._backlog is not None:
                        self._keep_reply(self._backlog, packet)
                    continue
                verdict = _DROP if self._backlog is None else self._judge(packet, may_block)
                if verdict is _DROP or verdict.close:
                    self._dropped += 1
                    self._dropped_bytes += len(packet)
                    if verdict.close:
                        close = verdict.close
                        self._discard(())
                else:
                    assert self._backlog is not None
                    self._backlog.push([packet])
                    self._count(1, len(packet))
                    block = Until.EMPTY if Until.EMPTY in (block, verdict.block) else block or verdict.block
        except BaseException:  # of a plugged-in strategy or order: the messages that it has not judged are still here
            self.pending = [packet, *remaining]
            raise
        return self._outcome(close, block)

    def _outcome(self, close: CloseReason | None, block: Until | None) -> Outcome | None:
        """Sum up the messages that came together; relax if nothing is left."""
        if not self._backlog:
            block = None
            if self._backlog is not None:  # nothing was kept, and a strategy has dropped the rest
                self._relax()
                self._owner.on_drained(True, True, 0, 0)
        dropped, size, self._dropped, self._dropped_bytes = self._dropped, self._dropped_bytes, 0, 0
        return Outcome(dropped, size, close, block) if dropped or close or block else None

    def _judge(self, packet: bytes, may_block: bool) -> Outcome:
        """Ask the strategies about one message."""
        settings = self.settings
        soft = settings.soft.always or settings.soft.decide(self, packet)
        if soft is Verdict.DROP:
            return _DROP
        if soft is Verdict.CLOSE:
            return _SOCKET_FULL
        if soft is Verdict.BLOCK and may_block:
            return _BLOCK_UNTIL_EMPTY
        if not self._lacks_room(1, len(packet)):
            return _KEEP
        if soft is Verdict.BLOCK:
            return _DROP  # for a publisher that it may not block, it acts as queue with hard/discard
        hard = settings.hard.always or settings.hard.decide(self, packet)
        if hard is Verdict.CLOSE:
            return _QUEUE_FULL
        if hard is Verdict.BLOCK:
            return _BLOCK_UNTIL_ROOM if may_block else _DROP
        return _KEEP if hard is Verdict.KEEP else _DROP

    def _lacks_room(self, messages: int, size: int) -> bool:
        limits, budget = self._limits, self._user.budget
        return (
            self.messages + messages > limits.messages
            or self.size + size > limits.bytes
            or (budget.bytes + size > budget.unreserved and self.size + size > self._user.fair_share(size))
            or not self._user.has_memory(size + messages * self._price)
        )

    def _is_full(self, packets: list[bytes]) -> bool:
        """Return whether there is room for none of these messages."""
        return self.messages >= self._limits.messages or self._lacks_room(1, min(map(len, packets)))

    def _count(self, messages: int, size: int) -> None:
        user = self._user
        self.messages += messages
        self.size += size
        user.queued_bytes += size
        user.budget.bytes += size
        memory = size + messages * self._price
        self.memory += memory
        user.charge_memory(memory)

    def _charge(self, memory: int) -> None:
        """Charge memory of the backlog to the user, or give it back."""
        self.memory += memory
        self._user.charge_memory(memory)

    def _keep_reply(self, backlog: FifoBacklog | PriorityBacklog, reply: bytes) -> None:
        self.replies += 1
        backlog.push([reply])
        self._charge(len(reply) + self._price)

    # --- out ---------------------------------------------------------------------------------

    def take(self, count: int) -> list[bytes]:
        """Take the next packets to send, at most `count`; call `ack` before anything else."""
        if self._backlog is not None:
            return self._ordered(self._backlog).take(count)
        taken = self.pending
        if len(taken) <= count:
            self.pending = []
            return taken
        self.pending = taken[count:]
        return taken[:count]

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Report that the first `sent` of the packets `taken` were sent.

        If this leaves packets in a queue that was not congested, `settle` must follow.
        """
        rejected, self._oversized = self._oversized, ()
        if self._backlog is not None:
            self._backlog.ack(sent)
            if sent:
                self._sent(taken[:sent] if sent < len(taken) else taken)
        elif sent < len(taken):
            self.pending = taken[sent:] + self.pending
            self._backlog = self._new_backlog(iter(()))
            self._price = self._backlog.PRICE
            self._is_arranged = True
            self.is_congested = True
            self._user.add_queue()
        elif not self.pending:
            self._reply_pending = False
        if self.watch is not None and sent:
            # Last: an observer may publish, and the queue must be as if these packets had never been in it.
            ids = set(map(id, rejected))
            if packets := [packet for packet in taken[:sent] if id(packet) not in ids]:
                self.watch(packets)

    def reject_oversized(self, packet: bytes) -> bool:
        """Drop a packet that the socket can never take.

        The receiver is not to blame, so the connection goes on.
        """
        self._oversized = (*self._oversized, packet)
        if type(packet) is not Reply:
            self._owner.on_drained(False, False, 1, len(packet))
        return True

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """Drop every packet, including those `taken` but not yet passed to `ack`.

        The messages among them are counted.
        """
        self._discard(taken)
        dropped, size, self._dropped, self._dropped_bytes = self._dropped, self._dropped_bytes, 0, 0
        if dropped:
            self._owner.on_drained(False, False, dropped, size)

    def _discard(self, taken: Sequence[bytes]) -> None:
        self._dropped += self.messages
        self._dropped_bytes += self.size
        # What was taken from a backlog is counted there.
        for packet in (*taken, *self.pending) if self._backlog is None else self.pending:
            if type(packet) is not Reply:
                self._dropped += 1
                self._dropped_bytes += len(packet)
        for packet in self._oversized:  # among the packets taken; counted already
            if type(packet) is not Reply:
                self._dropped -= 1
                self._dropped_bytes -= len(packet)
        self.pending = []
        self._oversized = ()
        self._reply_pending = False
        if self._backlog is not None:
            self._count(-self.messages, -self.size)
            self.replies = 0
            self._relax()

    def _sent(self, packets: list[bytes]) -> None:
        messages = len(packets)
        size = total_size(packets)
        if self.replies:
            replies = [p for p in packets if type(p) is Reply]
            self.replies -= len(replies)
            messages -= len(replies)
            reply_bytes = sum(map(len, replies))
            size -= reply_bytes
            self._charge(-reply_bytes - len(replies) * self._price)
        self._count(-messages, -size)
        is_empty = not self._backlog
        limits = self._limits
        has_room = self.messages <= limits.messages // _LOW_WATER and self.size <= limits.bytes // _LOW_WATER
        if is_empty:
            self._relax()
        self._owner.on_drained(has_room, is_empty, 0, 0)

    def _relax(self) -> None:
        self._charge(-self.memory)  # also for replies that were discarded
        self._backlog = None
        self._price = 0
        self.is_congested = False
        self._user.remove_queue()

    def _ordered(self, backlog: FifoBacklog | PriorityBacklog) -> FifoBacklog | PriorityBacklog:
        if not self._is_arranged:
            self._is_arranged = True
            backlog = self._backlog = self._new_backlog(iter(backlog))
            self._charge((backlog.PRICE - self._price) * len(backlog))
            self._price = backlog.PRICE
        return backlog

    def _new_backlog(self, packets: Iterator[bytes]) -> FifoBacklog | PriorityBacklog:
        settings = self.settings
        if settings.order.arrival:
            return FifoBacklog(packets)
        return PriorityBacklog(packets, settings.order, settings.newest_first)
