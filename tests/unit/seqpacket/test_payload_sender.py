"""Descriptors on their way to a peer: how many it may leave unread, and when the transport goes on."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from twisted.internet import error
from twisted.python.failure import Failure

from sbus.flood import PROGRAM, PayloadMessage, PayloadShare, SharedBudget, SharedMemory, UserShare
from sbus.protocol.bundles import unbundle
from sbus.seqpacket import payload_sender
from sbus.seqpacket.multiplexer import RETRY
from sbus.seqpacket.payload_sender import MOST, MOST_ENDED
from sbus.syscalls.memfd import Memfd
from sbus.syscalls.sockets import least_charge, send_with, unread_bytes
from tests.support.descriptors import descriptors
from tests.support.reactors import Recorder
from tests.support.transports import World


def shared(size: int = 100) -> SharedMemory:
    """Return sealed memory."""
    memfd = Memfd.create()
    os.write(memfd.fileno(), b"x" * size)
    memfd.seal()
    return SharedMemory(memfd, UserShare(SharedBudget()))


def message(number: int, memory: SharedMemory | None = None) -> PayloadMessage:
    """Return a message whose payload has a length of its own."""
    return PayloadMessage.published(b"k", memory or shared(), 0, number + 1, PROGRAM)


def take(peer: socket.socket) -> bytes | None:
    """Receive a packet that comes with one descriptor, and close that; None if there is none."""
    try:
        packet, files, _, _ = socket.recv_fds(peer, 1 << 20, 4)
    except BlockingIOError:
        return None
    assert len(files) == 1
    os.close(files[0])
    return packet


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def connect(world: World) -> socket.socket:
    peer = world.connect(Recorder())
    world.transports[-1].pass_payloads(True)
    world.settle()
    return peer


def test_the_least_charge() -> None:
    """No packet takes less memory than a packet of one byte."""
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, peer:
        socket.send_fds(ours, [b"x"], [0])
        assert 0 < least_charge() <= unread_bytes(ours)


def test_unread_descriptors_are_bounded(world: World) -> None:
    """A peer that does not read has `MOST` of them, though its socket takes more, and the reactor is idle meanwhile."""
    peer = connect(world)
    transport = world.transports[0]
    for number in range(3 * MOST):
        transport.write(message(number))
    world.settle()
    assert len(transport.queue) == 2 * MOST
    assert unread_bytes(transport.getHandle()) // least_charge() == MOST
    got = []
    while (packet := take(peer)) is not None:
        got.append(packet)
        world.settle()
    assert got == [b"FMSG k\x000 %d" % (number + 1) for number in range(3 * MOST)]
    assert len(transport.queue) == 0


@pytest.mark.parametrize(("connections", "most"), [(64, 16), (100, 10), (1024, 1), (5000, 1)])
def test_the_connections_of_one_user_share_a_limit(world: World, connections: int, most: int) -> None:
    """More connections have fewer unread descriptors each, but one in any case, and all arrive when they are read."""
    peer = world.connect(Recorder())
    (transport,) = world.transports
    share = PayloadShare()
    share.connections = connections - 1
    transport.pass_payloads(True, share)
    for number in range(20):
        transport.write(message(number))
    world.settle()
    assert unread_bytes(transport.getHandle()) // least_charge() == most
    for number in range(20):
        assert take(peer) == b"FMSG k\x000 %d" % (number + 1)
        world.settle()


@pytest.mark.parametrize("leave", [False, True], ids=["reads", "hangs up"])
@pytest.mark.parametrize("end", ["abortConnection", "loseConnection"])
def test_what_is_unread_counts_after_the_end(world: World, end: str, leave: bool) -> None:
    """A connection that has ended counts until its peer has read the descriptors, or hung up."""
    peer = world.connect(Recorder())
    (transport,) = world.transports
    before, share = len(descriptors()), PayloadShare()
    assert transport.pass_payloads(True, share)
    memory = shared()
    for number in range(3):
        transport.write(message(number, memory))
    world.settle()
    getattr(transport, end)()
    world.settle()
    assert transport.protocol is None
    if leave:
        peer.close()
    else:
        assert [take(peer) for _ in range(2)] == [b"FMSG k\x000 1", b"FMSG k\x000 2"]
        world.settle()
        assert (share.connections, share.ended) == (1, 1)
        assert take(peer) == b"FMSG k\x000 3"
        assert peer.recv(1) == b""
    world.settle()
    assert (share.connections, share.ended) == (0, 0)
    del memory
    assert len(descriptors()) <= before - 1


def test_connections_that_have_ended_are_bounded(world: World) -> None:
    """A user with `MOST_ENDED` whose descriptors are unread gets none on others, until one is read."""
    share, peers = PayloadShare(), []
    for _ in range(MOST_ENDED):
        peers.append(world.connect(Recorder()))
        assert world.transports[-1].pass_payloads(True, share)
        world.transports[-1].write(message(0))
        world.settle()
        world.transports[-1].abortConnection()
        world.settle()
    world.connect(Recorder())
    transport = world.transports[-1]
    assert not transport.pass_payloads(True, share)
    assert transport.pass_payloads(True, PayloadShare())
    assert take(peers[0]) is not None
    world.settle()
    world.connect(Recorder())
    assert world.transports[-1].pass_payloads(True, share)


def test_nothing_unread_holds_nothing(world: World) -> None:
    """A connection whose descriptors were read ends at once."""
    peer = world.connect(Recorder())
    (transport,) = world.transports
    share = PayloadShare()
    assert transport.pass_payloads(True, share)
    transport.write(message(0))
    world.settle()
    assert take(peer) is not None
    transport.abortConnection()
    world.settle()
    assert peer.recv(1) == b""
    assert (share.connections, share.ended) == (0, 0)


@pytest.mark.parametrize("stops_first", [False, True])
def test_nothing_is_kept_when_the_reactor_stops(world: World, stops_first: bool) -> None:
    """A reactor that stops closes what is kept, and nothing more is kept."""
    world.connect(Recorder())
    (transport,) = world.transports
    share = PayloadShare()
    assert transport.pass_payloads(True, share)
    transport.write(message(0))
    world.settle()
    if not stops_first:
        transport.abortConnection()
        world.settle()
        assert share.ended == 1
    for reader in world.reactor.getReaders():
        reader.connectionLost(Failure(error.ConnectionDone()))
    assert (share.connections, share.ended) == (0, 0)


def test_server_without_a_free_descriptor_tries_again(world: World) -> None:
    """The first wait of a server opens a few descriptors; without any, the connection stays, and goes on later."""
    peer = connect(world)
    transport = world.transports[0]
    packets = [message(number) for number in range(3 * MOST)]
    least_charge.cache_clear()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(set(range(1000)) - set(map(int, descriptors()))), limits[1]))
    try:
        for packet in packets:
            transport.write(packet)
        world.settle()
        assert len(transport.queue) == 2 * MOST
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    got = 0
    while got < len(packets):
        world.settle()
        world.reactor.advance(RETRY)
        got += take(peer) is not None


def test_what_is_behind_waits_too(world: World) -> None:
    """A plain packet behind a payload that waits keeps its place, and one in front does not wait."""
    peer = connect(world)
    transport = world.transports[0]
    for number in range(MOST):
        transport.write(message(number))
    for packet in (b"front", message(MOST), b"behind"):
        transport.write(packet)
    world.settle()
    for _ in range(MOST):
        assert take(peer) is not None
    assert peer.recv(100) == b"front"
    world.settle()
    assert take(peer) == b"FMSG k\x000 %d" % (MOST + 1)
    assert peer.recv(100) == b"behind"


def test_a_peer_that_leaves_while_the_transport_waits(world: World) -> None:
    """The connection ends, and with it everything that waited."""
    before = descriptors()
    peer = connect(world)
    transport = world.transports[0]
    for number in range(2 * MOST):
        transport.write(message(number))
    world.settle()
    peer.close()
    world.settle()
    assert len(transport.queue) == 0
    world.close()
    assert {what for what in descriptors().values() if "memfd" in what} <= set(before.values())


def test_messages_of_one_memory_go_together(world: World) -> None:
    """With bundles, messages in one memory that follow each other take one descriptor."""
    peer = connect(world)
    transport = world.transports[0]
    transport.start_bundling(65_536)
    transport.write(b"first")
    world.settle()
    assert peer.recv(100) == b"first"
    one, other = shared(), shared()
    for packet in (message(1, one), message(2, one), b"between", message(3, one), message(4, other), message(5, other)):
        transport.write(packet)
    world.settle()
    first = take(peer)
    assert first is not None
    assert unbundle([first]) == [b"FMSG k\x000 2", b"FMSG k\x000 3"]
    assert peer.recv(100) == b"between"
    assert take(peer) == b"FMSG k\x000 4"
    last = take(peer)
    assert last is not None
    assert unbundle([last]) == [b"FMSG k\x000 5", b"FMSG k\x000 6"]


def test_off_sends_the_bytes(world: World) -> None:
    """Payloads that wait when the peer takes no more descriptors are sent as plain messages, if they fit a packet."""
    peer = connect(world)
    transport = world.transports[0]
    transport.pass_payloads(False)
    transport.write(message(2))
    world.settle()
    assert peer.recv(100) == b"MSG k\0xxx"


@pytest.fixture
def too_many(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next errors of the kernel: it has too many descriptors under way."""
    failures = [errno.ETOOMANYREFS]

    def fail(*args: object) -> bool:
        if failures:
            raise OSError(failures.pop(), "Too many references")
        return send_with(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(payload_sender, "send_with", fail)
    return failures


def test_too_many_descriptors_under_way(world: World, too_many: list[int]) -> None:
    """With too many descriptors under way, a payload that fits a packet goes with its bytes: nobody stops it."""
    peer = connect(world)
    transport = world.transports[0]
    transport.write(message(0))
    transport.write(message(1))
    world.settle()
    assert peer.recv(100) == b"MSG k\0x"
    assert take(peer) == b"FMSG k\x000 2"


def test_too_many_descriptors_and_no_packet_is_long_enough(world: World, too_many: list[int]) -> None:
    """ETOOMANYREFS is nobody's fault: the transport tries again after 50 ms."""
    size = 1 << 20
    peer = connect(world)
    world.transports[0].write(PayloadMessage.published(b"k", shared(size), 0, size, PROGRAM))
    world.settle()
    assert take(peer) is None
    world.reactor.rightNow += 0.05
    world.settle()
    assert take(peer) == b"FMSG k\x000 %d" % size


def test_no_memory_for_the_plain_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for the bytes of a payload, the connection stays, and goes on after 50 ms."""
    peer = connect(world)
    transport = world.transports[0]
    transport.pass_payloads(False)

    def fail(message: PayloadMessage) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(PayloadMessage, "plain", fail)
        transport.write(message(2))
        world.settle()
    world.reactor.advance(RETRY)
    world.settle()
    assert peer.recv(100) == b"MSG k\0xxx"
