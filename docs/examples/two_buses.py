"""Two buses in one process; messages of the inner bus under ``public/`` are published on the outer one too.

python3 two_buses.py inner.sock outer.sock
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import react

from sbus.errors import CloseReason
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server import BusService, Observer


class Window(Observer):
    """Publishes the public messages of the inner bus on the outer one."""

    def __init__(self, outer: BusService) -> None:
        self.outer = outer

    def published(self, client: Any, key: bytes, payload: bytes | None) -> None:
        if payload is not None and key.startswith(b"public/"):
            self.outer.registry.publish(key, payload)


class Books(Observer):
    """Reports, for each client that leaves, how many messages it received and lost."""

    def __init__(self, bus: str) -> None:
        self.bus = bus
        self.got: Counter[Any] = Counter()

    def delivered(self, client: Any, packets: int, size: int) -> None:
        self.got[client] += packets

    def closed(self, client: Any, reason: CloseReason) -> None:
        got = self.got.pop(client, 0)
        print(f"{self.bus}: uid {client.peer.uid} got {got}, lost {client.lost}: {reason.value}", flush=True)


def main(reactor: Any, inner_address: str, outer_address: str) -> Deferred[None]:
    outer = BusService(SeqpacketServerEndpoint(reactor, outer_address, reuse=True), observers=[Books("outer")])
    inner = BusService(
        SeqpacketServerEndpoint(reactor, inner_address, reuse=True), observers=[Books("inner"), Window(outer)]
    )
    for bus in (outer, inner):
        bus.startService()
        reactor.addSystemEventTrigger("before", "shutdown", bus.stopService)
    print("both buses listen", flush=True)
    return Deferred()  # until a signal ends the program


if __name__ == "__main__":
    react(main, sys.argv[1:])
