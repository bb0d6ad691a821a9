"""The lines of a user: who waits, how much mail fits, in which order readers come back, and whose turn a line has."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sbus.fair import Lines
from sbus.fair.lines import MAIL_NS, MEMBERSHIPS, MOST_BYTES, QUANTUM
from sbus.routing.route import FIRST_NS, Group
from tests.support.costs import calls
from tests.unit.fair.fakes import Machine, Reader, Work

MANY = 1 << 40


# --- who waits -----------------------------------------------------------------------------------


def test_a_receiver_waits_while_mail_is_for_it():
    """A receiver waits from the first entry for a group of it to the last one; others of its user do not."""
    lines, machine = Lines(), Machine()
    some, all_ = Group(None, ("a", "b")), Group(None, ("a", "b", "c"))
    assert not lines.waits("a")
    for group in (some, all_, some):
        lines.mail.append(Work(machine, 1, 1))
        lines.expect(group)
    assert [lines.waits(each) for each in "abcd"] == [True, True, True, False]
    assert [lines.waits(some) for some in ("da", "ad", "dd")] == [True, True, False]
    lines.settle(all_)
    assert [lines.waits(each) for each in "abcd"] == [True, True, False, False]
    lines.settle(some)
    assert lines.waits("a")
    lines.settle(some)
    assert not lines.waits("a")
    assert not lines.waiting


def test_many_receivers_are_not_walked_for_each_group():
    """Whether mail waits for one of many receivers takes no longer than its small groups are large."""
    hashed: list[int] = []

    class Receiver:
        def __hash__(self) -> int:
            hashed.append(1)
            return id(self)

    lines = Lines()
    for _ in range(20):
        lines.expect(Group(None, (Receiver(), Receiver())))
    lines.mail.append(Work(Machine(), 1, 1))
    many = frozenset(Receiver() for _ in range(300))
    for group in lines.waiting:
        assert group.members
    hashed.clear()
    assert not lines.waits(many)
    assert len(hashed) <= 2 * len(lines.waiting)


def test_a_receiver_waits_for_its_letters():
    """A letter for a client is mail that it waits for."""
    lines, machine = Lines(), Machine()
    lines.mail.append(Work(machine, 1, 1))
    lines.letters["a"] = 1
    assert lines.waits("a")
    assert not lines.waits("b")


@pytest.mark.parametrize(("groups", "waits"), [(MEMBERSHIPS, False), (MEMBERSHIPS + 1, True)])
def test_everybody_waits_for_many_groups(groups, waits):
    """Beyond some groups nobody looks: each receiver of the user counts as waiting, as long as there is mail."""
    lines, machine = Lines(), Machine()
    lines.mail.append(Work(machine, 1, 1))
    for number in range(groups):
        lines.expect(Group(None, (number,)))
    assert lines.waits([0])
    assert lines.waits(["nobody"]) is waits
    assert calls(lines.waits, range(groups, groups + 99)) == calls(lines.waits, ["nobody"]) <= 3 * MEMBERSHIPS
    lines.mail.clear()
    assert not lines.waits(["nobody"])


# --- how much fits (I9) --------------------------------------------------------------------------


@pytest.mark.parametrize("users", range(5))
def test_an_empty_share_takes_one_run_of_any_size(users):
    """However full a mailbox is, a user who has nothing in it may add one run."""
    lines = Lines(1_000)
    others = [Lines() for _ in range(users)]
    for other in others:
        lines.add(other, MAIL_NS, 1_000)
    newcomer = Lines()
    assert lines.has_room(newcomer, 100 * MAIL_NS, MANY)
    lines.add(newcomer, 100 * MAIL_NS, MANY)
    assert not lines.has_room(newcomer, 0, 1)
    assert not lines.has_room(newcomer, 1, 0)
    lines.remove(newcomer, 100 * MAIL_NS, MANY)
    assert lines.has_room(newcomer, 100 * MAIL_NS, MANY)


def test_one_publisher_has_half():
    """A publisher alone may fill half of the mailbox, to the byte and to the nanosecond: 8 MiB, and 200 ms."""
    for work, size in ((MAIL_NS // 2, 0), (0, MOST_BYTES // 2)):
        lines, publisher = Lines(), Lines()
        lines.add(publisher, 0, 0)
        assert lines.has_room(publisher, work, size)
        assert not lines.has_room(publisher, work + bool(work), size + bool(size))
        lines.add(publisher, work - bool(work), size - bool(size))
        assert lines.has_room(publisher, bool(work), bool(size))
        lines.add(publisher, bool(work), bool(size))
        assert not lines.has_room(publisher, bool(work), bool(size))


def test_after_a_gap_half_of_the_work_has_to_be_done():
    """Where messages were lost last, there is room when half of the work is done, and not after each entry."""
    lines, publisher = Lines(), Lines()
    lines.add(publisher, MAIL_NS // 4, 1)
    assert lines.has_room(publisher, MAIL_NS // 4, 1)
    assert lines.has_room(publisher, 0, 1, after_gap=True)
    assert not lines.has_room(publisher, 1, 1, after_gap=True)


def test_the_program_is_bounded_by_bytes_alone():
    """What the program around the bus publishes is never too much work; its bytes have a share as a user's have."""
    lines = Lines(1_000)
    lines.add(None, 1, 1)
    assert lines.has_room(None, 100 * MAIL_NS, 499)
    assert not lines.has_room(None, 0, 500)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, MAIL_NS // 3), st.integers(0, 400), st.booleans()), max_size=60
    )
)
def test_shares(steps):
    """A user who has mail there gets at most (rest + own) / (n + 1), and everything that was added can be removed."""
    lines, users = Lines(1_000), [Lines() for _ in range(4)]
    entries: list[tuple[int, int, int]] = []
    for who, work, size, is_removed in steps:
        if is_removed and entries:
            gone = entries.pop(0)
            lines.remove(users[gone[0]], *gone[1:])
            continue
        own = [entry for entry in entries if entry[0] == who]
        parts = len({entry[0] for entry in entries}) + 1
        fits = lines.has_room(users[who], work, size)
        if not own:
            assert fits
        else:
            for at, most, more in ((1, MAIL_NS, work), (2, 1_000, size)):
                total, mine = sum(entry[at] for entry in entries), sum(entry[at] for entry in own)
                assert not fits or mine + more <= (most - total + mine) / parts
        if fits:
            entries.append((who, work, size))
            lines.add(users[who], work, size)
        assert lines.work == sum(work for _, work, _ in entries)
        assert lines.bytes == sum(size for _, _, size in entries)
    for who, work, size in entries:
        lines.remove(users[who], work, size)
    assert (lines.work, lines.bytes) == (0, 0)
    assert all(lines.has_room(user, MANY, MANY) for user in users)


def test_each_newcomer_finds_room():
    """Ten users that flood a mailbox one after the other leave room for the eleventh, who may add more than one run."""
    lines, users = Lines(), [Lines() for _ in range(11)]
    for user in users:
        runs = 0
        while runs < 1_000 and lines.has_room(user, 100_000, 1_000):
            lines.add(user, 100_000, 1_000)
            runs += 1
        assert runs > 10
    assert lines.work <= MAIL_NS


def test_what_a_copy_takes_is_learned():
    """The estimate follows the entries finished last, and one without copies teaches nothing."""
    lines = Lines()
    lines.learn(0, 10**9)
    assert lines.ns == FIRST_NS
    lines.learn(100, 100 * FIRST_NS)
    assert lines.ns == FIRST_NS
    lines.learn(100, 100 * 700)
    assert FIRST_NS < lines.ns < 700
    lines.learn(100, 10**12)  # the process did not run
    assert lines.ns < 2 * FIRST_NS
    for took, least in ((40_000, 39_999), (0, 1), (750, 750), (747, 747)):
        for _ in range(40):
            lines.learn(1, took)
        assert least <= lines.ns <= max(took, 1) + 1


# --- readers -------------------------------------------------------------------------------------


def order(lines: Lines, machine: Machine) -> list[str]:
    """Serve all readers, and return the order in which they were read."""
    machine.log.clear()
    lines._serve_readers(machine.now + MANY, lambda: machine.now, machine.now)
    return machine.log


def readers(machine: Machine, lines: Lines, names: str) -> dict[str, Reader]:
    return {name: Reader(machine, lines, 1, 1, name) for name in names}


def test_those_that_have_hung_up_are_read_first():
    """Readers that have hung up go before all others, in the order in which they did; no reader is in line twice."""
    machine, lines = Machine(), Lines()
    some = readers(machine, lines, "abcd")
    for name in "abcd":
        lines.enter(some[name], False)
    for name in "cbc":
        lines.enter(some[name], True)
    lines.enter(some["a"], False)
    assert order(lines, machine) == [*"cbad"]
    assert lines.is_empty


def test_a_reader_that_leaves_is_forgotten():
    """A client that closes is in no line any more, wherever it waited."""
    lines, machine = Lines(), Machine()
    some = readers(machine, lines, "abc")
    lines.enter(some["a"], False)
    lines.enter(some["b"], True)
    lines.hold(some["c"], True)
    for reader in some.values():
        lines.leave(reader)
    assert lines.is_empty
    assert not lines.held


def test_held_readers_come_back_first_and_in_order():
    """With the next room, readers that waited for it go before those that came later, those that hung up at the top."""
    machine, lines, other = Machine(), Lines(), Lines()
    some = readers(machine, lines, "abcdef")
    lines.add(other, 1, 1)
    lines.enter(some["e"], False)
    lines.enter(some["f"], True)
    for name in "abcd":
        lines.hold(some[name], name in "bd")
    assert not lines.readers.keys() & lines.held.keys()
    lines.remove(other, 1, 1)
    assert not lines.held
    assert order(lines, machine) == [*"bdface"]


def test_a_reader_that_has_hung_up_and_waits_for_room_holds_those_behind_it():
    """What it sent before it closed comes before messages of a client that connects later (I14)."""
    machine, lines, other = Machine(), Lines(), Lines()
    some = readers(machine, lines, "abc")
    lines.add(other, 1, 1)
    lines.enter(some["b"], False)
    lines.enter(some["c"], True)
    lines.hold(some["a"], True)
    assert order(lines, machine) == []
    lines.remove(other, 1, 1)
    assert order(lines, machine) == [*"acb"]


def test_a_reader_that_waits_for_room_holds_nobody_while_it_is_connected():
    """Without a hang-up, other clients of the user are read meanwhile."""
    machine, lines, other = Machine(), Lines(), Lines()
    some = readers(machine, lines, "ab")
    lines.add(other, 1, 1)
    lines.enter(some["b"], False)
    lines.hold(some["a"], False)
    assert order(lines, machine) == ["b"]


def test_what_a_reader_that_hung_up_has_left_keeps_its_place():
    """A client that has hung up is read to its end before the next one that has."""
    machine, lines = Machine(), Lines()
    some = readers(machine, lines, "ab")
    for reader in some.values():
        reader.has_hung_up = True
        reader.left = 3
        reader.wait()
    assert order(lines, machine) == [*"aaabbb"]


def test_readers_take_turns():
    """Clients of a user that have sent much are read one batch each, in turn."""
    machine, lines = Machine(), Lines()
    for reader in readers(machine, lines, "abc").values():
        reader.left = 2
        reader.wait()
    assert order(lines, machine) == [*"abcabc"]


# --- turns ---------------------------------------------------------------------------------------


def test_each_turn_begins_with_another_line():
    """A line with endless work has every third turn, so that no line keeps another one from being served."""
    machine, lines = Machine(), Lines()
    lines.mail.append(Work(machine, MANY, QUANTUM, "mail"))
    lines.chores[Work(machine, MANY, QUANTUM, "chores")] = None
    lines.enter(Reader(machine, lines, MANY, QUANTUM, "readers"), False)
    for _ in range(6):
        lines.turn(machine.now, machine.now + QUANTUM, lambda: machine.now)
    assert machine.log == ["mail", "chores", "readers"] * 2


def test_a_line_without_work_leaves_its_turn_to_the_next():
    """A turn goes on with the next line when the first one is empty."""
    machine, lines = Machine(), Lines()
    lines.chores[Work(machine, 2, 1, "chore")] = None
    lines.enter(Reader(machine, lines, 1, 1, "reader"), False)
    lines.turn(machine.now, machine.now + QUANTUM, lambda: machine.now)
    assert machine.log == ["chore", "chore", "reader"]
    assert lines.is_empty


def test_mail_keeps_its_order():
    """An entry that is not done in a turn goes on in the next one, before those behind it."""
    machine, lines = Machine(), Lines()
    for name in "abc":
        lines.mail.append(Work(machine, 3, QUANTUM // 2, name))
    while lines.mail:
        lines.turn(machine.now, machine.now + QUANTUM, lambda: machine.now)
    assert machine.log == [*"aaabbbccc"]


def test_chores_take_turns():
    """A chore that is not done makes room for the next one, and each is in the line once."""
    machine, lines = Machine(), Lines()
    some = [Work(machine, 2, QUANTUM, name) for name in "ab"]
    for chore in (*some, *some):
        lines.chores[chore] = None
    while lines.chores:
        lines.turn(machine.now, machine.now + 1, lambda: machine.now)
    assert machine.log == [*"abab"]


def test_a_step_is_made_in_any_turn():
    """A turn that begins with work makes one step at least, and none after its end."""
    machine, lines = Machine(), Lines()
    lines.mail.append(Work(machine, 5, 10, "step"))
    lines.turn(machine.now, machine.now + 1, lambda: machine.now)
    assert machine.log == ["step"]
    lines.turn(machine.now, machine.now, lambda: machine.now)
    assert machine.log == ["step"]
