"""The packet transport: one connected SEQPACKET socket as a Twisted transport.

One write is one packet, and so is one ``dataReceived``.

Theory of operation
-------------------

The multiplexer calls `ready` when the socket can be read or written; everything else happens because the protocol calls
a method. `sbus.seqpacket.states` has the states, `sbus.seqpacket.endings` the calls that end a connection,
`sbus.seqpacket.pacing` bounds the packets of one read, and `sbus.seqpacket.sending` is the base class: the socket, and
its sending half. This module reads, and closes.

Reading and writing end separately, as the kernel ends them:

======================  ==============================================================================================
event                   what the transport does
======================  ==============================================================================================
end of file, or an      It delivers everything before it. Then the connection is lost; an `IHalfCloseableProtocol` gets
empty packet            ``readConnectionLost`` instead.
hang-up                 It reads the peer's packets to the end at once, before sockets that are ready later.
hang-up while paused    The socket leaves the epoll set, which would report it forever. The packets stay in the kernel
                        until the protocol resumes, so no message is lost because its publisher left.
large packets that      It sends each to an outlet, if the protocol finds one, and no layer sees it: 400 kB took the
begin alike             server 87 µs as an object that each layer handled, and take 70 from the buffer.
the kernel has no       It reads again after 50 ms, as it does if the peer's user has passed many descriptors that still
memory                  have to be closed, or if there is no room for those that may come.
======================  ==============================================================================================

Invariants:

* *No callback runs inside another one.* Closing, resuming and reporting are deferred (`Multiplexer.call_soon`), so a
  protocol that iterates over receivers never loses one meanwhile.
* *A packet that was read is delivered*, unless the protocol closes the connection first. Packets that a paused protocol
  does not take are kept (`_undelivered`), and come first when it resumes.

Rejected: a second read of a socket whose only packet was just read (it mostly found nothing; the multiplexer looks
again instead); three classes with about fifteen booleans (they shared all of them, so none could be read alone; today's
halves share the table of states).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Final, cast

from twisted.internet import error, main
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableProtocol,
    IProtocol,
    IPushProducer,
    ITransport,
)
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.flood import PayloadShare
from sbus.protocol.bundles import unbundle
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.routing.runs import total_size
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.framing import FrameReader
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport, Outlet, Reactor
from sbus.seqpacket.multiplexer import GONE, HANGUP, READ, WRITE
from sbus.seqpacket.pacing import IN_TURN, LARGE, LARGE_PER_PASS, ReadPacer
from sbus.seqpacket.payload_sender import PayloadSender, may_join
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.sending import NO_MEMORY, SendingHalf
from sbus.seqpacket.states import Event, Life, ReadSide
from sbus.syscalls.batch import BATCH, PacketReader
from sbus.syscalls.processes import peer_executable
from sbus.syscalls.sockets import pass_descriptors, peer_credentials, peer_groups

__all__ = ["PacketTransport"]

_UNBUNDLED_AT_ONCE = 128 << 10
"""Bytes of bundles that are taken apart together, whatever their packets."""
_ENOUGH_UNBUNDLED = 4_096
"""Messages after which no more bundles are taken apart: 16 of the largest have 300,000, which takes 30 ms."""
_LONGEST_HEAD = 512
"""Bytes of a large packet up to its first NUL, at most, that are compared with those of the next ones."""

_READABLE: Final = READ | HANGUP
# A member looked up in its enum costs ten times a global.
_READ_OPEN: Final = ReadSide.OPEN
_PAUSE: Final = Event.PAUSE
_RESUME: Final = Event.RESUME

_PAUSED: Final = frozenset({ReadSide.PAUSED, ReadSide.PAUSED_EOF})
_RESUMABLE: Final = frozenset({ReadSide.RESUMING, ReadSide.EOF})
_DELIVERING: Final = frozenset({ReadSide.OPEN, ReadSide.RESUMING, ReadSide.EOF})
"""The states in which the protocol takes packets."""


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
class PacketTransport(SendingHalf):
    """A connected SEQPACKET socket as a Twisted transport (`IPacketTransport`).

    :param sock: connected and non-blocking; the transport closes it.
    :param max_packet: bytes in the longest packet to receive. A longer packet is never delivered in part: a protocol
        that takes batches (`IPacketReceiver`) gets the empty packet instead, any other loses the connection with
        `twisted.internet.error.ConnectionAborted`.
    :param send_buffer: the socket's send buffer, if it is to grow; else it is left as it is.
    :ivar credentials: the peer's process, user and group.
    :ivar queue: the `IPacketQueue` that is sent from; a protocol can replace it.
    :ivar read_limit: packets to read in one go while other sockets have packets to be read.
    :ivar has_hung_up: whether the peer has closed its socket.
    :ivar keeps_bundles: whether the protocol gets bundles as they are, and not their packets.
    """

    TLS = False

    __slots__ = (
        "_large_head",
        "_pacer",
        "_read_retry",
        "_reader",
        "_receiver",
        "_undelivered",
        "before_read",
        "credentials",
        "find_outlet",
        "has_hung_up",
        "keeps_bundles",
        "on_writable",
        "protocol",
        "read_limit",
    )

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        max_packet: int = DEFAULT_MAX_PACKET,
        send_buffer: SendBuffer | None = None,
    ) -> None:
        super().__init__(reactor, sock, send_buffer)
        self.credentials = peer_credentials(sock)
        self.protocol: IProtocol | None = None
        self._receiver = _NO_RECEIVER
        self._reader: PacketReader | FrameReader = self._multiplexer.reader(max_packet)
        self._pacer = ReadPacer()
        self.read_limit = BATCH
        self.keeps_bundles = False
        self._undelivered: list[bytes] | None = None
        self._read_retry = False
        self._large_head = b""  # the beginning of the last large packet
        self.before_read: Callable[[], None] | None = None
        self.find_outlet: Callable[[bytes], Outlet | None] | None = None
        self.on_writable: Callable[[bool], bool] | None = None
        self.has_hung_up = False

    def peer_executable(self) -> str | None:
        """Return the path of the peer's program; see `IPacketTransport`."""
        return None if self.life is Life.CLOSED else peer_executable(self._sock, self.credentials.pid)

    def peer_groups(self) -> frozenset[int]:
        """See `IPacketTransport`."""
        return peer_groups(self._sock)

    def begin_alone(self) -> None:
        """Read the first packet alone, to learn whether an unknown peer sends large ones; call it before `start`."""
        self._pacer.begin_alone()

    def start(self, protocol: IProtocol) -> None:
        """Connect a protocol and begin to read.

        :raises OSError: as epoll_ctl(2).
        :raises Exception: the error of ``makeConnection``; the connection is closed then.
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
        if events != READ:
            self._handle(events, exclusive)
            return
        if self.read_side is not _READ_OPEN:
            self._poll(self._events & ~READ)  # only now: most pauses are over before anything is reported
            return
        multiplexer = self._multiplexer
        contended = multiplexer.contended
        if (contended or self.plain_socket is None) and self.before_read is not None:
            self.before_read()  # a read causes work, and other clients of the user may have been read in this pass
            if self.read_side is not _READ_OPEN:
                return
        number, bundle_limit = multiplexer.pass_number, self._bundle_limit
        self._read(self._pacer.first_limit(self.read_limit, exclusive, contended, number, bundle_limit))

    def _handle(self, events: int, exclusive: bool) -> None:
        """Handle events other than new packets to read, or these as well."""
        if events & WRITE:
            if events & GONE and self._is_writable():
                self._lose_writing()  # no send could succeed, and to take from the queue first could mean to sort it
            elif self.on_writable is None:
                self.send_on(exclusive)
            elif not self.on_writable(exclusive):
                self._poll_writing(False)
        if self.read_side is _READ_OPEN:
            if events & GONE:
                self._read_out()
            elif events & _READABLE:
                self.ready(READ, exclusive)
        elif events & HANGUP:
            self._hung_up()
        elif events & READ:
            self._poll(self._events & ~READ)

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        if self._payloads is not None:
            self._payloads.is_kept = False
        self._close(reason)

    # --- reading -----------------------------------------------------------------------------

    def limit_packets(self, size: int) -> None:
        """Receive packets of up to `size` bytes whole from now on; longer ones are truncated."""
        self._reader = self._multiplexer.reader(size, self._reader.descriptors)

    def ensure_max_packet(self, size: int) -> None:
        """Receive packets of up to `size` bytes whole from now on, if the limit was lower."""
        if size > self._reader.max_packet:
            self.limit_packets(size)

    def pass_payloads(self, wanted: bool, share: PayloadShare | None = None) -> bool:
        """Accept packets with descriptors, and send payloads with theirs, or no more; see `IPacketTransport`."""
        if wanted and self._payloads is None:
            if share is not None and not may_join(share):
                return False
            longest = self._reader.max_packet  # the same in both directions
            self._payloads = PayloadSender(self._sock, self._multiplexer, longest, self._fit, share)
            self.send_batch = self._payloads.send
        if self._payloads is not None:
            self._payloads.is_wanted = wanted
        pass_descriptors(self._sock, wanted)
        if wanted:  # and for good: after the end, there may be descriptors that were sent before
            self._reader = self._multiplexer.reader(self._reader.max_packet, True)
        return True

    def _fit(self, size: int) -> bool:
        """Make the send buffer large enough for a packet; return whether it is larger now."""
        return self._send_buffer is not None and self._send_buffer.fit(size, self.may_grow)

    def partial_bytes(self) -> int:
        """Return the memory of a packet that has arrived in part: none, as the kernel keeps packets whole."""
        return 0

    def partial_limit(self) -> int:
        """Return the bytes of the longest packet that can arrive in part; see `IPacketTransport`."""
        return 0

    def _read_out(self) -> None:
        """Read to the end: the peer has hung up. If the protocol pauses, the rest stays in the kernel."""
        self.has_hung_up = True
        while self.read_side is _READ_OPEN and not self._read_retry:
            if self.before_read is not None:
                self.before_read()
            if self.read_side is _READ_OPEN:
                self._read(self._pacer.first_limit(BATCH, False, False, IN_TURN, self._bundle_limit))
        if self.read_side in _PAUSED:
            self._hung_up()
        elif self._read_retry:
            self._multiplexer.suspend(self._fd)  # else the kernel reports the hang-up until the retry

    def _read(self, limit: int) -> None:
        """Read and deliver packets.

        :param limit: the packets of the first batch; the pacer says how many follow.
        """
        left = LARGE_PER_PASS
        while limit:
            if self._payloads is not None:
                limit = min(limit, self._payloads.readable())
                if not limit:
                    self._read_later()
                    return
            try:
                if self._large_head:
                    packets, ended, left = self._forward(limit, left)
                else:
                    packets, ended = self._reader.read(self._sock, limit)
            except OSError as e:
                if e.errno in NO_MEMORY:
                    self._read_later()
                else:
                    self._abort(Failure(_connection_lost(e)))
                return
            if ended:
                self._read_last(packets)
                return
            if not packets:
                return
            large = 0
            if self._bundle_limit:
                packets = self._taken_apart(packets)
                if len(packets[-1]) >= LARGE:
                    large = total_size(packets)  # before the receiver, which may change the list
                    self._large_head = packets[-1][: packets[-1].find(b"\0", 0, _LONGEST_HEAD) + 1]
            taken = self._receiver.packetsReceived(packets)  # not `_deliver`: each call counts here
            if taken < len(packets):
                self._keep(packets, taken)
            self._multiplexer.has_read = True
            if large and self._pacer.is_alone():
                left -= large
                if left > 0 and self.read_side is _READ_OPEN:
                    continue
            if limit == 1:
                return  # a lone packet, most likely: the next pass finds out
            limit = self._pacer.next_limit(len(packets))
            if limit and (self.read_side is not _READ_OPEN or self._bundle_limit):
                return

    def _forward(self, limit: int, left: int) -> tuple[list[bytes], bool, int]:
        """Send the packets in front that need not be seen to the outlet, then read as `PacketReader.read` does.

        :returns: as `PacketReader.read`, and the rest of the `left` bytes that may be sent on.
        """
        reader, find_outlet, outlet = self._reader, self.find_outlet, None
        if find_outlet is not None and self._payloads is None and self._pacer.is_alone():
            outlet = find_outlet(self._large_head)
        if outlet is None or not isinstance(reader, PacketReader):
            self._large_head = b""
            return *reader.read(self._sock, limit), left
        count, size, packets, ended = reader.forward(self._sock, outlet.sock, self._large_head, left)
        if count:
            outlet.on_sent(count, size)
            self._multiplexer.has_read = True
        elif packets:
            self._large_head = b""  # small ones are read in batches again; a large one sets it anew
        return packets, ended, left - size

    def _read_last(self, packets: list[bytes]) -> None:
        """Deliver the packets in front of the end of file, and report it."""
        self.move(Event.END_OF_FILE)
        if packets:
            self._deliver(self._taken_apart(packets))
        self._poll(self._events & ~READ)
        if self.read_side is ReadSide.EOF and not self._undelivered:
            self._report_end_of_file()

    def _taken_apart(self, packets: list[bytes]) -> list[bytes]:
        """Take bundles out of a list of packets; beyond some messages, leave them as they are."""
        if not self._bundle_limit or self.keeps_bundles:
            return packets
        if total_size(packets) <= _UNBUNDLED_AT_ONCE:
            return unbundle(packets)
        return unbundle(packets, _ENOUGH_UNBUNDLED)

    def _read_later(self) -> None:
        """Read again in a moment: the packets wait in the socket."""
        self._poll(self._events & ~READ)
        self._read_retry = True
        self._multiplexer.try_again(self._retry_read)

    def _retry_read(self) -> None:
        self._read_retry = False
        if self.read_side is not _READ_OPEN:
            return
        payloads = self._payloads
        if payloads is None or payloads.readable():
            self._guarded(self._poll, self._events | READ)
        elif self.has_hung_up and not payloads.share.is_overrun():
            self._abort(Failure(error.ConnectionLost()))  # its own descriptor may be among those that lack
        else:
            self._read_later()

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
        """Stop watching the socket until the protocol resumes: the peer is gone, and its packets stay there."""
        if self._farewell is not None:
            self._shut_down()
            return
        self.has_hung_up = True
        if self.read_side in _PAUSED or self.read_side is ReadSide.RESUMING:
            self._events &= ~READ
            self._multiplexer.suspend(self._fd)
        else:
            self._stop_polling()
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

    def resumeProducing(self) -> None:
        """Read again, soon; packets that were kept are delivered first (`IPushProducer`)."""
        if self.read_side in _PAUSED:
            self.move(_RESUME)
            self._call_soon(self._resume)

    def read_on(self) -> None:
        """Deliver the packets that were kept, and read once, now; see `IPacketTransport`."""
        if self.read_side in _PAUSED:
            self.move(_RESUME)
        self._guarded(self._read_on)

    def _read_on(self) -> None:
        had_kept = self._undelivered is not None
        if self._deliver_kept():
            if self.has_hung_up:
                self._read_out()
                return
            if had_kept and self.before_read is not None:  # they may have taken the whole turn
                self.before_read()
            if self.read_side is _READ_OPEN:
                self._read(self._pacer.first_limit(BATCH, False, False, IN_TURN, self._bundle_limit))
            if not self._events & READ and self.read_side is _READ_OPEN and not self._read_retry:
                self._poll(self._events | READ)

    def _resume(self) -> None:
        """Deliver the packets that were kept; then read again, or report the end of file."""
        if self._deliver_kept() and not self._read_retry:
            self._poll(self._events | READ)

    def _deliver_kept(self) -> bool:
        """Deliver the packets that were kept, and report the end of file if it was read; return whether to read on."""
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

    # --- closing -----------------------------------------------------------------------------

    def _stop_input(self) -> None:
        self._undelivered = None
        self._poll(self._events & ~READ)

    def close_gracefully(self, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon, so that the peer can still read delivered packets; see `IPacketTransport`."""
        self._depart(Failure(error.ConnectionAborted()), farewell, patience, input_limit)

    def _depart(self, reason: Failure, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        if self.life is not Life.OPEN and self.life is not Life.CLOSING:
            return
        is_writable = self._is_writable()
        self.move(Event.ABORT)
        self._undelivered = None
        self._poll(0)
        self._departure = reason
        self._input_limit = input_limit
        self._end_soon(self._begin_farewell, farewell if is_writable else None, patience)

    def _abort(self, reason: Failure) -> None:
        if self.life is not Life.OPEN and self.life is not Life.CLOSING:
            return
        self.move(Event.ABORT)
        self._undelivered = None
        self._poll(0)
        self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._end_soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self.life is Life.CLOSED:
            return
        self._stop_polling()
        payloads = self._payloads
        self._payloads, self.send_batch = None, _closed  # the old `send_batch` may refer to this object
        self.move(Event.CLOSE)
        self._undelivered = None
        self.queue.discard_all()
        self._multiplexer.try_no_more(self._retry_flush)
        self._multiplexer.try_no_more(self._retry_read)
        if self._farewell_timer is not None:
            self._farewell_timer.cancel()
            self._farewell_timer = None
        self._guarded(self._stop_producer)
        try:
            if payloads is not None:
                payloads.close(self._input_limit)
            else:
                self._sock.close()
        except OSError as e:  # the descriptor is gone anyway (close(2))
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


def _closed(packets: list[bytes]) -> int:
    """Send nothing: the socket is closed."""
    return 0


def _connection_lost(e: OSError) -> error.ConnectionLost:
    return error.ConnectionLost(f"{e.strerror} [{errno.errorcode.get(e.errno or 0, e.errno)}]")
