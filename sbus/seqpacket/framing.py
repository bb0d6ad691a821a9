"""Packets in a byte stream: each with its length in front. Protocol: "The stream door".

Theory of operation
-------------------

A frame is the packet's length, 4 bytes, unsigned and little-endian, and then the packet. The reader belongs to one
connection, since it keeps the part of a frame that has arrived.

==============================  ======================================================================================
a peer sends                    the reader
==============================  ======================================================================================
a bad length                    delivers the packets before it, then a packet that the protocol refuses (the empty one
                                for a length above the limit, `EMPTY_FRAME` for 0), then the end of file: there is no
                                next frame to continue with
an end inside a frame           reports a broken connection, as after a peer that dies while it sends
packets in tiny pieces          counts the reads: if nine in ten of 1,000 (`_JUDGED`) complete no packet and bring less
                                than 16 bytes, it ends the stream with a packet that the protocol refuses (`DRIPPING`)
==============================  ======================================================================================

Invariants:

* *Complete packets never wait.* `FrameReader.read` returns every complete packet that it has received. The socket would
  not become readable for the sake of a packet that is in memory already.
* *Memory follows the bytes sent*, not an announced length: a peer that announces a megabyte and sends nothing costs
  four bytes.

One read takes at least `READ_SIZE` bytes, and all missing bytes of a packet that has begun, up to `LARGEST_READ`. A
read that gets fewer bytes has emptied the socket, and is the last one for now: otherwise a peer that keeps sending
single bytes would keep the reader busy.

Tiny pieces are judged because the kernel keeps a buffer for each single byte, and freeing a thousand of them takes 1.2
ms. No program sends packets in such pieces.
"""

from __future__ import annotations

import errno
import socket
import struct

from sbus.protocol.packets import DRIPPING, Truncated
from sbus.syscalls.sockets import DONTWAIT

__all__ = ["EMPTY_FRAME", "HEADER", "LARGEST_READ", "READ_SIZE", "FrameReader", "frame"]

HEADER = struct.Struct("<I")
"""The length in front of a packet."""
READ_SIZE = 16 << 10
"""Bytes to ask the kernel for at least."""
LARGEST_READ = 64 << 10
"""Bytes to ask the kernel for at most."""
_JUDGED = 1_000
"""Reads of one connection that are judged together (row ``stream-drips``)."""
_MOST_VAIN = 900
"""Vain reads among them that break the rules."""
_VAIN_BYTES = 16
"""Bytes below which a read that completes no packet is vain."""
EMPTY_FRAME = b"\0"
"""A packet that every protocol refuses; it stands for a frame of length 0."""


def frame(packets: list[bytes]) -> bytes:
    """Return the bytes in which these packets travel."""
    pack = HEADER.pack
    return b"".join([part for packet in packets for part in (pack(len(packet)), packet)])


class FrameReader:
    """Reads packets from one stream socket.

    It has the interface of `sbus.syscalls.batch.PacketReader`, but cannot be shared.

    :param max_packet: bytes in the longest packet.
    :ivar held: bytes of a frame that has arrived in part.
    """

    descriptors = False

    __slots__ = ("_buffer", "_has_ended", "_reads", "_vain", "max_packet")

    def __init__(self, max_packet: int) -> None:
        self.max_packet = max_packet
        self._buffer = bytearray()
        self._has_ended = False
        self._reads = self._vain = 0

    @property
    def held(self) -> int:
        return len(self._buffer)

    def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
        """Receive the packets of one read, without waiting.

        :param most: ignored; packets cannot be left in the socket.
        :returns: the packets, and whether the stream has ended after them. No packets and no end: nothing more has
            arrived.
        :raises OSError: as recv(2), but not EAGAIN; ``ECONNRESET`` for an end inside a frame.
        """
        packets: list[bytes] = []
        while not packets and not self._has_ended:
            wanted = self._wanted()
            try:
                data = sock.recv(wanted, DONTWAIT)
            except BlockingIOError:
                break
            if not data:
                self._has_ended = True
                if self._buffer:
                    self._buffer.clear()
                    raise ConnectionResetError(errno.ECONNRESET, "the stream ended inside a frame")
                break
            self._buffer += data
            packets = self._complete()
            self._judge(len(data), packets)
            if len(data) < wanted:
                break
        return packets, self._has_ended

    def _judge(self, size: int, packets: list[bytes]) -> None:
        """Count a read; end the stream of a peer that sends packets in tiny pieces."""
        self._reads += 1
        self._vain += not packets and size < _VAIN_BYTES
        if self._reads == _JUDGED:
            if self._vain >= _MOST_VAIN:
                packets.append(DRIPPING)
                self._has_ended = True
            self._reads = self._vain = 0

    def _wanted(self) -> int:
        """Return the bytes to ask for: the rest of a long packet at once."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return READ_SIZE
        length: int = HEADER.unpack_from(buffer)[0]
        return min(max(READ_SIZE, HEADER.size + length - len(buffer)), LARGEST_READ)

    def _complete(self) -> list[bytes]:
        """Take the complete packets out of the buffer."""
        packets = []
        with memoryview(self._buffer) as view:
            at, size = 0, len(view)
            while at + HEADER.size <= size:
                (length,) = HEADER.unpack_from(view, at)
                if not 0 < length <= self.max_packet:
                    packets.append(Truncated.of(length, bytes(view[at + 4 : at + 8])) if length else EMPTY_FRAME)
                    self._has_ended = True
                    at = size
                    break
                end = at + HEADER.size + length
                if end > size:
                    break
                packets.append(bytes(view[at + HEADER.size : end]))
                at = end
        del self._buffer[:at]
        return packets
