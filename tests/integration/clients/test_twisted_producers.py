"""Producers of Twisted, push and pull, as publishers."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from sbus.errors import Disconnected
from sbus.syscalls.batch import BATCH
from tests.integration.clients.backends import Client, TwistedBackend, turn, wait_quiet
from tests.integration.clients.deferreds import QUICK, Push
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


class Pull:
    """A pull producer that publishes one message each time it is resumed, `count` in all."""

    def __init__(self, client: Client, count: int) -> None:
        self.bus = client.raw
        self.count = count
        self.published = 0
        self.stopped = False

    def resumeProducing(self) -> None:
        if self.published == self.count:
            self.bus.unregisterProducer()
            return
        number, self.published = self.published, self.published + 1
        self.bus.publish("k", b"%d " % number + bytes(2000)).addErrback(lambda failure: failure.trap(Disconnected))

    def stopProducing(self) -> None:
        self.stopped = True


def numbers(packets: list[bytes]) -> list[int]:
    return [int(packet.partition(b"\0")[2].split()[0]) for packet in packets]


async def test_push_producer_follows_the_socket(twisted: TwistedBackend, bus: StartBus) -> None:
    """A push producer is paused while the socket is full, and resumed when all is sent; nothing is lost."""
    server = bus()
    client = await twisted.connect(server.address)
    subscriber = server.client(b"k")
    producer = Push(client)
    with paused(server.pid):
        client.raw.registerProducer(producer, True)
        assert producer.reported == []
        producer.begin()
        await wait_quiet(lambda: producer.published)
        assert producer.reported == ["pause"]
        assert 1 <= len(client.raw.outbox) < 1 + 65_536 / 2000
        held = producer.published
    while producer.published < held + 2000:
        await turn()
    client.raw.unregisterProducer()
    producer.stop()
    await client.fence()
    assert producer.reported == ["pause", "resume"] * (len(producer.reported) // 2) + ["pause"] * (
        len(producer.reported) % 2
    )
    assert numbers(subscriber.sync()) == list(range(producer.published))
    before = list(producer.reported)
    await client.publish("k", b"x")
    assert producer.reported == before


async def test_pull_producer_is_asked_when_nothing_waits(twisted: TwistedBackend, bus: StartBus) -> None:
    """A pull producer is resumed once for each message, and not while the socket is full."""
    server = bus()
    client = await twisted.connect(server.address)
    subscriber = server.client(b"k")
    producer = Pull(client, 5000)
    steps: list[int] = []

    def watch(before: int) -> None:
        steps.append(producer.published - before)
        if producer.published < producer.count:
            asyncio.get_running_loop().call_soon(watch, producer.published)

    with paused(server.pid):
        client.raw.registerProducer(producer, False)
        await wait_quiet(lambda: producer.published)
        assert 0 < producer.published < producer.count
        assert len(client.raw.outbox) == 1
    watch(producer.published)
    got = numbers(await asyncio.to_thread(subscriber.receive, 5000))
    await client.fence()
    assert got == list(range(5000))
    assert max(steps) <= BATCH  # the reactor does other work, however fast the server is
    assert not producer.stopped


async def test_one_producer_at_a_time(twisted: TwistedBackend, shared: Bus) -> None:
    """A second producer is refused while there is one; a producer is stopped at the end."""
    client = await twisted.connect(shared.address)
    one, two, three = Push(client), Push(client), Push(client)
    client.raw.registerProducer(one, True)
    with pytest.raises(RuntimeError, match="never unregistered"):
        client.raw.registerProducer(two, True)
    client.raw.unregisterProducer()
    client.raw.unregisterProducer()
    client.raw.registerProducer(two, True)
    await client.close()
    client.raw.registerProducer(three, True)
    assert (one.reported, two.reported, three.reported) == ([], ["stop"], ["stop"])


async def test_producer_survives_a_lost_connection(twisted: TwistedBackend, bus: StartBus) -> None:
    """A producer is paused without a connection, and resumed on the next one; unsent messages are sent."""
    server = bus()
    client = await twisted.connect(server.address, reconnect=QUICK)
    subscriber = server.client(b"k")
    push = Push(client)
    client.raw.registerProducer(push, True)
    push.begin()
    await asyncio.to_thread(subscriber.receive, 100)
    server.kill(signal.SIGKILL)
    server.wait()
    await wait_quiet(lambda: push.published)
    assert push.reported[-1] == "pause"
    server = bus("--reuse")
    subscriber = server.client(b"k")
    held = push.published
    while push.published < held + 100:
        await turn()
    client.raw.unregisterProducer()
    push.stop()
    await client.fence()
    got = numbers(subscriber.sync())
    assert got == list(range(got[0], push.published))
    pull = Pull(client, 300)
    client.raw.registerProducer(pull, False)
    while pull.published < 100:
        await turn()
    server.kill(signal.SIGKILL)
    server.wait()
    await wait_quiet(lambda: pull.published)
    bus("--reuse")
    while pull.published < 300:
        await turn()
    await client.settle()


async def test_producers_are_stopped_at_the_end(twisted: TwistedBackend, directory: Path) -> None:
    """The end of the connection stops its producer."""
    for make in (Push, lambda client: Pull(client, 10**9)):
        with FakeServer(directory / "fake") as server:
            client = await twisted.connect(server.address)
            peer = await server.accept()
            producer: Any = make(client)
            client.raw.registerProducer(producer, make is Push)
            peer.close()
            with pytest.raises(Disconnected):
                await client.fence()
            assert producer.stopped
            await turn()
            server.vanish()


async def test_producer_that_fails_is_logged(twisted: TwistedBackend, shared: Bus) -> None:
    """An exception of a producer is logged and does not affect the connection."""

    class Broken:
        def resumeProducing(self) -> None:
            raise ZeroDivisionError

        def stopProducing(self) -> None:
            raise KeyError

    client = await twisted.connect(shared.address)
    client.raw.registerProducer(Broken(), False)
    assert [type(error) for error in twisted.take_failures()] == [ZeroDivisionError]
    await client.fence()
    await client.close()
    assert [type(error) for error in twisted.take_failures()] == [KeyError]
