"""Sending batches of packets to real sockets: one test body for the compiled helper and its twin in plain Python."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.syscalls import batch as chosen
from sbus.syscalls.sockets import (
    max_sendable,
)
from tests.unit.syscalls.pairs import load, small, socketpair

# --- sending --------------------------------------------------------------------------------------


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


# --- which one is used ----------------------------------------------------------------------------


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
