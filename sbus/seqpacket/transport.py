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

Callbacks never run in the middle of somebody else's: closing and resuming wait until the hub has
dealt with the events in hand.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet import error, main
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableProtocol,
    IProtocol,
    IPushProducer,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from sbus.bundles import pack, unbundle
from sbus.interfaces import IPacketQueue, IPacketReceiver, IPacketTransport
from sbus.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.address import PacketAddress
from sbus.seqpacket.hub import HANGUP, READ, WRITE, Hub
from sbus.seqpacket.queue import PlainQueue
from sbus.syscalls.batch import BATCH, send_packets
from sbus.syscalls.sockets import peer_credentials, sendable

__all__ = ["PacketTransport"]

_READ_ROUNDS = 8
"""Reads in one turn at most, when no other socket is ready, until they make a batch."""
_WRITE_ROUNDS = 16
"""Batches written in one turn at most."""
_BUNDLES_READ = 8
"""Packets in a batch from a peer that sends bundles."""
_BUNDLES_SENT = 8
"""Bundles sent with one call at most."""
_MESSAGES_BUNDLED = 2048
"""Packets taken from the queue at a time to be bundled."""
_RETRY = 0.05
"""Seconds until a socket is tried again for which the kernel had no memory."""


@implementer(IPacketTransport, ITransport, IConsumer, IPushProducer)
class PacketTransport:
    """A connected SEQPACKET socket as a Twisted transport (`IPacketTransport`).

    :param sock: connected and non-blocking; the transport closes it.
    :param max_packet: bytes in the longest packet to receive. A longer one is never delivered in
        part: a protocol that takes batches (`IPacketReceiver`) gets the empty packet instead, any
        other loses the connection with `twisted.internet.error.ConnectionAborted`.
    """

    TLS = False

    _log = Logger()

    __slots__ = (
        "_aborting",
        "_bundle_size",
        "_bundles",
        "_closed",
        "_ended",
        "_events",
        "_flush_soon",
        "_half",
        "_held",
        "_hub",
        "_paused",
        "_producer",
        "_producer_paused",
        "_read_told",
        "_reader",
        "_receiver",
        "_resuming",
        "_retry",
        "_sock",
        "_streaming",
        "_watched",
        "_write_closing",
        "_write_lost",
        "connected",
        "credentials",
        "disconnecting",
        "protocol",
        "queue",
    )

    def __init__(self, reactor: Any, sock: socket.socket, max_packet: int = DEFAULT_MAX_PACKET) -> None:
        self._hub = Hub.of(reactor)
        self._sock = sock
        self._reader = self._hub.reader(max_packet)
        self.credentials = peer_credentials(sock)
        self.queue: IPacketQueue = PlainQueue()
        self.protocol: IProtocol | None = None
        self._receiver: IPacketReceiver | None = None
        self._half: IHalfCloseableProtocol | None = None
        self.connected = False
        self.disconnecting = False
        self._events = 0
        self._paused = False
        self._resuming = False
        self._held: list[bytes] | None = None
        self._ended = False
        self._read_told = False
        self._watched = False
        self._write_closing = False
        self._write_lost = False
        self._bundles = 0
        self._bundle_size = 0
        self._aborting = False
        self._closed = False
        self._flush_soon = False
        self._retry: Any = None
        self._producer: Any = None
        self._producer_paused = False
        self._streaming = False

    def start(self, protocol: IProtocol) -> None:
        """Connect a protocol and begin to read.

        :raises Exception: what its ``makeConnection`` raised; the connection is closed then.
        """
        self.protocol = protocol
        self._receiver = IPacketReceiver(protocol, None)
        self._half = IHalfCloseableProtocol(protocol, None)
        self._events = READ
        self._hub.add(self._sock.fileno(), self, READ)
        self._watched = True
        self.connected = True
        try:
            protocol.makeConnection(self)
        except BaseException:
            self._guarded(self._close, Failure())
            raise

    # --- what the hub says -------------------------------------------------------------------

    def ready(self, events: int, alone: bool) -> None:
        """See `sbus.seqpacket.hub.Handler`."""
        if self._closed:
            return
        if events & WRITE:
            self.flush()
        if self._events & READ:
            if events & (READ | HANGUP):
                self._read(_READ_ROUNDS if alone else 1)
        elif events & HANGUP:
            self._hung_up()

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.hub.Handler`."""
        self._abort(failure)

    def lost(self, reason: Failure) -> None:
        """See `sbus.seqpacket.hub.Handler`."""
        self._close(reason)

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call when the events in hand are dealt with."""
        self._hub.soon(self._guarded, call, *args)

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        """Call; an exception, which is most likely the protocol's, costs this connection and no other."""
        try:
            call(*args)
        except Exception:
            failure = Failure()
            self._log.failure("Error in {transport}", failure=failure, transport=self)
            self._abort(failure)

    # --- reading -----------------------------------------------------------------------------

    def _read(self, rounds: int) -> None:
        """Read a batch. A small one is followed by another look: an answer to it may be there already."""
        count = 0
        for _ in range(rounds):
            try:
                packets, ended = self._reader.read(self._sock, _BUNDLES_READ if self._bundles else BATCH)
            except OSError as e:
                self._abort(Failure(_lost(e)))
                return
            if ended:
                self._ended = True
            if packets:
                self._deliver(unbundle(packets) if self._bundles else packets)
            if self._ended:
                self._watch(self._events & ~READ)
                if not self._held:
                    self._end_of_file()
                return
            if not packets or not self._events & READ:
                return
            count += len(packets)
            if count >= BATCH or self._bundles:
                self._hub.has_more = True
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
            self._held = packets[taken:]

    def _hung_up(self) -> None:
        """The peer is gone while we do not read: keep what it sent, and watch its socket no more."""
        held = self._held or []
        while not self._ended:
            try:
                packets, self._ended = self._reader.read(self._sock)
            except OSError:
                packets, self._ended = [], True
            if not packets:
                break
            held += unbundle(packets) if self._bundles else packets
        self._held = held
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
        if self._held:
            held, self._held = self._held, None
            self._deliver(held)
            if self._paused or self._held or self._aborting or self.disconnecting:
                return
        self._held = None
        if self._ended:
            if not self._read_told:
                self._end_of_file()
        else:
            self._watch(self._events | READ)

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._events = events
            if self._watched:
                self._hub.modify(self._sock.fileno(), events)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._hub.remove(self._sock.fileno())

    # --- writing -----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send one packet, when the events in hand are dealt with (`ITransport`).

        :raises ValueError: if it is empty, as that would read as end-of-file.
        """
        if not data:
            raise ValueError("an empty packet cannot be sent: it reads as end-of-file")
        if self._write_lost or self._closed:
            return
        if (self.disconnecting or self._write_closing) and self._producer is None:
            return
        self.queue.write(data)
        if not self._flush_soon:
            self._flush_soon = True
            self._soon(self.flush)
        if self._streaming and not self._producer_paused and self._is_high():
            self._producer_paused = True
            self._producer.pauseProducing()

    def writeSequence(self, data: Any) -> None:
        """Send several packets: one for each item (`ITransport`)."""
        for packet in data:
            self.write(packet)

    def flush(self) -> None:
        """Send what the socket takes; for the rest, wait until it is writable."""
        self._flush_soon = False
        queue = self.queue
        if self._write_lost or self._aborting:
            queue.abandon()
            return
        wanted = _MESSAGES_BUNDLED if self._bundle_size else BATCH
        for _ in range(_WRITE_ROUNDS):
            taken = queue.take(wanted)
            if not taken:
                break
            sent = self._send_bundled(taken) if self._bundle_size else self._send(taken)
            if sent is None:
                queue.abandon(taken)
                if not self._aborting:
                    self._lose_writing()
                return
            queue.done(taken, sent)
            if sent < len(taken) and len(queue):
                self._watch_writing(self._retry is None)
                return
            if sent < wanted and not self._events & WRITE:
                break
        else:
            if len(queue):
                self._watch_writing(True)  # go on in the next turn
                return
        self._watch_writing(False)
        if self._bundles:
            self._bundle_size = self._bundles  # the answer that allows it is on its way
        if self._producer is not None:
            if self._producer_paused or not self._streaming:
                self._producer_paused = False
                self._producer.resumeProducing()
        elif self.disconnecting:
            self._close_soon(Failure(main.CONNECTION_DONE))
        elif self._write_closing:
            self._sock.shutdown(socket.SHUT_WR)
            self._lose_writing()

    def startBundling(self, limit: int) -> int:
        """Take bundles from now on, and send them as soon as what waits now is sent (`sbus.bundles`).

        :param limit: bytes in the largest bundle to send.
        :returns: the limit in force, which is less if the socket takes no packets so long.
        """
        self._bundles = min(limit, sendable(self._sock))
        return self._bundles

    def stopBundling(self) -> None:
        """Neither take nor send bundles from now on."""
        self._bundles = self._bundle_size = 0

    def _send_bundled(self, taken: list[bytes]) -> int | None:
        """As `_send`, with many packets in one; what is left out waits for the next round."""
        bundles, counts = pack(taken, self._bundle_size, _BUNDLES_SENT)
        sent = self._send(bundles)
        return None if sent is None else sum(counts[:sent])

    def _send(self, taken: list[bytes]) -> int | None:
        """Send packets until the socket is full.

        :returns: how many, from the front, are dealt with; None if nothing can be sent any more.
        """
        sent = 0
        batch = taken
        while True:
            try:
                count = send_packets(self._sock, batch)
            except OSError as e:
                if e.errno == errno.EMSGSIZE:
                    # Longer than this socket's buffer: no fault of the receiver's, nor of the other packets'.
                    if not self.queue.refused(batch[0]):
                        why = f"{len(batch[0])} bytes do not fit the send buffer"
                        self._abort(Failure(error.MessageLengthError(why)))
                        return None
                    sent += 1
                    batch = taken[sent:]
                    continue
                if e.errno not in (errno.ENOBUFS, errno.ENOMEM):
                    return None
                if self._retry is None:
                    self._retry = self._hub.reactor.callLater(_RETRY, self._guarded, self._try_again)
                return sent
            sent += count
            if count == 0 or count == len(batch):
                return sent
            # A batch that was cut short does not say why; the packet that it ended at, sent alone, does.
            batch = taken[sent : sent + 1]

    def _try_again(self) -> None:
        self._retry = None
        self.flush()

    def _watch_writing(self, on: bool) -> None:
        self._watch(self._events | WRITE if on else self._events & ~WRITE)

    def _lose_writing(self) -> None:
        if self._write_lost:
            return
        self._write_lost = True
        self._watch_writing(False)
        self.queue.abandon()
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._soon(producer.stopProducing)
        if self.disconnecting or self._read_told:
            self._close_soon(Failure(main.CONNECTION_DONE))
        elif self._half is not None:
            self._soon(self._half.writeConnectionLost)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Let a producer follow the socket's pace (`IConsumer`).

        :raises RuntimeError: if there is one already.
        """
        if self._producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self._producer!r} was never unregistered")
        if self._write_lost or self._closed or self.disconnecting:
            producer.stopProducing()
            return
        self._producer = producer
        self._producer_paused = False
        self._streaming = streaming
        if not streaming:
            producer.resumeProducing()

    def unregisterProducer(self) -> None:
        """The producer has no more to send (`IConsumer`); what was to be closed behind it closes now."""
        self._producer = None
        self._streaming = False
        if self.disconnecting or self._write_closing:
            self._soon(self.flush)

    def _is_high(self) -> bool:
        return isinstance(self.queue, PlainQueue) and self.queue.is_high()

    # --- closing -----------------------------------------------------------------------------

    def loseConnection(self) -> None:
        """Send what waits, and what a producer has to send, then close (`ITransport`).

        What arrives from now on is not delivered.
        """
        if self.disconnecting or self._closed or self._aborting:
            return
        self.disconnecting = True
        self._held = None
        self._watch(self._events & ~READ)
        if self._write_lost:
            self._close_soon(Failure(main.CONNECTION_DONE))
        else:
            self._soon(self.flush)

    def loseWriteConnection(self) -> None:
        """Send what waits, then shut our side down: the peer reads end-of-file, and we still read."""
        if not self._write_lost and not self._closed:
            self._write_closing = True
            self._soon(self.flush)

    def abortConnection(self) -> None:
        """Close, and forget what waits."""
        self._abort(Failure(error.ConnectionAborted()))

    def _abort(self, reason: Failure) -> None:
        if self._aborting or self._closed:
            return
        self._aborting = True
        self._held = None
        self._watch(0)
        self._close_soon(reason)

    def _close_soon(self, reason: Failure) -> None:
        self._soon(self._close, reason)

    def _close(self, reason: Failure) -> None:
        if self._closed:
            return
        self._unwatch()
        self._closed = True
        self.connected = False
        self._write_lost = True
        self.queue.abandon()
        self._sock.close()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._guarded(producer.stopProducing)
        protocol, self.protocol, self._receiver, self._half = self.protocol, None, None, None
        if protocol is not None:
            protocol.connectionLost(reason)

    # --- who and where -----------------------------------------------------------------------

    def getHost(self) -> PacketAddress:
        """Our own address (`ITransport`); an empty one when the connection is lost."""
        return PacketAddress(None if self._closed else self._sock.getsockname())

    def getPeer(self) -> PacketAddress:
        """The peer's address (`ITransport`), which for a client is mostly empty, as for a lost connection."""
        return PacketAddress(None if self._closed else self._sock.getpeername())

    def getHandle(self) -> socket.socket:
        """The socket, for its options."""
        return self._sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def __repr__(self) -> str:
        return f"<PacketTransport fd {self._sock.fileno()} {self.credentials}>"


def _lost(e: OSError) -> error.ConnectionLost:
    return error.ConnectionLost(f"{e.strerror} [{errno.errorcode.get(e.errno or 0, e.errno)}]")
