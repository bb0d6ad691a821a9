"""The part of the time that reading tiny pieces may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbus.server.bus.vain_reads import VainReads


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 200_000)), min_size=1, max_size=30))
def test_one_user_has_a_twentieth_of_the_time(reads):
    """Whenever its clients read after their rests, they take the burst of 50 ms and a twentieth of the time at most."""
    now, took = 0.0, 0
    found = VainReads(lambda: now)
    for pause, time in reads:
        now += pause
        took += time
        rest = found.rest_after(7, time)
        assert 0 <= rest <= 10
        if rest < 10:
            assert took / 1e6 <= (now + rest + 1) / 20 + 1e-6
        else:
            took = int((now + rest + 1) / 20 * 1e6)  # the rest is forgiven
        now += rest


def test_a_user_that_was_still_has_the_burst_again():
    """What was not taken is not saved up, and is each user's own."""
    now = 100.0
    found = VainReads(lambda: now)
    assert found.rest_after(7, 50_000) == 0
    assert found.rest_after(7, 50_000) == 1
    assert found.rest_after(8, 50_000) == 0
    now += 2
    assert found.rest_after(7, 50_000) == 0
