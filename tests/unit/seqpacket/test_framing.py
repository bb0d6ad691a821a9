"""Packets in a byte stream: cut out again however the stream is cut."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_reads_that_complete_no_packet_are_measured(monkeypatch):
    """The time of each read that brings bytes and no packet counts, so that single bytes can be charged."""
    monkeypatch.setattr(time, "thread_time_ns", itertools.count().__next__)  # 2 ns from the first look to the third
    ours, theirs = socket.socketpair()
    reader = FrameReader(100)
    with ours, theirs:
        for byte in b"\x05\0\0\0MSG ":
            theirs.sendall(bytes([byte]))
            assert reader.read(ours) == ([], False)
        assert reader.vain == 8
        theirs.sendall(b"\0")
        assert reader.read(ours) == ([b"MSG \0"], False)
        assert reader.vain == 8


def test_long_reads_are_measured_though_they_complete_packets(monkeypatch):
    """A packet among single bytes does not hide what these cost; usual reads are free."""
    ours, theirs = socket.socketpair()
    reader = FrameReader(100)
    with ours, theirs:
        for took, vain in ((10_000, 0), (10_100, 91)):
            monkeypatch.setattr(time, "thread_time_ns", itertools.count(step=took).__next__)
            theirs.sendall(frame([b"MSG \0"]))
            assert reader.read(ours) == ([b"MSG \0"], False)
            assert reader.vain == vain


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
        assert reader.vain > 0
