"""A client that breaks the protocol is disconnected or ignored, with a log line; no other is affected."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import pytest

from tests.support.harness import SAME_USER, Client, goes_on, numbered

LIMIT = 409_600

BAD_PACKETS = [
    (b"x", "unknown message type"),
    (b"\0", "unknown message type"),
    (b"MSG", "unknown message type"),
    (b"MSGkey\0", "unknown message type"),
    (b"msg key\0payload", "unknown message type"),
    (b" MSG key\0payload", "unknown message type"),
    (b"MSG\0key\0payload", "unknown message type"),
    (b"PUB key\0payload", "unknown message type"),
    (b"SUBS key", "unknown message type"),
    (b"SUB", "unknown message type"),
    (b"UNSUB", "unknown message type"),
    (b"CMSG", "unknown message type"),
    (b"XMSG key\0", "unknown message type"),
    (b"BNDL\x09\0\0\0MSG key\0x", "a bundle from a client that has not asked for bundles"),
    (b"MSG key", "MSG without a NUL"),
    (b"MSG ", "MSG without a NUL"),
    (b"MSG !/x\0", "'!' is reserved"),
    (b"SUB a/!", "'!' is reserved"),
    (b"MSG !/cred/01///\0", "an ID in a secret key must be"),
    (b"SUB !/cred/0/0/1/", "subscription to another client's secret key"),
]


@pytest.fixture
def big():
    """Enlarges a client's socket buffer, so that it can send such a packet."""

    def enlarge(client: Client, size: int) -> Client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        if client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < size + 32:
            with contextlib.suppress(PermissionError):
                client.sock.setsockopt(socket.SOL_SOCKET, 32, size)  # SO_SNDBUFFORCE
        if client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < size + 32:
            pytest.skip("the kernel grants no larger buffer: net.core.wmem_max")
        return client

    return enlarge


@pytest.fixture(scope="module")
def forgiving(module_bus):
    """A bus with --on-violation=ignore, which the tests of this module share."""
    return module_bus("--on-violation=ignore")


@pytest.fixture(scope="module")
def early(module_bus):
    """A bus of the early dialect, which the tests of this module share."""
    return module_bus("--dialect=early")


class TestReaction:
    """The fate of a client that sends such a packet."""

    @pytest.mark.parametrize(("packet", "why"), BAD_PACKETS, ids=[repr(packet) for packet, _ in BAD_PACKETS])
    def test_disconnected(self, shared, packet, why):
        """The client is disconnected, the log names it and the reason, and others of its process are unaffected."""
        bystander = shared.client(b"", b"key")
        client = shared.client(b"key", user=SAME_USER)
        client.send(packet)
        assert client.has_ended()
        who = f"pid {client.pid} uid {client.uid} gid {client.gid}"
        shared.wait_log(rf"warn: violation by client \d+, {who}: .*{re.escape(why)}")
        shared.wait_log(rf"warn: client \d+ disconnected: {who}: the client broke the protocol")
        assert bystander.sync() == []

    @pytest.mark.parametrize(("packet", "why"), BAD_PACKETS, ids=[repr(packet) for packet, _ in BAD_PACKETS])
    def test_ignored(self, forgiving, packet, why):
        """With --on-violation=ignore the packet is dropped, and logged, and the client stays."""
        bystander = forgiving.client(b"", b"key")
        client = forgiving.client(b"ignored", user=SAME_USER)
        client.send(packet)
        after = client.msg(b"ignored")
        assert client.sync() == [after]
        forgiving.wait_log(rf"violation by client \d+, pid {client.pid} .*{re.escape(why)}")
        assert bystander.sync() == [after]
        bystander.close()

    def test_what_stood_before_holds(self, shared):
        """In one batch, what stands before the violation holds, and what stands behind it is not handled."""
        subscriber = shared.client(b"batch/*")
        client = shared.client()
        for n in range(50):
            if n == 30:
                client.send(b"nonsense")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.msg(b"batch/%d" % n)
        assert client.rest() == []
        assert subscriber.sync() == [b"MSG batch/%d\0" % n for n in range(30)]

    def test_ignored_in_a_batch(self, forgiving):
        """With --on-violation=ignore all the rest of a batch is handled."""
        subscriber = forgiving.client(b"batch/*")
        client = forgiving.client()
        for n in range(50):
            client.send(b"nonsense")
            client.msg(b"batch/%d" % n)
        client.sync()
        assert subscriber.sync() == [b"MSG batch/%d\0" % n for n in range(50)]

    def test_subscriptions_go(self, shared):
        """When a subscriber is disconnected for a violation, all others still get messages."""
        others = [shared.client(b"crowd/*") for _ in range(3)]
        client = shared.client(b"crowd/*", b"crowd/1")
        publisher = shared.client()
        first = publisher.msg(b"crowd/1")
        publisher.sync()
        client.send(b"nonsense")
        second = publisher.msg(b"crowd/2")
        publisher.sync()
        for other in others:
            assert other.sync() == [first, second]


class TestEmptyPacket:
    """An empty packet is indistinguishable from end-of-file."""

    def test_ends_the_connection(self, shared):
        """It ends the connection: what was sent before it counts, what is sent behind it does not."""
        subscriber = shared.client(b"empty/*")
        client = shared.client(b"empty/*")
        before = client.msg(b"empty/before")
        client.sock.send(b"")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.msg(b"empty/behind")
        assert client.rest() == [before]
        assert subscriber.sync() == [before]

    def test_is_no_violation(self, shared):
        """It is logged as an ordinary end."""
        client = shared.client(user=SAME_USER)
        client.sock.send(b"")
        assert client.has_ended()
        found = shared.wait_log(rf"client \d+ disconnected: pid {client.pid} .*")[0][0]
        assert "the client closed the connection" in found


class TestSize:
    """Packets of the limit, and of one byte more."""

    @pytest.mark.parametrize("pure", ["0", "1"])
    def test_default_limit(self, bus, big, pure):
        """409,600 bytes arrive byte for byte; one more disconnects the sender, and no client gets any of it."""
        started = bus(env={"SBUS_PURE": pure})
        subscriber = started.client(b"large")
        client = big(started.client(b"large"), LIMIT + 1)
        longest = b"MSG large\0".ljust(LIMIT, b"x")[:-4] + b"\0end"
        client.send(longest)
        assert client.recv() == longest
        assert subscriber.recv() == longest
        client.send(longest + b"!")
        assert client.has_ended()
        started.wait_log("violation by client 2, .*: the packet is longer than the limit")
        assert subscriber.sync() == []
        assert goes_on(started)

    def test_many_of_the_limit(self, bus, big):
        """Packets of the limit in a row, to several receivers, arrive all."""
        started = bus()
        subscribers = [started.client(b"large") for _ in range(3)]
        client = big(started.client(), LIMIT)
        packets = [b"MSG large\0" + bytes([n]) * (LIMIT - 10) for n in range(20)]
        for packet in packets:
            client.send(packet)
        for subscriber in subscribers:
            assert subscriber.receive(20) == packets
            assert subscriber.sync() == []

    @pytest.mark.parametrize("limit", [64, 1000, 100_000])
    def test_max_packet(self, bus, limit):
        """--max-packet sets the limit, to the byte."""
        started = bus(f"--max-packet={limit}")
        subscriber = started.client(b"k")
        client = started.client()
        packet = b"MSG k\0".ljust(limit, b"x")
        client.send(packet)
        assert client.sync() == []
        client.send(packet + b"x")
        assert client.has_ended()
        assert subscriber.sync() == [packet]

    @pytest.mark.parametrize("pure", ["0", "1"])
    def test_ignored(self, bus, big, pure):
        """With --on-violation=ignore a packet that is too long is dropped, and what follows is handled."""
        started = bus("--on-violation=ignore", "--max-packet=1000", env={"SBUS_PURE": pure})
        subscriber = started.client(b"")
        client = big(started.client(), 300_000)
        kept = []
        for n in range(20):
            kept.append(client.msg(b"kept", b"%d" % n))
            client.send(b"MSG lost\0".ljust(1001 + n * 10_000, b"x"))
        assert client.sync() == []
        assert subscriber.sync() == kept

    def test_too_long_a_subscription(self, bus):
        """A SUB that is too long is no subscription to what is left of it."""
        started = bus("--on-violation=ignore", "--max-packet=100")
        client = started.client()
        client.send(b"SUB " + b"a" * 96 + b"/b")
        client.msg(b"a" * 80)
        client.send(b"MSG " + b"a" * 95 + b"\0")
        assert client.sync() == []

    def test_limits_that_something_else_bounds(self, bus):
        """When the bus starts, it logs each such limit and the remedy."""
        started = bus("--max-memory=8M", "--user-memory=16M", "--max-clients=100000000", "--user-clients=100000000")
        for text in (
            r"one user may hold all memory, as all clients together may hold \d+ B: lower --user-memory=16777216",
            r"one user may take the places of all clients, as --max-clients is \d+: lower --user-clients=100000000",
            r"fewer than 100000000 clients can connect: the process may have \d+ descriptors; raise LimitNOFILE",
        ):
            assert started.wait_log(r"warn: " + text)

    def test_limits_as_they_should_be(self, bus):
        """A bus with the default limits does not warn of limits of one user."""
        started = bus()
        started.client().sync()
        assert not any(" warn: " in line and "one user may" in line for line in started.log.splitlines())

    def test_nobody_can_be_sent_it(self, bus, big):
        """A packet within a limit that is beyond the kernel's is dropped and counted; no receiver is blamed for it.

        The log names the real limit when the bus starts.
        """
        started = bus("--max-packet=3000000")
        real = int(started.wait_log(r"warn: packets of more than (\d+) B cannot be passed on")[0][1])
        assert 400_000 < real <= 1 << 20
        subscribers = [started.client(b"huge") for _ in range(2)]
        client = big(started.client(), 2_000_000)
        fits = b"MSG huge\0".ljust(real, b"x")
        for packet in (fits, fits + b"x", b"MSG huge\0".ljust(1_500_000, b"x"), fits):
            client.send(packet)
            client.sync()
        for subscriber in subscribers:
            assert subscriber.sync() == [fits, fits]
            subscriber.close()
        started.wait_log("client 2 disconnected")
        started.wait_log("client 1 disconnected")
        assert started.dropped() == 4
        assert goes_on(started)


class TestLog:
    """What the log says, and what it keeps to itself."""

    def test_no_payloads(self, bus):
        """No payload gets into the log, not even of a packet that is a violation."""
        started = bus("--on-violation=ignore", "--queue-messages=1", "--max-packet=1024")
        client = started.client(b"flood", b"fine", b"!/cred////")
        client.msg(b"fine", b"PAYLOAD")
        client.msg(b"!/wrong", b"PAYLOAD")
        client.msg(b"!/cred/1/2/x/", b"PAYLOAD")
        client.send(b"NONSENSE PAYLOAD")
        client.send(b"SUB a/!\0PAYLOAD")
        client.cmsg(b"unknown\0PAYLOAD")
        client.msg(client.credentials + b"/x", b"PAYLOAD")
        client.sync()
        publisher = started.client()
        for _ in range(50):
            publisher.msg(b"flood", b"PAYLOAD")
        publisher.sync()
        assert started.stop() == 0
        assert started.log.count("violation by") == 4
        assert "dropped" in started.log
        assert "PAYLOAD" not in started.log

    def test_secret_keys_are_cut(self, bus):
        """Of a secret key the log shows whom it is for, and no more."""
        started = bus("--on-violation=ignore")
        client = started.client()
        client.sub(b"!/cred/1/2/3/HIDDEN/inbox")
        client.msg(b"!/cred/1/2/3/HIDDEN/!/x")
        client.msg(b"!/cred/01/2/3/HIDDEN")
        client.sync()
        assert started.stop() == 0
        assert len(re.findall("violation by", started.log)) == 3
        assert "'!/cred/1/2/3/" in started.log
        assert "HIDDEN" not in started.log

    def test_keys_are_escaped_and_truncated(self, bus):
        """Bytes that a terminal would obey, or that would forge a line, are escaped; long keys are cut."""
        started = bus("--on-violation=ignore")
        client = started.client()
        client.msg(b"a/!/\x1b[2J\r\n2026-01-01 forged line\xff\xc3\xa9{format}")
        client.msg(b"a/!/" + b"long" * 10_000)
        client.sync()
        assert started.stop() == 0
        lines = [line for line in started.log.splitlines() if "violation by" in line]
        assert len(lines) == 2
        assert "\x1b" not in started.log
        assert "\n2026-01-01 forged" not in started.log
        assert "{format}" in lines[0]
        assert all(len(line) < 1000 for line in lines)

    def test_connects_and_ordinary_ends_are_for_debugging(self, bus):
        """A connect and an ordinary end are logged at debug level, with pid, uid and gid."""
        started = bus()
        client = started.client()
        who = f"pid {os.getpid()} uid {os.getuid()} gid {os.getgid()}"
        started.wait_log(f"debug: client 1 connected: {who}")
        client.close()
        started.wait_log(f"debug: client 1 disconnected: {who}: the client closed the connection")
        assert not re.search("warn: .* client ", started.log)

    def test_drops_in_sums(self, bus):
        """Drops are logged with the client and the number: the first at once, later ones in sums."""
        started = bus("--max-packet=1024", "--queue-messages=10")
        reader = started.client(b"flood", user=SAME_USER)
        publisher = started.client()
        for packet in numbered(b"flood", 5000):
            publisher.send(packet)
        publisher.sync()
        got = len(reader.sync())
        reader.close()
        started.wait_log("client 1 disconnected")
        lines = re.findall(
            r"warn: dropped (\d+) messages \((\d+) bytes\) for client 1, (.*); (\d+) in all", started.log
        )
        assert 2 <= len(lines) <= 3
        assert sum(int(line[0]) for line in lines) == 5000 - got == int(lines[-1][3])
        sizes = [len(packet) for packet in numbered(b"flood", 5000)]
        assert sum(int(line[1]) for line in lines) == sum(sizes[got:])
        assert {line[2] for line in lines} == {f"pid {reader.pid} uid {reader.uid} gid {reader.gid}"}


class TestEarlyDialect:
    """--dialect=early: the protocol's first revision."""

    def client(self, bus, *patterns):
        client = bus.client()
        client.sub(*patterns)
        assert client.echo() == []
        return client

    def test_separator(self, early):
        """Segments are parted by dots; a slash is an ordinary byte."""
        client = self.client(early, b"a.*", b"b.", b"c/*")
        expected = []
        for key, hit in [
            (b"a.b", True),
            (b"a.b/c", True),
            (b"a.b.c", False),
            (b"a", False),
            (b"a/b", False),
            (b"b.", True),
            (b"b.c.d", True),
            (b"b/c", False),
            (b"c/d/e", True),
            (b"c/d.e", False),
        ]:
            packet = client.msg(key)
            expected += [packet] if hit else []
        assert client.echo() == expected

    @pytest.mark.parametrize(
        "packet",
        [
            b"CMSG !/cred/whoami",
            b"CMSG echo/off",
            b"CMSG x\0",
            b"SUB !",
            b"SUB !x",
            b"SUB !.x",
            b"MSG !\0",
            b"MSG !a.b\0",
        ],
        ids=repr,
    )
    def test_violations(self, early, packet):
        """There are no control messages, and no key or pattern may begin with an exclamation mark."""
        bystander = self.client(early, b"")
        client = self.client(early)
        client.send(packet)
        assert client.has_ended()
        assert packet not in bystander.echo()

    def test_no_secret_keys(self, early):
        """An exclamation mark elsewhere is an ordinary byte."""
        client = self.client(early, b"a.!", b"a.!/cred/*", b"b!")
        packets = [client.msg(key) for key in (b"a.!", b"a.!/cred/1", b"b!")]
        assert client.echo() == packets

    def test_unsubscribe(self, early):
        """SUB, UNSUB and MSG work as ever."""
        client = self.client(early, b"x.y", b"x.y")
        client.unsub(b"x.y")
        packet = client.msg(b"x.y", b"\0\1\2")
        assert client.echo() == [packet]
        client.unsub(b"x.y")
        client.msg(b"x.y")
        assert client.echo() == []

    def test_said_at_start(self, early):
        """The log names the dialect."""
        assert "early dialect" in early.log
