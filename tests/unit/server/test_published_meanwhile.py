"""What is published while something else is handled, and bundles in slices."""

from __future__ import annotations

from typing import Any

import pytest

from sbus.protocol import bundles
from sbus.server.bus import protocol
from sbus.server.bus.protocol import MAX_RUN
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from tests.support.buses import Bus
from tests.support.packets import bundle, message

# --- what is published meanwhile ------------------------------------------------------------------


def telling_bus(event: str, key: bytes = b"more", most: int = 1, **settings: Any) -> Bus:
    """A bus whose program publishes for each event of one kind with client 1 in it, up to `most` messages."""
    left = most

    def tell(self, client, *_):
        nonlocal left
        if left and client.number == 1:
            left -= 1
            bus.registry.publish(key, b"")

    bus = Bus(observers=(type("Telling", (Observer,), {event: tell})(),), **settings)
    return bus


def test_what_the_program_publishes_from_an_observer_blocks_no_publisher():
    """Not even the client whose message is being handled is blocked, and no client loses its connection."""
    bus = telling_bus("published", most=5)
    publisher, reader = bus.connect(), bus.connect()
    reader.send(b"SUB more", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(*[b"MSG k\0"] * 5)
    assert not publisher.protocol.is_paused
    bus.clock.advance(60)
    bus.settle()
    assert reader.is_connected
    reader.drain()
    assert reader.take() == [b"MSG more\0"] * 5


def test_what_a_client_has_published_before_that_is_still_its_own():
    """A publisher is blocked for its own messages, whatever the program publishes between them."""
    bus = telling_bus("published")
    publisher, reader = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"SUB more", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(b"MSG k\x001", b"MSG k\x002")
    assert publisher.protocol.is_paused
    reader.drain()
    assert not publisher.protocol.is_paused
    assert sorted(reader.take()) == [b"MSG k\x001", b"MSG k\x002", b"MSG more\0"]


@pytest.mark.parametrize("by", ["a client", "the program"])
@pytest.mark.parametrize("capacity", range(5))
def test_publishing_when_something_was_delivered(by, capacity):
    """It is sent at once, or waits with the rest; nothing is lost, and the accounts are right."""
    bus = telling_bus("delivered", most=3)
    reader, other, publisher = bus.connect(), bus.connect(), bus.connect()
    for client in (reader, other):
        client.send(b"SUB k", b"SUB more")
    reader.transport.capacity = capacity
    packets = [message("k", b"%d" % n) for n in range(4)]
    for n, packet in enumerate(packets):
        if by == "a client":
            publisher.send(packet)
        else:
            bus.registry.publish(b"k", b"%d" % n)
        assert reader.protocol.queue.pending == []
        assert packet in other.take()
    reader.drain()
    got = reader.take()
    assert [packet for packet in got if packet != b"MSG more\0"] == packets
    assert got.count(b"MSG more\0") == 3
    assert (reader.protocol.queue.messages, reader.protocol.queue.size) == (0, 0)
    assert (bus.registry.users.budget.bytes, bus.registry.counters.dropped) == (0, 0)


@pytest.mark.parametrize("order", [b"queue", b"stack", b"random"])
@pytest.mark.parametrize("hard", [b"error", b"discard"])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_publishing_when_a_full_queue_was_read(order, hard, taken):
    """A message that an observer publishes finds the room that the delivered ones have left; the accounts are right."""
    bus = telling_bus("delivered", key=b"k", most=1, limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/hard/" + hard, b"CMSG order/" + order)
    reader.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(3)])
    queue = reader.protocol.queue
    assert queue.messages == 3
    reader.drain(taken)
    assert reader.is_connected
    assert (queue.messages, reader.protocol.lost) == (3 - taken + 1, 0)
    reader.drain()
    assert len(reader.take()) == 4
    assert (queue.messages, queue.size, bus.registry.users.budget.bytes) == (0, 0, 0)


def test_publishing_when_something_was_dropped():
    """The receivers behind the one that has lost a message get it all the same."""
    bus = telling_bus("dropped", limits=Limits(queue_messages=1))
    stalled, *others = (bus.connect() for _ in range(4))
    publisher = bus.connect()
    for reader in (stalled, *others):
        reader.send(b"SUB k", b"SUB more")
    stalled.stall()
    publisher.send(message("k"))
    for _ in range(3):
        publisher.send(message("k"), b"SUB else", message("k"))  # which is no run, so that it goes through the queues
    for reader in others:
        got = reader.take()
        assert (got.count(message("k")), got.count(b"MSG more\0")) == (7, 1)


def test_flood_control_hears_of_what_a_socket_did_not_take_in_one_turn(monkeypatch):
    """However little of its queue a transport sends at a time, what its socket does not take counts as waiting."""
    bus = Bus(limits=Limits(queue_messages=2))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    taken_in_all = 0

    def flush():
        nonlocal taken_in_all
        taken = reader.protocol.queue.take(2)
        sent = min(len(taken), 5 - taken_in_all)
        taken_in_all += sent
        reader.protocol.queue.ack(taken, sent)

    monkeypatch.setattr(reader.transport, "flush", flush)
    publisher.send(*[b"MSG k\0"] * 9, b"SUB else")
    assert taken_in_all == 5
    assert (reader.protocol.queue.messages, bus.registry.counters.dropped) == (2, 2)


# --- bundles --------------------------------------------------------------------------------------


def test_a_bundle_behind_the_question_is_sent_in_slices(monkeypatch):
    """However much is read with the question, what it brings is sent on before it is more than a slice."""
    bus = Bus(limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(capacity=0), bus.connect()
    reader.send(b"SUB k")
    longest = 0

    def watched(packets, *more):
        nonlocal longest
        longest = max(longest, len(packets))
        return deliver(packets, *more)

    deliver = bus.registry.deliver
    monkeypatch.setattr(bus.registry, "deliver", lambda packets, *more: watched(packets, *more[:2]))
    publisher.send(b"MSG k\0", b"CMSG bundle/on", bundle(*[b"MSG k\0"] * 3 * MAX_RUN))
    assert longest <= MAX_RUN
    assert (reader.protocol.queue.messages, bus.registry.counters.dropped) == (3, 3 * MAX_RUN - 2)


def test_asking_for_bundles_again_and_again_costs_no_more_each_time(monkeypatch):
    """What is behind the question is looked at when its turn comes, and not at every question."""
    looked_at = 0

    def counted(packets):
        nonlocal looked_at
        looked_at += len(packets)
        return unbundle(packets)

    unbundle = bundles.unbundle
    monkeypatch.setattr(protocol, "unbundle", counted)
    bus = Bus()
    client = bus.connect()
    pairs = [b"CMSG bundle/on", b"CMSG bundle/off"] * 100
    client.send(*pairs, b"CMSG bundle/on", bundle(*pairs, b"MSG a\0"), b"SUB x", b"MSG x\0")
    assert client.is_connected
    assert client.take()[-1] == b"MSG x\0"
    assert looked_at <= 2
