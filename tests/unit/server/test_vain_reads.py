"""The part of the time that reading incomplete packets may take."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sbus.server.vain_reads import rest_after


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 200_000)), min_size=1, max_size=30))
def test_one_user_has_a_twentieth_of_the_time(reads):
    """Whenever its clients read after their rests, they take the burst of 50 ms and a twentieth of the time at most."""
    user, now, took = SimpleNamespace(vain_until=0.0), 0.0, 0
    for pause, time in reads:
        now += pause
        took += time
        rest = rest_after(user, time, now)
        assert 0 <= rest <= 10
        if rest < 10:
            assert took / 1e6 <= (now + rest + 1) / 20 + 1e-6
        else:
            took = int((now + rest + 1) / 20 * 1e6)  # the rest is forgiven
        now += rest


def test_a_user_that_was_still_has_the_burst_again():
    """What was not taken is not saved up."""
    user = SimpleNamespace(vain_until=0.0)
    assert rest_after(user, 50_000, 100.0) == 0
    assert rest_after(user, 50_000, 100.0) == 1
    assert rest_after(user, 50_000, 102.0) == 0
