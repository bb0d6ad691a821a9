"""Users: one for each UID with a connection, with all that its connections hold."""

from __future__ import annotations

import pytest

from sbus.server.core.limits import Limits, pattern_cost
from sbus.server.core.users import Users
from tests.support.buses import Bus


def test_a_user_is_one_for_all_its_connections():
    """Connections of one UID share a user; the last one takes it along."""
    users = Users(100)
    first, second, other = users.connect(1), users.connect(1), users.connect(2)
    assert first is second is users[1]
    assert (first.uid, first.connections, other.connections, len(users)) == (1, 2, 1, 2)
    users.disconnect(first)
    assert users[1].connections == 1
    users.disconnect(second)
    users.disconnect(other)
    assert len(users) == 0
    with pytest.raises(KeyError):
        users[1]


def test_patterns_are_charged_and_released():
    """Each different pattern counts once for each client, until it goes, by UNSUB or with its client."""
    bus = Bus()
    one, two = bus.connect(uid=7), bus.connect(uid=7)
    user = bus.registry.users[7]
    one.send(b"SUB a", b"SUB a", b"SUB bb/")
    two.send(b"SUB a")
    assert (user.patterns, user.pattern_bytes) == (3, 2 * pattern_cost(b"a", b"/") + pattern_cost(b"bb/", b"/"))
    one.send(b"UNSUB a")
    assert user.patterns == 3
    one.send(b"UNSUB a", b"UNSUB a")
    assert user.patterns == 2
    one.transport.end()
    bus.settle()
    assert (user.patterns, user.pattern_bytes, user.connections) == (1, 1, 1)
    two.transport.end()
    bus.settle()
    assert (user.patterns, user.pattern_bytes, len(bus.registry.users)) == (0, 0, 0)


def test_queued_bytes_are_those_of_all_its_queues():
    """The bytes in the queues of a user are counted, and are zero when they have drained or are gone."""
    bus = Bus()
    readers, publisher = [bus.connect(uid=7), bus.connect(uid=7), bus.connect(uid=8)], bus.connect(uid=9)
    for reader in readers:
        reader.send(b"SUB k")
        reader.stall()
    packet = b"MSG k\x0012345"
    publisher.send(packet, packet)
    users = bus.registry.users
    user = users[7]
    assert [(users[uid].queued_bytes, users[uid].queues) for uid in (7, 8, 9)] == [
        (4 * len(packet), 2),
        (2 * len(packet), 1),
        (0, 0),
    ]
    assert users.budget.bytes == 6 * len(packet)
    readers[0].drain()
    readers[1].transport.breakDown()
    readers[1].transport.end()
    bus.settle()
    assert (user.queued_bytes, user.queues, user.connections) == (0, 0, 1)


def test_refused_connections_leave_no_user_behind():
    """A connection that is refused counts for its user only until it is closed."""
    bus = Bus(limits=Limits(max_clients=1))
    bus.connect(uid=1)
    assert not bus.connect(uid=2).is_connected
    assert len(bus.registry.users) == 1
