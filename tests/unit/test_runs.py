"""Runs of messages that go the same way: the plain function and its compiled twin."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.client.core import Message
from sbus.runs import _next_messages, _next_run

try:
    compiled_runs = importlib.import_module("sbus._runs")
    compiled, compiled_messages = compiled_runs.next_run, compiled_runs.next_messages
except ImportError:
    compiled = compiled_messages = None

needs_compiled = pytest.mark.skipif(compiled is None, reason="the compiled part was not built")


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def next_run(request):
    """Each of the twins in turn."""
    return _next_run if request.param == "plain" else compiled


def m(key: bytes) -> bytes:
    return b"MSG %b\0payload\0" % key


def test_runs_of_one_way(next_run):
    """A run is the messages in a row whose known routes are the very same receivers."""
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
    """Any other packet, one that is malformed, and a message with an unknown key end a run, and begin none."""
    routes = {b"1": ("a",)}
    packets = [b"MSG 1\0", other, b"MSG 1\0"]
    assert next_run(packets, 0, 3, routes) == (("a",), 1)
    assert next_run(packets, 1, 3, routes) == (None, 1)
    assert next_run(packets, 2, 3, routes) == (("a",), 3)


def test_the_empty_key_is_a_key(next_run):
    """A message with an empty key goes the way of the empty key."""
    assert next_run([b"MSG \0", b"MSG \0x"], 0, 2, {b"": ("a",)}) == (("a",), 2)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def next_messages(request):
    """Each of the twins in turn."""
    return _next_messages if request.param == "plain" else compiled_messages


def test_messages_of_one_way(next_messages):
    """The messages of a run come as what they are to be, with their keys and payloads."""
    ab, c = ("a", "b"), ("c",)
    routes = {b"1": ab, b"2": ab, b"3": c}
    packets = [m(b"1"), m(b"1"), b"MSG 2\0", m(b"3"), b"SUB 1", m(b"9")]
    payload = b"payload\0"
    receivers, messages = next_messages(packets, 0, routes, Message)
    assert receivers is ab
    assert messages == [Message(b"1", payload), Message(b"1", payload), Message(b"2", b"")]
    assert type(messages[0]) is Message
    assert next_messages(packets, 3, routes, Message) == (c, [Message(b"3", payload)])
    assert next_messages(packets, 4, routes, Message) == (None, [])
    assert next_messages(packets, 5, routes, Message) == (None, [])
    assert next_messages(packets, 6, routes, Message) == (None, [])


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
    """The compiled function says what the plain one says, of anything."""
    one, two = ("a", "b"), ("c",)
    routes = {b"1": one, b"12": one, b"2": two, b"": ()}
    start = min(start, len(packets))
    end = min(start + length, len(packets))
    assert compiled(packets, start, end, routes) == _next_run(packets, start, end, routes)
    assert compiled_messages(packets, start, routes, Message) == _next_messages(packets, start, routes, Message)


@needs_compiled
def test_the_compiled_twin_refuses_nonsense():
    """Wrong types and bounds raise; they do not crash."""
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
