"""The packets that wait for one receiver, and their way out: the order, the counts, and receipts for losses.

`sbus.flood.send_queue` has the theory, and decides what comes in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol

from zope.interface import implementer

from sbus.flood.backlogs import PRICE, RANKED, REPLY, Backlog, FifoBacklog, Reply, new_backlog
from sbus.flood.budget import QueueLimits, UserShare
from sbus.flood.interfaces import IPacketQueue, IQueueOrder, Loss
from sbus.flood.latest import KeyIndex
from sbus.flood.naming import Mark, sign_each
from sbus.flood.payloads import PayloadMessage
from sbus.flood.receipts import MERGE, Receipt
from sbus.flood.settings import DEFAULT_SETTINGS, ClientSettings
from sbus.protocol import notices
from sbus.protocol.notices import LossReason
from sbus.routing.runs import total_size

__all__ = ["OutgoingQueue", "QueueOwner", "State", "held"]


class State(enum.Enum):
    """The fate of a message that comes for a queue; see the table in `sbus.flood.send_queue`."""

    OPEN = "it is sent"
    CONGESTED = "flood control decides, as something waits"
    HELD = "flood control decides, and nothing leaves: a snapshot is in front"
    DEAF = "it is not for this receiver any more"


# A member looked up in its enum costs ten times a global.
_OPEN, _CONGESTED, _HELD, _DEAF = State.OPEN, State.CONGESTED, State.HELD, State.DEAF

_LOW_WATER = 4
"""The low-water mark is this fraction (one over it) of a queue's limits."""


def held(packet: bytes, user: UserShare) -> bytes:
    """Return a packet as it waits for a receiver of a user, room or not."""
    return packet.held(user, True) or packet if type(packet) is PayloadMessage else packet


class QueueOwner(Protocol):
    """The object that a queue belongs to: the server's side of a connection."""

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        """Packets have left the queue, by the transport's doing.

        :param has_room: the queue is at its low-water mark or below.
        :param is_empty: the queue is empty, after it was congested.
        """

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        """Messages were dropped because they can never be sent."""


@implementer(IPacketQueue)
class OutgoingQueue:
    """The packets on their way to one receiver; an `IPacketQueue`.

    :param owner: the object whose `on_drained` is called.
    :param limits: the limits of this queue.
    :param user: the share of the receiver's user in the limit of all queues.

    :ivar pending: packets of the current batch that were not yet offered to the socket; the server appends to
        it directly while the queue is not congested.
    :ivar state: the state; new messages go through `SendQueue.admit` unless it is open.
    :ivar messages: messages in the backlog (without replies and `pending`).
    :ivar size: the bytes of these messages' packets.
    :ivar replies: replies in the backlog.
    :ivar memory: bytes of memory that the backlog takes, replies included; charged to the user.
    :ivar owner: the object whose callbacks are called.
    :ivar settings: the receiver's choices; change them with `SendQueue.configure`.
    :ivar lost: messages that were dropped since the connection began.
    :ivar conflated: messages that newer ones of their keys have replaced.
    :ivar price: bytes of memory that a packet takes in the backlog beyond its own size; it changes only while there is
        no backlog.
    :ivar head: the receipt in front of everything else, if there is one: no message may go past the queue then.
    :ivar on_sent: called with the packets that were sent, if it is not None.
    """

    __slots__ = (
        "_arranged_by",
        "_backlog",
        "_keys",
        "_limits",
        "_losses",
        "_lost_before",
        "_oversized",
        "_ranks",
        "_stamped",
        "_substitute",
        "_untold",
        "_user",
        "conflated",
        "head",
        "lost",
        "memory",
        "messages",
        "on_sent",
        "owner",
        "pending",
        "price",
        "replies",
        "settings",
        "size",
        "state",
    )

    def __init__(self, owner: QueueOwner, limits: QueueLimits, user: UserShare) -> None:
        self.pending: list[bytes] = []
        self.state = _OPEN
        self.messages = 0
        self.size = 0
        self.replies = 0
        self.memory = 0
        self.settings: ClientSettings = DEFAULT_SETTINGS
        self.on_sent: Callable[[list[bytes]], None] | None = None
        self.owner = owner
        self._limits = limits
        self._user = user
        self._backlog: Backlog | None = None
        self.price = PRICE
        self._ranks = 0  # bytes of memory of the ranks in the backlog
        self._arranged_by: IQueueOrder | None = self.settings.order  # whatever the order, an empty backlog is arranged
        self._oversized: Sequence[bytes] = ()
        self._losses: dict[LossReason, Loss] = {}
        self.lost = 0
        self._lost_before = 0
        # Receipts
        self.head: Receipt | None = None
        self._untold = 0  # messages in receipts that wait
        self._stamped: list[tuple[int, Receipt]] = []  # among the packets taken, by index
        self._substitute: Receipt | None = None
        # blocking/soft/latest
        self.conflated = 0
        self._keys: KeyIndex | None = None

    def __len__(self) -> int:
        waiting = len(self._backlog) if self._backlog is not None else 0
        return len(self.pending) + waiting + (self.head is not None)

    @property
    def is_congested(self) -> bool:
        """Whether new messages go through `admit`."""
        return self.state is not _OPEN

    def hold(self, before: OutgoingQueue) -> None:
        """Let nothing leave until `release`; this queue is new (`sbus.flood.front`).

        :param before: the queue in front of this one; this one continues its counts of losses.
        """
        self.lost, self.conflated = before.lost, before.conflated
        self._lost_before = before.lost
        before.conflated = 0
        self._congest(_HELD)

    def follow(self, before: OutgoingQueue) -> None:
        """Count the losses in front of this queue since the last call; they come before all of its own.

        :param before: as for `hold`.
        """
        self.lost += before.lost - self._lost_before
        self._lost_before = before.lost

    def release(self, before: OutgoingQueue) -> None:
        """End a `hold`: all packets in front of this queue are gone.

        :param before: as for `hold`; its losses since then become this one's.
        """
        self.follow(before)
        self.conflated += before.conflated
        if before.head is not None:
            self._untold += before.head.messages
            self._put_first(before.head)
            before.head = None
        if self.state is _HELD:
            self.state = _CONGESTED
        if self._backlog is not None and not self.messages and not self.replies:
            self._relax()

    def sign_pending(self, last: Mark | None) -> None:
        """Sign all pending messages, for a receiver that has asked for senders (`sbus.flood.naming`).

        :param last: the mark of the messages before the first signed one.
        """
        self.pending = sign_each(self.pending, last)

    def sign_all(self, last: Mark | None) -> None:
        """Sign all waiting messages: from now on, they may change places or be replaced."""
        if isinstance(self._backlog, FifoBacklog):
            last = self._backlog.sign_all(last)
        self.sign_pending(last)

    def deafen(self) -> None:
        """Take no more messages; waiting packets are sent.

        Messages that come from now on do not count as lost: they are not for this receiver.
        """
        self.sign_pending(None)
        pending, self.pending = self.pending, []
        if self._backlog is None and pending:
            self._congest(_DEAF)
        self.state = _DEAF
        backlog = self._backlog
        if backlog is not None:
            for packet in pending:
                if type(packet) is Reply:
                    self._keep_reply(backlog, packet)
                else:
                    backlog.push([held(packet, self._user)])
                    self._count(1, len(packet))

    def describe(self) -> dict[str, Any]:
        """Return the queue in order of arrival, as plain values.

        ``packets`` has tuples (whether it is a reply, packet). ``receipts`` has tuples (index of the packet that it
        stands before, messages, bytes, cause).
        """
        packets: list[tuple[bool, bytes]] = []
        receipts: list[tuple[int, int, int, str]] = []
        for packet in [*([self.head] if self.head else []), *(self._backlog or ()), *self.pending]:
            if type(packet) is Receipt:
                receipts.append((len(packets), packet.messages, packet.size, packet.why.value))
            else:
                packets.append((type(packet) is Reply, bytes(packet)))
        return {"packets": packets, "receipts": receipts, "lost": self.lost, "conflated": self.conflated}

    def write(self, packet: bytes) -> None:
        """Add a reply: it is kept in any case and counted apart."""
        reply = Reply(packet)
        if self._backlog is None or self.pending:
            self.pending.append(reply)
        else:
            self._keep_reply(self._backlog, reply)

    def _count(self, messages: int, size: int) -> None:
        user = self._user
        self.messages += messages
        self.size += size
        user.queued_bytes += size
        budget = user.budget
        budget.bytes += size
        budget.messages += messages
        memory = size + messages * self.price
        self.memory += memory
        user.charge_memory(memory)

    def _charge(self, memory: int) -> None:
        """Charge memory of the backlog to the user, or give it back."""
        self.memory += memory
        self._user.charge_memory(memory)

    def _keep_reply(self, backlog: Backlog, reply: bytes) -> None:
        self.replies += 1
        backlog.push([reply])
        self._charge(len(reply) + self.price + REPLY)
        if backlog.marks and isinstance(backlog, FifoBacklog):
            backlog[backlog.marks[-1]].replies += 1

    # --- losses -----------------------------------------------------------------------------------

    def _lose(self, messages: int, size: int, why: LossReason, is_first: bool = False) -> None:
        """Count messages that were dropped, and note them for a receipt.

        :param is_first: they stood before everything that waits, and not after it.
        """
        self.lost += messages
        before = self._losses.get(why)
        self._losses[why] = (
            Loss(why, messages, size) if before is None else Loss(why, before[1] + messages, before[2] + size)
        )
        if not self.settings.receipts:
            return
        self._untold += messages
        receipt = self.head
        backlog = self._backlog
        if not is_first and self.messages and isinstance(backlog, FifoBacklog) and self.settings.order.arrival:
            last = backlog.last_mark()
            if last is not None:
                receipt = last[0] if last[1] < MERGE else None
            elif self.messages >= MERGE:
                receipt = None
            if receipt is None:
                backlog.mark(Receipt(messages, size, why))
                return
        if receipt is None:
            self.head = Receipt(messages, size, why)
        else:
            receipt.add(messages, size, why)

    def _take_losses(self) -> tuple[Loss, ...]:
        """Return the losses that were not reported yet."""
        if not self._losses:
            return ()
        losses = tuple(self._losses.values())
        self._losses = {}
        return losses

    def last_receipt(self) -> bytes | None:
        """Drop everything, and return one receipt for it and for all that was not sent; None if there is none.

        Nothing more can be sent after it.
        """
        self.discard_all()
        receipt, self.head, self._untold = self.head, None, 0
        if receipt is None:
            return None
        return notices.lost(receipt.messages, receipt.size, self.lost, LossReason.DISCONNECT)

    def _put_first(self, receipt: Receipt) -> None:
        """Put a receipt in front of everything."""
        if self.head is None:
            self.head = receipt
        else:
            self.head.add(receipt.messages, receipt.size, receipt.why)

    def _collect(self) -> None:
        """Move the receipts in the backlog to its front, as one: the order, or the end, leaves them no place."""
        if isinstance(self._backlog, FifoBacklog) and self._backlog.marks:
            for receipt in self._backlog.remove_marks():
                self._put_first(receipt)
            self._forget_keys()

    def stamp(self, taken: list[bytes]) -> None:
        """Make the packets of the receipts among those taken, with the sums of losses as they are now."""
        total = self.lost - self._untold
        for at, receipt in self._stamped:
            total += receipt.messages
            taken[at] = receipt.packet(total)

    # --- out --------------------------------------------------------------------------------------

    def put_in_order(self, most: int) -> bool:
        """Put some of the messages that wait into the receiver's order; `take` does so with all that are left.

        :param most: the number of messages at most.
        :returns: whether `take` has nothing left to put in order.
        """
        backlog = self._backlog
        if backlog is None or (self._arranged_by is self.settings.order and not backlog.unranked):
            return True
        backlog = self._ordered(backlog, 0, most)
        return self._rankable(backlog, 0) <= 0

    def take(self, count: int) -> list[bytes]:
        """Take the next packets to send, at most `count`; call `ack` before anything else."""
        backlog = self._backlog
        if backlog is not None:
            if self._arranged_by is not self.settings.order or backlog.unranked:
                backlog = self._ordered(backlog, count)
            if self.head is None and not backlog.marks:
                return backlog.take(count)
        elif self.head is None:
            pending = self.pending
            if len(pending) <= count:
                self.pending = []
                return pending
            taken = pending[:count]
            del pending[:count]  # a tenth of the time of a copy of the rest
            return taken
        return self._take_receipts(count)

    def _take_receipts(self, count: int) -> list[bytes]:
        """As `take`, with receipts among the packets."""
        stamped: list[tuple[int, Receipt]] = [] if self.head is None else [(0, self.head)]
        count -= len(stamped)
        backlog = self._backlog
        if backlog is None:
            taken, self.pending = self.pending[:count], self.pending[count:]
        else:
            if isinstance(backlog, FifoBacklog):
                stamped += [(at + len(stamped), receipt) for at, receipt in backlog.marks_within(count)]
            taken = backlog.take(count)
        if self.head is not None:
            taken.insert(0, b"")
        self._stamped = stamped
        self.stamp(taken)
        return taken

    def put_back(self, taken: list[bytes], kept: int) -> None:
        """Take back the packets from ``taken[kept]`` on, as if `take` had been asked for fewer."""
        if self._backlog is None:
            self.pending[:0] = taken[kept:]
            del taken[kept:]

    def ack(self, taken: list[bytes], sent: int) -> None:
        """Report that the first `sent` of the packets `taken` were sent.

        If this leaves packets in a queue that was not congested, `settle` must follow.
        """
        rejected, self._oversized = self._oversized, ()
        if self._stamped:
            gone, left, removed = self._ack_receipts(taken, sent)
        elif sent < len(taken):
            gone, left, removed = taken[:sent], taken[sent:], sent
        else:
            gone, left, removed = taken, [], sent
        if self._backlog is not None:
            self._backlog.ack(removed)
            if removed:
                self._sent(gone)
        elif left:
            self.pending = left + self.pending
            self._congest(_DEAF if self.state is _DEAF else _CONGESTED)
        if self.on_sent is not None and sent:
            # Last: an observer may publish, and the queue must be as if these packets had never been in it.
            ids = set(map(id, rejected))
            if packets := [packet for packet in taken[:sent] if id(packet) not in ids]:
                self.on_sent(packets)

    def _ack_receipts(self, taken: list[bytes], sent: int) -> tuple[list[bytes], list[bytes], int]:
        """Settle the receipts among the packets taken.

        :returns: the other packets that were sent, those that were not, and the packets to remove from the backlog.
        """
        stamped, self._stamped = self._stamped, []
        substitute, self._substitute = self._substitute, None
        has_backlog = self._backlog is not None  # which still has the packets that were not sent
        gone, left, removed = taken[:sent], [] if has_backlog else taken[sent:], sent
        for at, receipt in reversed(stamped):
            if at >= sent:
                if not has_backlog:
                    del left[at - sent]
                if receipt is substitute:  # its message has left the backlog
                    removed += 1
                    self._put_first(receipt)
                continue
            del gone[at]
            self._untold -= receipt.stamped
            rest = receipt.rest()
            if receipt is self.head:
                removed -= 1
                self.head = rest
            elif rest is not None:
                self._put_first(rest)
        return gone, left, removed

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """Drop a packet that the socket can never take; its receipt takes its place.

        The receiver is not to blame, so the connection continues.
        """
        packet = taken[at]
        if type(packet) is Reply:
            self._oversized = (*self._oversized, packet)
            return True
        size = len(packet)
        if self.settings.receipts:
            receipt = self._substitute = Receipt(1, size, LossReason.TOO_LARGE)
            self._stamped = sorted([*self._stamped, (at, receipt)], key=itemgetter(0))
            self._untold += 1
            self.lost += 1
            if self._backlog is not None:
                self._count(-1, -size)
            self.stamp(taken)
        else:
            self._oversized = (*self._oversized, packet)
            self.lost += 1
        self.owner.on_lost((Loss(LossReason.TOO_LARGE, 1, size),))
        return True

    def discard_all(self, taken: Sequence[bytes] = ()) -> None:
        """Drop every packet, including those `taken` but not yet passed to `ack`.

        The messages among them are counted; receipts stay.
        """
        self._discard(taken)
        if losses := self._take_losses():
            self.owner.on_lost(losses)

    def _discard(self, taken: Sequence[bytes]) -> None:
        messages, size = self.messages, self.size
        # Packets that were taken from a backlog are counted there.
        packets = self.pending
        if self._backlog is None:
            stamped = {at for at, _ in self._stamped}
            packets = [packet for at, packet in enumerate(taken) if at not in stamped] + packets
        for packet in packets:
            if type(packet) is not Reply:
                messages += 1
                size += len(packet)
        for packet in self._oversized:  # among the packets taken; counted already
            if type(packet) is not Reply:
                messages -= 1
                size -= len(packet)
        if self._substitute is not None:
            self._put_first(self._substitute)
            self._substitute = None
        self._stamped = []
        self.pending = []
        self._oversized = ()
        if self._backlog is not None:
            self._count(-self.messages, -self.size)
            self.replies = 0
            self._relax()
        if messages:
            self._lose(messages, size, LossReason.DISCONNECT)

    def _sent(self, packets: list[bytes]) -> None:
        """Count packets that have left the backlog, receipts aside."""
        messages = len(packets)
        size = total_size(packets)
        if self.replies:
            replies = [p for p in packets if type(p) is Reply]
            self.replies -= len(replies)
            messages -= len(replies)
            reply_bytes = sum(map(len, replies))
            size -= reply_bytes
            self._charge(-reply_bytes - len(replies) * (self.price + REPLY))
        self._count(-messages, -size)
        if self._ranks and self._backlog is not None:
            self._charge_ranks(self._backlog)
        is_empty = not self.messages and not self.replies
        limits = self._limits
        has_room = self.messages <= limits.messages // _LOW_WATER and self.size <= limits.bytes // _LOW_WATER
        if is_empty:
            self._relax()
        self.owner.on_drained(has_room, is_empty)

    # --- the backlog ------------------------------------------------------------------------------

    def _read_keys(self) -> None:
        """Read the keys of the waiting messages, if newer ones are to replace them."""

    def _forget_keys(self) -> None:
        if self._keys is not None:
            self._charge(-self._keys.memory)
            self._keys = None

    def _relax(self) -> None:
        """End the backlog: nothing is left in it."""
        self._collect()
        self._keys = None
        self._ranks = 0
        self._charge(-self.memory)  # also for replies that were discarded, and for the index of keys
        if self.state is _HELD:
            self._backlog = self._new_backlog(iter(()))
            return
        self._backlog = None
        if self.state is _CONGESTED:
            self.state = _OPEN
        self._user.remove_queue()

    def _congest(self, state: State) -> None:
        """Begin a backlog: new messages go through flood control."""
        self._backlog = self._new_backlog(iter(()))
        self.state = state
        self._user.add_queue()

    def _ordered(self, backlog: Backlog, count: int, most: int | None = None) -> Backlog:
        """Put the backlog into the order that its receiver has chosen.

        :param count: the number of packets that are to be sent.
        :param most: the number of messages that get ranks, at most; None for all that can.
        """
        if self._arranged_by is not self.settings.order:
            self._collect()
            self._forget_keys()
            backlog = self._backlog = self._new_backlog(iter(backlog))
            self._read_keys()
        if backlog.unranked:
            ranked = self._rankable(backlog, count)
            if most is not None:
                ranked = min(ranked, most)
            if ranked > 0:
                backlog.rank(ranked)
        self._charge_ranks(backlog)
        return backlog

    def _rankable(self, backlog: Backlog, count: int) -> int:
        """Return how many messages can get ranks: there is memory for them, or they are among `count` to be sent."""
        user, account = self._user, self._user.budget.memory
        room = min(user.memory_limit - user.memory, account.limit - account.held) // RANKED
        return min(backlog.unranked, max(room, count - backlog.ranked))

    def _charge_ranks(self, backlog: Backlog) -> None:
        """Charge the memory of the ranks of the messages in the backlog."""
        memory = backlog.ranked * RANKED
        self._charge(memory - self._ranks)
        self._ranks = memory

    def _new_backlog(self, packets: Iterator[bytes]) -> Backlog:
        self._arranged_by = self.settings.order
        return new_backlog(packets, self.settings.order, self.settings.newest_first)
