"""Delivery: messages into the receivers' queues, and from there to the sockets.

.. rubric:: Theory of operation

A batch is handled run by run. A run is a list of consecutive messages with the same receivers (`sbus.routing.route`),
and `Delivery.deliver` takes it one of two ways:

===========================  ==================================================================================
who is active                what happens
===========================  ==================================================================================
one user                     every receiver gets it at once, as far as `AT_ONCE` and `AT_ONCE_KIB` allow
several users                the publisher's own receivers get it at once, and those of any other user if they are at
                             most `OF_OTHERS` and none of them waits; all others have one entry of mail
                             (`sbus.server.bus.mail`)
===========================  ==================================================================================

*At once* means into `SendQueue.pending`; `Delivery.flush` sends that when the batch ends, with one system call for each
receiver. If a whole batch is one run, it goes past the queues of receivers with nothing waiting. Large messages
with one receiver do not come here then (`Delivery.find_outlet`). Flood control decides about messages that a
socket does not take (`sbus.flood.send_queue`). Mail ends in the same function, `Delivery.hand`.

The publisher is an argument; None stands for the program around the bus, which no receiver can block. A receiver that
can block may do so at any message of a run, and handling must stop there. If each such receiver certainly has
room for the whole run, as nearly always, the run goes as one. Otherwise it is halved until a half has room
or is a single message.

Mail without room: a publisher of the same user waits for it, so `deliver` handles nothing and returns 0; messages from
other users are lost for that user, and leave a `Gap`. Messages that observers publish during an event are handled when
the batch, or the entry, is over (`SubscriptionRegistry.publish`).

If a plugged-in strategy or order raises, the server disconnects the client that chose it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence, Set
from functools import partial

from sbus.errors import CloseReason
from sbus.fair import Scheduler
from sbus.flood import PROGRAM, Loss, NamedRun, Outcome, PayloadMessage, Run, SendQueue, Signature, State, sign_from
from sbus.protocol.bundles import BundleCache
from sbus.protocol.notices import LossReason
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.routing.route import Route
from sbus.routing.runs import total_size
from sbus.seqpacket.interfaces import IPacketTransport, Outlet
from sbus.server.asks.last_values import LastValues
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.payloads import PayloadPosting, without
from sbus.server.bus.posting import AT_ONCE, AT_ONCE_KIB, OF_OTHERS
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver
from sbus.server.core.observers import Events
from sbus.syscalls.batch import send_packets, send_to_each

__all__ = ["Delivery"]

_OPEN = State.OPEN
_DEAF = State.DEAF


class Delivery(PayloadPosting):
    """Delivers messages to their receivers, and acts on the outcomes.

    :param credentials: decides whether a receiver may block a publisher.
    :param backpressure: blocks publishers.
    :param scheduler: whose turn it is.
    :param muted: receivers that no longer get anything, although routes contain them.
    :param max_packet: bytes in the longest packet.
    :ivar uncounted: receivers that do not count as subscribed (`sbus.server.bus.unrouted`).
    :ivar served: the receivers that the last run was handed to at once.
    :ivar touched: the receivers that `flush` has to see.
    """

    __slots__ = (
        "_backpressure",
        "_blocking",
        "_count",
        "_events",
        "_flushing",
        "_most_at_once",
        "served",
    )

    def __init__(
        self,
        counters: Counters,
        events: Events,
        credentials: ICredentials,
        backpressure: Backpressure,
        scheduler: Scheduler,
        muted: Set[Receiver] = frozenset(),
        max_packet: int = DEFAULT_MAX_PACKET,
    ) -> None:
        super().__init__(credentials, scheduler, counters, muted, max_packet)
        self._count = counters.tally.add
        self._events = events
        self._backpressure = backpressure
        self._blocking: set[Receiver] = set()
        self._flushing = False
        self._most_at_once = 0 if events.delivered else AT_ONCE
        self.served = 0

    def set_keeper(self, keeper: LastValues) -> None:
        """Keep last values: keys whose route contains the keeper are kept."""
        self._keeper = keeper

    # --- in ----------------------------------------------------------------------------------

    def deliver(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool = False,
        has_echo: bool = True,
        /,
    ) -> int:
        """Hand a run of messages to its receivers, or to their mail; `flush` sends those handed over.

        :param packets: the messages.
        :param publisher: the client that published them; None for the program around the bus.
        :param at_once: these packets are all that is to be sent now, so receivers with an empty queue may get them
            past it.
        :param has_echo: whether the publisher gets its own messages if it is among the receivers.
        :returns: the number of packets, from the front, that were dealt with. It is less than all if a receiver has
            blocked the publisher, and 0 also if the mail of the publisher's own user has no room.
        """
        if self.touched and publisher is not self._publisher:
            self.flush()
        receivers = route.receivers
        copies = len(receivers)
        if self.scheduler.is_busy or copies > AT_ONCE:
            return self._deliver_by_user(packets, route, publisher, at_once, has_echo)
        if not has_echo:
            receivers = without(receivers, publisher)
            copies = len(receivers)
        count = len(packets)
        if self._blocking and count > 1 and not self._has_room(packets, receivers, publisher):
            return self._deliver_halves(packets, route, publisher, has_echo)
        weight = self._count(packets, copies)
        if not copies or ((self.uncounted or self._muted) and is_unrouted(receivers, self.uncounted, self._muted)):
            self._counters.unrouted += count
        if weight and weight * copies > AT_ONCE_KIB:  # nobody else is active, so there is room in every mailbox
            size = total_size(packets)
            now, later = self._split(size, route, publisher)
            self._post(later, packets, size, publisher, has_echo)
            receivers = tuple(now) if has_echo else without(now, publisher)
        self.hand(packets, receivers, publisher, at_once)
        return count

    def _deliver_by_user(
        self,
        packets: list[bytes],
        route: Route[Receiver],
        publisher: Publisher | None,
        at_once: bool,
        has_echo: bool,
    ) -> int:
        """As `deliver`, group by group."""
        count, size = len(packets), total_size(packets)
        now, later = self._split(size, route, publisher)
        if later and not self._has_own_room(later, count, size, publisher):
            return 0
        receivers, everybody = tuple(now), route.receivers
        if not has_echo:
            receivers, everybody = without(receivers, publisher), without(everybody, publisher)
        if self._blocking and count > 1 and not self._has_room(packets, receivers, publisher):
            return self._deliver_halves(packets, route, publisher, has_echo)
        self._count(packets, len(everybody))
        if is_unrouted(everybody, self.uncounted, self._muted):
            self._counters.unrouted += count
        if later:
            self._post(later, packets, size, publisher, has_echo)
        self.hand(packets, receivers, publisher, at_once)
        return count

    def _deliver_halves(
        self, packets: list[bytes], route: Route[Receiver], publisher: Publisher | None, has_echo: bool
    ) -> int:
        """Deliver two halves: somewhere in the middle a receiver may block the publisher, and this finds out where."""
        half = len(packets) // 2
        done = self.deliver(packets[:half], route, publisher, False, has_echo)
        if done < half or (publisher is not None and publisher.is_paused):
            return done
        return done + self.deliver(packets[half:], route, publisher, False, has_echo)

    def handled(self) -> int:
        """Return the number of messages that were handled since the start."""
        return self._counters.tally.messages

    # --- to the receivers --------------------------------------------------------------------

    def hand(
        self,
        packets: list[bytes],
        receivers: tuple[Receiver, ...],
        publisher: Publisher | None,
        at_once: bool,
        packed: BundleCache | None = None,
    ) -> None:
        """Put a run into the receivers' queues, or past them.

        :param at_once: as for `deliver`.
        :param packed: the messages as bundles, by limit, which the receivers of the run share.
        """
        self.served = served = len(receivers)
        others: Sequence[Receiver] = receivers
        if at_once and served <= self._most_at_once:
            if served == 1:
                # The general way below does the same in more steps, which are much of the work of a small batch.
                receiver = receivers[0]
                queue, transport = receiver.direct, receiver.transport
                if (
                    queue is not None
                    and transport is not None
                    and queue.state is _OPEN
                    and not queue.pending
                    and queue.head is None
                ):
                    if (sock := transport.plain_socket) is None:
                        sent = transport.try_send(packets, packed)
                    else:
                        try:
                            sent = send_packets(sock, packets)
                        except OSError:
                            sent = 0  # `flush` will get the same error, and handle it
                    if sent < len(packets):
                        self._leave_rest(receiver, packets, sent, publisher)
                    return
            others = self._send_at_once(packets, receivers, publisher, {} if packed is None else packed)
        run: Run | None = None
        named: NamedRun | None = None
        foreign = 0
        for receiver in others:
            queue = receiver.direct
            if queue is None:
                if (queue := receiver.queue) is None:
                    self._offer(receiver, packets, publisher)
                else:
                    if named is None:
                        named = NamedRun(sign_from(packets, 0, _signature(publisher)))
                    foreign += self._name(receiver, queue, named, publisher)
            elif queue.state is not _OPEN:
                run = run or Run(packets)
                self._admit(receiver, queue, run, publisher)
                foreign += publisher is not None and receiver.user is not publisher.user
            elif queue.pending:
                queue.pending += packets
            else:
                self.touched.append(receiver)
                self._publisher = publisher
                queue.pending += packets
        if foreign > OF_OTHERS:
            self.scheduler.press()
        if len(self.touched) > AT_ONCE:
            self.flush()

    def hand_named(self, run: NamedRun, receivers: tuple[Receiver, ...], publisher: Publisher | None) -> None:
        """Put a run, perhaps of several publishers, into the queues of receivers that have asked for senders.

        :param publisher: the publisher that they may block, or None.
        """
        for receiver in receivers:
            queue = receiver.queue
            if queue is not None:
                for part in run.parts if queue.is_shared else (run,):
                    self._name(receiver, queue, part, publisher)

    def _send_at_once(
        self,
        packets: list[bytes],
        receivers: Sequence[Receiver],
        publisher: Publisher | None,
        packed: BundleCache,
    ) -> list[Receiver]:
        """Send a run past the queues of the receivers that have nothing in the way; return the others.

        Those with plain sockets get it in one step. Nothing but the kernel is called meanwhile, so no receiver's state
        changes.
        """
        others: list[Receiver] = []
        direct: list[Receiver] = []
        socks: list[socket.socket] = []
        indirect: list[tuple[Receiver, IPacketTransport]] = []
        for receiver in receivers:
            queue, transport = receiver.direct, receiver.transport
            if queue is None:
                if receiver.queue is None or not self._send_named(receiver, packets, publisher, packed):
                    others.append(receiver)
                continue
            if transport is None or queue.state is not _OPEN or queue.pending or queue.head is not None:
                others.append(receiver)
                continue
            sock = transport.plain_socket
            if sock is None:
                indirect.append((receiver, transport))
            else:
                direct.append(receiver)
                socks.append(sock)
        if socks:
            for at, sent in send_to_each(socks, packets):
                self._leave_rest(direct[at], packets, sent, publisher)
        for receiver, transport in indirect:
            sent = transport.try_send(packets, packed)
            if sent < len(packets):
                self._leave_rest(receiver, packets, sent, publisher)
        return others

    def find_outlet(self, route: Route[Receiver]) -> Outlet | None:
        """Return the outlet of a route: its only receiver's socket, if nothing is in the way of messages to it.

        This is valid until anything else happens.
        """
        if len(route.receivers) != 1 or self.touched or self.uncounted or self._muted:
            return None
        transport = self._open_transport(route.receivers[0])
        sock = None if transport is None else transport.open_socket()
        return None if sock is None else Outlet(sock, self._count_forwarded)

    def _count_forwarded(self, count: int, size: int) -> None:
        self._counters.tally.count(count, size, 1)

    def _open_transport(self, receiver: Receiver) -> IPacketTransport | None:
        """Return the transport of a receiver, if messages can go past its queue."""
        queue = receiver.direct
        if (
            self._most_at_once > 0
            and queue is not None
            and queue.state is _OPEN
            and not queue.pending
            and queue.head is None
        ):
            return receiver.transport
        return None

    def _send_alone(self, receiver: Receiver, message: PayloadMessage) -> bool:
        transport = self._open_transport(receiver)
        return transport is not None and transport.try_send([message]) == 1

    def _leave_rest(self, receiver: Receiver, packets: list[bytes], sent: int, publisher: Publisher | None) -> None:
        """Leave to `flush` the messages of a run that a socket has not taken."""
        assert receiver.queue is not None
        self.touch(receiver, publisher)
        receiver.queue.pending += packets[sent:]

    def touch(self, receiver: Receiver, publisher: Publisher | None) -> None:
        """Mark a receiver for `flush`: its queue has something of this publisher's batch."""
        self.touched.append(receiver)
        self._publisher = publisher

    def touch_also(self, receiver: Receiver) -> None:
        """Mark a receiver for `flush`: its queue has something other than messages of this batch."""
        self.touched.append(receiver)

    def flush(self) -> None:
        """Send the packets of the batch, one call for each receiver, and settle those that the sockets did not take."""
        if self._flushing or not self.touched:
            return
        self._flushing = True
        try:
            while self.touched:
                touched, self.touched = self.touched, []
                publisher, self._publisher = self._publisher, None
                for receiver in touched:
                    queue, transport = receiver.queue, receiver.transport
                    try:
                        if queue is None or transport is None:
                            receiver.flush()
                            continue
                        transport.flush()
                        if queue.pending:
                            self._settle(receiver, queue, transport, publisher)
                    except Exception:
                        self._failed(receiver)
        finally:
            self._flushing = False

    def _settle(
        self, receiver: Receiver, queue: SendQueue, transport: IPacketTransport, publisher: Publisher | None
    ) -> None:
        """Decide about messages that a flush has left."""
        while queue.pending and not queue.is_congested:
            transport.flush()  # the socket takes more than a transport sends in one turn
        if queue.pending:
            may_block = receiver.can_block and self._may_block(receiver, publisher)
            before = queue.messages, queue.size
            outcome = queue.settle(may_block)
            if may_block and publisher is not None:
                self._note_kept(publisher, receiver, queue, *before)
            self.reconsider(receiver)
            if outcome is not None:
                self._act(receiver, outcome, publisher)

    def _admit(self, receiver: Receiver, queue: SendQueue, run: Run, publisher: Publisher | None) -> None:
        """Offer a run to a congested receiver."""
        if queue.state is _DEAF:
            self._counters.no_copy(run.count, run.size)  # it has left since the route was looked up
            return
        try:
            may_block = receiver.can_block and self._may_block(receiver, publisher)
            before = queue.messages, queue.size
            outcome = queue.admit(run, may_block)
            if may_block and publisher is not None:
                self._note_kept(publisher, receiver, queue, *before)
            if outcome is not None:
                self._act(receiver, outcome, publisher)
        except Exception:
            self._failed(receiver)

    def _note_kept(self, publisher: Publisher, receiver: Receiver, queue: SendQueue, messages: int, size: int) -> None:
        self._backpressure.kept(publisher, receiver, queue.messages - messages, queue.size - size, queue.messages)

    def _send_named(
        self, receiver: Receiver, packets: list[bytes], publisher: Publisher | None, packed: BundleCache
    ) -> bool:
        """Send a run past the queue of a receiver that has asked for senders, if nothing is in the way.

        :returns: False if something is.
        """
        queue, naming, transport = receiver.queue, receiver.naming, receiver.transport
        if (
            naming is None
            or queue is None
            or transport is None
            or queue.state is not _OPEN
            or queue.pending
            or queue.head is not None
        ):
            return False
        signature = _signature(publisher)
        sent = naming.send(packets, signature, transport, packed)
        if sent < len(packets):
            self.touch(receiver, publisher)
            queue.pending += sign_from(packets, sent, signature)
        return True

    def _offer(self, receiver: Receiver, packets: list[bytes], publisher: Publisher | None) -> None:
        """Hand a run to a receiver without a `SendQueue`."""
        keeper = self._keeper
        if keeper is not None and receiver is keeper:
            keeper.keep(packets, publisher)
            self._counters.no_copy(len(packets), total_size(packets))
            return
        if receiver in self._muted:
            self._counters.no_copy(len(packets), total_size(packets))
            return
        try:
            outcome = receiver.enqueue(packets, receiver.can_block and self._may_block(receiver, publisher))
            if outcome is not None:
                self._act(receiver, outcome, publisher)
        except Exception:
            self._failed(receiver)
        self.touch(receiver, publisher)

    def _name(self, receiver: Receiver, queue: SendQueue, run: NamedRun, publisher: Publisher | None) -> bool:
        """Put a run into the queue of a receiver that has asked for senders (`sbus.flood.naming`).

        :param run: the messages; of one publisher if users share the queue.
        :returns: whether flood control has decided about it, for a receiver of another user.
        """
        if queue.state is not _OPEN:
            if queue.has_share(run.user, run):
                self._admit(receiver, queue, Run(run.leading) if queue.keeps(run) else run, publisher)
            elif (outcome := queue.lose_run(Run(run.leading), LossReason.SHARE)) is not None:
                self._act(receiver, outcome, publisher)
            return publisher is not None and receiver.user is not publisher.user
        if not queue.pending:
            self.touch(receiver, publisher)
        queue.pending += run.leading
        return False

    # --- the outcome -------------------------------------------------------------------------

    def drained(self, receiver: Receiver, has_room: bool, is_empty: bool) -> None:
        """Unblock the publishers that waited for a congested receiver.

        Messages have just left its queue.
        """
        if is_empty:
            self._blocking.discard(receiver)
        self._backpressure.drained(receiver, has_room, is_empty)

    def reconsider(self, receiver: Receiver) -> None:
        """Note whether a receiver can block publishers now.

        Its queue or its strategies have changed.
        """
        queue = receiver.queue
        if queue is not None and queue.is_congested and receiver.can_block:
            self._blocking.add(receiver)
        else:
            self._blocking.discard(receiver)

    def forget(self, receiver: Receiver) -> None:
        """A receiver takes no more messages: unblock its publishers."""
        self._blocking.discard(receiver)
        self._backpressure.release(receiver)

    def lose(self, receiver: Receiver, messages: int, size: int, why: LossReason, number: int) -> None:
        """Count messages for which the mail had no room, as lost for one receiver.

        :param number: see `number`.
        """
        queue = receiver.queue
        if queue is None or queue.state is _DEAF:
            self._counters.no_copy(messages, size)
            return
        outcome = queue.lose(messages, size, why)
        if outcome is not None:
            self.number = number
            self._act(receiver, outcome, None)
            self.number = None
        if queue.head is not None:
            self.touch_also(receiver)  # its receipt

    def miss(self, receivers: Sequence[Receiver], link: object, messages: int, size: int) -> None:
        """Give receivers a receipt for messages that were lost on their way to this bus.

        :param link: the link, which gets none.
        """
        self.flush()  # earlier messages
        for receiver in receivers:
            queue = receiver.queue
            if queue is None or receiver is link or not queue.settings.receipts:
                continue
            if not self.post(receiver, "loss", partial(self._miss, receiver, messages, size)):
                self._miss(receiver, messages, size)

    def _miss(self, receiver: Receiver, messages: int, size: int) -> None:
        queue = receiver.queue
        if queue is not None:
            queue.miss(messages, size)
            if queue.head is not None:
                self.touch_also(receiver)

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


def _signature(publisher: Publisher | None) -> Signature:
    """Return the signature of a publisher's messages."""
    return PROGRAM if publisher is None else publisher.signature
