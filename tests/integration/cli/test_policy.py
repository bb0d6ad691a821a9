"""``sbus policy``: what its commands print, and the status with which they end."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.commands import failure, sbus

POLICY = """\
version = 1
closed = ["sensors/"]

[[rule]]
name = "sensors"
users = ["daemon"]
publish = ["sensors/"]
subscribe = ["sensors/"]

[[rule]]
name = "extra"
listeners = ["app"]
publish = ["other/"]
max_rate = 100
"""


@pytest.fixture
def policy(directory: Path) -> Path:
    """Write a policy and return its path."""
    path = directory / "policy.toml"
    path.write_text(POLICY)
    return path


def test_check_reports_what_changes_nothing(policy: Path) -> None:
    """Warnings leave the status at 0, and name file and line."""
    output, errors = sbus(None, "policy", "check", policy)
    assert output.decode().splitlines() == [
        f'{policy}:10: extra: publish "other/" changes nothing: the default is allow, and nothing of it is closed',
        f"{policy}: 2 rules, default allow, 1 closed pattern; 1 warning",
    ]
    assert errors == ""


def test_check_prints_json(policy: Path) -> None:
    """One object with what the policy is, and its warnings."""
    output, _ = sbus(None, "policy", "check", "--json", policy)
    found = json.loads(output)
    assert [warning["where"] for warning in found.pop("warnings")] == [f"{policy}:10"]
    assert found == {
        "files": [str(policy)],
        "rules": 2,
        "limits": 0,
        "default": "allow",
        "closed": ["sensors/"],
        "mode": "enforce",
    }


def test_check_reads_a_directory(directory: Path, policy: Path) -> None:
    """All its files are one policy; limits and an audit mode are in the summary."""
    (directory / "z.toml").write_text('version = 1\nmode = "audit"\n[[limits]]\nusers = ["root"]\nclients = 5\n')
    output, _ = sbus(None, "policy", "check", directory)
    summary = "2 rules, shares in 1 table, default allow, 1 closed pattern, mode audit; 1 warning"
    assert output.decode().splitlines()[-1] == f"{directory}: {summary}"


@pytest.mark.parametrize("command", ["check", "explain", "diff"])
def test_an_error_is_one_line_and_status_2(command: str, policy: Path) -> None:
    """File, line and remedy, from every command that reads a policy."""
    policy.write_text(POLICY.replace("daemon", "no-such-user"))
    arguments: dict[str, list[str | Path]] = {
        "check": [policy],
        "explain": ["--policy", policy, "--user", "root", "publish", "a"],
        "diff": [policy, policy],
    }
    line = failure(None, "policy", command, *arguments[command], status=2)
    assert line.startswith(f"sbus: {policy}:6: users: there is no user 'no-such-user': create it first")


def test_check_knows_the_sockets_of_the_bus(policy: Path) -> None:
    """A rule for another socket is an error if the sockets are given."""
    sbus(None, "policy", "check", "--listener", "main", "--listener", "app", policy)
    line = failure(None, "policy", "check", "--listener", "main", policy, status=2)
    assert line.startswith(f"sbus: {policy}:12: listeners: the bus has no socket 'app': it has main")


def test_explain_says_what_decides(policy: Path) -> None:
    """Status 0 for what is allowed, 1 for what is not."""
    ask = ("policy", "explain", "--policy", policy)
    output, _ = sbus(None, *ask, "--user", "daemon", "--group", "root", "publish", "sensors/kitchen")
    assert output.decode().splitlines() == [
        "may publish sensors/kitchen: uid 1 (daemon), group root, socket main",
        f'  because sensors ({policy}:4): publish "sensors/": allows it',
        f'  also closed ({policy}:2): "sensors/": this key needs an allow',
    ]
    output, _ = sbus(None, *ask, "--user", "123456", "--listener", "app", "subscribe", "", status=1)
    assert output.decode().splitlines() == [
        "may not subscribe to every key: uid 123456, socket app",
        f'  because closed ({policy}:2): "sensors/": sensors/ needs an allow',
    ]


def test_explain_prints_json(policy: Path) -> None:
    """The groups of the user are those of the system, unless some are given."""
    entry = pwd.getpwnam("daemon")
    output, _ = sbus(
        None, "policy", "explain", "--json", "--policy", policy, "--user", str(entry.pw_uid), "publish", "sensors/x"
    )
    found = json.loads(output)
    assert (found["is_allowed"], found["verb"], found["key"], found["mode"]) == (
        True,
        "publish",
        "sensors/x",
        "enforce",
    )
    groups = os.getgrouplist("daemon", entry.pw_gid)
    assert found["client"]["groups"] == [entry.pw_gid, *sorted(set(groups) - {entry.pw_gid})]
    assert found["reasons"][0] == {
        "rule": "sensors",
        "where": f"{policy}:4",
        "field": "publish",
        "pattern": "sensors/",
        "text": "allows it",
        "decides": True,
    }


def test_explain_says_that_audit_refuses_nothing(policy: Path) -> None:
    """The verdict is that of the rules; a client whose IDs prove nothing is shown as such."""
    policy.write_text('version = 1\nmode = "audit"\ndefault = "deny"\n')
    output, _ = sbus(None, "policy", "explain", "--policy", policy, "-u", "65534", "-g", "0", "publish", "a", status=1)
    lines = output.decode().splitlines()
    assert lines[0].endswith("whose IDs prove nothing, socket main")
    assert lines[1:] == [
        f"  because default ({policy}:3): the default is deny",
        "  but the mode is audit: the bus logs this, and refuses nothing",
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--user", "no-such-user", "publish", "a"), "there is no user 'no-such-user': give a name from"),
        (("--user", "root", "--group", "no-such-group", "publish", "a"), "there is no group 'no-such-group'"),
        (("--user", "root", "publish", "!"), "'!': '!' is reserved"),
        (("--user", "root", "subscribe", "!/cred/1/2/3/"), "no policy decides who reads secret keys"),
    ],
)
def test_explain_refuses_what_cannot_be(arguments: tuple[str, ...], error: str, policy: Path) -> None:
    """Users, groups and keys that do not exist are wrong usage, and no verdict."""
    line = failure(None, "policy", "explain", "--policy", policy, *arguments, status=2)
    assert line.startswith(f"sbus: {error}")


def test_diff_shows_an_example_for_each_change(directory: Path, policy: Path) -> None:
    """Status 1 if there is one, 0 if there is none, whatever the order of the rules."""
    assert sbus(None, "policy", "diff", policy, policy) == (b"", "")
    new = directory / "new.toml"
    new.write_text(
        POLICY.replace('publish = ["sensors/"]\n', "").replace("100", "50").replace("1\n", '1\nmode = "audit"\n', 1)
        + '[[limits]]\nusers = ["daemon"]\nmemory = "1M"\n'
    )
    output, _ = sbus(None, "policy", "diff", policy, new, status=1)
    assert output.decode().splitlines() == [
        "- publish sensors/x: uid 1 (daemon), socket main",
        f'    old: sensors ({policy}:4): publish "sensors/": allows it',
        f'    new: closed ({new}:3): "sensors/": this key needs an allow',
        "~ mode enforce -> audit",
        "~ max_rate 100 -> 50: any other user, socket app",
        "~ memory none -> 1048576: uid 1 (daemon)",
    ]
    output, _ = sbus(None, "policy", "diff", "--json", new, policy, status=1)
    found = json.loads(output)
    assert [(each["verb"], each["key"], each["is_allowed"]) for each in found["changes"]] == [
        ("publish", "sensors/x", True)
    ]
    assert [(each["setting"], each["old"], each["new"]) for each in found["settings"]] == [
        ("mode", "audit", "enforce"),
        ("max_rate", 50, 100),
        ("memory", 1 << 20, None),
    ]


@pytest.mark.parametrize("name", ["check", "explain", "diff"])
def test_help(name: str) -> None:
    """Each command has a help text with an example."""
    output, _ = sbus(None, "policy", name, "--help")
    assert f"  sbus policy {name} " in output.decode()


# --- with a bus ----------------------------------------------------------------------------------

OPEN = 'version = 1\n[[rule]]\nname = "no-b"\ndeny_subscribe = ["b"]\n'
NO_A = OPEN + '[[rule]]\nname = "no-a"\ndeny_subscribe = ["a"]\ndeny_publish = ["k"]\n'


def test_reload_waits_for_the_new_policy(bus: Any, policy: Path) -> None:
    """When the command has ended, the new policy is in force."""
    policy.write_text(OPEN)
    started = bus(f"--policy={policy}", "--admin=auto")
    client = started.client(b"a")
    client.cmsg(b"denied/on")
    client.sync()
    policy.write_text(NO_A)
    output, _ = sbus(started, "policy", "reload")
    assert output == b"the policy is in force (generation 2)\n"
    client.msg(b"k")
    assert client.sync() == [b"CMSG denied\0SUB a no-a", b"CMSG denied\0MSG k no-a"]
    started.wait_log(f"SUB 'a', rule no-a .{policy}:5., generation 2")  # of the policy that decides


def test_reload_names_what_is_wrong(bus: Any, policy: Path) -> None:
    """A wrong policy is an error with file and line, and the one before stays."""
    policy.write_text(OPEN)
    started = bus(f"--policy={policy}", "--admin=auto")
    policy.write_text(OPEN + "x = 1\n")
    assert failure(started, "policy", "reload", status=2).startswith(f"sbus: {policy}:5: unknown field 'x'")
    client = started.client(b"a")
    client.cmsg(b"denied/on")
    client.sub(b"b")
    assert client.sync() == [b"CMSG denied/on\0", b"CMSG denied\0SUB b no-b"]


@pytest.mark.parametrize("command", [("reload",), ("diff", "{policy}"), ("explain", "-uroot", "publish", "a")])
def test_a_bus_without_a_policy(bus: Any, policy: Path, command: tuple[str, ...]) -> None:
    """There is nothing to reload, to compare with or to explain, and the error says how to have a policy."""
    started = bus("--admin=auto")
    words = [word.format(policy=policy) for word in command]
    assert "start it with --policy=FILE" in failure(started, "policy", *words)


def test_diff_with_the_running_bus(bus: Any, policy: Path, directory: Path) -> None:
    """One policy is compared with that of the bus: for its clients, with the subscriptions that would end."""
    policy.write_text(OPEN)
    new = directory / "new.toml"
    new.write_text(NO_A)
    started = bus(f"--policy={policy}", "--admin=auto")
    loser, other = started.client(b"a", b"c"), started.client(b"c")
    output, _ = sbus(started, "policy", "diff", new, status=1)
    user = pwd.getpwuid(os.getuid()).pw_name
    first, *rest = output.decode().splitlines()
    assert first == (
        f"! client 1 (pid {loser.pid}, uid {os.getuid()} ({user})) would lose its subscription to a: no-a ({new}:5)"
    )
    assert [line.split(":")[0] for line in rest if not line.startswith(" ")] == ["- publish k", "- subscribe a"]
    output, _ = sbus(started, "policy", "diff", "--json", new, status=1)
    found = json.loads(output)
    assert [(row["client"], row["pattern"], row["rule"]) for row in found["lost"]] == [(1, "a", "no-a")]
    assert [(row["verb"], row["key"]) for row in found["changes"]] == [("publish", "k"), ("subscribe", "a")]
    assert sbus(started, "policy", "diff", policy) == (b"", "")
    assert (loser.sync(), other.sync()) == ([], []), "nothing has changed on the bus"


def test_explain_and_status_with_the_running_bus(bus: Any, policy: Path) -> None:
    """Without ``--policy``, the policy of the bus decides, as the text of a refusal promises; status names it."""
    policy.write_text(OPEN)
    started = bus(f"--policy={policy}", "--admin=auto")
    ask = ("policy", "explain", "--user", "root", "subscribe", "b")
    output, _ = sbus(started, *ask, status=1)
    assert output.decode().splitlines()[1] == f'  because no-b ({policy}:2): deny_subscribe "b": denies b'
    output, _ = sbus(started, "status")
    assert f"{policy}: 1 rule, default allow, mode enforce, generation 1\n" in output.decode()
    assert started.wait_log("policy of generation 1 is in force: .*: 1 rule, default allow")


def test_diff_with_a_file_that_has_changed(bus: Any, policy: Path, directory: Path) -> None:
    """If the files are not those that the bus has read, the command says so and compares nothing."""
    policy.write_text(OPEN)
    started = bus(f"--policy={policy}", "--admin=auto")
    policy.write_text(NO_A)
    line = failure(started, "policy", "diff", policy, status=2)
    assert line.startswith(f"sbus: {policy} has changed since the bus has read it, so no file has the policy in force")
