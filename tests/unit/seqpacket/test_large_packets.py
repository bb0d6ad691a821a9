"""Large packets: read in a separate pass, and sent on past the protocol."""

from __future__ import annotations

import socket

import pytest

from sbus.seqpacket.interfaces import Outlet
from sbus.seqpacket.multiplexer import READ
from sbus.seqpacket.pacing import LARGE_PER_PASS
from sbus.syscalls.batch import PacketReader
from tests.support.reactors import BatchRecorder, received, socket_pair
from tests.support.transports import numbered

# --- reading --------------------------------------------------------------------------------------


def test_large_packets_come_in_small_batches(world):
    """The buffers of a batch stay within bounds, however long a packet may be."""
    recorder = BatchRecorder()
    peer = world.connect(recorder, max_packet=16 << 20)
    for packet in numbered(10):
        peer.send(packet)
    world.turn()
    assert recorder.batches == [2] * 5


# --- writing --------------------------------------------------------------------------------------


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
