"""Bundles: packing and unbundling, by the plain functions and by their compiled twins."""

from __future__ import annotations

import importlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.protocol import bundles
from tests.support.packets import bundle

compiled: Any
try:
    compiled = importlib.import_module("sbus.protocol._bundles")
except ImportError:
    compiled = None

needs_compiled = pytest.mark.skipif(compiled is None, reason="the compiled part was not built")


class Plain:
    """The plain functions, by the names of the compiled ones."""

    pack = staticmethod(bundles._pack)
    unbundle = staticmethod(bundles._unbundle)


@pytest.fixture(params=["plain", pytest.param("compiled", marks=needs_compiled)])
def twin(request):
    """Each of the twins in turn."""
    return Plain if request.param == "plain" else compiled


def test_a_bundle_is_its_packets(twin):
    """Each bundle is replaced by its packets, in its place; plain packets stay."""
    packets = [b"MSG a\0", bundle(b"MSG b\0x", b"SUB c"), b"MSG d\0", bundle(b"MSG e\0")]
    assert twin.unbundle(packets) == [b"MSG a\0", b"MSG b\0x", b"SUB c", b"MSG d\0", b"MSG e\0"]


def test_without_a_bundle_nothing_is_copied(twin):
    """A batch of plain packets is returned as it is."""
    packets = [b"MSG a\0", b"", b"BND"]
    assert twin.unbundle(packets) is packets


def test_a_large_packet_stays_plain(twin):
    """A large packet goes by itself, and the packets before and behind it in bundles."""
    large, longest = bytes(bundles.LARGE), bytes(bundles.LARGE - 1)
    packets = [b"a", longest, large, large, b"b", b"c"]
    expected = [bundle(b"a", longest), large, large, bundle(b"b", b"c")]
    assert twin.pack(packets, 65_536, 64) == (expected, [2, 1, 1, 2])


def test_enough_packets_leave_the_other_bundles_whole(twin):
    """A bundle that begins behind `enough` packets stays as it is; the one before it is taken out whole."""
    packets = [bundle(b"MSG a\0", b"MSG b\0"), b"MSG c\0", bundle(b"MSG d\0")]
    assert twin.unbundle(packets, 1) == [b"MSG a\0", b"MSG b\0", *packets[1:]]
    assert twin.unbundle(packets, 3) == [b"MSG a\0", b"MSG b\0", *packets[1:]]
    assert twin.unbundle(packets, 4)[-1] == b"MSG d\0"


@pytest.mark.parametrize("off", [b"CMSG bundle/off", b"CMSG bundle/off\0", b"CMSG bundle/off\0for good"])
def test_behind_the_end_of_bundles_there_are_none(twin, off):
    """``bundle/off`` does not affect its own bundle; a bundle behind it stays as it is."""
    last = bundle(b"MSG c\0")
    assert twin.unbundle([bundle(b"MSG a\0", off, b"MSG b\0"), b"SUB x", last]) == [
        b"MSG a\0",
        off,
        b"MSG b\0",
        b"SUB x",
        last,
    ]
    assert twin.unbundle([off, last]) == [off, last]


@pytest.mark.parametrize("like", [b"CMSG bundle/of", b"CMSG bundle/offer", b"MSG bundle/off\0", b"CMSG bundle/on"])
def test_bundles_do_not_end_with_anything_else(twin, like):
    """Only ``bundle/off`` ends bundles."""
    assert twin.unbundle([like, bundle(b"MSG a\0", b"MSG b\0")]) == [like, b"MSG a\0", b"MSG b\0"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"BNDL",
        b"BNDL\0\0\0\0",
        b"BNDL\1\0\0\0",
        b"BNDL\1\0\0",
        bundle(b"MSG a\0") + b"x",
        bundle(b"MSG a\0")[:-1],
        bundle(b"MSG a\0", b""),
        bundle(bundle(b"MSG a\0")),
        bundle(b"MSG a\0", b"BNDL"),
        b"BNDL\xff\xff\xff\xffMSG a\0",
        b"BNDL" + struct.pack("<I", 2**31) + b"x",
    ],
)
def test_a_malformed_bundle_stays_whole(twin, wrong):
    """A bundle with bad framing stays as it is, so nothing in it takes effect."""
    assert twin.unbundle([b"MSG x\0", wrong, bundle(b"MSG y\0")]) == [b"MSG x\0", wrong, b"MSG y\0"]


def test_every_cut_of_a_bundle_is_malformed(twin):
    """A bundle that was cut anywhere but between two packets is not unbundled."""
    whole = bundle(b"MSG a\0b", b"SUB c", b"CMSG d")
    edges = {4 + 4 + 7, 4 + 4 + 7 + 4 + 5, len(whole)}
    for cut in range(4, len(whole) + 1):
        is_whole = twin.unbundle([whole[:cut]]) != [whole[:cut]]
        assert is_whole is (cut in edges)


def test_packs_up_to_the_limit(twin):
    """A bundle reaches the limit and does not exceed it; a packet that would be alone stays plain."""
    a, b = b"a" * 10, b"b" * 10
    both = bundle(a, b)
    assert twin.pack([a, b], len(both), 9) == ([both], [2])
    assert twin.pack([a, b], len(both) - 1, 9) == ([a, b], [1, 1])
    assert twin.pack([a, b, a], len(both), 9) == ([both, a], [2, 1])
    assert twin.pack([a], 1000, 9) == ([a], [1])
    assert twin.pack([], 1000, 9) == ([], [])
    assert twin.pack([b"x" * 2000, a, b], 1000, 9) == ([b"x" * 2000, both], [1, 2])


class Long(bytes):
    """A packet that is longer than its bytes, as a message with a payload in sealed memory."""

    def __len__(self) -> int:
        return bytes.__len__(self) + 1


def test_a_packet_that_is_longer_than_its_bytes_stays_alone(twin):
    """No bundle takes it; it ends the bundle before it."""
    long = Long(b"long")
    bundles, counts = twin.pack([b"a", b"b", long, long, b"c", b"d"], 1000, 64)
    assert counts == [2, 1, 1, 2]
    assert bundles[1] is bundles[2] is long


def test_a_bundle_that_is_not_exactly_bytes_stays_whole(twin):
    """It came with a descriptor, to which its packets refer."""
    (bundle,), _ = twin.pack([b"a", b"b"], 1000, 64)
    attached = type("Attached", (bytes,), {})(bundle)
    assert twin.unbundle([attached]) == [attached]
    assert twin.unbundle([bundle, attached]) == [b"a", b"b", attached]


def test_packs_no_more_than_it_is_to(twin):
    """Packets beyond the maximum number of bundles are left out and not counted."""
    a = b"a" * 10
    assert twin.pack([a] * 7, len(bundle(a, a)), 2) == ([bundle(a, a)] * 2, [2, 2])
    assert twin.pack([a] * 7, 1000, 0) == ([], [])


PLAIN = st.binary(min_size=1, max_size=40).filter(lambda p: p[:4] != b"BNDL" and p != b"CMSG bundle/off")
PACKETS = st.lists(PLAIN, max_size=30)


@given(PACKETS, st.integers(20, 200))
def test_packing_and_unbundling_is_nothing(packets, limit):
    """Unbundling restores what was packed, in order, with any limit; the counts add up."""
    for twin in (Plain, compiled) if compiled else (Plain,):
        sent, counts = twin.pack(packets, limit, 99)
        assert twin.unbundle(list(sent)) == packets
        assert sum(counts) == len(packets)
        assert all(len(one) <= limit or count == 1 for one, count in zip(sent, counts, strict=True))


@needs_compiled
@given(st.lists(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda b: b"BNDL" + b)), max_size=6))
def test_the_twins_agree_on_anything(packets):
    """For any input the compiled functions return what the plain ones return."""
    assert compiled.unbundle(list(packets)) == bundles._unbundle(list(packets))
    assert compiled.pack(packets, 64, 3) == bundles._pack(packets, 64, 3)


@needs_compiled
def test_the_compiled_twin_refuses_nonsense():
    """Wrong types raise an exception; they do not crash."""
    with pytest.raises(TypeError):
        compiled.unbundle(["x"])
    with pytest.raises(TypeError):
        compiled.pack([b"x", None], 100, 1)
    with pytest.raises(TypeError):
        compiled.pack(0, 1, 1)
