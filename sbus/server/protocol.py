"""One client's connection to the bus: takes its packets apart and hands them to the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet import error
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.errors import CloseReason, Violation, ViolationReason
from sbus.flood import SendQueue
from sbus.protocol.bundles import MAGIC, MAX_BUNDLE, MIN_BUNDLE_LIMIT, unbundle
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.protocol.packets import CMSG, MSG, SUB, UNSUB, build, parse
from sbus.routing.runs import next_run
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.server.backpressure import Backpressure
from sbus.server.limits import MAX_REPLIES
from sbus.syscalls.batch import BATCH

if TYPE_CHECKING:
    from sbus.server.registry import SubscriptionRegistry

__all__ = ["BusProtocol"]

_WHOAMI = b"!/cred/whoami"
_FANOUT_BUDGET = 48
"""Copies to make in one go, about, while other clients want to be read: they wait for so long."""
_MIN_READ = 4
"""Packets to read in one go at least, however many copies of each are to be made."""
_MAX_RUN = 1024
"""Packets handled at most before they are sent on; bundles, and what was held, can be more."""


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class BusProtocol:
    """A client, as publisher (what it sends) and as receiver (`sbus.flood.Receiver`: what it is sent).

    :ivar number: counts connections, from 1.
    :ivar peer: who it is, by the kernel's word.
    :ivar queue: what is on its way to it.
    :ivar patterns: what it is subscribed to: pattern → (how often, parts of a secret pattern).
    :ivar pattern_bytes: what these cost together (`sbus.server.limits.pattern_cost`).
    :ivar lost: messages that were dropped for it.
    :ivar is_paused: it is not read from, for a receiver's sake or until it takes its replies.
    """

    __slots__ = (
        "_backpressure",
        "_blocked_by",
        "_bundles",
        "_drain_timer",
        "_echo",
        "_fast_path",
        "_registry",
        "_write_closed",
        "is_paused",
        "lost",
        "number",
        "pattern_bytes",
        "patterns",
        "peer",
        "queue",
        "reason",
        "transport",
    )

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self._registry = registry
        self.transport: IPacketTransport | None = None
        self.number = 0
        self.peer = PeerCredentials(0, 0, 0)
        self.queue: SendQueue
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = 0
        self.lost = 0
        self.reason: CloseReason | None = None
        self.is_paused = False
        self._bundles = False
        self._echo = True
        self._fast_path = registry.fast_path
        self._blocked_by: set[Any] | None = None
        self._backpressure: Backpressure | None = None
        self._drain_timer: Any = None
        self._write_closed = False

    # --- the connection ----------------------------------------------------------------------

    def makeConnection(self, transport: IPacketTransport) -> None:  # type: ignore[override]
        """The transport is there (`IProtocol`)."""
        self.transport = transport
        self.peer = transport.credentials
        self.queue = self._registry.new_queue(self)
        transport.queue = self.queue
        self.connectionMade()

    def connectionMade(self) -> None:
        """Ask to be let in (`IProtocol`)."""
        self.reason = self._registry.connected(self)
        if self.reason is not None and self.transport is not None:
            self.transport.abortConnection()

    def close(self, reason: CloseReason) -> None:
        """Disconnect this client; the first reason given stands."""
        if self.transport is not None:
            self.reason = self.reason or reason
            self.transport.abortConnection()

    def readConnectionLost(self) -> None:
        """It sends no more: give it what waits, as long as it takes any, then close (`IHalfCloseableProtocol`)."""
        if self.reason is None and self.transport is not None:
            self.reason = CloseReason.PEER_CLOSED
            self._registry.leave(self)
            if len(self.queue):
                self._drain_timer = self._registry.call_after_block_timeout(self.transport.abortConnection)
            self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """It receives no more; what it has sent still counts (`IHalfCloseableProtocol`)."""
        self._write_closed = True
        self._registry.leave(self)
        self._release()
        self._maybe_resume()

    def connectionLost(self, reason: Failure) -> None:
        """It is gone (`IProtocol`)."""
        if self._drain_timer is not None and self._drain_timer.active():
            self._drain_timer.cancel()
        self._release()
        for receiver in self._blocked_by or ():
            receiver.forget(self)
        self._blocked_by = None
        self.transport = None
        if self.reason is None:
            if reason.check(error.ConnectionDone):
                self.reason = CloseReason.PEER_CLOSED
            elif reason.check(error.ConnectionLost):
                self.reason = CloseReason.PEER_RESET
            else:
                self.reason = CloseReason.SERVER_ERROR
        self._registry.disconnected(self, self.reason)

    # --- as publisher ------------------------------------------------------------------------

    def dataReceived(self, data: bytes) -> None:
        """One packet (`IProtocol`), from a transport that keeps back what comes while it is paused."""
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        """One batch in (`IPacketReceiver`), and one batch out to each receiver.

        Runs of messages that go the same way by a known route are handed on as one. Most often a batch
        is one run.
        """
        registry = self._registry
        routes = registry.routes
        total = len(packets)
        at = 0
        registry.publisher = self
        try:
            if self._fast_path and total <= BATCH and not self.is_paused and self.reason is None:
                receivers, until = next_run(packets, 0, total, routes)
                if until == total and receivers is not None:
                    if total >= _MIN_READ and self.transport is not None:
                        self.transport.read_limit = max(_MIN_READ, min(BATCH, _FANOUT_BUDGET // (len(receivers) or 1)))
                    at = registry.deliver(packets, receivers, at_once=True)
            while at < total and self._may_continue():
                start, end = at, min(at + _MAX_RUN, total)
                while at < end and self._may_continue():
                    if self._fast_path:
                        receivers, until = next_run(packets, at, end, routes)
                        if receivers is not None:
                            is_all = at == start and until == end
                            at += registry.deliver(packets[at:until], receivers, at_once=is_all)
                            continue
                    if self._bundles and packets[at][:4] == MAGIC:  # read before it was asked for
                        parts = unbundle(packets[at : at + 1])
                        if parts[0] is not packets[at]:
                            packets[at : at + 1] = parts
                            total = len(packets)
                            end = min(start + _MAX_RUN, total)
                            continue
                    self._handle(packets[at])
                    at += 1
                registry.flush()
        finally:
            registry.flush()
            registry.publisher = None
        return total if self.reason is not None else at

    def _may_continue(self) -> bool:
        return not self.is_paused and self.reason is None

    def _handle(self, packet: bytes) -> None:
        """Deal with one packet of any kind."""
        key = b""
        try:
            verb, key, payload = parse(packet)
            if verb == MSG:
                self._publish(packet, key, payload)
            elif verb == SUB:
                if not self._write_closed:
                    self._registry.subscribe(self, key)
            elif verb == UNSUB:
                self._registry.unsubscribe(self, key)
            else:
                self._control(verb, key)
        except Violation as violation:
            if self._registry.violated(self, violation, key):
                self.close(CloseReason.VIOLATION)

    def _publish(self, packet: bytes, key: bytes, payload: bytes) -> None:
        registry = self._registry
        receivers = registry.route(key)
        registry.check_publish(self, key, payload)
        if not self._echo and self in receivers:
            receivers = tuple(receiver for receiver in receivers if receiver is not self)
        registry.deliver([packet], receivers)

    def _control(self, verb: bytes, key: bytes) -> None:
        registry = self._registry
        if not registry.dialect.control:
            raise Violation(ViolationReason.UNKNOWN_VERB)
        controls = registry.controls
        if key == _WHOAMI:
            self._reply(build(CMSG, key, b"!/cred/%d/%d/%d" % (self.peer.gid, self.peer.uid, self.peer.pid)))
        elif key in controls.soft:
            self._choose(soft=controls.soft[key])
        elif key in controls.hard:
            self._choose(hard=controls.hard[key])
        elif key in controls.orders:
            self.queue.set_order(controls.orders[key])
        elif key in (b"echo/on", b"echo/off"):
            self._echo = key == b"echo/on"
            self._fast_path = self._echo and registry.fast_path
        elif key == b"bundle/on" and self._can_bundle():
            self._reply(build(CMSG, key, b"%d" % MAX_BUNDLE))
        elif key == b"bundle/off" and self.transport is not None:
            self._bundles = False
            self.transport.stop_bundling()
            self._reply(build(CMSG, key, b""))
        else:
            registry.counters.unknown_controls += 1

    def _can_bundle(self) -> bool:
        """Begin with bundles, if packets may be long enough here."""
        if self.transport is not None and self._registry.limits.max_packet >= MIN_BUNDLE_LIMIT:
            self._bundles = self.transport.start_bundling(MAX_BUNDLE) >= MIN_BUNDLE_LIMIT
            if not self._bundles:
                self.transport.stop_bundling()
        return self._bundles

    def _reply(self, packet: bytes) -> None:
        self.queue.write(packet)
        if not self.queue.is_congested:
            self._registry.touch(self)
        if len(self.queue.pending) >= MAX_REPLIES:
            self._registry.flush()
        if self.queue.replies > MAX_REPLIES:
            self._pause()

    def block_on(self, receiver: Any) -> None:
        """A receiver holds this client back (`sbus.server.backpressure.Publisher`)."""
        if self._blocked_by is None:
            self._blocked_by = set()
        self._blocked_by.add(receiver)
        self._pause()

    def unblock(self, receiver: Any) -> None:
        """That receiver no longer does (`sbus.server.backpressure.Publisher`)."""
        if self._blocked_by is not None:
            self._blocked_by.discard(receiver)
        self._maybe_resume()

    def _pause(self) -> None:
        if not self.is_paused and self.transport is not None:
            self.is_paused = True
            self.transport.pauseProducing()

    def _maybe_resume(self) -> None:
        if self.is_paused and not self._blocked_by and self.queue.replies <= MAX_REPLIES:
            self.is_paused = False
            if self.transport is not None:
                self.transport.resumeProducing()

    # --- as receiver -------------------------------------------------------------------------

    def _choose(self, **strategies: Any) -> None:
        self.queue.set_strategies(**strategies)
        if self._backpressure is not None:
            self._backpressure.reconsider()
        self._registry.congested(self)

    def mayBlock(self) -> bool:
        """See `sbus.flood.Receiver`."""
        return self.reason is None and self._registry.mayBlock(self)

    def block(self, until_empty: bool) -> None:
        """See `sbus.flood.Receiver`."""
        publisher = self._registry.publisher
        if publisher is not None:
            if self._backpressure is None:
                self._backpressure = self._registry.new_backpressure(self)
            self._backpressure.block_on(publisher, until_empty)

    def on_drained(self, room: bool, empty: bool) -> None:
        """See `sbus.flood.Receiver`."""
        if self._backpressure is not None:
            self._backpressure.on_drained(room, empty)
        if self.is_paused:
            self._maybe_resume()

    def congested(self, now: bool) -> None:
        """See `sbus.flood.Receiver`."""
        self._registry.congested(self)

    def dropped(self, packets: int, size: int) -> None:
        """See `sbus.flood.Receiver`."""
        self.lost += packets
        self._registry.dropped(self, packets, size)

    def on_overflow(self, reason: CloseReason) -> None:
        """See `sbus.flood.Receiver`."""
        self.close(reason)

    def block_timed_out(self) -> None:
        """It has held publishers back and taken nothing for the whole time-out."""
        self.close(CloseReason.BLOCKED_TOO_LONG)
        self._release()

    def forget(self, publisher: Any) -> None:
        """A publisher that it holds back is gone."""
        if self._backpressure is not None:
            self._backpressure.discard(publisher)

    def _release(self) -> None:
        if self._backpressure is not None:
            self._backpressure.release()
