"""Senders of messages, alike in all client libraries: with a scripted server, and with a real one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from sbus.client.connecting import Backoff
from sbus.client.core import Message
from sbus.client.identity import Sender
from sbus.errors import RequestFailed, UsageError
from tests.integration.clients.backends import Backend, BlockingBackend, Client, Gaps
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"
NAME = WHOAMI + b"\0!/cred/1/2/3"
QUESTION = b"CMSG sender/on"
ANSWER = QUESTION + b"\0"
ONE, OTHER = b"CMSG sender\x001 !/cred/1/2/3", b"CMSG sender\x002 !/cred/0/0/7/!/cred/4/5/6"
FIRST, SECOND = Sender(1, 1, 2, 3), Sender(2, 4, 5, 6, "!/cred/0/0/7")


def told(message: Message) -> tuple[bytes, Sender | None]:
    return message.payload, message.sender


async def asked(peer: FakePeer) -> list[bytes]:
    """Answer the question for senders; return the packets before it."""
    before = await peer.receive_until(QUESTION)
    assert await peer.receive() == WHOAMI
    peer.send(ANSWER, NAME)
    return before[:-1]


async def test_each_message_has_its_sender(backend: Backend, directory: Path) -> None:
    """Readers of one message or many and callbacks get the senders; messages of one publisher share the value."""
    got: list[Message] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, sender=True)
        peer = await server.accept()
        sub = await client.subscribe("k")
        await client.subscribe("k", got.append)
        assert await asked(peer) == []
        peer.send(ONE, b"MSG k\x001", b"MSG k\x002", OTHER, b"MSG k\x003", ONE, b"MSG k\x004")
        messages = [await sub.get() for _ in range(4)]
        assert list(map(told, messages)) == [(b"1", FIRST), (b"2", FIRST), (b"3", SECOND), (b"4", FIRST)]
        assert messages[0].sender is messages[1].sender is messages[3].sender
        await client.do(lambda: None)  # the blocking client's callbacks have been called by now
        assert list(map(told, got)) == list(map(told, messages))
        peer.send(b"MSG k\x005", OTHER, b"MSG k\x006")
        many = await sub.get_many()
        while len(many) < 2:
            many += await sub.get_many()
        assert list(map(told, many)) == [(b"5", FIRST), (b"6", SECOND)]
        assert "sender" in client.raw.extensions


async def test_without_asking(backend: Backend, directory: Path) -> None:
    """A client that does not ask sends nothing more than before, and its messages have no sender."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        sub = await client.subscribe("k")
        assert await peer.receive() == b"SUB k"
        peer.send(b"MSG k\x001")
        assert told(await sub.get()) == (b"1", None)


async def test_subscription_that_wants_senders(backend: Backend, directory: Path) -> None:
    """The question goes out first; no message from before its answer gets into this subscription."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        plain = await client.subscribe("k")
        sub = await client.subscribe("k", sender=True)
        again = await client.subscribe("l", sender=True)
        assert await peer.receive_until(QUESTION) == [b"SUB k", QUESTION]
        assert [await peer.receive() for _ in range(2)] == [WHOAMI, b"SUB l"]
        peer.send(b"MSG k\x001", ANSWER, NAME, ONE, b"MSG k\x002", b"MSG l\x003")
        assert told(await sub.get()) == (b"2", FIRST)
        assert told(await again.get()) == (b"3", FIRST)
        assert [told(await plain.get()) for _ in range(2)] == [(b"1", None), (b"2", FIRST)]


async def test_new_connection_has_new_senders(backend: Backend, directory: Path) -> None:
    """A reconnect asks anew; messages of the old connection keep their senders, and no sender stays for the new one."""
    with FakeServer(directory / "fake") as server:
        gaps = Gaps()
        client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
        peer = await server.accept()
        sub = await client.subscribe("k", sender=True)
        await peer.receive_until(b"SUB k")
        peer.send(ANSWER, NAME, OTHER, b"MSG k\x001", ONE, b"MSG k\x002")
        peer.close()
        settling = asyncio.ensure_future(client.settle())
        peer = await server.accept()
        assert await peer.receive_until(QUESTION) == [QUESTION]
        assert [await peer.receive() for _ in range(2)] == [WHOAMI, b"SUB k"]
        peer.send(ANSWER, NAME, OTHER, b"MSG k\x003")
        await peer.answer()
        await peer.answer()
        await settling
        assert [told(await sub.get()) for _ in range(3)] == [(b"1", SECOND), (b"2", FIRST), (b"3", SECOND)]


async def test_messages_that_were_read_with_the_end(waiting: BlockingBackend, directory: Path) -> None:
    """A send that notices the end reads the rest; it is processed on the next connection, with its own senders."""
    with FakeServer(directory / "fake") as server:
        client = await waiting.connect(server.address, reconnect=QUICK, sender=True)
        peer = await server.accept()
        sub = await client.subscribe("k")
        await peer.receive_until(b"SUB k")
        peer.send(ANSWER, NAME, ONE, b"MSG k\x001", OTHER, b"MSG k\x002")
        peer.close()
        publishing = asyncio.ensure_future(client.publish("x"))
        peer = await server.accept()
        await peer.receive_until(b"SUB k")
        peer.send(ANSWER, NAME, NAME, ONE, b"MSG k\x003")
        await publishing
        assert [told(await sub.get()) for _ in range(3)] == [(b"1", FIRST), (b"2", SECOND), (b"3", FIRST)]


async def test_messages_that_waited_for_the_readers_of_the_bus(waiting: BlockingBackend, directory: Path) -> None:
    """A subscription of the blocking client that is read itself takes over messages, those with a sender only."""
    with FakeServer(directory / "fake") as server:
        client = await waiting.connect(server.address)
        peer = await server.accept()
        bus = client.raw
        subs: list[Any] = [await client.do(bus.subscribe, "k")]
        subs.append(await client.do(bus.subscribe, "k", sender=True))
        await peer.receive_until(QUESTION)
        peer.send(b"MSG k\x001", ANSWER, NAME, ONE, b"MSG k\x002", WHOAMI + b"\0")
        await client.fence()
        assert list(map(told, await client.do(subs[1].get_ready))) == [(b"2", FIRST)]
        assert list(map(told, await client.do(bus.get_ready))) == [(b"1", None), (b"2", FIRST)]


@pytest.mark.parametrize("late", [False, True])
async def test_server_without_senders(
    backend: Backend, directory: Path, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that does not know the question ends the connection, with an error for everybody who waits or calls."""
    caplog.set_level(logging.WARNING)
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK, sender=not late)
        peer = await server.accept()
        plain = await client.subscribe("j")
        sub = await client.subscribe("k", sender=True)
        await peer.receive_until(WHOAMI)
        peer.send(b"MSG k\x001", NAME, b"MSG k\x002")
        for call in (sub.get, plain.get, client.fence):
            with pytest.raises(UsageError, match="does not say who sends a message"):
                await call()
        assert client.raw.state == "closed"
        await sub.close()
        assert "does not say who sends" in caplog.text or backend.name != "asyncio"


async def test_server_that_no_longer_has_senders(backend: Backend, directory: Path) -> None:
    """A bus that was restarted without senders is no bus to reconnect to; what had come before is still read."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        sub = await client.subscribe("k", sender=True)
        await peer.receive_until(b"SUB k")
        peer.send(ANSWER, NAME, ONE, b"MSG k\x001", b"MSG k\x002")
        assert told(await sub.get()) == (b"1", FIRST)
        peer.close()
        settling = asyncio.ensure_future(client.settle())
        peer = await server.accept()
        await peer.receive_until(WHOAMI)
        peer.send(NAME)
        with pytest.raises(UsageError, match="does not say who sends a message"):
            await settling
        assert told(await sub.get()) == (b"2", FIRST)
        with pytest.raises(UsageError, match="does not say who sends a message"):
            await sub.get()


# --- with a real server ----------------------------------------------------------------------


async def name_of(client: Client) -> str:
    """Return what senders of this client's messages are, as text."""
    return (await client.whoami()).decode()


@pytest.mark.parametrize("bundles", [True, False])
async def test_senders_of_a_bus(backend: Backend, shared: Bus, bundles: bool) -> None:
    """Of interleaved publishers, each message has its own: the number and the IDs that the server knows."""
    reader = await backend.connect(shared.address, bundles=bundles, sender=True)
    writers = [await backend.connect(shared.address, bundles=bundles) for _ in range(3)]
    sub = await reader.subscribe("senders/")
    await reader.fence()
    for turn in range(40):
        for at, writer in enumerate(writers):
            batch = [(f"senders/{at}", b"%d" % turn)] * (1 + turn * at)
            await writer.publish_many(batch)
            await writer.fence()
    await reader.publish("senders/own")
    seen: dict[bytes, set[Sender | None]] = {}
    while b"senders/own" not in seen:
        for message in await sub.get_many():
            seen.setdefault(message.key, set()).add(message.sender)
    assert all(len(senders) == 1 for senders in seen.values())
    found = {key: next(iter(senders)) for key, senders in seen.items()}
    assert all(sender is not None and sender.is_user(os.geteuid()) for sender in found.values())
    assert len({sender.number for sender in found.values() if sender is not None}) == 4
    assert str(found[b"senders/own"]) == await name_of(reader)


async def test_requests_have_senders(backend: Backend, shared: Bus) -> None:
    """A handler authorises in one line; the requester gets the refusal."""
    server, client = await backend.connect(shared.address), await backend.connect(shared.address)

    def command(request: Any) -> bytes:
        if not request.sender.is_user(os.geteuid() + int(request.payload)):
            raise RequestFailed("only for the pump's own user")
        return str(request.sender).encode()

    await server.do(server.raw.respond, "senders/pump", command, sender=True)
    await server.fence()
    async with server.serving():
        assert await client.request("senders/pump", b"0", timeout=TIMEOUT) == (await name_of(client)).encode()
        with pytest.raises(RequestFailed, match="only for the pump's own user"):
            await client.request("senders/pump", b"1", timeout=TIMEOUT)


async def test_authors_that_a_link_names(backend: Backend, shared: Bus) -> None:
    """Of what a link passes on, the sender is the author, until it names itself again."""
    reader, link = await backend.connect(shared.address, sender=True), await backend.connect(shared.address)
    sub = await reader.subscribe("senders/linked")
    await reader.fence()
    for author in (OTHER.partition(b"\0")[2], b"0 -", b""):
        await link.control("link/sender", author)
        await link.publish("senders/linked", author)
    senders = [(await sub.get()).sender for _ in range(3)]
    assert senders[:2] == [SECOND, Sender(0, None, None, None)]
    assert str(senders[2]) == await name_of(link)


async def test_last_values_have_senders(backend: Backend, bus: StartBus) -> None:
    """A last value has the sender that published it, also when that one has left."""
    server = bus("--last-value=state/")
    writer = await backend.connect(server.address)
    name = await name_of(writer)
    await writer.publish_many([("state/a", b"1"), ("state/b", b"2")])
    await writer.fence()
    await writer.close()
    reader = await backend.connect(server.address)
    sub = await reader.subscribe("state/", last=True, sender=True)
    messages = [await sub.get() for _ in range(2)]
    assert [(m.payload, str(m.sender), m.is_last_value) for m in messages] == [(b"1", name, True), (b"2", name, True)]
    assert messages[0].sender is not None
    assert messages[0].sender.number > 0


async def test_newest_of_each_key_with_senders(backend: Backend, shared: Bus) -> None:
    """With ``soft="latest"`` a message that replaces another one brings its own sender into that place."""
    reader = await backend.connect(shared.address, sender=True)
    writers = [await backend.connect(shared.address) for _ in range(2)]
    names = [await name_of(writer) for writer in writers]
    await reader.flood_control(soft="latest")
    sub = await reader.subscribe("senders/latest/")
    await reader.fence()
    paused = contextlib.ExitStack()
    if not isinstance(backend, BlockingBackend):
        reader.raw.pause_for(sub.raw)
        paused.callback(reader.raw.resume_for, sub.raw)
    with paused:
        for turn in range(300):
            writer = writers[turn % 2]
            await writer.publish_many([(f"senders/latest/{key}", b"%d " % (turn % 2) + bytes(900)) for key in range(9)])
            await writer.fence()
    await reader.publish("senders/latest/end")
    count = 0
    while True:
        message = await sub.get()
        if message.key == b"senders/latest/end":
            break
        count += 1
        assert str(message.sender) == names[int(message.payload[:1])]
    assert 0 < count < 2700


async def test_restarted_bus(backend: Backend, bus: StartBus) -> None:
    """After a restart of the bus the client asks again; the numbers are the new bus's."""
    server = bus()
    gaps = Gaps()
    reader = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
    sub = await reader.subscribe("k", sender=True)
    await reader.publish("k", b"1")
    assert str((await sub.get()).sender) == await name_of(reader)
    server.stop()
    bus(address=server.address)
    await reader.settle()
    await reader.publish("k", b"2")
    message = await sub.get()
    assert (message.payload, str(message.sender)) == (b"2", await name_of(reader))


async def test_early_dialect(backend: Backend, bus: StartBus) -> None:
    """In the early dialect asking is an error at once."""
    server = bus("--dialect=early")
    with pytest.raises(UsageError, match="early dialect"):
        await backend.connect(server.address, dialect="early", sender=True)
    client = await backend.connect(server.address, dialect="early")
    with pytest.raises(UsageError, match="early dialect"):
        await client.subscribe("k", sender=True)
