"""The index of patterns finds what comparing them one by one finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbus.link.covering import CoverIndex
from sbus.protocol.patterns import Shape, covers, shape

SHAPES = st.text("ab*/", max_size=6).map(str.encode).map(shape).filter(bool)


@given(st.lists(SHAPES, max_size=12), st.lists(SHAPES, max_size=6), SHAPES, st.sets(SHAPES, max_size=3))
def test_index_finds_what_comparing_finds(added, removed, asked, besides):
    """Covers and covered patterns are those that `covers` names; a pattern is not its own cover."""
    index = CoverIndex()
    for each in added:
        index.add(each)
    for each in removed:
        index.discard(each)
    left = set(added) - set(removed)
    assert set(index) == left
    assert len(index) == len(left)
    wider = {each for each in left if each != asked and covers(each, asked)}
    found = index.cover_of(asked, besides)
    assert found in wider - besides if wider - besides else found is None
    assert sorted(index.covered_by(asked)) == sorted(each for each in left if each != asked and covers(asked, each))


@given(st.lists(SHAPES, max_size=12))
def test_empty_index_is_small_again(added):
    """Nothing stays behind of patterns that were removed."""
    index = CoverIndex()
    for each in added:
        index.add(each)
    for each in added:
        index.discard(each)
    root = index._root
    assert not root.children
    assert not root.stars
    assert root.exact is root.below is None


def test_search_for_cover_is_bounded():
    """However many wildcards there are, the search for a cover ends; then it may miss one."""
    index = CoverIndex()
    for number in range(4096):
        parts = [b"a" * (1 + (number >> 3 * at) % 8) + b"*" for at in range(4)]
        index.add(Shape((*parts, b"x"), False))
    assert index.cover_of(Shape((b"aaaaaaaa",) * 8, False)) is None
