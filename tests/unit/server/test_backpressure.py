"""Whom a receiver holds back, until when, and when its time is up; on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from twisted.internet.task import Clock

from sbus.server.backpressure import Backpressure

TIMEOUT = 30.0


class Publisher:
    """Remembers who holds it."""

    def __init__(self) -> None:
        self.held_by: set[object] = set()

    def block_on(self, receiver):
        self.held_by.add(receiver)

    def unblock(self, receiver):
        self.held_by.discard(receiver)


class Receiver:
    """A receiver that is disconnected when its time is up, as the server does it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.holdback = Backpressure(self, self.clock, TIMEOUT)
        self.disconnected_at: float | None = None

    def block_timed_out(self):
        assert self.disconnected_at is None
        self.disconnected_at = self.clock.seconds()
        self.holdback.release()


@pytest.fixture
def receiver():
    return Receiver()


def held(*publishers):
    return [bool(publisher.held_by) for publisher in publishers]


def test_until_empty(receiver):
    """A publisher held until the queue is empty is not let go before it is."""
    publisher = Publisher()
    receiver.holdback.block_on(publisher, until_empty=True)
    assert publisher.held_by == {receiver}
    receiver.holdback.on_drained(room=False, empty=False)
    receiver.holdback.on_drained(room=True, empty=False)
    assert held(publisher) == [True]
    receiver.holdback.on_drained(room=True, empty=True)
    assert held(publisher) == [False]
    assert receiver.clock.getDelayedCalls() == []


def test_until_room(receiver):
    """A publisher held until there is room goes on at the low-water mark; the others wait on."""
    roomy, empty = Publisher(), Publisher()
    receiver.holdback.block_on(roomy, until_empty=False)
    receiver.holdback.block_on(empty, until_empty=True)
    receiver.holdback.on_drained(room=False, empty=False)
    assert held(roomy, empty) == [True, True]
    receiver.holdback.on_drained(room=True, empty=False)
    assert held(roomy, empty) == [False, True]
    receiver.holdback.on_drained(room=True, empty=True)
    assert held(roomy, empty) == [False, False]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_held_for_both(receiver, order):
    """A publisher held in both ways waits for the queue to be empty."""
    publisher = Publisher()
    for until_empty in order:
        receiver.holdback.block_on(publisher, until_empty)
    receiver.holdback.on_drained(room=True, empty=False)
    assert held(publisher) == [True]
    receiver.holdback.on_drained(room=True, empty=True)
    assert held(publisher) == [False]


@pytest.mark.parametrize("until_empty", [True, False])
def test_time_out(receiver, until_empty):
    """If nothing leaves the queue for the whole time, the receiver is disconnected, and not a moment before."""
    publisher = Publisher()
    receiver.clock.advance(100)
    receiver.holdback.block_on(publisher, until_empty)
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    assert held(publisher) == [True]
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 100 + TIMEOUT
    assert held(publisher) == [False]
    assert receiver.clock.getDelayedCalls() == []


def test_each_packet_that_leaves_starts_the_time_again(receiver):
    """A receiver that takes one packet now and then is slow, but does not misbehave."""
    receiver.holdback.block_on(Publisher(), until_empty=True)
    for _ in range(10):
        receiver.clock.advance(TIMEOUT - 1)
        receiver.holdback.on_drained(room=False, empty=False)
    assert receiver.disconnected_at is None
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 11 * TIMEOUT - 10


def test_more_publishers_do_not_start_the_time_again(receiver):
    """However many are held back one after another, the time runs from the first, or from the last packet."""
    publishers = [Publisher() for _ in range(10)]
    for publisher in publishers:
        receiver.holdback.block_on(publisher, until_empty=True)
        receiver.clock.advance(TIMEOUT / 10)
    assert receiver.disconnected_at == pytest.approx(TIMEOUT)
    assert held(*publishers) == [False] * 10


def test_nobody_held_back_no_time_out(receiver):
    """A receiver that holds nobody back may take as long as it likes."""
    gone, goes_on = Publisher(), Publisher()
    receiver.holdback.block_on(gone, until_empty=True)
    receiver.holdback.block_on(goes_on, until_empty=False)
    receiver.holdback.discard(gone)
    receiver.holdback.on_drained(room=True, empty=False)
    assert held(gone, goes_on) == [True, False]  # nobody bothers one that is gone
    receiver.clock.advance(10 * TIMEOUT)
    assert receiver.disconnected_at is None
    assert receiver.clock.getDelayedCalls() == []


@pytest.mark.parametrize("until_empty", [True, False])
def test_a_publisher_that_is_gone(receiver, until_empty):
    """A publisher that is gone is held by nobody: it is not let go, and no time-out follows from it."""
    publisher = Publisher()
    receiver.holdback.block_on(publisher, until_empty)
    receiver.holdback.discard(publisher)
    receiver.clock.advance(TIMEOUT)
    assert receiver.disconnected_at is None
    receiver.holdback.on_drained(room=True, empty=True)
    assert held(publisher) == [True]


def test_time_starts_afresh_after_a_pause(receiver):
    """Once everyone was let go and the time has run out, who is held later is held for the whole time."""
    receiver.holdback.block_on(Publisher(), until_empty=False)
    receiver.holdback.on_drained(room=True, empty=False)
    receiver.clock.advance(2 * TIMEOUT)
    receiver.holdback.block_on(Publisher(), until_empty=False)
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 3 * TIMEOUT


def test_release(receiver):
    """To release everyone ends the matter: no clock is left running, and it may be done again."""
    publishers = [Publisher(), Publisher()]
    receiver.holdback.block_on(publishers[0], until_empty=True)
    receiver.holdback.block_on(publishers[1], until_empty=False)
    receiver.holdback.release()
    receiver.holdback.release()
    assert held(*publishers) == [False, False]
    assert receiver.clock.getDelayedCalls() == []


def test_a_publisher_that_goes_on_at_once(receiver):
    """A publisher that publishes as soon as it is let go, and is held again, is let go again in its turn."""

    class Eager(Publisher):
        def unblock(self, receiver):
            super().unblock(receiver)
            if eager:
                receiver.holdback.block_on(self, eager.pop())

    for until_empty in (True, False):
        eager = [until_empty]
        publisher = Eager()
        receiver.holdback.block_on(publisher, until_empty)
        receiver.holdback.on_drained(room=True, empty=until_empty)
        assert held(publisher) == [True]
        receiver.clock.advance(TIMEOUT / 2)
        receiver.holdback.on_drained(room=True, empty=until_empty)
        assert held(publisher) == [False]
    publisher = Eager()
    eager = [True]
    receiver.holdback.block_on(publisher, until_empty=True)
    receiver.holdback.release()
    assert held(publisher) == [True]
    receiver.clock.advance(TIMEOUT)
    assert held(publisher) == [False]


def test_changes_of_mind_do_not_start_the_time_again(receiver):
    """A receiver that chooses another strategy lets its publishers go, but wins no time if it holds them again."""
    publisher = Publisher()
    for _ in range(4):
        receiver.holdback.block_on(publisher, until_empty=True)
        receiver.clock.advance(TIMEOUT / 4 - 0.001)
        assert receiver.disconnected_at is None
        receiver.holdback.reconsider()
        assert held(publisher) == [False]
    receiver.holdback.block_on(publisher, until_empty=True)
    receiver.clock.advance(0.004)
    assert receiver.disconnected_at == pytest.approx(TIMEOUT)
    assert held(publisher) == [False]


class HoldbackMachine(RuleBasedStateMachine):
    """Several receivers and publishers, against a plain account of who waits for what."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = Receiver()
        self.publishers = [Publisher() for _ in range(3)]
        self.waits: dict[Publisher, bool] = {}
        self.since: float | None = None

    def end(self):
        self.waits.clear()
        self.since = None

    @rule(number=st.integers(0, 2), until_empty=st.booleans())
    def block_on(self, number, until_empty):
        publisher = self.publishers[number]
        self.receiver.holdback.block_on(publisher, until_empty)
        self.waits[publisher] = self.waits.get(publisher, False) or until_empty
        if self.since is None:
            self.since = self.receiver.clock.seconds()

    @rule(room=st.booleans(), empty=st.booleans())
    def on_drained(self, room, empty):
        self.receiver.holdback.on_drained(room, empty)
        if self.since is not None:
            self.since = self.receiver.clock.seconds()
        if empty:
            self.end()
        elif room:
            self.waits = {publisher: True for publisher, until_empty in self.waits.items() if until_empty}

    @rule(number=st.integers(0, 2))
    def gone(self, number):
        publisher = self.publishers[number]
        self.receiver.holdback.discard(publisher)
        self.waits.pop(publisher, None)
        self.publishers[number] = Publisher()

    @rule()
    def release(self):
        self.receiver.holdback.release()
        self.end()

    @rule()
    def reconsider(self):
        self.receiver.holdback.reconsider()
        self.waits.clear()

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds):
        now = self.receiver.clock.seconds()
        due = None if self.since is None else self.since + TIMEOUT
        self.receiver.clock.pump([1.0] * seconds)
        if due is None or due > now + seconds:
            assert self.receiver.disconnected_at is None
        elif self.waits:
            assert self.receiver.disconnected_at == due
            self.receiver.disconnected_at = None
            self.end()
        else:
            assert self.receiver.disconnected_at is None
            self.since = None

    @invariant()
    def holds_who_waits(self):
        assert {p for p in self.publishers if p.held_by} == set(self.waits)

    @invariant()
    def clock_runs_while_someone_waits(self):
        assert len(self.receiver.clock.getDelayedCalls()) <= 1
        if self.waits:
            assert len(self.receiver.clock.getDelayedCalls()) == 1

    def teardown(self):
        self.receiver.holdback.release()
        assert self.receiver.clock.getDelayedCalls() == []


TestHoldback = HoldbackMachine.TestCase
TestHoldback.settings = settings(max_examples=60, stateful_step_count=30)
