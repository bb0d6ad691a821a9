"""The queue of packets on their way to one receiver; flood control happens here.

.. rubric:: Theory of operation

Packets gather in a list, `pending`, which the transport flushes. *The remainder of a flush is the congestion*: it goes
through flood control into a backlog with an order, counts and limits, and so does every later message until the backlog
is empty. No other flag could go stale:

=============  ==========================================  =======================================================
state          what comes in                               how it ends
=============  ==========================================  =======================================================
``OPEN``       `pending`, or past the queue                an ``ack`` leaves something: ``CONGESTED``
``CONGESTED``  `SendQueue.admit` decides                   the backlog is empty: ``OPEN``
``HELD``       the same; a snapshot is in front, or the    `SendQueue.release`: ``OPEN`` or ``CONGESTED``
               end is near, and nothing leaves
``DEAF``       replies alone; waiting packets are sent     never
=============  ==========================================  =======================================================

The transport calls `take`, sends, and calls `ack`; if that leaves something of an open queue, the server calls `settle`
at once: it knows whose messages they are. `admit` and `settle` return an `Outcome`, which the caller acts upon,
or None. They call only strategies (and `on_drained`, if one has emptied the queue), so a caller's loop never finds the
receivers changed.

Whole runs are kept or lost in one step where the strategies allow it. `SendQueue.admit_each` decides one by one where a
limit would end the connection or block a publisher, and where it has to ask a plugged-in strategy.

Invariants: a message was delivered, is counted as dropped or as conflated, or is in the queue, and never two of these.
A reply is never dropped, delayed by a strategy, or counted as a message. An outcome with a block leaves a message in
the queue, so that a later `on_drained` ends the blocking.

`sbus.flood.receipts` notes each drop at its place; `sbus.flood.latest` finds the keys that wait under
``blocking/soft/latest``; `sbus.flood.outgoing` has the waiting packets, and their way out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

from sbus.errors import CloseReason
from sbus.flood.backlogs import SHARED, Backlog, FifoBacklog, PriorityBacklog, Reply
from sbus.flood.budget import QueueLimits, UserShare
from sbus.flood.interfaces import Outcome, Until, Verdict
from sbus.flood.latest import KeyIndex
from sbus.flood.naming import Mark, sign
from sbus.flood.outgoing import OutgoingQueue, QueueOwner, State, held
from sbus.flood.payloads import PayloadMessage
from sbus.flood.run import Run
from sbus.flood.settings import ClientSettings
from sbus.flood.shared import SharedBacklog
from sbus.flood.strategies import SOFT_ERROR
from sbus.protocol.notices import LossReason
from sbus.routing.runs import find_type

__all__ = ["SendQueue"]

_HELD, _DEAF = State.HELD, State.DEAF


class _Decision(NamedTuple):
    """The decision about one message: drop it for this cause, close for this reason, block; else keep it."""

    drop: LossReason | None = None
    close: CloseReason | None = None
    block: Until | None = None


_KEEP = _Decision()
_DROP = {why: _Decision(drop=why) for why in LossReason}
_SOCKET_FULL = _Decision(LossReason.DISCONNECT, close=CloseReason.SOCKET_FULL)
_QUEUE_FULL = _Decision(LossReason.DISCONNECT, close=CloseReason.QUEUE_FULL)
_GONE = _DROP[LossReason.DISCONNECT]
_BLOCK = Outcome(block=Until.EMPTY)
_BLOCK_UNTIL_EMPTY = _Decision(block=Until.EMPTY)
_BLOCK_UNTIL_ROOM = _Decision(block=Until.ROOM)


class _Losses:
    """Consecutive losses of one cause, which are counted together.

    :param count: called with each sum: messages, bytes and the cause.
    """

    __slots__ = ("_count", "_messages", "_size", "_why")

    def __init__(self, count: Callable[[int, int, LossReason], None]) -> None:
        self._count = count
        self._messages = self._size = 0
        self._why = LossReason.DISCARD

    def add(self, messages: int, size: int, why: LossReason) -> None:
        if why is not self._why:
            self.end()
            self._why = why
        self._messages += messages
        self._size += size

    def end(self) -> None:
        """Count the messages that were added, before something that is kept."""
        if self._messages:
            self._count(self._messages, self._size, self._why)
            self._messages = self._size = 0


def _has_payload(run: Run) -> bool:
    return find_type(run.packets, PayloadMessage, 0) >= 0


class SendQueue(OutgoingQueue):
    """The queue of one receiver, with flood control, which decides about each new message."""

    __slots__ = ("_cause", "_conflated")

    def __init__(self, owner: QueueOwner, limits: QueueLimits, user: UserShare) -> None:
        super().__init__(owner, limits, user)
        self._cause = LossReason.DISCARD  # of messages that a strategy drops by itself
        self._conflated = 0  # messages that were replaced since the last outcome

    def configure(self, settings: ClientSettings) -> None:
        """Replace the settings.

        New strategies apply to new messages; a new order also applies to the backlog.
        """
        if self._is_shut():
            return
        backlog = self._backlog
        if isinstance(backlog, PriorityBacklog) and backlog.newest_first is not settings.newest_first:
            self._arranged_by = None  # the same order, chosen after another one, is not the same
        self.settings = settings
        self._read_keys()

    # --- messages ---------------------------------------------------------------------------------

    def write(self, packet: bytes) -> None:
        """See `OutgoingQueue.write`."""
        if not self._is_shut():  # else it would take the place of the dropped replies
            super().write(packet)

    def admit(self, run: Run, may_block: bool) -> Outcome | None:
        """Decide about messages for a receiver that is congested.

        :param may_block: whether the receiver may block the publisher of these messages.
        :returns: None if all were kept and there is nothing to do.
        """
        if self.state is _DEAF:
            return None
        if self.pending:  # an exception of a strategy has left these
            run, self.pending = Run(self.pending + run.packets), []
        backlog = self._backlog
        assert backlog is not None, "only a congested queue is offered messages"
        settings = self.settings
        if settings.payloads and _has_payload(run):
            return self.admit_each(run.packets, may_block)
        soft, hard = settings.soft.always, settings.hard.always
        if soft is Verdict.REPLACE and not settings.order.arrival:
            soft = Verdict.KEEP
        if not may_block:  # without a publisher to block
            if soft is Verdict.BLOCK:
                soft, hard = Verdict.KEEP, Verdict.DROP
            if hard is Verdict.BLOCK:
                hard = Verdict.DROP
        if soft is Verdict.BLOCK:
            self._keep(backlog, run)
            return _BLOCK
        if soft is Verdict.KEEP or soft is Verdict.REPLACE:
            fits = not self._lacks_room(run.count, run.size)
            if fits and soft is Verdict.KEEP:
                self._keep(backlog, run)
                return None
            if fits or hard is Verdict.DROP:
                if soft is Verdict.REPLACE:
                    run = self._replace_newest(run)
                    if not run.count:
                        return self._outcome(None, None)
                    fits = not self._lacks_room(run.count, run.size)
                if fits:
                    self._keep(backlog, run)
                else:
                    self._keep_some(backlog, run)
                return self._outcome(None, None)
        elif soft is Verdict.DROP:
            self._lose(run.count, run.size, LossReason.DISCARD)
            return self._outcome(None, None)
        if soft is Verdict.CLOSE or (soft is Verdict.KEEP and hard is Verdict.CLOSE):
            # The messages for which there is room are lost as well: nothing more is sent.
            self._shut()
            self._lose(run.count, run.size, LossReason.DISCONNECT)
            reason = CloseReason.SOCKET_FULL if soft is Verdict.CLOSE else CloseReason.QUEUE_FULL
            return self._outcome(reason, None)
        return self.admit_each(run.packets, may_block)

    def keeps(self, run: Run) -> bool:
        """Return whether `admit` would keep a run, and keep it together."""
        return not self.pending and self._keeps(run)

    def _keeps(self, run: Run) -> bool:
        order = self.settings.order
        return (
            self.settings.soft.always is Verdict.KEEP
            and order is self._arranged_by
            and (order.arrival or order is SHARED)
            and not self._lacks_room(run.count, run.size)
            and not (self.settings.payloads and _has_payload(run))
        )

    def sign_rest(self, last: Mark | None) -> None:
        """Sign the messages that a flush has left: the first, or all if `settle` may not keep them together.

        :param last: as for `sign_pending`.
        """
        left = self.pending
        if not left:
            return
        if find_type(left, Reply, 0) >= 0 or not self._keeps(Run(left)):
            self.sign_pending(last)
        elif type(left[0]) is bytes and last is not None:
            left[0] = sign(left[0], last)

    def settle(self, may_block: bool) -> Outcome | None:
        """Decide about the packets that a first flush has left; see `admit`."""
        left, self.pending = self.pending, []
        if self.state is _DEAF or any(type(packet) is Reply for packet in left):
            return self.admit_each(left, may_block)
        return self.admit(Run(left), may_block)

    def lose(self, messages: int, size: int, why: LossReason) -> Outcome | None:
        """Drop messages that the server had no room for; they come after everything that waits here."""
        if self.state is _DEAF:
            return None
        self._lose(messages, size, why)
        return self._outcome(None, None)

    def lose_run(self, run: Run, why: LossReason) -> Outcome | None:
        """Drop messages: their user has no room left in a shared queue, or they are too large.

        The receipt of a link names their keys.
        """
        outcome = self.lose(run.count, run.size, why)
        self._name_lost(run.packets)
        return outcome

    def miss(self, messages: int, size: int) -> None:
        """Note messages lost on their way to this bus, for a receipt; this bus does not count them as drops."""
        if self.settings.receipts and self.state is not _DEAF:
            losses = dict(self._losses)
            self._lose(messages, size, LossReason.SHARE)
            self._losses = losses

    def has_room(self, messages: int, size: int, copies: int) -> bool:
        """Return whether the queue, once it is congested, surely keeps these messages and blocks no publisher.

        :param messages: the number of messages.
        :param size: their bytes.
        :param copies: the bytes of their copies for all receivers, which count toward the limit of all queues.
        """
        limits, budget = self._limits, self._user.budget
        soft = self.settings.soft.always
        return (
            soft in (Verdict.KEEP, Verdict.REPLACE)
            and self.messages + messages <= limits.messages
            and self.size + size <= limits.bytes
            and budget.bytes + copies <= budget.unreserved
            and self._user.has_memory(size + messages * self.price)
        )

    @property
    def is_shared(self) -> bool:
        """Whether users share the queue, as they do a link's."""
        return self.settings.order is SHARED

    def has_share(self, user: Hashable, run: Run) -> bool:
        """Return whether a publisher's user may add messages; always true if users do not share the queue."""
        backlog, limits = self._backlog, self._limits
        if not isinstance(backlog, SharedBacklog) or self.state is _DEAF:
            return True
        rest = limits.messages - self.messages, limits.bytes - self.size
        return backlog.has_room(user, run.count, run.size, *rest)

    def drop_next(self) -> bool:
        """Drop the message that would be sent next, and return whether there was one.

        For strategies.
        """
        if self._backlog is None:
            return False
        backlog = self._ordered(self._backlog, 1)
        packet = backlog.pop_message()
        if packet is None:
            return False
        self._charge_ranks(backlog)
        self._count(-1, -len(packet))
        self._lose(1, len(packet), self._cause, is_first=True)
        return True

    def _keep(self, backlog: Backlog, run: Run) -> None:
        backlog.push(run.packets)
        self._count(run.count, run.size)

    def _replace_newest(self, run: Run) -> Run:
        """Put the newest message of each key in the place of the one that waits; return those for which none waits."""
        newest_of_each = run.newest
        self._count_conflated(run.count - newest_of_each.count)
        if not self.messages:
            return newest_of_each
        left = self._replace(newest_of_each.packets)
        return newest_of_each if len(left) == newest_of_each.count else Run(left)

    def _keep_some(self, backlog: Backlog, run: Run) -> None:
        """Keep each message for which there is room when its turn comes, and drop the others; not all have room."""
        why = self._lacks_any_room(run)
        if why is not None:
            self._lose(run.count, run.size, why)
            self._name_lost(run.packets)
            return
        losses = _Losses(self._lose)
        lost: list[bytes] = []
        refused = 0  # the size of a packet for which there was no room
        for packet in run.packets:
            size = len(packet)
            if why is None or size < refused:
                cause = self._lacks_room(1, size)
                if cause is None:
                    losses.end()
                    backlog.push([packet])
                    self._count(1, size)
                    continue
                why, refused = cause, size
            losses.add(1, size, why)
            lost.append(packet)
        losses.end()
        self._name_lost(lost)

    def _name_lost(self, packets: list[bytes]) -> None:
        """Note the keys of dropped messages in their receipt, if the receiver is a link."""
        if self.head is not None and isinstance(self._backlog, SharedBacklog):
            self.head.note_keys(packets)

    def admit_each(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """As `admit`, one by one; there may be replies among the packets."""
        close: CloseReason | None = None
        block: Until | None = None
        remaining = iter(packets)
        replaces = self.settings.soft.always is Verdict.REPLACE
        losses = _Losses(self._lose)
        try:
            for packet in remaining:
                if type(packet) is Reply:
                    if self._backlog is not None and close is None:
                        losses.end()
                        self._keep_reply(self._backlog, packet)
                    continue
                if self.state is _DEAF:
                    continue
                kept = packet.held(self._user) if type(packet) is PayloadMessage else packet
                if replaces and kept is not None and not self._replace([kept]):
                    continue
                drop, end, wait = _GONE if close is not None else self._judge(packet, may_block, kept is not None)
                if drop is None:
                    losses.end()
                    assert self._backlog is not None
                    self._backlog.push([held(packet, self._user) if kept is None else kept])
                    self._count(1, len(packet))
                    block = Until.EMPTY if Until.EMPTY in (block, wait) else block or wait
                    continue
                losses.add(1, len(packet), drop)
                if end:
                    close = end
                    self._shut()
        except BaseException:  # of a plugged-in strategy or order: the messages that it has not judged are still here
            self.pending = [packet, *remaining]
            raise
        finally:
            losses.end()
        return self._outcome(close, block)

    # --- the newest of a key ----------------------------------------------------------------------

    def _read_keys(self) -> None:
        # Otherwise, all receivers of the next message would read their keys in one step: 2 ms for each receiver.
        if self.settings.soft.always is Verdict.REPLACE:
            self._replace([])

    def _replace(self, packets: list[bytes]) -> list[bytes]:
        """Put messages in the places of the waiting ones of their keys.

        :returns: those whose keys do not wait, and those that have no room to grow.
        """
        backlog = self._backlog
        if not isinstance(backlog, FifoBacklog) or not self.settings.order.arrival:
            return packets
        keys = self._keys
        if keys is None:
            keys = self._keys = KeyIndex(backlog)
        before = keys.memory
        left, shrunk = keys.replace(packets, self._grow)
        if shrunk:
            self._count(0, -shrunk)
            if left:  # some may find the room to grow that others have made
                left, _ = keys.replace(left, self._grow)
        if keys.memory != before:
            self._charge(keys.memory - before)
        self._count_conflated(len(packets) - len(left))
        return left

    def _grow(self, size: int) -> bool:
        """Count bytes that a waiting message grows by, if there is room for them."""
        if self._lacks_bytes(size):
            return False
        self._count(0, size)
        return True

    def _count_conflated(self, messages: int) -> None:
        self.conflated += messages
        self._conflated += messages

    # --- decisions --------------------------------------------------------------------------------

    def _outcome(self, close: CloseReason | None, block: Until | None) -> Outcome | None:
        """Sum up the messages that came together; relax if nothing is left."""
        if not self.messages and not self.replies:
            block = None
            if self._backlog is not None:  # nothing was kept, and a strategy has dropped the rest
                self._relax()
                self.owner.on_drained(True, True)
        losses = self._take_losses()
        conflated, self._conflated = self._conflated, 0
        if not losses:
            return Outcome(0, 0, close, block, (), conflated) if close or block or conflated else None
        messages = size = 0
        for _, lost, lost_size in losses:
            messages += lost
            size += lost_size
        return Outcome(messages, size, close, block, losses, conflated)

    def _judge(self, packet: bytes, may_block: bool, may_wait: bool) -> _Decision:
        """Ask the strategies about one message.

        :param may_wait: whether its payload may wait, if it has one.
        """
        settings = self.settings
        soft = settings.soft.always
        if soft is None:
            self._cause = LossReason.DISCARD
            soft = settings.soft.decide(self, packet)
        if soft is Verdict.DROP:
            return _DROP[LossReason.DISCARD]
        if soft is Verdict.CLOSE:
            return _SOCKET_FULL
        if soft is Verdict.BLOCK and may_block:
            return _BLOCK_UNTIL_EMPTY
        lack = self._lacks_room(1, len(packet)) if may_wait else LossReason.SHARE
        if lack is None:
            return _KEEP
        if soft is Verdict.BLOCK:
            return _DROP[lack]  # for a publisher that it may not block, it acts as queue with hard/discard
        hard = settings.hard.always
        if hard is None:
            self._cause = lack
            hard = settings.hard.decide(self, packet)
        if hard is Verdict.CLOSE:
            return _QUEUE_FULL
        if hard is Verdict.BLOCK:
            return _BLOCK_UNTIL_ROOM if may_block else _DROP[lack]
        return _KEEP if hard is Verdict.KEEP else _DROP[lack]

    def _lacks_room(self, messages: int, size: int) -> LossReason | None:
        """Return the limit that these messages would exceed, as the cause of a loss."""
        if self.messages + messages > self._limits.messages:
            return LossReason.QUEUE_FULL
        return self._lacks_bytes(size, messages * self.price)

    def _lacks_bytes(self, size: int, price: int = 0) -> LossReason | None:
        budget = self._user.budget
        if self.size + size > self._limits.bytes:
            return LossReason.QUEUE_FULL
        if budget.bytes + size > budget.unreserved and self.size + size > self._user.fair_share(size):
            return LossReason.SHARE
        return None if self._user.has_memory(size + price) else LossReason.SHARE

    def _lacks_any_room(self, run: Run) -> LossReason | None:
        """Return the limit that each of these messages would exceed, as the cause of a loss."""
        if self.messages >= self._limits.messages:
            return LossReason.QUEUE_FULL  # no need to look at all sizes
        return self._lacks_room(1, run.shortest)

    def _shut(self) -> None:
        """Drop everything, and let nothing more leave: the receiver is to be disconnected, by its own choice."""
        self._discard(())
        if self._backlog is None:
            self._congest(_HELD)
        self.state = _HELD
        self.settings = replace(self.settings, soft=SOFT_ERROR)

    def _is_shut(self) -> bool:
        return self.state is _HELD and self.settings.soft is SOFT_ERROR  # a snapshot in front comes with ``queue``
