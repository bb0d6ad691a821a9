"""The packet transport: one connected SEQPACKET socket.

One write is one packet, and so is one ``dataReceived``.

Theory of operation
-------------------

The multiplexer calls `ready` when the socket can be read or written. Everything else happens because the protocol
calls a method. The states and what moves them are the table in `sbus.seqpacket.states`, the calls that end a connection
`sbus.seqpacket.endings`; how much is read in one go is `sbus.seqpacket.pacing`. This module does the I/O between these,
in three sections: reading, writing, closing.

Invariants:

* *No callback runs inside another one.* Closing, resuming and reporting wait until the multiplexer has dealt with the
  events in hand (`Multiplexer.call_soon`). A protocol that iterates over receivers never loses a connection meanwhile.
* *An exception costs one connection.* Deferred calls are guarded: an error in a protocol aborts its own transport.
* *A packet that was read is delivered*, unless the protocol closes the connection first. What a paused protocol does
  not take is kept (`_undelivered`), and comes first when it resumes.
* *The remainder of a flush is the congestion.* `flush` gives back to the queue only what a full socket left, so flood
  control may take a remainder for a slow reader. An oversized packet, or a peer that left, is reported otherwise.

Reading and writing end separately, as the kernel ends them:

* *End of file* (or an empty packet, which looks the same): everything before it is delivered first. Then the
  connection is lost, or ``readConnectionLost`` is called if the protocol is an `IHalfCloseableProtocol`.
* *Hang-up*: what the peer sent is read to its end at once, before sockets that are ready later have their turn.
* *Hang-up while paused*: the peer is gone, and epoll would report its socket as ready forever. The socket leaves the
  epoll set, and what the peer sent stays in the kernel until the protocol resumes: a message is never lost because its
  publisher left.
* *A failed send* (``EPIPE``, ``ECONNRESET``): the queue is discarded at once. Reading goes on to the end of file.

Closing a socket that has unread packets resets the connection: the peer gets ``ECONNRESET`` ahead of packets that wait
for it. `close_gracefully` avoids that: it sends the last packets past the queue, shuts the socket down both ways,
discards what the peer has sent (nothing more can come), and closes. The last packets nearly always fit, because the
send buffer is raised above what it holds; else they are tried until the peer has read, for as long as the caller says.

Sending, in numbers: one system call sends up to 64 packets, or 8 bundles made from up to 2048 packets. One flush makes
at most 16 such rounds, and the rest goes in the next turn of the reactor. A batch that the kernel cut short does not
say why it stopped, so the packet at which it stopped is sent alone and its error decides. A kernel without memory
(``ENOBUFS``, ``ENOMEM``) is tried again after 50 ms, for reading too. Any other error of a send is unforeseen: it is
logged, and closes the connection.

Tried and given up:

* A second read of a socket whose only packet was just read. It mostly found nothing; the multiplexer looks again
  instead, and sees other sockets too.
* To end a flush after 8 bundles. Flood control took the rest for congestion, and a receiver with room lost messages.
* Reading, writing and closing as a chain of three classes with about fifteen booleans. The classes shared all of
  them, so none could be read alone.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from twisted.internet import error, main
from twisted.internet.interfaces import (
    IConsumer,
    IDelayedCall,
    IHalfCloseableProtocol,
    IProducer,
    IProtocol,
    IPushProducer,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache, pack, unbundle
from sbus.protocol.controls import BUNDLE_OFF
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.routing.runs import total_size
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.endings import Endings
from sbus.seqpacket.framing import FrameReader
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport, Reactor
from sbus.seqpacket.multiplexer import GONE, HANGUP, READ, WRITE, Multiplexer
from sbus.seqpacket.pacing import IN_TURN, ReadPacer
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.states import Event, Life, ReadSide, WriteSide
from sbus.syscalls.batch import BATCH, PacketReader, send_packets
from sbus.syscalls.sockets import (
    OVERHEAD,
    discard_input,
    make_send_room,
    max_sendable,
    peer_credentials,
    unread_bytes,
)

__all__ = ["PacketTransport"]

_ROUNDS_PER_FLUSH: Final = range(16)
"""Batches written in one flush at most."""
_ONE_ROUND: Final = range(1)
"""The same where a socket is writable again while others are ready: each has one batch, and then they have theirs."""
_BUNDLES_PER_SEND = 8
"""Bundles sent with one system call at most."""
_PACKETS_PER_BUNDLING = 2048
"""Packets taken from the queue at a time to be bundled."""
_UNBUNDLED_AT_ONCE = 128 << 10
"""Bytes of bundles that are taken apart together, whatever they hold."""
_ENOUGH_UNBUNDLED = 4_096
"""Messages after which no more bundles are taken apart: 16 of the largest hold 300,000, which takes 30 ms."""
_DISCARDED_AT_ONCE = 256
"""Packets of a peer that is being disconnected that are discarded at a time."""
_MEMORY_RETRY = 0.05
"""Seconds until the next attempt to send or to read, after the kernel had no memory."""
_NO_MEMORY: Final = (errno.ENOBUFS, errno.ENOMEM)
_PEER_LEFT: Final = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN)
"""The errors of a send to a peer that reads no more; what it sent before can still be read."""

_READABLE: Final = READ | HANGUP
# A member looked up in its enum costs ten times a global.
_READ_OPEN: Final = ReadSide.OPEN
_WRITE_OPEN: Final = WriteSide.OPEN
_DRAINING: Final = WriteSide.DRAINING
_PAUSE: Final = Event.PAUSE
_RESUME: Final = Event.RESUME

_PAUSED: Final = frozenset({ReadSide.PAUSED, ReadSide.PAUSED_EOF})
_RESUMABLE: Final = frozenset({ReadSide.RESUMING, ReadSide.EOF})
_DELIVERING: Final = frozenset({ReadSide.OPEN, ReadSide.RESUMING, ReadSide.EOF})
"""The states in which the protocol takes packets."""


class _Pace(enum.Enum):
    """What a registered producer does."""

    PULL = "produces when it is asked, each time that the queue is empty"
    PUSH = "produces by itself"
    PAUSED = "would produce by itself, and was paused at the high-water mark"


@implementer(IPacketReceiver)
class _NoReceiver:
    """Takes the packets of a transport without a protocol."""

    def packetsReceived(self, packets: list[bytes]) -> int:
        return len(packets)


_NO_RECEIVER: Final[IPacketReceiver] = cast(IPacketReceiver, _NoReceiver())


@implementer(IPacketReceiver)
class _OneByOne:
    """Hands packets to a protocol that takes no batches."""

    def __init__(self, transport: PacketTransport) -> None:
        self._transport = transport

    def packetsReceived(self, packets: list[bytes]) -> int:
        transport = self._transport
        assert transport.protocol is not None
        for taken, packet in enumerate(packets):
            if transport.read_side not in _DELIVERING:
                return taken
            if not packet:
                failure = Failure(error.ConnectionAborted("a packet longer than the limit arrived"))
                transport._abort(failure)
                break
            transport.protocol.dataReceived(packet)
        return len(packets)


@implementer(IPacketTransport, ITransport, IConsumer, IPushProducer)
class PacketTransport(Endings):
    """A connected SEQPACKET socket as a Twisted transport (`IPacketTransport`).

    :param sock: connected and non-blocking; the transport closes it.
    :param max_packet: bytes in the longest packet to receive. A longer packet is never delivered in part: a protocol
        that takes batches (`IPacketReceiver`) gets the empty packet instead, any other loses the connection with
        `twisted.internet.error.ConnectionAborted`.
    :param send_buffer: the socket's send buffer, if it is to grow; else it is left as it is.
    :ivar credentials: the peer's process, user and group.
    :ivar queue: the `IPacketQueue` that is sent from; a protocol can replace it.
    :ivar plain_socket: the socket, as long as it is open for packets and has neither bundles nor frames; else None.
    :ivar read_limit: packets to read in one go while other sockets have packets to be read.
    :ivar has_hung_up: whether the peer has closed its socket.
    :ivar keeps_bundles: whether the protocol gets bundles as they are, and not their packets.
    """

    TLS = False

    _has_frames = False
    """Whether packets travel as frames of a byte stream, so that a read may complete none."""

    _log = Logger(namespace="sbus.seqpacket")

    __slots__ = (
        "_bundle_limit",
        "_departure",
        "_events",
        "_farewell",
        "_farewell_timer",
        "_fd",
        "_flush_scheduled",
        "_half",
        "_input_limit",
        "_memory_retry",
        "_multiplexer",
        "_pace",
        "_pacer",
        "_producer",
        "_read_retry",
        "_reader",
        "_receiver",
        "_send_batch",
        "_send_buffer",
        "_send_bundle_limit",
        "_sock",
        "_undelivered",
        "before_read",
        "credentials",
        "has_hung_up",
        "keeps_bundles",
        "may_grow",
        "on_writable",
        "plain_socket",
        "protocol",
        "queue",
        "read_limit",
    )

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        max_packet: int = DEFAULT_MAX_PACKET,
        send_buffer: SendBuffer | None = None,
    ) -> None:
        super().__init__()
        self._multiplexer = Multiplexer.of(reactor)
        self._sock = sock
        self._fd = -1  # as long as the multiplexer does not watch it
        self._events = 0
        self.credentials = peer_credentials(sock)
        self.protocol: IProtocol | None = None
        self._receiver = _NO_RECEIVER
        self._half: IHalfCloseableProtocol | None = None
        # Reading
        self._reader: PacketReader | FrameReader = self._multiplexer.reader(max_packet)
        self._pacer = ReadPacer()
        self.read_limit = BATCH
        self.keeps_bundles = False
        self._undelivered: list[bytes] | None = None
        self._read_retry: IDelayedCall | None = None
        self.before_read: Callable[[], None] | None = None
        self.has_hung_up = False
        # Writing
        self._send_buffer = send_buffer
        self.may_grow: Callable[[int], bool] | None = None
        self.on_writable: Callable[[bool], bool] | None = None
        self._send_batch: Callable[[list[bytes]], int] = partial(send_packets, sock)
        self.queue: IPacketQueue = FifoQueue()
        self._bundle_limit = 0  # what both ends have agreed on, bytes; 0 for no bundles
        self._send_bundle_limit = 0  # the same, from when the answer that agrees to it is sent
        self.plain_socket: socket.socket | None = None
        self._flush_scheduled = False
        self._memory_retry: IDelayedCall | None = None
        self._producer: IPushProducer | None = None
        self._pace = _Pace.PUSH
        # Closing
        self._farewell: list[bytes] | None = None
        self._farewell_timer: IDelayedCall | None = None
        self._input_limit = 0
        self._departure: Failure | None = None

    def begin_alone(self) -> None:
        """Read the first packet alone, to learn whether an unknown peer sends large ones; call it before `start`."""
        self._pacer.begin_alone()

    def start(self, protocol: IProtocol) -> None:
        """Connect a protocol and begin to read.

        :raises OSError: as epoll_ctl(2).
        :raises Exception: what ``makeConnection`` raised; the connection is closed then.
        """
        self.protocol = protocol
        self._receiver = IPacketReceiver(protocol, _OneByOne(self))
        self._half = IHalfCloseableProtocol(protocol, None)
        fd = self._sock.fileno()
        self._multiplexer.add(fd, self, READ)
        self._fd, self._events = fd, READ
        self.move(Event.START)
        try:
            protocol.makeConnection(self)
        except BaseException:
            self._guarded(self._close, Failure())
            raise

    # --- the multiplexer ---------------------------------------------------------------------

    def ready(self, events: int, exclusive: bool) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        if events & WRITE:
            if events & GONE and self._is_writable():
                self._lose_writing()  # no send could succeed, and to take from the queue first could mean to sort it
            elif self.on_writable is None:
                self.send_on(exclusive)
            elif not self.on_writable(exclusive):
                self._watch_writing(False)
        if self.read_side is _READ_OPEN:
            if events & GONE:
                self._read_out()
            elif events & _READABLE:
                self._read(exclusive)
        elif events & HANGUP:
            self._hung_up()

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._depart(failure, list, 0.0, _DISCARDED_AT_ONCE)

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._close(reason)

    def _call_soon(self, call: Callable[..., object], *args: object) -> None:
        """Call when the events in hand are dealt with."""
        self._multiplexer.call_soon(self._guarded, call, *args)

    def _end_soon(self, call: Callable[..., object], *args: object) -> None:
        """As `_call_soon`, for a step of closing."""
        self._multiplexer.close_soon(self._guarded, call, *args)

    def _guarded(self, call: Callable[..., object], *args: object) -> None:
        """Call a function; if it raises, abort this connection and no other.

        The exception is most likely the protocol's.
        """
        try:
            call(*args)
        except Exception:
            failure = Failure()
            self._log.failure("Error in {transport}", failure=failure, transport=self)
            self._depart(failure, list, 0.0, _DISCARDED_AT_ONCE)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            if self._fd >= 0:
                self._multiplexer.modify(self._fd, events)

    def _unwatch(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._multiplexer.remove(fd)

    # --- reading -----------------------------------------------------------------------------

    def limit_packets(self, size: int) -> None:
        """Receive packets of up to `size` bytes whole from now on; longer ones are truncated."""
        self._reader = self._multiplexer.reader(size)

    def ensure_max_packet(self, size: int) -> None:
        """Receive packets of up to `size` bytes whole from now on, if the limit was lower."""
        if size > self._reader.max_packet:
            self._reader = self._multiplexer.reader(size)

    def _read_out(self) -> None:
        """Read to the end: the peer has hung up. If the protocol pauses, the rest stays in the kernel."""
        self.has_hung_up = True
        while self.read_side is _READ_OPEN and self._read_retry is None:
            if self.before_read is not None:
                self.before_read()
            if self.read_side is _READ_OPEN:
                self._read_batches(self._pacer.first_limit(BATCH, False, False, IN_TURN, self._bundle_limit))
        if self.read_side in _PAUSED:
            self._hung_up()

    def _read(self, exclusive: bool) -> None:
        """Read and deliver as many packets as the pacer allows in this pass."""
        multiplexer = self._multiplexer
        contended = multiplexer.contended
        if (contended or self.plain_socket is None) and self.before_read is not None:
            self.before_read()  # a read causes work, and other clients of the user may have been read in this pass
            if self.read_side is not _READ_OPEN:
                return
        number, bundle_limit = multiplexer.pass_number, self._bundle_limit
        self._read_batches(self._pacer.first_limit(self.read_limit, exclusive, contended, number, bundle_limit))

    def _read_batches(self, limit: int) -> None:
        """Read and deliver packets.

        :param limit: the packets of the first batch; the pacer says how many follow.
        """
        multiplexer, bundle_limit = self._multiplexer, self._bundle_limit
        while limit:
            try:
                packets, ended = self._reader.read(self._sock, limit)
            except OSError as e:
                if e.errno in _NO_MEMORY:
                    self._read_later()
                else:
                    self._abort(Failure(_connection_lost(e)))
                return
            if ended:
                self._read_last(packets)
                return
            if not packets:
                return
            if bundle_limit:
                packets = self._taken_apart(packets)
            taken = self._receiver.packetsReceived(packets)  # not `_deliver`: each call counts here
            if taken < len(packets):
                self._keep(packets, taken)
            multiplexer.has_read = True
            if limit == 1:
                return  # a lone packet, most likely: the next pass finds out
            limit = self._pacer.next_limit(len(packets))
            if limit and (self.read_side is not _READ_OPEN or self._bundle_limit):
                return

    def _read_last(self, packets: list[bytes]) -> None:
        """Deliver the packets in front of the end of file, and report it."""
        self.move(Event.END_OF_FILE)
        if packets:
            self._deliver(self._taken_apart(packets))
        self._watch(self._events & ~READ)
        if self.read_side is ReadSide.EOF and not self._undelivered:
            self._report_end_of_file()

    def _taken_apart(self, packets: list[bytes]) -> list[bytes]:
        """Take bundles out of a list of packets; beyond some messages, leave them as they are."""
        if not self._bundle_limit or self.keeps_bundles:
            return packets
        if total_size(packets) <= _UNBUNDLED_AT_ONCE:
            return unbundle(packets)
        parts: list[bytes] = []
        for at, packet in enumerate(packets, 1):
            parts += unbundle([packet])
            if len(parts) >= _ENOUGH_UNBUNDLED or BUNDLE_OFF in packet:
                return parts + packets[at:]  # behind the peer's wish for no more bundles they may not be taken apart
        return parts

    def _read_later(self) -> None:
        """Read again when the kernel may have memory: the packets wait in the socket."""
        if self._read_retry is None:
            self._watch(self._events & ~READ)
            self._read_retry = self._multiplexer.reactor.callLater(_MEMORY_RETRY, self._guarded, self._retry_read)

    def _retry_read(self) -> None:
        self._read_retry = None
        if self.read_side is _READ_OPEN:
            self._watch(self._events | READ)

    def _deliver(self, packets: list[bytes]) -> None:
        taken = self._receiver.packetsReceived(packets)
        if taken < len(packets):
            self._keep(packets, taken)

    def _keep(self, packets: list[bytes], taken: int) -> None:
        """Keep the packets that the protocol has not taken because it has paused the transport."""
        if self.read_side is not ReadSide.STOPPED:
            del packets[:taken]  # a copy of the rest would cost as much as a turn, turn by turn, if there are bundles
            self._undelivered = packets

    def _hung_up(self) -> None:
        """Look at the socket no more until the protocol resumes: the peer is gone, and its packets stay there."""
        if self._farewell is not None:
            self._shut_down()
            return
        self.has_hung_up = True
        if self.read_side in _PAUSED or self.read_side is ReadSide.RESUMING:
            self._multiplexer.suspend(self._fd)
        else:
            self._unwatch()
        self._lose_writing()

    def _report_end_of_file(self) -> None:
        if self._half is None or not self._is_writable():
            self._close_soon(Failure(main.CONNECTION_DONE))
        else:
            self.move(Event.REPORT)
            self._half.readConnectionLost()

    def pauseProducing(self) -> None:
        """Stop reading (`IPushProducer`); packets that were read and not taken are kept."""
        self.move(_PAUSE)
        self._watch(self._events & ~READ)

    def resumeProducing(self) -> None:
        """Read again, soon; packets that were kept are delivered first (`IPushProducer`)."""
        if self.read_side in _PAUSED:
            self.move(_RESUME)
            self._call_soon(self._resume)

    def read_on(self) -> None:
        """Deliver what was kept, and read once, now; see `IPacketTransport`."""
        if self.read_side in _PAUSED:
            self.move(_RESUME)
        self._guarded(self._read_on)

    def _read_on(self) -> None:
        if self._deliver_kept():
            if self.has_hung_up:
                self._read_out()
                return
            if self.before_read is not None:
                self.before_read()
            if self.read_side is _READ_OPEN:
                self._read_batches(self._pacer.first_limit(BATCH, False, False, IN_TURN, self._bundle_limit))
            if self.read_side is _READ_OPEN:
                self._watch(self._events | READ)

    def _resume(self) -> None:
        """Deliver what was kept; then read again, or report the end of file."""
        if self._deliver_kept():
            self._watch(self._events | READ)

    def _deliver_kept(self) -> bool:
        """Deliver what was kept, and report the end of file if it was read; return whether to read on."""
        if self.read_side not in _RESUMABLE:
            return False  # paused again, or closing
        kept, self._undelivered = self._undelivered, None
        if kept:
            self._deliver(kept)
            if self._undelivered:
                return False
        if self.read_side is ReadSide.RESUMING:
            self.move(Event.RESUMED)
            return True
        if self.read_side is ReadSide.EOF:
            self._report_end_of_file()
        return False

    # --- writing -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send one packet, when the events in hand are dealt with (`ITransport`).

        :raises ValueError: if it is empty, which the peer would read as end of file.
        """
        if not data:
            raise ValueError("an empty packet cannot be sent: it reads as end-of-file")
        if self.write_side is not _WRITE_OPEN and (self.write_side is not _DRAINING or self._producer is None):
            return
        self.queue.write(data)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_soon(self.flush)
        if self._producer is not None and self._pace is _Pace.PUSH and self._is_high():
            self._pace = _Pace.PAUSED
            self._producer.pauseProducing()

    def flush(self, rounds: range = _ROUNDS_PER_FLUSH) -> None:
        """Send what the socket takes; for the rest, wait until it is writable.

        :param rounds: one item for each batch, at most.
        """
        self._flush_scheduled = False
        queue = self.queue
        if self.write_side is not _WRITE_OPEN and self.write_side is not _DRAINING:
            queue.discard_all()
            if self._farewell is not None:
                self._say_farewell()
            return
        wanted = _PACKETS_PER_BUNDLING if self._send_bundle_limit else BATCH
        for _ in rounds:
            taken = queue.take(wanted)
            if not taken:
                break
            sent = self._send_bundled(taken) if self._send_bundle_limit else self._send(taken)
            if sent is None:
                queue.discard_all(taken)
                self._lose_writing()
                return
            queue.ack(taken, sent)
            if sent < len(taken) and len(queue):
                self._watch_writing(self._memory_retry is None)
                return
            if sent < wanted and not self._events & WRITE:
                break
        else:
            if len(queue):
                self._watch_writing(True)  # go on in the next turn
                return
        self._queue_sent()

    def flush_batch(self) -> None:
        """Send one batch; see `IPacketTransport`."""
        self.flush(_ONE_ROUND)

    def flush_later(self) -> None:
        """Send the queue once the socket takes packets; see `IPacketTransport`."""
        if self._is_writable():
            self._watch_writing(True)
        else:
            self.queue.discard_all()

    def send_on(self, exclusive: bool) -> None:
        """Send what waited for the socket to take packets again; see `IPacketTransport`."""
        self._guarded(self._send_on, exclusive)

    def _send_on(self, exclusive: bool) -> None:
        if self._send_buffer is not None and self.life is not Life.CLOSED:
            self._send_buffer.grow(self.may_grow)
        self.flush(_ROUNDS_PER_FLUSH if exclusive else _ONE_ROUND)

    def _queue_sent(self) -> None:
        """Go on after all that was queued was sent: let the producer produce, or end as `loseConnection` wanted."""
        self._watch_writing(False)
        if self._bundle_limit:
            self._send_bundle_limit = self._packing_limit()  # the answer that agrees to it is on its way
        if self._producer is not None:
            if self._pace is not _Pace.PUSH:
                if self._pace is _Pace.PAUSED:
                    self._pace = _Pace.PUSH
                self._producer.resumeProducing()
        elif self.write_side is _DRAINING:
            if self.life is Life.CLOSING:
                self._close_soon(Failure(main.CONNECTION_DONE))
            else:
                self._sock.shutdown(socket.SHUT_WR)
                self._end_writing(Event.SHUT_DOWN)

    def _moved(self) -> None:
        self._note_plain()

    def _note_plain(self) -> None:
        is_plain = self._is_writable() and not self._bundle_limit and not self._has_frames
        self.plain_socket = self._sock if is_plain else None

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets now, past the queue, which must be empty; see `IPacketTransport`."""
        if not self._is_writable():
            return 0
        try:
            if not self._bundle_limit or len(packets) == 1:
                return self._send_batch(packets)
            limit = self._send_bundle_limit
            if not limit:
                return 0
            cache = {} if cache is None else cache
            if limit not in cache:
                cache[limit] = pack(packets, limit, BATCH)
            bundles, counts = cache[limit]
            return sum(counts[: self._send_batch(bundles)])
        except OSError:
            return 0

    def unread_bytes(self) -> int:
        """Return the memory of what the peer has not read; see `IPacketTransport`."""
        return 0 if self.life is Life.CLOSED else unread_bytes(self._sock)

    def partial_bytes(self) -> int:
        """Return the memory of a packet that has arrived in part: none, as the kernel keeps packets whole."""
        return 0

    def partial_limit(self) -> int:
        """Return the bytes of the longest packet that can arrive in part; see `IPacketTransport`."""
        return 0

    def start_bundling(self, limit: int) -> int:
        """Accept bundles from now on, and send them once the queue is empty.

        See `sbus.protocol.bundles`.

        :param limit: bytes in the largest bundle to send.
        :returns: the limit in force, which is lower if the socket does not take packets of that length.
        """
        buffer = self._send_buffer
        self._bundle_limit = min(limit, max_sendable(self._sock) if buffer is None else buffer.full_size - OVERHEAD)
        self._note_plain()
        return self._bundle_limit

    def _packing_limit(self) -> int:
        """Return the bytes in the largest bundle to send.

        No bundle makes the send buffer grow. The limit is the same before and after the buffer has grown, so that the
        receivers of a run share one bundle.
        """
        buffer = self._send_buffer
        return self._bundle_limit if buffer is None else min(self._bundle_limit, buffer.first_sendable)

    def stop_bundling(self) -> None:
        """Accept and send no more bundles."""
        self._bundle_limit = self._send_bundle_limit = 0
        self._note_plain()

    def _send_bundled(self, taken: list[bytes]) -> int | None:
        """As `_send`, with many packets in one."""
        done = 0
        while done < len(taken):
            limit = self._send_bundle_limit
            bundles, counts = pack(taken[done:] if done else taken, limit, _BUNDLES_PER_SEND)
            sent = self._send(bundles, counts, taken, done)
            if sent is None:
                return None
            done += sum(counts[:sent])
            # Flood control takes a remainder for congestion, so only a full socket leaves one.
            if sent < len(bundles) and self._send_bundle_limit == limit:
                break
        return done

    def _send(
        self, items: list[bytes], counts: list[int] | None = None, taken: list[bytes] | None = None, done: int = 0
    ) -> int | None:
        """Send packets until the socket is full.

        If a bundle is too long for the socket, the next ones are shorter.

        :param counts: the number of packets in each item, if there are bundles among them.
        :param taken: the packets taken from the queue, if they are not the items themselves.
        :param done: the number of these that stand before the items.
        :returns: the number of items, from the front, that are dealt with; None if nothing can be sent any more.
        """
        sent = 0
        batch = items
        while True:
            try:
                count = self._send_batch(batch)
            except OSError as e:
                if e.errno == errno.EMSGSIZE:
                    if counts is not None and counts[sent] > 1:
                        # The send buffer was made smaller than a bundle. The packets inside may fit all the same.
                        limit = min(max_sendable(self._sock), len(batch[0]) - 1)
                        self._bundle_limit = self._send_bundle_limit = min(self._bundle_limit, limit)
                        return sent
                    if self._send_buffer is not None and self._send_buffer.fit(len(batch[0]), self.may_grow):
                        continue
                    # Longer than this socket's buffer: no fault of the receiver, and the other packets are sent.
                    packets = items if taken is None else taken
                    at = done + (sent if counts is None else sum(counts[:sent]))
                    oversized = packets[at]
                    if not self.queue.reject_oversized(packets, at):
                        why = f"{len(oversized)} bytes do not fit the send buffer"
                        self._abort(Failure(error.MessageLengthError(why)))
                        return None
                    if packets[at] is oversized:
                        sent += 1
                    elif counts is not None:
                        items[sent:], counts[sent:] = pack(packets[at:], self._send_bundle_limit, _BUNDLES_PER_SEND)
                    batch = items[sent:]
                    continue
                if e.errno not in _NO_MEMORY:
                    if e.errno not in _PEER_LEFT:
                        self._log.error("{transport} cannot be sent to: {why}: closing it", transport=self, why=str(e))
                        self._abort(Failure(e))
                    return None
                if self._memory_retry is None:
                    self._memory_retry = self._multiplexer.reactor.callLater(
                        _MEMORY_RETRY, self._guarded, self._retry_flush
                    )
                return sent
            sent += count
            if count == 0 or count == len(batch):
                return sent
            # A batch that was cut short does not say why; the packet that it ended at, sent alone, does.
            batch = items[sent : sent + 1]

    def _retry_flush(self) -> None:
        self._memory_retry = None
        self.flush()

    def _watch_writing(self, on: bool) -> None:
        self._watch(self._events | WRITE if on else self._events & ~WRITE)

    def _end_writing(self, event: Event) -> None:
        """Discard the queue, stop the producer, and report the end of writing.

        If reading has ended too, close instead.
        """
        self.move(event)
        self._watch_writing(False)
        self.queue.discard_all()
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._call_soon(producer.stopProducing)
        if self.life is Life.CLOSING or self.read_side is ReadSide.REPORTED:
            self._close_soon(Failure(main.CONNECTION_DONE))
        elif self._half is not None:
            self._call_soon(self._report_end_of_writing)

    def _report_end_of_writing(self) -> None:
        if self._half is not None:
            self._half.writeConnectionLost()

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Have a producer follow the socket's pace (`IConsumer`).

        :raises RuntimeError: if there is one already.
        """
        if self._producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self._producer!r} was never unregistered")
        if self.life is not Life.OPEN or not self._is_writable():
            producer.stopProducing()
            return
        self._producer = cast(IPushProducer, producer)  # only one that pushes is ever paused
        self._pace = _Pace.PUSH if streaming else _Pace.PULL
        if not streaming:
            self._producer.resumeProducing()

    def unregisterProducer(self) -> None:
        """Go on without the producer (`IConsumer`).

        It has no more to send; a close that waited for it follows.
        """
        self._producer = None
        if self.write_side is _DRAINING:
            self._call_soon(self.flush)

    def _is_high(self) -> bool:
        return isinstance(self.queue, FifoQueue) and self.queue.is_high()

    # --- closing -----------------------------------------------------------------------------

    def _stop_input(self) -> None:
        self._undelivered = None
        self._watch(self._events & ~READ)

    def close_gracefully(self, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon, so that the peer can still read what was delivered; see `IPacketTransport`."""
        self._depart(Failure(error.ConnectionAborted()), farewell, patience, input_limit)

    def _depart(self, reason: Failure, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        if self.life is not Life.OPEN and self.life is not Life.CLOSING:
            return
        is_writable = self._is_writable()
        self.move(Event.ABORT)
        self._undelivered = None
        self._watch(0)
        self._departure = reason
        self._input_limit = input_limit
        self._end_soon(self._begin_farewell, farewell if is_writable else None, patience)

    def _begin_farewell(self, farewell: Callable[[], list[bytes]] | None, patience: float) -> None:
        if self.life is Life.CLOSED:
            return
        packets: list[bytes] = []
        try:
            if farewell is not None:
                packets = farewell()  # may flush, which would end the connection if the farewell had begun
        finally:
            self._farewell = packets
            if packets and patience > 0:
                self._farewell_timer = self._multiplexer.reactor.callLater(patience, self._guarded, self._shut_down)
            self._say_farewell()

    def _say_farewell(self) -> None:
        """Send the last packets; wait until the socket is writable if they do not fit and there is time."""
        packets = self._farewell or []
        is_open = True
        for _ in range(2 * len(packets) + 1):
            try:
                del packets[: self._send_batch(packets)]
            except OSError:  # the peer reads no more, or the kernel has no memory
                is_open = False
                break
            is_open = bool(packets) or self._is_frame_open()
            if not is_open or not make_send_room(self._sock):
                break
        if is_open and self._farewell_timer is not None:
            self._watch(WRITE)
        else:
            self._shut_down()

    def _is_frame_open(self) -> bool:
        """Return whether a packet has left in part."""
        return False

    def _shut_down(self) -> None:
        """Shut the socket down both ways: the peer can read what the kernel holds, and send nothing more."""
        self._farewell = None
        if self._farewell_timer is not None:
            if self._farewell_timer.active():
                self._farewell_timer.cancel()
            self._farewell_timer = None
        self._unwatch()
        with contextlib.suppress(OSError):  # the peer has left
            self._sock.shutdown(socket.SHUT_RDWR)
        self._discard_input()

    def _discard_input(self) -> None:
        """Discard what the peer has sent, a few packets at a time, then close."""
        if self.life is Life.CLOSED:
            return
        limit = min(self._input_limit, _DISCARDED_AT_ONCE)
        self._input_limit -= limit
        if limit and discard_input(self._sock, limit) == limit:
            self._end_soon(self._discard_input)
        else:
            self._close(self._departure or Failure(error.ConnectionAborted()))

    def _abort(self, reason: Failure) -> None:
        if self.life is not Life.OPEN and self.life is not Life.CLOSING:
            return
        self.move(Event.ABORT)
        self._undelivered = None
        self._watch(0)
        self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._end_soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self.life is Life.CLOSED:
            return
        self._unwatch()
        self.move(Event.CLOSE)
        self._undelivered = None
        self.queue.discard_all()
        if self._memory_retry is not None:
            self._memory_retry.cancel()
            self._memory_retry = None
        if self._read_retry is not None:
            self._read_retry.cancel()
            self._read_retry = None
        if self._farewell_timer is not None:
            self._farewell_timer.cancel()
            self._farewell_timer = None
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._guarded(producer.stopProducing)
        try:
            self._sock.close()
        except OSError as e:  # the descriptor is gone all the same (close(2))
            self._log.error("{transport} was closed with an error: {why}", transport=self, why=str(e))
        protocol, self.protocol, self._half = self.protocol, None, None
        self._receiver = _NO_RECEIVER  # the protocol refers to the transport
        if protocol is not None:
            protocol.connectionLost(reason)

    # --- addresses ---------------------------------------------------------------------------

    def getHost(self) -> PacketAddress:
        """The local address (`ITransport`); empty when the connection is lost."""
        return PacketAddress(None if self.life is Life.CLOSED else self._sock.getsockname())

    def getPeer(self) -> PacketAddress:
        """The peer's address (`ITransport`).

        It is empty for most clients, and once the connection is lost.
        """
        return PacketAddress(None if self.life is Life.CLOSED else self._sock.getpeername())

    def getHandle(self) -> socket.socket:
        """The socket, for its options."""
        return self._sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fd {self._sock.fileno()} {self.credentials}>"


def _connection_lost(e: OSError) -> error.ConnectionLost:
    return error.ConnectionLost(f"{e.strerror} [{errno.errorcode.get(e.errno or 0, e.errno)}]")
