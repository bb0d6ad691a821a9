"""Reading the packets of one connection, with buffers that grow to the server's limit.

A server whose limit is above that of the original says so in its answer to ``bye/on``, which is among the first packets
of a connection. A long message can be read by the same system call as the answer. So up to the answer, and for
`FIRST_READS` reads at most, packets are read into buffers for the longest packet that any socket sends; most of that
memory is never touched, and it is given back then.
"""

from __future__ import annotations

import socket

from sbus.client.core import ClientCore
from sbus.client.payloads import open_attached
from sbus.seqpacket.pacing import batch_size
from sbus.syscalls.batch import BATCH, PacketReader
from sbus.syscalls.sockets import LONGEST_PACKET

__all__ = ["FIRST_READS", "Inlet", "PayloadInlet"]

_BUNDLED = 8
"""Packets read with one system call from a server that sends bundles, each of which holds many messages."""
FIRST_READS = 2
"""Reads that may have the answer to ``bye/on``: before it, a server can only send the one to ``bundle/on``."""


class Inlet:
    """Reads the packets of a client, one connection after the other.

    :param size: bytes of the longest packet to receive, as far as is known.
    """

    _descriptors = False

    def __init__(self, core: ClientCore, size: int) -> None:
        self._core = core
        self._reader = PacketReader(size, descriptors=self._descriptors, splits=not self._descriptors)
        self._first: PacketReader | None = None
        self._first_left = 0

    @property
    def is_empty(self) -> bool:
        """Whether the last read has emptied the socket."""
        return (self._first or self._reader).is_empty

    def connected(self) -> None:
        """Begin a new connection."""
        asks = self._core.asks_limit and self._reader.max_packet < LONGEST_PACKET
        self._first, self._first_left = None, FIRST_READS if asks else 0

    def make_room(self, size: int) -> None:
        """Receive packets of `size` bytes from now on."""
        if size > self._reader.max_packet:
            self._reader = PacketReader(
                size, batch_size(size), descriptors=self._descriptors, splits=not self._descriptors
            )

    def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
        """Receive a batch; see `sbus.syscalls.batch.PacketReader.read`.

        :param most: packets to receive at most; by default a whole batch, which is shorter if the server sends bundles.
        """
        most = most or (_BUNDLED if self._core.bundle_limit else BATCH)
        if self._first_left:
            return self._read_first(sock, most)
        return self._reader.read(sock, most)

    def read_rest(self, sock: socket.socket) -> list[bytes]:
        """Return what the server sent before it stopped reading."""
        rest: list[bytes] = []
        while True:
            try:
                packets, ended = self.read(sock)
            except OSError:
                return rest
            rest += packets
            if ended or not packets:
                return rest

    def _read_first(self, sock: socket.socket, most: int) -> tuple[list[bytes], bool]:
        if self._core.packet_limit.is_known:
            self._first, self._first_left = None, 0
            return self.read(sock, most)
        if self._first is None:
            self._first = PacketReader(LONGEST_PACKET, descriptors=self._descriptors)
        packets, ended = self._first.read(sock, most)
        if packets:
            self._first_left -= 1
            if not self._first_left:
                self._first = None
        return packets, ended


class PayloadInlet(Inlet):
    """Reads the packets of a client that takes messages in sealed memory."""

    _descriptors = True

    def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
        """Receive a batch; see `sbus.client.payloads.open_attached`."""
        packets, ended = super().read(sock, most)
        return open_attached(packets), ended
