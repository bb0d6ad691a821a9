"""Servers that a test controls, packet by packet."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from sbus.syscalls.batch import PacketReader
from sbus.syscalls.memfd import Attached, Memfd
from sbus.syscalls.sockets import LONGEST_PACKET, grow_send_buffer, send_with
from tests.integration.clients.backends import ASKED, in_thread
from tests.support.harness import TIMEOUT, WHOAMI

__all__ = ["FakePeer", "FakeServer"]


class FakeServer:
    """A server that the test controls; a context manager."""

    def __init__(self, address: Path, backlog: int = 8) -> None:
        self.address = address
        self._open: list[socket.socket] = []
        self.listen(backlog)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._open:
            sock.close()

    def listen(self, backlog: int = 8) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._open.append(self._listening)
        self._listening.bind(str(self.address))
        self._listening.listen(backlog)
        self._listening.settimeout(TIMEOUT)

    def vanish(self) -> None:
        """Disappear, until `listen` is called again."""
        self.address.unlink()
        for sock in self._open:
            sock.close()
        self._open.clear()

    async def accept(self) -> FakePeer:
        """Accept the next client."""
        peer: FakePeer = await in_thread(self.accept_now)
        return peer

    def accept_now(self) -> FakePeer:
        """Accept the next client, in a test without an event loop."""
        sock = self._listening.accept()[0]
        # Not Python's own timeout: its poll reports a socket as full from a quarter on.
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT), 0))
        self._open.append(sock)
        return FakePeer(sock)

    def fill(self) -> int:
        """Fill the backlog, and return the number of places; each `accept` frees one."""
        taken = 0
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._open.append(sock)
            try:
                sock.connect(str(self.address))
            except BlockingIOError:
                return taken
            taken += 1


class FakePeer:
    """A client's connection, seen from a `FakeServer`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def receive(self, *, raw: bool = False) -> bytes:
        """Return the next packet; an empty one at the end of the connection."""
        packet: bytes = await in_thread(self.receive_now, raw=raw)
        return packet

    def receive_now(self, *, raw: bool = False) -> bytes:
        """Return the next packet, in a test without an event loop.

        :param raw: also if it is a question that every connection begins with, which old servers ignore.
        """
        while (packet := self._sock.recv(1 << 20)) in ASKED and not raw:
            pass
        return packet

    async def receive_until(self, last: bytes) -> list[bytes]:
        """Return the packets up to `last`, which is included."""
        packets = [await self.receive()]
        while packets[-1] != last:
            assert packets[-1], f"the connection ended after {packets}"
            packets.append(await self.receive())
        return packets

    async def answer(self) -> list[bytes]:
        """Answer the next ``whoami``; return the packets before it."""
        packets = await self.receive_until(WHOAMI)
        self.send(WHOAMI + b"\0!/cred/1/2/3")
        return packets[:-1]

    def send(self, *packets: bytes) -> None:
        for packet in packets:
            self._sock.send(packet)

    async def receive_attached(self) -> Attached:
        """Return the next packet, which comes with descriptors."""
        packet = await self.receive_any()
        assert isinstance(packet, Attached), packet
        return packet

    async def receive_any(self) -> bytes:
        """Return the next packet, with its descriptors if there are any."""
        packet: bytes = await in_thread(self._receive_any)
        return packet

    def _receive_any(self) -> bytes:
        self._sock.recv(1, socket.MSG_PEEK)  # waits
        packets, _ = PacketReader(1 << 20, 1, descriptors=True).read(self._sock)
        return packets[0] if packets else b""

    def send_attached(self, packet: bytes, memory: Memfd) -> None:
        assert send_with(self._sock, packet, memory.fileno())

    def raise_send_buffer(self) -> None:
        """Be able to send packets of almost a megabyte."""
        grow_send_buffer(self._sock, LONGEST_PACKET)

    def close_half(self) -> None:
        """Send no more."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
