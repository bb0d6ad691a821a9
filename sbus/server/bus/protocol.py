"""One client's connection to the bus: how it begins, publishes and ends.

.. rubric:: Theory of operation

A connection has two halves that share little. The *receiver* is the base class (`sbus.server.bus.receiving`), with a
queue from which the transport sends. The *publisher* is here: it gets batches of packets from its transport, and hands
them to the registry: whole runs of messages, and any other packet one by one. Control messages go to
`sbus.server.bus.choices`.

=====================  ============================================================================================
batch                  what happens
=====================  ============================================================================================
one run                delivered at once, nothing is parsed; the clock is read only while several users are active.
                       This way ends as soon as packets of the client are kept, or the client is closed
large, one receiver    the same, but each packet after the first is sent on as it is read, unseen (`find_outlet`)
anything else          the loop of `BusProtocol._handle_batch`: runs, and other packets one by one, until the client
                       is paused or closed, or its user's time is over; the transport keeps the rest
in its user's turn     the same, from `BusProtocol.read_on`
=====================  ============================================================================================

A long run is cut to `MOST_COPIES`. If many of them are made at once, it is also cut to the time that is left, judged by
earlier copies on its route. After `MAX_RUN` packets of a bundle the queues are flushed, so that flood control learns of
a full socket. While other clients wait to be read, a publisher is read in batches of about `FANOUT_BUDGET` copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from twisted.internet import error
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.errors import CloseReason, Violation, ViolationReason
from sbus.policy.rules import ALLOWED
from sbus.protocol.bundles import MAGIC, unbundle
from sbus.protocol.controls import LAST
from sbus.protocol.packets import CMSG, FMSG, MSG, SUB, UNSUB, parse
from sbus.routing.cache import LONGEST_KEY
from sbus.routing.route import Route
from sbus.routing.runs import next_run, total_size
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport, Outlet
from sbus.seqpacket.send_buffer import START
from sbus.server.bus import choices, payload_checks
from sbus.server.bus.departure import Departure
from sbus.server.bus.memory import CLIENT_MEMORY, KEPT_PACKET
from sbus.server.bus.pace import Pace
from sbus.server.bus.receiving import ReceivingHalf
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Receiver, Rights
from sbus.server.core.listeners import MAIN, Listener
from sbus.server.core.permissions import verdict_of
from sbus.syscalls.batch import BATCH
from sbus.syscalls.memfd import Attached

__all__ = ["FANOUT_BUDGET", "LONG_RUN", "MAX_RUN", "MIN_READ", "MOST_COPIES", "BusProtocol"]

FANOUT_BUDGET = 48
"""Copies to make for one read of a publisher, about, while other clients wait to be read."""
MIN_READ = 4
"""Packets to read from a publisher in one go at least, however many copies of each are made."""
_MANY_SERVED = FANOUT_BUDGET // MIN_READ
_READ_LIMITS = [FANOUT_BUDGET // max(1, served) for served in range(_MANY_SERVED)]
"""Packets to read in one go, for fewer than `_MANY_SERVED` receivers of the last run."""
MAX_RUN = 1024
"""Packets handled at most before the queues are flushed; a batch of bundles can hold more."""
LONG_RUN = 1024
"""Copies of a run from which on it is cut to the time that is left: about half a millisecond (row ``sibling``, whose
runs make 4,096)."""
MOST_COPIES = 32_768
"""Copies of a run, at most, if it has more than one message. As mail they take their user 30 ms; a publisher that is
alone has room for 200 ms there (row ``eager-most``, whose runs have 3,901 copies of each message)."""
_MESSAGE, _PAYLOAD = MSG + b" ", FMSG + b" "


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class BusProtocol(ReceivingHalf):
    """A client's connection: a `sbus.server.core.interfaces.Client`.

    :param listener: the socket at which the client has connected.
    """

    __slots__ = ("_departure", "_fast_path")

    def __init__(self, registry: SubscriptionRegistry, listener: Listener = MAIN) -> None:
        super().__init__(registry, listener)
        self._fast_path = False  # not before the first batch
        self._departure: Departure | None = None

    # --- the connection ----------------------------------------------------------------------

    def makeConnection(self, transport: IPacketTransport) -> None:  # type: ignore[override]
        """Take the transport (`IProtocol`)."""
        self.transport = transport
        self.peer = transport.credentials
        self._join(transport, self.registry.connect_user(self.peer))
        transport.may_grow = self._may_grow
        transport.before_read = self._before_read
        transport.find_outlet = self._find_outlet
        transport.on_writable = self._writable
        self.user.charge_memory(CLIENT_MEMORY)
        self._buffer = START + transport.partial_limit()
        self.registry.memory.add_buffer(self.user, self._buffer)
        self.connectionMade()

    def connectionMade(self) -> None:
        """Ask the registry to admit the client (`IProtocol`)."""
        self.reason = self.registry.connected(self)
        if self.reason is not None:
            self._depart().begin(None)

    def _depart(self) -> Departure:
        if self._departure is None:
            self._departure = Departure(self)
        return self._departure

    def detach(self) -> None:
        """See `ReceivingHalf.detach`."""
        super().detach()
        self._departure = None

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Disconnect this client; the first reason given stands, unless that is that the client has shut down writing.

        :param detail: more about the reason, for the client itself.
        """
        if self.reason is None or (self.reason is CloseReason.PEER_CLOSED and self.transport is not None):
            self.reason = reason
        self._fast_path = False
        if self.transport is not None:
            self._depart().begin(reason, detail)

    def readConnectionLost(self) -> None:
        """Send the client its queue, as long as it reads, then close (`IHalfCloseableProtocol`)."""
        if self.reason is None and self.transport is not None:
            self.reason = CloseReason.PEER_CLOSED
            self._fast_path = False
            self._depart().drain()

    def writeConnectionLost(self) -> None:
        """Drop the client's subscriptions, and handle the packets that it has sent.

        This is `IHalfCloseableProtocol`.
        """
        if self._is_waiting and self.transport is not None and self.transport.has_hung_up:
            self._scheduler.hang_up(self.user.lines, self)
        self._depart().deafen()
        self._maybe_resume()

    def connectionLost(self, reason: Failure) -> None:
        """Forget the client (`IProtocol`)."""
        if self._pace is not None:
            self._pace.stop()
        self.transport = None
        self._fast_path = False
        if self.reason is None:
            if reason.check(error.ConnectionDone):
                self.reason = CloseReason.PEER_CLOSED
            elif reason.check(error.ConnectionLost):
                self.reason = CloseReason.PEER_RESET
            else:
                self.reason = CloseReason.SERVER_ERROR
        self._depart().lose()

    def describe(self) -> dict[str, Any]:
        """Return the state of this connection as plain values, without its queued packets."""
        return {
            "number": self.number,
            "peer": tuple(self.peer),
            "signature": self.signature.notice,
            "listener": self.listener.name,
            "patterns": {pattern: count for pattern, (count, _) in self.patterns.items()},
            "lost": self.lost,
            "untold": self.untold,
            "connected_at": self.connected_at,
            "settings": self.settings.describe(),
            "is_write_closed": self.is_write_closed,
            "reason": None if self.reason is None else self.reason.name,
        }

    # --- as publisher ------------------------------------------------------------------------

    def dataReceived(self, data: bytes) -> None:
        """Handle one packet (`IProtocol`); the transport keeps packets back while it is paused."""
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """Handle a batch of packets, and flush the queues of the receivers it touched.

        This is `IPacketReceiver`.
        """
        registry, scheduler, lines = self.registry, self._scheduler, self.user.lines
        total, at = len(packets), 0
        if scheduler.last is not lines:
            scheduler.change(lines)
        elif scheduler.crowd:
            scheduler.count_batch()
        is_busy = scheduler.is_busy
        if self._fast_path and (not is_busy or scheduler.may_go_on(lines)):
            route, until = next_run(packets, 0, total, registry.routes)
            if (
                until == total <= BATCH
                and route is not None
                and (total * len(route.receivers) < LONG_RUN or (total == 1 and self.has_echo))
                and (self.is_free or self._may_hand(route))
            ):
                delivery = self._delivery
                if is_busy:
                    scheduler.begin(lines, total)
                try:
                    at = registry.deliver(packets, route, self, True)
                    if total >= MIN_READ and self.transport is not None:
                        served = delivery.served
                        self.transport.read_limit = _READ_LIMITS[served] if served < _MANY_SERVED else MIN_READ
                finally:
                    if delivery.touched:
                        delivery.flush()
                    if is_busy:
                        scheduler.end(lines)
                if at == total:
                    return total  # as nearly always
        return self._handle_batch(packets, at)

    def use_rights(self, rights: Rights) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._rights = rights
        self.is_free = self.has_echo and rights.publishes_all
        self._fast_path = False  # not before the next batch
        if self._pace is not None:
            self._pace.stop()
        self._pace = None
        if rights.rates:
            self._pace = self.registry.guard.paces.of(self.user.uid, rights.rates, self._maybe_resume)
        self._maybe_resume()

    def forget_rights(self) -> None:
        """See `sbus.server.core.interfaces.Client`."""
        self._rights = None
        self.is_free = self._fast_path = False

    def _may_hand(self, route: Route[Receiver]) -> bool:
        """Return whether a client that is not free may have a run handed to a route as it is."""
        rights = self._rights
        is_allowed = rights is not None and (rights.publishes_all or route.verdicts.get(rights) is ALLOWED)
        return is_allowed and (self.has_echo or self not in route.receivers)

    def _find_outlet(self, head: bytes) -> Outlet | None:
        """Return the outlet of messages that begin like this, if a run of them would be delivered at once."""
        registry, delivery, scheduler = self.registry, self._delivery, self._scheduler
        if scheduler.last is not self.user.lines:
            scheduler.change(self.user.lines)
        is_open = self._fast_path and not (self.is_paused or scheduler.is_busy) and head.startswith(_MESSAGE)
        route = registry.routes.get(head[4:-1]) if is_open else None
        if route is None or not (self.is_free or self._may_hand(route)):
            return None
        return delivery.find_outlet(route) if registry.deliver == delivery.deliver else None  # a tap sees each message

    def _handle_batch(self, packets: list[bytes], at: int) -> int:
        """Handle a batch of any packets, from one of them on, as far as that can go now; keep the rest.

        :returns: see `packetsReceived`.
        """
        registry, scheduler, lines = self.registry, self._scheduler, self.user.lines
        total = len(packets)
        if self.reason is None and not self.is_paused:
            if scheduler.is_busy and not scheduler.may_go_on(lines):
                self._wait(scheduler.wait)
            else:
                until = scheduler.begin(lines, total - at)
                try:
                    if self._rights is None:
                        registry.guard.admit(self)
                    if self._pace is None:
                        at, total = self._handle_some(packets, at, until)
                    else:
                        at, total = self._handle_paced(packets, at, until, self._pace)
                finally:
                    if self._delivery.touched:
                        self._delivery.flush()
                    scheduler.end(self.user.lines)  # a client that has become a service belongs to another one now
                if at < total and self.reason is None and not self.is_paused:
                    self._wait(scheduler.wait)
        if at < total:
            if not self._kept:
                self._keep(packets[at:] if at else packets)
        elif self._kept:
            self._release_kept()
        self._fast_path = registry.fast_path and not (self._kept or self.is_paused or self.reason or self._pace)
        return total if self.reason is not None else at

    def _handle_some(self, packets: list[bytes], at: int, until: int, last: int = sys.maxsize) -> tuple[int, int]:
        """Handle packets until the clock shows `until`, at least one of them.

        :param last: the packets, from the front, that may be handled, with bundles taken apart.
        :returns: those that are handled, and those that can be: `last`, or the number of all now.
        """
        registry, clock = self.registry, self._scheduler.clock
        total = min(len(packets), last)
        is_over = False
        while at < total and not is_over and self._may_continue():
            start, end = at, min(at + MAX_RUN, total)
            while at < end and not is_over and self._may_continue():
                if registry.fast_path and type(packets[at]) is not Attached:
                    route, stop = next_run(packets, at, end, registry.routes)
                    if route is None and self._learn(packets, at, end, until):
                        route, stop = next_run(packets, at, end, registry.routes)
                    if route is not None and (
                        self.rights.publishes_all or registry.guard.allows_run(self, packets[at], route)
                    ):
                        count = self._deliver_run(packets, at, stop, route, until, at == start and stop == end)
                        if not count:
                            if not self.is_paused:
                                self._wait(self._scheduler.hold)
                            break
                        at += count
                        is_over = clock() >= until
                        continue
                if self.settings.bundles and packets[at][:4] == MAGIC:  # read before the client asked, or with memory
                    packet = packets[at]
                    parts = packet.parts() if type(packet) is Attached else unbundle([packet])
                    if parts[0] is not packet:
                        packets[at : at + 1] = parts
                        total = min(len(packets), last)
                        end = min(start + MAX_RUN, total)
                        continue
                if not self._handle(packets[at]):
                    break
                at += 1
                is_over = clock() >= until
            self._delivery.flush()
        return at, total

    def _handle_paced(self, packets: list[bytes], at: int, until: int, pace: Pace) -> tuple[int, int]:
        """Do as `_handle_some`, as far as the pace of the client's user permits; wait if that is not all."""
        done, last = self._handle_some(packets, at, until, at + pace.quota())
        pace.spend(done - at)
        if done == last and done < len(packets) and self._pace is pace:
            pace.wait()
            self.pause()
        return done, len(packets)

    def _deliver_run(
        self, packets: list[bytes], at: int, stop: int, route: Route[Receiver], until: int, is_whole: bool
    ) -> int:
        """Deliver a run, or the part of a long one for which there is time; see `Delivery.deliver`."""
        registry, scheduler, copies = self.registry, self._scheduler, len(route.receivers)
        is_long, began = False, 0
        if (stop - at) * copies >= LONG_RUN:
            most = at + max(1, MOST_COPIES // copies)
            if most < stop:
                stop, is_whole = most, False
            copies = self._delivery.copies_at_once(packets[at:stop], route, self)
            is_long = (stop - at) * copies >= LONG_RUN
        if is_long:
            began = scheduler.working_time()
            affordable = at + max(1, (until - scheduler.clock()) // (copies * route.ns))
            if affordable < stop:
                stop, is_whole = affordable, False
        at_once = is_whole or is_long or stop - at >= BATCH
        count = registry.deliver(packets[at:stop], route, self, at_once, self.has_echo)
        if is_long and count:
            self._delivery.flush()  # sending takes most of the time
            route.learn(count * copies, scheduler.working_time() - began)
        return count

    def _learn(self, packets: list[bytes], start: int, end: int, until: int) -> bool:
        """Look up the new keys of the messages from `start` on, as far as there is time, so that they make runs.

        A user who subscribes to everything and leaves, all day, makes all keys new again and again. Handled one by one,
        their messages would cost three times as much.

        At most `BATCH` messages are looked at: a batch of bundles may hold more keys than the cache, which would forget
        the first ones before they are used, again for each message.

        :returns: whether the first message has a known route now.
        """
        registry, clock = self.registry, self._scheduler.clock
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
            if first is None:
                first = key
            if key not in routes or clock() >= until:
                break
        return first is not None and first in routes

    def _keep(self, packets: list[bytes]) -> None:
        """Charge packets that the transport keeps until they can be handled.

        They are given back when the last one has been handled: counting the rest at each turn would cost as much as a
        turn.
        """
        if self.reason is None:
            self._release_kept()
            self._fast_path = False
            self._kept = total_size(packets) + KEPT_PACKET * len(packets)
            self.user.charge_memory(self._kept)
            self.registry.memory.check()

    def _release_kept(self) -> None:
        self.user.charge_memory(-self._kept)
        self._kept = 0

    def _before_read(self) -> None:
        """Wait for a turn instead, if the user has no time left, or others of the user wait."""
        scheduler, lines = self._scheduler, self.user.lines
        if scheduler.last is not lines:
            scheduler.change(lines)  # reading takes time, too, whatever its result
        if scheduler.is_busy and self.reason is None and not scheduler.may_read(lines):
            self._wait(scheduler.wait)

    def _wait(self, wait: Callable[..., None]) -> None:
        """Wait to be read: with `Scheduler.wait` for a turn of its user, with `hold` for room in that user's mail."""
        transport = self.transport
        if not self._is_waiting and transport is not None:
            self._is_waiting = True
            self.pause()
            wait(self.user.lines, self, transport.has_hung_up)

    def read_on(self, until: int) -> None:
        """See `sbus.fair.Reader`."""
        self._is_waiting = False
        if self._is_readable() and self.transport is not None:
            self.is_paused = False
            self.transport.read_on()

    def _may_continue(self) -> bool:
        return not self.is_paused and self.reason is None

    def _handle(self, packet: bytes) -> bool:
        """Handle one packet of any kind.

        :returns: False if it is a message that has to wait for room: it is to be handled again.
        """
        verb = key = b""
        try:
            if type(packet) is Attached and not packet.startswith(_PAYLOAD):
                raise Violation(ViolationReason.BAD_DESCRIPTORS)
            verb, key, payload = parse(packet)
            if verb == MSG:
                return self._publish(packet, key, payload)
            if verb == SUB:
                if not self.is_write_closed:
                    self.registry.subscribe(self, key)
            elif verb == UNSUB:
                self.registry.unsubscribe(self, key)
            elif verb == FMSG:
                is_done = payload_checks.publish(self, packet, key, payload)
                if not is_done:
                    self._wait(self._scheduler.hold)
                return is_done
            else:
                choices.handle(self, key, payload if len(packet) > len(CMSG) + 1 + len(key) else None)
        except Violation as violation:
            self._refuse(violation, verb, key if key != LAST or verb != CMSG else payload)
        return True

    def _refuse(self, violation: Violation, verb: bytes, key: bytes) -> None:
        """Refuse a packet: send the client a denial, or disconnect it."""
        verdict = verdict_of(violation)
        if verdict is not None and self.registry.guard.deny(self, verb, key, verdict):
            return
        if self.registry.violated(self, violation, key):
            reason = CloseReason.USER_LIMIT if violation.reason.is_user_limit else CloseReason.VIOLATION
            self.close(reason, str(violation))

    def _publish(self, packet: bytes, key: bytes, payload: bytes) -> bool:
        registry = self.registry
        route = registry.route(key)
        if not registry.delivery.has_room_for(packet, route, self):
            self._wait(self._scheduler.hold)
            return False
        registry.guard.check_publication(self, key, payload, route)
        registry.deliver([packet], route, self, False, self.has_echo)
        return True
