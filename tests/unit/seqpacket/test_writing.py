"""What the transport writes: in which batches, and what becomes of the packets that a socket does not take."""

from __future__ import annotations

import socket

import pytest

from sbus.protocol.bundles import BundleCache, pack, unbundle
from sbus.seqpacket import sending
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.batch import BATCH
from sbus.syscalls.polling import is_readable
from sbus.syscalls.sockets import max_sendable
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received
from tests.support.transports import DISCARD, ERROR, QUEUE, flood_controlled, numbered


def test_what_is_written_in_one_turn_goes_in_one_batch(world, monkeypatch):
    """Packets written one by one are sent together, when the events in hand are dealt with."""
    batches = []

    def send(sock, packets):
        batches.append(len(packets))
        return len(packets)

    monkeypatch.setattr(sending, "send_packets", send)
    recorder = Recorder(lambda packet: recorder.transport.write(packet))
    peer = world.connect(recorder)
    for packet in numbered(50):
        peer.send(packet)
    world.turn()
    assert batches == [50]


def test_send_now(world):
    """The socket takes what it can of packets sent past the queue; a broken connection takes none."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport = recorder.transport
    assert transport.try_send(numbered(3)) == 3
    assert received(peer) == numbered(3)
    packets = [b"%0400d" % i for i in range(2000)]
    sent = 0
    while count := transport.try_send(packets[sent:]):
        sent += count
    assert 0 < sent < 2000
    assert received(peer) == packets[:sent]
    assert transport.try_send([b"x" * (max_sendable(transport.getHandle()) + 1)]) == 0
    peer.shutdown(socket.SHUT_RD)
    assert transport.try_send([b"nobody reads"]) == 0
    assert transport.connected
    transport.abortConnection()
    assert transport.try_send([b"too late"]) == 0


@pytest.mark.parametrize("leave", ["loseConnection", "abortConnection", "peer"])
def test_a_plain_socket(world, leave):
    """A socket is plain while it is open and has no bundles; with these, it takes packets as they are, too."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport = recorder.transport
    assert transport.plain_socket is transport.getHandle()
    transport.start_bundling(1000)
    assert transport.plain_socket is None
    assert transport.open_socket() is transport.getHandle()
    transport.stop_bundling()
    assert transport.plain_socket is transport.getHandle()
    if leave == "peer":
        peer.close()
    else:
        getattr(transport, leave)()
    world.settle()
    assert recorder.lost
    assert transport.plain_socket is transport.open_socket() is None


def test_a_protocol_is_asked_before_bundles_are_read(world):
    """A protocol that pauses then has them left in the socket: to take bundles apart is work."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport, asked = recorder.transport, list[None]()

    def pause() -> None:
        asked.append(None)
        transport.pauseProducing()

    transport.before_read = pause
    peer.send(b"alone")
    world.settle()
    assert recorder.packets == [b"alone"]
    transport.start_bundling(1000)
    (packet,), _ = pack([b"one", b"two"], 1000, BATCH)
    peer.send(packet)
    world.settle()
    assert asked == [None]
    assert has_unread(transport)
    transport.before_read = None
    transport.resumeProducing()
    world.settle()
    assert recorder.packets == [b"alone", b"one", b"two"]


def has_unread(transport: PacketTransport) -> bool:
    """Return whether a packet waits in the socket to be read."""
    return is_readable(transport.getHandle(), 0)


def test_try_send_where_bundles_are_sent(world):
    """A peer that takes bundles also gets them past the queue, but not before the answer to its request is sent."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport = recorder.transport
    transport.start_bundling(1000)
    assert transport.try_send(numbered(2)) == 0
    assert transport.try_send([b"alone"]) == 1
    transport.write(b"answer")
    transport.flush()
    assert received(peer) == [b"alone", b"answer"]
    assert transport.try_send(numbered(2)) == 2
    assert received(peer) == pack(numbered(2), 1000, 1)[0]
    assert transport.try_send([b"alone"]) == 1
    packets = [b"%0400d" % i for i in range(3000)]
    sent = transport.try_send(packets)
    assert 2 < sent < 3000
    assert sent % 2 == 0
    assert unbundle(received(peer)) == [b"alone", *packets[:sent]]
    transport.stop_bundling()
    assert transport.try_send(numbered(2)) == 2
    assert received(peer) == numbered(2)


def test_try_send_to_many_puts_together_once(world, monkeypatch):
    """Packets for many receivers are bundled once for each limit, and all get the same bundle."""
    limits = []

    def counted(packets, limit, most):
        limits.append(limit)
        return pack(packets, limit, most)

    monkeypatch.setattr(sending, "pack", counted)
    packets = numbered(10)
    cache: BundleCache = {}
    for limit in (1000, 1000, 900, 1000, 900):
        recorder = Recorder()
        peer = world.connect(recorder)
        recorder.transport.start_bundling(limit)
        recorder.transport.flush()
        assert recorder.transport.try_send(packets, cache) == 10
        got = received(peer)
        assert len(got) == 1
        assert unbundle(got) == packets
    assert limits == [1000, 900]


def test_bounded_writing(world, monkeypatch):
    """A peer that takes everything does not keep the reactor in one flush: the rest goes in the next turns."""
    monkeypatch.setattr(sending, "send_packets", lambda sock, packets: len(packets))
    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.writeSequence(numbered(9000))
    left = 9000
    while left > 2000:
        world.turn()
        assert 0 < left - len(recorder.transport.queue) <= 2 * 16 * 64
        left = len(recorder.transport.queue)
    world.settle()
    assert len(recorder.transport.queue) == 0


def test_sockets_that_take_packets_again_take_turns(world):
    """Of what waits for a socket that is writable again, one batch is sent before the other sockets have their turn."""
    recorders = [Recorder(), Recorder()]
    peers = [world.connect(recorder) for recorder in recorders]
    for recorder in recorders:
        flood_controlled(recorder.transport, QUEUE)
        recorder.transport.queue.pending += numbered(2_000)
        recorder.transport.flush()
    for peer in peers:
        received(peer)
    for _ in range(2):
        world.turn()
        assert [len(received(peer)) for peer in peers] == [BATCH, BATCH]
    peers[1].close()
    world.settle()
    received(peers[0])
    world.turn()
    assert len(received(peers[0])) > BATCH


def congested(world, transport_class=PacketTransport) -> tuple[Recorder, socket.socket]:
    """Return a protocol whose socket is full, with packets in the queue behind it, and its peer."""
    recorder = Recorder()
    peer = world.connect(recorder, transport_class=transport_class)
    flood_controlled(recorder.transport, QUEUE)
    recorder.transport.queue.pending += numbered(2_000)
    recorder.transport.flush()
    return recorder, peer


def test_a_protocol_decides_when_to_send_on(world):
    """A protocol that is asked and sends nothing has the socket left alone until it sends on."""
    recorder, peer = congested(world, CountingTransport)
    transport, asked = recorder.transport, []

    def refuse(exclusive: bool) -> bool:
        asked.append(exclusive)
        return False

    transport.on_writable = refuse
    first = received(peer)
    world.settle()
    assert asked == [True]
    assert received(peer) == []
    calls = transport.calls
    world.settle()
    assert transport.calls == calls
    transport.send_on(False)
    second = received(peer)
    assert len(second) == BATCH
    world.settle()
    assert asked == [True, True]
    transport.on_writable = lambda exclusive: transport.send_on(exclusive) is None
    transport.send_on(False)
    got = first + second
    while len(transport.queue):
        world.turn()
        got += received(peer)
    assert got + received(peer) == numbered(2_000)


def test_sending_on_raises_nothing(world, monkeypatch):
    """A queue that fails while a protocol has it sent in its own time costs this connection, and not its caller."""
    recorder, _ = congested(world)
    recorder.transport.on_writable = lambda exclusive: False
    monkeypatch.setattr(recorder.transport.queue, "take", lambda count: 1 // 0)
    recorder.transport.send_on(False)
    world.settle()
    assert [reason.type for reason in recorder.lost] == [ZeroDivisionError]


def test_sending_on_after_the_end(world):
    """A protocol that has the queue sent in its own time may do so after the connection has ended."""
    recorder, _ = congested(world)
    recorder.transport.on_writable = lambda exclusive: False
    recorder.transport.abortConnection()
    world.settle()
    recorder.transport.send_on(True)
    assert len(recorder.lost) == 1


def test_full_socket_is_not_polled(world):
    """Nothing is sent while a socket is full; sending goes on by itself when the peer reads."""
    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.writeSequence(numbered(1000))
    world.turn(2)
    left = len(recorder.transport.queue)
    assert 0 < left < 1000
    got = received(peer)
    world.turn()
    assert len(recorder.transport.queue) < left
    for _ in range(20):
        got += received(peer)
        world.turn()
    assert got == numbered(1000)


class CountingTransport(PacketTransport):
    """Counts the calls from the multiplexer."""

    calls = 0

    def ready(self, events: int, exclusive: bool) -> None:
        self.calls += 1
        super().ready(events, exclusive)


def test_idle_when_all_is_sent(world):
    """A connection that was congested and has sent everything causes no more work."""
    recorder = Recorder()
    peer = world.connect(recorder, transport_class=CountingTransport)
    recorder.transport.writeSequence(numbered(1000))
    while len(recorder.transport.queue):
        world.turn()
        received(peer)
    world.settle()
    calls = recorder.transport.calls
    world.settle()
    assert recorder.transport.calls == calls


def test_idle_when_nothing_can_be_sent(world):
    """A congested connection whose peer reads no more, though it can still send, causes no more work."""
    recorder = HalfRecorder()
    peer = world.connect(recorder, transport_class=CountingTransport)
    recorder.transport.writeSequence(numbered(1000))
    world.settle()
    peer.shutdown(socket.SHUT_RD)
    received(peer)  # what the kernel still holds; before that the socket is just full
    world.settle()
    assert recorder.halves == ["write"]
    calls = recorder.transport.calls
    world.settle()
    assert recorder.transport.calls == calls
    peer.send(b"still heard")
    world.settle()
    assert recorder.packets == [b"still heard"]


def test_aborting_counts_what_waits(world):
    """The packets left in a queue with flood control are counted as dropped when the connection is aborted."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, QUEUE)
    queue.pending += numbered(1000)
    recorder.transport.flush()
    recorder.transport.abortConnection()
    world.settle()
    assert receiver.lost + len(received(peer)) == 1001


def test_closing_with_a_queue_that_drops(world):
    """A connection that is to be closed closes, also if flood control drops what the last flush left."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, DISCARD)
    queue.pending += numbered(1000)
    recorder.transport.loseConnection()
    world.settle()
    assert len(recorder.lost) == 1
    assert len(received(peer)) + receiver.lost == 1001


@pytest.mark.parametrize(("size", "together"), [(600, 1), (400, 2)])
def test_many_bundles_are_no_congestion(world, size, together):
    """A receiver whose socket has room loses nothing to flood control, however many bundles are needed."""
    for soft in (QUEUE, DISCARD, ERROR):
        recorder = Recorder()
        peer = world.connect(recorder)
        queue, receiver = flood_controlled(recorder.transport, soft)
        recorder.transport.start_bundling(1000)
        recorder.transport.flush()
        packets = [bytes([i]) * size for i in range(20 * together)]
        queue.pending += packets
        recorder.transport.flush()
        got = received(peer)
        assert unbundle(list(got)) == packets
        assert len(got) == 20
        assert (receiver.lost, receiver.reasons, queue.is_congested) == (0, [], False)


def test_bundles_of_many_messages_are_not_all_taken_apart(world):
    """Of a read, as many bundles are taken apart as hold some thousands of messages, in their order."""
    recorder = BatchRecorder()
    peer = world.connect(recorder)
    recorder.transport.ensure_max_packet(100_000)
    recorder.transport.start_bundling(1 << 20)
    packets = [b"%06d" % i for i in range(20_000)]
    bundles, counts = pack(packets, 48_000, BATCH)
    for bundle in bundles:
        peer.send(bundle)
    world.settle()
    assert counts[0] > 4_096
    assert len(recorder.packets) == counts[0] + len(bundles) - 1
    assert unbundle(recorder.packets) == packets


def test_large_bundles_behind_the_end_of_bundles_stay(world):
    """What follows a ``bundle/off`` is not taken apart, however it is read."""
    recorder = BatchRecorder()
    peer = world.connect(recorder)
    recorder.transport.ensure_max_packet(100_000)
    recorder.transport.start_bundling(1 << 20)
    first, second = (pack(packets, 100_000, 1)[0] for packets in ([b"CMSG bundle/off", b"x"], [bytes(90_000), b"y"]))
    for bundle in (*first, *second, *second):
        peer.send(bundle)
    world.settle()
    assert recorder.packets == [b"CMSG bundle/off", b"x", *second, *second]


def test_full_socket_where_bundles_are_sent(world):
    """Flood control gets what a full socket leaves of many bundles: nothing is lost, doubled or out of order."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, QUEUE)
    recorder.transport.start_bundling(1000)
    recorder.transport.flush()
    queue.pending += [b"%0400d" % i for i in range(3000)]
    recorder.transport.flush()
    assert queue.is_congested
    got = []
    for _ in range(50):
        got += unbundle(received(peer))
        world.turn()
    assert got == [b"%0400d" % i for i in range(3000)]
    assert receiver.lost == 0
