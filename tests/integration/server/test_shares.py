"""Shares by user over real sockets, with real UIDs: no user takes all of a bus from the others."""

from __future__ import annotations

import contextlib
import json
import pwd
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server.test_admin import ask, got
from tests.support.harness import OTHER_USER, THIRD_USER, TIMEOUT, Bus, name_of

_PROGRAM = """
import json, os, resource, select, socket, sys, time
uid, name, count, seconds = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)

def connect():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(name)
    return sock

began = time.monotonic()
if count:
    held, served, got = [], 0, 0
    for _ in range(count):
        sock = connect()
        try:
            sock.send(b"CMSG !/cred/whoami")
            if sock.recv(100):
                served += 1
                held.append(sock)
        except (BrokenPipeError, ConnectionResetError):
            pass
    print(json.dumps({"served": served, "seconds": time.monotonic() - began}), flush=True)
    sys.stdin.read()
else:
    print(json.dumps({}), flush=True)
    while time.monotonic() < began + seconds:
        sock = connect()
        try:
            sock.send(b"JUNK" * 100)
        except (BrokenPipeError, ConnectionResetError):
            pass
        sock.close()
"""


class Crowd:
    """A process of another user: it holds as many connections as it gets, or connects and leaves without a pause.

    :ivar served: the connections that it got.
    :ivar seconds: the time that they took.
    """

    def __init__(self, bus: Bus, uid: int, *, hold: int = 0, seconds: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(uid), name_of(bus.address).hex(), str(hold), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.served, self.seconds = report.get("served", 0), report.get("seconds", 0.0)

    def leave(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def crowd(as_root: None) -> Iterator[Any]:
    """Start crowds that end with the test: ``crowd(bus, uid, hold=10)``."""
    mine: list[Crowd] = []

    def start(bus: Bus, uid: int, **options: Any) -> Crowd:
        mine.append(Crowd(bus, uid, **options))
        return mine[-1]

    yield start
    for each in mine:
        each.leave()


def is_served(bus: Bus, user: tuple[int, int] | None = None) -> bool:
    """Whether a new client gets an answer."""
    client = bus.client(user=user)
    try:
        return client.sync() == []
    except (AssertionError, BrokenPipeError, ConnectionResetError):
        return False


def served_soon(bus: Bus, user: tuple[int, int]) -> bool:
    """Whether a client is served within the time limit: the server may still have to notice that others have left."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if is_served(bus, user):
            return True
    return False


def test_clients_of_one_user(as_root, bus):
    """A user's fourth of three clients is closed without a byte, and logged; others, and root, are not concerned."""
    started = bus("--mode=0777", "--user-clients=3")
    clients = [started.client(b"k", user=OTHER_USER) for _ in range(3)]
    refused = started.client(user=OTHER_USER)
    assert refused.rest() == []
    started.wait_log(rf"refused a connection from pid {refused.pid} uid 12001 .*: its user has .*\(--user-clients=3\)")
    assert is_served(started, THIRD_USER)
    assert [is_served(started) for _ in range(5)] == [True] * 5
    packet = clients[0].msg(b"k")
    assert [client.recv() for client in clients] == [packet] * 3
    clients.pop().close()
    assert served_soon(started, OTHER_USER)


def test_connections_a_second(bus, crowd):
    """A user gets the burst and what the rate allows, and the next connections are closed; root gets all."""
    started = bus("--mode=0777", "--user-accepts=10", "--user-clients=1000")
    some = crowd(started, OTHER_USER[0], hold=100)
    assert 50 <= some.served <= 50 + 10 * some.seconds + 1
    started.wait_log(r"refused a connection from pid \d+ uid 12001 .*: its user connects .*\(--user-accepts=10\)")
    assert is_served(started, THIRD_USER)
    assert crowd(started, 0, hold=100).served == 100


def test_reconnecting_does_not_help(bus, crowd):
    """A user who has left finds the rate as it was, and is served again when it allows."""
    started = bus("--mode=0777", "--user-accepts=2")
    began = time.monotonic()
    some = crowd(started, OTHER_USER[0], hold=20)
    assert some.served >= 10
    some.leave()
    again = crowd(started, OTHER_USER[0], hold=20)
    assert some.served + again.served <= 10 + 2 * (time.monotonic() - began) + 1
    assert served_soon(started, OTHER_USER)


def test_patterns_of_one_user(as_root, bus):
    """The subscription past a user's patterns ends that client alone; the log names the limit and its option."""
    started = bus("--mode=0777", "--user-patterns=10")
    first = started.client(*(b"first/%d" % n for n in range(6)), user=OTHER_USER)
    second = started.client(*(b"second/%d" % n for n in range(4)), user=OTHER_USER)
    root = started.client(*(b"root/%d" % n for n in range(20)))
    second.sub(b"one too many")
    assert second.has_ended()
    started.wait_log(r"violation by client 2, .*: more patterns than .* one user \(--user-patterns=10\)")
    started.wait_log("client 2 disconnected: .*: the clients of its user together went beyond a limit")
    first.sub(*(b"more/%d" % n for n in range(4)))
    assert first.sync() == []
    assert root.sync() == []


def test_the_last_clients(bus, crowd):
    """A user who takes all clients leaves a reserve, and each user without a client gets one of it."""
    started = bus("--mode=0777", "--max-clients=40", "--user-clients=40")
    assert crowd(started, OTHER_USER[0], hold=40).served == 30
    started.wait_log("refused .* uid 12001 .*: its user has a client, and the last places are kept")
    assert [crowd(started, uid, hold=2).served for uid in range(13_000, 13_010)] == [1] * 10
    assert crowd(started, 13_010, hold=1).served == 0
    started.wait_log("refused .* uid 13010 .*: the bus.* has reached its limit of clients")


def test_the_last_descriptors(bus, crowd):
    """A user who takes all descriptors leaves the reserve: users without a client are served at once."""
    started = bus("--mode=0777", "--user-clients=1000")
    listener = started.client(b"k", user=THIRD_USER)
    limit = len(started.descriptors()) + 300
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (limit, limit))
    some = crowd(started, OTHER_USER[0], hold=400)
    kept = limit // 3
    assert 300 - kept - 2 <= some.served <= 300 - kept
    assert kept <= limit - len(started.descriptors()) <= kept + 2
    before = time.monotonic()
    assert [crowd(started, uid, hold=2).served for uid in range(13_000, 13_005)] == [1] * 5
    assert time.monotonic() - before < TIMEOUT
    assert is_served(started), "root"
    packet = listener.msg(b"k")
    assert listener.recv() == packet
    assert "Cannot accept" not in started.log


def test_clients_of_users_by_default_and_by_name(bus, crowd, directory):
    """By default a user gets 256 clients, and one that is named its own number; status, users and the log say which."""
    admin = f"{directory}/admin"
    options = (f"--user-clients={THIRD_USER[0]}=300", "--user-clients=daemon=2", f"--admin={admin}")
    started = bus("--mode=0777", *options)
    named = pwd.getpwnam("daemon").pw_uid
    started.wait_log(rf"a user 256 clients \(UID {named} 2\) \(UID {THIRD_USER[0]} 300\), ")
    assert crowd(started, OTHER_USER[0], hold=260).served == 256
    started.wait_log(r"refused a connection from .* uid 12001 .*: its user has .* \(--user-clients=256\)")
    assert crowd(started, THIRD_USER[0], hold=301).served == 300
    started.wait_log(rf"refused .* uid {THIRD_USER[0]} .*: its user has .* \(--user-clients={THIRD_USER[0]}=300\)")
    assert crowd(started, named, hold=3).served == 2
    assert crowd(started, 0, hold=301).served == 301
    assert got(admin, "/v1/status")["limits_per_user"]["clients"] == 256
    assert got(admin, "/v1/status")["limits_per_user"]["clients_of"] == {str(named): 2, str(THIRD_USER[0]): 300}
    most = {user["uid"]: user["clients_limit"] for user in got(admin, "/v1/users")["users"]}
    assert most == {0: None, OTHER_USER[0]: 256, THIRD_USER[0]: 300, named: 2}
    assert re.search(rb'sbus_users_at_limit{[^}]*limit="clients"} 3\.0', ask(admin, "/metrics")[1])


@pytest.mark.parametrize("option", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_subordinate_uids(as_root, bus, directory, option):
    """With --subuid-as-owner the UIDs of a range share the limits of its owner; without it each has its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace, in which /etc/subuid could be another file")
    file = directory / "subuid"
    file.write_text("12001:200000:1000\nbad line\n")
    mount = 'mount --bind "$0" /etc/subuid && exec "$@"'
    started = bus(
        "--mode=0777",
        "--user-clients=1",
        "--user-clients=12001=2",
        "--user-clients=200000=9",
        *(["--subuid-as-owner"] if option else []),
        before=["unshare", "-m", "sh", "-c", mount, file],
    )
    ignored = "--user-clients=200000=9 has no effect, as UID 200000 counts as 12001 (--subuid-as-owner): name UID 12001"
    if option:
        started.wait_log(re.escape(ignored))  # it comes behind the line that says where the bus listens
    assert (ignored in started.log) is option
    clients = [started.client(user=(200_000, 5)), started.client(user=OTHER_USER)]
    assert [client.sync() for client in clients] == [[], []]
    assert is_served(started, (200_999, 5)) is not option
    assert is_served(started, (201_000, 5))
    assert ("/etc/subuid, line 2 ('bad line')" in started.log) is option
    clients[0].sub(clients[0].credentials + b"/x")
    assert clients[0].sync() == [], "credentials are the kernel's"
    if option:
        file.write_text("12001:300000:1000\n")
        assert served_soon(started, (200_999, 5))


@pytest.mark.parametrize("connectors", [1, 12])
def test_a_storm(bus, crowd, connectors):
    """While processes of a user connect and leave without a pause, others talk and connect, and SIGTERM works."""
    started = bus("--mode=0777", "--user-accepts=20")
    talker = started.client(b"talk", user=THIRD_USER)
    for _ in range(connectors):
        crowd(started, OTHER_USER[0], seconds=2 * TIMEOUT)
    longest = 0.0
    for number in range(200):
        began = time.monotonic()
        packet = talker.msg(b"talk", b"%d" % number)
        assert talker.recv() == packet
        longest = max(longest, time.monotonic() - began)
    assert longest < 1
    assert is_served(started, THIRD_USER)
    assert is_served(started, (13_000, 13_000))
    began = time.monotonic()
    assert started.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 5
    with contextlib.suppress(ConnectionResetError):
        assert talker.has_ended()
