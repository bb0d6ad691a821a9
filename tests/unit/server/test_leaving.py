"""Leaving: the subscriptions of a client that has left are dropped in slices, and it gets nothing meanwhile."""

from __future__ import annotations

from twisted.internet.task import Clock

from sbus.server.registry import LEAVE_AT_ONCE
from tests.support.buses import Bus, Peer


class Stepwise(Bus):
    """A bus that makes the delayed calls of its registry one by one."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.registry._clock = self.reactor = Clock()

    def step(self) -> None:
        """Make the next delayed call."""
        call = self.reactor.calls.pop(0)
        call.called = 1
        call.func(*call.args, **call.kw)


def leaver(bus: Bus, count: int) -> Peer:
    """Connect a client with so many patterns, one of which is ``k``."""
    peer = bus.connect(uid=7)
    for number in range(count - 1):
        bus.registry.subscribe(peer.protocol, b"%d/*" % number)
    bus.registry.subscribe(peer.protocol, b"k")
    return peer


def test_few_patterns_go_at_once():
    """A client with as many patterns as a slice leaves nothing behind when its connection is lost."""
    bus = Stepwise()
    peer = leaver(bus, LEAVE_AT_ONCE)
    peer.transport.hang_up()
    bus.settle()
    assert bus.registry._router.is_empty()
    assert not bus.reactor.calls


def test_many_patterns_go_in_slices():
    """Messages of others flow between two slices, the client gets and loses nothing, and its user pays."""
    bus = Stepwise()
    peer, other = leaver(bus, 5 * LEAVE_AT_ONCE + 1), bus.connect(uid=8)
    other.send(b"SUB k", b"MSG k\0before")
    user = peer.protocol.user
    peer.take(), other.take()
    peer.transport.hang_up()
    bus.settle()
    assert not peer.is_connected
    slices = 0
    while bus.reactor.calls:
        assert len(bus.registry.users) == 2
        other.send(b"MSG k\0meanwhile", b"MSG 7/x\0")
        assert other.take() == [b"MSG k\0meanwhile"]
        before = user.work_left
        bus.step()
        slices += 1
        assert user.patterns == max(0, 5 * LEAVE_AT_ONCE + 1 - slices * LEAVE_AT_ONCE)
        assert user.work_left < before
    assert slices == 6
    assert (user.match_cost.steps, user.pattern_bytes, len(bus.registry.users)) == (0, 0, 2)
    for _ in range(4):
        bus.settle()  # the user pays, and is forgotten then
    assert len(bus.registry.users) == 1
    assert bus.registry.counters.dropped == 0
    assert peer.take() == []
    other.send(b"UNSUB k")
    assert bus.registry._router.is_empty()


def test_a_client_that_half_closes_gets_what_was_queued():
    """What waits for a client that has ended its sending is sent to it, and nothing else, while its patterns go."""
    bus = Stepwise()
    peer, other = leaver(bus, 2 * LEAVE_AT_ONCE), bus.connect(uid=8)
    peer.stall()
    other.send(b"MSG k\0before")
    peer.transport.end()
    bus.settle()
    other.send(b"MSG k\0late")
    bus.step()
    other.send(b"MSG k\0later")
    peer.drain()
    assert peer.take() == [b"MSG k\0before"]
    bus.step()
    assert bus.registry._router.is_empty()
    assert not bus.registry.users[8].patterns


def test_a_subscriber_that_comes_back():
    """A receiver that subscribes again while its patterns are dropped has the new ones alone."""
    bus = Stepwise()
    peer = leaver(bus, 3 * LEAVE_AT_ONCE)
    bus.registry.leave(peer.protocol)
    bus.step()
    bus.registry.unsubscribe(peer.protocol, b"k")
    bus.registry.subscribe(peer.protocol, b"new")
    assert list(peer.protocol.patterns) == [b"new"]
    assert bus.registry.route(b"new") == (peer.protocol,)
    assert bus.registry.route(b"k") == ()
    bus.step()
    assert list(peer.protocol.patterns) == [b"new"]
