"""With all client libraries, bundles change only the number of packets, and servers need not support them."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sbus
from sbus.protocol.bundles import MAX_BUNDLE, _unbundle
from tests.integration.clients import test_messages as messages
from tests.integration.clients import test_requests as requests
from tests.integration.clients.backends import Backend, Client, Gaps, TwistedBackend
from tests.integration.clients.fake_servers import FakePeer, FakeServer
from tests.integration.clients.losses import NAME, QUICK, WHOAMI
from tests.support.harness import TIMEOUT, Bus
from tests.support.packets import bundle
from tests.support.servers import StartBus

ON = b"CMSG bundle/on"
ANSWER = ON + b"\x0065536"


async def agree(client: Client, peer: FakePeer) -> None:
    """Make the client read the server's reply about bundles."""
    asking = asyncio.ensure_future(client.whoami())
    assert await peer.receive() == WHOAMI
    peer.send(ANSWER, WHOAMI + b"\0" + NAME)
    await asking
    assert client.raw.core.bundle_limit == MAX_BUNDLE


async def test_bundles_are_used_when_the_server_has_answered(backend: Backend, directory: Path) -> None:
    """The question is the first packet; packets before the reply, and lone packets, are plain."""
    some = [("k", b"%d" % i) for i in range(100)]
    packets = [b"MSG k\0%d" % i for i in range(100)]
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        peer = await server.accept()
        assert await peer.receive(raw=True) == ON
        await client.publish_many(some)
        assert [await peer.receive() for _ in some] == packets
        await agree(client, peer)
        await client.publish_many(some)
        assert await peer.receive() == bundle(*packets)
        await client.publish("k", b"alone")
        assert await peer.receive() == b"MSG k\0alone"
        await client.publish_many([("k", bytes(10_000)), ("k", b"x"), ("k", bytes(100_000)), ("k", bytes(40_000))])
        assert await peer.receive() == bundle(b"MSG k\0" + bytes(10_000), b"MSG k\0x")
        assert [len(await peer.receive()) for _ in range(2)] == [100_006, 40_006]


async def test_bundles_are_taken_apart(backend: Backend, directory: Path) -> None:
    """Messages and replies in bundles count like plain packets; a malformed bundle is ignored."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address)
        sub = await client.subscribe("k")
        peer = await server.accept()
        assert await peer.receive() == b"SUB k"
        asking = asyncio.ensure_future(client.whoami())
        assert await peer.receive() == WHOAMI
        peer.send(ANSWER, bundle(b"MSG k\x001", WHOAMI + b"\0" + NAME, b"MSG k\x002"))
        assert await asking == NAME
        assert await sub.take(2) == [b"1", b"2"]
        peer.send(bundle(b"MSG k\x003") + b"x", b"BNDL", bundle(b"MSG k\x004", b"NEW", b"MSG k\x005"))
        assert await sub.take(2) == [b"4", b"5"]


@pytest.mark.parametrize("settings", [{"bundles": False}, {"dialect": "early"}], ids=str)
async def test_bundles_that_are_not_wanted(backend: Backend, directory: Path, settings: dict[str, Any]) -> None:
    """A client without bundles, or in the early dialect, does not ask for them."""
    with FakeServer(directory / "fake") as server:
        client = await backend.connect(server.address, **settings)
        await client.publish("k", b"1")
        peer = await server.accept()
        first = [] if "dialect" in settings else [b"CMSG bye/on", b"CMSG denied/on"]
        assert [await peer.receive(raw=True) for _ in (*first, 1)] == [*first, b"MSG k\x001"]


async def test_client_that_only_publishes_reads_the_reply(backend: Backend, directory: Path) -> None:
    """A client that never reads still notices the reply; any other first packet means that there is none."""
    some = [("k", b"%d" % i) for i in range(10)]
    whole = bundle(*[b"MSG k\0%d" % i for i in range(10)])
    with FakeServer(directory / "fake") as server:
        for first in (ANSWER, b"CMSG other\0"):
            client = await backend.connect(server.address)
            peer = await server.accept()
            peer.send(first)
            await asyncio.sleep(0)
            await client.publish_many(some)
            got = [await peer.receive()]
            if first == ANSWER and got != [whole]:  # the event loop may not have read it yet
                got += [await peer.receive() for _ in range(9)]
                await client.publish_many(some)
                got = [await peer.receive()]
            assert got == ([whole] if first == ANSWER else [b"MSG k\x000"])


async def test_what_is_published_in_one_turn_leaves_together(looping: Backend, directory: Path) -> None:
    """Messages published without waiting travel in a few packets, in order."""
    with FakeServer(directory / "fake") as server:
        client = await looping.connect(server.address)
        peer = await server.accept()
        await agree(client, peer)
        for _ in range(2):
            calls = [asyncio.ensure_future(client.publish("k", b"%d" % i)) for i in range(1000)]
            await asyncio.gather(*calls)
            sent = 0
            packets: list[bytes] = []
            while len(packets) < 1000:
                packets += _unbundle([await peer.receive()])
                sent += 1
            assert packets == [b"MSG k\0%d" % i for i in range(1000)]
        assert sent <= 3


async def test_bundling_and_plain_clients_together(backend: Backend, shared: Bus) -> None:
    """Clients with and without bundles receive the same messages from each other."""
    kinds: list[dict[str, Any]] = [{}, {"bundles": False}]
    readers = [await backend.connect(shared.address, **kind) for kind in kinds]
    publishers = [await backend.connect(shared.address, **kind) for kind in kinds]
    subs = [await reader.subscribe("mixed/") for reader in readers]
    await messages.fenced(*readers, *publishers)
    assert [client.raw.core.bundle_limit for client in publishers] == [MAX_BUNDLE, 0]
    sent = []
    for turn in range(6):
        many = [(f"mixed/{i % 3}", b"%d " % (turn * 1000 + i) + bytes(i * 7)) for i in range(300)]
        await publishers[turn % 2].publish_many(many)
        await publishers[turn % 2].publish("mixed/alone", b"%d" % turn)
        await publishers[turn % 2].publish("mixed/large", bytes(300_000))
        await publishers[turn % 2].fence()
        sent += [payload for _, payload in many] + [b"%d" % turn, bytes(300_000)]
    for sub in subs:
        assert await sub.take(len(sent)) == sent


async def test_reconnecting_to_servers_with_bundles_and_without(backend: Backend, bus: StartBus) -> None:
    """Each connection negotiates bundles again; subscriptions and messages are unaffected."""
    server, gaps = bus(), Gaps()
    client = await backend.connect(server.address, reconnect=QUICK, on_gap=gaps)
    sub = await client.subscribe("k")
    some = [("k", b"%d" % i) for i in range(500)]
    for turn, (options, limit) in enumerate([((), MAX_BUNDLE), (("--max-packet=65535",), 0), ((), MAX_BUNDLE)]):
        if turn:
            server.kill(signal.SIGKILL)
            server.wait()
            server = bus("--reuse", *options)
        await client.settle()
        assert client.raw.core.bundle_limit == limit
        await client.publish_many(some)
        assert await sub.take(500) == [payload for _, payload in some]
    assert len(gaps.reported) == 2


async def test_bundles_are_longer_than_the_longest_packet(backend: Backend, shared: Bus) -> None:
    """A client that takes only short packets has room for a bundle of them."""
    client = await backend.connect(shared.address, max_packet=100)
    sub = await client.subscribe("k")
    await client.fence()
    for _ in range(3):
        await client.publish_many([("k", b"%d" % i) for i in range(5000)])
        assert await sub.take(5000) == [b"%d" % i for i in range(5000)]


async def test_endpoint_that_knows_of_no_bundles(twisted: TwistedBackend, shared: Bus) -> None:
    """An endpoint made for short packets still gets buffers for bundles."""
    client = await twisted.connect(f"seqpacket:{shared.address}:max_packet=100", max_packet=100)
    sub = await client.subscribe("k")
    await client.fence()
    assert client.raw.core.bundle_limit > 0
    await client.publish_many([("k", b"%d" % i) for i in range(3000)])
    assert await sub.take(3000) == [b"%d" % i for i in range(3000)]


def test_socket_that_was_made_smaller_than_a_bundle(shared: Bus) -> None:
    """Packets that do not fit as a bundle go out one by one."""
    with sbus.connect(str(shared.address)) as client:
        client.subscribe("k")
        client.fence()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
        client.publish_many([("k", b"%d" % i + bytes(500)) for i in range(200)])
        client.fence(TIMEOUT)
        assert [int(m.payload.rstrip(b"\0")) for m in client.get_ready()] == list(range(200))


ALIKE: list[Callable[..., Any]] = [
    messages.test_message_arrives_as_it_was_published,
    messages.test_overlapping_subscriptions_get_their_message_once_each,
    messages.test_thousand_subscriptions_on_one_connection,
    messages.test_callback_gets_messages_in_order,
    messages.test_get_many_waits_for_one_and_gives_all,
    messages.test_callback_may_use_the_bus,
    messages.test_iteration_ends_when_the_subscription_is_closed,
    messages.test_own_messages_come_back_unless_echo_is_off,
    messages.test_packet_over_the_limit_is_refused,
    requests.test_request_is_answered,
    requests.test_answers_can_be_given_later,
    requests.test_identity_is_proved,
]


@pytest.mark.parametrize("behaviour", ALIKE, ids=lambda test: test.__name__)
async def test_plain_packets_behave_alike(backend: Backend, shared: Bus, behaviour: Callable[..., Any]) -> None:
    """With ``bundles=False``, everything works as with bundles."""
    backend.settings["bundles"] = False
    await behaviour(backend, shared)
