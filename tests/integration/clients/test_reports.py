"""What the server reports to its clients, in all client libraries: reasons, losses, subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sbus.client.losses import Lost
from sbus.errors import CloseReason, ConnectionLost, NobodyListens, UsageError
from tests.integration.clients.backends import Backend, BlockingBackend, Client, Sub
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus


@contextlib.asynccontextmanager
async def not_reading(client: Client, sub: Sub) -> AsyncIterator[None]:
    """Keep a client from reading its socket; a blocking one does not read by itself."""
    if isinstance(client.backend, BlockingBackend):
        yield
        return
    client.raw.pause_for(sub.raw)
    yield
    client.raw.resume_for(sub.raw)


async def test_reasons(backend: Backend, bus: StartBus) -> None:
    """A client that breaks a rule and one whose server stops get the reason."""
    server = bus()
    offender, bystander = await backend.connect(server.address), await backend.connect(server.address)
    await offender.do(offender.raw.send, [b"NONSENSE"])
    with pytest.raises(ConnectionLost, match="unknown message type") as raised:
        await offender.fence()
    assert raised.value.reason is CloseReason.VIOLATION
    await bystander.fence()
    assert "bye" in bystander.raw.extensions
    server.stop(signal.SIGTERM)
    with pytest.raises(ConnectionLost, match="the server is stopping") as raised:
        await bystander.fence()
    assert raised.value.reason is CloseReason.SERVER_STOPPED


@pytest.mark.parametrize("bundles", [True, False])
async def test_every_message_is_delivered_or_reported(backend: Backend, shared: Bus, bundles: bool) -> None:
    """A reader that falls behind gets a number or a loss for each message, and no gap before its loss."""
    story: list[Any] = []
    reader = await backend.connect(shared.address, bundles=bundles, on_lost=story.append)
    writer = await backend.connect(shared.address)
    await reader.flood_control(soft="discard")
    sub = await reader.subscribe("k")
    await reader.fence()
    assert "receipts" in reader.raw.extensions
    count = 3000
    async with not_reading(reader, sub):
        await writer.publish_many([("k", b"%d " % number + bytes(500)) for number in range(count)])
        await writer.fence()
    await reader.flood_control(soft="queue")
    await reader.fence()
    await writer.publish("k", b"%d " % count)
    await writer.fence()
    while not story or story[-1] != count:
        for message in await sub.get_many():
            story.append(int(message.payload.split()[0]))
    losses = [item for item in story if isinstance(item, Lost)]
    numbers = [item for item in story if isinstance(item, int)]
    assert len(numbers) + sum(lost.messages or 0 for lost in losses) == count + 1
    assert {lost.why for lost in losses} == {"discard"}
    assert reader.raw.lost == sum(lost.messages or 0 for lost in losses)
    reported, expected = 0, 0
    for item in story:
        if isinstance(item, Lost):
            reported += item.messages or 0
            assert item.total == reported
        else:
            assert item - expected <= reported, "a gap came before its loss"
            expected += 1


async def test_watching_subscribers(backend: Backend, shared: Bus) -> None:
    """`has_subscribers` and a watch follow the subscriptions of others."""
    client, other = await backend.connect(shared.address), await backend.connect(shared.address)
    assert await client.has_subscribers("watched/key") is False
    watch = await client.watch_subscribers("watched/key")
    assert await watch.get() is False
    sub = await other.subscribe("watched/")
    assert await watch.get() is True
    assert await client.has_subscribers("watched/key") is True
    await sub.close()
    assert await watch.get() is False
    await watch.close()
    assert await client.has_subscribers("!/cred////secret") is True


async def test_request_to_nobody(backend: Backend, shared: Bus) -> None:
    """A request fails at once where nobody subscribes, and as soon as a responder is there, it is answered."""
    client, server = await backend.connect(shared.address), await backend.connect(shared.address)
    with pytest.raises(NobodyListens):
        await client.request("nobody/there", timeout=3 * TIMEOUT)
    await server.respond("nobody/there", lambda request: request.payload.upper())
    await server.fence()
    async with server.serving():
        assert await client.request("nobody/there", b"x", timeout=TIMEOUT) == b"X"


async def test_server_without_interest(backend: Backend, bus: StartBus) -> None:
    """In the early dialect asking raises UsageError; losses are those between connections alone."""
    server = bus("--dialect=early")
    losses: list[Lost] = []
    client = await backend.connect(server.address, dialect="early", on_lost=losses.append)
    with pytest.raises(UsageError, match="early dialect has no control messages"):
        await client.has_subscribers("k")
    with pytest.raises(UsageError, match="early dialect has no control messages"):
        await client.watch_subscribers("k")
    with pytest.raises(UsageError, match="early dialect has no control messages"):
        await client.subscribe("k", last=True)
    await client.fence()
    assert losses == []


async def test_last_values(backend: Backend, bus: StartBus) -> None:
    """A client that comes late gets the last value of each key, marked, and then what is published, once."""
    server = bus("--last-value=state/")
    writer, reader = await backend.connect(server.address), await backend.connect(server.address)
    for number in range(3):
        await writer.publish_many([(f"state/{key}", b"%d" % number) for key in range(100)])
    await writer.publish_many([("state/0", b""), ("other", b"x")])
    await writer.fence()
    wide = await reader.subscribe("")
    sub = await reader.subscribe("state/*", last=True)
    await reader.fence()
    await writer.publish("state/1", b"live")
    got = [await sub.get() for _ in range(100)]
    assert [(m.key, m.payload) for m in got[:99]] == [(b"state/%d" % key, b"2") for key in range(1, 100)]
    assert [m.is_last_value for m in got] == [True] * 99 + [False]
    assert (await wide.get()).payload == b"live"
    assert "last" in reader.raw.extensions
    await sub.close()
    await wide.close()
    assert await reader.has_subscribers("state/1") is False


async def test_newest_of_each_key(backend: Backend, shared: Bus) -> None:
    """With ``soft="latest"`` a slow reader gets the newest message of each key, and no loss is reported."""
    losses: list[Lost] = []
    reader = await backend.connect(shared.address, on_lost=losses.append)
    writer = await backend.connect(shared.address)
    await reader.flood_control(soft="latest")
    sub = await reader.subscribe("k/")
    await reader.fence()
    rounds, keys = 100, 50
    async with not_reading(reader, sub):
        for number in range(rounds):
            await writer.publish_many([(f"k/{key}", b"%d " % number + bytes(500)) for key in range(keys)])
        await writer.fence()
    newest: dict[bytes, int] = {}
    count = 0
    async with asyncio.timeout(TIMEOUT):
        while len(newest) < keys or min(newest.values()) < rounds - 1:
            for message in await sub.get_many():
                newest[message.key] = int(message.payload.split()[0])
                count += 1
    assert count < rounds * keys
    assert losses == []
