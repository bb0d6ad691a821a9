"""The bridge to NATS as a process, with real buses and real nats-servers: what crosses, and what is counted."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

import nats

from sbus.cli.admin.connection import Admin
from sbus.cli.options import Target
from sbus.link.nats.state import has_bridge
from sbus.link.subjects import pattern_subject, subject
from sbus.protocol.keys import matches_open
from tests.support import servers
from tests.support.harness import TIMEOUT, Bus, Client, Process
from tests.support.nats import Bridge, NatsServer, free_ports, nats_matches
from tests.support.waiting import paused

Spawn = Callable[..., Any]
P = TypeVar("P", bound=Process)


_OPTIONS = {
    "a": ("--out=", "--in=", "--confirm-time=2s", "--queue=1M"),
    "b": ("--out=", "--in=", "--confirm-time=2s", "--queue=1M"),
    "c": ("--out=p/", "--prefix=hosts/c", "--in=t/", "--in=u/*", "--metrics-file=metrics"),
}
"""The options of the bridge of each host."""


class Joined:
    """Hosts that tests share, each with a bus and a bridge.

    :ivar server: the nats-server that they are joined over, the only one of its cluster.
    :ivar routes: the address of that cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buses: dict[str, Bus] = {}
        self.bridges: dict[str, Bridge] = {}
        self._started: list[Process] = []

    def start_all(self) -> None:
        """Start nats-server, and on each host a bus and a bridge."""
        self.routes = f"nats://127.0.0.1:{free_ports(1)[0]}"
        self.server = self.start(NatsServer(self.folder, "--cluster_name", "c", "--cluster", self.routes))
        self.server.wait_started()
        for name in _OPTIONS:
            (self.folder / name).mkdir()
            self.buses[name] = self.start(Bus(self.folder / name, f"--admin={self.folder}/{name}/admin"))
            self.buses[name].wait_started()
            self.bridges[name] = self.bridge(name)
        for bridge in self.bridges.values():
            bridge.wait_joined()

    def start(self, process: P) -> P:
        self._started.append(process)
        servers._started.append(process)
        return process

    def bridge(self, name: str) -> Bridge:
        return self.start(Bridge(self.folder / name, self.buses[name].address, name, self.server.url, *_OPTIONS[name]))

    def wait_link_up(self, name: str, is_up: bool) -> None:
        """Wait until the metrics of a bus say that its bridge is up, or down; nothing announces it."""
        admin = Admin(Target(), str(self.folder / name / "admin"))
        deadline = time.monotonic() + TIMEOUT
        line = rf"^sbus_link_up\{{.*\}} {float(is_up)}$"
        while not re.search(line, found := admin._ask("GET", "/metrics", {}, TIMEOUT).read().decode(), re.MULTILINE):
            assert time.monotonic() < deadline, found

    def replace_server(self) -> None:
        self.server = self.start(self.server.again()).wait_started()

    def client(self, name: str, *patterns: bytes) -> Client:
        return self.buses[name].client(*patterns)

    def end(self) -> None:
        for process in self._started:
            process.ensure_gone()
            servers._started.remove(process)
        shutil.rmtree(self.folder)


@contextmanager
def run_joined() -> Iterator[Joined]:
    """Start joined hosts in a new directory, and end them."""
    joined = Joined(servers._new_directory())
    try:
        joined.start_all()
        yield joined
    finally:
        joined.end()


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    with run_joined() as joined:
        yield joined


@pytest.fixture
def hosts(joined: Joined) -> Iterator[Joined]:
    """The shared hosts, without clients at the beginning; NATS may still have the subscriptions of earlier ones."""
    yield joined
    for bus in joined.buses.values():
        bus.disconnect()


class Difference:
    """What the counters of a bridge have grown by."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._before = bridge, bridge.settled()

    def wait(self, **expected: int) -> dict[str, int]:
        """Wait until they have grown by these values; return what they have grown by."""
        before = self._before
        now = self._bridge.wait_counters(**{name: before.get(name, 0) + by for name, by in expected.items()})
        return {name: by for name in now if (by := now[name] - before.get(name, 0))}


_KEYS = [
    b"a",
    b"a/b",
    b"a/b/c",
    b"a//b/",
    b"",
    b"/",
    b"ab/c",
    b"a.b/c d",
    b"a/*",
    b"a/>",
    b"$SYS/x",
    b"\xff\xfe/\r\n",
    b"x" * 400 + b"/y",
    b"/".join([b"s"] * 14),
    b"/".join([b"s"] * 15),
    b"/".join([b"s"] * 40),
    b"=/=+/~",
]
_PATTERNS = [
    *_KEYS,
    b"a/",
    b"a*",
    b"*/b",
    b"a*/*",
    b"x*/y",
    b"/".join([b"s"] * 13) + b"/",
    b"/".join([b"*"] * 15),
    b"/".join([b"s"] * 20) + b"/",
]


def test_a_real_server_finds_what_patterns_find(joined: Joined) -> None:
    """What a pattern matches, nats-server delivers to the mapped subscription."""

    async def ask() -> set[tuple[bytes, bytes]]:
        client = await nats.connect(joined.server.url)
        found: set[tuple[bytes, bytes]] = set()
        for pattern in _PATTERNS:
            name = pattern_subject("sample", pattern)
            if name is None:
                continue

            async def note(message: Any, pattern: bytes = pattern) -> None:
                found.add((pattern, message.data))

            await client.subscribe(name, cb=note)
        await client.flush()
        for key in _KEYS:
            await client.publish(subject("sample", key), key)
        await asyncio.sleep(0)
        await client.drain()
        return found

    found = asyncio.run(ask())
    pairs = [(pattern, key) for pattern in _PATTERNS for key in _KEYS]
    assert found >= {(pattern, key) for pattern, key in pairs if matches_open(pattern, key)}
    assert found == {
        (pattern, key)
        for pattern, key in pairs
        if nats_matches(pattern_subject("sample", pattern) or "", subject("sample", key))
    }


def test_what_is_no_message_of_a_bridge_is_dropped(hosts: Joined) -> None:
    """Forged messages never reach the bus: bad headers, other subjects, secret keys, control messages."""
    client, before = hosts.client("c", b""), Difference(hosts.bridges["c"])
    hosts.server.wait_subscriptions("sbus c", "sbus.t.>", "sbus.u.*")
    good = {"Sbus-Origin": "0" * 32 + " evil", "Sbus-Seq": "1.1"}

    async def forge() -> None:
        evil = await nats.connect(hosts.server.url)
        for name, packet, headers in [
            ("sbus.t.x", b"MSG t/x\x00no headers", None),
            ("sbus.t.x", b"MSG t/x\x00no number", {"Sbus-Origin": "0" * 32 + " evil"}),
            ("sbus.t.x", b"MSG t/x\x00bad number", {**good, "Sbus-Seq": "1.x"}),
            ("sbus.t.x", b"MSG t/y\x00other subject", good),
            ("sbus.t.x", b"MSG !/cred/0/0/1/t\x00secret", good),
            (subject("sbus", b"t/!/x"), b"MSG t/!/x\x00reserved", good),
            ("sbus.t.x", b"CMSG bundle/on", good),
            ("sbus.t.x", b"BNDL\x01\x00\x00\x00x", good),
            ("sbus.t.x", b"MSG t/x", good),
            ("sbus.t.x", b"", good),
            ("sbus.t.x", b"MSG t/x\x00good", {"Other": "y", **good}),
            ("sbus.t.x", b"MSG t/x\x00double", good),
            ("sbus.t.x", b"MSG t/x\x00gap", {**good, "Sbus-Seq": "1.5"}),
            ("sbus.t.x", b"MSG t/x\x00" + b"x" * 500_000, {**good, "Sbus-Seq": "1.6"}),
        ]:
            await evil.publish(name, packet, headers=headers)
        await evil.drain()

    asyncio.run(forge())
    assert client.receive(2) == [b"MSG t/x\x00good", b"MSG t/x\x00gap"]
    assert before.wait(received=14) == {
        "received": 14,
        "forged": 10,
        "doubled": 1,
        "missed": 3,
        "in_too_large": 1,
        "published": 2,
    }
    assert not client.has_input()


def test_the_bridge_is_the_sender(hosts: Joined) -> None:
    """To receivers that ask who publishes, what comes from other hosts is the bridge's; a header claims nothing."""
    client = hosts.client("c")
    client.cmsg(b"sender/on")
    assert client.recv() == b"CMSG sender/on\0"
    client.sub(b"t/x")
    client.sync()
    hosts.server.wait_subscriptions("sbus c", "sbus.t.x")
    hosts.client("a").msg(b"t/x", b"from a client of another host")

    async def forge() -> None:
        evil = await nats.connect(hosts.server.url)
        headers = {"Sbus-Origin": "1" * 32 + " evil", "Sbus-Seq": "1.1", "Sbus-Sender": "1 !/cred/0/0/1"}
        await evil.publish("sbus.t.x", b"MSG t/x\0forged", headers=headers)
        await evil.drain()

    name, _ = client.receive(2)
    asyncio.run(forge())
    assert re.fullmatch(rb"CMSG sender\0\d+ !/cred/\d+/\d+/%d" % hosts.bridges["c"].pid, name)
    assert client.recv() == b"MSG t/x\0forged"


def test_messages_cross_byte_for_byte_and_once(hosts: Joined) -> None:
    """With all keys in and out, each message arrives once on every host; nothing echoes."""
    clients = [hosts.client(name, b"") for name in "ab"]
    before = {name: Difference(hosts.bridges[name]) for name in "ab"}
    for name in "ab":
        hosts.server.wait_subscriptions(f"sbus {name}", "sbus.>")
    sent = [clients[0].msg(key, b"\0\xff payload") for key in _KEYS]
    sent.append(clients[0].msg(b"large", b"x" * 100_000))
    for client in clients:
        assert client.receive(len(sent)) == sent
    back = clients[1].msg(b"back", b"again")
    for client in clients:
        assert client.receive(1) == [back]
        assert not client.has_input()
    count = len(sent)
    assert before["b"].wait(published=count, confirmed=1)["received"] == count
    assert before["a"].wait(confirmed=count, published=1) == {
        "taken": count,
        "sent": count,
        "confirmed": count,
        "received": 1,
        "published": 1,
    }


def test_only_what_clients_want_is_subscribed_to(hosts: Joined) -> None:
    """The subscriptions on NATS are the intersections of what clients want with --in; covered ones are left out."""
    server, client = hosts.server, hosts.client("c", b"t/x", b"nothing/", b"u/y")
    server.wait_subscriptions("sbus c", "sbus.t.x", "sbus.u.y")
    client.sub(b"*/x")
    server.wait_subscriptions("sbus c", "sbus.t.x", "sbus.u.y", "sbus.u.x")
    client.sub(b"")
    server.wait_subscriptions("sbus c", "sbus.t.>", "sbus.u.*", exactly=True)
    client.close()
    server.wait_subscriptions("sbus c", exactly=True)


def test_a_prefix_stands_in_front_of_keys_that_leave(hosts: Joined) -> None:
    """With --prefix a message arrives under a longer key; only keys that --out lists leave, and no secret ones."""
    client, publisher = hosts.client("a", b""), hosts.client("c")
    hosts.server.wait_subscriptions("sbus a", "sbus.>")
    publisher.msg(b"u/no")
    publisher.msg(b"p/yes", b"1")
    publisher.msg(b"!/cred/0/0/%d/p/" % publisher.pid, b"secret")
    publisher.msg(b"p/also", b"2")
    assert client.receive(2) == [b"MSG hosts/c/p/yes\x001", b"MSG hosts/c/p/also\x002"]
    assert not client.has_input()


def tally(client: Client, key: bytes = b"t/x") -> list[int]:
    """Return the numbers that a subscriber got, up to the message ``end``."""
    numbers = []
    while (packet := client.recv()) != b"MSG " + key + b"\0end":
        numbers.append(int(packet.rpartition(b"\0")[2]))
    return numbers


def test_losses_are_counted_to_the_message(hosts: Joined) -> None:
    """nats-server is killed, and stopped and killed: published = arrived + missed + dropped, in order, none twice."""
    out, come = hosts.bridges["a"], hosts.bridges["b"]
    client, publisher = hosts.client("b", b"t/x"), hosts.client("a")
    before_out, before_come = Difference(out), Difference(come)
    joins = len(re.findall("joined NATS", out.log))
    count = waited = 0

    def publish(many: int) -> None:
        nonlocal count
        for _ in range(many):
            publisher.msg(b"t/x", b"%d" % count)
            count += 1

    for number in range(3):
        hosts.server.wait_subscriptions("sbus b", "sbus.t.x")
        publish(1)
        before_out.wait(taken=count, out=0)
        hosts.wait_link_up("a", True)
        publish(2000)
        if number == 1:
            hosts.server.kill(signal.SIGSTOP)
            publish(20_000)  # more than may wait
            out.wait_log("has not answered for 2 seconds")
        hosts.server.kill_now()
        hosts.wait_link_up("a", False)
        publish(1000)
        waited += before_out.wait(taken=count).get("out", 0)
        hosts.replace_server()
        for bridge in hosts.bridges.values():
            bridge.wait_joined(joins + 1 + number)
    hosts.server.wait_subscriptions("sbus b", "sbus.t.x")
    publisher.msg(b"t/x", b"end")
    numbers = tally(client)
    sent = before_out.wait(taken=count + 1, out=0)
    came = before_come.wait(published=len(numbers) + 1)
    assert numbers == sorted(set(numbers))
    assert count == len(numbers) + sent.get("out_full", 0) + came.get("missed", 0)
    assert sent["out_full"] > 0
    assert came.get("missed", 0) <= sent["unconfirmed"] + waited, "what waited is missed if the others join later"
    assert "may be lost" in out.log
    out.wait_log("messages were lost: ")


def test_a_bus_that_stands_still_costs_what_does_not_fit(hosts: Joined) -> None:
    """While a bus takes nothing, its bridge keeps what --queue holds; the rest is dropped there, and counted."""
    client, publisher = hosts.client("b", b"t/x"), hosts.client("a")
    hosts.server.wait_subscriptions("sbus b", "sbus.t.x")
    out, come = Difference(hosts.bridges["a"]), Difference(hosts.bridges["b"])
    with paused(hosts.buses["b"].pid):
        for count in range(1000, 11_000, 1000):
            for number in range(count - 1000, count):
                publisher.msg(b"t/x", b"%0500d" % number)
            out.wait(confirmed=count)
        come.wait(received=count)
    before = come.wait(come=0)
    publisher.msg(b"t/x", b"end")
    numbers = tally(client)
    assert numbers == sorted(set(numbers))
    assert before["in_full"] > 0
    assert count == len(numbers) + before["in_full"]


def test_a_bus_has_one_bridge_and_its_successor_knows_what_was_lost(hosts: Joined) -> None:
    """A second bridge is refused; the one after a killed one says how many messages that may have lost."""
    bus, bridge = hosts.buses["c"], hosts.bridges["c"]
    assert has_bridge(str(bus.address))
    second = hosts.bridge("c")
    assert second.wait() == 1
    assert "another bridge to NATS serves this bus" in second.log
    before = Difference(bridge)
    with paused(hosts.server.pid):
        client = bus.client()
        for number in range(100):
            client.msg(b"p/x", b"%d" % number)
        found = before.wait(taken=100)
        bridge.kill(signal.SIGKILL)
        bridge.wait()
    assert not has_bridge(str(bus.address))
    assert "confirmed" not in found
    hosts.bridges["c"] = hosts.bridge("c").wait_joined()
    metrics = (hosts.folder / "c" / "metrics").read_text()
    assert f'sbus_nats_messages_total{{bus="{bus.address}",kind="missed"}} 0.0' in metrics
    assert f'sbus_nats_connected{{bus="{bus.address}"}} ' in metrics
    hosts.bridges["c"].wait_log("killed: up to 100 messages to NATS and 0 to the bus were lost")


def test_the_last_metrics(hosts: Joined) -> None:
    """When a bridge has stopped, its file has all that it has carried, and says that it is not connected."""
    bus, bridge = hosts.buses["c"], hosts.bridges["c"]
    before = Difference(bridge)
    client = bus.client()
    for number in range(5):
        client.msg(b"p/x", b"%d" % number)
    before.wait(taken=5)
    assert bridge.stop() == 0
    metrics = (hosts.folder / "c" / "metrics").read_text()
    assert f'sbus_nats_messages_total{{bus="{bus.address}",kind="taken"}} 5.0' in metrics
    assert f'sbus_nats_connected{{bus="{bus.address}"}} 0.0' in metrics
    hosts.bridges["c"] = hosts.bridge("c").wait_joined()


def test_a_bus_may_restart(hosts: Joined) -> None:
    """When a bus comes back, its bridge connects again, and follows what the new clients want."""
    bridge = hosts.bridges["c"]
    hosts.buses["c"].kill(signal.SIGKILL)
    hosts.buses["c"].wait()
    hosts.buses["c"] = hosts.start(Bus(hosts.folder / "c", "--reuse")).wait_started()
    bridge.wait_log("the bus was away: ")
    client, other = hosts.client("c", b"u/new"), hosts.client("a", b"hosts/c/")
    hosts.server.wait_subscriptions("sbus c", "sbus.u.new")
    other.msg(b"u/new", b"1")
    assert client.recv() == b"MSG u/new\x001"
    client.msg(b"p/new", b"2")
    assert other.recv() == b"MSG hosts/c/p/new\x002"


def test_a_bus_has_a_master_or_a_bridge_and_not_both(hosts: Joined, spawn: Spawn, directory: Path) -> None:
    """A bridge refuses a bus with a master, with both names; a bus with a bridge refuses a link to a master."""
    master = hosts.buses["c"]
    below = spawn(Bus, directory, f"--upstream={master.address}", "--upstream-out=t/", "--name=below").wait_started()
    below.wait_log("link: linked to")
    bridge = spawn(Bridge, directory, below.address, "x", hosts.server.url, "--out=t/")
    assert bridge.wait() == 1
    assert f"the bus below has a master, {master.address}: " in bridge.log
    options = [f"--socket={hosts.buses['a'].address}", f"--upstream={master.address}"]
    link = spawn(Process, directory, ["-n", "--pidfile=", "sbus-link", *options])
    link.wait_log("this bus has a link to another one, or a bridge: there can be one")
    assert hosts.bridges["a"].is_running()


def test_a_bridge_that_may_not_see_what_it_carries(hosts: Joined, spawn: Spawn, directory: Path) -> None:
    """A bridge ends with the rule that refuses one of its patterns, instead of carrying nothing."""
    policy = directory / "policy.toml"
    policy.write_text('version = 1\n[[rule]]\nname = "no.reading"\ndeny_subscribe = ["t/"]\n')
    strict = spawn(Bus, directory, f"--policy={policy}").wait_started()
    bridge = spawn(Bridge, directory, strict.address, "x", hosts.server.url, "--out=t/", "--out=u/")
    assert bridge.wait() == 1
    assert "this client may not subscribe to 't/': the policy of the bus forbids it (rule: no.reading)" in bridge.log


def test_a_cluster_may_lose_members(hosts: Joined) -> None:
    """Bridges go on with other servers of a cluster, which they were not given and which came later."""
    cluster = [hosts.server]
    for port in free_ports(2):
        routes = ("--cluster", f"nats://127.0.0.1:{port}", "--routes", hosts.routes)
        cluster.append(hosts.start(NatsServer(hosts.folder, "--cluster_name", "c", *routes)).wait_started())
    for server in cluster:
        server.wait_routes(2)
    client, publisher = hosts.client("b", b"t/x"), hosts.client("a")
    out, come = Difference(hosts.bridges["a"]), Difference(hosts.bridges["b"])
    for lost in cluster[:2]:
        joins = {name: bridge.log.count("joined NATS") for name, bridge in hosts.bridges.items()}
        on_it = [name for name in "ab" if lost.has_client(f"sbus {name}")]
        lost.kill_now()
        for name in on_it:
            hosts.bridges[name].wait_joined(joins[name] + 1)
    cluster[2].wait_subscriptions("sbus b", "sbus.t.x")
    publisher.msg(b"t/x", b"1")
    assert client.recv() == b"MSG t/x\x001"
    out.wait(confirmed=1)
    assert "missed" not in come.wait(published=1)


def test_nats_that_permits_few_subscriptions(directory: Path, spawn: Spawn) -> None:
    """A user who wants more patterns than nats-server permits stops nobody: the listed ones are asked for whole."""
    (directory / "nats.conf").write_text("max_subscriptions: 20\n")
    server = spawn(NatsServer, directory, "-c", str(directory / "nats.conf")).wait_started()
    bus = spawn(Bus, directory).wait_started()
    bridge = spawn(Bridge, directory, bus.address, "a", server.url, "--out=", "--in=x/").wait_joined()
    good = bus.client(b"x/good")
    server.wait_subscriptions("sbus a", subject("sbus", b"x/good"))
    bus.client(*(b"x/%d" % number for number in range(40)))
    server.wait_subscriptions("sbus a", pattern_subject("sbus", b"x/"), exactly=True)
    bridge.wait_log("NATS permits fewer subscriptions")

    asyncio.run(_publish(server.url, b"x/good"))
    assert good.receive(1) == [b"MSG x/good\0hello"]


async def _publish(url: str, key: bytes) -> None:
    """Publish a message as the bridge of another host does."""
    client = await nats.connect(url)
    headers = {"Sbus-Origin": "0" * 32 + " other", "Sbus-Seq": "1.1"}
    await client.publish(subject("sbus", key), b"MSG %b\0hello" % key, headers=headers)
    await client.close()


def test_a_pattern_that_nats_does_not_permit_takes_no_other_along(directory: Path, spawn: Spawn) -> None:
    """A client that wants more than the bridge's user may subscribe to takes nothing from others.

    Not from those that want less, and not from those whose keys differ from its own in case.
    """
    (directory / "nats.conf").write_text(
        "authorization { users: [\n"
        '    { user: me, password: s3cret, permissions: { publish: "sbus.>", subscribe: "sbus.X.good" } }\n'
        "    { user: other, password: s3cret }\n"
        "] }\n"
    )
    (directory / "password").write_text("s3cret")
    server = spawn(NatsServer, directory, "-c", str(directory / "nats.conf")).wait_started()
    bus = spawn(Bus, directory).wait_started()
    login = ("--user=me", f"--password-file={directory}/password")
    bridge = spawn(Bridge, directory, bus.address, "a", server.url, "--out=", "--in=", *login).wait_joined()
    bus.client(b"X/")
    bridge.wait_log('permissions violation for subscription to "sbus.x.>"')
    good = bus.client(b"X/good")
    bus.client(b"x/good")
    bridge.wait_log('permissions violation for subscription to "sbus.x.good"')
    server.wait_subscriptions("sbus a", subject("sbus", b"X/good"), exactly=True)
    asyncio.run(_publish(server.url.replace("://", "://other:s3cret@"), b"X/good"))
    assert good.receive(1) == [b"MSG X/good\0hello"]


def test_what_nats_does_not_permit_is_counted(directory: Path, spawn: Spawn) -> None:
    """A message that nats-server refuses is a loss, though nats-server confirms it like any other."""
    (directory / "nats.conf").write_text(
        'authorization { users: [{ user: me, password: s3cret, permissions: { publish: "sbus.a.>" } }] }\n'
    )
    (directory / "password").write_text("s3cret")
    server = spawn(NatsServer, directory, "-c", str(directory / "nats.conf")).wait_started()
    bus = spawn(Bus, directory).wait_started()
    login = ("--user=me", f"--password-file={directory}/password")
    bridge = spawn(Bridge, directory, bus.address, "a", server.url, "--out=", *login).wait_joined()
    client = bus.client()
    for key in (b"a/x", b"b/x", b"b/x"):
        client.send(b"MSG %b\0" % key)
    counters = bridge.wait_counters(out_denied=2)
    assert counters["taken"] == 3
    bridge.wait_log("messages were lost: out_denied 2")
