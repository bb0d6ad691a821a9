"""Explanations of mismatches agree with the matcher and point at the right place."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbus.errors import Violation
from sbus.protocol.explain import explain, hint, hints, never_matches
from sbus.protocol.keys import CURRENT, EARLY, Dialect, PeerCredentials, SecretKey, matches, matches_open

TEXT = st.text("ab*/.", max_size=8).map(str.encode)
IDS = st.sampled_from(["", "0", "7"])
SECRET = st.builds("!/cred/{}/{}/{}/{}".format, IDS, IDS, IDS, st.text("ab*/", max_size=5)).map(str.encode)


@given(TEXT, TEXT, st.sampled_from([CURRENT, EARLY]))
@example(b"a/*b", b"a/xb", CURRENT)
@example(b"a", b"a", CURRENT)
def test_agrees_with_matcher(pattern, key, dialect):
    """There is a mismatch exactly where the matcher finds no match."""
    assert (explain(pattern, key, dialect) is None) == matches_open(pattern, key, dialect.separator)


@given(SECRET | TEXT, SECRET | TEXT)
def test_agrees_on_secret_keys(pattern, key):
    """A secret pattern matches if a subscriber with the IDs of pattern and key would receive the key."""
    wanted, secret = CURRENT.check(pattern), CURRENT.check(key)
    nobody = SecretKey(b"", b"", b"", b"")
    ids = zip((wanted or nobody)[:3], (secret or nobody)[:3], strict=True)
    gid, uid, pid = (int(want or have or 5) for want, have in ids)
    assert (explain(pattern, key) is None) == matches(pattern, key, CURRENT, PeerCredentials(pid, uid, gid))


@given(TEXT, TEXT)
def test_place_is_where_it_stops(pattern, key):
    """The pattern in front of the mismatch matches the key in front of it."""
    found = explain(pattern, key)
    if found is None:
        return
    assert 0 <= found.pattern_at <= len(pattern)
    assert 0 <= found.key_at <= len(key)
    agreed = pattern[: found.pattern_at]
    if agreed and not agreed.endswith(b"/"):
        assert matches_open(agreed, key[: found.key_at])


@pytest.mark.parametrize(
    ("pattern", "key", "pattern_at", "key_at", "reason"),
    [
        (b"a/b", b"a/c", 2, 2, "differ"),
        (b"a/bc", b"a/b", 3, 3, "the key's segment ends"),
        (b"a/b", b"a/bc", 3, 3, "the pattern's segment ends"),
        (b"a/b", b"a", 1, 1, "the key ends"),
        (b"a/", b"a", 1, 1, "needs '/'"),
        (b"a", b"a/b", 1, 1, "end the pattern with '/'"),
        (b"a/b*", b"a/bc/d", 4, 4, "end the pattern with '/'"),
        (b"a/*b", b"a/xb", 3, 4, "nothing is left"),
        (b"a/***b/c", b"a/xb/c", 5, 4, "nothing is left"),
        (b"*/", b"!/cred////x", 0, 0, "no wildcard"),
        (b"!/cred////x", b"x", 0, 0, "this key is open"),
        (b"!/cred/1/2/3/x", b"!/cred/1/5/3/x", 9, 9, "the UID is 2 in the pattern, but 5 in the key"),
        (b"!/cred/1/2/3/x", b"!/cred////x", 7, 7, "the GID is 1 in the pattern, but none in the key"),
        (b"!/cred////a/*b", b"!/cred/1/22/3/a/x", 13, 17, "nothing is left"),
    ],
)
def test_places(pattern, key, pattern_at, key_at, reason):
    """A mismatch reports how far pattern and key agree, and why they differ there."""
    found = explain(pattern, key)
    assert found is not None
    assert (found.pattern_at, found.key_at) == (pattern_at, key_at)
    assert reason in found.reason


def test_early_dialect():
    """The early dialect's separator is a dot, in explanations too."""
    found = explain(b"a.", b"a", EARLY)
    assert found is not None
    assert "'.'" in found.reason


@pytest.mark.parametrize(("pattern", "key"), [(b"!/x", b"a"), (b"a", b"a/!"), (b"!/cred/01///", b"a")])
def test_forbidden(pattern, key):
    """A forbidden pattern or key is a violation, not a mismatch."""
    with pytest.raises(Violation):
        explain(pattern, key)


@given(TEXT, TEXT)
def test_impossible_patterns_match_nothing(pattern: bytes, key: bytes) -> None:
    """A pattern that is called impossible matches no key."""
    if never_matches(pattern) is not None:
        assert not matches_open(pattern, key)


@pytest.mark.parametrize(
    ("pattern", "is_impossible"),
    [
        (b"a/*b", True),
        (b"*x/", True),
        (b"a**b", True),
        (b"a/b*", False),
        (b"a/**/c", False),
        (b"", False),
        (b"*", False),
    ],
)
def test_patterns_that_can_never_match(pattern: bytes, is_impossible: bool) -> None:
    """Nothing but ``*`` can follow a ``*`` within a segment."""
    assert (never_matches(pattern) is not None) == is_impossible


@pytest.mark.parametrize(
    ("pattern", "dialect", "remedy"),
    [
        (b"a/*b", CURRENT, "nothing is left for 'b'; end the segment with '*'"),
        (b"a.*.b", CURRENT, "nothing is left for '.b'; write '/' for '.', or end the segment with '*'"),
        (b"a:*:b", CURRENT, "nothing is left for ':b'; write '/' for ':', or end the segment with '*'"),
        (b"a/*/b", EARLY, "nothing is left for '/b'; write '.' for '/', or end the segment with '*'"),
    ],
)
def test_the_remedy_names_the_separator(pattern: bytes, dialect: Dialect, remedy: str) -> None:
    """A pattern with the separator of another bus says which one this bus has."""
    assert (never_matches(pattern, dialect) or "").endswith(remedy)


@pytest.mark.parametrize(
    ("pattern", "dialect", "start"),
    [
        (b"a/#", CURRENT, "'#' is an ordinary byte, and no wildcard; the pattern 'a/' matches everything below"),
        (b">", CURRENT, "'>' is an ordinary byte, and no wildcard; the empty pattern matches every key"),
        (b"a.b.>", CURRENT, "'>' is an ordinary byte, and no wildcard, and '.' separates nothing; the pattern 'a/b/'"),
        (b"a.>", EARLY, "'>' is an ordinary byte, and no wildcard; the pattern 'a.' matches everything below"),
        (b"+/b", CURRENT, "'+' is an ordinary byte, and no wildcard; '*' matches to the next '/'"),
        (b"a/**", CURRENT, "'**' is the same as '*', and matches to the end of one segment; the pattern 'a/'"),
        (b"a/**/c", CURRENT, "'**' is the same as '*', and matches to the next '/' or the end; no wildcard"),
        (b"a/*b", CURRENT, "it can never match"),
    ],
)
def test_hints(pattern: bytes, dialect: Dialect, start: str) -> None:
    """The wildcards of MQTT, NATS and shells are explained in the words of this bus."""
    assert (hint(pattern, dialect) or "").startswith(start)


@given(TEXT)
def test_a_hint_is_for_odd_patterns_alone(pattern: bytes) -> None:
    """Each impossible pattern has a hint, and each pattern with a hint has a byte of a wildcard."""
    if never_matches(pattern):
        assert hint(pattern)
    if hint(pattern):
        assert set(pattern) & set(b"*#>+")


def test_lines_of_hints():
    """Patterns that are likely to be wrong have a line each, with the pattern."""
    wrong = ("a/#", "a/b.>", "a/+/b")
    assert list(hints([b"a/", *(each.encode() for each in wrong), b"a/b"])) == [
        f"the pattern {each}: {hint(each.encode())}" for each in wrong
    ]
