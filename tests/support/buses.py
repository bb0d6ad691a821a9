"""A bus without sockets, for unit tests of the server: real registry and protocols, fake transports."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock

from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.limits import Limits
from sbus.testing import FakePacketTransport

__all__ = ["Bus", "Peer"]


class Peer:
    """One client of the bus, with its transport and its protocol."""

    def __init__(self, bus: Bus, transport: FakePacketTransport, protocol: BusProtocol) -> None:
        self._bus = bus
        self.transport = transport
        self.protocol = protocol

    def send(self, *packets: bytes) -> None:
        """Send packets to the server, in one batch."""
        self.transport.deliver(*packets)
        self._bus.settle()

    def take(self) -> list[bytes]:
        """Return the packets that the server has sent since the last call."""
        written, self.transport.written[:] = list(self.transport.written), []
        return written

    def stall(self) -> None:
        """Read no more: the socket takes nothing from now on."""
        self.transport.capacity = 0

    def drain(self, packets: int | None = None) -> None:
        """Read `packets` packets (None: all that come)."""
        self.transport.drain(packets)
        self._bus.settle()

    @property
    def is_connected(self) -> bool:
        return self.transport.connected


class Bus:
    """A registry with a clock, and clients on fake transports."""

    def __init__(self, *, credentials: Any = None, access: AccessSettings | None = None, **settings: Any) -> None:
        self.clock: Clock = settings.pop("clock", None) or Clock()
        limits = settings.pop("limits", None) or Limits(block_timeout=30.0)
        self.registry = SubscriptionRegistry(
            credentials or KernelPolicy().make(access or AccessSettings()), self.clock, limits=limits, **settings
        )
        self.registry.scheduler.clock = lambda: 0  # what a turn costs must not depend on the machine that tests
        self.registry.startService()

    def settle(self) -> None:
        """Run the calls that are due; no time passes."""
        for _ in range(8):
            self.clock.advance(0)

    def connect(self, uid: int = 1000, gid: int = 100, pid: int = 0, **settings: Any) -> Peer:
        """Connect a new client, with a PID of its own if none is given."""
        peer = PeerCredentials(pid or 5000 + len(self.registry.clients), uid, gid)
        transport = FakePacketTransport(peer, clock=self.clock, **settings)
        protocol = BusProtocol(self.registry)
        transport.connect(protocol)
        self.settle()
        return Peer(self, transport, protocol)
