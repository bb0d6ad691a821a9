"""Shares of single users over real sockets, with real UIDs: the n-th is allowed, and the next one refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.server.bus.admission import BURST_SECONDS
from sbus.server.bus.memory import CLIENT_MEMORY, pattern_memory
from tests.integration.server.test_shares import Crowd
from tests.support.harness import OTHER_USER, THIRD_USER, Client, Process

UID = OTHER_USER[0]
APPLICATION = """
import json, os
from types import SimpleNamespace
from twisted.application.service import Application
from twisted.internet import reactor
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.core.observers import Observer
from sbus.server.run.service import BusService

class Operator(Observer):
    def published(self, client, key, payload):
        if key == b"limits":
            bus.registry.users.set_limits([table(**each) for each in json.loads(payload)])

def table(users, clients=None, patterns=None, memory=None, accepts=None, where="p.toml:1"):
    return SimpleNamespace(
        users=frozenset(users), clients=clients, patterns=patterns, memory=memory, accepts=accepts, where=where
    )

application = Application("bus")
bus = BusService(SeqpacketServerEndpoint(reactor, os.path.abspath("bus"), mode=0o777), observers=[Operator()])
bus.setServiceParent(application)
"""


class Host(Process):
    """A program with a bus in it, whose limits root can set with a message.

    :ivar address: the path of the bus.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.address = directory / "bus"
        self.clients: list[Client] = []
        super().__init__(directory, arguments)

    def client(self, *patterns: bytes, user: tuple[int, int] | None = None) -> Client:
        self.clients.append(Client(self.address, user=user))
        if patterns:
            self.clients[-1].sub(*patterns)
            assert self.clients[-1].sync() == []
        return self.clients[-1]

    def ensure_gone(self) -> None:
        for client in self.clients:
            client.close()
        super().ensure_gone()

    def set_limits(self, *tables: dict[str, Any]) -> None:
        root = self.client()
        root.msg(b"limits", json.dumps(tables).encode())
        assert root.sync() == []


@pytest.fixture
def host(as_root, spawn, directory) -> Host:
    """A bus whose limits can be set."""
    (directory / "app.tac").write_text(APPLICATION)
    process: Host = spawn(Host, directory, "-n", "--pidfile=", "-y", "app.tac")
    process.wait_log("sbus listens on")
    return process


@pytest.fixture
def crowd(host) -> Iterator[Any]:
    """Start crowds that end with the test: ``crowd(uid, hold=10)``."""
    mine: list[Crowd] = []

    def start(uid: int, **options: Any) -> Crowd:
        mine.append(Crowd(host, uid, **options))
        return mine[-1]

    yield start
    for each in mine:
        each.leave()


def test_clients(host, crowd):
    """The user who is named gets n clients; one more is closed, and the log names the table; others get the default."""
    host.set_limits({"users": [UID], "clients": 3})
    assert crowd(UID, hold=4).served == 3
    host.wait_log(rf"refused .* uid {UID} .*: its user has .* \(clients = 3, policy p.toml:1\)")
    assert crowd(THIRD_USER[0], hold=5).served == 5


def test_patterns(host):
    """The user who is named gets n patterns; one more ends its client, and the log names the table."""
    host.set_limits({"users": [UID], "patterns": 2}, {"users": [UID], "patterns": 3, "where": "q.toml:9"})
    one, two = host.client(b"a", b"b", user=OTHER_USER), host.client(b"c", user=OTHER_USER)
    other = host.client(b"a", b"b", b"c", b"d", user=THIRD_USER)
    two.sub(b"d")
    assert two.has_ended()
    host.wait_log(r"violation by client \d+, .*: more patterns than .* \(patterns = 3, policy q.toml:9\)")
    assert (one.sync(), other.sync()) == ([], [])


def test_memory(host):
    """The user who is named may hold n bytes; the pattern that needs one more ends its client, and the log says so."""
    need = CLIENT_MEMORY + sum(pattern_memory(pattern, b"/", None) for pattern in (b"a", b"b"))
    host.set_limits({"users": [UID], "memory": need})
    client = host.client(b"a", b"b", user=OTHER_USER)
    host.set_limits({"users": [UID], "memory": need - 1})
    client.unsub(b"b")
    assert client.sync() == []
    client.sub(b"b")
    assert client.has_ended()
    host.wait_log(rf"violation by client \d+, .*: .* as much memory .* \(memory = {need - 1}, policy p.toml:1\)")
    assert host.client(b"a", b"b", b"c", user=THIRD_USER).sync() == []


def test_accepts(host, crowd):
    """The user who is named connects five seconds' worth of times at once, and what comes back meanwhile."""
    host.set_limits({"users": [UID], "accepts": 2})
    burst = 2 * BURST_SECONDS
    some = crowd(UID, hold=burst + 10)
    assert burst <= some.served <= burst + 2 * some.seconds + 1
    host.wait_log(rf"refused .* uid {UID} .*: its user connects more often .* \(accepts = 2, policy p.toml:1\)")
    assert crowd(THIRD_USER[0], hold=burst + 10).served == burst + 10


def test_a_new_policy(host, crowd):
    """Limits change for connected users at once: lower ones end nobody, and hold for the next client."""
    client = host.client(b"a", b"b", user=OTHER_USER)
    host.set_limits({"users": [UID], "clients": 1, "patterns": 1})
    packet = client.msg(b"a")
    assert client.recv() == packet
    assert crowd(UID, hold=1).served == 0
    host.set_limits({"users": [UID], "clients": 2, "patterns": 3})
    assert crowd(UID, hold=2).served == 1
    client.sub(b"c")
    assert client.sync() == []
    client.sub(b"d")
    assert client.has_ended()


def test_root_is_exempt(host, crowd):
    """A table that names root has no effect."""
    host.set_limits({"users": [0], "clients": 1, "patterns": 1, "memory": 1, "accepts": 1})
    assert crowd(0, hold=20).served == 20
    assert host.client(b"a", b"b").sync() == []
