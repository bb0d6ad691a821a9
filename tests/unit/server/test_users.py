"""Users: one for each UID with a connection, with all that its connections hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.errors import CloseReason
from sbus.server.core.limits import Limits
from sbus.server.core.users import Users
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

TICK = 100_000
"""Nanoseconds between two looks at the clock, where the test turns the bus."""


def test_a_user_is_one_for_all_its_connections():
    """Connections of one UID share a user; the last one takes it along."""
    users = Users(100)
    first, second, other = users.connect(1), users.connect(1), users.connect(2)
    assert first is second is users[1]
    assert (first.uid, first.connections, other.connections, len(users)) == (1, 2, 1, 2)
    users.disconnect(first)
    assert users[1].connections == 1
    for user in (second, other):
        users.disconnect(user)
        users.forget(user)
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
    assert user.patterns == 3
    one.send(b"UNSUB a")
    assert user.patterns == 3
    one.send(b"UNSUB a", b"UNSUB a")
    assert user.patterns == 2
    one.transport.end()
    bus.settle()
    assert (user.patterns, user.connections) == (1, 1)
    two.transport.end()
    bus.settle()
    assert (user.patterns, len(bus.registry.users)) == (0, 0)


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


def test_a_user_is_forgotten_by_identity():
    """To forget a user that is gone does not take the next one of its UID along."""
    users = Users(100)
    gone = users.connect(1)
    users.disconnect(gone)
    users.forget(gone)
    back = users.connect(1)
    assert back is not gone
    users.forget(gone)
    assert users[1] is back


def test_a_debt_outlives_the_connection():
    """A user that reconnects finds its debt, and one that does not is forgotten when the debt is paid."""
    bus = HandTurnedBus(TICK)
    debtor, other = bus.connect(uid=7), bus.connect(uid=8)
    user = debtor.protocol.user
    bus.use_up(debtor, 5_000)
    for _ in range(3):
        debtor.transport.loseConnection()
        bus.settle()
        debtor = bus.connect(uid=7)
        assert debtor.protocol.user is user
        assert user.lines.deficit <= -5_000_000
    debtor.transport.loseConnection()
    bus.settle()
    turns = 0
    while user.lines.deficit <= 0:
        assert bus.registry.users[7] is user
        other.send(*[b"MSG nobody\0"] * 9)
        bus.turn()
        turns += 1
    assert 4 < turns < 40
    bus.finish()
    assert [each.uid for each in bus.registry.users.all()] == [8]
    assert bus.connect(uid=7).protocol.user is not user


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_last_step_counts(in_turn):
    """What it takes to drop a user's last patterns is its debt, too: it is not forgotten before that is paid."""
    bus = HandTurnedBus(TICK)
    client, other = bus.connect(uid=7), bus.connect(uid=8)
    client.send(b"SUB k")
    bus.finish()
    user = client.protocol.user
    bus.use_up(other, 0)
    user.lines.deficit = 0 if in_turn else 1
    client.transport.abortConnection()
    bus.settle()
    if in_turn:
        bus.tick = 4 * TICK  # the step takes more than a turn
        bus.turn()
        bus.tick = TICK
    assert not user.patterns
    assert user.lines.deficit <= 0
    assert bus.registry.users[7] is user
    bus.finish()
    assert [each.uid for each in bus.registry.users.all()] == [8]


def test_connections_count_whatever_debts_were_paid():
    """A user that comes back while its debt is paid keeps its connections: they count for its limit."""
    bus = HandTurnedBus(TICK, limits=Limits(user_clients=2))
    debtor = bus.connect(uid=7)
    bus.use_up(debtor, 5_000)
    debtor.transport.loseConnection()
    bus.settle()
    clients = [bus.connect(uid=7) for _ in range(2)]
    bus.finish()
    assert bus.registry.users.connections_of(7) == 2
    refused = bus.connect(uid=7)
    assert refused.protocol.reason is CloseReason.TOO_MANY_USER_CLIENTS
    for client in clients:
        client.transport.loseConnection()
    bus.settle()
    bus.finish()
    assert len(bus.registry.users) == 0


class World(RuleBasedStateMachine):
    """Clients of two users come and go, with patterns, watched keys and debts."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = HandTurnedBus(TICK)
        self.peers: list[Peer] = []

    @rule(uid=st.integers(1, 2))
    def connect(self, uid):
        self.peers.append(self.bus.connect(uid=uid))

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), count=st.integers(1, 40))
    def send(self, who, count):
        peer = self.peers[who % len(self.peers)]
        peer.send(*(verb + b"%d" % n for n in range(count) for verb in (b"SUB ", b"CMSG interest/on\0")), b"MSG 1\0")

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), work=st.integers(0, 3_000))
    def use_up(self, who, work):
        self.bus.use_up(self.peers[who % len(self.peers)], work)

    @precondition(lambda self: self.peers)
    @rule(who=st.integers(0, 99), how=st.sampled_from(["loseConnection", "abortConnection", "hang_up", "end"]))
    def leave(self, who, how):
        getattr(self.peers[who % len(self.peers)].transport, how)()
        self.bus.settle()

    @rule()
    def turn(self):
        self.bus.turn()

    @rule()
    def finish(self):
        self.bus.finish()
        self.drop_those_that_left()
        assert len(self.bus.registry.users) == len({peer.protocol.user for peer in self.peers})

    def drop_those_that_left(self):
        self.peers = [peer for peer in self.peers if peer.is_connected]

    @invariant()
    def users_are_those_of_their_clients(self):
        self.drop_those_that_left()
        users = self.bus.registry.users
        for peer in self.peers:
            assert users[peer.protocol.user.uid] is peer.protocol.user
        for uid in (1, 2):
            mine = [peer for peer in self.peers if peer.protocol.peer.uid == uid]
            assert users.connections_of(uid) == len(mine)
            if mine:
                assert set(mine[0].protocol.user.clients) == {peer.protocol for peer in mine}

    def teardown(self):
        for peer in self.peers:
            peer.transport.abortConnection()
        self.bus.settle()
        self.bus.finish()
        self.bus.turn(1.0)
        assert len(self.bus.registry.users) == 0
        assert self.bus.registry.users.budget.memory.held == 0


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
