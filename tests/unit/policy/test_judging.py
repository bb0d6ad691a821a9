"""Verdicts equal those of the naive judge, and keep what a policy promises whatever its rules are."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sbus.policy import ALLOWED, Policy, Rule
from sbus.policy.shapes import ShapeIndex
from sbus.protocol.patterns import Shape, covers, intersect, shape
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

chances = st.randoms(use_true_random=False)


@given(chances)
def test_a_verdict_on_a_key_is_that_of_the_naive_judge(chance: random.Random) -> None:
    """Open and secret keys, for clients with and without proven IDs."""
    world = random_world(chance)
    policy = world.policy()
    for key in [*chance.sample(KEYS, 8), *SECRETS]:
        for who in CLIENTS:
            verdict = policy.rights_of(who).publication(policy.zone(key))
            assert verdict.is_allowed == world.publishes(who, key), (key, who)


@given(chances)
def test_a_verdict_on_a_pattern_is_that_of_the_naive_judge(chance: random.Random) -> None:
    """Containment holds for all keys of the world, and intersection for one of them."""
    world = random_world(chance)
    policy = world.policy()
    for pattern in [random_pattern(chance) for _ in range(8)]:
        for who in CLIENTS:
            verdict = policy.rights_of(who).subscription(pattern)
            assert verdict.is_allowed == world.subscribes(who, pattern), (pattern, who)


@given(chances)
def test_nothing_has_to_be_asked_only_if_everything_is_allowed(chance: random.Random) -> None:
    """`publishes_all` is true only if every key of the world has the verdict `ALLOWED`."""
    policy = random_world(chance).policy()
    for who in CLIENTS:
        rights = policy.rights_of(who)
        if rights.publishes_all:
            assert all(rights.publication(policy.zone(key)) is ALLOWED for key in [*KEYS, *SECRETS])


def test_without_rules_nothing_has_to_be_asked_under_default_allow() -> None:
    """A closed pattern has to be asked for, and so has everything under default deny, unless a rule allows it."""
    who = CLIENTS[0]
    everything, below = Rule(0, "all", "", publish=(b"",)), Rule(0, "a", "", publish=(b"a/",))
    assert Policy().rights_of(who).publishes_all
    assert not Policy(is_closed=True).rights_of(who).publishes_all
    assert Policy([everything], is_closed=True).rights_of(who).publishes_all
    assert not Policy(closed=[(b"a/b", "")]).rights_of(who).publishes_all
    assert Policy([below], closed=[(b"a/b", "")]).rights_of(who).publishes_all
    assert not Policy([replace(below, audit=True)]).rights_of(who).publishes_all
    assert not Policy([replace(below, deny_publish=(b"!/cred/",))]).rights_of(who).publishes_all


@given(chances)
def test_the_order_of_rules_changes_no_answer(chance: random.Random) -> None:
    """However the rules and the closed patterns are ordered, what is allowed is the same."""
    world = random_world(chance)
    one, other = world.policy(), world.shuffled(chance).policy()
    for who in CLIENTS:
        mine, its = one.rights_of(who), other.rights_of(who)
        for key in [*chance.sample(KEYS, 8), *SECRETS]:
            assert mine.publication(one.zone(key)).is_allowed == its.publication(other.zone(key)).is_allowed
        for pattern in [random_pattern(chance) for _ in range(8)]:
            assert mine.subscription(pattern).is_allowed == its.subscription(pattern).is_allowed


@given(chances)
def test_an_allow_takes_no_right_and_a_deny_gives_none(chance: random.Random) -> None:
    """A rule that only allows leaves every right; a rule that only denies adds none."""
    world = random_world(chance)
    new = random_rule(chance)
    allow = replace(new, deny_publish=(), deny_subscribe=(), publish=random_patterns(chance, 3))
    deny = replace(new, publish=(), subscribe=(), subscribe_exact=(), deny_subscribe=random_patterns(chance, 3))
    before = world.policy()
    more, less = (
        World(numbered((*world.rules, rule)), world.closed, world.is_closed).policy() for rule in (allow, deny)
    )
    for who in CLIENTS:
        asked = [(key, None) for key in [*chance.sample(KEYS, 8), *SECRETS]]
        asked += [(None, random_pattern(chance)) for _ in range(8)]  # type: ignore[misc]
        for key, pattern in asked:
            answers = []
            for policy in (less, before, more):
                rights = policy.rights_of(who)
                verdict = rights.publication(policy.zone(key)) if key is not None else rights.subscription(pattern)
                answers.append(verdict.is_allowed)
            assert answers == sorted(answers), (who, key, pattern)


@given(chances)
def test_the_index_of_shapes_finds_what_comparing_all_pairs_finds(chance: random.Random) -> None:
    """Covers and shared keys, each value once, also between additions."""
    index: ShapeIndex[int] = ShapeIndex()
    shapes: list[Shape] = []
    for _ in range(3):
        for pattern in [random_pattern(chance) for _ in range(8)]:
            shapes.append(shape_of(pattern))
            index.add(shapes[-1], len(shapes) - 1)
        for wanted in [shape_of(random_pattern(chance)) for _ in range(8)]:
            assert sorted(index.covering(wanted)) == [at for at, each in enumerate(shapes) if covers(each, wanted)]
            assert sorted(index.sharing(wanted)) == [at for at, each in enumerate(shapes) if intersect(each, wanted)]


def shape_of(pattern: bytes) -> Shape:
    """Return the shape of a pattern that matches something."""
    found = shape(pattern)
    assert found is not None
    return found


def test_an_index_forgets_what_it_has_merged() -> None:
    """Merged nodes stay below a multiple of the set, whatever is asked for, and the answers stay right."""
    chance = random.Random(35)
    parts = [bytes(chance.choice(b"abc") for _ in range(4)) for _ in range(40)]
    index: ShapeIndex[Shape] = ShapeIndex()
    shapes = [Shape(tuple(chance.choice(parts) for _ in range(5)), False) for _ in range(200)]
    for each in shapes:
        index.add(each, each)
    forgotten = before = 0
    for _ in range(500):
        wanted = Shape(tuple(chance.choice(parts)[: chance.randrange(3)] + b"*" for _ in range(5)), False)
        assert sorted(index.sharing(wanted)) == sorted(each for each in shapes if intersect(each, wanted))
        assert index._branches <= 8 * index._nodes
        forgotten += index._branches < before
        before = index._branches
    assert forgotten


@given(chances)
def test_the_world_has_a_key_for_each_difference_of_patterns(chance: random.Random) -> None:
    """So the naive judge, which knows only these keys, tells covers from overlaps."""
    one, other = random_pattern(chance), random_pattern(chance)
    mine, its = shape(one), shape(other)
    assert mine is not None
    assert its is not None
    assert covers(mine, its) == (keys_of(one) >= keys_of(other))
    assert (intersect(mine, its) is not None) == bool(keys_of(one) & keys_of(other))
