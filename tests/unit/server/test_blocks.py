"""Messages in blocks that many queues share, beside a plain list."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.server import blocks
from sbus.server.blocks import Blocks
from tests.support.examples import examples

STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "add", "close", "drop", "copy")), st.integers(1, 9), st.integers(0, 9)),
    max_size=30,
)


@settings(max_examples=examples(300))
@given(STEPS, st.data())
def test_the_part_between_two_positions(steps, data):
    """However messages come and go, each part has the messages between its positions, and their bytes."""
    found, sent, dropped = Blocks(3), [b""] * 3, 3
    with mock.patch.object(blocks, "_BLOCK", (5, 40)), mock.patch.object(blocks, "_LEAST", (3, 20)):
        for name, count, size in steps:
            if name == "add":
                packets = [bytes(size + at) for at in range(count)]
                found.add(packets, sum(map(len, packets)))
                sent += packets
                packets.clear()  # it was the caller's
            elif name == "close":
                found.close()
            elif name == "copy":
                before, found = found, found.copy()
                before.add([b"other"], 5)
                before.drop(before.end)
            else:
                dropped = data.draw(st.integers(dropped, len(sent)))
                held = found.size
                assert found.drop(dropped) == held - found.size
            assert found.start <= dropped
            assert found.end == len(sent)
            assert found.size == sum(map(len, sent[found.start :]))
            if dropped == len(sent):
                assert found.size == 0
            first = data.draw(st.integers(found.start, len(sent)))
            end = data.draw(st.integers(first, len(sent)))
            part = found.between(first, end)
            assert part.packets == sent[first:end]
            assert (len(part), part.size) == (end - first, sum(map(len, sent[first:end])))


def test_parts_share_the_blocks():
    """What is handed out twice is the same lists, with what is known of them."""
    found = Blocks()
    packets = [b"one"] * 1_700
    found.add(packets[:1_100], 3_300)
    found.add(packets[1_100:], 1_800)
    found.close()
    some, others = found.between(0, 1_700), found.between(1_100, 1_700)
    assert [len(part) for part in some.parts] == [1_100, 600]
    assert some.parts[1] is others
    assert found.between(1, 1_700).parts[1] is others


def test_nothing_between_two_blocks():
    """A position between two blocks has nothing before it and nothing behind it."""
    found = Blocks()
    for _ in range(2):
        found.add([b"x"] * 1_024, 1_024)
    assert len(found.between(1_024, 1_024)) == 0
    assert found.between(0, 0).packets == []


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
