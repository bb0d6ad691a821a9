"""The bridge to NATS as a process, with real buses and real nats-servers: what crosses, and what is counted."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("nats", reason="no nats-py: pip install 'sbusd[nats]'")

import nats

from sbus.link.nats.state import has_bridge
from sbus.link.subjects import pattern_subject, subject
from sbus.protocol.keys import matches_open
from tests.support import servers
from tests.support.harness import Bus, Client, Process
from tests.support.nats import Bridge, NatsServer, free_ports, nats_matches

directory, spawn = servers.directory, servers.spawn
Spawn = Callable[..., Any]
P = TypeVar("P", bound=Process)


class Joined:
    """Hosts that tests share: buses a, b, c and d, and bridges for the first three.

    :ivar server: the nats-server that they are joined over.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []
        self.server = self.start(NatsServer(folder))
        self.buses: dict[str, Bus] = {}
        for name in "abcd":
            (folder / name).mkdir()
            self.buses[name] = self.start(Bus(folder / name))
        for bus in self.buses.values():
            bus.wait_started()
        self.server.wait_started()
        self.bridges = {
            "a": self.bridge("a", "--out=", "--in=", "--confirm-time=2s", "--queue=1M"),
            "b": self.bridge("b", "--out=", "--in=", "--confirm-time=2s"),
            "c": self.bridge("c", "--out=p/", "--prefix=hosts/c", "--in=t/", "--in=u/*"),
        }
        for bridge in self.bridges.values():
            bridge.wait_joined()

    def start(self, process: P) -> P:
        self._started.append(process)
        servers._started.append(process)
        return process

    def bridge(self, name: str, *options: str, nats: str = "") -> Bridge:
        return self.start(
            Bridge(self._folder / name, self.buses[name].address, name, nats or self.server.url, *options)
        )

    def replace_server(self) -> None:
        self.server = self.start(self.server.again()).wait_started()

    def client(self, name: str, *patterns: bytes) -> Client:
        return self.buses[name].client(*patterns)

    def end(self) -> None:
        for process in self._started:
            process.ensure_gone()
            servers._started.remove(process)


@pytest.fixture(scope="module")
def joined() -> Iterator[Joined]:
    folder = servers._new_directory()
    joined = Joined(folder)
    yield joined
    joined.end()
    shutil.rmtree(folder)


@pytest.fixture
def hosts(joined: Joined) -> Iterator[Joined]:
    """The shared hosts, without clients at the beginning; NATS may still have the subscriptions of earlier ones."""
    yield joined
    for bus in joined.buses.values():
        bus.disconnect()


class Difference:
    """What the counters of a bridge have grown by."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._before = bridge, bridge.counters()

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
    count = 0

    def publish(many: int) -> None:
        nonlocal count
        for _ in range(many):
            publisher.msg(b"t/x", b"%d" % count)
            count += 1

    for number in range(3):
        hosts.server.wait_subscriptions("sbus b", "sbus.t.x")
        publish(1)
        before_out.wait(taken=count, out=0)
        publish(2000)
        if number == 1:
            hosts.server.kill(signal.SIGSTOP)
            publish(10_000)
            out.wait_log("has not answered for 2 seconds")
        hosts.server.kill_now()
        publish(1000)
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
    assert came.get("missed", 0) <= sent["unconfirmed"] + 3000
    assert "may be lost" in out.log
    out.wait_log("messages were lost: ")


def test_a_bus_has_one_bridge_and_its_successor_knows_what_was_lost(hosts: Joined) -> None:
    """A second bridge is refused; the one after a killed one says how many messages that may have lost."""
    bus = hosts.buses["d"]
    assert not has_bridge(str(bus.address))
    bridge = hosts.bridge("d", "--out=t/", "--realm=other").wait_joined()
    assert has_bridge(str(bus.address))
    second = hosts.bridge("d", "--out=t/")
    assert second.wait() == 1
    assert "another bridge to NATS serves this bus" in second.log
    hosts.server.kill(signal.SIGSTOP)
    try:
        client = bus.client()
        for number in range(100):
            client.msg(b"t/x", b"%d" % number)
        found = bridge.wait_counters(taken=100)
        bridge.kill(signal.SIGKILL)
        bridge.wait()
    finally:
        hosts.server.kill(signal.SIGCONT)
    assert not has_bridge(str(bus.address))
    assert "confirmed" not in found
    third = hosts.bridge("d", "--out=t/").wait_joined()
    third.wait_log("killed: up to 100 messages to NATS and 0 to the bus were lost")
    assert third.stop() == 0


def test_a_cluster_may_lose_members(hosts: Joined, spawn: Spawn, directory: Path) -> None:
    """Bridges go on with other servers of a cluster, which they were not given."""
    routes = free_ports(3)
    peers = ",".join(f"nats://127.0.0.1:{port}" for port in routes)
    cluster: list[NatsServer] = []
    for port in routes:
        options = ("--cluster_name", "c", "--cluster", f"nats://127.0.0.1:{port}", "--routes", peers)
        cluster.append(spawn(NatsServer, directory, *options))
    for server in cluster:
        server.wait_started()
    for server in cluster:
        server.wait_routes(2)
    out, come = (
        hosts.bridge(name, "--out=t/", "--in=t/", "--realm=c", f"--state={directory}/{name}", nats=server.url)
        for name, server in zip("ab", cluster, strict=False)
    )
    client, publisher = hosts.client("b", b"t/x"), hosts.client("a")
    out.wait_joined()
    come.wait_joined()
    cluster[1].wait_subscriptions("sbus b", "c.t.>")  # the other bridge of that bus wants everything
    cluster[0].kill_now()
    cluster[1].kill_now()
    out.wait_joined(2)
    come.wait_joined(2)
    cluster[2].wait_subscriptions("sbus b", "c.t.>")
    before = Difference(come)
    publisher.msg(b"t/x", b"1")
    before.wait(published=1)
    assert come.stop() == out.stop() == 0
    assert client.recv() == b"MSG t/x\x001"
