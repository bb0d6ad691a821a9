"""Descriptors that come with packets, and that nobody has asked for, are closed."""

from __future__ import annotations

import array
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.syscalls.sockets import (
    discard_plain,
    pass_descriptors,
)
from tests.support.descriptors import descriptors
from tests.unit.syscalls.pairs import socketpair

# --- descriptors ----------------------------------------------------------------------------------


def with_descriptors(sock, packet, count):
    """Send a packet with `count` descriptors."""
    with open(os.devnull, "rb") as file:
        rights = array.array("i", [file.fileno()] * count)
        sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@pytest.mark.parametrize("count", [1, 253])
def test_descriptors_are_dropped(helper, pair, count):
    """Descriptors sent along are not received, and do not pile up; their packets come like any others."""
    ours, theirs = pair
    reader = helper.PacketReader(100)
    before = descriptors()
    for _ in range(3):
        theirs.send(b"before")
        with_descriptors(theirs, b"with", count)
        with_descriptors(theirs, b"x" * 101, count)
        theirs.send(b"after")
        assert reader.read(ours) == ([b"before", b"with", b"", b"after"], False)
        assert not descriptors().items() - before.items()


def test_dropped_descriptors_are_closed(helper, pair):
    """A descriptor that was dropped is closed: a pipe whose only writer it was reads as ended."""
    ours, theirs = pair
    reading, writing = os.pipe2(os.O_NONBLOCK)
    try:
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing]))])
        os.close(writing)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        assert helper.PacketReader(100).read(ours) == ([b"x"], False)
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)


def test_descriptors_on_an_empty_packet(helper, pair):
    """A packet of nothing but a descriptor reads as the end, and the descriptor is dropped."""
    ours, theirs = pair
    before = descriptors()
    with_descriptors(theirs, b"", 1)
    assert helper.PacketReader(100).read(ours) == ([], True)
    assert not descriptors().items() - before.items()


def test_refused_descriptors():
    """If the kernel can, it refuses descriptors to the sender; a socket that cannot is not changed."""
    ours, theirs = socketpair()
    with ours, theirs:
        pass_descriptors(ours, False)
        try:
            with_descriptors(theirs, b"x", 1)
        except PermissionError:
            theirs.send(b"x")
        assert ours.recv(10) == b"x"
    with socket.socket(socket.AF_INET) as other:
        pass_descriptors(other, False)


# --- socket options -------------------------------------------------------------------------------


@given(
    packets=st.lists(st.tuples(st.sampled_from([b"", b"x", b"xx" * 600]), st.booleans()), max_size=8),
    limit=st.integers(0, 10),
    leaves=st.booleans(),
)
def test_discarding_what_is_plain(packets: list[tuple[bytes, bool]], limit: int, leaves: bool) -> None:
    """Packets are discarded up to the limit, or the first that came with descriptors; only an empty socket is one."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, peer:
        ours.send(b"unread")  # so that the peer's end resets the connection
        for packet, has_descriptor in packets:
            if has_descriptor:
                socket.send_fds(peer, [packet], [0])
            else:
                peer.send(packet)
        if leaves:
            peer.close()
        ours.shutdown(socket.SHUT_RDWR)
        is_plain = [not has_descriptor for _, has_descriptor in packets]
        plain = is_plain.index(False) if False in is_plain else len(packets)
        assert discard_plain(ours, limit) is (plain == len(packets) <= limit)
        for packet, _ in packets[min(plain, limit) :]:
            assert ours.recv(2000) == packet
