"""The token buckets of users."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbus.server.bus.buckets import Buckets


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(0, 4)), max_size=60))
def test_a_bucket_is_what_came_less_what_was_taken(steps):
    """Each user's level is the plain sum, within the burst and the debt, however many other buckets are forgotten."""
    now, levels = 0, dict.fromkeys((1, 2, 3), 10.0)
    found = Buckets(lambda _: (2, 10), lambda: now, debt=15)
    for uid, tokens, pause in steps:
        now += pause
        levels = {each: min(10.0, level + 2 * pause) for each, level in levels.items()}
        levels[uid] = max(-15.0, levels[uid] - tokens)
        assert found.take(uid, tokens) == levels[uid]
        assert {each: found.level(each) for each in levels} == levels


def test_full_buckets_are_forgotten():
    """Their number follows the users that are not full, and a debt is never forgotten."""
    now = 0.0
    found = Buckets(lambda _: (1, 1), lambda: now, debt=1e6)
    found.take(0, 1e6)
    for uid in range(1, 1_000):
        now += 1
        found.take(uid, 1)
    assert len(found) <= 64
    assert found.level(0) < -900_000
