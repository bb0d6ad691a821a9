"""A packet transport without a socket, for unit tests of protocols.

Twisted's ``StringTransport`` joins what is written, so a test cannot tell packets apart. This one keeps them, and plays
the kernel and the peer too::

    transport = FakePacketTransport()
    transport.connect(MyProtocol())
    transport.deliver(b"MSG greeting\\0hello")
    transport.clock.advance(0)
    assert transport.written == [b"MSG reply\\0hello to you"]

The fake follows the table of states of the real transport (`sbus.seqpacket.states`), and closes by the same steps
(`sbus.seqpacket.endings`). What a real transport does *soon*, outside every callback, the fake does when its clock
advances, if only by 0.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

from twisted.internet import error, main
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol, IPushProducer, ITransport
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.flood import PayloadShare
from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.endings import Endings
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport, Outlet
from sbus.seqpacket.states import Event, Life, ReadSide, WriteSide
from sbus.syscalls.batch import BATCH

__all__ = ["FakePacketTransport"]


@implementer(IPacketTransport, ITransport, IPushProducer)
class FakePacketTransport(Endings):
    """A connection whose kernel and peer do what a test says (`IPacketTransport`).

    :param credentials: the peer's process, user and group.
    :param clock: makes the deferred calls; share it between transports that belong together.
    :param capacity: packets that the socket takes until the peer reads some; None for any number.
    :param longest: bytes in the longest packet that the socket takes; None for any length.
    :param groups: the peer's supplementary groups.

    :ivar written: the packets that the socket took, one item a packet.
    :ivar is_losing: the protocol has called ``loseConnection``.
    :ivar is_aborted: the connection was aborted, by the protocol or by an error.
    :ivar unread: what `unread_bytes` returns; a test changes it to have the peer read something.
    :ivar bundle_limit: bytes in the largest bundle that the protocol allows; 0 if it allows none.
    :ivar takes_payloads: whether the peer has asked for payloads in sealed memory.
    :ivar reason: the reason that ``connectionLost`` got, once the connection is closed.
    """

    def __init__(
        self,
        credentials: PeerCredentials | None = None,
        *,
        clock: Clock | None = None,
        capacity: int | None = None,
        longest: int | None = None,
        groups: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self._groups = frozenset(groups)
        self.credentials = credentials or PeerCredentials(pid=1000, uid=1000, gid=1000)
        self.clock = clock or Clock()
        self.capacity = capacity
        self.longest = longest
        self.queue: IPacketQueue = FifoQueue()
        self.plain_socket: socket.socket | None = None
        self.read_limit = BATCH
        self.may_grow: Callable[[int], bool] | None = None
        self.before_read: Callable[[], None] | None = None
        self.find_outlet: Callable[[bytes], Outlet | None] | None = None
        self.has_hung_up = False
        self.on_writable: Callable[[bool], bool] | None = None
        self.protocol: IProtocol | None = None
        self.written: list[bytes] = []
        self.is_losing = False
        self.is_aborted = False
        self.reason: Failure | None = None
        self.bundle_limit = 0
        self.takes_payloads = False
        self.unread = 0
        self._arrived: list[bytes] = []
        self._peer_ended = False

    @property
    def is_paused(self) -> bool:
        """Whether the protocol has asked for no more packets."""
        return self.read_side in (ReadSide.PAUSED, ReadSide.PAUSED_EOF)

    def connect(self, protocol: IProtocol) -> None:
        """Give the connection to a protocol."""
        self.protocol = protocol
        self.move(Event.START)
        protocol.makeConnection(self)

    def peer_executable(self) -> str | None:
        """See `IPacketTransport`."""
        return None

    def peer_groups(self) -> frozenset[int]:
        """See `IPacketTransport`."""
        return self._groups

    # --- the peer and the kernel -------------------------------------------------------------

    def deliver(self, *packets: bytes) -> None:
        """Deliver the peer's packets in one batch.

        Those that the protocol does not take are kept for it.
        """
        self._arrived += packets
        if self.read_side is ReadSide.OPEN:
            self._read()

    def end(self) -> None:
        """End the peer's sending.

        The protocol reads end-of-file after the packets that are kept for it.
        """
        self._peer_ended = True
        if self.read_side is ReadSide.OPEN:
            self._read()

    def drain(self, packets: int | None = None) -> None:
        """Have the peer read `packets` packets (None: all that come).

        The socket then takes as many again.
        """
        self.capacity = None if packets is None else (self.capacity or 0) + packets
        self._writable()

    def _writable(self) -> None:
        if self.on_writable is None:
            self.send_on(True)
        else:
            self.on_writable(True)

    def breakDown(self) -> None:
        """End the peer's reading.

        Nothing more can be written; packets that the peer has sent can still be read.
        """
        self._lose_writing()

    def hang_up(self) -> None:
        """Have the peer close.

        One direction is at end-of-file, and nothing can be written in the other.
        """
        self.has_hung_up = True
        self.end()
        self.breakDown()

    # --- the protocol ------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send one packet, soon.

        :raises ValueError: if it is empty, which the peer would read as end of file.
        """
        if not data:
            raise ValueError("an empty packet cannot be sent: it reads as end-of-file")
        if self.write_side is WriteSide.OPEN and self.protocol is not None:
            self.queue.write(data)
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Send what the socket takes of the queue."""
        if not self._is_writable():
            self.queue.discard_all()
            return
        while taken := self.queue.take(BATCH):
            sent = 0
            while sent < len(taken):
                packet = taken[sent]
                if self.longest is not None and len(packet) > self.longest:
                    if not self.queue.reject_oversized(taken, sent):
                        self.queue.discard_all(taken)
                        self._abort(Failure(error.MessageLengthError(f"{len(packet)} bytes do not fit the buffer")))
                        return
                    if taken[sent] is not packet:
                        continue
                elif self.capacity == 0:
                    break
                else:
                    self._take(packet)
                sent += 1
            self.queue.ack(taken, sent)
            if sent < len(taken) and len(self.queue):
                return
        if self.write_side is WriteSide.DRAINING:
            if self.life is Life.CLOSING:
                self._close_soon(Failure(main.CONNECTION_DONE))
            else:
                self._end_writing(Event.SHUT_DOWN)

    def send_on(self, exclusive: bool) -> None:
        """Send what waited until the socket takes packets again; see `IPacketTransport`."""
        try:
            self.flush()
        except Exception:
            self._abort(Failure())

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets past the empty queue, and return how many the socket took."""
        sent = 0
        if self._is_writable():
            for packet in packets:
                if self.capacity == 0 or (self.longest is not None and len(packet) > self.longest):
                    break
                self._take(packet)
                sent += 1
        return sent

    def open_socket(self) -> socket.socket | None:
        """Return `plain_socket`."""
        return self.plain_socket

    def unread_bytes(self) -> int:
        """Return `unread`."""
        return self.unread

    def partial_bytes(self) -> int:
        """See `IPacketTransport`."""
        return 0

    def partial_limit(self) -> int:
        """Return the bytes of the longest packet that can arrive in part; see `IPacketTransport`."""
        return 0

    def start_bundling(self, limit: int) -> int:
        """Note the limit.

        Packets stay single, as the kernel would not show bundles to a protocol either.
        """
        self.bundle_limit = limit
        return limit

    def stop_bundling(self) -> None:
        """Note that bundles are no longer allowed."""
        self.bundle_limit = 0

    def pass_payloads(self, wanted: bool, share: PayloadShare | None = None) -> bool:
        """Note whether payloads go with their descriptors; a fake takes them as they are."""
        self.takes_payloads = wanted
        return True

    def pauseProducing(self) -> None:
        """Give the protocol no more packets."""
        self.move(Event.PAUSE)

    def resumeProducing(self) -> None:
        """Give the protocol packets again, soon; first those that were kept."""
        if self.is_paused:
            self.move(Event.RESUME)
            self._call_soon(self._resume)

    def read_on(self) -> None:
        """Deliver now the packets that were kept, and those that have arrived."""
        if self.is_paused:
            self.move(Event.RESUME)
        self._resume()

    def close_gracefully(self, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon; the last packets always fit."""
        if self.life in (Life.OPEN, Life.CLOSING):
            is_writable = self._is_writable()
            self.is_aborted = True
            self.move(Event.ABORT)
            self._call_soon(self._depart, farewell if is_writable else list)

    def _depart(self, farewell: Callable[[], list[bytes]]) -> None:
        if self.life is not Life.CLOSED:
            try:
                self.written += farewell()
            finally:
                self._close(Failure(error.ConnectionAborted()))

    def getHost(self) -> PacketAddress:
        """Some address."""
        return PacketAddress(b"\0host")

    def getPeer(self) -> PacketAddress:
        """The empty address, as most clients have none."""
        return PacketAddress(None)

    # --- inside ------------------------------------------------------------------------------

    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        self.clock.callLater(0, call, *args)

    def _stop_input(self) -> None:
        self.is_losing = True

    def _take(self, packet: bytes) -> None:
        """Put a packet into the socket."""
        self.written.append(packet)
        if self.capacity is not None:
            self.capacity -= 1

    def _read(self) -> None:
        """Deliver the packets that have arrived, and the end of file after them."""
        self._deliver()
        if self.read_side is ReadSide.OPEN and self._peer_ended and not self._arrived:
            self.move(Event.END_OF_FILE)
            self._report_end_of_file()

    def _resume(self) -> None:
        """Deliver the packets that were kept; then read again."""
        self._deliver()
        if self._arrived:
            return
        if self.read_side is ReadSide.RESUMING:
            self.move(Event.RESUMED)
            self._read()

    def _report_end_of_file(self) -> None:
        half = IHalfCloseableProtocol(self.protocol, None)
        if half is None or not self._is_writable():
            self._close_soon(Failure(main.CONNECTION_DONE))
        else:
            self.move(Event.REPORT)
            half.readConnectionLost()

    def _deliver(self) -> None:
        """Hand over the packets that have arrived, as far as the protocol takes them."""
        receiver = IPacketReceiver(self.protocol, None)
        while self._arrived and self.read_side in (ReadSide.OPEN, ReadSide.RESUMING):
            assert self.protocol is not None
            if receiver is not None:
                packets, self._arrived = self._arrived, []
                taken = receiver.packetsReceived(packets)
                self._arrived = packets[taken:] + self._arrived
                if taken < len(packets):
                    return  # until it is resumed
            elif self._arrived[0]:
                self.protocol.dataReceived(self._arrived.pop(0))
            else:
                self._abort(Failure(error.ConnectionAborted("a packet longer than the limit arrived")))

    def _end_writing(self, event: Event) -> None:
        self.move(event)
        self.queue.discard_all()
        if self.life is Life.CLOSING or self.read_side is ReadSide.REPORTED:
            self._close_soon(Failure(main.CONNECTION_DONE))
        else:
            self._call_soon(self._report_end_of_writing)

    def _report_end_of_writing(self) -> None:
        half = IHalfCloseableProtocol(self.protocol, None)
        if half is not None:
            half.writeConnectionLost()

    def _abort(self, reason: Failure) -> None:
        if self.life in (Life.OPEN, Life.CLOSING):
            self.is_aborted = True
            self.move(Event.ABORT)
            self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._call_soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self.life is not Life.CLOSED:
            self.move(Event.CLOSE)
            self.queue.discard_all()
            protocol, self.protocol, self.reason = self.protocol, None, reason
            if protocol is not None:
                protocol.connectionLost(reason)
