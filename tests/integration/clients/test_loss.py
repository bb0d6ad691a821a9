"""Lost and closed connections, with all three libraries: each call ends, and no message that arrived is lost."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from sbus.client.subscription import HIGH_WATER
from sbus.errors import Closed, ConnectionLost, Disconnected
from tests.integration.clients.backends import (
    Backend,
    BlockingBackend,
    Client,
    Sub,
    TwistedBackend,
    turn,
    unread,
    wait_stuck,
)
from tests.integration.clients.fake_servers import FakeServer
from tests.integration.clients.losses import CALLS, NAME, QUICK, WHOAMI, answer_until, gather, publish_without_end
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


async def iterate(sub: Sub) -> None:
    async for _ in sub:
        pass


async def test_lost_connection_ends_every_waiting_call(backend: Backend, bus: StartBus) -> None:
    """When the server dies, every waiting call raises ConnectionLost with the reason and the address."""
    server = bus()
    clients = [await backend.connect(server.address) for _ in range(len(CALLS) + 3)]
    subs = [await client.subscribe("never") for client in clients[-3:]]
    for client in clients:
        await client.fence()
    with paused(server.pid):
        calls = [asyncio.ensure_future(call(client)) for call, client in zip(CALLS.values(), clients, strict=False)]
        calls += [asyncio.ensure_future(sub.get()) for sub in subs[:2]] + [asyncio.ensure_future(iterate(subs[2]))]
        await turn()
        assert not any(call.done() for call in calls)
        server.kill(signal.SIGKILL)
    for error in await gather(calls):
        assert type(error) is ConnectionLost
        assert error.reason is None
        assert str(error) == f"the server closed the connection ({server.address})"


async def test_lost_connection_ends_all_that_waits_on_it(looping: Backend, bus: StartBus) -> None:
    """Many calls on one connection all raise ConnectionLost, several of a kind included."""
    server = bus()
    client = await looping.connect(server.address)
    sub = await client.subscribe("never")
    await client.fence()
    with paused(server.pid):
        calls = [asyncio.ensure_future(call(client)) for call in CALLS.values() for _ in range(3)]
        calls += [asyncio.ensure_future(sub.get()) for _ in range(3)] + [asyncio.ensure_future(iterate(sub))]
        await turn()
        server.kill(signal.SIGKILL)
    assert {type(error) for error in await gather(calls)} == {ConnectionLost}


async def use(client: Client, sub: Sub) -> list[Any]:
    """Return the error that every call of a client raises; it must be the same one."""
    calls: list[Any] = [call(client) for call in CALLS.values()]
    calls += [
        client.publish_many([("k", b"")]),
        client.subscribe("x"),
        client.respond("x", lambda request: b""),
        client.control("x"),
        client.flood_control(soft="queue"),
        client.echo(False),
        sub.get(),
    ]
    if isinstance(client.backend, BlockingBackend):
        raw = client.raw
        calls += [client.do(call) for call in (raw.receive, raw.get_many, raw.get_ready, raw.fileno)]
        calls.append(client.publish("k", timeout=1.0))
        calls.append(client.do(getattr, raw, "socket"))
        calls.append(client.do(sub.raw.get_ready))
    return await gather([asyncio.ensure_future(call) for call in calls])


async def test_lost_connection_cannot_be_used(backend: Backend, bus: StartBus) -> None:
    """Every call after the loss raises ConnectionLost too; closing does not."""
    server = bus()
    client = await backend.connect(server.address)
    sub = await client.subscribe("x")
    await client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    with pytest.raises(Disconnected):
        await client.fence()
    for _ in range(2):
        assert {type(error) for error in await use(client, sub)} == {ConnectionLost}
    await sub.close()
    await client.close()


async def test_closed_bus_cannot_be_used(backend: Backend, shared: Bus) -> None:
    """Every call after closing raises Closed; closing again does nothing."""
    client = await backend.connect(shared.address)
    sub = await client.subscribe("x")
    await client.close()
    await client.close()
    errors = await use(client, sub)
    assert {type(error) for error in errors} == {Closed}
    assert {str(error) for error in errors} == {
        "the connection to the bus was closed here: connect again before any other call"
    }
    await sub.close()


async def test_closing_ends_every_waiting_call(looping: Backend, bus: StartBus) -> None:
    """Closing makes calls that wait for a message or a reply raise Closed; a loop over messages just ends."""
    server = bus()
    client = await looping.connect(server.address)
    sub = await client.subscribe("never")
    await client.fence()
    with paused(server.pid):
        calls = [asyncio.ensure_future(call(client)) for name, call in CALLS.items() if name != "publish"]
        calls.append(asyncio.ensure_future(sub.get()))
        loop = asyncio.ensure_future(iterate(sub))
        await turn()
        await client.close()
        assert {type(error) for error in await gather(calls)} == {Closed}
        await loop


async def test_connection_is_closed_at_the_end_of_with(backend: Backend, directory: Path) -> None:
    """``with`` and ``async with`` close the bus, and a subscription's ``with`` unsubscribes."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()

        def use_with() -> None:
            with client.raw.subscribe("a"):
                pass
            if not isinstance(backend, BlockingBackend):
                return
            with client.raw:
                pass

        await client.do(use_with)
        if not isinstance(backend, BlockingBackend | TwistedBackend):
            async with client.raw:
                pass
        if isinstance(backend, TwistedBackend):
            await client.close()
        assert await peer.receive_until(b"") == [b"SUB a", b"UNSUB a", b""]


@pytest.mark.parametrize("publishing", [False, True], ids=["reading", "publishing"])
async def test_messages_from_before_the_end_are_delivered(backend: Backend, directory: Path, publishing: bool) -> None:
    """Messages sent before the server closed are delivered, whether a read or a send notices the end."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        got: list[bytes] = []
        sub = await client.subscribe("k")
        await client.subscribe("k", lambda message: got.append(message.payload))
        await peer.receive_until(b"SUB k")
        peer.send(*[b"MSG k\0%d" % i for i in range(150)])
        peer.close()
        if publishing:
            with pytest.raises(Disconnected):
                await publish_without_end(client)
        assert await sub.take(150) == [b"%d" % i for i in range(150)]
        with pytest.raises(Disconnected, match="the server closed the connection"):
            await sub.get()
        assert got == [b"%d" % i for i in range(150)]


async def test_answer_from_before_the_end_counts(backend: Backend, directory: Path) -> None:
    """A reply that comes together with the end of the connection is a reply."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        asked = asyncio.ensure_future(client.whoami())
        assert await peer.receive() == WHOAMI
        peer.send(WHOAMI + b"\0" + NAME)
        peer.close()
        assert await asked == NAME
        with pytest.raises(Disconnected):
            await client.whoami()


async def test_messages_behind_a_callback_that_sends_keep_their_order(backend: Backend, directory: Path) -> None:
    """If a callback's send notices that the server is gone, later messages keep their order."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        got: list[bytes] = []

        def callback(message: Any) -> None:
            got.append(message.payload)
            if client.raw._error is None:
                try:
                    client.raw.send([b"MSG other\0"])
                except Disconnected:
                    assert isinstance(backend, BlockingBackend)

        await client.subscribe("k", callback)
        await peer.receive_until(b"SUB k")
        peer.send(*[b"MSG k\0%d" % i for i in range(200)])
        peer.close()
        with pytest.raises(Disconnected):
            await client.fence()
        if isinstance(backend, BlockingBackend):
            with pytest.raises(Disconnected):
                await client.do(client.raw.receive)
        assert got == [b"%d" % i for i in range(200)]


async def test_paused_connection_notices_the_end(looping: Backend, bus: StartBus) -> None:
    """The end of a paused connection is noticed, and messages that came before can still be read."""
    server = bus()
    client, publisher = await looping.connect(server.address), await looping.connect(server.address)
    sub = await client.subscribe("p")
    await client.fence()
    await publisher.publish_many([("p", b"%d " % i + bytes(1000)) for i in range(2 * HIGH_WATER)])
    await wait_stuck(lambda: unread(client), publisher)
    asking = asyncio.ensure_future(client.whoami())
    await turn()
    assert not asking.done()
    server.kill(signal.SIGKILL)
    with pytest.raises(Disconnected, match="the server closed the connection"):
        await asyncio.wait_for(asking, TIMEOUT)
    with pytest.raises(Disconnected):
        await client.publish("k")
    got = [int(m.payload.split()[0]) for m in await sub.get_ready()]
    with pytest.raises(Disconnected):
        await sub.get()
    assert len(got) > HIGH_WATER
    assert got == list(range(len(got)))


async def test_on_gap_that_raises(backend: Backend, directory: Path) -> None:
    """If `on_gap` raises, the error is logged, or raised by the call that reconnected; nothing else changes."""

    def on_gap(error: Exception) -> None:
        raise ZeroDivisionError

    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK, on_gap=on_gap)
        (await server.accept()).close()
        with pytest.raises(Disconnected):
            await client.fence()
        settling = asyncio.ensure_future(client.settle())
        serving = asyncio.ensure_future(answer_until(await server.accept(), b"MSG end\0"))
        if isinstance(backend, BlockingBackend):
            with pytest.raises(ZeroDivisionError):
                await settling
        await client.settle()
        await client.publish("end")
        await serving
        if not isinstance(backend, BlockingBackend):
            await settling
            assert [type(error) for error in backend.take_failures()] == [ZeroDivisionError]


async def test_callbacks_that_raise(backend: Backend, shared: Bus) -> None:
    """If a callback raises, the error is logged, or raised where the bus is read; no later message is lost."""
    client = await backend.connect(shared.address)
    got: list[bytes] = []

    def callback(message: Any) -> None:
        got.append(message.payload)
        if len(got) in (3, 4):
            raise ZeroDivisionError

    await client.subscribe("k", callback)
    sub = await client.subscribe("k")
    await client.publish_many([("k", b"%d" % i) for i in range(100)])
    if isinstance(backend, BlockingBackend):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await client.fence()
    await client.fence()
    assert got == [b"%d" % i for i in range(100)]
    left = [m.payload for m in await sub.get_ready()]
    assert left == got
    if not isinstance(backend, BlockingBackend):
        assert [type(error) for error in backend.take_failures()] == [ZeroDivisionError] * 2


async def test_on_control_that_raises(backend: Backend, directory: Path) -> None:
    """If `on_control` raises, the error is logged, or raised where the bus is read; the connection continues."""

    def on_control(key: bytes, payload: bytes) -> None:
        raise ZeroDivisionError

    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_control=on_control)
        peer = await server.accept()
        sub = await client.subscribe("k")
        peer.send(b"CMSG x\0", b"MSG k\x001", b"MSG k\x002")
        if isinstance(backend, BlockingBackend):
            with pytest.raises(ZeroDivisionError):
                await sub.get()
        assert await sub.take(2) == [b"1", b"2"]
        if not isinstance(backend, BlockingBackend):
            assert [type(error) for error in backend.take_failures()] == [ZeroDivisionError]
