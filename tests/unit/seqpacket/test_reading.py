"""What the transport reads: how much in a turn, in which batches, and until when."""

from __future__ import annotations

import socket

import pytest
from twisted.internet import error

from sbus.seqpacket.multiplexer import READ
from sbus.syscalls.batch import BATCH
from sbus.syscalls.sockets import grow_send_buffer
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received
from tests.support.transports import QUEUE, flood_controlled, numbered

# --- reading --------------------------------------------------------------------------------------


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


# --- a peer that has hung up ----------------------------------------------------------------------


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
