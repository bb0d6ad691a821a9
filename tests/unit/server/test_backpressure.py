"""Back-pressure: which publishers are blocked, until when, and when time is up; on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from twisted.internet.task import Clock

from sbus.errors import CloseReason
from sbus.flood import QueueLimits, Until
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.protocol import MAX_RUN
from sbus.server.bus.queue_shares import QueueShares
from sbus.server.core.limits import Limits
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus
from tests.support.examples import examples

TIMEOUT = 30.0
LIMITS = QueueLimits(messages=1_000, bytes=100_000)
ROOM, EMPTY = Until.ROOM, Until.EMPTY


class Publisher:
    """A publisher that knows whether it is paused."""

    def __init__(self, user: int = 0) -> None:
        self.is_paused = False
        self.user = user

    def pause_publishing(self):
        self.is_paused = True

    def resume_publishing(self):
        assert self.is_paused
        self.is_paused = False


class Receiver:
    """A receiver with a bus of its own, unless it is given the back-pressure of one."""

    def __init__(self, backpressure: Backpressure | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.backpressure = backpressure or Backpressure(self.clock, TIMEOUT, LIMITS)
        self.disconnected_at: float | None = None
        self.transport: FakePacketTransport | None = None

    def block(self, publisher, until):
        self.backpressure.block(publisher, self, until)

    def drained(self, has_room, is_empty):
        self.backpressure.drained(self, has_room, is_empty)

    def close(self, reason):
        assert reason is CloseReason.BLOCKED_TOO_LONG
        assert self.disconnected_at is None
        self.disconnected_at = self.clock.seconds()


@pytest.fixture
def receiver():
    return Receiver()


def paused(*publishers):
    return [publisher.is_paused for publisher in publishers]


def test_until_empty(receiver):
    """A publisher that is blocked until the queue is empty is not resumed before."""
    publisher = Publisher()
    receiver.block(publisher, EMPTY)
    assert paused(publisher) == [True]
    receiver.drained(False, False)
    receiver.drained(True, False)
    assert paused(publisher) == [True]
    receiver.drained(True, True)
    assert paused(publisher) == [False]
    assert receiver.clock.getDelayedCalls() == []


def test_only_a_user_with_more_than_its_part_of_the_queue_is_held(receiver):
    """A publisher whose user has a fair part of the full queue at most goes on; with more, it is held."""
    flood, other = Publisher(1), Publisher(2)
    receiver.backpressure.kept(flood, receiver, 900, 9_000, 900)
    receiver.backpressure.kept(other, receiver, 100, 1_000, 1_000)
    receiver.block(other, ROOM)
    receiver.block(flood, ROOM)
    assert paused(flood, other) == [True, False]
    receiver.backpressure.kept(other, receiver, 800, 8_000, 1_800)
    receiver.block(other, ROOM)
    assert paused(flood, other) == [True, False]  # exactly its part
    receiver.backpressure.kept(other, receiver, 1, 10, 1_801)
    receiver.block(other, ROOM)
    assert paused(flood, other) == [True, True]
    receiver.drained(True, True)
    assert paused(flood, other) == [False, False]
    receiver.block(other, ROOM)  # the queue was empty: nobody else has anything there
    assert paused(flood, other) == [False, True]


def test_soft_blocking_concerns_each_publisher(receiver):
    """A receiver that blocks until it has drained does so whoever has most in its queue."""
    flood, other = Publisher(1), Publisher(2)
    receiver.backpressure.kept(flood, receiver, 900, 900, 900)
    receiver.block(other, EMPTY)
    assert paused(flood, other) == [False, True]


def test_forty_equal_users_are_held_when_they_grow(receiver):
    """Of users with equal parts none is held for what it has, and each one for the next message."""
    users = [Publisher(number) for number in range(40)]
    for queued, user in enumerate(users, 1):
        receiver.backpressure.kept(user, receiver, 1, 10, queued)
    for user in users:
        receiver.block(user, ROOM)
    assert not any(paused(*users))
    for queued, user in enumerate(users, 41):
        receiver.backpressure.kept(user, receiver, 1, 10, queued)
        receiver.block(user, ROOM)
        assert user.is_paused is (queued < 80)  # the last one has as much as each of the others
    receiver.drained(True, False)
    assert not any(paused(*users))


@pytest.mark.parametrize("is_large", [False, True])
def test_the_nearer_limit_counts(is_large):
    """The parts are those of the messages or of the bytes, whichever is nearer to its limit in the queue."""
    shares = QueueShares(QueueLimits(messages=1_000, bytes=9_999 if is_large else 1_000_000))
    shares.add("many", 90, 900, 90)
    shares.add("large", 10, 9_000, 100)
    assert shares.has_more_than_fair("large") is is_large
    assert shares.has_more_than_fair("many") is not is_large
    assert not shares.has_more_than_fair("nothing there")


SIZES = {1: 7, 2: 20, 3: 300}
"""The bytes of each message of a user."""


@given(
    st.lists(st.one_of(st.tuples(st.integers(1, 3), st.integers(1, 9)), st.integers(1, 20).map(lambda n: (0, n)))),
    st.builds(QueueLimits, messages=st.integers(1, 50), bytes=st.integers(1, 5_000)),
)
def test_shares_of_a_queue(plan, limits):
    """Beside a queue that is first in, first out, the shares are those of what waits in it."""
    shares = QueueShares(limits)
    queue: list[int] = []  # the user of each message
    for user, count in plan:
        if not user:
            del queue[:count]
            continue
        queue += [user] * count
        total = sum(SIZES[each] for each in queue)
        shares.add(user, count, count * SIZES[user], len(queue))
        counts_messages = len(queue) / limits.messages >= total / limits.bytes
        whole = len(queue) if counts_messages else total
        users = set(queue)
        for each in SIZES:
            part = queue.count(each) * (1 if counts_messages else SIZES[each])
            assert shares.has_more_than_fair(each) == (len(users) == 1 or part > whole / len(users))


@pytest.mark.parametrize("has_owner", [False, True])
def test_forty_uids_of_one_owner_are_one_user(has_owner):
    """With ``--subuid-as-owner`` they hold each other, and nobody else; else each of them has a part of its own."""
    bus = Bus(
        limits=Limits(queue_messages=100, block_timeout=TIMEOUT),
        owner_of=(lambda uid: 1 if uid >= 100_000 else uid) if has_owner else None,
    )
    reader, other = bus.connect(uid=0), bus.connect(uid=2)
    reader.send(b"SUB k", b"CMSG blocking/hard/block")
    reader.stall()
    flood = [bus.connect(uid=100_000 + number) for number in range(40)]
    for _ in range(10):
        for each in flood:
            if not each.protocol.is_paused:
                each.send(b"MSG k\0")
    other.send(b"MSG k\0", b"MSG k\0", b"MSG k\0", b"MSG k\0")
    assert other.protocol.is_paused is not has_owner
    assert any(each.protocol.is_paused for each in flood)


def test_a_flood_holds_no_other_user():
    """Where a full queue of root holds one user, the messages of another one are kept, up to an equal part."""
    bus = Bus(limits=Limits(queue_messages=100, block_timeout=TIMEOUT))
    reader, flood, other = bus.connect(uid=0), bus.connect(uid=1), bus.connect(uid=2)
    reader.send(b"SUB k", b"CMSG blocking/hard/block")
    reader.stall()
    flood.send(b"MSG k\0")
    flood.send(*[b"MSG k\0"] * 149)
    assert (flood.protocol.is_paused, reader.protocol.queue.messages) == (True, 101)
    for queued in range(1, 200):
        other.send(b"MSG k\0")
        if other.protocol.is_paused:
            break
        assert reader.protocol.queue.messages == 101 + queued
    assert queued == 102
    reader.drain()
    assert len(reader.take()) == 150 + queued
    assert not any(peer.protocol.is_paused for peer in (flood, other))
    assert bus.registry.counters.dropped == 0


def test_until_room(receiver):
    """A publisher that is blocked until there is room goes on at the low-water mark; the others stay blocked."""
    roomy, empty = Publisher(), Publisher()
    receiver.block(roomy, ROOM)
    receiver.block(empty, EMPTY)
    receiver.drained(False, False)
    assert paused(roomy, empty) == [True, True]
    receiver.drained(True, False)
    assert paused(roomy, empty) == [False, True]
    receiver.drained(True, True)
    assert paused(roomy, empty) == [False, False]


@pytest.mark.parametrize("order", [(EMPTY, ROOM), (ROOM, EMPTY)])
def test_blocked_in_both_ways(receiver, order):
    """A publisher that is blocked in both ways stays blocked until the queue is empty."""
    publisher = Publisher()
    for until in order:
        receiver.block(publisher, until)
    receiver.drained(True, False)
    assert paused(publisher) == [True]
    receiver.drained(True, True)
    assert paused(publisher) == [False]


def test_two_receivers_block_one_publisher():
    """A publisher goes on when the last of the receivers that block it has drained, however the others end."""
    clock = Clock()
    backpressure = Backpressure(clock, TIMEOUT, LIMITS)
    one, two, three = (Receiver(backpressure, clock) for _ in range(3))
    publisher = Publisher()
    for each in (one, two, three):
        each.block(publisher, EMPTY)
    one.drained(True, True)
    backpressure.release(two)
    assert paused(publisher) == [True]
    three.drained(True, True)
    assert paused(publisher) == [False]
    assert clock.getDelayedCalls() == []


@pytest.mark.parametrize("until", [EMPTY, ROOM])
def test_time_out(receiver, until):
    """If nothing leaves the queue for the whole time, the receiver is disconnected, and not a moment before."""
    publisher = Publisher()
    receiver.clock.advance(100)
    receiver.block(publisher, until)
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    assert paused(publisher) == [True]
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 100 + TIMEOUT
    assert paused(publisher) == [False]
    assert receiver.clock.getDelayedCalls() == []


def test_each_packet_that_leaves_starts_the_time_again(receiver):
    """A receiver that takes one packet now and then is slow, but does not misbehave."""
    receiver.block(Publisher(), EMPTY)
    for _ in range(10):
        receiver.clock.advance(TIMEOUT - 1)
        receiver.drained(False, False)
    assert receiver.disconnected_at is None
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 11 * TIMEOUT - 10


def test_each_byte_that_is_read_starts_the_time_again(receiver):
    """Progress is what the receiver reads, long before packets leave its queue."""
    receiver.transport = FakePacketTransport()
    receiver.transport.unread = 100_000
    receiver.block(Publisher(), EMPTY)
    for _ in range(10):
        receiver.clock.pump([TIMEOUT / 8] * 4)
        receiver.transport.unread -= 768
        receiver.clock.pump([TIMEOUT / 8] * 3)
    assert receiver.disconnected_at is None
    receiver.clock.pump([TIMEOUT / 8] * 8)
    assert receiver.disconnected_at is not None


def test_more_publishers_do_not_start_the_time_again(receiver):
    """However many publishers are blocked one after another, the time runs from the first, or from the last packet."""
    publishers = [Publisher() for _ in range(10)]
    for publisher in publishers:
        receiver.block(publisher, EMPTY)
        receiver.clock.advance(TIMEOUT / 10)
    assert receiver.disconnected_at == pytest.approx(TIMEOUT)
    assert paused(*publishers) == [False] * 10


def test_no_time_out_without_a_blocked_publisher(receiver):
    """A receiver that blocks no publisher may take any time."""
    gone, goes_on = Publisher(), Publisher()
    receiver.block(gone, EMPTY)
    receiver.block(goes_on, ROOM)
    receiver.backpressure.forget(gone)
    receiver.drained(True, False)
    assert paused(gone, goes_on) == [True, False]  # one that is gone is left alone
    receiver.clock.advance(10 * TIMEOUT)
    assert receiver.disconnected_at is None
    assert receiver.clock.getDelayedCalls() == []


@pytest.mark.parametrize("until", [EMPTY, ROOM])
def test_a_publisher_that_is_gone(receiver, until):
    """A publisher that is gone is not resumed, and no time-out follows from it."""
    publisher = Publisher()
    receiver.block(publisher, until)
    receiver.backpressure.forget(publisher)
    receiver.backpressure.forget(publisher)
    receiver.clock.advance(TIMEOUT)
    assert receiver.disconnected_at is None
    receiver.drained(True, True)
    assert paused(publisher) == [True]


def test_time_starts_afresh_after_a_pause(receiver):
    """Once all publishers went on and the time has run out, the next block gets the whole time."""
    receiver.block(Publisher(), ROOM)
    receiver.drained(True, False)
    receiver.clock.advance(2 * TIMEOUT)
    receiver.block(Publisher(), ROOM)
    receiver.clock.advance(TIMEOUT - 0.001)
    assert receiver.disconnected_at is None
    receiver.clock.advance(0.001)
    assert receiver.disconnected_at == 3 * TIMEOUT


def test_release(receiver):
    """Releasing all publishers ends the matter: no timer is left, and it may be done again."""
    publishers = [Publisher(), Publisher()]
    receiver.block(publishers[0], EMPTY)
    receiver.block(publishers[1], ROOM)
    receiver.backpressure.release(receiver)
    receiver.backpressure.release(receiver)
    assert paused(*publishers) == [False, False]
    assert receiver.clock.getDelayedCalls() == []


def test_a_publisher_that_goes_on_at_once(receiver):
    """A publisher that publishes as soon as it is resumed, and is blocked again, is resumed again in its turn."""

    class Eager(Publisher):
        def resume_publishing(self):
            super().resume_publishing()
            if eager:
                receiver.block(self, eager.pop())

    for until in (EMPTY, ROOM):
        eager = [until]
        publisher = Eager()
        receiver.block(publisher, until)
        receiver.drained(True, until is EMPTY)
        assert paused(publisher) == [True]
        receiver.clock.advance(TIMEOUT / 2)
        receiver.drained(True, until is EMPTY)
        assert paused(publisher) == [False]
    publisher = Eager()
    eager = [EMPTY]
    receiver.block(publisher, EMPTY)
    receiver.backpressure.release(receiver)
    assert paused(publisher) == [True]
    receiver.clock.advance(TIMEOUT)
    assert paused(publisher) == [False]


def test_a_publisher_that_has_others_blocked_when_it_goes_on(receiver):
    """Publishers whose turn to be resumed has not come yet stay paused if they are blocked again meanwhile."""

    class Eager(Publisher):
        def resume_publishing(self):
            super().resume_publishing()
            for other in others:
                receiver.block(other, EMPTY)
            others.clear()

    eager, other = Eager(), Publisher()
    others = [other]
    receiver.block(eager, EMPTY)
    receiver.block(other, EMPTY)
    receiver.drained(True, True)
    assert paused(eager, other) == [False, True]
    receiver.drained(True, True)
    assert paused(eager, other) == [False, False]


def test_changes_of_mind_do_not_start_the_time_again(receiver):
    """A receiver that chooses other strategies unblocks its publishers, but wins no time if it blocks them again."""
    publisher = Publisher()
    for _ in range(4):
        receiver.block(publisher, EMPTY)
        receiver.clock.advance(TIMEOUT / 4 - 0.001)
        assert receiver.disconnected_at is None
        receiver.backpressure.reconsider(receiver)
        assert paused(publisher) == [False]
    receiver.block(publisher, EMPTY)
    receiver.clock.advance(0.004)
    assert receiver.disconnected_at == pytest.approx(TIMEOUT)
    assert paused(publisher) == [False]


class BackpressureMachine(RuleBasedStateMachine):
    """Several receivers and publishers of one bus, against a plain account of the blocked pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backpressure = Backpressure(self.clock, TIMEOUT, LIMITS)
        self.receivers = [Receiver(self.backpressure, self.clock) for _ in range(2)]
        self.publishers = [Publisher() for _ in range(3)]
        self.waits: dict[tuple[Receiver, Publisher], Until] = {}
        self.since: dict[Receiver, float] = {}

    def stop(self, receiver):
        self.since.pop(receiver, None)

    def end(self, receiver):
        self.waits = {pair: until for pair, until in self.waits.items() if pair[0] is not receiver}

    @rule(r=st.integers(0, 1), p=st.integers(0, 2), until=st.sampled_from(Until))
    def block(self, r, p, until):
        receiver, publisher = self.receivers[r], self.publishers[p]
        receiver.block(publisher, until)
        if self.waits.get((receiver, publisher)) is not EMPTY:
            self.waits[receiver, publisher] = until
        self.since.setdefault(receiver, self.clock.seconds())

    @rule(r=st.integers(0, 1), has_room=st.booleans(), is_empty=st.booleans())
    def drained(self, r, has_room, is_empty):
        receiver = self.receivers[r]
        receiver.drained(has_room, is_empty)
        if receiver in self.since:
            self.since[receiver] = self.clock.seconds()
        if is_empty:
            self.end(receiver)
            self.stop(receiver)
        elif has_room:
            self.waits = {pair: u for pair, u in self.waits.items() if pair[0] is not receiver or u is EMPTY}

    @rule(p=st.integers(0, 2))
    def publisher_leaves(self, p):
        publisher = self.publishers[p]
        self.backpressure.forget(publisher)
        self.waits = {pair: until for pair, until in self.waits.items() if pair[1] is not publisher}
        self.publishers[p] = Publisher()

    @rule(r=st.integers(0, 1))
    def release(self, r):
        self.backpressure.release(self.receivers[r])
        self.end(self.receivers[r])
        self.stop(self.receivers[r])

    @rule(r=st.integers(0, 1))
    def reconsider(self, r):
        self.backpressure.reconsider(self.receivers[r])
        self.end(self.receivers[r])

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds):
        self.clock.pump([1.0] * seconds)
        for receiver in self.receivers:
            expected = None
            due = self.since.get(receiver, float("inf")) + TIMEOUT
            if due <= self.clock.seconds():
                expected = due if any(pair[0] is receiver for pair in self.waits) else None
                self.end(receiver)
                self.stop(receiver)
            assert receiver.disconnected_at == expected
            receiver.disconnected_at = None

    @invariant()
    def paused_are_those_that_are_blocked(self):
        blocked = {publisher for _, publisher in self.waits}
        assert {p for p in self.publishers if p.is_paused} == blocked

    @invariant()
    def one_timer_for_each_receiver_that_blocks(self):
        assert len(self.clock.getDelayedCalls()) == len(self.since)
        assert {receiver for receiver, _ in self.waits} <= set(self.since)

    def teardown(self):
        for receiver in self.receivers:
            self.backpressure.release(receiver)
        assert self.clock.getDelayedCalls() == []
        assert not any(paused(*self.publishers))


TestBackpressure = BackpressureMachine.TestCase
TestBackpressure.settings = settings(max_examples=examples(60), stateful_step_count=30)


@pytest.mark.parametrize(("sent", "kept"), [(64, 64), (2_000, MAX_RUN)])
def test_a_queue_exceeds_its_limit_by_a_batch_once(sent, kept):
    """What the first flush leaves is kept, `MAX_RUN` messages at most; then one message stops each publisher (I6)."""
    bus = Bus(limits=Limits(block_timeout=30.0, queue_messages=3))
    reader, *publishers = (bus.connect() for _ in range(4))
    reader.send(b"SUB k", b"CMSG blocking/hard/block")
    reader.stall()
    for publisher in publishers:
        publisher.send(*[b"MSG k\0"] * sent)
    assert reader.protocol.queue.messages == kept + 2
    assert all(publisher.protocol.is_paused for publisher in publishers)
    reader.drain()
    bus.settle()
    assert len(reader.take()) == 3 * sent
