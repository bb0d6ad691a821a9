"""Cohorts: what happens to them while they change, and what is left of them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from unittest import mock

import pytest
from twisted.internet import error
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from sbus.server import cohorts, delivery, late
from sbus.server.late import LONGEST_WAIT
from sbus.server.observers import Observer
from sbus.server.turns import TURN_BUDGET
from tests.support.buses import Bus, Peer


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    """Have single receivers form cohorts."""
    monkeypatch.setattr(late, "MANY", 1)
    monkeypatch.setattr(delivery, "MANY", 1)


def stalled(bus: Bus, publisher: Peer, *choices: bytes, count: int = 2, patterns: tuple[bytes, ...] = (b"k",)):
    """Return readers that are members of a cohort, for which nothing waits undecided."""
    readers = [bus.connect(uid=2) for _ in range(count)]
    for reader in readers:
        reader.send(*[b"CMSG " + choice for choice in choices], *[b"SUB " + pattern for pattern in patterns])
        reader.stall()
        reader.take()
    publisher.send(b"MSG %s\0first" % patterns[0])
    assert len(bus.registry.delivery._late.cohorts.of) == count
    return readers


def test_a_digest_is_forgotten_when_it_was_used():
    """A receiver that has got all that waited pays for its next message alone, and keeps nothing in memory."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    (reader,) = stalled(bus, publisher, b"blocking/soft/discard", count=1)
    publisher.send(*[b"MSG k\0"] * 60)
    reader.transport.capacity = None
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    assert len(reader.take()) == 60
    assert reader.protocol.queue.digest is None


def test_a_packet_that_is_too_long_for_one_member_reaches_the_other():
    """What a member has sent in place of a packet that its socket never takes is no other member's."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, b"blocking/soft/discard", b"receipts/on")
    for _ in range(2):
        for reader in readers:
            reader.transport.capacity = None
        readers[0].transport.longest = 80
        publisher.send(b"MSG k\0" + bytes(100))
        bus.clock.advance(LONGEST_WAIT)
        bus.settle()
        assert b"MSG k\0" + bytes(100) in readers[1].take()


class Echoing(Observer):
    """Publishes when a message is delivered to one client."""

    def __init__(self) -> None:
        self.client: object = None
        self.publish = lambda: None

    def delivered(self, client, messages, size) -> None:
        if client is self.client:
            self.client = None
            self.publish()


def test_a_receiver_that_joins_in_the_middle_of_a_run_gets_the_run(monkeypatch):
    """An observer publishes while a run is delivered, and a receiver of that run joins a cohort: the order stays."""
    echoing = Echoing()
    bus = Bus(observers=[echoing])
    publisher = bus.connect(uid=1)
    first, second = bus.connect(uid=2), bus.connect(uid=2)
    for reader in (first, second):
        reader.send(b"SUB k")
    second.send(b"SUB note")
    second.stall()
    with monkeypatch.context() as few:  # with a full socket, and in no cohort
        few.setattr(delivery, "MANY", 10)
        publisher.send(b"MSG note\0before")
    first.protocol.user.copies.work_left = TURN_BUDGET
    late_ = bus.registry.delivery._late
    late_.postpone(first.protocol, first.protocol.queue, [b"MSG k\0one"], 9)
    echoing.client = first.protocol
    echoing.publish = lambda: bus.registry.publish(b"note", b"inner")
    room, calls = late.Late.room, itertools.count()
    join = mock.Mock(side_effect=cohorts.Cohorts.join)
    monkeypatch.setattr(cohorts.Cohorts, "join", lambda *args: join(*args))
    # The run has to be decided about for the first one, and then what the observer publishes for the second one.
    monkeypatch.setattr(late.Late, "room", lambda *args: (0, 0) if next(calls) < 3 else room(*args))
    publisher.transport.deliver(b"MSG k\0two")
    assert [call.args[1] for call in join.mock_calls] == [second.protocol]
    publisher.send(b"MSG note\0outer")
    bus.clock.advance(LONGEST_WAIT)
    second.drain()
    bus.clock.advance(LONGEST_WAIT)
    assert [packet.partition(b"\0")[2] for packet in second.take()] == [b"before", b"inner", b"two", b"outer"]


def test_a_cohort_that_cannot_be_split_is_closed(monkeypatch):
    """If there may be no more cohorts, a message for some members costs no decisions, and waits behind what waits."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, count=4)
    monkeypatch.setattr(cohorts, "MOST_COHORTS", 1)
    for reader in readers[1:]:
        reader.send(b"SUB j")
    publisher.send(b"MSG k\0one")
    found = bus.registry.delivery._late
    (cohort,) = set(found.cohorts.of.values())
    assert len(cohort.members) == 4
    monkeypatch.setattr(found, "_decide", mock.Mock(side_effect=AssertionError("decided")))
    for packet in (b"MSG j\0two", b"MSG k\0three", b"MSG j\0four"):
        publisher.transport.deliver(packet)
    monkeypatch.undo()
    assert cohort.packets == [b"MSG k\0one"]
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    assert not cohort.members
    for reader in readers:
        reader.drain()
        got = [packet.partition(b"\0")[2] for packet in reader.take()]
        assert got == [b"first", b"one", b"two", b"three", b"four"] if reader is not readers[0] else b"two" not in got
    assert (found.bytes, found.cohorts.bytes) == (0, 0)


def test_a_split_costs_what_the_part_has():
    """A message for one member of a large cohort looks at no other one, and the oldest positions stay the first."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, count=6)
    found = bus.registry.delivery._late.cohorts
    (cohort,) = set(found.of.values())
    publisher.send(b"MSG k\0one")
    cohort.due = cohort.end
    cohort.advance(readers[0].protocol)
    for reader in (readers[0], readers[3]):
        reader.send(b"SUB j")
    items = mock.Mock(side_effect=AssertionError("looked at all"))
    cohort.members = type("Members", (OrderedDict,), {"items": items})(cohort.members)
    publisher.transport.deliver(b"MSG j\0two")
    part = found.of[readers[0].protocol]
    assert list(part.members) == [readers[3].protocol, readers[0].protocol]
    assert list(part.members.values()) == [0, 1]


def test_what_waits_for_a_member_whose_connection_breaks_is_counted_as_lost():
    """Messages that wait in a cohort are in the counts of losses, as those in the queue are."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher)
    publisher.send(*[b"MSG k\0"] * 5)
    for reader in readers:
        reader.transport._abort(Failure(error.ConnectionLost()))
    bus.settle()
    assert [reader.protocol.lost for reader in readers] == [6, 6]
    assert bus.registry.counters.dropped == 12


def test_clients_that_are_gone_are_in_no_plan():
    """A cohort that stays as it is keeps no client alive that has left."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    stalled(bus, publisher)
    for n in range(200):
        reader = bus.connect(uid=3)
        reader.send(b"SUB x%d" % n)
        publisher.send(b"MSG x%d\0" % n)
        reader.transport.loseConnection()
        bus.settle()
    known = {receiver for plan in bus.registry.delivery._late.cohorts._plans.values() for receiver in plan[0]}
    assert len(known) <= 64


def test_messages_that_only_observers_wait_for_are_unrouted():
    """An observer in a cohort counts as no subscriber, as one elsewhere; a subscriber in one counts."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    (observer,) = stalled(bus, publisher, b"observer/on", count=1)
    before = bus.registry.counters.unrouted
    publisher.send(b"MSG k\0")
    assert bus.registry.counters.unrouted == before + 1
    reader = bus.connect(uid=2)
    reader.send(b"SUB k")
    publisher.send(b"MSG k\0")
    assert bus.registry.counters.unrouted == before + 1
    assert observer.is_connected


def test_users_that_are_gone_are_not_kept_by_turns():
    """On a bus where nobody has to wait, users that come and go are forgotten."""
    bus = Bus()
    for _ in range(10):
        peer = bus.connect(uid=1)
        peer.send(b"MSG k\0")
        peer.transport.loseConnection()
        bus.settle()
    assert len(bus.registry.turns._senders) <= 2


def test_members_that_drain_share_what_waits():
    """A member that has read its queue wants a turn, and what waits for all is not copied for it."""
    bus = Bus(clock=Clock())
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, count=10)
    found = bus.registry.delivery._late
    publisher.send(*[b"MSG k\0" + bytes(1_000)] * 20)
    turns, bus.registry.turns._is_due = bus.registry.turns._is_due, True  # nobody gets a turn
    before = readers[0].protocol.user.memory
    for reader in readers:
        reader.transport.drain(1)
    assert found.bytes == 0
    assert readers[0].protocol.user.memory <= before
    bus.registry.turns._is_due = turns
    bus.registry.turns._schedule()
    for reader in readers:
        reader.drain()
    assert [len(reader.take()) for reader in readers] == [21] * 10
    assert (found.bytes, found.cohorts.bytes) == (0, 0)


def test_a_publisher_decides_about_some_members_at_a_time(monkeypatch):
    """However full the cohorts are, one message is no long piece of work."""
    monkeypatch.setattr(late, "MOST_BYTES", 10_000)
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, count=100)
    served = itertools.count()
    found = bus.registry.delivery._late
    decide = found._decide
    found._decide = lambda *args: (next(served), decide(*args))[1]
    publisher.send(b"MSG k\0")
    found.cohorts.bytes += 10_000  # of other cohorts
    publisher.send(b"MSG k\0")
    assert 0 < next(served) < 50
    assert readers


def test_what_waits_for_a_cohort_costs_no_other_user_its_clients():
    """If all are over the limit of memory because of a cohort, its members go, and nobody else."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher)
    publisher.send(*[b"MSG k\0" + bytes(10_000)] * 40)
    account = publisher.protocol.user.budget.memory
    assert bus.registry.delivery._late.cohorts.bytes > 400_000
    account.limit = account.held - 1_000
    bus.registry.memory.relieve()
    bus.settle()
    assert publisher.is_connected
    assert not any(reader.is_connected for reader in readers)
    assert account.held < account.limit
