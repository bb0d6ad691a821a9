"""Interest: the answer about a watched key is what a look-up would find, and nothing else can be learnt from it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from zope.interface import implementer

from sbus.errors import CloseReason
from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import matches
from sbus.server.asks.lingering import LINGER
from sbus.server.asks.watched_keys import MAX_WALKS, Watch, WatchedKeys, _walk
from sbus.server.core.credentials import AccessSettings, KernelCredentials
from sbus.server.core.interfaces import ICredentials
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

OTHER = 2
TICK = 100_000
"""Nanoseconds between two looks at the clock, where the test turns the bus."""


def notices(peer: Peer) -> list[tuple[bytes, int]]:
    """Return the answers and notices about interest that have come, as (key, answer)."""
    found = []
    for packet in peer.take():
        if packet.startswith(b"CMSG interest\0"):
            value, _, key = packet.removeprefix(b"CMSG interest\0").partition(b" ")
            found.append((key, int(value)))
    return found


def settle(bus: Bus) -> None:
    """Let what lingers end, and every walk with it."""
    for _ in range(8):
        if isinstance(bus, HandTurnedBus):
            bus.turn(LINGER)
            bus.finish()
        else:
            bus.clock.advance(LINGER)
            bus.settle()


@pytest.mark.parametrize("pattern", [b"a/b", b"a/", b"a/*", b"*/b", b"", b"*/", b"a/b*"])
def test_a_watched_key(pattern):
    """The answer comes at once, then a notice in the batch of the first subscription, and one 100 ms after the last."""
    bus = Bus()
    watcher, one, two = bus.connect(), bus.connect(), bus.connect()
    watcher.send(b"CMSG interest/on\0a/b")
    assert watcher.take() == [b"CMSG interest\x000 a/b"]
    one.transport.deliver(b"SUB " + pattern)
    assert watcher.take() == [b"CMSG interest\x001 a/b"]
    two.send(b"SUB " + pattern)
    one.send(b"UNSUB " + pattern)
    settle(bus)
    assert watcher.take() == []
    two.transport.hang_up()
    bus.settle()
    bus.clock.advance(LINGER - 0.001)
    assert watcher.take() == []
    bus.clock.advance(0.001)
    assert watcher.take() == [b"CMSG interest\x000 a/b"]
    assert all(peer.take() == [] for peer in (one, two))


@pytest.mark.parametrize("pattern", [b"a/c", b"b/", b"a", b"a/b/", b"*", b"a/*b", b"!/cred////a/b"])
def test_patterns_that_do_not_match(pattern):
    """A subscription that would not receive the key is no interest in it."""
    bus = Bus()
    watcher, one = bus.connect(), bus.connect()
    watcher.send(b"CMSG interest/on\0a/b")
    one.send(b"SUB " + pattern)
    one.send(b"UNSUB " + pattern)
    settle(bus)
    assert notices(watcher) == [(b"a/b", 0)]


def test_the_memory_of_a_long_key():
    """Watching a key of 1,024 segments takes memory for each of them, and the end gives it back."""
    bus = Bus()
    watcher = bus.connect()
    user = watcher.protocol.user
    for request in (b"CMSG interest/on\0", b"CMSG interest/off\0"):
        memory = user.memory
        watcher.transport.deliver(request + b"/" * 1023)
        assert abs(user.memory - memory) > 400_000
    assert user.memory < 100_000


def test_a_subscriber_that_reconnects_does_not_flap():
    """Within 100 ms of the end of a subscription another one keeps the answer, whatever its pattern."""
    bus = Bus()
    watcher = bus.connect()
    watcher.send(b"CMSG interest/on\0a")
    for pattern in (b"a", b"*", b"", b"a"):
        one = bus.connect()
        one.send(b"SUB " + pattern)
        bus.clock.advance(LINGER)
        one.transport.hang_up()
        bus.settle()
        bus.clock.advance(LINGER / 2)
    assert notices(watcher) == [(b"a", 0), (b"a", 1)]
    settle(bus)
    assert notices(watcher) == [(b"a", 0)]


def test_the_end_of_watching():
    """interest/off of a key is answered with its interest; without a key it ends all; then nothing comes."""
    bus = Bus()
    watcher, one = bus.connect(), bus.connect()
    watcher.send(*(b"CMSG interest/on\0%d" % n for n in range(4)), b"CMSG interest/off\x000", b"CMSG interest/off\x007")
    assert notices(watcher) == [(b"0", 0), (b"1", 0), (b"2", 0), (b"3", 0), (b"0", 0), (b"7", 0)]
    one.send(b"SUB *")
    assert sorted(notices(watcher)) == [(b"1", 1), (b"2", 1), (b"3", 1)]
    watcher.send(b"CMSG interest/off\x001", b"CMSG interest/off")
    assert watcher.take() == [b"CMSG interest\x001 1", b"CMSG interest/off\0"]
    one.send(b"UNSUB *")
    settle(bus)
    assert watcher.take() == []
    assert bus.registry.router.listeners == ()
    user = watcher.protocol.user
    assert (user.patterns, watcher.protocol.pattern_bytes) == (0, 0)


def test_asking_again_is_answered_again():
    """The same key is watched once, however often it is asked for."""
    bus = Bus()
    watcher = bus.connect()
    watcher.send(*[b"CMSG interest/on\0a"] * 3, b"SUB a", b"CMSG interest/on\0a")
    assert watcher.take() == [
        *[b"CMSG interest\x000 a"] * 3,
        b"CMSG interest\x001 a",
        b"CMSG interest\x001 a",
    ]
    assert watcher.protocol.user.patterns == 2


def test_own_subscriptions_count_as_far_as_echo_goes():
    """With echo off a client is not its own subscriber; another one with the same pattern is."""
    bus = Bus()
    watcher, one = bus.connect(), bus.connect()
    watcher.send(b"SUB a", b"CMSG interest/on\0a", b"CMSG echo/off", b"CMSG probe\0a")
    assert watcher.take() == [b"CMSG interest\x001 a", b"CMSG interest\x000 a", b"CMSG probe\x000 a"]
    one.send(b"SUB a")
    assert notices(watcher) == [(b"a", 1)]
    one.send(b"UNSUB a")
    settle(bus)
    assert notices(watcher) == [(b"a", 0)]
    watcher.send(b"CMSG echo/on")
    assert notices(watcher) == [(b"a", 1)]


def test_observers_do_not_count():
    """The subscriptions of an observer are no interest, before and after it says so, until it says otherwise."""
    bus = Bus()
    watcher, recorder = bus.connect(), bus.connect()
    watcher.send(b"CMSG interest/on\0a")
    recorder.send(b"CMSG observer/on", b"SUB ")
    assert recorder.take() == [b"CMSG observer/on\0"]
    watcher.send(b"CMSG probe\0a", b"MSG a\0")
    assert watcher.take() == [b"CMSG interest\x000 a", b"CMSG probe\x000 a"]
    assert recorder.take() == [b"MSG a\0"]
    recorder.send(b"CMSG observer/off")
    assert notices(watcher) == [(b"a", 1)]
    recorder.send(b"CMSG observer/on")
    settle(bus)
    assert notices(watcher) == [(b"a", 0)]
    recorder.transport.hang_up()
    settle(bus)
    assert notices(watcher) == []
    assert not bus.registry.interest.uncounted


def test_an_observer_that_changes_its_mind_costs_watchers_little(monkeypatch):
    """Only the keys that its patterns match are looked up, at once; with many patterns all are, once a second."""
    bus = Bus()
    watcher, fickle = bus.connect(uid=2), bus.connect(uid=3)
    watcher.send(b"CMSG interest/on\0a", *(b"CMSG interest/on\0k/%d" % n for n in range(50)))
    fickle.send(b"SUB a*")
    assert notices(watcher)[-1] == (b"a", 1)
    looked: list[bytes] = []
    open_tables = bus.registry.router.open_tables

    def look(key: bytes) -> object:
        looked.append(key)
        return open_tables(key)

    monkeypatch.setattr(bus.registry.router, "open_tables", look)
    for _ in range(3):
        fickle.send(b"CMSG observer/on", b"SUB a*", b"UNSUB a*", b"CMSG observer/off")
        settle(bus)
    assert notices(watcher) == []
    fickle.send(b"CMSG observer/on", b"UNSUB a*", b"SUB a*")
    settle(bus)
    assert notices(watcher) == [(b"a", 0)]
    fickle.send(b"CMSG observer/off")
    assert notices(watcher) == [(b"a", 1)]
    assert set(looked) <= {b"a"}
    fickle.send(*(b"SUB x/%d" % n for n in range(100)), *[b"CMSG observer/on", b"CMSG observer/off"] * 20)
    bus.clock.advance(1)
    bus.settle()
    assert looked.count(b"k/1") == 1


def test_probe():
    """Root learns how many would receive a message, others whether anybody would; each one's own copy counts."""
    bus = Bus()
    peers = [bus.connect(uid=OTHER) for _ in range(3)]
    root = bus.connect(uid=0)
    for peer in (*peers, root):
        peer.send(b"SUB a", b"SUB *")
    for peer in (*peers, root):
        peer.send(b"CMSG probe\0a", b"CMSG probe\0b/c")
    assert all(peer.take() == [b"CMSG probe\x001 a", b"CMSG probe\x000 b/c"] for peer in peers)
    assert root.take() == [b"CMSG probe\x004 a", b"CMSG probe\x000 b/c"]
    root.send(b"CMSG echo/off", b"CMSG probe\0a")
    assert root.take() == [b"CMSG probe\x003 a"]


def test_subscribers_that_have_left():
    """A subscriber that has left is not counted any more, even if its patterns have not been dropped yet."""
    bus = HandTurnedBus(TICK)
    before, leaver, watcher = (bus.connect(uid=uid) for uid in (5, 6, 7))
    leaver.send(b"SUB a")
    before.send(b"CMSG interest/on\0a")
    bus.use_up(leaver, 5_000)
    leaver.transport.hang_up()
    bus.settle()
    assert bus.registry.clients.keys() == {1, 3}
    assert leaver.protocol.patterns
    watcher.send(b"CMSG probe\0a", b"CMSG interest/on\0a")
    assert watcher.take() == [b"CMSG probe\x000 a", b"CMSG interest\x000 a"]
    before.send(b"CMSG interest/on\0a")
    assert before.take() == [b"CMSG interest\x001 a"] * 2  # as long as interest lingers
    bus.finish()
    assert not leaver.protocol.patterns
    bus.turn(LINGER)
    bus.finish()
    assert before.take() == [b"CMSG interest\x000 a"]


@implementer(ICredentials)
class Closed(KernelCredentials):
    """A policy under which nobody may publish below ``closed/``."""

    restrictsPublishing = True

    def mayPublish(self, peer: Any, key: bytes) -> bool:
        return not key.startswith(b"closed/")


@pytest.mark.parametrize("key", [b"!/cred////inbox", b"!/cred/100/2//x", b"closed/a"])
@pytest.mark.parametrize("uid", [0, OTHER])
def test_nothing_can_be_learnt(key, uid):
    """Of secret keys, and of keys that it may not publish, a client learns the same with and without subscribers."""
    bus = Bus(credentials=Closed(AccessSettings(), None))
    watcher, one = bus.connect(uid=uid), bus.connect(uid=OTHER)
    for step in (b"UNSUB nothing", b"SUB " + key, b"UNSUB " + key):
        one.send(step)
        settle(bus)
        watcher.send(b"CMSG probe\0" + key, b"CMSG interest/on\0" + key)
        assert watcher.take() == [b"CMSG probe\x001 " + key, b"CMSG interest\x001 " + key]
    watcher.send(b"CMSG interest/off\0" + key)
    assert watcher.take() == [b"CMSG interest\x001 " + key]


@pytest.mark.parametrize("verb", [b"interest/on", b"interest/off", b"probe"])
def test_bad_requests(verb):
    """A malformed key is a violation; a request without the NUL is unknown; the empty key is a key."""
    bus = Bus(ignore_violations=True)
    watcher = bus.connect()
    watcher.send(b"CMSG %b\0!/x" % verb, b"CMSG %b\0a/!/b" % verb)
    assert bus.registry.counters.violations == 2
    assert watcher.take() == []
    watcher.send(b"CMSG " + verb)
    assert bus.registry.counters.unknown_controls == (verb != b"interest/off")
    watcher.take()
    watcher.send(b"CMSG %b\0" % verb)
    assert watcher.take() == [b"CMSG %b\x000 " % verb.split(b"/")[0]]


def test_no_interest():
    """With the option, interest and probe are unknown to users other than root and the server's."""
    bus = Bus(public_interest=False)
    other, root = bus.connect(uid=OTHER), bus.connect(uid=0)
    for peer in (other, root):
        peer.send(b"CMSG interest/on\0a", b"CMSG interest/off\0a", b"CMSG interest/off", b"CMSG probe\0a")
    assert other.take() == []
    assert bus.registry.counters.unknown_controls == 4
    assert len(root.take()) == 4


@pytest.mark.parametrize(
    ("requests", "limits"),
    [
        ([b"%d" % n for n in range(1025)], Limits()),
        ([b"k" * 1025], Limits()),
        ([b"a", b"b", b"c"], Limits(max_patterns=2)),
        ([b"a" * 100, b"b" * 100], Limits(max_pattern_bytes=150)),
        ([b"/" * 600], Limits(max_pattern_bytes=100_000)),
    ],
)
def test_limits(requests, limits):
    """Past a limit, the client has broken the protocol; all that it has watched is forgotten with it."""
    bus = Bus(limits=limits)
    watcher = bus.connect()
    for key in requests[:-1]:
        watcher.send(b"CMSG interest/on\0" + key)
    assert watcher.is_connected
    watcher.send(b"CMSG interest/on\0" + requests[-1])
    settle(bus)
    assert watcher.protocol.reason is CloseReason.VIOLATION
    assert len(bus.registry.users) == 0


@pytest.mark.parametrize("packet", [b"CMSG interest/on\0", b"SUB "])
def test_what_was_given_back_counts_no_more(packet):
    """After interest/off there is room for other keys, or patterns, at once, also if the user has no time left."""
    bus = HandTurnedBus(limits=Limits(max_patterns=100, max_pattern_bytes=10_000))
    watcher = bus.connect()
    bus.use_up(watcher, 10_000)
    for number in range(100):
        watcher.protocol._handle(b"CMSG interest/on\0%d%b" % (number, b"a" * 97))
    watcher.protocol._handle(b"CMSG interest/off")
    for number in range(100):
        watcher.protocol._handle(b"%b%d%b" % (packet, number, b"b" * 97))
    assert watcher.protocol.reason is None
    watcher.transport.hang_up()
    bus.finish()
    user = watcher.protocol.user
    assert (user.patterns, user.memory) == (0, 0)
    assert (watcher.protocol.pattern_bytes, watcher.protocol.pattern_memory) == (0, 0)


def test_watched_keys_count_as_patterns():
    """A client that watches keys may subscribe to fewer patterns."""
    bus = Bus(limits=Limits(max_patterns=2))
    watcher = bus.connect()
    watcher.send(b"CMSG interest/on\0a", b"SUB a")
    assert watcher.is_connected
    watcher.send(b"SUB b")
    assert not watcher.is_connected


def watchers_of(bus: Bus, uid: int, count: int) -> list[Peer]:
    """Connect clients that watch ``key/0`` to ``key/999`` each, and have got the answers."""
    watchers = [bus.connect(uid=uid) for _ in range(count)]
    for watcher in watchers:
        for start in range(0, 1000, 50):
            watcher.send(*(b"CMSG interest/on\0key/%d" % n for n in range(start, start + 50)))
        settle(bus)
        watcher.take()
    return watchers


def test_a_thousand_keys_in_one_batch():
    """A change that concerns 1,000 watched keys is reported in its own batch, also by a user that has gone on."""
    bus = Bus()
    (watcher,), one = watchers_of(bus, 1, 1), bus.connect(uid=0)
    for other in range(2, 5):
        watchers_of(bus, other, 1)[0].send(b"CMSG interest/off")
    settle(bus)
    one.transport.deliver(b"SUB key/*")
    assert len(notices(watcher)) == 1000
    one.send(b"UNSUB key/*")
    settle(bus)
    assert len(notices(watcher)) == 1000


def test_a_walk_takes_its_watchers_turns():
    """While others are active, a long walk stops when its user's time is over, and goes on in turns of that user."""
    bus = HandTurnedBus(TICK)
    watchers, one, other = watchers_of(bus, 1, 3), bus.connect(uid=2), bus.connect(uid=3)
    bus.use_up(other, 0)
    watchers[0].protocol.user.lines.deficit = QUANTUM
    one.send(b"SUB key/")
    told = sum(len(watcher.take()) for watcher in watchers)
    assert 0 < told < 1500
    turns = answers = 0
    while told < 3000:
        one.send(b"CMSG !/cred/whoami")
        bus.turn()
        answers += len(one.take())
        more = sum(len(watcher.take()) for watcher in watchers)
        assert more < 1500
        told, turns = told + more, turns + 1
    assert turns > 4
    assert answers > turns // 3


def test_a_watcher_without_time_holds_up_no_subscriber():
    """A user that has used up its time learns of a subscription in its turns; the subscription is there at once."""
    bus = HandTurnedBus(TICK)
    (watcher,), one, publisher = watchers_of(bus, 1, 1), bus.connect(uid=2), bus.connect(uid=3)
    bus.use_up(watcher, 1_000)
    one.send(b"SUB key/*")
    publisher.send(b"MSG key/1\0")
    assert one.take() == [b"MSG key/1\0"]
    assert notices(watcher) == []
    bus.finish()
    assert len(notices(watcher)) == 1000


def test_a_walk_takes_small_steps():
    """However many segments stand below one node, a walk looks at some of them in one step."""
    bus = Bus()
    (watcher,) = watchers_of(bus, 1, 1)
    (watched,) = bus.registry.interest._watched.values()
    for pattern in (b"", b"key/", b"key/*", b"key/x*", b"k*"):
        found = list(_walk(watched._root, pattern, b"/"))
        assert sum(isinstance(step, Watch) for step in found) == (1000 if pattern in (b"", b"key/", b"key/*") else 0)
        assert max(step for step in found if isinstance(step, int)) < 300
    assert watcher.is_connected


@pytest.mark.parametrize("toggles", [1, 2])
def test_an_observer_begins_few_walks_at_once(monkeypatch, toggles):
    """Walks for many patterns, which begin or end to count in one packet, wait for turns; so do those that lingered."""
    bus = HandTurnedBus(TICK)
    (watcher,), fickle = watchers_of(bus, 1, 1), bus.connect(uid=2)
    fickle.send(*(b"SUB key/x%d*" % n for n in range(60)), b"SUB key/1")
    settle(bus)
    walks: list[WatchedKeys] = []
    finish = WatchedKeys.finish

    def count(watched: WatchedKeys) -> None:
        walks.append(watched)
        finish(watched)

    monkeypatch.setattr(WatchedKeys, "finish", count)
    for toggle in (b"CMSG observer/on", b"CMSG observer/off")[:toggles]:
        bus.registry.scheduler.crowd, bus.registry.scheduler.is_busy = 0, False
        walks.clear()
        fickle.send(toggle)
        if toggles == 1:
            bus.turn(LINGER + 0.001)
        assert len(walks) <= 20
        settle(bus)
    assert notices(watcher)[-1] == (b"key/1", toggles - 1)


class World(RuleBasedStateMachine):
    """Clients of several users subscribe, watch, observe and leave; the answers follow a model."""

    KEYS = (b"a", b"b", b"a/b", b"a/c", b"", b"closed/a", b"!/cred////x")
    PATTERNS = (b"a", b"b", b"*", b"", b"a/", b"a/*", b"*/b", b"a/b", b"*/", b"a*b", b"closed/", b"!/cred////x")

    def __init__(self) -> None:
        super().__init__()
        self.bus = HandTurnedBus(TICK, credentials=Closed(AccessSettings(), None))
        self.peers: list[Peer] = []
        self.watched: dict[Peer, dict[bytes, int]] = {}
        self.is_exact = False

    def teardown(self) -> None:
        for peer in self.peers:
            peer.transport.hang_up()
        settle(self.bus)
        registry = self.bus.registry
        assert len(registry.users) == 0
        assert registry.router.listeners == ()
        assert not registry.interest._by_key
        assert not registry.interest._lingering
        assert not registry.interest.uncounted

    def send(self, peer: Peer, packet: bytes) -> None:
        """Send a packet, and let turns pass until it is handled."""
        peer.send(packet)
        while peer.protocol.is_paused:
            self.bus.turn()

    def note(self) -> None:
        """Take the answers that have come: each is a change, unless it was asked for."""
        self.is_exact = False
        for peer in self.peers:
            for key, value in notices(peer):
                if key in self.watched[peer]:
                    self.watched[peer][key] = value

    def expected(self, watcher: Peer, key: bytes) -> int:
        if key.startswith((b"closed/", b"!/")):
            return 1
        registry = self.bus.registry
        return any(
            matches(pattern, key)
            for peer in self.peers
            for pattern in peer.protocol.patterns
            if peer.protocol not in registry.interest.uncounted
            and (peer is not watcher or watcher.protocol.settings.echo)
        )

    @rule(uid=st.integers(0, 2))
    def connect(self, uid: int) -> None:
        if len(self.peers) < 6:
            peer = self.bus.connect(uid=uid)
            self.peers.append(peer)
            self.watched[peer] = {}

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), pattern=st.sampled_from(PATTERNS), verb=st.sampled_from((b"SUB ", b"UNSUB ")))
    def subscribe(self, data, pattern: bytes, verb: bytes) -> None:
        self.send(data.draw(st.sampled_from(self.peers)), verb + pattern)
        self.note()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def watch(self, data, key: bytes) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.note()
        is_new = key not in self.watched[peer]
        self.watched[peer][key] = -1
        self.send(peer, b"CMSG interest/on\0" + key)
        self.note()
        value = self.watched[peer][key]
        assert value == self.expected(peer, key) or (value == 1 and not is_new)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def unwatch(self, data, key: bytes) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.note()
        self.watched[peer].pop(key, None)
        self.send(peer, b"CMSG interest/off\0" + key)

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def unwatch_all(self, data) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.send(peer, b"CMSG interest/off")
        self.note()
        self.watched[peer].clear()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), setting=st.sampled_from((b"echo/on", b"echo/off", b"observer/on", b"observer/off")))
    def configure(self, data, setting: bytes) -> None:
        self.send(data.draw(st.sampled_from(self.peers)), b"CMSG " + setting)
        self.note()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), work=st.integers(0, 2_000))
    def use_up(self, data, work: int) -> None:
        """Have walks of a user wait, from the first one on."""
        self.bus.use_up(data.draw(st.sampled_from(self.peers)), work)

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def leave(self, data) -> None:
        self.note()
        peer = self.peers.pop(data.draw(st.integers(0, len(self.peers) - 1)))
        del self.watched[peer]
        peer.transport.hang_up()
        self.bus.settle()
        self.note()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def probe(self, data, key: bytes) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.note()
        self.send(peer, b"CMSG probe\0" + key)
        (answer,) = [packet for packet in peer.take() if packet.startswith(b"CMSG probe\0")]
        count, _, of = answer.removeprefix(b"CMSG probe\0").partition(b" ")
        assert of == key
        assert min(1, int(count)) == self.expected(peer, key)
        if peer.protocol.peer.uid:
            assert int(count) <= 1

    @rule(seconds=st.sampled_from((0.0, LINGER / 2, LINGER)))
    def time(self, seconds: float) -> None:
        self.bus.turn(seconds)
        self.note()

    @rule()
    def rest(self) -> None:
        for _ in range(5):
            settle(self.bus)
        self.note()
        self.is_exact = True

    @invariant()
    def answers_are_right(self) -> None:
        if self.is_exact:
            for peer, watched in self.watched.items():
                for key, value in watched.items():
                    assert value == self.expected(peer, key), (key, value)


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.sampled_from((b"SUB ", b"UNSUB ")), min_size=1, max_size=60), st.integers(1, 80))
def test_churn_ends(steps, patterns):
    """However many patterns come and go before the first walk, the answers are right when the walks are done."""
    bus = HandTurnedBus(TICK)
    watcher, churner = bus.connect(), bus.connect(uid=OTHER)
    watcher.send(*(b"CMSG interest/on\0%d" % n for n in range(40)))
    bus.finish()
    some = itertools.cycle([b"%d*" % n for n in range(patterns)])
    for at in range(0, 5 * len(steps), 10):
        bus.use_up(watcher, 1_000)
        churner.send(*(verb + next(some) for verb in (steps * 5)[at : at + 10]))
        for walk in bus.registry.interest._watched.values():
            assert len(walk.walks) <= MAX_WALKS
    for _ in range(30):
        settle(bus)
    answers = dict(notices(watcher))
    live = churner.protocol.patterns
    for n in range(40):
        assert answers[b"%d" % n] == any(matches(pattern, b"%d" % n) for pattern in live)


def test_churn_of_everything_costs_others_little():
    """While one client subscribes to everything and leaves, a watcher's answers neither flap nor take its time."""
    bus = HandTurnedBus(TICK)
    (watcher,), churner = watchers_of(bus, 1, 1), bus.connect(uid=OTHER)
    lines = watcher.protocol.user.lines
    spent = []
    for _ in range(2):
        lines.deficit = least = QUANTUM
        for _ in range(50):
            churner.send(*[b"SUB ", b"UNSUB "] * 30)
            least = min(least, lines.deficit)
            bus.turn(LINGER / 10)
        bus.finish()
        spent.append(QUANTUM - least)
        spent.append(len(notices(watcher)))
    assert spent[0] > 0
    assert spent[1:] == [1000, 0, 0]


def test_one_notice_of_each_key_waits():
    """For a watcher that does not read, at most one notice of a key waits; what is taken back is not sent."""
    bus = Bus()
    watcher, one = bus.connect(), bus.connect(uid=OTHER)
    for start in range(0, 200, 50):
        watcher.send(*(b"CMSG interest/on\0%d" % n for n in range(start, start + 50)))
    watcher.take()
    watcher.stall()
    for _ in range(10):
        one.send(b"SUB *")
        one.send(b"UNSUB *")
        settle(bus)
    queue = watcher.protocol.queue
    assert len(queue) <= 200
    one.send(b"SUB *")
    settle(bus)
    assert len(queue) <= 200
    for _ in range(20):
        watcher.drain(20)
        bus.settle()
    watcher.drain()
    settle(bus)
    got = notices(watcher)
    assert dict(got) == {b"%d" % n: 1 for n in range(200)}
    assert len(got) <= 400
    assert watcher.protocol.on_room == ()
    assert not watcher.protocol.is_paused
