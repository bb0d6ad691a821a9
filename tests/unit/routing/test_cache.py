"""The route cache agrees with the index, forgets little, stays within its bounds and keeps no client alive."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.keys import CURRENT, EARLY, Dialect, PeerCredentials
from sbus.routing.cache import RouteCache
from sbus.routing.route import Route
from sbus.routing.trie import PatternIndex
from tests.support.costs import calls
from tests.support.examples import examples
from tests.support.strategies import PEERS, dialects, keys, may_subscribe, patterns, patterns_near

ME = PeerCredentials(pid=30, uid=20, gid=10)


class Client:
    """A subscriber with credentials."""

    def __init__(self, peer: PeerCredentials = ME) -> None:
        self.peer = peer


class CachedIndex:
    """An index with a cache in front of it, used as the server does."""

    def __init__(self, dialect: Dialect = CURRENT, **bounds: int) -> None:
        self.dialect = dialect
        self.index: PatternIndex[Client] = PatternIndex(dialect)
        self.cache: RouteCache[Client] = RouteCache(dialect, **bounds)
        self.lookups = 0
        self.refreshed = 0

    def subscribe(self, client: Client, pattern: bytes) -> None:
        secret = self.dialect.check(pattern)
        self.index.subscribe(client, pattern, secret, client.peer)
        self.change(pattern, secret, client.peer)

    def unsubscribe(self, client: Client, pattern: bytes) -> None:
        secret = self.dialect.check(pattern)
        self.index.unsubscribe(client, pattern, secret, client.peer)
        self.change(pattern, secret, client.peer)

    def change(self, pattern, secret, peer) -> None:
        """Look up again what the change touches, if that are at most `refreshed` keys; forget more."""
        keys = self.cache.affected(pattern, secret, peer, self.refreshed) if self.refreshed else None
        if keys is None:
            self.cache.forget(pattern, secret, peer)
        for key in keys or ():
            if key in self.cache.routes:
                self.cache.replace(key, self.index.route(key, self.dialect.check(key)))

    def route(self, key: bytes) -> tuple[Client, ...]:
        return self.find(key).receivers

    def find(self, key: bytes) -> Route[Client]:
        route = self.cache.routes.get(key)
        if route is None:
            self.lookups += 1
            secret = self.dialect.check(key)
            route = self.cache.remember(key, secret, self.index.route(key, secret))
        return route

    def is_routed(self, client: Client) -> bool:
        return any(client in route.receivers for route in self.cache.routes.values())


@settings(max_examples=examples(300))
@given(st.data(), dialects, st.integers(1, 6), st.integers(1, 12), st.integers(0, 4))
def test_cache_says_what_the_index_says(data, dialect, max_keys, max_receivers, refreshed):
    """However subscriptions and routes interleave, a cached route is never stale, and the bounds hold."""
    bus = CachedIndex(dialect, max_keys=max_keys, max_receivers=max_receivers)
    bus.refreshed = refreshed
    clients = [Client(peer) for peer in (*PEERS, PEERS[0])]
    subscriptions = []
    some_keys = data.draw(st.lists(keys(dialect), min_size=2, max_size=6), "keys")
    for what in data.draw(st.lists(st.sampled_from("ssurrr"), max_size=25), "steps"):
        if what == "s":
            client = data.draw(st.sampled_from(clients))
            pattern = data.draw(st.one_of(patterns(dialect), patterns_near(some_keys, dialect)))
            if may_subscribe(dialect, client.peer, pattern):
                bus.subscribe(client, pattern)
                subscriptions.append((client, pattern))
        elif what == "u" and subscriptions:
            bus.unsubscribe(*subscriptions.pop(data.draw(st.integers(0, len(subscriptions) - 1))))
        else:
            key = data.draw(st.sampled_from(some_keys))
            assert Counter(bus.route(key)) == Counter(bus.index.route(key, dialect.check(key)))
        for key, route in bus.cache.routes.items():
            assert Counter(route.receivers) == Counter(bus.index.route(key, dialect.check(key)))
        check_books(bus.cache)
        assert len(bus.cache.routes) <= max_keys
        held = sum(len(route.receivers) for route in bus.cache.routes.values())
        assert held <= max_receivers or len(bus.cache.routes) == 1
    for key in some_keys:
        bus.route(key)
    assert len(set(bus.cache.routes.values())) == len({route.receivers for route in bus.cache.routes.values()})
    for client, pattern in subscriptions:
        bus.unsubscribe(client, pattern)
    assert all(route.receivers == () for route in bus.cache.routes.values())


def check_books(cache: RouteCache[Client]) -> None:
    """Beside the routes, the cache keeps exactly what it needs to forget them."""
    grouped = [key for seconds in cache._groups.values() for group in seconds.values() for key in group]
    assert sorted(grouped) == sorted(cache.routes)
    assert all(cache._groups.values())
    assert all(group for seconds in cache._groups.values() for group in seconds.values())
    assert cache._receivers == sum(len(route.receivers) for route in cache.routes.values())
    assert {route: route.uses for route in cache._shared.values()} == Counter(cache.routes.values())
    assert all(route.receivers is receivers for (_, receivers), route in cache._shared.items())


def warm(dialect: Dialect = CURRENT) -> CachedIndex:
    """A cache with some open and secret routes, and a subscriber to all open keys."""
    bus = CachedIndex(dialect)
    bus.subscribe(Client(), b"")
    for key in (b"a/b/c", b"a/b/d", b"a/b", b"a/x", b"a/", b"a", b"d/e/f", b"/", b"", b"*/b"):
        bus.route(key)
    if dialect.control:
        for key in (b"!/cred/10/20/30/", b"!/cred/10/20/30/x", b"!/cred/10/20/31/x", b"!/cred////x", b"!/cred/10///y"):
            bus.route(key)
    return bus


A_B = {b"a/b/c", b"a/b/d", b"a/b"}
A = A_B | {b"a/x", b"a/", b"a"}


@pytest.mark.parametrize(
    ("pattern", "forgotten"),
    [
        # Without a wildcard: that key, if it is there.
        (b"a/b/c", {b"a/b/c"}),
        (b"a/b/e", set()),
        (b"a/b", {b"a/b"}),
        (b"a", {b"a"}),
        (b"nobody/asked", set()),
        # With one: what begins with the same two segments, or one.
        (b"a/b/*", A_B),
        (b"a/b/c/", A_B),
        (b"a/b/*/d", A_B),
        (b"a/b/", A_B),
        (b"a/b*", A),
        (b"a/*", A),
        (b"a/", A),
        (b"a/*/c", A),
        (b"/", {b"/", b""}),
        (b"other/*", set()),
        (b"d/x/*", set()),
        # Secret patterns: what has the same IDs.
        (b"!/cred/10/20/30/x", {b"!/cred/10/20/30/x"}),
        (b"!/cred/10/20/30/", {b"!/cred/10/20/30/", b"!/cred/10/20/30/x"}),
        (b"!/cred/10/20/30/y*", {b"!/cred/10/20/30/", b"!/cred/10/20/30/x"}),
        (b"!/cred////x", {b"!/cred////x", b"!/cred/10/20/30/x"}),
        (b"!/cred//20//y", set()),
        (b"!/cred//20//", {b"!/cred/10/20/30/", b"!/cred/10/20/30/x"}),
    ],
)
def test_little_is_forgotten(pattern, forgotten):
    """A change of a subscription forgets the routes that it may change and near neighbours, but no others."""
    for action in ("subscribe", "unsubscribe"):
        bus, client = warm(), Client()
        if action == "unsubscribe":
            bus.subscribe(client, pattern)
            for key in warm().cache.routes:
                bus.route(key)
        before = set(bus.cache.routes)
        getattr(bus, action)(client, pattern)
        assert before - set(bus.cache.routes) == forgotten


@pytest.mark.parametrize("pattern", [b"", b"*", b"*/b", b"a*/b", b"*/", b"a*"])
def test_a_wildcard_in_front_forgets_everything(pattern):
    """A pattern with a wildcard in its first segment may change any route."""
    bus = warm()
    bus.subscribe(Client(), pattern)
    assert not bus.cache.routes


@pytest.mark.parametrize(
    "pattern", [b"mine/status", b"mine/status/", b"mine/*/x", b"!/cred/10/20/30/in", b"!/cred////"]
)
def test_churn_keeps_the_cache_warm_for_others(pattern):
    """A client that subscribes and unsubscribes all day causes no look-ups for other clients."""
    bus, client = CachedIndex(), Client()
    others = [b"their/%d" % i for i in range(100)] + [b"!/cred/11/21/31/x"]
    for key in others:
        bus.route(key)
    before = bus.lookups
    for _ in range(50):
        bus.subscribe(client, pattern)
        bus.unsubscribe(client, pattern)
        for key in others:
            bus.route(key)
    assert bus.lookups == before


def test_cost_of_forgetting():
    """The cost of forgetting does not depend on the number of routes that stay."""
    few, many = CachedIndex(), CachedIndex()
    for bus, count in ((few, 2), (many, 1000)):
        for i in range(count):
            for form in (b"%d", b"a/%d", b"%d/b", b"!/cred/10/20/%d/x", b"!/cred/10/20/40/%d"):
                bus.route(form % (10_000 + i))
    for pattern in (b"x", b"a/b", b"a/b/", b"x/", b"x/*", b"!/cred////x", b"!/cred////x*"):
        secret = CURRENT.check(pattern)
        assert calls(many.cache.forget, pattern, secret, ME) == calls(few.cache.forget, pattern, secret, ME)
    assert len(many.cache.routes) == 5000


def test_millions_of_keys_do_not_pile_up():
    """At its limit the cache is emptied, and the keys in use come back at one look-up each."""
    bus = CachedIndex(max_keys=10)
    client = Client()
    bus.subscribe(client, b"")
    for i in range(1000):
        assert bus.route(b"once/%d" % i) == (client,)
        bus.route(b"hot")
        assert len(bus.cache.routes) <= 10
    assert bus.lookups <= 1000 + 1000 / 8


@pytest.mark.parametrize(("count", "kept"), [(9, 9), (10, 10), (11, 1)])
def test_bound_on_keys(count, kept):
    """The cache holds as many keys as its limit; with one more it holds only that one."""
    bus = CachedIndex(max_keys=10)
    for i in range(count):
        bus.route(b"%d" % i)
    assert len(bus.cache.routes) == kept


@pytest.mark.parametrize(("bound", "kept"), [(9, 3), (8, 1)])
def test_bound_on_receivers(bound, kept):
    """The cache holds as many receivers as its limit, shared or not; with one more only that route's."""
    bus = CachedIndex(max_receivers=bound)
    for _ in range(3):
        bus.subscribe(Client(), b"a/")
    for i in range(3):
        assert len(bus.route(b"a/%d" % i)) == 3
    assert len(bus.cache.routes) == kept


def test_forgotten_routes_make_room():
    """Forgotten routes no longer count toward the limits."""
    bus = CachedIndex(max_keys=4, max_receivers=4)
    client = Client()
    bus.subscribe(client, b"a/")
    for _ in range(20):
        bus.route(b"a/1")
        bus.route(b"a/2")
        bus.route(b"b")
        assert set(bus.cache.routes) == {b"a/1", b"a/2", b"b"}
        bus.unsubscribe(client, b"a/")
        assert set(bus.cache.routes) == {b"b"}
        bus.subscribe(client, b"a/")


@pytest.mark.parametrize(("length", "cached"), [(1024, True), (1025, False)])
def test_very_long_keys_are_not_cached(length, cached):
    """A key of more than 1024 bytes is looked up each time, so keys cannot fill the memory."""
    bus, client = CachedIndex(), Client()
    bus.subscribe(client, b"")
    key = b"k" * length
    assert bus.route(key) == (client,)
    assert (key in bus.cache.routes) == cached
    bus.unsubscribe(client, b"")
    assert bus.route(key) == ()


def test_equal_routes_are_one_object():
    """Keys with the same receivers share one route, also after others were forgotten."""
    bus, client = CachedIndex(), Client()
    bus.subscribe(client, b"a/")
    first = bus.find(b"a/1")
    assert bus.find(b"a/2") is first
    bus.subscribe(Client(), b"a/1")
    assert bus.find(b"a/1") is not first
    assert bus.find(b"a/3") is first is bus.find(b"a/2")
    assert first.uses == 2


def test_a_key_and_then_its_neighbours():
    """A route that was forgotten alone can come back, and its neighbours can still be forgotten."""
    for again in (True, False):
        bus, client = CachedIndex(), Client()
        for key in (b"a/b/1", b"a/b/2"):
            bus.route(key)
        bus.subscribe(client, b"a/b/1")
        if again:
            assert bus.route(b"a/b/1") == (client,)
        bus.subscribe(client, b"a/b/")
        assert not bus.cache.routes
        assert bus.route(b"a/b/1") == bus.route(b"a/b/2") == (client,)


def test_keys_that_came_and_went_cost_nothing():
    """Keys that were forgotten one by one leave no bookkeeping behind."""
    few, many = CachedIndex(), CachedIndex()
    client = Client()
    for i in range(100):
        for form in (b"a/%d", b"a/%d/x", b"%d/a", b"!/cred/10/20/%d/x"):
            key = form % (100 + i)
            many.route(key)
            many.cache.forget(key, CURRENT.check(key), PeerCredentials(100 + i, 20, 10))
    for bus in (few, many):
        bus.route(b"stays")
    for pattern in (b"a/", b"a/*", b"!/cred////"):
        secret = CURRENT.check(pattern)
        assert calls(many.cache.forget, pattern, secret, ME) == calls(few.cache.forget, pattern, secret, ME)
    assert set(many.cache.routes) == {b"stays"}
    many.subscribe(client, b"a/")
    assert many.route(b"a/100") == (client,)


@pytest.mark.parametrize("pattern", [b"", b"a/", b"a/b", b"a/b/*", b"*/b", b"!/cred////", b"!/cred//20//x"])
def test_who_left_is_not_kept(pattern):
    """After a client's last subscription, neither the index nor the cache refers to it."""
    bus, stays = CachedIndex(), Client()
    bus.subscribe(stays, b"a/")
    bus.subscribe(stays, b"!/cred////x")
    client = Client()
    gone = weakref.ref(client)
    bus.subscribe(client, pattern)
    for key in (b"a/b", b"a/b/c", b"x/b", b"!/cred/10/20/30/x", b"!/cred////x", b"!/cred//20//x"):
        bus.route(key)
    assert bus.is_routed(client)
    bus.unsubscribe(client, pattern)
    del client
    gc.collect()
    assert gone() is None
    assert bus.route(b"a/b") == (stays,)


def test_nobody_is_kept_after_clear():
    """An emptied cache refers to no client."""
    bus, client = CachedIndex(), Client()
    bus.subscribe(client, b"a")
    bus.route(b"a")
    bus.cache.clear()
    bus.index.unsubscribe(client, b"a", None, ME)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


def test_early_dialect_groups_by_its_separator():
    """In the early dialect the first segments end at a '.'."""
    bus = CachedIndex(EARLY)
    for key in (b"a.b", b"a.c", b"b.a", b"a/b"):
        bus.route(key)
    bus.subscribe(Client(), b"a.")
    assert set(bus.cache.routes) == {b"b.a", b"a/b"}


def test_few_routes_are_looked_up_again_at_once():
    """Subscribing to everything and leaving keeps the routes of a few keys in the cache, and right."""
    bus = warm()
    bus.refreshed = 20
    keys = set(bus.cache.routes)
    client = Client()
    for pattern in (b"", b"*", b"*/", b"a*/*", b"a/b/*", b"!/cred////*", b"!/cred////x"):
        bus.subscribe(client, pattern)
        assert set(bus.cache.routes) == keys
        bus.unsubscribe(client, pattern)
        assert set(bus.cache.routes) == keys
    assert not bus.is_routed(client)
    check_books(bus.cache)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        (b"*", {b"a", b"", b"b"}),
        (b"a*", {b"a"}),
        (b"*/b", {b"a/b", b"a/b/c", b"b/b", b"a/", b"b/x", b"a", b"b", b""}),
        (b"*/b/", {b"a/b", b"a/b/c", b"b/b"}),
        (b"b*/b/c", {b"b/b"}),
    ],
)
def test_affected_keys_of_a_wildcard_in_front(pattern, keys):
    """A wildcard in the first segment touches keys with such a first segment; ``*`` touches keys of one segment."""
    bus = CachedIndex()
    for key in (b"a", b"", b"b", b"a/b", b"a/b/c", b"b/b", b"a/", b"b/x"):
        bus.route(key)
    assert set(bus.cache.affected(pattern, None, ME, 100) or ()) == keys
    assert bus.cache.affected(pattern, None, ME, 0) is None
