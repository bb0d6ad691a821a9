"""Time-outs of the command ``sbus``."""

from __future__ import annotations

import select
import signal

import pytest

from sbus.cli.deadline import Deadline, at_most
from sbus.errors import TimedOut


def test_deadline():
    """A deadline passes when its seconds are over, and never without any."""
    assert Deadline(None).left is None
    assert not Deadline(None).has_passed
    assert Deadline(0).has_passed
    later = Deadline(1000)
    assert later.left is not None
    assert 990 < later.left <= 1000
    assert not later.has_passed


def test_at_most_breaks_off():
    """What takes too long is broken off, though it catches time-outs of its own."""
    caught = []

    def wait() -> None:
        try:
            select.select([], [], [])
        except Exception as e:
            caught.append(e)

    def wait_briefly() -> None:
        with at_most(0.05, "waiting"):
            wait()

    with pytest.raises(TimedOut, match=r"the time is up: waiting is not done after 0\.05 seconds"):
        wait_briefly()
    assert caught == []


@pytest.mark.parametrize("seconds", [None, 1000])
def test_at_most_in_time(seconds):
    """What is done in time is not disturbed, nor what comes later."""
    before = signal.getsignal(signal.SIGALRM)
    with at_most(seconds, "nothing"):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_time():
    """No time at all is too little."""
    with pytest.raises(TimedOut), at_most(0, "waiting"):
        select.select([], [], [])


def test_signal_that_is_missed():
    """A signal that came just before the system call, and so did not break it off, comes again."""

    def wait_deafly() -> None:
        with at_most(0.01, "waiting"):
            # The first one is swallowed here, as if it had come too early.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            assert signal.sigwait({signal.SIGALRM}) == signal.SIGALRM
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            select.select([], [], [], 10)

    with pytest.raises(TimedOut):
        wait_deafly()
