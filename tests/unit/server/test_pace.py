"""Rates: a user above its max_rate is read more slowly, and no client of a user starves another one."""

from __future__ import annotations

from collections import Counter

import pytest
from twisted.internet.task import Clock

from sbus.policy import Policy
from sbus.policy.rules import Rule
from sbus.protocol.bundles import pack
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.listeners import Listener
from tests.support.buses import Bus, Peer

USER = frozenset({1000})


def slow_bus(*rules: Rule) -> tuple[Bus, Peer]:
    """Return a bus with these rules, and a reader of everything."""
    bus = Bus(policy=Policy(rules), clock=Clock())
    reader = bus.connect(uid=7)
    reader.send(b"SUB ")
    return bus, reader


def rule(rate: float, number: int = 0, listener: str | None = None) -> Rule:
    """Return a rule for one user, perhaps at one socket."""
    where = None if listener is None else frozenset({listener})
    return Rule(number, f"r{number}", "", users=USER, listeners=where, max_rate=rate)


def at(bus: Bus, listener: str) -> Peer:
    """Connect a client at another socket."""
    return bus.connect(make=lambda registry: BusProtocol(registry, Listener(listener)))


def flood(clients: list[Peer], messages: int = 20_000) -> None:
    """Have each client send many messages with its number as the key."""
    for number, client in enumerate(clients):
        client.transport.deliver(*[b"MSG %d\0" % number] * messages)


def counted(bus: Bus, reader: Peer, seconds: float) -> Counter[bytes]:
    """Let time pass; return how many messages have come from whom."""
    for _ in range(round(seconds * 1000)):
        bus.clock.advance(0.001)
    return Counter(packet[4:-1] for packet in reader.take())


@pytest.mark.parametrize(("rate", "clients"), [(1, 3), (100, 2), (100, 60), (4000, 9)])
def test_the_clients_of_a_user_have_equal_parts_of_its_rate(rate, clients):
    """However much a client sends, another one of the same user gets its part of the rate, and together it is kept."""
    bus, reader = slow_bus(rule(rate))
    flood([bus.connect() for _ in range(clients)])
    counted(bus, reader, 1.0)
    seconds = max(2.0, 10 * clients / rate)
    came = counted(bus, reader, seconds)
    assert len(came) == clients
    assert max(came.values()) <= 1.3 * min(came.values())
    assert 0.95 * rate * seconds <= came.total() <= 1.05 * rate * seconds


def test_a_single_message_comes_through_beside_a_flood():
    """A client that sends a message now and then waits for one round of the others, and not for their end."""
    bus, reader = slow_bus(rule(100))
    flood([bus.connect()])
    other = bus.connect()
    counted(bus, reader, 1.0)
    for _ in range(10):
        other.send(b"MSG other\0")
        assert counted(bus, reader, 0.05)[b"other"] == 1


def test_another_socket_with_another_rate_adds_nothing():
    """A client takes from the buckets of all its rates: a lower one at another socket is within the higher one."""
    bus, reader = slow_bus(rule(400), rule(300, 1, "b"), rule(350, 2, "c"))
    flood([bus.connect(), at(bus, "b"), at(bus, "c")])
    counted(bus, reader, 1.0)
    came = counted(bus, reader, 2.0)
    assert 760 <= came.total() <= 840
    assert min(came.values()) > 100


def test_a_bundle_counts_as_its_messages():
    """Bundles that were left in one piece, as there were many of them, are not handled whole."""
    bus, reader = slow_bus(rule(400))
    client = bus.connect()
    client.send(b"CMSG bundle/on")
    bundles, _ = pack([b"MSG k\0"] * 20_000, 65_536, 100)
    assert len(bundles) < 10
    client.transport.deliver(*bundles, b"MSG last\0")
    for _ in range(3):
        assert 380 <= counted(bus, reader, 1.0).total() <= 420
    assert counted(bus, reader, 50.0)[b"last"] == 1


def test_tokens_cannot_be_saved_by_many_clients():
    """Clients that were blocked while they waited have one burst together when they may go on, and not one each."""
    bus, reader = slow_bus(rule(400))
    clients = [bus.connect() for _ in range(50)]
    for client in clients:
        client.protocol.pause_publishing()
    flood(clients)
    for client in clients:
        client.protocol.resume_publishing()
        client.protocol.pause_publishing()
    counted(bus, reader, 3.0)
    for client in clients:
        client.protocol.resume_publishing()
    assert counted(bus, reader, 1.0).total() <= 420


def test_a_client_that_leaves_gives_its_tokens_back():
    """Clients that come, wait and go cost the others of their user nothing."""
    bus, reader = slow_bus(rule(100))
    flood([bus.connect()])
    counted(bus, reader, 1.0)
    for _ in range(100):
        passing = bus.connect()
        passing.transport.deliver(*[b"MSG x\0"] * 10)
        passing.transport.loseConnection()
        bus.settle()
    assert counted(bus, reader, 1.0)[b"0"] >= 80
