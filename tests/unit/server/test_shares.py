"""Shares: which limits each user has, where they come from, and their exact edges."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import CloseReason
from sbus.flood import UNLIMITED
from sbus.policy.rules import UserLimits
from sbus.seqpacket.send_buffer import START
from sbus.server.bus.admission import BURST_SECONDS, Admission
from sbus.server.bus.memory import CLIENT_MEMORY, pattern_memory
from sbus.server.core.limits import Limits
from sbus.server.core.shares import Limit, Share, Shares, limits_by_user
from sbus.server.core.users import RECORDER, Users
from tests.support.buses import Bus

MEMORY = 1 << 20


def table(*users: int, where: str = "p.toml:1", **limits: int) -> UserLimits:
    fields: dict[str, int | None] = {**dict.fromkeys(("clients", "patterns", "memory", "accepts")), **limits}
    return UserLimits(frozenset(users), **fields, where=where)


fields = st.none() | st.integers(1, 99)
tables = st.lists(
    st.builds(
        UserLimits, st.frozensets(st.integers(1, 4)), fields, fields, fields, fields, st.sampled_from(["a:1", "b:2"])
    )
)


def test_the_sources():
    """Each number says where it comes from: the default, an option, an option for one user, or a table."""
    shares = Shares(Limits(user_patterns=9, user_clients_of={7: 5}), MEMORY)
    shares.override([table(7, 8, accepts=3), table(8, where="q.toml:4", clients=2)])
    assert shares.of(6) == Share(
        Limit(256, "default"), Limit(9, "--user-patterns"), Limit(MEMORY, "default"), Limit(200, "default")
    )
    assert shares.of(7).clients == (5, "--user-clients=7=5")
    assert shares.of(7).accepts == (3, "policy p.toml:1")
    assert shares.of(8).clients == (2, "policy q.toml:4")
    assert shares.of(8).patterns is shares.of_most.patterns


@pytest.mark.parametrize(
    ("name", "uid", "setting"),
    [
        ("clients", 6, "--user-clients=256"),
        ("patterns", 6, "--user-patterns=9"),
        ("clients", 7, "--user-clients=7=5"),
        ("accepts", 7, "--user-accepts=200"),
        ("memory", 8, "memory = 65536, policy p.toml:1"),
    ],
)
def test_what_to_change(name, uid, setting):
    """A refusal names the option with its value, or the table of the policy."""
    shares = Shares(Limits(user_patterns=9, user_clients_of={7: 5}), MEMORY)
    shares.override([table(8, memory=65_536)])
    assert shares.of(uid).setting(name) == setting


@given(tables, st.integers(1, 5))
def test_the_last_table_wins_field_by_field(some, uid):
    """Each field of a user's share is that of the last table that names the user and has the field."""
    shares = Shares(Limits(user_clients_of={1: 77}), MEMORY)
    before = shares.of(uid)
    shares.override(some)
    for name in Share._fields:
        given_by = [each for each in some if uid in each.users and getattr(each, name) is not None]
        expected = getattr(before, name)
        if given_by:
            expected = Limit(getattr(given_by[-1], name), f"policy {given_by[-1].where}")
        assert getattr(shares.of(uid), name) == expected


@given(tables, tables)
def test_a_policy_leaves_nothing_of_the_last_one(old, new):
    """Tables that are gone have no effect any more."""
    shares, fresh = Shares(Limits(), MEMORY), Shares(Limits(), MEMORY)
    shares.override(old)
    shares.override(new)
    fresh.override(new)
    assert shares.of_some == fresh.of_some
    assert set(shares.of_some) == set(limits_by_user(new))


# --- edges ---------------------------------------------------------------------------------------


def test_clients():
    """The n-th client of a user is admitted, the next one is refused; others have the limit of the options."""
    bus = Bus(limits=Limits(user_clients=1))
    bus.registry.users.set_limits([table(7, clients=3)])
    peers = [bus.connect(uid=7) for _ in range(4)]
    assert [peer.is_connected for peer in peers] == [True, True, True, False]
    assert peers[3].protocol.reason is CloseReason.TOO_MANY_USER_CLIENTS
    assert [bus.connect(uid=8).is_connected for _ in range(2)] == [True, False]


def test_patterns():
    """The n-th pattern of a user is made, and the next one ends its client; watched keys count alike."""
    bus = Bus(limits=Limits(user_patterns=1))
    bus.registry.users.set_limits([table(7, patterns=3)])
    first, second, other = bus.connect(uid=7), bus.connect(uid=7), bus.connect(uid=8)
    first.send(b"SUB a", b"CMSG interest/on\0b")
    second.send(b"SUB c")
    other.send(b"SUB a")
    assert [peer.is_connected for peer in (first, second, other)] == [True] * 3
    second.send(b"CMSG interest/on\0d")
    first.send(b"SUB d")
    other.send(b"SUB b")
    assert [peer.protocol.reason for peer in (second, other)] == [CloseReason.USER_LIMIT] * 2
    assert first.is_connected


def test_memory():
    """A user may hold the n-th byte, and not one more."""
    need = CLIENT_MEMORY + pattern_memory(b"a", b"/", None)
    for most, is_allowed in ((need, True), (need - 1, False)):
        bus = Bus()
        bus.registry.users.set_limits([table(7, memory=most)])
        client = bus.connect(uid=7)
        client.send(b"SUB a")
        assert client.is_connected is is_allowed
        assert bus.registry.counters.user_limits == (not is_allowed)


def test_accepts():
    """A user may connect five seconds' worth of times at once, as often again as its rate brings, and not once more."""
    now = 1000.0
    users = Users(100)
    users.set_limits([table(7, accepts=2)])
    rates = Admission(Limits(), users, clock=lambda: now).rates
    burst = 2 * BURST_SECONDS
    assert [rates.take(7) for _ in range(burst + 1)] == [True] * burst + [False]
    now += 1
    assert [rates.take(7) for _ in range(3)] == [True, True, False]
    assert rates.left(7) == 0
    assert rates.left(8) == 200 * BURST_SECONDS


# --- who, and when -------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_exempt_stays_exempt(uid):
    """A table that names root or the server's own user has no effect."""
    bus = Bus()
    bus.registry.users.set_limits([table(uid, clients=1, patterns=1, memory=1, accepts=1)])
    peers = [bus.connect(uid=uid) for _ in range(3)]
    for peer in peers:
        peer.send(b"SUB a", b"SUB b")
    assert all(peer.is_connected for peer in peers)
    assert peers[0].protocol.user.memory_limit == UNLIMITED


def test_the_owner_counts():
    """With owners, the tables that name the owner hold for its subordinate UIDs, and those that name these do not."""
    bus = Bus(owner_of=lambda uid: 7 if uid >= 100_000 else uid)
    bus.registry.users.set_limits([table(7, clients=2), table(100_000, clients=9)])
    assert [bus.connect(uid=uid).is_connected for uid in (7, 100_000, 100_001)] == [True, True, False]


def test_services_have_the_limits_of_the_options():
    """No table can name the users of the server's own processes."""
    assert Users(100).connect(RECORDER).share.clients == (256, "default")


def test_lower_limits_end_nobody():
    """What a user has stays when its limits fall below that, and the next connection, pattern and byte are refused."""
    bus = Bus()
    kept, other = bus.connect(uid=7), bus.connect(uid=7)
    kept.send(b"SUB a", b"SUB b")
    bus.registry.users.set_limits([table(7, clients=1, patterns=1, memory=CLIENT_MEMORY)])
    kept.send(b"MSG a\0x", b"UNSUB b")
    assert kept.take() == [b"MSG a\0x"]
    assert [peer.is_connected for peer in (kept, other)] == [True, True]
    assert bus.connect(uid=7).protocol.reason is CloseReason.USER_MEMORY
    other.send(b"SUB a")
    assert other.protocol.reason is CloseReason.USER_LIMIT
    assert kept.is_connected


def test_limits_change_for_connected_users():
    """Higher limits hold at once, and those of a policy that no longer names the user are those of the options."""
    bus = Bus(limits=Limits(user_patterns=1))
    client = bus.connect(uid=7)
    client.send(b"SUB a")
    user, mail = client.protocol.user, client.protocol.user.lines.most_bytes
    bus.registry.users.set_limits([table(7, patterns=2, memory=64 << 10)])
    client.send(b"SUB b")
    assert client.is_connected
    assert (user.memory_limit, user.lines.most_bytes) == (64 << 10, 2 << 10)
    bus.registry.users.set_limits([])
    assert (user.share, user.lines.most_bytes) == (bus.registry.users.shares.of_most, mail)
    client.send(b"SUB c")
    assert client.protocol.reason is CloseReason.USER_LIMIT


def test_a_lower_limit_of_memory_holds_for_send_buffers():
    """Buffers that have grown stay, and grow no more."""
    bus = Bus()
    client = bus.connect(uid=7)
    memory, user = bus.registry.memory, client.protocol.user
    assert memory.may_grow(user, START)
    bus.registry.users.set_limits([table(7, memory=user.buffers)])
    assert not memory.may_grow(user, 1)
