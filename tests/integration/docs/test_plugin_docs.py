"""Programs with a bus in them, and plug-ins, as their pages show them."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sbus import errors
from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.server.core.credentials import AccessSettings
from tests.integration.docs.pages import EXAMPLES, Script
from tests.support.harness import OTHER_USER, TIMEOUT, Bus, Client, Process, numbered, twistd

PLUGINS = EXAMPLES / "plugins"

# --- embedding ------------------------------------------------------------------------------------


def test_an_application_with_a_bus_in_it(directory: Path, spawn: Callable[..., Any]) -> None:
    """The application of the page on embedding publishes the load to its clients."""
    application = spawn(Process, directory, ["-n", "--pidfile=", "-y", EXAMPLES / "load.py"])
    application.wait_log("sbus listens on .*/load.sock")
    assert (directory / "load.sock").stat().st_mode & 0o777 == 0o770
    with Client(directory / "load.sock") as client:
        client.sub(b"machine/")
        assert re.fullmatch(rb"MSG machine/load\x00\d+\.\d\d", client.recv())
    application.stop()
    assert not (directory / "load.sock").exists()
    assert "#warn]" not in application.log


def test_two_buses_in_one_process(directory: Path, spawn: Callable[..., Any]) -> None:
    """The outer bus of the page on embedding shows the public keys of the inner one, and nothing else."""
    program = spawn(Script, directory, sys.executable, EXAMPLES / "two_buses.py", "inner", "outer")
    program.wait_log("both buses listen")
    with Client(directory / "outer") as outside, Client(directory / "inner") as inside:
        outside.sub(b"")
        inside.sub(b"")
        assert outside.sync() == inside.sync() == []
        inside.msg(b"private/plan", b"hidden")
        shown = inside.msg(b"public/news", b"shown")
        hidden = outside.msg(b"public/echo", b"not inside")
        assert inside.sync() == [b"MSG private/plan\0hidden", shown]
        assert sorted(outside.sync()) == sorted([shown, hidden])
    program.wait_log(r"^inner: uid \d+ got 4, lost 0: ")
    program.wait_log(r"^outer: uid \d+ got 4, lost 0: ")
    assert program.stop(signal.SIGINT) in (0, -signal.SIGINT)
    assert sorted(os.listdir(directory)) == []


# --- plugins --------------------------------------------------------------------------------------


@pytest.fixture
def with_plugins(directory: Path) -> dict[str, str]:
    """The environment of a process that finds the plugins of the page on plugins."""
    copy = shutil.copytree(PLUGINS, directory / "acme", ignore=shutil.ignore_patterns("__pycache__", "dropin.cache"))
    return {"PYTHONPATH": os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the page on plugins."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    yield importlib.import_module("acme_bus")
    sys.modules.pop("acme_bus")


def test_help_lists_plugins(with_plugins: dict[str, str]) -> None:
    """The help names the credentials policy, the strategies and the order that plugins bring."""
    command = [*twistd(), "sbus", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, **with_plugins})
    assert shown.returncode == 0
    for name in ("house-rules: ", "blocking/soft/recent", "blocking/hard/make-room", "order/smallest"):
        assert name in shown.stdout


def test_policy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """A bus applies a plugin's policy: it disconnects clients that subscribe to everything, and no others."""
    started = bus("--credentials=house-rules", env=with_plugins)
    listener = started.client(b"news/*", b"system/")
    for pattern in (b"", b"*", b"n*/"):
        with Client(started.address) as greedy:
            greedy.sub(pattern)
            assert greedy.has_ended()
    started.wait_log("violation by client .* the policy of the bus refuses this subscription", 3)
    mine = listener.msg(b"system/status", b"fine")  # by the server's own user
    assert listener.sync() == [mine]
    with Client(started.address) as spy:
        spy.sub(b"!/cred/1/2/3/inbox")
        assert spy.has_ended()
    assert started.stop() == 0


def test_policy_restricts_publishing(bus: Callable[..., Bus], with_plugins: dict[str, str], as_root: None) -> None:
    """A plugin's policy restricts publishing by other users than the server's."""
    started = bus("--credentials=house-rules", "--mode=0777", env=with_plugins)
    listener = started.client(b"news/", b"system/")
    with Client(started.address, user=OTHER_USER) as other:
        allowed = other.msg(b"news/today")
        assert listener.recv() == allowed
        other.msg(b"system/halt")
        assert other.has_ended()
    started.wait_log("the policy of the bus refuses this publication")
    assert listener.sync() == []


def test_policy_with_made_up_peers(acme: ModuleType) -> None:
    """The policy decides about invented peers as the page says."""
    rules = acme.HouseRulesPolicy().make(AccessSettings(allowed_users=frozenset((4242,))))
    system, user = PeerCredentials(pid=1, uid=0, gid=0), PeerCredentials(pid=9, uid=4242, gid=100)
    assert rules.mayPublish(system, b"system/halt")
    assert not rules.mayPublish(user, b"system/halt")
    assert rules.mayPublish(user, b"news/system/")
    assert rules.mayConnect(user)
    assert not rules.mayConnect(PeerCredentials(pid=9, uid=4243, gid=100))
    assert rules.mayBlock(system, user)
    assert not rules.mayBlock(user, system)
    own = CURRENT.check(b"!/cred//4242//x")
    rules.checkSubscription(user, b"!/cred//4242//x", own)
    with pytest.raises(errors.Violation, match="another client's"):
        rules.checkSubscription(system, b"!/cred//4242//x", own)


def read_late(bus: Bus, controls: list[bytes], messages: list[bytes]) -> list[bytes]:
    """Return what a client with these control messages receives if it reads late; the log counts the rest."""
    late = bus.client(b"flood")
    late.cmsg(*controls)
    late.sync()
    publisher = bus.client()
    for message in messages:
        publisher.send(message)
    publisher.sync()
    late.sock.shutdown(socket.SHUT_WR)
    got = late.rest()
    bus.wait_log(r"client 1 disconnected")
    assert len(got) + bus.dropped() == len(messages)
    return got


def in_the_socket(got: list[bytes], messages: list[bytes]) -> int:
    """Return the number of messages that the kernel held: those that came first, in the order of sending."""
    return next((i for i, (one, other) in enumerate(zip(got, messages, strict=False)) if one != other), len(got))


def test_soft_strategy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's soft strategy, a late reader receives what its socket held, then the ten newest messages."""
    messages = numbered(b"flood", 3000)
    got = read_late(bus(env=with_plugins), [b"blocking/soft/recent"], messages)
    assert 0 < in_the_socket(got, messages) == len(got) - 10
    assert got[-10:] == messages[-10:]


def test_hard_strategy_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's hard strategy, a queue at its limit drops its oldest messages for new ones."""
    messages = numbered(b"flood", 3000)
    started = bus("--queue-messages=100", env=with_plugins)
    got = read_late(started, [b"blocking/hard/make-room"], messages)
    assert 0 < in_the_socket(got, messages) == len(got) - 100
    assert got[-100:] == messages[-100:]


def test_hard_strategy_makes_room_for_a_large_message(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """For a large message, the plugin's hard strategy drops as many waiting messages as necessary."""
    messages = [*numbered(b"flood", 2000, size=1000), b"MSG flood\0".ljust(8000, b"L")]
    started = bus("--queue-bytes=10000", env=with_plugins)
    got = read_late(started, [b"blocking/hard/make-room"], messages)
    assert got[-3:] == messages[-3:]
    assert in_the_socket(got, messages) == len(got) - 3


def test_order_of_a_plugin(bus: Callable[..., Bus], with_plugins: dict[str, str]) -> None:
    """With the plugin's order, waiting messages are sent by size, and equal sizes in order of arrival."""
    messages = [b"MSG flood\0%d" % i + b"." * (i * 7 % 50) for i in range(2000)]
    got = read_late(bus(env=with_plugins), [b"order/smallest"], messages)
    held = in_the_socket(got, messages)
    assert 0 < held < len(messages)
    # Whether the last packet in the kernel differs from the first in the queue is a matter of luck.
    assert got[held:] == sorted(messages[held:], key=len)
