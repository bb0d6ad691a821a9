"""The patterns that a link asks for: exactly the wanted ones that may cross, new before old, few and not too often."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbus.errors import UsageError
from sbus.link.interest import CONSIDERED, NOTED, Change, Interest
from sbus.protocol.patterns import covers, shape
from tests.support.examples import examples
from tests.unit.link.interests import LISTS, STEPS, OtherSide, keys_of, settle


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
