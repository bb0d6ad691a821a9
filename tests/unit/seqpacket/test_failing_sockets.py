"""Sockets that fail: kernel errors, packets that are too long, and peers that leave in between."""

from __future__ import annotations

import errno
import socket
from unittest import mock

import pytest
from twisted.internet import error

from sbus.flood import Run
from sbus.flood.backlogs import ORDERS, PriorityBacklog
from sbus.protocol.bundles import MAX_BUNDLE, unbundle
from sbus.seqpacket import sending
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.batch import send_packets
from sbus.syscalls.sockets import max_sendable
from tests.support.reactors import HalfRecorder, Recorder, received
from tests.support.transports import DISCARD, ERROR, QUEUE, flood_controlled, numbered

RANDOM = ORDERS[2]

# --- reading --------------------------------------------------------------------------------------


def test_failed_read(world, monkeypatch):
    """A failed read ends the connection with ConnectionLost, which names the error."""
    recorder = Recorder()
    peer = world.connect(recorder)

    class BrokenReader:
        def read(self, sock, most=64):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(recorder.transport, "_reader", BrokenReader())
    peer.send(b"one")
    world.settle()
    recorder.lost[0].trap(error.ConnectionLost)
    assert "EIO" in str(recorder.lost[0].value)


def test_failed_read_of_a_vanished_peer(world, monkeypatch):
    """A failed read ends the connection with its error, also if the peer has vanished while it was paused."""
    recorder = Recorder()
    peer = world.connect(recorder)

    class BrokenReader:
        def read(self, sock, most=64):
            raise OSError(errno.EIO, "Input/output error")

    recorder.transport.pauseProducing()
    monkeypatch.setattr(recorder.transport, "_reader", BrokenReader())
    peer.close()
    world.settle()
    assert not recorder.lost
    recorder.transport.resumeProducing()
    world.settle()
    recorder.lost[0].trap(error.ConnectionLost)
    assert "EIO" in str(recorder.lost[0].value)


# --- writing --------------------------------------------------------------------------------------


def test_packet_too_long_for_the_socket_is_no_fault_of_the_receivers(world):
    """A packet that the socket can never take is dropped and counted; other packets and flood control go on."""
    for soft in (QUEUE, DISCARD, ERROR):
        for place in (0, 2, 5):
            recorder = Recorder()
            peer = world.connect(recorder)
            queue, receiver = flood_controlled(recorder.transport, soft)
            packets = numbered(5)
            queue.pending += [
                *packets[:place],
                bytes(max_sendable(recorder.transport.getHandle()) + 1),
                *packets[place:],
            ]
            recorder.transport.flush()
            assert received(peer) == packets
            assert receiver.lost == 1
            assert receiver.reasons == []
            assert not queue.is_congested


def test_several_packets_too_long_for_the_socket(world):
    """All packets of a batch arrive except those that the socket can never take."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, ERROR)
    long = bytes(max_sendable(recorder.transport.getHandle()) + 1)
    queue.pending += [long, b"a", long, long, b"b", long]
    recorder.transport.flush()
    assert received(peer) == [b"a", b"b"]
    assert receiver.lost == 4
    assert receiver.reasons == []


def test_packet_too_long_for_a_congested_socket(world):
    """A packet that the socket can never take does not block its queue."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, QUEUE)
    queue.pending += numbered(500)
    recorder.transport.flush()
    assert queue.is_congested
    queue.admit(Run([bytes(max_sendable(recorder.transport.getHandle()) + 1), b"last"]), may_block=False)
    got = []
    for _ in range(20):
        got += received(peer)
        world.turn()
    assert got == [*numbered(500), b"last"]
    assert receiver.lost == 1


def test_peer_that_left_is_not_taken_for_slow(world):
    """Flood control does not take a peer that has left for a full socket; its losses are counted."""
    recorder = HalfRecorder()
    peer = world.connect(recorder)
    recorder.transport.pauseProducing()
    queue, receiver = flood_controlled(recorder.transport, ERROR)
    peer.send(b"before it left")
    peer.close()
    queue.pending += numbered(100)
    recorder.transport.flush()
    assert receiver.reasons == []
    assert receiver.lost == 100
    recorder.transport.resumeProducing()
    world.settle()
    assert recorder.packets == [b"before it left"]


def test_nothing_is_put_into_order_for_a_peer_that_left(world):
    """What waits for a peer that has left is lost at once: to take it from the queue first could mean to sort it."""
    recorder = HalfRecorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, QUEUE)
    queue.configure(queue.settings.with_order(RANDOM))
    queue.pending += numbered(5_000)
    recorder.transport.flush()
    sent = 5_000 - len(queue)
    assert queue.is_congested
    peer.send(b"before it left")
    with mock.patch.object(PriorityBacklog, "rank", side_effect=AssertionError("sorted")):
        peer.close()
        world.settle()
    assert receiver.lost == 5_000 - sent
    assert recorder.packets == [b"before it left"]
    assert len(recorder.lost) == 1


def test_peer_that_leaves_in_the_middle_of_a_batch(world, monkeypatch):
    """The same if the peer leaves between two packets of a batch, and the kernel reports only how many were sent."""
    recorder = Recorder()
    real = send_packets

    def send(sock, packets):
        if len(packets) > 1:
            count = real(sock, packets[:3])
            peer.close()
            return count
        return real(sock, packets)

    monkeypatch.setattr(sending, "send_packets", send)
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, ERROR)
    queue.pending += numbered(100)
    recorder.transport.flush()
    assert receiver.reasons == []
    assert receiver.lost == 100
    world.settle()
    assert len(recorder.lost) == 1


def test_peer_that_leaves_between_two_bundles(world, monkeypatch):
    """Packets taken from the queue are lost without blaming flood control, even if some bundles were sent before."""
    recorder = Recorder()
    real = send_packets

    def send(sock, packets):
        count = real(sock, packets)
        peer.close()
        return count

    monkeypatch.setattr(sending, "send_packets", send)
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, ERROR)
    recorder.transport.start_bundling(1000)
    recorder.transport.flush()
    queue.pending += [bytes(600)] * 20
    recorder.transport.flush()
    assert (receiver.lost, receiver.reasons) == (20, [])
    world.settle()
    assert len(recorder.lost) == 1


@pytest.mark.parametrize("first", [[], [bytes(7000)]])
def test_send_buffer_made_smaller_than_a_bundle(world, first):
    """If a bundle is too long for the socket, shorter ones are sent; only a packet too long by itself is refused."""
    for has_flood_control in (True, False):
        recorder = Recorder()
        peer = world.connect(recorder)
        transport = recorder.transport
        if has_flood_control:
            queue, receiver = flood_controlled(transport, QUEUE)
        transport.start_bundling(MAX_BUNDLE)
        transport.flush()
        transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4000)
        packets = first + [b"%0500d" % i for i in range(200)]
        if has_flood_control:
            too_long = bytes(max_sendable(transport.getHandle()) + 1)
            queue.pending += [*packets[:100], too_long, *packets[100:]]
            transport.flush()
        else:
            transport.writeSequence(packets)
        got = []
        for _ in range(100):
            world.turn()
            got += received(peer)
        assert unbundle(list(got)) == packets
        assert len(got) < len(packets) / 5
        assert not recorder.lost
        if has_flood_control:
            assert (len(queue), receiver.lost, receiver.reasons) == (0, 1, [])


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_kernel_without_memory(world, monkeypatch, number):
    """If the kernel has no memory for packets, the transport tries again a little later, and no sooner."""
    attempts = []
    out_of_memory = True

    def send(sock, packets):
        attempts.append(len(packets))
        if out_of_memory:
            raise OSError(number, "no memory")
        return real(sock, packets)

    real = send_packets
    monkeypatch.setattr(sending, "send_packets", send)
    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.writeSequence(numbered(3))
    world.turn(10)
    assert attempts == [3]
    world.reactor.advance(0.1)
    world.turn(10)
    assert attempts == [3, 3]
    out_of_memory = False
    world.reactor.advance(0.1)
    world.settle()
    assert received(peer) == numbered(3)
    assert not recorder.lost


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_kernel_without_memory_to_read(world, number):
    """If the kernel has no memory to read with, nothing is lost: the transport reads a little later."""

    class Reader:
        max_packet = 1000
        attempts = 0

        def read(self, sock, most=64):
            Reader.attempts += 1
            raise OSError(number, "no memory")

    recorder = Recorder()
    peer = world.connect(recorder)
    real, recorder.transport._reader = recorder.transport._reader, Reader()
    for packet in numbered(3):
        peer.send(packet)
    world.turn(10)
    assert (Reader.attempts, recorder.lost) == (1, [])
    recorder.transport._reader = real
    world.reactor.advance(0.1)
    world.settle()
    assert recorder.packets == numbered(3)
    assert not recorder.lost
    recorder.transport._reader = Reader()
    peer.send(b"more")
    world.settle()
    recorder.transport.abortConnection()
    world.settle()
    assert world.reactor.getDelayedCalls() == []


def test_a_hang_up_while_the_kernel_has_no_memory(world):
    """A peer that is gone is not looked at again before there may be memory; then what it has sent is read."""

    class Reader:
        max_packet = 1000

        def read(self, sock, most=64):
            raise OSError(errno.ENOMEM, "no memory")

    class Counting(PacketTransport):
        looks = 0

        def ready(self, events, exclusive):
            Counting.looks += 1
            super().ready(events, exclusive)

    recorder = Recorder()
    peer = world.connect(recorder, transport_class=Counting)
    real, recorder.transport._reader = recorder.transport._reader, Reader()
    for packet in numbered(3):
        peer.send(packet)
    peer.close()
    world.turn(10)
    assert (Counting.looks, recorder.lost) == (1, [])
    recorder.transport._reader = real
    world.reactor.advance(0.1)
    world.settle()
    assert recorder.packets == numbered(3)
    assert recorder.lost


def test_unforeseen_send_error(world, monkeypatch):
    """An error of a send that no rule covers closes the connection with that error as the reason."""

    def send(sock, packets):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(sending, "send_packets", send)
    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.write(b"one")
    world.settle()
    assert [str(reason.value) for reason in recorder.lost] == ["[Errno 5] broken"]


def test_close_that_fails(world):
    """A close that fails is logged, and the protocol learns that its connection is lost."""

    class Socket:
        def __init__(self, sock):
            self._sock = sock

        def __getattr__(self, name):
            return getattr(self._sock, name)

        def close(self):
            self._sock.close()
            raise OSError(errno.EIO, "broken")

    recorder = Recorder()
    world.connect(recorder)
    recorder.transport._sock = Socket(recorder.transport._sock)
    recorder.transport.loseConnection()
    world.settle()
    assert len(recorder.lost) == 1


def test_closed_while_the_kernel_has_no_memory(world, monkeypatch):
    """A connection that closes while it waits for the kernel's memory leaves no timer behind."""

    def send(sock, packets):
        raise OSError(errno.ENOBUFS, "no memory")

    monkeypatch.setattr(sending, "send_packets", send)
    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.write(b"one")
    world.turn()
    assert len(world.reactor.getDelayedCalls()) == 1
    recorder.transport.abortConnection()
    world.settle()
    assert recorder.lost
    assert world.reactor.getDelayedCalls() == []
