"""Draining: what waits for full sockets goes out in the turns of its receivers' user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sbus.errors import CloseReason
from sbus.flood import SendQueue
from sbus.flood.orders import PriorityBacklog
from sbus.server.bus import delivery, draining, late
from sbus.server.bus.late import MANY
from sbus.server.core.turns import TURN_BUDGET
from tests.support.buses import Peer
from tests.unit.server.test_bounded_work import Turned
from tests.unit.server.test_late import spend


def full(bus: Turned, count: int = 1) -> tuple[Peer, list[Peer]]:
    """Return a publisher, and receivers of another user with full sockets, a message in each queue, and a balance."""
    publisher = bus.connect(uid=1)
    readers = [bus.connect(uid=2) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
        reader.stall()
    readers[0].protocol.user.copies.work_left = TURN_BUDGET
    publisher.send(b"MSG k\0")
    assert all(reader.protocol.queue.messages for reader in readers)
    return publisher, readers


def subscribed(bus: Turned, uid: int = 1, count: int = MANY) -> tuple[Peer, list[Peer]]:
    """Return a publisher, and receivers of user 2 with room in their sockets, and no balance while others wait."""
    publisher = bus.connect(uid=uid)
    readers = [bus.connect(uid=2) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
    spend(readers[0])
    return publisher, readers


def slow_down(bus: Turned, reader: Peer, work: int) -> None:
    """Have it take some time, in units of work, to send what waits for a reader."""
    send_on = reader.transport.send_on

    def slowly(exclusive: bool) -> None:
        bus.cpu += work * 1_000
        send_on(exclusive)

    setattr(reader.transport, "send_on", slowly)  # noqa: B010


def failing_for(broken: SendQueue, step: str) -> Callable[..., Any]:
    """Return a method of `SendQueue` that fails for one queue."""
    method = getattr(SendQueue, step)

    def called(queue: SendQueue, *args: Any) -> Any:
        if queue is broken:
            raise ZeroDivisionError
        return method(queue, *args)

    return called


def test_draining_is_work_of_the_receivers_user():
    """The time that it takes to send what waited is deducted from the balance of copies."""
    bus = Turned()
    _, (reader,) = full(bus)
    copies = reader.protocol.user.copies
    copies.work_left = before = 100
    slow_down(bus, reader, 70)
    reader.drain()
    assert reader.take() == [b"MSG k\0"]
    assert copies.work_left == before - 70


def test_readers_of_a_user_without_balance_wait_for_turns():
    """Sockets that have room again are filled as far as the budget goes, in the order in which they got it."""
    bus = Turned()
    _, readers = full(bus, 5)
    spend(readers[0])
    for reader in readers:
        slow_down(bus, reader, 300)
        reader.drain()
        reader.drain()  # it may have more room meanwhile
    assert not any(reader.take() for reader in readers)
    served = []
    while bus.turn():
        served.append([bool(reader.take()) for reader in readers].count(True))
        assert served[-1] <= 2
    served.append(sum(bool(reader.take()) for reader in readers))
    assert sum(served) == 5


def test_a_turn_ends_when_its_budget_is_spent():
    """Those whose turn did not come stay where they are, and nobody takes a turn in vain."""
    bus = Turned()
    _, readers = full(bus, 3)
    spend(readers[0])
    for reader in readers:
        slow_down(bus, reader, 10 * TURN_BUDGET)
        reader.drain()
    bus.turn()
    assert [bool(reader.take()) for reader in readers] == [True, False, False]
    line = bus.registry.turns._waiting[readers[0].protocol.user.copies, False]
    assert list(line.others) == [reader.protocol._draining for reader in readers[1:]]


def test_messages_are_put_in_order_in_turns(monkeypatch):
    """A long queue gets its order piece by piece, whatever the receiver chooses meanwhile; then all of it is sent."""
    monkeypatch.setattr(draining, "ARRANGED_AT_ONCE", 100)
    bus = Turned()
    publisher, (reader,) = full(bus)
    reader.send(b"CMSG order/random", b"CMSG order/stack", b"CMSG order/random")
    for number in range(1_000):
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.send(b"MSG k\0%d" % number)
    pieces = []
    rank = PriorityBacklog.rank

    def measured(backlog: PriorityBacklog, most: int) -> None:
        pieces.append(most)
        bus.cpu += most * 1_000
        rank(backlog, most)

    monkeypatch.setattr(PriorityBacklog, "rank", measured)
    reader.protocol.user.copies.work_left = 150
    reader.drain()
    assert pieces == [100, 100]
    assert reader.take() == []
    done = 2
    while bus.turn():
        assert len(pieces) - done <= 1 + TURN_BUDGET // 100
        assert not reader.take() or len(pieces) >= 11
        done = len(pieces)
    reader.drain()
    assert sum(pieces) == 1_001
    assert max(pieces) == 100
    assert not reader.protocol.queue.messages


def test_a_reader_that_leaves_waits_for_no_turn():
    """A connection that is lost while it waits is forgotten."""
    bus = Turned()
    _, (reader,) = full(bus)
    spend(reader)
    reader.drain()
    line = bus.registry.turns._waiting[reader.protocol.user.copies, False]
    draining = reader.protocol._draining
    assert draining in line.others
    reader.transport.abortConnection()
    bus.settle()
    assert draining not in line.others
    assert reader.transport.on_writable is None
    while bus.turn():
        pass


@pytest.mark.parametrize("step", ["take", "_ordered"])
def test_a_queue_that_fails_in_a_turn_stops_nobody(monkeypatch, step):
    """Where a plugged-in order fails in a turn, its client is disconnected, and the others have their turns."""
    bus = Turned()
    _, readers = full(bus, 3)
    for reader in readers:
        reader.send(b"CMSG order/random")
    spend(readers[0])
    for reader in readers:
        reader.drain()
    monkeypatch.setattr(SendQueue, step, failing_for(readers[0].protocol.queue, step))
    while bus.turn():
        pass
    assert [bool(reader.take()) for reader in readers] == [False, True, True]
    assert [reader.is_connected for reader in readers] == [False, True, True]
    assert readers[0].protocol.reason is CloseReason.SERVER_ERROR


def test_a_stranger_pays_for_no_sending_to_many(monkeypatch):
    """Beyond what may wait, a publisher of another user pays for decisions alone; the receivers' turns send."""
    monkeypatch.setattr("sbus.server.bus.cohort_delivery._MOST_SHARED", 20)
    bus = Turned()
    publisher, readers = full(bus, MANY)
    for reader in readers:
        reader.transport.capacity = None  # there is room by now
    for number in range(40):
        spend(readers[0])
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(b"MSG k\0%d" % number)
    kept = [reader.protocol.queue.messages for reader in readers]
    assert max(kept) > 10
    assert not any(reader.take() for reader in readers)
    while bus.turn():
        pass
    bus.clock.advance(1)
    while bus.turn():
        pass
    for reader in readers:
        reader.drain()
    while bus.turn():
        pass
    expected = [b"MSG k\0", *(b"MSG k\0%d" % number for number in range(40))]
    assert all(reader.take() == expected for reader in readers)


@pytest.mark.parametrize("uid", [1, 2])
@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_who_pays_for_sending_to_a_cohort(monkeypatch, uid, count):
    """Beyond what may wait for a cohort, a publisher sends to few members, or to those of its own user."""
    monkeypatch.setattr("sbus.server.bus.cohort_delivery._MOST_SHARED", 20)
    monkeypatch.setattr(delivery, "MANY", 1)  # a few form a cohort, too
    bus = Turned()
    publisher, readers = subscribed(bus, uid, count)
    expected = [b"MSG k\0%d" % number for number in range(40)]
    for packet in expected:
        spend(readers[0])
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(packet)
    assert any(reader.transport.written for reader in readers) is (uid == 2 or count < MANY)
    while bus.turn():
        pass
    assert all(reader.take() == expected for reader in readers)


def test_many_late_receivers_with_room_form_a_cohort(monkeypatch):
    """A run that has to wait for many receivers waits once for all of them, whether or not their sockets are full."""
    bus = Turned()
    publisher, readers = subscribed(bus)
    publisher.transport.deliver(b"MSG k\0one")
    found = bus.registry.delivery._late.cohorts
    assert len(set(found.of.values())) == 1
    assert len(found.of) == MANY
    monkeypatch.setattr(delivery.Delivery, "_postpone", None)
    publisher.transport.deliver(b"MSG k\0two")
    monkeypatch.undo()
    while bus.turn():
        pass
    assert all(reader.take() == [b"MSG k\0one", b"MSG k\0two"] for reader in readers)
    assert not found.of


@pytest.mark.parametrize(("uid", "room"), [(1, 1), (2, 2)])
def test_a_run_without_room_forms_no_cohort(monkeypatch, uid, room):
    """What waits for those that join with a run is bounded, to half for publishers of the receivers' own user."""
    large, small = b"MSG k\0" + bytes(100), b"MSG k\0s"
    monkeypatch.setattr(late, "MOST_BYTES", room * len(large) - 1)
    monkeypatch.setattr(late, "_COHORTS", 1)
    monkeypatch.setattr(late, "_OTHERS", 1)
    monkeypatch.setattr(late, "_BEYOND", 1)
    bus = Turned()
    publisher, readers = subscribed(bus, uid)
    found = bus.registry.delivery._late.cohorts
    for packet, waits in ((large, False), (small, True)):
        spend(readers[0])
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(packet)
        assert (len(found.of) == MANY) is waits
        assert bool(found._by_user) is waits
    assert found.bytes == len(small)
    others = [bus.connect(uid=2) for _ in range(MANY)]
    for reader in others:
        reader.send(b"SUB j")
    room_left = len(large) - 1 - len(small)
    for size, waits in ((room_left + 1, False), (room_left, True)):
        spend(readers[0])
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(b"MSG j\0".ljust(size, b"x"))
        assert (len(found.of) > MANY) is waits
    while bus.turn():
        pass
    assert all(reader.take() == [large, small] for reader in readers)
    assert (found.of, found._by_user, found.bytes) == ({}, {}, 0)


def test_a_member_with_a_full_socket_waits_for_one_turn(monkeypatch):
    """A member that wanted a turn and found its socket full stays in its cohort, and out of the line of turns."""
    bus = Turned()
    publisher, readers = full(bus, MANY)
    for number in range(2):
        spend(readers[0])
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.transport.deliver(b"MSG k\0%d" % number)
    found = bus.registry.delivery._late
    (cohort,) = set(found.cohorts.of.values())
    cohort.want_turns()
    member = next(iter(cohort.members))
    line = found._lines[member.user]
    line.want_turn(member)
    publisher.transport.deliver(b"MSG k\0more")
    member.user.copies.work_left = 1
    line.take_turn()
    assert not line.receivers
    assert cohort.members[member] == cohort.due < cohort.end


@pytest.mark.parametrize("more", [False, True])
def test_a_member_with_room_is_late_as_long_as_something_waits(more):
    """A member whose socket has taken what was due leaves its cohort, or wants another turn for the rest."""
    bus = Turned()
    publisher, readers = subscribed(bus)
    publisher.transport.deliver(b"MSG k\0one")
    found, member = bus.registry.delivery._late, readers[1].protocol
    found.cohorts.of[member].want_turns()
    if more:
        publisher.transport.deliver(b"MSG k\0two")
    line = found._lines[member.user]
    line.receivers.clear()
    found.serve(member, are_many=True)
    assert readers[1].take() == [b"MSG k\0one"]
    assert (member in found.cohorts.of, member.queue.is_late) == (more, more)
    assert list(line.receivers) == ([member] if more else [])


def test_a_reader_that_waits_keeps_its_place():
    """A reader that waits for a turn is not sent to before it, whatever its user has left by then."""
    bus = Turned()
    _, (reader,) = full(bus)
    copies = reader.protocol.user.copies
    spend(reader, 0)
    reader.drain()
    copies.work_left = 100
    reader.drain()
    assert reader.take() == []
    assert not bus.turn()
    assert reader.take() == [b"MSG k\0"]


def test_one_batch_at_a_time_while_others_send():
    """Where another user sends too, a socket gets one batch at a time; else all that it takes."""
    bus = Turned()
    _, (reader,) = full(bus)
    asked: list[bool] = []
    setattr(reader.transport, "send_on", asked.append)  # noqa: B010
    on_writable = reader.transport.on_writable
    assert on_writable is not None
    for crowd, exclusive in ((1, False), (1, True), (0, False), (0, True)):
        bus.registry.turns.crowd = crowd
        on_writable(exclusive)
    assert asked == [False, True, True, True]
