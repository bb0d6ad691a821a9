"""Reconnecting, with all three libraries: subscriptions and settings return, and packets stay in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sbus.client.connecting import Backoff
from sbus.errors import Closed, ConnectError, Disconnected
from sbus.routing.trie import PatternIndex
from tests.integration.clients.backends import Backend, Gaps, turn, wait_quiet
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.integration.clients.losses import CALLS, NAME, QUICK, WHOAMI, answer_until, gather, publish_without_end
from tests.support.harness import TIMEOUT
from tests.support.servers import StartBus
from tests.support.waiting import paused


async def test_new_connection_gets_what_is_in_force(backend: Backend, directory: Path) -> None:
    """A new connection gets the settings and subscriptions in force, each once, and nothing else."""
    with FakeServer(directory / "fake") as server:
        gaps = Gaps()
        client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
        peer = await server.accept()
        one, two = await client.subscribe("a"), await client.subscribe("a")
        gone = await client.subscribe("gone")
        await client.subscribe("b/", lambda message: None)
        await client.flood_control(soft="discard", hard="block", order="stack")
        await client.flood_control(soft="block", order="random")
        await client.echo(False)
        await client.control("other/thing", b"x")
        await gone.close()
        await peer.receive_until(b"UNSUB gone")
        asking = asyncio.ensure_future(client.whoami())
        assert await peer.receive() == WHOAMI
        peer.close()
        with pytest.raises(Disconnected, match="the server closed"):
            await asking
        settling = asyncio.ensure_future(client.settle())
        peer = await server.accept()
        resync = await peer.answer()
        assert sorted(resync) == sorted(
            [
                b"SUB a",
                b"SUB b/",
                b"CMSG blocking/soft/block",
                b"CMSG blocking/hard/block",
                b"CMSG order/stack",
                b"CMSG order/random",
                b"CMSG echo/off",
            ]
        )
        assert resync.index(b"CMSG order/stack") < resync.index(b"CMSG order/random") < resync.index(b"SUB a")
        await peer.answer()  # the fence of `settle`
        await settling
        await gaps.wait(1)
        assert [str(error) for error in gaps.reported] == [f"the server closed the connection ({server.address})"]
        for sub in (one, two):
            await sub.close()
        assert await peer.receive() == b"UNSUB a"


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
async def test_what_is_sent_when_there_is_no_connection_follows_in_order(
    backend: Backend, directory: Path, known: bool
) -> None:
    """Packets sent without a connection go out in order, once, whether or not the loss was known."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        kept = await client.subscribe("kept")
        await peer.receive()
        peer.close()
        if known:
            server.vanish()
            with pytest.raises(Disconnected):
                await client.fence()
        calls = [
            client.subscribe("new"),
            client.publish("k", b"1"),
            kept.close(),
            client.publish_many([("k", b"2"), ("k", b"3")]),
            client.control("a/b"),
            client.publish("k", b"4"),
        ]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await turn()
        if known:
            server.listen()
        peer = await server.accept()
        packets = await answer_until(peer, b"MSG k\x004")
        messages = [b"MSG k\x001", b"MSG k\x002", b"MSG k\x003"]
        assert [packet for packet in packets if packet.startswith(b"MSG")] == [*messages, b"MSG k\x004"]
        assert packets.count(b"SUB new") == 1
        assert packets.index(b"SUB new") < packets.index(messages[0])
        if b"SUB kept" in packets:
            assert messages[0] in packets[: packets.index(b"UNSUB kept")] or not known
            assert packets.count(b"SUB kept") == packets.count(b"UNSUB kept") == 1
        if known:
            assert packets == [
                b"SUB kept",
                b"SUB new",
                messages[0],
                b"UNSUB kept",
                *messages[1:],
                b"CMSG a/b",
                packets[-1],
            ]
        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*tasks)


async def test_fence_asked_when_there_is_no_connection(looping: Backend, directory: Path) -> None:
    """A fence sent without a connection keeps its place behind earlier packets, so that it proves them."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, reconnect=QUICK)
        await server.accept()
        server.vanish()
        with pytest.raises(Disconnected):
            await client.fence()
        tasks = [asyncio.ensure_future(call) for call in (client.publish("k"), client.fence())]
        await turn()
        server.listen()
        peer = await server.accept()
        assert await peer.answer() == []  # the client's own fence, for which messages wait
        assert (await peer.receive(), await peer.receive()) == (b"MSG k\0", WHOAMI)
        assert not tasks[1].done()
        peer.send(WHOAMI + b"\0" + NAME)
        await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT)


async def test_messages_that_could_not_be_sent_are_sent_on_the_next_connection(
    backend: Backend, directory: Path
) -> None:
    """Messages that the kernel had accepted are not repeated; all others go out in order."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        calls = [client.publish_many([("k", b"%d " % i + bytes(10_000))]) for i in range(300)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await peer.receive()
        await wait_quiet(lambda: sum(task.done() for task in tasks))
        done = sum(task.done() for task in tasks)
        assert 0 < done < 300
        peer.close()
        peer = await server.accept()
        packets = [packet.split()[1] for packet in await answer_until(peer, b"MSG k\x00299 " + bytes(10_000))]
        numbers = [int(packet.partition(b"\0")[2]) for packet in packets]
        assert numbers == list(range(done, 300))
        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*tasks)


async def test_server_that_accepts_and_closes_is_not_stormed(backend: Backend, directory: Path) -> None:
    """A connection that ends before its fence counts as a failed attempt, so the pauses keep growing."""
    drawn: list[str] = []

    class Counted(Backoff):
        def delays(self) -> Iterator[float]:
            drawn.append("gap")
            for _ in range(100):
                drawn.append("attempt")
                yield 0.0

    with FakeServer(directory / "fake") as server:
        gaps = Gaps()
        client = await backend.connect(server.address, reconnect=Counted(), on_gap=gaps)
        drawn.clear()  # those of the first connection
        (await server.accept()).close()
        settling = asyncio.ensure_future(client.settle())
        for _ in range(3):
            (await server.accept()).close()
        serving = asyncio.ensure_future(answer_until(await server.accept(), b"MSG end\0"))
        await settling
        await gaps.wait(1)
        assert drawn[0] == "gap"
        assert drawn.count("gap") == 1
        assert drawn.count("attempt") in (4, 5)  # one may be drawn ahead
        assert len(gaps.reported) == 1
        await client.publish("end")
        await serving


async def test_closing_while_there_is_no_connection(looping: Backend, directory: Path) -> None:
    """`close` does not wait for a reconnect; calls that do raise Closed."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
    peer.close()
    with pytest.raises(Disconnected):
        await client.fence()
    sub = await client.subscribe("x")
    calls = [asyncio.ensure_future(call(client)) for call in CALLS.values()] + [asyncio.ensure_future(sub.get())]
    await turn()
    assert not any(call.done() for call in calls)
    await asyncio.wait_for(client.close(), TIMEOUT)
    assert {type(error) for error in await gather(calls)} == {Closed}


async def test_closing_when_the_server_dies_meanwhile(looping: Backend, bus: StartBus) -> None:
    """`close` returns when the server dies before everything is sent, also with `reconnect`."""
    server = bus()
    client = await looping.connect(server.address, reconnect=QUICK)
    with paused(server.pid):
        publishing = asyncio.ensure_future(publish_without_end(client))
        while not len(client.raw.outbox):
            await turn()
        closing = asyncio.ensure_future(client.close())
        await turn()
        assert not closing.done()
        server.kill(signal.SIGKILL)
    await asyncio.wait_for(closing, TIMEOUT)
    with pytest.raises(Closed):
        await publishing


async def test_first_connection_waits_for_a_server(backend: Backend, bus: StartBus, directory: Path) -> None:
    """With `reconnect`, a client may be started before its bus, and over a stale socket; no gap is reported."""
    gaps = Gaps()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(directory / "bus"))
    connecting = asyncio.ensure_future(backend.connect(directory / "bus", reconnect=QUICK, on_gap=gaps))
    await asyncio.sleep(0.05)
    assert not connecting.done()
    (directory / "bus").unlink()
    await asyncio.sleep(0.05)
    assert not connecting.done()
    bus()
    client = await asyncio.wait_for(connecting, TIMEOUT)
    await client.fence()
    assert gaps.reported == []


async def test_state(backend: Backend, bus: StartBus) -> None:
    """A client says whether it is connected, reconnecting or closed."""
    server = bus()
    gaps = Gaps()
    client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
    plain = await backend.connect(server.address)
    await client.fence()
    assert (client.raw.state, plain.raw.state) == ("connected", "connected")
    server.stop()
    with pytest.raises(Disconnected):
        await client.fence()
    with pytest.raises(Disconnected):
        await plain.fence()
    assert (client.raw.state, plain.raw.state) == ("reconnecting", "closed")
    bus()
    async with client.serving():
        await gaps.wait(1)
    assert client.raw.state == "connected"
    await client.close()
    assert client.raw.state == "closed"


async def test_first_connection_has_an_end(backend: Backend, directory: Path) -> None:
    """The wait for the first connection ends with the timeout; what waiting cannot mend is an error at once."""
    with pytest.raises(ConnectError, match="No such file or directory: start one"):
        await backend.connect(directory / "none", reconnect=QUICK, timeout=0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(directory / "other"))
        other.listen()
        with pytest.raises(ConnectError, match="a socket of another kind"):
            await backend.connect(directory / "other", reconnect=QUICK, timeout=None)
    with pytest.raises(ConnectError):
        await backend.connect(directory / "none", timeout=None)


async def test_early_dialect_reconnects(backend: Backend, bus: StartBus) -> None:
    """In the early dialect too, subscriptions are in force again when `on_gap` is called."""
    server = bus("--dialect=early")
    gaps = Gaps()
    client = await backend.connect(server.address, dialect="early", reconnect=QUICK, on_gap=gaps)
    sub = await client.subscribe("a.")
    await client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    server = bus("--dialect=early", "--reuse")
    await client.settle()
    await gaps.wait(1)
    server.client().msg(b"a.b", b"hello")
    assert await sub.take(1) == [b"hello"]


async def test_new_connection_has_whole_routes(
    looping: Backend, bus: StartBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription gets nothing on the next connection if an exception of a signal handler interrupted its end."""

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    server = bus()
    gaps, ended = Gaps(), list[Any]()
    client = await looping.connect(server.address, reconnect=QUICK, on_gap=gaps)
    other, sub = await client.subscribe("k/"), await client.subscribe("k/*", ended.append)
    await client.fence()
    monkeypatch.setattr(PatternIndex, "unsubscribe", interrupted)
    with pytest.raises(ZeroDivisionError):
        await sub.close()
    server.kill(signal.SIGKILL)
    server.wait()
    bus("--reuse")
    await gaps.wait(1)
    await client.publish("k/1", b"1")
    assert await other.take(1) == [b"1"]
    assert not ended


async def test_killed_server_is_survived_while_publishing_and_subscribing(backend: Backend, bus: StartBus) -> None:
    """After each ``kill -9`` both clients report the gap and continue, and no message comes twice."""
    server = bus()
    heard, said = Gaps(), Gaps()
    reader = await backend.connect(server.address, reconnect=QUICK, on_gap=heard)
    writer = await backend.connect(server.address, reconnect=QUICK, on_gap=said)
    sub, wide = await reader.subscribe("k/*"), await reader.subscribe("k/")
    own = await writer.subscribe("k/")
    await writer.echo(False)
    await writer.flood_control(soft="block")
    await reader.fence()
    number = 0

    async def publish() -> None:
        nonlocal number
        while not stopping:
            await writer.publish("k/n", b"%d" % number)
            number += 1
            await asyncio.sleep(0)

    for kills in range(1, 4):
        stopping = False
        publishing = asyncio.ensure_future(publish())
        await sub.take(20)
        server.kill(signal.SIGKILL)
        server.wait()
        server = bus("--reuse")
        await reader.settle()
        await heard.wait(kills)
        await said.wait(kills)
        assert not publishing.done()
        stopping = True
        await publishing
        await writer.fence()
        await reader.fence()
        first = number
        await writer.publish_many([("k/n", b"%d" % i) for i in range(first, first + 50)])
        number += 50
        await writer.fence()
        await reader.fence()
        got = [int(m.payload) for m in await sub.get_ready()]
        assert got[-50:] == list(range(first, first + 50))
        assert got == sorted(set(got))
        assert [int(m.payload) for m in await wide.get_ready()][-len(got) :] == got
        assert await own.get_ready() == []
    assert len(heard.reported) == len(said.reported) == 3
    assert {str(error) for error in heard.reported} == {f"the server closed the connection ({server.address})"}


async def test_thousand_subscriptions_are_made_again(backend: Backend, bus: StartBus) -> None:
    """Many subscriptions, more than the socket takes at once, are in force when `on_gap` is called."""
    server = bus()
    gaps = Gaps()
    client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
    subs = [await client.subscribe(f"many/{i}/{'x' * 1000}") for i in range(1000)]
    await client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    server = bus("--reuse")
    await client.settle()
    await gaps.wait(1)
    publisher = server.client()
    for i in range(0, 1000, 50):
        publisher.msg(b"many/%d/%b" % (i, b"x" * 1000), b"%d" % i)
    publisher.sync()
    await client.fence()
    assert [[m.payload for m in await sub.get_ready()] for sub in subs[::50]] == [
        [b"%d" % i] for i in range(0, 1000, 50)
    ]


async def test_calls_wait_for_the_connection_to_be_made_again(backend: Backend, bus: StartBus) -> None:
    """Once the loss is known, calls wait for the next connection, and do there what they were to do."""
    server = bus()
    client = await backend.connect(server.address, reconnect=QUICK)
    sub = await client.subscribe("own/*")
    await client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    with pytest.raises(Disconnected):
        await client.fence()

    async def publish() -> None:
        await client.publish_many([("own/x", b"%d" % i) for i in range(300)])
        await client.fence()

    async def ask() -> bytes:
        return await client.request("up", b"x", timeout=TIMEOUT)

    publishing = asyncio.ensure_future(publish())
    asking = asyncio.ensure_future(client.whoami())
    opening = asyncio.ensure_future(client.inbox("letters"))
    await turn()
    assert not any(call.done() for call in (publishing, asking, opening))
    server = bus("--reuse")
    responder = await backend.connect(server.address)
    await responder.respond("up", lambda request: request.payload.upper())
    await responder.fence()
    async with asyncio.timeout(TIMEOUT):
        await publishing
        assert [m.payload for m in await sub.get_ready()] == [b"%d" % i for i in range(300)]
        key, inbox = await opening
        assert key == await asking + b"/letters"
        async with responder.serving():
            assert await ask() == b"X"
        await client.publish(key, b"dear")
        assert await inbox.take(1) == [b"dear"]


async def serve_request(peer: FakePeer, answer: bytes) -> None:
    """Answer questions, then a request, after checking that its reply key was subscribed to."""
    packets: list[bytes] = []
    while not packets or not packets[-1].startswith(b"MSG up\0"):
        packets.append(await peer.receive())
        if packets[-1] == WHOAMI:
            peer.send(WHOAMI + b"\0" + NAME)
    assert packets.count(b"SUB " + NAME + b"/sbus/reply/*") == 1
    reply_to, _, payload = packets[-1].removeprefix(b"MSG up\0").partition(b"\0")
    assert reply_to.startswith(NAME + b"/sbus/reply/")
    assert payload == b"x"
    peer.send(b"MSG " + reply_to + b"\0+" + answer)


async def test_request_made_when_there_is_no_connection(backend: Backend, directory: Path) -> None:
    """A request made without a connection goes out on the next one, after the subscription to its reply."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        asking = asyncio.ensure_future(client.request("up", b"x", timeout=TIMEOUT))
        await serve_request(peer, b"first")
        assert await asking == b"first"
        server.vanish()
        with pytest.raises(Disconnected):
            await client.fence()
        asking = asyncio.ensure_future(client.request("up", b"x", timeout=TIMEOUT))
        await turn()
        server.listen()
        await serve_request(await server.accept(), b"second")
        assert await asking == b"second"
