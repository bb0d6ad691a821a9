"""Delivery: messages into the receivers' queues, and from there to the sockets.

.. rubric:: Theory of operation

A batch that was read from one publisher is handled run by run. A run is a list of consecutive messages with the same
receivers; `Delivery.deliver` adds the list to the queue of each receiver that has one. When the batch ends,
`Delivery.flush` sends each touched receiver's queue with one system call. So a receiver in the middle of a batch gets
nothing yet; the wait is bounded by the time to handle 64 packets.

If a whole batch is one run, there is nothing to gather: it goes *at once* to the sockets of receivers with empty
queues, and only what a socket did not accept goes through its queue. Sockets without bundles and frames get it in one
step, `send_to_each`. (Python code between two system calls finds the CPU's caches cold: it took 5 to 9 µs for each
receiver. The decisions about 64 receivers in a row take less than 1 µs each.) Where several receivers take bundles,
the bundle is made once and each gets the same bytes. (Observers of deliveries are called by the queue; if there is
one, everything goes through the queues.) A run for one congested receiver goes straight to its backlog.

.. rubric:: Whose messages they are

The publisher is an argument of `deliver`; None stands for the program around the bus, which no receiver can block. The
messages between two flushes are of one publisher: if another one delivers before the flush, the first one's messages
are flushed in its name first. An observer that publishes in the middle of a client's batch makes that happen.
What a first flush leaves is settled with the publisher of its batch; see `sbus.flood.send_queue`.

.. rubric:: Where a batch stops

A receiver that can block may do so at any message of a run, and handling must stop right there, so that a queue
overruns its limit by one message. If each such receiver certainly has room for the whole run, as is nearly
always so, the run goes as one. Otherwise it is halved until a half has room or is a single message. Asking about each
message instead made every receiver with ``blocking/hard/block`` cost its publishers one pass for each message.

.. rubric:: What the copies cost

Each copy is deducted from the balance of copies of the receiver's user. If that is spent, the message waits
(`sbus.server.bus.late`). While no other user sends, the balance is topped up instead, at most once in a run.
Cohorts get a run before all other receivers, in one step each (`sbus.server.bus.cohort_delivery`). The publisher pays
for the copies that did not wait: `work` is their price. `_deliver_each` keeps the balance in a local variable, which
costs less than an attribute.

An exception of a plugged-in strategy or order is the trouble of the client that chose it: that client is disconnected.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence, Set
from typing import NamedTuple

from twisted.logger import Logger

from sbus.errors import CloseReason
from sbus.flood import Loss, Outcome, SendQueue, Verdict
from sbus.flood.budget import CopyBalance, MemoryAccount, UserShare
from sbus.flood.digest import Digest
from sbus.protocol.bundles import BundleCache
from sbus.protocol.notices import LossReason
from sbus.routing.runs import total_size
from sbus.seqpacket.interfaces import IPacketTransport
from sbus.server.asks.last_values import LastValues
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.cohort_delivery import CohortDelivery
from sbus.server.bus.late import CATCH_UP_WORK, FLUSHED_AT_ONCE, MANY, WORTH_DECIDING, Late, catch_ups, is_own_user
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver
from sbus.server.core.observers import Events
from sbus.server.core.prices import (
    BUNDLED_COPIES,
    COPIED_KIB,
    COPIES,
    DECIDED,
    FULL_SOCKET,
    POSTPONED,
    REFUSED,
    REPLACED,
    SENDING,
    UNSHARED,
)
from sbus.server.core.turns import CONTENDED_BUDGET, TURN_BUDGET, Turns
from sbus.syscalls.batch import BATCH, send_packets, send_to_each

__all__ = ["Delivery"]

_FLUSHED_PER_LOOK = 64
"""Receivers that are flushed between two looks at the clock."""
_SENDS_FOR = CONTENDED_BUDGET // 5
"""Microseconds for which a decision sends while other users send as well, so that a turn is enough for several."""
_CLOSE = Verdict.CLOSE
_KEEP = Verdict.KEEP
_REPLACE = Verdict.REPLACE


class _Run(NamedTuple):
    """A run on its way to receivers.

    :ivar packets: the messages.
    :ivar publisher: see `Delivery.deliver`.
    :ivar copies: the number of receivers of the run.
    :ivar price: the price of the copies of one receiver.
    :ivar saving: by how much these are cheaper in bundles.
    :ivar packed: the messages as bundles; None for a single message.
    :ivar is_topped_up: the balance of a receiver's user has been topped up for this run.
    """

    packets: list[bytes]
    publisher: Publisher | None
    copies: int
    price: int
    saving: int
    packed: BundleCache | None
    is_topped_up: bool


class Delivery:
    """Delivers messages to their receivers, and acts on what became of them.

    :param credentials: decides whether a receiver may block a publisher.
    :param backpressure: blocks publishers.
    :param turns: the turns of the users.
    :param memory: the account of the memory of all users.
    :param muted: receivers that get nothing any more, although routes contain them. Those with a queue refuse messages
        by themselves (`SendQueue.deafen`).
    :ivar observers: receivers that do not count as subscribed (`sbus.server.bus.unrouted`).
    :ivar touched: the receivers that `flush` has to see.
    :ivar unpaid: the work since the start that no publisher pays for: to have messages wait for late receivers of
        another user, and that user's part of the plans.
    :ivar served: the receivers of the last run that did not have to wait.
    :ivar work: the work to charge to the publisher since it was last set to 0: the copies that were made of its
        messages, its part of the plans, and the decisions about late receivers that it has caused.
    """

    log = Logger(namespace="sbus.bus")

    __slots__ = (
        "_backpressure",
        "_blocking",
        "_catch_ups_left",
        "_cohort_delivery",
        "_cohorts",
        "_count",
        "_counters",
        "_credentials",
        "_events",
        "_flushing",
        "_keeper",
        "_late",
        "_most_at_once",
        "_muted",
        "_publisher",
        "_turns",
        "observers",
        "served",
        "touched",
        "unpaid",
        "work",
    )

    def __init__(
        self,
        counters: Counters,
        events: Events,
        credentials: ICredentials,
        backpressure: Backpressure,
        turns: Turns,
        memory: MemoryAccount,
        muted: Set[Receiver] = frozenset(),
    ) -> None:
        self._counters = counters
        self._count = counters.tally.add
        self._events = events
        self._credentials = credentials
        self._backpressure = backpressure
        self.observers: Set[Receiver] = frozenset()
        self.touched: list[Receiver] = []
        self._publisher: Publisher | None = None
        self._blocking: set[Receiver] = set()
        self._flushing = False
        self._keeper: LastValues | None = None
        self._most_at_once = 0 if events.delivered else FLUSHED_AT_ONCE
        self._turns = turns
        self._muted = muted
        self._late = Late(turns, self._decide, min(memory.user_limit, memory.limit))
        self._cohorts = self._late.cohorts.of
        self._cohort_delivery = CohortDelivery(self._late, credentials)
        self._catch_ups_left: int | None = None
        self.served = self.work = self.unpaid = 0

    def set_keeper(self, keeper: LastValues) -> None:
        """Keep last values: a route that contains the keeper is one of keys that are kept."""
        self._keeper = keeper

    def deliver(
        self,
        packets: list[bytes],
        receivers: tuple[Receiver, ...],
        publisher: Publisher | None,
        at_once: bool = False,
        /,
    ) -> int:
        """Queue a run of messages for their receivers; `flush` sends them.

        :param packets: the messages. Once all of them were dealt with, the caller must not change the list: queues may
            share it.
        :param publisher: the client that published them; None for the program around the bus.
        :param at_once: these packets are all that is to be sent now, so receivers with an empty queue may get them
            past it.
        :returns: the number of packets, from the front, that were dealt with. It is less than all if a receiver has
            blocked the publisher, or if there is more to decide before than one step may take: call again then, once
            the publisher has paid.
        """
        if self.touched and publisher is not self._publisher:
            self.flush()
        late, copies = 0, len(receivers)
        if self._blocking or self._cohorts:
            plan, now, work = self._cohort_delivery.prepare(packets, receivers, publisher)
            self.work += work
            if plan is None:
                self.served = 0
                return 0
            if now < len(packets):
                packets = packets[:now]
            if self._blocking and len(packets) > 1 and not self._has_room(packets, plan.others, publisher):
                # Somewhere in the middle a receiver may block the publisher: find out where.
                half = len(packets) // 2
                done = self.deliver(packets[:half], receivers, publisher)
                if done < half or (publisher is not None and publisher.is_paused):
                    return done
                return done + self.deliver(packets[half:], receivers, publisher)
            late = plan.members
            if late and self.observers and is_unrouted(receivers, self.observers):
                self._counters.unrouted += len(packets)
            work, unpaid = self._cohort_delivery.add(plan, packets, publisher)
            self.work += work
            self.unpaid += unpaid
            receivers = plan.others
        count = len(packets)
        weight = self._count(packets, copies)
        if not copies or (self.observers and not late and self._is_unrouted(receivers)):
            self._counters.unrouted += count
        price = SENDING if count == 1 else SENDING + count // COPIES
        if weight:
            price += weight // COPIED_KIB
            self.work += weight
        if copies == 1 and not late:
            # The general way below does the same in more steps, which are much of the work of a small batch.
            receiver = receivers[0]
            queue = receiver.queue
            if queue is not None and queue.copies.work_left > 0:
                if queue.is_clear:
                    transport = receiver.transport
                    if (
                        at_once
                        and self._most_at_once
                        and not queue.pending
                        and transport is not None
                        and (sock := transport.plain_socket) is not None
                    ):
                        queue.copies.work_left -= price
                        self.work += price
                        self.served = 1
                        try:
                            sent = send_packets(sock, packets)
                        except OSError:
                            sent = 0  # `flush` will get the same error, and handle it
                        if sent < count:
                            self._leave_rest(receiver, packets, sent, publisher)
                        return count
                elif queue.is_congested and not queue.is_late and copies < MANY:
                    self._add(receiver, queue, packets, publisher)
                    self.work += price
                    self.served = 1
                    return count
        saving = 0
        packed: BundleCache | None = None
        if count > 1:
            saving, packed = count // COPIES - count // BUNDLED_COPIES, {}
        others: Sequence[Receiver] = receivers
        is_topped_up = False
        if at_once and copies <= self._most_at_once:
            others, is_topped_up = self._send_at_once(packets, receivers, publisher, price, price - saving, packed)
        if others:
            late += self._deliver_each(others, _Run(packets, publisher, copies, price, saving, packed, is_topped_up))
        self.served = copies - late
        return count

    def _send_at_once(
        self,
        packets: list[bytes],
        receivers: Sequence[Receiver],
        publisher: Publisher | None,
        price: int,
        bundled_price: int,
        packed: BundleCache | None,
    ) -> tuple[list[Receiver], bool]:
        """Send a run past the queues of the receivers that have nothing in the way.

        Those with plain sockets get it in one step. Nothing but the kernel is called meanwhile, so no receiver's state
        changes.

        :returns: the other receivers, and whether a balance was topped up.
        """
        others: list[Receiver] = []
        direct: list[Receiver] = []
        socks: list[socket.socket] = []
        indirect: list[Receiver] = []
        is_topped_up = False
        for receiver in receivers:
            queue, transport = receiver.queue, receiver.transport
            if queue is None or not queue.is_clear or queue.pending or transport is None:
                others.append(receiver)
                continue
            balance = queue.copies
            if balance.work_left <= 0:
                if is_topped_up or not self._turns.top_up(balance):
                    others.append(receiver)
                    continue
                is_topped_up = True
            sock = transport.plain_socket
            if sock is None:
                work = bundled_price if queue.settings.bundles else price
                balance.work_left -= work
                self.work += work
                indirect.append(receiver)
                continue
            balance.work_left -= price
            direct.append(receiver)
            socks.append(sock)
        if socks:
            self.work += price * len(socks)
            for at, sent in send_to_each(socks, packets):
                self._leave_rest(direct[at], packets, sent, publisher)
        if indirect:
            others += self._send_indirectly(packets, indirect, publisher, packed)
        return others, is_topped_up

    def _send_indirectly(
        self,
        packets: list[bytes],
        receivers: list[Receiver],
        publisher: Publisher | None,
        packed: BundleCache | None,
    ) -> list[Receiver]:
        """Have transports send a run past the queues, which were empty.

        A transport between two protocols of this process may call one of them, and that one may publish, or close any
        connection.

        :returns: the receivers that have something in the way now; their copies are paid for twice.
        """
        others = []
        for receiver in receivers:
            queue, transport = receiver.queue, receiver.transport
            if queue is None or not queue.is_clear or queue.pending or transport is None:
                others.append(receiver)
                continue
            sent = transport.try_send(packets, packed)
            if sent < len(packets):
                self._leave_rest(receiver, packets, sent, publisher)
        return others

    def _leave_rest(self, receiver: Receiver, packets: list[bytes], sent: int, publisher: Publisher | None) -> None:
        """Leave to `flush` what a socket has not taken of a run."""
        assert receiver.queue is not None
        self.touch(receiver, publisher)
        receiver.queue.pending += packets[sent:]

    def _deliver_each(self, receivers: Sequence[Receiver], run: _Run) -> int:
        """Deliver a run to receivers one by one: queue it, or have it wait.

        :returns: the number of receivers for which it waits.
        """
        packets, publisher, copies, price, saving, packed, is_topped_up = run
        count, late = len(packets), 0
        waiting = bundled = work_left = 0
        balance: CopyBalance | None = None  # its `work_left` is in the local variable
        user: UserShare | None = None  # the run waits for receivers of this user, as many as `waiting` says
        self._catch_ups_left = catch_ups(copies) if is_topped_up else None
        for receiver in receivers:
            queue = receiver.queue
            if queue is None:
                if balance is not None:
                    balance.work_left, balance = work_left, None
                self._offer(receiver, packets, publisher)
                continue
            if queue.copies is not balance:
                if balance is not None:
                    balance.work_left = work_left
                balance = queue.copies
                work_left = balance.work_left
            if work_left <= 0 or not queue.is_clear:
                if queue.is_late and receiver in self._cohorts:  # it has joined since: an observer has published
                    self._late.set_apart(receiver, queue)
                if queue.is_late and not (queue.can_block and self._may_block(receiver, publisher)):
                    if receiver.user is not user:
                        if user is not None:
                            self._wait(user, waiting, packets, publisher)
                        user, waiting, size = receiver.user, 0, total_size(packets)
                        is_beyond = self._catch_ups_left is not None and self._catch_ups_left <= 0
                        most, left = self._late.room(is_own_user(publisher, user), is_beyond)
                    waits = len(queue.pending) + count
                    if size <= left and waits <= most:
                        queue.pending += packets
                        if waits - count < WORTH_DECIDING <= waits:
                            self._late.hurry(receiver, queue)
                        queue.late_bytes += size
                        left -= size
                        waiting += 1
                        late += 1
                        continue
                if work_left <= 0 or queue.is_late or (copies >= MANY and queue.is_congested):
                    if user is not None:
                        self._wait(user, waiting, packets, publisher)
                        user = None
                    balance.work_left = work_left
                    is_late = self._postpone(receiver, queue, packets, publisher, copies)
                    work_left = balance.work_left
                    if is_late:
                        late += 1
                        continue
                if queue.is_congested:
                    balance.work_left, balance = work_left, None
                    self._add(receiver, queue, packets, publisher)
                    may_block = queue.can_block and self._may_block(receiver, publisher)
                    if copies >= MANY and queue.is_congested and not may_block:
                        self._late.join(receiver, queue)
                    continue
            work_left -= price
            if packed is not None and queue.settings.bundles:
                bundled += 1
                work_left += saving
            if queue.pending:
                queue.pending += packets
            else:
                self.touched.append(receiver)  # not a local list: an observer may have published meanwhile
                self._publisher = publisher
                queue.pending += packets
        if balance is not None:
            balance.work_left = work_left
        if user is not None:
            self._wait(user, waiting, packets, publisher)
        self.work += (len(receivers) - late) * price - bundled * saving
        return late

    def _is_unrouted(self, receivers: tuple[Receiver, ...]) -> bool:
        return receivers[0] in self.observers and is_unrouted(receivers, self.observers)

    def touch(self, receiver: Receiver, publisher: Publisher | None) -> None:
        """Mark a receiver for `flush`: its queue has something of this publisher's batch."""
        self.touched.append(receiver)
        self._publisher = publisher

    def touch_also(self, receiver: Receiver) -> None:
        """Mark a receiver for `flush`: its queue has something that is no message of this batch."""
        self.touched.append(receiver)

    def flush(self) -> None:
        """Send what the batch has brought, with one call for each receiver.

        Then settle what the sockets did not take. Where that takes long, the other receivers become late
        (`sbus.server.bus.late`).

        Messages that are published meanwhile, as by an observer of deliveries, are sent before it returns.
        """
        if self._flushing or not self.touched:
            return
        self._flushing = True
        try:
            while self.touched:
                touched, self.touched = self.touched, []
                if len(touched) > FLUSHED_AT_ONCE:
                    touched = self._flush_later(touched, FLUSHED_AT_ONCE)
                publisher, self._publisher = self._publisher, None
                end = self._turns.cpu() + TURN_BUDGET * 1_000 if len(touched) > _FLUSHED_PER_LOOK else 0
                are_many, done = len(touched) >= MANY, 0
                while done < len(touched):
                    for receiver in touched[done : done + _FLUSHED_PER_LOOK]:
                        queue, transport = receiver.queue, receiver.transport
                        try:
                            if queue is None or transport is None:
                                receiver.flush()
                                continue
                            transport.flush()
                            if queue.pending:
                                lost = queue.lost
                                self._settle(receiver, queue, transport, publisher)
                                if are_many and (queue.is_congested or queue.lost > lost):
                                    self._late.join(receiver, queue)
                        except Exception:
                            self._failed(receiver)
                    done += _FLUSHED_PER_LOOK
                    if done < len(touched) and self._turns.cpu() >= end:
                        touched = self._flush_later(touched, done)
                        end = sys.maxsize  # those that are left cannot wait
        finally:
            self._flushing = False

    def catch_up(self, receiver: Receiver) -> None:
        """Decide about the messages that wait for a late receiver; its user pays."""
        queue = receiver.queue
        if queue is not None and queue.is_late:
            queue.copies.work_left -= self._late.catch_up(receiver, queue)

    def leave_cohort(self, receiver: Receiver) -> None:
        """Take a receiver out of its cohort, if it is in one; it stays late."""
        queue = receiver.queue
        if queue is not None and receiver in self._cohorts:
            self._late.set_apart(receiver, queue)

    def drained(self, receiver: Receiver, has_room: bool, is_empty: bool) -> None:
        """Unblock the publishers that waited for a congested receiver.

        Messages have just left its queue.
        """
        if is_empty:
            self._blocking.discard(receiver)
            queue = receiver.queue
            if queue is not None and queue.is_late:
                self._late.hurry(receiver, queue)
        self._backpressure.drained(receiver, has_room, is_empty)

    def reconsider(self, receiver: Receiver) -> None:
        """Note whether a receiver can block publishers now.

        Its queue or its strategies have changed.
        """
        queue = receiver.queue
        if queue is not None and queue.is_congested and queue.can_block:
            self._blocking.add(receiver)
        else:
            self._blocking.discard(receiver)

    def forget(self, receiver: Receiver) -> None:
        """A receiver takes no more messages: unblock its publishers."""
        self._blocking.discard(receiver)
        self._backpressure.release(receiver)
        if receiver.queue is not None:
            self._late.forget(receiver, receiver.queue)
            self._cohort_delivery.note_gone()

    def has_left(self, receiver: Receiver) -> None:
        """A receiver is in no route any more; only now may another one have its column in a cohort."""
        self.leave_cohort(receiver)
        self._late.cohorts.forget(receiver)

    def dropped(self, receiver: Receiver, losses: tuple[Loss, ...]) -> None:
        """Count messages that were dropped for a receiver, by cause."""
        messages = size = 0
        for why, lost, lost_size in losses:
            self._counters.dropped_by[why] += lost
            messages += lost
            size += lost_size
        receiver.lost += messages
        self._counters.dropped += messages
        self._counters.dropped_bytes += size
        for notify in self._events.dropped:
            notify(receiver, messages, size)

    def _settle(
        self,
        receiver: Receiver,
        queue: SendQueue,
        transport: IPacketTransport,
        publisher: Publisher | None,
        digest: Digest | None = None,
    ) -> None:
        """Decide about what a flush has left.

        :param digest: as for `SendQueue.settle`; the queue is congested then.
        """
        while queue.pending and not queue.is_congested:
            transport.flush()  # the socket takes more than a transport sends in one turn
        if queue.pending or digest is not None:
            queue.copies.work_left -= REFUSED
            may_block = queue.can_block and self._may_block(receiver, publisher)
            before = queue.size
            outcome = queue.settle(may_block, digest)
            if may_block and publisher is not None:
                self._backpressure.kept(publisher, receiver, queue.size - before, queue.size)
            self.reconsider(receiver)
            if outcome is not None:
                self._act(receiver, outcome, publisher)

    def _add(self, receiver: Receiver, queue: SendQueue, packets: list[bytes], publisher: Publisher | None) -> None:
        """Add a run to the backlog of a congested receiver."""
        queue.copies.work_left -= FULL_SOCKET
        try:
            if not queue.can_block and queue.keep(packets):  # else it is noted whose messages were kept
                return
            digest = Digest(packets)
            if queue.settings.soft.always is _REPLACE:
                queue.copies.work_left -= len(digest.newest()) * REPLACED
            may_block = queue.can_block and self._may_block(receiver, publisher)
            before = queue.size
            outcome = queue.enqueue(packets, may_block, digest)
            if may_block and publisher is not None:
                self._backpressure.kept(publisher, receiver, queue.size - before, queue.size)
            if outcome is not None:
                self._act(receiver, outcome, publisher)
        except Exception:
            self._failed(receiver)

    def _wait(self, user: UserShare, receivers: int, packets: list[bytes], publisher: Publisher | None) -> None:
        """Account for a run that waits for some late receivers of one user."""
        self._late.add(user, receivers * total_size(packets))
        if not is_own_user(publisher, user):
            self.unpaid += receivers * POSTPONED

    def _postpone(
        self,
        receiver: Receiver,
        queue: SendQueue,
        packets: list[bytes],
        publisher: Publisher | None,
        copies: int,
    ) -> bool:
        """Have a run of messages wait for the turn of the receiver's user, if it has to.

        While no other user sends, the balance is topped up instead, at most once in a run.

        :param copies: the receivers of the run.
        :returns: whether they wait; if not, nothing waits any more.
        """
        catch_ups_left = self._catch_ups_left
        if catch_ups_left is None:
            catch_ups_left = self._catch_ups_left = catch_ups(copies)
            if not queue.is_late and not (copies >= MANY and queue.is_congested) and self._turns.top_up(queue.copies):
                return False
        may_block = queue.can_block and self._may_block(receiver, publisher)
        beyond, are_many = catch_ups_left <= 0, copies >= MANY
        size, is_own = total_size(packets), is_own_user(publisher, receiver.user)
        if not may_block and (
            (are_many and self._late.join_with(receiver, queue, packets, size, is_own=is_own))
            or self._late.postpone(receiver, queue, packets, size, is_own=is_own, beyond=beyond)
        ):
            self.unpaid += 0 if is_own else POSTPONED
            return True
        if queue.is_late:
            spent = queue.copies.work_left
            work = self._late.catch_up(receiver, queue, sends=not beyond and (is_own or not are_many))
            spent -= queue.copies.work_left  # what the queue has charged by itself
            # An observer may have published meanwhile, which is another run.
            self._catch_ups_left = catch_ups_left - 1 - (work + spent) // CATCH_UP_WORK
            self.work += work
        return False

    def _flush_later(self, touched: list[Receiver], first: int) -> list[Receiver]:
        """Make touched receivers late, as far as they can wait.

        :param first: the number of receivers, from the front, that do not become late.
        :returns: these receivers, and the others that cannot wait.
        """
        left = touched[:first]
        for receiver in touched[first:]:
            queue = receiver.queue
            if queue is None or queue.can_block:
                left.append(receiver)
                continue
            size = total_size(queue.pending) - queue.late_bytes  # the rest has been counted
            if not self._late.postpone(receiver, queue, [], size):
                left.append(receiver)
        return left

    def _decide(self, receiver: Receiver, queue: SendQueue, sends: bool, shared: Digest | None) -> int:
        """Send what a receiver's socket takes in limited time, and let flood control decide about the rest.

        If the queue has room for all messages, it keeps them first. The publishers are not known any more, and none of
        them can be blocked.

        :param sends: if not, the socket counts as full, unless its receiver is to be disconnected then.
        :param shared: the messages, if they are in lists that queues share, and nothing is pending; else None.
        :returns: the price.
        """
        sent, digest = 0, shared
        waiting = len(queue.pending) if shared is None else len(shared)
        if waiting and queue.settings.soft.always is _REPLACE:
            digest = shared or Digest(queue.pending)
            price = len(digest.newest()) * REPLACED if queue.messages else 0
        elif shared is None:
            price = waiting // UNSHARED
        else:
            price = len(shared.parts) // DECIDED
        transport = receiver.transport
        sends = sends or transport is None or _ends(queue, waiting, shared)
        try:
            if transport is None:
                if shared is not None:
                    queue.pending = shared.packets.copy()
                receiver.flush()
                return FULL_SOCKET
            # The transport may have found the backlog empty meanwhile, and not wait for the socket any more.
            is_unwatched = not queue.is_congested or len(queue) == len(queue.pending)
            if not queue.is_congested:
                if sends and not self._keeps_all(queue, waiting, shared):
                    sent, digest = self._send_some(queue, transport, shared)
                    is_unwatched = False
                elif waiting:
                    queue.congest()
            if queue.pending or digest is not None:
                self._settle(receiver, queue, transport, None, digest)
                if is_unwatched and sends:
                    before = len(queue)
                    (transport.flush_batch if self._turns.crowd else transport.flush)()
                    sent = max(0, before - len(queue))  # an observer may have published meanwhile
                elif is_unwatched and queue.is_congested:
                    transport.flush_later()
        except Exception:
            self._failed(receiver)
        copies = BUNDLED_COPIES if queue.settings.bundles else COPIES
        return FULL_SOCKET + sent // copies + price

    def _keeps_all(self, queue: SendQueue, waiting: int, shared: Digest | None) -> bool:
        """Return whether more than one batch waits for a late receiver, and its queue surely has room for all of it.

        Then the queue keeps all before anything is sent: no message is lost, and no long list is copied for the socket.
        Where that would change the order, the socket comes first: draining has turns for putting a long list in order.
        """
        settings = queue.settings
        if waiting <= BATCH or settings.soft.always is _REPLACE or not settings.order.arrival:
            return False
        return _has_room(queue, waiting, shared)

    def _send_some(
        self, queue: SendQueue, transport: IPacketTransport, shared: Digest | None
    ) -> tuple[int, Digest | None]:
        """Send messages that wait undecided, until the socket is full or the time is up.

        When the time is up, the socket counts as full. A receiver that would be disconnected then has no such limit.

        :param shared: as for `_decide`. Its parts become pending one by one: a socket takes few messages, and a long
            list is not copied for these. If deliveries are observed, or an observer of losses may publish, all parts
            become pending together, so that what it publishes comes behind them.
        :returns: the number of messages sent, and the digest of those that are left; None if these are pending, or
            none is left.
        """
        turns, waiting = self._turns, len(queue.pending) if shared is None else len(shared)
        goes_on = _ends(queue, waiting, shared)
        parts: list[Digest] = []
        part: Digest | None = None  # whose last messages are pending
        if shared is not None and (queue.watch is not None or self._events.publishes_on_loss):
            queue.pending = shared.packets.copy()  # a list of its own: the transport takes it
        elif shared is not None:
            parts = shared.parts[::-1] or [shared]
            part = parts.pop()
            queue.pending = part.packets.copy()
        end = turns.cpu() + (_SENDS_FOR if turns.crowd else TURN_BUDGET) * 1_000
        while True:
            transport.flush_batch()
            if queue.is_congested:
                break
            if not queue.pending:
                if not parts:
                    break
                part = parts.pop()
                queue.pending = part.packets.copy()
            if not goes_on and turns.cpu() >= end:
                queue.congest()
                transport.flush_later()
                if queue.is_congested:  # else nothing can be sent any more: all of it is lost, part by part
                    break
        sent = max(0, waiting - len(queue.pending) - sum(map(len, parts)))
        if part is None or not (queue.pending or parts):
            return sent, None
        if queue.pending:
            is_rest = queue.pending[-1] is part.packets[-1]  # else an observer that never publishes has
            parts.append(part.rest(queue.pending) if is_rest else Digest(queue.pending))
            queue.pending = []
        if not queue.is_congested:  # such an observer has published
            queue.congest()
            transport.flush_later()
        return sent, parts[0] if len(parts) == 1 else Digest.join(parts[::-1])

    def _offer(self, receiver: Receiver, packets: list[bytes], publisher: Publisher | None) -> None:
        """Hand a run to a receiver without a `SendQueue`."""
        keeper = self._keeper
        if keeper is not None and receiver is keeper:
            keeper.keep(packets, publisher)
            self._counters.tally.no_copy(packets)
            return
        if receiver in self._muted:
            return
        try:
            outcome = receiver.enqueue(packets, receiver.can_block and self._may_block(receiver, publisher))
            if outcome is not None:
                self._act(receiver, outcome, publisher)
        except Exception:
            self._failed(receiver)
        self.touch(receiver, publisher)

    def _may_block(self, receiver: Receiver, publisher: Publisher | None) -> bool:
        return publisher is not None and self._credentials.mayBlock(receiver.peer, publisher.peer)

    def _act(self, receiver: Receiver, outcome: Outcome, publisher: Publisher | None) -> None:
        dropped, size, close, block, losses, conflated = outcome
        if close is not None:
            receiver.close(close)
            self._blocking.discard(receiver)
        elif block is not None and publisher is not None:
            self._backpressure.block(publisher, receiver, block)
        if dropped:
            self.dropped(receiver, losses or (Loss(LossReason.DISCARD, dropped, size),))
        self._counters.conflated += conflated

    def _has_room(self, packets: list[bytes], receivers: tuple[Receiver, ...], publisher: Publisher | None) -> bool:
        """Return whether surely no receiver blocks the publisher for any of these packets."""
        blocking = [
            receiver for receiver in self._blocking.intersection(receivers) if self._may_block(receiver, publisher)
        ]
        if not blocking:
            return True
        messages, size = len(packets), total_size(packets)
        copies = size * len(receivers)
        return all(
            receiver.queue is not None and receiver.queue.has_room(messages, size, copies) for receiver in blocking
        )

    def _failed(self, receiver: Receiver) -> None:
        self.log.failure("Error in sending to client {number}", number=getattr(receiver, "number", 0))
        receiver.close(CloseReason.SERVER_ERROR)


def _has_room(queue: SendQueue, waiting: int, shared: Digest | None) -> bool:
    """Return whether a queue surely keeps the messages that wait undecided, for which no publisher can be blocked."""
    size = total_size(queue.pending) if shared is None else shared.size
    return queue.has_room(waiting, size, size, may_block=False)


def _ends(queue: SendQueue, waiting: int, shared: Digest | None) -> bool:
    """Return whether a receiver, if its socket counted as full, might be disconnected for what waits undecided."""
    soft, hard = queue.settings.soft.always, queue.settings.hard.always
    if hard is not _CLOSE or soft not in (_KEEP, _REPLACE):
        return soft is _CLOSE
    return not queue.is_congested and not _has_room(queue, waiting, shared)
