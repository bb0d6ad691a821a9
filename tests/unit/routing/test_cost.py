"""What a user's patterns can cost a look-up: an upper bound that comes and goes with them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.routing.cost import MatchCost
from sbus.routing.trie import PatternIndex
from tests.support.examples import examples
from tests.support.strategies import keys, patterns, patterns_near

PEER = PeerCredentials(1, 2, 3)


def rest_of(text: bytes) -> bytes:
    """What is matched of a key or pattern: a secret one without its credentials."""
    secret = CURRENT.check(text)
    return secret.rest if secret else text


@settings(max_examples=examples(300))
@given(st.data())
def test_no_look_up_takes_more_steps(data):
    """However the patterns of several users come and go, the sum of their bounds bounds every look-up."""
    index: PatternIndex[int] = PatternIndex()
    costs = [MatchCost() for _ in range(3)]
    held: list[tuple[int, bytes]] = []
    some_keys = data.draw(st.lists(keys(), min_size=1, max_size=4), "keys")
    for adds in data.draw(st.lists(st.booleans(), max_size=30), "steps"):
        if adds or not held:
            user, pattern = data.draw(st.integers(0, 2)), data.draw(st.one_of(patterns(), patterns_near(some_keys)))
            index.subscribe(user, pattern, CURRENT.check(pattern), PEER)
            costs[user].add(rest_of(pattern))
            held.append((user, pattern))
        else:
            user, pattern = held.pop(data.draw(st.integers(0, len(held) - 1)))
            index.unsubscribe(user, pattern, CURRENT.check(pattern), PEER)
            costs[user].remove(rest_of(pattern))
        for key in some_keys:
            receivers, steps = index.look_up(key, CURRENT.check(key))
            own = 3 * len(held) if CURRENT.check(key) else len(held)  # entries of tables, whoever they are
            assert steps - own <= 1 + key.count(b"/") + 1 + sum(cost.steps for cost in costs), receivers
    for user, pattern in held:
        costs[user].remove(rest_of(pattern))
    assert [cost.steps for cost in costs] == [0, 0, 0]


def test_wildcards_behind_wildcards_multiply():
    """Each segment that is a literal or a ``*`` doubles the bound, and the bound is what a look-up takes."""
    cost = MatchCost()
    index: PatternIndex[int] = PatternIndex()
    for segments in itertools.product((b"a", b"*"), repeat=8):
        cost.add(b"/".join(segments))
        index.subscribe(1, b"/".join(segments), None, PEER)
    receivers, steps = index.look_up(b"/".join([b"a"] * 8), None)
    assert receivers == (1,)
    assert 2**8 < steps - 2**8 <= cost.steps + 9 < 2**11


def test_many_patterns_that_share_their_wildcards_cost_little():
    """A thousand devices below one ``*`` cost as much as one, and so do prefixes of one length."""
    cost = MatchCost()
    for number in range(1000):
        cost.add(b"*/status/%d" % (1000 + number))
        cost.add(b"device%d*/state" % (1000 + number))
    assert cost.steps < 12


def test_each_length_of_a_prefix_costs_a_probe():
    """Prefixes of many lengths cost by their lengths, long ones more."""
    cost = MatchCost()
    for length in range(100):
        cost.add(b"x" * length + b"*")
    assert cost.steps == 200
    cost.add(b"y" * 1024 + b"*")
    assert cost.steps == 200 + 6


@pytest.mark.parametrize("pattern", [b"", b"a/b", b"a/", b"a*b", b"*a/"])
def test_patterns_that_cost_nothing(pattern):
    """Patterns without wildcards, and those that match nothing, cost nothing."""
    cost = MatchCost()
    cost.add(pattern)
    assert cost.steps == 0
    cost.remove(pattern)


@pytest.mark.parametrize("pattern", [b"*", b"a*", b"b/*/c", b"a/*/c/d", b"a/*"])
def test_what_was_not_added_cannot_be_removed(pattern):
    """Removing a pattern that is not there is an error, and changes nothing."""
    cost = MatchCost()
    cost.add(b"a/*/c")
    before = cost.steps
    with pytest.raises(KeyError):
        cost.remove(pattern)
    assert cost.steps == before
