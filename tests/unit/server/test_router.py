"""The router: index and cache in step, and the subscriptions that it reports."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sbus.protocol.keys import CURRENT, matches
from sbus.server.bus.router import Router
from tests.support.strategies import PEERS, keys, may_subscribe, patterns


class Named:
    """A receiver that is nothing but credentials."""

    def __init__(self, number: int) -> None:
        self.peer = PEERS[number]


class Listener:
    """Keeps what the router reports."""

    def __init__(self, events: list[tuple[str, Any, bytes]]) -> None:
        self.events = events

    def added(self, receiver: Any, pattern: bytes) -> None:
        self.events.append(("added", receiver, pattern))

    def removed(self, receiver: Any, pattern: bytes) -> None:
        self.events.append(("removed", receiver, pattern))


@given(
    st.lists(patterns(), min_size=1, max_size=4, unique=True),
    st.lists(keys(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, len(PEERS) - 1), st.integers(0, 3)), max_size=20),
)
def test_routes_and_events(some_patterns, some_keys, steps):
    """After any subscriptions a key reaches those that match it, and each change of an open pattern is reported."""
    events: list[tuple[str, Any, bytes]] = []
    router = Router(CURRENT)
    router.listeners = (Listener(events),)
    receivers: list[Any] = [Named(number) for number in range(len(PEERS))]
    subscribed: dict[bytes, set[Any]] = {pattern: set() for pattern in some_patterns}
    for number, which in steps:
        one, pattern = receivers[number], some_patterns[which % len(some_patterns)]
        if not may_subscribe(CURRENT, one.peer, pattern):
            continue
        events.clear()
        secret = CURRENT.check(pattern)
        if one in subscribed[pattern]:
            router.remove(one, pattern, secret)
            subscribed[pattern].remove(one)
            assert events == ([] if secret else [("removed", one, pattern)])
        else:
            router.add(one, pattern, secret)
            assert events == ([] if secret else [("added", one, pattern)])
            subscribed[pattern].add(one)
        for key in some_keys:
            expected = {
                each
                for wanted, those in subscribed.items()
                for each in those
                if matches(wanted, key, CURRENT, each.peer)
            }
            found = router.route(key)
            assert set(found.receivers) == expected
            assert len(found.receivers) == len(expected)
            assert router.routes[key] is found
            if not CURRENT.check(key):
                assert set().union(*router.open_tables(key)[0]) == expected
    assert router.is_empty() == (not any(subscribed.values()))


def test_a_router_without_listeners():
    """A router reports to nobody until it is given somebody to report to."""
    router = Router(CURRENT)
    one: Any = Named(0)
    router.add(one, b"a", None)
    assert router.route(b"a").receivers == (one,)
    router.remove(one, b"a", None)
    assert router.route(b"a").receivers == ()
    assert router.is_empty()
