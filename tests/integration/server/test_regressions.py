"""Regression tests: none of the original server's mistakes comes back."""

from __future__ import annotations

import resource
import signal
import socket
import struct

import pytest

from tests.support.harness import SAME_USER, Client, goes_on, numbered, refusal
from tests.support.waiting import paused


@pytest.fixture(params=[False, True], ids=["compiled", "plain"])
def started(request, lease):
    """A bus, with the compiled helper (where there is one) and without."""
    return lease(pure=request.param)


def test_sub_then_unsub(started):
    """SUB and then UNSUB, in any number and order, does not crash the server."""
    client = started.client()
    for pattern in (b"a", b"", b"a/", b"*", b"a/*/b*", b"!/cred////x", b"a" * 10_000):
        for _ in range(3):
            client.sub(pattern)
            client.unsub(pattern)
        client.unsub(pattern)
        client.sub(pattern, pattern)
        client.unsub(pattern)
        client.unsub(pattern)
        client.unsub(pattern)
    client.msg(b"a")
    assert client.sync() == []
    assert goes_on(started)


@pytest.mark.parametrize("how", ["closes", "resets", "does not receive"])
def test_peer_that_fails_in_a_fan_out(started, how):
    """Peers that fail in the middle of a fan-out do not affect the other receivers or the publisher."""
    subscribers = [started.client(b"fan/*") for _ in range(30)]
    publisher = started.client()
    packets = numbered(b"fan/out", 200)
    for packet in packets[:100]:
        publisher.send(packet)
    publisher.sync()
    failing = subscribers[3:30:5]
    with paused(started.pid):
        for packet in packets[100:]:
            assert publisher.push(packet)
        for subscriber in failing:
            if how == "does not receive":
                subscriber.sock.shutdown(socket.SHUT_RD)
            else:
                if how == "resets":
                    subscriber.send(b"MSG unread\0")  # by the server, which makes the end a reset
                    assert subscriber.recv() == packets[0]
                subscriber.close()
    for subscriber in subscribers:
        if subscriber not in failing:
            assert subscriber.receive(200) == packets
    assert publisher.sync() == []
    assert goes_on(started)


def test_whose_credentials(bus):
    """A client's own credentials are accepted, and foreign ones refused; it was the other way round."""
    started = bus()
    mine = started.client(user=SAME_USER)
    mine.sub(mine.credentials + b"/inbox")
    assert mine.sync() == []
    thief = started.client(user=SAME_USER)
    thief.sub(mine.credentials + b"/inbox")
    assert thief.has_ended()
    sender = started.client()
    packet = sender.msg(mine.credentials + b"/inbox")
    sender.sync()
    assert mine.sync() == [packet]


def test_stalled_reader(started):
    """A reader that does not read freezes no publisher, and no other reader of the same messages."""
    stalled = started.client(b"news/*")
    reader = started.client(b"news/*")
    publisher = started.client()
    for start in range(0, 10_000, 100):
        packets = numbered(b"news/flash", 100, 200, start)
        for packet in packets:
            publisher.send(packet)
        assert reader.receive(100) == packets
    assert publisher.sync() == []
    assert goes_on(started)
    assert stalled.receive(10_000) == numbered(b"news/flash", 10_000, 200)


def test_sender_with_an_enlarged_buffer(started):
    """A packet too large for the receivers' sockets costs its sender the connection, not the receivers theirs."""
    receivers = [started.client(b"large") for _ in range(3)]
    sender = started.client()
    sender.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    largest = min(sender.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 32, 1 << 20)
    if largest <= 409_600:
        pytest.skip("the kernel lets nobody send packets that large: net.core.wmem_max")
    good = sender.msg(b"large", b"x" * (409_600 - 10))
    sender.send(b"MSG large\0".ljust(largest, b"y"))
    assert sender.has_ended()
    for receiver in receivers:
        assert receiver.sync() == [good]
    assert goes_on(started)


@pytest.mark.parametrize("count", [1, 3000])
def test_publisher_that_closes_at_once(started, count):
    """Messages of a publisher that closes at once are not lost."""
    reader = started.client(b"last/*")
    packets = numbered(b"last/words", count)
    with Client(started.address) as publisher:
        for packet in packets:
            publisher.send(packet)
    assert reader.receive(count) == packets


def test_truncated_packet(started):
    """A packet that did not arrive whole is not forwarded, not even in part, to anyone."""
    readers = [started.client(b""), started.client(b"long"), started.client(b"*")]
    sender = started.client(b"long")
    sender.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 500_000)
    before = sender.msg(b"long", b"before")
    assert sender.sync() == [before]
    try:
        sender.send(b"MSG long\0".ljust(409_601, b"x"))
    except OSError:
        pytest.skip("the kernel lets nobody send packets that large: net.core.wmem_max")
    assert sender.has_ended()
    for reader in readers:
        assert reader.sync() == [before]


def test_no_descriptors_left(bus):
    """A server without free descriptors waits for one; it does not spin, and serves the connected clients."""
    started = bus()
    one, other = started.client(b"talk"), started.client(b"talk")
    most = resource.prlimit(started.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (max(started.descriptors()) + 1, most))
    assert started.client().has_ended()
    before = started.cpu()
    assert started.client().has_ended(), "which takes it until it tries again"
    assert started.cpu() - before <= 0.2
    packet = one.msg(b"talk")
    assert one.recv() == packet
    assert other.recv() == packet


def test_socket_file(bus, directory):
    """SIGTERM leaves no socket file behind, so that the next server can start."""
    started = bus()
    assert (directory / "bus").exists()
    assert "in use" in refusal(directory)
    assert started.stop(signal.SIGTERM) == 0
    assert not (directory / "bus").exists()


@pytest.mark.parametrize("mode", [b"blocking/soft/queue", b"blocking/soft/error"])
def test_bundle_that_is_read_with_the_question_for_bundles(lease, mode):
    """Such a bundle does not evade flood control: packets wait up to the limits, or the reader is disconnected."""
    started = lease("--queue-messages=100", "--queue-bytes=100000")
    reader, publisher = started.client(b"k"), started.client()
    reader.cmsg(mode)
    reader.sync()
    many = b"".join(struct.pack("<I", 6) + b"MSG k\0" for _ in range(3000))
    with paused(started.pid):
        publisher.msg(b"other")  # is read alone, as nobody has sent more than one packet at a time; the rest together
        publisher.send(b"CMSG bundle/on")
        publisher.send(b"BNDL" + many)
    for _ in range(300):
        publisher.send(b"MSG k\0" + bytes(10_000))
    publisher.send(b"CMSG bundle/off")
    while publisher.recv() != b"CMSG bundle/off\0":
        pass
    if mode == b"blocking/soft/error":
        started.wait_log(f"client {started.nth(1)} disconnected: ")
        reader.rest()
        assert reader.has_ended()
    else:
        started.wait_log(rf"dropped \d+ messages .* for client {started.nth(1)},")
        assert len(reader.sync()) < 3300
