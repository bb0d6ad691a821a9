"""Limits that client and server need not agree on beforehand: the longest packet, and what waits without a bus."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sbus
import sbus.client.blocking
from sbus.client.losses import Lost
from sbus.errors import BufferFull, Disconnected, PacketTooLong, TimedOut
from tests.integration.clients.backends import Backend, BlockingBackend, Client, turn
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused

RAISED = "--max-packet=1000000"
LONG = b"x" * 900_000


async def test_raised_limit_is_learnt(backend: Backend, bus: StartBus) -> None:
    """Clients that do not know of a raised limit get longer messages, and publish them, from the first call on."""
    server = bus(RAISED)
    one, other = await backend.connect(server.address), await backend.connect(server.address)
    sub = await other.subscribe("k")
    await one.publish("k", LONG)  # nothing of this connection has been read yet
    await other.fence()
    await one.publish_many([("k", LONG), ("k", b"short")])
    sizes: list[int] = []
    while sizes[-1:] != [5]:
        sizes += map(len, await sub.take(1))
    assert sizes in ([900_000, 900_000, 5], [900_000, 5])  # the first one may come before the subscription
    with pytest.raises(PacketTooLong, match=r"the limit is 1000000; .*the operator raise the limit of the bus"):
        await one.publish("k", bytes(1_000_000))
    assert other.raw.lost == 0


async def test_lowered_limit_is_learnt(backend: Backend, bus: StartBus) -> None:
    """A first message longer than a lowered limit raises an error, and the connection stays."""
    server = bus("--max-packet=100000")
    long = bytes(200_000)
    for publish in (
        lambda client: client.publish("k", long),
        lambda client: client.publish_many([("k", b"short"), ("k", long)]),
        lambda client: client.publish_batch(lambda batch: batch.publish("k", long)),
        lambda client: client.request("k", long),
    ):
        client = await backend.connect(server.address)
        with pytest.raises(PacketTooLong, match=r"2000\d\d bytes, and the limit is 100000; .*"):
            await publish(client)
        sub = await client.subscribe("k")
        await client.publish("k", long[:90_000])
        assert [len(payload) for payload in await sub.take(1)] == [90_000]


async def test_long_reply_to_a_server_that_says_nothing(looping: Backend, directory: Path) -> None:
    """A responder that has asked the server nothing sends a reply of any length up to the usual limit at once."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address)
        await client.respond("k", lambda request: bytes(300_000))
        peer = await server.accept()
        peer.raise_send_buffer()
        peer.send(b"MSG k\0!/cred/1/2/3/sbus/reply/1\0")
        reply = b"MSG !/cred/1/2/3/sbus/reply/1\0+" + bytes(300_000)
        assert (await peer.receive_until(reply))[-1] == reply


@pytest.mark.parametrize("answers", [[], [b"CMSG bundle/on\x0065536"]], ids=["plain", "bundles"])
async def test_long_message_with_the_first_answers(backend: Backend, directory: Path, answers: list[bytes]) -> None:
    """A long message that is read by the same call as the server's limit arrives whole."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, bundles=bool(answers))
        sub = await client.subscribe("k")
        messages = [b"MSG k\x001", b"MSG k\0".ljust(500_000, b"x"), b"MSG k\x003"]
        await raised_peer(server, *answers, b"CMSG bye/on\x001000000", *messages)
        assert [len(payload) for payload in await sub.take(3)] == [1, 499_994, 1]
        assert client.raw.core.max_packet == 1_000_000


async def test_limit_is_learnt_again_after_a_restart(backend: Backend, bus: StartBus) -> None:
    """A client that reconnects to a bus with another limit adopts it, a longer one and a shorter one."""
    server = bus()
    gaps: list[Any] = []
    client = await backend.connect(server.address, reconnect=True, on_gap=gaps.append)
    sub = await client.subscribe("k")
    for option, size in ((RAISED, 900_000), ("--max-packet=500000", 490_000), (RAISED, 900_000)):
        server.kill(signal.SIGKILL)
        server.wait()
        server = bus(option, "--reuse")
        publisher = await backend.connect(server.address)
        async with asyncio.timeout(TIMEOUT):
            while not await publisher.has_subscribers("k"):
                if isinstance(backend, BlockingBackend):
                    with contextlib.suppress(Disconnected):  # it finds out in its calls
                        await client.fence()
                await asyncio.sleep(0.01)
        await client.publish("k", bytes(size))
        assert [len(payload) for payload in await sub.take(1)] == [size]
        with pytest.raises(PacketTooLong):
            await client.publish("k", bytes(1_000_000))


@pytest.mark.parametrize("is_noticed", [False, True])
def test_limit_is_learnt_again_by_the_message_that_needs_it(bus: StartBus, is_noticed: bool) -> None:
    """A blocking client asks a bus that was restarted for its limit before it refuses a message by the old one."""
    calls: list[Callable[[sbus.client.blocking.Bus], object]] = [
        lambda client: client.publish("k", bytes(700_000)),
        lambda client: client.publish("k", bytes(700_000), timeout=TIMEOUT),
        lambda client: client.publish_many([("k", bytes(700_000))]),
        lambda client: client.request("echo", bytes(700_000)) == b"7" * 9,
        lambda client: client.enqueue("q", "k", bytes(700_000)) == 777_777_777,
    ]
    for call in calls:
        server = bus("--max-packet=500000", "--reuse")
        with sbus.connect(str(server.address), reconnect=True) as client:
            client.subscribe("k")
            for key in ("echo", "queue/q/put/k"):
                client.respond(key, lambda request: b"7" * 9)
            client.enqueue("q", "k")
            server.kill(signal.SIGKILL)
            server.wait()
            if is_noticed:
                with pytest.raises(Disconnected):
                    client.fence()
            server = bus(RAISED, "--reuse")
            result = call(client)
            assert result in (None, True)
            if result is None:
                assert len(client.receive(TIMEOUT).payload) == 700_000
            with pytest.raises(PacketTooLong, match="the limit is 1000000"):
                client.publish("k", bytes(1_000_000))
        server.kill(signal.SIGKILL)
        server.wait()


def test_long_message_after_the_end(bus: StartBus) -> None:
    """A message too long for a bus that is gone fails with the loss, or waits for the next one as long as it may."""
    server = bus()
    address = str(server.address)
    with sbus.connect(address) as once, sbus.connect(address, reconnect=True) as client:
        for each in (once, client):
            each.fence()
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            once.publish("k", LONG)
        with pytest.raises(TimedOut):
            client.publish("k", LONG, timeout=0.01)
        with pytest.raises(BlockingIOError):
            client.publish("k", LONG, flags=socket.MSG_DONTWAIT)


BIG = b"x" * 200_000
"""A payload that goes into memory, if the server agrees."""


@pytest.mark.parametrize(
    ("settings", "first"), [({}, LONG), ({"payloads": True}, BIG)], ids=["a long packet", "in memory"]
)
async def test_publishing_keeps_its_order_up_to_the_limit(
    looping: Backend, bus: StartBus, settings: dict[str, Any], first: bytes
) -> None:
    """What is published while a long message waits for the server's limit follows it; so it does when closing."""
    server = bus(RAISED)
    reader = await looping.connect(server.address, payloads=True)
    sub = await reader.subscribe("k")
    await reader.fence()
    client = await looping.connect(server.address, **settings)
    calls = [
        client.publish("k", first),
        client.publish("k", b"2"),
        client.publish_batch(lambda batch: batch.publish("k", b"3")),
        client.publish_many([("k", b"4"), ("k", first)]),
        client.publish_many([]),
        client.publish("k", b"6"),
        client.close(),
    ]
    await asyncio.gather(*calls)
    assert [bytes(payload) for payload in await sub.take(6)] == [first, b"2", b"3", b"4", first, b"6"]


async def test_batch_is_not_overtaken(looping: Backend, bus: StartBus) -> None:
    """A batch that waits for the agreement about payloads comes before later messages."""
    client = await looping.connect(bus().address, payloads=True)
    sub = await client.subscribe("k")

    def fill(batch: Any) -> None:
        batch.publish("k", BIG)
        batch.publish("k", b"2")

    await asyncio.gather(client.publish_batch(fill), client.publish("k", b"3"))
    assert [bytes(payload) for payload in await sub.take(3)] == [BIG, b"2", b"3"]


async def test_waiting_for_the_limit_ends(looping: Backend, directory: Path) -> None:
    """If the connection is lost first, the long message fails; others are sent later, unless they were given up."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, reconnect=True)
        peer = await server.accept()
        calls = [asyncio.ensure_future(client.publish("k", each)) for each in (LONG, b"2", b"3", b"4")]
        await turn()
        calls[2].cancel()
        await turn()
        peer.close()
        with pytest.raises(Disconnected):
            await calls[0]
        peer = await server.accept()
        assert await peer.answer() == []
        assert await peer.receive_until(b"MSG k\x004") == [b"MSG k\x002", b"MSG k\x004"]
        await asyncio.gather(calls[1], calls[3])


async def raised_peer(server: FakeServer, *packets: bytes) -> FakePeer:
    peer = await server.accept()
    peer.raise_send_buffer()
    peer.send(*packets)
    return peer


async def exchange(client: Client, peer: FakePeer, *packets: bytes) -> None:
    """Have a client read packets, which the peer sends one by one."""
    for packet in packets:
        fencing = asyncio.ensure_future(client.fence())
        await turn()
        peer.send(packet)
        await peer.answer()
        await fencing


@pytest.mark.parametrize("settings", [{}, {"bundles": False, "max_packet": 1000}])
async def test_long_message_of_a_server_that_says_nothing(
    backend: Backend, directory: Path, settings: dict[str, Any]
) -> None:
    """A message that is longer than the buffer is a loss with its size and a reason, in its place."""
    story: list[Any] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_lost=story.append, **settings)
        await client.subscribe("k", lambda message: story.append(message.payload))
        peer = await raised_peer(server, b"CMSG bye/on\0")
        await exchange(client, peer, b"MSG k\0one", b"MSG k\0two", b"MSG k\0".ljust(600_000, b"x"), b"MSG k\0three")
        assert story == [b"one", b"two", Lost(1, 600_000, None, "too-large"), b"three"]
        assert client.raw.lost == 1


async def test_long_message_is_logged(backend: Backend, directory: Path) -> None:
    """Without ``on_lost``, what was too long is counted, and logged once with its size."""
    said: list[str] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        client.raw._warn = said.append
        await client.subscribe("k", lambda message: None)
        peer = await raised_peer(server, b"CMSG bye/on\0")
        await exchange(client, peer, b"MSG k\0", *[b"MSG k\0".ljust(600_000, b"x")] * 3)
        assert client.raw.lost == 3
        (line,) = said
        assert "the last one of 600000 bytes; connect with max_packet=" in line


async def test_long_message_in_the_early_dialect(backend: Backend, bus: StartBus) -> None:
    """A bus of the early dialect says no limit: what is too long is a loss, unless the client knows the limit."""
    server = bus("--dialect=early", RAISED)
    lost: list[Lost] = []
    early = {"dialect": "early"}
    publisher = await backend.connect(server.address, **early, max_packet=1_000_000)
    knows = await backend.connect(server.address, **early, max_packet=1_000_000)
    does_not = await backend.connect(server.address, **early, on_lost=lost.append)
    subs = [await client.subscribe("k") for client in (knows, does_not)]
    for client in (knows, does_not):
        for _ in range(3):
            await client.fence()
    await publisher.publish_many([("k", LONG), ("k", b"short")])
    assert await subs[0].take(2) == [LONG, b"short"]
    assert await subs[1].take(1) == [b"short"]
    assert lost == [Lost(1, 900_006, None, "too-large")]


@pytest.mark.parametrize("options", [[RAISED], ["--max-packet=500000"], []], ids=str)
async def test_long_messages_that_wait_for_a_bus(looping: Backend, bus: StartBus, options: list[str]) -> None:
    """A long message goes to the next bus if that takes it. Else its call fails, and the client connects anyway."""
    gaps: list[Exception] = []
    client = await without_bus(looping, bus(RAISED), reconnect_buffer=8 << 20, on_gap=gaps.append)
    sub = await client.subscribe("k")
    messages = [[b"1"], [LONG], [b"2", LONG, b"3"], [b"4"]]
    calls = [asyncio.ensure_future(client.publish_many([("k", each) for each in many])) for many in messages]
    await turn()
    bus(*options, "--reuse")
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await client.settle()
    taken = messages if options == [RAISED] else [many for many in messages if LONG not in many]
    assert [type(outcome) is PacketTooLong for outcome in outcomes] == [many not in taken for many in messages]
    expected = [payload for many in taken for payload in many]
    assert await sub.take(len(expected)) == expected
    assert (client.raw.state, len(gaps)) == ("connected", 1)


@pytest.mark.parametrize("when", ["away", "back"])
async def test_messages_for_a_bus_with_less_than_the_usual_limit(looping: Backend, bus: StartBus, when: str) -> None:
    """A bus that takes less than is usual gets no longer message, and the client stays connected to it."""
    gaps: list[Exception] = []
    client = await without_bus(looping, bus(), on_gap=gaps.append)
    sub = await client.subscribe("k")
    if when == "back":
        bus("--max-packet=1000", "--reuse")
        while not client.raw.is_connected():
            await asyncio.sleep(0)  # the answer to the question for the limit takes longer
    sizes = [1, 300_000, 2, 2000, 3]
    calls = [asyncio.ensure_future(client.publish("k", bytes(size))) for size in sizes]
    await turn()
    if when == "away":
        bus("--max-packet=1000", "--reuse")
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), PacketTooLong, type(None), PacketTooLong, type(None)]
    assert "300006 bytes, and the limit is 1000" in str(outcomes[1])
    assert [len(payload) for payload in await sub.take(3)] == [1, 2, 3]
    await client.settle()
    assert len(gaps) == 1


async def test_long_messages_for_a_bus_with_a_lower_limit(waiting: BlockingBackend, bus: StartBus) -> None:
    """The call that reconnects raises if the new bus does not take its message; the bus sees none of it."""
    server = bus(RAISED)
    client = await waiting.connect(server.address, reconnect=True)
    await client.fence()
    calls = [
        partial(client.publish, "k", LONG[:500_000]),
        partial(client.publish, "k", LONG[:500_000], timeout=TIMEOUT),
        partial(client.publish_many, [("k", b"1"), ("k", LONG[:500_000])]),
    ]
    for number, call in enumerate(calls):
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            await client.fence()
        server = bus("--reuse")
        with pytest.raises(PacketTooLong, match="500006 bytes, and the limit is 409600"):
            await call()
        sub = await client.subscribe("k")
        await client.publish("k", b"%d" % number)
        assert await sub.take(1) == [b"%d" % number]
        server.kill(signal.SIGKILL)
        server.wait()
        with pytest.raises(Disconnected):
            await client.fence()
        server = bus(RAISED, "--reuse")
        await client.settle()
        await sub.close()


async def test_long_message_for_a_server_that_says_nothing(looping: Backend, directory: Path) -> None:
    """If the next server ignores the question for its limit, a long message is refused, and the others are sent."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, reconnect=True)
        peer = await raised_peer(server, b"CMSG bye/on\x001000000")
        fencing = asyncio.ensure_future(client.fence())
        await peer.answer()
        await fencing
        peer.close()
        server.vanish()
        while client.raw.state != "reconnecting":
            await turn()
        calls = [asyncio.ensure_future(client.publish("k", payload)) for payload in (b"1", LONG, b"2")]
        await turn()
        server.listen()
        peer = await server.accept()
        assert await peer.answer() == []
        assert await peer.receive_until(b"MSG k\x002") == [b"MSG k\x001", b"MSG k\x002"]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), PacketTooLong, type(None)]
        await turn()
        assert client.raw.state == "connected"


async def without_bus(looping: Backend, server: Bus, **settings: Any) -> Any:
    client = await looping.connect(server.address, reconnect=True, **settings)
    await client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    while client.raw.state != "reconnecting":
        await turn()
    return client


async def test_publish_that_was_given_up_is_not_sent(looping: Backend, bus: StartBus) -> None:
    """What is cancelled while there is no bus is not sent when it is back; the rest is, in order."""
    server = bus()
    client = await without_bus(looping, server)
    calls = [asyncio.ensure_future(client.publish("k", b"%d" % number)) for number in range(9)]
    calls.append(asyncio.ensure_future(client.publish_many([("k", b"many"), ("k", b"more")])))
    calls.append(asyncio.ensure_future(client.publish_many([("k", b"9"), ("k", b"10")])))
    await turn()
    for call in (*calls[1:9:2], calls[9]):
        call.cancel()
    await turn()
    server = bus("--reuse")
    with server.client(b"k") as subscriber:
        await asyncio.gather(*calls, return_exceptions=True)
        await client.fence()
        got = [packet.partition(b"\0")[2] for packet in subscriber.sync()]
    assert got == [b"%d" % number for number in (0, 2, 4, 6, 8, 9, 10)][-len(got) :]


async def test_what_waits_for_a_bus_is_bounded(looping: Backend, bus: StartBus) -> None:
    """A publish past ``reconnect_buffer`` raises an error that names it; what is taken back makes room."""
    server = bus()
    client = await without_bus(looping, server, reconnect_buffer=10_000)
    message = b"x" * 994  # a packet of 1000 bytes
    waiting = [asyncio.ensure_future(client.publish("k", message)) for _ in range(10)]
    await turn()
    with pytest.raises(BufferFull, match=r"10000 bytes wait for one \(reconnect_buffer=10000\)"):
        await client.publish("k", b"")
    with pytest.raises(BufferFull):
        await client.publish_many([("k", b""), ("k", message)])
    await client.subscribe("other")  # the client's choices are no messages
    waiting[3].cancel()
    await turn()
    again = asyncio.ensure_future(client.publish("k", message))
    await turn()
    assert not again.done()
    bus("--reuse")
    await asyncio.gather(*waiting, again, return_exceptions=True)
    await client.fence()
    await client.publish_many([("k", message)] * 20)  # there is no limit while there is a bus


async def test_request_that_was_given_up_is_not_sent(backend: Backend, shared: Bus) -> None:
    """A request that timed out before it could leave is not sent later."""
    client = await backend.connect(shared.address)
    await client.do(client.raw.answer_proofs)  # the name of the client is known from here on
    with shared.client(b"ask") as responder:
        first = asyncio.ensure_future(client.request("ask"))  # from here on, a request is one packet
        question = await asyncio.to_thread(responder.recv)
        responder.msg(question.split(b"\0")[1], b"+")
        await first
        with paused(shared.pid):
            sent = 0
            while sent < 2000 and await leaves(client):
                sent += 1
            assert sent < 2000
            with pytest.raises(TimedOut):
                await client.request("ask", timeout=0.05)
        await client.fence()
        assert responder.sync() == []


async def leaves(client: Client) -> bool:
    """Publish a message if the socket has room for it; return whether it was sent."""
    limit = {"timeout": 0.02} if isinstance(client.backend, BlockingBackend) else {}
    publishing = asyncio.ensure_future(client.publish("fill", bytes(10_000), **limit))
    if limit:
        await asyncio.wait((publishing,))
        return publishing.exception() is None
    await turn()
    return publishing.done() or not publishing.cancel()
