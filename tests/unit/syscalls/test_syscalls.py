"""Batches of packets on real sockets: one test body for the compiled helper and its twin in plain Python."""

from __future__ import annotations

import array
import contextlib
import errno
import importlib
import os
import resource
import socket
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.keys import PeerCredentials
from sbus.protocol.packets import DEFAULT_MAX_PACKET, Split
from sbus.syscalls import batch as chosen
from sbus.syscalls.batch import BATCH
from sbus.syscalls.sockets import (
    LARGEST_SEND_BUFFER,
    OVERHEAD,
    UNKNOWN_GROUPS,
    discard_plain,
    grow_send_buffer,
    is_unix,
    max_sendable,
    overflow_ids,
    pass_descriptors,
    peer_credentials,
    peer_groups,
    unread_bytes,
)
from tests.support.descriptors import descriptors
from tests.support.examples import examples
from tests.support.waiting import wait_until


@pytest.fixture(params=["_pure", "_batch"])
def helper(request):
    """Each implementation in turn; the compiled one is skipped where it was not built."""
    return load(request.param)


def load(name):
    try:
        return importlib.import_module(f"sbus.syscalls.{name}")
    except ImportError:
        pytest.skip(f"{name} is not built")


def socketpair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


@pytest.fixture
def pair():
    """Two connected sockets, with buffers that hold a batch of small packets."""
    ours, theirs = socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        yield ours, theirs


def small(sock):
    """Give a socket the smallest send buffer, which holds a few packets."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


# --- reading -----------------------------------------------------------------------------------------------------


def test_nothing_there(helper, pair):
    """If nothing has arrived, a read returns at once, with nothing."""
    ours, _ = pair
    assert helper.PacketReader(100).read(ours) == ([], False)


def test_read(helper, pair):
    """Packets come in order, one by one, with every byte."""
    ours, theirs = pair
    packets = [b"a", b"\0", b"b\0c\n", bytes(range(256)) * 3, b"d"]
    for packet in packets:
        theirs.send(packet)
    reader = helper.PacketReader(1000)
    assert reader.read(ours) == (packets, False)
    assert reader.read(ours) == ([], False)
    theirs.send(b"later")
    assert reader.read(ours) == ([b"later"], False)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("size", [1, 60_000])
def test_a_read_tells_whether_it_has_emptied_the_socket(helper, pair, size, descriptors):
    """It is empty after less than was asked for; a full batch, and the end, leave that open."""
    ours, theirs = pair
    reader = helper.PacketReader(65_536, descriptors=descriptors)
    assert not reader.is_empty
    for most, sent, left in ((3, 0, True), (2, 3, False), (2, 0, True), (2, 2, False), (1, 0, True), (1, 1, False)):
        for _ in range(sent):
            theirs.send(b"x" * size)
        reader.read(ours, most)
        assert reader.is_empty is left
    theirs.close()
    assert reader.read(ours) == ([], True)
    assert not reader.is_empty


@pytest.mark.parametrize("blocking", [True, False])
def test_read_never_waits(helper, pair, blocking):
    """A read does not wait, even on a blocking socket."""
    ours, theirs = pair
    ours.setblocking(blocking)
    reader = helper.PacketReader(100)
    assert reader.read(ours) == ([], False)
    theirs.send(b"a")
    assert reader.read(ours) == ([b"a"], False)


def test_a_read_of_large_packets_ends_early(helper, pair):
    """After a batch of large packets a read gets an eighth of its bytes; nothing is lost or reordered."""
    ours, theirs = pair
    reader = helper.PacketReader(1_500, read_bytes=32_000)
    reads: list[list[bytes]] = []
    for _ in range(2):
        packets = [bytes([at]) * 1_500 for at in range(20)]
        for packet in packets:
            theirs.send(packet)
        found: list[bytes] = []
        reads.clear()
        while len(found) < len(packets):
            reads.append(reader.read(ours)[0])
            found += reads[-1]
        assert found == packets
    assert [len(read) for read in reads] == [3] * 6 + [2]  # 3 have more than 4,000 bytes
    for _ in range(64):
        theirs.send(b"small")
    assert reader.read(ours) == ([b"small"] * 64, False)  # in several calls of the kernel


def test_a_read_of_large_bundles_ends_early(helper, pair):
    """Bundles hold small messages: a read of them gets all its bytes, and a few packets more."""
    ours, theirs = pair
    reader = helper.PacketReader(1_500, read_bytes=10_000)
    packets = [b"BNDL" + bytes([at]) * 1_496 for at in range(20)]
    for packet in packets:
        theirs.send(packet)
    found = reader.read(ours)[0]  # by the compiled twin all of them, by the other one those of 10,000 bytes
    for packet in packets[: len(found)]:
        theirs.send(packet)
    assert 7 <= len(reader.read(ours)[0]) <= 7 + 3


def test_large_and_small_packets_in_turn(helper, pair):
    """Large packets among small ones, empty and oversized ones come whole, in order, also in later reads."""
    ours, theirs = pair
    reader = helper.PacketReader(2_000, read_bytes=32_000)
    packets = [b"a", b"b" * 1_500, b"c" * 2_000, b"d", b"e" * 1_000, b"f" * 999, b"g"]
    for _ in range(3):
        for packet in [*packets[:3], b"x" * 2_001, *packets[3:]]:
            theirs.send(packet)
        found: list[bytes] = []
        while len(found) < len(packets) + 1:
            found += reader.read(ours)[0]
        assert found == [*packets[:3], b"", *packets[3:]]
    theirs.send(b"h" * 1_500)
    theirs.close()
    assert reader.read(ours) == ([b"h" * 1_500], True)


def test_a_large_packet_that_was_read_alone(helper, pair):
    """After a large packet that was read alone, a read gets an eighth of its bytes."""
    ours, theirs = pair
    reader = helper.PacketReader(1_500, read_bytes=32_000)
    packets = [bytes([at]) * 1_500 for at in range(20)]
    for packet in packets:
        theirs.send(packet)
    assert [reader.read(ours, 1)[0] for _ in range(2)] == [packets[:1], packets[1:2]]
    assert reader.read(ours) == (packets[2:5], False)


def test_large_messages_in_two_parts(helper, pair):
    """A reader that splits has each large message whole, or in two parts of which the first ends with the key."""
    ours, theirs = pair
    reader = helper.PacketReader(2_000, read_bytes=32_000, splits=True)
    small, payload = b"MSG key\0small", bytes(1_500)
    packets = [
        b"MSG key\0" + payload,
        small,
        b"MSG " + b"k" * 600 + b"\0" + payload[:1_000],
        b"MSG " + payload.replace(b"\0", b"n"),
        b"CMSG key\0" + payload,
        b"MSG \0" + payload,
    ]
    for _ in range(2):
        for packet in packets:
            theirs.send(packet)
        found: list[bytes] = []
        while len(found) < len(packets):
            found += reader.read(ours)[0]
        assert [packet.whole() if isinstance(packet, Split) else packet for packet in found] == packets
        assert list(map(len, found)) == list(map(len, packets))
        assert {packet[:] for packet in found if isinstance(packet, Split)} <= {b"MSG key\0", b"MSG \0"}
    if helper.__name__.endswith("_batch"):
        assert type(found[0]) is Split


_SIZES = st.sampled_from([1, 3, 9, 500, 600, 1_500, 1_501, 1_990, 2_000, 2_001, 2_500])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"MSG k\0", b"MSG l\0", b"MSG ", b"BNDL", b"", b"CMSG k\0"]), _SIZES, st.integers(1, 4)
        ),
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)
def test_whatever_follows_a_large_packet(steps, splits, descriptors):
    """After packets of one size and key, any other is whole, too, or an empty packet if it is longer than the limit."""
    packets = [
        (head + bytes((1 + at % 255,)) * size)[:size]
        for at, (head, size, times) in enumerate(steps)
        for _ in range(times)
    ]
    whole = [packet if len(packet) <= 2_000 else b"" for packet in packets]
    for name in ("_pure", "_batch"):
        reader = load(name).PacketReader(2_000, read_bytes=32_000, splits=splits, descriptors=descriptors)
        ours, theirs = socketpair()
        with ours, theirs:
            found: list[bytes] = []
            for packet in packets:
                theirs.send(packet)
                if len(packet) % 2:  # several wait at times
                    found += reader.read(ours)[0]
            while len(found) < len(packets):
                found += reader.read(ours)[0]
            assert reader.read(ours) == ([], False)
        assert [packet.whole() if isinstance(packet, Split) else packet for packet in found] == whole


@pytest.mark.parametrize("splits", [False, True])
def test_packets_of_one_size_are_not_looked_at_before(splits):
    """A large packet that follows two of its size is received at once; any other size is asked for first."""
    reader, packet = load("_batch").PacketReader(2_000, read_bytes=32_000, splits=splits), b"MSG k\0" + bytes(1_500)
    ours, theirs = socketpair()
    with ours, theirs:
        for count in range(5):
            theirs.send(packet)
            assert len(reader.read(ours)[0]) == 1
            assert reader.is_steady is (count >= 2)
        theirs.send(packet + b"x")
        assert reader.read(ours)[0][0].endswith(b"\0x")
        assert not reader.is_steady


@pytest.mark.parametrize("limit", [1, 63, 64, 65, 1000])
def test_truncation(helper, pair, limit):
    """A packet of the limit comes whole; with one byte more, the empty packet stands for it."""
    ours, theirs = pair
    reader = helper.PacketReader(limit)
    whole = os.urandom(limit)
    for packet in (whole, whole + b"x", whole, b"x" * 10 * limit, b"y"):
        theirs.send(packet)
    packets, ended = reader.read(ours)
    assert (packets, ended) == ([whole, b"", whole, b"", b"y"], False)
    assert [(packet.size, packet.is_message) for packet in packets if not packet] == [
        (limit + 1, False),
        (10 * limit, False),
    ]


@pytest.mark.parametrize("most", [1, 64])
def test_truncated_packet_is_known(helper, pair, most):
    """The stand-in for a packet that was too long says how long it was, and whether it was a message."""
    ours, theirs = pair
    reader = helper.PacketReader(10)
    for packet in (b"MSG key\0payload", b"BNDL" + bytes(20), b"MSG k\0"):
        theirs.send(packet)
    packets = [packet for _ in range(3) for packet in reader.read(ours, most)[0]]
    assert [(packet.size, packet.is_message) for packet in packets[:2]] == [(15, True), (24, False)]
    assert packets == [b"", b"", b"MSG k\0"]


def test_one_at_a_time(helper, pair):
    """A read for one packet gets the next one, whole or as the empty packet, and the end by itself."""
    ours, theirs = pair
    for packet in (b"whole", b"too long", b"w", b""):
        theirs.send(packet)
    reader = helper.PacketReader(5)
    read = [reader.read(ours, 1) for _ in range(4)]
    assert read == [([b"whole"], False), ([b""], False), ([b"w"], False), ([], True)]
    assert reader.read(ours, 1) == ([], False)


def test_one_at_a_time_to_the_end(helper, pair):
    """A reset costs no waiting packet, and is not an error, if packets are read one at a time."""
    ours, theirs = pair
    theirs.send(b"1")
    theirs.send(b"2")
    ours.send(b"never read")
    theirs.close()
    reader = helper.PacketReader(100)
    assert [reader.read(ours, 1) for _ in range(4)] == [([b"1"], False), ([b"2"], False), ([], True), ([], True)]


def test_one_of_a_closed_socket(helper, pair):
    """A closed socket cannot be read for one packet either."""
    pair[0].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        helper.PacketReader(100).read(pair[0], 1)


def test_packets_of_the_limit(helper, pair):
    """The longest packets that the bus takes come whole, in any number."""
    ours, theirs = pair
    grow_send_buffer(theirs, DEFAULT_MAX_PACKET)
    reader = helper.PacketReader(DEFAULT_MAX_PACKET)
    longest = os.urandom(DEFAULT_MAX_PACKET)
    for _ in range(5):
        assert helper.send_packets(theirs, [longest]) == 1
        assert reader.read(ours) == ([longest], False)
    assert helper.send_packets(theirs, [longest + b"x"]) == 1
    theirs.send(b"after")
    assert reader.read(ours) == ([b"", b"after"], False)


@pytest.mark.parametrize("size", [1, 2, 63, 64])
def test_batches(helper, pair, size):
    """A read takes one batch at most, and the next read goes on behind it."""
    ours, theirs = pair
    packets = [b"%d" % i for i in range(2 * size + 1)]
    for packet in packets:
        theirs.send(packet)
    reader = helper.PacketReader(100, size)
    assert (reader.max_packet, reader.batch) == (100, size)
    assert [reader.read(ours)[0] for _ in range(4)] == [packets[:size], packets[size : 2 * size], packets[-1:], []]


def test_a_batch_is_64_packets(helper, pair):
    """By default a batch has 64 packets, in both directions."""
    ours, theirs = pair
    assert BATCH == helper.PacketReader(100).batch == 64
    packets = [b"%d" % i for i in range(70)]
    assert helper.send_packets(theirs, packets) == 64
    assert helper.send_packets(theirs, packets[64:]) == 6
    reader = helper.PacketReader(100)
    assert reader.read(ours) == (packets[:64], False)
    assert reader.read(ours) == (packets[64:], False)


def test_less_than_a_batch(helper, pair):
    """A read can ask for fewer packets than a batch has; it never takes more."""
    ours, theirs = pair
    packets = [b"%d" % i for i in range(10)]
    for packet in packets:
        theirs.send(packet)
    reader = helper.PacketReader(100, 4)
    assert reader.read(ours, 1) == (packets[:1], False)
    assert reader.read(ours, 3) == (packets[1:4], False)
    assert reader.read(ours, 64) == (packets[4:8], False)
    assert reader.read(ours, most=4) == (packets[8:], False)


@pytest.mark.parametrize(("max_packet", "batch"), [(0, 1), (-1, 1), (100, 0), (100, -1), (100, 65)])
def test_bounds(helper, max_packet, batch):
    """A packet has at least one byte, a batch 1 to 64 packets."""
    with pytest.raises(ValueError, match="a batch has 1 to 64 packets, a packet at least 1 byte"):
        helper.PacketReader(max_packet, batch)


@pytest.mark.parametrize("most", [0, -1])
def test_bounds_of_a_read(helper, pair, most):
    """A read asks for at least one packet; none would look like an empty socket."""
    with pytest.raises(ValueError, match="a batch has at least 1 packet"):
        helper.PacketReader(100).read(pair[0], most)


@pytest.mark.parametrize("size", [1 << 50, 1 << 58, 1 << 60, sys.maxsize])
def test_packets_beyond_all_memory(helper, size):
    """Buffers larger than any memory are refused, even if their size overflows."""
    with pytest.raises(MemoryError):
        helper.PacketReader(size)


def test_memory_is_given_back(helper):
    """The buffers of a reader are freed with it."""

    def pages():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0])

    helper.PacketReader(DEFAULT_MAX_PACKET)
    before = pages()
    for _ in range(100):
        helper.PacketReader(DEFAULT_MAX_PACKET)
    assert (pages() - before) * resource.getpagesize() < 10 * DEFAULT_MAX_PACKET


# --- the end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_end_of_file(helper, pair, count):
    """Packets sent before the end come together with it, and later reads report it again."""
    ours, theirs = pair
    packets = [b"%d" % i for i in range(count)]
    for packet in packets:
        theirs.send(packet)
    theirs.close()
    reader = helper.PacketReader(100)
    assert reader.read(ours) == (packets, True)
    assert reader.read(ours) == ([], True)


def test_end_of_file_behind_a_full_batch(helper, pair):
    """The end that follows a full batch is reported by the next read."""
    ours, theirs = pair
    for _ in range(3):
        theirs.send(b"x")
    theirs.close()
    reader = helper.PacketReader(100, 3)
    assert reader.read(ours) == ([b"x"] * 3, False)
    assert reader.read(ours) == ([], True)


def test_half_closed(helper, pair):
    """A peer that is shut down for writing has ended its sending; it can still be sent to."""
    ours, theirs = pair
    theirs.send(b"last")
    theirs.shutdown(socket.SHUT_WR)
    assert helper.PacketReader(100).read(ours) == ([b"last"], True)
    assert helper.send_packets(ours, [b"answer"]) == 1
    assert theirs.recv(100) == b"answer"


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("after", [0, 1, 100])
def test_zero_length_packet(helper, pair, before, after):
    """A packet without a byte reads as the end, whatever comes behind it."""
    ours, theirs = pair
    for packet in [b"before"] * before + [b""] + [b"after"] * after:
        theirs.send(packet)
    assert helper.PacketReader(100).read(ours) == ([b"before"] * before, True)


def test_zero_length_packet_is_not_a_truncated_one(helper, pair):
    """A packet that was too long is not an end, though the reader has no bytes of either."""
    ours, theirs = pair
    theirs.send(b"xx")
    assert helper.PacketReader(1).read(ours) == ([b""], False)
    theirs.send(b"")
    assert helper.PacketReader(1).read(ours) == ([], True)


@pytest.mark.parametrize("count", [1, 3])
def test_reset_before_data(helper, pair, count):
    """A reset that the kernel reports before the packets that still wait costs none of them."""
    ours, theirs = pair
    packets = [b"%d" % i for i in range(count)]
    for packet in packets:
        theirs.send(packet)
    ours.send(b"never read")
    theirs.close()
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET  # does not take the error
    assert helper.PacketReader(100).read(ours) == (packets, True)


def test_reset_without_data(helper, pair):
    """A reset with nothing behind it is an end like any other."""
    ours, theirs = pair
    ours.send(b"never read")
    theirs.close()
    assert helper.PacketReader(100).read(ours) == ([], True)


def test_reset_is_really_reported_first(pair):
    """The kernel behaves as the tests on resets rely on."""
    ours, theirs = pair
    theirs.send(b"x")
    ours.send(b"never read")
    theirs.close()
    with pytest.raises(ConnectionResetError):
        ours.recv(100)
    assert ours.recv(100) == b"x"


def test_reset_between_two_reads(helper, pair):
    """A reset that comes while the peer's packets are being read loses none either."""
    ours, theirs = pair
    for i in range(6):
        theirs.send(b"%d" % i)
    reader = helper.PacketReader(100, 2)
    assert reader.read(ours) == ([b"0", b"1"], False)
    ours.send(b"never read")
    theirs.close()
    assert reader.read(ours) == ([b"2", b"3"], False)
    assert reader.read(ours) == ([b"4", b"5"], False)
    assert reader.read(ours) == ([], True)


class Scripted:
    """A socket that answers as the test says: what a kernel can do, but seldom does on request."""

    def __init__(self, *answers: bytes | OSError) -> None:
        self.answers = list(answers)

    def recv_into(self, buffer, size, flags):
        assert flags & socket.MSG_DONTWAIT
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        buffer[: len(answer)] = answer
        return len(answer)


def test_errors_in_the_middle_lose_nothing():
    """An error behind packets does not cost these (plain twin; recvmmsg(2) sees to it for the compiled helper)."""
    reset, broken = ConnectionResetError(errno.ECONNRESET, "reset"), OSError(errno.EIO, "broken")
    reader = load("_pure").PacketReader(10)
    assert reader.read(Scripted(b"a", broken)) == ([b"a"], False)
    assert reader.read(Scripted(reset, b"a", reset, b"b")) == ([b"a"], False)
    assert reader.read(Scripted(b"a", reset, b"b", b"")) == ([b"a", b"b"], True)
    with pytest.raises(ConnectionResetError):
        reader.read(Scripted(reset, reset))
    with pytest.raises(OSError, match="broken"):
        reader.read(Scripted(broken))


def test_closed_socket(helper, pair):
    """On a closed socket both directions fail, and the new owner of its descriptor loses nothing."""
    ours, _ = pair
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        helper.PacketReader(100).read(ours)
    for packets in ([b"a"], [b"a", b"b"]):
        with pytest.raises(OSError, match="Bad file descriptor"):
            helper.send_packets(ours, packets)


# --- descriptors -------------------------------------------------------------------------------------------------


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


# --- sending on --------------------------------------------------------------------------------------------------

_HEAD = b"MSG key\0"


def _message(at, size=1_500):
    return _HEAD + bytes([at]) * size


@pytest.fixture
def onward(helper, pair):
    """A reader of small buffers, the socket that it reads, its peer, and two ends of a socket that it sends on to."""
    ours, theirs = pair
    out, away = socketpair()
    with out, away:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        yield helper.PacketReader(2_000, read_bytes=32_000), ours, theirs, out, away


def _received(sock):
    packets = []
    with contextlib.suppress(BlockingIOError):
        while packet := sock.recv(4_096):
            packets.append(packet)
    return packets


def test_packets_that_begin_alike_go_on(onward):
    """They are sent on in order, as long as there are any, and counted."""
    reader, ours, theirs, out, away = onward
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (0, 0, [], False)
    packets = [_message(at) for at in range(5)]
    for packet in packets:
        theirs.send(packet)
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (5, sum(map(len, packets)), [], False)
    assert _received(away) == packets


@pytest.mark.parametrize(
    "other",
    [b"MSG kez\0" + bytes(1_500), b"MSG key", _HEAD, _HEAD + bytes(400), b"CMSG key\0" + bytes(1_500), b"a"],
    ids=["key", "short", "empty", "small", "verb", "one byte"],
)
def test_another_packet_comes_back(onward, other):
    """A packet that begins in another way, or is small, is returned, and what is behind it stays in the socket."""
    reader, ours, theirs, out, away = onward
    for packet in (_message(0), other, _message(1)):
        theirs.send(packet)
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (1, len(_message(0)), [other], False)
    assert _received(away) == [_message(0)]
    assert reader.read(ours) == ([_message(1)], False)


def test_a_packet_that_is_too_long_comes_back(onward):
    """It becomes an empty one that knows its length, as if it had been read."""
    reader, ours, theirs, out, _ = onward
    theirs.send(_message(0, 2_500))
    count, size, [packet], ended = reader.forward(ours, out, _HEAD, 1 << 20)
    assert (count, size, packet, packet.size, packet.is_message, ended) == (0, 0, b"", len(_HEAD) + 2_500, True, False)


def test_to_send_on_ends_with_the_bytes(onward):
    """After so many bytes the rest stays in the socket."""
    reader, ours, theirs, out, away = onward
    for at in range(5):
        theirs.send(_message(at))
    assert reader.forward(ours, out, _HEAD, 2_000) == (2, 2 * len(_message(0)), [], False)
    assert reader.forward(ours, out, _HEAD, 0) == (0, 0, [], False)
    assert _received(away) == [_message(0), _message(1)]


def test_a_full_socket_gives_a_packet_back(onward):
    """What the socket does not take is returned: nothing is lost, and nothing comes twice."""
    reader, ours, theirs, out, away = onward
    small(out)
    packets = [_message(at) for at in range(20)]
    for packet in packets:
        theirs.send(packet)
    count, size, rest, ended = reader.forward(ours, out, _HEAD, 1 << 20)
    assert 0 < count < 20
    assert (size, rest, ended) == (count * len(packets[0]), [packets[count]], False)
    assert _received(away) == packets[:count]


@pytest.mark.parametrize("close", [socket.socket.close, lambda sock: sock.shutdown(socket.SHUT_RD)])
def test_a_receiver_that_is_gone_gives_a_packet_back(onward, close):
    """An error of sending is left to the one who sends the packet again."""
    reader, ours, theirs, out, away = onward
    close(away)
    theirs.send(_message(0))
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (0, 0, [_message(0)], False)


def test_the_end_behind_what_goes_on(onward):
    """The end of the stream is reported with what was sent on before it."""
    reader, ours, theirs, out, _ = onward
    theirs.send(_message(0))
    theirs.close()
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (1, len(_message(0)), [], True)
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (0, 0, [], True)


def test_a_reset_before_what_goes_on(onward):
    """A reset is reported once, before the packets that wait: these still go on."""
    reader, ours, theirs, out, away = onward
    ours.send(b"never read")
    theirs.send(_message(0))
    theirs.close()
    assert reader.forward(ours, out, _HEAD, 1 << 20) == (1, len(_message(0)), [], True)
    assert _received(away) == [_message(0)]


def test_to_send_on_from_a_closed_socket(onward):
    """An error of reading is raised."""
    reader, ours, _, out, _ = onward
    ours.close()
    with pytest.raises(OSError, match=r"\[Errno 9\]"):
        reader.forward(ours, out, _HEAD, 1 << 20)


@settings(max_examples=examples(60))
@given(st.data())
def test_what_goes_on_and_what_comes_back(data):
    """However reads and sending on take turns, each packet goes one of the two ways, in order."""
    helper = load(data.draw(st.sampled_from(["_pure", "_batch"])))
    heads = st.sampled_from([_HEAD, b"MSG k\0", b"BNDL", b"x"])
    packets = data.draw(
        st.lists(st.builds(lambda head, size: head + bytes(size), heads, st.sampled_from([0, 9, 1_500])))
    )
    reader = helper.PacketReader(2_000, read_bytes=32_000)
    (ours, theirs), (out, away) = socketpair(), socketpair()
    with ours, theirs, out, away:
        if data.draw(st.booleans()):
            small(out)
        found, sent = [], 0
        for packet in packets:
            theirs.send(packet)
            sent += 1
            if sent < len(packets) and data.draw(st.booleans()):
                continue
            while True:
                if data.draw(st.booleans()):
                    back, _ = reader.read(ours, data.draw(st.integers(1, 3)))
                else:
                    count, size, back, _ = reader.forward(ours, out, _HEAD, data.draw(st.integers(1, 5_000)))
                    gone = _received(away)
                    assert (len(gone), sum(map(len, gone))) == (count, size)
                    found += gone
                    if count and not back:
                        continue
                found += back
                if not back:
                    break
        assert found + reader.read(ours)[0] == packets


# --- sending -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_send(helper, pair, count):
    """Packets are sent in order, one by one, and their number is returned."""
    ours, theirs = pair
    packets = [b"%d\0" % i * (i + 1) for i in range(count)]
    assert helper.send_packets(ours, packets) == count
    assert [theirs.recv(1000) for _ in range(count)] == packets
    with pytest.raises(BlockingIOError):
        theirs.recv(1000)


def test_full_socket(helper, pair):
    """A full socket takes nothing more, which is not an error; sending goes on where it stopped."""
    ours, theirs = pair
    small(ours)
    packets = [b"%03d" % i for i in range(64)]
    sent = helper.send_packets(ours, packets)
    assert 0 < sent < 64
    assert helper.send_packets(ours, packets[sent:]) == 0
    assert helper.send_packets(ours, packets[sent : sent + 1]) == 0
    received: list[bytes] = []
    while len(received) < 64:
        received.append(theirs.recv(100))
        sent += helper.send_packets(ours, packets[sent:])
    assert received == packets


@pytest.mark.parametrize("blocking", [True, False])
def test_send_never_waits(helper, pair, blocking):
    """A send does not wait, even on a blocking socket."""
    ours, _ = pair
    small(ours)
    ours.setblocking(blocking)
    while helper.send_packets(ours, [b"x" * 100] * 64):
        pass
    assert helper.send_packets(ours, [b"x" * 100] * 2) == 0
    assert helper.send_packets(ours, [b"x" * 100]) == 0


def test_too_long_for_the_buffer(helper, pair):
    """A packet that never fits is an error if it is the first, and otherwise ends the batch before it."""
    ours, theirs = pair
    small(ours)
    longest = max_sendable(ours)
    fits, too_long = b"x" * longest, b"x" * (longest + 1)
    for packets in ([too_long], [too_long, b"a"]):
        with pytest.raises(OSError, match="Message too long") as caught:
            helper.send_packets(ours, packets)
        assert caught.value.errno == errno.EMSGSIZE
    assert helper.send_packets(ours, [b"a", too_long, b"b"]) == 1
    assert theirs.recv(10) == b"a"
    assert helper.send_packets(ours, [fits]) == 1
    assert theirs.recv(longest + 1) == fits


def test_a_packet_from_two_places(helper, pair):
    """It is one packet; a full socket takes none of it, and any other reason is an error."""
    ours, theirs = pair
    small(ours)
    assert helper.send_split(ours, b"MSG k\0", b"payload")
    assert theirs.recv(100) == b"MSG k\0payload"
    with pytest.raises(OSError, match="Message too long"):
        helper.send_split(ours, b"a", b"x" * max_sendable(ours))
    sent = 0
    while helper.send_split(ours, b"%d " % sent, bytes(100)):
        sent += 1
    assert [theirs.recv(200) for _ in range(sent)] == [b"%d " % at + bytes(100) for at in range(sent)]
    assert helper.send_split(ours, b"", b"again")
    assert theirs.recv(100) == b"again"
    theirs.close()
    with pytest.raises(BrokenPipeError):
        helper.send_split(ours, b"nobody", b"reads")


@pytest.mark.parametrize("packets", [[b"a"], [b"a", b"b"]])
def test_nobody_there(helper, pair, packets):
    """Sending to a peer that has left is EPIPE, without a signal."""
    ours, theirs = pair
    theirs.close()
    with pytest.raises(BrokenPipeError):
        helper.send_packets(ours, packets)


@pytest.mark.parametrize("packets", [[b"a"], [b"a", b"b"]])
def test_send_side_shut_down(helper, pair, packets):
    """After the socket is shut down for writing nothing can be sent, and everything can be read."""
    ours, theirs = pair
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenPipeError):
        helper.send_packets(ours, packets)
    theirs.send(b"x")
    assert helper.PacketReader(100).read(ours) == ([b"x"], False)


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_the_same_packets_to_each_of_several_sockets(helper, pair, count):
    """Each socket gets all packets, and a socket that does not take them, or fails, holds up none of the others."""
    ours, theirs = pair
    other, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.close()
    closed.close()
    packets = [b"%d." % i for i in range(count)]
    with other, others, gone:
        short = helper.send_to_each([ours, gone, closed, other], packets)
        assert short == ([(1, 0), (2, 0)] if count else [])
        for end in (theirs, others):
            assert [end.recv(10) for _ in range(count)] == packets
            with pytest.raises(BlockingIOError):
                end.recv(10, socket.MSG_DONTWAIT)
    assert helper.send_to_each([], packets) == []


def test_what_each_socket_takes(helper, pair):
    ours, _theirs = pair
    too_long = b"x" * (max_sendable(ours) + 1)
    assert helper.send_to_each([ours, ours], [too_long, b"a"]) == [(0, 0), (1, 0)]
    assert helper.send_to_each([ours], [b"a", too_long]) == [(0, 1)]
    assert helper.send_to_each([ours], [b"a"] * 65) == [(0, 64)], "one batch at most"
    while not (short := helper.send_to_each([ours], [b"a", b"b"])):
        pass
    assert short in ([(0, 0)], [(0, 1)]), "the socket is full"
    with pytest.raises(TypeError):
        helper.send_to_each([ours], ["text"])


def test_subclasses_of_bytes(helper, pair):
    """Subclasses of bytes are sent like bytes."""
    ours, theirs = pair

    class Kind(bytes):
        pass

    for packets in ([Kind(b"a")], [Kind(b"a"), b"b"]):
        assert helper.send_packets(ours, packets) == len(packets)
        assert [theirs.recv(10) for _ in packets] == packets


@settings(max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=100), st.integers(1, 64), st.integers(1, 200))
def test_both_directions_of_both(packets, batch, limit):
    """Packets sent by either implementation are read by either, the same, and in the same batches."""
    results = []
    for sender, receiver in (("_pure", "_pure"), ("_batch", "_batch"), ("_pure", "_batch"), ("_batch", "_pure")):
        ours, theirs = socketpair()
        with ours, theirs:
            reader = load(receiver).PacketReader(limit, batch)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            sent = 0
            while sent < len(packets):
                sent += load(sender).send_packets(ours, packets[sent:])
            ours.close()
            batches: list[tuple[list[bytes], bool]] = []
            while not batches or not batches[-1][1]:
                batches.append(reader.read(theirs))
        results.append(batches)
    assert results[0] == results[1] == results[2] == results[3]
    read = [packet for batch, _ in results[0] for packet in batch]
    assert read == [packet if len(packet) <= limit else b"" for packet in packets]


# --- which one is used -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pure", "used"), [("1", "_pure"), ("yes", "_pure"), ("0", "_batch"), ("", "_batch"), (None, "_batch")]
)
def test_choice(pure, used):
    """The compiled helper is used if there is one, unless SBUS_PURE forbids it."""
    load(used)
    environ = {name: value for name, value in os.environ.items() if name != "SBUS_PURE"}
    if pure is not None:
        environ["SBUS_PURE"] = pure
    code = (
        "from sbus.syscalls import batch as b; print(b.PacketReader.__module__, b.send_packets.__module__, b.COMPILED)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [f"sbus.syscalls.{used}"] * 2 + [str(used == "_batch")]


def test_chosen_functions():
    """The chosen implementation is one of the two, not a mixture."""
    modules = {chosen.PacketReader.__module__, chosen.send_packets.__module__}
    assert modules == {"sbus.syscalls._batch" if chosen.COMPILED else "sbus.syscalls._pure"}


# --- socket options ----------------------------------------------------------------------------------------------


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
