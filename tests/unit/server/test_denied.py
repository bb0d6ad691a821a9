"""Refusals by user and rule: counted over connections, shown to operators, and bounded."""

from __future__ import annotations

from pathlib import Path

from twisted.internet import defer

from sbus.policy import load
from sbus.server.core.denied import MOST, Denied
from tests.support.buses import Bus
from tests.unit.server.test_admin_pages import figures, got
from tests.unit.server.test_shares import table

POLICY = 'version = 1\nclosed = ["jobs/"]\n[[rule]]\nname = "quiet"\ndeny_publish = ["noise/"]\n'


def denying_bus(directory: Path, text: str = POLICY) -> Bus:
    (directory / "p.toml").write_text(text)
    return Bus(policy=load(str(directory / "p.toml")))


def test_rows_are_counted_and_the_last_come_first():
    """Each user and rule has a row, and the row that was counted last is the first."""
    denied = Denied()
    for uid, rule in ((1, "a"), (1, "b"), (2, "a"), (1, "a")):
        denied.add(uid, rule)
    assert [(row.uid, row.rule, row.count) for row in denied.latest()] == [(1, "a", 2), (2, "a", 1), (1, "b", 1)]
    assert len(denied.latest(2)) == 2


def test_rows_are_bounded():
    """More users than rows leave those that were counted last."""
    denied = Denied()
    for uid in range(100_000):
        denied.add(uid, "a")
        denied.add(7, "mine")
    assert len(denied) == MOST
    rows = denied.latest()
    assert (rows[0].uid, rows[0].count) == (7, 100_000)
    assert rows[-1].uid == 100_000 - MOST + 1


def test_a_user_who_is_disconnected_each_time(tmp_path):
    """The numbers outlive the connections, of which each refusal ends one."""
    bus = denying_bus(tmp_path)
    for _ in range(3):
        client = bus.connect(uid=7)
        client.send(b"MSG noise/1\0")
        assert not client.is_connected
    assert len(bus.registry.users) == 0
    (row,) = got(bus, "/v1/status")["denied"]
    assert (row["uid"], row["rule"], row["count"]) == (7, "quiet", 3)
    bus.connect(uid=7)
    (user,) = got(bus, "/v1/users")["users"]
    assert user["denied"] == {"quiet": 3}


def test_metrics_and_counters(tmp_path):
    """The metric has a series for each rule in force, from 0 on; a rule that is gone takes its series along."""
    bus = denying_bus(tmp_path)
    assert figures(bus)["sbus_denied_total quiet"] == 0
    client = bus.connect(uid=7)
    client.send(b"CMSG denied/on", b"MSG noise/1\0", b"MSG jobs/1\0", b"SUB jobs/", b"SUB !/cred/1/2/3/x")
    found = figures(bus)
    assert {name: found[f"sbus_denied_total {name}"] for name in ("quiet", "closed", "secret")} == {
        "quiet": 1,
        "closed": 2,
        "secret": 1,
    }
    assert got(bus, "/v1/status")["counters"]["denied_by"] == {"quiet": 1, "closed": 2, "secret": 1}
    (tmp_path / "p.toml").write_text(POLICY.replace("quiet", "silent"))
    adopted = defer.Deferred.fromCoroutine(bus.registry.guard.adopt(load(str(tmp_path / "p.toml"))))
    bus.settle()
    assert adopted.called
    assert bus.registry.counters.denied_by == {"closed": 2, "secret": 1}
    assert bus.registry.counters.denied == 4
    assert "sbus_denied_total quiet" not in figures(bus)


def test_the_series_of_a_large_policy(tmp_path):
    """Of ten thousand rules the first 200 have series of their own, and all others one together."""
    rules = (f'[[rule]]\nname = "r{number}"\ndeny_publish = ["k{number}"]\n' for number in range(10_000))
    bus = denying_bus(tmp_path, "version = 1\n" + "".join(rules))
    client = bus.connect(uid=7)
    client.send(b"CMSG denied/on", *(b"MSG k%d\0" % number for number in (0, 199, 200, 201)))
    found = {name: value for name, value in figures(bus).items() if name.startswith("sbus_denied_total ")}
    assert len(found) == 4 + 200 + 1
    assert [found[f"sbus_denied_total {rule}"] for rule in ("r0", "r1", "r199", "(others)")] == [1, 0, 1, 2]


def test_users_show_their_shares():
    """Each user has its limits, what it takes of them, and where each comes from; exempt users have none."""
    bus = Bus()
    bus.registry.users.set_limits([table(7, patterns=5, where="p.toml:9")])
    bus.connect(uid=7).send(b"SUB a")
    bus.connect(uid=0)
    bus.registry.users.connect(-3)
    users = {user["uid"]: user for user in got(bus, "/v1/users")["users"]}
    mine, memory = users[7], bus.registry.users.shares.of_most.memory.most
    assert (mine["clients"], mine["clients_limit"]) == (1, 256)
    assert (mine["patterns"], mine["patterns_limit"]) == (1, 5)
    assert (mine["memory_bytes"] > 0, mine["memory_limit_bytes"]) == (True, memory)
    assert (mine["accepts_left"], mine["accepts_limit"]) == (1000, 200)
    assert mine["limits_from"] == {
        "clients": "default",
        "patterns": "policy p.toml:9",
        "memory": "default",
        "accepts": "default",
    }
    assert {users[0][name] for name in users[0] if "limit" in name} == {None}
    assert (users[-3]["patterns_limit"], users[-3]["clients_limit"]) == (None, 256)
