"""Losses, reasons, watches and last values behave alike in all client libraries, with a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from sbus.client.connecting import Backoff
from sbus.client.losses import Lost
from sbus.errors import CloseReason, ConnectionLost, NobodyListens, TimedOut, UsageError
from tests.integration.clients.backends import ASKED, Backend, BlockingBackend, Gaps, turn
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.support.harness import TIMEOUT

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"
NAME = b"!/cred/1/2/3"
RECEIPTS = b"CMSG receipts/on"
GAP = Lost(None, None, None, "reconnect")


async def answer_name(peer: FakePeer) -> list[bytes]:
    """Answer the next ``whoami``, and return the packets before it."""
    packets = await peer.receive_until(WHOAMI)
    peer.send(WHOAMI + b"\0" + NAME)
    return packets[:-1]


async def serve(peer: FakePeer) -> None:
    """Answer each ``whoami`` until the client closes."""
    with contextlib.suppress(AssertionError, BrokenPipeError):
        while True:
            await answer_name(peer)


# --- reasons ---------------------------------------------------------------------------------


async def test_reason_of_the_server_is_in_the_error(backend: Backend, directory: Path) -> None:
    """The client asks for the reason by itself; each call that fails has it, and so does each later one."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        assert [await peer.receive(raw=True) for _ in ASKED] == ASKED
        sub = await client.subscribe("k")
        peer.send(b"CMSG bye/on\0", b"MSG k\0last", b"CMSG bye\0queue-full its queue was full")
        peer.close()
        assert await sub.take(1) == [b"last"]
        for call in (sub.get, client.whoami):
            with pytest.raises(ConnectionLost) as raised:
                await call()
            assert raised.value.reason is CloseReason.QUEUE_FULL
            assert str(raised.value) == f"the server disconnected this client: its queue was full ({server.address})"


async def test_reason_is_found_by_a_client_that_only_publishes(backend: Backend, directory: Path) -> None:
    """A send that notices the end reads the reason first."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        peer.send(b"CMSG bye\0violation unknown message type")
        peer.close()

        async def publish() -> None:
            while True:
                await client.publish("k", bytes(10_000))

        with pytest.raises(ConnectionLost, match="unknown message type") as raised:
            await publish()
        assert raised.value.reason is CloseReason.VIOLATION


@pytest.mark.parametrize("farewell", [b"out-of-coffee no more", b"out-of-coffee", b"\xff", b""])
async def test_reason_of_a_newer_server(backend: Backend, directory: Path, farewell: bytes) -> None:
    """A reason that this version does not know is None; its text is in the error, whatever it contains."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        peer.send(b"CMSG bye\0" + farewell)
        peer.close()
        with pytest.raises(ConnectionLost, match="the server disconnected this client") as raised:
            await client.whoami()
        assert raised.value.reason is None


async def test_reason_is_that_of_one_connection(backend: Backend, directory: Path) -> None:
    """`on_gap` gets the reason; the next connection does not inherit it."""
    with FakeServer(directory / "fake") as server:
        gaps = Gaps()
        client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
        peer = await server.accept()
        peer.send(b"CMSG bye\0server-stopped the server is stopping")
        peer.close()
        with pytest.raises(ConnectionLost) as raised:
            await client.whoami()
        assert raised.value.reason is CloseReason.SERVER_STOPPED
        settling = asyncio.ensure_future(client.settle())
        peer = await server.accept()
        for _ in range(2):
            await answer_name(peer)
        await settling
        assert gaps.reported == [raised.value]
        peer.close()
        with pytest.raises(ConnectionLost) as raised:
            await client.whoami()
        assert raised.value.reason is None


# --- losses ----------------------------------------------------------------------------------


class Story:
    """What the application got: payloads and losses, in the order in which it got them."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_lost(self, lost: Lost) -> None:
        self.got.append(lost)

    def on_message(self, message: Any) -> None:
        self.got.append(message.payload)


async def test_losses_stand_among_the_messages(backend: Backend, directory: Path) -> None:
    """A callback, a reader of single messages and a reader of lists find each loss in its place."""
    story = Story()
    first, second = Lost(3, 300, 3, "queue-full"), Lost(None, None, None, "restart")
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_lost=story.on_lost)
        peer = await server.accept()
        assert await peer.receive() == RECEIPTS
        sub = await client.subscribe("k")
        packets = [b"CMSG receipts/on\0", b"MSG k\x000", b"CMSG lost\x003 300 3 queue-full", b"MSG k\x001"]
        packets += [b"MSG k\x002", b"CMSG lost\0? ? ? restart", b"MSG k\x003"]
        peer.send(*packets)
        for _ in range(4):
            story.on_message(await sub.get())
        assert story.got == [b"0", first, b"1", b"2", second, b"3"]
        story.got.clear()
        peer.send(*packets[1:], b"MSG k\x00end")
        while story.got[-1:] != [b"end"]:
            for message in await sub.get_many():
                story.on_message(message)
        assert story.got == [b"0", first, b"1", b"2", second, b"3", b"end"]
        await sub.close()
        story.got.clear()
        await client.subscribe("k", story.on_message)
        fencing = asyncio.ensure_future(client.fence())
        await peer.receive_until(WHOAMI)
        peer.send(*packets[1:], WHOAMI + b"\0" + NAME)
        await fencing
        assert story.got == [b"0", first, b"1", b"2", second, b"3"]
        assert client.raw.lost == 9


async def test_losses_are_reported_once(backend: Backend, directory: Path) -> None:
    """Several subscriptions: the first reader that reaches a loss reports it; no message from behind comes before."""
    story = Story()
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_lost=story.on_lost)
        peer = await server.accept()
        one, other = await client.subscribe("k"), await client.subscribe("k")
        peer.send(*[b"MSG k\0%d" % number for number in range(3)], b"CMSG lost\x001 10 1 discard", b"MSG k\x004")
        assert await one.take(3) == [b"0", b"1", b"2"]
        assert story.got == []
        assert await other.take(2) == [b"0", b"1"]
        assert story.got == []
        assert await one.take(1) == [b"4"]
        assert story.got == [Lost(1, 10, 1, "discard")]
        assert await other.take(2) == [b"2", b"4"]
        assert len(story.got) == 1
        fencing = asyncio.ensure_future(client.fence())
        await peer.receive_until(WHOAMI)
        peer.send(b"CMSG lost\x001 10 2 discard", WHOAMI + b"\0" + NAME)
        await fencing
        assert len(story.got) == 2  # nobody has anything to read before it


async def test_gap_between_connections_is_a_loss(backend: Backend, directory: Path) -> None:
    """After a reconnect, the loss of unknown number stands between the messages of the two connections."""
    story = Story()
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK, on_lost=story.on_lost)
        peer = await server.accept()
        sub = await client.subscribe("k")
        await peer.receive_until(b"SUB k")
        peer.send(b"MSG k\x001", b"CMSG lost\x002 20 2 disconnect", b"CMSG bye\0queue-full full")
        peer.close()
        settling = asyncio.ensure_future(client.settle())
        (await server.accept()).close()
        peer = await server.accept()
        assert RECEIPTS in await peer.receive_until(b"SUB k")
        peer.send(b"MSG k\x002")
        serving = asyncio.ensure_future(serve(peer))
        await settling
        for _ in range(2):
            story.on_message(await sub.get())
        assert story.got == [b"1", Lost(2, 20, 2, "disconnect"), GAP, b"2"]
        assert client.raw.lost == 2
        await client.close()
        await serving


async def test_receipts_that_nobody_asked_for(backend: Backend, directory: Path) -> None:
    """Without `on_lost` the client asks for no receipts, and `on_control` gets what it does not know."""
    got: list[tuple[bytes, bytes]] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_control=lambda key, payload: got.append((key, payload)))
        peer = await server.accept()
        asking = asyncio.ensure_future(client.whoami())
        assert await peer.receive() == WHOAMI
        peer.send(b"CMSG lost\x001 10 1 discard", WHOAMI + b"\0" + NAME)
        await asking
        assert got == [(b"lost", b"1 10 1 discard")]
        assert client.raw.lost == 0


async def test_on_lost_that_raises(backend: Backend, directory: Path) -> None:
    """If `on_lost` raises, the error is logged, or raised where the loss is reached; no message is lost."""

    def on_lost(lost: Lost) -> None:
        raise ZeroDivisionError

    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_lost=on_lost)
        peer = await server.accept()
        sub = await client.subscribe("k")
        peer.send(b"MSG k\x001", b"CMSG lost\x001 10 1 discard", b"MSG k\x002")
        assert await sub.take(1) == [b"1"]
        if isinstance(backend, BlockingBackend):
            with pytest.raises(ZeroDivisionError):
                await sub.get()
        assert await sub.take(1) == [b"2"]
        if not isinstance(backend, BlockingBackend):
            assert [type(error) for error in backend.take_failures()] == [ZeroDivisionError]


# --- who listens -----------------------------------------------------------------------------


async def test_subscribers_are_asked_for(backend: Backend, directory: Path) -> None:
    """`has_subscribers` sends one question; ``whoami`` follows until the server has answered one."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        for count, expected in ((b"0", False), (b"17", True)):
            asking = asyncio.ensure_future(client.has_subscribers("a b"))
            assert await peer.receive() == b"CMSG probe\0a b"
            if not expected:
                assert await peer.receive() == WHOAMI
            peer.send(b"CMSG probe\0" + count + b" a b", *[WHOAMI + b"\0" + NAME] * (not expected))
            assert await asking is expected


async def test_server_that_does_not_know_who_listens(backend: Backend, directory: Path) -> None:
    """With a server that ignores the questions, asking raises UsageError, and requests are as they were."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        asking = asyncio.ensure_future(client.has_subscribers("k"))
        assert await answer_name(peer) == [b"CMSG probe\0k"]
        with pytest.raises(UsageError, match="does not say whether anybody subscribes"):
            await asking
        watch = await client.watch_subscribers("k")
        assert await answer_name(peer) == [b"CMSG interest/on\0k"]
        with pytest.raises(UsageError, match="does not say whether anybody subscribes"):
            await watch.get()
        await watch.close()
        requesting = asyncio.ensure_future(client.request("k", b"x", timeout=TIMEOUT))
        await answer_name(peer)
        packets = await peer.receive_until(b"SUB " + NAME + b"/sbus/reply/*")
        request = await peer.receive()
        assert request.startswith(b"MSG k\0")
        peer.send(b"MSG " + request.split(b"\0")[1] + b"\0+yes")
        assert await requesting == b"yes"
        assert packets == [b"SUB " + NAME + b"/sbus/reply/*"]
        with pytest.raises(TimedOut):
            await client.request("k", timeout=0.05)


async def test_request_fails_at_once_where_nobody_listens(backend: Backend, directory: Path) -> None:
    """A request fails when the server says that nobody has got it; with any other answer it goes on."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        requesting = asyncio.ensure_future(client.request("k", b"x", timeout=TIMEOUT))
        await answer_name(peer)
        await peer.receive_until(b"CMSG probe\0k")
        peer.send(b"CMSG probe\x000 k")
        with pytest.raises(NobodyListens, match="nobody subscribes to 'k'"):
            await requesting
        requesting = asyncio.ensure_future(client.request("k", b"x", timeout=TIMEOUT))
        packets = await peer.receive_until(b"CMSG probe\0k")
        peer.send(b"CMSG probe\x001 k")
        await turn()
        assert not requesting.done()
        peer.send(b"MSG " + packets[-2].split(b"\0")[1] + b"\0+yes")
        assert await requesting == b"yes"


async def test_watch_hands_out_changes(backend: Backend, directory: Path) -> None:
    """A watch hands out the state and then its changes; watches of a key share one; a reconnect asks again."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        watch = await client.watch_subscribers("k")
        assert await peer.receive_until(WHOAMI) == [b"CMSG interest/on\0k", WHOAMI]
        peer.send(b"CMSG interest\x000 k", WHOAMI + b"\0" + NAME)
        assert await watch.get() is False
        again = await client.watch_subscribers("k")
        assert await again.get() is False
        peer.send(b"CMSG interest\x000 k", b"CMSG interest\x001 k")
        assert await watch.get() is True
        assert await again.get() is True
        assert watch.raw.has_subscribers is True
        await again.close()
        peer.close()
        getting = asyncio.ensure_future(watch.get())
        peer = await server.accept()
        assert await peer.receive_until(WHOAMI) == [b"CMSG interest/on\0k", WHOAMI]
        peer.send(b"CMSG interest\x001 k", b"CMSG interest\x000 k", b"CMSG interest\x000 other")
        peer.send(WHOAMI + b"\0" + NAME)
        assert await getting is False
        await watch.close()
        assert await peer.receive() == b"CMSG interest/off\0k"
        await watch.close()


async def test_watch_ends_with_its_connection(backend: Backend, directory: Path) -> None:
    """When the connection is lost for good, reading a watch raises; iteration ends when the watch is closed here."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        watch = await client.watch_subscribers("k")
        peer.send(b"CMSG interest\x001 k")
        assert await watch.get() is True
        peer.close()
        with pytest.raises(ConnectionLost):
            await watch.get()


# --- last values -----------------------------------------------------------------------------


LAST = [b"CMSG bye/on", b"CMSG last\0k/*", b"SUB k/*", WHOAMI]


async def test_last_values_are_marked(backend: Backend, directory: Path) -> None:
    """Messages between the request and its end are last values, for the subscription that asked and no other."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        assert [await peer.receive(raw=True) for _ in ASKED] == ASKED
        wide = await client.subscribe("k/")
        sub = await client.subscribe("k/*", last=True)
        assert await peer.receive(raw=True) == b"SUB k/"
        assert [await peer.receive(raw=True) for _ in LAST] == LAST
        peer.send(b"CMSG bye/on\0", b"MSG k/a\0waiting", b"CMSG bye/on\0", b"MSG k/a\0kept", b"MSG k/b\0kept")
        peer.send(b"CMSG last/done\0k/*", b"MSG k/a\0live", WHOAMI + b"\0" + NAME)
        got = [await sub.get() for _ in range(3)]
        assert [m.payload for m in got] == [b"kept", b"kept", b"live"]
        assert [m.is_last_value for m in got] == [True, True, False]
        assert await wide.take(2) == [b"waiting", b"live"]  # the first one is older than the snapshot
        assert "last" in client.raw.extensions
        await sub.close()
        assert [await peer.receive() for _ in range(2)] == [b"UNSUB k/*"] * 2


async def test_last_values_of_a_server_without_them(backend: Backend, directory: Path) -> None:
    """With a server that knows nothing of this, the subscription is an ordinary one from the answer to whoami on."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        sub, wide = await client.subscribe("k/*", last=True), await client.subscribe("k/")
        await peer.receive_until(b"SUB k/")
        peer.send(b"MSG k/a\x001", WHOAMI + b"\0" + NAME, b"MSG k/a\x002")
        message = await sub.get()
        assert (message.payload, message.is_last_value) == (b"2", False)
        assert await wide.take(2) == [b"1", b"2"]
        assert "last" not in client.raw.extensions


async def test_last_values_come_again_after_a_reconnect(backend: Backend, directory: Path) -> None:
    """A reconnect asks for the last values again, once for all subscriptions of the pattern."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, reconnect=QUICK)
        peer = await server.accept()
        one, other = await client.subscribe("k/*", last=True), await client.subscribe("k/*", last=True)
        plain = await client.subscribe("k/*")
        assert (await peer.receive_until(WHOAMI))[-2:] == LAST[2:]
        assert await peer.receive_until(WHOAMI) == [b"CMSG last\0k/*", WHOAMI]
        peer.close()
        getting = asyncio.ensure_future(one.get())
        peer = await server.accept()
        assert [await peer.receive(raw=True) for _ in ASKED] == ASKED
        assert [await peer.receive(raw=True) for _ in LAST] == LAST
        peer.send(b"CMSG bye/on\0", b"CMSG bye/on\0", b"MSG k/a\0kept", b"CMSG last/done\0k/*")
        peer.send(WHOAMI + b"\0" + NAME, WHOAMI + b"\0" + NAME, b"MSG k/a\0live")
        assert (await getting).is_last_value
        assert [(await other.get()).is_last_value for _ in range(2)] == [True, False]
        assert (await plain.take(1), await one.take(1)) == ([b"live"], [b"live"])
