"""The stream transport: packets over a Unix *stream* socket, for languages without SEQPACKET.

Theory of operation
-------------------

A `StreamTransport` is a `PacketTransport` with other ends: packets are cut out of a byte stream by
`sbus.seqpacket.framing.FrameReader`, and are sent with their lengths in front. States, pacing, queues and closing
are the packet transport's.

* *A frame that has begun to leave belongs to the transport.* A socket can take half a frame. The queue counts such a
  packet as sent, because its order may change; the transport keeps the other half (`_unsent`) and sends it first. It is
  at most one frame of each connection.
* *The end waits for it*: a connection that closes, or shuts down writing, sends the rest of the frame first. A
  connection that is aborted does not; the peer finds an end inside a frame. The last packets of a graceful close follow
  the rest of the frame, or are not sent.
* *A read may complete no packet*, so the protocol is asked before each one (`before_read`) outside of a turn, and can
  pause the transport.
* *Progress is bytes*: `unread_bytes` counts the unsent half, too.
"""

from __future__ import annotations

import socket

from sbus.flood import PayloadShare
from sbus.protocol.bundles import BundleCache
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.framing import HEADER, FrameReader, frame
from sbus.seqpacket.interfaces import Reactor
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.batch import BATCH
from sbus.syscalls.sockets import SEND_NOW

__all__ = ["StreamTransport"]


class StreamTransport(PacketTransport):
    """A connected Unix stream socket as a packet transport (`IPacketTransport`); see `PacketTransport`.

    :param max_packet: bytes in the longest packet to receive. A longer one is refused as it is there, and ends the
        connection in any case.
    """

    _has_bypass = False

    __slots__ = ("_frames", "_unsent")

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        max_packet: int = DEFAULT_MAX_PACKET,
        send_buffer: SendBuffer | None = None,
    ) -> None:
        super().__init__(reactor, sock, max_packet, send_buffer)
        self._reader = self._frames = FrameReader(max_packet)
        self._unsent = b""
        self.send_batch = self._send_frames

    def ensure_max_packet(self, size: int) -> None:
        """Receive packets of up to `size` bytes from now on, if the limit was lower."""
        self._frames.max_packet = max(self._frames.max_packet, size)

    def pass_payloads(self, wanted: bool, share: PayloadShare | None = None) -> bool:
        """Pass no descriptors: a frame can be cut in two, and a descriptor would go with the first half."""
        return False

    def unread_bytes(self) -> int:
        """Return the memory of the packets that the peer has not read; see `IPacketTransport`."""
        return super().unread_bytes() + len(self._unsent)

    def partial_bytes(self) -> int:
        """Return the memory of the packet that has arrived in part; see `IPacketTransport`."""
        return self._frames.held

    def partial_limit(self) -> int:
        """Return the bytes of the longest packet that can arrive in part; see `IPacketTransport`."""
        return self._frames.max_packet

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        """Send packets now, past the queue; see `IPacketTransport`."""
        sent = super().try_send(packets, cache)
        if self._unsent and self._is_writable():
            self._poll_writing(True)
        return sent

    def _send_frames(self, packets: list[bytes]) -> int:
        """Send packets with their lengths in front, without waiting; at most one batch.

        :returns: the number of packets, from the front, that have begun to leave.
        :raises OSError: as send(2), but not EAGAIN.
        """
        if self._unsent:
            self._unsent = self._unsent[self._send_bytes(self._unsent) :]
        if self._unsent or not packets:
            return 0
        packets = packets[:BATCH]
        data = frame(packets)
        sent = self._send_bytes(data)
        if sent == len(data):
            return len(packets)
        end = begun = 0
        while end < sent:
            end += HEADER.size + len(packets[begun])
            begun += 1
        self._unsent = data[sent:end]
        return begun

    def _send_bytes(self, data: bytes) -> int:
        try:
            return self._sock.send(data, SEND_NOW)
        except BlockingIOError:
            return 0

    def _is_frame_open(self) -> bool:
        return bool(self._unsent)

    def _queue_sent(self) -> None:
        """Continue as the packet transport does, once the frame that has begun to leave is sent."""
        if self._unsent and self._send([]) is None:
            self._lose_writing()
        elif self._unsent:
            self._poll_writing(not self._memory_retry)
        else:
            super()._queue_sent()
