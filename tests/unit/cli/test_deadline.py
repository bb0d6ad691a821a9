"""Time-outs of the command ``sbus``: deadlines, and blocks that are interrupted."""

from __future__ import annotations

import select
import signal

import pytest

from sbus.cli.deadline import Deadline, time_limit
from sbus.errors import TimedOut

pytestmark = pytest.mark.timeout(0)  # the plugin has the same timer as the code under test


def test_deadline():
    """A deadline passes when its seconds are over; without seconds it never passes."""
    assert Deadline(None).left is None
    assert not Deadline(None).has_passed
    assert Deadline(0).has_passed
    later = Deadline(1000)
    assert later.left is not None
    assert 990 < later.left <= 1000
    assert not later.has_passed


def test_interrupts():
    """A block that takes too long is interrupted, even if it handles every `Exception`."""
    caught = []

    def wait() -> None:
        try:
            select.select([], [], [])
        except Exception as e:
            caught.append(e)

    def wait_briefly() -> None:
        with time_limit(0.05, "waiting"):
            wait()

    with pytest.raises(TimedOut, match=r"timed out: waiting did not finish within 0\.05 seconds"):
        wait_briefly()
    assert caught == []


@pytest.mark.parametrize("seconds", [None, 1000])
def test_in_time(seconds):
    """A block that ends in time is not interrupted, and no alarm is left for later."""
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(seconds, "nothing"):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_time():
    """A limit of 0 seconds interrupts at once."""
    with pytest.raises(TimedOut), time_limit(0, "waiting"):
        select.select([], [], [])


def test_signal_that_is_missed():
    """A signal that came just before a system call, and did not interrupt it, comes again."""

    def wait_deafly() -> None:
        with time_limit(0.01, "waiting"):
            # The first signal is consumed here, as if it had come too early.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            assert signal.sigwait({signal.SIGALRM}) == signal.SIGALRM
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            select.select([], [], [], 10)

    with pytest.raises(TimedOut):
        wait_deafly()


def test_nested_limits():
    """Within a longer limit a shorter one applies; afterwards the longer one still holds."""
    steps = []

    def inner() -> None:
        with time_limit(0.01, "inner"):
            select.select([], [], [])

    def outer() -> None:
        with time_limit(0.2, "outer"):
            with pytest.raises(TimedOut, match="timed out: inner"):
                inner()
            steps.append("after inner")
            select.select([], [], [])

    with pytest.raises(TimedOut, match=r"timed out: outer did not finish within 0\.2 seconds"):
        outer()
    assert steps == ["after inner"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
