"""What a client's socket has taken is counted in packets, however they travel."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from sbus.client.sending import read_at_once, send_some, share
from sbus.protocol.bundles import MAX_BUNDLE, unbundle
from sbus.syscalls.batch import BATCH, PacketReader
from sbus.syscalls.sockets import max_sendable


@pytest.fixture
def ours_and_theirs() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def received(sock: socket.socket) -> list[bytes]:
    """All that has come, as packets were sent."""
    reader, packets = PacketReader(1 << 20), []
    while batch := reader.read(sock)[0]:
        packets += batch
    return packets


@pytest.mark.parametrize("limit", [0, 1000, MAX_BUNDLE])
def test_what_is_taken_is_what_arrives(ours_and_theirs: tuple[socket.socket, socket.socket], limit: int) -> None:
    """The count is that of the packets that the peer gets, also when the socket is full in the middle."""
    ours, theirs = ours_and_theirs
    packets = [b"MSG k\0%d " % i + bytes(i % 300) for i in range(20_000)]
    sent = rounds = 0
    while count := send_some(ours, packets[sent : sent + share(limit)], limit):
        sent += count
        rounds += 1
    assert 0 < sent < len(packets)
    got = received(theirs)
    assert unbundle(list(got)) == packets[:sent]
    assert max(map(len, got)) <= (limit or 1000)
    assert (len(got) < sent / 2) is (limit > 0)


def test_alone_is_plain(ours_and_theirs: tuple[socket.socket, socket.socket]) -> None:
    """One packet is no bundle, whether it is all there is or does not fit with others."""
    ours, theirs = ours_and_theirs
    assert send_some(ours, [], MAX_BUNDLE) == 0
    assert send_some(ours, [b"alone"], MAX_BUNDLE) == 1
    assert send_some(ours, [bytes(900), b"x", bytes(900)], 500) == 3
    assert received(theirs) == [b"alone", bytes(900), b"x", bytes(900)]


def test_socket_that_takes_no_bundle_so_long(ours_and_theirs: tuple[socket.socket, socket.socket]) -> None:
    """Packets go one by one then; one that does not fit by itself raises what the kernel says."""
    ours, theirs = ours_and_theirs
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4000)
    packets = [bytes([i]) * 500 for i in range(100)]
    sent = send_some(ours, packets, MAX_BUNDLE)
    assert 0 < sent <= BATCH
    assert received(theirs) == packets[:sent]
    for packets in ([bytes(max_sendable(ours) + 1)], [bytes(max_sendable(ours) + 1), b"x"]):
        with pytest.raises(OSError, match="too long") as raised:
            send_some(ours, packets, MAX_BUNDLE)
        assert raised.value.errno == errno.EMSGSIZE


def test_shares() -> None:
    """Where there are bundles, fewer packets are read at once, as each may be many, and more are offered."""
    assert read_at_once(0) == share(0) == BATCH
    assert read_at_once(MAX_BUNDLE) < BATCH < share(MAX_BUNDLE)
