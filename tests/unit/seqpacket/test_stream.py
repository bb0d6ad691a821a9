"""The stream transport: frames that the socket takes in part, and the end of a connection in the middle of one."""

from __future__ import annotations

import select
import socket

import pytest
from twisted.internet import error
from zope.interface.verify import verifyObject

from sbus.interfaces import IPacketTransport
from sbus.seqpacket.framing import frame
from sbus.seqpacket.interfaces import Outlet
from sbus.seqpacket.states import ReadSide
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received
from tests.support.transports import numbered

LONG = bytes(range(256)) * 2400
"""A packet of 614,400 bytes, more than the kernel takes at once."""


def test_a_frame_that_leaves_in_parts(world):
    """A frame that the socket takes in part is completed as the peer reads, and the next ones follow it in order."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    verifyObject(IPacketTransport, recorder.transport)
    assert recorder.transport.open_socket() is None
    recorder.transport.writeSequence([b"first", LONG, b"last"])
    world.turn()
    assert recorder.transport.unread_bytes() > len(LONG) // 2
    got = []
    for _ in range(50):
        got += received(peer)
        world.turn()
    assert got == [b"first", LONG, b"last"]
    assert recorder.transport.unread_bytes() == 0
    assert not recorder.lost


def test_the_middle_of_a_frame_can_wait(world):
    """In the middle of a frame the protocol can pause the transport before the next read, and not only after it."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    asked = []
    whole = frame([b"one packet"])

    def pause() -> None:
        asked.append(recorder.transport.read_side)
        recorder.transport.pauseProducing()

    peer.raw.send(whole[:6])
    world.turn()
    assert recorder.transport.partial_bytes() == 6
    recorder.transport.before_read = pause
    peer.raw.send(whole[6:])
    world.turn()
    assert asked == [ReadSide.OPEN]
    assert recorder.packets == []
    recorder.transport.before_read = None
    recorder.transport.resumeProducing()
    world.turn()
    assert recorder.packets == [b"one packet"]


def test_past_the_queue(world):
    """Packets that are sent past the queue count as sent once they have begun to leave, and their rest follows."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    transport = recorder.transport
    assert transport.try_send([LONG, b"second"]) == 1
    assert transport.try_send([b"third"]) == 0
    got = []
    for _ in range(50):
        got += received(peer)
        world.turn()
    assert got == [LONG]
    assert transport.try_send([b"fourth"]) == 1
    assert received(peer) == [b"fourth"]


def test_nothing_is_waited_for_where_nothing_can_be_sent(world):
    """A peer that left in the middle of a frame makes no transport wait until it can send on."""
    recorder = HalfRecorder()
    peer = world.connect_stream(recorder)
    transport = recorder.transport
    assert transport.plain_socket is None
    assert transport.try_send([LONG]) == 1
    peer.raw.shutdown(socket.SHUT_RD)
    transport.write(b"second")
    world.settle()
    events = transport._events
    assert not events & select.EPOLLOUT
    assert transport.try_send([b"third"]) == 0
    assert transport._events == events


def test_a_close_waits_for_the_rest_of_a_frame(world):
    """A connection that closes sends the frame that has begun first; then the peer reads end of file."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.write(LONG)
    recorder.transport.loseConnection()
    got = []
    for _ in range(50):
        world.turn()
        got += received(peer)
        if got[-1:] == [b""]:
            break
    assert got == [LONG, b""]
    assert recorder.lost[0].check(error.ConnectionDone)


def test_half_a_close_waits_too(world):
    """Shutting down for writing sends the frame that has begun first, and reading goes on."""
    recorder = HalfRecorder()
    peer = world.connect_stream(recorder)
    recorder.transport.write(LONG)
    recorder.transport.loseWriteConnection()
    got = []
    for _ in range(50):
        world.turn()
        got += received(peer)
        if got[-1:] == [b""]:
            break
    assert got == [LONG, b""]
    peer.send(b"still here")
    world.turn()
    assert recorder.packets == [b"still here"]


def test_the_peer_leaves_in_the_middle_of_a_frame(world):
    """A peer that left is noticed where only the rest of a frame is to be sent."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.write(LONG)
    world.turn()
    peer.close()
    world.turn(3)
    assert len(recorder.lost) == 1


def test_a_graceful_close_sends_its_last_packets_in_frames(world):
    """The last packets of a graceful close have their lengths in front, and follow what the kernel holds."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.write(b"before")
    world.turn()
    recorder.transport.close_gracefully(lambda: [b"receipt", b"bye"], 1.0, 1 << 20)
    world.turn(3)
    assert received(peer) == [b"before", b"receipt", b"bye", b""]
    assert len(recorder.lost) == 1


def test_a_graceful_close_in_the_middle_of_a_frame(world):
    """The frame that has begun is completed first, as the peer reads; only then the last packets can be told apart."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.try_send([LONG * 4])
    recorder.transport.close_gracefully(lambda: [b"bye"], 1.0, 1 << 20)
    got = []
    for _ in range(50):
        world.turn()
        got += received(peer)
        if got[-1:] == [b""]:
            break
    assert got == [LONG * 4, b"bye", b""]


def test_a_graceful_close_of_a_peer_that_reads_nothing(world):
    """If the frame that has begun cannot be completed in time, there are no last packets."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.try_send([LONG * 4])
    recorder.transport.close_gracefully(lambda: [b"bye"], 1.0, 1 << 20)
    world.turn(3)
    assert not recorder.lost
    world.reactor.advance(1.1)
    world.turn(3)
    assert len(recorder.lost) == 1
    assert received(peer) == [b""]  # nothing whole


@pytest.mark.parametrize("part", [b"\x05", frame([b"12345"])[:-1]])
def test_an_end_inside_a_frame_breaks_the_connection(world, part):
    """The end of the stream inside a frame is a broken connection, not a peer that has finished."""
    recorder = HalfRecorder()
    peer = world.connect_stream(recorder)
    peer.raw.send(frame([b"whole"]) + part)
    peer.shutdown(socket.SHUT_WR)
    world.turn(3)
    assert recorder.packets == [b"whole"]
    assert recorder.halves == []
    assert recorder.lost[0].check(error.ConnectionLost)


def test_an_end_inside_a_frame_while_paused(world):
    """The same, of a peer that left while the protocol had paused: the whole packets come first."""
    recorder = Recorder()
    peer = world.connect_stream(recorder)
    recorder.transport.pauseProducing()
    peer.raw.send(frame(numbered(3)) + b"\x05")
    peer.close()
    world.turn(3)
    assert recorder.packets == []
    recorder.transport.resumeProducing()
    world.turn(3)
    assert recorder.packets == numbered(3)
    assert len(recorder.lost) == 1


def test_a_bad_length_ends_the_connection(world):
    """A length above the limit is delivered as the empty packet, behind the packets before it, and ends the stream."""
    recorder = BatchRecorder()
    peer = world.connect_stream(recorder, max_packet=10)
    peer.raw.send(frame([b"good", b"much too long", b"never"]))
    world.turn(3)
    assert recorder.packets == [b"good", b""]
    assert len(recorder.lost) == 1


def test_a_longer_limit(world):
    """A limit that is raised holds from the next frame on; it is never lowered."""
    recorder = BatchRecorder()
    peer = world.connect_stream(recorder, max_packet=10)
    recorder.transport.ensure_max_packet(20)
    recorder.transport.ensure_max_packet(5)
    peer.send(b"fifteen bytes..")
    world.turn()
    assert recorder.packets == [b"fifteen bytes.."]


def test_bundles(world):
    """Bundles travel as any packet does, once both ends have agreed on them."""
    recorder = BatchRecorder()
    peer = world.connect_stream(recorder, max_packet=100_000)
    transport = recorder.transport
    assert transport.start_bundling(1 << 20) > 100_000
    transport.flush()
    transport.writeSequence(numbered(500))
    world.turn()
    bundles = received(peer)
    assert len(bundles) < 10
    for bundle in bundles:
        peer.send(bundle)
    world.turn()
    assert recorder.packets == numbered(500)


def test_large_packets_in_frames_are_handled(world):
    """Nothing is sent on unseen, even where an outlet is offered: that takes a socket that keeps packets apart."""
    recorder = BatchRecorder()
    peer = world.connect_stream(recorder, max_packet=100_000)
    recorder.transport.start_bundling(1 << 16)
    out, away = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with out, away:
        recorder.transport.find_outlet = lambda head: Outlet(out, lambda count, size: None)
        packets = [b"MSG k\0" + bytes([at]) * 20_000 for at in range(4)]
        for packet in packets:
            peer.send(packet)
            world.turn()
    assert recorder.packets == packets
