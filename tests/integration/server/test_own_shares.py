"""Shares of single users over real sockets, with real UIDs: the n-th is allowed, and the next one refused."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.server.bus.admission import BURST_SECONDS
from sbus.server.bus.memory import CLIENT_MEMORY, pattern_memory
from tests.integration.server.test_shares import Crowd
from tests.support.harness import OTHER_USER, THIRD_USER, TIMEOUT, Bus

UID = OTHER_USER[0]


class Ruled:
    """A bus with a policy that a test can change.

    :ivar bus: the bus.
    :ivar file: the policy.
    """

    def __init__(self, start: Callable[..., Bus], file: Path) -> None:
        self.file = file
        self._generation = 1
        self.file.write_text("version = 1\n")
        self.bus = start("--mode=0777", f"--policy={file}", f"--admin={file.parent}/bus.admin")
        self.bus.client().sync()  # it handles signals now

    def set_limits(self, *tables: str) -> None:
        """Have the bus load a policy with these tables; the first one is in line 2."""
        self.file.write_text("\n".join(["version = 1", *("[[limits]]\n" + each for each in tables)]))
        self.bus.kill(signal.SIGHUP)
        self._generation += 1
        self.bus.wait_log(f"policy of generation {self._generation} is in force")


@pytest.fixture
def ruled(as_root, bus, directory) -> Ruled:
    return Ruled(bus, directory / "p.toml")


@pytest.fixture
def crowd(ruled) -> Iterator[Any]:
    """Start crowds that end with the test: ``crowd(uid, hold=10)``."""
    mine: list[Crowd] = []

    def start(uid: int, **options: Any) -> Crowd:
        mine.append(Crowd(ruled.bus, uid, **options))
        return mine[-1]

    yield start
    for each in mine:
        each.leave()


def test_clients(ruled, crowd):
    """The user who is named gets n clients; one more is closed, and the log names the table; others get the default."""
    ruled.set_limits(f"users = [{UID}]\nclients = 3")
    assert crowd(UID, hold=4).served == 3
    ruled.bus.wait_log(rf"refused .* uid {UID} .*: its user has .* \(clients = 3, policy .*/p.toml:2\)")
    assert crowd(THIRD_USER[0], hold=5).served == 5


def test_patterns(ruled):
    """The user who is named gets n patterns; one more ends its client, and the log names the table."""
    ruled.set_limits(f"users = [{UID}]\npatterns = 2", f"users = [{UID}]\npatterns = 3")
    one, two = ruled.bus.client(b"a", b"b", user=OTHER_USER), ruled.bus.client(b"c", user=OTHER_USER)
    other = ruled.bus.client(b"a", b"b", b"c", b"d", user=THIRD_USER)
    two.sub(b"d")
    assert two.has_ended()
    ruled.bus.wait_log(r"violation by client \d+, .*: more patterns than .* \(patterns = 3, policy .*/p.toml:5\)")
    assert (one.sync(), other.sync()) == ([], [])


def test_memory(ruled):
    """The user who is named may hold n bytes; the pattern that needs more ends its client, and the log says so."""
    patterns = [b"%d/" % number * 30 for number in range(20)]
    each = pattern_memory(patterns[0], b"/", None)
    need = CLIENT_MEMORY + sum(pattern_memory(pattern, b"/", None) for pattern in patterns) + each // 2  # for packets
    ruled.set_limits(f"users = [{UID}]\nmemory = {need}")
    client = ruled.bus.client(user=OTHER_USER)
    for pattern in patterns:
        client.sub(pattern)
        assert client.sync() == []  # packets that wait for the bus count as well
    client.sub(b"more/" * 30)
    assert client.has_ended()
    ruled.bus.wait_log(rf"violation by client \d+, .*: .* as much memory .* \(memory = {need}, policy .*/p.toml:2\)")
    assert ruled.bus.client(*patterns, b"more", user=THIRD_USER).sync() == []


def test_accepts(ruled, crowd):
    """The user who is named connects five seconds' worth of times at once, and what comes back meanwhile."""
    ruled.set_limits(f"users = [{UID}]\naccepts = 2")
    burst = 2 * BURST_SECONDS
    some = crowd(UID, hold=burst + 10)
    assert burst <= some.served <= burst + 2 * some.seconds + 1
    ruled.bus.wait_log(rf"refused .* uid {UID} .*: its user connects more often .* \(accepts = 2, policy .*/p.toml:2\)")
    assert crowd(THIRD_USER[0], hold=burst + 10).served == burst + 10


def test_a_new_policy(ruled, crowd):
    """Limits change for connected users at once: lower ones end nobody."""
    client = ruled.bus.client(b"a", b"b", user=OTHER_USER)
    ruled.set_limits(f"users = [{UID}]\nclients = 1\npatterns = 1")
    packet = client.msg(b"a")
    assert client.recv() == packet
    assert crowd(UID, hold=1).served == 0
    ruled.set_limits(f"users = [{UID}]\nclients = 2\npatterns = 3")
    assert crowd(UID, hold=2).served == 1
    client.sub(b"c")
    assert client.sync() == []
    client.sub(b"d")
    assert client.has_ended()


def test_root_is_exempt(ruled, crowd):
    """A table that names root has no effect, and the log says so."""
    ruled.set_limits("users = [0]\nclients = 1\npatterns = 1\nmemory = 65536\naccepts = 1")
    ruled.bus.wait_log(r"clients = 1, policy .*/p.toml:2 has no effect, as root and")
    assert crowd(0, hold=20).served == 20
    assert ruled.bus.client(b"a", b"b").sync() == []


def test_sbus_users(ruled):
    """``sbus users`` shows what each user takes of its share, where the limits come from, and what was denied."""
    ruled.set_limits(f"users = [{UID}]\npatterns = 3\nmemory = 65536")
    client = ruled.bus.client(b"a", b"b", user=OTHER_USER)
    client.send(b"CMSG denied/on")
    client.sub(b"!/cred/1/2/3/x")
    client.sync()
    command = [sys.executable, "-m", "sbus.cli", "users", "--socket", str(ruled.bus.address)]
    head, *lines = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=True
    ).stdout.splitlines()
    assert head.split()[:7] == ["uid", "name", "clients", "patterns", "memory", "connects", "queues"]
    assert head.split()[7:] == ["queued", "denied", "limits"]
    mine = next(line for line in lines if line.split()[0] == str(UID))
    where = f"policy {ruled.file}:2"
    pattern = rf"1 of 256 +2 of 3 +7\.\d KiB of 64\.0 KiB +\d+, 200/s +0 +0 B +1  patterns: {where}, memory: {where}"
    assert re.search(pattern, mine)
    root = next(line for line in lines if line.split()[0] == "0")
    assert root.endswith("none")
