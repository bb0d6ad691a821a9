"""Messages arrive: byte for byte, once, in order, and all of them."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time

import pytest

from sbus.syscalls import batch
from tests.support.harness import TIMEOUT, WHOAMI, Client, goes_on, numbered, send_with_descriptors
from tests.support.waiting import paused


@pytest.fixture(params=["compiled", "plain"])
def any_bus(request, lease):
    """Start buses with and without the compiled helper."""
    if request.param == "compiled" and not batch.COMPILED:
        pytest.skip("the compiled helper is not built, or switched off")
    return lambda *options: lease(*options, pure=request.param == "plain")


class TestBytes:
    """What is delivered is what was published."""

    @pytest.mark.parametrize(
        "packet",
        [
            b"MSG key\0payload",
            b"MSG key\0",
            b"MSG \0",
            b"MSG \0\0",
            b"MSG key\0" + bytes(range(256)),
            bytes(range(1, 256)).join([b"MSG ", b"\0"]).replace(b"!", b"").replace(b"*", b""),
            b"MSG a*b/**\0stars in a key are ordinary",
            b"MSG a!b/foo!/!bar\0so are these",
            b"MSG //\0/",
            b"MSG MSG \0MSG \0",
            b"MSG key\0" + b"\xff" * 100_000,
        ],
        ids=lambda packet: repr(packet[:20]),
    )
    def test_same_bytes(self, shared, packet):
        """A delivered message is the published packet, whatever bytes it holds."""
        subscriber = shared.client(b"")
        publisher = shared.client()
        publisher.send(packet)
        assert publisher.sync() == []
        assert subscriber.sync() == [packet]

    def test_packet_edges(self, shared):
        """One packet is one message: many sent in a row arrive as as many, none joined and none cut."""
        subscriber = shared.client(b"edge/*")
        publisher = shared.client()
        packets = [b"MSG edge/%d\0" % (n % 7) + b"x" * size for n, size in enumerate([0, 1, 5000, 2, 70_000, 3] * 50)]
        for packet in packets:
            publisher.send(packet)
        assert subscriber.receive(len(packets)) == packets

    def test_publisher_hears_itself(self, shared):
        """A client that is subscribed to a message of its own receives it."""
        client = shared.client(b"self")
        packet = client.msg(b"self", b"hello")
        assert client.sync() == [packet]

    def test_ignored_tails(self, shared):
        """What follows a NUL in SUB, UNSUB and CMSG is ignored."""
        client = shared.client()
        client.send(b"SUB tail\0ignored/\0*")
        packet = client.msg(b"tail")
        assert client.sync() == [packet]
        client.send(b"UNSUB tail\0something else")
        client.msg(b"tail")
        assert client.sync() == []
        client.send(b"CMSG echo/off\0whatever")
        client.sub(b"tail")
        client.msg(b"tail")
        assert client.sync() == []


class TestMatching:
    """The receivers of a message."""

    @pytest.mark.parametrize(
        ("pattern", "hits", "misses"),
        [
            (b"", [b"", b"a", b"a/b", b"*"], []),
            (b"a", [b"a"], [b"", b"a/", b"a/b", b"ab", b"A"]),
            (b"*", [b"", b"a", b"*"], [b"a/", b"/", b"a/b"]),
            (b"a/", [b"a/", b"a/b", b"a/b/c", b"a//"], [b"a", b"ab/", b"b/a/"]),
            (b"a/*", [b"a/", b"a/b"], [b"a", b"a/b/", b"a/b/c"]),
            (b"a/*/c/", [b"a/b/c/", b"a/b/c/d/e", b"a//c/"], [b"a/b/c", b"a/c/d"]),
            (b"a/b*", [b"a/b", b"a/bc"], [b"a/bc/d", b"a/cb"]),
            (b"a/*b", [], [b"a/b", b"a/ab", b"a/*b"]),
            (b"*/", [b"/", b"a/", b"a/b/c"], [b"", b"a"]),
            (b"*/*", [b"/", b"a/b"], [b"a", b"a/b/c"]),
            (b"a/**", [b"a/b", b"a/"], [b"a/b/c"]),
        ],
        ids=repr,
    )
    def test_patterns(self, shared, pattern, hits, misses):
        """A pattern gets the keys that the protocol's rules of matching say, and no others."""
        with Client(shared.address) as subscriber, Client(shared.address) as publisher:
            subscriber.sub(pattern)
            subscriber.sync()
            for key in misses:
                publisher.msg(key, b"miss")
            expected = [publisher.msg(key, b"hit") for key in hits]
            publisher.sync()
            assert subscriber.sync() == expected

    def test_one_copy(self, shared):
        """A client gets one copy of a message, however many of its patterns match."""
        client = shared.client(b"one/copy", b"one/*", b"one/", b"*/copy", b"one/copy", b"one/c*", b"one/**")
        packet = client.msg(b"one/copy")
        assert client.sync() == [packet]

    def test_counted_subscriptions(self, shared):
        """Two identical subscriptions need two UNSUBs."""
        client = shared.client(b"twice", b"twice")
        client.unsub(b"twice")
        packet = client.msg(b"twice")
        assert client.sync() == [packet]
        client.unsub(b"twice")
        client.msg(b"twice")
        assert client.sync() == []

    def test_unknown_unsubscription(self, shared):
        """UNSUB of a pattern that is not there is ignored, also if another one matches the same keys."""
        client = shared.client(b"there/*")
        for pattern in (b"", b"there", b"there/", b"there/x", b"never"):
            client.unsub(pattern)
        packet = client.msg(b"there/x")
        assert client.sync() == [packet]

    def test_unsubscribed_in_between(self, shared):
        """Subscribing and unsubscribing take effect between the messages they stand between, in one batch too."""
        client = shared.client()
        expected = []
        for n in range(50):
            client.sub(b"toggle")
            expected.append(client.msg(b"toggle", b"%d on" % n))
            client.unsub(b"toggle")
            client.msg(b"toggle", b"%d off" % n)
        assert client.sync() == expected

    def test_subscriptions_end_with_the_client(self, shared):
        """When a subscriber leaves, no other client gets or loses a message."""
        stays = shared.client(b"leave/*")
        with shared.client(b"leave/*"), shared.client(b"leave/1"):
            pass
        packets = [stays.msg(b"leave/%d" % n) for n in range(3)]
        assert stays.sync() == packets


class TestCompleteness:
    """Nothing is lost, doubled or put in another order."""

    @pytest.mark.parametrize("count", [1, 5000])
    def test_publish_then_close(self, any_bus, count):
        """What a client publishes right before it closes arrives in full."""
        bus = any_bus()
        subscriber = bus.client(b"last/*")
        packets = numbered(b"last/words", count)
        with Client(bus.address) as publisher:
            for packet in packets:
                publisher.send(packet)
        assert subscriber.receive(count) == packets
        assert subscriber.sync() == []

    def test_closed_before_it_was_accepted(self, lease):
        """A client that connects, publishes and closes while the server is busy elsewhere has published."""
        started = lease()
        subscriber = started.client(b"brief/*")
        packets = [b"MSG brief/%d\0here and gone" % n for n in range(20)]
        with paused(started.pid):
            for packet in packets:
                with Client(started.address) as publisher:
                    publisher.send(packet)
        assert subscriber.receive(20) == packets

    def test_subscribe_then_publish_at_once(self, lease):
        """A client that subscribes and publishes before the server has accepted it receives its message."""
        started = lease()
        with paused(started.pid):
            client = Client(started.address)
            client.sub(b"breath")
            packet = client.msg(b"breath", b"one")
        assert client.recv() == packet
        client.close()

    def test_slow_receiver(self, any_bus):
        """A receiver that begins to read when the publisher is long gone gets everything, in order."""
        bus = any_bus()
        subscriber = bus.client(b"slow/*")
        packets = numbered(b"slow/reader", 20_000, 100)
        with Client(bus.address) as publisher:
            for packet in packets:
                publisher.send(packet)
            assert publisher.sync() == []
        assert goes_on(bus)
        assert subscriber.receive(len(packets)) == packets
        assert subscriber.sync() == []
        assert bus.dropped() == 0

    def test_receiver_that_dawdles(self, any_bus):
        """A receiver that reads in fits and starts while the publisher goes on loses nothing."""
        bus = any_bus("--max-packet=1024")
        subscriber = bus.client(b"dawdle/*")
        publisher = bus.client()
        packets = iter(numbered(b"dawdle/reader", 6000))
        got: list[bytes] = []
        while chunk := list(itertools.islice(packets, 100)):
            for packet in chunk:
                publisher.send(packet)
            publisher.sync()
            got += subscriber.receive(60)
        got += subscriber.sync()
        assert got == numbered(b"dawdle/reader", 6000)

    def test_many_publishers(self, any_bus):
        """Messages of one publisher keep their order, however many publish at the same time."""
        bus = any_bus()
        subscriber = bus.client(b"from/")
        publishers = [bus.client() for _ in range(20)]
        for n in range(100):
            for who, publisher in enumerate(publishers):
                publisher.msg(b"from/%d" % who, b"%d" % n)
        for publisher in publishers:
            publisher.sync()
        by_key: dict[bytes, list[bytes]] = {}
        for packet in subscriber.sync():
            key, _, payload = packet[4:].partition(b"\0")
            by_key.setdefault(key, []).append(payload)
        assert by_key == {b"from/%d" % who: [b"%d" % n for n in range(100)] for who in range(20)}

    def test_many_subscribers(self, any_bus):
        """Each of a hundred subscribers gets each message once, in order."""
        bus = any_bus()
        subscribers = [bus.client(b"to/", b"to/all") for _ in range(100)]
        packets = numbered(b"to/all", 100)
        with Client(bus.address) as publisher:
            for packet in packets:
                publisher.send(packet)
        for subscriber in subscribers:
            assert subscriber.receive(100) == packets
            assert subscriber.sync() == []

    def test_half_closed_client_gets_its_due(self, any_bus):
        """A client that sends no more (shutdown) gets what was published before that, its own last words included."""
        bus = any_bus("--max-packet=1024")
        client = bus.client(b"half/*")
        packets = numbered(b"half/closed", 200)
        for packet in packets:
            client.send(packet)
        client.sock.shutdown(socket.SHUT_WR)
        assert client.rest() == packets

    def test_deaf_client_still_publishes(self, lease):
        """A client that receives no more (shutdown) may still publish, and does not affect others."""
        started = lease()
        subscriber = started.client(b"deaf/*")
        deaf = started.client(b"deaf/*")
        deaf.sock.shutdown(socket.SHUT_RD)
        packets = numbered(b"deaf/speaks", 500)
        for packet in packets:
            deaf.send(packet)
        assert subscriber.receive(500) == packets
        assert goes_on(started)


class TestControl:
    """Control messages that every client may use."""

    def test_whoami(self, shared):
        """whoami is answered with the client's own IDs: no slash and no NUL at the end, to that client alone."""
        other = shared.client(b"", b"!/cred////")
        client = shared.client()
        client.send(WHOAMI)
        assert client.recv() == WHOAMI + b"\0" + client.credentials
        client.send(WHOAMI + b"\0payload\0ignored")
        assert client.recv() == WHOAMI + b"\0" + client.credentials
        assert other.sync() == []

    def test_never_forwarded(self, shared):
        """Control messages are never forwarded, unknown ones included."""
        subscriber = shared.client(b"", b"CMSG", b"*/", b"echo/*")
        client = shared.client(b"", b"unknown")
        client.cmsg(b"unknown", b"echo/on", b"order/queue", b"", b"blocking/soft/unheard-of", b"!/strange", b"bundle")
        client.send(b"CMSG unknown\0with a payload")
        assert client.sync() == []
        assert subscriber.sync() == []

    def test_echo(self, shared):
        """echo/off keeps a client's own messages from that client alone; echo/on brings them back."""
        other = shared.client(b"echo")
        client = shared.client(b"echo", b"ech*")
        expected = [client.msg(b"echo", b"1")]
        assert client.sync() == expected
        client.cmsg(b"echo/off")
        expected.append(client.msg(b"echo", b"2"))
        assert client.sync() == []
        assert other.sync() == expected
        foreign = other.msg(b"echo", b"3")
        assert other.sync() == [foreign]
        assert client.sync() == [foreign]
        client.cmsg(b"echo/off", b"echo/on")
        loud = client.msg(b"echo", b"4")
        assert client.sync() == [loud]
        assert other.sync() == [loud]

    def test_echo_off_reaches_all_others(self, shared):
        """All other clients get what a client with echo/off publishes, in order, each time."""
        others = [shared.client(b"silent/*") for _ in range(3)]
        client = shared.client(b"silent/*")
        client.cmsg(b"echo/off")
        packets = [client.msg(b"silent/%d" % (n % 3), b"%d" % n) for n in range(300)]
        assert client.sync() == []
        for other in others:
            assert other.sync() == packets

    def test_replies_do_not_pile_up(self, lease):
        """A client that asks and does not read the answers is not read from for long, and then gets every one."""
        started = lease("--max-packet=1024")
        client = started.client()
        bystander = started.client()
        asked = turns = 0
        while turns < 30:
            if client.push(WHOAMI):
                asked += 1
                turns = 0
                assert asked < 20_000, "the server reads on and on"
            else:
                bystander.sync()
                turns += 1
        assert goes_on(started)
        assert client.receive(asked) == [WHOAMI + b"\0" + client.credentials] * asked
        assert client.sync() == []


class TestReactors:
    """Every reactor that twistd can use."""

    @pytest.mark.parametrize("reactor", ["epoll", "poll", "select", "asyncio"])
    def test_delivery(self, bus, reactor):
        """The bus delivers, loses no message of a client that closes at once, and notices when clients leave."""
        started = bus("--auto-close", flags=["-n", "--pidfile=", f"--reactor={reactor}"])
        subscriber = started.client(b"reactor/*")
        packets = numbered(b"reactor/any", 3000)
        with Client(started.address) as publisher:
            for packet in packets:
                publisher.send(packet)
        assert subscriber.receive(3000) == packets
        subscriber.close()
        assert started.wait() == 0


class TestStopped:
    """Processes that are stopped and continued."""

    def test_stopped_server(self, lease):
        """Messages that clients send while the server is stopped are delivered when it continues."""
        started = lease()
        subscriber = started.client(b"sleep/*")
        publisher = started.client()
        packets = []
        with paused(started.pid):
            for packet in numbered(b"sleep/on", 10_000, 1000):
                if not publisher.push(packet):
                    break
                packets.append(packet)
        assert 0 < len(packets) < 10_000
        assert subscriber.receive(len(packets)) == packets
        assert goes_on(started)

    def test_stopped_subscriber(self, lease):
        """A stopped subscriber misses nothing, and no other client waits for it."""
        started = lease("--max-packet=1024")
        count = 5000
        program = (
            "import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            f"s.connect({str(started.address)!r})\n"
            "s.send(b'SUB stop/*'); s.send(b'CMSG !/cred/whoami'); s.recv(1000)\n"
            "print('ready', flush=True)\n"
            f"for _ in range({count}): print(s.recv(1000)[4:].partition(b'\\0')[2].decode())\n"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "ready\n"
                bystander = started.client(b"stop/*")
                publisher = started.client()
                packets = numbered(b"stop/reader", count)
                with paused(reader.pid):
                    for packet in packets:
                        publisher.send(packet)
                    assert bystander.receive(count) == packets
                output, _ = reader.communicate(timeout=TIMEOUT)
            finally:
                reader.kill()
        assert output.split() == [str(n) for n in range(count)]


class TestDescriptors:
    """Descriptors that clients send along."""

    def test_dropped(self, any_bus):
        """Descriptors sent along never pile up in the server: they are refused, or dropped from the packet."""
        bus = any_bus()
        subscriber = bus.client(b"rights")
        client = bus.client()
        client.sync()  # by now it is accepted
        before = bus.descriptors()
        passed = 0
        with open("/dev/null") as null:
            for _ in range(50):
                try:
                    send_with_descriptors(client, b"MSG rights\0look", [null.fileno()] * 10)
                    passed += 1
                except PermissionError:
                    pass  # newer kernels refuse them for us
            client.sync()
            assert bus.descriptors() == before
        assert subscriber.sync() == [b"MSG rights\0look"] * passed
        assert goes_on(bus)


class TestFairness:
    """No client starves."""

    def test_busy_publisher(self, bus):
        """While one client publishes as fast as it can, others are served all the time."""
        started = bus("--queue-messages=1000")
        program = (
            "import socket\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            f"s.connect({str(started.address)!r})\n"
            "s.send(b'SUB busy')\n"
            "s.send(b'CMSG blocking/soft/discard')\n"
            "print('ready', flush=True)\n"
            "while True: s.send(b'MSG busy\\0' + b'x' * 100)\n"
        )
        client = started.client(b"calm")
        slowest = 0.0
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as flood:
            try:
                assert flood.stdout is not None
                assert flood.stdout.readline() == "ready\n"
                for _ in range(100):
                    began = time.monotonic()
                    packet = client.msg(b"calm")
                    assert client.recv() == packet
                    slowest = max(slowest, time.monotonic() - began)
            finally:
                flood.kill()
        assert slowest < 3.0
        assert not client.has_input()
