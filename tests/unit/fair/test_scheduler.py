"""The scheduler: of k users with work each gets 1/k of the time, and what the server does for one is charged once."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.fair import Lines
from sbus.fair.lines import QUANTUM
from sbus.fair.scheduler import ALONE, CROWD, FEW, LONGEST_CHARGE, SLICE
from tests.support.examples import examples
from tests.unit.fair.fakes import Machine, Reader, Work
from tests.unit.fair.work import LINES, add, busy, crowd

# --- shares (I8) ----------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.dictionaries(st.sampled_from(LINES), st.integers(1_000, LONGEST_CHARGE), min_size=1), min_size=2, max_size=6
    ),
    st.integers(1, 300),
)
def test_users_with_work_get_equal_shares(users, turns):
    """Of k users with work, none ever gets more than another one beyond two quanta and the longest step of both."""
    machine = Machine()
    all_lines = [Lines() for _ in users]
    works = [
        [add(machine, lines, line, length) for line, length in chosen.items()]
        for lines, chosen in zip(all_lines, users, strict=True)
    ]
    for _ in range(turns):
        machine.turn()
        took = [sum(work.took for work in some) for some in works]
        for one, first in zip(took, users, strict=True):
            for two, second in zip(took, users, strict=True):
                assert one - two <= 2 * QUANTUM + max(first.values()) + max(second.values())
    assert machine.now - 1_000_000_000 == sum(took)


@given(st.lists(st.integers(1_000, 100_000), min_size=3, max_size=3), st.integers(1, 3))
def test_each_line_of_a_user_gets_a_third(lengths, users):
    """Of a user's time, each line with endless work gets a third, within one step a turn."""
    machine, turns = Machine(), 100
    for _ in range(users):
        lines = Lines()
        works = [add(machine, lines, line, length) for line, length in zip(LINES, lengths, strict=True)]
    machine.turn(turns)
    took = [work.took for work in works]
    for one in took:
        assert abs(one - sum(took) / 3) <= turns / users / 3 * max(lengths) + ALONE


@pytest.mark.parametrize("line", LINES)
def test_little_work_waits_for_one_round(line):
    """A user with little to do is done after one turn of each of the others, however much they have."""
    machine = Machine()
    for _ in range(5):
        add(machine, Lines(), "mail", QUANTUM // 10)
    machine.turn(20)
    before = machine.now
    work = add(machine, Lines(), line, QUANTUM // 10, 1)
    while not work.took:
        machine.turn()
    assert machine.now - before <= 6 * (QUANTUM + QUANTUM // 10)


def test_who_has_waited_longest_is_next():
    """A user that enters the ring goes before those that have had a turn since its own last one, and behind others; a
    new user goes behind all, or a user with ever new UIDs would always be first.
    """
    machine = Machine()
    one, two, three, new = Lines(), Lines(), Lines(), Lines()
    add(machine, one, "chores", QUANTUM, 1)
    machine.turn()
    for name, lines in ("two", two), ("three", three):
        add(machine, lines, "chores", QUANTUM).name = name
    machine.turn(2)
    for name, lines in ("new", new), ("one", one):
        add(machine, lines, "chores", QUANTUM).name = name
    machine.turn(5)
    assert machine.log[1:] == ["two", "three", "one", "two", "three", "new", "one"]


def test_who_comes_back_as_a_new_user_is_not_first():
    """A user that leaves the bus after each turn and comes back has no more turns than those that stay."""
    machine = Machine()
    others = [add(machine, Lines(), "chores", QUANTUM) for _ in range(2)]
    came = list[Work | Reader]()
    for _ in range(30):
        if not came or came[-1].took:
            came.append(add(machine, Lines(), "readers", QUANTUM - 1, 1))
        machine.turn()
    assert [work.took for work in others] == [10 * QUANTUM] * 2


def test_who_has_had_a_turn_does_not_go_before_a_new_user():
    """A user that empties its lines in each turn leaves the next turn to one that has had none yet."""
    machine = Machine()
    regular = Lines()
    add(machine, regular, "chores", 1, 1)
    machine.turn()
    add(machine, Lines(), "chores", 1, 1).name = "new"
    add(machine, regular, "chores", 1, 1).name = "regular"
    machine.turn(2)
    assert machine.log[1:] == ["new", "regular"]


@pytest.mark.parametrize("others", [1, 3])
def test_a_step_beyond_the_quantum_is_a_debt(others):
    """A user whose steps are long waits for the others to catch up."""
    machine = Machine()
    slow = add(machine, Lines(), "chores", 4 * QUANTUM)
    quick = [add(machine, Lines(), "chores", QUANTUM // 10) for _ in range(others)]
    machine.turn(400)
    for each in quick:
        assert each.took == pytest.approx(slow.took, rel=0.1)


def test_a_charge_is_capped():
    """A step that took very long was preempted: a user pays for 5 ms of it, and is served again after ten rounds."""
    machine = Machine()
    slow = add(machine, Lines(), "chores", 1_000 * QUANTUM)
    quick = add(machine, Lines(), "chores", QUANTUM)
    machine.turn(1_001)
    rounds = LONGEST_CHARGE / QUANTUM
    assert slow.took // slow.length == pytest.approx(quick.took // quick.length / rounds, abs=2)
    lines = Lines()
    machine.scheduler.charge(lines, 10 * LONGEST_CHARGE)
    assert lines.deficit == QUANTUM - LONGEST_CHARGE


class Ring(RuleBasedStateMachine):
    """Users come and go, with clients that are read directly, or in turns, and work of all kinds."""

    @initialize(users=st.integers(2, 4))
    def begin(self, users):
        self.machine = Machine()
        self.users = [Lines() for _ in range(users)]
        self.flood = Lines()
        add(self.machine, self.flood, "chores", QUANTUM // 4)
        self.waiting = dict.fromkeys(self.users, 0.0)

    @rule(who=st.integers(0, 3), line=st.sampled_from(LINES), steps=st.integers(1, 30), length=st.integers(1, 900_000))
    def give(self, who, line, steps, length):
        add(self.machine, self.users[who % len(self.users)], line, length, steps)

    @rule(who=st.integers(0, 3), took=st.integers(1, 900_000))
    def send(self, who, took):
        lines = self.users[who % len(self.users)]
        had = lines.deficit
        if self.machine.batch(lines, took):
            assert lines.deficit == had - took
        elif lines.is_empty:
            assert lines.deficit <= 0
            Reader(self.machine, lines, 1, took).wait()

    @rule(times=st.integers(1, 20))
    def turn(self, times):
        self.machine.turn(times)

    @invariant()
    def holds(self):
        if not hasattr(self, "users"):
            return
        for lines in (*self.users, self.flood):
            assert lines.deficit <= QUANTUM
            assert lines.is_empty or lines in self.machine.scheduler._ring
        assert self.machine.scheduler.is_busy
        assert len(self.machine.calls) == 1

    def teardown(self):
        if hasattr(self, "users"):
            self.machine.scheduler.finish(self.flood)
            self.machine.settle()
            assert all(lines.is_empty for lines in self.users)
            alone = Lines()
            for _ in range(CROWD + 1):
                assert self.machine.batch(alone, 0)
            assert not self.machine.scheduler.is_busy


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=examples(100), stateful_step_count=30)

# --- who is active --------------------------------------------------------------------------------


def test_nothing_is_measured_while_one_user_is_active():
    """The batches of a user alone are not charged, however many they are."""
    machine, lines = Machine(), Lines()
    for _ in range(3 * CROWD):
        assert machine.batch(lines, 10 * QUANTUM)
    assert not machine.scheduler.is_busy
    assert lines.deficit == QUANTUM
    assert machine.calls == []


def test_a_second_user_makes_a_crowd():
    """From the first batch of a second user on all are charged, until one has sent 64 batches in a row."""
    machine, one, two = Machine(), Lines(), Lines()
    machine.batch(one, 10)
    machine.batch(two, 10)
    scheduler = machine.scheduler
    assert (scheduler.is_busy, scheduler.is_contended, scheduler.crowd) == (True, True, CROWD)
    assert (one.deficit, two.deficit) == (QUANTUM, QUANTUM - 10)
    for _ in range(CROWD - 1):
        machine.batch(two, 10)
        assert scheduler.is_busy
    machine.batch(two, 10)
    assert (scheduler.is_busy, scheduler.is_contended, scheduler.crowd) == (False, False, 0)
    machine.batch(one, 10)
    assert scheduler.is_busy


def test_a_crowd_begins_anew_with_each_change():
    """As long as users alternate, everybody is charged."""
    machine, one, two = Machine(), Lines(), Lines()
    for _ in range(2 * CROWD):
        machine.batch(one, 1)
        machine.batch(two, 1)
        assert machine.scheduler.crowd == CROWD


def test_the_end_of_a_crowd_while_something_waits():
    """A user that has sent alone for long is measured still, while anything waits for a turn."""
    machine, one, two = Machine(), Lines(), Lines()
    machine.batch(one, 1)
    machine.batch(two, 1)
    work = add(machine, one, "chores", 1, 1)
    for _ in range(CROWD):
        machine.batch(two, 1)
    assert (machine.scheduler.crowd, machine.scheduler.is_busy) == (0, True)
    machine.settle()
    assert work.took
    assert not machine.scheduler.is_busy


def test_a_user_that_was_forgotten_makes_no_crowd():
    """The user after one that has left is alone."""
    machine, one, two = Machine(), Lines(), Lines()
    machine.batch(one, 1)
    machine.scheduler.forget(two)
    assert machine.scheduler.last is one
    machine.scheduler.forget(one)
    machine.batch(two, 1)
    assert not machine.scheduler.is_busy


@pytest.mark.parametrize("line", LINES)
def test_work_makes_a_user_measured_until_it_is_done(line):
    """While anything waits for a turn, all users are measured; a user alone has turns of 4 ms."""
    machine, lines = Machine(), Lines()
    work = add(machine, lines, line, ALONE // 4, 6)
    scheduler = machine.scheduler
    assert (scheduler.is_busy, scheduler.is_contended) == (True, False)
    machine.turn()
    assert work.took == ALONE
    assert scheduler.is_busy
    machine.turn()
    assert work.took == 6 * ALONE // 4
    assert not scheduler.is_busy
    assert machine.calls == []


def test_a_user_with_mail_is_not_alone_while_another_one_sends():
    """However many batches another user has sent since, turns of a user with mail are short."""
    machine, sender, receiver = Machine(), Lines(), Lines()
    machine.batch(sender, 1)
    work = add(machine, receiver, "mail", QUANTUM // 4, 20)
    assert not machine.scheduler.is_contended
    machine.turn(4)
    assert work.took == QUANTUM
    machine.scheduler.last = receiver
    machine.turn()
    assert work.took > 2 * QUANTUM


# --- slices ---------------------------------------------------------------------------------------


def test_a_turn_has_slices_while_few_packets_come():
    """The sockets are looked at within a turn, which is a user's until it is spent."""
    machine, one, two = Machine(), Lines(), Lines()
    busy(machine)
    works = [add(machine, lines, "chores", SLICE // 2) for lines in (one, two)]
    took = []
    for _ in range(2 * QUANTUM // SLICE):
        crowd(machine, FEW // 2)
        machine.turn()
        took.append(tuple(work.took // SLICE for work in works))
    assert took == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (5, 1), (5, 2), (5, 3), (5, 4), (5, 5)]


def test_the_last_slice_of_a_turn_is_what_is_left():
    """A user's time exceeds its turn by one step at most, however many slices the turn has."""
    machine, one, two = Machine(), Lines(), Lines()
    busy(machine)
    step = 3 * SLICE // 10
    first, second = (add(machine, lines, "chores", step) for lines in (one, two))
    while not second.took:
        machine.turn()
    assert QUANTUM <= first.took < QUANTUM + step


def test_a_turn_is_whole_while_many_packets_come():
    """Looks would bring a few of many packets each time. Earlier packets count by halves."""
    machine, lines = Machine(), Lines()
    busy(machine)
    work = add(machine, lines, "chores", SLICE // 2)
    crowd(machine, 4 * FEW)
    took = []
    for _ in range(4):
        before = work.took
        machine.turn()
        took.append(work.took - before)
    assert took == [QUANTUM, QUANTUM, SLICE, SLICE]


def test_waiting_clients_of_others_count_as_packets():
    """A crowd without time left is one all the same; clients of the user whose turn it is are none."""
    machine, lines, other = Machine(), Lines(), Lines()
    busy(machine)
    work = add(machine, lines, "chores", SLICE // 2)
    machine.turn()
    assert work.took == SLICE
    for _ in range(2 * FEW):
        machine.scheduler.wait(lines, Reader(machine, lines, 1, 0))
        machine.scheduler.begin(lines, 2 * FEW)
    machine.turn()
    assert work.took == 2 * SLICE
    for _ in range(2 * FEW):
        machine.scheduler.wait(other, Reader(machine, other, 1, 0))
    machine.turn()
    assert work.took == QUANTUM


def test_a_user_whose_turn_it_is_and_that_is_forgotten_leaves_nothing():
    """Nor does a turn go to a user that has been taken out of the ring between two slices."""
    machine, lines, other = Machine(), Lines(), Lines()
    busy(machine)
    gone, work = add(machine, lines, "chores", SLICE), add(machine, other, "chores", SLICE)
    machine.turn()
    machine.scheduler.finish(lines)
    machine.turn()
    assert (gone.took, work.took) == (SLICE, SLICE)


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_an_exception_costs_its_user_time_and_nobody_else_a_turn(line):
    """Work that raises is dropped and charged; the scheduler goes on with the next turn."""
    machine, lines, other = Machine(), Lines(), Lines()
    busy(machine)

    def fail() -> None:
        raise RuntimeError("of the work")

    if line == "readers":
        reader = add(machine, lines, line, 1, 1)
        assert isinstance(reader, Reader)
        reader.before = lambda: fail() or True  # type: ignore[func-returns-value]
    else:
        bad = add(machine, lines, line, QUANTUM // 2, 1)
        assert isinstance(bad, Work)
        bad.during = fail
    good = [add(machine, each, line, 1, 1) for each in (lines, other)]
    failures = Counter[str]()
    for _ in range(20):
        try:
            machine.turn()
        except RuntimeError as e:
            failures[str(e)] += 1
    assert failures == {"of the work": 1}
    assert all(work.took for work in good)
    assert not machine.calls
    assert not machine.scheduler._ring
    if line != "readers":
        assert lines.deficit <= QUANTUM


# --- turns without the reactor --------------------------------------------------------------------


@pytest.mark.parametrize("can_wait", [True, False])
def test_turns_follow_each_other_while_the_reactor_can_wait(can_wait):
    """Between two turns the sockets are looked at; the reactor goes on after `ALONE`, or if something was put off."""
    machine = Machine()
    looks = []
    for _ in range(2):
        add(machine, Lines(), "mail", QUANTUM)

    def look() -> bool:
        looks.append(machine.now)
        return can_wait

    machine.scheduler.look = look
    began = machine.now
    machine.scheduler._call()
    assert len(looks) == (ALONE // QUANTUM if can_wait else 1)
    assert machine.now - began == (ALONE + QUANTUM if can_wait else QUANTUM)


def test_nobody_looks_when_nothing_waits_any_more():
    """With the last entry the turns end, and the reactor has its own again."""
    machine = Machine()
    add(machine, Lines(), "mail", 1_000, steps=1)
    machine.scheduler.look = lambda: pytest.fail("nothing waits for a turn")
    machine.scheduler._call()
    assert not machine.scheduler.is_busy
