"""Runs of messages: the plain functions and their compiled twins."""

from __future__ import annotations

import importlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.client.core import Message
from sbus.flood.backlogs import Reply
from sbus.protocol.packets import Split
from sbus.routing.runs import _build_messages, _next_messages, _next_run, _Tally, _total_size
from sbus.server.core.counters import Counters
from sbus.syscalls.memfd import Attached

try:
    compiled_runs = importlib.import_module("sbus.routing._runs")
    compiled, compiled_messages = compiled_runs.next_run, compiled_runs.next_messages
    compiled_build, compiled_size = compiled_runs.build_messages, compiled_runs.total_size
    compiled_tally = compiled_runs.Tally
except ImportError:
    compiled = compiled_messages = compiled_build = compiled_size = compiled_tally = None

needs_compiled = pytest.mark.skipif(compiled is None, reason="the compiled part was not built")


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def next_run(request):
    """Each of the twins in turn."""
    return _next_run if request.param == "plain" else compiled


def m(key: bytes) -> bytes:
    return b"MSG %b\0payload\0" % key


def test_runs_of_one_way(next_run):
    """A run is consecutive messages whose cached routes are the same tuple."""
    ab, c = ("a", "b"), ("c",)
    routes = {b"1": ab, b"2": ab, b"3": c, b"": (), b"4": ("a", "b", "")[:2]}
    assert routes[b"4"] == ab
    assert routes[b"4"] is not ab
    packets = [m(b"1"), m(b"2"), m(b"3"), m(b"3"), m(b""), m(b""), m(b"1"), m(b"4")]
    ends = {0: (ab, 2), 1: (ab, 2), 2: (c, 4), 4: ((), 6), 6: (ab, 7), 7: (ab, 8), 8: (None, 8)}
    for start, expected in ends.items():
        assert next_run(packets, start, len(packets), routes) == expected
    assert next_run(packets, 0, 1, routes) == (ab, 1)
    assert next_run([], 0, 0, routes) == (None, 0)


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"SUB 1",
        b"SUB 1\0",
        b"UNSUB 1\0",
        b"CMSG 1\0",
        b"MSG",
        b"MSG ",
        b"MSG 1",
        b"MSG\0",
        b"MSG 5\0",
        b"XMSG 1\0",
        b"msg 1\0x",
        b"MSG 1 \0",
    ],
)
def test_a_run_ends_before_anything_else(next_run, other):
    """Any other packet, a malformed one, and a message with an unknown key end a run and begin none."""
    routes = {b"1": ("a",)}
    packets = [b"MSG 1\0", other, b"MSG 1\0"]
    assert next_run(packets, 0, 3, routes) == (("a",), 1)
    assert next_run(packets, 1, 3, routes) == (None, 1)
    assert next_run(packets, 2, 3, routes) == (("a",), 3)


def test_a_run_ends_before_a_packet_with_descriptors(next_run):
    """What is not exactly bytes came with descriptors, or is a stand-in: the caller has to look at it."""
    routes = {b"1": ("a",)}
    packets = [m(b"1"), Attached.of(m(b"1"), (), False), m(b"1")]
    assert next_run(packets, 0, 3, routes) == (("a",), 1)
    assert next_run(packets, 1, 3, routes) == (None, 1)


def test_the_empty_key_is_a_key(next_run):
    """A message with an empty key has the route of the empty key."""
    assert next_run([b"MSG \0", b"MSG \0x"], 0, 2, {b"": ("a",)}) == (("a",), 2)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def next_messages(request):
    """Each of the twins in turn."""
    return _next_messages if request.param == "plain" else compiled_messages


def test_messages_in_two_parts(next_messages):
    """The payload of a message that was received in two parts is not copied."""
    route, payload = ("a",), b"payload"
    packets = [Split.of(b"MSG 1\0", payload), m(b"1"), Split.of(b"MSG 1\0", b"")]
    found, messages = next_messages(packets, 0, 3, {b"1": route}, Message)
    assert (found, messages) == (route, [(b"1", payload), (b"1", b"payload\0"), (b"1", b"")])
    assert messages[0].payload is payload


def test_messages_of_one_way(next_messages):
    """The messages of a run are instances of the given type, with key and payload."""
    ab, c = ("a", "b"), ("c",)
    routes = {b"1": ab, b"2": ab, b"3": c}
    packets = [m(b"1"), m(b"1"), b"MSG 2\0", m(b"3"), b"SUB 1", m(b"9")]
    payload = b"payload\0"
    receivers, messages = next_messages(packets, 0, 6, routes, Message)
    assert receivers is ab
    assert messages == [Message(b"1", payload), Message(b"1", payload), Message(b"2", b"")]
    assert type(messages[0]) is Message
    assert next_messages(packets, 1, 2, routes, Message) == (ab, messages[1:2])
    assert next_messages(packets, 3, 6, routes, Message) == (c, [Message(b"3", payload)])
    assert next_messages(packets, 0, 600, routes, Message) == (receivers, messages)  # no further than the list goes
    for start in (4, 5, 6):
        assert next_messages(packets, start, 6, routes, Message) == (None, [])
        assert next_messages(packets, start, 600, routes, Message) == (None, [])


PACKETS = st.lists(
    st.one_of(
        st.sampled_from([b"1", b"2", b"3", b"12", b""]).map(m),
        st.sampled_from([b"MSG 1", b"SUB 1", b"", b"MSG ", b"CMSG 1\0"]),
        st.binary(max_size=8),
    ),
    max_size=12,
)


@needs_compiled
@given(PACKETS, st.integers(0, 12), st.integers(0, 12))
def test_the_twins_agree(packets, start, length):
    """For any input the compiled function returns what the plain one returns."""
    one, two = ("a", "b"), ("c",)
    routes = {b"1": one, b"12": one, b"2": two, b"": ()}
    start = min(start, len(packets))
    end = min(start + length, len(packets))
    assert compiled(packets, start, end, routes) == _next_run(packets, start, end, routes)
    expected = _next_messages(packets, start, start + length, routes, Message)
    assert compiled_messages(packets, start, start + length, routes, Message) == expected


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def build_messages(request):
    """Each of the twins in turn."""
    return _build_messages if request.param == "plain" else compiled_build


def test_packets_of_messages(build_messages):
    """Each message is its packet, whether its key is bytes or text."""
    messages = [(b"a", b"1"), ("ä", b"2\0"), ("", b""), Message(b"b", b"3"), (b"b", b"4"), ("b" * 9, b"5")]
    packets = [b"MSG a\x001", b"MSG \xc3\xa4\x002\0", b"MSG \0", b"MSG b\x003", b"MSG b\x004", b"MSG bbbbbbbbb\x005"]
    assert build_messages(messages, 0, 1000) == packets
    assert build_messages(messages, 4, 1000) == packets[4:]
    assert build_messages(messages, 6, 1000) == []
    assert build_messages(messages, 0, len(packets[-1]) - 1) == packets[:-1]


@pytest.mark.parametrize(
    "other",
    [
        ("!", b""),
        (b"a!", b""),
        ("a\0", b""),
        (b"\0", b""),
        ("k" * 100, b""),
        ("k", bytes(95)),
        ("k", bytearray(b"x")),
        (bytearray(b"k"), b""),
        (1, b""),
        ("k", "text"),
        ("k",),
        ("k", b"", b""),
        ["k", b""],
        None,
    ],
)
def test_what_needs_a_closer_look_ends_the_packets(build_messages, other):
    """Building stops at reserved and odd keys, packets that are too long, and wrong types."""
    messages = [("k", b"1"), other, ("k", bytes(94))]
    assert build_messages(messages, 0, 100) == [b"MSG k\x001"]
    assert build_messages(messages, 1, 100) == []
    assert build_messages(messages, 2, 100) == [b"MSG k\0" + bytes(94)]


@needs_compiled
@given(st.lists(st.tuples(st.text(max_size=4) | st.binary(max_size=4), st.binary(max_size=6)), max_size=9))
def test_the_twins_build_the_same(messages):
    """The compiled function builds what the plain one builds, and compares keys by value, not by address."""
    for start in range(len(messages) + 1):
        assert compiled_build(messages, start, 13) == _build_messages(messages, start, 13)


@pytest.mark.parametrize("key", ["\ud800", None, 7])
def test_keys_that_are_no_text_need_a_closer_look(build_messages, key):
    """A key that is None, of another wrong type, or text that UTF-8 cannot encode ends the run before it."""
    assert build_messages([("a", b""), (key, b"x")], 0, 100) == [b"MSG a\0"]
    assert build_messages([(key, b"x")], 0, 100) == []


@needs_compiled
def test_the_compiled_twin_refuses_nonsense():
    """Wrong types and bounds raise an exception; they do not crash."""
    with pytest.raises(TypeError):
        compiled(["MSG a"], 0, 1, {})
    with pytest.raises(TypeError):
        compiled((b"MSG a\0",), 0, 1, {})
    with pytest.raises(TypeError):
        compiled(None, 0, 0, {})
    with pytest.raises(IndexError):
        compiled([b"MSG a\0"], 0, 2, {b"a": ()})
    with pytest.raises(IndexError):
        compiled([b"MSG a\0"], -1, 1, {b"a": ()})
    with pytest.raises(TypeError):
        compiled_messages([b"MSG a\0", "MSG a\0"], 0, 2, {b"a": ()}, Message)
    with pytest.raises(IndexError):
        compiled_messages([b"MSG a\0"], -1, 1, {b"a": ()}, Message)
    for kind in (list, os.stat_result, Message(b"", b""), None):
        with pytest.raises(TypeError):
            compiled_messages([b"MSG a\0"], 0, 1, {b"a": ()}, kind)
    with pytest.raises(TypeError):
        compiled_build((("k", b""),), 0, 9)
    with pytest.raises(IndexError):
        compiled_build([("k", b"")], -1, 9)


@pytest.mark.parametrize("total_size", [_total_size, pytest.param(compiled_size, marks=needs_compiled)])
def test_total_size(total_size):
    """The total size is the sum of all lengths; the compiled function raises for anything but bytes."""
    assert total_size([]) == 0
    assert total_size([b"", b"12", Reply(b"345")]) == 5
    with pytest.raises(TypeError):
        total_size([b"12", 5])


class Long(bytes):
    """A packet that is longer than its bytes, as a message with a payload in sealed memory."""

    def __len__(self) -> int:
        return 1000


@pytest.mark.parametrize("twin", ["plain", pytest.param("compiled", marks=needs_compiled)])
def test_a_packet_has_the_length_that_it_says(twin):
    """Sizes are those of `len`; a look for a type finds its subclasses; the newest of a key may be any."""
    plain = importlib.import_module("sbus.routing.runs")
    runs = plain if twin == "plain" else compiled_runs
    name = "_" if twin == "plain" else ""
    long, packets = Long(b"MSG k\0"), [Reply(b"reply"), b"MSG k\0abc"]
    assert getattr(runs, f"{name}total_size")([*packets, long]) == 1014
    assert getattr(runs, f"{name}shortest")([long]) == 1000
    assert getattr(runs, f"{name}find_type")([b"", *packets, long], bytes, 1) == 1
    assert getattr(runs, f"{name}find_type")([*packets, Attached(b""), type("Sub", (Long,), {})(b"")], Long, 0) == 3
    assert getattr(runs, f"{name}newest")([packets[1], long]) == [long]
    tally = getattr(runs, f"{name}Tally")()
    assert tally.add([Long(b""), Long(b""), Long(b"")] * 100, 2) == 0
    assert (tally.messages, tally.size, tally.copies, tally.copied_size) == (300, 300_000, 600, 600_000)


@pytest.mark.parametrize("kind", [_Tally, pytest.param(compiled_tally, marks=needs_compiled)])
@given(runs=st.lists(st.tuples(st.lists(st.binary(max_size=9), max_size=5), st.integers(0, 4), st.booleans())))
def test_tally(kind, runs):
    """Counters have the messages and the bytes of all runs, and their copies without those that were taken back."""
    counters = Counters(tally=kind())
    tally, copied = counters.tally, []
    for packets, copies, is_kept in runs:
        tally.add(packets, copies + is_kept)
        if is_kept:
            counters.no_copy(len(packets), sum(map(len, packets)))
        copied += packets * copies
    published = [packet for packets, _, _ in runs for packet in packets]
    assert (tally.messages, tally.size) == (len(published), sum(map(len, published)))
    assert (tally.copies, tally.copied_size) == (len(copied), sum(map(len, copied)))
