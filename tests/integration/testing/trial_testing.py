"""Cases for trial, run by `tests.integration.testing.test_testing`: `BusMixin` as users use it."""

from __future__ import annotations

import os

from twisted.internet import reactor
from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from sbus.client import tx
from sbus.errors import Closed, Disconnected, NotAllowed, TimedOut, UsageError
from sbus.policy import Policy, Rule
from sbus.protocol.keys import EARLY
from sbus.server.core.limits import Limits
from sbus.testing import BusMixin, TwistedRecordingClient


class MixinTests(BusMixin, TestCase):
    """A bus on the reactor of the test."""

    async def test_record(self) -> None:
        """A client records each message that its patterns match once, from the moment that it exists."""
        bus = self.startBus()
        recording = await bus.record("a/", "a/b", "c")
        client = await bus.connect()
        waiting = recording.wait_for(3)
        await client.publish_many([("a/b", b"1"), ("b", b"2"), ("c", b"3"), ("a/b", b"1")])
        self.assertEqual(await waiting, [(b"a/b", b"1"), (b"c", b"3"), (b"a/b", b"1")])
        recording.clear()
        await client.publish("a/", b"4")
        await client.fence()
        self.assertEqual(await recording.settle(), [(b"a/", b"4")])
        self.assertEqual(await recording.wait_for(1), recording.messages)

    async def test_too_late(self) -> None:
        """The error of a time-out says how many messages came."""
        recording = await self.startBus().record()
        with self.assertRaisesRegex(TimedOut, r"0 of 1 messages came within 0\.01 s$"):
            await recording.wait_for(1, timeout=0.01)

    async def test_cancel(self) -> None:
        """Waiting can be cancelled, and the next caller gets the messages recorded meanwhile."""
        bus = self.startBus()
        recording = await bus.record()
        waiting = recording.wait_for(1)
        waiting.cancel()
        client = await bus.connect()
        await client.publish("a", b"1")
        self.assertEqual(await recording.wait_for(1), [(b"a", b"1")])
        self.failureResultOf(waiting)

    async def test_settings(self) -> None:
        """The bus has the given settings, and its clients use them."""
        bus = self.startBus(dialect=EARLY, limits=Limits(max_packet=300))
        recording = await bus.record("a.")
        client = await bus.connect()
        self.assertEqual(client.core.max_packet, 300)
        await client.publish("a.b", b"x")
        self.assertEqual(await recording.wait_for(1), [(b"a.b", b"x")])

    async def test_two(self) -> None:
        """A test may have several independent buses."""
        one, other = self.startBus(), self.startBus()
        here, there = await one.record(), await other.record()
        client = await one.connect()
        await client.publish("a", b"1")
        await here.wait_for(1)
        self.assertEqual(await there.settle(), [])

    async def test_stop_and_start(self) -> None:
        """When a bus stops, waiting clients raise an error; it can be started again at the same address."""
        bus = self.startBus()
        recording = await bus.record()
        waiting = recording.wait_for(1)
        await bus.stop()
        self.assertFalse(os.path.exists(bus.address))
        with self.assertRaises(Disconnected):
            await waiting
        await bus.stop()  # nothing to do
        bus.start()
        bus.start()  # nothing to do
        client = await bus.connect()
        await client.fence()

    async def test_own_connection(self) -> None:
        """A connection that the test made can be recorded too; when it closes, waiting ends."""
        bus = self.startBus()
        client = await tx.connect(reactor, bus.address)
        recording = TwistedRecordingClient(client, reactor, "a")
        await client.publish("a", b"1")
        await recording.wait_for(1)
        waiting = recording.wait_for(2)
        await client.close()
        with self.assertRaises(Closed):
            await waiting

    async def test_a_pattern_that_is_refused(self) -> None:
        """Nothing that a policy keeps from a client looks like a message that was not published."""
        bus = self.startBus(policy=Policy())
        recording = await bus.record("a/")
        with self.assertRaises(NotAllowed):
            await bus.record("!/cred/1/2/3/")
        clock = Clock()
        self.patch(recording, "_reactor", clock)
        waiting = recording.wait_for(1)
        await bus.service.registry.guard.adopt(Policy([Rule(0, "none", "", deny_subscribe=(b"a/",))]))
        with self.assertRaises(NotAllowed):
            await recording.settle()
        clock.advance(10)
        for waits in (waiting, recording.wait_for(1)):
            with self.assertRaises(NotAllowed):
                await waits

    async def test_reconnecting_client(self) -> None:
        """A client that is reconnecting when the test ends is closed, and leaves nothing on the reactor."""
        bus = self.startBus()
        client = await bus.connect(reconnect=True)
        asked = client.fence()
        await bus.stop()
        try:
            await asked
        except Disconnected:
            pass  # it is about to reconnect

    async def test_a_test_that_fails(self) -> None:
        """If the loss of a connection makes the test fail, the clean-up closes every client."""
        bus = self.startBus()
        client = await bus.connect(reconnect=True)
        await client.fence()
        lost = client.request("nobody/there", b"", timeout=None)
        lost.addErrback(lambda failure: failure.trap(Disconnected) and client.close())
        await client.fence()
        await bus.stop()
        await lost

    def test_refused(self) -> None:
        """An unknown or impossible setting is an error at once."""
        with self.assertRaises(TypeError):
            self.startBus(no_such_setting=1)
        with self.assertRaises(UsageError):
            self.startBus(limits=Limits(max_packet=1))
