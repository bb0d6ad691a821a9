"""The table of masks, beside a list of integers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.server.bus.masks import Masks
from tests.support.examples import examples

MASKS = st.none() | st.integers(0, 2**40 - 1) | st.sampled_from((1, 1 << 7, 1 << 8, 1 << 600))
STEPS = st.lists(st.tuples(st.just("add"), MASKS) | st.tuples(st.sampled_from(("include", "drop")), st.integers(0, 50)))


@settings(max_examples=examples(300))
@given(STEPS, st.data())
def test_columns(steps, data):
    """However rows come, get more members and go, a column says for each row whether its mask has the member's bit."""
    masks, expected, dropped = Masks(), [], 0
    for name, value in steps:
        if name == "add":
            masks.add(value)
            expected.append(value)
        elif name == "include" and len(masks):
            masks.include(value)
            if expected[-1] is not None:
                expected[-1] |= 1 << value
        elif name == "drop":
            dropped = data.draw(st.integers(0, len(expected)))
            masks.drop(dropped)
        dropped = len(expected) - len(masks)
        assert masks.end == len(expected)
        column = data.draw(st.integers(0, 48) | st.sampled_from((599, 600, 601, 10_000)))
        first = data.draw(st.integers(dropped, len(expected)))
        end = data.draw(st.integers(first, len(expected)))
        wanted = [mask is None or bool(mask >> column & 1) for mask in expected[first:end]]
        assert list(masks.flags(first, end, column)) == wanted


def test_what_was_dropped_stays_dropped():
    """To drop less than before drops nothing."""
    masks = Masks()
    for mask in (1, 2, 3):
        masks.add(mask)
    masks.drop(2)
    masks.drop(1)
    assert (len(masks), masks.end) == (1, 3)
    assert masks.flags(2, 3, 0) == b"\1"


def test_rows_become_longer_in_few_steps():
    """Members that come one by one do not each make all rows longer."""
    masks, widths = Masks(), set()
    for column in range(4_096):
        masks.add(1 << column)
        widths.add(masks.width)
        masks.drop(masks.end - 1)
    assert len(widths) < 12
    assert masks.width < 2 * 4_096 // 8 + 2
