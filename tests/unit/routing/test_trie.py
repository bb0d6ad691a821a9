"""The trie finds exactly the subscribers that the reference finds, at a cost that depends on the key's depth alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.keys import CURRENT, EARLY, Dialect, PeerCredentials, matches
from sbus.routing.trie import PatternIndex
from tests.support.costs import calls
from tests.support.examples import examples
from tests.support.strategies import PEERS, dialects, keys, may_subscribe, patterns, patterns_near

ME = PeerCredentials(pid=30, uid=20, gid=10)


class Client:
    """A subscriber with credentials."""

    def __init__(self, peer: PeerCredentials = ME) -> None:
        self.peer = peer

    def __repr__(self) -> str:
        return f"<Client {id(self):x} {self.peer}>"


class Bus:
    """An index, and a plain list of subscriptions as its reference."""

    def __init__(self, dialect: Dialect = CURRENT) -> None:
        self.dialect = dialect
        self.index: PatternIndex[Client] = PatternIndex(dialect)
        self.subscriptions: list[tuple[Client, bytes]] = []

    def subscribe(self, client: Client, pattern: bytes) -> None:
        self.index.subscribe(client, pattern, self.dialect.check(pattern), client.peer)
        self.subscriptions.append((client, pattern))

    def unsubscribe(self, client: Client, pattern: bytes) -> None:
        self.index.unsubscribe(client, pattern, self.dialect.check(pattern), client.peer)
        self.subscriptions.remove((client, pattern))

    def route(self, key: bytes) -> tuple[Client, ...]:
        return self.index.route(key, self.dialect.check(key))

    def check(self, key: bytes) -> None:
        wanted = {c for c, pattern in self.subscriptions if matches(pattern, key, self.dialect, c.peer)}
        assert Counter(self.route(key)) == Counter(wanted)


@settings(max_examples=examples(300))
@given(st.data(), dialects)
def test_index_finds_what_the_matcher_finds(data, dialect):
    """In any sequence of changes, each key finds all matching subscribers once; in the end nothing is left."""
    bus = Bus(dialect)
    clients = [Client(peer) for peer in (*PEERS, PEERS[0])]
    some_keys = data.draw(st.lists(keys(dialect), min_size=1, max_size=6), "keys")
    for what in data.draw(st.lists(st.sampled_from("sssru"), max_size=25), "steps"):
        if what == "s":
            client = data.draw(st.sampled_from(clients))
            pattern = data.draw(st.one_of(patterns(dialect), patterns_near(some_keys, dialect)))
            if may_subscribe(dialect, client.peer, pattern):
                bus.subscribe(client, pattern)
        elif what == "u" and bus.subscriptions:
            bus.unsubscribe(*data.draw(st.sampled_from(bus.subscriptions)))
        else:
            bus.check(data.draw(st.sampled_from(some_keys)))
        assert bus.index.is_empty() == (not bus.subscriptions)
    for key in some_keys:
        bus.check(key)
    for client, pattern in data.draw(st.permutations(bus.subscriptions), "the end"):
        bus.unsubscribe(client, pattern)
        bus.check(some_keys[0])
    assert bus.index.is_empty()
    assert [bus.route(key) for key in some_keys] == [()] * len(some_keys)


def test_one_copy_for_many_patterns():
    """A subscriber is found once, however many of its patterns match, as long as one does (rule 6)."""
    bus, client = Bus(), Client()
    several = (b"", b"*/", b"a/", b"a/*", b"a/b*", b"a/b**", b"a/b", b"*/*", b"a*/b")
    for pattern in several:
        bus.subscribe(client, pattern)
    for pattern in several:
        assert bus.route(b"a/b") == (client,)
        bus.unsubscribe(client, pattern)
    assert bus.route(b"a/b") == ()
    assert bus.index.is_empty()


@pytest.mark.parametrize(
    "pattern", [b"", b"a", b"a/", b"a/*", b"*b*c", b"!/cred////", b"!/cred////x", b"!/cred////x*y"]
)
def test_subscriptions_are_counted(pattern):
    """A subscription made twice ends when it was undone twice; a third time is an error."""
    bus, client = Bus(), Client()
    secret = CURRENT.check(pattern)
    bus.subscribe(client, pattern)
    bus.subscribe(client, pattern)
    assert not bus.index.is_empty()
    bus.unsubscribe(client, pattern)
    assert not bus.index.is_empty()
    bus.unsubscribe(client, pattern)
    assert bus.index.is_empty()
    with pytest.raises(KeyError):
        bus.index.unsubscribe(client, pattern, secret, client.peer)


@pytest.mark.parametrize("prefix", [b"", b"!/cred/10/20/30/", b"!/cred////"])
def test_patterns_that_match_nothing_come_and_go(prefix):
    """Patterns with bytes behind a ``*`` match nothing and do not affect each other."""
    bus, client = Bus(), Client()
    bus.subscribe(client, prefix + b"a*b")
    bus.subscribe(client, prefix + b"c*d")
    bus.subscribe(client, prefix + b"e")
    for pattern in (b"a*b", b"e", b"c*d"):
        bus.check(prefix + b"e")
        bus.unsubscribe(client, prefix + pattern)
    assert bus.index.is_empty()


@pytest.mark.parametrize(
    ("subscribed", "unsubscribed"),
    [
        (b"a", b"b"),
        (b"a", b"a/"),
        (b"a/", b"a"),
        (b"a/b", b"a"),
        (b"a", b"a/b"),
        (b"a*", b"a"),
        (b"a", b"a*"),
        (b"a", b""),
        (b"", b"*"),
        (b"!/cred////x", b"!/cred////y"),
        (b"!/cred/10/20/30/x", b"!/cred////x"),
    ],
)
def test_unknown_unsubscription(subscribed, unsubscribed):
    """Undoing a subscription that does not exist is an error and changes nothing."""
    bus, client = Bus(), Client()
    bus.subscribe(client, subscribed)
    with pytest.raises(KeyError):
        bus.index.unsubscribe(client, unsubscribed, CURRENT.check(unsubscribed), client.peer)
    with pytest.raises(KeyError):
        bus.index.unsubscribe(Client(), subscribed, CURRENT.check(subscribed), client.peer)
    bus.check(subscribed)
    bus.unsubscribe(client, subscribed)
    assert bus.index.is_empty()


def test_open_patterns_are_apart_from_secret_ones():
    """Of two subscribers that differ in one ID, each receives its own secret keys; open patterns receive none."""
    bus = Bus()
    mine, other, everyone = Client(ME), Client(ME._replace(pid=31)), Client(ME)
    for client in (mine, other):
        bus.subscribe(client, b"!/cred////x")
    for pattern in (b"", b"*/", b"*/*/*/*/*/*"):
        bus.subscribe(everyone, pattern)
    assert bus.route(b"!/cred/10/20/30/x") == (mine,)
    assert bus.route(b"!/cred/10/20/31/x") == (other,)
    assert set(bus.route(b"!/cred/10/20//x")) == {mine, other}
    assert bus.route(b"!/cred/10/21//x") == ()
    assert bus.route(b"a/cred/10/20/30/x") == (everyone,)


def test_early_dialect_has_no_secrets():
    """In the early dialect there are no secret keys, and ``.`` separates segments."""
    bus, client = Bus(EARLY), Client()
    bus.subscribe(client, b"a.")
    assert bus.route(b"a.b/c") == (client,)
    assert bus.route(b"a/b") == ()


def filled(patterns_of_others: int) -> Bus:
    bus = Bus()
    for i in range(patterns_of_others):
        # Beside, above and below the key that is looked up; literal and with wildcards.
        for form in (b"%d", b"%d*", b"*/%d", b"a/%d", b"a/%d*", b"a/b%d*", b"a/b/%d/", b"!/cred////%d", b"a/*/%d*/c"):
            client = Client(ME)
            pattern = form % (10_000 + i)
            bus.index.subscribe(client, pattern, CURRENT.check(pattern), client.peer)
    return bus


def test_cost_goes_by_the_key_not_by_the_patterns():
    """Routing, subscribing and unsubscribing cost no more among thousands of patterns than among a few."""
    few, many = filled(2), filled(1000)
    for bus in (few, many):
        for pattern in (b"a/b/c", b"a/b*", b"a/"):
            bus.subscribe(Client(), pattern)
    for key in (b"a/b/c", b"a/b", b"x", b"!/cred////x"):
        secret = CURRENT.check(key)
        assert many.index.route(key, secret) is not None
        assert calls(many.index.route, key, secret) == calls(few.index.route, key, secret)
    for pattern in (b"a/x", b"x*", b"a/x*", b"a/*/x*/", b"", b"a/", b"!/cred////x*", b"x*y"):
        args = (Client(), pattern, CURRENT.check(pattern), ME)
        assert calls(many.index.subscribe, *args) == calls(few.index.subscribe, *args)
        assert calls(many.index.unsubscribe, *args) == calls(few.index.unsubscribe, *args)


def test_deep_and_long_keys():
    """A key as long as a packet is routed without recursion, by shallow and deep patterns."""
    bus, shallow, deep = Bus(), Client(), Client()
    key = b"a/" * 50_000
    bus.subscribe(shallow, b"a/")
    bus.subscribe(deep, key)
    assert set(bus.route(key)) == {shallow, deep}
    assert bus.route(key[:-1]) == (shallow,)
    bus.unsubscribe(deep, key)
    assert bus.route(key) == (shallow,)


def test_prefixes_of_many_lengths():
    """Prefixes of a length are found as long as one of that length exists."""
    bus, clients = Bus(), [Client() for _ in range(20)]
    for i, client in enumerate(clients):
        bus.subscribe(client, b"x" * i + b"*")
        bus.subscribe(client, b"y" * i + b"*")
    for i, client in enumerate(clients):
        bus.check(b"x" * 10)
        bus.unsubscribe(client, b"x" * i + b"*")
        bus.check(b"x" * 10)
        bus.check(b"y" * 15)
    for i, client in reversed(list(enumerate(clients))):
        bus.check(b"y" * i)
        bus.unsubscribe(client, b"y" * i + b"*")
    assert bus.index.is_empty()


def test_prefixes_that_went_cost_nothing():
    """A length without a prefix is not looked for."""
    few, many = Bus(), Bus()
    client = Client()
    for bus in (few, many):
        bus.subscribe(client, b"x*")
    for _ in range(2):
        for text in (b"x", b"y"):
            for i in range(2, 20):
                many.subscribe(client, text * i + b"*")
        for text in (b"x", b"y"):
            for i in range(2, 20):
                many.unsubscribe(client, text * i + b"*")
    key = b"x" * 30
    assert many.route(key) == (client,)
    assert calls(many.index.route, key, None) == calls(few.index.route, key, None)
