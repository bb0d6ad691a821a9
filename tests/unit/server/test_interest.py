"""Interest: the answer about a watched key is what a look-up would find, and nothing else can be learnt from it."""

from __future__ import annotations

import pytest

from sbus.errors import CloseReason
from sbus.server.asks.lingering import LINGER
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus
from tests.unit.server.watching import OTHER, TICK, Closed, notices, settle


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
