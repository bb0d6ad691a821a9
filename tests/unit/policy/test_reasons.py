"""Explanations agree with verdicts, and name what decided; reviews report only what changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import InvalidKey
from sbus.policy import Identity, Policy
from sbus.policy.reasons import explain
from sbus.policy.review import review
from sbus.policy.rules import PATTERN_FIELDS, Verb
from tests.unit.policy.worlds import CLIENTS, KEYS, SECRETS, World, policy, random_pattern, random_world

chances = st.randoms(use_true_random=False)
HOST = Identity(1000, 100, frozenset({20}), "main", True)


@given(chances)
def test_an_explanation_decides_as_the_verdict_does(chance: random.Random) -> None:
    """The rule of a refusal is among those that decide, and what decides denies exactly if the verdict does."""
    judge = random_world(chance).policy()
    asked: list[tuple[Verb, bytes]] = [("publish", key) for key in [*chance.sample(KEYS, 8), *SECRETS]]
    asked += [("subscribe", random_pattern(chance)) for _ in range(8)]
    for verb, key in asked:
        for who in CLIENTS:
            verdict, reasons = explain(judge, who, verb, key)
            deciding = [reason for reason in reasons if reason.decides]
            assert deciding
            assert reasons[: len(deciding)] == deciding
            fields = {reason.field for reason in deciding}
            if not verdict.is_allowed:
                assert verdict.rule in {reason.rule for reason in deciding}
                assert fields in ({f"deny_{verb}"}, {"closed"}, {"default"})
            else:
                assert fields <= {"publish", "subscribe", "subscribe_exact"} or fields in ({"default"}, {""})


def test_an_explanation_names_what_came_near(tmp_path: Path) -> None:
    """An allow of other clients, and one that covers a part of a pattern."""
    judge = policy(
        tmp_path, 'default = "deny"', "[[rule]]", 'name = "others"', "users = [1]", 'publish = ["a"]',
        'subscribe = ["a/"]', "[[rule]]", 'name = "part"', 'subscribe = ["a/*"]', 'subscribe_exact = ["a/b/"]',
    )  # fmt: skip
    verdict, reasons = explain(judge, HOST, "publish", b"a")
    assert not verdict.is_allowed
    assert [(each.decides, each.rule, each.text) for each in reasons] == [
        (True, "default", "the default is deny"),
        (False, "others", "allows it, but this client does not match: it has other users"),
    ]
    _, reasons = explain(judge, HOST, "subscribe", b"a/")
    assert [(each.rule, each.field, each.text) for each in reasons] == [
        ("default", "default", "the default is deny"),
        ("others", "subscribe", "allows all of it, but this client does not match: it has other users"),
        ("part", "subscribe", "allows no more than a/*"),
        ("part", "subscribe_exact", "allows the keys a/b/ one by one"),
    ]


def test_an_explanation_names_the_rule_against_payloads(tmp_path: Path) -> None:
    """The error of a refused large message sends the administrator here, though its key may be published."""
    judge = policy(tmp_path, "[[rule]]", 'name = "small"', "payload = false")
    verdict, reasons = explain(judge, HOST, "publish", b"a")
    assert verdict.is_allowed
    assert [(each.decides, each.rule, each.field) for each in reasons] == [
        (True, "default", "default"),
        (False, "small", "payload"),
    ]
    _, reasons = explain(judge, HOST, "subscribe", b"a")
    assert [each.rule for each in reasons] == ["default"]


def test_a_denial_names_the_keys_that_it_shares(tmp_path: Path) -> None:
    """Without them nobody sees why a wide pattern is refused; allows that a deny overrules are named, too."""
    judge = policy(tmp_path, "[[rule]]", 'name = "no"', 'subscribe = [""]', 'deny_subscribe = ["a/*/c"]')
    _, reasons = explain(judge, HOST, "subscribe", b"a/b*/")
    assert [(each.decides, each.field, each.text) for each in reasons[:2]] == [
        (True, "deny_subscribe", "denies a/b*/c"),
        (False, "subscribe", "allows all of it"),
    ]


@pytest.mark.parametrize(
    ("verb", "key"), [("publish", b"!"), ("publish", b"!/cred/x"), ("subscribe", b"!/cred/1/2/3/")]
)
def test_what_no_policy_decides_is_an_error(verb: Verb, key: bytes) -> None:
    """Keys that the protocol forbids, and reading secret keys."""
    with pytest.raises(InvalidKey):
        explain(Policy(), HOST, verb, key)


@pytest.mark.parametrize(
    ("who", "text"),
    [
        (HOST._replace(is_proven=False), "its IDs prove nothing"),
        (HOST._replace(uid=1), "it has other users"),
        (HOST._replace(groups=frozenset()), "it has other groups"),
        (HOST._replace(listener="app"), "it has other listeners"),
    ],
)
def test_a_mismatch_names_the_field(who: Identity, text: str, tmp_path: Path) -> None:
    """The first field that keeps a client from a right."""
    judge = policy(
        tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', "users = [1000]", "groups = [20]",
        'listeners = ["main"]', 'publish = ["a"]',
    )  # fmt: skip
    assert explain(judge, HOST, "publish", b"a").verdict.is_allowed
    assert explain(judge, who, "publish", b"a").reasons[1].text.endswith(f"does not match: {text}")


@given(chances)
def test_taking_out_what_a_review_reports_changes_no_verdict(chance: random.Random) -> None:
    """All reported patterns together, for all clients and keys of the world."""
    world = random_world(chance)
    before = world.policy()
    useless = {(each.rule, *each.useless) for each in review(before) if each.useless is not None}
    rules = []
    for rule in world.rules:
        kept: dict[str, Any] = {
            field: tuple(each for each in getattr(rule, field) if (rule.name, field, each) not in useless)
            for field in PATTERN_FIELDS
        }
        rules.append(replace(rule, **kept))
    closed = tuple(each for each in world.closed if ("closed", "closed", each) not in useless)
    after = World(tuple(rules), closed, world.is_closed).policy()
    for who in CLIENTS:
        mine, its = before.rights_of(who), after.rights_of(who)
        for key in [*chance.sample(KEYS, 8), *SECRETS]:
            one, other = mine.publication(before.zone(key)), its.publication(after.zone(key))
            assert (one.is_allowed, one.is_audited) == (other.is_allowed, other.is_audited)
        for pattern in [random_pattern(chance) for _ in range(8)]:
            one, other = mine.subscription(pattern), its.subscription(pattern)
            assert (one.is_allowed, one.is_audited) == (other.is_allowed, other.is_audited)


REVIEWS = {
    "an allow that is not needed": (
        ["[[rule]]", 'name = "r"', 'publish = ["a/"]'],
        ['publish "a/" changes nothing: the default is allow, and nothing of it is closed'],
    ),
    "an allow that audits": (["[[rule]]", 'name = "r"', 'publish = ["a/"]', "audit = true"], []),
    "an allow that opens": (['closed = ["a/b"]', "[[rule]]", 'name = "r"', 'publish = ["a/"]'], []),
    "an allow that another one covers": (
        ['default = "deny"', "[[rule]]", 'name = "r"', 'publish = ["a/", "a/b"]'],
        ['publish "a/b" changes nothing: publish "a/" of the rule r (PATH:3) allows it'],
    ),
    "the same allow twice": (
        [
            'default = "deny"', "[[rule]]", 'name = "r"', 'publish = ["a/"]',
            "[[rule]]", 'name = "s"', 'publish = ["a/"]',
        ],
        ['publish "a/" changes nothing: publish "a/" of the rule r (PATH:3) allows it'],
    ),
    "an allow of fewer clients": (
        [
            'default = "deny"', "[[rule]]", 'name = "r"', "users = [1]", 'publish = ["a/"]',
            "[[rule]]", 'name = "s"', "users = [1, 2]", 'publish = ["a/b"]',
        ],
        [],
    ),
    "an exact allow beside a wide one": (
        ['default = "deny"', "[[rule]]", 'name = "r"', 'subscribe = ["a/"]', 'subscribe_exact = ["a/b", "b/"]'],
        ['subscribe_exact "a/b" changes nothing: subscribe "a/" of the rule r (PATH:3) allows it'],
    ),
    "an allow under a deny": (
        ['default = "deny"', "[[rule]]", 'name = "r"', 'subscribe = ["a/b"]', 'deny_subscribe = ["a/"]'],
        ['subscribe "a/b" changes nothing: deny_subscribe "a/" of the rule r (PATH:3) denies all of it'],
    ),
    "a deny under a deny": (
        ["[[rule]]", 'name = "r"', 'deny_publish = ["a/", "a/b", "!/cred/", "!/cred/1/"]'],
        [
            'deny_publish "a/b" changes nothing: deny_publish "a/" of the rule r (PATH:2) denies it',
            'deny_publish "!/cred/1/" changes nothing: deny_publish "!/cred/" of the rule r (PATH:2) denies it',
        ],
    ),
    "a deny without an allow": (
        ['default = "deny"', "[[rule]]", 'name = "r"', 'deny_publish = ["a/"]'],
        ['deny_publish "a/" changes nothing: the default is deny, and no rule allows any of it to these clients'],
    ),
    "a deny of what is closed": (
        ['closed = ["a/"]', "[[rule]]", 'name = "r"', 'deny_publish = ["a/b"]'],
        ['deny_publish "a/b" changes nothing: all of it is closed (PATH:2), and no rule allows any of it to these '
         "clients"],
    ),
    "closed under a default of deny": (
        ['default = "deny"', 'closed = ["a/"]'],
        ['"a/" changes nothing: the default is deny'],
    ),
    "closed twice": (['closed = ["a/", "a/b"]'], ['"a/b" changes nothing: "a/" is closed']),
    "another system's wildcard": (['closed = ["a/#"]'], ['"a/#": ']),
    "audit without an allow": (
        ["[[rule]]", 'name = "r"', 'deny_publish = ["a/"]', "audit = true"],
        ["audit changes nothing: it logs what the rule allows; refusals are logged anyway"],
    ),
    "payload that all may send": (
        ["[[rule]]", 'name = "r"', "payload = true"],
        ["payload = true changes nothing: all may, unless a rule says false"],
    ),
    "a rate above another": (
        ["[[rule]]", 'name = "r"', "max_rate = 10", "[[rule]]", 'name = "s"', "users = [1]", "max_rate = 20"],
        ["max_rate changes nothing: that of the rule r (PATH:2) is no higher"],
    ),
    "users outside their group": (
        ["[[rule]]", 'name = "r"', "max_rate = 10", 'users = ["daemon"]', "groups = [0]"],
        ["none of its users is in one of its groups; a service can still be (SupplementaryGroups=)"],
    ),
    "a group of an unknown number": (["[[rule]]", 'name = "r"', "max_rate = 10", "groups = [123456]"], []),
}  # fmt: skip


@pytest.mark.parametrize("case", REVIEWS)
def test_a_review_says_what_makes_a_pattern_useless(case: str, tmp_path: Path) -> None:
    """Each finding names the rule that is to blame, with file and line."""
    lines, expected = REVIEWS[case]
    found = [finding.text.replace(f"{tmp_path}/p.toml", "PATH") for finding in review(policy(tmp_path, *lines))]
    assert len(found) == len(expected), found
    for text, begin in zip(found, expected, strict=True):
        assert text.startswith(begin)


def test_a_group_without_members_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule may match nobody; the system's databases say who is in it."""
    import grp
    import pwd

    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("g", "x", gid, [])))
    monkeypatch.setattr(pwd, "getpwall", list)
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', "groups = [20]", "max_rate = 1")
    assert [each.text for each in review(judge)] == [
        "nobody is in its groups; a service can still be (SupplementaryGroups=)"
    ]
