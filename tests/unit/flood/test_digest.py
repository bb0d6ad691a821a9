"""The digest of a list of messages."""

from __future__ import annotations

from itertools import accumulate, count, product
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbus.flood.digest import MOST_SEARCHES, Digest


@given(
    sizes=st.integers(1, 9).flatmap(lambda most: st.lists(st.integers(1, most), min_size=1, max_size=200)),
    limits=st.lists(st.tuples(st.integers(0, 205), st.integers(0, 1_000)), min_size=1, max_size=3),
)
@example(sizes=[1] * 64, limits=[(64, 64), (63, 64)])
@example(sizes=[1] * 65, limits=[(64, 64), (65, 63)])
@example(sizes=[1] * 129, limits=[(128, 200), (64, 64)])
def test_the_prefix_that_fits(sizes: list[int], limits: list[tuple[int, int]]) -> None:
    """Asked again with other limits, a digest finds the longest beginning within them that is not everything."""
    digest = Digest([bytes(size) for size in sizes])
    sums = [0, *accumulate(sizes)]
    for most, most_bytes in limits:
        expected = max(n for n in range(len(sizes)) if n <= most and sums[n] <= most_bytes)

        def fits(n: int, size: int, most: int = most, most_bytes: int = most_bytes) -> bool:
            return n <= most and size <= most_bytes

        assert digest.prefix(fits) == (expected, sums[expected])


@pytest.mark.parametrize("count", [1, 64, 1_000])
def test_a_look_costs_few_questions(count: int) -> None:
    """Where the place is found by halving, the questions are few, and the bytes are not counted again."""
    digest = Digest([b"x"] * count)
    asked: list[int] = []

    def fits(n: int, size: int) -> bool:
        asked.append(n)
        return n <= count // 2

    for _ in range(2):
        digest.prefix(fits)
    assert len(asked) <= 2 * 13


def test_the_digest_of_several_lists():
    """A digest knows of its parts what it would know of one list."""
    lists = [[b"MSG a\0one", b"MSG b\0"], [b"MSG a\0"]]
    joined = Digest.join([Digest(each) for each in lists])
    flat = [packet for each in lists for packet in each]
    assert (len(joined), joined.size, joined.shortest()) == (3, sum(map(len, flat)), 6)
    assert joined.packets == flat
    assert joined.packets is joined.packets
    assert joined.newest().packets == [flat[2], flat[1]]
    assert Digest.join([]).packets == []


@given(st.lists(st.lists(st.sampled_from(b"abcd"), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_newest_of_several_lists(keys):
    """They are the same, and in the same order, as those of one list with all messages."""
    number = count()
    lists = [[b"MSG %c\0%d" % (key, next(number)) for key in each] for each in keys]
    flat = [packet for each in lists for packet in each]
    assert Digest.join([Digest(each) for each in lists]).newest().packets == Digest(flat).newest().packets


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.data())
def test_the_newest_of_a_rest(keys, data):
    """What is left when the first messages are gone has the newest messages that its digest by itself would have."""
    packets = [b"MSG %d\0%d" % (key, at) for at, key in enumerate(keys)]
    whole = Digest(packets)
    if data.draw(st.booleans()):
        whole.newest()
    left = packets[data.draw(st.integers(1, len(packets) - 1)) :]
    rest = whole.rest(left)
    assert rest.packets == left
    assert rest.newest().packets == Digest(left).newest().packets


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 10), st.floats(0, 0.99)), min_size=1, max_size=9),
    st.sampled_from([1, 5, 1_024]),
)
@example([[1], [2] * 20], [(3, 0), (2, 0), (2, 0.1)], 1)
def test_the_smaller_messages(sizes, asked, short):
    """A digest of several lists finds the messages below any size, from any message on, as often as it is asked."""
    lists = [[bytes(each) for each in part] for part in sizes]
    flat = [packet for part in lists for packet in part]
    for digest, (size, part) in product((Digest.join([Digest(part) for part in lists]), Digest(flat)), asked):
        with mock.patch("sbus.flood.digest._SHORT", short):
            first = int(part * len(flat))
            found, wanted = digest.smaller(size, first), [each for each in flat[first:] if len(each) < size]
            assert (found is not None) is bool(wanted)
            if found is not None:
                assert found.packets == wanted
                assert (len(found), found.size) == (len(wanted), sum(map(len, wanted)))
            assert digest.may_search(size)
            assert digest.after(first).packets == flat[first:]


def test_a_list_is_searched_for_few_sizes():
    """After some sizes only the one that was asked for last is known; other lists are not affected."""
    parts = [Digest([bytes(9)]), Digest([bytes(9)] * 2)]
    joined = Digest.join(parts)
    for size in range(MOST_SEARCHES):
        assert joined.may_search(10 + size)
        joined.smaller(10 + size)
    assert joined.may_search(10 + size)
    assert not joined.may_search(9)
    assert parts[0].may_search(10 + size)
    assert not parts[1].may_search(9)
    assert Digest.join(parts).may_search(10 + size)
