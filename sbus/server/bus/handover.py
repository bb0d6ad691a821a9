"""Handover: messages into the receivers' queues, and from there to the sockets.

.. rubric:: Theory of operation

`Handover.hand` puts a run of messages into `SendQueue.pending` of each receiver. When the batch or a step of mail ends,
`Handover.flush` sends them, with one system call for each receiver. If a whole batch is one run, it goes past the
queues of receivers with nothing waiting. Large packets for a single such receiver go past this module too
(`Handover.find_outlet`). Flood control decides about messages that a socket does not take (`sbus.flood.send_queue`).

Receivers get a message with its payload in sealed memory in different forms (`Handover.hand_payload`):

======================  ============================================================================================
a receiver              gets
======================  ============================================================================================
that has asked          the message itself, which its transport sends with the descriptor; past the queue, if that is
                        empty and the message is not from a bundle: a bundle is sent on as a bundle
any other, if it fits   a plain message; the payload is read once for all receivers that get it now
any other, or without   a loss, ``too-large``
memory for the copy
======================  ============================================================================================

The publisher is an argument; None stands for the program around the bus, which no receiver can block. If a plugged-in
strategy or order raises, the server disconnects the client that chose it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence, Set

from twisted.logger import Logger

from sbus.errors import CloseReason
from sbus.fair import Scheduler
from sbus.flood import PROGRAM, Loss, NamedRun, Outcome, PayloadMessage, Run, SendQueue, Signature, State, sign_from
from sbus.protocol.bundles import BundleCache
from sbus.protocol.notices import LossReason
from sbus.routing.route import Route
from sbus.routing.runs import total_size
from sbus.seqpacket.interfaces import IPacketTransport, Outlet
from sbus.server.asks.last_values import LastValues
from sbus.server.bus.backpressure import Backpressure
from sbus.server.core.counters import Counters
from sbus.server.core.interfaces import ICredentials, Publisher, Receiver
from sbus.server.core.observers import Events
from sbus.syscalls.batch import send_packets, send_to_each

__all__ = ["AT_ONCE", "OF_OTHERS", "Handover"]

AT_ONCE = 512
"""The maximal number of a user's receivers that get a message at once: about 1 ms (row ``fan-out``, with 1,000)."""
OF_OTHERS = 2
"""The maximal number of another user's receivers that get a message at once, at the publisher's expense. With 8, the
readers of row ``eager-8`` took two thirds of the publisher's throughput."""
_OPEN = State.OPEN
_DEAF = State.DEAF


class Handover:
    """Hands messages to receivers, and acts on the outcomes.

    :param credentials: decides whether a receiver may block a publisher.
    :param backpressure: blocks publishers.
    :param scheduler: whose turn it is.
    :param muted: receivers that no longer get anything, although routes contain them.
    :param max_packet: bytes in the longest plain message.
    :ivar scheduler: the same.
    :ivar keeper: keeps the last values of keys whose route contains it; None if the bus keeps none.
    :ivar number: the number of the current mail entry's last message, counted by `handled`; None outside of entries.
    :ivar uncounted: receivers that do not count as subscribed (`sbus.server.bus.unrouted`).
    :ivar served: the receivers that the last run was handed to at once.
    :ivar touched: the receivers that `flush` has to see.
    """

    log = Logger(namespace="sbus.bus")

    __slots__ = (
        "_backpressure",
        "_blocking",
        "_count",
        "_counters",
        "_credentials",
        "_events",
        "_flushing",
        "_max_packet",
        "_most_at_once",
        "_muted",
        "_publisher",
        "keeper",
        "number",
        "scheduler",
        "served",
        "touched",
        "uncounted",
    )

    def __init__(
        self,
        counters: Counters,
        events: Events,
        credentials: ICredentials,
        backpressure: Backpressure,
        scheduler: Scheduler,
        muted: Collection[Receiver],
        max_packet: int,
    ) -> None:
        self.scheduler = scheduler
        self.number: int | None = None
        self.uncounted: Set[Receiver] = frozenset()
        self.touched: list[Receiver] = []
        self.served = 0
        self._credentials = credentials
        self._counters = counters
        self._count = counters.tally.add
        self._events = events
        self._backpressure = backpressure
        self._muted = muted
        self._max_packet = max_packet
        self.keeper: LastValues | None = None
        self._publisher: Publisher | None = None
        self._blocking: set[Receiver] = set()
        self._flushing = False
        self._most_at_once = 0 if events.delivered else AT_ONCE

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

    def _leave_rest(self, receiver: Receiver, packets: list[bytes], sent: int, publisher: Publisher | None) -> None:
        """Leave to `flush` the messages of a run that a socket has not taken."""
        assert receiver.queue is not None
        self.touch(receiver, publisher)
        receiver.queue.pending += packets[sent:]

    def _offer(self, receiver: Receiver, packets: list[bytes], publisher: Publisher | None) -> None:
        """Hand a run to a receiver without a `SendQueue`."""
        keeper = self.keeper
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

    # --- large messages ----------------------------------------------------------------------

    def hand_payload(
        self, message: PayloadMessage, receivers: tuple[Receiver, ...], publisher: Publisher | None
    ) -> None:
        """Put a message into the queues of receivers, in the form that each has asked for."""
        asking: list[Receiver] = []
        others: list[Receiver] = []
        is_alone = not message.memory.is_batch
        for receiver in receivers:
            queue = receiver.queue
            if queue is None or not queue.settings.payloads:
                others.append(receiver)
            elif not (is_alone and self._send_alone(receiver, message)):
                asking.append(receiver)
        if asking:
            self._hand(message, asking, publisher)
        if not others:
            return
        copy = message.copied(self._max_packet)
        if copy is not None:
            self._hand(copy, others, publisher)
        else:
            for receiver in others:
                self._lose_payload(receiver, message)

    def _send_alone(self, receiver: Receiver, message: PayloadMessage) -> bool:
        transport = self._open_transport(receiver)
        return transport is not None and transport.try_send([message]) == 1

    def _hand(self, packet: bytes, receivers: list[Receiver], publisher: Publisher | None) -> None:
        """Put a signed message into the queues of receivers."""
        named = tuple(each for each in receivers if each.queue is not None and each.direct is None)
        if named:
            self.hand_named(NamedRun([packet]), named, publisher)
        if len(named) < len(receivers):
            self.hand([packet], tuple(each for each in receivers if each not in named), publisher, False)

    def _lose_payload(self, receiver: Receiver, message: PayloadMessage) -> None:
        """Count a message that cannot be copied for a receiver that has not asked for payloads."""
        queue = receiver.queue
        if receiver is self.keeper and self.keeper is not None:
            self.keeper.forget(bytes(message)[4:-1])
            self._counters.no_copy(1, len(message))
        elif receiver in self._muted or (queue is not None and queue.state is State.DEAF):
            self._counters.no_copy(1, len(message))
        elif queue is None:
            self.dropped(receiver, (Loss(LossReason.TOO_LARGE, 1, len(message)),))
        else:
            if queue.pending:
                self.flush()  # the messages before it
            outcome = queue.lose_run(Run([message]), LossReason.TOO_LARGE)
            if outcome is not None:
                self._act(receiver, outcome, None)
            if queue.head is not None:
                self.touch_also(receiver)

    # --- to the sockets ----------------------------------------------------------------------

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

    def _may_block(self, receiver: Receiver, publisher: Publisher | None) -> bool:
        try:
            return publisher is not None and self._credentials.mayBlock(receiver.peer, publisher.peer)
        except Exception:
            self.log.failure(
                "Error in the credentials policy: client {number} blocks nobody", number=getattr(receiver, "number", 0)
            )
            return False

    def _failed(self, receiver: Receiver) -> None:
        self.log.failure("Error in sending to client {number}", number=getattr(receiver, "number", 0))
        receiver.close(CloseReason.SERVER_ERROR)


def _signature(publisher: Publisher | None) -> Signature:
    """Return the signature of a publisher's messages."""
    return PROGRAM if publisher is None else publisher.signature
