"""Tests of a Twisted service that uses a bus, with trial: bus, service and test share one reactor."""

from __future__ import annotations

from cookbook.dashboard import Dashboard, Page
from twisted.internet import reactor
from twisted.internet.protocol import Protocol
from twisted.trial.unittest import TestCase

from sbus.testing import BusMixin, FakePacketTransport


class DashboardTests(BusMixin, TestCase):
    async def start(self) -> None:
        self.bus = self.startBus()
        self.dashboard = Dashboard(reactor, self.bus.address, "tcp:0:interface=127.0.0.1")
        self.dashboard.startService()
        self.addCleanup(self.dashboard.stopService)
        # The service has subscribed, and the server has confirmed it.
        await (await self.dashboard.bus.whenConnected()).fence()

    async def test_shows_the_newest(self) -> None:
        await self.start()
        sensor = await self.bus.connect()
        await sensor.publish("telemetry/kitchen/load", b"0.5")
        await sensor.publish("telemetry/kitchen/load", b"0.7")
        await sensor.fence()  # the server has handled both messages,
        await (await self.dashboard.bus.whenConnected()).fence()  # and the service has received them
        self.assertEqual(Page(self.dashboard.values).text(), b"telemetry/kitchen/load: 0.7\n")

    async def test_leaves_with_the_service(self) -> None:
        await self.start()
        self.assertEqual(len(self.bus.service.registry.clients), 1)
        gone = self.bus.service.registry.when_empty()
        await self.dashboard.stopService()
        await gone


class Bell(Protocol):
    """A protocol for SEQPACKET endpoints: rings for every packet, and closes the connection on ``stop``."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        if data == b"stop":
            self.transport.loseConnection()
        else:
            self.transport.writeSequence([b"ding", b"dong"])


class PacketTests(TestCase):
    def setUp(self) -> None:
        self.transport = FakePacketTransport()
        self.transport.connect(Bell())

    def test_rings(self) -> None:
        self.transport.deliver(b"ring")
        self.transport.clock.advance(0)
        self.assertEqual(self.transport.written, [b"ding", b"dong"])

    def test_finishes_before_it_stops(self) -> None:
        self.transport.capacity = 1
        self.transport.deliver(b"ring", b"stop")
        self.transport.clock.advance(0)
        self.assertEqual((self.transport.written, self.transport.connected), ([b"ding"], True))
        self.transport.drain()
        self.transport.clock.advance(0)
        self.assertEqual((self.transport.written, self.transport.connected), ([b"ding", b"dong"], False))
