"""A pair of packet transports in memory: a connection between two protocols of one process.

Theory of operation
-------------------

Each end has an *inbox*, which stands for what a kernel would hold between two sockets. `PairedTransport.flush` and
`PairedTransport.try_send` put packets into the peer's inbox, up to `CAPACITY`; what does not fit stays in the queue, as
with a full socket, and flood control decides about it. The multiplexer calls the peer when it has dealt with the events
in hand. There is no system call, no copy of a packet, and no turn of the reactor between the two ends.

Invariants:

* *No callback runs inside another one.* Handing over, closing, resuming and reporting are deferred, as those of a
  socket are (`Multiplexer.call_soon`). A protocol that sends in the middle of a batch never runs its peer inside it.
  Two exceptions save a lone packet the way through the multiplexer, for an end that asks for them.
  `PairedTransport.take_lone` is called inside the call that sends; it neither calls back nor sends to this pair.
  `PairedTransport.hand_over` is for a sender that no protocol has called. Both need a peer that is not running, with an
  empty inbox. So two ends that answer each other do not call each other deeper and deeper.
* *One call hands over one inbox at most*, about 2,000 small messages. Two such calls in each direction follow each
  other in one pass of the multiplexer, then its sockets and the reactor have their turn.
* *A full inbox is the congestion.* An empty one takes at least one packet, of any length: no packet is too long.
* *What has arrived is delivered*, unless the protocol closes the connection first: also when the peer has closed.
* *Nothing here is memory of the kernel.* `PairedTransport.partial_bytes` reports what this end's inbox holds, and what
  the program around it holds for the connection, so a server charges it as it charges half a packet on a stream.

Packets are never bundled: a bundle saves system calls, and there is none. The ends agree on bundles all the same, since
a copy costs as little as a bundled one.

Both ends follow the table of states that a socket's transport follows (`sbus.seqpacket.states`), and are closed by the
same steps (`sbus.seqpacket.endings`). Rejected: a socket pair of the kernel, which costs two system calls, two copies
and a turn for each message; and a subclass of `PacketTransport`, most of which is about errors of system calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from twisted.internet import error, main
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol, IPushProducer, ITransport
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache
from sbus.protocol.keys import PeerCredentials
from sbus.routing.runs import total_size
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.endings import Endings
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport, Reactor
from sbus.seqpacket.multiplexer import Multiplexer
from sbus.seqpacket.states import Event, Life, ReadSide, WriteSide
from sbus.syscalls.batch import BATCH

__all__ = ["CAPACITY", "OVERHEAD", "PairedTransport", "connect_pair"]

CAPACITY = 256 << 10
"""Bytes that an inbox takes, `OVERHEAD` included; an empty one takes a packet of any length."""
OVERHEAD = 56
"""Bytes of memory that a packet takes besides its own."""
_TAKEN = 2048
"""Packets taken from the queue at a time."""

_READ_OPEN: Final = ReadSide.OPEN
_WRITE_OPEN: Final = WriteSide.OPEN
_DRAINING: Final = WriteSide.DRAINING
_NEW: Final = Life.NEW
_CLOSED: Final = Life.CLOSED
_STOPPED: Final = ReadSide.STOPPED


def connect_pair(
    reactor: Reactor, one: PeerCredentials, other: PeerCredentials
) -> tuple[PairedTransport, PairedTransport]:
    """Return the two ends of a new connection; `PairedTransport.start` gives each its protocol.

    :param one: the credentials of the first end's peer.
    :param other: those of the second end's.
    """
    ours, theirs = PairedTransport(reactor, one), PairedTransport(reactor, other)
    ours.peer, theirs.peer = theirs, ours
    return ours, theirs


@implementer(IPacketTransport, ITransport, IPushProducer)
class PairedTransport(Endings):
    """One end of a connection in memory (`IPacketTransport`); make a pair with `connect_pair`.

    :param credentials: the peer's process, user and group.
    :ivar peer: the other end.
    :ivar queue: the `IPacketQueue` that is sent from; a protocol can replace it.
    :ivar held: returns the bytes that the program holds for this connection, besides the two inboxes.
    :ivar held_limit: about the largest number that `held` returns.
    :ivar take_lone: if the protocol sets it: called with a packet that the peer sends alone while the inbox is empty,
        inside the peer's call. It returns whether it has taken the packet, and calls nothing of the peer.
    """

    TLS = False

    _log = Logger(namespace="sbus.seqpacket")

    plain_socket: Final = None

    __slots__ = (
        "_arrived",
        "_half",
        "_is_due",
        "_kept",
        "_multiplexer",
        "_peer_ended",
        "_receiver",
        "_size",
        "_waits_for_room",
        "before_read",
        "credentials",
        "held",
        "held_limit",
        "may_grow",
        "on_kept",
        "on_vain_read",
        "on_writable",
        "peer",
        "protocol",
        "queue",
        "read_limit",
        "take_lone",
    )

    peer: PairedTransport

    def __init__(self, reactor: Reactor, credentials: PeerCredentials) -> None:
        super().__init__()
        self._multiplexer = Multiplexer.of(reactor)
        self.credentials = credentials
        self.protocol: IProtocol | None = None
        self._receiver: IPacketReceiver | None = None
        self._half: IHalfCloseableProtocol | None = None
        self.queue: IPacketQueue = FifoQueue()
        self.read_limit = BATCH
        self.may_grow: Callable[[int], bool] | None = None
        self.on_kept: Callable[[list[bytes]], None] | None = None
        self.before_read: Callable[[], None] | None = None
        self.on_vain_read: Callable[[int], None] | None = None
        self.on_writable: Callable[[bool], bool] | None = None
        self.held: Callable[[], int] = _nothing
        self.held_limit = 0
        self.take_lone: Callable[[list[bytes]], bool] | None = None
        # The inbox. Its size includes the packets that the protocol is being handed.
        self._arrived: list[bytes] = []
        self._size = 0
        self._kept = 0  # the part that the protocol was offered, and accounts for
        self._is_due = False
        self._peer_ended = False
        # The peer's inbox was full
        self._waits_for_room = False

    def start(self, protocol: IProtocol) -> None:
        """Connect a protocol, which takes batches (`IPacketReceiver`).

        :raises TypeError: if it takes none.
        :raises Exception: what ``makeConnection`` raised; the connection is closed then.
        """
        self._receiver = IPacketReceiver(protocol)
        self.protocol = protocol
        self._half = IHalfCloseableProtocol(protocol, None)
        self.move(Event.START)
        try:
            protocol.makeConnection(self)
        except BaseException:
            self._guarded(self._close, Failure())
            raise
        if (self._arrived or self._peer_ended) and not self._is_due:
            self._read_soon()

    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call when the events in hand are dealt with."""
        self._multiplexer.call_soon(self._guarded, call, *args)

    def _guarded(self, call: Callable[..., object], *args: object) -> None:
        """Call a function; if it raises, abort this connection and no other."""
        try:
            call(*args)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """Log the exception in hand, most likely the protocol's, and abort the connection."""
        failure = Failure()
        self._log.failure("Error in {transport}", failure=failure, transport=self)
        self._abort(failure)

    # --- reading -----------------------------------------------------------------------------

    def _arrive(self, packets: list[bytes], size: int) -> None:
        """Take packets from the peer.

        :param size: their bytes, and `OVERHEAD` for each.
        """
        if self.read_side is _STOPPED:
            return
        self._arrived += packets
        self._size += size
        if not self._is_due and self.read_side is _READ_OPEN:
            self._read_soon()

    def _read_soon(self) -> None:
        self._is_due = True
        self._multiplexer.call_soon(self._read)

    def _read(self) -> None:
        """Deliver what has arrived, and the end of file behind it."""
        self._is_due = False
        if self.read_side is not _READ_OPEN or self.life is _NEW:
            return
        try:
            packets = self._arrived
            if packets:
                # What `_deliver` does, in place: nearly every message goes this way.
                self._arrived = []
                receiver = self._receiver
                assert receiver is not None
                taken = receiver.packetsReceived(packets)
                if taken == len(packets) and not (self._arrived or self._peer_ended or self.peer._waits_for_room):
                    self._size = self._kept = 0
                    return
                self._taken(packets, taken)
            if self.read_side is _READ_OPEN and (self._arrived or self._peer_ended):
                if self._arrived:
                    self._read_soon()
                else:
                    self.move(Event.END_OF_FILE)
                    self._report_end_of_file()
        except Exception:
            self._failed()

    def _deliver(self) -> None:
        """Hand the inbox to the protocol; keep what it does not take."""
        assert self._receiver is not None
        packets, self._arrived = self._arrived, []
        self._taken(packets, self._receiver.packetsReceived(packets))

    def _taken(self, packets: list[bytes], taken: int) -> None:
        """Keep what the protocol has not taken of these packets, and count the bytes in the inbox."""
        self._kept = 0
        if self.read_side is _STOPPED:
            return  # the inbox was discarded
        if taken < len(packets):
            del packets[:taken]
            self._kept = _size(packets)
            packets += self._arrived
            self._arrived = packets
        self._size = _size(self._arrived) if self._arrived else 0
        if self.peer._waits_for_room and self._size < CAPACITY:
            self._make_room()

    def _make_room(self) -> None:
        """Have the peer send again: the inbox was full, and is not any more."""
        self.peer._waits_for_room = False
        self.peer._call_soon(self.peer.flush)

    def _report_end_of_file(self) -> None:
        if self._half is None or not self._is_writable():
            self._close_soon(Failure(main.CONNECTION_DONE))
            return
        self.move(Event.REPORT)
        self._half.readConnectionLost()
        if self.peer.life is _CLOSED:
            self._lose_writing()

    def _peer_closed(self) -> None:
        """The peer has closed: what it has sent can still be read, and nothing can be sent to it."""
        if self.life is _CLOSED or self.life is Life.NEW:
            return
        if self.read_side is _READ_OPEN:
            if not self._is_due:
                self._read_soon()
            return
        if self._arrived and self.on_kept is not None:
            self._kept = self._size
            self.on_kept(self._arrived)
        self._lose_writing()

    def pauseProducing(self) -> None:
        """Take no more packets (`IPushProducer`); those that have arrived are kept."""
        self.move(Event.PAUSE)

    def resumeProducing(self) -> None:
        """Take packets again, soon (`IPushProducer`)."""
        if self.read_side is ReadSide.PAUSED:
            self.move(Event.RESUME)
            self._call_soon(self._resume)

    def _resume(self) -> None:
        if self.read_side is not ReadSide.RESUMING:
            return  # paused again, or closing
        if self._arrived:
            self._deliver()
        if self.read_side is ReadSide.RESUMING:
            self.move(Event.RESUMED)
            if self._arrived or self._peer_ended:
                self._read()

    # --- writing -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send one packet, soon (`ITransport`).

        :raises ValueError: if it is empty, which a peer behind a socket would read as end of file.
        """
        if not data:
            raise ValueError("an empty packet cannot be sent: it reads as end-of-file")
        if self.write_side is _WRITE_OPEN:
            self.queue.write(data)
            self._call_soon(self.flush)

    def flush(self) -> None:
        """Put what the peer's inbox takes into it; for the rest, wait until it has room."""
        queue = self.queue
        if not self._is_writable():
            queue.discard_all()
            return
        if self.peer.life is _CLOSED:
            self._lose_writing()
            return
        while taken := queue.take(_TAKEN):
            sent = self._send(taken)
            queue.ack(taken, sent)
            if sent < len(taken) and len(queue):
                self._waits_for_room = True
                return
        self._waits_for_room = False
        if self.write_side is _DRAINING:
            if self.life is Life.CLOSING:
                self._close_soon(Failure(main.CONNECTION_DONE))
            else:
                self._end_writing(Event.SHUT_DOWN)

    def flush_batch(self) -> None:
        """Send the queue; see `IPacketTransport`."""
        self.flush()

    def flush_later(self) -> None:
        """Send the queue soon; see `IPacketTransport`."""
        self._call_soon(self.flush)

    def send_on(self, exclusive: bool) -> None:
        """Send what waited; see `IPacketTransport`. Nobody is asked first: one process is at both ends."""
        self.flush()

    @property
    def passes(self) -> int:
        """The passes over all sockets that have begun; see `IPacketTransport`."""
        return self._multiplexer.passes

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets past the queue, which must be empty; see `IPacketTransport`."""
        if self.write_side is not _WRITE_OPEN and self.write_side is not _DRAINING:
            return 0
        peer = self.peer
        if not peer._size and peer.take_lone is not None and len(packets) == 1 and peer.read_side is _READ_OPEN:
            try:
                if peer.take_lone(packets):
                    return 1
            except Exception:
                peer._failed()
        size = total_size(packets) + OVERHEAD * len(packets)
        if peer.read_side is _READ_OPEN and peer._size + size <= CAPACITY:
            # What `_arrive` does, in place: nearly every message goes this way.
            peer._arrived += packets
            peer._size += size
            if not peer._is_due:
                peer._is_due = True
                self._multiplexer.call_soon(peer._read)
            return len(packets)
        return self._send(packets)

    def hand_over(self, packets: list[bytes]) -> int:
        """As `try_send`, but call the peer now if nothing waits for it.

        Only for a caller that the multiplexer or a timer has called, and not for a protocol in the middle of its batch.
        """
        peer = self.peer
        if peer._size or peer._is_due or peer.read_side is not _READ_OPEN or self.write_side is not _WRITE_OPEN:
            return self.try_send(packets)
        peer._arrived += packets
        peer._size = total_size(packets) + OVERHEAD * len(packets)
        peer._read()
        return len(packets)

    def _send(self, packets: list[bytes]) -> int:
        """Put packets into the peer's inbox; return the number of those that it took, from the front."""
        peer = self.peer
        if peer.life is _CLOSED:
            return 0
        count = len(packets)
        size = _size(packets)
        room = CAPACITY - peer._size
        if size > room:
            count = size = 0
            for packet in packets:
                more = size + len(packet) + OVERHEAD
                if more > room and (count or peer._size):
                    break
                size = more
                count += 1
            packets = packets[:count]
        if count:
            peer._arrive(packets, size)
        return count

    def unread_bytes(self) -> int:
        """Return the memory of what the peer has not been handed; see `IPacketTransport`."""
        return 0 if self.life is _CLOSED else self.peer._size

    def partial_bytes(self) -> int:
        """Return the memory of what the protocol has not been offered, and of what the program holds.

        See `IPacketTransport`.
        """
        return self._size - self._kept + self.held()

    def partial_limit(self) -> int:
        """Return about the largest number that `partial_bytes` returns; see `IPacketTransport`."""
        return CAPACITY + self.held_limit

    def start_bundling(self, limit: int) -> int:
        """Agree to bundles, although none is ever made; see `IPacketTransport`."""
        return limit

    def stop_bundling(self) -> None:
        """Do nothing: packets are single in any case."""

    def _end_writing(self, event: Event) -> None:
        """Discard the queue, and report the end of writing; if reading has ended too, close instead."""
        self.move(event)
        self._waits_for_room = False
        self.queue.discard_all()
        if event is Event.SHUT_DOWN:
            self.peer._end_input()
        if self.life is Life.CLOSING or self.read_side is ReadSide.REPORTED:
            self._close_soon(Failure(main.CONNECTION_DONE))
        elif self._half is not None:
            self._call_soon(self._report_end_of_writing)

    def _end_input(self) -> None:
        self._peer_ended = True
        if self.read_side is _READ_OPEN and not self._is_due:
            self._read_soon()

    def _report_end_of_writing(self) -> None:
        if self._half is not None:
            self._half.writeConnectionLost()

    # --- closing -----------------------------------------------------------------------------

    def close_gracefully(self, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon; the last packets always fit; see `IPacketTransport`."""
        if self.life is Life.OPEN or self.life is Life.CLOSING:
            is_writable = self._is_writable()
            self.move(Event.ABORT)
            self._stop_input()
            self._multiplexer.close_soon(self._guarded, self._depart, farewell if is_writable else list)

    def _depart(self, farewell: Callable[[], list[bytes]]) -> None:
        if self.life is _CLOSED:
            return
        try:
            packets = farewell()
            if packets and self.peer.life is not _CLOSED:
                self.peer._arrive(packets, _size(packets))
        finally:
            self._close(Failure(error.ConnectionAborted()))

    def _stop_input(self) -> None:
        self._arrived = []
        self._size = self._kept = 0
        if self.peer._waits_for_room:
            self._make_room()

    def _abort(self, reason: Failure) -> None:
        if self.life is Life.OPEN or self.life is Life.CLOSING:
            self.move(Event.ABORT)
            self._stop_input()
            self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._multiplexer.close_soon(self._guarded, self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self.life is _CLOSED:
            return
        self.move(Event.CLOSE)
        self._stop_input()
        self.queue.discard_all()
        self.held = _nothing
        self.take_lone = None
        self.peer._peer_ended = True
        self.peer._call_soon(self.peer._peer_closed)
        protocol, self.protocol, self._half, self._receiver = self.protocol, None, None, None
        if protocol is not None:
            protocol.connectionLost(reason)

    # --- addresses ---------------------------------------------------------------------------

    def getHost(self) -> PacketAddress:
        """The empty address (`ITransport`)."""
        return PacketAddress(None)

    def getPeer(self) -> PacketAddress:
        """The empty address, as that of most clients (`ITransport`)."""
        return PacketAddress(None)

    def __repr__(self) -> str:
        return f"<PairedTransport {self.credentials}>"


def _nothing() -> int:
    return 0


def _size(packets: list[bytes]) -> int:
    return total_size(packets) + OVERHEAD * len(packets)
