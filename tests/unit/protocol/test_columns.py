"""Messages as columns: the plain function and its compiled twin."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.protocol import columns
from sbus.protocol.bundles import unbundle
from sbus.protocol.columns import Columns
from sbus.protocol.packets import Truncated
from tests.support.packets import bundle

compiled: Any
try:
    compiled = importlib.import_module("sbus.protocol._columns")
except ImportError:
    compiled = None

needs_compiled = pytest.mark.skipif(compiled is None, reason="the compiled part was not built")
TWINS = [
    pytest.param(columns._collect, id="plain"),
    pytest.param(compiled and compiled.collect, marks=needs_compiled, id="compiled"),
]
Row = tuple[bytes, bytes]


def rows(found: columns.Columns) -> list[Row]:
    keys = struct.unpack(f"={len(found.key_ends) // 4}i", found.key_ends)
    payloads = struct.unpack(f"={len(found.payload_ends) // 4}i", found.payload_ends)
    assert len(keys) == len(payloads) == found.rows + 1
    assert (keys[-1], payloads[-1]) == (len(found.keys), len(found.payloads))
    return [
        (bytes(found.keys[keys[i] : keys[i + 1]]), bytes(found.payloads[payloads[i] : payloads[i + 1]]))
        for i in range(found.rows)
    ]


def collected(
    collect: Callable[..., Any], packets: list[bytes], max_rows: int = 1 << 30, max_bytes: int = 1 << 30
) -> list[list[Row] | bytes]:
    """Return the rows of each call, and each packet that is no message, in order."""
    found: list[list[Row] | bytes] = []
    at = offset = 0
    while at < len(packets):
        part = columns.Columns()
        before = at, offset
        at, offset, other = collect(packets, at, offset, *part.buffers, max_rows, max_bytes)
        assert (at, offset) > before
        found += [rows(part)] if part.rows else []
        found += [other] if other is not None else []
    return found


@pytest.mark.parametrize("collect", TWINS)
def test_messages_and_others_in_their_places(collect: Callable[..., Any]) -> None:
    """The rows before a packet that is no message come before it, also within a bundle."""
    packets = [
        b"MSG a\0x",
        bundle(b"MSG \0", b"CMSG lost\x001 2 3 share", b"MSG b\0y\0z", b"CMSG c"),
        b"",
        bundle(b"MSG d\0", b"MSG e\0"),
        b"MSG f",
        b"BNDL",
    ]
    assert collected(collect, packets) == [
        [(b"a", b"x"), (b"", b"")],
        b"CMSG lost\x001 2 3 share",
        [(b"b", b"y\0z")],
        b"CMSG c",
        b"",
        [(b"d", b""), (b"e", b"")],
        b"MSG f",
        b"BNDL",
    ]


@pytest.mark.parametrize("collect", TWINS)
def test_full_columns(collect: Callable[..., Any]) -> None:
    """At a limit the next call goes on within the bundle; the message that reaches the limit is whole."""
    packets = [bundle(*[b"MSG k\0%d" % i for i in range(5)]), b"MSG k\x005"]
    assert [len(part) for part in collected(collect, packets, max_rows=2)] == [2, 2, 2]
    assert [len(part) for part in collected(collect, packets, max_bytes=5)] == [3, 3]


part = st.one_of(
    st.tuples(st.binary(max_size=5), st.binary(max_size=9)).map(
        lambda m: b"MSG %b\0%b" % (m[0].replace(b"\0", b""), m[1])
    ),
    st.sampled_from([b"CMSG x\0y", b"MSG ", b"MSG", b"M", b"SUB a", b"MSG no nul"]),
)
packet = st.one_of(
    part,
    st.lists(part, min_size=1, max_size=5).map(lambda parts: bundle(*parts)),
    st.lists(part, min_size=1, max_size=3).map(lambda parts: bundle(*parts)[:-1]),
    st.binary(max_size=12).map(lambda data: b"BNDL" + data),
    st.just(b""),
)


@given(st.lists(packet, max_size=8), st.integers(1, 6), st.integers(1, 40))
def test_columns_hold_what_unbundling_gives(packets: list[bytes], max_rows: int, max_bytes: int) -> None:
    """For any packets and limits: the same messages and other packets, in the same order, from both twins."""
    expected: list[Row | bytes] = []
    for one in unbundle(packets):
        key, nul, payload = one[4:].partition(b"\0")
        expected.append((key, payload) if one[:4] == b"MSG " and nul else one)
    for twin in (columns._collect, *([compiled.collect] if compiled else [])):
        found = collected(twin, packets, max_rows, max_bytes)
        flat: list[Row | bytes] = []
        for item in found:
            flat += [item] if isinstance(item, bytes) else item
        assert flat == expected
        assert all(len(item) <= max_rows for item in found if isinstance(item, list))


@needs_compiled
def test_wrong_types() -> None:
    """What is no packet is refused by the compiled twin too."""
    part = columns.Columns()
    with pytest.raises(TypeError, match="a packet is bytes, not str"):
        compiled.collect(["MSG a"], 0, 0, *part.buffers, 1, 1)


@pytest.mark.parametrize("collect", TWINS)
def test_truncated_packet_keeps_its_length(collect: Callable[..., Any]) -> None:
    """The stand-in for a packet that was too long is handed on as it is, in its place."""
    columns = Columns()
    cut = Truncated.of(600_000, b"MSG ")
    assert collect([b"MSG k\0x", cut, b"MSG k\0y"], 0, 0, *columns.buffers, 10, 1000)[2] is cut
    assert columns.rows == 1


def runs(found: columns.Columns) -> list[tuple[int, bytes]]:
    """Return for each notice the row that its run begins with, and the name."""
    ends = struct.unpack(f"={len(found.sender_ends) // 4}i", found.sender_ends)
    starts = struct.unpack(f"={len(found.run_starts) // 4}i", found.run_starts)
    assert len(ends) == len(starts) + 1
    assert ends[-1] == len(found.senders)
    return [(start, bytes(found.senders[ends[i] : ends[i + 1]])) for i, start in enumerate(starts)]


@pytest.mark.parametrize("collect", TWINS)
def test_publishers_of_runs(collect: Callable[..., Any]) -> None:
    """A notice begins a run with the next message, also within a bundle; it is handed to nobody."""
    packets = [
        b"MSG a\0",
        b"CMSG sender\0one",
        bundle(b"MSG b\0", b"CMSG sender\0two", b"MSG c\0", b"MSG d\0", b"CMSG sender\0three"),
        bundle(b"CMSG sender\0four", b"MSG e\0"),
        b"CMSG sender\0five",
    ]
    found = Columns()
    assert collect(packets, 0, 0, *found.buffers, 100, 1000) == (5, 0, None)
    assert [key for key, _ in rows(found)] == [b"a", b"b", b"c", b"d", b"e"]
    assert runs(found) == [(0, b""), (1, b"one"), (2, b"two"), (4, b"three"), (4, b"four"), (5, b"five")]
    assert found.sender == b"five"


@pytest.mark.parametrize("collect", TWINS)
def test_publisher_of_the_next_columns(collect: Callable[..., Any]) -> None:
    """What begins with the last publisher of the columns before goes on with it."""
    found = Columns(b"one")
    collect([b"MSG a\0", b"CMSG sender\0two"], 0, 0, *found.buffers, 1, 1000)
    assert runs(found) == [(0, b"one")]
    assert found.sender == b"one"
    assert Columns().sender == b""


@pytest.mark.parametrize("collect", TWINS)
@pytest.mark.parametrize("packet", [b"CMSG sender", b"CMSG sender/on\0", b"CMSG senders\0one"])
def test_what_names_no_publisher(collect: Callable[..., Any], packet: bytes) -> None:
    """Other control messages are handed on."""
    found = Columns()
    assert collect([packet], 0, 0, *found.buffers, 100, 1000) == (1, 0, packet)
    assert runs(found) == [(0, b"")]


@given(st.lists(st.one_of(packet, st.sampled_from([b"CMSG sender\0one", bundle(b"CMSG sender\0two", b"MSG k\0")]))))
def test_twins_agree_on_publishers(packets: list[bytes]) -> None:
    """For any packets, both twins find the publisher of each message that unbundling gives."""
    expected, sender = [], b""
    for one in unbundle(packets):
        if one.startswith(b"CMSG sender\0"):
            sender = one[12:]
        elif one[:4] == b"MSG " and b"\0" in one:
            expected.append(sender)
    for twin in (columns._collect, *([compiled.collect] if compiled else [])):
        found = Columns()
        at = offset = 0
        while at < len(packets):
            at, offset, _ = twin(packets, at, offset, *found.buffers, 1 << 30, 1 << 30)
        named = [max((start, i, name) for i, (start, name) in enumerate(runs(found)) if start <= row)[2]
                 for row in range(found.rows)]  # fmt: skip
        assert named == expected
