"""A bus without sockets, for unit tests of the server: real registry and protocols, fake transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.task import Clock

from sbus.fair.scheduler import CROWD
from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.limits import Limits
from sbus.testing import FakePacketTransport
from tests.support.reactors import HandTurnedReactor

__all__ = ["Bus", "HandTurnedBus", "Peer"]


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
        self.registry.scheduler.clock = self.registry.scheduler.working_time = lambda: (
            0
        )  # what a turn costs must not depend on the machine that tests
        self.registry.startService()

    def settle(self) -> None:
        """Run the calls that are due; no time passes."""
        for _ in range(8):
            self.clock.advance(0)

    def connect(
        self,
        uid: int = 1000,
        gid: int = 100,
        pid: int = 0,
        *,
        make: Callable[[SubscriptionRegistry], BusProtocol] = BusProtocol,
        **settings: Any,
    ) -> Peer:
        """Connect a new client, with a PID of its own if none is given.

        :param make: makes the server's side of the connection.
        """
        peer = PeerCredentials(pid or 5000 + len(self.registry.clients), uid, gid)
        transport = FakePacketTransport(peer, clock=self.clock, **settings)
        protocol = make(self.registry)
        transport.connect(protocol)
        self.settle()
        return Peer(self, transport, protocol)


class HandTurnedBus(Bus):
    """A bus whose server goes on only when a test says so: what it puts off waits for `turn`.

    Sockets have a clock of their own, so that what they do soon is done at once.

    :ivar tick: nanoseconds that pass with each look of the scheduler at its clock.
    """

    def __init__(self, tick: int = 20_000, **settings: Any) -> None:
        self.reactor = HandTurnedReactor()
        super().__init__(clock=self.reactor, **settings)
        self.clock = Clock()
        self.tick = tick
        self._now = 0
        self.registry.scheduler.clock = self.registry.scheduler.working_time = self._look

    def _look(self) -> int:
        self._now += self.tick
        return self._now

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and then the server have one turn."""
        self.reactor.rightNow += seconds
        self.reactor.turn()
        self.settle()

    def finish(self) -> None:
        """Let turns pass until nothing waits for one; no time passes for timers."""
        ring = self.registry.scheduler._ring
        while True:
            while ring:
                self.turn()
            self.turn()  # what the last one has brought is sent
            if not ring:
                break

    def use_up(self, peer: Peer, work: int) -> None:
        """Have a client's user use up its time, while other users are active: the rest of its work waits for turns.

        These are whole, as if many packets came from others.

        :param work: by how much it exceeds its time, in microseconds.
        """
        scheduler, lines = self.registry.scheduler, peer.protocol.user.lines
        lines.deficit = -1_000 * work
        scheduler.crowd, scheduler.is_busy, scheduler._arrived = CROWD, True, 1 << 40
