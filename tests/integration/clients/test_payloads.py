"""With all client libraries, large messages travel in sealed memory, if the server takes them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sbus.client.core import Message
from sbus.client.payloads import Outgoing
from sbus.errors import BufferFull, Disconnected, PacketTooLong, RequestFailed
from sbus.protocol.bundles import unbundle
from sbus.protocol.packets import LEAST_PAYLOAD, build_range
from sbus.syscalls.memfd import Attached
from tests.integration.clients.backends import Backend, Client, TwistedBackend, turn
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.integration.clients.losses import QUICK, WHOAMI
from tests.support.harness import Bus
from tests.support.packets import bundle, sealed

ON = b"CMSG payload/on"
ANSWER = ON + b"\x001000 100000"
NAME = WHOAMI + b"\0!/cred/1/2/3"
BYE = b"CMSG bye/on\0"
BUNDLES = b"CMSG bundle/on\x0065536"


async def settle(client: Client, peer: FakePeer, *answers: bytes) -> None:
    """Give the answers to a client that has connected, and make it read them."""
    assert await peer.receive_until(WHOAMI) == [ON, WHOAMI]
    peer.send(BYE, *answers, NAME)
    asking = asyncio.ensure_future(client.whoami())
    assert await peer.receive() == WHOAMI
    peer.send(NAME)
    await asking


@pytest.mark.parametrize("answers", [(), (BUNDLES,)], ids=["plain", "bundles"])
async def test_large_messages_are_sent_in_memory(backend: Backend, directory: Path, answers: tuple[bytes, ...]) -> None:
    """What is large enough goes into memory, in the order of the calls; the messages of a batch into one."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True)
        peer = await server.accept()
        await settle(client, peer, *answers, ANSWER)
        await client.publish("a", b"small")
        await client.publish("b", b"x" * 1000)
        await client.publish("c", b"small")
        assert await peer.receive() == b"MSG a\0small"
        packet = await peer.receive_attached()
        assert packet == build_range(b"b", 0, 1000)
        assert packet.files[0].fault() is None
        assert packet.files[0].read(0, 1000) == b"x" * 1000
        assert await peer.receive() == b"MSG c\0small"

        def fill(batch: Any) -> None:
            view = batch.allocate(3000)
            view[:5] = b"hello"
            batch.publish("d", view)
            batch.publish("e", view[1:5])
            view[:5] = b"other"

        await client.publish_batch(fill)
        expected = [build_range(b"d", 0, 3000), build_range(b"e", 3008, 4)]
        if answers:
            packet = await peer.receive_attached()
            assert unbundle([bytes(packet)]) == expected
        else:
            packet, other = await peer.receive_attached(), await peer.receive_attached()
            assert [packet, other] == expected
            assert os.path.sameopenfile(packet.files[0].fileno(), other.files[0].fileno())
        assert packet.files[0].read(0, 5) == b"hello"
        with pytest.raises(PacketTooLong, match="--max-payload"):
            await client.publish("k", bytes(100_001))


async def test_first_large_message_waits_for_the_answer(backend: Backend, directory: Path) -> None:
    """A large message, or a batch, that is published at once waits until it is known what the server takes."""
    with FakeServer(directory / "fake") as server:
        for call in (
            lambda client: client.publish("k", bytes(80_000)),
            lambda client: client.publish_many([("k", bytes(80_000))]),
            lambda client: client.publish_batch(lambda batch: batch.publish("k", bytes(80_000))),
        ):
            client = await backend.connect(server.address, payloads=True)
            peer = await server.accept()
            publishing = asyncio.ensure_future(call(client))
            assert await peer.receive_until(WHOAMI) == [ON, WHOAMI]
            assert await peer.receive() == WHOAMI
            peer.send(ANSWER, NAME, NAME)
            assert await peer.receive_attached() == build_range(b"k", 0, 80_000)
            await publishing


async def test_server_without_payloads_gets_ordinary_messages(backend: Backend, directory: Path) -> None:
    """A server that ignores the question gets the bytes of each message."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True)
        peer = await server.accept()
        await settle(client, peer)
        await client.publish("a", b"x" * 80_000)
        await client.publish_batch(lambda batch: batch.publish("b", b"y" * 80_000))
        assert await peer.receive() == b"MSG a\0" + b"x" * 80_000
        assert await peer.receive() == b"MSG b\0" + b"y" * 80_000
        assert "payload" not in client.raw.extensions


async def test_large_messages_arrive_as_views(backend: Backend, directory: Path) -> None:
    """Messages in memory, alone and in bundles, arrive in order among the others; what has no memory is a loss."""
    lost: list[Any] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True, on_lost=lost.append)
        sub = await client.subscribe("")
        peer = await server.accept()
        peer.send(BUNDLES, ANSWER)
        memory = sealed(b"0123456789")
        peer.send(b"MSG a\0a")
        peer.send_attached(bundle(build_range(b"b", 0, 2), b"MSG c\0c", build_range(b"d", 2, 3)), memory)
        peer.send_attached(build_range(b"e", 9, 1), memory)
        peer.send(build_range(b"f", 0, 1))
        peer.send(b"MSG g\0g")
        messages = [await sub.get() for _ in range(6)]
        assert [(message.key, bytes(message.payload)) for message in messages] == [
            (b"a", b"a"), (b"b", b"01"), (b"c", b"c"), (b"d", b"234"), (b"e", b"9"), (b"g", b"g"),
        ]  # fmt: skip
        assert [type(message.payload) for message in messages] == [
            bytes,
            memoryview,
            bytes,
            memoryview,
            memoryview,
            bytes,
        ]
        assert [(loss.messages, loss.why) for loss in lost] == [(1, "payload")]


async def lose(client: Client, peer: FakePeer, server: FakeServer) -> list[asyncio.Future[None]]:
    """End the connection, and publish large messages before there is another one."""
    peer.close()
    server.vanish()
    with pytest.raises(Disconnected):
        await client.fence()
    calls = [client.publish("k", b"first"), client.publish("k", bytes(50_000)), client.publish("k", bytes(1_000))]
    calls.append(client.publish("k", b"last"))
    publishing: list[asyncio.Future[None]] = [asyncio.ensure_future(call) for call in calls]
    await turn()
    server.listen()
    return publishing


async def resume(server: FakeServer, *answers: bytes) -> FakePeer:
    """Accept the next connection, and give the answers to its first questions."""
    peer = await server.accept()
    assert (await peer.receive_until(WHOAMI))[-2:] == [ON, WHOAMI]
    peer.send(*answers, NAME)
    return peer


async def next_message(peer: FakePeer) -> bytes:
    """Answer each ``whoami`` up to a message, and return that, with its descriptors."""
    while (packet := await peer.receive_any()) == WHOAMI:
        peer.send(NAME)
    return packet


async def test_what_waits_is_sent_in_memory_on_the_next_connection(backend: Backend, directory: Path) -> None:
    """Messages that wait for a connection keep their memory; they go out when the next server has agreed."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True, reconnect=QUICK)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        publishing = await lose(client, peer, server)
        peer = await resume(server, ANSWER)
        packets = [await next_message(peer) for _ in range(4)]
        assert packets == [b"MSG k\0first", build_range(b"k", 0, 50_000), build_range(b"k", 0, 1_000), b"MSG k\0last"]
        assert [type(packet) for packet in packets] == [bytes, Attached, Attached, bytes]
        await asyncio.gather(*publishing)


async def test_what_waits_is_sent_as_bytes_to_a_server_without_payloads(backend: Backend, directory: Path) -> None:
    """If the next server takes no payloads, it gets the bytes, in order."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True, reconnect=QUICK)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        publishing = await lose(client, peer, server)
        peer = await resume(server)
        sizes = [len(await next_message(peer)) for _ in range(4)]
        assert sizes == [11, 50_006, 1_006, 10]
        await asyncio.gather(*publishing)


async def test_what_waits_counts_for_the_reconnect_buffer(looping: Backend, directory: Path) -> None:
    """The bytes of the payloads count as what waits, not those of their packets."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, payloads=True, reconnect=QUICK, reconnect_buffer=80_000)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        peer.close()
        server.vanish()
        with pytest.raises(Disconnected):
            await client.fence()
        publishing = asyncio.ensure_future(client.publish("k", bytes(50_000)))
        await turn()
        with pytest.raises(BufferFull):
            await client.publish("k", bytes(50_000))
        publishing.cancel()
        await turn()
        assert not any(isinstance(packet, Outgoing) for packet in client.raw.outbox.packets)


@pytest.mark.parametrize(
    ("answers", "error"), [((), "90006 bytes"), ((ON + b"\x001000 60000",), "90000 bytes of payload, .* 60000")]
)
async def test_message_that_does_not_fit_the_next_server(
    backend: Backend, directory: Path, answers: tuple[bytes, ...], error: str
) -> None:
    """A large message that waits for a server which does not take it is not sent, and its call fails."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True, reconnect=QUICK, max_packet=70_000)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        peer.close()
        server.vanish()
        with pytest.raises(Disconnected):
            await client.fence()
        publishing = asyncio.ensure_future(client.publish_many([("k", bytes(90_000)), ("k", b"with it")]))
        await turn()
        server.listen()
        peer = await resume(server, *answers)
        answering = asyncio.ensure_future(next_message(peer))
        with pytest.raises(PacketTooLong, match=error):
            await publishing
        await client.publish("k", b"after")
        assert await answering == b"MSG k\0after"


@pytest.mark.parametrize("answers", [(), (ON + b"\x001000 60000",)])
async def test_reply_that_does_not_fit_the_next_server(
    backend: Backend, directory: Path, answers: tuple[bytes, ...]
) -> None:
    """Nobody waits for a reply to be sent, so the log tells of it; what waits behind it is sent."""
    request = Message(b"k", b"!/cred/1/2/4/sbus/reply/x\0")
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True, reconnect=QUICK, max_packet=70_000)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        peer.close()
        server.vanish()
        with pytest.raises(Disconnected):
            await client.fence()
        warnings: list[str] = []
        client.raw._warn = warnings.append
        await client.answer(request, bytes(90_000))
        await client.answer(request, b"short")
        server.listen()
        fencing = asyncio.ensure_future(client.settle())
        peer = await resume(server, *answers)
        assert await next_message(peer) == b"MSG !/cred/1/2/4/sbus/reply/x\0+short"
        answering = asyncio.ensure_future(next_message(peer))
        await fencing
        assert len(warnings) == 1
        assert "a message that waited for a connection was dropped" in warnings[0]
        await client.publish("k", b"after")
        assert await answering == b"MSG k\0after"


async def test_end_of_a_batch_fires_a_deferred(twisted: TwistedBackend, directory: Path) -> None:
    """In Twisted, ``send`` ends a batch without a coroutine."""
    with FakeServer(directory / "fake") as server:
        client = await twisted.connect(server.address, payloads=True)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        batch = client.raw.payloads()
        batch.publish("k", batch.allocate(10))
        await client.do(batch.send)
        assert await peer.receive_attached() == build_range(b"k", 0, 10)


async def test_exception_in_a_batch_sends_nothing(backend: Backend, directory: Path) -> None:
    """A block that raises sends nothing, and the client goes on."""

    def fail(batch: Any) -> None:
        batch.publish("k", bytes(10))
        raise ZeroDivisionError

    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, payloads=True)
        peer = await server.accept()
        await settle(client, peer, ANSWER)
        with pytest.raises(ZeroDivisionError):
            await client.publish_batch(fail)
        await client.publish("k", b"next")
        assert await peer.receive() == b"MSG k\0next"


# --- with a real server -----------------------------------------------------------------------


async def test_messages_of_any_size_arrive(backend: Backend, shared: Bus) -> None:
    """Small and large messages, single ones and batches, arrive in order; what is large, without a copy."""
    writer = await backend.connect(shared.address, payloads=True)
    reader = await backend.connect(shared.address, payloads=True)
    sub = await reader.subscribe("sizes/")
    await reader.fence()
    sizes = [0, 1, LEAST_PAYLOAD - 1, LEAST_PAYLOAD, 409_600, 1_000_000, 10, 20_000_000]
    for size in sizes[:4]:
        await writer.publish(f"sizes/{size}", b"x" * size)
    await writer.publish_many([(f"sizes/{size}", b"x" * size) for size in sizes[4:]])
    messages = [await sub.get() for _ in sizes]
    assert [message.key for message in messages] == [b"sizes/%d" % size for size in sizes]
    assert [len(message.payload) for message in messages] == sizes
    assert all(
        bytes(message.payload[-10:]) == b"x" * min(10, size) for message, size in zip(messages, sizes, strict=True)
    )
    assert [isinstance(message.payload, memoryview) for message in messages] == [
        size >= LEAST_PAYLOAD for size in sizes
    ]

    def fill(batch: Any) -> None:
        for number in range(100):
            view = batch.allocate(10_000)
            view[:] = bytes([number]) * 10_000
            batch.publish("sizes/batch", view)

    await writer.publish_batch(fill)
    payloads = [(await sub.get()).payload for _ in range(100)]
    assert [bytes(payload) for payload in payloads] == [bytes([number]) * 10_000 for number in range(100)]


async def test_receiver_without_payloads_gets_what_fits(backend: Backend, shared: Bus) -> None:
    """A receiver that has not asked gets the bytes; of what fits no packet it gets a receipt."""
    lost: list[Any] = []
    writer = await backend.connect(shared.address, payloads=True)
    reader = await backend.connect(shared.address, on_lost=lost.append)
    sub = await reader.subscribe("plain")
    await reader.fence()
    for size in (300_000, 1_000_000, 100):
        await writer.publish("plain", bytes(size))
    assert [type((await sub.get()).payload) for _ in range(2)] == [bytes, bytes]
    assert [(loss.messages, loss.why) for loss in lost] == [(1, "too-large")]


async def test_large_requests_and_replies(backend: Backend, shared: Bus) -> None:
    """A request and its reply may be large; an error stays a text."""

    def answer(request: Any) -> bytes:
        if bytes(request.payload[:1]) == b"-":
            raise RequestFailed("no")
        return bytes(request.payload) * 2

    responder = await backend.connect(shared.address, payloads=True)
    requester = await backend.connect(shared.address, payloads=True)
    await responder.respond("double", answer)
    await responder.fence()
    async with responder.serving():
        reply = await requester.request("double", b"12345" * 100_000)
        assert bytes(reply) == b"12345" * 200_000
        with pytest.raises(RequestFailed, match="no"):
            await requester.request("double", b"-" * 1_000_000)


async def test_sender_is_known(backend: Backend, shared: Bus) -> None:
    """Messages in memory have a sender as others do."""
    client = await backend.connect(shared.address, payloads=True, sender=True)
    sub = await client.subscribe("signed")
    await client.publish_many([("signed", b"1"), ("signed", bytes(300_000)), ("signed", b"3")])
    senders = {str((await sub.get()).sender) for _ in range(3)}
    assert senders == {(await client.whoami()).decode()}
