"""Features of the asyncio client alone."""

from __future__ import annotations

import asyncio
import errno
import gc
import select
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from sbus.client import aio, outbox
from sbus.client.core import Message
from sbus.client.subscription import HIGH_WATER
from sbus.errors import Closed, Disconnected, UsageError
from sbus.syscalls import batch
from tests.integration.clients.backends import AsyncioBackend, turn, unread, wait_stuck
from tests.integration.clients.fake_servers import FakeServer
from tests.support.descriptors import descriptors
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


async def test_async_with_and_for(native: AsyncioBackend, shared: Bus) -> None:
    """The end of ``async with`` closes the bus, also after an exception, and leaves nothing open."""
    before = descriptors()
    bus = await aio.connect(str(shared.address))

    async def use() -> None:
        async with bus:
            sub = bus.subscribe("a")
            await bus.publish("a", b"1")
            async for message in sub:
                assert message.payload == b"1"
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    await bus.wait_closed()
    assert not descriptors().items() - before.items()


async def test_waiting_for_the_end(native: AsyncioBackend, directory: Path) -> None:
    """`wait_closed` returns after `close`, and raises the reason if the server has closed; calling it is optional."""
    with FakeServer(directory / "fake") as server:
        bus = (await native.connect(server.address)).raw
        (await server.accept()).close()
        for _ in range(2):
            with pytest.raises(Disconnected, match="the server closed the connection"):
                await bus.wait_closed()
        other = (await native.connect(server.address)).raw
        waiting = asyncio.ensure_future(other.wait_closed())
        await asyncio.sleep(0)
        await other.close()
        await waiting
        unwatched = await native.connect(server.address)
        for _ in range(2):
            (await server.accept()).close()
        with pytest.raises(Disconnected):
            await unwatched.fence()
    del unwatched
    gc.collect()


async def test_reading_continues_without_a_descriptor_to_pause(
    native: AsyncioBackend, shared: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that cannot watch for the end of a connection reads on, also a new one, and pauses when it can."""

    def fail() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    client, other = await native.connect(shared.address, reconnect=True), await native.connect(shared.address)
    sub = await client.subscribe("p")
    await client.fence()
    monkeypatch.setattr(select, "epoll", fail)
    count = 3 * HIGH_WATER
    await other.publish_many([("p", b"%d" % number) for number in range(count)])
    await other.fence()
    await client.fence()
    client.socket.shutdown(socket.SHUT_RDWR)
    await client.settle()
    monkeypatch.undo()
    await client.fence()
    assert client.raw._hangup is not None
    assert await sub.take(count) == [b"%d" % number for number in range(count)]
    await client.fence()


async def test_socket_is_there_for_its_options(native: AsyncioBackend, shared: Bus) -> None:
    """``.socket`` is the socket; after the end it raises the reason."""
    client = await native.connect(shared.address)
    assert client.raw.socket.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET
    await client.close()
    with pytest.raises(Disconnected):
        _ = client.raw.socket


async def test_reader_that_pauses_often_leaves_no_descriptors(native: AsyncioBackend, shared: Bus) -> None:
    """The epoll set of a paused connection is closed when reading resumes, and when the connection closes."""
    client, publisher = await native.connect(shared.address), await native.connect(shared.address)
    before = descriptors()
    sub = await client.subscribe("p")
    await client.fence()
    for _ in range(3):
        await publisher.publish_many([("p", b"")] * HIGH_WATER)
        await wait_stuck(lambda: unread(client), publisher)
        assert len(await sub.get_ready()) == HIGH_WATER
        await client.fence()
        assert not descriptors().items() - before.items()
    await publisher.publish_many([("p", b"")] * HIGH_WATER)
    await wait_stuck(lambda: unread(client), publisher)
    number = client.raw.socket.fileno()
    await client.close()
    assert str(number) not in descriptors()
    assert not descriptors().items() - before.items()


async def test_lack_of_memory_is_waited_out(
    native: AsyncioBackend, shared: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel has no memory for a packet, the client sends it later; the connection is not lost."""
    real, failures = batch.send_packets, [errno.ENOBUFS, errno.ENOMEM]

    def send_packets(sock: socket.socket, packets: list[bytes]) -> int:
        if failures:
            raise OSError(failures.pop(), "no memory")
        return real(sock, packets)

    client = await native.connect(shared.address)
    monkeypatch.setattr(outbox, "send_packets", send_packets)
    sub = await client.subscribe("k")
    async with asyncio.timeout(TIMEOUT):
        await client.publish("k", b"1")
    assert await sub.take(1) == [b"1"]
    assert failures == []


async def stuck(native: AsyncioBackend, server: Bus) -> tuple[aio.Bus, asyncio.Task[None]]:
    """A client with unsent packets, whose paused server takes none; and the task that publishes them."""
    bus: aio.Bus = (await native.connect(server.address)).raw

    async def publish() -> None:
        while True:
            await bus.publish("k", bytes(50_000))

    publishing = asyncio.ensure_future(publish())
    while not len(bus.outbox):
        await turn()
    return bus, publishing


async def test_end_of_a_with_statement_that_is_cancelled(native: AsyncioBackend, bus: StartBus) -> None:
    """If the wait at the end of ``async with`` is cancelled, the connection is closed all the same."""
    server = bus()
    with paused(server.pid):
        client, publishing = await stuck(native, server)
        receiving = asyncio.ensure_future(client.subscribe("k").get())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02), client:
                pass
        await client.wait_closed()
        for ended in (receiving, publishing):
            with pytest.raises(Closed):
                await ended


async def test_cancelled_with_does_not_wait_for_the_server(native: AsyncioBackend, bus: StartBus) -> None:
    """A cancellation inside ``async with``, such as Ctrl-C, closes the connection at once."""
    server = bus()
    with paused(server.pid):
        client, publishing = await stuck(native, server)

        async def use() -> None:
            async with client:
                await asyncio.Event().wait()

        using = asyncio.ensure_future(use())
        await turn()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(using, TIMEOUT)
        await client.wait_closed()
        with pytest.raises(Closed):
            await publishing


async def test_callback_that_raises_a_cancellation(native: AsyncioBackend, shared: Bus) -> None:
    """A callback's CancelledError is logged like any other exception, and no later message is lost."""
    client = await native.connect(shared.address)
    got: list[bytes] = []

    def callback(message: Message) -> None:
        got.append(message.payload)
        raise asyncio.CancelledError

    await client.subscribe("k", callback)
    await client.publish_many([("k", b"%d" % i) for i in range(20)])
    await client.fence()
    assert got == [b"%d" % i for i in range(20)]
    failures: list[BaseException] = [*native.take_failures()]
    assert [type(error) for error in failures] == [asyncio.CancelledError] * 20


def test_another_event_loop(shared: Bus) -> None:
    """Calls that wait say that a connection is that of one event loop; nothing would end their wait in another one."""

    async def connect() -> aio.Bus:
        return await aio.connect(str(shared.address))

    async def use() -> None:
        sub = bus.subscribe("k")
        for call in (bus.fence(), bus.whoami(1.0), bus.request("k"), bus.inbox("a"), sub.get(), sub.get_many()):
            with pytest.raises(UsageError, match="that of another event loop: connect in each loop"):
                await call
        await bus.close()

    bus = asyncio.run(connect())
    asyncio.run(use())
