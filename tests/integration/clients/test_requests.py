"""Inboxes, requests and proofs of identity behave alike in all client libraries, over a real server."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred

from sbus.client.core import Message
from sbus.client.responding import MOST_HANDLERS
from sbus.errors import InvalidKey, NobodyListens, PacketTooLong, RequestFailed, TimedOut, UsageError
from tests.integration.clients.backends import Backend, BlockingBackend, Client, turn, unread, wait_stuck
from tests.support.harness import OTHER_USER, TIMEOUT, Bus
from tests.support.servers import StartBus
from tests.support.waiting import paused


def upper(request: Any) -> bytes:
    answer: bytes = request.payload.upper()
    return answer


async def test_inbox_is_private(backend: Backend, bus: StartBus, as_root: None) -> None:
    """An inbox's key begins with the client's name; any client may publish to it, and only its owner gets it."""
    server = bus("--mode=0777")
    client, friend = await backend.connect(server.address), await backend.connect(server.address)
    key, sub = await client.inbox("letters")
    assert key == await client.whoami() + b"/letters"
    nosy = server.client(b"", user=OTHER_USER)
    await client.fence()
    await friend.publish(key, b"psst")
    await friend.publish("open", b"hear ye")
    assert (await sub.get()) == (key, b"psst")
    await friend.fence()
    assert nosy.sync() == [b"MSG open\0hear ye"]


async def test_request_is_answered(backend: Backend, shared: Bus) -> None:
    """A request returns the handler's result; the handler gets the request's key."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    keys: list[bytes] = []

    def handler(request: Any) -> bytes:
        keys.append(request.key)
        return upper(request)

    sub = await server.respond("ask/*", handler)
    await server.fence()
    async with server.serving():
        assert await bus.request("ask/one", b"a\0b") == b"A\0B"
        assert await bus.request("ask/two") == b""
    assert keys == [b"ask/one", b"ask/two"]
    await sub.close()
    await server.fence()
    async with server.serving():
        with pytest.raises(NobodyListens, match=r"nobody subscribes to 'ask/one'"):
            await bus.request("ask/one")
        with pytest.raises(NobodyListens, match=r"nobody subscribes to 'k{200}': start"):
            await bus.request("k" * 100_000)  # an error shows the beginning of a key that is much too long


async def test_error_longer_than_a_packet(backend: Backend, bus: StartBus) -> None:
    """On a bus with short packets, the text of an error is cut to fit one."""
    small = bus("--max-packet=300")
    server, client = await backend.connect(small.address), await backend.connect(small.address)

    def handler(request: Any) -> bytes:
        raise RequestFailed("é" * 1000)

    await server.respond("k", handler)
    await server.fence()
    async with server.serving():
        with pytest.raises(RequestFailed, match=r"^é{50,}�?$"):
            await client.request("k")


async def test_reply_without_room_to_wait(looping: Backend, bus: StartBus, caplog: pytest.LogCaptureFixture) -> None:
    """A reply for which the buffer has no room is a line in the responder's log, and no failure of its handler."""
    shared, payloads = bus(), list[bytes]()
    hold: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handler(request: Any) -> bytes:
        payloads.append(request.payload)
        await (Deferred.fromFuture(hold) if looping.name == "twisted" else hold)
        return bytes(1000)

    said: list[str] = []
    server = await looping.connect(shared.address, reconnect=True, reconnect_buffer=2500)
    server.raw._warn = said.append
    await server.respond("k", handler)
    await server.fence()
    client = await looping.connect(shared.address)
    requests = [asyncio.ensure_future(client.request("k")) for _ in range(4)]
    while len(payloads) < 4:
        await asyncio.sleep(0.01)
    shared.kill(signal.SIGKILL)
    shared.wait()
    while server.raw.state != "reconnecting":
        await turn()
    hold.set_result(None)
    await asyncio.gather(*requests, return_exceptions=True)
    while len(said) < 2:
        await turn()
    assert all("a reply to a request for 'k' failed: not sent: there is no connection" in each for each in said)
    assert not caplog.records
    bus("--reuse")
    await server.settle()


async def test_error_of_the_handler_fails_the_request(
    backend: Backend, shared: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """The requester gets the name of the handler's exception or a text meant for it, and the responder continues."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)

    def handler(request: Any) -> bytes:
        if request.payload == b"type":
            return "text"  # type: ignore[return-value]
        if request.payload == b"large":
            return bytes(500_000)
        if request.payload == b"long":
            raise RequestFailed("é" * 500_000)
        if request.payload == b"odd":
            raise RequestFailed("\udc80")
        if request.payload == b"file":
            Path("/etc/a private/file").read_text()
        return b"%d" % (1 / len(request.payload))

    await server.respond("divide", handler)
    await server.fence()
    async with server.serving():
        for payload, error in (
            (b"", r"^the responder failed \(ZeroDivisionError\): its log says why$"),
            (b"type", r"\(UsageError\)"),
            (b"large", r"^the reply is too long: .* the limit is 409600; .*--max-packet\)$"),
            (b"long", "^éé"),
            (b"odd", r"^\?$"),
            (b"file", r"^the responder failed \(FileNotFoundError\): its log says why$"),
        ):
            with pytest.raises(RequestFailed, match=error):
                await bus.request("divide", payload)
        assert await bus.request("divide", b"x") == b"1"
    logged: list[Any] = [type(error) for error in backend.take_failures()]
    logged += [record.exc_info[0] for record in caplog.records if record.name == "sbus.client" and record.exc_info]
    assert logged == [ZeroDivisionError, UsageError, FileNotFoundError]


async def test_handler_may_be_a_coroutine_function(looping: Backend, shared: Bus) -> None:
    """An async handler waits for something while others are answered; its errors reach both ends."""
    server, bus = await looping.connect(shared.address), await looping.connect(shared.address)
    other = await looping.connect(shared.address)

    async def handler(request: Any) -> bytes:
        if request.payload == b"wrong":
            raise LookupError(request.payload)
        if request.payload == b"refused":
            raise RequestFailed("not today")
        reply = upper(request)
        if request.payload == b"first":
            reply += b" and " + await server.raw.request("ask", b"second")
        return reply

    await server.respond("ask", handler)
    await server.fence()
    assert await bus.request("ask", b"first") == b"FIRST and SECOND"
    with pytest.raises(RequestFailed, match=r"^not today$"):
        await other.request("ask", b"refused")
    with pytest.raises(RequestFailed, match=r"^the responder failed \(LookupError\)"):
        await other.request("ask", b"wrong")
    failures = looping.take_failures()
    assert all(isinstance(error, LookupError) for error in failures)


@pytest.mark.parametrize("is_async", [False, True])
async def test_handler_that_is_cancelled(native: Backend, shared: Bus, is_async: bool) -> None:
    """The requester learns at once that a handler was cancelled, as by what it waits for."""
    server, bus = await native.connect(shared.address), await native.connect(shared.address)
    cancelled: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    cancelled.cancel()

    async def wait(request: Any) -> bytes:
        return await cancelled

    await server.respond("ask", wait if is_async else lambda request: cancelled.result())
    await server.fence()
    with pytest.raises(RequestFailed, match=r"^the responder gave up \(CancelledError\)$"):
        await bus.request("ask")
    assert all(isinstance(error, asyncio.CancelledError) for error in native.take_failures())


async def test_closing_in_a_handler(looping: Backend, shared: Bus) -> None:
    """An async handler may close its own connection. The requester waits in vain, or hears that nobody is there
    if the bus sees the end before it counts the subscribers.
    """
    server, bus = await looping.connect(shared.address), await looping.connect(shared.address)

    async def handler(request: Any) -> bytes:
        await server.raw.close()
        return b"too late"

    await server.respond("ask", handler)
    await server.fence()
    with pytest.raises((TimedOut, NobodyListens)):
        await bus.request("ask", timeout=0.2)
    assert looping.take_failures() == []


async def test_answers_can_be_given_later(backend: Backend, shared: Bus) -> None:
    """A responder may keep requests and answer or fail them later, in any order."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    other = await backend.connect(shared.address)
    sub = await server.subscribe("later")
    await server.fence()
    first = asyncio.ensure_future(bus.request("later", b"1"))
    requests = [await sub.get()]
    second = asyncio.ensure_future(other.request("later", b"2"))
    requests.append(await sub.get())
    await server.fail(requests[1], "no time")
    with pytest.raises(RequestFailed, match=r"^no time$"):
        await second
    await server.answer(requests[0], b"yes")
    assert await first == b"yes"


async def test_late_reply_is_ignored(backend: Backend, shared: Bus) -> None:
    """The late reply to a request that timed out does not complete the next one."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await server.subscribe("slow")
    await server.fence()
    # The first request asks for the client's name too; from now on only the reply takes time.
    first = asyncio.ensure_future(bus.request("slow", b"0"))
    await server.answer(await sub.get(), b"")
    await first
    late: list[Any] = []
    while not late:  # a request whose time is over before it can leave is not sent
        with pytest.raises(TimedOut):
            await bus.request("slow", b"1", timeout=0.05)
        await bus.fence()
        await server.fence()
        late = await sub.get_ready()
    asked = asyncio.ensure_future(bus.request("slow", b"2"))
    request = await sub.get()
    await server.answer(late[0], b"late")
    await server.answer(request, b"right")
    assert await asked == b"right"


async def test_first_answer_counts(backend: Backend, shared: Bus) -> None:
    """If several clients reply, the first reply counts."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await server.subscribe("many")
    await server.fence()
    asked = asyncio.ensure_future(bus.request("many"))
    request = await sub.get()
    reply_to = request.payload.partition(b"\0")[0]
    await server.publish_many([(reply_to, b"+first"), (reply_to, b"-second"), (reply_to, b"+third")])
    assert await asked == b"first"


async def test_requests_of_many_keep_apart(looping: Backend, shared: Bus) -> None:
    """A hundred concurrent requests on one connection each get their own reply."""
    server, bus = await looping.connect(shared.address), await looping.connect(shared.address)
    await server.respond("up/*", upper)
    await server.fence()
    answers = await asyncio.gather(*[bus.request(f"up/{i}", b"n%d" % i) for i in range(100)])
    assert answers == [b"N%d" % i for i in range(100)]


async def test_flood_of_requests_whose_handlers_wait(looping: Backend, shared: Bus) -> None:
    """A bounded number of handlers is under way, and of other requests unread; each is answered, in order."""
    server, bus = await looping.connect(shared.address), await looping.connect(shared.address)
    begun: list[int] = []
    most = under_way = 0
    hold: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handler(request: Any) -> bytes:
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        begun.append(int(request.payload))
        await (Deferred.fromFuture(hold) if looping.name == "twisted" else hold)
        under_way -= 1
        return bytes(request.payload)

    await server.flood_control(soft="block")
    await server.respond("ask", handler)
    await server.fence()
    key, inbox = await bus.inbox("sbus/reply/x")
    total = 3 * MOST_HANDLERS
    publishing = asyncio.ensure_future(bus.publish_many([("ask", b"%b\0%d" % (key, i)) for i in range(total)]))
    await wait_stuck(lambda: len(begun) + unread(server), await looping.connect(shared.address))
    assert (len(begun), most) == (MOST_HANDLERS, MOST_HANDLERS)
    hold.set_result(None)
    assert [int(answer[1:]) for answer in await inbox.take(total)] == list(range(total))
    assert begun == list(range(total))
    await publishing


async def test_message_that_is_no_request_gets_no_answer(backend: Backend, shared: Bus) -> None:
    """A responder publishes to reply keys only, whatever a message contains."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    everything = await bus.subscribe("")
    key, inbox = await bus.inbox("sbus/reply/x")
    handled: list[bytes] = []

    def handler(request: Any) -> bytes:
        handled.append(request.payload)
        return b"answer"

    await server.respond("ask", handler)
    await server.fence()
    bad = [
        b"no NUL",
        b"ask\0",
        b"open/sbus/reply/key\0",
        b"!/sbus/reply/key\0",
        b"a/!/sbus/reply/key\0",
        b"!/cred/x/1/1/sbus/reply/key\0",
        await bus.whoami() + b"/other\0",
        await bus.whoami() + b"/sbus/reply/" + b"x" * 2000 + b"\0",
        await bus.whoami() + b"/sbus/reply/" + b"x" * 409_000 + b"\0",
    ]
    async with server.serving():
        for payload in bad:
            await bus.publish("ask", payload)
        await bus.publish("ask", key + b"\0good")
        assert (await inbox.get()).payload == b"+answer"
    await bus.fence()
    assert {message.key for message in await everything.get_ready()} == {b"ask"}
    assert len(handled) == len(bad) + 1
    assert backend.failures == []


async def test_request_that_cannot_be_sent_raises(backend: Backend, shared: Bus) -> None:
    """A request that cannot be sent raises at once."""
    bus = await backend.connect(shared.address)
    with pytest.raises(InvalidKey):
        await bus.request("!")
    with pytest.raises(PacketTooLong):
        await bus.request("k", bytes(409_600))
    await bus.fence()


async def test_identity_is_proved(backend: Backend, shared: Bus) -> None:
    """A client that answers proofs under its own name is verified."""
    server, bus = await backend.connect(shared.address), await backend.connect(shared.address)
    me = await server.whoami()
    sub = await server.answer_proofs()
    await server.fence()
    async with server.serving():
        assert await bus.verify(me) is True
        assert await bus.verify(me.decode()) is True
    await sub.close()


async def test_impostor_is_not_verified(backend: Backend, shared: Bus) -> None:
    """An impostor cannot read the nonce, so it is not verified."""
    bus, impostor = await backend.connect(shared.address), await backend.connect(shared.address)
    claimed = b"!/cred/%d/%d/%d" % (os.getegid(), os.geteuid() + 1, os.getpid())
    # The impostor sees every open message, and would answer it.
    await impostor.respond("", lambda request: request.payload)
    await impostor.answer_proofs()
    await impostor.fence()
    async with impostor.serving():
        assert await bus.verify(claimed, timeout=0.1) is False
        assert await bus.verify(claimed.decode(), timeout=0.1) is False


@pytest.mark.parametrize("peer", ["", "somebody", "!/cred///", "!/cred//1000/", "!/cred/1/2/3!", "!/nobody"])
async def test_name_that_is_not_private_proves_nothing(backend: Backend, shared: Bus, peer: str) -> None:
    """A name that others could subscribe to is not verified."""
    bus, impostor = await backend.connect(shared.address), await backend.connect(shared.address)
    for pattern in ("", "!/cred////sbus/proof"):
        await impostor.respond(pattern, lambda request: request.payload)
    await impostor.fence()
    async with impostor.serving():
        assert await bus.verify(peer, timeout=TIMEOUT) is False


@pytest.mark.parametrize("answer", [b"+wrong", b"-error", b"", b"nonsense"])
async def test_wrong_answer_is_no_proof(backend: Backend, shared: Bus, answer: bytes) -> None:
    """A peer that replies with other bytes than the nonce is not verified."""
    bus, peer = await backend.connect(shared.address), await backend.connect(shared.address)
    _, sub = await peer.inbox("sbus/proof")
    verified = asyncio.ensure_future(bus.verify(await peer.whoami()))
    request = await sub.get()
    await peer.publish(request.payload.partition(b"\0")[0], answer)
    assert await verified is False


@pytest.mark.parametrize("answer", [b"+wrong", b"+", b"+" + b"1" * 5000])
async def test_number_of_a_job_that_is_none(backend: Backend, shared: Bus, answer: bytes) -> None:
    """If a peer answers a put with something else than a number, the caller gets an error of the library."""
    bus, peer = await backend.connect(shared.address), await backend.connect(shared.address)
    sub = await peer.subscribe("queue/none/put/")
    await peer.fence()
    putting = asyncio.ensure_future(bus.do(bus.raw.enqueue, "none", "k"))
    request = await sub.get()
    await peer.publish(request.payload.partition(b"\0")[0], answer)
    with pytest.raises(RequestFailed, match="no number of a job"):
        await putting


@pytest.mark.parametrize("timeout", [0, -1.5, math.nan])
async def test_deadline_that_is_over(backend: Backend, shared: Bus, timeout: float) -> None:
    """Without time left a call times out at once, and nothing of it is left."""
    bus = await backend.connect(shared.address)
    await bus.subscribe("ask")
    me = await bus.whoami()
    with paused(shared.pid):
        for call in (bus.whoami, bus.fence, partial(bus.request, "ask"), partial(bus.has_subscribers, "ask")):
            with pytest.raises(TimedOut, match=f"no answer within {timeout} s"):
                await call(timeout=timeout)
        assert not await bus.verify(me, timeout=timeout)
    await bus.fence()
    assert bus.raw._requests == {}


WRONG: list[Callable[[Any], Any]] = [
    lambda raw: raw.whoami(timeout="1"),
    lambda raw: raw.fence(timeout=b"1"),
    lambda raw: raw.has_subscribers("k", timeout="1"),
    lambda raw: raw.request("nobody", timeout="1"),
    lambda raw: raw.verify("!/cred/1/1/1", timeout=[1]),
    lambda raw: raw.enqueue("jobs", "k", delay="1"),
    lambda raw: raw.enqueue("jobs", "k", timeout="1"),
    lambda raw: raw.enqueue(b"jobs", "k"),
    lambda raw: raw.work(5),
    lambda raw: raw.work("jobs", credit="3"),
    lambda raw: raw.subscribe("a", "no function"),
    lambda raw: raw.respond("a", None),
    lambda raw: raw.control("echo/on", "text"),
    lambda raw: raw.answer(Message(b"a", b""), "text"),
    lambda raw: raw.fail(Message(b"a", b""), ValueError("why")),
    lambda raw: raw.payloads().allocate("1"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
async def test_arguments_of_the_wrong_type(backend: Backend, shared: Bus, number: int) -> None:
    """They raise what other wrong arguments raise, and nothing is sent or left."""
    bus = await backend.connect(shared.address)
    before = bus.raw.core.state()
    with pytest.raises(UsageError):
        await bus.do(WRONG[number], bus.raw)
    assert (bus.raw._requests, bus.raw.core.state(), bus.raw.works) == ({}, before, [])
    await bus.fence()


async def test_times_of_the_wrong_type(waiting: BlockingBackend, shared: Bus) -> None:
    """In the blocking library more calls take a time."""
    bus = await waiting.connect(shared.address)
    sub, watch = await bus.subscribe("a"), await bus.watch_subscribers("a")
    await watch.get()
    calls = (bus.raw.receive, bus.raw.get_many, sub.raw.get, sub.raw.get_many, watch.raw.get, bus.raw.work("q").get)
    for call in (*calls, lambda timeout: bus.raw.publish("a", timeout=timeout), lambda x: bus.raw.limit(x).__enter__()):
        with pytest.raises(UsageError, match=r"^timeout='1': give a number of seconds$"):
            await bus.do(call, "1")


async def test_waiting_in_vain_times_out(backend: Backend, shared: Bus) -> None:
    """A timeout ends one call only: later requests are answered."""
    bus = await backend.connect(shared.address)

    async def ask_in_vain(client: Client) -> None:
        with pytest.raises(TimedOut, match=r"no answer within 0.05 s"):
            await client.whoami(timeout=0.05)
        with pytest.raises(TimedOut):
            await client.fence(timeout=0.05)
        with pytest.raises(TimedOut):
            await client.request("x", timeout=0.05)

    with paused(shared.pid):
        await ask_in_vain(bus)
    sub = await bus.subscribe("after")
    await bus.publish_many([("after", b"%d" % i) for i in range(300)])
    await bus.fence()
    assert len(await sub.get_ready()) == 300
    assert (await bus.whoami()).startswith(b"!/cred/")
