"""The plain Python twin of `sbus.syscalls._batch`: one system call per packet."""

from __future__ import annotations

import array
import errno
import socket

from sbus.protocol.bundles import MAGIC
from sbus.protocol.packets import Truncated
from sbus.syscalls.memfd import Attached, Memfd, adopt
from sbus.syscalls.sockets import DONTWAIT, MOST_PASSED, SEND_NOW, TRUNC

__all__ = ["MAX_BATCH", "PacketReader", "send_packets", "send_split", "send_to_each"]

MAX_BATCH = 64
"""Packets in the largest batch."""
_READ_BYTES = 1 << 20
"""Bytes after which a read ends, if the caller does not say."""
_LARGE_PART, _LARGE_READ_PART = 64, 8
"""See `sbus.syscalls._batch`."""
_CONTROL = socket.CMSG_SPACE(MOST_PASSED * array.array("i").itemsize)
"""Bytes of control data in a packet: room for all descriptors that can come with it, since it may take
long to close one, and the kernel closes those without room at once (`sbus.syscalls.elsewhere`)."""
_READ_NOW = DONTWAIT | TRUNC
"""Flags of recv(2): return at once, and return the length of the packet, even if it did not fit."""
_READ_WITH = _READ_NOW | socket.MSG_CMSG_CLOEXEC
"""The same for recvmsg(2); no other program inherits the descriptors."""


class PacketReader:
    """Reads packets from SEQPACKET sockets through shared buffers.

    :param max_packet: bytes in the longest packet that is received whole.
    :param batch: packets in the largest batch.
    :param read_bytes: bytes after which a read ends.
    :param descriptors: receive the descriptors that come with packets: such a packet is `Attached`.
    :param splits: a large message may come as a `sbus.protocol.packets.Split`; not with `descriptors`. This twin, which
        copies packets out of its buffer anyway, makes none.

    After a read, `is_empty` shows whether it has emptied the socket: if so, wait before the next read.
    """

    def __init__(
        self,
        max_packet: int,
        batch: int = MAX_BATCH,
        read_bytes: int = _READ_BYTES,
        descriptors: bool = False,
        splits: bool = False,
    ) -> None:
        if not 0 < batch <= MAX_BATCH or max_packet <= 0:
            raise ValueError(f"a batch has 1 to {MAX_BATCH} packets, a packet at least 1 byte")
        self.max_packet = max_packet
        self.batch = batch
        self.descriptors = descriptors
        self.is_empty = False
        self._read_bytes = read_bytes
        self._buffer = bytearray(max_packet)
        self._view = memoryview(self._buffer)

    def read(self, sock: socket.socket, most: int = MAX_BATCH) -> tuple[list[bytes], bool]:
        """Receive the packets that have arrived, at most one batch, without waiting.

        It ends early after `read_bytes`, or an eighth of that if they come in large packets: so one sender of these
        does not delay all others, and the CPU's cache keeps them until they are sent. The compiled twin reads a few
        packets more, or a whole batch if there was no large one within the last seconds.

        A packet longer than `max_packet` becomes an empty one (`Truncated`). Descriptors that a peer sends along are
        not received, unless the reader is there for them: recv(2) has no room for control data, so the kernel closes
        them.

        :param most: packets to receive at most, if fewer than a batch.
        :returns: the packets, and whether the stream ended after them (end of file, or an empty packet).
        :raises ValueError: if `most` is not positive.
        :raises OSError: as recv(2), if nothing was received; but not EAGAIN.
        """
        if most <= 0:
            raise ValueError("a batch has at least 1 packet")
        packets: list[bytes] = []
        retried = self.is_empty = False
        total, most = 0, min(self.batch, most)
        control: list[tuple[int, int, bytes]] = []
        flags = 0
        enough = self._read_bytes
        while len(packets) < most and total < enough:
            try:
                if self.descriptors:
                    size, control, flags, _ = sock.recvmsg_into([self._buffer], _CONTROL, _READ_WITH)
                else:
                    size = sock.recv_into(self._buffer, 0, _READ_NOW)
            except BlockingIOError:
                self.is_empty = True
                break
            except OSError as e:
                # A reset is reported once, before the packets that still wait (unix(7)): read on.
                if e.errno == errno.ECONNRESET and not retried:
                    retried = True
                    continue
                if packets:
                    break
                raise
            files = _files(control)
            total += size
            is_whole = size <= self.max_packet
            packet = bytes(self._view[:size]) if is_whole else Truncated.of(size, bytes(self._view[:4]))
            if is_whole and (control or flags & socket.MSG_CTRUNC):
                packet = Attached.of(packet, files, bool(flags & socket.MSG_CTRUNC))
            if not size:
                return packets, True
            packets.append(packet)
            if is_whole and size * _LARGE_PART >= self._read_bytes and packet[:4] != MAGIC:
                enough = self._read_bytes // _LARGE_READ_PART
        return packets, False

    def forward(
        self, sock: socket.socket, to: socket.socket, head: bytes, most: int
    ) -> tuple[int, int, list[bytes], bool]:
        """Send on large packets that begin alike from the buffer that they are received in, until one is to be handled.

        That is one that begins in another way, is small, or is not taken by the socket.

        :param to: the socket to send to.
        :param head: how they begin.
        :param most: bytes after which to end.
        :returns: the number of packets sent on, and their bytes; then the packet to be handled, if any, and whether the
            stream ended, as `read`.
        :raises OSError: as recv(2), if nothing was received; but not EAGAIN.
        """
        count = total = 0
        while total < most:
            try:
                packets, ended = self.read(sock, 1)
            except OSError:
                if count:
                    break
                raise
            if not packets:
                return count, total, packets, ended
            [packet] = packets
            if not packet.startswith(head) or len(packet) * _LARGE_PART < self._read_bytes:
                return count, total, packets, False
            try:
                taken = send_packets(to, packets)
            except OSError:
                taken = 0
            if not taken:
                return count, total, packets, False
            count += 1
            total += len(packet)
        return count, total, [], False


def _files(control: list[tuple[int, int, bytes]]) -> tuple[Memfd, ...]:
    """Return the descriptors that came with a packet."""
    descriptors = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return adopt(descriptors)


def send_packets(sock: socket.socket, packets: list[bytes]) -> int:
    """Send packets, at most one batch, without waiting.

    :returns: the number of packets, from the front, that were sent; 0 if the socket is full.
    :raises OSError: as sendmsg(2), if the first packet cannot be sent; but not EAGAIN.
    """
    sent = 0
    for packet in packets[:MAX_BATCH]:
        try:
            sock.send(packet, SEND_NOW)
        except BlockingIOError:
            break
        except OSError:
            if sent:
                break
            raise
        sent += 1
    return sent


def send_split(sock: socket.socket, head: bytes, payload: bytes) -> bool:
    """Send one packet from two places, without waiting; return whether it was sent, or the socket is full.

    :raises OSError: as sendmsg(2), but not EAGAIN.
    """
    try:
        sock.sendmsg((head, payload), (), SEND_NOW)
    except BlockingIOError:
        return False
    return True


def send_to_each(socks: list[socket.socket], packets: list[bytes]) -> list[tuple[int, int]]:
    """Send the same packets, at most one batch, to several sockets, without waiting.

    :returns: for each socket that did not take all of them, its index, and the number of packets, from the front, that
        it took. That is 0 also in place of an error, for a caller that sends again and meets it then.
    """
    short = []
    for at, sock in enumerate(socks):
        try:
            sent = send_packets(sock, packets)
        except OSError:
            sent = 0
        if sent < len(packets):
            short.append((at, sent))
    return short
