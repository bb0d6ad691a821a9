"""Clients that watch keys, and the notices that they get."""

from __future__ import annotations

from typing import Any

from zope.interface import implementer

from sbus.server.asks.lingering import LINGER
from sbus.server.core.credentials import KernelCredentials
from sbus.server.core.interfaces import ICredentials
from tests.support.buses import Bus, HandTurnedBus, Peer

OTHER = 2
TICK = 100_000
"""Nanoseconds between two looks at the clock, where the test turns the bus."""


def notices(peer: Peer) -> list[tuple[bytes, int]]:
    """Return the answers and notices about interest that have come, as (key, answer)."""
    found = []
    for packet in peer.take():
        if packet.startswith(b"CMSG interest\0"):
            value, _, key = packet.removeprefix(b"CMSG interest\0").partition(b" ")
            found.append((key, int(value)))
    return found


def settle(bus: Bus) -> None:
    """Let what lingers end, and every walk with it."""
    for _ in range(8):
        if isinstance(bus, HandTurnedBus):
            bus.turn(LINGER)
            bus.finish()
        else:
            bus.clock.advance(LINGER)
            bus.settle()


@implementer(ICredentials)
class Closed(KernelCredentials):
    """A policy under which nobody may publish below ``closed/``."""

    restrictsPublishing = True

    def mayPublish(self, peer: Any, key: bytes) -> bool:
        return not key.startswith(b"closed/")
