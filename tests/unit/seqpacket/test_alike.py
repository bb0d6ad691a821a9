"""The fake transport behaves as the real one: one test body for both, and both driven side by side."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from twisted.internet import error
from twisted.internet.interfaces import IPushProducer, ITransport
from zope.interface.verify import verifyObject

from sbus.interfaces import IPacketTransport
from sbus.seqpacket.states import Life, ReadSide, WriteSide
from sbus.syscalls.sockets import max_sendable
from sbus.testing import FakePacketTransport
from tests.support.examples import examples
from tests.support.reactors import BatchRecorder, HalfRecorder, Recorder, received
from tests.support.transports import DISCARD, ERROR, QUEUE, World, flood_controlled, numbered


class RealLink:
    """A protocol on a real transport, and the peer."""

    def __init__(self, protocol: Recorder) -> None:
        self.world = World()
        self.protocol = protocol
        self.peer = self.world.connect(protocol)
        self.transport: Any = protocol.transport
        self.got: list[bytes] = []
        self.too_long = bytes(1001)
        self.unsendable = bytes(max_sendable(self.transport.getHandle()) + 1)

    def fill(self) -> None:
        """Fill the socket."""
        while True:
            try:
                self.transport.getHandle().send(b"filling")
            except BlockingIOError:
                break

    def send(self, *packets: bytes) -> None:
        """The peer sends packets, in one batch."""
        for packet in packets:
            self.peer.send(packet)
        self.settle()

    def end(self) -> None:
        """The peer sends no more."""
        with contextlib.suppress(OSError):  # the connection may be closed
            self.peer.shutdown(socket.SHUT_WR)
        self.settle()

    def deafen(self, probe: bytes = b"") -> None:
        """The peer reads no more, which the next send notices."""
        with contextlib.suppress(OSError):  # the connection may be closed
            self.peer.shutdown(socket.SHUT_RD)
        if probe:
            self.transport.write(probe)
        self.transport.flush()
        self.settle()

    def leave(self) -> None:
        """The peer closes."""
        self.peer.close()
        self.settle()

    def settle(self) -> None:
        """Make the calls that are due."""
        self.world.settle()

    def read(self) -> list[bytes]:
        """Have the peer read everything; returns all that it has read so far."""
        for _ in range(20):
            self.got += [packet for packet in received(self.peer) if packet not in (b"", b"filling")]
            self.settle()
        return self.got

    def close(self) -> None:
        self.world.close()


class FakeLink:
    """The same on a fake transport."""

    def __init__(self, protocol: Recorder) -> None:
        self.protocol = protocol
        self.transport: Any = FakePacketTransport(longest=900)
        self.transport.connect(protocol)
        self.too_long = b""
        self.unsendable = bytes(901)

    def fill(self) -> None:
        self.transport.capacity = 0

    def send(self, *packets: bytes) -> None:
        self.transport.deliver(*packets)
        self.settle()

    def end(self) -> None:
        self.transport.end()
        self.settle()

    def deafen(self, probe: bytes = b"") -> None:
        self.transport.breakDown()
        self.settle()

    def leave(self) -> None:
        self.transport.hang_up()
        self.settle()

    def settle(self) -> None:
        self.transport.clock.advance(0)

    def read(self) -> list[bytes]:
        self.transport.drain()
        self.settle()
        return self.transport.written

    def close(self) -> None:
        pass


@pytest.fixture(params=[RealLink, FakeLink])
def link(request: pytest.FixtureRequest) -> Iterator[Callable[[Recorder], Any]]:
    """Connects a protocol to a real transport, or to a fake one."""
    made: list[Any] = []

    def connect(protocol: Recorder) -> Any:
        made.append(request.param(protocol))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def test_alike_edges(link):
    """On both each packet is one dataReceived, and each write one packet, sent soon but not at once."""
    one = link(Recorder())
    one.send(b"a", b"bc", b"def")
    assert one.protocol.packets == [b"a", b"bc", b"def"]
    one.transport.write(b"a")
    one.transport.writeSequence([b"bc", b"def"])
    assert len(one.transport.queue) == 3
    assert one.read() == [b"a", b"bc", b"def"]
    with pytest.raises(ValueError, match="empty"):
        one.transport.write(b"")


def test_alike_pauses(link):
    """On both a pause keeps the rest of the batch; it comes soon after resuming, and once."""
    one = link(Recorder(lambda packet: packet == b"0001" and one.transport.pauseProducing()))
    one.send(*numbered(5))
    one.send(*numbered(5, 5))
    assert one.protocol.packets == numbered(2)
    one.transport.resumeProducing()
    assert one.protocol.packets == numbered(2)
    one.settle()
    assert one.protocol.packets == numbered(10)


def test_alike_parts_of_batches(link):
    """On both the part of a batch that a protocol does not take comes again when it resumes."""
    one = link(BatchRecorder())
    one.protocol.room = 3
    one.send(*numbered(10))
    assert one.protocol.packets == numbered(3)
    one.protocol.room = 4
    one.transport.resumeProducing()
    one.settle()
    assert one.protocol.packets == numbered(7)
    one.protocol.room = None
    one.transport.resumeProducing()
    one.settle()
    assert one.protocol.packets == numbered(10)
    assert one.protocol.batches == [10, 7, 3]


def test_alike_end_of_file(link):
    """On both end of file comes after the kept packets, and ends the connection."""
    one = link(Recorder(lambda packet: packet == b"0001" and one.transport.pauseProducing()))
    one.send(*numbered(5))
    one.end()
    assert not one.protocol.lost
    one.transport.resumeProducing()
    one.settle()
    assert one.protocol.packets == numbered(5)
    one.protocol.lost[0].trap(error.ConnectionDone)


def test_alike_half_close(link):
    """On both a half-closed connection gets one readConnectionLost, and can be written to and closed."""
    one = link(HalfRecorder())
    one.send(b"last")
    one.end()
    one.transport.pauseProducing()
    one.transport.resumeProducing()
    one.settle()
    assert one.protocol.halves == ["read"]
    one.transport.write(b"answer")
    one.transport.loseConnection()
    assert one.read() == [b"answer"]
    one.protocol.lost[0].trap(error.ConnectionDone)


def test_alike_loss_of_writing(link):
    """On both a peer that reads no more costs the queue; its packets are delivered until its end of file."""
    one = link(HalfRecorder())
    one.fill()
    one.transport.writeSequence(numbered(3))
    one.settle()
    assert len(one.transport.queue) == 3
    one.deafen()
    assert one.protocol.halves == ["write"]
    assert len(one.transport.queue) == 0
    one.transport.write(b"never")
    one.send(b"still heard")
    assert one.protocol.packets == [b"still heard"]
    one.end()
    assert one.protocol.halves == ["write"]
    one.protocol.lost[0].trap(error.ConnectionDone)


def test_alike_closing_after_loss_of_writing(link):
    """On both loseConnection also closes if nothing can be written any more."""
    one = link(HalfRecorder())
    one.fill()
    one.transport.write(b"one")
    one.settle()
    one.deafen()
    one.transport.loseConnection()
    one.settle()
    one.protocol.lost[0].trap(error.ConnectionDone)


def test_alike_closing(link):
    """On both loseConnection sends the queue, takes nothing new and delivers nothing more."""
    one = link(Recorder())
    one.fill()
    one.transport.writeSequence(numbered(3))
    one.transport.loseConnection()
    one.transport.write(b"never")
    one.send(b"never")
    assert not one.protocol.lost
    assert one.read() == numbered(3)
    one.protocol.lost[0].trap(error.ConnectionDone)
    assert one.protocol.packets == []


def test_alike_aborting(link):
    """On both abortConnection discards the queue, and calls connectionLost soon, once."""
    one = link(Recorder())
    one.transport.write(b"never")
    one.transport.abortConnection()
    one.transport.loseConnection()
    one.transport.abortConnection()
    assert not one.protocol.lost
    one.settle()
    assert one.read() == []
    (reason,) = one.protocol.lost
    reason.trap(error.ConnectionAborted)
    assert not one.transport.connected


def test_alike_truncation(link):
    """On both a packet over the limit costs a plain protocol its connection, and is empty in a batch."""
    one = link(Recorder())
    one.send(b"a", one.too_long, b"c")
    assert one.protocol.packets == [b"a"]
    one.protocol.lost[0].trap(error.ConnectionAborted)
    two = link(BatchRecorder())
    two.send(b"a", two.too_long, b"c")
    assert two.protocol.packets == [b"a", b"", b"c"]
    assert not two.protocol.lost


def test_alike_refusal(link):
    """On both an oversized packet ends a plain connection, while flood control only drops it."""
    one = link(Recorder())
    one.transport.writeSequence([b"a", one.unsendable, b"c"])
    one.settle()
    one.protocol.lost[0].trap(error.MessageLengthError)
    assert one.read() == [b"a"]
    two = link(Recorder())
    queue, receiver = flood_controlled(two.transport, ERROR)
    queue.pending += [b"a", two.unsendable, b"c"]
    two.transport.flush()
    assert two.read() == [b"a", b"c"]
    assert (receiver.lost, receiver.reasons) == (1, [])


def test_alike_flood_control(link):
    """On both flood control learns what the socket does not take, and when it has room again."""
    one = link(Recorder())
    queue, receiver = flood_controlled(one.transport, QUEUE)
    one.fill()
    queue.pending += numbered(5)
    one.transport.flush()
    assert queue.is_congested
    assert queue.messages == 5
    assert one.read() == numbered(5)
    assert not queue.is_congested
    two = link(Recorder())
    queue, receiver = flood_controlled(two.transport, DISCARD)
    two.fill()
    queue.pending += numbered(5)
    two.transport.loseConnection()
    two.settle()
    assert receiver.lost == 5
    assert len(two.protocol.lost) == 1


def test_fake_interfaces():
    """The fake has everything that its interfaces promise."""
    fake = FakePacketTransport()
    for interface in (IPacketTransport, ITransport, IPushProducer):
        verifyObject(interface, fake)


def test_fake_capacity():
    """A fake takes as many packets as its capacity, and goes on when the peer has read some."""
    recorder = Recorder()
    fake = FakePacketTransport(capacity=2)
    fake.connect(recorder)
    fake.writeSequence(numbered(10))
    fake.clock.advance(0)
    assert fake.written == numbered(2)
    fake.drain(3)
    assert fake.written == numbered(5)
    fake.drain()
    assert fake.written == numbered(10)
    assert fake.getPeer().name == b""
    assert fake.getHost().name


# --- side by side -------------------------------------------------------------------------------

KINDS = {"plain": Recorder, "batches": BatchRecorder, "half-close": HalfRecorder}


class SideBySide(RuleBasedStateMachine):
    """Do the same to a real transport and to a fake one, in any order."""

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def connect(self, kind: str) -> None:
        self.links: list[Any] = [RealLink(KINDS[kind]()), FakeLink(KINDS[kind]())]
        self.sent = self.written = self.steps = 0
        self.peer_sends = self.peer_reads = self.peer_is_there = True

    def both(self, act: Callable[[Any], object]) -> None:
        """Do this to both, and make the calls that are due."""
        self.steps += 1
        for link in self.links:
            act(link)
            link.settle()

    @property
    def transport(self) -> FakePacketTransport:
        return self.links[1].transport

    @rule()
    def pause(self) -> None:
        self.both(lambda link: link.transport.pauseProducing())

    @rule()
    def resume(self) -> None:
        self.both(lambda link: link.transport.resumeProducing())

    @rule(count=st.integers(1, 3))
    def write(self, count: int) -> None:
        packets = numbered(count, self.written)
        self.written += count
        self.both(lambda link: link.transport.writeSequence(packets))

    @precondition(lambda self: self.peer_sends)
    @rule(count=st.integers(1, 4), pause_over=st.none() | st.integers(1, 3))
    def peer_writes(self, count: int, pause_over: int | None) -> None:
        """The peer sends some packets; the protocol pauses over one of those that come next, or takes them all."""
        for link in self.links:
            link.protocol.react = None
            if isinstance(link.protocol, BatchRecorder):
                link.protocol.room = pause_over
            elif pause_over is not None:
                link.protocol.react = self.pause_after(link, len(link.protocol.packets) + pause_over)
        packets = numbered(count, self.sent)
        self.sent += count
        with contextlib.suppress(OSError):  # the connection may be closed
            self.both(lambda link: link.send(*packets))

    @staticmethod
    def pause_after(link: Any, count: int) -> Callable[[bytes], object]:
        return lambda _: len(link.protocol.packets) == count and link.transport.pauseProducing()

    @precondition(lambda self: self.peer_sends)
    @rule()
    def peer_ends(self) -> None:
        self.peer_sends = False
        self.both(lambda link: link.end())

    @precondition(lambda self: self.peer_is_there)
    @rule()
    def peer_reads_all(self) -> None:
        real, fake = self.links
        assert real.read() == fake.read()

    @precondition(lambda self: self.peer_reads)
    @rule()
    def peer_reads_no_more(self) -> None:
        self.peer_reads = False
        self.both(lambda link: link.deafen(b"probe"))

    def peer_closes(self) -> None:
        self.peer_reads_all()  # else its close resets the connection
        self.peer_sends = self.peer_reads = self.peer_is_there = False
        self.both(lambda link: link.leave())

    @precondition(lambda self: self.peer_reads and self.transport.write_side is WriteSide.OPEN)
    @rule()
    def fill(self) -> None:
        self.both(lambda link: link.fill())

    @rule()
    def lose_writing(self) -> None:
        self.both(lambda link: link.transport.loseWriteConnection())

    @precondition(lambda self: self.steps > 5)
    @rule(how=st.sampled_from(["lose", "abort", "the peer closes"]))
    def close(self, how: str) -> None:
        """End the connection. One rule for all ways, so that most connections live for some steps."""
        if how == "lose":
            self.both(lambda link: link.transport.loseConnection())
        elif how == "abort":
            self.both(lambda link: link.transport.abortConnection())
        elif self.peer_is_there:
            self.peer_closes()

    @invariant()
    def alike(self) -> None:
        """States, callbacks and queues are equal."""
        real, fake = (self.observed(link) for link in self.links)
        assert real == fake

    def observed(self, link: Any) -> tuple[object, ...]:
        transport, protocol = link.transport, link.protocol
        read_side = transport.read_side
        if read_side is ReadSide.PAUSED_EOF:
            read_side = ReadSide.PAUSED  # how much one read finds decides which of the two it is
        closed = transport.life is Life.CLOSED
        return (
            transport.life,
            None if closed else read_side,
            None if closed else transport.write_side,
            protocol.packets,
            [reason.type for reason in protocol.lost],
            getattr(protocol, "halves", None),
            len(transport.queue),
        )

    def teardown(self) -> None:
        for link in getattr(self, "links", ()):
            link.close()


SideBySide.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestSideBySide = SideBySide.TestCase
