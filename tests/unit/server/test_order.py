"""The order of messages of clients that hang up, on sockets in a reactor that the test turns."""

from __future__ import annotations

import socket

import pytest

from sbus.seqpacket.transport import PacketTransport
from sbus.server.bus.protocol import BusProtocol
from tests.support.buses import Bus
from tests.support.reactors import HandTurnedReactor, received, socket_pair


class SocketBus(Bus):
    """A bus with sockets, in a reactor that goes on only when a test says so."""

    def __init__(self) -> None:
        self.reactor = HandTurnedReactor()
        super().__init__(clock=self.reactor)
        self.peers: list[socket.socket] = []

    def connect_socket(self, *packets: bytes) -> socket.socket:
        """Return the client's end of a new connection, over which these packets were sent."""
        ours, peer = socket_pair()
        PacketTransport(self.reactor, ours).start(BusProtocol(self.registry))
        for packet in packets:
            peer.send(packet)
        self.peers.append(peer)
        return peer


@pytest.fixture
def bus():
    """A bus; nothing of it is left in the reactor."""
    bus = SocketBus()
    yield bus
    for peer in bus.peers:
        peer.close()
    bus.registry.stopService()
    bus.reactor.settle()
    while bus.reactor.getReaders():
        bus.reactor.turn()


@pytest.mark.parametrize("packets", [[], [b"SUB */x"]], ids=["messages", "subscriptions"])
@pytest.mark.parametrize("count", [1, 8, 9, 200])
def test_clients_that_hang_up(bus, count, packets):
    """What a client sent before it closed comes before messages of a client of its user that connects later."""
    watcher = bus.connect_socket(b"SUB w/")
    bus.reactor.settle()
    for number in range(count):
        bus.connect_socket(*packets, b"MSG w/%d\0" % number).close()
    bus.connect_socket(b"MSG w/%d\0" % count)
    bus.reactor.turn(50)
    assert [int(packet[6:-1]) for packet in received(watcher)] == list(range(count + 1))
