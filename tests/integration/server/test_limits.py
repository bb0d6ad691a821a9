"""Limits on what clients may ask for; and what happens when the process itself is at one."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.support.harness import SAME_USER, Client, goes_on


class TestClients:
    """--max-clients."""

    def test_one_too_many(self, bus):
        """A connection past the limit is accepted and closed, and logged; the others go on, and room comes back."""
        started = bus("--max-clients=3")
        clients = [started.client(b"limit") for _ in range(3)]
        refused = started.client(user=SAME_USER)
        assert refused.has_ended()
        who = f"pid {refused.pid} uid {refused.uid} gid {refused.gid}"
        started.wait_log(f"warn: refused a connection from {who}: the bus.* has reached its limit of clients")
        packet = clients[0].msg(b"limit")
        for client in clients:
            assert client.recv() == packet
        clients.pop().close()
        started.wait_log("client 3 disconnected")
        assert started.client().sync() == []

    def test_many(self, bus):
        """The bus serves a thousand clients."""
        started = bus()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 2500:
            pytest.skip("too few descriptors for a thousand clients")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500), hard))
        resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (2500, hard))
        try:
            clients = [Client(started.address) for _ in range(1000)]
            for client in clients:
                client.sub(b"many")
            for client in clients:
                assert client.sync() == []
            packet = clients[-1].msg(b"many")
            for client in clients:
                assert client.recv() == packet
            for client in clients:
                client.close()
            assert goes_on(started)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestPatterns:
    """--max-patterns and --max-pattern-bytes."""

    def test_one_too_many(self, bus):
        """A client past the number of patterns has violated the protocol; the log says how."""
        started = bus("--max-patterns=10")
        client = started.client(*(b"pattern/%d" % n for n in range(10)))
        client.sub(b"one too many")
        assert client.has_ended()
        started.wait_log("violation by client 1, .*: more patterns than the limit for one client")

    def test_same_ones_count_once(self, bus):
        """Identical subscriptions take no more room, and room comes back with UNSUB."""
        started = bus("--max-patterns=2")
        client = started.client(b"one", *[b"two"] * 100)
        for _ in range(100):
            client.unsub(b"two")
        client.sub(b"three")
        packet = client.msg(b"three")
        client.msg(b"two")
        assert client.sync() == [packet]

    def test_of_one_client(self, bus):
        """The limit is each client's own."""
        started = bus("--max-patterns=2")
        clients = [started.client(b"one", b"two") for _ in range(5)]
        packet = clients[0].msg(b"one")
        for client in clients:
            assert client.recv() == packet

    def test_bytes(self, bus):
        """A client past the bytes of its patterns has violated the protocol."""
        started = bus("--max-pattern-bytes=1000")
        client = started.client(b"a" * 500, b"b" * 500)
        client.sub(b"")
        client.unsub(b"b" * 500)
        client.sub(b"c" * 500)
        assert client.sync() == []
        client.sub(b"d")
        assert client.has_ended()
        started.wait_log("violation by client 1, .*: more bytes in patterns than the limit for one client")

    def test_deep_patterns(self, bus):
        """Patterns of very many segments, which cost more memory than their bytes, count for more."""
        started = bus()
        client = started.client()
        before = started.memory()
        client.sub(b"/" * 150_000)
        assert client.has_ended()
        started.wait_log("more bytes in patterns than the limit for one client")
        assert goes_on(started)
        assert started.memory() - before < 20 << 20

    def test_ignored(self, bus):
        """With --on-violation=ignore the pattern is not registered, and the client stays."""
        started = bus("--max-patterns=1", "--on-violation=ignore")
        client = started.client(b"one", b"two")
        packet = client.msg(b"one")
        client.msg(b"two")
        assert client.sync() == [packet]


class TestMemory:
    """What the server keeps is bounded."""

    def test_distinct_keys(self, bus):
        """A flood of keys that never repeat takes no lasting memory, and slows no other client down."""
        started = bus()
        client, listener = started.client(), started.client(b"keys/*/last")
        for n in range(20_000):
            client.msg(b"keys/%d/warm/up/with/a/key/that/is/not/short" % n)
        client.sync()
        before = started.memory()
        for n in range(100_000):
            client.msg(b"keys/%d/of/which/there/are/very/many/indeed" % n)
        last = client.msg(b"keys/x/last")
        client.sync()
        assert listener.sync() == [last]
        assert started.memory() - before < 16 << 20

    def test_queues_are_freed(self, bus):
        """Memory of a queue comes back when its reader leaves: the next one fills the same room."""
        started = bus("--queue-bytes=20000000")
        publisher = started.client()
        sizes = []
        for _ in range(4):
            with started.client(b"flood"):
                for _ in range(60):
                    publisher.msg(b"flood", b"x" * 200_000)
                publisher.sync()
            publisher.sync()
            sizes.append(started.memory())
        assert max(sizes) - sizes[0] < 12 << 20


class TestDescriptors:
    """The process has no descriptors left (EMFILE)."""

    def starve(self, bus, spare: int) -> None:
        """Leave the server this number of free descriptors."""
        most = resource.prlimit(bus.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(bus.pid, resource.RLIMIT_NOFILE, (max(bus.descriptors()) + 1 + spare, most))

    def test_turned_away(self, bus):
        """A client that cannot be served is refused at once; connected clients continue, and nothing spins."""
        started = bus()
        one, two = started.client(b"talk"), started.client(b"talk")
        self.starve(started, 2)
        served = [started.client(b"talk"), started.client(b"talk")]
        turned_away = started.client()
        assert turned_away.has_ended()
        started.wait_log("Cannot accept: Too many open files: raise the limit of open files")
        before = started.cpu()
        assert started.client().has_ended(), "after a while in which it accepts nobody"
        assert started.cpu() - before <= 0.3
        packets = [one.msg(b"talk", b"%d" % n) for n in range(200)]
        for client in (one, two, *served):
            assert client.receive(200) == packets

    def comes_in(self, bus) -> bool:
        """Whether a client is served, now or when the server tries again."""
        client = bus.client()
        try:
            return client.sync() == []
        except (AssertionError, BrokenPipeError, ConnectionResetError):
            return False

    def test_none_at_all(self, bus):
        """Without a waiting client it does not spin either, and the log is not flooded."""
        started = bus()
        client = started.client(b"talk")
        self.starve(started, 0)
        assert started.client().has_ended()
        began = started.cpu()
        for _ in range(200):
            packet = client.msg(b"talk")
            assert client.recv() == packet
        assert started.client().has_ended()
        assert started.cpu() - began < 0.5
        assert started.log.count("Cannot accept") <= 4

    def test_it_can_still_stop(self, bus, directory):
        """SIGTERM ends a process without descriptors as cleanly as any."""
        started = bus()
        client = started.client(b"talk")
        self.starve(started, 0)
        assert started.client().has_ended()
        assert started.stop(signal.SIGTERM) == 0
        assert client.has_ended()
        assert not (directory / "bus").exists()

    def test_room_comes_back(self, bus):
        """Once descriptors are free again, the bus serves new clients; those that gave up meanwhile do no harm."""
        started = bus()
        client = started.client(b"talk")
        self.starve(started, 0)
        for _ in range(20):
            started.client().close()
        packet = client.msg(b"talk")
        assert client.recv() == packet
        self.starve(started, 10)
        assert any(self.comes_in(started) for _ in range(5))
        assert goes_on(started)


def test_the_server_uses_as_many_descriptors_as_it_may(bus):
    """The soft limit, 1,024 as a rule, is for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        started = bus()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(started.pid, resource.RLIMIT_NOFILE) == (hard, hard)
