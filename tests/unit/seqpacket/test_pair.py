"""A pair of transports in memory: as sockets in what protocols see, with an inbox that can be full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from twisted.internet import error
from twisted.internet.interfaces import IPushProducer, IStreamClientEndpoint, ITransport
from twisted.internet.protocol import Factory
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from sbus.flood import SOFT_STRATEGIES
from sbus.interfaces import IPacketTransport
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.interfaces import IPeerGate
from sbus.seqpacket.pair import CAPACITY, OVERHEAD, PairedTransport, connect_pair
from sbus.seqpacket.pair_endpoint import PairEndpoint
from sbus.seqpacket.states import Life
from tests.support.examples import examples
from tests.support.reactors import BatchRecorder, HalfRecorder, HandTurnedReactor, Recorder
from tests.support.transports import flood_controlled, numbered
from tests.unit.seqpacket.test_alike import RealLink, SideBySide

OWN = PeerCredentials(7, 8, 9)
PACKET = bytes(1000)
FULL = CAPACITY // (len(PACKET) + OVERHEAD)
"""Packets of this length that an inbox takes."""


class HalfBatches(BatchRecorder, HalfRecorder):
    """A recorder of batches and of half-closed connections."""


class Pair:
    """Two recorders on a pair of transports."""

    def __init__(self, one: Any = None, other: Any = None) -> None:
        self.reactor = HandTurnedReactor()
        self.ours, self.theirs = connect_pair(self.reactor, OWN, OWN)
        self.one, self.other = one or HalfBatches(), other or HalfBatches()
        self.theirs.start(self.other)
        self.ours.start(self.one)

    def settle(self) -> None:
        self.reactor.settle()


def test_packets_cross_soon_in_both_directions():
    """What is sent arrives in order when the events in hand are dealt with, and never inside the call that sends."""
    pair = Pair()
    assert pair.ours.try_send(numbered(3)) == 3
    pair.theirs.writeSequence(numbered(2))
    assert pair.other.packets == pair.one.packets == []
    pair.settle()
    assert pair.other.packets == numbered(3)
    assert pair.one.packets == numbered(2)
    assert pair.ours.credentials == OWN
    with pytest.raises(ValueError, match="empty"):
        pair.ours.write(b"")


def test_what_waits_in_a_queue_is_sent_later_or_in_the_callers_time():
    """A queue that is flushed later, or sent on, arrives by itself; an end that is closed by then sends nothing."""
    pair = Pair()
    queue, _ = flood_controlled(pair.ours, SOFT_STRATEGIES[0])
    for send in (pair.ours.flush_later, pair.ours.flush_batch, lambda: pair.ours.send_on(False)):
        queue.pending += numbered(3)
        send()
        pair.settle()
        assert pair.other.packets == numbered(3)
        pair.other.packets.clear()
    pair.ours.flush_later()
    pair.ours.abortConnection()
    pair.settle()
    assert len(pair.one.lost) == 1


def test_no_protocol_runs_inside_another(monkeypatch: pytest.MonkeyPatch):
    """A protocol that answers in the middle of its batch has the answer handled after the batch."""
    pair = Pair()
    running = 0
    handled: list[tuple[int, int]] = []  # the number of protocols that run, and the length of the packet

    def react(transport: PairedTransport) -> Callable[[list[bytes]], int]:
        def received(packets: list[bytes]) -> int:
            nonlocal running
            running += 1
            handled.append((running, len(packets[0])))
            if len(packets[0]) < 20:
                transport.try_send([packets[0] + b"."])
            running -= 1
            return len(packets)

        return received

    monkeypatch.setattr(pair.one, "packetsReceived", react(pair.ours))
    monkeypatch.setattr(pair.other, "packetsReceived", react(pair.theirs))
    pair.ours.try_send([b"x"])
    for _ in range(20):
        pair.settle()
    assert handled == [(1, length) for length in range(1, 21)]


def test_handing_over_calls_the_peer_unless_something_waits():
    """What is handed over arrives in the call; behind packets that wait, or for a paused peer, it comes as usual."""
    pair = Pair()
    assert pair.ours.hand_over([b"1"]) == 1
    assert pair.other.packets == [b"1"]
    pair.ours.try_send([b"2"])
    assert pair.ours.hand_over([b"3"]) == 1
    assert pair.other.packets == [b"1"]
    pair.settle()
    pair.theirs.pauseProducing()
    assert pair.ours.hand_over([b"4"]) == 1
    assert pair.ours.unread_bytes() == 1 + OVERHEAD
    pair.theirs.resumeProducing()
    pair.settle()
    assert pair.other.packets == [b"1", b"2", b"3", b"4"]
    pair.theirs.abortConnection()
    pair.settle()
    assert pair.ours.hand_over([b"5"]) == 0


def test_ends_that_hand_over_to_each_other_do_not_fill_the_stack(monkeypatch: pytest.MonkeyPatch):
    """Two protocols that answer each packet by handing over a longer one run inside each other once, and not deeper."""
    pair = Pair()
    running = deepest = 0
    handled: list[int] = []

    def react(transport: PairedTransport) -> Callable[[list[bytes]], int]:
        def received(packets: list[bytes]) -> int:
            nonlocal running, deepest
            running += 1
            deepest = max(deepest, running)
            handled.append(len(packets[0]))
            if len(packets[0]) < 100:
                transport.hand_over([packets[0] + b"."])
            running -= 1
            return len(packets)

        return received

    monkeypatch.setattr(pair.one, "packetsReceived", react(pair.ours))
    monkeypatch.setattr(pair.other, "packetsReceived", react(pair.theirs))
    pair.ours.hand_over([b"x"])
    for _ in range(100):
        pair.settle()
    assert handled == list(range(1, 101))
    assert deepest == 2


def test_a_lone_packet_can_be_taken_inside_the_call():
    """An end that asks for it is offered a packet that comes alone; what it refuses, and all else, comes as usual."""
    pair = Pair()
    offered: list[list[bytes]] = []

    def take(packets: list[bytes]) -> bool:
        offered.append(packets)
        return packets != [b"no"]

    pair.theirs.take_lone = take
    assert [pair.ours.try_send(packets) for packets in ([b"a"], [b"b", b"c"], [b"behind"])] == [1, 2, 1]
    assert offered == [[b"a"]]
    pair.settle()
    assert pair.other.packets == [b"b", b"c", b"behind"]
    assert pair.ours.try_send([b"no"]) == 1
    pair.settle()
    assert offered == [[b"a"], [b"no"]]
    assert pair.other.packets[-1] == b"no"
    pair.theirs.pauseProducing()
    pair.ours.try_send([b"later"])
    assert len(offered) == 2


def test_an_error_in_taking_a_lone_packet_costs_that_end_its_connection():
    """The sender notices nothing but the end of the connection."""
    pair = Pair()

    def take(packets: list[bytes]) -> bool:
        raise ValueError("wrong")

    pair.theirs.take_lone = take
    with capturedLogs() as logs:
        assert pair.ours.try_send([b"a"]) == 1
    assert [str(event["log_failure"].value) for event in logs] == ["wrong"]
    pair.settle()
    assert pair.theirs.life is Life.CLOSED
    assert pair.ours.life is Life.CLOSED


def test_full_inbox_is_congestion():
    """A paused peer's inbox takes its capacity; the rest waits in the queue and follows when there is room."""
    pair = Pair()
    pair.theirs.pauseProducing()
    queue, _ = flood_controlled(pair.ours, SOFT_STRATEGIES[0])
    sent = [PACKET[:-4] + packet for packet in numbered(2 * FULL)]
    taken = pair.ours.try_send(sent)
    assert taken == FULL
    queue.pending += sent[taken:]
    pair.ours.flush()
    assert queue.is_congested
    assert queue.messages == len(sent) - FULL
    assert pair.ours.unread_bytes() == FULL * (len(PACKET) + OVERHEAD)
    pair.theirs.resumeProducing()
    pair.settle()
    assert pair.other.packets == sent
    assert not queue.is_congested
    assert pair.ours.unread_bytes() == 0


def test_a_packet_of_any_length_fits_an_empty_inbox():
    """A packet longer than the capacity is taken if nothing else waits."""
    pair = Pair()
    pair.theirs.pauseProducing()
    long = bytes(2 * CAPACITY)
    assert pair.ours.try_send([long, b"x"]) == 1
    assert pair.ours.try_send([b"x"]) == 0
    pair.theirs.resumeProducing()
    pair.settle()
    assert pair.other.packets == [long]


def test_memory_is_counted_once():
    """The receiving end reports what its protocol was not offered, and what the program holds beside."""
    pair = Pair()
    pair.theirs.held, pair.theirs.held_limit = lambda: 11, 22
    pair.other.room = 2
    pair.ours.try_send([PACKET] * 5)
    assert pair.theirs.partial_bytes() == 5 * (len(PACKET) + OVERHEAD) + 11
    pair.settle()
    assert len(pair.other.packets) == 2
    assert pair.theirs.partial_bytes() == 11
    pair.ours.try_send([PACKET])
    assert pair.theirs.partial_bytes() == len(PACKET) + OVERHEAD + 11
    assert pair.theirs.partial_limit() == CAPACITY + 22


def test_what_was_sent_before_a_close_is_read():
    """Whoever closes, the other end reads all that was sent, and then the end."""
    for close in ("loseConnection", "abortConnection"):
        pair = Pair()
        pair.theirs.pauseProducing()
        pair.ours.try_send(numbered(3))
        getattr(pair.ours, close)()
        pair.settle()
        assert pair.ours.life is Life.CLOSED
        assert pair.theirs.life is Life.OPEN
        pair.theirs.resumeProducing()
        pair.settle()
        assert pair.other.packets == numbered(3)
        assert [reason.type for reason in pair.other.lost] == [error.ConnectionDone]
        assert pair.theirs.try_send([b"x"]) == 0


def test_last_packets_go_past_a_full_inbox():
    """A graceful close brings its last packets also to a peer whose inbox is full."""
    pair = Pair()
    pair.theirs.pauseProducing()
    pair.ours.try_send([PACKET] * 2 * FULL)
    pair.ours.close_gracefully(lambda: [b"bye"], 1.0, 64)
    pair.settle()
    pair.theirs.resumeProducing()
    pair.settle()
    assert pair.other.packets == [PACKET] * FULL + [b"bye"]


def test_half_close():
    """After loseWriteConnection the peer reads the queue and the end of file, and can still send."""
    pair = Pair()
    pair.theirs.pauseProducing()
    sent = [PACKET] * 2 * FULL + numbered(3)
    pair.ours.writeSequence(sent)
    pair.ours.loseWriteConnection()
    pair.settle()
    assert pair.one.halves == []
    pair.theirs.resumeProducing()
    pair.settle()
    assert pair.other.packets == sent
    assert (pair.one.halves, pair.other.halves) == (["write"], ["read"])
    pair.theirs.try_send([b"answer"])
    pair.settle()
    assert pair.one.packets == [b"answer"]
    pair.theirs.loseConnection()
    pair.settle()
    assert len(pair.one.lost) == len(pair.other.lost) == 1


class ErrorTests(SynchronousTestCase):
    """Protocols that fail."""

    def test_an_error_costs_one_connection(self) -> None:
        """A protocol that raises loses its connection, and its peer reads the end."""
        pair = Pair()
        self.patch(pair.other, "packetsReceived", lambda packets: 1 // 0)
        pair.ours.try_send([b"x"])
        pair.settle()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(pair.other.lost[0].check(ZeroDivisionError))
        self.assertEqual(len(pair.one.lost), 1)

    def test_protocol_that_refuses_its_transport(self) -> None:
        """An exception of makeConnection is the caller's, and closes the connection."""
        reactor = HandTurnedReactor()
        ours, theirs = connect_pair(reactor, OWN, OWN)
        protocol = BatchRecorder()
        self.patch(protocol, "makeConnection", lambda transport: 1 // 0)
        self.assertRaises(ZeroDivisionError, ours.start, protocol)
        self.assertIs(ours.life, Life.CLOSED)
        self.assertRaises(TypeError, theirs.start, Recorder())


@implementer(IPeerGate)
class Gate(Factory):
    """A factory with a gate."""

    noisy = False

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.built: list[BatchRecorder] = []

    def admits(self, peer: PeerCredentials) -> bool:
        return self.is_open and peer == OWN

    def buildProtocol(self, addr: Any) -> Any:
        self.built.append(BatchRecorder())
        return self.built[-1]


class EndpointTests(SynchronousTestCase):
    """The endpoint that connects within a process."""

    def test_connects(self) -> None:
        """Both factories build a protocol, and the two are connected."""
        reactor, server, client = HandTurnedReactor(), Gate(True), Gate(True)
        endpoint = PairEndpoint(reactor, server, lambda: OWN)
        verifyObject(IStreamClientEndpoint, endpoint)
        self.successResultOf(endpoint.connect(client))
        client.built[0].transport.try_send([b"x"])
        reactor.settle()
        self.assertEqual(server.built[0].packets, [b"x"])

    def test_gate(self) -> None:
        """A factory that does not admit the connection is not asked for a protocol."""
        server = Gate(False)
        endpoint = PairEndpoint(HandTurnedReactor(), server, lambda: OWN)
        self.failureResultOf(endpoint.connect(Gate(True)), error.ConnectError)
        self.assertEqual(server.built, [])


def test_interfaces():
    """An end has everything that its interfaces promise."""
    for interface in (IPacketTransport, ITransport, IPushProducer):
        verifyObject(interface, Pair().ours)


# --- side by side with a socket -----------------------------------------------------------------


class PairLink:
    """A protocol on one end of a pair; the other end stands for the peer, which reads when it is asked to."""

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self.reader = HalfBatches()
        self._pair = Pair(protocol, self.reader)
        self.transport = self._pair.ours
        self._peer = self._pair.theirs
        self._peer.pauseProducing()

    def fill(self) -> None:
        self._peer._arrive([b"filling"], CAPACITY)

    def send(self, *packets: bytes) -> None:
        self._peer.try_send(list(packets))
        self.settle()

    def end(self) -> None:
        self._peer.loseWriteConnection()
        self.settle()

    def leave(self) -> None:
        self._peer.abortConnection()
        self.settle()

    def settle(self) -> None:
        self._pair.settle()

    def read(self) -> list[bytes]:
        self._peer.resumeProducing()
        self.settle()
        self._peer.pauseProducing()
        return [packet for packet in self.reader.packets if packet != b"filling"]

    def close(self) -> None:
        pass


class PairBesideSocket(SideBySide):
    """Do the same to a socket and to a pair, in any order."""

    @initialize(kind=st.sampled_from([BatchRecorder, HalfBatches]))
    def connect(self, kind: Any) -> None:
        self.links = [RealLink(kind()), PairLink(kind())]
        self.sent = self.written = self.steps = 0
        self.peer_sends = self.peer_reads = self.peer_is_there = True

    @precondition(lambda self: False)
    @rule()
    def peer_reads_no_more(self) -> None:
        """An end of a pair cannot end its reading alone."""


PairBesideSocket.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
TestPairBesideSocket = PairBesideSocket.TestCase
