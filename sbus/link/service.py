"""The link between two buses as a Twisted service: the connections, their queues, and time.

`sbus.link.core` decides what a link says and carries. This module connects to both buses, again after 0.1 s, doubling
to 5 s, and moves packets.

A bus that takes packets more slowly than the other sends them fills its queue here. Above `HIGH_WATER` the other
connection is not read from, so that the other bus queues for the link, in a queue that the publishers' users share
(`sbus.flood.shared`). The queue here is short, because each message in it waits for all earlier ones. Both connections
are non-blocking, and a link never chooses *block*, so nobody waits for it.

Stopping: the link shuts down its sending side at the bus below, which sends its queue, and closes; the link passes that
on and closes the connection above, all within `STOP_TIMEOUT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from twisted.internet import defer, error
from twisted.internet.interfaces import IAddress, IDelayedCall, IHalfCloseableProtocol, IProtocol, ITransport
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.client.connecting import Backoff, describe_connect_error
from sbus.daemon.service import Service
from sbus.flood.fifo import FifoQueue
from sbus.link.core import LinkCore, Side
from sbus.protocol.explain import hints
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.routing.runs import next_run, total_size
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint
from sbus.seqpacket.interfaces import IPacketReceiver
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.sockets import LONGEST_PACKET, grow_send_buffer

__all__ = ["HIGH_WATER", "STOP_TIMEOUT", "LinkService"]

HIGH_WATER = 256 << 10
"""Bytes in the queue for one bus above which the other bus is not read from; below a quarter it is read again."""
STOP_TIMEOUT = 5.0
"""Seconds for which a link that stops passes on the messages queued for it."""
_BACKOFF = Backoff(first=0.1, factor=2.0, longest=5.0, spread=0.0)
_REPORT_INTERVAL = 60.0
"""Seconds between two log lines with the same reason why there is no link."""


class _Queue(FifoQueue):
    """The packets on their way to one bus.

    :param on_lost: called with the messages that can no longer be sent.
    :param on_room: called when the queue has become short.
    """

    __slots__ = ("_is_high", "_on_lost", "_on_room")

    def __init__(self, on_lost: Callable[[int], object], on_room: Callable[[], object]) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._on_room = on_room
        self._is_high = False

    def extend(self, packets: list[bytes]) -> bool:
        """Add packets; return whether the queue is too long now."""
        self._packets += packets
        self._size += total_size(packets)
        self._is_high = self._is_high or self._size > HIGH_WATER
        return self._is_high

    def ack(self, taken: list[bytes], sent: int) -> None:
        super().ack(taken, sent)
        self._check_room()

    def _check_room(self) -> None:
        if self._is_high and self._size <= HIGH_WATER // 4:
            self._is_high = False
            self._on_room()

    def reject_oversized(self, taken: list[bytes], at: int) -> bool:
        """Drop a packet that no socket takes."""
        self._on_lost(1)
        return True

    def discard_all(self, taken: Any = ()) -> None:
        if self._packets:
            self._on_lost(sum(packet.startswith(b"MSG ") for packet in self._packets))
        super().discard_all(taken)
        self._check_room()


@implementer(IProtocol, IPacketReceiver, IHalfCloseableProtocol)
class _Connection:
    """A connection to one bus."""

    def __init__(self, link: LinkService, side: Side) -> None:
        self._link = link
        self.side = side
        self._other = side.other
        self.transport: PacketTransport | None = None
        self.queue = _Queue(lambda count: link.core.lose(side.other, count), lambda: link.resume(side.other))
        self._is_paused = False
        self._core = link.core
        self._known = link.core.known[side]
        self.limit = 0  # bytes of the longest packet that the other bus takes, if this one sends longer ones

    def makeConnection(self, transport: ITransport) -> None:
        self.transport = cast("PacketTransport", transport)
        self.transport.queue = self.queue

    def connectionMade(self) -> None:
        """Do nothing more (`IProtocol`)."""

    def dataReceived(self, data: bytes) -> None:
        self.packetsReceived([data])

    def packetsReceived(self, packets: list[bytes]) -> int:
        link, side, core = self._link, self.side, self._core
        if self.limit:
            link.drop_long(self, packets)
        if core.is_up and link.connections[side] is self:
            total = len(packets)
            found, until = next_run(packets, 0, total, self._known)
            if until == total and found is not None:  # as nearly always
                core.carried[side] += total
                link.send(self._other, packets)
                if True in link.touched:
                    link.flush(False)
                return total
        left = self._link.received(self, packets)
        return len(packets) - left  # counted now: the core has taken bundles apart in this list

    def pause(self) -> bool:
        """Read no more; return False if that was so already."""
        if self._is_paused or self.transport is None:
            return False
        self._is_paused = True
        self.transport.pauseProducing()
        return True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self.transport is not None:
                self.transport.resumeProducing()

    def readConnectionLost(self) -> None:
        """The bus has closed; all that it sent has been read (`IHalfCloseableProtocol`)."""
        self._link.ended(self, "it closed the connection")
        if self.transport is not None:
            self.transport.loseConnection()

    def writeConnectionLost(self) -> None:
        """Read to the end: the bus takes no more packets (`IHalfCloseableProtocol`)."""
        self.resume()

    def connectionLost(self, reason: Failure) -> None:
        self.transport = None
        clean = reason.check(error.ConnectionDone)
        self._link.ended(self, "it closed the connection" if clean else reason.getErrorMessage())


class _Factory(Factory):
    noisy = False

    def __init__(self, protocol: _Connection) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: IAddress | None) -> Any:
        return self._protocol


class LinkService(Service):
    """A link between two buses; it can be started and stopped any number of times.

    :param reactor: the reactor to connect with.
    :param below: the address of the bus below.
    :param above: the address of its master.
    :param out: the patterns that may go up.
    :param into: the patterns that may come down.
    :param secrets: whether secret messages that are not for the bus below go up.
    :param max_packet: bytes in the longest packet of a bus that does not say its limit.
    :ivar core: what the link knows and has counted.
    """

    log_ = Logger(namespace="sbus.link")

    def __init__(
        self,
        reactor: Any,
        below: str,
        above: str,
        out: Iterable[bytes] = (),
        into: Iterable[bytes] = (),
        *,
        secrets: bool = False,
        max_packet: int = DEFAULT_MAX_PACKET,
    ) -> None:
        self._reactor = reactor
        self._addresses = (below, above)
        self._endpoints = tuple(
            SeqpacketClientEndpoint(reactor, address, timeout=5.0, max_packet=max_packet) for address in self._addresses
        )
        self._max_packet = max_packet
        self._limits = [0, 0]  # of the two buses, as far as they have said
        self.connections: list[_Connection | None] = [None, None]
        self._delays = [_BACKOFF.delays(), _BACKOFF.delays()]
        self._attempts: list[defer.Deferred[None] | None] = [None, None]
        self.touched = [False, False]
        self._is_receiving = False
        self._timer: IDelayedCall | None = None
        self._reports = [("", 0.0), ("", 0.0)]
        self._stopped: defer.Deferred[None] | None = None
        self._listed = (*(out := tuple(out)), *(into := tuple(into)))
        self.core = LinkCore(self, out, into, secrets=secrets)

    # --- the service -------------------------------------------------------------------------

    def startService(self) -> None:
        """Connect to both buses."""
        for line in hints(self._listed):
            self.log(line)
        super().startService()
        for side in Side:
            self._connect_after(side, next(self._delays[side]))

    def stopService(self) -> defer.Deferred[None]:
        """Pass on the messages queued for the link, and disconnect."""
        super().stopService()
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        for attempt in self._attempts:
            if attempt is not None:
                attempt.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stopped = defer.Deferred()
        deadline = self._reactor.callLater(STOP_TIMEOUT, self._abort)
        below, above = self.connections
        if below is not None and below.transport is not None and self.core.is_up:
            below.transport.loseWriteConnection()
        else:
            for connection in (below, above):
                if connection is not None and connection.transport is not None:
                    connection.transport.loseConnection()
        self._check_stopped()
        await self._stopped
        if deadline.active():
            deadline.cancel()
        self._stopped = None
        for side in (Side.ABOVE, Side.BELOW):
            self.core.disconnected(side)

    def _abort(self) -> None:
        for connection in self.connections:
            if connection is not None and connection.transport is not None:
                connection.transport.abortConnection()

    def _check_stopped(self) -> None:
        if self._stopped is not None and not self._stopped.called and self.connections == [None, None]:
            self._stopped.callback(None)

    # --- connecting --------------------------------------------------------------------------

    def _connect_after(self, side: Side, delay: float) -> None:
        if self.running and self._attempts[side] is None and self.connections[side] is None:
            attempt = self._attempts[side] = defer.Deferred.fromCoroutine(self._connect(side, delay))
            attempt.addErrback(lambda failure: None if failure.check(defer.CancelledError) else failure)
            attempt.addErrback(lambda failure: self.log_.failure("Error in connecting", failure=failure))

    async def _connect(self, side: Side, delay: float) -> None:
        try:
            await deferLater(self._reactor, delay)
            while True:
                connection = _Connection(self, side)
                try:
                    await self._endpoints[side].connect(_Factory(connection))
                    break
                except error.ConnectError as e:
                    self._report(side, describe_connect_error(self._addresses[side], e))
                await deferLater(self._reactor, next(self._delays[side]))
        finally:
            self._attempts[side] = None
        self.connections[side] = connection
        self.core.connected(side)
        self.flush()

    def ended(self, connection: _Connection, why: str) -> None:
        """Note the end of a connection, and connect again; called once or twice."""
        side = connection.side
        if self.connections[side] is not connection:
            return
        if side is Side.BELOW and self._stopped is not None:
            above = self.connections[Side.ABOVE]
            if above is not None and above.transport is not None:
                above.transport.loseConnection()
        self.connections[side] = None
        connection.queue.discard_all()
        if self._stopped is None:
            self._report(side, f"the connection to {self._addresses[side]} was lost: {why}")
            self.core.disconnected(side)
            self.flush()
            self._connect_after(side, next(self._delays[side]))
        self._check_stopped()

    def _report(self, side: Side, reason: str) -> None:
        """Log why there is no link: at once, when the reason changes, and at intervals."""
        now = self._reactor.seconds()
        text, at = self._reports[side]
        if reason != text or now - at >= _REPORT_INTERVAL:
            self._reports[side] = (reason, now)
            self.log_.warn("no link: {reason}; trying again", reason=reason)

    # --- packets -----------------------------------------------------------------------------

    def received(self, connection: _Connection, packets: list[bytes]) -> int:
        """Handle a batch from one bus; return the number of packets at its end to be handed over again."""
        if self.connections[connection.side] is not connection:
            return 0
        self._is_receiving = True
        try:
            is_due_changed = self.core.received(connection.side, packets, self._reactor.seconds())
        finally:
            self._is_receiving = False
        left = self.core.left
        if left and connection.pause():
            self._reactor.callLater(0, connection.resume)
        if is_due_changed or True in self.touched:
            self.flush(is_due_changed)
        return left

    def limit(self, side: Side, size: int) -> None:
        """See `sbus.link.core.Wire`."""
        self._limits[side] = min(size, LONGEST_PACKET)
        connection = self.connections[side]
        if connection is not None and size and connection.transport is not None:
            connection.transport.ensure_max_packet(self._limits[side])
            grow_send_buffer(connection.transport.getHandle(), self._limits[side])
        below, above = (limit or self._max_packet for limit in self._limits)
        for each, own, other in ((self.connections[0], below, above), (self.connections[1], above, below)):
            if each is not None:
                each.limit = other if own > other else 0

    def drop_long(self, connection: _Connection, packets: list[bytes]) -> None:
        """Take the messages out of a batch that are longer than what the other bus takes."""
        kept = []
        for packet in packets:
            if len(packet) <= connection.limit or not packet.startswith(b"MSG "):
                kept.append(packet)
                continue
            self.core.lose(connection.side, 1)
            name = self._addresses[connection.side.other]
            why = f"it has {len(packet)} bytes, and {name} takes {connection.limit} (--max-packet)"
            self.core.log_long(why, self._reactor.seconds())
        packets[:] = kept

    def resume(self, side: Side) -> None:
        """Read from a bus again."""
        connection = self.connections[side]
        if connection is not None:
            connection.resume()

    def flush(self, is_due_changed: bool = True) -> None:
        """Send the queued packets, and set the timer."""
        if self._is_receiving:
            return
        for side in Side:
            if self.touched[side]:
                self.touched[side] = False
                connection = self.connections[side]
                if connection is not None and connection.transport is not None:
                    connection.transport.flush()
        if not is_due_changed:
            return
        now = self._reactor.seconds()
        due = self.core.due(now) if self.running else None
        if due is None:
            return
        if self._timer is not None:
            if self._timer.getTime() <= due + 0.001:
                return
            self._timer.cancel()
        self._timer = self._reactor.callLater(max(0.001, due - now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.core.tick(self._reactor.seconds())
        self.flush()

    # --- `sbus.link.core.Wire` ---------------------------------------------------------------

    def send(self, side: Side, packets: list[bytes]) -> None:
        """See `sbus.link.core.Wire`."""
        connection = self.connections[side]
        if connection is None:
            return
        transport = connection.transport
        if transport is not None and not connection.queue:
            sent = transport.try_send(packets)
            if sent == len(packets):
                return
            packets = packets[sent:]
        self.touched[side] = True
        if connection.queue.extend(packets):
            source = self.connections[side.other]
            if source is not None:
                source.pause()

    def bundle(self, side: Side, limit: int) -> None:
        """See `sbus.link.core.Wire`."""
        connection = self.connections[side]
        if connection is not None and connection.transport is not None:
            connection.transport.start_bundling(limit)

    def disconnect(self, side: Side, reason: str, retry: float | None) -> None:
        """See `sbus.link.core.Wire`."""
        self._report(side, reason)
        connection, self.connections[side] = self.connections[side], None
        if connection is not None:
            connection.queue.discard_all()
            if connection.transport is not None:
                connection.transport.abortConnection()
        if self._stopped is None:
            self._connect_after(side, next(self._delays[side]) if retry is None else retry)

    def is_up(self, up: bool, master: str) -> None:
        """See `sbus.link.core.Wire`."""
        if up:
            self._delays = [_BACKOFF.delays(), _BACKOFF.delays()]
            for delays in self._delays:
                next(delays)  # a master that ends each connection at once is not tried without a pause
            self._reports = [("", 0.0), ("", 0.0)]
            self.log_.info(
                "linked to {master} at {address}; lost so far: {up} messages up, {down} down",
                master=master,
                address=self._addresses[Side.ABOVE],
                up=self.core.lost[Side.BELOW],
                down=self.core.lost[Side.ABOVE],
            )
        else:
            self.log_.warn(
                "the link to {master} is down; lost so far: {up} messages up, {down} down",
                master=master,
                up=self.core.lost[Side.BELOW],
                down=self.core.lost[Side.ABOVE],
            )

    def log(self, text: str) -> None:
        """See `sbus.link.core.Wire`."""
        self.log_.warn("{text}", text=text)
