"""Large packets that go from one socket to another without a look at them, by the compiled helper and its twin."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.syscalls.pairs import load, small, socketpair

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
