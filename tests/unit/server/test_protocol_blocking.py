"""Receivers that block or slow down their publishers: who waits, for whom, and how long."""

from __future__ import annotations

import pytest

from sbus.errors import CloseReason
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.core.limits import Limits
from tests.support.buses import Bus
from tests.support.costs import calls
from tests.support.packets import message


def test_block_stops_the_publisher_inside_its_batch():
    """Packets that were read from a publisher before it was blocked are kept, and go on in order afterwards."""
    bus = Bus()
    reader, other, publisher = bus.connect(), bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    other.send(b"SUB k")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(*[message("k", b"%d" % n) for n in range(2, 10)])
    assert publisher.transport.is_paused
    assert len(other.take()) < 9
    before = len(other.transport.written)
    reader.drain()
    got = [packet[6:] for packet in reader.take()]
    assert got == [b"%d" % n for n in range(1, 10)]
    assert not publisher.transport.is_paused
    assert len(other.transport.written) > before


@pytest.mark.parametrize("total", [None, 24])
@pytest.mark.parametrize("batch", [1, 2, 3, 10, 40])
def test_a_full_queue_stops_the_publisher_at_the_same_message(batch, total):
    """Where a queue with hard/block fills up does not depend on how many messages come at a time."""
    messages = [message("k", b"%02d" % n) for n in range(40)]
    limits = {"total_queue_bytes": total * len(messages[0])} if total else {"queue_messages": 10}
    bus = Bus(limits=Limits(**limits))
    first, second, publisher = bus.connect(), bus.connect(), bus.connect()
    for reader in (first, second):
        reader.send(b"SUB k", b"CMSG blocking/hard/block")
        reader.stall()
    publisher.send(messages[0])
    for at in range(1, 40, batch):
        publisher.send(*messages[at : at + batch])
    assert publisher.transport.is_paused
    assert [reader.protocol.queue.messages for reader in (first, second)] == [11, 11]
    for _ in range(10):
        first.drain()
        second.drain()
    assert first.take() == second.take() == messages
    assert not publisher.transport.is_paused


def test_messages_for_receivers_that_can_block_cost_by_the_batch():
    """While there is room for a batch, it costs as much as for receivers that do not block."""
    costs = []
    for count in (2, 60):
        bus = Bus()
        reader, publisher = bus.connect(), bus.connect()
        reader.send(b"SUB k", b"CMSG blocking/hard/block")
        reader.stall()
        publisher.send(message("k"))
        costs.append(calls(bus.registry.deliver, [message("k")] * count, bus.registry.route(b"k"), publisher.protocol))
        assert reader.protocol.queue.messages == 1 + count
    assert costs[0] == costs[1]


def test_block_acts_as_queue_toward_other_users():
    """A receiver does not block a publisher of another user; messages beyond its limit are dropped."""
    bus = Bus(limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(uid=1000), bus.connect(uid=1001)
    reader.send(b"SUB k", b"CMSG blocking/soft/block", b"CMSG blocking/hard/error")
    reader.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(5)])
    assert not publisher.transport.is_paused
    assert reader.is_connected
    reader.drain()
    assert len(reader.take()) == 3
    assert reader.protocol.lost == 2


def test_a_receiver_that_blocks_too_long_is_disconnected():
    """After the block time-out without a packet leaving its queue, the publishers go on without it."""
    bus = Bus()
    reader, publisher, other = bus.connect(), bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    other.send(b"SUB k")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(message("k", b"2"))
    bus.clock.advance(29.9)
    assert reader.is_connected
    assert publisher.transport.is_paused
    reader.drain(0)
    bus.clock.advance(0.2)
    bus.settle()
    assert not reader.is_connected
    assert reader.protocol.reason is CloseReason.BLOCKED_TOO_LONG
    assert not publisher.transport.is_paused
    assert [packet[6:] for packet in other.take()] == [b"1", b"2"]


def test_a_client_that_blocks_itself_is_disconnected():
    """Blocking on one's own messages ends by the time-out; it does not hang."""
    bus = Bus()
    narcissus = bus.connect()
    narcissus.send(b"SUB k", b"CMSG blocking/soft/block")
    narcissus.stall()
    narcissus.send(message("k"))
    bus.clock.advance(30.1)
    bus.settle()
    assert not narcissus.is_connected
    assert not bus.registry.clients


def test_two_clients_that_block_each_other_end():
    """Neither reads, so the time-out ends at least one of them; nothing hangs."""
    bus = Bus()
    a, b = bus.connect(), bus.connect()
    a.send(b"SUB a", b"CMSG blocking/soft/block")
    b.send(b"SUB b", b"CMSG blocking/soft/block")
    a.stall()
    b.stall()
    a.send(message("b"), message("b"))
    b.send(message("a"), message("a"))
    assert a.transport.is_paused
    assert b.transport.is_paused
    bus.clock.advance(30.1)
    bus.settle()
    assert not (a.is_connected and b.is_connected)
    assert not any(peer.transport.is_paused for peer in (a, b) if peer.is_connected)


def test_a_change_of_strategy_unblocks_the_publishers():
    """A receiver that chooses another strategy unblocks the publishers that it blocked with the one before."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(message("k", b"2"))
    assert publisher.transport.is_paused
    reader.send(b"CMSG blocking/soft/queue")
    assert not publisher.transport.is_paused
    publisher.send(message("k", b"3"))
    assert not publisher.transport.is_paused
    reader.drain()
    assert [packet[6:] for packet in reader.take()] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(("receivers", "read_limit"), [(0, 48), (1, 48), (2, 24), (8, 6), (64, 4)])
def test_share_of_a_publisher(receivers, read_limit):
    """The more receivers there are, the less of a publisher is read in one go while others want to be read too."""
    bus = Bus()
    for _ in range(receivers):
        bus.connect().send(b"SUB k")
    publisher = bus.connect()
    publisher.send(message("k"))
    publisher.send(*[message("k")] * 10)
    assert publisher.transport.read_limit == read_limit


def test_share_of_a_publisher_to_a_congested_receiver():
    """A receiver with a full socket counts as one, whatever the last run was."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    for _ in range(8):
        bus.connect().send(b"SUB many")
    reader.stall()
    for key in ("k", "many"):  # from now on their routes are known
        publisher.send(message(key))
    publisher.send(*[message("many")] * 8)
    assert publisher.transport.read_limit == 6
    publisher.send(*[message("k")] * 8)
    assert publisher.transport.read_limit == 48
    reader.drain()
    assert reader.take() == [message("k")] * 9


def test_share_of_a_publisher_whose_messages_go_by_mail():
    """What goes into mail is made no copies of yet, whatever the last run was."""
    bus = Bus()
    for _ in range(64):
        bus.connect().send(b"SUB many")
    for _ in range(OF_OTHERS + 1):
        bus.connect(uid=1001).send(b"SUB k")
    publisher = bus.connect()
    for key in ("k", "many"):  # from now on their routes are known
        publisher.send(message(key))
    publisher.send(*[message("many")] * 8)
    assert publisher.transport.read_limit == 4
    publisher.send(*[message("k")] * 8)
    assert publisher.transport.read_limit == 48


def test_whose_messages_a_blocking_receiver_keeps(monkeypatch):
    """What a congested receiver keeps is noted by publisher, as long as it may block that one."""
    noted = []

    def note(self, publisher, receiver, *figures):
        noted.append((publisher, figures))

    monkeypatch.setattr(Backpressure, "kept", note)
    bus = Bus()
    reader, publisher, stranger = bus.connect(), bus.connect(), bus.connect(uid=1001)
    reader.send(b"CMSG blocking/hard/block", b"SUB k")
    reader.stall()
    publisher.send(message("k", b"first"))
    noted.clear()
    publisher.send(message("k", bytes(94)))
    stranger.send(message("k", bytes(94)))
    assert noted == [(publisher.protocol, (1, 100, 2))]
