"""One client's connection to the bus, as publisher and as receiver.

.. rubric:: Theory of operation

A connection has two sides that share little. As a *publisher* it gets batches of packets from its transport, and hands
them to the registry: runs of messages whole, any other packet one by one. As a *receiver*
(`sbus.server.core.interfaces.Receiver`) it has a queue, from which its transport sends.

The state of a connection is in a few objects, each of which can be written down with its ``snapshot()``: the
connection (`BusProtocol.snapshot`), with the choices of the client (`sbus.flood.ClientSettings`), and the queue.

.. rubric:: Batches

The hot path is a batch of at most 64 packets that is one run with a known route (`sbus.routing.runs.next_run`): it is
delivered at once, and nothing is parsed. It is closed on a bus whose policy or observers want to see each message, and
to messages that a client without echo would receive itself. So that it asks one question about its client, it is also
closed (`BusProtocol._fast_path`) as soon as the client is paused, is closed, has a turn, or has packets that were kept;
the next batch that goes the long way opens it again.

Everything else goes through the loop of `BusProtocol._handle_batch`: runs through ``deliver``, other packets through
the parser. New keys are looked up ahead, so that their messages make runs, too. A client without echo has runs, too; it
is taken out of their receivers. The loop stops at the packet at which the client is paused or closed; the transport
keeps the rest and hands it over again on resuming. A batch can hold any number of packets, as the transport takes
bundles apart: after `MAX_RUN` packets the queues are flushed, so that flood control learns of a full socket before the
whole batch is queued.

.. rubric:: Fairness

While other clients wait to be read too, a publisher is read in smaller batches, the smaller the more receivers its
messages have: about `FANOUT_BUDGET` copies for each read, but at least `MIN_READ` packets. Another client then
waits for about 48 copies, and not for 64 packets times all their receivers. docs/performance.rst has the price and the
gain.

.. rubric:: Turns

The work of a packet is deducted from the balance of the client's user (`sbus.server.core.turns`). When the balance is
spent, handling stops in the middle of the batch, as it does when a receiver blocks the client, and goes on in a later
turn of the user. On the hot path that is one comparison and one subtraction: where the balance is not enough for a
whole batch of plain copies, the run is left to the loop. That takes as much of it as there is balance for, but at least
one message.

A copy to a receiver that waits for it takes two or three times its price, as the kernel wakes a process. So a turn
that took longer than its price sets a factor, `_dearness`, for the prices of the runs that the loop handles from then
on. The next turn corrects it, and a turn within `CONTENDED_BUDGET` resets it. Without it, a publisher to a thousand
such receivers had turns of 12 ms.

Thousands of clients that send little would each be read although others of their user have spent the balance. So while
several sockets can be read, a client whose user has spent it waits for a turn before the read (`_check_balance`).

A client is read from unless there is a reason not to: a receiver blocks it, too many of its replies wait, or it waits
for its turn. The three are independent, and the last one to go resumes the transport. A client that has
been closed handles no packet more, which bounds the time that the server takes to stop.

.. rubric:: The end

The server disconnects a client gracefully (`IPacketTransport.close_gracefully`): the last packets go past the queue,
and the client can still read what the kernel holds for it. The last packets are one receipt for all that waited, if the
client asked for receipts, and the reason, if it asked for byes. They are made when the batch in hand is over and the
client is in no route any more, so the receipt is complete.

.. rubric:: Replies

Replies are never dropped, so a client that asks and does not read could fill the server's memory with them. Past
`sbus.server.core.limits.MAX_REPLIES` waiting replies the client is not read from until it takes some.

On a bus with a master a reply to ``whoami`` may have to wait (`sbus.server.asks.upstream`). It then leaves a place in a
list of held replies, and the replies behind it are held, too, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

from twisted.internet import error
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol, IProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.errors import CloseReason, Violation, ViolationReason
from sbus.flood import DEFAULT_SETTINGS, ClientSettings, Loss, Outcome, SendQueue, Snapshot
from sbus.protocol import controls
from sbus.protocol.bundles import MAGIC, MAX_BUNDLE, MIN_BUNDLE_LIMIT, unbundle
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.protocol.notices import bye
from sbus.protocol.packets import CMSG, MSG, SUB, UNSUB, build, parse
from sbus.routing.cache import LONGEST_KEY
from sbus.routing.runs import next_run, total_size
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.seqpacket.pacing import BUNDLES_PER_READ
from sbus.seqpacket.send_buffer import START
from sbus.server.bus.draining import Draining
from sbus.server.bus.memory import CLIENT_MEMORY, KEPT_PACKET
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.bus.stall import StallTimer
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.limits import MAX_REPLIES
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.prices import (
    BUNDLED_COPIES,
    COPIES,
    PACKET,
    READ,
    READING,
    REORDERED,
    REPLY,
    SENDING,
    subscription_work,
)
from sbus.server.core.turns import CONTENDED_BUDGET
from sbus.server.core.users import User
from sbus.syscalls.batch import BATCH

__all__ = ["BYE_PATIENCE", "FANOUT_BUDGET", "MAX_RUN", "MIN_READ", "OVERDRAFT", "BusProtocol"]

FANOUT_BUDGET = 48
"""Copies to make for one read of a publisher, about, while other clients wait to be read."""
MIN_READ = 4
"""Packets to read from a publisher in one go at least, however many copies of each are made."""
_MANY_SERVED = FANOUT_BUDGET // MIN_READ
_READ_LIMITS = [FANOUT_BUDGET // max(1, served) for served in range(_MANY_SERVED)]
"""Packets to read in one go, for fewer than `_MANY_SERVED` receivers of the last run."""
_MOST_DEAR = 8.0
"""The largest factor by which runs cost more than their price: one slow turn may be chance."""
OVERDRAFT = 128
"""Work by which the last run of a turn may exceed the balance.

The prices of runs are estimates. Without an overdraft a turn ended in runs of a few messages, and a run costs each of
its receivers a system call.
"""
MAX_RUN = 1024
"""Packets handled at most before the queues are flushed; a batch of bundles can hold more."""
_READ_PRICES = [SENDING + packets // COPIES for packets in range(BATCH + 1)]
"""Prices of reading a run, by its number of messages, 0 to `BATCH`; a table, as each batch needs one."""
_BATCH_PRICE = BATCH // COPIES
"""The price of one receiver's copies of a batch, if they are plain."""
BYE_PATIENCE = 1.0
"""Seconds for which the last packets of a connection are tried if they do not fit the socket."""
DISCARDED = 262_144
"""Packets of clients to discard at most if all are disconnected at once, about: a tenth of a second."""
MIN_DISCARDED = 64
"""Packets to discard of each client at least, however many there are."""


class _Nobody:
    """The owner of a queue whose client has gone."""

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        pass

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        pass


_NOBODY = _Nobody()


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class BusProtocol:
    """A client's connection: a `sbus.server.core.interfaces.Client`.

    :param listener: the socket at which the client has connected.
    :ivar number: counts connections, from 1.
    :ivar peer: the client's credentials, from the kernel.
    :ivar user: the user that the client belongs to.
    :ivar queue: the packets on their way to the client.
    :ivar settings: the client's choices.
    :ivar patterns: its subscriptions: pattern → (how often it subscribed, the parts of a secret pattern).
    :ivar pattern_bytes: the cost of these (`sbus.protocol.patterns.pattern_cost`).
    :ivar pattern_memory: the memory of these (`sbus.server.bus.memory.pattern_memory`).
    :ivar lost: messages that were dropped for the client.
    :ivar connected_at: when the client connected, in seconds since the epoch.
    :ivar reason: why the connection is to be closed, or was; else None.
    :ivar is_paused: whether the client is not read from: a receiver blocks it, too many of its replies wait, or it
        waits for its user's turn.
    """

    __slots__ = (
        "_buffer",
        "_dearness",
        "_delivery",
        "_drain_timer",
        "_draining",
        "_fast_path",
        "_has_echo",
        "_has_spent",
        "_has_turn",
        "_held",
        "_in_kernel",
        "_is_blocked",
        "_is_loading",
        "_is_waiting",
        "_kept",
        "_price",
        "_registry",
        "_rest",
        "_route",
        "_snapshot",
        "_write_closed",
        "connected_at",
        "is_paused",
        "listener",
        "lost",
        "number",
        "on_room",
        "pattern_bytes",
        "pattern_memory",
        "patterns",
        "peer",
        "queue",
        "reason",
        "settings",
        "transport",
        "user",
    )

    queue: SendQueue
    user: User
    settings: ClientSettings

    def __init__(self, registry: SubscriptionRegistry, listener: Listener = MAIN) -> None:
        self._registry = registry
        self.listener = listener
        self._delivery = registry.delivery
        self._route = 0  # not the tuple itself, which would keep clients alive
        self._price = 1.0
        self._dearness = 1.0
        self.transport: IPacketTransport | None = None
        self.number = 0
        self.on_room: tuple[Callable[[], None], ...] = ()
        self.peer = PeerCredentials(0, 0, 0)
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = 0
        self.pattern_memory = 0
        self.lost = 0
        self.connected_at = time.time()
        self.reason: CloseReason | None = None
        self.is_paused = False
        self._is_blocked = False
        self._is_loading = False
        self._fast_path = False  # not before the first batch
        self._is_waiting = False
        self._has_turn = self._has_spent = False
        self._held: list[bytes | None] = []
        self._has_echo = True
        self._drain_timer: StallTimer | None = None
        self._rest: IDelayedCall | None = None
        self._snapshot: Snapshot | None = None
        self._write_closed = False
        self._buffer = 0
        self._in_kernel = 0
        self._kept = 0

    # --- the connection ----------------------------------------------------------------------

    def makeConnection(self, transport: IPacketTransport) -> None:  # type: ignore[override]
        """Take the transport (`IProtocol`)."""
        self.transport = transport
        self.peer = transport.credentials
        self._join(transport, self._registry.connect_user(self.peer))
        self.settings = self.queue.settings
        transport.may_grow = self._may_grow
        transport.on_kept = self._keep_last
        transport.before_read = self._check_balance
        transport.on_vain_read = self._pay_vain_reads
        self.user.charge_memory(CLIENT_MEMORY)
        self._buffer = START + transport.partial_limit()
        self._registry.memory.add_buffer(self.user, self._buffer)
        self.connectionMade()

    def _join(self, transport: IPacketTransport, user: User) -> None:
        """Belong to a user; what is sent from now on is at its expense."""
        self.user = user
        self.queue = self._registry.new_queue(self, self, user)
        self._draining = Draining(self._registry.turns, self.queue.copies, transport)
        transport.queue = self.queue

    @property
    def is_holding(self) -> bool:
        """See `sbus.server.core.interfaces.Client`."""
        queue = self.queue
        return len(queue) > 0 or queue.is_late or self._snapshot is not None or self.lost > 0

    def change_user(self, user: User) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        if self.transport is None:
            return
        before, memory = self.user, CLIENT_MEMORY + self._kept + self._in_kernel
        self._draining.stop()
        self._join(self.transport, user)
        self._configure_queue()
        before.charge_memory(-memory)
        user.charge_memory(memory)
        self._registry.memory.add_buffer(before, -self._buffer)
        self._registry.memory.add_buffer(user, self._buffer)

    def connectionMade(self) -> None:
        """Ask the registry to admit the client (`IProtocol`)."""
        self.reason = self._registry.connected(self)
        if self.reason is not None:
            self._dismiss(None)

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Disconnect this client; the first reason given stands.

        :param detail: more about the reason, for the client itself.
        """
        self.reason = self.reason or reason
        self._fast_path = False
        self._dismiss(reason, detail)

    def _dismiss(self, reason: CloseReason | None, detail: str = "") -> None:
        """Close the connection; the client can still read what was sent to it.

        :param reason: the reason to give to the client; None to give none.
        """
        if self.transport is not None:
            self.queue.can_block = False
            patience = 0.0 if reason is None or reason is CloseReason.SERVER_STOPPED else BYE_PATIENCE
            input_limit = max(MIN_DISCARDED, DISCARDED // (len(self._registry.clients) or 1))
            self.transport.close_gracefully(lambda: self._farewell(reason, detail), patience, input_limit)

    def _farewell(self, reason: CloseReason | None, detail: str) -> list[bytes]:
        """Stop receiving, drop what waits, and return the last packets for the client."""
        self._registry.stop_receiving(self)
        packets = []
        if self._snapshot is not None:
            self._snapshot.discard_all()
        last = self.queue.last_receipt()
        if last is not None and self.settings.receipts:
            packets.append(last)
        if reason is not None and self.settings.bye:
            text = f"{reason.value}: {detail}" if detail else reason.value
            packets.append(bye(reason.name, text, self._registry.limits.max_packet))
        return packets

    def readConnectionLost(self) -> None:
        """Send the client what is queued, as long as it reads, then close (`IHalfCloseableProtocol`)."""
        if self.reason is None and self.transport is not None:
            self.reason = CloseReason.PEER_CLOSED
            self._fast_path = False
            self._delivery.catch_up(self)
            self.queue.can_block = False
            self._registry.leave(self)
            if len(self.queue):
                self._drain_timer = self._registry.stall_timer(self._progress, lambda: self._dismiss(None))
            self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Drop the client's subscriptions, and handle the packets that it has sent.

        This is `IHalfCloseableProtocol`.
        """
        self._write_closed = True
        self._registry.stop_receiving(self)
        self.queue.discard_all()  # what came since the transport did
        if self._rest is not None:  # it has probably left, which the server learns as it reads
            self._rest.cancel()
            self._end_rest()
        self._maybe_resume()

    def connectionLost(self, reason: Failure) -> None:
        """Forget the client (`IProtocol`)."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self.transport = None
        self._draining.stop()
        if self._is_waiting:
            self._registry.turns.forget(self.user, self)
        if self._rest is not None:
            self._rest.cancel()
        self._delivery.catch_up(self)  # what waits for it is lost
        if self.reason is None:
            if reason.check(error.ConnectionDone):
                self.reason = CloseReason.PEER_CLOSED
            elif reason.check(error.ConnectionLost):
                self.reason = CloseReason.PEER_RESET
            else:
                self.reason = CloseReason.SERVER_ERROR
        self._registry.disconnected(self, self.reason)
        self.user.charge_memory(-CLIENT_MEMORY - self._kept - self._in_kernel)
        self._kept = self._in_kernel = 0
        self._registry.memory.add_buffer(self.user, -self._buffer)
        self._registry.disconnect_user(self.user)
        # These refer to this object, and it to them: only the garbage collector would free such a cycle.
        self.queue.owner = _NOBODY
        self._drain_timer = self._rest = None
        del self._draining

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this connection as plain values, without its queued packets."""
        return {
            "number": self.number,
            "peer": tuple(self.peer),
            "listener": self.listener.name,
            "patterns": {pattern: count for pattern, (count, _) in self.patterns.items()},
            "lost": self.lost,
            "connected_at": self.connected_at,
            "settings": self.settings.snapshot(),
            "is_write_closed": self._write_closed,
            "reason": None if self.reason is None else self.reason.name,
        }

    # --- as publisher ------------------------------------------------------------------------

    def dataReceived(self, data: bytes) -> None:
        """Handle one packet (`IProtocol`).

        The transport keeps packets back while it is paused.
        """
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """Handle a batch of packets, and flush the queues of the receivers it touched.

        This is `IPacketReceiver`.
        """
        registry, user = self._registry, self.user
        total, at = len(packets), 0
        if READING and not self._kept:
            self._pay_reading(total)
        turns = registry.turns
        if turns.last is not user:
            turns.change(user)
        elif turns.crowd:
            turns.crowd -= 1
        if self._fast_path:
            delivery = self._delivery
            try:
                receivers, until = next_run(packets, 0, total, registry.routes)
                # If whole batches of plain copies could be paid for, nothing else has to be known of the price.
                if (
                    until == total
                    and total <= BATCH
                    and receivers is not None
                    and len(receivers) * _BATCH_PRICE < user.work_left
                    and (self._has_echo or self not in receivers)
                ):
                    at = registry.deliver(packets, receivers, self, True)
                    user.work_left -= _READ_PRICES[total] + delivery.work
                    delivery.work = 0
                    if total >= MIN_READ and self.transport is not None:
                        served = delivery.served
                        self.transport.read_limit = _READ_LIMITS[served] if served < _MANY_SERVED else MIN_READ
            finally:
                if delivery.touched:
                    delivery.flush()
            if at == total:
                return total  # as nearly always
        return self._handle_batch(packets, at)

    def _handle_batch(self, packets: list[bytes], at: int) -> int:
        """Handle a batch of any packets, from one of them on, as far as that can go now; keep the rest.

        :returns: see `packetsReceived`.
        """
        registry = self._registry
        routes, deliver, turns, user = registry.routes, registry.deliver, registry.turns, self.user
        total = len(packets)
        has_turn, self._has_turn, self._has_spent = self._has_turn, False, True
        if has_turn:
            before, began, unpaid = user.work_left - turns.given, turns.cpu(), self._delivery.unpaid
        try:
            while at < total and self._may_continue():
                start, end = at, min(at + MAX_RUN, total)
                while at < end and self._may_continue():
                    if registry.fast_path:
                        receivers, until = next_run(packets, at, end, routes)
                        if receivers is None and self._learn(packets, at, end):
                            receivers, until = next_run(packets, at, end, routes)
                        if receivers is not None:
                            if not self._has_echo and self in receivers:
                                receivers = tuple(receiver for receiver in receivers if receiver is not self)
                            until = min(until, at + self._affordable(receivers, until - at))
                            at_once = until - at >= BATCH or (at == start and until == end)
                            count = deliver(packets[at:until], receivers, self, at_once)
                            self._pay(receivers, count)
                            at += count
                            continue
                    if self.settings.bundles and packets[at][:4] == MAGIC:  # read before the client asked for bundles
                        parts = unbundle(packets[at : at + 1])
                        if parts[0] is not packets[at]:
                            packets[at : at + 1] = parts
                            total = len(packets)
                            end = min(start + MAX_RUN, total)
                            continue
                    self._handle(packets[at])
                    at += 1
                registry.flush()
            if at < total and self.reason is None and not self.is_paused:
                self._wait_for_turn(has_turn and not at)
        finally:
            if self._delivery.touched:
                registry.flush()
            if has_turn:
                before += turns.given  # that was given in this turn has been paid, too
                paid = before - user.work_left
                took = turns.correct(user, before, began, self._delivery.unpaid - unpaid)
                self._dearness = max(1.0, min(_MOST_DEAR, self._dearness * took / max(paid, 1)))
                if took <= CONTENDED_BUDGET:
                    self._dearness = 1.0
        if at < total:
            if not self._kept:
                self._keep(packets[at:] if at else packets)
        elif self._kept:
            self._release_kept()
        self._fast_path = registry.fast_path and not (self._kept or self._has_turn or self.is_paused or self.reason)
        return total if self.reason is not None else at

    def _learn(self, packets: list[bytes], start: int, end: int) -> bool:
        """Look up the new keys of the messages from `start` on, as far as the balance lasts, so that they make runs.

        A user who subscribes to everything and leaves, all day, makes all keys new again and again. Handled one by one,
        their messages would cost three times as much.

        At most `BATCH` messages are looked at: a batch of bundles may hold more keys than the cache, which would forget
        the first ones before they are used, again for each message.

        :returns: whether the first message has a known route now.
        """
        registry, user = self._registry, self.user
        routes, first = registry.routes, None
        # No slice: that, or the way to the middle of a long batch, would cost as much as a turn.
        for at in range(start, min(end, start + BATCH)):
            packet = packets[at]
            nul = packet.find(b"\0", 4)
            if not 0 < nul <= 4 + LONGEST_KEY or not packet.startswith(b"MSG ") or packet.startswith(b"MSG !"):
                break
            key = packet[4:nul]
            if key not in routes:
                try:
                    registry.route(key)
                except Violation:
                    break  # it is handled when its turn comes
                user.work_left -= registry.routing_work()
            if first is None:
                first = key
            if user.work_left <= 0 or key not in routes:
                break
        return first is not None and first in routes

    def _pay_reading(self, messages: int) -> None:
        """Pay for packets read without the compiled helper; those of a peer that sends bundles have many messages."""
        self.user.work_left -= READING * (min(messages, BUNDLES_PER_READ) if self.settings.bundles else messages)

    def _affordable(self, receivers: tuple[Receiver, ...], wanted: int) -> int:
        """Return how many messages of a run the balance and the overdraft pay for: 1 to `wanted`.

        The price of a message is that of the last run, if it had the same receivers; else each copy counts as plain.
        Either is multiplied by `_dearness`.
        """
        price = self._price if id(receivers) == self._route else (1 + len(receivers)) / COPIES
        # A budget that does not pay for a whole batch saves no turn, and runs to so many take longer than their price.
        least = int(max(wanted, BATCH) * price)
        price *= self._dearness
        if wanted * price <= self.user.work_left:
            return wanted
        if self.transport is not None and self._registry.turns.top_up(self.user, least, self.transport.passes):
            self._dearness = 1.0  # this budget pays for whole batches at their price
            return wanted
        return min(wanted, 1 + max(0, int((self.user.work_left + OVERDRAFT) / price)))

    def _pay(self, receivers: tuple[Receiver, ...], count: int) -> None:
        """Pay for a run by the work that it has caused.

        :param count: the number of messages delivered; 0 if there were only decisions, whose work says nothing about
            the price of a message.
        """
        delivery = self._delivery
        work = delivery.work + SENDING + count // (BUNDLED_COPIES if self.settings.bundles else COPIES)
        delivery.work = 0
        if count:
            self._route, self._price = id(receivers), work / count
        self.user.work_left -= int(work * self._dearness)

    def _keep(self, packets: list[bytes]) -> None:
        """Charge packets that the transport keeps until they can be handled.

        They are given back when the last one was handled: to count what is left at each turn would cost as much as a
        turn.
        """
        if self.reason is None:
            self._release_kept()
            self._fast_path = False
            self._kept = total_size(packets) + KEPT_PACKET * len(packets)
            self.user.charge_memory(self._kept)
            self._registry.memory.check()

    def _keep_last(self, packets: list[bytes]) -> None:
        """Pay for the last read of a client that has left while it was paused, and charge what the transport keeps.

        What was kept before is paid for once more: that is less than a batch.
        """
        self.user.work_left -= READ
        if READING:
            self._pay_reading(len(packets))
        self._keep(packets)

    def _release_kept(self) -> None:
        self.user.charge_memory(-self._kept)
        self._kept = 0

    def _check_balance(self) -> None:
        """Before a read, wait for a turn if other clients of the user have spent the balance; else pay for the read.

        A client on a stream socket that has spent nothing of it since its last turn comes first, unless it sends
        bundles: its packet may be incomplete.
        """
        if self.user.work_left <= 0 and self.reason is None and not self._is_waiting:
            transport = self.transport
            is_stream = transport is not None and transport.partial_limit() > 0 and not self.settings.bundles
            self._wait_for_turn(is_first=self._has_turn or (is_stream and not self._has_spent))
        else:
            self.user.work_left -= READ

    def _pay_vain_reads(self, took: int) -> None:
        """Pay for vain reads (`sbus.server.bus.vain_reads`): rest, or wait for a turn if that has spent the balance.

        :param took: their CPU time, in microseconds.
        """
        self.user.work_left -= took
        self._has_spent = True
        if self.reason is not None or self._is_waiting:
            return
        self._rest = self._registry.rest(self.user, took, self._end_rest)
        if self._rest is not None:
            self._is_waiting = True
            self._pause()
        elif self.user.work_left <= 0:
            self._wait_for_turn(is_first=False)

    def _end_rest(self) -> None:
        self._rest = None
        self._wait_for_turn(is_first=False)

    def pause_publishing(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._is_blocked = True
        self._pause()

    def resume_publishing(self) -> None:
        """See `sbus.server.core.interfaces.Publisher`."""
        self._is_blocked = False
        self._maybe_resume()

    def take_turn(self) -> None:
        """Go on with the packets that were kept: the user has work left again (`sbus.server.core.turns`)."""
        self._is_waiting = self._has_spent = self._fast_path = False
        self._has_turn = True
        self._maybe_resume()

    def _wait_for_turn(self, is_first: bool) -> None:
        self._is_waiting = True
        self._pause()
        self._registry.turns.wait(self.user, self, is_first)

    def _may_continue(self) -> bool:
        return not self.is_paused and self.reason is None and self.user.work_left > 0

    def _pause(self) -> None:
        if not self.is_paused and self.transport is not None:
            self.is_paused = True
            self._fast_path = False
            self.transport.pauseProducing()

    def _maybe_resume(self) -> None:
        if self._is_blocked or self._is_waiting or self._is_loading:
            return
        if self.is_paused and not self._has_replies():
            self.is_paused = False
            if self.transport is not None:
                self.transport.resumeProducing()

    def _handle(self, packet: bytes) -> None:
        """Handle one packet of any kind, and charge its user."""
        key = b""
        work = PACKET + (len(packet) >> 10)
        try:
            verb, key, payload = parse(packet)
            if verb == MSG:
                self._publish(packet, key, payload)
                work = PACKET  # delivery counts the bytes
            elif verb == SUB:
                work += subscription_work(key, self._registry.dialect.separator)
                if not self._write_closed:
                    self._registry.subscribe(self, key)
            elif verb == UNSUB:
                work += subscription_work(key, self._registry.dialect.separator)
                self._registry.unsubscribe(self, key)
            else:
                self._control(key, payload if len(packet) > len(CMSG) + 1 + len(key) else None)
        except Violation as violation:
            if self._registry.violated(self, violation, key):
                reason = CloseReason.USER_LIMIT if violation.reason.is_user_limit else CloseReason.VIOLATION
                self.close(reason, violation.reason.value)
        self.user.work_left -= work + self._registry.routing_work()

    def _publish(self, packet: bytes, key: bytes, payload: bytes) -> None:
        registry = self._registry
        receivers: tuple[Receiver, ...] = registry.route(key)
        registry.check_publish(self, key, payload)
        if not self.settings.echo and self in receivers:
            receivers = tuple(receiver for receiver in receivers if receiver is not self)
        while not registry.deliver([packet], receivers, self):
            pass
        self.user.work_left -= self._delivery.work
        self._delivery.work = 0

    # --- control messages --------------------------------------------------------------------

    def _control(self, key: bytes, payload: bytes | None) -> None:
        """Handle a control message.

        Strategies and orders are found by their selectors, the others by their group.

        :param payload: what stands behind the NUL; None without a NUL.
        """
        registry = self._registry
        if not registry.dialect.control:
            raise Violation(ViolationReason.UNKNOWN_VERB)
        if (chosen := registry.controls.apply(self.settings, key)) is not None:
            self._apply(chosen)
            if key not in registry.controls.orders:
                registry.strategies_changed(self)
            return
        control = controls.find(key)
        handler = _HANDLERS.get(control.group) if control is not None else None
        if not (handler(self, key) if handler is not None else registry.requests.handle(self, key, payload)):
            registry.counters.unknown_controls += 1

    def _whoami(self, key: bytes) -> bool:
        self._registry.upstream.whoami(self)
        return True

    def _choose_echo(self, key: bytes) -> bool:
        self._apply(replace(self.settings, echo=key == controls.ECHO_ON))
        self._registry.interest.echo_changed(self)
        return True

    def _choose_bundles(self, key: bytes) -> bool:
        """Begin or end bundles.

        A request for bundles counts as unknown if packets must be shorter than bundles.
        """
        transport = self.transport
        if transport is None:
            return False
        wanted = key == controls.BUNDLE_ON
        if wanted and self._registry.limits.max_packet < MIN_BUNDLE_LIMIT:
            return False
        bundles = wanted and transport.start_bundling(MAX_BUNDLE) >= MIN_BUNDLE_LIMIT
        if not bundles:
            transport.stop_bundling()
        self._apply(replace(self.settings, bundles=bundles))
        if bundles == wanted:
            self.reply(key, b"%d" % MAX_BUNDLE if bundles else b"")
        return bundles == wanted

    def _choose_bye(self, key: bytes) -> bool:
        self._apply(replace(self.settings, bye=key == controls.BYE_ON))
        self.reply(key, self._registry.limits.announced if self.settings.bye else b"")
        return True

    def _choose_receipts(self, key: bytes) -> bool:
        self._apply(replace(self.settings, receipts=key == controls.RECEIPTS_ON))
        self.reply(key, b"")
        return True

    def _choose_observer(self, key: bytes) -> bool:
        self._apply(replace(self.settings, observer=key == controls.OBSERVER_ON))
        self._registry.observe(self, self.settings.observer)
        self.reply(key, b"")
        return True

    def _choose_chain(self, key: bytes) -> bool:
        self._apply(replace(self.settings, chain=key == controls.CHAIN_ON))
        self._registry.upstream.observe_name(self, self.settings.chain)
        self.reply(key, b"")
        return True

    def _apply(self, settings: ClientSettings) -> None:
        if self.queue.is_late:
            self._delivery.catch_up(self)
        if settings.order is not self.settings.order or settings.newest_first != self.settings.newest_first:
            self.user.work_left -= len(self.queue) // REORDERED
        self.settings = settings
        self._configure_queue()
        self._has_echo = settings.echo

    def _configure_queue(self) -> None:
        """Tell the queue what the client has chosen; behind a snapshot, each message is kept if there is room."""
        settings = self.settings
        self.queue.configure(settings if self._snapshot is None else replace(settings, soft=DEFAULT_SETTINGS.soft))

    def send_snapshot(self, packets: Generator[bytes | None, None, None], on_over: Callable[[], None]) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        registry, transport = self._registry, self.transport
        if transport is None or self._write_closed:
            on_over()
            return
        registry.flush()
        if self.queue.is_late:
            self._delivery.catch_up(self)
        front, self.queue = self.queue, registry.new_queue(self, self, self.user)
        self._is_loading = True
        self._pause()
        transport.queue = self._snapshot = Snapshot(
            front, packets, self.queue, self, partial(self._snapshot_over, on_over)
        )
        self._configure_queue()
        registry.strategies_changed(self)
        registry.touch(self)

    def _snapshot_over(self, on_over: Callable[[], None]) -> None:
        on_over()
        if self.queue.is_late and self.queue.is_congested:
            self._delivery.catch_up(self)  # it came behind the snapshot, and is kept
        self._snapshot = None
        self._is_loading = False
        if self.transport is not None:
            self.transport.queue = self.queue
        self._delivery.leave_cohort(self)  # what its members have chosen is not what holds from now on
        self._configure_queue()
        self._registry.strategies_changed(self)
        if not self.queue.is_congested:
            self._registry.drained(self, True, True)
        if self.reason is None:
            self._maybe_resume()

    def reply(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        if self._held:
            self._held.append(build(CMSG, key, payload))
            if self._has_replies():
                self._pause()
            return
        self._write(build(CMSG, key, payload), self._registry.touch)

    def hold_replies(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._held.append(None)
        if self._has_replies():
            self._pause()

    def release_reply(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._held[0] = build(CMSG, key, payload)
        while self._held and (packet := self._held[0]) is not None:
            del self._held[0]
            self._write(packet, self._registry.touch_also)
        self._maybe_resume()

    def notify(self, key: bytes, payload: bytes) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._write(build(CMSG, key, payload), self._registry.touch_also)

    def _write(self, packet: bytes, touch: Callable[[Client], None]) -> None:
        self.user.work_left -= REPLY
        if self._write_closed:
            return
        queue = self.queue
        if queue.is_late:
            self._delivery.catch_up(self)
        queue.write(packet)
        if not queue.is_congested:
            touch(self)
        if len(queue.pending) >= MAX_REPLIES:
            self._registry.flush()
        if self._has_replies():
            self._pause()

    def _has_replies(self) -> bool:
        """Return whether the client has to read replies first: too many wait, or its user has no memory for more."""
        replies = self.queue.replies
        return replies + len(self._held) > MAX_REPLIES or (replies > 0 and not self.user.may_hold(0))

    # --- as receiver -------------------------------------------------------------------------

    @property
    def can_block(self) -> bool:
        """See `sbus.server.core.interfaces.Receiver`."""
        return self.queue.can_block

    @property
    def conflated(self) -> int:
        """See `sbus.server.core.interfaces.Client`."""
        return self.queue.conflated

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        """See `sbus.server.core.interfaces.Receiver`."""
        return self.queue.enqueue(packets, may_block)

    def flush(self) -> None:
        """See `sbus.server.core.interfaces.Receiver`."""
        if self.transport is not None:
            self.transport.flush()
        else:
            self.queue.discard_all()

    def memory(self) -> int:
        """See `sbus.server.core.interfaces.Holder`."""
        return (
            CLIENT_MEMORY
            + self.queue.memory
            + self.queue.late_bytes
            + self.pattern_memory
            + self._kept
            + self._in_kernel
        )

    def sample_kernel(self) -> None:
        """See `sbus.server.core.interfaces.Holder`."""
        if self.transport is not None:
            held = self.transport.unread_bytes() + self.transport.partial_bytes()
            self.user.charge_memory(held - self._in_kernel)
            self._in_kernel = held

    def _may_grow(self, size: int) -> bool:
        """Decide whether the send buffer grows."""
        grows = self._registry.memory.may_grow(self.user, size)
        if grows:
            self._buffer += size
        return grows

    def _progress(self) -> tuple[int, int]:
        """What changes when the client reads."""
        return len(self.queue), 0 if self.transport is None else self.transport.unread_bytes()

    def on_drained(self, has_room: bool, is_empty: bool) -> None:
        """See `sbus.flood.QueueOwner`."""
        self._registry.drained(self, has_room, is_empty)
        if self.is_paused:
            self._maybe_resume()
        for hook in self.on_room:
            hook()

    def on_lost(self, losses: tuple[Loss, ...]) -> None:
        """See `sbus.flood.QueueOwner`."""
        self._registry.lost(self, losses)


_HANDLERS: dict[bytes, Callable[[BusProtocol, bytes], bool]] = {
    controls.WHOAMI: BusProtocol._whoami,
    controls.ECHO: BusProtocol._choose_echo,
    controls.BUNDLE: BusProtocol._choose_bundles,
    controls.BYE: BusProtocol._choose_bye,
    controls.RECEIPTS: BusProtocol._choose_receipts,
    controls.OBSERVER: BusProtocol._choose_observer,
    controls.CHAIN: BusProtocol._choose_chain,
}
"""What handles a control message, by its group; it returns whether the message was understood."""
