"""The attacking side's tools: Python's `socket`, a deadline, and nothing from the package under attack."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from benchmarks.attacks.processes import Board

__all__ = [
    "BIG_BUNDLE",
    "LARGEST_PACKET",
    "WHOAMI",
    "Attacker",
    "bundle",
    "filled",
    "master_of",
    "receive",
    "receive_now",
]

WHOAMI = b"CMSG !/cred/whoami"
LARGEST_PACKET = 409_600
"""Bytes in the longest packet that a server takes by default."""

BIG_BUNDLE = 200_000
"""Bytes in the bundles of an attack. They exceed what the server announces, and it takes them none the less."""

_TIMEOUT = 1.0
"""Seconds that a connect, a send or a receive may take."""
_RETRY = 0.02
"""Seconds before an attack whose connection has ended begins again."""
_TICK = 0.05
"""Seconds between two looks for connections that the server has ended."""
_REPLACED = 20
"""Connections that are replaced in each such look, at most: 400 a second, so that holding is no connection storm."""


def master_of(address: str) -> str:
    """Return the address of the master of a server, if it has one."""
    return f"{address}-master"


def bundle(packets: Iterable[bytes]) -> bytes:
    """Put packets into one bundle."""
    return b"BNDL" + b"".join(struct.pack("<I", len(packet)) + packet for packet in packets)


def filled(packets: Sequence[bytes], size: int) -> tuple[bytes, int]:
    """Repeat packets in a bundle of at most `size` bytes; returns it and the number of packets in it."""
    times = max(1, (size - 4) // sum(4 + len(packet) for packet in packets))
    return bundle([*packets] * times), times * len(packets)


class Attacker:
    """One attacking process.

    :ivar refusals: how often the attack began again because the server had ended a connection.
    """

    def __init__(self, address: str, board: Board, index: int, deadline: float, most_files: int) -> None:
        self.address = address
        self.most_files = most_files
        self.refusals = 0
        self._board = board
        self._index = index
        self._deadline = deadline

    def run(self, function: Callable[[Attacker], None]) -> None:
        """Attack until the deadline, from the beginning whenever a connection ends or takes too long."""
        while self.running():
            try:
                function(self)
            except OSError as e:
                # A server that is only slow has not refused anything.
                self.refusals += not isinstance(e, BlockingIOError)
                self.ready()
                time.sleep(_RETRY)

    def running(self) -> bool:
        return time.monotonic() < self._deadline

    def ready(self) -> None:
        """Report that the set-up is over."""
        self._board.mark_ready(self._index)

    def count(self, actions: int = 1) -> None:
        self._board.add(self._index, actions)

    def connect(self, *packets: bytes, timeout: float = _TIMEOUT, is_above: bool = False) -> socket.socket:
        """Connect and send packets.

        :param is_above: connect to the server's master.
        :raises OSError: if the server refuses, or leaves either undone for `timeout` seconds.
        """
        address = master_of(self.address) if is_above else self.address
        return self._connect(socket.SOCK_SEQPACKET, address, packets, timeout)

    def connect_stream(self, timeout: float = _TIMEOUT) -> socket.socket:
        """Connect to the server's stream socket.

        :raises OSError: as `connect`.
        """
        return self._connect(socket.SOCK_STREAM, f"{self.address}-stream", (), timeout)

    def _connect(self, kind: int, address: str, packets: Iterable[bytes], timeout: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            # With these, connect(2) waits for room in the server's backlog for a bounded time; a non-blocking
            # socket would fail at once.
            span = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_PACKET)
            sock.connect(address)
            for packet in packets:
                sock.send(packet)
        except BaseException:
            sock.close()
            raise
        return sock

    def connect_bundling(self, *packets: bytes, is_above: bool = False) -> tuple[socket.socket, int]:
        """Connect and ask for bundles.

        :returns: the socket, and how many bytes a bundle should have: more than the server announces, unless it has
            ended a connection before.
        :raises OSError: as `connect`, or if the server does not answer.
        """
        sock = self.connect(*packets, b"CMSG bundle/on", is_above=is_above)
        try:
            while not (answer := receive(sock)).startswith(b"CMSG bundle/on\0"):
                pass
        except BaseException:
            sock.close()
            raise
        announced = int(answer.partition(b"\0")[2])
        return sock, announced if self.refusals else max(announced, BIG_BUNDLE)

    def send_patiently(self, sock: socket.socket, packet: bytes) -> None:
        """Send as soon as the server has room, however long that takes within the deadline.

        :raises OSError: if the connection ends, or the deadline passes.
        """
        while True:
            try:
                sock.send(packet)
                return
            except BlockingIOError:
                if not self.running():
                    raise

    def fence(self, sock: socket.socket) -> None:
        """Wait until the server has handled everything sent before."""
        self.send_patiently(sock, WHOAMI)
        while self.running():
            with contextlib.suppress(BlockingIOError):
                if WHOAMI + b"\0" in receive(sock):  # it may come in a bundle
                    return

    def hold(self, connections: int, *packets: bytes, timeout: float = _TIMEOUT) -> None:
        """Keep silent connections until the deadline, each of which sends these packets first and never reads.

        A connection that the server ends is replaced.
        """
        held: dict[int, socket.socket] = {}
        poll = select.poll()
        allowed = connections
        while self.running():
            while allowed > 0 and len(held) < connections and self.running():
                allowed -= 1
                try:
                    sock = self.connect(*packets, timeout=timeout)
                except BlockingIOError:
                    break  # the server does not accept at present
                except OSError:
                    continue
                held[sock.fileno()] = sock
                poll.register(sock, 0)
                self.count()
            self.ready()
            time.sleep(_TICK)
            allowed = _REPLACED
            for number, _ in poll.poll(0):
                poll.unregister(number)
                held.pop(number).close()


def receive_now(sock: socket.socket) -> bytes:
    """Receive one packet that is there; as `receive`."""
    return receive(sock, socket.MSG_DONTWAIT)


def receive(sock: socket.socket, flags: int = 0) -> bytes:
    """Receive one packet.

    :raises ConnectionResetError: at end-of-file.
    :raises BlockingIOError: if none comes in time.
    """
    if packet := sock.recv(LARGEST_PACKET, flags):
        return packet
    raise ConnectionResetError("the server has ended the connection")
