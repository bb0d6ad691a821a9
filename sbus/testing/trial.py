"""A real bus inside a trial test, on the test's own reactor.

::

    class ThermometerTests(BusMixin, TestCase):
        async def test_temperature(self):
            bus = self.startBus()
            recording = await bus.record("temperature/")
            self.addCleanup((await Thermometer.start(bus.address)).stop)
            self.assertEqual(await recording.wait_for(1), [(b"temperature/kitchen", b"21.5")])
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from twisted.internet import defer

from sbus.client import tx
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.run.service import BusService
from sbus.syscalls.socket_directory import new_socket_directory
from sbus.testing.clients import TwistedRecordingClient

if TYPE_CHECKING:
    from twisted.trial.unittest import TestCase
else:
    TestCase = object

__all__ = ["BusMixin", "InProcessBus"]


class InProcessBus:
    """A bus on the test's reactor; `BusMixin.startBus` makes it.

    :ivar address: where it listens; the same after a stop and a start.
    :ivar service: the `sbus.server.run.service.BusService`; its ``registry`` has the clients and the counters.
    """

    def __init__(self, case: TestCase, reactor: Any, address: str, settings: dict[str, Any]) -> None:
        self.address = address
        self.service = BusService(SeqpacketServerEndpoint(reactor, address, reuse=True), **settings)
        self._case = case
        self._reactor = reactor
        registry = self.service.registry
        self._settings = {"dialect": registry.dialect.name, "max_packet": registry.limits.max_packet}

    def start(self) -> None:
        """Start it again after `stop`."""
        if not self.service.running:
            self.service.startService()

    def stop(self) -> defer.Deferred[None]:
        """Stop listening and disconnect every client.

        :returns: a Deferred that fires when that is done.
        """
        return self.service.stopService() if self.service.running else defer.succeed(None)

    def connect(self, **settings: Any) -> defer.Deferred[tx.Bus]:
        """Connect a client that is closed when the test ends.

        :param settings: as for `sbus.client.tx.connect`; dialect and packet limit default to the server's.
        :returns: a Deferred that fires with the connection.
        """

        def connected(bus: tx.Bus) -> tx.Bus:
            self._case.addCleanup(bus.close)
            return bus

        return tx.connect(self._reactor, self.address, **{**self._settings, **settings}).addCallback(connected)

    def record(self, *patterns: bytes | str, **settings: Any) -> defer.Deferred[TwistedRecordingClient]:
        """Connect a client that records the messages that the patterns match.

        :returns: a Deferred that fires with the client once the server has confirmed its subscriptions.
        """
        return defer.Deferred.fromCoroutine(self._record(patterns, settings))

    async def _record(self, patterns: tuple[bytes | str, ...], settings: dict[str, Any]) -> TwistedRecordingClient:
        recording = TwistedRecordingClient(await self.connect(**settings), self._reactor, *patterns)
        await recording.settle()
        return recording


class BusMixin(TestCase):
    """Give a test case `startBus`; name this base class before `TestCase`."""

    def startBus(self, reactor: Any = None, **settings: Any) -> InProcessBus:
        """Start a bus in a temporary directory; it accepts connections when this returns.

        When the test ends, the clients that `InProcessBus.connect` made are closed, and then the bus is stopped.

        :param reactor: by default the global reactor, which trial runs.
        :param settings: as for `sbus.server.run.service.BusService`: ``limits``, ``dialect``, ``observers``…
        """
        if reactor is None:
            from twisted.internet import reactor
        directory = new_socket_directory()
        self.addCleanup(shutil.rmtree, directory, ignore_errors=True)
        bus = InProcessBus(self, reactor, os.path.join(directory, "bus"), settings)
        bus.start()
        self.addCleanup(bus.stop)
        return bus
