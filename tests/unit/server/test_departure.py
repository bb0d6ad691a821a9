"""The end of a client, in four steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import CloseReason
from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import CURRENT
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.ops.tap import Tap
from sbus.server.ops.viewers import UnroutedViewer
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples
from tests.unit.server.leaving import LEAVER, OTHER, TICK, contend, leaver, look_ups

WAYS = ["end", "hang_up", "abortConnection", "close"]


def leave(peer: Peer, how: str) -> None:
    """End a connection in one of `WAYS`."""
    if how == "close":
        peer.protocol.close(CloseReason.VIOLATION)
    else:
        getattr(peer.transport, how)()


# --- the four steps -------------------------------------------------------------------------------


def test_the_steps_of_an_end():
    """Input stops; at its place in the mail the client gets its farewell; its patterns go in turns; then it is gone."""
    events: list[str] = []

    class Closed(Observer):
        def closed(self, client: Any, reason: CloseReason) -> None:
            events.append(reason.name)

    bus = HandTurnedBus(TICK, observers=(Closed(),))
    peer, publisher = leaver(bus, 200), bus.connect(uid=OTHER)
    others = [leaver(bus, 1) for _ in range(OF_OTHERS)]
    peer.send(b"CMSG bye/on", b"CMSG receipts/on")
    peer.take()
    contend(bus, publisher)
    peer.protocol.user.lines.deficit = 0
    publisher.send(b"MSG k\x001")
    peer.protocol.close(CloseReason.VIOLATION, "because")
    peer.send(b"MSG k\0never")
    publisher.send(b"MSG k\x002")
    assert peer.is_connected
    assert peer.take() == []
    assert peer.protocol.user.patterns == 200 + OF_OTHERS
    while peer.is_connected:  # the first message is delivered, and then the letter of the end is opened
        bus.turn()
    first, last = peer.take()[0], peer.take()
    assert (first, last) == (b"MSG k\x001", [])
    assert peer.protocol.number not in bus.registry.clients
    assert peer.protocol.patterns
    bus.finish()
    assert peer.protocol.patterns == {}
    assert events == ["VIOLATION"]
    assert [other.take() for other in others] == [[b"MSG k\x001", b"MSG k\x002"]] * OF_OTHERS
    assert bus.registry.counters.published == 2


def test_few_patterns_go_at_once():
    """A client whose user has time for all leaves nothing behind when its connection is lost."""
    bus = Bus()
    peer = leaver(bus, 200)
    peer.transport.hang_up()
    for _ in range(3):
        bus.clock.advance(0)
    assert bus.registry.router.index.is_empty()
    assert not bus.registry.router.muted
    assert len(bus.registry.users) == 0


def test_many_patterns_go_in_turns():
    """Messages of others flow between two turns, the client gets and loses nothing, and its user pays."""
    bus = HandTurnedBus(TICK)
    peer, other = leaver(bus, 640), bus.connect(uid=OTHER)
    other.send(b"SUB k", b"MSG k\0before")
    bus.finish()
    assert (peer.take(), other.take()) == ([b"MSG k\0before"], [b"MSG k\0before"])
    user = peer.protocol.user
    contend(bus, peer)
    peer.transport.hang_up()
    bus.settle()
    assert not peer.is_connected
    assert 0 < user.patterns < 640
    turns = 0
    while user.patterns:
        assert len(bus.registry.users) == 2
        other.protocol.user.lines.deficit = QUANTUM
        other.send(b"MSG k\0meanwhile", b"MSG 7/x\0")
        assert other.take() == [b"MSG k\0meanwhile"]
        before = user.patterns
        bus.turn()
        assert before - user.patterns < 200
        turns += 1
    assert turns > 3
    assert user.match_cost.steps == 0
    bus.finish()
    assert len(bus.registry.users) == 1
    assert (bus.registry.counters.dropped, bus.registry.counters.routed) == (0, 2 + turns)
    assert peer.take() == []
    other.send(b"UNSUB k")
    assert bus.registry.router.index.is_empty()


def test_routes_to_a_client_that_leaves_stay_in_the_cache():
    """A client that leaves with many patterns makes others look nothing up again, and no message is lost for it."""
    bus = HandTurnedBus(TICK)
    peer, other = leaver(bus, 640), bus.connect(uid=OTHER)
    other.send(b"SUB other", b"MSG k\0", b"MSG other\0")
    bus.finish()
    keys = look_ups(bus)
    contend(bus, peer)
    peer.transport.hang_up()
    bus.settle()
    assert peer.protocol.patterns
    other.send(b"MSG k\0", b"MSG other\0")
    assert keys == []
    assert bus.registry.counters.dropped == 0


def test_users_leave_side_by_side():
    """A user with few patterns does not wait until one with many has left."""
    bus = HandTurnedBus(TICK)
    many, few = leaver(bus, 3_000, uid=7), leaver(bus, 20, uid=8)
    bus.use_up(few, 0)
    many.transport.hang_up()
    few.transport.hang_up()
    bus.settle()
    while few.protocol.patterns:
        bus.turn()
    assert many.protocol.user.patterns > 2_000


@pytest.mark.parametrize("is_busy", [True, False])
def test_messages_for_receivers_that_have_left_are_unrouted(is_busy):
    """A message that none but a client that has left and observers would get has no subscriber, as its counter says."""
    bus = HandTurnedBus(TICK)
    peer, recorder, other = leaver(bus, 640), bus.connect(uid=OTHER), bus.connect(uid=OTHER)
    recorder.send(b"CMSG observer/on", b"SUB k")
    other.send(b"CMSG echo/off", b"SUB k", b"MSG k\0before")
    bus.finish()
    contend(bus, peer)
    peer.transport.hang_up()
    bus.settle()
    assert peer.protocol in bus.registry.router.muted
    bus.registry.scheduler.is_busy = is_busy
    other.protocol.user.lines.deficit = QUANTUM
    viewer = UnroutedViewer(CURRENT, bus.registry.interest.uncounted, bus.registry.router.muted)
    tap = Tap(bus.registry)
    tap.add(viewer)
    other.send(b"MSG k\0meanwhile")
    assert peer.protocol in bus.registry.router.muted
    assert bus.registry.counters.unrouted == 1
    assert list(viewer.take()) == [b"k"]
    bus.finish()
    assert bus.registry.counters.routed == 3


def test_one_pattern_may_take_all_the_time():
    """The time is looked at after each pattern: to drop one with many routes takes more than a millisecond."""
    bus = HandTurnedBus(TICK)
    peer = leaver(bus, 640)
    contend(bus, peer)
    peer.protocol.user.lines.deficit = 1
    peer.transport.hang_up()
    assert len(peer.protocol.patterns) == 639
    while peer.protocol.patterns:
        before = len(peer.protocol.patterns)
        bus.turn()
        assert before - len(peer.protocol.patterns) <= QUANTUM // TICK


def test_a_departed_client_without_patterns_is_not_in_the_way_of_room():
    """A client that has left without patterns does not hide one whose patterns are still being dropped."""
    bus = HandTurnedBus(TICK, limits=Limits(user_patterns=640))
    empty, peer = bus.connect(uid=LEAVER), leaver(bus, 640)
    bus.use_up(peer, 10_000)
    empty.transport.hang_up()
    peer.transport.hang_up()
    following = bus.connect(uid=LEAVER)
    bus.registry.subscribe(following.protocol, b"new")
    assert following.protocol.patterns


def test_patterns_that_are_being_dropped_make_room():
    """What a client that has left holds is not held against a new one of its user."""
    bus = HandTurnedBus(TICK, limits=Limits(user_patterns=640))
    peer = leaver(bus, 640)
    bus.use_up(peer, 10_000)
    peer.transport.hang_up()
    bus.settle()
    assert peer.protocol.user.patterns == 640
    following = bus.connect(uid=LEAVER)
    bus.registry.subscribe(following.protocol, b"new")
    assert following.protocol.patterns
    assert peer.protocol.user.patterns == 640


@pytest.mark.parametrize("packet", [b"SUB new", b"CMSG interest/on\0new"])
@pytest.mark.parametrize("has_watches", [False, True])
def test_what_is_being_dropped_makes_room_for_either(packet, has_watches):
    """Neither patterns nor watches of a client that has left are held against a new pattern, or a new watch."""
    bus = HandTurnedBus(TICK, limits=Limits(user_patterns=640))
    peer = bus.connect(uid=LEAVER)
    for number in range(640):
        if has_watches:
            bus.registry.interest.watch(peer.protocol, b"%d" % number)
        else:
            bus.registry.subscribe(peer.protocol, b"%d/*" % number)
    following = bus.connect(uid=LEAVER)
    bus.finish()
    bus.use_up(peer, 10_000)
    peer.transport.hang_up()
    following.protocol._handle(packet)
    assert following.protocol.reason is None
    assert following.protocol.user.patterns == (1 if has_watches else 640)
    assert bus.registry.counters.user_limits == 0


# --- the three ways -------------------------------------------------------------------------------


def test_a_client_that_half_closes_gets_what_was_queued():
    """What waits for a client that has ended its sending is sent to it, and nothing else, while its patterns go."""
    bus = HandTurnedBus(TICK)
    peer, other = leaver(bus, 640), bus.connect(uid=OTHER)
    peer.stall()
    other.send(b"MSG k\0before")
    bus.finish()
    contend(bus, peer)
    peer.transport.end()
    bus.settle()
    assert peer.protocol.patterns
    other.send(b"MSG k\0late")
    bus.turn()
    other.send(b"MSG k\0later")
    peer.drain()
    bus.finish()
    assert peer.take() == [b"MSG k\0before"]
    assert not peer.is_connected
    assert bus.registry.router.index.is_empty()
    assert [user.uid for user in bus.registry.users.all()] == [OTHER]
    assert bus.registry.users.budget.bytes == 0
    assert bus.registry.counters.dropped == 0


def test_a_half_closed_client_gets_its_mail():
    """Mail that was there before a client ended its sending is for it; what came since is not."""
    bus = Bus()
    peers, publisher = [leaver(bus, 1) for _ in range(OF_OTHERS + 1)], bus.connect(uid=OTHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(b"MSG k\x001")
    peers[0].transport.end()
    publisher.transport.deliver(b"MSG k\x002")
    bus.settle()
    assert not peers[0].is_connected
    assert peers[0].take() == [b"MSG k\x001"]
    assert [peer.take() for peer in peers[1:]] == [[b"MSG k\x001", b"MSG k\x002"]] * OF_OTHERS
    assert bus.registry.counters.dropped == 0


def test_a_client_that_shuts_down_reading_blocks_nobody():
    """It gets no message, so publishers of mail for other clients of its user need not wait for it."""
    bus = HandTurnedBus(tick=TICK, access=AccessSettings(block_across_users=True))
    deaf, publisher = bus.connect(uid=LEAVER), bus.connect(uid=OTHER)
    readers = [bus.connect(uid=LEAVER) for _ in range(OF_OTHERS + 1)]
    for reader in [deaf, *readers]:
        reader.send(b"SUB k")
    deaf.send(b"CMSG blocking/soft/block")
    bus.finish()
    for is_paused in (True, False):
        contend(bus, publisher)
        publisher.send(b"MSG k\0")
        assert publisher.transport.is_paused == is_paused
        deaf.transport.breakDown()
        bus.finish()
    assert [len(reader.take()) for reader in readers] == [2] * len(readers)


def test_a_client_that_shuts_down_reading_gets_no_mail():
    """What waits for it is lost; what it sends is handled, and its patterns are dropped."""
    bus = Bus()
    peers, publisher = [leaver(bus, 1) for _ in range(OF_OTHERS + 1)], bus.connect(uid=OTHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(b"MSG k\x001")
    peers[0].transport.breakDown()
    bus.settle()
    peers[0].send(b"SUB k", b"MSG k\x002")
    assert peers[0].is_connected
    assert peers[0].protocol.patterns == {}
    assert peers[0].protocol.lost == 1
    assert [peer.take() for peer in peers[1:]] == [[b"MSG k\x001", b"MSG k\x002"]] * OF_OTHERS


def test_the_server_disconnects_a_client_with_mail():
    """It gets what was for it before, then its last receipt and the reason; its input stops at once."""
    bus = Bus(limits=Limits(queue_messages=2))
    peers, publisher = [leaver(bus, 1) for _ in range(OF_OTHERS + 1)], bus.connect(uid=OTHER)
    peer = peers[0]
    peer.send(b"CMSG bye/on", b"CMSG receipts/on", b"CMSG echo/off")
    peer.take()
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(*(b"MSG k\0%d" % number for number in range(5)))
    peer.transport.capacity = 1
    peer.transport.deliver(b"nonsense", b"MSG k\0never")
    bus.settle()
    assert not peer.is_connected
    message, receipt, bye = peer.take()
    assert message == b"MSG k\x000"
    assert receipt == b"CMSG lost\x004 28 4 disconnect"
    assert bye.startswith(b"CMSG bye\0violation ")
    assert peer.protocol.lost == 4 == bus.registry.counters.dropped
    assert len(peers[1].take()) == 5
    assert bus.registry.counters.published == 5


@pytest.mark.parametrize("how", WAYS)
def test_an_end_while_a_snapshot_waits(how):
    """A client that leaves while its snapshot waits in the mail, or is on its way, gives everything back."""
    for is_on_its_way in (False, True):
        bus = Bus(last_values=(LastValueRule(b"k"),))
        peers, publisher = [leaver(bus, 1) for _ in range(OF_OTHERS + 1)], bus.connect(uid=OTHER)
        publisher.send(b"MSG k\x001")
        peers[0].stall()
        bus.registry.scheduler.is_busy = True
        publisher.transport.deliver(b"MSG k\x002")
        peers[0].transport.deliver(b"CMSG last\0k")
        if is_on_its_way:
            bus.settle()
        leave(peers[0], how)
        bus.settle()
        peers[0].drain()
        bus.settle()
        assert not peers[0].is_connected
        for peer in peers[1:]:
            peer.transport.abortConnection()
        publisher.transport.abortConnection()
        bus.settle()
        account = bus.registry.users.budget.memory
        assert bus.registry.last_values is not None
        assert (account.held, len(bus.registry.users)) == (bus.registry.last_values.memory, 0)


# --- after the fourth step ------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("has_mail", [False, True])
def test_nothing_refers_to_a_client_that_has_left(how, has_mail):
    """After its end no table, route, timer or account has anything of a client, and its objects are freed (I13)."""
    bus = Bus(limits=Limits(block_timeout=30.0), last_values=(LastValueRule(b"kept"),))
    registry = bus.registry
    publisher = bus.connect(uid=OTHER)
    others = [leaver(bus, 1) for _ in range(OF_OTHERS)]
    publisher.send(b"MSG k\0", b"MSG kept\0x")
    before = registry.users.budget.memory.held, registry.memory.buffers, registry.users[LEAVER].patterns
    peer = leaver(bus, 20)
    peer.send(b"CMSG receipts/on", b"CMSG bye/on", b"CMSG interest/on\0k", b"CMSG last\0kept", b"SUB !/cred////x")
    peer.send(b"MSG k\0", b"CMSG blocking/hard/block")
    peer.stall()
    registry.scheduler.is_busy = has_mail
    publisher.transport.deliver(b"MSG k\0waits", b"MSG kept\0y")
    peer.transport.deliver(b"CMSG !/cred/whoami", b"CMSG probe\0k")
    leave(peer, how)
    bus.settle()
    peer.drain()
    bus.settle()
    assert not peer.is_connected
    bus.clock.advance(1.0)
    bus.settle()
    for other in others:
        other.take()
    publisher.send(b"MSG k\0")
    assert [other.take() for other in others] == [[b"MSG k\0"]] * OF_OTHERS
    protocol, queue = peer.protocol, peer.protocol.queue
    after = registry.users.budget.memory.held, registry.memory.buffers, registry.users[LEAVER].patterns
    assert after == before
    assert registry.users[LEAVER].clients.keys() == {other.protocol for other in others}
    assert not registry.users[LEAVER].blockers
    assert (protocol.patterns, protocol.pattern_bytes, protocol.pattern_memory) == ({}, 0, 0)
    assert (queue.messages, queue.replies, queue.memory, queue.pending) == (0, 0, 0, [])
    assert protocol not in registry.router.muted
    assert all(protocol not in route.receivers for route in registry.routes.values())
    assert registry.users.budget.bytes == 0
    reason = protocol.reason
    protocol.close(CloseReason.OUT_OF_MEMORY)  # too late
    assert (protocol.reason, protocol._departure) == (reason, None)
    freed = weakref.ref(protocol)
    del protocol, queue, peer
    gc.collect()
    assert freed() is None


def test_a_client_is_freed_without_the_garbage_collector():
    """A client that has left is in no cycle of references of the server."""
    bus = Bus()
    publisher = bus.connect(uid=OTHER)
    peer = leaver(bus, 20)
    peer.send(b"CMSG interest/on\0k")
    publisher.send(b"MSG k\0")
    gc.collect()
    gc.disable()
    try:
        peer.transport.abortConnection()
        bus.settle()
        bus.clock.advance(1.0)
        publisher.send(b"MSG k\0")
        freed = weakref.ref(peer.protocol)
        peer.transport.before_read = peer.transport.may_grow = peer.transport.on_writable = None  # the fake's own
        del peer
        assert freed() is None
    finally:
        gc.enable()


STEPS = st.tuples(
    st.sampled_from(["publish", "publish", "ask", "stall", "drain", "leave", "leave", "turn", "come", "use up"]),
    st.integers(0, 40),
    st.sampled_from([*WAYS, "breakDown", "loseConnection"]),
)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(STEPS, max_size=50), st.integers(1, TICK))
def test_clients_end_in_any_way(steps, tick):
    """However clients of two users end, and whatever waits for them, nothing of them is left in the end."""
    bus = HandTurnedBus(tick, limits=Limits(block_timeout=1e9, queue_messages=10), last_values=(LastValueRule(b"k"),))
    registry = bus.registry

    def come(number: int) -> Peer:
        peer = bus.connect(uid=1 + number % 2)
        peer.send(b"SUB k", b"CMSG interest/on\0k", b"CMSG receipts/on", *(b"SUB %d/*" % n for n in range(number)))
        if number % 3 == 0:
            peer.send(b"CMSG blocking/soft/block")
        return peer

    peers = [come(number) for number in range(24)]
    for name, who, how in steps:
        peer = peers[who % len(peers)]
        if name == "publish":
            peer.send(*[b"MSG k\0%d" % who] * (1 + who % 4))
        elif name == "ask":
            peer.send(b"CMSG !/cred/whoami", b"CMSG last\0k")
        elif name == "stall":
            peer.stall()
        elif name == "drain" and peer.is_connected:
            peer.drain()
        elif name == "leave" and peer.is_connected:
            leave(peer, how)
            bus.settle()
        elif name == "turn":
            bus.turn()
        elif name == "come":
            peers.append(come(who))
        elif name == "use up":
            bus.use_up(peer, 100 * who)
        counters = registry.counters
        assert counters.dropped == sum(each.protocol.lost for each in peers)
    for peer in peers:
        if peer.is_connected:
            peer.transport.hang_up()
    bus.settle()
    bus.finish()
    for _ in range(3):
        bus.turn(1.0)
        bus.settle()
        bus.finish()
    assert not any(peer.is_connected for peer in peers)
    assert (len(registry.clients), len(registry.users)) == (0, 0)
    assert registry.last_values is not None
    assert registry.route(b"k").receivers == (registry.last_values,)
    registry.router.remove(registry.last_values, b"k", None)
    assert registry.router.index.is_empty()
    assert registry.users.budget.memory.held == registry.last_values.memory
    assert (registry.users.budget.bytes, registry.users.budget.queues, registry.memory.buffers) == (0, 0, 0)
    assert not registry.router.muted
    assert registry.scheduler.mail_copies == 0
    assert registry.backpressure.held == 0
