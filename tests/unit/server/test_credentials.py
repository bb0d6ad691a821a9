"""Permission to connect, subscribe and block, by the peer credentials of both ends."""

from __future__ import annotations

import os

import pytest
from zope.interface.verify import verifyObject

from sbus.errors import Violation, ViolationReason
from sbus.interfaces import ICredentials, ICredentialsPolicy
from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.server.core import credentials
from sbus.server.core.credentials import AccessSettings, KernelPolicy, OwnUserPolicy

SERVER = 500
OVERFLOW = (65_000, 64_000)


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    """The server runs as a user of its own, on a system whose overflow IDs are not the usual ones."""
    become(monkeypatch, SERVER)
    monkeypatch.setattr(credentials, "_overflow_ids", lambda: OVERFLOW)


def become(monkeypatch, uid):
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: uid)


def peer(uid=1000, gid=100, pid=4321):
    return PeerCredentials(pid, uid, gid)


def who_may_connect(policy, **settings):
    control = policy.make(AccessSettings(**settings))
    return {uid for uid in (0, SERVER, 1000, 1001, OVERFLOW[0]) if control.mayConnect(peer(uid))}


EVERYONE = {0, SERVER, 1000, 1001, OVERFLOW[0]}


def test_the_effective_user_counts(monkeypatch):
    """After twistd --euid the server's own user is the one as which it acts, not the one that started it."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "geteuid", lambda: SERVER)
    assert who_may_connect(OwnUserPolicy()) == {SERVER}
    control = OwnUserPolicy().make(AccessSettings())
    assert control.mayBlock(peer(SERVER), peer(1000))


@pytest.mark.parametrize("policy", [KernelPolicy(), OwnUserPolicy()])
def test_interfaces(policy):
    """The policies and what they make keep the promises of their interfaces."""
    assert verifyObject(ICredentialsPolicy, policy)
    assert verifyObject(ICredentials, policy.make(AccessSettings()))


def test_names():
    """Each policy has a name for the command line and a line for its help."""
    assert [policy.name for policy in (KernelPolicy(), OwnUserPolicy())] == ["kernel", "own-user"]
    assert all(policy.description and "\n" not in policy.description for policy in (KernelPolicy(), OwnUserPolicy()))


def test_a_path_keeps_out_whom_its_mode_keeps_out():
    """On a path, every user that can reach the socket may connect."""
    assert who_may_connect(KernelPolicy()) == EVERYONE


def test_an_abstract_address_is_for_its_user_and_root():
    """An abstract address has no mode; so by default only the server's own user and root may connect."""
    assert who_may_connect(KernelPolicy(), is_abstract=True) == {0, SERVER}


@pytest.mark.parametrize("is_abstract", [True, False])
def test_allowed_users(is_abstract):
    """Allowed users may connect besides the server's own user; no other may, not even root."""
    allowed = frozenset((1000,))
    assert who_may_connect(KernelPolicy(), allowed_users=allowed, is_abstract=is_abstract) == {SERVER, 1000}
    assert who_may_connect(KernelPolicy(), allowed_users=frozenset(), is_abstract=is_abstract) == {SERVER}


@pytest.mark.parametrize("allowed", [None, frozenset((0, 1000))])
def test_own_user_policy(allowed):
    """The policy own-user admits only the server's own user, whatever else was allowed."""
    assert who_may_connect(OwnUserPolicy(), allowed_users=allowed) == {SERVER}


def test_own_user_after_root_was_given_up(monkeypatch):
    """The server's own user is the one that it runs as in the end, not the root that it was started by."""
    become(monkeypatch, 0)
    control = KernelPolicy().make(AccessSettings(allowed_users=frozenset()))
    become(monkeypatch, SERVER)
    assert control.mayConnect(peer(SERVER))
    assert not control.mayConnect(peer(0))
    assert control.mayBlock(peer(SERVER), peer(1000))


def subscription(control, who, pattern):
    """The reason for which a subscription is refused, or None."""
    try:
        control.checkSubscription(who, pattern, CURRENT.check(pattern))
    except Violation as violation:
        return violation.reason
    return None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (b"", None),
        (b"a/*", None),
        (b"!/cred////", None),
        (b"!/cred/100///x", None),
        (b"!/cred//1000//x", None),
        (b"!/cred///4321/x", None),
        (b"!/cred/100/1000/4321/x/*", None),
        (b"!/cred/101///x", ViolationReason.FOREIGN_SECRET),
        (b"!/cred//1001//x", ViolationReason.FOREIGN_SECRET),
        (b"!/cred///4322/x", ViolationReason.FOREIGN_SECRET),
        (b"!/cred/1000/100/4321/", ViolationReason.FOREIGN_SECRET),
        (b"!/cred/100/1000/1/", ViolationReason.FOREIGN_SECRET),
        (b"!/cred/0/0/0/", ViolationReason.FOREIGN_SECRET),
    ],
)
def test_secret_subscriptions(pattern, reason):
    """A client may subscribe to everything open, and to secrets all given IDs of which are its own."""
    for policy in (KernelPolicy(), OwnUserPolicy()):
        assert subscription(policy.make(AccessSettings()), peer(), pattern) is reason


def test_root_reads_no_secrets_of_others():
    """Root is a client like any other."""
    control = KernelPolicy().make(AccessSettings())
    assert subscription(control, peer(0, 0, 1), b"!/cred//1000//") is ViolationReason.FOREIGN_SECRET
    assert subscription(control, peer(0, 0, 1), b"!/cred/0/0/1/") is None


@pytest.mark.parametrize("who", [peer(pid=0), peer(uid=OVERFLOW[0]), peer(gid=OVERFLOW[1])])
@pytest.mark.parametrize("pattern", [b"!/cred////", b"!/cred//1000//x", b"!/cred/1///"])
def test_shared_ids_prove_nothing(who, pattern):
    """A client with a shared ID can subscribe to open keys, but to no secret key."""
    control = KernelPolicy().make(AccessSettings())
    assert subscription(control, who, pattern) is ViolationReason.UNPROVEN_IDENTITY
    assert subscription(control, who, b"a/") is None


def test_overflow_ids_are_not_mixed_up():
    """The overflow UID as a GID, and the overflow GID as a UID, are ordinary IDs."""
    control = KernelPolicy().make(AccessSettings())
    assert subscription(control, peer(uid=OVERFLOW[1], gid=OVERFLOW[0]), b"!/cred////") is None


@pytest.mark.parametrize(
    ("receiver", "publisher", "may"),
    [
        (1000, 1000, True),
        (1000, 1001, False),
        (1000, 0, False),
        (1000, SERVER, False),
        (0, 1000, True),
        (SERVER, 1000, True),
        (0, SERVER, True),
        (SERVER, 0, True),
    ],
)
def test_who_may_block_whom(receiver, publisher, may):
    """A receiver may block publishers of its own user; root and the server's own user may block any."""
    control = KernelPolicy().make(AccessSettings())
    # Its process and group do not matter.
    assert control.mayBlock(peer(receiver, 1, 2), peer(publisher, 3, 4)) is may
    assert KernelPolicy().make(AccessSettings(block_across_users=True)).mayBlock(peer(receiver), peer(publisher))


def test_everybody_may_publish():
    """Publishing is restricted by no built-in policy, so that it costs nothing."""
    for policy in (KernelPolicy(), OwnUserPolicy()):
        control = policy.make(AccessSettings())
        assert control.restrictsPublishing is False
        assert control.mayPublish(peer(), b"!/cred/1/2/3/x")
