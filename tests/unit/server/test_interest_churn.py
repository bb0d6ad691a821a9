"""Subscribers that come and go: watched keys under any sequence of requests."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import matches
from sbus.server.asks.lingering import LINGER
from sbus.server.asks.watched_keys import MAX_WALKS, Watch, WatchedKeys, _walk
from sbus.server.core.credentials import AccessSettings
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples
from tests.unit.server.watching import OTHER, TICK, Closed, notices, settle


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
