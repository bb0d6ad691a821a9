"""The mapping of keys and patterns to NATS subjects."""

from __future__ import annotations

import hashlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.link.subjects import MAX_SUBJECT, check_realm, pattern_subject, subject
from sbus.protocol.keys import matches_open
from tests.support.nats import nats_matches

_LETTERS = st.sampled_from([b"a", b"b", b"ab", b"=", b".", b" ", b">", b"$", b"\xff", b"~", b"+", b"\r\n", b"a" * 63])
_SEGMENT = st.one_of(
    st.lists(_LETTERS, max_size=3).map(b"".join),
    st.sampled_from([b"", b"a", b"b", b"ab", b"x" * 64, b"x" * 65, b"." * 21, b"." * 22, b"=2A", b"=", b"=+"]),
)
_KEYS = st.lists(_SEGMENT, min_size=1, max_size=18).map(b"/".join)
_PARTS = st.one_of(_SEGMENT, _SEGMENT.map(lambda s: s + b"*"), st.sampled_from([b"*", b"**", b"*b", b"a*b"]))
_PATTERNS = st.lists(_PARTS, max_size=18).map(b"/".join)


@st.composite
def _related(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A key, and a pattern that is made of it and so matches it often."""
    segments = draw(_KEYS).split(b"/")
    parts = []
    for segment in segments:
        cut = draw(st.integers(0, len(segment)))
        parts.append(draw(st.sampled_from([segment, b"*", segment[:cut] + b"*", segment + b"*"])))
    if draw(st.booleans()):
        parts = [*parts[: draw(st.integers(0, len(parts)))], b""]
    return b"/".join(parts), b"/".join(segments)


@given(_related() | st.tuples(_PATTERNS, _KEYS))
def test_what_a_pattern_finds_its_subscription_finds(both: tuple[bytes, bytes]) -> None:
    """If a pattern matches a key, the pattern's subject matches the key's."""
    pattern, key = both
    mapped = pattern_subject("r", pattern)
    if matches_open(pattern, key):
        assert mapped is not None
        assert nats_matches(mapped, subject("r", key))


@given(_related() | st.tuples(_PATTERNS, _KEYS))
def test_a_subscription_finds_only_what_its_pattern_may_match(both: tuple[bytes, bytes]) -> None:
    """Without a wildcard behind letters, and within 14 segments, subject and pattern match the same keys."""
    pattern, key = both
    parts = pattern.split(b"/")
    is_plain = all(b"*" not in part or not part.strip(b"*") for part in parts)
    if is_plain and max(len(parts), key.count(b"/") + 1) <= 14:
        mapped = pattern_subject("r", pattern)
        assert mapped is not None
        assert nats_matches(mapped, subject("r", key)) is matches_open(pattern, key)


@given(_KEYS | st.binary(max_size=200))
def test_a_subject_has_only_bytes_that_nats_permits(key: bytes) -> None:
    """A subject consists of non-empty tokens of letters, digits and ``_-=~+``, within its length."""
    mapped = subject("realm", key)
    assert len(mapped) <= MAX_SUBJECT < 4096 - 100
    tokens = mapped.split(".")
    assert len(tokens) <= 16
    assert all(re.fullmatch("[A-Za-z0-9_=~+-]{1,64}", token) for token in tokens)


@given(_PATTERNS)
def test_a_mapped_pattern_has_only_bytes_that_nats_permits(pattern: bytes) -> None:
    """In a mapped pattern ``*`` is a token of its own, and ``>`` only the last one."""
    mapped = pattern_subject("realm", pattern)
    if mapped is not None:
        *front, last = mapped.split(".")
        assert len(mapped) <= MAX_SUBJECT + 2
        assert all(re.fullmatch("[A-Za-z0-9_=~+-]{1,64}|[*]", token) for token in front)
        assert re.fullmatch("[A-Za-z0-9_=~+-]{1,64}|[*>]", last)


@given(st.lists(_SEGMENT, min_size=1, max_size=14).map(b"/".join), st.lists(_SEGMENT, min_size=1, max_size=14))
def test_different_keys_have_different_subjects(key: bytes, others: list[bytes]) -> None:
    """Within 14 segments the mapping is one to one (but for collisions of a hash)."""
    other = b"/".join(others)
    assert (subject("r", key) == subject("r", other)) is (key == other)


def test_a_long_key_costs_little() -> None:
    """A segment of 400,000 bytes that would all be escaped, and as many segments, are mapped at once."""
    began = time.process_time()
    found = [subject("sbus", key) for key in (b"." * 400_000, b"/" * 400_000) for _ in range(20)]
    assert time.process_time() - began < 0.3  # escaping and splitting all of it takes 1 s
    assert found[0] == "sbus.=~" + hashlib.sha256(b"." * 400_000).hexdigest()[:32]
    assert found[-1] == "sbus" + ".=" * 14 + ".=+"


@pytest.mark.parametrize(
    ("key", "mapped"),
    [
        (b"a/b-c/d_1", "r.a.b-c.d_1"),
        (b"", "r.="),
        (b"a//b/", "r.a.=.b.="),
        (b"a.b/*/>", "r.a=2Eb.=2A.=3E"),
        (b"\xc3\xa4 =", "r.=C3=A4=20=3D"),
        (b"x" * 64, "r." + "x" * 64),
        (b"x" * 65, "r.=~" + hashlib.sha256(b"x" * 65).hexdigest()[:32]),
        (b"/".join([b"a"] * 14), "r" + ".a" * 14),
        (b"/".join([b"a"] * 15), "r" + ".a" * 14 + ".=+"),
        (b"/".join([b"a"] * 30), "r" + ".a" * 14 + ".=+"),
    ],
)
def test_the_subject_of_a_key(key: bytes, mapped: str) -> None:
    """The rules, one by one."""
    assert subject("r", key) == mapped


@pytest.mark.parametrize(
    ("pattern", "mapped"),
    [
        (b"", "r.>"),
        (b"/", "r.=.>"),
        (b"a/", "r.a.>"),
        (b"*", "r.*"),
        (b"a/*/c", "r.a.*.c"),
        (b"ab*/c", "r.*.c"),
        (b"a*b", None),
        (b"/".join([b"a"] * 14) + b"/", "r" + ".a" * 14 + ".>"),
        (b"/".join([b"a"] * 15), "r" + ".a" * 14 + ".=+"),
        (b"/".join([b"a"] * 15) + b"/", "r" + ".a" * 14 + ".=+"),
    ],
)
def test_the_subject_of_a_pattern(pattern: bytes, mapped: str | None) -> None:
    """The rules, one by one."""
    assert pattern_subject("r", pattern) == mapped


@pytest.mark.parametrize("realm", ["", "a b", "a..b", ".a", "a.", "$SYS", "_INBOX", "a*", ">", "x" * 65, "a\n"])
def test_a_bad_realm_is_refused(realm: str) -> None:
    """A realm has to be the beginning of a subject that is not reserved."""
    with pytest.raises(UsageError, match="is no realm"):
        check_realm(realm)
    assert check_realm("plant.north-1") == "plant.north-1"
