"""Features of the blocking client alone: iteration over the bus, timeouts, flags and polls."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sbus
from sbus.client import blocking, outbox
from sbus.client.core import Message
from sbus.errors import (
    Closed,
    InvalidKey,
    PacketTooLong,
    TimedOut,
)
from sbus.syscalls import batch
from sbus.syscalls.polling import is_readable
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER
from tests.integration.clients.fake_servers import FakeServer
from tests.integration.clients.losses import QUICK, lose
from tests.support.harness import TIMEOUT, Bus, Client
from tests.support.servers import StartBus
from tests.support.waiting import paused


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
