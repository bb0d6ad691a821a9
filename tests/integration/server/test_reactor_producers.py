"""Producers, and errors that affect only one connection, on every reactor; quick runs use only epoll."""

from __future__ import annotations

from typing import Any

from twisted.internet import error
from twisted.internet.defer import Deferred
from twisted.internet.protocol import connectionDone

from sbus.flood.fifo import HIGH_WATER
from tests.integration.server.streams import forever, numbered
from tests.support.reactors import (
    PacketReactorBuilder,
    Recorder,
    each_reactor,
    in_reactor,
)


class Producer:
    """Writes numbered packets.

    :param at_once: how many for each time it is resumed; None for as many as it may.
    """

    def __init__(self, transport: Any, count: int, size: int = 4, at_once: int | None = None) -> None:
        self.transport = transport
        self.packets = iter(numbered(count, size=size))
        self.calls: list[str] = []
        self.at_once = at_once
        self.paused = True
        self.unregister = False

    def resumeProducing(self) -> None:
        self.calls.append("resume")
        self.paused = False
        written = 0
        while not self.paused and written != self.at_once:
            packet = next(self.packets, None)
            if packet is None:
                if self.unregister:
                    self.transport.unregisterProducer()
                break
            self.transport.write(packet)
            written += 1

    def pauseProducing(self) -> None:
        self.calls.append("pause")
        self.paused = True

    def stopProducing(self) -> None:
        self.calls.append("stop")
        self.paused = True


class Producing(PacketReactorBuilder):
    """Producers that write to a transport follow its pace."""

    @in_reactor
    async def test_push_producer(self):
        """A push producer is paused at the high-water mark and resumed when the queue is empty, in turn."""
        recorder = Recorder()
        peer = self.connect(recorder)
        producer = Producer(recorder.transport, 1000, size=1000)
        recorder.transport.registerProducer(producer, True)
        producer.resumeProducing()
        got: list[bytes] = []
        most = 0
        while len(got) < 1000:
            got += await self.receive(peer, 1)
            most = max(most, len(recorder.transport.queue) * 1000)
        recorder.transport.unregisterProducer()
        assert got == numbered(1000, size=1000)
        assert most <= HIGH_WATER + 1000
        assert len(producer.calls) > 10
        assert producer.calls == ["resume", "pause"] * (len(producer.calls) // 2) + ["resume"] * (
            len(producer.calls) % 2
        )

    @in_reactor
    async def test_pull_producer(self):
        """A pull producer is asked for more whenever the queue is empty."""
        recorder = Recorder()
        peer = self.connect(recorder)
        producer = Producer(recorder.transport, 1000, size=1000, at_once=1)
        recorder.transport.registerProducer(producer, False)
        assert await self.receive(peer, 1000) == numbered(1000, size=1000)
        assert set(producer.calls) == {"resume"}

    @in_reactor
    async def test_second_producer(self):
        """A second producer is refused until the first is unregistered."""
        recorder = Recorder()
        self.connect(recorder)
        first = Producer(recorder.transport, 0)
        recorder.transport.registerProducer(first, True)
        with self.assertRaises(RuntimeError):
            recorder.transport.registerProducer(Producer(recorder.transport, 0), True)
        recorder.transport.unregisterProducer()
        recorder.transport.registerProducer(Producer(recorder.transport, 0), True)
        assert first.calls == []

    @in_reactor
    async def test_producer_of_a_lost_connection(self):
        """A producer is stopped, once, when its connection is lost; one that comes later is stopped at once."""
        for leave in (lambda peer, transport: peer.close(), lambda peer, transport: transport.abortConnection()):
            recorder = Recorder()
            peer = self.connect(recorder)
            producer = Producer(recorder.transport, 0)
            recorder.transport.registerProducer(producer, True)
            leave(peer, recorder.transport)
            await recorder.whenLost()
            assert producer.calls == ["stop"]
            late = Producer(recorder.transport, 0)
            recorder.transport.registerProducer(late, True)
            assert late.calls == ["stop"]

    @in_reactor
    async def test_lose_connection_waits_for_the_producer(self):
        """loseConnection closes only when the producer has finished (`ITransport`)."""
        for streaming in (True, False):
            recorder = Recorder()
            peer = self.connect(recorder)
            producer = Producer(recorder.transport, 100, size=10_000, at_once=1)
            producer.unregister = True
            recorder.transport.registerProducer(producer, streaming)
            if streaming:
                producer.at_once = None
                producer.resumeProducing()
            recorder.transport.loseConnection()
            assert await self.receive(peer, 101) == [*numbered(100, size=10_000), b""]
            await recorder.whenLost()
            recorder.lost[0].trap(error.ConnectionDone)


class Fairness(PacketReactorBuilder):
    """An error in one connection reaches no other."""

    @in_reactor
    async def test_protocol_that_raises(self):
        """A protocol that raises in dataReceived loses its own connection; the others are not affected."""

        def fail(packet):
            raise ZeroDivisionError

        bad, good = Recorder(fail), Recorder()
        worse = Recorder(fail)
        peers = [self.connect(recorder) for recorder in (bad, good, worse)]
        for peer in peers:
            peer.send(b"one")
            peer.send(b"two")
        for recorder in (bad, worse):
            await recorder.whenLost()
            recorder.lost[0].trap(ZeroDivisionError)
            assert recorder.packets == [b"one"]
        peers[1].send(b"three")
        await good.whenCount(3)
        assert good.packets == [b"one", b"two", b"three"]
        assert not good.lost
        assert len(self.flushLoggedErrors(ZeroDivisionError)) == 2

    @in_reactor
    async def test_protocol_that_exits(self):
        """A protocol that raises SystemExit loses its own connection; the others and their packets are not affected."""

        def leave(packet):
            raise SystemExit

        bad, good = Recorder(leave), Recorder()
        peers = [self.connect(recorder) for recorder in (bad, good)]
        good.transport.write(b"answer")
        peers[0].send(b"one")
        await bad.whenLost()
        bad.lost[0].trap(SystemExit)
        assert await self.receive(peers[1], 1) == [b"answer"]
        assert not good.lost
        assert len(self.flushLoggedErrors(SystemExit)) == 1

    @in_reactor
    async def test_protocol_that_raises_when_resumed(self):
        """A protocol that raises over a kept packet loses its connection too."""

        def react(packet):
            if packet == b"0000":
                recorder.transport.pauseProducing()
            else:
                raise ZeroDivisionError

        recorder = Recorder(react)
        peer = self.connect(recorder)
        for packet in numbered(3):
            peer.send(packet)
        await recorder.whenCount(1)
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        recorder.lost[0].trap(ZeroDivisionError)
        assert recorder.packets == numbered(2)
        assert len(self.flushLoggedErrors(ZeroDivisionError)) == 1

    @in_reactor
    async def test_producer_that_raises(self):
        """A producer that raises costs its own connection only."""

        class Bad(Producer):
            def resumeProducing(self):
                raise ZeroDivisionError

        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.registerProducer(Bad(recorder.transport, 0), True)
        recorder.transport.writeSequence(numbered(200, size=1000))
        await self.receive(peer, 200)
        await recorder.whenLost()
        assert len(self.flushLoggedErrors(ZeroDivisionError)) == 1

    @in_reactor
    async def test_connection_lost_that_raises(self):
        """A protocol that raises in connectionLost does not affect other connections."""

        class Bad(Recorder):
            def connectionLost(self, reason=connectionDone):
                super().connectionLost(reason)
                raise ZeroDivisionError

        bad, good = Bad(), Recorder()
        self.connect(bad).close()
        peer = self.connect(good)
        await bad.whenLost()
        peer.send(b"one")
        await good.whenCount(1)
        assert len(self.flushLoggedErrors(ZeroDivisionError)) == 1

    @in_reactor
    async def test_saturating_sender(self):
        """A sender whose socket is never empty starves neither another connection nor timed calls."""
        greedy = Recorder(lambda packet: source.send(packet))
        source = self.connect(greedy)
        for packet in numbered(200):
            source.send(packet)
        modest = Recorder(lambda packet: modest.transport.write(packet))
        peer = self.connect(modest)
        timed: Deferred[None] = Deferred()
        self.reactor.callLater(0.02, timed.callback, None)
        await timed
        for packet in numbered(20):
            before = len(greedy.packets)
            peer.send(packet)
            assert await self.receive(peer, 1) == [packet]
            assert len(greedy.packets) - before < 10_000
        assert len(greedy.packets) > 1000
        greedy.react = None

    @in_reactor
    async def test_saturating_writer(self):
        """A writer that always has more to send, to a peer that takes all, does not starve the others either."""
        greedy = Recorder()
        sink = self.connect(greedy)
        producer = Producer(greedy.transport, 0, at_once=10)
        producer.packets = forever(sink)
        greedy.transport.registerProducer(producer, False)
        modest = Recorder(lambda packet: modest.transport.write(packet))
        peer = self.connect(modest)
        for packet in numbered(20):
            before = len(producer.calls)
            peer.send(packet)
            assert await self.receive(peer, 1) == [packet]
            assert len(producer.calls) - before < 100
        assert len(producer.calls) > 20
        greedy.transport.unregisterProducer()

    @in_reactor
    async def test_many_connections(self):
        """If hundreds of connections are ready at once, each is served."""
        recorders = [Recorder() for _ in range(300)]
        peers = [self.connect(recorder) for recorder in recorders]
        for peer in peers:
            peer.send(b"hello")
        for recorder in recorders:
            await recorder.whenCount(1)


globals().update(each_reactor(Producing, Fairness))
