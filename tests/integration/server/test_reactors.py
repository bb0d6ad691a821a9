"""The transport on every reactor: one test body, run on epoll, poll, select and asyncio.

Quick runs have everything on epoll, which twistd uses, and what depends on the reactor on each other one.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet import error
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.protocol import Factory, connectionDone

from sbus.flood.fifo import HIGH_WATER, FifoQueue
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint, SeqpacketServerEndpoint
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.listening import BACKLOG
from sbus.syscalls.sockets import grow_send_buffer, max_sendable
from tests.support.descriptors import descriptors
from tests.support.reactors import BatchRecorder, HalfRecorder, PacketReactorBuilder, Recorder, in_reactor, received

LIMIT = DEFAULT_MAX_PACKET


def numbered(count: int, start: int = 0, size: int = 4) -> list[bytes]:
    """Packets that differ."""
    return [b"%0*d" % (size, i) for i in range(start, start + count)]


def forever(sink: socket.socket) -> Iterator[bytes]:
    """Packets for a peer that reads what it has before it gets more."""
    while True:
        received(sink)
        yield b"more"


class CountingTransport(PacketTransport):
    """Counts the calls from the multiplexer."""

    calls = 0

    def ready(self, events: int, alone: bool) -> None:
        self.calls += 1
        super().ready(events, alone)


class Edges(PacketReactorBuilder):
    """Packets arrive as they were sent."""

    SIZES = [*range(1, 130), 4095, 4096, 4097, 65_535, 65_536, 65_537, LIMIT - 1, LIMIT, 1]

    @in_reactor
    async def test_read_edges(self):
        """Each packet of any size up to the limit is one dataReceived."""
        recorder = Recorder()
        peer = self.connect(recorder)
        grow_send_buffer(peer, LIMIT)
        packets = [os.urandom(size) for size in self.SIZES]
        await self.send(peer, *packets)
        await recorder.whenCount(len(packets))
        assert recorder.packets == packets

    @in_reactor
    async def test_write_edges(self):
        """Each write of any size up to the limit is one packet."""
        recorder = Recorder()
        peer = self.connect(recorder)
        grow_send_buffer(recorder.transport.getHandle(), LIMIT)
        packets = [os.urandom(size) for size in self.SIZES]
        for packet in packets:
            recorder.transport.write(packet)
        assert await self.receive(peer, len(packets)) == packets

    @in_reactor
    async def test_write_sequence_edges(self):
        """writeSequence sends one packet for each item."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.writeSequence([b"one", b"two", b"three"])
        assert await self.receive(peer, 3) == [b"one", b"two", b"three"]

    @in_reactor
    async def test_batches(self):
        """A protocol that takes batches gets waiting packets in batches, in order and complete."""
        recorder = BatchRecorder()
        peer = self.connect(recorder)
        packets = numbered(200)
        for packet in packets:
            peer.send(packet)
        await recorder.whenCount(200)
        assert recorder.packets == packets
        assert recorder.batches == [64, 64, 64, 8]

    @in_reactor
    async def test_write_in_data_received(self):
        """Packets written from within dataReceived are sent one by one and in order."""
        recorder = Recorder(lambda packet: recorder.transport.writeSequence([b"echo", packet]))
        peer = self.connect(recorder)
        packets = numbered(100)
        for packet in packets:
            peer.send(packet)
        answers = await self.receive(peer, 200)
        assert answers == [answer for packet in packets for answer in (b"echo", packet)]

    @in_reactor
    async def test_descriptors_are_dropped(self):
        """A packet sent with descriptors arrives, and the descriptors are closed."""
        recorder = Recorder()
        peer = self.connect(recorder)
        reading, writing = os.pipe()
        before = descriptors()
        for _ in range(5):
            socket.send_fds(peer, [b"with descriptors"], [writing] * 4)
        await recorder.whenCount(5)
        os.close(writing)
        assert recorder.packets == [b"with descriptors"] * 5
        assert os.read(reading, 1) == b"", "nobody but this test may have held the pipe open"
        os.close(reading)
        assert not descriptors().items() - before.items()


class Pausing(PacketReactorBuilder):
    """A paused protocol gets nothing, and loses nothing."""

    @in_reactor
    async def test_pause_inside_a_batch(self):
        """Packets read when the protocol paused are kept; on resuming they come first, once, then the rest."""
        recorder = Recorder(lambda packet: packet == b"0003" and recorder.transport.pauseProducing())
        peer = self.connect(recorder)
        for packet in numbered(10):
            peer.send(packet)
        await recorder.whenCount(4)
        for packet in numbered(10, 10):
            peer.send(packet)
        await self.turns(5)
        assert recorder.packets == numbered(4)
        recorder.transport.resumeProducing()
        assert recorder.packets == numbered(4), "nothing may arrive from within resumeProducing"
        await recorder.whenCount(20)
        await self.turns(5)
        assert recorder.packets == numbered(20)

    @in_reactor
    async def test_pause_after_every_packet(self):
        """A protocol that pauses after each packet gets one packet each time it resumes."""
        recorder = Recorder(lambda packet: recorder.transport.pauseProducing())
        peer = self.connect(recorder)
        for packet in numbered(100):
            peer.send(packet)
        for count in range(1, 101):
            await recorder.whenCount(count)
            await self.turns()
            assert len(recorder.packets) == count
            recorder.transport.resumeProducing()
        assert recorder.packets == numbered(100)

    @in_reactor
    async def test_pause_and_resume_inside_a_batch(self):
        """Pausing and resuming at once, in the middle of a batch, changes nothing."""

        def react(packet):
            recorder.transport.pauseProducing()
            recorder.transport.resumeProducing()

        recorder = Recorder(react)
        peer = self.connect(recorder)
        for packet in numbered(100):
            peer.send(packet)
        await recorder.whenCount(100)
        await self.turns(3)
        assert recorder.packets == numbered(100)

    @in_reactor
    async def test_part_of_a_batch_taken(self):
        """A protocol that takes a part of a batch gets the rest of it first when it resumes."""
        recorder = BatchRecorder()
        recorder.room = 5
        peer = self.connect(recorder)
        for packet in numbered(100):
            peer.send(packet)
        await recorder.whenCount(5)
        await self.turns(5)
        assert recorder.packets == numbered(5)
        recorder.room = 10
        recorder.transport.resumeProducing()
        await recorder.whenCount(15)
        await self.turns(5)
        assert recorder.packets == numbered(15)
        recorder.room = None
        recorder.transport.resumeProducing()
        await recorder.whenCount(100)
        assert recorder.packets == numbered(100)

    @in_reactor
    async def test_paused_before_anything_came(self):
        """A protocol that pauses as soon as it is connected gets its packets when it resumes."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.pauseProducing()
        peer.send(b"one")
        await self.turns(5)
        assert recorder.packets == []
        recorder.transport.resumeProducing()
        await recorder.whenCount(1)

    @in_reactor
    async def test_peer_leaves_while_paused(self):
        """Packets that a peer sent before it left are delivered when the protocol resumes, and only then the loss."""
        recorder = Recorder(lambda packet: packet == b"0001" and recorder.transport.pauseProducing())
        peer = self.connect(recorder)
        for packet in numbered(150):
            peer.send(packet)
        await recorder.whenCount(2)
        peer.close()
        await self.turns(5)
        assert recorder.packets == numbered(2)
        assert not recorder.lost
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == numbered(150)
        recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_peer_leaves_while_paused_again_and_again(self):
        """A protocol that pauses after each packet gets all packets of a peer that left long ago."""
        recorder = Recorder(lambda packet: recorder.transport.pauseProducing())
        peer = self.connect(recorder)
        for packet in numbered(20):
            peer.send(packet)
        peer.close()
        for count in range(1, 21):
            await recorder.whenCount(count)
            assert not recorder.lost
            recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == numbered(20)

    @in_reactor
    async def test_vanished_peers_cost_nothing(self):
        """Peers that have vanished while their connections are paused do not keep the reactor busy."""
        recorders = [Recorder() for _ in range(20)]
        peers = [self.connect(recorder, transport_class=CountingTransport) for recorder in recorders]
        for recorder, peer in zip(recorders, peers, strict=True):
            recorder.transport.pauseProducing()
            peer.send(b"bye")
            peer.close()
        witness = Recorder()
        self.connect(witness).send(b"after them")
        await witness.whenCount(1)
        await self.turns(5)
        calls = [recorder.transport.calls for recorder in recorders]
        await self.turns(50)
        assert [recorder.transport.calls for recorder in recorders] == calls
        assert max(calls) <= 2
        for recorder in recorders:
            recorder.transport.resumeProducing()
        for recorder in recorders:
            await recorder.whenLost()
            assert recorder.packets == [b"bye"]

    @in_reactor
    async def test_vanished_peer_of_a_paused_writer(self):
        """A peer that vanishes does not keep the reactor busy either if its paused connection has much to send."""
        recorder = Recorder()
        peer = self.connect(recorder, transport_class=CountingTransport)
        recorder.transport.pauseProducing()
        recorder.transport.writeSequence(numbered(1000, size=1000))
        peer.send(b"bye")
        await self.turns(3)
        assert len(recorder.transport.queue) > 0
        peer.close()
        await self.turns(5)
        calls = recorder.transport.calls
        await self.turns(50)
        assert recorder.transport.calls == calls
        assert not recorder.lost
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == [b"bye"]


class Ends(PacketReactorBuilder):
    """How connections end."""

    @in_reactor
    async def test_write_and_close_at_once(self):
        """A peer that sends and closes at once loses nothing: every packet is delivered before the loss is reported."""
        for recorder in (Recorder(), BatchRecorder(), HalfRecorder()):
            peer = self.connect(recorder)
            for packet in numbered(200):
                peer.send(packet)
            peer.close()
            if isinstance(recorder, HalfRecorder):
                await recorder.whenHalf()
                recorder.transport.loseConnection()
            await recorder.whenLost()
            assert recorder.packets == numbered(200)
            recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_end_of_file(self):
        """Without IHalfCloseableProtocol the peer's end-of-file ends the connection."""
        recorder = Recorder()
        peer = self.connect(recorder)
        peer.send(b"last")
        peer.shutdown(socket.SHUT_WR)
        await recorder.whenLost()
        assert recorder.packets == [b"last"]
        recorder.lost[0].trap(error.ConnectionDone)
        assert received(peer) == [b""]

    @in_reactor
    async def test_half_close(self):
        """With IHalfCloseableProtocol the peer's end of file is reported, and the protocol can go on writing."""
        recorder = HalfRecorder()
        peer = self.connect(recorder)
        peer.send(b"last")
        peer.shutdown(socket.SHUT_WR)
        await recorder.whenHalf()
        assert recorder.packets == [b"last"]
        assert recorder.halves == ["read"]
        recorder.transport.write(b"more")
        assert await self.receive(peer, 1) == [b"more"]
        await self.turns(5)
        assert not recorder.lost
        recorder.transport.loseConnection()
        await recorder.whenLost()
        assert recorder.halves == ["read"]
        assert received(peer) == [b""]

    @in_reactor
    async def test_half_closed_by_a_peer_that_then_leaves(self):
        """A half-closed connection ends when the peer closes, even if neither side reads or writes."""
        recorder = HalfRecorder()
        peer = self.connect(recorder)
        peer.shutdown(socket.SHUT_WR)
        await recorder.whenHalf()
        peer.close()
        await recorder.whenLost()
        recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_lose_write_connection(self):
        """loseWriteConnection sends the queue, then the peer reads end of file; the protocol still gets packets."""
        recorder = HalfRecorder()
        peer = self.connect(recorder)
        recorder.transport.writeSequence(numbered(1000, size=500))
        recorder.transport.loseWriteConnection()
        assert await self.receive(peer, 1001) == [*numbered(1000, size=500), b""]
        await recorder.whenHalf()
        assert recorder.halves == ["write"]
        recorder.transport.write(b"never")
        peer.send(b"still here")
        await recorder.whenCount(1)
        assert not recorder.lost
        peer.shutdown(socket.SHUT_WR)
        await recorder.whenLost()
        assert recorder.packets == [b"still here"]
        recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_lose_write_connection_of_a_plain_protocol(self):
        """loseWriteConnection works for protocols that do not implement IHalfCloseableProtocol."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.write(b"last")
        recorder.transport.loseWriteConnection()
        assert await self.receive(peer, 2) == [b"last", b""]
        peer.send(b"answer")
        await recorder.whenCount(1)
        assert not recorder.lost

    @in_reactor
    async def test_lose_connection_flushes(self):
        """loseConnection closes only when everything written is sent, however slow the peer is."""
        recorder = Recorder()
        peer = self.connect(recorder)
        packets = numbered(3000, size=1000)
        recorder.transport.writeSequence(packets)
        recorder.transport.loseConnection()
        recorder.transport.write(b"too late")
        await self.turns(5)
        assert not recorder.lost
        assert await self.receive(peer, 3001) == [*packets, b""]
        await recorder.whenLost()
        recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_lose_connection_flushes_after_end_of_file(self):
        """loseConnection flushes also if the peer's end-of-file came in the same batch as its question."""

        def react(packet):
            recorder.transport.writeSequence(numbered(1000, size=1000))
            recorder.transport.loseConnection()

        recorder = Recorder(react)
        peer = self.connect(recorder)
        peer.send(b"question")
        peer.shutdown(socket.SHUT_WR)
        await recorder.whenCount(1)
        await self.turns(5)
        assert await self.receive(peer, 1001) == [*numbered(1000, size=1000), b""]

    @in_reactor
    async def test_lose_connection_stops_reading(self):
        """After loseConnection nothing more is delivered, not even the rest of the batch."""
        for recorder in (Recorder(), BatchRecorder()):
            peer = self.connect(recorder)
            recorder.transport.writeSequence(numbered(1000, size=1000))
            for packet in numbered(5):
                peer.send(packet)
            recorder.transport.loseConnection()
            await self.turns(5)
            assert recorder.packets == []
            assert not recorder.lost

        recorder = Recorder(lambda packet: recorder.transport.loseConnection())
        peer = self.connect(recorder)
        for packet in numbered(5):
            peer.send(packet)
        await recorder.whenLost()
        assert recorder.packets == numbered(1)

    @in_reactor
    async def test_lose_connection_when_the_peer_never_reads(self):
        """A closing connection ends when the peer leaves without having read everything."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.writeSequence(numbered(1000, size=1000))
        recorder.transport.loseConnection()
        await self.turns(5)
        assert not recorder.lost
        peer.close()
        await recorder.whenLost()
        recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_abort_connection(self):
        """abortConnection sends nothing more and closes; the protocol gets ConnectionAborted, but not at once."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.writeSequence(numbered(1000, size=1000))
        await self.turns(3)
        recorder.transport.write(b"never")
        recorder.transport.abortConnection()
        assert not recorder.lost
        await recorder.whenLost()
        recorder.lost[0].trap(error.ConnectionAborted)
        got = received(peer)
        assert 0 < len(got) < 1000
        assert got == [*numbered(len(got) - 1, size=1000), b""]

    @in_reactor
    async def test_abort_in_data_received(self):
        """A protocol that aborts in dataReceived gets nothing more."""
        recorder = Recorder(lambda packet: recorder.transport.abortConnection())
        peer = self.connect(recorder)
        for packet in numbered(5):
            peer.send(packet)
        await recorder.whenLost()
        assert recorder.packets == numbered(1)

    @in_reactor
    async def test_reset(self):
        """A peer that closes with unread packets loses none of those that it has sent before."""
        for recorder in (Recorder(), BatchRecorder()):
            peer = self.connect(recorder)
            recorder.transport.write(b"never read")
            await self.readable(peer)
            for packet in numbered(100):
                peer.send(packet)
            peer.close()
            await recorder.whenLost()
            assert recorder.packets == numbered(100)

    @in_reactor
    async def test_reset_while_paused(self):
        """The same, if the peer resets a paused connection."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.write(b"never read")
        recorder.transport.pauseProducing()
        await self.readable(peer)
        for packet in numbered(100):
            peer.send(packet)
        peer.close()
        await self.turns(5)
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == numbered(100)

    @in_reactor
    async def test_write_to_a_peer_that_has_left(self):
        """A failed send discards the queue at once, while packets from the peer are still delivered."""
        for recorder in (Recorder(), HalfRecorder()):
            peer = self.connect(recorder)
            recorder.transport.pauseProducing()
            for packet in numbered(100):
                peer.send(packet)
            peer.close()
            recorder.transport.write(b"nobody reads this")
            recorder.transport.flush()
            assert len(recorder.transport.queue) == 0
            recorder.transport.resumeProducing()
            await recorder.whenLost()
            assert recorder.packets == numbered(100)

    @in_reactor
    async def test_zero_length_packet(self):
        """An empty packet ends the connection as end-of-file does, after what stood before it."""
        for recorder in (Recorder(), BatchRecorder()):
            peer = self.connect(recorder)
            for packet in [*numbered(10), b"", b"behind it"]:
                peer.send(packet)
            await recorder.whenLost()
            assert recorder.packets == numbered(10)
            recorder.lost[0].trap(error.ConnectionDone)

    @in_reactor
    async def test_zero_length_packet_while_paused(self):
        """An empty packet behind kept packets ends the connection only once those are delivered."""
        recorder = Recorder(lambda packet: packet == b"0003" and recorder.transport.pauseProducing())
        peer = self.connect(recorder)
        for packet in [*numbered(10), b"", b"behind it"]:
            peer.send(packet)
        await recorder.whenCount(4)
        await self.turns(5)
        assert not recorder.lost
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == numbered(10)

    @in_reactor
    async def test_empty_write_is_refused(self):
        """An empty packet cannot be written, as the peer would take it for end-of-file."""
        recorder = Recorder()
        self.connect(recorder)
        with self.assertRaises(ValueError):
            recorder.transport.write(b"")

    @in_reactor
    async def test_packet_over_the_limit(self):
        """A packet over the limit costs a plain protocol its connection; no part of it is delivered."""
        recorder = Recorder()
        peer = self.connect(recorder, max_packet=1000)
        for packet in (b"a" * 1000, b"b" * 1001, b"c"):
            peer.send(packet)
        await recorder.whenLost()
        assert recorder.packets == [b"a" * 1000]
        recorder.lost[0].trap(error.ConnectionAborted)

    @in_reactor
    async def test_packet_over_the_limit_in_a_batch(self):
        """A protocol that takes batches gets the empty packet in place of a packet over the limit."""
        recorder = BatchRecorder()
        peer = self.connect(recorder, max_packet=1000)
        for packet in (b"a" * 1000, b"b" * 1001, b"c", b"d" * 50_000, b"e"):
            peer.send(packet)
        await recorder.whenCount(5)
        assert recorder.packets == [b"a" * 1000, b"", b"c", b"", b"e"]
        assert not recorder.lost

    @in_reactor
    async def test_packet_over_the_limit_while_paused(self):
        """A packet over the limit that was kept while the protocol was paused is not delivered in part either."""
        recorder = Recorder(lambda packet: packet == b"a" and recorder.transport.pauseProducing())
        peer = self.connect(recorder, max_packet=1000)
        for packet in (b"a", b"b" * 1001, b"c"):
            peer.send(packet)
        await recorder.whenCount(1)
        peer.close()
        await self.turns(5)
        recorder.transport.resumeProducing()
        await recorder.whenLost()
        assert recorder.packets == [b"a"]
        recorder.lost[0].trap(error.ConnectionAborted)

    @in_reactor
    async def test_packet_that_cannot_be_sent(self):
        """A packet that no send buffer takes ends a plain connection, because its peer would miss it in the stream."""
        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.write(b"before")
        recorder.transport.write(bytes(max_sendable(recorder.transport.getHandle()) + 1))
        recorder.transport.write(b"behind")
        await recorder.whenLost()
        recorder.lost[0].trap(error.MessageLengthError)
        assert received(peer) == [b"before", b""]

    @in_reactor
    async def test_packet_that_cannot_be_sent_and_is_not_missed(self):
        """A queue that can drop a packet that no send buffer takes keeps its connection, and its other packets."""

        class Lenient(FifoQueue):
            __slots__ = ("missed",)

            def reject_oversized(self, taken, at):
                self.missed = len(taken[at])
                return True

        recorder = Recorder()
        peer = self.connect(recorder)
        recorder.transport.queue = Lenient()
        length = max_sendable(recorder.transport.getHandle()) + 1
        recorder.transport.writeSequence([b"before", bytes(length), b"behind"])
        assert await self.receive(peer, 2) == [b"before", b"behind"]
        assert recorder.transport.queue.missed == length
        assert not recorder.lost

    @in_reactor
    async def test_reactor_stops(self):
        """When the reactor stops, protocols get connectionLost, as on any other transport in Twisted."""
        recorder = Recorder()
        self.connect(recorder)
        self.reactor.disconnectAll()
        assert len(recorder.lost) == 1
        recorder.lost[0].trap(error.ConnectionLost)


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


class Listening(PacketReactorBuilder):
    """Ports and endpoints."""

    def factory(self) -> Any:
        """A factory of recorders that the test closes; the last one is ``factory.last``."""

        class RecorderFactory(Factory):
            noisy = False
            last: Any = None

            def buildProtocol(self, addr):
                self.last = case.watch(Recorder())
                return self.last

        case = self
        return RecorderFactory()

    @in_reactor
    async def test_there_and_back(self):
        """Packets pass between a client and a server's protocol; factories are started and stopped."""
        path = f"{self.path}/socket"
        servers, clients = self.factory(), self.factory()
        port = await SeqpacketServerEndpoint(self.reactor, path).listen(servers)
        client: Any = await SeqpacketClientEndpoint(self.reactor, path).connect(clients)
        assert client is clients.last
        client.transport.write(b"to the server")
        await self.turns(2)
        server = servers.last
        await server.whenCount(1)
        server.transport.write(b"x" * LIMIT)
        await client.whenCount(1)
        assert (server.packets, client.packets) == ([b"to the server"], [b"x" * LIMIT])
        assert server.transport.credentials.pid == os.getpid()
        assert (servers.numPorts, clients.numPorts) == (1, 1)
        client.transport.loseConnection()
        await client.whenLost()
        await server.whenLost()
        await maybeDeferred(port.stopListening)
        assert (servers.numPorts, clients.numPorts) == (0, 0)
        assert os.listdir(self.path) == []

    @in_reactor
    async def test_many_connect_at_once(self):
        """If as many clients connect at once as the backlog holds, all are accepted, and what they sent is read."""
        path = f"{self.path}/socket"
        accepted = []
        enough: Deferred[None] = Deferred()

        def react(packet):
            accepted.append(packet)
            if len(accepted) == BACKLOG:
                enough.callback(None)

        factory = self.factory()
        factory.buildProtocol = lambda addr: self.watch(Recorder(react))
        port = await SeqpacketServerEndpoint(self.reactor, path).listen(factory)
        peers = []
        for packet in numbered(BACKLOG):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.connect(path)
            peer.send(packet)
            peer.close()
            peers.append(packet)
        await enough
        assert sorted(accepted) == peers
        await maybeDeferred(port.stopListening)

    @in_reactor
    async def test_descriptors_sent_to_a_port(self):
        """Descriptors sent to a listening bus are refused or dropped; either way none stays open."""
        path = f"{self.path}/socket"
        servers = self.factory()
        port = await SeqpacketServerEndpoint(self.reactor, path).listen(servers)
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(path)
        reading, writing = os.pipe()
        try:
            peer.sendmsg([b"take this"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing] * 8))])
        except PermissionError:
            pass  # newer kernels: SO_PASSRIGHTS=0
        os.close(writing)
        peer.send(b"the end")
        while servers.last is None:
            await self.turns()
        await servers.last.when(lambda: b"the end" in servers.last.packets)
        assert os.read(reading, 1) == b""
        os.close(reading)
        peer.close()
        await maybeDeferred(port.stopListening)

    @in_reactor
    async def test_stop_listening(self):
        """A port that has stopped accepts no more connections, and keeps those it has."""
        path = f"{self.path}/socket"
        servers, clients = self.factory(), self.factory()
        port = await SeqpacketServerEndpoint(self.reactor, path).listen(servers)
        client: Any = await SeqpacketClientEndpoint(self.reactor, path).connect(clients)
        client.transport.write(b"one")
        while servers.last is None:
            await self.turns()
        await maybeDeferred(port.stopListening)
        with self.assertRaises(error.ConnectError):
            await SeqpacketClientEndpoint(self.reactor, path).connect(clients)
        client.transport.write(b"two")
        await servers.last.whenCount(2)


for _case in (Edges, Pausing, Ends, Producing, Fairness, Listening):
    for _name, _class in _case.makeTestCaseClasses().items():
        is_quick = _case in (Edges, Listening) or "EPoll" in _name
        globals()[_name] = _class if is_quick else pytest.mark.slow(_class)
del _case, _name, _class
