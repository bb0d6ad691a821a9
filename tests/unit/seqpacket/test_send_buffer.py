"""The send buffer of a server's socket: small for a peer that does not read, and full-sized for one that does."""

from __future__ import annotations

import socket

import pytest
from twisted.internet import error

from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.seqpacket.multiplexer import WRITE
from sbus.seqpacket.send_buffer import START, SendBuffer
from sbus.seqpacket.transport import PacketTransport
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER, OVERHEAD, max_sendable, unread_bytes
from tests.support.reactors import HandTurnedReactor, Recorder, received, socket_pair

FULL = 2 * (DEFAULT_MAX_PACKET + OVERHEAD)


@pytest.fixture
def sockets():
    ours, theirs = socket_pair()
    with ours, theirs:
        yield ours, theirs


def fill(sock: socket.socket, packet: bytes = b"x" * 100) -> int:
    """Send until the socket is full; return the number of packets."""
    count = 0
    try:
        while True:
            sock.send(packet)
            count += 1
    except BlockingIOError:
        return count


@pytest.mark.parametrize(
    ("may_grow", "expected"),
    [(None, [START, FULL]), (lambda size: size < FULL // 2, [START, 2 * START, 4 * START, 8 * START, FULL])],
)
def test_it_starts_small_and_grows(sockets, may_grow, expected):
    """A new buffer has 64 KiB; then the longest packet fits twice. If that is too much, it doubles each time."""
    ours, _ = sockets
    buffer = SendBuffer(ours, DEFAULT_MAX_PACKET)
    sizes = [buffer.size]
    while buffer.grow(may_grow):
        sizes.append(buffer.size)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == buffer.size
        assert max_sendable(ours) == buffer.size - OVERHEAD
    assert sizes == expected
    assert not buffer.grow(may_grow)


@pytest.mark.parametrize(("max_packet", "start", "full"), [(10_000, 20_064, 20_064), (1 << 30, START, 1 << 20)])
def test_it_is_never_larger_than_needed(sockets, max_packet, start, full):
    """A small limit of packets needs no more than its double; no limit takes the buffer above 1 MiB."""
    buffer = SendBuffer(sockets[0], max_packet)
    assert (buffer.size, buffer.full_size) == (start, full)
    while buffer.grow(None):
        pass
    assert buffer.size == full <= LARGEST_SEND_BUFFER


def test_a_silent_peer_keeps_little(sockets):
    """What the kernel holds for a peer that reads nothing is about the start size, or one packet more."""
    ours, _ = sockets
    buffer = SendBuffer(ours, DEFAULT_MAX_PACKET)
    fill(ours)
    assert START <= unread_bytes(ours) <= START + 1024
    assert fill(ours, bytes(buffer.size - OVERHEAD)) == 0


def test_a_packet_that_needs_it(sockets):
    """A packet that is longer than the buffer makes it grow to that length; a shorter one changes nothing."""
    ours, _ = sockets
    buffer = SendBuffer(ours, DEFAULT_MAX_PACKET)
    assert not buffer.fit(buffer.size - OVERHEAD, None)
    assert buffer.fit(100_000, None)
    assert 100_000 <= buffer.size - OVERHEAD <= 100_002
    assert ours.send(bytes(100_000)) == 100_000
    assert buffer.fit(DEFAULT_MAX_PACKET, None)
    assert not buffer.fit(1 << 20, None)


def test_it_asks_before_it_grows(sockets):
    """The account is asked with the bytes to be added, and may refuse; nothing grows then."""
    ours, _ = sockets
    buffer = SendBuffer(ours, DEFAULT_MAX_PACKET)
    asked: list[int] = []

    def refuse(size: int) -> bool:
        asked.append(size)
        return False

    assert not buffer.grow(refuse)
    assert not buffer.fit(100_000, refuse)
    assert not buffer.fit(10, refuse)
    assert asked == [FULL - START, START, 100_000 + OVERHEAD - START]
    assert max_sendable(ours) == START - OVERHEAD


def test_the_kernel_grants_less(sockets, monkeypatch):
    """Where the kernel grants no more, the buffer is as it is, and is not asked for more again and again."""
    ours, _ = sockets
    buffer = SendBuffer(ours, DEFAULT_MAX_PACKET)
    monkeypatch.setattr("sbus.seqpacket.send_buffer.set_send_buffer", lambda sock, size: START)
    assert not buffer.grow(None)
    assert buffer.full_size == START


class Connected:
    """A transport as a port makes it, with its raw peer."""

    def __init__(self) -> None:
        self.reactor = HandTurnedReactor()
        ours, self.peer = socket_pair()
        self.transport = PacketTransport(self.reactor, ours, send_buffer=SendBuffer(ours, DEFAULT_MAX_PACKET))
        self.recorder = Recorder()
        self.transport.start(self.recorder)
        self.sock = ours

    @property
    def size(self) -> int:
        return self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def send(self, packets: list[bytes]) -> None:
        for packet in packets:
            self.transport.queue.write(packet)
        self.transport.flush()


@pytest.fixture
def connected():
    made = Connected()
    with made.peer:
        yield made
        made.transport.abortConnection()
        made.reactor.settle()


def test_a_transport_grows_for_a_peer_that_reads(connected):
    """Only a peer that reads has the buffer grow: the socket is reported as writable then."""
    connected.send([b"x" * 100] * 5000)
    assert connected.size == START
    connected.reactor.settle()
    assert connected.size == START
    got, sizes = 0, []
    while got < 5000:
        got += len(received(connected.peer))
        connected.transport.ready(WRITE, False)
        sizes.append(connected.size)
    assert sizes[0] == FULL


def test_a_transport_asks_its_protocol(connected):
    """If the protocol refuses, packets go on in the small buffer, and one that does not fit is the queue's matter."""
    connected.transport.may_grow = lambda size: False
    connected.send([b"x" * 100] * 500)
    got = 0
    while got < 500:
        got += len(received(connected.peer))
        connected.transport.ready(WRITE, False)
    assert connected.size == START
    connected.send([bytes(100_000)])
    connected.reactor.settle()
    (reason,) = connected.recorder.lost
    reason.trap(error.MessageLengthError)


def test_a_long_packet_goes_out(connected):
    """A packet of the limit is sent to a new client at once, between small ones."""
    packets = [b"a", bytes(DEFAULT_MAX_PACKET), b"b"]
    connected.send(packets)
    got = received(connected.peer)
    connected.transport.ready(WRITE, False)
    assert got + received(connected.peer) == packets
    assert DEFAULT_MAX_PACKET + OVERHEAD <= connected.size <= FULL


def test_bundles_are_packed_for_the_buffer(connected):
    """Bundles are agreed on in full, but none is larger than a new buffer: none makes it grow, and all share one."""
    limit = 65_536
    assert connected.transport.start_bundling(limit) == limit
    connected.send([b"x"])
    connected.send([bytes(130)] * 2000)
    assert connected.size == START
    lengths = [len(packet) for packet in received(connected.peer)]
    while connected.transport.queue:
        connected.transport.ready(WRITE, False)
        lengths += [len(packet) for packet in received(connected.peer)]
    assert connected.size > START
    assert max(lengths) == lengths[1] == 4 + 488 * 134 <= START - OVERHEAD < 4 + 489 * 134 <= limit
