"""Packets in a byte stream: cut out again however the stream is cut."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.packets import DRIPPING
from sbus.seqpacket.framing import EMPTY_FRAME, LARGEST_READ, READ_SIZE, FrameReader, frame
from tests.support.examples import examples

LIMIT = 1000

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def read_all(reader: FrameReader, sock: socket.socket) -> tuple[list[bytes], bool]:
    """Read until nothing more has arrived."""
    packets: list[bytes] = []
    while True:
        more, ended = reader.read(sock)
        packets += more
        if ended or not more:
            return packets, ended


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=20), st.lists(st.integers(1, 400), max_size=30))
def test_any_cuts(packets, cuts):
    """However the stream is cut into pieces, each packet comes out once, whole and in order, as soon as it is there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        reader, data, got = FrameReader(LIMIT), frame(packets), []
        for cut in cuts:
            theirs.sendall(data[:cut])
            data = data[cut:]
            got += read_all(reader, ours)[0]
            assert got == packets[: len(got)]
        theirs.sendall(data)
        got += read_all(reader, ours)[0]
        assert got == packets
        assert reader.held == 0
        theirs.close()
        assert reader.read(ours) == ([], True)


def test_nothing_has_arrived(pair):
    """Without data there are no packets, and the stream goes on."""
    assert FrameReader(LIMIT).read(pair[0]) == ([], False)


@pytest.mark.parametrize(("length", "marker"), [(LIMIT + 1, b""), (2**32 - 1, b""), (0, EMPTY_FRAME)])
def test_a_bad_length_ends_the_stream(pair, length, marker):
    """The packets before a bad length come first, then one that every protocol refuses, then the end; never more."""
    ours, theirs = pair
    reader = FrameReader(LIMIT)
    theirs.sendall(frame([b"good"]) + length.to_bytes(4, "little") + frame([b"never"]))
    assert reader.read(ours) == ([b"good", marker], True)
    theirs.sendall(frame([b"never"]))
    assert reader.read(ours) == ([], True)
    assert reader.held == 0


@pytest.mark.parametrize("part", [b"\x01", b"\x05\0\0\0", b"\x05\0\0\0abcd"])
def test_an_end_inside_a_frame(pair, part):
    """A peer that leaves in the middle of a frame has broken the connection; the packets before it are delivered."""
    ours, theirs = pair
    reader = FrameReader(LIMIT)
    theirs.sendall(frame([b"good"]) + part)
    theirs.close()
    assert reader.read(ours) == ([b"good"], False)
    with pytest.raises(OSError, match="inside a frame") as caught:
        reader.read(ours)
    assert caught.value.errno == errno.ECONNRESET
    assert reader.read(ours) == ([], True)


def test_memory_follows_what_was_sent(pair):
    """A length that announces much and is followed by nothing costs its four bytes."""
    ours, theirs = pair
    reader = FrameReader(1 << 30)
    theirs.sendall((1 << 30).to_bytes(4, "little"))
    assert reader.read(ours) == ([], False)
    assert reader.held == 4


def test_a_long_packet_is_read_in_large_pieces(pair):
    """The rest of a packet that has begun is asked for at once, within a bound."""
    ours, theirs = pair

    class Asked(socket.socket):
        sizes: list[int] = []

        def recv(self, size: int, flags: int = 0) -> bytes:
            self.sizes.append(size)
            return super().recv(size, flags)

    reader = FrameReader(1 << 20)
    with Asked(fileno=ours.detach()) as sock:
        theirs.sendall((1 << 20).to_bytes(4, "little"))
        reader.read(sock)
        theirs.sendall(bytes(1000))
        reader.read(sock)
    assert Asked.sizes == [READ_SIZE, LARGEST_READ]


def test_a_peer_that_goes_on_sending_does_not_keep_the_reader():
    """A read that gets less than it asked for is the last one, though more may have come meanwhile."""
    ours, theirs = socket.socketpair()

    class Dripping(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            theirs.send(b"x")
            return super().recv(size, flags)

    reader = FrameReader(1 << 20)
    with theirs, Dripping(fileno=ours.detach()) as sock:
        theirs.sendall((1 << 20).to_bytes(4, "little"))
        assert reader.read(sock) == ([], False)
        assert reader.held >= 4


def drip(pair: Pair, reader: FrameReader, packet: bytes, size: int, reads: int) -> tuple[list[bytes], bool, int]:
    """Send a packet over and over in pieces of some bytes, each in a read of its own, until the stream ends.

    :returns: the packets, whether the stream has ended, and the reads.
    """
    ours, theirs = pair
    data, got, ended, at, made = frame([packet]), list[bytes](), False, 0, 0
    while made < reads and not ended:
        made += 1
        theirs.sendall(data[at : at + size])
        at = at + size if at + size < len(data) else 0
        packets, ended = reader.read(ours)
        got += packets
    return got, ended, made


@pytest.mark.parametrize("before", [0, 1])
def test_a_peer_that_sends_packets_in_tiny_pieces_breaks_the_rules(pair, before):
    """After 1,000 reads that brought single bytes the stream ends, behind what is complete, with a packet to refuse."""
    reader = FrameReader(LIMIT)
    if before:
        assert drip(pair, reader, bytes(500), 504, 1_000) == ([bytes(500)] * 1_000, False, 1_000)
    packets, ended, reads = drip(pair, reader, b"x" * 96, 1, 3_000)
    assert (ended, reads) == (True, 1_000)
    assert packets == [b"x" * 96] * 10 + [DRIPPING]
    assert reader.read(pair[0]) == ([], True)


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (5, 1),  # every ninth read completes a packet: 889 of 1,000 do not
        (996, 16),
        (10, 14),
    ],
)
def test_a_peer_may_send_in_small_pieces(pair, length, size):
    """Reads that complete a packet are no reason to end a stream, and nor are reads that bring 16 bytes or more."""
    reader, packet = FrameReader(LIMIT), bytes(length)
    packets, ended, _ = drip(pair, reader, packet, size, 4_000)
    assert not ended
    assert set(packets) == {packet}


def test_the_rule_for_tiny_pieces_to_the_read(pair):
    """Of 1,000 reads, 899 may be vain, and not 900."""
    for whole, ends in ((101, False), (100, True)):
        reader = FrameReader(1 << 20)
        assert drip(pair, reader, b"whole", 9, whole) == ([b"whole"] * whole, False, whole)
        packets, ended, reads = drip(pair, reader, bytes(1_000), 1, 1_000 - whole)
        assert (packets, ended, reads) == ([DRIPPING] if ends else [], ends, 1_000 - whole)
        if not ends:
            pair[1].sendall(frame([bytes(1_000)])[1_000 - whole :])
            assert reader.read(pair[0]) == ([bytes(1_000)], False)
