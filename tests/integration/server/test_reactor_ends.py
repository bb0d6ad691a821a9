"""Ends of connections, on every reactor; quick runs use only epoll."""

from __future__ import annotations

import socket

from twisted.internet import error

from sbus.flood.fifo import FifoQueue
from sbus.syscalls.sockets import max_sendable
from tests.integration.server.streams import numbered
from tests.support.reactors import (
    BatchRecorder,
    HalfRecorder,
    PacketReactorBuilder,
    Recorder,
    each_reactor,
    in_reactor,
    received,
)


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


globals().update(each_reactor(Ends))
