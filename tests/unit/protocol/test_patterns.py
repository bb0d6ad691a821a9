"""Intersections and covers of patterns agree with the matcher, which looks at keys."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import InvalidKey, UsageError
from sbus.protocol.keys import matches_open
from sbus.protocol.patterns import Shape, covers, intersect, shape
from sbus.protocol.recorded import check_recorded

PATTERN = st.text("ab*/", max_size=6).map(str.encode)
KEYS = [
    "/".join(segments).encode()
    for count in range(1, 5)
    for segments in itertools.product(("", "a", "b", "ab", "aa", "abc"), repeat=count)
]
SEGMENTS = st.sampled_from(("", "a", "ab", "aa", "b", "*", "a*", "ab*", "**"))
SIMPLE = st.lists(SEGMENTS, max_size=3).map("/".join).map(str.encode)
"""Patterns that `KEYS` tell apart."""
SEPARATORS = st.sampled_from((b"/", b"."))


def keys_of(pattern: bytes) -> set[bytes]:
    return {key for key in KEYS if matches_open(pattern, key)}


@given(PATTERN, PATTERN)
def test_intersection_matches_what_both_match(one, other):
    """The intersection of two patterns is one pattern, which matches the keys that both match, or there is none."""
    first, second = shape(one), shape(other)
    both = keys_of(one) & keys_of(other)
    found = intersect(first, second) if first and second else None
    assert (keys_of(found.pattern()) if found else set()) == both
    assert found == (intersect(second, first) if first and second else None)


@given(PATTERN)
def test_shape_has_a_pattern_that_matches_the_same(pattern):
    """The pattern of a shape matches the same keys, and has the same shape; without a shape, nothing matches."""
    found = shape(pattern)
    if found is None:
        assert not keys_of(pattern)
    else:
        assert keys_of(found.pattern()) == keys_of(pattern)
        assert shape(found.pattern()) == found
        assert len(found.pattern()) <= len(pattern)


@given(SIMPLE, SIMPLE)
def test_cover_matches_all_that_the_other_matches(one, other):
    """A pattern covers another exactly if it matches all keys of the other; equal sets of keys mean equal shapes."""
    first, second = shape(one), shape(other)
    assert first is not None
    assert second is not None
    assert covers(first, second) == (keys_of(one) >= keys_of(other))
    assert (covers(first, second) and covers(second, first)) == (first == second)


@given(PATTERN, PATTERN, SEPARATORS)
def test_separator_is_a_parameter(one, other, separator):
    """The early dialect's patterns have the same intersections, written with its separator."""
    other_one, other_two = one.replace(b"/", separator), other.replace(b"/", separator)
    shapes = shape(one), shape(other)
    assert (shape(other_one, separator), shape(other_two, separator)) == shapes
    if shapes[0] is not None and shapes[1] is not None:
        both = intersect(shapes[0], shapes[1])
        assert both is None or both.pattern(separator).replace(separator, b"/") == both.pattern()


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (b"", b"a/b", b"a/b"),
        (b"", b"", b""),
        (b"a/", b"a/b/", b"a/b/"),
        (b"a/", b"a", None),
        (b"a/", b"a/*", b"a/*"),
        (b"*/b", b"a/*", b"a/b"),
        (b"a*/", b"*/c", b"a*/c"),
        (b"ab*", b"a*", b"ab*"),
        (b"a*", b"b*", None),
        (b"/", b"*/", b"/"),
    ],
)
def test_examples(one, other, both):
    """A few intersections, spelled out."""
    first, second = shape(one), shape(other)
    assert first is not None
    assert second is not None
    found = intersect(first, second)
    assert (found and found.pattern()) == both


def test_shape_of_impossible_pattern():
    """A pattern with anything but '*' behind a '*' matches nothing and has no shape; stars in a row are one."""
    assert shape(b"a/*b") is None
    assert shape(b"a**/b") == Shape((b"a*", b"b"), False)


@pytest.mark.parametrize(
    ("pattern", "error", "text"),
    [(b"a\0b", InvalidKey, "NUL"), (b"!/cred/0/0/7/x", UsageError, "secret"), (b"a/!", InvalidKey, "'!'")],
)
def test_patterns_that_select_no_recorded_messages(pattern, error, text):
    """Secret messages are not recorded, and no key matches the others."""
    with pytest.raises(error, match=text):
        check_recorded(pattern)
    check_recorded(b"a/*/")
