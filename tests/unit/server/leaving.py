"""Clients that leave, and what they leave behind."""

from __future__ import annotations

from typing import Any

from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import SecretKey
from sbus.server.bus.protocol import BusProtocol
from tests.support.buses import Bus, HandTurnedBus, Peer

TICK = QUANTUM // 5
LEAVER, OTHER = 7, 8


class Referred(BusProtocol):
    """A connection that can be referred to weakly."""

    __slots__ = ("__weakref__",)


def leaver(bus: Bus, count: int, uid: int = LEAVER) -> Peer:
    """Connect a client with `count` patterns, one of which is ``k``."""
    peer = bus.connect(uid=uid, make=Referred)
    for number in range(count - 1):
        bus.registry.subscribe(peer.protocol, b"%d/*" % number)
    bus.registry.subscribe(peer.protocol, b"k")
    return peer


def contend(bus: HandTurnedBus, peer: Peer) -> None:
    """Have others be active, and a client's user have the time of one turn."""
    bus.use_up(peer, -QUANTUM // 1_000)


def look_ups(bus: Bus) -> list[bytes]:
    """Return a list to which each key is added that is looked up from now on."""
    index, keys = bus.registry.router.index, list[bytes]()
    look_up = index.look_up

    def counted(key: bytes, secret: SecretKey | None) -> Any:
        keys.append(key)
        return look_up(key, secret)

    setattr(index, "look_up", counted)  # noqa: B010
    return keys
