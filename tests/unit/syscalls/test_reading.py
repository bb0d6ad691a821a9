"""Reading batches of packets from real sockets: one test body for the compiled helper and its twin in plain Python."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.protocol.packets import DEFAULT_MAX_PACKET, Split
from sbus.syscalls.batch import BATCH
from sbus.syscalls.sockets import (
    grow_send_buffer,
)
from tests.unit.syscalls.pairs import load, socketpair

# --- reading --------------------------------------------------------------------------------------


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


# --- the end --------------------------------------------------------------------------------------


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
