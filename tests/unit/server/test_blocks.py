"""Messages in blocks that many queues share, beside a plain list."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.flood.digest import Digest
from sbus.server.bus import blocks
from sbus.server.bus.blocks import Blocks
from tests.support.buses import mask_memory
from tests.support.examples import examples

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "close", "drop", "include")),
        st.integers(1, 9),
        st.integers(0, 9),
        st.sampled_from((None, None, 0, 1, 2, 3)),
    ),
    max_size=30,
)


def for_member(column: int, sent: list[tuple[bytes, int | None]]) -> list[bytes]:
    """The messages among some that are for a member."""
    return [packet for packet, mask in sent if mask is None or mask >> column & 1]


def packets_of(found: Blocks, first: int, end: int, column: int = 0) -> list[bytes]:
    """The messages between two positions that are for a member."""
    part = found.window(first, end).digest_for(column)
    return part.packets if part is not None else []


@settings(max_examples=examples(300))
@given(STEPS, st.data())
def test_the_part_between_two_positions(steps, data):
    """However messages come and go, each part has a member's messages between its positions, and their bytes."""
    found, dropped = Blocks(3), 3
    sent: list[tuple[bytes, int | None]] = [(b"", None)] * 3
    last = 0
    with mock.patch.object(blocks, "_BLOCK", (5, 40)), mock.patch.object(blocks, "_LEAST", (3, 20)):
        for name, count, size, mask in steps:
            if name == "add":
                packets = [bytes(size + at) for at in range(count)]
                found.add(packets, sum(map(len, packets)), mask)
                last = len(sent)
                sent += [(packet, mask) for packet in packets]
                packets.clear()  # it was the caller's
            elif name == "close":
                found.close()
            elif name == "drop":
                dropped = data.draw(st.integers(dropped, len(sent)))
                held = found.size
                assert found.drop(dropped) == held - found.size
            elif dropped <= last < len(sent) and last > 2:
                found.include(2)
                sent[last:] = [(packet, each if each is None else each | 4) for packet, each in sent[last:]]
            assert found.start <= dropped
            assert found.end == len(sent)
            assert found.size == sum(len(packet) for packet, _ in sent[found.start :]) + mask_memory(found)
            if dropped == len(sent):
                assert found.size == found.mask_count == 0
            column = data.draw(st.integers(0, 2))
            first = data.draw(st.integers(max(found.start, last if column == 2 else 0), len(sent)))
            end = data.draw(st.integers(first, len(sent)))
            part, wanted = found.window(first, end).digest_for(column), for_member(column, sent[first:end])
            assert (part is not None) is bool(wanted)
            if part is not None:
                assert (len(part), part.size) == (len(wanted), sum(map(len, wanted)))
                assert part.shortest() == min(map(len, wanted))
                assert part.newest().packets == Digest(wanted).newest().packets
                size, left_out = data.draw(st.integers(0, 50)), data.draw(st.integers(0, len(wanted)))
                smaller = part.smaller(size, left_out)
                assert (smaller.packets if smaller is not None else []) == [
                    packet for packet in wanted[left_out:] if len(packet) < size
                ]
                assert part.packets == wanted


def test_parts_share_the_blocks():
    """What is handed out twice is the same lists, with what is known of them."""
    found = Blocks()
    packets = [b"one"] * 1_700
    found.add(packets[:1_100], 3_300)
    found.add(packets[1_100:], 1_800)
    found.close()
    some, others, rest = (found.window(first, 1_700).digest_for(0) for first in (0, 1_100, 1))
    assert some is not None
    assert rest is not None
    assert [len(part) for part in some.parts] == [1_100, 600]
    assert some.parts[1] is others
    assert rest.parts[1] is others


def test_nothing_between_two_blocks():
    """A position between two blocks has nothing before it and nothing behind it."""
    found = Blocks()
    for _ in range(2):
        found.add([b"x"] * 1_024, 1_024)
    assert found.window(1_024, 1_024).digest_for(0) is None
    assert found.window(0, 0).digest_for(0) is None


def test_runs_with_a_mask_have_a_price():
    """Messages for the same members share a mask, which has a price; a block with masks has one for each run."""
    found = Blocks()
    for mask in (None, None, 1, 1, 2, None):
        found.add([b"x"], 1, mask)
    assert (found.mask_count, found.size) == (4, 6 + mask_memory(found))
    assert [len(packets_of(found, 0, 6, column)) for column in range(3)] == [5, 4, 3]
    found.add([b"x"] * 1_018, 1_018)
    found.add([b"y"], 1)
    assert found.mask_count == 4
    held = mask_memory(found)
    assert found.drop(1_024) == 1_024 + held
    assert (found.mask_count, found.size) == (0, 1)


def test_members_in_the_same_masks_share_their_digest(monkeypatch):
    """Members in the same masks of a window get one digest, and those in the same masks of a block share its part."""
    monkeypatch.setattr(blocks, "_BLOCK", (2, 1_000))
    found = Blocks()
    for mask in (1, 6, 2, 5):
        found.add([b"x%d" % mask], 2, mask)
    window = found.window(0, 4)
    digests = [window.digest_for(column) for column in range(3)]
    assert [digest and digest.packets for digest in digests] == [[b"x1", b"x5"], [b"x6", b"x2"], [b"x6", b"x5"]]
    assert window.digest_for(0) is digests[0]
    first, _, last = (digest.parts for digest in digests if digest is not None)
    assert last[1] is first[1]
    monkeypatch.setattr(blocks, "_MOST_DIGESTS", 1)
    found.add([b"x3", b"x4"], 4, 4)
    window = found.window(0, 6)
    assert all(window.digest_for(column) is not None for column in range(3))
    assert len(window._digests) == 1
    assert all(len(block._digests) <= 2 for block in found._blocks), "two were there"


def test_only_blocks_that_nobody_needs_are_dropped():
    """A block is kept until all of it is dropped."""
    found = Blocks()
    for _ in range(3):
        found.add([b"x"] * 1_024, 1_024)
    assert found.drop(2_047) == 1_024
    assert (found.start, found.size) == (1_024, 2_048)
    assert found.drop(2_048) == 1_024
    assert found.drop(3_072) == 1_024
    assert (found.start, found.end, found.size) == (3_072, 3_072, 0)


def test_large_messages_are_not_kept_for_long():
    """A block ends with its bytes, too: else a few hundred large messages would be kept because of the last one."""
    found = Blocks()
    for _ in range(3):
        found.add([bytes(300 << 10)], 300 << 10)
    assert found.drop(2) == 600 << 10
    found.add([bytes(100 << 10)], 100 << 10)
    found.close()
    found.add([b"x"], 1)
    assert found.drop(4) == 400 << 10
    assert found.size == 1
