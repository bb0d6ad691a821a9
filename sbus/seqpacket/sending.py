"""The sending half of a packet transport: from a queue to the socket.

Theory of operation
-------------------

`SendingHalf` has the socket, watches it, and sends the packets of the queue, and the last packets of a connection that
is closed gracefully. `sbus.seqpacket.transport` adds reading, and decides about closing.

Invariants:

* *The remainder of a flush is the congestion.* `flush` returns packets to the queue only if the socket is full, so
  flood control may take a remainder for a slow reader. An oversized packet, or a peer that left, is reported otherwise.
* *An exception costs one connection.* Deferred calls are guarded: an error in a protocol aborts its own transport.

===============================  ==================================================================================
a send                           what happens
===============================  ==================================================================================
one system call                  sends up to 64 packets, or 8 bundles made from up to 2048 packets
one flush                        makes at most 16 such rounds; the rest is sent in the next turn of the reactor
a batch was cut short            the kernel does not say why: the packet at which it stopped is sent alone, and its
                                 error decides
``ENOBUFS``, ``ENOMEM``          tried again after 50 ms, as is a lack of descriptors (`sbus.seqpacket.payload_sender`)
``EPIPE``, ``ECONNRESET``        the peer has left: the queue is discarded at once; reading continues to the end of file
any other error                  unforeseen: it is logged, and closes the connection
===============================  ==================================================================================

Closing a socket that has unread packets resets the connection: the peer gets ``ECONNRESET`` ahead of packets that wait
for it. The farewell avoids that: it sends the last packets past the queue, shuts the socket down both ways, discards
packets from the peer (no more can come), and closes. The last packets nearly always fit, because the send buffer is
raised above its content; else they are tried until the peer has read, for as long as the caller says.

Rejected: ending a flush after 8 bundles. Flood control took the rest for congestion, and a receiver with room lost
messages.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import islice, takewhile
from typing import Final, cast

from twisted.internet import error, main
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol, IProducer, IPushProducer
from twisted.logger import Logger
from twisted.python.failure import Failure

from sbus.flood import PayloadMessage
from sbus.flood.fifo import FifoQueue
from sbus.flood.interfaces import IPacketQueue
from sbus.protocol.bundles import BundleCache, pack
from sbus.seqpacket.endings import Endings
from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.multiplexer import WRITE, Multiplexer
from sbus.seqpacket.payload_sender import PayloadSender
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.states import Event, Life, ReadSide, WriteSide
from sbus.syscalls.batch import BATCH, send_packets
from sbus.syscalls.sockets import OVERHEAD, discard_input, make_send_room, max_sendable, unread_bytes

__all__ = ["NO_MEMORY", "SendingHalf"]

NO_MEMORY: Final = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE)
"""The errors of a kernel that has no memory now, no descriptor, or too many of this user under way."""
_ROUNDS_PER_FLUSH: Final = range(16)
"""Batches written in one flush at most."""
_ONE_ROUND: Final = range(1)
"""The same where a socket is writable again while others are ready: each has one batch, and then they have theirs."""
_BUNDLES_PER_SEND = 8
"""Bundles sent with one system call at most."""
_PACKETS_PER_BUNDLING = 2048
"""Packets taken from the queue at a time to be bundled."""
_DISCARDED_AT_ONCE = 256
"""Packets of a peer that is being disconnected that are discarded at a time."""
_PEER_LEFT: Final = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN)
"""The errors of a send to a peer that no longer reads; the packets that it sent before can still be read."""

# A member looked up in its enum costs ten times a global.
_WRITE_OPEN: Final = WriteSide.OPEN
_DRAINING: Final = WriteSide.DRAINING


class _Pace(enum.Enum):
    """The state of a registered producer."""

    PULL = "produces when it is asked, each time that the queue is empty"
    PUSH = "produces by itself"
    PAUSED = "would produce by itself, and was paused at the high-water mark"


class SendingHalf(Endings):
    """A connected SEQPACKET socket that sends packets from a queue.

    :param sock: connected and non-blocking.
    :param send_buffer: the socket's send buffer, if it is to grow; else it is left as it is.
    :ivar queue: the `IPacketQueue` that is sent from; a protocol can replace it.
    :ivar send_batch: sends packets to the socket as `sbus.syscalls.batch.send_packets` does; it can be replaced.
    :ivar plain_socket: the socket, while packets may bypass the transport and none are bundled; otherwise None.
    """

    _has_bypass = True
    """Whether packets may bypass the transport and go straight to its socket."""

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
        "_payloads",
        "_producer",
        "_send_buffer",
        "_send_bundle_limit",
        "_sock",
        "may_grow",
        "plain_socket",
        "queue",
        "send_batch",
    )

    def __init__(self, reactor: Reactor, sock: socket.socket, send_buffer: SendBuffer | None) -> None:
        super().__init__()
        self._multiplexer = Multiplexer.of(reactor)
        self._sock = sock
        self._fd = -1  # as long as the multiplexer does not watch it
        self._events = 0
        self._half: IHalfCloseableProtocol | None = None
        self._send_buffer = send_buffer
        self.may_grow: Callable[[int], bool] | None = None
        self.send_batch: Callable[[list[bytes]], int] = partial(send_packets, sock)
        self._payloads: PayloadSender | None = None
        self.queue: IPacketQueue = FifoQueue()
        self._bundle_limit = 0  # what both ends have agreed on, bytes; 0 for no bundles
        self._send_bundle_limit = 0  # the same, once the answer that agrees to it is sent
        self.plain_socket: socket.socket | None = None
        self._flush_scheduled = False
        self._memory_retry = False
        self._producer: IPushProducer | None = None
        self._pace = _Pace.PUSH
        # The farewell
        self._farewell: list[bytes] | None = None
        self._farewell_timer: IDelayedCall | None = None
        self._input_limit = 0
        self._departure: Failure | None = None

    @abstractmethod
    def _depart(self, reason: Failure, farewell: Callable[[], list[bytes]], patience: float, input_limit: int) -> None:
        """Close soon, with a farewell; see `IPacketTransport.close_gracefully`."""

    @abstractmethod
    def _close(self, reason: Failure) -> None:
        """Close now."""

    # --- the socket --------------------------------------------------------------------------

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
        except BaseException:
            failure = Failure()
            self._log.failure("Error in {transport}", failure=failure, transport=self)
            self.failed(failure)

    def failed(self, failure: Failure) -> None:
        """See `sbus.seqpacket.multiplexer.Handler`."""
        self._depart(failure, list, 0.0, _DISCARDED_AT_ONCE)

    def _poll(self, events: int) -> None:
        if events != self._events:
            self._events = events
            if self._fd >= 0:
                self._multiplexer.modify(self._fd, events)

    def _stop_polling(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._multiplexer.remove(fd)

    # --- the queue ---------------------------------------------------------------------------

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
        """Send as much as the socket takes; for the rest, wait until it is writable.

        :param rounds: one item for each batch, at most.
        """
        self._flush_scheduled = False
        queue = self.queue
        if self.write_side is not _WRITE_OPEN and self.write_side is not _DRAINING:
            queue.discard_all()
            if self._farewell is not None:
                self._end_soon(self._say_farewell)
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
                is_waiting = self._payloads is not None and self._payloads.is_waiting
                self._poll_writing(not self._memory_retry and not is_waiting)
                return
            if sent < wanted and not self._events & WRITE:
                break
        else:
            if len(queue):
                self._poll_writing(True)  # continue in the next turn
                return
        self._queue_sent()

    def send_on(self, exclusive: bool) -> None:
        """Send the packets that waited for the socket; see `IPacketTransport`."""
        self._guarded(self._send_on, exclusive)

    def _send_on(self, exclusive: bool) -> None:
        payloads = self._payloads
        if payloads is not None and payloads.is_waiting:  # the socket was not full, so its buffer is large enough
            self.flush(_ROUNDS_PER_FLUSH if exclusive else _ONE_ROUND)
            if not len(self.queue):
                payloads.stop_waiting()
            return
        if self._send_buffer is not None and self.life is not Life.CLOSED:
            self._send_buffer.grow(self.may_grow)
        self.flush(_ROUNDS_PER_FLUSH if exclusive else _ONE_ROUND)

    def _queue_sent(self) -> None:
        """Continue once the whole queue was sent: let the producer produce, or end as `loseConnection` wanted."""
        self._poll_writing(False)
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
        is_plain = self._is_writable() and not self._bundle_limit and self._has_bypass
        self.plain_socket = self._sock if is_plain else None

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets now, past the queue, which must be empty; see `IPacketTransport`."""
        if not self._is_writable():
            return 0
        try:
            if not self._bundle_limit or len(packets) == 1:
                return self.send_batch(packets)
            limit = self._send_bundle_limit
            if not limit:
                return 0
            cache = {} if cache is None else cache
            if limit not in cache:
                cache[limit] = pack(packets, limit, BATCH)
            bundles, counts = cache[limit]
            return sum(counts[: self.send_batch(bundles)])
        except OSError:
            return 0

    def open_socket(self) -> socket.socket | None:
        """Return the socket if it takes packets as they are, one by one; see `IPacketTransport`."""
        return self._sock if self._is_writable() and self._has_bypass else None

    def unread_bytes(self) -> int:
        """Return the memory of the packets that the peer has not read; see `IPacketTransport`."""
        return 0 if self.life is Life.CLOSED else unread_bytes(self._sock)

    def _send_bundled(self, taken: list[bytes]) -> int | None:
        """As `_send`, with many packets in one."""
        done = 0
        while done < len(taken):
            limit = self._send_bundle_limit
            if self._payloads is not None and isinstance(taken[done], PayloadMessage):
                self._payloads.bundle_limit = limit  # it makes bundles of payloads itself
                bundles = list(takewhile(lambda packet: isinstance(packet, PayloadMessage), islice(taken, done, None)))
                counts = [1] * len(bundles)
            else:
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
        :returns: the number of items, from the front, that are dealt with; None if nothing more can be sent.
        """
        sent = 0
        batch = items
        while True:
            try:
                count = self.send_batch(batch)
            except OSError as e:
                if e.errno == errno.EMSGSIZE:
                    if counts is not None and counts[sent] > 1:
                        # The send buffer was made smaller than a bundle. The packets inside may still fit.
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
                if e.errno not in NO_MEMORY:
                    if e.errno not in _PEER_LEFT:
                        self._log.error("{transport} cannot be sent to: {why}: closing it", transport=self, why=str(e))
                        self._abort(Failure(e))
                    return None
                self._memory_retry = True
                self._multiplexer.try_again(self._retry_flush)
                return sent
            sent += count
            if count == 0 or count == len(batch):
                return sent
            # A batch that was cut short does not say why; the packet that it ended at, sent alone, does.
            batch = items[sent : sent + 1]

    def _retry_flush(self) -> None:
        self._memory_retry = False
        self._guarded(self.flush)

    def _poll_writing(self, on: bool) -> None:
        self._poll(self._events | WRITE if on else self._events & ~WRITE)

    def _end_writing(self, event: Event) -> None:
        """Discard the queue, stop the producer, and report the end of writing.

        If reading has ended too, close instead.
        """
        self.move(event)
        self._poll_writing(False)
        self.queue.discard_all()
        if self._producer is not None:
            self._call_soon(self._stop_producer)
        if self.life is Life.CLOSING or self.read_side is ReadSide.REPORTED:
            self._close_soon(Failure(main.CONNECTION_DONE))
        elif self._half is not None:
            self._call_soon(self._report_end_of_writing)

    def _report_end_of_writing(self) -> None:
        if self._half is not None:
            self._half.writeConnectionLost()

    # --- bundles -----------------------------------------------------------------------------

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

    def stop_bundling(self) -> None:
        """Accept and send no more bundles."""
        self._bundle_limit = self._send_bundle_limit = 0
        if self._payloads is not None:
            self._payloads.bundle_limit = 0
        self._note_plain()

    def _packing_limit(self) -> int:
        """Return the bytes in the largest bundle to send.

        No bundle makes the send buffer grow. The limit is the same before and after the buffer has grown, so that the
        receivers of a run share one bundle.
        """
        buffer = self._send_buffer
        return self._bundle_limit if buffer is None else min(self._bundle_limit, buffer.first_sendable)

    # --- producers ---------------------------------------------------------------------------

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
        """Continue without the producer (`IConsumer`).

        It has no more to send; a close that waited for it follows.
        """
        self._producer = None
        if self.write_side is _DRAINING:
            self._call_soon(self.flush)

    def _stop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.stopProducing()

    def _is_high(self) -> bool:
        return isinstance(self.queue, FifoQueue) and self.queue.is_high()

    # --- the farewell ------------------------------------------------------------------------

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
        packets = self._farewell
        if packets is None:
            return  # several flushes asked for this, and one has done it
        is_open = True
        for _ in range(2 * len(packets) + 1):
            try:
                del packets[: self.send_batch(packets)]
            except OSError:  # the peer no longer reads, or the kernel has no memory
                is_open = False
                break
            is_open = bool(packets) or self._is_frame_open()
            if not is_open or not make_send_room(self._sock):
                break
        if is_open and self._farewell_timer is not None:
            self._poll(WRITE)
        else:
            self._shut_down()

    def _is_frame_open(self) -> bool:
        """Return whether a packet has left in part."""
        return False

    def _shut_down(self) -> None:
        """Shut the socket down both ways: the peer can read the packets in the kernel, and send nothing more."""
        self._farewell = None
        if self._farewell_timer is not None:
            if self._farewell_timer.active():
                self._farewell_timer.cancel()
            self._farewell_timer = None
        self._stop_polling()
        with contextlib.suppress(OSError):  # the peer has left
            self._sock.shutdown(socket.SHUT_RDWR)
        self._discard_input()

    def _discard_input(self) -> None:
        """Discard the peer's packets, a few at a time, then close."""
        if self.life is Life.CLOSED:
            return
        if self._payloads is not None:  # descriptors may have come with it: `_close` has it discarded
            self._close(self._departure or Failure(error.ConnectionAborted()))
            return
        limit = min(self._input_limit, _DISCARDED_AT_ONCE)
        self._input_limit -= limit
        if limit and discard_input(self._sock, limit) == limit:
            self._end_soon(self._discard_input)
        else:
            self._close(self._departure or Failure(error.ConnectionAborted()))
