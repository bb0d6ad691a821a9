"""Two policies compared: every change has a counterexample, and every counterexample is one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.policy import Policy, Rule, UserLimits
from sbus.policy.comparing import compare, compare_settings
from sbus.policy.rules import PATTERN_FIELDS, Verb
from tests.unit.policy.worlds import (
    CLIENTS,
    KEYS,
    SECRETS,
    World,
    keys_of,
    numbered,
    random_pattern,
    random_patterns,
    random_rule,
    random_world,
)

seeds = st.integers(0, 2**32)


def changed(world: World, chance: random.Random) -> World:
    """Return a world that differs in one thing."""
    rules = list(world.rules)
    closed, is_closed = world.closed, world.is_closed
    match chance.randrange(6):
        case 0:
            rules.append(random_rule(chance, len(rules)))
        case 1 if rules:
            del rules[chance.randrange(len(rules))]
        case 2 if rules:
            rules[chance.randrange(len(rules))] = random_rule(chance)
        case 3 | 4 if rules:
            at = chance.randrange(len(rules))
            patterns: dict[str, Any] = {chance.choice(PATTERN_FIELDS): random_patterns(chance)}
            rules[at] = replace(rules[at], **patterns)
        case _:
            closed, is_closed = random_patterns(chance, 3), chance.random() < 0.5
    return World(numbered(rules), closed, is_closed)


def compare_with_samples(chance: random.Random, count: int) -> int:
    """Compare two worlds, and hold the result against samples; return the number of changes that these show."""
    before = random_world(chance)
    after = changed(before, chance)
    old, new = before.policy(), after.policy()
    found: set[tuple[Verb, bool]] = set()
    for change in compare(old, new):
        judge = "publishes" if change.verb == "publish" else "subscribes"
        assert change.before.is_allowed != change.after.is_allowed
        if keys_of(change.key) or change.verb == "publish":
            assert getattr(before, judge)(change.who, change.key) == change.before.is_allowed
            assert getattr(after, judge)(change.who, change.key) == change.after.is_allowed
        found.add((change.verb, change.after.is_allowed))
    changes = 0
    for who in CLIENTS:
        for key in [*chance.sample(KEYS, count), *SECRETS]:
            is_allowed = after.publishes(who, key)
            if before.publishes(who, key) != is_allowed:
                assert ("publish", is_allowed) in found, (before, after, who, key)
                changes += 1
        for pattern in [random_pattern(chance) for _ in range(count)]:
            was_allowed, is_allowed = (policy.rights_of(who).subscription(pattern).is_allowed for policy in (old, new))
            if was_allowed != is_allowed:
                assert ("subscribe", is_allowed) in found, (before, after, who, pattern)
                changes += 1
    return changes


@given(seeds)
def test_every_change_has_a_counterexample(seed: int) -> None:
    """If any client of the world gains or loses a right, the comparison says so, and all that it says is so."""
    compare_with_samples(random.Random(seed), 20)


def test_the_same_policy_in_another_order_has_no_change() -> None:
    """Names, files and order of the rules do not count."""
    chance = random.Random(1)
    world = random_world(chance)
    assert not list(compare(world.policy(), world.shuffled(chance).policy()))


def _changes(old: Policy, new: Policy) -> list[tuple[str, bytes, bool]]:
    return [(change.verb, change.key, change.after.is_allowed) for change in compare(old, new)]


CLOSED = [(b"a/b", "")]
CASES: dict[str, tuple[Policy, Policy, list[tuple[str, bytes, bool]]]] = {
    "a key that is denied": (
        Policy(),
        Policy([Rule(0, "r", "", deny_publish=(b"a/b",))]),
        [("publish", b"a/b", False)],
    ),
    "secret keys that are denied": (
        Policy(),
        Policy([Rule(0, "r", "", deny_publish=(b"!/cred/7/*/",))]),
        [("publish", b"!/cred/7/1/1/x", False)],
    ),
    "a wide pattern that reaches what is closed": (
        Policy(),
        Policy([Rule(0, "r", "", publish=(b"a/b",), subscribe=(b"a/b",))], closed=CLOSED),
        [("subscribe", b"", False)],
    ),
    "a prefix between": (
        Policy([Rule(0, "r", "", deny_subscribe=(b"w",))]),
        Policy(
            [Rule(0, "r", "", deny_subscribe=(b"w",), subscribe=(b"xy*",), publish=(b"x*",))], closed=[(b"xyz", "")]
        ),
        [("subscribe", b"x*", False)],
    ),
    "two rules that one client matches": (
        Policy([Rule(0, "r", "", publish=(b"a",), groups=frozenset({1}))], is_closed=True),
        Policy(
            [
                Rule(0, "r", "", publish=(b"a",), groups=frozenset({1})),
                Rule(1, "s", "", deny_publish=(b"*",), groups=frozenset({2})),
            ],
            is_closed=True,
        ),
        [("publish", b"a", False)],
    ),
    "keys one by one": (
        Policy([Rule(0, "r", "", subscribe=(b"a/*",))], is_closed=True),
        Policy([Rule(0, "r", "", subscribe_exact=(b"a/*",))], is_closed=True),
        [("subscribe", b"a/x*", False)],
    ),
    "below and exactly": (
        Policy([Rule(0, "r", "", subscribe=(b"a/",))], is_closed=True),
        Policy([Rule(0, "r", "", subscribe=(b"a/*", b"a/*/"))], is_closed=True),
        [("subscribe", b"a/", False)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_that_only_some_keys_show_is_found(case: str) -> None:
    """Each needs another kind of candidate."""
    old, new, expected = CASES[case]
    assert _changes(old, new) == expected
    assert [(verb, key) for verb, key, _ in _changes(new, old)] == [(verb, key) for verb, key, _ in expected]


def test_the_last_table_that_gives_a_share_counts() -> None:
    """So a table changes nothing for a user to whom a later one gives the same share."""
    one, other = frozenset({1}), frozenset({1, 2})
    first = UserLimits(other, 5, 7, None, None, "")
    last = UserLimits(one, 6, None, None, None, "")
    found = compare_settings(Policy(limits=[last]), Policy(limits=[first, last]))
    assert [(each.uid, each.setting, each.before, each.after) for each in found] == [
        (1, "patterns", None, 7),
        (2, "clients", None, 5),
        (2, "patterns", None, 7),
    ]
