"""Each field of a policy has a test in which it denies: a field that nobody saw refuse anything may not work."""

from __future__ import annotations

import gc
import grp
import pwd
from itertools import product
from pathlib import Path

import pytest

from sbus.policy import ALLOWED, Identity, Policy
from sbus.protocol.keys import PeerCredentials, matches
from sbus.syscalls.sockets import UNKNOWN_GROUPS
from tests.unit.policy.worlds import policy

HOST = Identity(1000, 100, frozenset({20, 30}), "main", True)


def publishes(judge: Policy, who: Identity, key: bytes) -> bool:
    """Return whether a client may publish a key."""
    return judge.rights_of(who).publication(judge.zone(key)).is_allowed


def subscribes(judge: Policy, who: Identity, pattern: bytes) -> bool:
    """Return whether a client may subscribe to a pattern."""
    return judge.rights_of(who).subscription(pattern).is_allowed


def test_users_deny_others(tmp_path: Path) -> None:
    """Another UID does not get what the rule gives; each of several users does."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', "users = [1000, 1001]", 'publish = ["a"]')
    assert publishes(judge, HOST, b"a")
    assert publishes(judge, HOST._replace(uid=1001), b"a")
    assert not publishes(judge, HOST._replace(uid=1002), b"a")


def test_users_are_denied_by_name(tmp_path: Path) -> None:
    """A name is the UID that the system gives it."""
    name = pwd.getpwall()[1].pw_name
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', f'users = ["{name}"]', 'deny_publish = ["a"]')
    assert not publishes(judge, HOST._replace(uid=pwd.getpwnam(name).pw_uid), b"a")
    assert publishes(judge, HOST, b"a")


@pytest.mark.parametrize("groups", [(100, {20, 30}), (20, set()), (100, {21}), (20, {20})])
def test_groups_deny_by_primary_and_supplementary_group(groups: tuple[int, set[int]], tmp_path: Path) -> None:
    """A group that a client is in, whichever way, is denied; a client that is in none of them is not."""
    who = HOST._replace(gid=groups[0], groups=frozenset(groups[1]))
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', "groups = [20, 21]", 'deny_subscribe = ["a/"]')
    assert not subscribes(judge, who, b"a/b")
    assert subscribes(judge, who._replace(gid=100, groups=frozenset({30})), b"a/b")


def test_a_client_of_too_many_groups_may_do_nothing_if_there_are_rules_for_groups(tmp_path: Path) -> None:
    """Which of these it is in is not known, and one could deny; rules that name none are as ever."""
    crowd = HOST._replace(groups=UNKNOWN_GROUPS)
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', "groups = [7]", 'deny_publish = ["a/"]')
    for key in (b"a/b", b"c", b"!/cred/1/2/3/x"):
        verdict = judge.rights_of(crowd).publication(judge.zone(key))
        assert (verdict.is_allowed, verdict.rule) == (False, "credentials")
        assert publishes(judge, HOST, key)
    assert not subscribes(judge, crowd, b"c")
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', "users = [1000]", 'deny_publish = ["a/"]')
    assert publishes(judge, crowd, b"c")
    assert not publishes(judge, crowd, b"a/b")


def test_groups_are_denied_by_name(tmp_path: Path) -> None:
    """A name is the GID that the system gives it."""
    name = grp.getgrall()[1].gr_name
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', f'groups = ["{name}"]', 'deny_publish = ["a"]')
    assert not publishes(judge, HOST._replace(gid=grp.getgrnam(name).gr_gid), b"a")


def test_listeners_deny_other_sockets(tmp_path: Path) -> None:
    """A right that one socket has is not that of another; a denial of one socket does not reach another."""
    judge = policy(
        tmp_path, 'closed = ["a/"]', "[[rule]]", 'name = "r"', 'listeners = ["app"]', 'publish = ["a/"]',
        'deny_publish = ["b/"]',
    )  # fmt: skip
    app = HOST._replace(listener="app")
    assert publishes(judge, app, b"a/b")
    assert not publishes(judge, HOST, b"a/b")
    assert not publishes(judge, app, b"b/c")
    assert publishes(judge, HOST, b"b/c")


def test_all_fields_of_a_rule_have_to_match(tmp_path: Path) -> None:
    """A client that matches the users, but not the groups or the listeners, does not get the right."""
    judge = policy(
        tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', "users = [1000]", "groups = [20]",
        'listeners = ["main"]', 'publish = ["a"]',
    )  # fmt: skip
    assert publishes(judge, HOST, b"a")
    for change in ({"uid": 1}, {"groups": frozenset({30})}, {"listener": "app"}):
        assert not publishes(judge, HOST._replace(**change), b"a"), change


def test_publish_gives_no_other_key(tmp_path: Path) -> None:
    """A key that no pattern of ``publish`` matches is denied, and so is subscribing to one that does."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', 'publish = ["a/*"]')
    assert publishes(judge, HOST, b"a/b")
    assert not publishes(judge, HOST, b"a/b/c")
    assert not subscribes(judge, HOST, b"a/b")


def test_subscribe_gives_no_wider_pattern(tmp_path: Path) -> None:
    """A pattern that reaches one key more than an allowed one is denied, and so is publishing."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', 'subscribe = ["a/*", "b/"]')
    for pattern in (b"a/*", b"a/b*", b"a/b", b"b/", b"b/*/c/"):
        assert subscribes(judge, HOST, pattern), pattern
    for pattern in (b"a/", b"", b"*", b"*/*", b"*/b", b"a/*/", b"b", b"b*/", b"c"):
        assert not subscribes(judge, HOST, pattern), pattern
    assert not publishes(judge, HOST, b"b/c")


def test_several_allowed_patterns_are_not_added_up(tmp_path: Path) -> None:
    """One pattern has to cover what a client subscribes to: ``a/*`` and ``a/*/`` together do not give ``a/``."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', 'subscribe = ["a/*", "a/*/"]')
    assert subscribes(judge, HOST, b"a/*/")
    assert not subscribes(judge, HOST, b"a/")


def test_subscribe_exact_denies_wildcards(tmp_path: Path) -> None:
    """Keys may be named one by one; a ``*``, a separator at the end and the empty pattern are denied."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', 'subscribe_exact = ["jobs/", "", "x/*"]')
    assert subscribes(judge, HOST, b"jobs/1/2")
    assert subscribes(judge, HOST, b"x/y")
    for pattern in (b"jobs/*", b"jobs/", b"jobs/1*", b"x/*", b""):
        assert not subscribes(judge, HOST, pattern), pattern


def test_deny_publish_denies_what_is_allowed(tmp_path: Path) -> None:
    """A deny goes before every allow, of the same rule or another; the verdict names the denying rule and its line."""
    judge = policy(
        tmp_path, "[[rule]]", 'name = "yes"', "users = [1000]", 'publish = ["a/b"]', "[[rule]]", 'name = "no"',
        'deny_publish = ["a/"]',
    )  # fmt: skip
    verdict = judge.rights_of(HOST).publication(judge.zone(b"a/b"))
    assert (verdict.is_allowed, verdict.rule, verdict.where) == (False, "no", f"{tmp_path}/p.toml:6")
    assert subscribes(judge, HOST, b"a/b")


def test_deny_publish_may_name_secret_keys(tmp_path: Path) -> None:
    """Only a pattern below ``!/cred/`` denies secret keys, and no allow is needed for others."""
    judge = policy(
        tmp_path, 'default = "deny"', 'closed = [""]', "[[rule]]", 'name = "r"', "users = [1000]",
        'deny_publish = ["!/cred//0/", ""]',
    )  # fmt: skip
    assert not publishes(judge, HOST, b"!/cred//0//x")
    assert publishes(judge, HOST, b"!/cred//1//x")
    assert publishes(judge, HOST._replace(uid=1), b"!/cred//0//x")
    assert not publishes(judge, HOST, b"a")
    assert not judge.rights_of(HOST).publishes_all


def test_deny_publish_limits_segments(tmp_path: Path) -> None:
    """A pattern of n times ``*/`` denies all open keys of more than n segments."""
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', 'deny_publish = ["*/*/*/"]')
    for count in range(1, 7):
        assert publishes(judge, HOST, b"/".join([b"x"] * count)) == (count <= 3)
    assert publishes(judge, HOST, b"!/cred/1/2/3/x/y")


def test_deny_publish_denies_every_secret_key_that_reaches_a_client(tmp_path: Path) -> None:
    """A key need not name all IDs of the client that it reaches; one that cannot reach it stays allowed."""
    root = PeerCredentials(77, 0, 5)
    for denied in ("!/cred//0/", "!/cred/5/0/", "!/cred/5/0/77/x", "!/cred///77/*"):
        judge = policy(tmp_path, "[[rule]]", 'name = "r"', f'deny_publish = ["{denied}"]')
        for gid, uid, pid in product((b"", b"5"), (b"", b"0"), (b"", b"77")):
            key = b"!/cred/%b/%b/%b/x" % (gid, uid, pid)
            assert matches(b"!/cred////x", key, subscriber=root)
            assert not publishes(judge, HOST, key), (denied, key)
        assert publishes(judge, HOST, b"!/cred/6/1/78/x")


def test_deny_subscribe_denies_every_pattern_that_reaches_it(tmp_path: Path) -> None:
    """Nothing is filtered at delivery, so a pattern that reaches one denied key is denied as a whole."""
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', 'subscribe = [""]', 'deny_subscribe = ["a/secret/"]')
    for pattern in (b"", b"a/", b"*/*/x", b"a/s*/", b"a/secret/x", b"a/secret/"):
        assert not subscribes(judge, HOST, pattern), pattern
    for pattern in (b"a/*", b"a/secret", b"b/", b"a/t*/"):
        assert subscribes(judge, HOST, pattern), pattern


def test_closed_denies_without_an_allow(tmp_path: Path) -> None:
    """Under default allow these keys need an allow, and so does a pattern that shares one with them."""
    judge = policy(tmp_path, 'closed = ["a/"]', "[[rule]]", 'name = "r"', "users = [1]", 'publish = ["a/"]',
                   'subscribe = ["a/"]')  # fmt: skip
    verdict = judge.rights_of(HOST).publication(judge.zone(b"a/b"))
    assert (verdict.is_allowed, verdict.rule, verdict.where) == (False, "closed", f"{tmp_path}/p.toml:2")
    assert judge.rights_of(HOST).subscription(b"").rule == "closed"
    assert publishes(judge, HOST, b"b")
    assert publishes(judge, HOST._replace(uid=1), b"a/b")
    assert subscribes(judge, HOST._replace(uid=1), b"a/*")
    assert not subscribes(judge, HOST._replace(uid=1), b"")


def test_default_denies_what_nothing_allows(tmp_path: Path) -> None:
    """The verdict names the default and its line."""
    judge = policy(tmp_path, "", 'default = "deny"')
    for verdict in (judge.rights_of(HOST).publication(judge.zone(b"a")), judge.rights_of(HOST).subscription(b"a")):
        assert (verdict.is_allowed, verdict.rule, verdict.where) == (False, "default", f"{tmp_path}/p.toml:3")


@pytest.mark.parametrize("field", ["users = [1000]", "groups = [100]", "groups = [20]"])
def test_an_identity_that_proves_nothing_gets_no_right_by_its_ids(field: str, tmp_path: Path) -> None:
    """It matches only rules without users and groups."""
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', field, 'publish = ["a"]')
    assert publishes(judge, HOST, b"a")
    assert not publishes(judge, HOST._replace(is_proven=False), b"a")
    judge = policy(tmp_path, "[[rule]]", 'name = "r"', 'listeners = ["main"]', 'deny_publish = ["a"]')
    assert not publishes(judge, HOST._replace(is_proven=False), b"a")


def test_the_lowest_max_rate_counts(tmp_path: Path) -> None:
    """Of the rules that match; none without one."""
    judge = policy(
        tmp_path, "[[rule]]", 'name = "a"', "max_rate = 10_000", "[[rule]]", 'name = "b"', "users = [1000]",
        "max_rate = 2.5",
    )  # fmt: skip
    assert judge.rights_of(HOST).rate == 2.5
    assert judge.rights_of(HOST._replace(uid=1)).rate == 10_000
    assert policy(tmp_path).rights_of(HOST).rate is None


def test_one_rule_suffices_to_deny_payloads(tmp_path: Path) -> None:
    """By default clients may send them, and ``true`` overrides no ``false``."""
    judge = policy(
        tmp_path, "[[rule]]", 'name = "a"', "payload = true", "[[rule]]", 'name = "b"', "users = [1000]",
        "payload = false",
    )  # fmt: skip
    assert not judge.rights_of(HOST).payload
    assert judge.rights_of(HOST._replace(uid=1)).payload


def test_audit_marks_what_the_rule_allows(tmp_path: Path) -> None:
    """Every use that an audited rule allows has its verdict; what only others allow has `ALLOWED`."""
    judge = policy(
        tmp_path, "[[rule]]", 'name = "open"', 'publish = [""]', 'subscribe = [""]', "[[rule]]", 'name = "seen"',
        'publish = ["a/"]', 'subscribe = ["a/"]', "audit = true",
    )  # fmt: skip
    rights = judge.rights_of(HOST)
    for verdict in (rights.publication(judge.zone(b"a/b")), rights.subscription(b"a/*")):
        assert (verdict.is_allowed, verdict.rule, verdict.is_audited) == (True, "seen", True)
    assert rights.publication(judge.zone(b"b")) is ALLOWED
    assert rights.subscription(b"") is ALLOWED
    assert not rights.publishes_all


def test_mode_audit_leaves_verdicts_as_they_are(tmp_path: Path) -> None:
    """The server does not enforce them; the policy only says so."""
    judge = policy(tmp_path, 'mode = "audit"', 'default = "deny"')
    assert judge.is_audit
    assert not publishes(judge, HOST, b"a")
    assert not policy(tmp_path).is_audit


def test_a_pattern_that_matches_nothing_needs_an_allow_under_default_deny(tmp_path: Path) -> None:
    """Every allowed pattern covers it, and no denied one shares a key with it."""
    assert not subscribes(policy(tmp_path, 'default = "deny"'), HOST, b"a/*b")
    judge = policy(tmp_path, 'default = "deny"', "[[rule]]", 'name = "r"', 'subscribe = ["x"]', 'deny_subscribe = [""]')
    assert subscribes(judge, HOST, b"a/*b")
    assert subscribes(policy(tmp_path), HOST, b"a/*b")


def test_clients_with_the_same_rules_share_their_rights(tmp_path: Path) -> None:
    """So do keys that the same patterns match; both end with whatever held them."""
    judge = policy(tmp_path, 'closed = ["a/"]', "[[rule]]", 'name = "r"', "users = [1000, 1001]", 'publish = ["a/b/"]')
    rights, zone = judge.rights_of(HOST), judge.zone(b"a/b/c")
    assert judge.rights_of(HOST._replace(uid=1001, listener="app")) is rights
    assert judge.rights_of(HOST._replace(uid=1)) is not rights
    assert judge.zone(b"a/b/d") is zone
    assert len({judge.zone(key) for key in (b"a/b/c", b"a/b", b"b", b"!/cred/1/2/3/x")}) == 4
    for number in range(1000):
        judge.zone(b"%d" % number)
        judge.rights_of(HOST._replace(uid=number))
    del rights, zone
    gc.collect()
    assert not judge._rights
    assert not judge._zones
