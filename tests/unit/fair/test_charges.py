"""What the scheduler charges: events, batches, chores and debts, each once."""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sbus.fair import Lines
from sbus.fair.lines import QUANTUM
from sbus.fair.scheduler import ALONE, FEW, SLICE
from tests.unit.fair.fakes import Machine, Reader, Work
from tests.unit.fair.work import LINES, add, busy, crowd

# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_event_without_a_batch_is_charged(is_refused):
    """What is done for a socket that brings no packet, or may not be read, is its user's."""
    machine, lines, other = Machine(), Lines(), Lines()
    scheduler = machine.scheduler
    scheduler.is_busy = True
    if is_refused:
        lines.deficit = 0
    before = lines.deficit
    assert scheduler.may_read(lines) is not is_refused
    machine.now += 7
    scheduler.note_event(other)
    machine.now += 5
    scheduler.may_pass()
    assert (before - lines.deficit, QUANTUM - other.deficit) == (7, 5)


def test_a_part_of_a_turn_can_be_shifted():
    """Who causes work in another user's turn or batch pays for it."""
    machine, lines, causer = Machine(), Lines(), Lines()
    work = add(machine, lines, "chores", 100, 1)
    assert isinstance(work, Work)

    def cause() -> None:
        machine.now += 30
        machine.scheduler.shift(causer, 30)

    work.during = cause
    machine.settle()
    assert QUANTUM - causer.deficit == 30
    assert ALONE - lines.deficit == 100


def test_a_user_can_be_taken_out():
    """A user whose server stops has no turn any more, whatever waits."""
    machine, lines = Machine(), Lines()
    work = add(machine, lines, "mail", 1)
    machine.scheduler.finish(lines)
    assert not machine.scheduler.is_busy
    machine.settle()
    assert not work.took


# --- batches outside of turns ---------------------------------------------------------------------


def test_who_has_no_time_left_waits():
    """A user in debt is not read directly; after a turn it is again."""
    machine, lines = Machine(), Lines()
    busy(machine)
    assert machine.batch(lines, QUANTUM - 1)
    assert machine.scheduler.may_go_on(lines)
    assert machine.batch(lines, 2)
    assert not machine.scheduler.may_go_on(lines)
    assert not machine.batch(lines, 1)
    reader = Reader(machine, lines, 1, 7)
    reader.wait()
    machine.settle()
    assert (reader.took, machine.scheduler.waited) == (7, 1)
    assert machine.batch(lines, 1)


@pytest.mark.parametrize("line", ["readers", "hung_up", "held"])
def test_a_client_is_not_read_before_those_of_its_user_that_wait(line):
    """Clients of one user are read in the order in which they have sent, whoever is looked at first."""
    machine, lines = Machine(), Lines()
    busy(machine)
    reader = Reader(machine, lines, 1, 1)
    assert machine.scheduler.may_read(lines)
    if line == "held":
        machine.scheduler.hold(lines, reader)
    else:
        machine.scheduler.wait(lines, reader, line == "hung_up")
    assert not machine.scheduler.may_read(lines)
    assert not machine.scheduler.may_go_on(lines)
    assert machine.scheduler.may_read(Lines())


@pytest.mark.parametrize("line", ["mail", "chores"])
def test_mail_and_chores_keep_no_client_from_being_read(line):
    """A user's clients are read directly while only mail or chores of it wait."""
    machine, lines = Machine(), Lines()
    add(machine, lines, line, 1)
    assert machine.scheduler.may_read(lines)


def test_a_batch_may_take_what_its_user_has_left():
    """A batch ends when its user's time does; while no other user is active, after 4 ms."""
    machine, lines = Machine(), Lines()
    scheduler = machine.scheduler
    assert scheduler.begin(lines) == machine.now + ALONE
    scheduler.end(lines)
    busy(machine)
    machine.batch(lines, 100)
    assert scheduler.begin(lines) == machine.now + QUANTUM - 100
    scheduler.end(lines)
    scheduler.charge(lines, 3 * QUANTUM)
    assert scheduler.begin(lines) == machine.now + 1


def test_a_batch_begins_when_it_is_read():
    """To read a batch is part of it; the next batch of the same read begins where the first one ended."""
    machine, lines = Machine(), Lines()
    scheduler = machine.scheduler
    busy(machine)
    assert scheduler.may_read(lines)
    machine.now += 100
    scheduler.begin(lines)
    machine.now += 10
    scheduler.end(lines)
    assert lines.deficit == QUANTUM - 110
    machine.now += 1_000
    scheduler.begin(lines)
    machine.now += 10
    scheduler.end(lines)
    assert lines.deficit == QUANTUM - 120


def test_a_read_that_finds_no_packet_is_charged():
    """A read is charged that completes no packet: when the next one begins, or when the sockets were looked at."""
    machine, one, two = Machine(), Lines(), Lines()
    scheduler = machine.scheduler
    busy(machine)
    assert scheduler.may_read(one)
    machine.now += 10
    assert scheduler.may_read(two)
    machine.now += 20
    scheduler.begin(one)
    machine.now += 30
    scheduler.end(one)
    assert (one.deficit, two.deficit) == (QUANTUM - 40, QUANTUM - 20)
    assert scheduler.may_read(two)
    machine.now += 5
    assert scheduler.may_pass()
    assert two.deficit == QUANTUM - 25


def test_what_happens_between_two_looks_is_no_part_of_a_read():
    """A client that has closed, whose last read finds nothing, does not make its user pay until the next batch."""
    machine, lines = Machine(), Lines()
    scheduler = machine.scheduler
    busy(machine)
    assert scheduler.may_read(lines)
    machine.now += 10
    scheduler.may_pass()
    machine.now += 10**9
    scheduler.begin(lines)
    machine.now += 10
    scheduler.end(lines)
    assert lines.deficit == QUANTUM - 20


def test_passes_go_on_for_a_quantum_between_turns():
    """While a user waits for a turn, sockets are looked at for a quantum; while nobody does, as long as they like."""
    machine = Machine()
    assert machine.scheduler.may_pass()
    machine.now += 10 * QUANTUM
    assert machine.scheduler.may_pass()
    add(machine, Lines(), "chores", 1)
    machine.turn()
    machine.now += QUANTUM - 1
    assert machine.scheduler.may_pass()
    machine.now += 1
    assert not machine.scheduler.may_pass()


# --- batches in turns -----------------------------------------------------------------------------


def test_a_batch_in_a_turn_is_charged_once():
    """A batch that is handled in its user's turn is part of the turn, which is charged as a whole."""
    machine, lines = Machine(), Lines()
    busy(machine)
    reader = Reader(machine, lines, 3, SLICE // 3)
    reader.wait()
    machine.turn()
    assert reader.left == 0
    assert lines.deficit == QUANTUM - 3 * (SLICE // 3)


def test_in_a_turn_only_its_user_is_read():
    """Whatever a turn resumes, clients of other users wait for theirs, and its own clients until its end."""
    machine, lines, other = Machine(), Lines(), Lines()
    seen: list[tuple[bool, ...]] = []
    scheduler = machine.scheduler

    def look() -> None:
        seen.append(tuple(may(each) for each in (lines, other) for may in (scheduler.may_read, scheduler.may_go_on)))

    work = add(machine, lines, "chores", ALONE // 2 + 1, 2)
    assert isinstance(work, Work)
    work.during = look
    machine.settle()
    assert seen == [(True, True, False, False), (False, True, False, False)]


def test_turns_are_made_one_at_a_time():
    """However much waits, the reactor is asked for one turn, and for the next when that is over."""
    machine = Machine()
    for _ in range(5):
        lines = Lines()
        for line in LINES:
            add(machine, lines, line, 1, 2)
    while machine.calls:
        assert len(machine.calls) == 1
        machine.turn()


# --- chores ---------------------------------------------------------------------------------------


def test_a_short_chore_is_done_at_once():
    """What a user's deficit lasts for is done at once, and charged once."""
    machine, lines = Machine(), Lines()
    busy(machine)
    work = Work(machine, 3, 10)
    machine.scheduler.do(lines, work)
    assert (work.left, lines.deficit, lines.is_empty) == (0, QUANTUM - 30, True)


def test_a_long_chore_goes_on_in_turns():
    """The rest of a chore waits for the turns of its user."""
    machine, lines = Machine(), Lines()
    busy(machine)
    work = Work(machine, 10, QUANTUM // 2)
    machine.scheduler.do(lines, work)
    assert work.took == QUANTUM
    assert lines.deficit == 0
    machine.settle()
    assert work.left == 0


@pytest.mark.parametrize("why", ["debt", "order"])
def test_a_chore_waits_for_its_turn(why):
    """A user in debt, or with other chores, has nothing done at once."""
    machine, lines = Machine(), Lines()
    busy(machine)
    if why == "debt":
        machine.scheduler.charge(lines, QUANTUM)
    else:
        add(machine, lines, "chores", 1, 1)
    work = Work(machine, 1, 1, "last")
    machine.scheduler.do(lines, work)
    assert work.took == 0
    machine.settle()
    assert work.left == 0
    assert machine.log[-1] == "last"


def test_a_chore_of_a_user_alone():
    """While nobody else is active, a chore has 4 ms at once and nothing is charged."""
    machine, lines = Machine(), Lines()
    work = Work(machine, 20, ALONE // 10)
    machine.scheduler.do(lines, work)
    assert work.took == ALONE
    assert lines.deficit == QUANTUM
    machine.settle()
    assert work.left == 0


def test_a_chore_that_another_user_causes():
    """A batch does not pay for what it makes the server do for another user, who does."""
    machine, one, two = Machine(), Lines(), Lines()
    busy(machine)
    machine.scheduler.begin(one)
    machine.now += 10
    machine.scheduler.do(two, Work(machine, 1, 100))
    machine.now += 10
    machine.scheduler.end(one)
    assert (one.deficit, two.deficit) == (QUANTUM - 20, QUANTUM - 100)


def test_a_chore_that_a_chore_of_another_user_causes():
    """Each of three users pays for its own part, once: the batch does not get back what neither chore has cost it."""
    machine, one, two, three = Machine(), Lines(), Lines(), Lines()
    busy(machine)
    chore = Work(machine, 1, 100)
    chore.during = lambda: machine.scheduler.do(three, Work(machine, 1, 40))
    machine.scheduler.begin(one)
    machine.now += 10
    machine.scheduler.do(two, chore)
    machine.scheduler.end(one)
    assert [QUANTUM - lines.deficit for lines in (one, two, three)] == [10, 100, 40]


def test_what_a_chore_adds():
    """What others will need later because of a chore is charged to the user whose chore it is."""
    machine, one, two = Machine(), Lines(), Lines()
    busy(machine)
    chore = Work(machine, 1, 100)
    chore.during = lambda: machine.scheduler.add(30)
    machine.scheduler.begin(one)
    machine.now += 10
    machine.scheduler.do(two, chore)
    machine.scheduler.end(one)
    assert [QUANTUM - lines.deficit for lines in (one, two)] == [10, 130]


def test_a_chore_of_the_user_whose_batch_causes_it():
    """A chore in a batch of its own user is charged once."""
    machine, lines = Machine(), Lines()
    busy(machine)
    machine.scheduler.begin(lines)
    machine.now += 10
    machine.scheduler.do(lines, Work(machine, 1, 100))
    machine.scheduler.end(lines)
    assert lines.deficit == QUANTUM - 110


def test_a_chore_in_a_turn():
    """In a turn, a chore of its user is part of it, as far as it lasts; one of another user waits for that user's."""
    machine, lines, other = Machine(), Lines(), Lines()
    busy(machine)
    crowd(machine, FEW + 1)
    own, foreign = Work(machine, 3, QUANTUM // 4, "own"), Work(machine, 1, 1, "foreign")
    work = Work(machine, 1, QUANTUM // 2, "work")

    def cause() -> None:
        machine.scheduler.do(other, foreign)
        machine.scheduler.do(lines, own)
        assert (own.left, foreign.left) == (1, 1)

    work.during = cause
    machine.scheduler.append(lines, work)
    machine.turn()
    assert lines.deficit == 0
    assert machine.log == ["work", "own", "own"]
    machine.settle()
    assert sorted(machine.log) == ["foreign", "own", "own", "own", "work"]
    assert other.deficit == QUANTUM - 1


# --- debts ----------------------------------------------------------------------------------------


def test_a_debt_outlives_the_connections_of_its_user():
    """A user that has left is forgotten when it has rested: to connect again is no way out of a debt."""
    machine, lines = Machine(), Lines()
    busy(machine)
    add(machine, Lines(), "chores", QUANTUM)
    machine.batch(lines, 4 * QUANTUM)
    rested: list[int] = []
    lines.on_rest = lambda: rested.append(lines.deficit)
    machine.scheduler.enter(lines)
    while not rested:
        assert lines in machine.scheduler._ring
        machine.turn()
    assert rested[0] == QUANTUM
    machine.turn(10)
    assert len(rested) == 1
    assert lines not in machine.scheduler._ring


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("goes_into_debt", [False, True])
@given(length=st.integers(QUANTUM // 50, QUANTUM), number=st.integers(1, 6))
def test_reconnecting_gains_no_time(length, number, goes_into_debt, is_forgotten):
    """A user that leaves whenever its time is up has no more than the others, whether it comes back as soon as it is
    forgotten, or just before.
    """
    machine, lines = Machine(), Lines()
    add(machine, lines, "chores", 1, 1)
    machine.turn()
    others = [add(machine, Lines(), "chores", QUANTUM // 5) for _ in range(number)]
    machine.scheduler.press()
    took = 0
    rested = list[bool]()
    for _ in range(100):
        if rested and is_forgotten:
            lines = Lines()
        rested.clear()
        for _ in range(3):
            while (goes_into_debt or lines.deficit > length) and machine.batch(lines, length):
                took += length
            machine.scheduler.may_pass()
            if not (is_forgotten and lines.has_rested):
                break
            lines = Lines()
        if lines.on_rest is None:
            lines.on_rest = lambda: rested.append(True)
            machine.scheduler.enter(lines)
        machine.turn()
    assert took <= min(other.took for other in others) + ALONE + QUANTUM + length


def test_a_debt_of_a_user_that_stays_is_kept():
    """A user that has nothing to do has no turns, and no time comes back to it meanwhile."""
    machine, lines = Machine(), Lines()
    busy(machine)
    add(machine, Lines(), "chores", QUANTUM)
    machine.batch(lines, 3 * QUANTUM)
    machine.turn(50)
    assert lines.deficit == -2 * QUANTUM


def test_what_waits_keeps_a_user_from_being_forgotten():
    """As long as something waits for it, a user is not at rest."""
    machine, lines = Machine(), Lines()
    work = add(machine, lines, "mail", ALONE, 3)
    rested: list[float] = []
    lines.on_rest = lambda: rested.append(work.left)
    machine.settle()
    assert rested == [0]


def test_a_user_that_is_forgotten_is_not_kept():
    """The scheduler refers to no user who has nothing to do and sends no more."""
    machine, lines = Machine(), Lines()
    machine.batch(lines, 1)
    machine.batch(Lines(), 1)
    add(machine, lines, "chores", 1, 2)
    machine.settle()
    assert machine.scheduler.may_read(lines)
    machine.scheduler.may_pass()
    machine.scheduler.forget(lines)
    assert machine.scheduler not in gc.get_referrers(lines)


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_that_hangs_up_while_it_waits():
    """It goes before those that have not, also if it waits for room."""
    machine, lines, other = Machine(), Lines(), Lines()
    a, b, c = (Reader(machine, lines, 1, 1, name) for name in "abc")
    a.wait()
    b.wait()
    lines.add(other, 1, 1)
    machine.scheduler.hold(lines, c)
    machine.scheduler.hang_up(lines, c)
    machine.scheduler.hang_up(lines, b)
    machine.scheduler.hang_up(lines, Reader(machine, lines, 1, 1, "it does not wait"))
    machine.turn(2)
    assert machine.log == []
    lines.remove(other, 1, 1)
    machine.settle()
    assert machine.log == ["c", "b", "a"]


def test_a_reader_without_room_is_read_when_mail_has_gone():
    """Mail that leaves brings the readers that waited for room back into turns, whoever published it."""
    machine, lines, other = Machine(), Lines(), Lines()
    reader = Reader(machine, lines, 1, 1, "reader")
    lines.add(other, 1, 1)
    mail = add(machine, lines, "mail", ALONE, 2)
    assert isinstance(mail, Work)
    mail.during = lambda: lines.remove(other, 1, 1) if not mail.left else None
    machine.scheduler.hold(lines, reader)
    machine.settle()
    assert machine.log == ["mail", "mail", "reader"]
