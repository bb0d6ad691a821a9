"""Helpers for the tests of lost connections: calls that wait, and how soon clients reconnect."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from sbus.client import blocking
from sbus.client.connecting import Backoff
from sbus.errors import Disconnected
from tests.integration.clients.backends import Client
from tests.integration.clients.fake_servers import FakePeer
from tests.support.harness import TIMEOUT, Bus

QUICK = Backoff(first=0.01, factor=1.2, longest=0.05)
WHOAMI = b"CMSG !/cred/whoami"
NAME = b"!/cred/1/2/3"


async def publish_without_end(client: Client) -> None:
    while True:
        await client.publish("k", bytes(10_000))


CALLS: dict[str, Callable[[Client], Any]] = {
    "whoami": lambda client: client.whoami(),
    "fence": lambda client: client.fence(),
    "inbox": lambda client: client.inbox("x"),
    "request": lambda client: client.request("nobody"),
    "verify": lambda client: client.verify("!/cred/1/2/3"),
    "answer_proofs": lambda client: client.answer_proofs(),
    "publish": publish_without_end,
}


async def gather(calls: list[asyncio.Future[Any]]) -> list[Any]:
    """Return the exceptions of calls that all fail."""
    async with asyncio.timeout(TIMEOUT):
        return list(await asyncio.gather(*calls, return_exceptions=True))


async def answer_until(peer: FakePeer, last: bytes) -> list[bytes]:
    """Answer each ``whoami`` up to a packet, and return the other packets."""
    packets: list[bytes] = []
    while not packets or packets[-1] != last:
        packet = await peer.receive()
        assert packet, f"the connection ended after {packets}"
        if packet == WHOAMI:
            peer.send(WHOAMI + b"\0" + NAME)
        else:
            packets.append(packet)
    return packets


def lose(server: Bus, client: blocking.Bus) -> None:
    """Kill the server, and make the client notice."""
    client.fence()
    server.kill(signal.SIGKILL)
    server.wait()
    with pytest.raises(Disconnected):
        client.fence()
