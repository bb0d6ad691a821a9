"""The transport in every order of events: real sockets, a reactor that the test turns."""

from __future__ import annotations

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

from sbus.flood.fifo import HIGH_WATER, FifoQueue
from sbus.interfaces import IPacketQueue, IPacketTransport
from sbus.seqpacket.transport import PacketTransport
from tests.support.examples import examples
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received, socket_pair
from tests.support.transports import World, numbered


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


# --- any order of events --------------------------------------------------------------------------


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


# --- producers ------------------------------------------------------------------------------------


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


# --- closing --------------------------------------------------------------------------------------


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


# --- addresses ------------------------------------------------------------------------------------


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
