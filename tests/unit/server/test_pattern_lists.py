"""Lists of patterns: a listener's picture of all others' patterns is right, whatever comes in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sbus.fair import Scheduler
from sbus.fair.lines import QUANTUM
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

ASK = b"CMSG interest/patterns"
END = b"CMSG interest/patterns\0"


class Picture:
    """What a listener knows from the packets that it got."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.patterns: set[bytes] = set()
        self.number = 0
        self.is_complete = False

    def update(self) -> None:
        for packet in self.peer.take():
            if packet == END:
                self.is_complete = True
            elif packet.startswith(b"CMSG interest/pattern\0"):
                sign, number, pattern = packet.partition(b"\0")[2].split(b" ", 2)
                assert int(number) >= self.number
                self.number = int(number)
                if sign == b"+":
                    assert pattern not in self.patterns
                    self.patterns.add(pattern)
                else:
                    self.patterns.remove(pattern)


def test_the_list_and_its_changes():
    """Root gets the open patterns of all others, a mark, and changes: none of its own, of secrets or of observers."""
    bus = Bus()
    root, one, two, observer = bus.connect(uid=0), bus.connect(), bus.connect(), bus.connect()
    root.send(b"SUB mine", b"SUB both")
    one.send(b"SUB a/*", b"SUB both", b"SUB a/*", b"SUB !/cred////x")
    two.send(b"SUB a/*", b"SUB b c")
    observer.send(b"CMSG observer/on", b"SUB ")
    root.send(ASK)
    got = root.take()
    assert sorted(got[:-1]) == [b"CMSG interest/pattern\0+ %d %b" % (n, p) for n, p in sorted(numbers(got[:-1]))]
    assert {pattern for _, pattern in numbers(got[:-1])} == {b"a/*", b"both", b"b c"}
    assert got[-1] == END
    one.send(b"UNSUB a/*", b"UNSUB a/*", b"SUB c")
    (packet,) = root.take()
    assert packet.startswith(b"CMSG interest/pattern\0+ ")
    assert packet.endswith(b" c")
    two.transport.hang_up()
    bus.settle()
    assert {(p.split(b" ")[1][-1:], p.split(b" ", 3)[3]) for p in root.take()} == {(b"-", b"a/*"), (b"-", b"b c")}
    observer.send(b"CMSG observer/off")
    assert len(root.take()) == 1
    root.transport.hang_up()
    bus.settle()
    assert bus.registry.router.listeners == ()


def numbers(packets: list[bytes]) -> list[tuple[int, bytes]]:
    found = []
    for packet in packets:
        _, number, pattern = packet.partition(b"\0")[2].split(b" ", 2)
        found.append((int(number), pattern))
    return found


def test_it_is_for_root_and_the_servers_user():
    """For any other user the request is unknown."""
    bus = Bus()
    other = bus.connect(uid=4711)
    other.send(ASK)
    assert other.take() == []
    assert bus.registry.counters.unknown_controls == 1


def test_many_patterns_for_a_slow_reader():
    """However many patterns there are, at most 64 wait in the queue of a listener; the rest follows as it reads."""
    bus = Bus()
    root, one = bus.connect(uid=0), bus.connect()
    for start in range(0, 5000, 100):
        one.send(*(b"SUB %d" % n for n in range(start, start + 100)))
        bus.settle()
    root.stall()
    root.send(ASK)
    assert len(root.protocol.queue) <= 65
    picture = Picture(root)
    for _ in range(200):
        root.drain(40)
        picture.update()
    root.drain()
    for _ in range(40):
        bus.settle()
        picture.update()
    assert picture.is_complete
    assert len(picture.patterns) == 5000


def test_the_numbers_of_patterns_that_were_there():
    """A list that begins among many patterns takes no look at each; their numbers are known before they are sent."""
    bus = Bus()
    first, root, one = bus.connect(uid=0), bus.connect(uid=0), bus.connect()
    first.send(ASK)
    for number in range(3_000):
        bus.registry.subscribe(one.protocol, b"%d" % number)
    root.stall()
    root.send(ASK)
    lists = bus.registry._pattern_lists
    assert len(lists._feeds[root.protocol].agenda) == 1  # the mark
    one.send(b"UNSUB 1000", b"SUB 1000", b"UNSUB 2000", b"SUB new")
    expected = {pattern: lists.number_of(root.protocol, pattern) for pattern in one.protocol.patterns}
    assert (lists.number_of(root.protocol, b"2000"), min(expected.values())) == (0, 3_000)
    got: list[bytes] = []
    while END not in got:
        root.drain(40)
        got += root.take()
    for _ in range(40):
        root.drain()
        bus.settle()
        got += root.take()
    assert {pattern: number for number, pattern in numbers([each for each in got if each != END])} == expected
    ordered = [number for number, _ in numbers([each for each in got if each != END])]
    assert ordered == sorted(ordered)


def test_patterns_that_come_and_go_do_not_pile_up():
    """A pattern that has gone before a listener learnt of it is not kept for the listener, however slowly it reads."""
    bus = Bus()
    root, one = bus.connect(uid=0), bus.connect()
    root.stall()
    root.send(ASK)
    for number in range(0, 2_000, 10):
        one.send(*(verb + b"gone/%d" % n for n in range(number, number + 10) for verb in (b"SUB ", b"UNSUB ")))
        bus.settle()
    (listener,) = bus.registry._pattern_lists._feeds.values()
    assert len(listener.agenda) <= 200
    root.drain()
    picture = Picture(root)
    for _ in range(40):
        bus.settle()
        picture.update()
    assert picture.is_complete
    assert picture.patterns == set()


def test_patterns_of_a_client_that_is_leaving():
    """A list that begins while the patterns of a departed client are being dropped has all later subscribers."""
    bus = HandTurnedBus()
    leaving, other, late = bus.connect(uid=7), bus.connect(uid=8), bus.connect(uid=9)
    leaving.send(*(b"SUB %d" % n for n in range(1000)))
    bus.finish()
    bus.use_up(leaving, 1000)
    leaving.transport.end()
    bus.settle()
    assert len(leaving.protocol.patterns) > 900
    picture = Picture(bus.connect(uid=0))
    picture.peer.send(ASK)
    bus.finish()
    picture.update()
    assert (picture.is_complete, picture.patterns) == (True, set())
    late.send(b"SUB 999")
    bus.finish()
    picture.update()
    assert picture.patterns == {b"999"}
    assert other.is_connected


def test_patterns_that_change_while_they_are_counted():
    """So many patterns that to count them takes several turns of the reactor, and some that come and go meanwhile."""
    bus = HandTurnedBus(limits=Limits(user_patterns=100_000))
    peers = [bus.connect() for _ in range(40)]
    for at, peer in enumerate(peers):
        for number in range(1_000):
            bus.registry.subscribe(peer.protocol, b"%d/%d" % (at, number))
    root = bus.connect(uid=0)
    root.send(ASK)
    assert bus.registry._pattern_lists._to_count
    for at in (0, 39):  # of a client that has been counted, and of one that has not
        bus.registry.unsubscribe(peers[at].protocol, b"%d/7" % at)
        bus.registry.subscribe(peers[at].protocol, b"new/%d" % at)
    picture = Picture(root)
    while not picture.is_complete or bus.registry.scheduler._ring:
        bus.turn()
        picture.update()
    assert picture.patterns == {pattern for peer in peers for pattern in peer.protocol.patterns}
    assert len(picture.patterns) == 40_000


@pytest.mark.parametrize("start", [b"CMSG observer/off", b"CMSG observer/on"])
def test_an_observer_that_changes_its_mind_is_counted_in_turns(start):
    """Many patterns begin or end to count some at a time, whatever the client subscribes to meanwhile."""
    bus = HandTurnedBus(tick=QUANTUM // 8)
    lists = bus.registry._pattern_lists
    fickle, root = bus.connect(), bus.connect(uid=0)
    fickle.send(start)
    for number in range(10_000):
        bus.registry.subscribe(fickle.protocol, b"%d" % number)
    picture = Picture(root)
    root.send(ASK)
    for toggle in (b"CMSG observer/on", b"CMSG observer/off") * 3:
        before = lists._number
        bus.registry.scheduler.press()  # others are active, too
        fickle.send(toggle, b"UNSUB %d" % lists._number, b"SUB new/%d" % lists._number)
        assert lists._number - before <= 3_000
        bus.turn()
        picture.update()
    bus.finish()
    picture.update()
    assert picture.patterns == set(fickle.protocol.patterns)
    fickle.send(b"CMSG observer/on")
    bus.finish()
    picture.update()
    assert picture.patterns == set()


def test_a_client_with_many_patterns_is_counted_in_turns():
    """The first listener has many patterns of one client counted in several turns, and learns of changes meanwhile."""
    bus = HandTurnedBus()
    lists = bus.registry._pattern_lists
    one, root = bus.connect(), bus.connect(uid=0)
    for number in range(10_000):
        bus.registry.subscribe(one.protocol, b"%d" % number)
    picture = Picture(root)
    root.send(ASK)
    assert lists._number <= 2_100
    for toggles in ((), (b"CMSG observer/on",), (), (b"CMSG observer/off",)):
        before = lists._number
        one.send(*toggles, b"UNSUB %d" % before, b"SUB new/%d" % before)
        bus.turn()
    while not picture.is_complete or bus.registry.scheduler._ring:
        bus.turn()
        picture.update()
    assert picture.patterns == set(one.protocol.patterns)


class World(RuleBasedStateMachine):
    """Clients subscribe, observe and leave, and listeners come, stall and read."""

    PATTERNS = (b"a", b"b", b"", b"*", b"a/", b"!/cred////x")

    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()
        self.peers: list[Peer] = []
        self.pictures: dict[Peer, Picture] = {}
        self.is_exact = False

    def settle(self) -> None:
        self.bus.settle()
        while self.bus.registry.scheduler._ring or self.bus.registry._pattern_lists._to_count:
            self.bus.settle()

    def teardown(self) -> None:
        for peer in self.peers:
            peer.transport.hang_up()
        for _ in range(4):
            self.settle()
        assert self.bus.registry.router.listeners == ()
        assert not self.bus.registry._pattern_lists._counts

    def changed(self) -> None:
        self.is_exact = False
        for picture in self.pictures.values():
            picture.update()

    @rule()
    def connect(self) -> None:
        if len(self.peers) < 6:
            self.peers.append(self.bus.connect(uid=0))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), verb=st.sampled_from((b"SUB ", b"SUB ", b"UNSUB ")), pattern=st.sampled_from(PATTERNS))
    def subscribe(self, data, verb: bytes, pattern: bytes) -> None:
        data.draw(st.sampled_from(self.peers)).transport.deliver(verb + pattern)
        self.changed()

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def ask(self, data) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        if peer not in self.pictures:
            self.pictures[peer] = Picture(peer)
            peer.take()
            peer.transport.deliver(ASK)
        self.changed()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), setting=st.sampled_from((b"observer/on", b"observer/off")))
    def observe(self, data, setting: bytes) -> None:
        data.draw(st.sampled_from(self.peers)).transport.deliver(b"CMSG " + setting)
        self.changed()

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def leave(self, data) -> None:
        peer = self.peers.pop(data.draw(st.integers(0, len(self.peers) - 1)))
        self.pictures.pop(peer, None)
        peer.transport.hang_up()
        self.changed()

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), packets=st.integers(0, 3))
    def read(self, data, packets: int) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        if packets:
            peer.transport.drain(packets)
        else:
            peer.stall()
        self.changed()

    @rule()
    def rest(self) -> None:
        for _ in range(3):
            for peer in self.peers:
                peer.transport.drain()
            self.settle()
        self.changed()
        self.is_exact = True

    @invariant()
    def pictures_are_right(self) -> None:
        if self.is_exact:
            uncounted = self.bus.registry.interest.uncounted
            for peer, picture in self.pictures.items():
                assert picture.is_complete
                assert picture.patterns == {
                    pattern
                    for other in self.peers
                    if other is not peer and other.protocol not in uncounted
                    for pattern in other.protocol.patterns
                    if not pattern.startswith(b"!")
                }


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


class TurningWorld(World):
    """The same, with all chores done in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Scheduler, "do", Scheduler.add_chore)

    @rule()
    def turn(self) -> None:
        self.bus.clock.advance(0)
        self.changed()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


TestTurningWorld = TurningWorld.TestCase
TestTurningWorld.settings = TestWorld.settings
