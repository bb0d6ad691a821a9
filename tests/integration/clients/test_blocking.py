"""Features of the blocking client alone: iteration over the bus, timeouts, flags and polls."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

import sbus
from sbus.client import blocking, outbox
from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.errors import (
    BufferFull,
    Closed,
    CloseReason,
    ConnectionLost,
    Disconnected,
    InvalidKey,
    PacketTooLong,
    TimedOut,
)
from sbus.syscalls import batch
from sbus.syscalls.polling import is_readable
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER
from tests.integration.clients.backends import FakeServer
from tests.support.harness import TIMEOUT, Bus, Client
from tests.support.servers import StartBus
from tests.support.waiting import paused

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"


def lose(server: Bus, client: blocking.Bus) -> None:
    """Kill the server, and make the client notice."""
    client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    with pytest.raises(Disconnected):
        client.fence()


def test_iterating_over_the_bus(client: blocking.Bus) -> None:
    """Iterating over the bus yields the messages of all subscriptions, each once, until the bus is closed."""
    for pattern in ("a/", "a/*", "b"):
        client.subscribe(pattern)
    for key in ("a/1", "b", "a/2", "c", "a/1/2"):
        client.publish(key)
    got = []
    for message in client:
        got.append(message.key)
        if len(got) == 4:
            client.close()
    assert got == [b"a/1", b"b", b"a/2", b"a/1/2"]


def test_what_was_read_is_freed(client: blocking.Bus) -> None:
    """A client keeps nothing of a message that its program has read and forgotten."""
    client.subscribe("large")
    for size in (100, 100_000, 100_000, 100_000):
        client.publish("large", bytes(size))
        message = client.receive()
        assert len(message.payload) == size
        assert gc.get_referrers(message) == []
        alone = Message(b"large", bytes(size))
        assert sys.getrefcount(message.payload) == sys.getrefcount(alone.payload)


def test_a_connection_in_use_is_not_asked_after(bus: StartBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are sent and read without a look at why there may be no connection; losing it has that look at it."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=QUICK) as client:
        for restarts in range(2):
            if restarts:
                lose(server, client)
                assert client._usable is None
                bus("--reuse")
            sub = client.subscribe("k")
            client.fence()
            with monkeypatch.context() as patch:
                patch.setattr(client, "_connected", None)
                for size in (1, 100_000):
                    client.publish("k", bytes(size))
                    assert len(sub.get(TIMEOUT).payload) == size
        client.close()
        assert client._usable is None
        with pytest.raises(Closed):
            client.publish("k", bytes(100_000))


def test_errors_of_callbacks_are_raised_one_by_one(directory: Path) -> None:
    """Each read raises one error of a batch's callbacks before it reads further; no message is lost."""
    got: list[bytes] = []

    def callback(message: Message) -> None:
        got.append(message.payload)
        if len(got) in (1, 3):
            raise ZeroDivisionError(len(got))

    with FakeServer(directory / "fake") as server, sbus.connect(str(server.address)) as client:
        client.subscribe("k", callback)
        client.subscribe("k")
        server.accept_now().send(*(b"MSG k\0%d" % i for i in range(4)))
        for count in (1, 3):
            with pytest.raises(ZeroDivisionError, match=str(count)):
                client.get_ready()
            assert got == [b"0", b"1", b"2", b"3"]
        assert [m.payload for m in client.get_ready()] == got


def test_iterating_over_a_subscription(client: blocking.Bus) -> None:
    """Messages read from a subscription do not come from the bus too, unless another subscription shares them."""
    one = client.subscribe("x/1")
    client.subscribe("x/")
    two = client.subscribe("x/2")
    assert (one.get_ready(), two.get_ready()) == ([], [])
    for i in range(6):
        client.publish(f"x/{i % 3}", b"%d" % i)
    got = []
    for message in one:
        got.append(message.payload)
        if len(got) == 2:
            one.close()
    assert got == [b"1", b"4"]
    client.fence()
    assert [m.payload for m in two.get_ready()] == [b"2", b"5"]
    assert [m.payload for m in client.get_ready()] == [b"%d" % i for i in range(6)]


def test_messages_that_came_before_a_subscription_was_read(client: blocking.Bus) -> None:
    """Messages that came while another subscription was read still reach their own; shared ones stay on the bus."""
    a, b, both = client.subscribe("a"), client.subscribe("b"), client.subscribe("b/")
    for key in ("b", "b/1", "a", "b"):
        client.publish(key)
    client.fence()
    assert a.get(TIMEOUT).key == b"a"
    assert [b.get(TIMEOUT).key, b.get(TIMEOUT).key] == [b"b", b"b"]
    assert client.receive(TIMEOUT).key == b"b/1"
    assert both.get_ready() == []


def test_messages_that_came_before_a_subscription_began(client: blocking.Bus) -> None:
    """A new subscription gets nothing from before it, however others read what they kept."""
    client.subscribe("k/")
    aside = client.subscribe("aside")
    client.publish_many([("k/1", b"old"), ("aside", b"1"), ("aside", b"2")])
    client.fence()
    first, second = client.subscribe("k/1"), client.subscribe("k/")
    client.publish("aside", b"3")
    client.publish("k/1", b"new")
    client.fence()
    assert [m.payload for m in aside.get_ready()] == [b"1", b"2", b"3"]
    assert [m.payload for m in first.get_ready()] == [b"new"]
    assert [m.payload for m in second.get_ready()] == [b"new"]
    assert [m.payload for m in client.get_ready()] == [b"old", b"new"]


def test_inbox_keeps_its_own_messages(client: blocking.Bus) -> None:
    """An inbox keeps the messages that arrive while the program waits for something else."""
    key, inbox = client.inbox("letters")
    client.subscribe("open")
    client.publish_many([(key, b"1"), ("open", b"2"), (key, b"3")])
    client.fence()
    assert [m.payload for m in client.get_ready()] == [b"2"]
    assert [m.payload for m in inbox.get_ready()] == [b"1", b"3"]


def test_time_outs(client: blocking.Bus) -> None:
    """Every call that waits takes a timeout, after which it raises TimedOut, a kind of TimeoutError."""
    sub = client.subscribe("never")
    calls: list[Callable[[float], object]] = [
        client.receive,
        client.get_many,
        sub.get,
        lambda timeout: client.request("never", timeout=timeout),  # the last one: this client gets it itself
    ]
    for call in calls:
        for timeout in (0.0, 0.02):
            began = time.monotonic()
            with pytest.raises(TimeoutError) as raised:
                call(timeout)
            assert raised.type is TimedOut
            assert timeout <= time.monotonic() - began < timeout + 5
    client.fence()


def test_time_out_holds_while_others_get_messages(client: blocking.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages for other subscriptions do not postpone a timeout, however fast they come."""

    class Endless:
        is_empty = False

        def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
            return [b"MSG flood\0"] * 64, False

    sub = client.subscribe("never")
    client.subscribe("flood", lambda message: None)
    client.fence()
    monkeypatch.setattr(client, "_reader", Endless())
    calls: list[Callable[[float], object]] = [sub.get, client.receive, client.get_many, client.whoami]
    for call in calls:
        for timeout in (0.0, 0.02):
            with pytest.raises(TimedOut):
                call(timeout)
    assert (sub.get_ready(), client.get_ready()) == ([], [])


def test_no_read_is_in_vain(client: blocking.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read that has emptied the socket, a client waits before it reads again."""
    sub = client.subscribe("key")
    client.fence()
    assert sub.get_ready() == []  # the first answers may have come in several reads, the last one by another reader
    reader, reads = client._reader, []

    class Watched:
        @property
        def is_empty(self) -> bool:
            return reader.is_empty

        def read(self, sock: socket.socket, most: int = 0) -> tuple[list[bytes], bool]:
            reads.append(reader.read(sock, most))
            return reads[-1]

    monkeypatch.setattr(client, "_reader", Watched())
    for payload in (b"1", b"x" * 60_000, b"y" * 60_000, b"2"):
        client.publish("key", payload)
        assert sub.get().payload == payload
    with pytest.raises(TimedOut):
        sub.get(timeout=0.0)
    assert [len(packets) for packets, _ in reads] == [1, 1, 1, 1]


def test_message_that_is_here_needs_no_time(client: blocking.Bus) -> None:
    """A timeout of 0 still finds a message in the socket, also behind many for other subscriptions."""
    sub = client.subscribe("last")
    client.subscribe("other", lambda message: None)
    sub.get_ready()
    with sbus.connect(client.address) as publisher:
        publisher.publish_many([("other", b"")] * 200 + [("last", b"here")])
        publisher.fence()
    assert sub.get(timeout=0).payload == b"here"


def test_flags_of_receiving(client: blocking.Bus) -> None:
    """``MSG_DONTWAIT`` does not wait, and ``MSG_PEEK`` leaves the message, as recv(2) has them."""
    client.subscribe("f")
    with pytest.raises(BlockingIOError) as raised:
        client.receive(flags=socket.MSG_DONTWAIT)
    assert raised.value.errno == errno.EAGAIN
    client.publish("f", b"1")
    client.publish("f", b"2")
    client.fence()
    assert client.receive(flags=socket.MSG_PEEK).payload == b"1"
    assert client.receive(flags=socket.MSG_PEEK | socket.MSG_DONTWAIT).payload == b"1"
    assert client.receive(flags=socket.MSG_DONTWAIT).payload == b"1"
    assert client.receive(0.0).payload == b"2"
    with pytest.raises(BlockingIOError):
        client.receive(flags=socket.MSG_PEEK | socket.MSG_DONTWAIT)


def test_flags_of_sending(bus: StartBus) -> None:
    """``MSG_DONTWAIT`` raises if the socket is full; flags that the kernel refuses raise its error."""
    server = bus()
    subscriber = server.client(b"k")
    with sbus.connect(str(server.address)) as client:
        client.publish("k", b"eor", flags=socket.MSG_EOR)
        with pytest.raises(OSError, match="not supported") as refused:
            client.publish("k", flags=socket.MSG_OOB)
        assert refused.value.errno == errno.EOPNOTSUPP
        sent = 0

        def publish() -> None:
            nonlocal sent
            while sent < 500:
                client.publish("k", bytes(10_000), flags=socket.MSG_DONTWAIT)
                sent += 1

        with paused(server.pid):
            with pytest.raises(BlockingIOError) as raised:
                publish()
            assert raised.value.errno == errno.EAGAIN
            assert 0 < sent < 500
        client.fence(timeout=TIMEOUT)
        assert len(subscriber.sync()) == sent + 1


def test_polls(client: blocking.Bus, shared: Bus) -> None:
    """A readable descriptor has something to `get_ready`; what is in memory already is `pending`."""
    sub = client.subscribe("p")
    client.fence()
    poll, epoll = select.poll(), select.epoll()
    poll.register(client, select.POLLIN)
    epoll.register(client.fileno(), select.EPOLLIN | select.EPOLLET)
    with epoll, sbus.connect(str(shared.address)) as publisher:
        assert (poll.poll(0), epoll.poll(0), client.get_ready(), client.pending) == ([], [], [], 0)
        publisher.publish_many([("p", b"%d" % i) for i in range(150)])
        publisher.fence()
        assert is_readable(client, TIMEOUT)
        assert poll.poll(TIMEOUT * 1000) == [(client.fileno(), select.POLLIN)]
        assert len(epoll.poll(TIMEOUT)) == 1
        assert client.receive().payload == b"0"
        assert client.pending > 0
        assert [m.payload for m in client.get_ready()] == [b"%d" % i for i in range(1, 150)]
        assert (client.pending, poll.poll(0)) == (0, [])
        # The socket is empty, as edge-triggered polls require.
        publisher.publish_many([("p", b"%d" % i) for i in range(150)])
        publisher.fence()
        assert len(epoll.poll(TIMEOUT)) == 1
        assert len(sub.get_ready()) == 150


def test_get_many_waits_for_one_and_gives_all(client: blocking.Bus) -> None:
    """`get_many` waits for a message, then returns all that are here."""
    client.subscribe("m")
    client.fence()
    with Client(client.address) as publisher:
        timer = threading.Timer(0.02, publisher.msg, (b"m", b"1"))
        timer.start()
        assert [m.payload for m in client.get_many()] == [b"1"]
        timer.join()
    client.publish_many([("m", b"2"), ("m", b"3")])
    client.fence()
    assert [m.payload for m in client.get_many(0.0)] == [b"2", b"3"]


def test_a_large_message_has_the_rules_of_any_other(client: blocking.Bus) -> None:
    """A large payload is refused for a wrong key and beyond the limit, and leaves behind what waits to be sent."""
    large = bytes(100_000)
    for wrong in ("no\0key", None):
        with pytest.raises(InvalidKey):
            client.publish(wrong, large)  # type: ignore[arg-type]
    with pytest.raises(PacketTooLong, match=str(5 + 1 + LARGEST_SEND_BUFFER)):
        client.publish("k", bytes(LARGEST_SEND_BUFFER))
    client.outbox.extend([b"SUB k"])
    client.publish("k", large)
    sub = client.subscribe("k")
    client.publish("k", large[:50_000])
    assert [len(sub.get(TIMEOUT).payload) for _ in range(2)] == [100_000, 50_000]


def test_a_key_that_changes(client: blocking.Bus) -> None:
    """The key of a large message is what it holds at the time, also if it is a buffer that is used again."""
    client.subscribe("*")
    key = bytearray(b"a")
    client.publish(key, bytes(50_000))  # type: ignore[arg-type]
    key[:] = b"b"
    client.publish(key, bytes(50_000))  # type: ignore[arg-type]
    assert [client.receive().key for _ in range(2)] == [b"a", b"b"]


def test_a_large_message_waits_until_it_fits(client: blocking.Bus, shared: Bus) -> None:
    """A large message is sent once the socket has room, or is not sent if `limit` ends before."""
    large = os.urandom(300_000)
    with sbus.connect(str(shared.address)) as reader:
        reader.flood_control(soft="block")
        sub = reader.subscribe("k")
        reader.fence()
        sent: list[bytes] = []

        def fill() -> None:
            while True:
                client.publish("k", large)
                sent.append(large)

        with pytest.raises(TimedOut), client.limit(0.1):
            fill()
        assert [sub.get(TIMEOUT).payload for _ in sent] == sent
        client.publish("k", large[::-1])
        assert sub.get(TIMEOUT).payload == large[::-1]


def test_a_large_message_is_kept_until_there_is_a_connection(bus: StartBus) -> None:
    """Without a connection, a large message waits like any other, and counts with all its bytes."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=QUICK, reconnect_buffer=150_000) as client:
        sub = client.subscribe("k")
        lose(server, client)
        client._reconnecting = True  # as within a callback, while the client reconnects
        client.publish("k", bytes(100_000))
        with pytest.raises(BufferFull):
            client.publish("k", bytes(100_000))
        client._reconnecting = False
        bus("--reuse")
        assert len(sub.get(TIMEOUT).payload) == 100_000


def test_socket_is_there_for_its_options(client: blocking.Bus) -> None:
    """``.socket`` takes options; a send buffer too small for a packet raises PacketTooLong."""
    assert client.socket.fileno() == client.fileno()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with pytest.raises(PacketTooLong, match="SO_SNDBUF"):
        client.publish("k", bytes(100_000))
    with pytest.raises(PacketTooLong, match="SO_SNDBUF"):
        client.subscribe(b"k" * 100_000)
    client.publish("k")
    client.fence()


READERS: list[Callable[[blocking.Bus, blocking.Subscription], list[sbus.Message]]] = [
    lambda client, sub: [client.receive() for _ in range(100)],
    lambda client, sub: client.get_many() + client.get_many(),
    lambda client, sub: client.get_ready(),
    lambda client, sub: list(islice(client, 100)),
    lambda client, sub: [sub.get() for _ in range(100)],
    lambda client, sub: sub.get_ready(),
    lambda client, sub: list(islice(sub, 100)),
]


def test_end_is_told_behind_the_messages(directory: Path) -> None:
    """Every way of reading returns the messages before the end first, and then raises Disconnected."""
    with FakeServer(directory / "fake") as server:
        for read in READERS:
            client = sbus.connect(str(server.address))
            sub = client.subscribe("k")
            peer = server.accept_now()
            peer.send(*[b"MSG k\0%d" % i for i in range(100)])
            peer.close()
            assert [m.payload for m in read(client, sub)] == [b"%d" % i for i in range(100)]
            calls: list[Callable[[], object]] = [client.receive, client.get_many, client.get_ready]
            calls += [iter(client).__next__, sub.get, sub.get_ready, iter(sub).__next__, client.fileno]
            for call in calls:
                with pytest.raises(Disconnected):
                    call()
            client.close()


def test_callback_may_read_and_ask(client: blocking.Bus, shared: Bus) -> None:
    """A callback may call what reads the bus; later messages stay in order, and nothing hangs."""
    got: list[bytes] = []

    def callback(message: sbus.Message) -> None:
        got.append(message.payload)
        if message.payload in (b"3", b"70"):
            assert client.whoami(timeout=TIMEOUT).startswith(b"!/cred/")
            client.fence(timeout=TIMEOUT)

    client.subscribe("c", callback)
    client.publish_many([("c", b"%d" % i) for i in range(100)])
    assert client.whoami(timeout=TIMEOUT).startswith(b"!/cred/")
    client.fence(timeout=TIMEOUT)
    assert got == [b"%d" % i for i in range(100)]


def test_callback_may_close(client: blocking.Bus) -> None:
    """A callback that closes the bus, or a subscription, is the last to get a message."""
    got: list[bytes] = []

    def callback(message: sbus.Message) -> None:
        got.append(message.payload)
        (sub if message.key == b"c" else client).close()

    sub = client.subscribe("c", callback)
    client.publish_many([("c", b"%d" % i) for i in range(10)])
    client.fence()
    assert got == [b"0"]
    client.subscribe("d", callback)
    client.publish_many([("d", b"%d" % i) for i in range(10)])
    with pytest.raises(Closed):
        client.receive()
    assert got == [b"0", b"0"]


def test_time_out_bounds_connecting_again(bus: StartBus) -> None:
    """While there is no server, calls with a timeout raise TimedOut, and calls that do not wait return at once."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=QUICK) as client:
        sub = client.subscribe("k")
        lose(server, client)
        began = time.monotonic()
        calls: list[Callable[[float], object]] = [
            client.receive,
            client.get_many,
            sub.get,
            client.whoami,
            client.fence,
            lambda timeout: client.request("k", timeout=timeout),
            lambda timeout: client.publish("k", b"lost", timeout=timeout),
        ]
        for call in calls:
            with pytest.raises(TimedOut):
                call(0.02)
        with pytest.raises(BlockingIOError):
            client.receive(flags=socket.MSG_DONTWAIT)
        with pytest.raises(BlockingIOError):
            client.publish("k", b"lost", flags=socket.MSG_DONTWAIT)
        assert (client.get_ready(), sub.get_ready()) == ([], [])
        assert client.verify("!/cred/1/2/3", timeout=0.02) is False
        assert time.monotonic() - began < 5
        bus("--reuse")
        client.publish("k", b"kept", timeout=TIMEOUT)
        client.fence()
        assert [m.payload for m in sub.get_ready()] == [b"kept"]


def test_closing_a_subscription_needs_no_connection(bus: StartBus) -> None:
    """A subscription that is closed while there is no connection is not subscribed to on the next one."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=QUICK) as client:
        with client.subscribe("k") as sub:
            lose(server, client)
        sub.close()
        bus("--reuse")
        client.subscribe("other")
        client.publish("k")
        client.publish("other")
        client.fence()
        assert (sub.get_ready(), [m.key for m in client.get_ready()]) == ([], [b"other"])


def test_interrupted_reconnecting_is_taken_up_again(bus: StartBus) -> None:
    """After an asynchronous exception, such as Ctrl-C, the next call reconnects."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=Backoff(first=30.0, spread=0.0)) as client:
        sub = client.subscribe("k")
        lose(server, client)
        with pytest.raises(TimedOut):
            client.receive(0.0)  # the first attempt is immediate, and fails
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

        def interrupted() -> None:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            client.receive()

        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
        finally:
            signal.signal(signal.SIGUSR1, before)
        bus("--reuse")
        client._next_attempt = 0.0  # otherwise the next attempt is half a minute away
        client.publish("k", b"again")
        assert sub.get(TIMEOUT).payload == b"again"


# The pause is the period of the signals: it drifts against the loop of the client, so they reach all of its lines.
_SIGNALS = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGUSR1)
    time.sleep(0.0005)
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a socket before anybody can close it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_reconnecting_that_is_interrupted_at_any_moment(bus: StartBus) -> None:
    """Wherever the exception of a signal handler comes from, the next call reconnects."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=Backoff(first=0.0, longest=0.0)) as client:
        sub = client.subscribe("k")
        lose(server, client)
        armed: list[bool] = []

        def interrupt(*_: object) -> None:
            if armed:
                armed.clear()
                raise KeyboardInterrupt

        def interrupted() -> None:
            armed.append(True)
            client.receive(TIMEOUT)

        before = signal.signal(signal.SIGUSR1, interrupt)
        sender = subprocess.Popen([sys.executable, "-c", _SIGNALS, str(os.getpid())])
        try:
            for _ in range(500):
                with pytest.raises(KeyboardInterrupt):
                    interrupted()
        finally:
            armed.clear()
            sender.kill()
            sender.wait()
            signal.signal(signal.SIGUSR1, before)
        bus("--reuse")
        client.publish("k", b"again")
        assert sub.get(TIMEOUT).payload == b"again"


def test_callbacks_may_send_while_the_connection_is_made_again(directory: Path) -> None:
    """Packets that a callback sends before the fence has returned follow the resync packets."""
    with FakeServer(directory / "fake") as server:
        gaps: list[Exception] = []
        with sbus.connect(str(server.address), reconnect=QUICK, on_gap=gaps.append) as client:
            client.subscribe("k", lambda message: client.publish("from/callback", message.payload))
            server.accept_now().close()
            with pytest.raises(Disconnected):
                client.fence()

            def serve() -> None:
                peer = server.accept_now()
                got.append(peer.receive_now())
                got.append(peer.receive_now())
                peer.send(b"MSG k\0early", WHOAMI + b"\0!/cred/1/2/3")
                got.append(peer.receive_now())
                got.append(peer.receive_now())

            got: list[bytes] = []
            thread = threading.Thread(target=serve)
            thread.start()
            client.publish("own")
            thread.join(TIMEOUT)
            assert got == [b"SUB k", WHOAMI, b"MSG from/callback\0early", b"MSG own\0"]
            assert len(gaps) == 1


def test_lack_of_memory_is_waited_out(client: blocking.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel has no memory for a packet, the client sends it later; the connection is not lost."""
    real, failures = batch.send_packets, [errno.ENOBUFS, errno.ENOMEM]

    def send_packets(sock: socket.socket, packets: list[bytes]) -> int:
        if failures:
            raise OSError(failures.pop(), "no memory")
        return real(sock, packets)

    monkeypatch.setattr(outbox, "send_packets", send_packets)
    sub = client.subscribe("k")
    client.publish("k", b"1")
    assert sub.get(TIMEOUT).payload == b"1"
    assert failures == []


def test_interrupted_with_does_not_wait_for_a_full_socket(client: blocking.Bus, shared: Bus) -> None:
    """An exception ends a ``with`` subscription at once; UNSUB goes out with the next packet."""

    def use() -> None:
        with client.subscribe("k"):
            while True:
                client.publish("x", bytes(10_000), flags=socket.MSG_DONTWAIT)

    with paused(shared.pid), pytest.raises(BlockingIOError):
        use()
    client.publish("k", b"nobody's")
    client.fence()
    assert client.get_ready() == []


def test_pending_messages_of_a_subscription(client: blocking.Bus) -> None:
    """`pending` counts the subscription's messages in memory, which no poll shows."""
    key, inbox = client.inbox("letters")
    client.subscribe("open")
    client.publish_many([("open", b"1"), (key, b"2"), (key, b"3")])
    client.fence()
    assert (client.pending, inbox.pending) == (1, 2)
    assert len(inbox.get_ready()) == 2
    assert inbox.pending == 0


def test_time_out_beyond_what_a_poll_can_wait(client: blocking.Bus) -> None:
    """A timeout longer than poll(2) takes works."""
    client.subscribe("k")
    client.publish("k", b"1")
    assert client.receive(timeout=365 * 86_400).payload == b"1"
    client.publish("k", b"2", timeout=float("inf"))
    assert client.receive(timeout=float("inf")).payload == b"2"


@pytest.mark.parametrize("timeout", [None, 0.0], ids=["get_ready", "get"])
def test_all_that_is_here_is_read(directory: Path, timeout: float | None) -> None:
    """`get_ready` empties the socket, as edge-triggered polls require."""
    with FakeServer(directory / "fake") as server, sbus.connect(str(server.address)) as client:
        peer = server.accept_now()
        client.subscribe("others", lambda message: None)
        sub = client.subscribe("k")
        peer.send(b"CMSG bundle/on\x0065536")
        client.get_ready()
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                peer._sock.send(b"MSG others\0", socket.MSG_DONTWAIT)
                count += 1
        assert count > 200
        client.socket.recv(100)  # makes room for the last one
        peer.send(b"MSG k\0last")
        if timeout is None:
            assert [message.payload for message in sub.get_ready()] == [b"last"]
        else:
            assert sub.get(timeout).payload == b"last"


@pytest.mark.parametrize("order", ["queue", "stack"])
def test_last_values_beside_unread_messages(bus: StartBus, order: str) -> None:
    """A subscription gets each last value once, and nothing older; the readers of the bus get what is theirs once."""
    address = str(bus("--last-value=lv/").address)
    with sbus.connect(address) as publisher, sbus.connect(address) as client:
        client.flood_control(order=order)  # type: ignore[arg-type]
        client.subscribe("")
        client.fence(TIMEOUT)
        publisher.publish_many([("lv/a", b"1"), ("lv/a", b"2"), ("lv/b", b"3")])
        publisher.fence(TIMEOUT)
        sub = client.subscribe("lv/", last=True)
        client.fence(TIMEOUT)
        last = sub.get_ready()
        assert sorted(message.payload for message in last) == [b"2", b"3"]
        assert all(message.is_last_value for message in last)
        others = client.get_ready()
        assert sorted(message.payload for message in others if not message.is_last_value) == [b"1", b"2", b"3"]
        assert len(others) == (3 if order == "queue" else 5)
        publisher.publish("lv/a", b"4")
        assert (sub.get(TIMEOUT).payload, client.receive(TIMEOUT).payload) == (b"4", b"4")


def test_a_request_whose_time_is_over_is_not_sent(bus: StartBus) -> None:
    """If a callback takes all of its time while the client asks for its own name first, nobody gets the request."""
    address = str(bus().address)
    with sbus.connect(address) as client, sbus.connect(address) as server:
        asked: list[bytes] = []
        server.respond("ask", lambda request: asked.append(request.payload))
        server.fence(TIMEOUT)

        def slow(message: Message) -> None:
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                client.fence(TIMEOUT)

        client.subscribe("slow", slow)
        client.fence(TIMEOUT)
        server.publish("slow")
        assert is_readable(client.socket, TIMEOUT)
        with pytest.raises(TimedOut):
            client.request("ask", b"late", timeout=0.1)
        client.fence(TIMEOUT)
        server.fence(TIMEOUT)
        assert asked == []


def test_reason_behind_a_message_whose_callback_finds_the_end(directory: Path) -> None:
    """A callback that finds the connection lost gets the server's reason, which was read behind its message."""
    errors: list[ConnectionLost] = []

    def publish(message: sbus.Message) -> None:
        try:
            connection.publish("k")
        except ConnectionLost as error:
            errors.append(error)

    with FakeServer(directory / "fake") as server, sbus.connect(str(server.address)) as connection:
        connection.subscribe("k", publish)
        peer = server.accept_now()
        peer.send(b"MSG k\0", b"CMSG bye\0violation the client broke the protocol")
        peer.close()
        with pytest.raises(ConnectionLost) as lost:
            connection.receive(TIMEOUT)
    assert [error.reason for error in (*errors, lost.value)] == [CloseReason.VIOLATION] * 2
