"""What a client may not do, alike in all client libraries: with a real server and with a scripted one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbus.client import aio, blocking, tx
from sbus.client.connecting import Backoff
from sbus.client.denials import Denial, raise_denied
from sbus.errors import ConnectionLost, NotAllowed
from sbus.protocol.notices import SEVERAL
from tests.integration.clients.backends import Backend, BlockingBackend, Gaps
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"
NAME = WHOAMI + b"\0!/cred/1/2/3"
POLICY = """
version = 1
closed = ["closed/"]

[[rule]]
name = "no.writing"
deny_publish = ["locked/"]

[[rule]]
name = "no.reading"
deny_subscribe = ["hidden/"]
"""
REVOKING = POLICY + '\n[[rule]]\nname = "revoked.today"\ndeny_subscribe = ["news/"]\n'


@pytest.fixture(scope="module")
def strict(module_bus: StartBus, tmp_path_factory: pytest.TempPathFactory) -> Bus:
    """A bus with a policy and with last values that the tests of this module share."""
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.write_text(POLICY)
    return module_bus(f"--policy={policy}", "--last-value=hidden/", "--last-value=open/")


@contextlib.contextmanager
def refused(verb: bytes, key: bytes, rule: str) -> Iterator[None]:
    """The block raises this refusal."""
    with pytest.raises(NotAllowed) as raised:
        yield
    assert (raised.value.verb, raised.value.key, raised.value.rule) == (verb, key, rule)


# --- messages ------------------------------------------------------------------------------------


async def test_a_refused_message(backend: Backend, strict: Bus) -> None:
    """``on_denied`` has been called when a fence behind the message returns; the client stays, others get the rest."""
    denials: list[Denial] = []
    client = await backend.connect(strict.address, on_denied=denials.append)
    reader = await backend.connect(strict.address)
    sub = await reader.subscribe("locked/")
    open_ = await reader.subscribe("open/")
    await reader.fence()
    await client.publish_many([("locked/door", b"1"), ("open/door", b"2"), ("closed/door", b"3")])
    await client.fence()
    assert denials == [Denial(b"MSG", b"locked/door", "no.writing"), Denial(b"MSG", b"closed/door", "closed")]
    assert await open_.take(1) == [b"2"]
    await reader.fence()
    assert await sub.get_ready() == []
    assert "denied" in client.raw.extensions


async def test_without_on_denied_each_key_is_logged_once(
    backend: Backend, strict: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the rule and the remedy."""
    said: list[str] = []
    for kind in (aio.Bus, blocking.Bus, tx.Bus):
        monkeypatch.setattr(kind, "_warn", lambda self, text: said.append(text))
    client = await backend.connect(strict.address)
    for _ in range(2):
        await client.publish_many([("locked/a", b""), ("locked/b", b""), ("locked/a", b"")])
        await client.fence()
    assert len(said) == 2
    assert "may not publish 'locked/a'" in said[0]
    assert "(rule: no.writing); ask the administrator of the bus: sbus policy explain" in said[0]


async def test_many_refused_messages(backend: Backend, strict: Bus) -> None:
    """A client that publishes without reading is not held up; each refusal is listed or summed up."""
    denials: list[Denial] = []
    client = await backend.connect(strict.address, on_denied=denials.append)
    await client.publish_many([("locked/k", b"x" * 100)] * 10_000)
    await client.fence()
    while sum(denial.count for denial in denials) < 10_000:
        await client.fence()
    assert sum(denial.count for denial in denials) == 10_000
    assert {denial.rule for denial in denials if denial.verb != SEVERAL} == {"no.writing"}


async def test_a_callback_that_raises(waiting: BlockingBackend, strict: Bus) -> None:
    """In the blocking client the call that reads raises what ``on_denied`` raises: a fence tells that all is well."""
    client = await waiting.connect(strict.address, on_denied=raise_denied)
    await client.publish("locked/k")
    with refused(b"MSG", b"locked/k", "no.writing"):
        await client.fence()
    await client.publish("open/k")
    await client.fence()


# --- subscriptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [False, True], ids=["subscribe", "last"])
async def test_a_refused_subscription(backend: Backend, strict: Bus, last: bool) -> None:
    """Each reader gets the error, at once and ever after; other subscriptions go on."""
    denials: list[Denial] = []
    client = await backend.connect(strict.address, on_denied=denials.append)
    sub, other = await client.subscribe("hidden/*", last=last), await client.subscribe("open/")
    with refused(b"SUB", b"hidden/*", "no.reading"):
        await sub.get()
    with refused(b"SUB", b"hidden/*", "no.reading"):
        async for _ in sub:
            raise AssertionError("nothing comes")
    for read in (sub.get_many, sub.get_ready):
        with refused(b"SUB", b"hidden/*", "no.reading"):
            await read()
    await sub.close()
    await client.fence()
    assert denials == []
    await client.publish("open/k", b"x")
    assert await other.take(1) == [b"x"]


async def test_a_wide_pattern_is_refused(backend: Backend, strict: Bus) -> None:
    """A pattern that matches keys of which some are forbidden gets nothing, and says so."""
    client = await backend.connect(strict.address)
    sub = await client.subscribe("")
    with refused(b"SUB", b"", "no.reading"):
        await sub.get()


async def test_a_refused_subscription_with_a_callback(backend: Backend, strict: Bus) -> None:
    """It cannot raise, so ``on_denied`` is called; the same is true for a responder."""
    denials: list[Denial] = []
    client = await backend.connect(strict.address, on_denied=denials.append)
    await client.subscribe("hidden/a", print)
    await client.respond("hidden/b", lambda request: b"")
    await client.fence()
    assert denials == [Denial(b"SUB", b"hidden/a", "no.reading"), Denial(b"SUB", b"hidden/b", "no.reading")]


async def test_secret_keys_of_others(backend: Backend, shared: Bus) -> None:
    """Without any policy, another client's secret key ends the subscription and not the connection."""
    client = await backend.connect(shared.address)
    sub = await client.subscribe("!/cred/1/2/3/letters")
    with refused(b"SUB", b"!/cred/1/2/3/letters", "secret"):
        await sub.get()
    _, mine = await client.inbox("letters")
    await client.fence()
    await mine.close()


async def test_readers_of_the_bus(waiting: BlockingBackend, strict: Bus) -> None:
    """Readers of a blocking bus get the error once for each subscription, behind the messages that came before."""
    client = await waiting.connect(strict.address)

    def read() -> None:
        bus = client.raw
        bus.subscribe("open/")
        bus.publish("open/k", b"1")
        refused_one, refused_two = bus.subscribe("hidden/a"), bus.subscribe("hidden/b")
        bus.fence()
        assert bus.receive().payload == b"1"
        with refused(b"SUB", b"hidden/a", "no.reading"):
            bus.receive(TIMEOUT)
        with refused(b"SUB", b"hidden/b", "no.reading"):
            refused_two.get(TIMEOUT)  # its own reader takes the error over
        assert bus.get_ready() == []
        bus.publish("open/k", b"2")
        assert next(iter(bus)).payload == b"2"
        bus.subscribe("hidden/a")
        with refused(b"SUB", b"hidden/a", "no.reading"):
            next(iter(bus))
        bus.subscribe("hidden/a")
        bus.fence()
        with refused(b"SUB", b"hidden/a", "no.reading"):
            bus.get_ready()
        with refused(b"SUB", b"hidden/a", "no.reading"):
            refused_one.get(TIMEOUT)

    await client.do(read)


# --- requests ------------------------------------------------------------------------------------


async def test_a_refused_request(backend: Backend, strict: Bus) -> None:
    """It fails at once, and ``on_denied`` is not called; other requests are answered."""
    denials: list[Denial] = []
    client, server = (
        await backend.connect(strict.address, on_denied=denials.append),
        await backend.connect(strict.address),
    )
    await server.respond("open/ask", lambda request: request.payload.upper())
    await server.fence()
    async with server.serving():
        for _ in range(2):
            with refused(b"MSG", b"locked/ask", "no.writing"):
                await client.request("locked/ask", timeout=3 * TIMEOUT)
            assert await client.request("open/ask", b"x", timeout=TIMEOUT) == b"X"
    assert denials == []


async def test_requests_and_messages_with_one_key(looping: Backend, directory: Path) -> None:
    """A denial behind the answer to a request's question is about a message, and does not fail the request."""
    denials: list[Denial] = []
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address, on_denied=denials.append)
        peer = await server.accept()
        asking = asyncio.ensure_future(client.request("k", b"1"))
        await peer.receive_until(WHOAMI)
        peer.send(NAME)
        request = (await peer.receive_until(WHOAMI))[1]
        peer.send(b"CMSG probe\x001 k", NAME, b"CMSG denied\0MSG k r")
        reply_to = request.split(b"\0")[1]
        peer.send(b"MSG " + reply_to + b"\0+fine")
        assert await asking == b"fine"
        assert denials == [Denial(b"MSG", b"k", "r")]


async def test_refused_replies(looping: Backend, directory: Path) -> None:
    """If the server refuses the subscription to replies, the requests that wait fail; the next one subscribes again."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address)
        peer = await server.accept()
        asking = [asyncio.ensure_future(client.request("k", b"1")) for _ in range(2)]
        await peer.receive_until(WHOAMI)
        await peer.receive_until(WHOAMI)
        peer.send(NAME, NAME)
        subscription = await peer.receive()
        assert subscription == b"SUB !/cred/1/2/3/sbus/reply/*"
        await peer.receive_until(WHOAMI)
        peer.send(b"CMSG denied\0%b credentials" % subscription)
        for request in asking:
            with refused(b"SUB", b"!/cred/1/2/3/sbus/reply/*", "credentials"):
                await request
        again = asyncio.ensure_future(client.request("k", b"2"))
        assert subscription in await peer.receive_until(subscription)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


# --- policies and connections that change --------------------------------------------------------


async def test_a_policy_that_revokes(backend: Backend, bus: StartBus, directory: Path) -> None:
    """A reload ends the subscription that it revokes, behind the messages before it, and nothing else."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    server = bus(f"--policy={policy}")
    client = await backend.connect(server.address)
    sub, other = await client.subscribe("news/"), await client.subscribe("open/")
    await client.publish("news/today", b"1")
    await client.fence()
    policy.write_text(REVOKING)
    server.kill(signal.SIGHUP)
    assert await sub.take(1) == [b"1"]
    with refused(b"SUB", b"news/", "revoked.today"):
        await sub.get()
    await client.publish_many([("news/today", b"2"), ("open/k", b"3")])
    assert await other.take(1) == [b"3"]
    again = await client.subscribe("news/today")
    with refused(b"SUB", b"news/today", "revoked.today"):
        await again.get()


async def test_reconnecting_to_a_stricter_bus(backend: Backend, bus: StartBus, directory: Path) -> None:
    """A subscription that the new server refuses ends; the connection, and the other subscriptions, are restored."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    gaps = Gaps()
    server = bus(f"--policy={policy}")
    client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
    sub, other = await client.subscribe("news/"), await client.subscribe("open/")
    await client.fence()
    server.stop()
    policy.write_text(REVOKING)
    bus(f"--policy={policy}")
    await client.settle()
    await gaps.wait(1)
    with refused(b"SUB", b"news/", "revoked.today"):
        await sub.get()
    await client.publish("open/k", b"x")
    assert await other.take(1) == [b"x"]


async def test_a_denial_just_before_the_end(backend: Backend, directory: Path) -> None:
    """A denial that arrived before the connection was lost is reported all the same."""
    denials: list[Denial] = []
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, on_denied=denials.append)
        peer = await server.accept()
        await client.publish("k")
        await peer.receive()
        peer.send(b"CMSG denied\0MSG k r")
        peer.close()
        with pytest.raises(ConnectionLost):
            await client.fence()
        if isinstance(backend, BlockingBackend):
            with pytest.raises(ConnectionLost):
                await client.do(client.raw.get_ready)  # it reads what arrived before
        assert denials == [Denial(b"MSG", b"k", "r")]


async def test_an_older_server(backend: Backend, directory: Path) -> None:
    """A server that does not know the question ignores it, and nothing waits for the answer."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        first: list[bytes] = [await peer.receive(raw=True) for _ in range(3)]
        assert first == [b"CMSG bundle/on", b"CMSG bye/on", b"CMSG denied/on"]
        serving = asyncio.ensure_future(_answer(peer))
        await client.fence(timeout=TIMEOUT)
        await serving
        assert "denied" not in client.raw.extensions


async def test_the_early_dialect(backend: Backend, bus: StartBus) -> None:
    """It has no control messages, so nothing is asked."""
    client = await backend.connect(bus("--dialect=early").address, dialect="early")
    await client.fence()
    assert client.raw.extensions == frozenset()


async def _answer(peer: FakePeer) -> None:
    await peer.receive_until(WHOAMI)
    peer.send(NAME)
