"""The end of the server, and of subscribers of the program."""

from __future__ import annotations

from sbus.errors import CloseReason
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus
from tests.unit.server.leaving import LEAVER, OTHER, TICK, contend, leaver, look_ups

# --- the server stops -----------------------------------------------------------------------------


def test_stopping_looks_nothing_up():
    """When the server stops, clients that leave do not have the routes of those that are still there looked up."""
    bus = Bus()
    peers = [leaver(bus, 1) for _ in range(60)]
    for peer in peers:
        bus.registry.subscribe(peer.protocol, b"")
    bus.connect(uid=OTHER).send(*[b"MSG key/%d\0" % number for number in range(100)])
    keys = look_ups(bus)
    stopped = bus.registry.stopService()
    bus.settle()
    assert not bus.registry.clients
    assert keys == []
    assert stopped.called
    assert bus.registry.router.index.is_empty()


def test_many_patterns_do_not_delay_the_end():
    """A server that stops drops what is left of many patterns without turns, when all clients are gone."""
    bus = HandTurnedBus(TICK)
    peers = [leaver(bus, 1_000) for _ in range(4)]
    bus.use_up(peers[0], 1_000_000)
    local = Local(bus)
    bus.registry.router.index.subscribe(local, b"own", None, local.peer)
    stopped = bus.registry.stopService()
    for _ in range(40):
        bus.settle()
        bus.turn()
    assert stopped.called
    assert bus.registry.route(b"own").receivers == (local,)
    bus.registry.router.index.unsubscribe(local, b"own", None, local.peer)
    assert bus.registry.router.index.is_empty()
    bus.registry.startService()
    peer = bus.connect(uid=9)
    peer.send(b"SUB k", b"MSG k\0")
    assert peer.take() == [b"MSG k\0"]
    assert bus.registry.routes[b"k"].receivers == (peer.protocol,)


def test_clients_are_disconnected_in_slices():
    """When the server stops, the closing of many clients begins in slices, and no packet of any is handled."""
    count = 1_200
    bus = HandTurnedBus(TICK, limits=Limits(user_clients=count))
    peers = [bus.connect(uid=LEAVER) for _ in range(count)]
    stopped = bus.registry.stopService()
    left = []
    while not stopped.called:
        bus.settle()
        for peer in (peers[0], peers[-1]):
            peer.send(b"MSG k\0")
        left.append(len(bus.registry.clients))
        bus.turn()
    assert 2 <= len(left) < 12
    assert max(before - after for before, after in zip([count, *left], left, strict=False)) < 600
    assert bus.registry.counters.published == 0
    assert {client.reason for client in bus.registry.closed} == {CloseReason.SERVER_STOPPED}


# --- subscribers of the program -------------------------------------------------------------------


class Local:
    """A receiver without a queue."""

    queue = direct = naming = None
    transport = None
    can_block = False

    def __init__(self, bus: Bus) -> None:
        self.peer = PeerCredentials(1, LEAVER, 7)
        self.user = bus.registry.connect_user(self.peer)
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = self.pattern_memory = self.lost = 0
        self.got: list[bytes] = []

    def enqueue(self, packets: list[bytes], may_block: bool) -> None:
        self.got += packets

    def flush(self) -> None:
        """Nothing is sent."""

    def close(self, reason: CloseReason) -> None:
        """Nothing is connected."""


def local_with(bus: HandTurnedBus, count: int) -> Local:
    """Subscribe a receiver of the program to many patterns and ``k``; its user has no time left."""
    local, other = Local(bus), bus.connect(uid=OTHER)
    for number in range(count):
        bus.registry.subscribe(local, b"%d/*" % number)
    bus.registry.subscribe(local, b"k")
    other.send(b"MSG k\0before")
    bus.finish()
    contend(bus, other)
    return local


def test_a_subscriber_of_the_program_gets_nothing_while_it_leaves():
    """A receiver without a queue is skipped from the moment at which it leaves."""
    bus = HandTurnedBus(TICK)
    local, other = local_with(bus, 1_000), bus.connect(uid=OTHER)
    bus.registry.drop(local)
    assert local.patterns
    routed = bus.registry.counters.routed
    other.send(b"MSG k\0late")
    assert local.got == [b"MSG k\0before"]
    assert bus.registry.counters.routed == routed
    bus.finish()
    assert bus.registry.router.index.is_empty()
    assert not bus.registry.router.muted


def test_a_subscriber_that_comes_back():
    """A receiver that subscribes again while its patterns are dropped has the new ones alone, and gets messages."""
    bus = HandTurnedBus(TICK)
    local, other = local_with(bus, 1_000), bus.connect(uid=OTHER)
    bus.registry.drop(local)
    bus.turn()
    unknown = bus.registry.counters.unknown_unsubscriptions
    bus.registry.unsubscribe(local, b"k")
    assert bus.registry.counters.unknown_unsubscriptions == unknown + 1
    bus.registry.subscribe(local, b"new")
    assert list(local.patterns) == [b"new"]
    assert bus.registry.route(b"new").receivers == (local,)
    assert bus.registry.route(b"k").receivers == ()
    bus.finish()
    assert list(local.patterns) == [b"new"]
    contend(bus, other)
    other.send(b"MSG new\0", b"MSG k\0")
    assert local.got == [b"MSG k\0before", b"MSG new\0"]
    bus.registry.drop(local)
    bus.finish()
    assert bus.registry.router.index.is_empty()
    assert local.user.memory == 0
