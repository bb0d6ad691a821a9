"""Options of sockets, and what the kernel reports about a peer."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from sbus.protocol.keys import PeerCredentials
from sbus.protocol.packets import DEFAULT_MAX_PACKET
from sbus.syscalls.sockets import (
    LARGEST_SEND_BUFFER,
    OVERHEAD,
    UNKNOWN_GROUPS,
    grow_send_buffer,
    is_unix,
    max_sendable,
    overflow_ids,
    peer_credentials,
    peer_groups,
    unread_bytes,
)
from tests.support.waiting import wait_until
from tests.unit.syscalls.pairs import socketpair


@pytest.mark.parametrize("size", [5_000, 100_000, DEFAULT_MAX_PACKET])
def test_raise_send_buffer(helper, size):
    """Afterwards a packet of the size fits, and the result is the length of the longest packet, to the byte."""
    ours, theirs = socketpair()
    with ours, theirs:
        longest = grow_send_buffer(ours, size)
        assert longest == max_sendable(ours)
        assert size <= longest <= 2 * (size + OVERHEAD)

        def send() -> int:
            try:
                return helper.send_packets(ours, [b"x" * longest])
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                return 0  # the kernel has no room beside much other work: clients try again, too

        assert wait_until(send) == 1
        theirs.recv(1)
        with pytest.raises(OSError, match="Message too long"):
            helper.send_packets(ours, [b"x" * (longest + 1)])


def test_send_buffer_has_an_end():
    """However long packets may be, the kernel never holds more than 1 MiB for one client."""
    ours, theirs = socketpair()
    with ours, theirs:
        assert grow_send_buffer(ours, 100 << 20) == LARGEST_SEND_BUFFER - OVERHEAD
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == LARGEST_SEND_BUFFER == 1 << 20


def test_peer_credentials():
    """The kernel names the peer of a connection."""
    ours, theirs = socketpair()
    with ours, theirs:
        me = PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
        assert peer_credentials(ours) == peer_credentials(theirs) == me


def test_peer_credentials_of_large_ids():
    """UIDs and GIDs are unsigned: the largest is not a negative number."""

    class Socket(socket.socket):
        def getsockopt(self, *args):
            return struct.pack("=iII", 7, 2**32 - 2, 2**32 - 1)

    with Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        assert peer_credentials(sock) == PeerCredentials(pid=7, uid=2**32 - 2, gid=2**32 - 1)


@pytest.mark.parametrize(
    ("family", "kind", "wanted"),
    [
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, True),
        (socket.AF_UNIX, socket.SOCK_STREAM, False),
        (socket.AF_UNIX, socket.SOCK_DGRAM, False),
        (socket.AF_INET, socket.SOCK_STREAM, False),
    ],
)
def test_is_unix(family, kind, wanted):
    """Only a Unix-domain SEQPACKET socket is recognized as one, by its descriptor too."""
    with socket.socket(family, kind) as sock:
        assert is_unix(sock) is wanted
        again = socket.socket(fileno=os.dup(sock.fileno()))
        with again:
            assert is_unix(again) is wanted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may choose its groups")
@pytest.mark.parametrize("count", [0, 1, 256, 257, 1_024, 1_025, 65_536])
def test_groups_of_a_peer_are_the_kernels(count):
    """The supplementary groups of a peer are those that the kernel noted; more than 1,024 are not looked at."""
    before = os.getgroups()
    os.setgroups(range(100, 100 + count))
    try:
        ours, theirs = socketpair()
    finally:
        os.setgroups(before)
    with ours, theirs:
        assert peer_groups(ours) == (frozenset(range(100, 100 + count)) if count <= 1_024 else UNKNOWN_GROUPS)


def test_groups_that_the_kernel_does_not_tell():
    """They are not taken for none: a rule that denies may be for one of them."""
    with socket.socket() as sock:
        assert peer_groups(sock) == UNKNOWN_GROUPS


def test_overflow_ids(tmp_path):
    """The overflow IDs are the system's, or the usual ones if the system does not publish them."""
    for i, name in enumerate(("overflowuid", "overflowgid")):
        with open(f"/proc/sys/kernel/{name}") as file:
            assert overflow_ids()[i] == int(file.read())
    (tmp_path / "overflowuid").write_text("1234\n")
    (tmp_path / "overflowgid").write_text("none\n")
    assert overflow_ids(str(tmp_path)) == (1234, 65534)
    (tmp_path / "overflowuid").unlink()
    assert overflow_ids(str(tmp_path)) == (65534, 65534)


def test_unread_bytes():
    """The kernel counts what the peer has not read: each packet that it reads makes the count smaller."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert unread_bytes(ours) == 0
        for _ in range(3):
            ours.send(b"x" * 100)
        counts = [unread_bytes(ours)]
        for _ in range(3):
            theirs.recv(100)
            counts.append(unread_bytes(ours))
        assert counts[0] >= 300
        assert counts == sorted(set(counts), reverse=True)
        assert counts[-1] == 0
