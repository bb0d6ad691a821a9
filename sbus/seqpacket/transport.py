"""The packet transport: one connected SEQPACKET socket, one write a packet, one ``dataReceived`` a packet.

In the life of a connection, reading and writing end separately, as the kernel lets them:

* *end of file* (or an empty packet, which looks the same): everything before it is delivered
  first, also what was kept back while the protocol had paused us. Then the connection is lost,
  or, if the protocol is an `IHalfCloseableProtocol`, its ``readConnectionLost`` is called;
* *hang-up while paused*: the peer is gone. What it sent is read into memory (it is no more than
  its socket buffer held), so that the descriptor need not be watched, and is delivered when the
  protocol resumes us: a message that was sent is never lost because its publisher left;
* *a failed send* (``EPIPE``, ``ECONNRESET``): nothing can be written any more. The queue is
  abandoned at once, while reading goes on to the end of file.

What both have in common is in `sbus.seqpacket.connection`, writing in `sbus.seqpacket.writing`.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from twisted.internet import error, main
from twisted.internet.interfaces import IConsumer, IHalfCloseableProtocol, IProtocol, IPushProducer, ITransport
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.protocol.bundles import unbundle
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.interfaces import IPacketReceiver, IPacketTransport
from sbus.seqpacket.multiplexer import HANGUP, READ, WRITE
from sbus.seqpacket.writing import WritingConnection
from sbus.syscalls.batch import BATCH

__all__ = ["PacketTransport"]

_READ_ROUNDS = range(8)
"""Reads in one turn at most, when no other socket is ready, until they make a batch."""
_CONTENTION_TTL = 64
"""For how many reads it is remembered that others had something to be read too."""
_BUNDLES_READ = 16
"""Packets in a batch from a peer that sends bundles."""


@implementer(IPacketTransport, ITransport, IConsumer, IPushProducer)
class PacketTransport(WritingConnection):
    """A connected SEQPACKET socket as a Twisted transport (`IPacketTransport`).

    :param sock: connected and non-blocking; the transport closes it.
    :param max_packet: bytes in the longest packet to receive. A longer one is never delivered in
        part: a protocol that takes batches (`IPacketReceiver`) gets the empty packet instead, any
        other loses the connection with `twisted.internet.error.ConnectionAborted`.
    """

    TLS = False

    __slots__ = ("_contention_ttl", "_ended", "_last_read_full", "_paused", "_reader", "_resuming", "read_limit")

    def __init__(self, reactor: Any, sock: socket.socket, max_packet: int = DEFAULT_MAX_PACKET) -> None:
        super().__init__(reactor, sock)
        self._reader = self._multiplexer.reader(max_packet)
        self._paused = False
        self._resuming = False
        self._ended = False
        self._last_read_full = True
        self._contention_ttl = 0
        self.read_limit = BATCH

    def start(self, protocol: IProtocol) -> None:
        """Connect a protocol and begin to read.

        :raises Exception: what its ``makeConnection`` raised; the connection is closed then.
        """
        self.protocol = protocol
        self._receiver = IPacketReceiver(protocol, None)
        self._half = IHalfCloseableProtocol(protocol, None)
        self._events = READ
        self._multiplexer.add(self._sock.fileno(), self, READ)
        self._watched = True
        self.connected = True
        try:
            protocol.makeConnection(self)
        except BaseException:
            self._guarded(self._close, Failure())
            raise

    def ready(self, events: int, exclusive: bool) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        if self._closed:
            return
        if events & WRITE:
            self.flush()
        if self._events & READ:
            if events & (READ | HANGUP):
                self._read(exclusive)
        elif events & HANGUP:
            self._hung_up()

    # --- reading -----------------------------------------------------------------------------

    def ensure_max_packet(self, size: int) -> None:
        """Receive packets of up to so many bytes whole from now on, if it was less."""
        if size > self._reader.max_packet:
            self._reader = self._multiplexer.reader(size)

    def _read(self, exclusive: bool) -> None:
        """Read a batch; one that is not full is followed by another look, as its sender is busy sending.

        Not so a packet that came alone: the multiplexer looks again, and sees the others too. Where the last one
        came alone, the next one is expected to, and a call for one packet costs less.
        """
        if self._multiplexer.contended:
            self._contention_ttl = _CONTENTION_TTL
        elif self._contention_ttl:
            self._contention_ttl -= 1
        read_limit = self.read_limit if self._contention_ttl else BATCH
        count = 0
        for _ in _READ_ROUNDS:
            if self._bundles:
                most = _BUNDLES_READ
            elif self._last_read_full or self._multiplexer.pass_number:
                most = read_limit - count
            else:
                most = 1
            try:
                packets, ended = self._reader.read(self._sock, most)
            except OSError as e:
                self._abort(Failure(_lost(e)))
                return
            if ended:
                self._ended = True
            if packets:
                self._deliver(unbundle(packets) if self._bundles else packets)
            if self._ended:
                self._watch(self._events & ~READ)
                if not self._undelivered:
                    self._end_of_file()
                return
            if not packets:
                return
            self._multiplexer.has_read = True
            self._last_read_full = len(packets) > 1
            count += len(packets)
            if (
                not (exclusive and self._last_read_full)
                or count >= read_limit
                or self._bundles
                or not self._events & READ
            ):
                return

    def _deliver(self, packets: list[bytes]) -> None:
        """Hand packets to the protocol; what it does not take, as it has paused us, is held."""
        if self._receiver is not None:
            taken = self._receiver.packetsReceived(packets)
        else:
            taken = 0
            assert self.protocol is not None
            for packet in packets:
                if self._paused or self._aborting or self.disconnecting:
                    break
                if not packet:
                    self._abort(Failure(error.ConnectionAborted("a packet longer than the limit arrived")))
                    return
                taken += 1
                self.protocol.dataReceived(packet)
        if taken < len(packets) and not self._aborting and not self.disconnecting:
            self._undelivered = packets[taken:]

    def _hung_up(self) -> None:
        """The peer is gone while we do not read: keep what it sent, and watch its socket no more."""
        held = self._undelivered or []
        while not self._ended:
            try:
                packets, self._ended = self._reader.read(self._sock)
            except OSError:
                packets, self._ended = [], True
            if not packets:
                break
            held = unbundle(held + packets) if self._bundles else held + packets
        self._undelivered = held
        if self._ended:
            self._unwatch()
            self._lose_writing()

    def _end_of_file(self) -> None:
        if self.disconnecting:
            return  # what waits is still sent
        if self._half is None or self._write_lost or self._read_told:
            self._close_soon(Failure(main.CONNECTION_DONE))
        else:
            self._read_told = True
            self._half.readConnectionLost()

    def pauseProducing(self) -> None:
        """Read no more (`IPushProducer`); what was read and not taken is kept."""
        self._paused = True
        self._watch(self._events & ~READ)

    def resumeProducing(self) -> None:
        """Read again, soon; what was kept is delivered first (`IPushProducer`)."""
        if self._paused and not self._closed:
            self._paused = False
            self._resume_soon()

    def stopProducing(self) -> None:
        """Close (`IPushProducer`)."""
        self.loseConnection()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        if self._paused or self._closed or self._aborting or self.disconnecting:
            return
        if self._undelivered:
            held, self._undelivered = self._undelivered, None
            self._deliver(held)
            if self._paused or self._undelivered or self._aborting or self.disconnecting:
                return
        self._undelivered = None
        if self._ended:
            if not self._read_told:
                self._end_of_file()
        else:
            self._watch(self._events | READ)


def _lost(e: OSError) -> error.ConnectionLost:
    return error.ConnectionLost(f"{e.strerror} [{errno.errorcode.get(e.errno or 0, e.errno)}]")
