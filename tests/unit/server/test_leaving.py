"""Leaving: the subscriptions of a client that has left are dropped in turns, and it gets nothing meanwhile."""

from __future__ import annotations

from twisted.internet.task import Clock

from sbus.errors import CloseReason
from sbus.protocol.keys import PeerCredentials
from sbus.server.core.prices import SUBSCRIPTION
from sbus.server.core.turns import TURN_BUDGET
from tests.support.buses import Bus, Peer


class Stepwise(Bus):
    """A bus whose turns a test takes one by one."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.registry.turns._reactor = self.reactor = Clock()

    def step(self) -> None:
        """Take a turn."""
        call = self.reactor.calls.pop(0)
        call.called = 1
        call.func(*call.args, **call.kw)

    def look_ups(self) -> list[bytes]:
        """Return a list to which each key is added that is looked up from now on."""
        index, keys = self.registry._router._index, []
        look_up = index.look_up

        def counted(key, secret):
            keys.append(key)
            return look_up(key, secret)

        setattr(index, "look_up", counted)  # noqa: B010
        return keys


def leaver(bus: Bus, count: int, uid: int = 7) -> Peer:
    """Connect a client with `count` patterns, one of which is ``k``."""
    peer = bus.connect(uid=uid)
    for number in range(count - 1):
        bus.registry.subscribe(peer.protocol, b"%d/*" % number)
    bus.registry.subscribe(peer.protocol, b"k")
    return peer


def test_few_patterns_go_at_once():
    """A client whose user's balance pays for all leaves nothing behind when its connection is lost."""
    bus = Stepwise()
    peer = leaver(bus, TURN_BUDGET // SUBSCRIPTION - 10)
    peer.transport.hang_up()
    bus.settle()
    assert bus.registry._router.is_empty()
    assert not bus.reactor.calls


def test_many_patterns_go_in_turns():
    """Messages of others flow between two turns, the client gets and loses nothing, and its user pays."""
    bus = Stepwise()
    peer, other = leaver(bus, 640), bus.connect(uid=8)
    other.send(b"SUB k", b"MSG k\0before")
    user = peer.protocol.user
    peer.take(), other.take()
    peer.transport.hang_up()
    bus.settle()
    assert not peer.is_connected
    assert 0 < user.patterns < 640
    taken = 0
    while user.patterns:
        assert len(bus.registry.users) == 2
        other.send(b"MSG k\0meanwhile", b"MSG 7/x\0")
        assert other.take() == [b"MSG k\0meanwhile"]
        before = user.patterns
        bus.step()
        assert before - TURN_BUDGET // SUBSCRIPTION - 1 <= user.patterns
        taken += 1
    assert taken > 1
    assert (user.match_cost.steps, user.pattern_bytes) == (0, 0)
    while bus.reactor.calls:
        bus.step()  # the user pays, and is forgotten then
    assert len(bus.registry.users) == 1
    assert bus.registry.counters.dropped == 0
    assert peer.take() == []
    other.send(b"UNSUB k")
    assert bus.registry._router.is_empty()


def test_routes_to_a_client_that_leaves_stay_in_the_cache():
    """A client that leaves with many patterns makes others look nothing up again."""
    bus = Stepwise()
    peer, other = leaver(bus, 640), bus.connect(uid=8)
    other.send(b"SUB other", b"MSG k\0", b"MSG other\0")
    keys = bus.look_ups()
    peer.transport.hang_up()
    bus.settle()
    other.send(b"MSG k\0", b"MSG other\0")
    assert keys == []
    assert bus.registry.counters.dropped == 0


def test_a_client_that_half_closes_gets_what_was_queued():
    """What waits for a client that has ended its sending is sent to it, and nothing else, while its patterns go."""
    bus = Stepwise()
    peer, other = leaver(bus, 640), bus.connect(uid=8)
    peer.stall()
    other.send(b"MSG k\0before")
    peer.transport.end()
    bus.settle()
    assert peer.protocol.patterns
    other.send(b"MSG k\0late")
    bus.step()
    other.send(b"MSG k\0later")
    peer.drain()
    assert peer.take() == [b"MSG k\0before"]
    while bus.reactor.calls:
        bus.step()
    assert bus.registry._router.is_empty()
    assert [user.uid for user in bus.registry.users.all()] == [8]
    assert bus.registry.users.budget.bytes == 0


def test_users_leave_side_by_side():
    """A user with few patterns does not wait until one with many has left."""
    bus = Stepwise()
    many, few = leaver(bus, 3_000, uid=7), leaver(bus, 20, uid=8)
    few.protocol.user.work_left = 0
    many.transport.hang_up()
    few.transport.hang_up()
    bus.settle()
    while few.protocol.patterns:
        bus.step()
    assert many.protocol.user.patterns > 2_000


def test_stopping_looks_nothing_up():
    """When the server stops, clients that leave do not have the routes of those that are still there looked up."""
    bus = Stepwise()
    peers = [leaver(bus, 1) for _ in range(60)]
    for peer in peers:
        bus.registry.subscribe(peer.protocol, b"")
    bus.connect(uid=8).send(*[b"MSG key/%d\0" % number for number in range(100)])
    keys = bus.look_ups()
    stopped = bus.registry.stopService()
    bus.settle()
    assert not bus.registry.clients
    assert keys == []
    assert stopped.called
    assert bus.registry._router.is_empty()


def test_many_patterns_do_not_delay_the_end():
    """A server that stops drops what is left of many patterns without turns, when all clients are gone."""
    bus = Stepwise()
    for _ in range(4):
        leaver(bus, 1_000)
    bus.registry._router._index.subscribe(own := Local(bus), b"own", None, own.peer)
    stopped = bus.registry.stopService()
    bus.settle()
    assert stopped.called
    assert bus.registry.route(b"own") == (own,)
    bus.registry._router._index.unsubscribe(own, b"own", None, own.peer)
    assert bus.registry._router.is_empty()
    bus.registry.startService()
    peer = bus.connect(uid=9)
    peer.send(b"SUB k", b"MSG k\0")
    assert peer.take() == [b"MSG k\0"]
    assert bus.registry.routes[b"k"] == (peer.protocol,)


class Local:
    """A receiver without a queue."""

    queue = None
    transport = None
    can_block = False

    def __init__(self, bus: Bus) -> None:
        self.peer = PeerCredentials(1, 7, 7)
        self.user = bus.registry.connect_user(self.peer)
        self.patterns: dict = {}
        self.pattern_bytes = self.pattern_memory = self.lost = 0
        self.got: list[bytes] = []

    def enqueue(self, packets, may_block) -> None:
        self.got += packets

    def flush(self) -> None:
        """Nothing is sent."""

    def close(self, reason) -> None:
        """Nothing is connected."""


def test_a_subscriber_of_the_program_gets_nothing_while_it_leaves():
    """A receiver without a queue is skipped from the moment at which it leaves."""
    bus = Stepwise()
    local, other = Local(bus), bus.connect(uid=8)
    for number in range(1_000):
        bus.registry.subscribe(local, b"%d/*" % number)
    bus.registry.subscribe(local, b"k")
    other.send(b"MSG k\0before")
    bus.registry.leave(local)
    other.send(b"MSG k\0late")
    assert local.got == [b"MSG k\0before"]
    while bus.reactor.calls:
        bus.step()
    assert bus.registry._router.is_empty()


def test_a_subscriber_that_comes_back():
    """A receiver that subscribes again while its patterns are dropped has the new ones alone."""
    bus = Stepwise()
    peer = leaver(bus, 640)
    bus.registry.leave(peer.protocol)
    bus.step()
    bus.registry.unsubscribe(peer.protocol, b"k")
    bus.registry.subscribe(peer.protocol, b"new")
    assert list(peer.protocol.patterns) == [b"new"]
    assert bus.registry.route(b"new") == (peer.protocol,)
    assert bus.registry.route(b"k") == ()
    bus.step()
    assert list(peer.protocol.patterns) == [b"new"]


def test_clients_are_disconnected_in_slices(monkeypatch):
    """When the server stops, the closing of many clients begins in slices, and no packet of any is handled."""
    monkeypatch.setattr("sbus.server.bus.registry._DISCONNECTED_AT_ONCE", 2)
    bus = Stepwise()
    peers = [bus.connect(uid=7) for _ in range(5)]
    bus.registry._clock = reactor = Clock()
    stopped = bus.registry.stopService()
    for left in (3, 1, 0):
        bus.settle()
        for peer in peers:
            peer.send(b"MSG k\0")
        assert len(bus.registry.clients) == left
        assert stopped.called is (not left)
        for call in reactor.calls[:1]:
            function, args = call.func, call.args
            call.cancel()
            function(*args)
    assert bus.registry.counters.published == 0
    assert {client.reason for client in bus.registry.closed} == {CloseReason.SERVER_STOPPED}
