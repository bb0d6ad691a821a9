"""The other side of a link, and patterns that come and go."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from sbus.link.interest import Change, Interest
from sbus.protocol.keys import matches_open
from sbus.protocol.patterns import shape

PATTERN = st.text("ab*/", max_size=5).map(str.encode)
LISTS = st.lists(PATTERN.filter(shape), max_size=3)
KEYS = ["/".join(each).encode() for n in (1, 2, 3) for each in itertools.product(("", "a", "b", "ab"), repeat=n)]


class OtherSide:
    """The other side of a link: it follows the changes, and knows which keys are asked for."""

    def __init__(self) -> None:
        self.patterns: set[bytes] = set()
        self.count = 0

    def follow(self, changes: list[Change], must_have: frozenset[bytes] = frozenset()) -> None:
        """Follow changes one by one; at no moment may a key that must be asked for be missing."""
        for change in changes:
            self.count += 1
            if change.is_new:
                assert change.pattern not in self.patterns
                self.patterns.add(change.pattern)
            else:
                self.patterns.remove(change.pattern)
            assert must_have <= self.keys()

    def keys(self) -> frozenset[bytes]:
        return keys_of(self.patterns)


def keys_of(patterns) -> frozenset[bytes]:
    return frozenset(key for key in KEYS if any(matches_open(pattern, key) for pattern in patterns))


def settle(interest: Interest, other: OtherSide, now: float, must_have: frozenset[bytes] = frozenset()) -> float:
    """Let time pass until nothing is due, which must come to be."""
    last = now + 1000
    while (due := interest.due(now)) is not None:
        now = max(now, due) + 1e-6
        assert now < last
        other.follow(interest.changes(now), must_have)
    return now


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PATTERN),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.3, 1.0, 5.0])),
        st.tuples(st.just("replace"), st.lists(PATTERN, max_size=4)),
        st.tuples(st.sampled_from(["restart", "refused"]), st.none()),
    ),
    max_size=40,
)
