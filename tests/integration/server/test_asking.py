"""Interest and last values over real sockets, with clients of several users."""

from __future__ import annotations

import struct
import threading
import time
from contextlib import suppress

import pytest

from tests.support.harness import Bus, Client

ONE, OTHER = (12_001, 12_001), (12_002, 12_002)


def unpacked(packet: bytes) -> list[bytes]:
    """Return the packets in a bundle, or the packet itself."""
    if not packet.startswith(b"BNDL"):
        return [packet]
    packets, at = [], 4
    while at < len(packet):
        (size,) = struct.unpack_from("<I", packet, at)
        packets.append(packet[at + 4 : at + 4 + size])
        at += 4 + size
    return packets


def publish(client: Client, count: int, value: bytes) -> None:
    for number in range(count):
        client.send(b"MSG state/%d\0%b" % (number, value))
    client.send(b"CMSG !/cred/whoami")
    client.recv()


def test_interest_across_users(as_root, bus):
    """A client learns that another user's client has come and gone, and root how many there are."""
    started = bus("--mode=0777")
    watcher, root = started.client(user=ONE), started.client()
    watcher.send(b"CMSG interest/on\0a/b")
    assert watcher.recv() == b"CMSG interest\x000 a/b"
    subscribers = [started.client(b"a/*", user=OTHER) for _ in range(2)]
    assert watcher.recv() == b"CMSG interest\x001 a/b"
    for client, count in ((watcher, 1), (root, 2)):
        client.send(b"CMSG probe\0a/b")
        assert client.recv() == b"CMSG probe\x00%d a/b" % count
    for client in subscribers:
        client.close()
    assert watcher.recv() == b"CMSG interest\x000 a/b"


def test_no_interest(as_root, bus):
    """With --no-interest only root and the server's user are answered."""
    started = bus("--mode=0777", "--no-interest")
    other, root = started.client(user=ONE), started.client()
    for client in (other, root):
        client.send(b"CMSG probe\0a")
        client.send(b"CMSG interest/on\0a")
        client.send(b"CMSG !/cred/whoami")
    assert other.recv().startswith(b"CMSG !/cred/whoami\0")
    assert root.recv() == b"CMSG probe\x000 a"


def test_churn_by_another_user(as_root, bus):
    """While one user subscribes to everything and ends it all day, a watcher of 1,000 keys has short round trips."""
    started = bus("--mode=0777")
    watcher, churner = started.client(user=ONE), started.client(user=OTHER)
    for number in range(1000):
        watcher.send(b"CMSG interest/on\0%d/%d" % (number % 7, number))
        assert watcher.recv()
    over = threading.Event()

    def churn() -> None:
        with suppress(OSError):
            number = 0
            while not over.is_set():
                number += 1
                for pattern in (b"", b"*/", b"%d/*" % (number % 7), b"*/%d*" % (number % 10)):
                    churner.send(b"SUB " + pattern)
                    churner.send(b"UNSUB " + pattern)

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        longest = 0.0
        for _ in range(30):
            began = time.monotonic()
            watcher.send(b"CMSG !/cred/whoami")
            while not watcher.recv().startswith(b"CMSG !/cred/whoami"):
                pass
            longest = max(longest, time.monotonic() - began)
    finally:
        over.set()
        thread.join(5)
    assert longest < 2.0


@pytest.mark.parametrize("bundles", [False, True])
def test_last_values_for_a_slow_reader(as_root, bus, bundles):
    """A slow reader gets 3,000 kept messages in their order, the mark, and every message published meanwhile."""
    started: Bus = bus("--mode=0777", "--last-value=state/")
    publisher = started.client(user=ONE)
    publish(publisher, 3000, b"old" * 100)
    reader = started.client(user=OTHER)
    reader.send(b"CMSG blocking/soft/discard")
    if bundles:
        reader.send(b"CMSG bundle/on")
        assert reader.recv().startswith(b"CMSG bundle/on\0")
    reader.send(b"CMSG last\0state/")
    reader.send(b"CMSG !/cred/whoami")
    got = unpacked(reader.recv())
    publish(publisher, 2000, b"new")
    while not got[-1].startswith(b"CMSG !/cred/whoami"):
        got += unpacked(reader.recv())
    assert got[:3000] == [b"MSG state/%d\0%b" % (number, b"old" * 100) for number in range(3000)]
    assert got[3000] == b"CMSG last/done\0state/"
    assert got[3001:-1] == [b"MSG state/%d\0new" % number for number in range(len(got) - 3002)]
    assert len(got) == 3000 + 1 + 2000 + 1


def test_the_last_value_can_be_the_last_packet_of_a_batch(bus):
    """A client that has asked for last values goes on with live messages, however many values there are."""
    started = bus("--last-value=state/")
    publisher, readers = started.client(), [started.client() for _ in range(130)]
    for number, reader in enumerate(readers):
        publisher.send(b"MSG state/%d\0old" % number)
        publisher.sync()
        reader.send(b"CMSG last\0state/")
        reader.send(b"CMSG !/cred/whoami")
        got: list[bytes] = []
        while not got or not got[-1].startswith(b"CMSG !/cred/whoami"):
            got.append(reader.recv())
        assert got[:-1] == [b"MSG state/%d\0old" % each for each in range(number + 1)] + [b"CMSG last/done\0state/"]


def test_values_belong_to_their_publisher(as_root, bus):
    """A user who publishes without end pushes out own values, and not those of another user."""
    started = bus("--mode=0777", "--last-value=,keys=100")
    one, other = started.client(user=ONE), started.client(user=OTHER)
    other.send(b"MSG mine\0x")
    publish(one, 1000, b"x")
    other.send(b"CMSG last\0mine")
    assert other.recv() == b"MSG mine\0x"
    assert other.recv() == b"CMSG last/done\0mine"


def test_patterns_are_for_root(as_root, bus):
    """Root gets the patterns of all other users, others only the whoami behind the request."""
    started = bus("--mode=0777")
    one, root = started.client(b"a/*", user=ONE), started.client()
    for client in (one, root):
        client.send(b"CMSG interest/patterns")
        client.send(b"CMSG !/cred/whoami")
    assert one.recv().startswith(b"CMSG !/cred/whoami\0")
    first = root.recv()
    assert first.startswith(b"CMSG interest/pattern\0+ ")
    assert first.endswith(b" a/*")
    assert root.recv() == b"CMSG interest/patterns\0"
    assert root.recv().startswith(b"CMSG !/cred/whoami\0")
    one.close()
    assert root.recv().startswith(b"CMSG interest/pattern\0- ")
