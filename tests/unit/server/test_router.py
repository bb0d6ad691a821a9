"""The router: index and cache in step, and the subscriptions that it reports."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.fair import Lines, Scheduler
from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import CURRENT, matches
from sbus.routing.cache import LONGEST_KEY
from sbus.server.bus.router import _BLAMED, _KEPT, _REFRESHED_RECEIVERS, Router
from tests.support.strategies import PEERS, keys, may_subscribe, patterns


class Named:
    """A receiver that is nothing but credentials."""

    queue: Any = None

    def __init__(self, number: int) -> None:
        self.peer = PEERS[number]


class Member(Named):
    """A receiver of a user."""

    def __init__(self, number: int, lines: Lines) -> None:
        super().__init__(number)
        self.user = self.queue = self
        self.lines = lines


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
    router = Router(CURRENT, Scheduler(Clock()))
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
    assert router.index.is_empty() == (not any(subscribed.values()))


def test_a_router_without_listeners():
    """A router reports to nobody until it is given somebody to report to."""
    router = Router(CURRENT, Scheduler(Clock()))
    one: Any = Named(0)
    router.add(one, b"a", None)
    assert router.route(b"a").receivers == (one,)
    router.remove(one, b"a", None)
    assert router.route(b"a").receivers == ()
    assert router.index.is_empty()


def test_who_changes_routes_pays_for_them():
    """The look-up of a route that was too dear to keep right is charged to the user who has changed it, once."""
    scheduler = Scheduler(Clock(), itertools.count(1_000, 1_000).__next__)
    router = Router(CURRENT, scheduler)
    changer, publisher = Lines(), Lines()
    members: list[Any] = [Member(0, changer) for _ in range(_REFRESHED_RECEIVERS + 2)]
    for member in members:
        router.add(member, b"", None)
    scheduler.is_busy = True
    before = router.route(b"k")
    assert changer.deficit == publisher.deficit == QUANTUM
    router.remove(members[0], b"", None)
    scheduler.begin(publisher)
    found = router.route(b"k")
    scheduler.end(publisher)
    assert len(found.receivers) == len(before.receivers) - 1
    assert found.has_groups
    assert (QUANTUM - changer.deficit, QUANTUM - publisher.deficit) == (1_000 + _KEPT, 2_000)
    router.routes.pop(b"k")
    router.route(b"k")
    assert changer.deficit == QUANTUM - 1_000 - _KEPT
    scheduler.is_busy = False
    router.remove(members[1], b"", None)
    router.route(b"k")
    assert changer.deficit == QUANTUM - 1_000 - _KEPT  # nobody else is active: nobody is charged


def test_who_changed_a_route_pays_for_no_room_that_it_does_not_take():
    """While no route is kept, the publisher gets nothing back for room for which it has not paid."""
    scheduler, changer, publisher = Scheduler(Clock(), lambda: 0), Lines(), Lines()
    router = Router(CURRENT, scheduler)
    scheduler.is_busy = True
    router._blame([b"k"], changer)
    router.stop_caching()
    scheduler.begin(publisher)
    router.route(b"k")
    scheduler.end(publisher)
    assert (changer.deficit, publisher.deficit) == (QUANTUM, QUANTUM)


class Payments(Scheduler):
    """Notes what those for whom something is done pay in addition."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.paid: list[int] = []

    def add(self, took: int) -> None:
        self.paid.append(took)


def test_routes_that_are_forgotten_together_are_paid_for():
    """Who gives keys another meaning pays for each route that is looked up again because of it."""
    scheduler = Payments()
    router, paid = Router(CURRENT, scheduler), scheduler.paid
    for number in range(3):
        router.route(b"%d" % number)
    paid.clear()
    router.forget_routes()
    assert paid == [3 * _KEPT]
    assert not router.routes


def test_many_keys_that_are_looked_up_again():
    """Past a number of keys nobody but their publishers pays; a receiver of the program never does."""
    scheduler = Scheduler(Clock(), itertools.count(1_000, 1_000).__next__)
    router = Router(CURRENT, scheduler)
    changer = Lines()
    members: list[Any] = [Member(0, changer) for _ in range(_REFRESHED_RECEIVERS // 100)]
    inside: Any = Named(1)
    for member in (*members, inside):
        router.add(member, b"", None)
    scheduler.is_busy = True
    some = [b"%d" % number for number in range(200)]
    for key in some:
        router.route(key)
    router.remove(inside, b"", None)  # it has no user that could pay
    router.route(some[0])
    assert changer.deficit == QUANTUM
    for first in range(0, 7 * len(some), len(some)):
        for number in range(first, first + len(some)):
            router.route(b"%d" % number)
        router.remove(members.pop(), b"", None)
    charged = 0
    for number in range(7 * len(some)):
        before = changer.deficit
        router.route(b"%d" % number)
        charged += changer.deficit < before
    assert 0 < charged <= _BLAMED


def test_routes_without_room_are_paid_for():
    """Each new route pays for the room that it takes, so the one for which there is none pays no more than others."""
    scheduler = Payments()
    router, paid = Router(CURRENT, scheduler, cache_bytes=4_000), scheduler.paid
    receivers: list[Any] = [Named(number % len(PEERS)) for number in range(40)]
    most = 0
    for number in range(60):
        router.route(b"%d" % number)
        most = max(most, len(router.routes))
    assert paid == [_KEPT] * 60
    assert most < 60  # there was no room for all
    router.route(b"59")
    assert len(paid) == 60
    router.route(b"k" * (LONGEST_KEY + 1))
    assert len(paid) == 60  # it takes no room
    for at, receiver in enumerate(receivers):
        router.add(receiver, b"", None)
        for number in range(30):
            assert router.route(b"%d" % number).receivers == tuple(receivers[: at + 1])


def test_without_caching():
    """A server that stops keeps no route."""
    router = Router(CURRENT, Scheduler(Clock()))
    router.route(b"k")
    router.stop_caching()
    router.route(b"k")
    assert not router.routes
    router.start_caching()
    router.route(b"k")
    assert list(router.routes) == [b"k"]


def test_muted_receivers_are_not_found():
    """A receiver that leaves is found no more; nobody is told of secret subscriptions."""
    events: list[tuple[str, Any, bytes]] = []
    router = Router(CURRENT, Scheduler(Clock()))
    router.listeners = (Listener(events),)
    one: Any = Named(0)
    secret = b"!/cred///%d/s" % one.peer.pid
    for pattern in (b"k", secret):
        router.add(one, pattern, CURRENT.check(pattern))
    chore: Any = None
    router.muted[one] = chore
    assert router.route(b"k").receivers == router.look_up(b"k") == ()
    del router.muted[one]
    assert router.look_up(b"k") == (one,)
    for pattern in (b"k", secret):
        router.remove(one, pattern, CURRENT.check(pattern))
    assert events == [("added", one, b"k"), ("removed", one, b"k")]
