"""How long the calls of a blocking client take while the server does not read."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import sbus
from sbus.client import blocking
from sbus.client.blocking.work import Work
from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.responding import Request
from sbus.errors import ConnectionLost, Disconnected, RequestFailed, TimedOut
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


@contextmanager
def stuck(server: Bus, client: blocking.Bus) -> Iterator[None]:
    """Have a server not read, and fill the socket of a client; fail if the body waits until the server reads."""
    with paused(server.pid):
        for size in (10_000, 0):
            with pytest.raises(BlockingIOError):
                fill(client, size)
        with unhindered(client, lambda: os.kill(server.pid, signal.SIGCONT)):
            yield


def fill(client: blocking.Bus, size: int, flags: int = socket.MSG_DONTWAIT) -> None:
    while True:
        client.publish("x", bytes(size), flags=flags)


@contextmanager
def unhindered(client: blocking.Bus, help: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Fail if the body waits: close the client then.

    :param help: called first, to let the body end.
    """

    def give_up() -> None:
        help()
        client.close()

    timer = threading.Timer(5.0, give_up)
    timer.start()
    try:
        yield
        assert not timer.finished.is_set()
    finally:
        timer.cancel()


@pytest.fixture
def worker(client: blocking.Bus) -> Work:
    return start_work(client)


def start_work(client: blocking.Bus) -> Work:
    """Return a worker that waits for jobs; no service has its queue."""
    work = client.work("none")
    while not client.works:
        with pytest.raises(TimedOut):
            work.get(timeout=0.02)
    return work


def test_close_does_not_wait_for_a_full_socket(client: blocking.Bus, worker: Work, shared: Bus) -> None:
    """The bus closes at once, with its workers, though the server does not read."""
    with stuck(shared, client):
        client.close()
    assert worker.has_ended


def large_batch(client: blocking.Bus) -> None:
    with client.payloads() as batch:
        batch.publish("k", bytes(1_000_000))


def test_large_message_that_must_not_wait(shared: Bus) -> None:
    """``MSG_DONTWAIT`` does not wait for the answer whether the bus takes large messages."""
    with paused(shared.pid):
        client = sbus.connect(str(shared.address), payloads=True)
    with client:
        with paused(shared.pid), unhindered(client), pytest.raises(BlockingIOError):
            client.publish("k", bytes(1_000_000), flags=socket.MSG_DONTWAIT)
        client.subscribe("k")
        client.fence()
        client.publish("k", bytes(1_000_000), flags=socket.MSG_DONTWAIT)
        assert len(client.receive().payload) == 1_000_000


CALLS: dict[str, Callable[[blocking.Bus], object]] = {
    "whoami": lambda client: client.whoami(),
    "fence": lambda client: client.fence(),
    "inbox": lambda client: client.inbox("a"),
    "answer_proofs": lambda client: client.answer_proofs(),
    "request": lambda client: client.request("a", timeout=30.0),
    "work": lambda client: client.work("none").get(),
    "publish": lambda client: client.publish("a"),
    "publish for a time": lambda client: client.publish("a", timeout=30.0),
    "large publish": lambda client: client.publish("a", bytes(1_000_000)),
    "large publish_many": lambda client: client.publish_many([("a", bytes(1_000_000))]),
    "large payloads": large_batch,
    "a limit in the limit": lambda client: limited(client, client.fence),
}


def limited(client: blocking.Bus, call: Callable[[], object]) -> None:
    with client.limit(None), client.limit(30.0):
        call()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_limit_bounds_every_call(shared: Bus, call: Callable[[blocking.Bus], object]) -> None:
    """`limit` ends a call that has a later timeout, or none, while the server does not read."""
    with paused(shared.pid):
        client = sbus.connect(str(shared.address), payloads=True)
    with client, stuck(shared, client), client.limit(0.05), pytest.raises(TimedOut):
        call(client)


def test_limit_bounds_the_end_of_a_subscription(client: blocking.Bus, shared: Bus) -> None:
    """Closing a subscription or a watch within a `limit` raises nothing: the rest goes out with the next packet."""
    subscription, watch = client.subscribe("a"), client.watch_subscribers("a")
    with stuck(shared, client), client.limit(0.05):
        subscription.close()
        watch.close()
    client.publish("a")
    client.fence()
    assert client.get_ready() == []


def test_reply_that_the_bus_does_not_read(client: blocking.Bus, shared: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """Within a `limit`, a reply that cannot be sent is one line in the log, and the next call sends it."""

    def handler(request: Request) -> bytes | None:
        if request.payload == b"interrupted":
            raise KeyboardInterrupt
        if request.payload == b"refused":
            raise RequestFailed("no")
        if request.payload == b"failed":
            return request.fail("not now")
        return b"yes"

    client.respond("k", handler)
    client.fence()
    with sbus.connect(str(shared.address)) as requester:
        inbox = requester.whoami() + b"/sbus/reply/"
        replies = requester.subscribe(inbox)
        for payload in (b"answered", b"failed", b"refused", b"interrupted"):
            requester.publish("k", inbox + payload + b"\0" + payload)
        requester.fence()
        with stuck(shared, client), client.limit(0.05), pytest.raises(KeyboardInterrupt):
            client.receive()
        assert [record.getMessage() for record in caplog.records] == 2 * [
            f"a reply to a request for 'k' waits for the next call: the bus at {shared.address} does not read: "
            "the socket stayed full"
        ]
        assert not any(record.exc_info for record in caplog.records)
        with suppress(Disconnected):
            client.fence()
        assert replies.get(TIMEOUT) == (inbox + b"answered", b"+yes")
        assert replies.get(TIMEOUT) == (inbox + b"failed", b"-not now")
        assert replies.get(TIMEOUT) == (inbox + b"refused", b"-no")


def end_job(worker: Work) -> None:
    worker._received(Message(b"", b"0 1 1 60 1 1 1 1 k\0"))
    with worker.get():
        pass


def fail_job(worker: Work) -> None:
    worker._received(Message(b"", b"0 1 1 60 1 1 1 1 k\0"))
    with pytest.raises(ZeroDivisionError), worker.get():
        raise ZeroDivisionError


def leave_work(worker: Work) -> None:
    with pytest.raises(ZeroDivisionError), worker:
        raise ZeroDivisionError


def leave_watch(worker: Work) -> None:
    watch = worker._bus.watch_subscribers("w")
    with pytest.raises(ZeroDivisionError), watch:
        raise ZeroDivisionError


@pytest.mark.parametrize("end", [end_job, fail_job, Work.close, leave_work, leave_watch])
def test_ends_need_no_connection(bus: StartBus, end: Callable[[Work], object]) -> None:
    """The end of a job, of a worker and of a watch does not wait until there is a connection again."""
    server = bus()
    with sbus.connect(str(server.address), reconnect=Backoff(longest=0.05)) as client:
        worker = start_work(client)
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            client.fence()
        with unhindered(client):
            end(worker)
        assert client.state == "reconnecting"
        bus("--reuse")
        client.fence()


@pytest.mark.parametrize("opening", [start_work, lambda client: client.watch_subscribers("w")], ids=["work", "watch"])
def test_exceptions_do_not_wait_for_a_full_socket(
    client: blocking.Bus, shared: Bus, opening: Callable[[blocking.Bus], Any]
) -> None:
    """An exception ends a ``with`` worker or watch at once, though the server does not read."""
    opened = opening(client)
    with stuck(shared, client), pytest.raises(ZeroDivisionError), opened:
        raise ZeroDivisionError


def test_what_could_not_begin_has_ended(client: blocking.Bus, shared: Bus) -> None:
    """A subscription or a watch that raises `TimedOut` gets nothing later, and leaves nothing in force."""
    got: list[Message] = []
    with stuck(shared, client):
        for _ in range(2):
            with pytest.raises(TimedOut), client.limit(0.02):
                client.subscribe("k", got.append)
            with pytest.raises(TimedOut), client.limit(0.02):
                client.subscribe("last", last=True)
            with pytest.raises(TimedOut), client.limit(0.02):
                client.watch_subscribers("k")
            with pytest.raises(TimedOut), client.limit(0.02):
                client.work("none").get()
    assert (client.core.state().patterns, client.core.state().watched) == ((), ())
    assert client.has_subscribers("k") is False
    client.subscribe("k", got.append)
    client.publish("k")
    client.fence()
    assert len(got) == 1


def test_many_questions_at_once(client: blocking.Bus, shared: Bus) -> None:
    """Calls that only ask do not wait for ever: the bus reads nothing from a client that does not take its answers."""
    got: list[bytes] = []
    with unhindered(client):
        client.subscribe("k", lambda message: got.append(message.payload))
        watches = [client.watch_subscribers(f"watched/{number}") for number in range(1024)]
        client.publish_many([("k", b"%d" % number) for number in range(3)])
        for number in range(1024):
            client.subscribe(f"last/{number}", last=True)
        assert got == []  # callbacks are called by reads alone
        client.fence()
    assert got == [b"0", b"1", b"2"]
    assert {watch.has_subscribers for watch in watches} == {False}


def test_a_publisher_does_not_keep_what_it_does_not_read(directory: Path) -> None:
    """While a call waits for room, messages wait at the server, whose flood control decides about them."""
    with FakeServer(directory / "fake") as server, sbus.connect(str(server.address)) as client:
        client.subscribe("k")
        peer = server.accept_now()
        sent: list[int] = []

        def flood() -> None:
            with suppress(OSError):  # the client has closed
                for number in range(20_000):
                    peer.send(b"MSG k\0" + bytes(1000))
                    sent.append(number)

        flooding = threading.Thread(target=flood)
        flooding.start()
        with pytest.raises(TimedOut), client.limit(1.0):
            fill(client, 1000, flags=0)
        client.close()
        flooding.join()
    assert len(sent) * 1000 < 4 * LARGEST_SEND_BUFFER


def test_a_server_that_has_closed_its_half_is_gone(directory: Path) -> None:
    """A publisher that waits for a full socket, and for a reply, notices that none will come."""
    with FakeServer(directory / "fake") as server, sbus.connect(str(server.address)) as client, client.limit(5.0):
        peer = server.accept_now()
        client.control("!/cred/whoami")
        peer.close_half()
        with pytest.raises(ConnectionLost, match="the server closed the connection"):
            client.publish_many([("k", bytes(1000))] * 10_000)
