"""Publishing and subscribing behave alike in all client libraries, over a real server."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from sbus.errors import Closed, Disconnected, InvalidKey, PacketTooLong, UsageError
from sbus.syscalls.sockets import LARGEST_SEND_BUFFER
from tests.integration.clients.backends import Backend, Client, Sub, turn
from tests.integration.clients.fake_servers import FakeServer
from tests.support.harness import TIMEOUT, Bus
from tests.support.servers import StartBus


async def fenced(*clients: Client) -> None:
    """Fence each client, one after the other."""
    for client in clients:
        await client.fence()


async def payloads(sub: Sub) -> list[bytes]:
    """Return the payloads received; all of them if the client was fenced after the publisher."""
    return [message.payload for message in await sub.get_ready()]


async def test_message_arrives_as_it_was_published(backend: Backend, shared: Bus) -> None:
    """A message arrives byte for byte, whatever its bytes and its size."""
    one, other = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await other.subscribe(b"any/")
    await other.fence()
    sent = [(b"any/", b""), (b"any/\xff*", b"\0 \0"), (b"any/thing", bytes(range(256)) * 1000)]
    for key, payload in sent:
        await one.publish(key, payload)
    assert [await sub.get() for _ in sent] == sent


async def test_large_messages_arrive_in_order(backend: Backend, shared: Bus) -> None:
    """Large messages among small ones arrive byte for byte, in order, for readers and for callbacks."""
    one, other = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await other.subscribe(b"large/")
    called: list[tuple[bytes, bytes]] = []
    await other.subscribe(b"large/b", called.append)
    await other.fence()
    sent = [
        (b"large/" + key, os.urandom(size))
        for key in (b"a", b"b" * 600, b"b")
        for size in (200_000, 10, 40_000, 32_768, 0, 300_000, 65_536)
    ]
    for key, payload in sent:
        await one.publish(key, payload)
    assert [await sub.get() for _ in sent] == sent
    assert called == sent[-7:]


async def test_text_keys_are_utf8(backend: Backend, shared: Bus) -> None:
    """Keys and patterns given as str are encoded as UTF-8; messages have bytes."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("wörter/")
    await bus.publish("wörter/grün", b"1")
    message = await sub.get()
    assert (message.key, message.payload) == ("wörter/grün".encode(), b"1")
    assert sub.raw.pattern == "wörter/".encode()


async def test_message_is_immutable(backend: Backend, shared: Bus) -> None:
    """A message is immutable, since several subscriptions share it."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("a")
    await bus.publish("a")
    message = await sub.get()
    with pytest.raises(AttributeError):
        message.payload = b"other"  # type: ignore[misc]


async def test_overlapping_subscriptions_get_their_message_once_each(backend: Backend, shared: Bus) -> None:
    """The server sends one copy; each matching subscription gets it, once."""
    bus, publisher = await backend.connect(shared.address), await backend.connect(shared.address)
    patterns = ("", "a/", "a/*", "a/b", "*/b", "a/b/", "b/", "a/bc")
    subs = [await bus.subscribe(pattern) for pattern in patterns]
    callback: list[bytes] = []
    await bus.subscribe("a/*", lambda message: callback.append(message.payload))
    await fenced(bus)
    await publisher.publish("a/b", b"1")
    await publisher.publish("a/b/c", b"2")
    await publisher.publish("a/", b"3")
    await fenced(publisher, bus)
    got = dict(zip(patterns, [b"".join(await payloads(sub)) for sub in subs], strict=True))
    wanted = {"": b"123", "a/": b"123", "a/*": b"13", "a/b": b"1", "*/b": b"1", "a/b/": b"2", "b/": b"", "a/bc": b""}
    assert got == wanted
    assert callback == [b"1", b"3"]


async def test_identical_patterns_are_counted(backend: Backend, shared: Bus) -> None:
    """Two subscriptions to one pattern both get the message; UNSUB is sent for the last of them."""
    bus, publisher = await backend.connect(shared.address), await backend.connect(shared.address)
    one, two = await bus.subscribe("twice"), await bus.subscribe("twice")
    await fenced(bus)
    await publisher.publish("twice", b"1")
    await fenced(publisher, bus)
    assert await payloads(one) == await payloads(two) == [b"1"]
    await one.close()
    await fenced(bus)
    await publisher.publish("twice", b"2")
    await fenced(publisher, bus)
    assert (await payloads(one), await payloads(two)) == ([], [b"2"])
    await two.close()
    three = await bus.subscribe("twice/other")
    await fenced(bus)
    await publisher.publish("twice", b"3")
    await publisher.publish("twice/other", b"4")
    await fenced(publisher, bus)
    assert (await payloads(two), await payloads(three)) == ([], [b"4"])


async def test_closing_one_of_overlapping_subscriptions_leaves_the_other(backend: Backend, shared: Bus) -> None:
    """After one of two overlapping subscriptions is closed, only the other one's messages come."""
    bus = await backend.connect(shared.address)
    wide, narrow = await bus.subscribe("w/"), await bus.subscribe("w/n")
    await wide.close()
    await wide.close()
    await bus.publish("w/other", b"1")
    await bus.publish("w/n", b"2")
    await fenced(bus)
    assert (await payloads(wide), await payloads(narrow)) == ([], [b"2"])


async def test_thousand_subscriptions_on_one_connection(backend: Backend, shared: Bus) -> None:
    """Each of 1,000 subscriptions gets its own messages, before and after half of them are closed."""
    bus, publisher = await backend.connect(shared.address), await backend.connect(shared.address)
    subs = [await bus.subscribe(f"many/{i}/*") for i in range(1000)]
    await fenced(bus)
    await publisher.publish_many([(f"many/{i}/x", b"%d" % i) for i in range(1000)])
    await fenced(publisher, bus)
    assert [await payloads(sub) for sub in subs] == [[b"%d" % i] for i in range(1000)]
    for sub in subs[::2]:
        await sub.close()
    await fenced(bus)
    await publisher.publish_many([(f"many/{i}/x", b"%d" % i) for i in range(1000)])
    await fenced(publisher, bus)
    assert [await payloads(sub) for sub in subs] == [[b"%d" % i] if i % 2 else [] for i in range(1000)]


async def test_callback_gets_messages_in_order(backend: Backend, shared: Bus) -> None:
    """A callback is called with each message, in the order of publication."""
    bus = await backend.connect(shared.address)
    got: list[bytes] = []
    sub = await bus.subscribe("call/", lambda message: got.append(message.payload))
    await bus.publish_many([("call/me", b"%d" % i) for i in range(500)])
    await fenced(bus)
    assert got == [b"%d" % i for i in range(500)]
    await sub.close()
    await bus.publish("call/me", b"later")
    await fenced(bus)
    assert len(got) == 500


async def test_get_many_waits_for_one_and_gives_all(backend: Backend, shared: Bus) -> None:
    """`get_many` waits for a message and returns all that are here in one list; at the end it raises."""
    bus, publisher = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await bus.subscribe("many")
    await fenced(bus)
    waiting = asyncio.ensure_future(sub.get_many())
    await turn()
    assert not waiting.done()
    await publisher.publish("many", b"0")
    assert await waiting == [(b"many", b"0")]
    await publisher.publish_many([("many", b"%d" % i) for i in range(200)])
    await fenced(publisher, bus)
    assert [m.payload for m in await sub.get_many()] == [b"%d" % i for i in range(200)]
    await publisher.publish("many", b"last")
    await fenced(publisher, bus)
    await sub.close()
    assert [m.payload for m in await sub.get_many()] == [b"last"]
    with pytest.raises(Closed, match="subscription was closed here: subscribe again"):
        await sub.get_many()


async def test_callback_may_use_the_bus(backend: Backend, shared: Bus) -> None:
    """A callback may subscribe, unsubscribe and send; a subscription that it closes does not get the same message."""
    bus = await backend.connect(shared.address)
    got: list[str] = []
    second: list[object] = []

    def callback(message: object) -> None:
        got.append("first")
        bus.raw.subscribe("from/callback", lambda message: got.append("new"))
        bus.raw.send([bus.raw.core.publish("from/callback", b"")])
        second[0].close()  # type: ignore[attr-defined]

    await bus.subscribe("start", callback)
    second.append((await bus.subscribe("start", lambda message: got.append("second"))).raw)
    await bus.publish("start")
    await fenced(bus, bus)
    assert got == ["first", "new"]


async def test_iteration_ends_when_the_subscription_is_closed(backend: Backend, shared: Bus) -> None:
    """Iteration yields the messages received before the subscription was closed, and then ends."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("loop/")
    await bus.publish_many([("loop/x", b"%d" % i) for i in range(3)])
    got = []
    async for message in sub:
        got.append(message.payload)
        if len(got) == 1:
            await fenced(bus)
            await sub.close()
    assert got == [b"0", b"1", b"2"]
    with pytest.raises(Closed, match="subscription was closed"):
        await sub.get()


async def test_iteration_ends_when_the_bus_is_closed(backend: Backend, shared: Bus) -> None:
    """Iteration over a closed bus ends without an exception."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("loop/")
    await bus.publish("loop/x")
    async for _ in sub:
        await bus.close()


async def test_own_messages_come_back_unless_echo_is_off(backend: Backend, shared: Bus) -> None:
    """``echo(False)`` stops a client's own messages, and no others; ``echo(True)`` restores them."""
    bus, other = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await bus.subscribe("echo")
    await bus.echo(False)
    await bus.publish("echo", b"unheard")
    await fenced(bus)
    await other.publish("echo", b"other's")
    await fenced(other)
    await bus.echo(True)
    await bus.publish("echo", b"heard")
    assert await sub.take(2) == [b"other's", b"heard"]


async def test_flood_control_is_chosen_at_the_server(backend: Backend, bus: StartBus) -> None:
    """With hard="error" a full queue disconnects the client; with the default it loses messages."""
    server = bus("--queue-messages=10")
    strict, lax = await backend.connect(server.address), await backend.connect(server.address)
    await strict.flood_control(soft="queue", hard="error", order="queue")
    await strict.subscribe("flood")
    sub = await lax.subscribe("flood")
    await fenced(strict, lax)
    with server.client() as raw:  # more than sockets and queues hold, while the client does not read
        for _ in range(3000):
            raw.msg(b"flood", bytes(1000))
        raw.sync()
    with pytest.raises(Disconnected, match="its queue was full, and it had chosen blocking/hard/error"):
        await strict.fence()
    server.wait_log("its queue was full, and it had chosen blocking/hard/error")
    await lax.fence()
    assert 10 < len(await sub.get_ready()) < 3000


async def test_control_messages_are_sent_raw(backend: Backend, shared: Bus) -> None:
    """A control message is sent unchanged; an unknown reply reaches `on_control`."""
    answers: list[tuple[bytes, bytes]] = []
    bus = await backend.connect(shared.address, on_control=lambda key, payload: answers.append((key, payload)))
    await bus.control("!/cred/whoami", b"ignored")
    await bus.control("no/such/setting")
    me = await bus.whoami()
    assert answers == [(b"!/cred/whoami", me)]


async def test_whoami_asked_raw_answers_no_fence(backend: Backend, shared: Bus) -> None:
    """The reply to a raw ``whoami`` does not complete a later fence."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("fenced")
    await bus.control("!/cred/whoami")
    await bus.publish_many([("fenced", b"%d" % i) for i in range(200)])
    await fenced(bus)
    assert len(await payloads(sub)) == 200


async def test_unknown_control_messages_are_ignored(backend: Backend, directory: Path) -> None:
    """Unknown control messages and packet kinds are ignored, and messages still arrive."""
    with FakeServer(directory / "fake") as server:
        bus = await backend.connect(server.address)
        peer = await server.accept()
        sub = await bus.subscribe("a")
        assert await peer.receive() == b"SUB a"
        peer.send(b"CMSG new/thing\0x", b"CMSG new", b"NEW thing", b"x", b"MSG a", b"MSG b\0", b"MSG a\0yes")
        assert await sub.get() == (b"a", b"yes")


async def test_hook_gets_control_messages(backend: Backend, directory: Path) -> None:
    """`on_control` gets the key and the payload, which is empty if there is none."""
    reported: list[tuple[bytes, bytes]] = []
    with FakeServer(directory / "fake") as server:
        bus = await backend.connect(server.address, on_control=lambda *control: reported.append(control))
        peer = await server.accept()
        sub = await bus.subscribe("a")
        peer.send(b"CMSG new/thing\0x", b"CMSG new", b"MSG a\0")
        await sub.get()
    assert reported == [(b"new/thing", b"x"), (b"new", b"")]


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("a\0b", "contains a NUL"),
        ("!", "'!' is reserved"),
        ("!/", "'!' is reserved"),
        ("a/!/b", "'!' is reserved"),
        ("!/cred/1/2/3", "'!' is reserved"),
        ("!/cred/*/2/3/x", "must be empty, or a decimal number"),
        ("!/cred/01/2/3/x", "must be empty, or a decimal number"),
    ],
)
async def test_keys_are_checked_before_sending(backend: Backend, shared: Bus, key: str, rule: str) -> None:
    """A forbidden key or pattern raises at once and names the rule; the connection is unaffected."""
    bus = await backend.connect(shared.address)
    for call, arguments in (
        (bus.raw.publish, (key, b"")),
        (bus.raw.publish_many, ([("good", b""), (key, b"")],)),
        (bus.raw.subscribe, (key,)),
    ):
        with pytest.raises(InvalidKey, match=rule):
            await bus.do(call, *arguments)
    await fenced(bus)
    assert list(bus.raw.core.sinks()) == []


async def test_nothing_is_published_if_one_of_many_cannot_be(backend: Backend, shared: Bus) -> None:
    """If one key is wrong, `publish_many` publishes nothing."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("all/")
    with pytest.raises(InvalidKey):
        await bus.publish_many([("all/1", b""), ("!", b"")])
    await bus.publish("all/2")
    assert (await sub.get()).key == b"all/2"


async def test_packet_over_the_limit_is_refused(backend: Backend, shared: Bus) -> None:
    """The longest packet passes; one byte more raises an error that names the limit."""
    bus = await backend.connect(shared.address)
    sub = await bus.subscribe("k")
    await bus.publish("k", bytes(409_600 - len(b"MSG k\0")))
    assert len((await sub.get()).payload) == 409_594
    with pytest.raises(PacketTooLong, match=r"409601 bytes, and the limit is 409600; connect with payloads=True, send"):
        await bus.publish("k", bytes(409_595))
    with pytest.raises(PacketTooLong):
        await bus.subscribe("k" * 409_600)
    await fenced(bus)


async def test_packet_too_large_for_the_socket_is_refused(backend: Backend, bus: StartBus) -> None:
    """A packet larger than the largest send buffer raises at once, with the limit."""
    server = bus("--max-packet=4000000")
    client = await backend.connect(server.address, max_packet=4_000_000)
    limit = client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 32
    assert limit <= LARGEST_SEND_BUFFER
    sub = await client.subscribe("k")
    await client.publish("k", bytes(limit - len(b"MSG k\0")))
    assert len((await sub.get()).payload) == limit - 6
    with pytest.raises(PacketTooLong, match=f"the limit is {limit}"):
        await client.publish("k", bytes(limit - 5))
    await fenced(client)


async def test_unknown_dialect_is_refused(backend: Backend, shared: Bus) -> None:
    """An unknown dialect raises UsageError."""
    with pytest.raises(UsageError, match="dialect='late'"):
        await backend.connect(shared.address, dialect="late")


async def test_early_dialect(backend: Backend, bus: StartBus) -> None:
    """In the early dialect, keys have dots, fences work, control messages raise, and reserved keys are refused."""
    server = bus("--dialect=early")
    one = await backend.connect(server.address, dialect="early")
    other = await backend.connect(server.address, dialect="early")
    everything, below = await one.subscribe(""), await one.subscribe("a.*.c.")
    await fenced(one)
    for key in ("a.b.c.", "a.b.c.d.e", "a.b.c", "a/!/b"):
        await other.publish(key, key.encode())
    await fenced(other, one)
    assert await payloads(below) == [b"a.b.c.", b"a.b.c.d.e"]
    # A client's own fences are hidden; those of others are ordinary messages.
    seen = [m.payload for m in await everything.get_ready() if not m.key.startswith(b"fence.")]
    assert seen == [b"a.b.c.", b"a.b.c.d.e", b"a.b.c", b"a/!/b"]
    for call in (one.whoami, lambda: one.inbox("x"), lambda: one.request("x"), lambda: one.echo(False)):
        with pytest.raises(UsageError, match="early dialect has no control messages"):
            await call()
    with pytest.raises(InvalidKey, match="reserved"):
        await one.publish("!x")
    await fenced(one)


async def test_early_fence_returns_after_what_was_sent(backend: Backend, bus: StartBus) -> None:
    """In the early dialect too, a fence proves what was sent before, and no subscription sees its message."""
    server = bus("--dialect=early")
    client = await backend.connect(server.address, dialect="early")
    sub = await client.subscribe("")
    for again in range(3):
        await client.publish_many([("k", b"%d" % i) for i in range(300)])
        await fenced(client)
        assert [m.payload for m in await sub.get_ready()] == [b"%d" % i for i in range(300)], again


async def test_whoami_is_the_servers_word(backend: Backend, shared: Bus) -> None:
    """`whoami` returns the server's reply byte for byte."""
    bus = await backend.connect(shared.address)
    assert await bus.whoami() == b"!/cred/%d/%d/%d" % (os.getegid(), os.geteuid(), os.getpid())


async def test_whoami_passes_on_any_answer(backend: Backend, directory: Path) -> None:
    """A chained name, as from a server behind a server, is returned byte for byte."""
    name = b"!/cred/1/2/3/!/cred/4/5/6"
    with FakeServer(directory / "fake") as server:
        bus = await backend.connect(server.address)
        peer = await server.accept()
        asked = asyncio.ensure_future(bus.whoami())
        assert await peer.receive() == b"CMSG !/cred/whoami"
        peer.send(b"CMSG !/cred/whoami\0" + name)
        assert await asyncio.wait_for(asked, TIMEOUT) == name


async def test_fence_proves_that_subscriptions_are_in_force(backend: Backend, shared: Bus) -> None:
    """A message published after the fence always reaches the subscription."""
    bus, publisher = await backend.connect(shared.address), await backend.connect(shared.address)
    for i in range(50):
        sub = await bus.subscribe(f"fence/{i}")
        await bus.fence()
        await publisher.publish(f"fence/{i}", b"%d" % i)
        assert (await sub.get()).payload == b"%d" % i
