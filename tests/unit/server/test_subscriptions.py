"""Subscriptions: the limit on wildcards, and changes that happen as a whole or not at all."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.errors import CloseReason, ViolationReason
from sbus.routing.cache import LONGEST_KEY
from sbus.routing.cost import MatchCost
from sbus.server.bus.router import Router
from sbus.server.bus.subscriptions import Subscriptions
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, Peer

USER = 77_001


def cost_of(*patterns: bytes) -> int:
    """Return the steps of these patterns together."""
    cost = MatchCost()
    for pattern in patterns:
        cost.add(pattern)
    return cost.steps


def state(bus: Bus, peer: Peer) -> tuple[object, ...]:
    """Return all that a subscription changes, besides the index."""
    user = peer.protocol.user
    return (
        dict(peer.protocol.patterns),
        peer.protocol.pattern_bytes,
        user.patterns,
        user.match_cost.steps,
        user.secret_match_cost.steps,
        bus.registry.route(b"a/b").receivers,
    )


@pytest.mark.parametrize(("form", "rest"), [(b"%b", ""), (b"!/cred////%b", "secret_")])
def test_the_edge_of_the_limit_on_wildcards(form, rest):
    """The limit itself is allowed, one step more ends the client; open and secret patterns are counted apart."""
    patterns = [b"/".join(parts) for parts in itertools.product((b"a", b"*"), repeat=3)]
    steps = cost_of(*patterns)
    for limit, is_allowed in ((steps, True), (steps - 1, False)):
        bus = Bus(limits=Limits(max_match_steps=limit))
        peer = bus.connect(uid=USER)
        peer.send(*(b"SUB " + form % pattern for pattern in patterns))
        assert peer.is_connected is is_allowed
        assert peer.protocol.reason is (None if is_allowed else CloseReason.USER_LIMIT)
        if is_allowed:
            assert getattr(peer.protocol.user, f"{rest}match_cost").steps == limit
            assert peer.protocol.user.match_cost.steps + peer.protocol.user.secret_match_cost.steps == limit


def test_the_violation_has_a_reason_and_a_remedy():
    """The text says what to do; what was subscribed before stands until the client has left."""
    bus = Bus(limits=Limits(max_match_steps=cost_of(b"*")), ignore_violations=True)
    peer = bus.connect(uid=USER)
    peer.send(b"SUB *", b"SUB */*")
    assert list(peer.protocol.patterns) == [b"*"]
    assert bus.registry.counters.violations == 1
    assert "use fewer of them" in ViolationReason.TOO_MANY_MATCH_STEPS.value
    peer.send(b"MSG a\0", b"MSG a/b\0")
    assert peer.take() == [b"MSG a\0"]


def test_the_limit_is_that_of_a_user():
    """The clients of one user share it, other users have their own, and what leaves makes room."""
    bus = Bus(limits=Limits(max_match_steps=cost_of(b"*", b"a*")), ignore_violations=True)
    one, two, other = bus.connect(uid=USER), bus.connect(uid=USER), bus.connect(uid=USER + 1)
    one.send(b"SUB *", b"SUB a*", b"SUB *")
    two.send(b"SUB ab*", b"SUB *")
    other.send(b"SUB *", b"SUB ab*")
    assert [list(peer.protocol.patterns) for peer in (one, two, other)] == [[b"*", b"a*"], [b"*"], [b"*", b"ab*"]]
    one.send(b"UNSUB a*")
    two.send(b"SUB ab*")
    assert list(two.protocol.patterns) == [b"*", b"ab*"]
    two.transport.end()
    bus.settle()
    one.send(b"SUB abc*")
    assert list(one.protocol.patterns) == [b"*", b"abc*"]


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_exempt_users(uid):
    """Root and the server's own user may have any wildcards."""
    bus = Bus(limits=Limits(max_match_steps=1))
    peer = bus.connect(uid=uid)
    peer.send(*(b"SUB " + b"/".join(parts) for parts in itertools.product((b"a", b"*"), repeat=4)))
    assert peer.is_connected
    assert len(peer.protocol.patterns) == 16


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from((b"*", b"a*", b"*/b", b"a/*/c", b"x")))))
def test_costs_are_those_of_the_patterns_that_exist(steps):
    """However clients of a user subscribe, leave and are refused, exactly their patterns are counted."""
    limit = cost_of(b"*", b"*/b")
    bus = Bus(limits=Limits(max_match_steps=limit), ignore_violations=True)
    peers = [bus.connect(uid=USER) for _ in range(3)]
    for number, comes, pattern in steps:
        peers[number].send((b"SUB " if comes else b"UNSUB ") + pattern)
        patterns = [pattern for peer in peers for pattern in peer.protocol.patterns]
        assert peers[0].protocol.user.match_cost.steps == cost_of(*patterns) <= limit
        assert peers[0].protocol.user.patterns == len(patterns)


@pytest.mark.parametrize("pattern", [b"a/b", b"a/*"])
@pytest.mark.parametrize(("part", "step"), [(Router, "add"), (Subscriptions, "_add_match_cost")])
def test_a_subscription_that_fails_leaves_nothing_behind(monkeypatch, part, step, pattern):
    """If a part of the server fails, neither the client, its user nor the router has anything of the pattern."""
    bus = Bus()
    peer = bus.connect(uid=USER)
    before = state(bus, peer)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(part, step, fail)
        with pytest.raises(MemoryError):
            bus.registry.subscribe(peer.protocol, pattern)
    assert state(bus, peer) == before
    bus.registry.subscribe(peer.protocol, pattern)
    assert bus.registry.route(b"a/b").receivers == (peer.protocol,)
    bus.registry.unsubscribe(peer.protocol, pattern)
    assert state(bus, peer) == before


def test_long_keys_have_no_place_in_the_cache():
    """A key of more than 1,024 bytes is routed like any other, and leaves the cache as it is."""
    bus = Bus()
    peer = bus.connect(uid=USER)
    peer.send(b"SUB ")
    for length in (LONGEST_KEY, LONGEST_KEY + 1):
        packet = b"MSG " + b"k" * length + b"\0"
        peer.send(packet, packet)
        assert peer.take() == [packet, packet]
    assert list(map(len, bus.registry.routes)) == [LONGEST_KEY]
