"""The patterns that a link asks for: exactly the wanted ones that may cross, new before old, few and not too often."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.link.interest import CONSIDERED, NOTED, RETRY, Change, Interest, _cost
from sbus.protocol.keys import matches_open
from sbus.protocol.patterns import Shape, covers, shape
from tests.support.examples import examples

PATTERN = st.text("ab*/", max_size=5).map(str.encode)
LISTS = st.lists(PATTERN.filter(shape), max_size=3)
KEYS = ["/".join(each).encode() for n in (1, 2, 3) for each in itertools.product(("", "a", "b", "ab"), repeat=n)]


class OtherSide:
    """The other side of a link: it follows the changes, and knows which keys are asked for."""

    def __init__(self) -> None:
        self.patterns: set[bytes] = set()
        self.count = 0

    def follow(self, changes: list[Change], must_have: frozenset[bytes] = frozenset()) -> None:
        """Follow changes one by one; at no moment may a key that must be asked for be missing."""
        for change in changes:
            self.count += 1
            if change.is_new:
                assert change.pattern not in self.patterns
                self.patterns.add(change.pattern)
            else:
                self.patterns.remove(change.pattern)
            assert must_have <= self.keys()

    def keys(self) -> frozenset[bytes]:
        return keys_of(self.patterns)


def keys_of(patterns) -> frozenset[bytes]:
    return frozenset(key for key in KEYS if any(matches_open(pattern, key) for pattern in patterns))


def settle(interest: Interest, other: OtherSide, now: float, must_have: frozenset[bytes] = frozenset()) -> float:
    """Let time pass until nothing is due, which must come to be."""
    last = now + 1000
    while (due := interest.due(now)) is not None:
        now = max(now, due) + 1e-6
        assert now < last
        other.follow(interest.changes(now), must_have)
    return now


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PATTERN),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.3, 1.0, 5.0])),
        st.tuples(st.just("replace"), st.lists(PATTERN, max_size=4)),
        st.tuples(st.sampled_from(["restart", "refused"]), st.none()),
    ),
    max_size=40,
)


@example(
    [b""], [("add", b"a"), ("wait", 0.3), ("replace", [b""]), ("replace", [b"a"]), ("add", b"")], 2, 5.0, False
)  # a pattern that is wanted again before it was given up covers one that was wanted again just before
@example(
    [b"*", b"//aa"], [("replace", [b"//aa", b"ba*", b"b"]), ("remove", 2)], 2, 1000.0, False
)  # half of the limit is enough, but there is no room for the listed patterns beside the others
@settings(max_examples=examples(1000))
@given(LISTS, STEPS, st.sampled_from([2, 4, 1000]), st.sampled_from([5.0, 1000.0]), st.booleans())
def test_interest_is_what_is_wanted_and_listed(listed, steps, limit, rate, is_noted):
    """Whatever comes and goes: nothing wanted is ever missing once it is settled, and in the end nothing else is there.

    The patterns asked for are then few (none covers another), unless they were too many: then the listed ones are asked
    for whole.
    """
    try:
        interest = Interest(listed, limit=limit, delay=2.0, rate=rate)
    except UsageError:
        assert len(set(listed)) > limit
        return
    other = OtherSide()
    wanted: list[bytes] = []
    held: frozenset[bytes] = frozenset()
    allowed = keys_of(listed)
    now, number = 0.0, 0
    for step, value in steps:
        if step == "add":
            number += 1
            wanted.append(value)
            if is_noted:
                interest.note(True, value, number)
            else:
                interest.add(value, number)
        elif step == "remove" and wanted:
            number += 1
            gone = wanted.pop(value % len(wanted))
            if is_noted:
                interest.note(False, gone, number)
            else:
                interest.remove(gone, now, number)
        elif step == "replace":
            wanted = list(value)
            number = 0
            interest.replace(wanted, now)
        elif step in ("restart", "refused"):
            other.patterns.clear()
            if step == "refused":
                interest.lower_limit()
                limit = 2
            other.follow(interest.restart(now))
        elif step == "wait":
            now += value
        held &= keys_of(wanted)
        other.follow(interest.changes(now), held & allowed)
        if interest.settled >= number:
            held = keys_of(wanted)
            assert held & allowed <= other.keys()
        assert sorted(interest.asked) == sorted(other.patterns)
    now = settle(interest, other, now, held & allowed)
    assert interest.settled == number
    if interest.is_collapsed:
        assert limit < 1000
        assert other.keys() == allowed
    else:
        assert other.keys() == keys_of(wanted) & allowed
    for one, two in itertools.permutations(filter(None, map(shape, other.patterns)), 2):
        assert not covers(one, two)
    for pattern in wanted:
        interest.remove(pattern, now)
    settle(interest, other, now)
    assert not other.patterns
    assert not interest._counts
    assert not interest._bytes


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"a/", b"*", b"c"]), st.floats(0, 0.01)), max_size=200))
def test_rate_is_bounded(toggles):
    """In no second are there more changes than the rate."""
    interest = Interest([b""], rate=20, delay=0.001)
    other = OtherSide()
    on: set[bytes] = set()
    now, times = 0.0, []
    for pattern, wait in toggles:
        now += wait
        if pattern in on:
            interest.remove(pattern, now)
        else:
            interest.add(pattern)
        on ^= {pattern}
        changes = interest.changes(now)
        other.follow(changes)
        times += [now] * len(changes)
    for at, when in enumerate(times):
        assert sum(when <= other_time <= when + 1 for other_time in times[at:]) <= 20


def test_pattern_that_returns_stays():
    """A subscriber that comes back within the delay costs the other side nothing."""
    interest = Interest([b"a/"])
    interest.add(b"a/b")
    assert interest.changes(0.0) == [(True, b"a/b")]
    interest.remove(b"a/b", 1.0)
    assert interest.changes(1.0) == []
    assert interest.due(1.0) == 3.0
    interest.add(b"a/b")
    assert interest.changes(2.0) == []
    assert interest.due(2.0) is None
    interest.remove(b"a/b", 5.0)
    assert interest.changes(7.5) == [(False, b"a/b")]


def test_new_before_old():
    """When a wide pattern ends, the narrow ones that it covered are asked for before it is given up."""
    interest = Interest([b""])
    interest.add(b"a/")
    interest.add(b"a/b")
    interest.add(b"a/c/*")
    interest.add(b"a/c/d")
    assert interest.changes(0.0) == [(True, b"a/")]
    interest.remove(b"a/", 1.0)
    assert interest.changes(3.0) == [(True, b"a/b"), (True, b"a/c/*"), (False, b"a/")]


def test_covered_patterns_are_left_out():
    """A wide pattern takes the place of narrow ones, which are given up after the delay."""
    interest = Interest([b""])
    interest.add(b"a/b")
    interest.add(b"x")
    assert interest.changes(0.0) == [(True, b"a/b"), (True, b"x")]
    interest.add(b"a/")
    assert interest.changes(1.0) == [(True, b"a/")]
    assert interest.changes(3.0) == [(False, b"a/b")]


def test_wanted_meets_listed():
    """The intersection of a wanted pattern with each listed one is asked for, and nothing else."""
    interest = Interest([b"a/*/c", b"d/"])
    interest.add(b"*/b/")
    interest.add(b"elsewhere")
    assert {change.pattern for change in interest.changes(0.0)} == {b"a/b/c", b"d/b/"}


def test_too_many_patterns_collapse_to_the_listed_ones():
    """Past the limit the listed patterns are asked for whole, until half of the limit is enough."""
    interest = Interest([b"a/"], limit=4)
    for number in range(5):
        interest.add(b"a/%d" % number)
    changes = interest.changes(0.0)
    assert changes[-1] == (True, b"a/")
    assert interest.is_collapsed
    assert {change.pattern for change in interest.changes(2.0)} == {b"a/%d" % number for number in range(4)}
    assert interest.asked == [b"a/"]
    for number in range(3):
        interest.remove(b"a/%d" % number, 3.0)
    assert not interest.is_collapsed
    assert interest.changes(5.0) == [(True, b"a/3"), (True, b"a/4"), (False, b"a/")]


def test_bytes_are_limited_too():
    """Long patterns, and those of many segments, collapse as many do; the cost is the server's."""
    interest = Interest([b"a/"], max_bytes=1000)
    interest.add(b"a/" + b"x" * 600)
    interest.add(b"a/" + b"y" * 600)
    assert [change.pattern for change in interest.changes(0.0)][1:] == [b"a/"]
    interest = Interest([b"a/"], max_bytes=1000)
    interest.add(b"a/" + b"/" * 30)
    assert interest.changes(0.0) == [(True, b"a/")]


def test_restart_says_everything_at_once():
    """At another side that knows nothing, all subscriptions are made at once, the covered ones left out."""
    interest = Interest([b""])
    for number in range(500):
        interest.add(b"a/%d" % number)
    interest.add(b"b/c")
    interest.add(b"b/")
    assert len(interest.changes(0.0)) == 100
    changes = interest.restart(1.0)
    assert len(changes) == 501
    assert (True, b"b/c") not in changes
    assert interest.changes(2.0) == []


def test_settled_waits_for_the_rate():
    """A number is settled when the patterns up to it have been asked for."""
    interest = Interest([b""], rate=10)
    interest.add(b"a", 7)
    interest.add(b"b", 8)
    assert interest.settled == 6
    assert interest.changes(0.0) == [(True, b"a")]
    assert interest.settled == 7
    assert interest.changes(0.05) == []
    due = interest.due(0.05)
    assert due is not None
    assert interest.changes(due) == [(True, b"b")]
    assert interest.settled == 8


def test_nobody_waits_behind_the_patterns_of_one_user():
    """More new patterns than a second's changes are covered at once, and asked for one by one afterwards."""
    interest, other = Interest([b""]), OtherSide()
    for number in range(2_000):
        interest.add(b"many/%d" % number, number + 1)
    interest.add(b"late", 2_001)
    other.follow(interest.changes(0.0))
    assert b"" in other.patterns
    assert interest.settled == 2_001
    now = settle(interest, other, 0.0)
    assert not interest.is_collapsed
    assert b"" not in other.patterns
    assert len(other.patterns) == 2_001
    assert now < 6


@pytest.mark.parametrize("many", [pytest.param(2_000, marks=pytest.mark.slow), 5_000])
def test_noted_patterns_are_counted_in_parts(many):
    """Nobody waits until thousands that were noted have been counted; in the end all are, and can go again."""
    interest, other = Interest([b""]), OtherSide()
    for number in range(many):
        interest.note(True, b"many/%d" % number, number + 1)
    interest.note(True, b"late", many + 1)
    other.follow(interest.changes(0.0))
    assert len(list(interest._wanted)) == NOTED
    assert other.patterns == {b""}
    assert interest.settled >= many + 1
    now = settle(interest, other, 0.0)
    assert len(list(interest._wanted)) == many + 1
    assert interest.is_collapsed is (many > 4_096)
    assert len(other.patterns) == (1 if interest.is_collapsed else many + 1)
    for number in range(many):
        interest.note(False, b"many/%d" % number, many + 2 + number)
    settle(interest, other, now)
    assert other.patterns == {b"late"}
    assert interest.settled == 2 * many + 1


def test_too_many_bytes_stay_collapsed():
    """Patterns that are few, but have more bytes than half of the limit, do not expand only to collapse again."""
    interest, other = Interest([b""], limit=1000, max_bytes=5_000), OtherSide()
    for number in range(100):
        interest.add(b"%d/" % number + bytes(60), number + 1)
    now = settle(interest, other, 0.0)
    assert interest.is_collapsed
    assert other.patterns == {b""}
    for number in range(70):
        interest.remove(b"%d/" % number + bytes(60), now)
    settle(interest, other, now)
    assert not interest.is_collapsed
    assert other.patterns == {b"%d/" % number + bytes(60) for number in range(70, 100)}


def test_new_list_that_changes_nothing_expands():
    """Changes that still wait to be counted keep an interest collapsed; a new list in their place leaves it nothing
    to wait for."""
    interest, other = Interest([b""], limit=10), OtherSide()
    for number in range(100):
        interest.note(True, b"%d" % number, number + 1)
    now = settle(interest, other, 0.0)
    for number in range(1, 100):
        interest.note(False, b"%d" % number, 100 + number)
    for _ in range(NOTED):
        interest.note(True, b"z", 200)
    while set(interest._wanted) != {b"0", b"z"}:
        other.follow(interest.changes(now))
    assert interest.is_collapsed
    interest.replace([b"0", b"z"], now)
    settle(interest, other, now)
    assert not interest.is_collapsed
    assert other.patterns == {b"0", b"z"}


def test_refused_with_the_listed_patterns_alone():
    """A server that refuses even the listed patterns says nothing about how many more it allows."""
    interest, other = Interest([b""], limit=10), OtherSide()
    for number in range(100):
        interest.add(b"%d" % number)
    now = settle(interest, other, 0.0)
    assert interest.asked == [b""]
    interest.lower_limit()
    for number in range(1, 100):
        interest.remove(b"%d" % number, now)
    settle(interest, other, now)
    assert other.patterns == {b"0"}


def test_refused_with_many_patterns():
    """At most half of the patterns that a server has refused are asked for."""
    interest, other = Interest([b""]), OtherSide()
    for number in range(40):
        interest.add(b"%d" % number)
    now = settle(interest, other, 0.0)
    interest.lower_limit()
    interest.add(b"one more")
    now = settle(interest, other, now)
    assert other.patterns == {b""}
    for number in range(31):
        interest.remove(b"%d" % number, now)
    settle(interest, other, now)
    assert other.patterns == {b"one more", *(b"%d" % number for number in range(31, 40))}


def test_wide_pattern_of_too_many_that_ends():
    """When a pattern ends that covers more than there may be, the listed ones take its place in one step."""
    interest, other = Interest([b""], limit=50, rate=1000), OtherSide()
    interest.add(b"many/")
    other.follow(interest.changes(0.0))
    for number in range(100):
        interest.add(b"many/%d" % number)
    now = settle(interest, other, 1.0)
    assert other.patterns == {b"many/"}
    interest.remove(b"many/", now)
    settle(interest, other, now)
    assert other.patterns == {b""}
    assert interest.is_collapsed


@pytest.mark.parametrize("listed", [[b"a/*b"], [b"!/cred/1/2/3/x"], [b"a", b"b", b"c"]])
def test_bad_lists_are_refused(listed):
    """A listed pattern that matches no open key is an error, and so are more of them than the limit."""
    with pytest.raises(UsageError):
        Interest(listed, limit=2)


def test_many_patterns_stay_fast():
    """A thousand changes among eight thousand patterns take far less than a second."""
    interest = Interest([b"x/", b"sensors/"], limit=10_000, rate=1e9)
    for number in range(8000):
        interest.add(b"sensors/%d/*" % number)
    assert len(interest.changes(0.0)) == 8000
    began = time.process_time()
    for number in range(1000):
        interest.add(b"sensors/%d/now" % number)
        assert interest.changes(1.0) == []
        interest.remove(b"sensors/%d/*" % number, 1.0)
        assert interest.changes(1.0) == []
    assert len(interest.changes(3.5)) == 2000
    assert time.process_time() - began < 1.0


def test_one_call_decides_about_few_patterns():
    """Many patterns that are covered by one that is asked for are considered in many short calls."""
    interest = Interest([b""])
    interest.add(b"a/", 1)
    assert interest.changes(0.0) == [(True, b"a/")]
    for number in range(1_000):
        interest.add(b"a/%d" % number, number + 2)
    calls = 0
    while interest.due(1.0) == 1.0:
        assert interest.changes(1.0) == []
        calls += 1
    assert calls == -(-1_000 // CONSIDERED)
    assert interest.settled == 1_001


def test_a_change_that_was_noted_comes_before_one_that_is_applied():
    """A pattern that ends while there is nobody to ask is over, also if its beginning was not counted yet."""
    interest = Interest([b""])
    interest.note(True, b"a", 1)
    interest.apply(False, b"a", 2, 0.0)
    interest.apply(True, b"b", 3, 0.0)
    assert list(interest._wanted) == [b"b"]
    assert interest.restart(0.0) == [Change(True, b"b")]
    assert interest.settled == 3


@settings(max_examples=examples(500))
@given(LISTS, STEPS, st.sampled_from([3, 1000]), st.sampled_from([5.0, 1000.0]), st.frozensets(st.sampled_from(KEYS)))
def test_a_refused_pattern_takes_no_other_along(listed, steps, limit, rate, closed):
    """The other side refuses each pattern that a closed key matches: all other patterns are asked for nevertheless, and
    those that it has refused as well, once it allows them.
    """
    interest, other = Interest(listed, limit=limit, delay=2.0, rate=rate), OtherSide()
    wanted: list[bytes] = []
    now = 0.0

    def follow(changes: list[Change]) -> None:
        other.follow(changes)
        for change in changes:
            if change.is_new and keys_of([change.pattern]) & closed and change.pattern in other.patterns:
                other.patterns.remove(change.pattern)
                interest.refuse(change.pattern, now)

    for step, value in [*steps, ("wait", 0.0)]:
        if step == "add":
            wanted.append(value)
            interest.add(value)
        elif step == "remove" and wanted:
            interest.remove(wanted.pop(value % len(wanted)), now)
        elif step == "replace":
            wanted = list(value)
            interest.replace(wanted, now)
        elif step == "restart":
            other.patterns.clear()
            follow(interest.restart(now))
        elif step == "wait":
            now += value
        follow(interest.changes(now))
        assert sorted(interest.asked) == sorted(other.patterns)
    last = now + 1000
    while (due := interest.due(now)) is not None and due < now + RETRY / 2:
        now = max(now, due) + 1e-6
        assert now < last
        follow(interest.changes(now))
    assert not other.keys() & closed
    if limit == 1000:
        crossing = {each.pattern(b"/") for pattern in wanted for each in interest._crossing(pattern)}
        assert other.keys() == keys_of([each for each in crossing if not keys_of([each]) & closed])
    settle(interest, other, now + RETRY)
    assert not interest._refused
    if limit == 1000:
        assert other.keys() == keys_of(crossing)
    now += 2 * RETRY
    for pattern in wanted:
        interest.remove(pattern, now)
    settle(interest, other, now)
    assert not other.patterns
    assert not interest._bytes


def test_a_refused_pattern_is_not_asked_for_again():
    """Not when a wider one is refused, and not by a collapse, which takes nobody's pattern away then."""
    interest = Interest([b""])
    for pattern in (b"a/", b"a/b"):
        interest.add(pattern)
    assert interest.changes(0.0) == [Change(True, b"a/")]
    interest.refuse(b"a/", 0.0)
    assert interest.changes(1.0) == [Change(True, b"a/b")]
    interest.add(b"")
    assert interest.changes(2.0) == [Change(True, b"")]
    interest.refuse(b"", 2.0)
    assert interest.changes(3.0) == []
    assert interest.asked == [b"a/b"]


def test_a_refused_listed_pattern_starves_nobody_for_good():
    """Too many patterns under one take places from others while they are wanted, and not under another listed one."""
    interest = Interest([b"x/", b"y/"], limit=4)
    interest.add(b"x/")
    interest.changes(0.0)
    interest.refuse(b"x/", 0.0)
    interest.remove(b"x/", 0.0)
    many = [b"x/%d" % number for number in range(5)]
    for pattern in many:
        interest.add(pattern)
    assert [change.pattern for change in interest.changes(1.0)] == [*many[:4], b"y/"]
    for pattern in (b"x/mine", b"y/mine"):
        interest.add(pattern)
    assert interest.changes(2.0) == []
    assert sorted(interest.asked) == [*many[:4], b"y/"]
    for pattern in many:
        interest.remove(pattern, 3.0)
    for at in range(3, 12):
        interest.changes(float(at))
    assert not interest.is_collapsed
    assert sorted(interest.asked) == [b"x/mine", b"y/mine"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_refused_pattern_is_asked_for_again_after_a_minute(is_late):
    """Not before, though its subscribers come and go; also if it was given up before the refusal came."""
    interest = Interest([b"a/"], delay=1.0)
    interest.add(b"a/")
    assert interest.changes(0.0) == [Change(True, b"a/")]
    if is_late:
        interest.remove(b"a/", 0.0)
    interest.refuse(b"a/", 1.0)
    for at in range(2, 60):
        interest.add(b"a/")
        assert interest.changes(float(at)) == []
        interest.remove(b"a/", float(at))
        assert interest.changes(float(at)) == []
    interest.add(b"a/")
    assert interest.changes(60.0) == []
    assert interest.due(60.0) == 1.0 + RETRY
    assert interest.changes(1.0 + RETRY) == [Change(True, b"a/")]


def test_what_a_refusal_costs(monkeypatch):
    """No walk through all that is needed, however many wide patterns are refused: that is one pass at a time."""
    interest = Interest([b""], limit=5_000, delay=1e6)
    for number in range(1_000):
        interest.add(b"x/y/%d" % number)
    assert len(interest.restart(0.0)) == 1_000
    wide = [b"*/*/%d" % number for number in range(500)]
    for pattern in wide:
        interest.add(pattern)
    asked = [change.pattern for at in range(10) for change in interest.changes(float(at))]
    assert sorted(asked) == sorted(wide)
    looks = 0
    consider = interest._consider

    def count(*args):
        nonlocal looks
        looks += 1
        return consider(*args)

    monkeypatch.setattr(interest, "_consider", count)
    for pattern in wide:
        interest.refuse(pattern, 10.0)
        interest.changes(10.0)
    assert looks <= CONSIDERED * len(wide)
    while interest.due(10.0) == 10.0:
        interest.changes(10.0)
    assert looks <= CONSIDERED * len(wide) + 2 * len(interest._needed)


def pass_time(interest: Interest, now: float, end: float, closed: bytes = b"") -> list[bytes]:
    """Let time pass; the other side refuses what begins like `closed`. Return what was asked for."""
    asked: list[bytes] = []
    while (due := interest.due(now)) is not None and due < end:
        now = max(now, due) + 1e-6
        for change in interest.changes(now):
            if change.is_new:
                asked.append(change.pattern)
                if closed and change.pattern.startswith(closed):
                    interest.refuse(change.pattern, now)
    return asked


def test_more_refused_patterns_than_may_be_asked_for():
    """Each is asked for once, and then again in turn, each once in two minutes at least."""
    interest = Interest([b"a/", b"b/"], limit=4)
    many = [b"a/%d" % number for number in range(100)]
    for pattern in many:
        interest.add(pattern)
    assert sorted(pass_time(interest, 0.0, 50.0, b"a/")) == sorted([*many, b"a/", b"b/"])
    again = pass_time(interest, 50.0, 50.0 + 2 * RETRY, b"a/")
    assert set(again) == {*many, b"a/"}
    assert len(again) <= 2 * len(set(again))


@pytest.mark.parametrize("number", [0, 10, 4_000])
def test_refused_patterns_of_one_client_delay_those_of_no_other(number):
    """A pattern that is allowed again is asked for within two minutes, however many are refused."""
    interest = Interest([b""])
    for refused in range(number):
        interest.add(b"a/%d" % refused)
    pass_time(interest, 0.0, 10.0, b"a/")
    interest.add(b"b/")
    pass_time(interest, 10.0, 11.0, b"b/")
    assert b"b/" not in interest.asked
    pass_time(interest, 11.0, 11.0 + 2 * RETRY + 5.0, b"a/")
    assert b"b/" in interest.asked


def test_one_walk_a_second_after_refusals():
    """Refusals, however many, have all needed patterns considered once a second, and a few in each call."""
    interest, now, considered = Interest([b""]), 0.0, 0
    for number in range(2_000):
        interest.add(b"x/y/%d" % number)
    pass_time(interest, now, 5.0)
    consider = interest._consider

    def count(*args):
        nonlocal considered
        considered += 1
        return consider(*args)

    setattr(interest, "_consider", count)  # noqa: B010
    for number in range(100):
        now = 10.0 + number / 10
        interest.add(b"z/%d/" % number)
        pass_time(interest, now, now + 0.09, b"z/")
        interest.remove(b"z/%d/" % number, now + 0.09)
    assert considered <= 11 * len(interest._needed) + 200


def test_refused_patterns_that_nobody_needs_are_forgotten_a_few_at_a_time():
    """However many have waited for their time behind one that is needed."""
    interest = Interest([b""])
    for number in range(500):
        interest.add(b"%d" % number)
        assert pass_time(interest, 0.0, 1.0) == [b"%d" % number]
        interest.refuse(b"%d" % number, 1.0)
        interest.remove(b"%d" % number, 1.0)
    left = 500
    while interest._refused:
        interest.changes(1.0 + RETRY)
        assert left - CONSIDERED <= len(interest._refused) < left
        left = len(interest._refused)


def test_how_many_refused_patterns_that_nobody_needs_are_remembered():
    """As many as may be asked for, and as many bytes: the oldest ones are asked for again before their time."""
    cost = _cost(Shape((b"0",), False))
    for interest in Interest([b""], limit=3), Interest([b""], max_bytes=3 * cost):
        for number in range(4):
            interest.add(b"%d" % number)
            assert pass_time(interest, 0.0, 1.0, b"") == [b"%d" % number]
            interest.refuse(b"%d" % number, 0.0)
            interest.remove(b"%d" % number, 0.0)
        for number in range(4):
            interest.add(b"%d" % number)
            assert interest.changes(1.0) == ([Change(True, b"0")] if not number else [])
        pass_time(interest, 1.0, 10.0)
        for number in range(4):
            interest.remove(b"%d" % number, 10.0)
        pass_time(interest, 10.0, 3 * RETRY)
        assert not interest._refused
        assert not interest._cold_bytes


def test_what_a_refused_pattern_has_covered_comes_before_what_ends():
    """Clients that come and go do not delay it, though they use up the rate; the widest pattern is the first."""
    interest = Interest([b""], rate=100.0)
    for pattern in (b"v/", b"v/w/", *(b"v/w/%d" % number for number in range(2_000))):
        interest.add(pattern)
    assert interest.restart(0.0) == [Change(True, b"v/")]
    interest.refuse(b"v/", 0.0)
    others = [b"o/%d" % number for number in range(50)]
    for at in range(1, 5):
        for other in others:
            interest.add(other)
        pass_time(interest, float(at), at + 0.7)
        for other in others:
            interest.remove(other, at + 0.7)
    assert b"v/w/" in interest.asked
    assert not any(pattern.startswith(b"v/w/") and pattern != b"v/w/" for pattern in interest.asked)


def test_a_retry_that_is_refused_late_takes_nothing_away():
    """A refused pattern that is asked for again does not replace those under it at once: it may be refused again."""
    interest = Interest([b""], delay=2.0)
    for pattern in (b"a/", b"a/b"):
        interest.add(pattern)
    interest.changes(0.0)
    interest.refuse(b"a/", 0.0)
    assert pass_time(interest, 0.0, RETRY) == [b"a/b"]
    assert interest.changes(RETRY) == [Change(True, b"a/")]
    assert interest.changes(RETRY + 5.0) == []
    interest.refuse(b"a/", RETRY + 5.0)
    assert pass_time(interest, RETRY + 5.0, 2 * RETRY) == []
    assert interest.asked == [b"a/b"]


def test_with_the_only_listed_pattern_refused():
    """A collapse asks for it once; what it could not cover is asked for when there are few patterns again."""
    interest = Interest([b""], limit=2, rate=10)
    asked: list[bytes] = []
    now = 0.0

    def pass_until(end: float) -> None:
        nonlocal now
        while now < end:
            changes = interest.changes(now)
            asked.extend(change.pattern for change in changes if change.is_new)
            if Change(True, b"") in changes:
                interest.refuse(b"", now)
            now += 0.1

    many = [b"x/%d" % number for number in range(100)]
    for pattern in (*many, b"y/a/mine"):
        interest.add(pattern)
    pass_until(5.0)
    for number in range(100):  # so many at once that it collapses, if it has not
        interest.note(number >= 50, many[50 + number % 50], number)
    pass_until(10.0)
    assert asked.count(b"") == 1
    assert b"y/a/mine" not in interest.asked
    for pattern in many:
        interest.remove(pattern, now)
    pass_until(20.0)
    assert interest.asked == [b"y/a/mine"]
