"""Back-pressure and cancellation in the client libraries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbus.client.subscription import HIGH_WATER
from sbus.errors import Closed, ConnectError, TimedOut
from sbus.syscalls.batch import BATCH
from tests.integration.clients.backends import (
    AsyncioBackend,
    Backend,
    BlockingBackend,
    Client,
    turn,
    unread,
    wait_quiet,
    wait_stuck,
)
from tests.integration.clients.fake_servers import FakeServer
from tests.support.descriptors import descriptors
from tests.support.harness import Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused

BEYOND = 16 * 65_536 // 1000
"""Messages of 1,000 bytes that are read at once at most, and so may be kept beyond the mark."""


@pytest.mark.parametrize(
    ("choices", "bundles"),
    [
        ({"soft": "block"}, True),
        ({"soft": "queue", "hard": "block", "order": "queue"}, True),
        ({"soft": "block"}, False),
    ],
    ids=str,
)
async def test_reader_that_does_not_read_holds_publishers_back(
    backend: Backend, bus: StartBus, choices: dict[str, str], bundles: bool
) -> None:
    """An unread subscription pauses its connection at the high-water mark; no message is lost."""
    server = bus("--queue-messages=200")
    reader, publisher, bystander = [await backend.connect(server.address, bundles=bundles) for _ in range(3)]
    await reader.flood_control(**choices)
    sub = await reader.subscribe("p")
    await reader.fence()
    total, chunk = 8_000, 50
    published = 0

    async def publish() -> None:
        nonlocal published
        for start in range(0, total, chunk):
            await publisher.publish_many([("p", b"%d" % i + bytes(1000)) for i in range(start, start + chunk)])
            published += chunk

    publishing = asyncio.ensure_future(publish())
    await wait_stuck(lambda: published, bystander)
    assert published < total
    if not isinstance(backend, BlockingBackend):
        assert HIGH_WATER <= unread(reader) < HIGH_WATER + (BEYOND if bundles else BATCH)
    assert await sub.take(total) == [b"%d" % i + bytes(1000) for i in range(total)]
    await publishing


async def test_reader_that_goes_on_before_all_is_read(looping: Backend, shared: Bus) -> None:
    """Reading resumes at the low-water mark, or when the unread subscription is closed."""
    client, bystander = await looping.connect(shared.address), await looping.connect(shared.address)
    unread_sub, other = await client.subscribe("p"), await client.subscribe("q")
    await client.fence()
    for round_ in range(2):
        await bystander.publish_many([("p", b"%d" % i + bytes(1000)) for i in range(2 * HIGH_WATER)] + [("q", b"")])
        await bystander.fence()
        await wait_stuck(lambda: unread(client), bystander)
        assert unread(client) < HIGH_WATER + BEYOND
        if round_ == 0:
            assert await unread_sub.take(2 * HIGH_WATER) == [b"%d" % i + bytes(1000) for i in range(2 * HIGH_WATER)]
        else:
            await unread_sub.close()
        await other.get()


async def test_publishing_to_a_stopped_server_waits(backend: Backend, shared: Bus) -> None:
    """Publishing waits while the socket is full, and continues in order, with nothing lost."""
    publisher = await backend.connect(shared.address)
    with shared.client(b"k") as subscriber:
        sent = 0

        async def publish() -> None:
            nonlocal sent
            for i in range(500):
                await publisher.publish("k", b"%d " % i + bytes(10_000))
                sent += 1

        with paused(shared.pid):
            publishing = asyncio.ensure_future(publish())
            await wait_quiet(lambda: sent)
            assert 0 < sent < 500
        got = await asyncio.to_thread(subscriber.receive, 500)
        assert [packet.partition(b" ")[2].partition(b"\0")[2].partition(b" ")[0] for packet in got] == [
            b"%d" % i for i in range(500)
        ]
        await publishing
        await publisher.fence()


async def test_blocking_publish_times_out(waiting: BlockingBackend, shared: Bus) -> None:
    """With a timeout, `publish` raises if the socket stays full, and that message is never sent."""
    publisher = await waiting.connect(shared.address)
    with shared.client(b"k") as subscriber:
        sent = 0

        async def publish() -> None:
            nonlocal sent
            while sent < 500:
                await publisher.publish("k", b"%d " % sent + bytes(10_000), timeout=0.05)
                sent += 1

        with paused(shared.pid):
            with pytest.raises(TimedOut, match="not sent: the socket was full"):
                await publish()
            assert 0 < sent < 500
            for call in (publisher.whoami, publisher.fence):
                with pytest.raises(TimedOut):
                    await call(timeout=0.02)
        await publisher.publish("k", b"last", timeout=5.0)
        await publisher.fence()
        got = subscriber.sync()
        assert len(got) == sent + 1
        assert got[-1] == b"MSG k\0last"


async def fill(client: Client) -> list[asyncio.Future[None]]:
    """Publish to a paused server until the socket is full; return the calls that wait."""
    waiting: list[asyncio.Future[None]] = []
    for i in range(500):
        publishing = asyncio.ensure_future(client.publish("k", b"%d " % i + bytes(10_000)))
        await turn()
        if not publishing.done():
            waiting.append(publishing)
    assert 10 < len(waiting) < 490
    return waiting


async def test_cancelled_publish_leaves_the_order(looping: Backend, shared: Bus) -> None:
    """A message whose publish is cancelled while it waits is not sent; all others are, each once, in order."""
    publisher = await looping.connect(shared.address)
    with shared.client(b"k") as subscriber:
        with paused(shared.pid):
            waiting = await fill(publisher)
            await cancel(*waiting[::2])
        await asyncio.gather(*waiting[1::2])
        await publisher.fence()
        got = subscriber.sync()
        numbers = [int(packet.split()[1].partition(b"\0")[2]) for packet in got]
        left = 500 - len(waiting)
        assert numbers == [*range(left), *range(left + 1, 500, 2)]


CALLS: list[Callable[[Client], Any]] = [
    lambda client: client.whoami(),
    lambda client: client.fence(),
    lambda client: client.inbox("x"),
    lambda client: client.request("nobody"),
    lambda client: client.verify("!/cred/1/2/3"),
    lambda client: client.answer_proofs(),
]


async def cancel(*calls: asyncio.Future[Any]) -> None:
    for call in calls:
        assert not call.done()
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} == {asyncio.CancelledError}


async def test_cancelled_calls_leave_the_connection_usable(looping: Backend, shared: Bus) -> None:
    """The late reply to a cancelled call does not complete the next call."""
    client, other = await looping.connect(shared.address), await looping.connect(shared.address)
    sub = await client.subscribe("own")
    await other.respond("up", lambda request: request.payload.upper())
    await other.fence()
    for ask in CALLS:
        await client.fence()
        with paused(shared.pid):
            calls = [asyncio.ensure_future(ask(client)) for _ in range(3)]
            await turn()
            await cancel(*calls)
        await client.publish_many([("own", b"%d" % i) for i in range(300)])
        await client.fence()
        assert [m.payload for m in await sub.get_ready()] == [b"%d" % i for i in range(300)]
        assert await client.request("up", b"x") == b"X"
        assert await client.whoami() == await other.whoami()


async def test_cancelled_close_leaves_the_connection_open(looping: Backend, shared: Bus) -> None:
    """A cancelled `close` closes nothing."""
    client = await looping.connect(shared.address)
    with paused(shared.pid):
        waiting = await fill(client)
        closing = [asyncio.ensure_future(client.close()) for _ in range(2)]
        await turn()
        await cancel(*closing)
    await asyncio.gather(*waiting)
    sub = await client.subscribe("open")
    await client.publish("open", b"still")
    assert (await sub.get()).payload == b"still"


async def test_cancelled_get_loses_nothing(looping: Backend, shared: Bus) -> None:
    """Cancelled readers of a subscription take no message from the others."""
    client = await looping.connect(shared.address)
    sub = await client.subscribe("get")
    gets = [asyncio.ensure_future(sub.get()) for _ in range(6)]
    await client.fence()
    for get in gets[::2]:
        get.cancel()
    await turn()
    await client.publish_many([("get", b"%d" % i) for i in range(4)])
    assert [(await get).payload for get in gets[1::2]] == [b"0", b"1", b"2"]
    assert (await sub.get()).payload == b"3"
    assert sub.raw._readers._waiters == []


async def test_get_that_is_cancelled_too_late_takes_nothing(native: AsyncioBackend, shared: Bus) -> None:
    """A task that is cancelled after its message came, but before it runs, leaves the message."""
    client = await native.connect(shared.address)
    sub = await client.subscribe("get")
    late = asyncio.ensure_future(sub.get())
    await client.fence()
    client.raw._receive_packets([b"MSG get\0late"])
    await cancel(late)
    assert (await sub.get()).payload == b"late"


async def test_waiting_for_messages_that_never_come_keeps_nothing(looping: Backend, shared: Bus) -> None:
    """Waiting with timeouts in a loop accumulates nothing."""
    client = await looping.connect(shared.address)
    sub = await client.subscribe("never")
    for _ in range(20):
        get = asyncio.ensure_future(sub.get())
        await asyncio.sleep(0)
        await cancel(get)
    assert sub.raw._readers._waiters == []


async def test_cancelled_wait_for_the_end_changes_nothing(looping: Backend, shared: Bus) -> None:
    """Cancelling one wait for the end affects neither the connection nor other waits."""
    client = await looping.connect(shared.address)
    wait = client.raw.wait_closed if hasattr(client.raw, "wait_closed") else client.raw.whenClosed
    waits = [asyncio.ensure_future(client.do(wait)) for _ in range(2)]
    await client.fence()
    waits[0].cancel()
    await client.fence()
    await client.close()
    await waits[1]
    assert waits[0].cancelled()


async def test_cancelled_connect_leaves_nothing(looping: Backend, directory: Path) -> None:
    """Connecting to an overloaded server can be cancelled and repeated later."""
    with FakeServer(directory / "fake", backlog=0) as server:
        waiting = server.fill()
        before = descriptors()
        connecting = asyncio.ensure_future(looping.connect(server.address))
        await turn()
        await cancel(connecting)
        assert not descriptors().items() - before.items()
        connecting = asyncio.ensure_future(looping.connect(server.address))
        for _ in range(waiting):
            await server.accept()
        client = await connecting
        peer = await server.accept()
        await client.publish("k", b"hello")
        assert await peer.receive() == b"MSG k\0hello"


async def test_connect_times_out(backend: Backend, directory: Path) -> None:
    """Connecting to a server with a full backlog fails after the timeout, with the reason."""
    with FakeServer(directory / "fake", backlog=0) as server:
        server.fill()
        with pytest.raises(ConnectError, match="accepts no connections: it is overloaded or stopped"):
            await backend.connect(server.address, timeout=0.05)


async def test_no_server_is_told_with_the_remedy(backend: Backend, directory: Path) -> None:
    """If there is no server, the error names the reason and the remedy."""
    with pytest.raises(ConnectError, match=f"no bus at {directory}/none: No such file or directory: start one"):
        await backend.connect(directory / "none")


async def test_loop_that_only_publishes_lets_others_have_their_turn(looping: Backend, shared: Bus) -> None:
    """A loop that only publishes still reads, and its timers run."""
    client = await looping.connect(shared.address)
    got: list[bytes] = []
    await client.subscribe("turn", lambda message: got.append(message.payload))
    timer = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, timer.set)
    for i in range(1_000_000):
        await client.publish("turn", b"%d" % i)
        if timer.is_set() and len(got) > 1000:
            break
    else:
        pytest.fail("nothing else had a turn")
    await client.fence()
    assert got == [b"%d" % n for n in range(i + 1)]


async def test_closing_sends_what_waits(looping: Backend, shared: Bus) -> None:
    """`close` returns when everything is sent, and completes the calls that wait for that."""
    publisher = await looping.connect(shared.address)
    with shared.client(b"k") as subscriber:
        with paused(shared.pid):
            waiting = await fill(publisher)
            closing = asyncio.ensure_future(publisher.close())
            await turn()
            assert not closing.done()
        await closing
        await asyncio.gather(*waiting)
        got = await asyncio.to_thread(subscriber.receive, 500)
        assert got[-1].startswith(b"MSG k\x00499 ")
        with pytest.raises(Closed):
            await publisher.publish("k")
