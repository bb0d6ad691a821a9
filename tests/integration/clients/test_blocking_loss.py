"""The blocking client when its connection ends, is made again, or accepts no data for now."""

from __future__ import annotations

import os
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
from sbus.client import blocking
from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.errors import (
    BufferFull,
    CloseReason,
    ConnectionLost,
    Disconnected,
    TimedOut,
)
from sbus.syscalls.polling import is_readable
from tests.integration.clients.fake_servers import FakeServer
from tests.integration.clients.losses import QUICK, WHOAMI, lose
from tests.support.harness import TIMEOUT
from tests.support.servers import StartBus


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
