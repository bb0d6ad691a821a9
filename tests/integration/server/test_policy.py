"""A policy over real sockets: users, groups and listeners from the kernel, and a new policy under load."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.harness import OTHER_USER, Bus, Client, refusal

ON, ANSWER = b"CMSG denied/on", b"CMSG denied/on\0"
READERS = '[[rule]]\nname = "readers"\nsubscribe = ["x/"]\n'
OLD = f'version = 1\ndefault = "deny"\n{READERS}[[rule]]\nname = "old"\npublish = ["x/a/", "x/both/"]\n'
NEW = f'version = 1\ndefault = "deny"\n{READERS}[[rule]]\nname = "new"\npublish = ["x/b/", "x/both/"]\n'


@pytest.fixture
def policy(directory: Path) -> Path:
    return directory / "policy.toml"


def asking(started: Bus, *patterns: bytes, user: tuple[int, int] | None = None) -> Client:
    """Connect a client that stays when it is refused."""
    client = started.client(user=user)
    client.send(ON)
    assert client.sync() == [ANSWER]
    for pattern in patterns:
        client.send(b"SUB " + pattern)
    assert client.sync() == []
    return client


def test_rules_by_user(as_root, bus, policy):
    """A rule is about the users that it names, as the kernel knows them."""
    policy.write_text(
        f'version = 1\nclosed = ["k/"]\n[[rule]]\nname = "mine"\nusers = [{OTHER_USER[0]}]\npublish = ["k/"]\n'
        '[[rule]]\nname = "all"\nsubscribe = ["k/"]\n'
    )
    started = bus("--mode=0777", f"--policy={policy}")
    reader, other, root = asking(started, b"k/"), asking(started, user=OTHER_USER), asking(started)
    other.msg(b"k/1")
    root.msg(b"k/2")
    assert (other.sync(), root.sync()) == ([], [b"CMSG denied\0MSG k/2 closed"])
    assert reader.sync() == [b"MSG k/1\0"]


def test_rules_by_listener(bus, directory, policy):
    """Clients of one user that come in at different sockets are told apart."""
    policy.write_text(
        'version = 1\n[[rule]]\nname = "guests"\nlisteners = ["guests"]\ndeny_publish = ["private/"]\n'
        '[[rule]]\nname = "main-only"\nlisteners = ["main"]\ndeny_subscribe = ["guests/"]\n'
    )
    started = bus(f"--policy={policy}", f"--listen=guests={directory}/guests")
    inside, guest = asking(started, b"private/"), Client(f"{directory}/guests")
    guest.send(ON)
    guest.send(b"SUB guests/x")
    inside.send(b"SUB guests/x")
    guest.msg(b"private/x")
    assert guest.sync() == [ANSWER, b"CMSG denied\0MSG private/x guests"]
    assert inside.sync() == [b"CMSG denied\0SUB guests/x main-only"]
    guest.close()


def test_a_rule_that_names_no_socket_of_the_bus(directory, policy):
    """A listener that the bus does not have is an error at the start, with file and line."""
    policy.write_text('version = 1\n[[rule]]\nname = "a"\nlisteners = ["nowhere"]\ndeny_publish = ["x"]\n')
    assert refusal(directory, f"--policy={policy}").startswith(f"sbus: {policy}:4: ")


def test_a_new_policy_under_load(bus, policy):
    """At no moment is more allowed than by the old or by the new policy, and nothing allowed is lost."""
    policy.write_text(OLD)
    started = bus(f"--policy={policy}")
    readers = [asking(started, b"x/") for _ in range(3)]
    many = started.client()
    for number in range(2_000):
        many.send(b"SUB x/many/%d" % number)
    many.sync()
    publisher = started.client()
    publisher.send(ON)
    got: list[list[bytes]] = [[] for _ in readers]
    rounds, is_new, after = 0, False, 0
    while after < 20:
        for kind in (b"a", b"b", b"both", b"none"):
            publisher.msg(b"x/%b/%d" % (kind, rounds))
        denied = publisher.sync()
        is_new = is_new or b"CMSG denied\0MSG x/a/%d default" % rounds in denied
        for reader, packets in zip(readers, got, strict=True):
            packets += reader.sync()
        rounds += 1
        after += is_new
        if rounds == 20:
            policy.write_text(NEW)
            started.kill(signal.SIGHUP)
        assert rounds < 20_000
    for packets in got:
        keys = [packet[4:-1].split(b"/")[1:] for packet in packets]
        assert [number for kind, number in keys if kind == b"both"] == [b"%d" % number for number in range(rounds)]
        kinds = [kind for kind, _ in keys if kind in (b"a", b"b")]
        assert kinds == sorted(kinds), "once the new policy is in force, nothing is allowed by the old one"
        assert {kind for kind, _ in keys} == {b"a", b"b", b"both"}
        numbers = [int(number) for kind, number in keys if kind in (b"a", b"b")]
        assert set(numbers) == set(range(rounds)), "each message was allowed by one of them"
    started.wait_log("policy of generation 2 is in force: .*: 2 rules, default deny")


def test_subscribing_while_the_policy_changes(bus, policy):
    """A subscription that only one of the two policies allows does not outlive the change."""
    rule = 'version = 1\ndefault = "deny"\n[[rule]]\nname = "r"\npublish = [""]\nsubscribe = ["{}/", "both/"]\n'
    policy.write_text(rule.format("old"))
    started = bus(f"--policy={policy}")
    client, publisher = asking(started), started.client()
    told: list[bytes] = []
    for number in range(5_000):
        client.send(b"SUB old/%d" % number)
        client.send(b"SUB new/%d" % number)
        client.send(b"SUB both/%d" % number)
        if number == 100:
            policy.write_text(rule.format("new"))
            started.kill(signal.SIGHUP)
        if number % 50 == 49:
            told += client.sync()
            if b"CMSG denied\0SUB old/%d r" % number in told or b"CMSG denied\0SUB old/%d default" % number in told:
                break
    else:
        pytest.fail("the new policy did not come into force")
    started.wait_log("policy of generation 2 is in force")
    client.send(b"SUB new/now")
    assert not [packet for packet in client.sync() if packet.startswith(b"CMSG denied\0SUB new/now")]
    publisher.msg(b"old/3")
    publisher.msg(b"new/now")
    publisher.msg(b"both/3")
    publisher.sync()
    assert [packet for packet in client.sync() if packet.startswith(b"MSG")] == [b"MSG new/now\0", b"MSG both/3\0"]


def test_what_is_revoked(bus, policy):
    """A revoked subscription ends alone for a client that has asked, and with a reason for any other."""
    policy.write_text("version = 1\n")
    started = bus(f"--policy={policy}")
    told, other = asking(started, b"a", b"b"), started.client(b"a", b"b")
    other.send(b"CMSG bye/on")
    other.sync()
    policy.write_text('version = 1\n[[rule]]\nname = "no-a"\ndeny_subscribe = ["a"]\n')
    started.kill(signal.SIGHUP)
    assert told.recv() == b"CMSG denied\0SUB a no-a"
    assert other.recv().startswith(b"CMSG bye\0revoked ")
    assert other.has_ended()
    publisher = started.client()
    publisher.msg(b"a")
    publisher.msg(b"b")
    publisher.sync()
    assert told.sync() == [b"MSG b\0"]


@pytest.mark.parametrize("broken", ["version = 1\n[[rule]]\nname = 'a'\n\nusers = ['no such user']\n", "version ="])
def test_a_broken_file_replaces_nothing(bus, policy, broken):
    """If the files cannot be read, the policy stays, and the log has file, line and remedy."""
    policy.write_text(OLD)
    started = bus(f"--policy={policy}")
    client = asking(started, b"x/")
    policy.write_text(broken)
    started.kill(signal.SIGHUP)
    line = 5 if "users" in broken else 1
    started.wait_log(f"the policy is not reloaded, and the one before stays in force: {policy}:{line}: ")
    client.msg(b"x/a/1")
    client.msg(b"x/b/1")
    assert client.sync() == [b"MSG x/a/1\0", b"CMSG denied\0MSG x/b/1 default"]
    policy.write_text(NEW)
    started.kill(signal.SIGHUP)
    started.wait_log("policy of generation 2 is in force")


def test_without_a_policy_there_is_nothing_to_reload(bus):
    """SIGHUP on a bus without a policy is a line in the log."""
    started = bus()
    started.client().sync()
    started.kill(signal.SIGHUP)
    started.wait_log("SIGHUP: there is nothing to reload")


def test_the_recorder_of_the_bus_needs_no_rule(bus, directory, policy):
    """The recorder that the bus has started records everything, whatever the policy."""
    policy.write_text('version = 1\ndefault = "deny"\n[[rule]]\nname = "p"\npublish = ["x"]\n')
    started = bus(f"--policy={policy}", f"--record={directory}/journal")
    started.wait_log("recording .*")
    client = asking(started)
    client.msg(b"x", b"1")
    client.msg(b"y", b"1")
    assert client.sync() == [b"CMSG denied\0MSG y default"]
    assert started.stop() == 0
    started.wait_log("recorded 1 messages")
