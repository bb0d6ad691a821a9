"""The transport in every order of events: real sockets, a reactor that the test turns."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import error
from twisted.internet.interfaces import IConsumer, IPushProducer, ITransport
from zope.interface.verify import verifyObject

from sbus.flood import SOFT_STRATEGIES, Run
from sbus.flood.backlogs import ORDERS, PriorityBacklog
from sbus.flood.fifo import HIGH_WATER, FifoQueue
from sbus.interfaces import IPacketQueue, IPacketTransport
from sbus.protocol.bundles import MAX_BUNDLE, BundleCache, pack, unbundle
from sbus.seqpacket import sending
from sbus.seqpacket.interfaces import Outlet
from sbus.seqpacket.multiplexer import READ
from sbus.seqpacket.pacing import LARGE_PER_PASS
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.batch import BATCH, PacketReader, send_packets
from sbus.syscalls.polling import is_readable
from sbus.syscalls.sockets import grow_send_buffer, max_sendable
from tests.support.examples import examples
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received, socket_pair
from tests.support.transports import World, flood_controlled, numbered

QUEUE, DISCARD, _, ERROR, _ = SOFT_STRATEGIES
RANDOM = ORDERS[2]


def test_a_farewell_survives_a_flush(world):
    """What asks for the last packets may flush, as it does for a receiver that is late: they are sent all the same."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport = recorder.transport

    def farewell() -> list[bytes]:
        transport.flush()
        return [b"bye"]

    transport.close_gracefully(farewell, 0.0, 1 << 20)
    world.settle()
    assert received(peer) == [b"bye", b""]
    assert recorder.lost


# --- any order of events ------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 100)),
        st.tuples(st.just("read"), st.integers(1, 100)),
        st.tuples(st.just("write"), st.integers(1, 200)),
        st.tuples(st.just("take"), st.integers(1, 50)),
        st.tuples(st.sampled_from(["pause", "resume", "turn", "flush"]), st.just(1)),
    ),
    max_size=40,
)


def play(script: list[tuple[str, int]], recorder: Recorder, leave: bool, stream: bool = False) -> None:
    """Play a script on a connection, then let it settle: nothing is lost, doubled or out of order."""
    world = World()
    peer: Any = world.connect_stream(recorder) if stream else world.connect(recorder)
    transport = recorder.transport
    sent: list[bytes] = []
    written: list[bytes] = []
    read: list[bytes] = []
    for step, count in script:
        if step == "send":
            for packet in numbered(count, len(sent)):
                try:
                    peer.send(packet)
                except BlockingIOError:
                    break
                sent.append(packet)
        elif step == "read":
            for _ in range(count):
                try:
                    read.append(peer.recv(2000))
                except BlockingIOError:
                    break
        elif step == "write":
            packets = numbered(count, len(written))
            transport.writeSequence(packets)
            written += packets
        elif step == "take" and isinstance(recorder, BatchRecorder):
            recorder.room = (recorder.room or 0) + count
            transport.resumeProducing()
        elif step == "take":
            limit = len(recorder.packets) + count
            recorder.react = lambda _, limit=limit: len(recorder.packets) == limit and transport.pauseProducing()
            transport.resumeProducing()
        elif step == "pause":
            transport.pauseProducing()
        elif step == "resume":
            transport.resumeProducing()
        elif step == "turn":
            world.turn()
        else:
            transport.flush()
        assert recorder.packets == sent[: len(recorder.packets)]
        assert read == written[: len(read)]
    if leave:
        # Closing with unread packets resets the connection; so read first.
        read += received(peer)
        peer.close()
        world.turn(2)
    recorder.react = None
    if isinstance(recorder, BatchRecorder):
        recorder.room = None
    for _ in range(200):
        transport.resumeProducing()
        world.turn()
        if not leave:
            read += received(peer)
    assert recorder.packets == sent
    if leave:
        assert read == written[: len(read)]
        assert len(recorder.lost) == 1
    else:
        assert read == written
        assert not recorder.lost
    world.close()
    assert len(recorder.lost) == 1


@settings(max_examples=examples(60), deadline=None)
@given(steps, st.sampled_from([Recorder, BatchRecorder]), st.booleans(), st.booleans())
def test_any_order_of_events(script, kind, leave, stream):
    """However reading, writing, pausing and leaving interleave, each packet arrives once and in order.

    That holds on a packet socket and on a stream.
    """
    play(script, kind(), leave, stream)


def test_taken_in_two_turns_after_the_peer_left():
    """One order of events that needs every part: a batch taken in pieces, and the peer gone in between."""
    script = [("take", 5), ("send", 70), ("turn", 1), ("write", 3), ("take", 10), ("turn", 1)]
    play(script, BatchRecorder(), True)
    play(script, Recorder(), True)


# --- reading ------------------------------------------------------------------------------------


def test_reads_more_in_a_turn_when_alone(world, now):
    """A socket that alone is ready is read for several batches in a turn, up to a bound."""

    class Slow(BatchRecorder):
        def packetsReceived(self, packets):
            now[0] += 0.0001
            return super().packetsReceived(packets)

    recorder = Slow()
    peer = world.connect(recorder)
    grow_send_buffer(peer, 409_600)
    for packet in numbered(700):
        peer.send(packet)
    world.turn()
    assert recorder.batches == [64] * 8
    world.turn()
    assert recorder.packets == numbered(700)


def test_reads_one_where_the_last_came_alone(world, monkeypatch):
    """After a packet that came alone the transport asks for one, and for batches again once more have come."""
    recorder = BatchRecorder()
    peer = world.connect(recorder)
    asked = []

    class Reader:
        def read(self, sock, most):
            asked.append(most)
            return reader.read(sock, most)

    reader = recorder.transport._reader
    monkeypatch.setattr(recorder.transport, "_reader", Reader())
    for count in (1, 1, 5, 5):
        for packet in numbered(count):
            peer.send(packet)
        world.turn()
    assert recorder.batches == [1, 1, 1, 4, 5]
    assert asked[:4] == [64, 1, 1, 64]
    assert min(asked[4:]) > 1


def test_contended_sockets_take_turns(world):
    """If several sockets are ready, none is read for a second batch before each was read for one."""
    order = []

    class Ordered(BatchRecorder):
        def packetsReceived(self, packets):
            order.append((recorders.index(self), len(packets)))
            return super().packetsReceived(packets)

    recorders = [Ordered() for _ in range(3)]
    for recorder in recorders:
        peer = world.connect(recorder)
        for packet in numbered(200):
            peer.send(packet)
    world.turn()
    assert [sorted(order[at : at + 3]) for at in range(0, 9, 3)] == [[(n, 64) for n in range(3)]] * 3
    assert sorted(order[9:]) == [(n, 8) for n in range(3)]


def test_read_limit(world):
    """A protocol limits how much is read of it under contention, and shortly after."""
    recorders = [BatchRecorder() for _ in range(2)]
    peers = [world.connect(recorder) for recorder in recorders]
    busy = recorders[0]
    busy.transport.read_limit = 10
    for peer in peers:
        for packet in numbered(40):
            peer.send(packet)
    world.turn()
    assert busy.batches == [10] * 4
    assert recorders[1].batches == [40]
    for packet in numbered(40):
        peers[0].send(packet)
    world.turn()
    assert max(busy.batches) == 10
    for _ in range(64):
        peers[0].send(b"alone")
        world.turn()
    for packet in numbered(2) * 30:
        peers[0].send(packet)
    world.turn(3)
    assert max(busy.batches) > 50


def test_large_packets_come_in_small_batches(world):
    """The buffers of a batch stay within bounds, however long a packet may be."""
    recorder = BatchRecorder()
    peer = world.connect(recorder, max_packet=16 << 20)
    for packet in numbered(10):
        peer.send(packet)
    world.turn()
    assert recorder.batches == [2] * 5


def test_lose_connection_over_a_kept_packet(world):
    """A protocol that closes while it is given packets kept for it is given nothing more."""

    class Closing(BatchRecorder):
        def packetsReceived(self, packets):
            if self.packets:
                self.transport.loseConnection()
                self.packets += packets
                return len(packets)
            return super().packetsReceived(packets)

    recorder = Closing()
    recorder.room = 2
    peer = world.connect(recorder)
    for packet in numbered(5):
        peer.send(packet)
    world.settle()
    recorder.transport.writeSequence([b"x" * 900] * 1000)
    recorder.transport.resumeProducing()
    for packet in numbered(5, 5):
        peer.send(packet)
    world.settle()
    assert recorder.packets == numbered(5)
    assert not recorder.lost, "what was written is not sent yet"


def test_resume_after_end_of_file(world):
    """Pausing and resuming a half-closed connection neither reports its end of file again nor closes it."""
    recorder = HalfRecorder()
    peer = world.connect(recorder)
    peer.shutdown(socket.SHUT_WR)
    world.settle()
    recorder.transport.pauseProducing()
    recorder.transport.resumeProducing()
    world.settle()
    assert recorder.halves == ["read"]
    recorder.transport.write(b"still open")
    world.settle()
    assert received(peer) == [b"still open"]


def test_pause_and_resume_at_the_end_of_file(world):
    """A protocol that pauses and resumes over the last packet before end of file gets one readConnectionLost."""

    def react(packet):
        recorder.transport.pauseProducing()
        recorder.transport.resumeProducing()

    recorder = HalfRecorder(react)
    peer = world.connect(recorder)
    peer.send(b"last")
    peer.shutdown(socket.SHUT_WR)
    world.settle()
    assert recorder.halves == ["read"]
    assert not recorder.lost


def test_pause_over_the_last_packet(world):
    """End of file found by the same read as the last packet waits, too, while the protocol is paused."""
    recorder = HalfRecorder(lambda packet: recorder.transport.pauseProducing())
    peer = world.connect(recorder)
    peer.send(b"last")
    peer.shutdown(socket.SHUT_WR)
    world.settle()
    assert (recorder.packets, recorder.halves) == ([b"last"], [])
    recorder.transport.resumeProducing()
    world.settle()
    assert recorder.halves == ["read"]


def test_abort_over_the_last_packet(world):
    """A protocol that aborts over the last packet before end of file gets connectionLost only."""
    recorder = HalfRecorder(lambda packet: recorder.transport.abortConnection())
    peer = world.connect(recorder)
    peer.send(b"last")
    peer.shutdown(socket.SHUT_WR)
    world.settle()
    assert recorder.halves == []
    assert len(recorder.lost) == 1


def test_resume_of_a_closed_connection(world):
    """Resuming a connection that is closing or lost does nothing."""
    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.pauseProducing()
    peer.send(b"one")
    world.settle()
    recorder.transport.loseConnection()
    recorder.transport.resumeProducing()
    world.settle()
    recorder.transport.resumeProducing()
    world.settle()
    assert recorder.packets == []
    assert len(recorder.lost) == 1


def test_pause_again_at_once(world):
    """A protocol that resumes and pauses again at once is given nothing."""
    recorder = Recorder(lambda packet: recorder.transport.pauseProducing())
    peer = world.connect(recorder)
    for packet in numbered(5):
        peer.send(packet)
    world.settle()
    recorder.transport.resumeProducing()
    recorder.transport.pauseProducing()
    world.settle()
    assert recorder.packets == numbered(1)

    batches = BatchRecorder()
    peer = world.connect(batches)
    batches.transport.pauseProducing()
    batches.transport.resumeProducing()
    batches.transport.pauseProducing()
    peer.send(b"one")
    world.settle()
    assert batches.batches == []


def test_abort_between_batches(world):
    """A protocol that aborts over a batch is given no other batch, though more was sent."""

    class Aborting(BatchRecorder):
        def packetsReceived(self, packets):
            self.transport.abortConnection()
            return super().packetsReceived(packets)

    recorder = Aborting()
    peer = world.connect(recorder)
    for packet in numbered(200):
        peer.send(packet)
    world.settle()
    assert recorder.batches == [64]
    assert len(recorder.lost) == 1


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


# --- a peer that has hung up --------------------------------------------------------------------


class Stopping(BatchRecorder):
    """A protocol that takes one packet of each batch, and pauses."""

    def packetsReceived(self, packets: list[bytes]) -> int:
        self.transport.pauseProducing()
        self.packets.append(packets[0])
        return 1


def test_what_a_peer_sent_before_it_closed_is_read_at_once(world):
    """All that the peer sent is delivered in the turn in which the server learns that it has gone."""
    recorder = BatchRecorder()
    peer = world.connect(recorder)
    for packet in numbered(200):
        peer.send(packet)
    assert not recorder.transport.has_hung_up
    peer.close()
    world.reactor.turn()
    assert recorder.transport.has_hung_up
    assert recorder.packets == numbered(200)


def test_packets_of_a_peer_that_has_gone_stay_in_the_kernel(world):
    """While the protocol is paused, nothing is read of a peer that has hung up, and its socket costs no look."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport = recorder.transport
    transport.pauseProducing()
    for packet in numbered(100):
        peer.send(packet)
    peer.close()
    world.settle()
    assert transport.has_hung_up
    assert transport._undelivered is None
    assert world.reactor.turn() is None
    assert len(transport.getHandle().recv(100, socket.MSG_PEEK)) == len(numbered(1)[0])
    assert not recorder.lost
    transport.resumeProducing()
    world.settle()
    assert recorder.packets == numbered(100)
    recorder.lost[0].trap(error.ConnectionDone)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_peer_that_has_gone_is_read_on_as_often_as_it_takes(world, when):
    """A protocol that pauses again and again gets everything in order, then the end; it keeps one batch at most."""
    recorder = Stopping()
    peer = world.connect(recorder)
    for packet in numbered(200):
        peer.send(packet)
    if when == "before":
        world.turn()
    peer.close()
    world.settle()
    transport, reads = recorder.transport, 0
    while not recorder.lost:
        assert len(transport._undelivered or ()) < BATCH
        assert transport.has_hung_up
        transport.read_on()
        world.settle()
        reads += 1
    assert recorder.packets == numbered(200)
    assert 200 <= reads <= 201


def test_what_a_peer_that_has_gone_shall_read_is_lost(world):
    """Nothing can be sent to it any more: its queue is dropped, also while the protocol is paused."""
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, receiver = flood_controlled(recorder.transport, QUEUE)
    recorder.transport.pauseProducing()
    peer.close()
    queue.pending += numbered(3)
    world.settle()
    recorder.transport.flush()
    assert receiver.lost == 3
    assert not recorder.lost


def test_a_short_pause_is_not_worth_a_system_call(world, monkeypatch):
    """A socket stays watched during a pause, until packets are reported that nobody reads."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport, changes = recorder.transport, list[int]()
    multiplexer = transport._multiplexer
    modify = multiplexer.modify

    def note(fd: int, events: int) -> None:
        changes.append(events)
        modify(fd, events)

    monkeypatch.setattr(multiplexer, "modify", note)
    peer.send(b"one")
    transport.pauseProducing()
    transport.read_on()
    assert recorder.packets == [b"one"]
    assert changes == []
    peer.send(b"two")
    transport.pauseProducing()
    world.settle()
    assert changes == [0]
    assert world.reactor.turn() is None
    transport.resumeProducing()
    world.settle()
    assert recorder.packets == [b"one", b"two"]
    assert changes == [0, READ]


def test_a_pause_amid_the_last_packets(world):
    """A protocol that pauses while the packets of a peer that has gone are read gets the rest once it resumes."""
    recorder = Recorder(lambda packet: recorder.transport.pauseProducing())
    peer = world.connect(recorder)
    packets = numbered(2 * BATCH)
    for packet in packets:
        peer.send(packet)
    peer.close()
    for _ in packets:
        world.settle()
        recorder.transport.resumeProducing()
    world.settle()
    assert recorder.packets == packets
    assert recorder.lost


def test_reading_on(world):
    """The protocol can have its packets at once, and not in a call of their own; nothing needs to be asked."""
    recorder = Recorder()
    peer = world.connect(recorder)
    transport, asked = recorder.transport, list[int]()
    transport.before_read = lambda: asked.append(len(recorder.packets))
    transport.pauseProducing()
    for packet in numbered(3):
        peer.send(packet)
    world.settle()
    assert recorder.packets == []
    transport.read_on()
    assert recorder.packets == numbered(3)
    assert asked == []
    peer.send(b"more")
    world.turn()
    assert recorder.packets == [*numbered(3), b"more"]


def test_reading_on_can_be_put_off(world):
    """A protocol that has got what was kept is asked before the read, since that took time; what it does not want then
    stays in the socket."""
    recorder = BatchRecorder()
    recorder.room = 1
    peer = world.connect(recorder)
    transport = recorder.transport
    for packet in numbered(3):
        peer.send(packet)
    world.settle()
    assert recorder.packets == numbered(1)
    peer.send(b"more")
    recorder.room = None
    transport.before_read = transport.pauseProducing
    transport.read_on()
    assert recorder.packets == numbered(3)
    transport.before_read = None
    transport.read_on()
    assert recorder.packets == [*numbered(3), b"more"]


def test_an_exception_while_reading_on(world):
    """An exception of the protocol ends its connection, and does not reach the caller."""
    recorder = Recorder(lambda packet: 1 // 0)
    peer = world.connect(recorder)
    recorder.transport.pauseProducing()
    peer.send(b"one")
    world.settle()
    recorder.transport.read_on()
    world.settle()
    recorder.lost[0].trap(ZeroDivisionError)


def test_reading_on_after_the_end(world):
    """A transport that is closed has nothing to read."""
    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.abortConnection()
    recorder.transport.read_on()
    world.settle()
    recorder.transport.read_on()
    assert len(recorder.lost) == 1


# --- writing ------------------------------------------------------------------------------------


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


class LargePackets:
    """A reader for which a packet of 400 kB always waits."""

    max_packet = 409_600
    descriptors = False

    def read(self, sock, most=64):
        return [bytes(400_000)], False


def test_large_packets_are_read_in_one_pass(world):
    """Where bundles are sent, what is behind a large packet is read in the same pass, up to `LARGE_PER_PASS` bytes."""
    recorder = BatchRecorder()
    world.connect(recorder)
    transport = recorder.transport
    transport._reader = LargePackets()
    transport.ready(READ, True)
    assert recorder.batches == [1]
    transport.start_bundling(60_000)
    transport.ready(READ, True)
    assert recorder.batches == [1] * 4
    assert 2 * 400_000 < LARGE_PER_PASS <= 3 * 400_000


@pytest.fixture
def onward(world):
    """A peer that sends bundles, the recorder at its transport, and both ends of a socket to send on to."""
    recorder = BatchRecorder()
    peer = world.connect(recorder, 100_000)
    recorder.transport.start_bundling(60_000)
    out, away = socket_pair()
    with out, away:
        for sock in (peer, out):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
        yield recorder, peer, out, away


def _large(at: int, key: bytes = b"k") -> bytes:
    return b"MSG %b\0" % key + bytes([at]) * 20_000


def test_large_packets_go_on_past_the_protocol(world, onward):
    """The first one is handled; those that begin like it go on if the protocol says where to, and are counted."""
    recorder, peer, out, away = onward
    asked, sent = [], []

    def find_outlet(head):
        asked.append(head)
        return Outlet(out, lambda count, size: sent.append((count, size)))

    recorder.transport.find_outlet = find_outlet
    packets = [
        *map(_large, range(5)),
        b"MSG k\0small",
        *map(_large, range(5, 8)),
        _large(8, b"other"),
        _large(9, b"other"),
    ]
    peer.send(packets[0])
    world.settle()
    for packet in packets[1:]:
        peer.send(packet)
    world.settle()
    assert set(asked) == {b"MSG k\0", b"MSG other\0"}
    gone = received(away)
    assert recorder.packets == [_large(0), b"MSG k\0small", _large(8, b"other")]
    assert [packet for packet in packets if packet not in recorder.packets] == gone
    assert (sum(count for count, _ in sent), sum(size for _, size in sent)) == (len(gone), sum(map(len, gone)))


def test_small_packets_behind_a_large_one_come_in_batches(world, onward):
    """A peer that sends small packets after a large one is read in batches again."""
    recorder, peer, out, _ = onward
    recorder.transport.find_outlet = lambda head: Outlet(out, lambda count, size: None)
    peer.send(_large(0))
    world.settle()
    recorder.batches.clear()
    for _ in range(3):
        for packet in numbered(32):
            peer.send(packet)
        world.settle()
    assert recorder.packets[1:] == numbered(32) * 3
    assert len(recorder.batches) < 10


@pytest.mark.parametrize(
    "why", ["nobody says where to", "others wait", "it begins with no key", "descriptors may come with it"]
)
def test_large_packets_that_the_protocol_has_to_see(world, onward, why):
    """Without an outlet, under contention, without a NUL near its beginning, and with payloads, a packet is handled."""
    recorder, peer, out, away = onward
    if why != "nobody says where to":
        recorder.transport.find_outlet = lambda head: Outlet(out, lambda count, size: None)
    if why == "descriptors may come with it":
        assert recorder.transport.pass_payloads(True)
    packets = [bytes([at]) * 20_000 if why == "it begins with no key" else _large(at) for at in range(1, 5)]
    peer.send(packets[0])
    world.settle()
    if why == "others wait":
        recorder.transport._pacer._contention_ttl = 1_000
    for packet in packets[1:]:
        peer.send(packet)
    world.settle()
    assert (recorder.packets, received(away)) == (packets, [])


def test_a_protocol_is_asked_once_where_large_packets_go(world, onward):
    """If it says nowhere, small packets behind them cost no question."""
    recorder, peer, _, _ = onward
    asked: list[bytes] = []
    recorder.transport.find_outlet = asked.append
    for packet in (_large(0), b"MSG k\0one", b"MSG k\0two"):
        peer.send(packet)
        world.settle()
    assert len(recorder.packets) == 3
    assert asked == [b"MSG k\0"]


class AlwaysMore(PacketReader):
    """A reader that always finds a packet to send on, and one to be handled."""

    def read(self, sock, most=64):
        return [_large(0)], False

    def forward(self, sock, to, head, most):
        return 1, 400_000, [_large(0)], False


def test_what_goes_on_counts_for_the_pass(world, onward):
    """A publisher that never stops holds up the others no longer than by packets that are handled."""
    recorder, _, out, _ = onward
    sent = []
    recorder.transport.find_outlet = lambda head: Outlet(out, lambda count, size: sent.append(size))
    recorder.transport._reader = AlwaysMore(100_000)
    recorder.transport.ready(READ, True)
    assert 2 * 400_000 < LARGE_PER_PASS <= sum(sent) + 20_000 * 4 <= LARGE_PER_PASS + 420_000


def test_the_end_behind_large_packets_that_went_on(world, onward):
    """A peer that sends and leaves: all of its packets go one of the two ways, and then the end is reported."""
    recorder, peer, out, away = onward
    recorder.transport.find_outlet = lambda head: Outlet(out, lambda count, size: None)
    packets = [_large(at) for at in range(5)]
    for packet in packets:
        peer.send(packet)
    peer.close()
    world.settle()
    assert recorder.packets + received(away) == packets
    assert recorder.lost


class Emptying(BatchRecorder):
    """A receiver that takes the packets out of the list, as a link does with those that are too long."""

    def packetsReceived(self, packets):
        taken = super().packetsReceived(packets)
        packets.clear()
        return taken


def test_a_receiver_may_empty_the_list_of_large_packets(world):
    """What a receiver does to its list changes nothing for the pass."""
    recorder = Emptying()
    world.connect(recorder)
    transport = recorder.transport
    transport.start_bundling(60_000)
    transport._reader = LargePackets()
    transport.ready(READ, True)
    assert recorder.batches == [1] * 3


def test_a_pass_of_large_packets_is_short_under_contention(world):
    """As long as another socket has had packets a short while ago, one read of large packets is all of a pass."""
    recorder = BatchRecorder()
    world.connect(recorder)
    transport = recorder.transport
    transport.start_bundling(60_000)
    transport._reader = LargePackets()
    transport._multiplexer.contended = True
    transport.ready(READ, False)
    transport._multiplexer.contended = False
    transport.ready(READ, True)
    assert recorder.batches == [1, 1]


def test_a_protocol_pauses_at_a_large_packet(world):
    """A protocol that takes no more gets nothing else in that pass."""
    recorder = BatchRecorder()
    world.connect(recorder)
    transport = recorder.transport
    transport.start_bundling(60_000)
    transport._reader = LargePackets()
    recorder.room = 0
    transport.ready(READ, True)
    assert recorder.batches == [1]
    transport.abortConnection()


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


# --- producers ----------------------------------------------------------------------------------


class Producer:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def resumeProducing(self) -> None:
        self.calls.append("resume")

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def stopProducing(self) -> None:
        self.calls.append("stop")


def test_push_producer_is_paused_once(world):
    """A push producer is paused once at the high-water mark, and resumed once when everything is sent."""
    recorder = Recorder()
    peer = world.connect(recorder)
    producer = Producer()
    recorder.transport.registerProducer(producer, True)
    packets = [b"x" * 1000] * (HIGH_WATER // 1000 + 300)
    recorder.transport.writeSequence(packets[: HIGH_WATER // 1000])
    assert producer.calls == []
    recorder.transport.writeSequence(packets[HIGH_WATER // 1000 :])
    assert producer.calls == ["pause"]
    got = []
    for _ in range(20):
        world.turn()
        got += received(peer)
    assert got == packets
    assert producer.calls == ["pause", "resume"]


def test_producer_and_loss_of_writing(world):
    """A producer is stopped, once, when nothing can be written any more, though the connection is still read."""
    recorder = HalfRecorder()
    peer = world.connect(recorder)
    producer = Producer()
    recorder.transport.registerProducer(producer, True)
    recorder.transport.write(b"last")
    peer.shutdown(socket.SHUT_RD)
    recorder.transport.flush()
    world.settle()
    assert producer.calls == ["stop"]
    assert recorder.halves == ["write"]
    peer.send(b"still heard")
    world.settle()
    assert recorder.packets == [b"still heard"]
    assert not recorder.lost
    recorder.transport.abortConnection()
    world.settle()
    assert producer.calls == ["stop"]


def test_producer_that_fails_to_stop(world):
    """A producer that raises in stopProducing does not keep connectionLost from the protocol."""

    class Stubborn(Producer):
        def stopProducing(self):
            raise ZeroDivisionError

    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.registerProducer(Stubborn(), True)
    recorder.transport.abortConnection()
    world.settle()
    assert len(recorder.lost) == 1


def test_lose_write_connection_waits_for_the_producer(world):
    """loseWriteConnection, too, waits for the producer to finish."""
    recorder = Recorder()
    peer = world.connect(recorder)
    producer = Producer()
    recorder.transport.registerProducer(producer, True)
    recorder.transport.loseWriteConnection()
    world.settle()
    recorder.transport.write(b"last")
    world.settle()
    assert received(peer) == [b"last"]
    recorder.transport.unregisterProducer()
    recorder.transport.write(b"never")
    world.settle()
    assert received(peer) == [b""]


# --- closing ------------------------------------------------------------------------------------


def test_lose_connection_after_lose_write_connection(world):
    """loseConnection closes a connection that is already shut down for writing."""
    recorder = Recorder()
    world.connect(recorder)
    recorder.transport.loseWriteConnection()
    world.settle()
    assert not recorder.lost
    recorder.transport.loseConnection()
    world.settle()
    recorder.lost[0].trap(error.ConnectionDone)


def test_lose_connection_after_a_failed_write(world):
    """loseConnection closes a paused connection whose peer has left."""
    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.pauseProducing()
    peer.close()
    recorder.transport.write(b"one")
    world.settle()
    assert not recorder.lost
    recorder.transport.loseConnection()
    world.settle()
    recorder.lost[0].trap(error.ConnectionDone)


def test_stop_producing_closes(world):
    """A consumer that calls stopProducing on the transport closes the connection."""
    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.write(b"one")
    recorder.transport.stopProducing()
    world.settle()
    assert received(peer) == [b"one", b""]
    assert len(recorder.lost) == 1


def test_abort_out_of_flow_control(world):
    """A queue that aborts its connection in the middle of a flush sends nothing more."""

    class Aborting(FifoQueue):
        __slots__ = ()

        def ack(self, taken, sent):
            super().ack(taken, sent)
            recorder.transport.abortConnection()

    recorder = Recorder()
    peer = world.connect(recorder)
    recorder.transport.queue = Aborting()
    recorder.transport.writeSequence(numbered(10))
    world.settle()
    recorder.transport.write(b"never")
    recorder.transport.flush()
    assert received(peer) == [*numbered(10), b""]
    recorder.lost[0].trap(error.ConnectionAborted)


def test_close_again(world):
    """Closing a lost connection, by any method, does nothing."""
    recorder = Recorder()
    world.connect(recorder)
    transport = recorder.transport
    transport.abortConnection()
    transport.abortConnection()
    world.settle()
    for again in (transport.abortConnection, transport.loseConnection, transport.loseWriteConnection, transport.flush):
        again()
    transport.write(b"never")
    world.settle()
    assert len(recorder.lost) == 1


def test_protocol_that_fails_to_start(world):
    """A protocol that raises in makeConnection gets connectionLost, and the connection is closed."""

    class Failing(Recorder):
        def connectionMade(self):
            raise ZeroDivisionError

    ours, peer = socket_pair()
    recorder = Failing()
    with pytest.raises(ZeroDivisionError):
        PacketTransport(world.reactor, ours).start(recorder)
    recorder.lost[0].trap(ZeroDivisionError)
    assert received(peer) == [b""]
    assert ours.fileno() == -1
    assert world.reactor.getReaders() == []
    peer.close()


def test_a_read_beside_others_can_wait(world):
    """The protocol is asked before a read if other sockets can be read in the same pass, and may pause."""
    recorders = [Recorder(), Recorder()]
    peers = [world.connect(recorder) for recorder in recorders]
    transport = recorders[1].transport
    transport.before_read = mock.Mock(side_effect=transport.pauseProducing)
    peers[1].send(b"alone")
    world.turn()
    assert recorders[1].packets == [b"alone"]
    assert not transport.before_read.called
    for peer in peers:
        peer.send(b"beside others")
    world.turn()
    transport.before_read.assert_called_once_with()
    assert [recorder.packets[-1] for recorder in recorders] == [b"beside others", b"alone"]
    transport.before_read = None
    transport.resumeProducing()
    world.turn()
    assert recorders[1].packets == [b"alone", b"beside others"]


# --- addresses ----------------------------------------------------------------------------------


def test_interfaces(world):
    """The transport has everything that its interfaces promise."""
    recorder = Recorder()
    world.connect(recorder)
    for interface in (IPacketTransport, ITransport, IConsumer, IPushProducer):
        verifyObject(interface, recorder.transport)
    verifyObject(IPacketQueue, recorder.transport.queue)


def test_peer_and_addresses(world):
    """The transport names its peer, and still answers when the connection is lost."""
    recorder = Recorder()
    world.connect(recorder)
    transport: Any = recorder.transport
    assert transport.credentials == (os.getpid(), os.getuid(), os.getgid())
    assert transport.fileno() == transport.getHandle().fileno() >= 0
    assert transport.getHost() == transport.getPeer()
    assert str(os.getpid()) in repr(transport)
    transport.abortConnection()
    world.settle()
    assert transport.fileno() == -1
    assert transport.getHost().name == transport.getPeer().name == b""
    assert not transport.connected
