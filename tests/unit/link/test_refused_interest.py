"""Patterns that the other side refuses: the link asks again later, and other patterns are not delayed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.link.interest import CONSIDERED, RETRY, Change, Interest, _cost
from sbus.protocol.patterns import Shape
from tests.support.examples import examples
from tests.unit.link.interests import KEYS, LISTS, STEPS, OtherSide, keys_of, settle


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
