"""Connections that others have got hold of: a forked child, and another thread that closes one."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import sbus
from sbus.client import blocking
from sbus.client.connecting import Backoff
from sbus.errors import Closed, Forked
from tests.integration.clients.backends import Backend, Client
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


def in_child(call: Callable[[], object]) -> str:
    """Return the error that a call raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    return said


def poke(call: Callable[[], Any]) -> object:
    """Make a call of any library to its end."""
    result = call()
    if inspect.iscoroutine(result):
        asyncio.run(result)
    if hasattr(result, "addErrback"):
        failures: list[Any] = []
        result.addErrback(failures.append)
        failures[0].raiseException()
    return result


async def test_forked_child_cannot_use_the_connection(backend: Backend, shared: Bus) -> None:
    """Every call of a forked child raises an error that says so, and the parent's connection stays as it was."""
    client = await backend.connect(shared.address, reconnect=True)
    sub = await client.subscribe("k")
    await client.publish("k", b"before")
    await client.fence()
    raw = client.raw
    calls: list[Callable[[], Any]] = [
        lambda: raw.publish("k"),
        lambda: raw.publish_many([("k", b"")]),
        lambda: raw.subscribe("x"),
        raw.fence,
        raw.whoami,
        lambda: raw.request("k"),
        sub.raw.get,
    ]
    for call in calls:
        said = in_child(lambda call=call: poke(call))  # type: ignore[misc]
        expected = (
            f"Forked: this connection to the bus is that of process {os.getpid()}, from which this one was forked"
        )
        assert said.startswith(expected)
    assert in_child(lambda: raw.state) == "'closed'"
    await client.publish("k", b"after")
    assert await sub.take(2) == [b"before", b"after"]


def test_child_closes_without_harm(shared: Bus) -> None:
    """A child may leave the block of its parent's connection, or connect itself."""
    with sbus.connect(str(shared.address)) as bus:
        bus.subscribe("k")
        bus.fence()
        assert in_child(bus.close) == "None"

        def connect() -> bytes:
            with pytest.raises(Forked), bus:
                bus.receive()
            with sbus.connect(str(shared.address)) as own:
                return own.whoami()

        assert in_child(connect) != repr(bus.whoami())
        bus.publish("k", b"1")
        assert bus.receive(TIMEOUT).payload == b"1"


def test_end_of_the_parent_is_the_end_of_the_connection(shared: Bus) -> None:
    """A child that lives on does not keep its parent's connection open."""
    with shared.client(b"gone") as witness:
        bus = sbus.connect(str(shared.address))
        bus.subscribe("x")
        bus.fence()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        try:
            with sbus.connect(str(shared.address)) as other:
                assert other.has_subscribers("x")
                bus.close()
                deadline = time.monotonic() + TIMEOUT
                while other.has_subscribers("x"):
                    assert time.monotonic() < deadline
        finally:
            os.close(writing)
            os.waitpid(child, 0)
            os.close(reading)
        witness.sync()


def _fill(bus: blocking.Bus) -> None:
    while True:
        bus.publish("k", bytes(10_000))


WAITS: dict[str, Callable[[blocking.Bus], object]] = {
    "receive": lambda bus: bus.receive(),
    "receive with a timeout": lambda bus: bus.receive(TIMEOUT),
    "iteration": lambda bus: list(bus),
    "get_many": lambda bus: bus.get_many(),
    "subscription": lambda bus: bus.subscribe("own").get(),
    "iteration over a subscription": lambda bus: list(bus.subscribe("own")),
    "watch": lambda bus: [watch.get() for watch in [bus.watch_subscribers("w")] * 2],
    "fence": lambda bus: bus.fence(),
    "request": lambda bus: bus.request("q", timeout=None),
    "publish": _fill,
}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("reconnect", [False, True])
def test_close_wakes_a_waiting_thread(shared: Bus, how: str, reconnect: bool) -> None:
    """`close` in another thread ends every call that waits, at once: an iteration ends, others raise Closed."""
    with sbus.connect(str(shared.address), reconnect=reconnect) as bus, shared.client(b"q") as responder:
        responder.sync()
        bus.subscribe("never")
        bus.fence()
        is_stuck = how in ("fence", "publish")
        said: list[object] = []

        def wait() -> None:
            try:
                said.append(WAITS[how](bus))
            except BaseException as error:
                said.append(type(error))

        thread = threading.Thread(target=wait)
        with paused(shared.pid) if is_stuck else open(os.devnull):
            thread.start()
            until = time.monotonic() + TIMEOUT
            while not bus._is_polling:
                assert time.monotonic() < until
            bus.close()
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        assert said == [[] if "iteration" in how else Closed]
        assert bus.state == "closed"


def test_close_wakes_a_thread_that_reconnects(bus: StartBus) -> None:
    """`close` in another thread ends the pause between two attempts to reconnect."""
    server = bus()
    client = sbus.connect(str(server.address), reconnect=Backoff(first=1000.0, longest=1000.0))
    client.fence()
    server.stop(signal.SIGKILL)
    said: list[object] = []

    def wait() -> None:
        try:
            client.receive()
        except BaseException as error:
            said.append(type(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until = time.monotonic() + TIMEOUT
    while client.state != "reconnecting":
        assert time.monotonic() < until
    client.close()
    thread.join(TIMEOUT)
    assert said == [Closed]


async def test_hint_for_the_wildcards_of_others(backend: Backend, shared: Bus) -> None:
    """A pattern with another system's wildcards is subscribed to, with a warning at the line of the program."""
    client = await backend.connect(shared.address)
    for pattern, why in HINTS.items():
        with pytest.warns(sbus.errors.PatternWarning, match=why) as caught:
            await subscribe(client, pattern)
        assert len(caught) == 1


async def subscribe(client: Client, pattern: str) -> None:
    await (await client.subscribe(pattern)).close()


HINTS = {
    "a/#": "'#' is an ordinary byte.*'a/' matches everything below",
    "#": "the empty pattern matches every key",
    "a/>": "'>' is an ordinary byte.*'a/' matches everything below",
    "a.b.>": "'a/b/' matches everything below",
    "a/+/c": r"'\+' is an ordinary byte",
    "a/**": r"'\*\*' is the same as '\*'",
    "a/**/c": "no wildcard matches several segments",
    "a/*b": "it can never match",
    "*.json": "it can never match",
}


def test_hint_for_code_without_a_module(shared: Bus) -> None:
    """Code that is run without a module name gets the warning as well."""
    with sbus.connect(str(shared.address)) as client, pytest.warns(sbus.errors.PatternWarning):
        exec("client.subscribe('a/#')", {"client": client})


async def test_no_hint_for_what_is_meant(backend: Backend, shared: Bus, recwarn: pytest.WarningsRecorder) -> None:
    """Patterns that use the rules of this bus, and keys with the same bytes, get no warning."""
    client = await backend.connect(shared.address)
    for pattern in ("", "a/", "a/*", "*/b/", "a*", "c++/x", "#1/x", "a>b", "!/cred////x"):
        await subscribe(client, pattern)
    assert [warning for warning in recwarn if warning.category is sbus.errors.PatternWarning] == []


def test_socket_is_free_after_close(shared: Bus) -> None:
    """What was published before `close` is handled, although the socket is shut down."""
    with shared.client(b"k") as subscriber, sbus.connect(str(shared.address)) as bus:
        subscriber.sync()
        bus.publish_many([("k", b"%d" % number) for number in range(100)])
        bus.close()
        assert subscriber.receive(100)[-1] == b"MSG k\x0099"
        with pytest.raises(Closed):
            _ = bus.socket.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
