"""The transport on every reactor: one test body, run on epoll, poll, select and asyncio.

Quick runs have everything on epoll, which twistd uses, and what depends on the reactor on each other one.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Any

from twisted.internet import error
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.protocol import Factory

from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.endpoints import SeqpacketClientEndpoint, SeqpacketServerEndpoint
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.listening import BACKLOG
from sbus.syscalls.sockets import grow_send_buffer
from tests.integration.server.streams import numbered
from tests.support.descriptors import descriptors
from tests.support.reactors import (
    BatchRecorder,
    PacketReactorBuilder,
    Recorder,
    each_reactor,
    in_reactor,
)

LIMIT = DEFAULT_MAX_PACKET


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


globals().update(each_reactor(Edges, Listening, is_quick=True) | each_reactor(Pausing))
