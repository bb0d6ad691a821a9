"""Cohorts: what happens to them while they change, and what is left of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import error
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from sbus.server.bus import blocks, cohort_delivery, cohort_plans, cohorts, delivery, late
from sbus.server.bus.cohort_plans import Plans
from sbus.server.bus.cohorts import Cohort, Cohorts
from sbus.server.bus.late import LONGEST_WAIT
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Events, Observer
from sbus.server.core.prices import POSTPONED, SENDING, SHARED
from sbus.server.core.turns import CONTENDED_BUDGET, CROWD, TURN_BUDGET
from tests.support.buses import Bus, Peer, kept, mask_memory
from tests.support.examples import examples
from tests.unit.server.test_bounded_work import Turned


class SlowTurns(Bus):
    """A bus whose users take turns only when a test says so; other timers go by its clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turns: list[Callable[[], None]] = []
        self.registry.turns._reactor = self

    def callLater(self, delay: float, call: Callable[[], None]) -> None:
        if delay:
            self.clock.callLater(delay, call)
        else:
            self.turns.append(call)

    def turn(self) -> None:
        """Take one turn."""
        turns, self.turns = self.turns, []
        for call in turns:
            call()
        self.settle()


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    """Have single receivers form cohorts."""
    monkeypatch.setattr(late, "MANY", 1)
    monkeypatch.setattr(delivery, "MANY", 1)
    monkeypatch.setattr(cohort_delivery, "MANY", 1)


def stalled(bus: Bus, publisher: Peer, *choices: bytes, count: int = 2, uid: int = 2) -> list[Peer]:
    """Return readers of `k` that are members of a cohort, for which nothing waits undecided."""
    readers = [bus.connect(uid=uid) for _ in range(count)]
    for reader in readers:
        reader.send(*[b"CMSG " + choice for choice in choices], b"SUB k")
        reader.stall()
        reader.take()
    publisher.send(b"MSG k\0first")
    assert {reader.protocol for reader in readers} <= bus.registry.delivery._late.cohorts.of.keys()
    return readers


def drain(bus: Turned, readers: list[Peer]) -> None:
    """Have readers read all that there is for them, until no turn is due."""
    for reader in readers:
        reader.transport.capacity = None
        reader.drain()
    while bus.turn():
        pass


def test_members_that_leave_one_after_the_other_have_one_list():
    """What waits for members with one position is put together once; it is freed when none has that position."""
    found = Cohorts()
    cohort, members = joined(found, 4)
    for packet in (b"one", b"two"):
        found.add(cohort, [packet], 3)
    digests = []
    for member in members[:3]:
        digests.append(cohort.waiting_for(member))
        found.leave(member)
    assert digests[0] is not None
    assert digests[0].packets == [b"one", b"two"]
    assert digests[0] is digests[1] is digests[2] is cohort.waiting_for(members[3])
    cohort.want_turns()
    cohort.advance(members[3])
    found.trim(cohort)
    assert not cohort._windows


def test_a_packet_that_is_too_long_for_one_member_reaches_the_other():
    """What a member has sent in place of a packet that its socket never takes is no other member's."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, b"blocking/soft/discard", b"receipts/on")
    for reader in readers:
        reader.transport.drain(1)  # the receipt for the message before
        reader.take()
        reader.transport.capacity = None
    readers[0].transport.longest = 80
    publisher.send(b"MSG k\0" + bytes(100))
    assert len(bus.registry.delivery._late.cohorts.of) == 2
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    assert readers[0].take() == [b"CMSG lost\0001 106 2 too-large"]
    assert readers[1].take() == [b"MSG k\0" + bytes(100)]


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
    publisher = bus.connect(uid=2)  # which pays for sending, too
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
    join = mock.Mock(side_effect=cohorts.Cohorts.join_with)
    monkeypatch.setattr(cohorts.Cohorts, "join_with", lambda *args, **choices: join(*args, **choices))
    # The run has to be decided about for the first one, and then what the observer publishes for the second one.
    monkeypatch.setattr(late.Late, "room", lambda *args: (0, 0) if next(calls) < 2 else room(*args))
    publisher.transport.deliver(b"MSG k\0two")
    assert [call.args[1] for call in join.mock_calls] == [second.protocol]
    publisher.send(b"MSG note\0outer")
    bus.clock.advance(LONGEST_WAIT)
    second.drain()
    bus.clock.advance(LONGEST_WAIT)
    assert [packet.partition(b"\0")[2] for packet in second.take()] == [b"before", b"inner", b"two", b"outer"]


def test_members_that_get_different_messages_cost_no_decisions(monkeypatch):
    """A run for some members waits as one for all does, and each member gets its messages in their order."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, count=4)
    for reader in readers[1:]:
        reader.send(b"SUB j")
    found = bus.registry.delivery._late
    monkeypatch.setattr(found, "_decide", mock.Mock(side_effect=AssertionError("decided")))
    for packet in (b"MSG k\0one", b"MSG j\0two", b"MSG k\0three", b"MSG j\0four"):
        publisher.transport.deliver(packet)
    monkeypatch.undo()
    (cohort,) = set(found.cohorts.of.values())
    assert len(cohort.members) == 4
    assert kept(cohort) == [b"MSG k\0one", b"MSG j\0two", b"MSG k\0three", b"MSG j\0four"]
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    for reader in readers:
        reader.drain()
        got = [packet.partition(b"\0")[2] for packet in reader.take()]
        everything = [b"first", b"one", b"two", b"three", b"four"]
        assert got == (everything[:2] + everything[3:4] if reader is readers[0] else everything)
    bus.settle()
    assert (found.bytes, found.cohorts.bytes, found.cohorts.of) == (0, 0, {})


def test_members_in_the_same_masks_share_a_list():
    """Thousands of members in a few groups have as many lists as there are groups; all masks count as memory."""
    found = Cohorts()
    cohort, members = joined(found, 6)
    even, odd = cohort.mask(members[::2]), cohort.mask(members[1::2])
    for packet, mask in ((b"1", even), (b"2", odd), (b"3", None), (b"4", even)):
        found.add(cohort, [packet], 1, mask)
    assert found.bytes == 4 + mask_memory(cohort.blocks)
    assert cohort.waiting() == 4 + 4 * cohorts._MASK_WEIGHT
    digests = [cohort.waiting_for(member) for member in members]
    assert len(set(map(id, digests))) == 2
    assert [digest.packets for digest in digests[:2] if digest] == [[b"1", b"3", b"4"], [b"2", b"3"]]
    assert cohort.members_in(odd) == members[1::2]
    cohort.want_turns()
    for member in members:
        cohort.advance(member)
        found.trim(cohort)
    assert (found.bytes, cohort.blocks.mask_count) == (0, 0)


def test_members_for_which_nothing_is_due_are_skipped():
    """They move on without a decision, and the next one is the first for which there is something."""
    found = Cohorts()
    cohort, members = joined(found, 5)
    found.add(cohort, [b"1"], 1, cohort.mask(members[3:4]))
    cohort.want_turns()
    cohort.skip()
    assert list(cohort.members.items()) == [(members[at], int(at < 3)) for at in (3, 4, 0, 1, 2)]
    cohort.advance(members[3])
    cohort.skip()
    assert not cohort.wants_turn()


def test_lists_of_many_groups_are_not_all_kept(monkeypatch):
    """Each member may be in masks of its own: what is kept for the next member has a limit."""
    monkeypatch.setattr(blocks, "_MOST_DIGESTS", 2)
    found = Cohorts()
    cohort, members = joined(found, 6)
    for at, member in enumerate(members):
        found.add(cohort, [b"%d" % at], 1, cohort.mask([member]))
    for at, member in enumerate(members):
        digest = cohort.waiting_for(member)
        assert digest is not None
        assert digest.packets == [b"%d" % at]
        assert all(len(window._digests) <= 2 for window in cohort._windows.values())


def test_a_column_is_taken_again():
    """A receiver that takes the column of a disconnected one gets nothing that was for the former owner."""
    found = Cohorts()
    cohort, (first, second) = joined(found, 2)
    found.add(cohort, [b"1"], 1, cohort.mask([first]))
    found.leave(first)
    found.forget(first)
    user: Any = cohort.user
    newcomer: Any = Member(user)
    found.join(newcomer, False, False)
    assert cohort.columns[newcomer] == 0
    assert (cohort.waiting_for(newcomer), cohort.waiting_for(second)) == (None, None)
    run = [b"2"]
    found.add(cohort, run, 1, cohort.mask([second]))
    other: Any = Member(user)
    assert found.join_with(other, run, 1, 0, can_block=False, replaces=False)
    got = [cohort.waiting_for(each) for each in (second, newcomer, other)]
    assert [digest and digest.packets for digest in got] == [run, None, run]


def test_a_receiver_that_joins_with_a_run_is_in_lists_that_were_made_before():
    """What is kept for the next member with the same position does not say that the run is not for the newcomer."""
    found = Cohorts()
    cohort, (first, second) = joined(found, 2)
    run = [b"1"]
    found.add(cohort, run, 1, cohort.mask([first]))
    assert [cohort.waiting_for(each) is None for each in (first, second)] == [False, True]
    newcomer: Any = Member(first.user)
    assert found.join_with(newcomer, run, 1, 0, can_block=False, replaces=False)
    digest = cohort.waiting_for(newcomer)
    assert digest is not None
    assert digest.packets == run


def test_masks_stay_the_same_while_members_leave_and_join_again():
    """So runs for one route share blocks. Members that have joined one by one need no mask if all are in the route."""
    found = Cohorts()
    plans = Plans(found)
    user: Any = Account()
    members: list[Any] = [Member(user) for _ in range(6)]
    everybody, some = tuple(members), tuple(members[:3])
    assert plans.find(everybody).cohorts == ()
    for member in members:
        found.join(member, False, False)
        assert [mask for _, mask, _ in plans.find(everybody).cohorts] == [None]
    (cohort,) = found.of_user(user)
    mask = cohort.mask(some)
    assert plans.find(some).cohorts == ((cohort, mask, 3),)
    found.leave(members[0])
    assert plans.find(some).cohorts == ((cohort, mask, 2),)
    for _ in range(len(some)):  # so many changes that the plan is made again
        found.leave(members[5])
        found.join(members[5], False, False)
    assert plans.find(some).cohorts == ((cohort, mask, 2),)
    found.join(members[0], False, False)
    assert plans.find(some).cohorts == ((cohort, mask, 3),)


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
    known = {receiver for plan in bus.registry.delivery._cohort_delivery._plans._by_receivers for receiver in plan}
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
    assert (found.bytes, found.cohorts.bytes, found.cohorts.of) == (0, 0, {})


def test_a_publisher_decides_about_some_members_at_a_time(monkeypatch):
    """However many cohorts there are, and however full they are, one message is no long piece of work."""
    monkeypatch.setattr(late, "MOST_BYTES", 10_000)
    bus = Bus()
    publisher = bus.connect(uid=1)
    for uid in range(2, 7):
        stalled(bus, publisher, count=20, uid=uid)
    served = itertools.count()
    found = bus.registry.delivery._late
    decide = found._decide
    found._decide = lambda *args: (next(served), decide(*args))[1]
    publisher.send(b"MSG k\0")
    found.cohorts.bytes += 20_000  # of other cohorts
    publisher.send(b"MSG k\0")
    assert 0 < next(served) <= late.catch_ups(100)


def test_a_member_blocks_a_publisher_that_it_may_block():
    """A cohort waits for publishers that its members cannot block; for another one they are decided about at once."""
    bus = Bus()
    stranger, friend = bus.connect(uid=1), bus.connect(uid=2)
    readers = stalled(bus, stranger, b"blocking/soft/block")
    stranger.send(b"MSG k\0second")
    assert len(bus.registry.delivery._late.cohorts.of) == 2
    friend.send(b"MSG k\0third")
    assert friend.protocol.is_paused
    assert bus.registry.delivery._late.cohorts.of == {}
    for reader in readers:
        reader.drain()
        assert reader.take() == [b"MSG k\0first", b"MSG k\0second", b"MSG k\0third"]
    assert not friend.protocol.is_paused


def test_a_run_that_waits_costs_only_a_publisher_of_its_own_user():
    """A publisher pays one price for a cohort of its own user; for another user's, not even for the plan."""
    bus = Bus()
    stranger, friend = bus.connect(uid=1), bus.connect(uid=2)
    stalled(bus, stranger, b"blocking/soft/discard", count=32)
    delivery_ = bus.registry.delivery

    def cost(publisher: Peer) -> tuple[int, int]:
        user, unpaid = publisher.protocol.user, delivery_.unpaid
        user.work_left = TURN_BUDGET
        publisher.transport.deliver(b"MSG k\0")
        return TURN_BUDGET - user.work_left, delivery_.unpaid - unpaid

    plan = cohort_plans._PLAN + 1 + 2 * 32 // cohort_plans._PLANNED_AT_ONCE
    balance = friend.protocol.queue.copies
    before = balance.work_left
    assert cost(stranger) == (SENDING, POSTPONED + plan)
    assert balance.work_left == before - plan
    assert cost(stranger) == (SENDING, POSTPONED)
    assert cost(friend) == (SENDING + SHARED, 0)
    assert balance.work_left == before - plan


def test_a_plan_is_paid_for_by_user():
    """Each user pays for its members' part of a plan; the publisher pays for the rest, the other receivers included."""
    bus = Bus()
    stranger, friend = bus.connect(uid=1), bus.connect(uid=2)
    stalled(bus, stranger, b"blocking/soft/discard", count=48)
    for _ in range(16):
        bus.connect(uid=1).send(b"SUB k")
    plan = cohort_plans._PLAN + 1 + 2 * 64 // cohort_plans._PLANNED_AT_ONCE
    balance, user = friend.protocol.queue.copies, stranger.protocol.user
    user.work_left, before = TURN_BUDGET, balance.work_left
    stranger.transport.deliver(b"MSG k\0")
    assert before - balance.work_left == plan * 48 // 64
    assert TURN_BUDGET - user.work_left == SENDING + plan - plan * 48 // 64 + 16 * SENDING


@pytest.mark.parametrize("is_known", [True, False])
def test_a_route_that_is_new_to_unchanged_cohorts_is_at_the_publishers_expense(monkeypatch, is_known):
    """Neither a publisher without echo nor one with very many routes spends the time of the receivers' user."""
    bus = Bus()
    stranger, friend = bus.connect(uid=1), bus.connect(uid=2)
    stalled(bus, stranger, b"blocking/soft/discard", count=32)
    if not is_known:
        monkeypatch.setattr(cohort_plans, "_MOST_PLANNED", 0)
    stranger.transport.deliver(b"MSG k\0")
    receivers = list(bus.registry.route(b"k"))
    balance, delivery_ = friend.protocol.queue.copies.work_left, bus.registry.delivery
    plan = 1 + 32 // cohort_plans._PLANNED_AT_ONCE
    if not is_known:
        plan += cohort_plans._PLAN + 32 // cohort_plans._PLANNED_AT_ONCE
    for _ in range(3):
        delivery_.work, unpaid = 0, delivery_.unpaid
        if not is_known:
            receivers.reverse()
        bus.registry.deliver([b"MSG k\0"], tuple(receivers), stranger.protocol)
        assert delivery_.work == plan
        assert delivery_.unpaid - unpaid == POSTPONED
    assert friend.protocol.queue.copies.work_left == balance


def test_a_flood_by_a_user_leaves_room_for_others(monkeypatch):
    """Flood control decides about few members when three quarters of the room are taken; for their own user's flood, an
    eighth."""
    monkeypatch.setattr(cohort_delivery, "_MOST_SHARED", 100)
    sent = []
    for uid in (1, 2):
        bus = Bus(clock=Clock())
        readers = stalled(bus, bus.connect(uid=1), b"blocking/hard/discard", count=10)
        publisher = bus.connect(uid=uid)
        sent.append(0)
        while all(reader.protocol.queue.messages == 1 for reader in readers):
            publisher.transport.deliver(b"MSG k\0")
            sent[-1] += 1
    assert sent == [76, 14]


@pytest.fixture
def leaver():
    """A bus and three clients: a publisher, a reader of `j` and `k`, and one of `j`; a fourth has left, but not `k`."""
    bus = SlowTurns(limits=Limits(block_timeout=1e9))
    publisher = bus.connect(uid=2)
    *others, gone, reader, newcomer = [bus.connect(uid=1) for _ in range(19)]
    for each in (*others, gone, reader, newcomer):
        each.send(b"SUB j")
    for each in (*others, gone, reader):
        each.stall()
    for each in (gone, reader):
        each.send(b"SUB k")
    publisher.send(b"MSG j\0one")
    publisher.send(b"MSG j\0two")
    publisher.send(b"MSG k\0one")  # its plan has a mask: these two
    assert {gone.protocol, reader.protocol} <= bus.registry.delivery._late.cohorts.of.keys()
    gone.protocol.user.work_left = -100
    gone.transport.hang_up()
    bus.settle()
    assert gone.protocol in bus.registry._leaving.receivers
    newcomer.stall()
    publisher.send(b"MSG j\0three")
    publisher.send(b"MSG j\0four")
    assert newcomer.protocol in bus.registry.delivery._late.cohorts.of
    return bus, publisher, reader, newcomer


def settle(bus: SlowTurns, reader: Peer) -> list[bytes]:
    """Return all that a reader gets within many turns."""
    for _ in range(20):
        bus.turn()
        bus.clock.advance(LONGEST_WAIT)
        reader.drain()
    return reader.take()


def test_a_newcomer_gets_nothing_that_one_who_left_would_have_got(leaver):
    """While a receiver that has left is in a route, nobody else has its column there."""
    bus, publisher, _, newcomer = leaver
    publisher.send(b"MSG k\0secret")
    assert [packet for packet in settle(bus, newcomer) if not packet.startswith(b"MSG j\0")] == []


def test_a_newcomer_that_leaves_takes_nobody_along(leaver):
    """A receiver of the route of one that has left gets its messages, whoever comes and goes."""
    bus, publisher, reader, newcomer = leaver
    publisher.send(b"MSG k\0two")
    newcomer.transport.hang_up()
    bus.settle()
    publisher.send(b"MSG k\0three")
    got = [packet for packet in settle(bus, reader) if packet.startswith(b"MSG k\0")]
    assert got == [b"MSG k\0one", b"MSG k\0two", b"MSG k\0three"]


def test_the_columns_of_those_that_left_are_used_again(leaver):
    """Once one that has left is in no route any more, its column is for the next one."""
    bus, _, reader, _ = leaver
    cohort = bus.registry.delivery._late.cohorts.of[reader.protocol]
    assert (len(cohort.columns), cohort._free) == (19, [])
    while bus.turn():
        pass
    assert not bus.registry._leaving.receivers
    assert (len(cohort.columns), len(cohort._free)) == (18, 1)


class Publishing(Observer):
    """Publishes once when something was delivered to a client."""

    def __init__(self) -> None:
        self.client: Any = None
        self.publish: Any = None

    def delivered(self, client: Any, messages: int, size: int) -> None:
        if client is self.client:
            self.client = None
            self.publish(b"k", b"inner")


def test_a_leaver_that_joins_again_as_it_leaves():
    """An observer of what is sent to a client that has ended its sending may publish: the client is no member then."""
    observer = Publishing()
    bus = SlowTurns(limits=Limits(block_timeout=1e9), observers=[observer])
    observer.publish = bus.registry.publish
    publisher, *readers = bus.connect(uid=2), *[bus.connect(uid=1) for _ in range(17)]
    for each in readers:
        each.send(b"SUB k")
    leaver, members = readers[0], bus.registry.delivery._late.cohorts.of
    publisher.send(b"MSG k\0zero")
    leaver.protocol.user.copies.work_left = -5_000
    bus.registry.turns.crowd = CROWD
    publisher.send(b"MSG k\0one")
    assert leaver.protocol in members
    observer.client = leaver.protocol
    leaver.transport.end()
    assert leaver.protocol not in members
    assert settle(bus, leaver) == [b"MSG k\0zero", b"MSG k\0one", b"MSG k\0inner"]


def test_a_late_client_does_not_change_its_user():
    """A client of root that says what it is while messages wait for it stays what it was."""
    bus = SlowTurns(limits=Limits(block_timeout=1e9))
    publisher, *readers = bus.connect(uid=2), *[bus.connect(uid=0) for _ in range(18)]
    for each in readers:
        each.send(b"SUB k")
    service = readers[0]
    publisher.send(b"MSG k\0zero")
    service.protocol.user.copies.work_left = -5_000
    bus.registry.turns.crowd = CROWD
    publisher.send(b"MSG k\0one")
    assert service.protocol in bus.registry.delivery._late.cohorts.of
    service.send(b"UNSUB k", b"CMSG interest/patterns")
    assert service.protocol.user.uid == 0
    assert b"MSG k\0one" in settle(bus, service)
    service.transport.hang_up()
    bus.settle()
    assert service.protocol not in bus.registry.clients.values()


def nearly_full(monkeypatch: pytest.MonkeyPatch, uid: int) -> tuple[Bus, Peer]:
    """Return a bus with a cohort of 20 members of one user, and a publisher that has to decide about some of them."""
    for name, value in (("_MOST_SHARED", 40), ("_MOST_OWN", 40), ("_OWN_COHORT_PART", 1)):
        monkeypatch.setattr(cohort_delivery, name, value)
    bus = Bus(clock=Clock())
    stalled(bus, bus.connect(uid=1), b"blocking/hard/discard", count=20)
    publisher = bus.connect(uid=uid)
    for _ in range(20 if uid == 2 else 30):  # half of the room, or three quarters
        publisher.transport.deliver(b"MSG k\0")
    return bus, publisher


@pytest.mark.parametrize(
    ("waiting", "decisions"), [(500, 0), (610, 1), (700, 2), (740, 3), (760, 5), (910, 12), (980, 50), (999, 100)]
)
def test_a_stranger_begins_with_few_decisions(monkeypatch, waiting, decisions):
    """From half of the room on, a run of another user's publisher decides about more and more members."""
    monkeypatch.setattr(cohort_delivery, "_MOST_SHARED", 1_000)
    monkeypatch.setattr(cohort_delivery, "catch_ups", lambda receivers: 1_000)
    bus = Bus(clock=Clock())
    stalled(bus, bus.connect(uid=3), b"blocking/hard/discard", count=100)
    publisher, found = bus.connect(uid=1), bus.registry.delivery
    (cohort,) = set(found._late.cohorts.of.values())
    found._late.cohorts.add(cohort, [b"MSG k\0"] * (waiting - cohort.waiting()), 7)
    served = itertools.count()
    monkeypatch.setattr(late.Late, "serve", lambda *args, **choices: next(served) * 0)
    found._cohort_delivery.prepare([b"MSG k\0"] * 10, bus.registry.route(b"k"), publisher.protocol)
    assert next(served) == decisions


@pytest.mark.parametrize(("waiting", "sends"), [(19, True), (20, False)])
def test_decisions_do_not_send_while_too_much_waits(monkeypatch, waiting, sends):
    """A member whose socket has room is sent nothing with the decision if its cohort is far behind, but right after."""
    monkeypatch.setattr(late, "_TOO_MUCH", 20)
    bus = Bus(clock=Clock())
    publisher = bus.connect(uid=1)
    reader = stalled(bus, publisher, count=20)[0]
    found = bus.registry.delivery._late
    while found.cohorts.of[reader.protocol].waiting() < waiting:
        publisher.transport.deliver(b"MSG k\0")
    chosen: list[bool] = []
    decide = found._decide

    def noted(receiver: Any, queue: Any, sends: bool, digest: Any) -> int:
        chosen.append(sends)
        return decide(receiver, queue, sends, digest)

    monkeypatch.setattr(found, "_decide", noted)
    found.cohorts.of[reader.protocol].want_turns()
    found.serve(reader.protocol, are_many=True)
    assert chosen == [sends]
    reader.drain()
    assert len(reader.take()) == waiting + 1


@pytest.mark.parametrize(("uid", "crowd", "looks"), [(2, 1, 3), (2, 0, 3), (1, 1, None), (1, 0, None)])
def test_a_run_is_cut_short_when_the_time_for_decisions_is_up(monkeypatch, uid, crowd, looks):
    """A publisher of the members' own user delivers what the decisions have made room for, and pays for their time."""
    bus, publisher = nearly_full(monkeypatch, uid)
    budget = CONTENDED_BUDGET if crowd else TURN_BUDGET
    elapsed, serve = [0], late.Late.serve

    def slowly(*args: Any, **choices: Any) -> int:
        elapsed[0] += budget * 400
        return serve(*args, **choices)

    monkeypatch.setattr(late.Late, "serve", slowly)
    turns = bus.registry.turns
    turns.cpu, turns.crowd = lambda: elapsed[0], crowd
    run = [b"MSG k\0%d" % n for n in range(20)]
    plan, count, work = bus.registry.delivery._cohort_delivery.prepare(
        run, bus.registry.route(b"k"), publisher.protocol
    )
    assert plan is not None
    if looks is None:
        assert count == 20
        assert elapsed[0] == (late.catch_ups(20) if crowd else 4) * budget * 400  # 4 ms at most, for a stranger
    else:
        assert count == 20 * looks // late.catch_ups(20)
        assert work == elapsed[0] // 1_000 == looks * budget * 4 // 10


@pytest.mark.parametrize(("uid", "is_own"), [(2, True), (1, False)])
def test_a_publisher_pays_for_the_time_of_its_decisions(monkeypatch, uid, is_own):
    """A decision can take longer than its price says, and less than a turn; another user's publisher pays the price."""
    bus, publisher = nearly_full(monkeypatch, uid)
    elapsed, serve = [0], late.Late.serve

    def slowly(*args: Any, **choices: Any) -> int:
        elapsed[0] += 100_000
        return min(serve(*args, **choices), 99)

    monkeypatch.setattr(late.Late, "serve", slowly)
    bus.registry.turns.cpu = lambda: elapsed[0]
    _, count, work = bus.registry.delivery._cohort_delivery.prepare(
        [b"MSG k\0"], bus.registry.route(b"k"), publisher.protocol
    )
    assert count == 1
    assert elapsed[0] >= 100_000
    assert (work == elapsed[0] // 1_000) is is_own


def test_members_want_turns_when_much_waits(monkeypatch):
    """They need not wait for the timer."""
    monkeypatch.setattr(cohort_delivery, "_COHORT_WORTH_DECIDING", 20)
    bus = Bus(clock=Clock())
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher)
    publisher.send(*[b"MSG k\0"] * 19)
    assert [reader.protocol.queue.messages for reader in readers] == [1, 1]
    publisher.send(b"MSG k\0")
    assert [reader.protocol.queue.messages for reader in readers] == [21, 21]


def test_a_member_whose_socket_takes_packets_again_leaves_its_cohort():
    """After its turn it gets each message at once."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    (reader,) = stalled(bus, publisher, b"blocking/soft/discard", count=1)
    reader.transport.capacity = None
    publisher.send(b"MSG k\0second")
    assert reader.take() == []
    bus.clock.advance(LONGEST_WAIT)
    assert reader.take() == [b"MSG k\0second"]
    publisher.send(b"MSG k\0third")
    assert reader.take() == [b"MSG k\0third"]


def test_the_variety_of_keys_is_known_after_a_turn():
    """More can wait for receivers of the newest messages if these have few keys."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    stalled(bus, publisher, b"blocking/soft/latest")
    publisher.send(*[b"MSG k\0"] * 8)
    bus.clock.advance(LONGEST_WAIT)
    found = bus.registry.delivery._late.cohorts
    (cohort,) = set(found.of.values())
    assert cohort.variety == 1 / 8


def test_receivers_that_are_alike_share_a_cohort():
    """All can block publishers or none, and all keep only the newest messages or none."""
    found = Cohorts()
    user: Any = Account()
    members: list[Any] = [Member(user) for _ in range(10)]
    kinds = list(itertools.product((False, True), repeat=2))
    for member, (can_block, replaces) in zip(members, kinds * 3, strict=False):
        found.join(member, can_block, replaces)
    assert [len(cohort.members) for cohort in found.of_user(user)] == [3, 3, 2, 2]
    assert len(found.of) == 10


def test_members_that_want_a_turn_share_one_list():
    """What comes in the middle of a turn waits for the next one: all members are offered the list of the first."""
    cohort, (first, second) = joined(Cohorts(), 2)
    cohort.blocks.add([b"1", b"2"], 2)
    cohort.want_turns()
    digest = cohort.advance(first)
    cohort.blocks.add([b"3"], 1)
    cohort.want_turns()
    assert cohort.advance(second) is digest
    assert not cohort.wants_turn()
    cohort.want_turns()
    assert cohort.wants_turn()
    digest = cohort.advance(first)
    assert digest is not None
    assert digest.packets == [b"3"]


class Account:
    """A user whose memory is charged."""

    def __init__(self) -> None:
        self.memory = 0

    def charge_memory(self, size: int) -> None:
        self.memory += size


class Member:
    """A receiver of one user."""

    def __init__(self, user: Account) -> None:
        self.user = user


def joined(found: Cohorts, count: int) -> tuple[Cohort, list[Any]]:
    """A cohort with some new members."""
    user: Any = Account()
    members: list[Any] = [Member(user) for _ in range(count)]
    for member in members:
        found.join(member, False, False)
    (cohort,) = found.of_user(user)
    return cohort, members


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.integers(0, 3)),
            st.tuples(st.just("join with"), st.integers(0, 15)),
            st.tuples(st.just("leave"), st.integers(0, 3)),
            st.tuples(st.just("go"), st.integers(0, 3)),
            st.tuples(st.just("add"), st.integers(1, 15)),
            st.tuples(st.just("add"), st.just(15)),
            st.tuples(st.just("want"), st.just(0)),
            st.tuples(st.just("advance"), st.just(0)),
            st.tuples(st.just("skip"), st.just(0)),
        ),
        min_size=30,  # Hypothesis makes short lists otherwise
        max_size=80,
    ),
    st.sampled_from([2, 3, 4_096]),
    st.sampled_from([1, 64]),
)
def test_each_member_has_what_came_since_its_position(steps, changes, digests):
    """However receivers join, leave and take turns, each has the messages that are for it, the oldest first."""
    found = Cohorts()
    plans = Plans(found)
    user: Any = Account()
    members: list[Any] = [Member(user) for _ in range(4)]
    waiting: dict[Any, list[bytes]] = {}
    with (
        mock.patch.object(blocks, "_MOST_DIGESTS", digests),
        mock.patch.object(cohorts, "_MOST_CHANGES", changes),
        mock.patch.object(blocks, "_BLOCK", (3, 1_000)),
    ):
        for number, (name, choice) in enumerate(steps):
            if name in ("add", "join with"):
                chosen = tuple(member for at, member in enumerate(members) if choice & 1 << at)
                plan = plans.find(chosen)
                reached = [member for cohort, mask, _ in plan.cohorts for member in cohort.members_in(mask)]
                assert all(len(cohort.members_in(mask)) == count for cohort, mask, count in plan.cohorts)
                assert len(reached) == plan.members
                assert sorted(map(id, [*reached, *plan.others])) == sorted(map(id, chosen))
                packets = [b"%d" % number, b"more"]
                size = sum(map(len, packets))
                for cohort, mask, _ in plan.cohorts:
                    assert mask != 0
                    found.add(cohort, packets, size, mask)
                for member in reached:
                    waiting[member] += packets
                for member in plan.others if name == "join with" else ():
                    assert found.join_with(member, packets, size, 100, can_block=False, replaces=False)
                    waiting[member] = packets.copy()
            elif name == "join" and members[choice] not in waiting:
                found.join(members[choice], False, False)
                waiting[members[choice]] = []
            elif name in ("leave", "go"):
                found.leave(members[choice])
                waiting.pop(members[choice], None)
                if name == "go":  # somebody else connects, and gets the place
                    found.forget(members[choice])
                    members[choice] = Member(user)
            for cohort in found.of_user(user):
                if name == "want":
                    cohort.want_turns()
                elif name == "skip":
                    cohort.skip()
                elif name == "advance" and cohort.oldest() < cohort.due:
                    member = next(iter(cohort.members))
                    digest = cohort.advance(member)
                    taken = digest.packets if digest else []
                    assert digest is None or (taken and digest.size == sum(map(len, taken)))
                    assert taken == waiting[member][: len(taken)]
                    del waiting[member][: len(taken)]
                    found.trim(cohort)
                assert list(cohort.members.values()) == sorted(cohort.members.values())
                assert cohort.blocks.start <= cohort.oldest() <= cohort.end
                assert sorted(cohort.columns.values()) == sorted(set(cohort.columns.values()))
            for member, cohort in found.of.items():
                digest = cohort.waiting_for(member)
                assert (digest.packets if digest else []) == waiting[member]
            assert found.of.keys() == waiting.keys()
            assert len(found.of_user(user)) <= 1
            assert found.bytes == user.memory == sum(cohort.blocks.size for cohort in found.of_user(user))
            for cohort in found.of_user(user):
                kept_ = cohort.blocks
                assert kept_.size == sum(map(len, kept(cohort))) + mask_memory(kept_)
                assert kept_.mask_count == sum(block.mask_count for block in kept_._blocks) + len(kept_._last_ends)
    for member in members:
        found.leave(member)
    assert (found.bytes, found.of, found.of_user(user)) == (0, {}, [])


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


def test_cohorts_that_are_gone_keep_nothing_in_memory():
    """Changes and plans know cohorts without members, but neither the messages nor the publishers of these."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    (reader,) = stalled(bus, publisher, b"blocking/hard/block", count=1)
    found = bus.registry.delivery._late.cohorts
    cohort = found.of[reader.protocol]
    publisher.send(b"MSG k\0" + bytes(1_000))
    assert kept(cohort)
    assert publisher.protocol in cohort.blockable
    reader.send(b"CMSG !/cred/whoami")
    assert found.of == {}
    assert any(change.cohort is cohort for change in found.changes)
    assert (kept(cohort), cohort.run, cohort.blockable) == ([], None, {})


def test_receivers_that_are_gone_are_forgotten():
    """What is known of changes keeps a few receivers in memory, however many come and go."""
    bus = Bus()
    publisher = bus.connect(uid=1)
    found = bus.registry.delivery._late.cohorts
    for _ in range(70):
        (reader,) = stalled(bus, publisher, count=1)
        reader.transport.hang_up()
        bus.settle()
    assert len(found.changes) <= 2 * cohort_plans._MOST_PLANNED // cohort_plans._GONE


def test_a_member_that_comes_with_a_run_is_due_behind_the_others():
    """Members have their positions in order, also if one joins while others have yet to come to where they are due."""
    bus = Bus()
    first, second = bus.connect(uid=2).protocol, bus.connect(uid=2).protocol
    found = bus.registry.delivery._late.cohorts
    join = partial(found.join_with, can_block=False, replaces=False)
    assert join(first, [b"one"], 3, 100)
    cohort = found.of[first]
    cohort.want_turns()
    assert cohort.due == 1
    found.add(cohort, [b"two"], 3)
    last = [b"three"]
    found.add(cohort, last, 5)
    assert join(second, last, 5, 0)
    assert found.of[second] is cohort
    assert (cohort.members, cohort.due) == ({first: 0, second: 2}, 2)
    digest = cohort.advance(first)
    assert digest is not None
    assert digest.packets == [b"one", b"two"]
    assert list(cohort.members.items()) == [(second, 2), (first, 2)]


@pytest.mark.parametrize(("can_block", "replaces"), [(True, False), (False, True)])
def test_receivers_of_a_run_that_differ_form_cohorts_of_their_own(can_block, replaces):
    """A receiver joins the cohort of those that block and replace as it does, if there is room for the run there."""
    bus = Bus()
    readers = [bus.connect(uid=2).protocol for _ in range(5)]
    found = bus.registry.delivery._late.cohorts
    join, run = partial(found.join_with, can_block=False, replaces=False), [b"one"]
    before = found.version
    assert not join(readers[0], run, 3, 2)
    assert join(readers[0], run, 3, 3)
    assert found.join_with(readers[1], run, 3, 3, can_block=can_block, replaces=replaces)
    assert join(readers[2], run, 3, 0)
    assert found.version == before + 3
    one, two, three = (found.of[reader] for reader in readers[:3])
    assert one is three
    assert one is not two
    found.join(readers[3], False, False)  # behind the run
    assert not join(readers[4], run, 3, 2)
    assert join(readers[4], run, 3, 3)
    assert kept(one) == [b"one", b"one"]
    got = [one.waiting_for(readers[at]) for at in (0, 4)]
    assert [digest and digest.packets for digest in got] == [run, run]
    assert one.waiting_for(readers[3]) is None


def test_a_publisher_waits_for_what_many_that_may_block_it_have_to_be_decided_about(monkeypatch):
    """Members that may block a publisher are decided about before its message, in its turns; nothing is lost."""
    monkeypatch.setattr(late, "_CATCH_UPS", 1)
    bus = Turned()
    stranger, own = bus.connect(uid=1), bus.connect(uid=2)
    readers = stalled(bus, stranger, b"blocking/soft/queue", b"blocking/hard/block", count=20)
    stranger.protocol.user.work_left = TURN_BUDGET
    stranger.send(b"MSG k\0one")
    cohort_of = bus.registry.delivery._late.cohorts.of
    assert len(cohort_of) == 20
    own.protocol.user.work_left = 1
    own.send(b"MSG k\0two")
    assert own.protocol.is_paused
    assert 0 < len(cohort_of) < 20
    while bus.turn():
        pass
    assert not own.protocol.is_paused
    drain(bus, readers)
    assert all(reader.take() == [b"MSG k\0first", b"MSG k\0one", b"MSG k\0two"] for reader in readers)


def test_decisions_alone_say_nothing_about_the_price_of_a_message(monkeypatch):
    """A run before which there is too much to decide is not known to be cheap."""
    monkeypatch.setattr(late, "_CATCH_UPS", 1)
    bus = Turned()
    stranger, own = bus.connect(uid=1), bus.connect(uid=2)
    stalled(bus, stranger, b"blocking/soft/queue", b"blocking/hard/block", count=20)
    stranger.protocol.user.work_left = TURN_BUDGET
    stranger.send(b"MSG k\0one")
    own.protocol.user.work_left = 1
    own.send(*[b"MSG k\0two"] * 64)
    assert own.protocol.is_paused
    own.protocol.user.work_left = 0
    assert own.protocol._affordable(bus.registry.route(b"k"), 1_000) < 20


def test_what_may_block_whom_is_asked_once_for_each_member():
    """The policy is asked about each member and publisher once, also about those that join later."""
    bus = Bus()
    stranger, own = bus.connect(uid=1), bus.connect(uid=2)
    stalled(bus, stranger, b"blocking/hard/block", count=3)
    delivery_ = bus.registry.delivery
    (cohort,) = set(delivery_._late.cohorts.of.values())
    asked = mock.Mock(side_effect=delivery_._credentials.mayBlock)
    policy = mock.Mock(mayBlock=asked)
    found = cohort_delivery.CohortDelivery(delivery_._late, policy)
    for _ in range(2):
        assert not found._may_block(cohort, stranger.protocol)
        assert found._may_block(cohort, own.protocol)
        assert not found._may_block(cohort, None)
    assert asked.call_count == 3 + 1
    cohort.add_member(own.protocol)
    asked.side_effect = lambda receiver, publisher: True
    assert found._may_block(cohort, stranger.protocol)
    assert asked.call_count == 3 + 1 + 1
    for _ in range(len(cohort.members) + 1):
        cohort.add_member(own.protocol)
    assert (cohort.blockable, cohort.unasked) == ({}, [])


def test_a_member_that_leaves_while_it_is_sent_a_long_list_loses_all_of_it(monkeypatch):
    """When its time is up, too, what is left of the list is counted as lost, and is no error of the server's."""
    monkeypatch.setattr(blocks, "_BLOCK", (2, 1_000))
    bus = Bus(clock=Clock())
    publisher = bus.connect(uid=1)
    reader, _ = stalled(bus, publisher, b"blocking/soft/discard")
    for n in range(7):
        publisher.transport.deliver(b"MSG k\0%d" % n)
    transport, lost = reader.transport, reader.protocol.lost
    cohort = bus.registry.delivery._late.cohorts.of[reader.protocol]
    cohort.want_turns()
    monkeypatch.setattr(transport, "flush_batch", transport.breakDown)
    bus.registry.turns.cpu = itertools.count(0, TURN_BUDGET * 1_000).__next__
    bus.registry.delivery._late.serve(reader.protocol, are_many=True)
    assert reader.protocol.lost == lost + 7
    assert reader.protocol.reason is None
    assert reader.is_connected


class Grumbling(Observer):
    """Publishes when a message is dropped."""

    def __init__(self) -> None:
        self.publish = lambda: None

    def dropped(self, client, messages, size) -> None:
        publish, self.publish = self.publish, lambda: None
        publish()


@pytest.mark.parametrize("key", [b"j", b"k"])
def test_what_is_published_because_of_a_loss_comes_behind_the_rest_of_a_long_list(monkeypatch, key):
    """An observer publishes for some or all members while a list is sent part by part: the order stays."""
    grumbling = Grumbling()
    bus = Bus(clock=Clock(), observers=[grumbling])
    publisher = bus.connect(uid=1)
    readers = stalled(bus, publisher, b"blocking/soft/discard", count=4)
    monkeypatch.setattr(blocks, "_BLOCK", (2, 1_000))
    for reader in readers[1:]:
        reader.send(b"SUB j")
    publisher.transport.deliver(b"MSG k\0much longer")
    for n in range(6):
        publisher.transport.deliver(b"MSG k\0%d" % n)
    late_, reader = bus.registry.delivery._late, readers[1]
    late_.cohorts.of[reader.protocol].want_turns()
    reader.transport.longest, reader.transport.capacity = 10, None
    grumbling.publish = lambda: bus.registry.publish(key, b"behind")
    late_.serve(reader.protocol, are_many=True)
    reader.transport.longest = None
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    assert [packet.partition(b"\0")[2] for packet in reader.take()] == [*(b"%d" % n for n in range(6)), b"behind"]
    assert reader.is_connected


class BrokenPromise(Grumbling):
    """Publishes because of a loss, although it says that it never publishes."""

    may_publish = False


@pytest.mark.parametrize("capacity", [1, None])
def test_a_message_of_an_observer_that_never_publishes_is_not_lost(monkeypatch, capacity):
    """What such an observer publishes all the same, while a list is sent part by part, is no part of that list."""
    observer = BrokenPromise()
    bus = Bus(clock=Clock(), observers=[observer])
    publisher, other, reader = bus.connect(uid=1), bus.connect(uid=2), bus.connect(uid=2)
    other.send(b"CMSG blocking/soft/latest", b"SUB k")
    reader.send(b"CMSG blocking/soft/latest", b"SUB k", b"SUB j")
    turns = bus.registry.turns
    turns.crowd, reader.protocol.user.copies.work_left = 10, 0
    monkeypatch.setattr(blocks, "_BLOCK", (4, 1_000))
    publisher.transport.deliver(b"MSG k\0much longer", *[b"MSG k\0%d" % n for n in range(8)])
    late_ = bus.registry.delivery._late
    late_.cohorts.of[reader.protocol].want_turns()
    reader.transport.longest, reader.transport.capacity = 10, capacity
    observer.publish = lambda: bus.registry.publish(b"j", b"other")
    late_.serve(reader.protocol, are_many=True)
    assert reader.protocol.lost == 1
    reader.transport.longest = reader.transport.capacity = None
    reader.drain()
    bus.clock.advance(LONGEST_WAIT)
    bus.settle()
    taken = reader.take()
    assert b"MSG j\0other" in taken
    assert b"MSG k\x007" in taken


def test_only_observers_that_may_publish_have_long_lists_copied():
    """An observer of losses may publish unless it says otherwise; one that hears of no loss makes no difference."""
    assert Events([Grumbling()]).publishes_on_loss
    assert not Events([BrokenPromise(), Echoing()]).publishes_on_loss
    assert not Events().publishes_on_loss


@pytest.mark.parametrize("cost", [30_000, 100_000])
def test_a_message_of_another_user_between_two_turns_starves_no_publisher(monkeypatch, cost):
    """Members join their cohort again with such a message, so a publisher must get past all of them in a few turns."""
    monkeypatch.setattr(late, "MANY", 16)
    bus = Turned()
    stranger, own = bus.connect(uid=1), bus.connect(uid=2)
    readers = stalled(bus, stranger, b"blocking/soft/queue", b"blocking/hard/block", count=40)
    serve = late.Late.serve

    def slowly(*args: Any, **choices: Any) -> int:
        bus.cpu += cost
        return serve(*args, **choices)

    monkeypatch.setattr(late.Late, "serve", slowly)
    turns = bus.registry.turns
    turns._alone, own.protocol.user.work_left = 0, CONTENDED_BUDGET
    own.send(b"MSG k\0own")
    for _ in range(20):
        turns.crowd, stranger.protocol.user.work_left = 64, CONTENDED_BUDGET
        stranger.send(b"MSG k\0x")
        bus.turn()
    assert not own.protocol.is_paused
    drain(bus, readers)
    assert all(reader.take().count(b"MSG k\0own") == 1 for reader in readers)
