"""Late receivers: copies wait for the turn of their own user, and nothing else changes: no order, no loss, no fence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.errors import CloseReason
from sbus.flood import SOFT_STRATEGIES, SendQueue
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus import cohort_delivery, cohort_plans, delivery, late
from sbus.server.bus.late import LONGEST_WAIT, WORTH_DECIDING
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.core.prices import COPIES, FULL_SOCKET, POSTPONED, UNSHARED
from sbus.server.core.turns import CONTENDED_BUDGET, CROWD, TURN_BUDGET
from sbus.syscalls.batch import BATCH
from tests.support.buses import Bus, Peer, kept
from tests.support.examples import examples
from tests.unit.server.test_bounded_work import Turned

MODES = (
    b"blocking/soft/queue",
    b"blocking/soft/block",
    b"blocking/hard/block",
    b"blocking/hard/discard",
    b"order/queue",
    b"bundle/on",
    b"echo/on",
)


def spend(peer: Peer, debt: int = 1) -> None:
    """Spend a user's balance of copies, while another user waits."""
    peer.protocol.user.copies.work_left = -debt
    peer.protocol._registry.turns.crowd = CROWD


def crowded(**settings) -> tuple[Turned, Peer, Peer]:
    """Return a bus with a publisher, and a subscriber of another user that has no copies left."""
    bus = Turned(**settings)
    publisher, reader = bus.connect(uid=1), bus.connect(uid=2)
    reader.send(b"SUB k")
    spend(reader)
    return bus, publisher, reader


def test_copies_wait_for_the_turn_of_their_user():
    """While others wait, a user without balance gets its copies in its next turns, and pays its debt before."""
    bus, publisher, reader = crowded()
    spend(reader, CONTENDED_BUDGET + 1)
    publisher.send(b"MSG k\0one", b"MSG k\0two")
    assert reader.take() == []
    assert bus.turn()
    assert reader.take() == []
    assert not bus.turn()
    assert reader.take() == [b"MSG k\0one", b"MSG k\0two"]
    assert not reader.protocol.queue.is_late


def test_nobody_waits_while_nobody_else_is_served():
    """On a bus that only one user keeps busy, a spent balance is topped up, and no copy is late."""
    bus, publisher, reader = crowded()
    bus.registry.turns.crowd = 0
    bus.registry.turns.last = publisher.protocol.user
    publisher.send(b"MSG k\0")
    assert reader.take() == [b"MSG k\0"]
    assert not bus.calls


def test_late_copies_cost_their_own_user():
    """The publisher pays for reading a message, and not for the copy that waits."""
    bus, publisher, reader = crowded()
    publisher.send(b"MSG k\0")
    publisher.protocol.user.work_left = TURN_BUDGET
    publisher.send(*[b"MSG k\0"] * 50)
    assert TURN_BUDGET - publisher.protocol.user.work_left < 50
    before = reader.protocol.user.copies.work_left
    bus.turn()
    assert len(reader.take()) == 51
    assert reader.protocol.user.copies.work_left <= before + TURN_BUDGET - FULL_SOCKET


def test_replies_follow_late_copies():
    """A fence still means that everything published before it has come."""
    _, publisher, reader = crowded()
    publisher.send(b"MSG k\0")
    reader.send(b"CMSG !/cred/whoami")
    assert [packet[:4] for packet in reader.take()] == [b"MSG ", b"CMSG"]


def test_a_client_that_sends_no_more_gets_late_copies():
    """Half-closing loses none of the copies that wait."""
    _, publisher, reader = crowded()
    publisher.send(b"MSG k\0")
    reader.transport.end()
    assert reader.take() == [b"MSG k\0"]


def test_a_blocking_receiver_is_not_late_for_those_it_may_block():
    """Blocking stays exact: flood control decides about such a message at once, behind what waited."""
    bus, publisher, reader = crowded()
    friend = bus.connect(uid=2)
    reader.send(b"CMSG blocking/soft/block")
    reader.stall()
    spend(reader)
    publisher.send(b"MSG k\0one")
    assert reader.protocol.queue.is_late
    friend.protocol.user.work_left = TURN_BUDGET
    friend.send(b"MSG k\0two")
    assert friend.protocol.is_paused
    reader.transport.capacity = None
    reader.drain()
    while bus.turn():
        pass
    assert reader.take() == [b"MSG k\0one", b"MSG k\0two"]
    assert not friend.protocol.is_paused


def test_too_much_is_decided_at_the_publishers_expense(monkeypatch):
    """What waits for one receiver is bounded; the publisher that exceeds the bound pays, and nothing is lost."""
    monkeypatch.setattr(late, "MOST_PACKETS", 10)
    monkeypatch.setattr(late, "_OTHERS", 1)
    monkeypatch.setattr(late, "_BEYOND", 2)
    _, publisher, reader = crowded()
    publisher.send(*[b"MSG k\0%d" % n for n in range(9)])
    assert reader.take() == []
    publisher.send(*[b"MSG k\0%d" % n for n in range(9, 20)])
    publisher.send(b"MSG k\0last")
    assert [packet[6:] for packet in reader.take()][:9] == [b"%d" % n for n in range(9)]


def congested(**settings) -> tuple[Turned, Peer, Peer]:
    """As `crowded`, but the subscriber reads nothing, and has messages in its queue."""
    bus, publisher, reader = crowded(**settings)
    reader.protocol.user.copies.work_left = TURN_BUDGET
    reader.stall()
    publisher.send(b"MSG k\0")
    assert reader.protocol.queue.is_congested
    spend(reader)
    return bus, publisher, reader


def test_a_congested_receiver_wants_its_turn_late():
    """What waits for a full socket is decided about after a while, or when there is much of it."""
    bus, publisher, reader = congested(clock=Clock())
    bus.registry.turns._reactor = bus.clock
    queue = reader.protocol.queue
    publisher.send(b"MSG k\0")
    bus.settle()
    assert queue.is_late
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    assert not queue.is_late
    assert queue.messages == 2
    spend(reader)
    publisher.protocol.user.work_left = TURN_BUDGET
    publisher.send(*[b"MSG k\0"] * WORTH_DECIDING)
    bus.settle()
    assert not queue.is_late
    assert queue.messages == WORTH_DECIDING + 2


def test_a_congested_receiver_that_has_read_its_queue_gets_a_turn_at_once():
    """A receiver that reads everything waits for its turn and no longer."""
    bus, publisher, reader = congested(clock=Clock())
    bus.registry.turns._reactor = bus.clock
    publisher.send(b"MSG k\0one")
    assert reader.protocol.queue.is_late
    reader.drain()
    assert reader.take() == [b"MSG k\0", b"MSG k\0one"]
    assert not reader.protocol.queue.is_late


def test_a_late_receiver_keeps_the_order_when_its_user_has_copies_again():
    """What is published for a full, late receiver whose user has a balance comes behind what waits for it."""
    _, publisher, reader = congested()
    publisher.send(b"MSG k\0one")
    assert reader.protocol.queue.is_late
    reader.protocol.user.copies.work_left = CONTENDED_BUDGET
    publisher.send(b"MSG k\0two")
    reader.drain()
    assert reader.take() == [b"MSG k\0", b"MSG k\0one", b"MSG k\0two"]


def test_a_turn_ends_when_its_time_is_over(monkeypatch):
    """Of late receivers that take longer than their price, as many are served in a turn as there is time for."""
    bus, publisher, reader = crowded()
    others = [bus.connect(uid=2) for _ in range(5)]
    for other in others:
        other.send(b"SUB k")
    spend(reader)
    publisher.send(b"MSG k\0")
    decide = bus.registry.delivery._late._decide

    def slowly(*args):
        bus.cpu += 3_000_000
        return decide(*args)

    monkeypatch.setattr(bus.registry.delivery._late, "_decide", slowly)
    served = []
    for _ in range(20):
        bus.turn()
        served.append(sum(len(each.take()) for each in (reader, *others)))
    assert sum(served) == 6
    assert max(served) <= 2


def test_the_flood_of_a_user_leaves_room_for_what_others_publish(monkeypatch):
    """Publishers of a late receiver's user pay for deciding when half of the room is taken, and others later."""
    monkeypatch.setattr(late, "MOST_PACKETS", 20)
    monkeypatch.setattr(late, "_OTHERS", 2)
    monkeypatch.setattr(late, "_BEYOND", 4)
    bus, publisher, reader = congested()
    own = bus.connect(uid=2)
    copies = reader.protocol.user.copies
    for peer, most in ((own, 10), (publisher, 40)):
        spend(reader)
        peer.protocol.user.work_left = TURN_BUDGET
        for _ in range(most - len(reader.protocol.queue.pending)):
            peer.send(b"MSG k\0")
            assert copies.work_left == -1
        assert len(reader.protocol.queue.pending) == most
    before = publisher.protocol.user.work_left
    publisher.send(b"MSG k\0")
    assert publisher.protocol.user.work_left < before - FULL_SOCKET


def test_many_receivers_at_their_limit_cost_a_stranger_nothing(monkeypatch):
    """Where a user's flood has filled what may wait for its many receivers, another user's message costs no more."""
    monkeypatch.setattr(late, "MOST_PACKETS", 20)
    monkeypatch.setattr(delivery, "MANY", 101)  # else they form cohorts
    bus = Turned()
    readers = [bus.connect(uid=2) for _ in range(100)]
    for reader in readers:
        reader.protocol.user.work_left = TURN_BUDGET
        reader.send(b"SUB k")
    own, publisher = bus.connect(uid=2), bus.connect(uid=1)
    spend(readers[0])
    bus.registry.turns._is_due = True  # nobody gets a turn
    for _ in range(40):
        own.protocol.user.work_left = TURN_BUDGET
        bus.registry.turns.crowd = CROWD
        own.transport.deliver(*[b"MSG k\0"] * 10)
    assert max(len(reader.protocol.queue.pending) for reader in readers) > 20
    publisher.protocol.user.work_left = TURN_BUDGET
    bus.registry.turns.crowd = CROWD
    publisher.transport.deliver(b"MSG k\0")
    assert TURN_BUDGET - publisher.protocol.user.work_left < 20


def test_what_waits_takes_nobody_the_memory():
    """On a bus with little memory less can wait for a user, so that no other user's flood ends its clients."""
    bus, publisher, reader = crowded(limits=Limits(max_memory=4 << 20))
    publisher.send(*[b"MSG k\0" + bytes(16_000)] * 70)
    assert reader.protocol.user.memory < (1 << 20) // 8
    reader.send(b"SUB other")
    while bus.turn():
        pass
    assert reader.is_connected
    assert len(reader.take()) == 70


def test_an_observer_may_publish_while_a_publisher_pays(monkeypatch):
    """What an observer publishes when late messages are delivered is a run of its own; the publisher's goes on."""

    class Noting(Observer):
        def delivered(self, client, messages, size) -> None:
            if not notes:
                notes.append(client)
                bus.registry.publish(b"note", b"")

    notes: list = []
    monkeypatch.setattr(late, "MOST_PACKETS", 10)
    monkeypatch.setattr(late, "_OTHERS", 1)
    monkeypatch.setattr(late, "_BEYOND", 2)
    bus, publisher, reader = crowded(observers=[Noting()])
    publisher.send(*[b"MSG k\0%d" % n for n in range(9)])
    publisher.send(*[b"MSG k\0%d" % n for n in range(9, 20)])
    assert notes == [reader.protocol]
    assert reader.take() == [b"MSG k\0%d" % n for n in range(20)]


def test_what_waits_for_a_client_that_reads_no_more_is_dropped():
    """Messages that become late before the server learns of the end of reading are counted as lost, and freed."""
    bus, publisher, reader = crowded()
    reader.transport.breakDown()
    publisher.transport.deliver(b"MSG k\0")
    assert reader.protocol.queue.is_late
    bus.settle()
    assert not reader.protocol.queue.pending
    assert reader.protocol.lost == 1


@pytest.mark.parametrize("uid", [1, 2])
def test_a_publisher_does_not_pay_for_the_time_of_postponing(uid):
    """In a turn that is measured, late receivers cost a publisher nothing, unless they are of its own user."""
    bus = Turned()
    readers = [bus.connect(uid=2) for _ in range(50)]
    publisher = bus.connect(uid=uid)
    for reader in readers:
        reader.send(b"SUB k")
    plan = cohort_plans._PLAN + 1 + 2 * (50 // cohort_plans._PLANNED_AT_ONCE)
    # First 50 receivers become late; then they are a cohort, for which the publisher's first run makes a plan.
    for unpaid in (50 * POSTPONED, POSTPONED + plan if uid == 1 else 50 * POSTPONED):
        spend(readers[0])
        publisher.protocol.user.work_left = 0
        publisher.send(b"MSG k\0")
        # Each look at the clock finds that postponing, and a whole budget, have passed.
        bus.registry.turns.cpu = itertools.count(step=(unpaid + TURN_BUDGET) * 1_000).__next__
        publisher.protocol.user.work_left = TURN_BUDGET
        bus.registry.turns.forget(publisher.protocol.user, publisher.protocol)
        publisher.protocol.take_turn()
        bus.settle()
        assert publisher.protocol.user.work_left == (0 if uid == 1 else -50 * POSTPONED)
    assert bus.registry.delivery.unpaid == (51 * POSTPONED + plan if uid == 1 else 0)


def test_messages_behind_a_snapshot_can_be_late():
    """A receiver that reads no snapshot costs publishers no decisions, and gets everything in its order."""
    bus, publisher, reader = crowded(last_values=(LastValueRule(b"kept/"),))
    publisher.send(b"MSG kept/1\0value")
    reader.stall()
    reader.protocol.user.copies.work_left = TURN_BUDGET
    publisher.send(b"MSG k\0before")
    reader.send(b"CMSG last\0kept/")
    spend(reader)
    publisher.send(b"MSG k\0after")
    queue = reader.protocol.queue
    assert queue.is_held
    assert queue.is_late
    reader.drain()
    bus.turn()
    bus.turn()
    publisher.send(b"MSG k\0later")
    for _ in range(3):
        bus.turn()
        reader.drain()
    got = [packet for packet in reader.take() if packet.startswith(b"MSG ")]
    assert got == [b"MSG k\0before", b"MSG kept/1\0value", b"MSG k\0after", b"MSG k\0later"]
    assert not reader.protocol.queue.is_late


def test_a_receiver_that_can_block_again_leaves_its_cohort(monkeypatch):
    """Behind a snapshot no receiver can block; when it is over, one that chose to leaves the others' cohort."""
    for module in (late, delivery, cohort_delivery):
        monkeypatch.setattr(module, "MANY", 1)
    bus, publisher, reader = crowded(last_values=(LastValueRule(b"kept/"),))
    publisher.send(b"MSG kept/1\0value")
    reader.stall()
    reader.send(b"CMSG blocking/soft/block", b"CMSG last\0kept/")
    publisher.send(b"MSG k\0after")
    found = bus.registry.delivery._late
    cohort = found.cohorts.of[reader.protocol]
    assert not cohort.can_block
    reader.protocol.user.copies.work_left = 1
    spend(reader, -1)
    reader.drain()
    queue = reader.protocol.queue
    assert queue.can_block
    assert queue.is_late
    assert (found.cohorts.of, found.cohorts.bytes) == ({}, 0)
    assert queue.late_bytes == len(b"MSG k\0after")
    assert list(found._lines[reader.protocol.user].receivers) == [reader.protocol]
    while bus.turn():
        pass
    assert [packet for packet in reader.take() if packet.startswith(b"MSG ")] == [b"MSG kept/1\0value", b"MSG k\0after"]
    assert not found._lines


def test_what_is_late_behind_a_snapshot_is_kept():
    """A receiver that discards while its socket is full keeps all that comes behind a snapshot, late or not."""
    bus, publisher, reader = crowded(last_values=(LastValueRule(b"kept/"),))
    publisher.send(b"MSG kept/1\0value")
    reader.send(b"CMSG blocking/soft/discard")
    reader.stall()
    reader.protocol.user.copies.work_left = TURN_BUDGET
    reader.send(b"CMSG last\0kept/")
    publisher.send(b"MSG k\0one")
    spend(reader)
    publisher.send(b"MSG k\0two")
    assert reader.protocol.queue.is_late
    reader.drain(2)
    for _ in range(3):
        bus.turn()
    reader.drain()
    assert [packet for packet in reader.take() if b"k\0" in packet] == [b"MSG k\0one", b"MSG k\0two"]
    assert reader.protocol.lost == 0


def test_most_of_very_many_receivers_are_flushed_later(monkeypatch):
    """One message for very many receivers is several pieces of work, and each receiver gets it once."""
    monkeypatch.setattr(delivery, "FLUSHED_AT_ONCE", 3)
    bus = Turned()
    readers = [bus.connect(uid=2) for _ in range(10)]
    for reader in readers:
        reader.send(b"SUB k")
    publisher = bus.connect(uid=1)
    publisher.send(b"MSG k\0")
    assert sum(len(reader.take()) for reader in readers) == 3
    bus.turn()
    assert sum(len(reader.take()) for reader in readers) == 7


def test_what_is_flushed_later_counts_once(monkeypatch):
    """Messages that wait behind those of this batch, and what the batch has brought before, count once."""
    monkeypatch.setattr(delivery, "FLUSHED_AT_ONCE", 2)
    bus = Turned()
    readers = [bus.connect(uid=2) for _ in range(4)]
    for reader in readers:
        reader.send(b"SUB k", *([b"SUB j"] if reader is not readers[0] else []))
    publisher = bus.connect(uid=1)
    found, memory = bus.registry.delivery._late, readers[0].protocol.user.memory
    readers[0].protocol.queue.copies.work_left = 4
    publisher.send(*[b"MSG k\0first", b"MSG j\0second", b"MSG k\0third"] * 3)
    for reader in readers[2:]:
        assert reader.protocol.queue.late_bytes == sum(map(len, reader.protocol.queue.pending)) > 0
    while bus.turn():
        pass
    assert found.bytes == 0
    assert readers[0].protocol.user.memory == memory
    assert [len(reader.take()) for reader in readers] == [6, 9, 9, 9]


@pytest.mark.parametrize("choice", [b"blocking/soft/queue", b"blocking/soft/block"])
def test_a_flush_that_takes_long_goes_on_later(monkeypatch, choice):
    """When the time of a long turn is up, the other receivers are late, save those that can block publishers."""
    monkeypatch.setattr(delivery, "_FLUSHED_PER_LOOK", 2)
    bus = Turned()
    readers = [bus.connect(uid=2) for _ in range(10)]
    for reader in readers:
        reader.send(b"CMSG " + choice, b"SUB k")
    publisher = bus.connect(uid=1)
    looks = itertools.chain((0, TURN_BUDGET * 1_000 - 1), itertools.repeat(TURN_BUDGET * 1_000))
    monkeypatch.setattr(bus.registry.turns, "cpu", looks.__next__)
    publisher.send(b"MSG k\0", b"MSG nobody\0")  # two runs, so that the first one waits for the flush
    assert sum(len(reader.take()) for reader in readers) == (4 if choice == b"blocking/soft/queue" else 10)
    monkeypatch.undo()
    bus.turn()
    assert sum(len(reader.take()) for reader in readers) == (6 if choice == b"blocking/soft/queue" else 0)
    assert bus.registry.delivery._late.bytes == 0


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_late_receiver_that_leaves_is_forgotten(end):
    """Nothing of a late receiver stays behind."""
    bus, publisher, reader = crowded()
    publisher.send(b"MSG k\0")
    if end == "close":
        reader.protocol.close(CloseReason.VIOLATION)
    else:
        reader.transport.loseConnection()
    bus.settle()
    while bus.turn():
        pass
    assert not bus.registry.delivery._late._lines
    assert bus.registry.delivery._late.bytes == 0


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("spend"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("stall"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("drain"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("choose"), st.integers(0, 2), st.integers(0, len(MODES) - 1)),
    st.tuples(st.just("fence"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_lateness_changes_no_order_and_loses_nothing(steps):
    """However copies are late, each receiver gets every message once, in the one order of all publishers."""
    bus = Bus(limits=Limits(block_timeout=1e9))
    peers = [bus.connect(uid=uid) for uid in (1, 2, 2)]
    for peer in peers:
        peer.send(b"SUB k")
    count = 0
    published: list[bytes] = []
    for name, who, number in steps:
        peer = peers[who]
        if name == "publish":
            packets = [b"MSG k\0%d" % n for n in range(count, count + number)]
            count += number
            published += packets
            peer.send(*packets)
        elif name == "spend":
            peer.protocol.user.copies.work_left = -number
            bus.registry.turns.crowd = CROWD
        elif name == "stall":
            peer.transport.capacity = number
        elif name == "drain":
            peer.drain(number)
        elif name == "choose":
            peer.send(b"CMSG " + MODES[number])
        elif name == "fence":
            peer.send(b"CMSG !/cred/whoami")
        else:
            bus.settle()
    for _ in range(4 * len(steps) + 4):
        for peer in peers:
            peer.transport.capacity = None
            peer.drain()
        bus.clock.advance(LONGEST_WAIT)
    orders = []
    for peer in peers:
        assert peer.is_connected
        messages = [packet for packet in _unbundled(peer.take()) if packet.startswith(b"MSG ")]
        assert sorted(messages) == sorted(published)
        orders.append(messages)
        assert not peer.protocol.queue.is_late
        assert peer.protocol.queue.late_bytes == 0
    assert orders[0] == orders[1] == orders[2]


def silent(bus: Turned, number: int, *packets: bytes) -> list[Peer]:
    """Return receivers of one user that have subscribed to everything; their sockets are full."""
    readers = [bus.connect(uid=2) for _ in range(number)]
    for reader in readers:
        reader.send(b"CMSG blocking/hard/discard", *packets, b"SUB ")
        reader.stall()
    publisher = bus.connect(uid=3)
    publisher.send(b"MSG first\0")
    while bus.turn():
        pass
    publisher.send(b"MSG second\0")
    return readers


def test_a_run_waits_once_for_many_silent_receivers():
    """What another user publishes is added to one list, however many silent receivers get it, and charged once."""
    bus = Turned()
    readers = silent(bus, 100)
    late_ones = bus.registry.delivery._late
    (cohort,) = set(late_ones.cohorts.of.values())
    assert list(cohort.members) == [reader.protocol for reader in readers]
    publisher = bus.connect(uid=1)
    before = readers[0].protocol.user.memory
    publisher.send(*[b"MSG any\0"] * 50)
    assert kept(cohort)[-50:] == [b"MSG any\0"] * 50
    assert not any(reader.protocol.queue.pending for reader in readers)
    assert readers[0].protocol.user.memory - before == 50 * len(b"MSG any\0")
    readers[7].drain()
    while bus.turn():
        pass
    assert readers[7].take()[-50:] == [b"MSG any\0"] * 50


def test_a_run_for_a_part_of_a_cohort_reaches_only_that_part():
    """Members that get different messages stay in one cohort, and each gets its own in their order."""
    bus = Turned()
    readers = silent(bus, 40)
    for reader in readers[:30]:
        reader.send(b"UNSUB ", b"SUB k")
    while bus.turn():
        pass
    before = [reader.protocol.queue.messages for reader in readers]
    publisher = bus.connect(uid=1)
    for packet in (b"MSG k\0one", b"MSG j\0two", b"MSG j\0three", b"MSG k\0four"):
        publisher.send(packet)
    (cohort,) = set(bus.registry.delivery._late.cohorts.of.values())
    assert len(cohort.members) == 40
    assert kept(cohort) == [b"MSG k\0one", b"MSG j\0two", b"MSG j\0three", b"MSG k\0four"]
    while bus.turn():
        pass
    after = [reader.protocol.queue.messages for reader in readers]
    assert [new - old for old, new in zip(before, after, strict=True)] == [2] * 30 + [4] * 10
    for reader, wanted in ((readers[0], [b"one", b"four"]), (readers[35], [b"one", b"two", b"three", b"four"])):
        reader.drain()
        assert [packet.partition(b"\0")[2] for packet in reader.take()][-len(wanted) :] == wanted


def test_too_much_for_a_cohort_is_decided_early(monkeypatch):
    """From half of the room on, the publisher has some members decided about in each run, and all before it is full."""
    monkeypatch.setattr(cohort_delivery, "_MOST_SHARED", 200)
    bus = Turned()
    readers = silent(bus, 64)
    publisher = bus.connect(uid=1)
    cohorts_ = bus.registry.delivery._late.cohorts
    decided = []
    for _ in range(30):
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.send(*[b"MSG k\0"] * 10)
        assert all(cohort.waiting() <= 210 for cohort in cohorts_.of.values())
        decided.append(sum(reader.protocol.queue.messages > 1 for reader in readers))
    assert decided[9] == 0
    assert decided[20] == 64
    assert max(after - before for before, after in itertools.pairwise(decided)) < 64


def test_what_comes_during_a_turn_of_a_cohort_is_not_forgotten():
    """Messages that come after it is settled up to where a turn goes get a turn, too, if nothing comes after them."""
    bus = Turned()
    readers = silent(bus, 40)
    publisher = bus.connect(uid=1)
    publisher.send(b"MSG third\0")
    (cohort,) = set(bus.registry.delivery._late.cohorts.of.values())
    readers[0].protocol.user.copies.work_left = -10 * CONTENDED_BUDGET
    bus.turn()
    publisher.send(b"MSG fourth\0")
    assert cohort.due < cohort.end
    while bus.turn():
        pass
    assert cohort.waiting() == 0
    assert kept(cohort) == []
    assert not cohort._windows
    assert [reader.protocol.queue.messages for reader in readers] == [4] * 40


def test_late_receivers_that_close_leave_their_cohort():
    """Nothing of a cohort stays behind when its members go, and their messages count as lost."""
    bus = Turned()
    readers = silent(bus, 20)
    publisher = bus.connect(uid=1)
    publisher.send(*[b"MSG k\0"] * 5)
    lost = bus.registry.counters.dropped
    for reader in readers:
        reader.protocol.close(CloseReason.VIOLATION)
    bus.settle()
    while bus.turn():
        pass
    found = bus.registry.delivery._late
    assert (found.bytes, found.cohorts.bytes, found.cohorts.of, found._lines) == (0, 0, {}, {})
    assert bus.registry.counters.dropped - lost == 20 * 7


ROUTES = (b"k", b"j", b"i")
COHORT_STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 40)),
    st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("spend"), st.integers(0, 1), st.integers(0, 600)),
    st.tuples(st.just("stall"), st.integers(0, 5), st.integers(0, 3)),
    st.tuples(st.just("drain"), st.integers(0, 5), st.integers(1, 50)),
    st.tuples(st.just("choose"), st.integers(0, 5), st.integers(0, len(MODES) - 1)),
    st.tuples(st.just("fence"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.just(0)),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=6, max_size=6),
    st.lists(COHORT_STEPS, min_size=20, max_size=60),
    st.sampled_from((8, 64, cohort_delivery._MOST_SHARED)),
)
def test_cohorts_change_no_order_and_lose_nothing(subscribed, steps, most_shared):
    """Whichever receivers form cohorts, and get a message, each gets its messages once, in their order."""
    with ExitStack() as patches:
        for module, name, value in (
            (late, "MANY", 1),
            (delivery, "MANY", 1),
            (cohort_delivery, "_MOST_SHARED", most_shared),
            (cohort_delivery, "_COHORT_WORTH_DECIDING", 20),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        _check_cohorts(subscribed, steps)


def _check_cohorts(subscribed: list[int], steps: list[tuple[str, int, int]]) -> None:
    bus = Bus(limits=Limits(block_timeout=1e9))
    publishers = [bus.connect(uid=uid) for uid in (1, 2, 3)]
    readers = [bus.connect(uid=2 + at % 2) for at in range(6)]
    for reader, choice in zip(readers, subscribed, strict=True):
        for at, key in enumerate(ROUTES):
            if choice & 1 << at:
                reader.send(b"SUB " + key)
        reader.transport.capacity = 0
    published: dict[bytes, list[bytes]] = {key: [] for key in ROUTES}
    everything: list[bytes] = []
    sender: dict[bytes, int] = {}
    joined = False
    for step, (name, who, number) in enumerate(steps):
        if name == "publish":
            key = ROUTES[step % 3]
            packets = [b"MSG %s\0%d" % (key, n) for n in range(len(everything), len(everything) + number)]
            published[key] += packets
            everything += packets
            sender.update(dict.fromkeys(packets, who))
            publishers[who].send(*packets)
        elif name == "spend":
            publishers[1 + who].protocol.user.copies.work_left = -number
            bus.registry.turns.crowd = CROWD
        elif name == "stall":
            readers[who].transport.capacity = number
        elif name == "drain":
            readers[who].drain(number)
        elif name == "choose":
            readers[who].send(b"CMSG " + MODES[number])
        elif name == "fence":
            readers[who].send(b"CMSG !/cred/whoami")
        elif name == "wait":
            bus.clock.advance(LONGEST_WAIT)
        else:
            bus.settle()
        joined = joined or bool(bus.registry.delivery._late.cohorts.of)
    event(f"a cohort was formed: {joined}")
    for _ in range(4 * len(steps) + 4):
        for reader in readers:
            reader.transport.capacity = None
            reader.drain()
        bus.clock.advance(LONGEST_WAIT)
    orders: list[list[bytes]] = []
    for reader, choice in zip(readers, subscribed, strict=True):
        assert reader.is_connected
        messages = [packet for packet in _unbundled(reader.take()) if packet.startswith(b"MSG ")]
        wanted = [packet for at, key in enumerate(ROUTES) if choice & 1 << at for packet in published[key]]
        assert sorted(messages) == sorted(wanted)
        orders.append(messages)
    for first, second in itertools.combinations(orders, 2):
        both = set(first) & set(second)
        assert [packet for packet in first if packet in both] == [packet for packet in second if packet in both]
    for messages, who in itertools.product(orders, range(3)):
        sent = [packet for packet in messages if sender[packet] == who]
        assert sent == sorted(sent, key=everything.index)
    found = bus.registry.delivery._late
    assert (found.bytes, found.cohorts.bytes, found.cohorts.of) == (0, 0, {})


def _unbundled(packets: list[bytes]) -> list[bytes]:
    return [part for packet in packets for part in (_parts(packet) if packet.startswith(b"BNDL") else [packet])]


def _parts(bundle: bytes) -> list[bytes]:
    found, at = [], 4
    while at < len(bundle):
        size = int.from_bytes(bundle[at : at + 4], "little")
        found.append(bundle[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def late_one(*choices: bytes) -> tuple[Turned, late.Late, Peer]:
    """Return a bus, its late receivers, and one of them, which lost a message before and whose socket has room now."""
    bus, publisher, reader = crowded()
    reader.send(*[b"CMSG " + choice for choice in choices], b"CMSG blocking/soft/discard")
    reader.stall()
    reader.protocol.user.copies.work_left = TURN_BUDGET
    publisher.send(b"MSG k\0lost")
    reader.send(b"CMSG blocking/soft/queue")
    reader.transport.capacity = None
    reader.take()
    spend(reader)
    publisher.send(b"MSG k\0kept")
    assert reader.protocol.queue.is_late
    assert reader.protocol.lost == 1
    return bus, bus.registry.delivery._late, reader


@pytest.mark.parametrize("are_many", [None, False, True])
@pytest.mark.parametrize("choice", [b"receipts/on", b"receipts/off"])
def test_what_counts_as_a_full_socket_is_sent_in_a_turn(choice, are_many):
    """A receiver about which a stranger has decided without sending gets everything in its user's turns."""
    bus, found, reader = late_one(choice)
    queue = reader.protocol.queue
    if are_many is None:
        found.catch_up(reader.protocol, queue, sends=False)
    else:
        found.serve(reader.protocol, are_many, sends=False)
    assert (queue.messages, queue.is_late, reader.transport.written) == (1, are_many is True, [])
    while bus.turn():
        pass
    got = reader.take()
    assert got[-1] == b"MSG k\0kept"
    assert len(got) == (2 if choice == b"receipts/on" else 1)


def one_by_one(bus: Turned, reader: Peer, work: int = 0) -> None:
    """Have a reader's transport send one message each time, which takes some time, in units of work."""
    queue, capacity = reader.protocol.queue, reader.transport.capacity

    def flush_batch() -> None:
        bus.cpu += work * 1_000
        taken = queue.take(1)
        sent = min(len(taken), 1 if capacity is None else capacity - len(reader.transport.written))
        reader.transport.written += taken[:sent]
        queue.ack(taken, sent)

    setattr(reader.transport, "flush_batch", flush_batch)  # noqa: B010


@pytest.mark.parametrize(("crowd", "sent"), [(CROWD, 3), (0, 118)])
@pytest.mark.parametrize("choice", [b"discard", b"latest"])
def test_a_decision_sends_for_a_limited_time(choice, crowd, sent):
    """However quickly a receiver reads, a decision sends for some time; after that its socket counts as full."""
    bus, publisher, reader = crowded()
    reader.send(b"CMSG blocking/soft/" + choice)
    spend(reader)
    publisher.send(*[b"MSG k\0%d" % number for number in range(200)])
    one_by_one(bus, reader, delivery._SENDS_FOR // 3 + 1)
    bus.registry.turns.crowd = crowd
    found, queue = bus.registry.delivery._late, reader.protocol.queue
    found.catch_up(reader.protocol, queue)
    assert reader.transport.written == [b"MSG k\0%d" % number for number in range(sent)]
    kept = 1 if choice == b"latest" else 0
    assert (queue.messages, queue.lost + queue.conflated, queue.is_late) == (kept, 200 - sent - kept, False)


def test_who_wants_to_be_disconnected_is_sent_to_until_its_socket_is_full():
    """A decision takes as long as it needs, where a full socket is the end of the connection."""
    for capacity in (None, 20):
        bus, publisher, reader = crowded()
        reader.send(b"CMSG blocking/soft/error")
        spend(reader)
        reader.transport.capacity = capacity
        publisher.send(*[b"MSG k\0"] * 30)
        one_by_one(bus, reader, CONTENDED_BUDGET)
        bus.registry.delivery._late.catch_up(reader.protocol, reader.protocol.queue)
        bus.settle()
        assert len(reader.transport.written) == (capacity or 30)
        assert reader.is_connected is (capacity is None)


@pytest.mark.parametrize("choice", [b"soft/queue", b"soft/block", b"hard/error", b"soft/latest"])
def test_what_is_surely_kept_is_not_copied_for_the_socket(monkeypatch, choice):
    """Many messages are put into the queue first, if nothing is lost by that; then one batch is sent."""
    bus, publisher, reader = crowded()
    reader.send(b"CMSG blocking/" + choice)
    spend(reader)
    packets = [b"MSG k\0%d" % number for number in range(BATCH + 1)]
    publisher.send(*packets)
    batches: list[int] = []
    flush_batch = reader.transport.flush_batch

    def noted() -> None:
        batches.append(len(reader.protocol.queue))
        flush_batch()

    setattr(reader.transport, "flush_batch", noted)  # noqa: B010
    take, pending = SendQueue.take, []

    def taken(queue: SendQueue, count: int) -> list[bytes]:
        pending.append(len(queue.pending))
        return take(queue, count)

    monkeypatch.setattr(SendQueue, "take", taken)
    price = bus.registry.delivery._late.catch_up(reader.protocol, reader.protocol.queue)
    assert reader.take() == packets
    assert batches
    assert (max(pending) == 0) is (choice != b"soft/latest")
    assert price >= len(packets) // COPIES


def test_what_a_queue_would_not_keep_is_sent_first():
    """Where a user has no memory for the places of many messages in a queue, a socket with room takes them."""
    bus, publisher, reader = crowded()
    packets = [b"MSG k\0%d" % number for number in range(2 * BATCH)]
    publisher.send(*packets)
    user = reader.protocol.user
    user.memory_limit = user.memory + 1_000
    bus.turn()
    bus.turn()
    assert reader.take() == packets
    assert reader.protocol.lost == 0


@pytest.mark.parametrize("sends", [False, True])
def test_a_full_queue_is_no_end_while_the_socket_has_room(sends):
    """A receiver that wants to be disconnected when its queue is full is sent to until its socket is full, too."""
    for capacity in (None, 20):
        bus, publisher, reader = crowded(limits=Limits(queue_messages=5))
        reader.send(b"CMSG blocking/hard/error")
        spend(reader)
        reader.transport.capacity = capacity
        packets = [b"MSG k\0%d" % number for number in range(BATCH + 6)]
        publisher.send(*packets)
        one_by_one(bus, reader, CONTENDED_BUDGET)
        bus.registry.delivery._late.catch_up(reader.protocol, reader.protocol.queue, sends)
        bus.settle()
        assert reader.transport.written == packets[:capacity]
        assert reader.is_connected is (capacity is None)


@pytest.mark.parametrize("order", [b"stack", b"random"])
def test_an_order_is_for_what_a_socket_does_not_take(order):
    """What waits for a late receiver comes as it was published, while its socket takes it."""
    _, publisher, reader = crowded()
    reader.send(b"CMSG order/" + order)
    spend(reader)
    packets = [b"MSG k\0" + b"x" * number for number in range(2 * BATCH)]
    publisher.send(*packets)
    reader.protocol._registry.delivery.catch_up(reader.protocol)
    assert reader.take() == packets


@pytest.mark.parametrize("is_for_all", [False, True])
def test_an_observer_may_publish_while_a_member_is_sent_to(monkeypatch, is_for_all):
    """What is just being sent comes before what waits in the cohort, whether or not that is decided about then."""
    for module in (late, delivery, cohort_delivery):
        monkeypatch.setattr(module, "MANY", 1)
    publish: list[Callable[[], object]] = []

    class Echo(Observer):
        def delivered(self, client, messages, size) -> None:
            if publish:
                publish.pop()()

    bus = Turned(observers=[Echo()])
    publisher = bus.connect(uid=1)
    reader, other = bus.connect(uid=2), bus.connect(uid=2)
    for each in (reader, other):
        each.send(b"CMSG blocking/soft/error", b"SUB k")
    spend(reader)
    reader.send(b"SUB j")
    numbers = itertools.count()

    def packets(count: int) -> list[bytes]:
        return [b"MSG k\0%d" % number for number in itertools.islice(numbers, count)]

    expected = packets(60)
    publisher.send(*expected)
    found = bus.registry.delivery._late
    cohort = found.cohorts.of[reader.protocol]
    cohort.want_turns()
    behind = packets(3)
    publisher.send(*behind)
    if is_for_all:
        found.most_bytes = 1
        found.cohorts.leave(other.protocol)
    publish.append(partial(bus.registry.publish, b"k" if is_for_all else b"j", b"last"))
    one_by_one(bus, reader)
    found.serve(reader.protocol, are_many=True)
    while bus.turn():
        pass
    assert reader.transport.written == [*expected, *behind, b"MSG %s\0last" % (b"k" if is_for_all else b"j")]


def test_nobody_is_disconnected_for_a_socket_with_room():
    """A receiver that wants to be disconnected when its socket is full is tried, whoever decides."""
    _, found, reader = late_one()
    reader.protocol.queue.configure(replace(reader.protocol.settings, soft=SOFT_STRATEGIES[3]))
    found.catch_up(reader.protocol, reader.protocol.queue, sends=False)
    assert reader.take() == [b"MSG k\0kept"]
    assert reader.is_connected


def test_who_joins_a_cohort_with_a_run():
    """A receiver with a run under way, or one that takes nothing, joins none; one with a full socket wants no turn."""
    bus, _, reader = crowded()
    found, queue = bus.registry.delivery._late, reader.protocol.queue
    run = [b"MSG k\0"]
    queue.pending = [b"MSG k\0before"]
    assert not found.join_with(reader.protocol, queue, run, 6)
    queue.deafen()
    assert not found.join_with(reader.protocol, queue, run, 6)
    queue.hear()
    queue.discard_all()
    queue.congest()
    assert found.join_with(reader.protocol, queue, run, 6)
    assert not found._lines[reader.protocol.user].receivers
    assert found._has_timer


def test_a_run_that_has_paid_sends_nothing(monkeypatch):
    """Once a run has paid for as many decisions as one run may, its publisher's other receivers get theirs in turns."""
    monkeypatch.setattr(late, "MOST_PACKETS", 10)
    monkeypatch.setattr(late, "_BEYOND", 1)
    monkeypatch.setattr(late, "_CATCH_UPS", 1)
    bus, publisher, reader = crowded()
    readers = [reader, *(bus.connect(uid=2) for _ in range(2))]
    for other in readers[1:]:
        other.send(b"SUB k")
    own = bus.connect(uid=2)
    expected = [b"MSG k\0%d" % number for number in range(15)]
    for peer, first in ((publisher, 0), (own, 5), (own, 10)):
        spend(reader)
        peer.protocol.user.work_left = TURN_BUDGET
        peer.transport.deliver(*expected[first : first + 5])
    got = [each.take() for each in readers]
    assert list(map(len, got)) == [10, 15, 0]
    assert readers[2].protocol.queue.messages == 15
    while bus.turn():
        pass
    assert [before + each.take() for before, each in zip(got, readers, strict=True)] == [expected] * 3


def test_a_stranger_sends_nothing_to_many(monkeypatch):
    """Where too much waits for many late receivers by themselves, a stranger's run decides, and their turns send."""
    monkeypatch.setattr(late, "MOST_PACKETS", 5)
    monkeypatch.setattr(late, "_OTHERS", 1)
    monkeypatch.setattr(late, "_BEYOND", 1)
    monkeypatch.setattr(late.Late, "join_with", lambda *args, **choices: False)
    bus, publisher, reader = crowded()
    readers = [reader, *(bus.connect(uid=2) for _ in range(late.MANY - 1))]
    for other in readers[1:]:
        other.send(b"SUB k")
    expected = [b"MSG k\0%d" % number for number in range(8)]
    for first in (0, 4):
        spend(reader)
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(*expected[first : first + 4])
    assert 8 in [each.protocol.queue.messages for each in readers]
    assert not any(each.transport.written for each in readers)
    while bus.turn():
        pass
    assert all(each.take() == expected for each in readers)


def test_the_price_of_what_waits_for_one_receiver():
    """Flood control decides about messages that wait for one receiver alone; that costs more than a shared list."""
    _, publisher, reader = congested()
    queue = reader.protocol.queue
    before = queue.messages
    publisher.send(*[b"MSG k\0"] * 96)
    assert (queue.messages, len(queue.pending)) == (before, 96)
    found = reader.protocol._registry.delivery._late
    assert found.catch_up(reader.protocol, queue) == FULL_SOCKET + 96 // UNSHARED


@pytest.mark.parametrize("choices", [(), (b"CMSG blocking/soft/error",)])
@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.timeout(20)
def test_an_observer_may_publish_when_the_last_batch_of_a_member_has_left(monkeypatch, choices, behind):
    """What waits in the cohort goes first, and the server does not send nothing for ever."""
    for module in (late, delivery, cohort_delivery):
        monkeypatch.setattr(module, "MANY", 1)
    publish: list[Callable[[], object]] = []

    class Echo(Observer):
        def delivered(self, client: object, messages: int, size: int) -> None:
            if publish:
                publish.pop()()

    bus = Turned(observers=[Echo()])
    publisher, reader, other = bus.connect(uid=1), bus.connect(uid=2), bus.connect(uid=2)
    for each in (reader, other):
        each.send(*choices, b"SUB k")
    spend(reader)
    reader.send(b"SUB j")
    expected = [b"MSG k\0%d" % number for number in range(60 + behind)]
    publisher.send(*expected[:60])
    found = bus.registry.delivery._late
    found.cohorts.of[reader.protocol].want_turns()
    if behind:
        publisher.send(*expected[60:])
    publish.append(lambda: bus.registry.publish(b"j", b"last"))
    times = itertools.count(step=50_000)
    monkeypatch.setattr(bus.registry.turns, "cpu", lambda: next(times))
    found.serve(reader.protocol, are_many=True)
    for _ in range(50):
        bus.turn()
    assert reader.transport.written == [*expected, b"MSG j\0last"]
