"""Packets in a byte stream: each with its length in front. Protocol: "The stream door".

Theory of operation
-------------------

A frame is the packet's length, 4 bytes, unsigned and little-endian, and then the packet. The reader belongs to one
connection, since it keeps the part of a frame that has arrived.

Invariants:

* *Nothing complete stays behind.* `FrameReader.read` returns every complete packet that it has received. The socket
  would not become readable for the sake of a packet that is in memory already.
* *Memory follows what was sent*, not what a length announces: a peer that announces a megabyte and sends nothing costs
  four bytes.
* *A bad length ends the stream.* There is no next frame to go on with. The packets before it are delivered, then a
  packet that the protocol refuses (the empty one for a length above the limit, `EMPTY_FRAME` for 0), then the end of
  file.
* *An end inside a frame* is a broken connection, as it is what a peer that dies while it sends leaves.

One read takes at least `READ_SIZE` bytes, and all that is missing of a packet that has begun, up to `LARGEST_READ`. A
read that gets fewer bytes has emptied the socket, and is the last one for now: a peer that goes on sending single bytes
would keep the reader busy.

For each single byte the kernel keeps a buffer, and to free a thousand of them takes 1.2 ms. So a read is *vain* as far
as it takes longer than its bytes are worth (`_BYTE`), and the reader measures that. A read that completes packets may
take `_READ` more.
"""

from __future__ import annotations

import errno
import socket
import struct
import time

from sbus.protocol.packets import Truncated
from sbus.syscalls.sockets import DONTWAIT

__all__ = ["EMPTY_FRAME", "HEADER", "LARGEST_READ", "READ_SIZE", "FrameReader", "frame"]

HEADER = struct.Struct("<I")
"""The length in front of a packet."""
READ_SIZE = 16 << 10
"""Bytes to ask the kernel for at least."""
LARGEST_READ = 64 << 10
"""Bytes to ask the kernel for at most."""
_BYTE = 1
"""Nanoseconds that a byte is worth. To copy it takes a third of that; to free a buffer of its own takes 1 µs."""
_READ = 10_000
"""Nanoseconds that completing packets is worth, for each read."""
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
    :ivar vain: CPU time of vain reads, in nanoseconds; the transport sets it back.
    """

    __slots__ = ("_buffer", "_has_ended", "max_packet", "vain")

    def __init__(self, max_packet: int) -> None:
        self.max_packet = max_packet
        self._buffer = bytearray()
        self._has_ended = False
        self.vain = 0

    @property
    def held(self) -> int:
        return len(self._buffer)

    def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
        """Receive the packets of one read, without waiting.

        :param most: ignored; packets cannot be left in the socket.
        :returns: the packets, and whether the stream has ended behind them. No packets and no end: nothing more has
            arrived.
        :raises OSError: as recv(2), but not EAGAIN; ``ECONNRESET`` for an end inside a frame.
        """
        packets: list[bytes] = []
        while not packets and not self._has_ended:
            wanted, began = self._wanted(), time.thread_time_ns()
            try:
                data = sock.recv(wanted, DONTWAIT)
            except BlockingIOError:
                break
            received = time.thread_time_ns()
            if not data:
                self._has_ended = True
                if self._buffer:
                    self._buffer.clear()
                    raise ConnectionResetError(errno.ECONNRESET, "the stream ended inside a frame")
                break
            self._buffer += data
            packets = self._complete()
            if packets:
                self.vain += max(0, received - began - _READ - _BYTE * len(data))
            else:
                self.vain += max(0, time.thread_time_ns() - began - _BYTE * len(data))
                if len(data) < wanted:
                    break
        return packets, self._has_ended

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
