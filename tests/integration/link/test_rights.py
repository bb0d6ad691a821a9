"""A link has the rights of its user at the master and no others, and a container's bus exports what is listed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.link.conftest import StartBus, link_pid, name_of, wait_crossing
from tests.support.harness import OTHER_USER, THIRD_USER, Client, Process, run, script, twistd, wait_end

CONTAINER = ("unshare", "--user", "--map-root-user", "--mount")


class Script(Process):
    """Any program, in place of twistd."""

    launcher = (sys.executable, "-P", "-c", "from twisted.scripts.twistd import run; run()")


def test_link_of_another_user_has_that_users_rights(
    tree: StartBus, become: list[str], directory: Path, spawn: Callable[..., Any]
) -> None:
    """A master without --allow-user for the link's user refuses it; with it, the link gets what is listed, unasked."""
    master = tree("root", None, "--mode=0777", f"--allow-user={THIRD_USER[0]}")
    below = directory / "below"
    below.mkdir()
    below.chmod(0o777)
    bus = tree("below/leaf", None, "--mode=0777", before=become)
    options = [f"--socket={bus.address}", f"--upstream={master.address}", "--upstream-out=", "--upstream-in="]
    link = spawn(Process, directory, ["-n", "--pidfile=", "sbus-link", *options], before=become)
    link.wait_log("no link: the connection to .*root was lost")
    assert "linked to" not in link.log
    master.stop()
    master = tree("root", None, "--mode=0777", f"--allow-user={OTHER_USER[0]}")
    link.wait_log("linked to root")
    client, above = bus.client(b"x"), master.client()
    sent = above.msg(b"x")
    assert client.recv() == sent
    assert re.fullmatch(rb"!/cred/%d/%d/\d+/!/cred/.*" % OTHER_USER[::-1], name_of(client))


def test_limits_of_the_master_apply(tree: StartBus) -> None:
    """A master that takes few patterns gets few: the link subscribes to the listed ones whole, and says so."""
    master = tree("root", None, "--max-patterns=20")
    leaf = tree("leaf", master, lists=("--upstream-out=", "--upstream-in=a/", "--upstream-in=b"))
    client = leaf.client(*[b"a/%d" % number for number in range(40)])
    leaf.wait_log("too many patterns are wanted at the master: subscribing to the listed ones whole")
    leaf.wait_log("linked to root", 2)
    sent = master.client().msg(b"a/39")
    assert client.recv() == sent


def test_ordinary_clients_do_not_make_links(tree: StartBus, as_root: None) -> None:
    """What another user says about links is unknown to the bus, and what it forges gets nothing."""
    root = tree("root", None, "--mode=0777")
    leaf = tree("leaf", root, "--upstream-secrets", "--mode=0777")
    victim, liar = leaf.client(), leaf.client(user=OTHER_USER)
    name = name_of(victim)
    prefix = name.rpartition(b"/!/cred/")[0]
    liar.cmsg(b"link/up\0!/cred/1/1/1", b"link/down", b"link/fence\0999", b"interest/patterns")
    assert liar.sync() == []
    assert name_of(victim) == name
    for pattern in (name + b"/x", b"!/cred/1/1/1/" + name + b"/x", prefix + b"/!/cred////x/", prefix + b"/x"):
        if pattern.startswith(prefix + b"/!/cred////"):
            continue  # that is its own
        other = leaf.client(user=OTHER_USER)
        other.sub(pattern)
        assert other.has_ended()
    victim.sub(name + b"/x")
    victim.sync()
    sent = liar.msg(name + b"/x", b"anybody may write to it")
    assert victim.recv() == sent
    assert liar.sync() == []


def test_link_alone(tree: StartBus, directory: Path, spawn: Callable[..., Any]) -> None:
    """twistd sbus-link links two running buses, stops with status 0, and the buses go on."""
    root, leaf = tree("root"), tree("leaf")
    options = [f"--socket={leaf.address}", f"--upstream={root.address}", "--upstream-out=up/", "--upstream-in=down/"]
    link = spawn(Process, directory, ["-n", "--pidfile=", "sbus-link", *options])
    link.wait_log("linked to root")
    below, above = leaf.client(b"down/x"), root.client(b"up/x")
    wait_crossing(below, b"up/x", above)
    sent = [below.msg(b"up/x"), above.msg(b"down/x")]
    assert [above.recv(), below.recv()] == sent
    assert link.stop() == 0
    below.msg(b"up/x")
    assert below.sync() == above.sync() == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "no master: give its address with --upstream=ADDRESS"),
        (["--upstream=/x", "--upstream-out=a/*b"], "no open key matches the listed pattern"),
        (["--upstream=/x", "--upstream-in=!/cred/1/2/3/x"], "no open key matches the listed pattern"),
        (["--upstream=systemd"], "a client cannot connect to this address"),
    ],
)
def test_wrong_options_of_a_link(directory: Path, options: list[str], line: str) -> None:
    """An option that cannot work is refused in one line."""
    done = run([*twistd(), "-n", "--pidfile=", "sbus-link", *options], directory)
    assert done.returncode != 0
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_link_counts_as_no_client(tree: StartBus) -> None:
    """Operators see the link as attached, and as a client of the bus; the bus stops with the last other client."""
    root = tree("root")
    leaf = tree("leaf", root, "--admin=auto", "--auto-close")

    def ask(what: str) -> Any:
        return json.loads(run([*script("sbus"), what, f"--socket={leaf.address}", "--json"]).stdout)

    assert ask("status")["attached"] == {"link": True}
    assert [(each["pid"], each["listener"]) for each in ask("clients")["clients"]] == [(link_pid(leaf), "main")]
    client = leaf.client()
    client.sync()
    client.close()
    assert leaf.wait() == 0


def test_wrong_options_for_a_master(directory: Path) -> None:
    """An empty address, such as that of a variable that is not set, is not taken for no master.

    An option of former releases is refused with the option that took its place, whatever its value.
    """
    gone = "--upstream-inside is gone: --upstream=ADDRESS starts the link as a process of its own"
    for options, line in (
        (["--upstream="], "--upstream= has no address: give the master's, or leave the option out"),
        (["--upstream-out=a"], "--upstream-out is for the link: give --upstream=ADDRESS too"),
        (["--upstream-inside"], gone),
        (["--upstream=/x", "--upstream-inside=yes"], gone),
    ):
        done = run([*twistd(), "-n", "--pidfile=", "sbus", f"--socket={directory}/bus", *options], directory)
        assert done.returncode != 0
        assert line in done.stderr
        assert done.stderr.count("\n") == 1


def test_bus_in_a_container(tree: StartBus, directory: Path) -> None:
    """A bus in mount and user namespaces of its own exports and imports what is listed, and its names are chains."""
    if not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(CONTAINER)}: not permitted here")
    host = tree("host")
    (directory / "inside").mkdir()
    lists = ("--upstream-out=inside/", "--upstream-in=time/")
    inside = tree("inside/bus", host, "--upstream-secrets", lists=lists, before=CONTAINER)
    below, above = inside.client(b"time/"), host.client(b"")
    wait_crossing(below, b"inside/probe", above)
    sent = [above.msg(b"time/now"), above.msg(b"elsewhere"), below.msg(b"private"), below.msg(b"inside/1")]
    assert sorted(above.receive(3)) == sorted([sent[0], sent[1], sent[3]])
    assert below.recv() == sent[0]
    assert above.sync() == below.sync() == []
    name = name_of(below)
    assert re.fullmatch(rb"!/cred/%d/%d/\d+/!/cred/\d+/\d+/\d+" % (os.getegid(), os.geteuid()), name)
    below.sub(name + b"/answer")
    below.sync()
    with Client(host.address) as other:
        answer = other.msg(name + b"/answer")
    assert below.recv() == answer


def test_link_ends_with_its_bus(tree: StartBus) -> None:
    """A link does not outlive its bus, however that ends, and what was published before a stop still goes up."""
    root = tree("root")
    leaf = tree("leaf", root)
    above, below = root.client(b"x"), leaf.client()
    pid = link_pid(leaf)
    wait_crossing(below, b"x", above)
    sent = [below.msg(b"x", b"%d" % number) for number in range(1000)]
    below.sync()  # what the bus has not read yet is not published
    assert leaf.stop() == 0
    wait_end(pid)
    assert above.receive(1000) == sent
    leaf = tree("leaf", root, "--reuse")
    pid = link_pid(leaf)
    leaf.stop(9)
    wait_end(pid)
