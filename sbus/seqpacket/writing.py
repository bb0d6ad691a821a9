"""The writing half of a packet transport: from a queue to the kernel, one packet for each write, many with one call."""

from __future__ import annotations

import errno
import socket
from typing import Any

from twisted.internet import error, main
from twisted.python.failure import Failure

from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache, pack
from sbus.seqpacket.connection import Connection
from sbus.seqpacket.multiplexer import READ, WRITE
from sbus.syscalls.batch import BATCH, send_packets
from sbus.syscalls.sockets import max_sendable

__all__ = ["WritingConnection"]

_WRITE_ROUNDS = 16
"""Batches written in one turn at most."""
_BUNDLES_SENT = 8
"""Bundles sent with one call at most."""
_MESSAGES_BUNDLED = 2048
"""Packets taken from the queue at a time to be bundled."""
_RETRY = 0.05
"""Seconds until a socket is tried again for which the kernel had no memory."""


class WritingConnection(Connection):
    """A connection that packets are written to, and that follows a producer's pace.

    :ivar queue: what is sent from (`IPacketQueue`); a protocol may put its own in its place.
    """

    __slots__ = (
        "_bundle_size",
        "_flush_soon",
        "_producer",
        "_producer_paused",
        "_retry",
        "_streaming",
        "_write_closing",
        "queue",
    )

    def __init__(self, reactor: Any, sock: socket.socket) -> None:
        super().__init__(reactor, sock)
        self.queue: IPacketQueue = FifoQueue()
        self._bundle_size = 0
        self._flush_soon = False
        self._retry: Any = None
        self._producer: Any = None
        self._producer_paused = False
        self._streaming = False
        self._write_closing = False

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
            queue.discard_all()
            return
        wanted = _MESSAGES_BUNDLED if self._bundle_size else BATCH
        for _ in range(_WRITE_ROUNDS):
            taken = queue.take(wanted)
            if not taken:
                break
            sent = self._send_bundled(taken) if self._bundle_size else self._send(taken)
            if sent is None:
                queue.discard_all(taken)
                if not self._aborting:
                    self._lose_writing()
                return
            queue.ack(taken, sent)
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

    def try_send(self, packets: list[bytes], packed: BundleCache | None = None) -> int:
        """Send packets past the queue, which is empty; see `IPacketTransport`."""
        if self._write_lost or self._aborting:
            return 0
        try:
            if not self._bundles or len(packets) == 1:
                return send_packets(self._sock, packets)
            limit = self._bundle_size
            if not limit:
                return 0
            packed = {} if packed is None else packed
            if limit not in packed:
                packed[limit] = pack(packets, limit, BATCH)
            bundles, counts = packed[limit]
            return sum(counts[: send_packets(self._sock, bundles)])
        except OSError:
            return 0

    def start_bundling(self, limit: int) -> int:
        """Take bundles from now on, and send them as soon as what waits now is sent (`sbus.protocol.bundles`).

        :param limit: bytes in the largest bundle to send.
        :returns: the limit in force, which is less if the socket takes no packets so long.
        """
        self._bundles = min(limit, max_sendable(self._sock))
        return self._bundles

    def stop_bundling(self) -> None:
        """Neither take nor send bundles from now on."""
        self._bundles = self._bundle_size = 0

    def _send_bundled(self, taken: list[bytes]) -> int | None:
        """As `_send`, with many packets in one."""
        done = 0
        while done < len(taken):
            limit = self._bundle_size
            bundles, counts = pack(taken[done:] if done else taken, limit, _BUNDLES_SENT)
            sent = self._send(bundles, counts)
            if sent is None:
                return None
            done += sum(counts[:sent])
            # Flood control takes what is left for congestion: only a full socket may leave anything.
            if sent < len(bundles) and self._bundle_size == limit:
                break
        return done

    def _send(self, taken: list[bytes], counts: list[int] | None = None) -> int | None:
        """Send packets until the socket is full, or until a bundle is too long for it: the next ones are shorter then.

        :param counts: how many packets are in each, if there may be bundles among them.
        :returns: how many, from the front, are dealt with; None if nothing can be sent any more.
        """
        sent = 0
        batch = taken
        while True:
            try:
                count = send_packets(self._sock, batch)
            except OSError as e:
                if e.errno == errno.EMSGSIZE:
                    if counts is not None and counts[sent] > 1:
                        # Somebody has made the buffer smaller than a bundle: the packets in it may fit all the same.
                        limit = min(max_sendable(self._sock), len(batch[0]) - 1)
                        self._bundles = self._bundle_size = min(self._bundles, limit)
                        return sent
                    # Longer than this socket's buffer: no fault of the receiver's, nor of the other packets'.
                    if not self.queue.reject_oversized(batch[0]):
                        why = f"{len(batch[0])} bytes do not fit the send buffer"
                        self._abort(Failure(error.MessageLengthError(why)))
                        return None
                    sent += 1
                    batch = taken[sent:]
                    continue
                if e.errno not in (errno.ENOBUFS, errno.ENOMEM):
                    return None
                if self._retry is None:
                    self._retry = self._multiplexer.reactor.callLater(_RETRY, self._guarded, self._try_again)
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
        self.queue.discard_all()
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
        return isinstance(self.queue, FifoQueue) and self.queue.is_high()

    # --- closing -----------------------------------------------------------------------------

    def loseConnection(self) -> None:
        """Send what waits, and what a producer has to send, then close (`ITransport`).

        What arrives from now on is not delivered.
        """
        if self.disconnecting or self._closed or self._aborting:
            return
        self.disconnecting = True
        self._undelivered = None
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

    def _stop_writing(self) -> None:
        self.queue.discard_all()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._producer is not None:
            producer, self._producer = self._producer, None
            self._guarded(producer.stopProducing)
