"""In and out of the kernel, and the way of a whole batch through a server, on socket pairs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet import reactor
from twisted.internet.main import CONNECTION_DONE
from twisted.python.failure import Failure

from sbus.seqpacket.transport import PacketTransport
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.syscalls.batch import BATCH, PacketReader, send_packets

MESSAGE = b"MSG sensors/kitchen/temperature\0" + b"x" * 64
ROUNDS = 2000


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@pytest.mark.parametrize("packets", [1, BATCH])
def test_send_and_receive(benchmark: Any, packets: int) -> None:
    """Packets go through the kernel, with one call each way."""
    with pair() as (one, other):
        reader = PacketReader(4096, BATCH)
        batch = [MESSAGE] * packets

        def send_and_receive() -> Any:
            send_packets(one, batch)
            return reader.read(other)

        assert benchmark(send_and_receive) == (batch, False)


class Server:
    """A bus with clients on socket pairs; the reactor does not run."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._reader = PacketReader(4096, BATCH)
        self.registry = SubscriptionRegistry(KernelPolicy().make(AccessSettings()), reactor)
        self.registry.startService()

    def connect(self, *packets: bytes) -> tuple[BusProtocol, socket.socket]:
        """A client that has sent these packets, and its socket."""
        sock, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.callback(peer.close)
        sock.setblocking(False)
        peer.setblocking(False)
        protocol = BusProtocol(self.registry)
        transport = PacketTransport(reactor, sock)
        transport.start(protocol)
        self._stack.callback(transport.lost, Failure(CONNECTION_DONE))
        protocol.packetsReceived(list(packets))
        return protocol, peer

    def take(self, peers: list[socket.socket]) -> int:
        """Read what has come; how many packets."""
        found = 0
        for peer in peers:
            while packets := self._reader.read(peer)[0]:
                found += len(packets)
        return found


@pytest.mark.parametrize("receivers", [1, 8])
@pytest.mark.parametrize("packets", [1, BATCH])
def test_flush(benchmark: Any, packets: int, receivers: int) -> None:
    """A batch that was read is routed, queued and flushed to its receivers."""
    with contextlib.ExitStack() as stack:
        server = Server(stack)
        peers = [server.connect(b"SUB sensors/")[1] for _ in range(receivers)]
        publisher, _ = server.connect()
        batch = [MESSAGE] * packets

        def clear() -> None:
            server.take(peers)

        publisher.packetsReceived(batch)
        assert server.take(peers) == packets * receivers
        benchmark.pedantic(publisher.packetsReceived, args=(batch,), setup=clear, rounds=ROUNDS)
        assert server.take(peers) == packets * receivers
