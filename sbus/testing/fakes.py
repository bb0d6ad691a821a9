"""What programs need to test their own protocols: a packet transport without a socket, whose edges stay.

Twisted's ``StringTransport`` joins what is written, so nobody can tell packets apart any more. This
one keeps them, and plays the kernel and the peer too::

    transport = FakePacketTransport()
    transport.connect(MyProtocol())
    transport.deliver(b"MSG greeting\\0hello")
    transport.clock.advance(0)
    assert transport.written == [b"MSG reply\\0hello to you"]

What a real transport does *soon* (not in the middle of somebody else's callback) the fake one does
when its clock advances, if only by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twisted.internet import error, main
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol, IPushProducer, ITransport
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.syscalls.batch import BATCH

__all__ = ["FakePacketTransport"]


@implementer(IPacketTransport, ITransport, IPushProducer)
class FakePacketTransport:
    """A connection with a kernel and a peer that do what a test tells them (`IPacketTransport`).

    :param credentials: who the peer is.
    :param clock: what does things soon; share it between transports that belong together.
    :param capacity: packets that the socket takes until the peer reads some; None for any number.
    :param longest: bytes in the longest packet that the socket takes; None for any length.

    :ivar written: the packets that the socket took, one item a packet.
    :ivar is_paused: the protocol has asked not to be given any packets.
    :ivar is_losing: the protocol has asked to close when all is sent.
    :ivar is_aborted: the connection was cut off, by the protocol or for its sake.
    :ivar bundle_limit: bytes in the largest bundle that the protocol allows; 0 if it allows none.
    :ivar reason: what ``connectionLost`` was told, once the connection is closed.
    """

    def __init__(
        self,
        credentials: PeerCredentials | None = None,
        *,
        clock: Clock | None = None,
        capacity: int | None = None,
        longest: int | None = None,
    ) -> None:
        self.credentials = credentials or PeerCredentials(pid=1000, uid=1000, gid=1000)
        self.clock = clock or Clock()
        self.capacity = capacity
        self.longest = longest
        self.queue: IPacketQueue = FifoQueue()
        self.read_limit = BATCH
        self.protocol: IProtocol | None = None
        self.written: list[bytes] = []
        self.is_paused = False
        self.is_losing = False
        self.is_aborted = False
        self.reason: Failure | None = None
        self.bundle_limit = 0
        self._undelivered: list[bytes] = []
        self._ended = False
        self._read_told = False
        self._write_lost = False

    @property
    def connected(self) -> bool:
        """Whether ``connectionLost`` was not called yet."""
        return self.protocol is not None

    def connect(self, protocol: IProtocol) -> None:
        """Give the connection to a protocol."""
        self.protocol = protocol
        protocol.makeConnection(self)

    # --- what the peer and the kernel do -----------------------------------------------------

    def deliver(self, *packets: bytes) -> None:
        """The peer's packets arrive, in one batch; those that the protocol does not take are kept for it."""
        self._undelivered += packets
        self._give()

    def end(self) -> None:
        """The peer sends no more: the protocol reads end-of-file behind what it is still to be given."""
        self._ended = True
        self._give()

    def drain(self, packets: int | None = None) -> None:
        """The peer reads so many packets (None: all that come), so that the socket takes as many again."""
        self.capacity = None if packets is None else (self.capacity or 0) + packets
        self.flush()

    def breakDown(self) -> None:
        """The peer reads no more: nothing can be written from now on, while what it has sent can be read."""
        if not self._write_lost:
            self._write_lost = True
            self.queue.discard_all()
            half = IHalfCloseableProtocol(self.protocol, None)
            if self.is_losing or self._read_told:
                self._close_soon(Failure(main.CONNECTION_DONE))
            elif half is not None:
                self._soon(half.writeConnectionLost)

    # --- what the protocol does --------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send one packet, soon.

        :raises ValueError: if it is empty, as that would read as end-of-file.
        """
        if not data:
            raise ValueError("an empty packet cannot be sent: it reads as end-of-file")
        if self.protocol is not None and not (self._write_lost or self.is_losing or self.is_aborted):
            self.queue.write(data)
            self._soon(self.flush)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Send several packets: one for each item."""
        for packet in data:
            self.write(packet)

    def flush(self) -> None:
        """Hand what waits to the socket, as far as it takes it."""
        if self._write_lost or self.is_aborted:
            self.queue.discard_all()
            return
        while taken := self.queue.take(BATCH):
            sent = 0
            for packet in taken:
                if self.longest is not None and len(packet) > self.longest:
                    if not self.queue.reject_oversized(packet):
                        self.queue.discard_all(taken)
                        self._abort(Failure(error.MessageLengthError(f"{len(packet)} bytes do not fit the buffer")))
                        return
                elif self.capacity == 0:
                    break
                else:
                    self.written.append(packet)
                    if self.capacity is not None:
                        self.capacity -= 1
                sent += 1
            self.queue.ack(taken, sent)
            if sent < len(taken) and len(self.queue):
                return
        if self.is_losing:
            self._close_soon(Failure(main.CONNECTION_DONE))

    def try_send(self, packets: list[bytes], packed: BundleCache | None = None) -> int:
        """Send packets past the queue, which is empty: as many as the socket takes."""
        sent = 0
        if not (self._write_lost or self.is_aborted):
            for packet in packets:
                if self.capacity == 0 or (self.longest is not None and len(packet) > self.longest):
                    break
                self.written.append(packet)
                if self.capacity is not None:
                    self.capacity -= 1
                sent += 1
        return sent

    def start_bundling(self, limit: int) -> int:
        """Bundles are the kernel's business, which a test does not see: only note the limit."""
        self.bundle_limit = limit
        return limit

    def stop_bundling(self) -> None:
        """No more bundles."""
        self.bundle_limit = 0

    def pauseProducing(self) -> None:
        """Give the protocol no more packets."""
        self.is_paused = True

    def resumeProducing(self) -> None:
        """Give the protocol packets again, soon; first those that were kept."""
        if self.is_paused:
            self.is_paused = False
            self._soon(self._give)

    def stopProducing(self) -> None:
        """Close."""
        self.loseConnection()

    def loseConnection(self) -> None:
        """Send what waits, then close. What arrives from now on is not delivered."""
        if self.protocol is not None and not self.is_losing and not self.is_aborted:
            self.is_losing = True
            if self._write_lost:
                self._close_soon(Failure(main.CONNECTION_DONE))
            else:
                self._soon(self.flush)

    def abortConnection(self) -> None:
        """Close soon, and forget what waits."""
        self._abort(Failure(error.ConnectionAborted()))

    def getHost(self) -> PacketAddress:
        """Some address."""
        return PacketAddress(b"\0host")

    def getPeer(self) -> PacketAddress:
        """No address, as clients have none."""
        return PacketAddress(None)

    # --- how -----------------------------------------------------------------------------------

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        self.clock.callLater(0, call, *args)

    def _give(self) -> None:
        """Hand over what is kept, as far as the protocol takes it, and then the end."""
        receiver = IPacketReceiver(self.protocol, None)
        while self._undelivered and self._is_listening():
            assert self.protocol is not None
            if receiver is not None:
                packets, self._undelivered = self._undelivered, []
                taken = receiver.packetsReceived(packets)
                self._undelivered = packets[taken:] + self._undelivered
                if taken < len(packets):
                    return  # until it is resumed
            elif self._undelivered[0]:
                self.protocol.dataReceived(self._undelivered.pop(0))
            else:
                self._abort(Failure(error.ConnectionAborted("a packet longer than the limit arrived")))
        if self._ended and not self._read_told and self._is_listening():
            half = IHalfCloseableProtocol(self.protocol, None)
            if half is None or self._write_lost:
                self._close_soon(Failure(main.CONNECTION_DONE))
            else:
                self._read_told = True
                half.readConnectionLost()

    def _is_listening(self) -> bool:
        return self.protocol is not None and not (self.is_paused or self.is_losing or self.is_aborted)

    def _abort(self, reason: Failure) -> None:
        if self.protocol is not None and not self.is_aborted:
            self.is_aborted = True
            self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self.protocol is not None:
            self._write_lost = True
            self.queue.discard_all()
            protocol, self.protocol, self.reason = self.protocol, None, reason
            protocol.connectionLost(reason)
