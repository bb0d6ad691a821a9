"""Bounded work: while several users are active, each step ends with its user's time, and the rest waits for turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import CloseReason
from sbus.fair.lines import QUANTUM
from sbus.fair.scheduler import CROWD
from sbus.routing.cache import LONGEST_KEY
from sbus.server.bus.drain import ARRANGED_AT_ONCE
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.bus.protocol import LONG_RUN, MOST_COPIES, BusProtocol
from sbus.server.core.limits import MAX_REPLIES
from sbus.server.core.observers import Observer
from sbus.syscalls.batch import BATCH
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

TICK = QUANTUM // 5
"""Nanoseconds between two looks at the clock, in most tests."""
CHURN = [b"SUB *", b"UNSUB *"]
LONG_LOOK = QUANTUM * 4 // 5
"""Nanoseconds between two looks at the clock with which each turn has one step."""


def connect(bus: Bus, *packets: bytes, uid: int = 1000) -> Peer:
    """Connect a client that has sent these packets, with all of its user's time left."""
    peer = bus.connect(uid=uid)
    if packets:
        peer.send(*packets)
    if isinstance(bus, HandTurnedBus):
        bus.finish()
    peer.protocol.user.lines.deficit = QUANTUM
    return peer


def slow_sockets(bus: HandTurnedBus, readers: list[Peer], nanoseconds: int) -> None:
    """Have each packet to these clients take time."""
    for reader in readers:

        def slowly(packet: bytes, take: Any = reader.transport._take) -> None:
            bus._now += nanoseconds
            take(packet)

        reader.transport._take = slowly  # type: ignore[method-assign]


def runs_of(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the lengths of the runs that the bus delivers from now on."""
    runs: list[int] = []
    deliver = bus.registry.deliver

    def count(packets, *rest):
        runs.append(len(packets))
        return deliver(packets, *rest)

    monkeypatch.setattr(bus.registry, "deliver", count)
    return runs


class Slow(Observer):
    """An observer that takes time for each message."""

    def __init__(self, nanoseconds: int) -> None:
        self.now = 0
        self.nanoseconds = nanoseconds

    def published(self, client: Any, key: bytes, payload: bytes | None) -> None:
        self.now += self.nanoseconds


# --- new keys ------------------------------------------------------------------------------------


def test_new_keys_make_runs(monkeypatch):
    """Messages with new keys are delivered together, as those with known keys are."""
    bus = Bus()
    reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus)
    runs = runs_of(bus, monkeypatch)
    messages = [b"MSG k/%d\0" % n for n in range(50)]
    publisher.send(*messages)
    assert runs == [50]
    assert reader.take() == messages


@pytest.mark.parametrize(
    "between", [b"SUB x", b"MSG !/cred/1/2\0", b"MSG k/" + b"x" * LONGEST_KEY + b"\0", b"MSG k", b""]
)
def test_new_keys_around_another_packet(between):
    """What is no message with a key for the cache is handled in its place."""
    received = []
    for batches in (1, 3):
        bus = Bus()
        reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus, b"CMSG echo/on")
        before, after = [b"MSG k/%d\0" % n for n in range(3)], [b"MSG x\0", b"MSG k/9\0"]
        parts = [before, [between], after]
        for packets in parts if batches == 3 else [[*before, between, *after]]:
            publisher.send(*packets)
        received.append((reader.take(), publisher.take(), publisher.protocol.reason))
    assert received[0] == received[1]


def test_new_keys_that_do_not_stay_in_the_cache():
    """A full cache is emptied in the middle of a batch, and no message is lost or doubled."""
    bus = Bus()
    reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus)
    bus.registry.router._cache._max_keys = 3
    messages = [b"MSG k/%d\0" % n for n in range(10)]
    publisher.send(*messages)
    assert reader.take() == messages


def test_keys_that_are_looked_up_ahead_are_not_forgotten_in_vain():
    """A batch with more new keys than the cache has room for looks each up about once, not again for each message."""
    bus = HandTurnedBus(tick=1_000)
    publisher = connect(bus, b"CMSG bundle/on")
    bus.registry.router._cache._max_keys = 300
    publisher.send(*[b"MSG k/%d\0" % n for n in range(1000)])
    bus.finish()
    assert 1000 <= bus.registry.router.misses <= 1500


def test_learning_new_keys_ends_with_the_time():
    """A batch of new keys looks up no more of them than its user has time for."""
    bus = HandTurnedBus(TICK)
    publisher = connect(bus)
    bus.use_up(publisher, -QUANTUM // 1_000)
    publisher.send(*[b"MSG key/%d\0" % n for n in range(100)])
    assert 0 < bus.registry.router.misses <= QUANTUM // bus.tick + 1
    bus.finish()
    assert bus.registry.router.misses == 100
    assert bus.registry.counters.published == 100


def test_a_key_whose_look_up_takes_all_the_time():
    """At least one message is handled in each turn, however long its key took to look up."""
    bus = HandTurnedBus(tick=LONG_LOOK)
    reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus)
    bus.use_up(publisher, -1)
    publisher.send(b"MSG k/1\0", b"MSG k/2\0", b"MSG k/3\0")
    assert reader.take() == [b"MSG k/1\0"]
    bus.finish()
    assert reader.take() == [b"MSG k/2\0", b"MSG k/3\0"]


def test_routes_of_others_are_paid_for():
    """A subscription that changes everybody's routes costs its user the look-ups that others will make again."""
    bus = Bus()
    churner, other = connect(bus), connect(bus, *(b"MSG key/%d\0" % n for n in range(1000)), uid=2)
    lines = churner.protocol.user.lines
    other.send(b"MSG key/1\0")
    churner.send(b"SUB */")
    assert lines.deficit < -10 * QUANTUM
    bus.registry.scheduler.is_busy = False
    bus.registry.scheduler.crowd = 0
    churner.protocol.user.lines.deficit = QUANTUM
    churner.send(b"UNSUB */")
    assert lines.deficit == QUANTUM  # while nobody else is active, nobody waits for these look-ups


@pytest.mark.parametrize("end", ["hang_up", "close"])
def test_routes_of_others_are_paid_for_by_a_client_that_leaves(end):
    """The end of a subscription that changes everybody's routes costs its own user the look-ups, and no other one."""
    bus = HandTurnedBus(tick=0)
    leaver, other = connect(bus, b"SUB */"), connect(bus, *(b"MSG key/%d\0" % n for n in range(1000)), uid=2)
    payer = leaver.protocol.user.lines
    bus.registry.scheduler.press()
    before = payer.deficit, other.protocol.user.lines.deficit
    if end == "hang_up":
        leaver.transport.hang_up()
    else:
        leaver.protocol.close(CloseReason.OPERATOR)
    bus.turn()
    other.send(b"MSG key/1\0")
    assert payer.deficit < before[0] - 10 * QUANTUM
    assert other.protocol.user.lines.deficit > before[1] - QUANTUM


def test_a_new_key_costs_the_same_when_the_cache_is_full():
    """A user cannot fill the route cache up to the last place, and have another one pay for all of it."""
    bus = Bus()
    filler, other = connect(bus), connect(bus, uid=2)
    bus.registry.router._cache._max_keys = 1000
    filler.send(*(b"MSG key/%d\0" % n for n in range(999)))
    bus.registry.scheduler.press()
    before = other.protocol.user.lines.deficit
    other.send(b"MSG k/1\0", b"MSG k/2\0")
    assert len(bus.registry.routes) < 1000
    assert other.protocol.user.lines.deficit > before - QUANTUM // 10


# --- batches ---------------------------------------------------------------------------------------


def test_a_batch_stops_when_its_users_time_is_over():
    """A batch of subscriptions goes on turn by turn, and another user is served between two turns."""
    bus = HandTurnedBus(TICK)
    flooder, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    bus.use_up(flooder, -QUANTUM // 1_000)
    flooder.send(*CHURN * 50, b"MSG k\0end")
    turns = answers = 0
    while flooder.protocol.is_paused:
        assert reader.take() == []
        reader.protocol.user.lines.deficit = QUANTUM
        reader.send(b"MSG k\0mine")
        answers += reader.take() == [b"MSG k\0mine"]
        bus.turn()
        turns += 1
    assert reader.take() == [b"MSG k\0end"]
    assert turns == answers
    assert turns >= 100 // (QUANTUM // bus.tick) - 1


def test_a_long_run_is_cut_to_the_time_that_is_left():
    """Of a run that takes longer than its user has, as many messages are delivered as there is time for."""
    bus = HandTurnedBus(tick=1_000)
    publisher, readers = connect(bus), [connect(bus, b"SUB k") for _ in range(200)]
    slow_sockets(bus, readers, 1_000)  # 200 µs for a message
    publisher.send(b"MSG k\0")
    bus.finish()
    for reader in readers:
        reader.take()
    bus.use_up(publisher, -QUANTUM // 1_000)
    messages = [b"MSG k\0%d" % n for n in range(50)]
    publisher.send(*messages)
    got = readers[0].take()
    assert 1 <= len(got) <= 6  # the first estimate is half of what it takes
    assert publisher.protocol.is_paused
    bus.finish()
    assert got + readers[0].take() == messages
    assert {len(reader.take()) for reader in readers[1:]} == {50}


def test_a_long_run_for_the_mail_is_cut_to_a_number_of_copies(monkeypatch):
    """A run that waits in the mail costs its publisher the same for any number of receivers: no time is looked at."""
    bus = HandTurnedBus(tick=1_000)
    publisher, own = connect(bus), connect(bus, b"SUB k")
    readers = [connect(bus, b"SUB k", uid=2 + n % 3) for n in range(600)]
    runs = runs_of(bus, monkeypatch)
    monkeypatch.setattr(bus.registry.scheduler, "working_time", lambda: pytest.fail("a run was measured"))
    bus.registry.scheduler.press()
    messages = [b"MSG k\0%d" % n for n in range(BATCH)]
    publisher.send(*messages)
    assert runs == [MOST_COPIES // 601, BATCH - MOST_COPIES // 601]
    assert own.take() == messages
    bus.finish()
    assert {tuple(reader.take()) for reader in readers} == {tuple(messages)}


def test_a_lone_message_is_no_long_run(monkeypatch):
    """A message alone cannot be cut, so it takes the shortest way, whatever the number of its receivers."""
    bus = Bus()
    publisher = connect(bus)
    readers = [connect(bus, b"SUB k", uid=2 + n % 5) for n in range(LONG_RUN + 1)]
    bus.registry.scheduler.press()
    publisher.send(b"MSG k\0first")
    monkeypatch.setattr(BusProtocol, "_handle_batch", lambda *_: pytest.fail("it was handled as a long run"))
    publisher.send(b"MSG k\0second")
    monkeypatch.undo()
    bus.settle()
    assert {tuple(reader.take()) for reader in readers} == {(b"MSG k\0first", b"MSG k\0second")}


def test_copies_that_wait_in_the_mail_teach_nothing(monkeypatch):
    """Receivers that wait for earlier mail get a run by mail, so it says nothing of the time that their copies take."""
    bus = HandTurnedBus(tick=1_000)
    publisher, stranger = connect(bus), connect(bus, uid=2)
    readers = [connect(bus, b"SUB k") for _ in range(200)]
    bus.registry.scheduler.press()
    stranger.send(b"MSG k\0")  # an entry for all of them
    before = bus.registry.routes[b"k"].ns
    monkeypatch.setattr(bus.registry.scheduler, "working_time", lambda: pytest.fail("a run was measured"))
    messages = [b"MSG k\0%d" % n for n in range(BATCH)]
    publisher.send(*messages)
    assert bus.registry.routes[b"k"].ns == before
    monkeypatch.undo()
    bus.finish()
    assert {tuple(reader.take()) for reader in readers} == {(b"MSG k\0", *messages)}


def test_large_copies_that_wait_in_the_mail_teach_nothing():
    """Nor does a run of a user alone that is too large to be copied at once."""
    bus = HandTurnedBus(tick=1_000)
    publisher, readers = connect(bus), [connect(bus, b"SUB k") for _ in range(200)]
    bus.registry.scheduler.finish(publisher.protocol.user.lines)
    publisher.send(b"MSG k\0first")
    before = bus.registry.routes[b"k"].ns
    messages = [b"MSG k\0" + bytes(8_000) for _ in range(20)]
    publisher.send(*messages)
    assert bus.registry.scheduler.mail_copies == 20 * 200
    assert bus.registry.routes[b"k"].ns == before
    bus.finish()
    assert {tuple(reader.take()) for reader in readers} == {(b"MSG k\0first", *messages)}


@pytest.mark.parametrize("readers", [0, 10, 100])
def test_a_user_alone_waits_for_no_turn(readers):
    """While no other user sends, batches follow each other without a turn between them; then they need turns again."""
    bus = HandTurnedBus(TICK)
    publisher, stranger = connect(bus), connect(bus, uid=2)
    peers = [connect(bus, b"SUB k") for _ in range(readers)]
    scheduler = bus.registry.scheduler
    for _ in range(CROWD + 1):
        publisher.send(b"MSG k\0")
    waited = scheduler.waited
    assert not scheduler.is_busy
    for _ in range(10):
        publisher.send(*[b"MSG k\0"] * BATCH)
    assert scheduler.waited == waited
    stranger.send(b"MSG other\0")
    for _ in range(10):
        publisher.send(*[b"MSG k\0"] * BATCH)
    assert scheduler.waited > waited
    bus.finish()
    assert {len(peer.take()) for peer in peers} == ({CROWD + 1 + 20 * BATCH} if readers else set())


@pytest.mark.parametrize("routes", [1, 2])
def test_a_batch_with_several_routes_is_not_taken_apart(routes):
    """While no other user sends, each receiver gets its part of a batch in one piece, and nobody waits."""
    bus = HandTurnedBus(tick=1_000)
    publisher = connect(bus)
    readers = [connect(bus, b"SUB k%d" % (number % routes)) for number in range(32 * routes)]
    batch = [b"MSG k%d\0" % (number * routes // BATCH) for number in range(BATCH)]
    for _ in range(10):
        publisher.send(*batch)
        assert not publisher.protocol.is_paused
        assert {len(reader.take()) for reader in readers} == {BATCH // routes}


def test_one_user_that_comes_and_goes_is_alone():
    """A bus with one user counts as one user's, however often the last of its clients leaves and the next one comes."""
    bus = HandTurnedBus(TICK)
    for _ in range(3):
        client = connect(bus)
        client.send(b"MSG k\0")
        assert bus.registry.scheduler.crowd == 0
        client.transport.end()
        bus.settle()
        bus.finish()


def test_clients_of_one_user_take_turns():
    """Of many clients that could use up a turn alone, each gets its turns, and none waits forever."""
    bus = HandTurnedBus(TICK)
    peers = [connect(bus) for _ in range(40)]
    bus.use_up(peers[0], 0)
    for peer in peers:
        peer.send(*CHURN * 100)
    while all(peer.protocol.is_paused for peer in peers):
        bus.use_up(peers[0], 0)
        bus.turn()
    left = [len(peer.transport._arrived) for peer in peers]
    assert max(left) - min(left) <= 2 * QUANTUM // bus.tick
    assert sum(count < 200 for count in left) == 40


def test_a_publisher_is_charged_for_few_copies_of_others():
    """A message costs its publisher at most `OF_OTHERS` copies for each other user; more are at that user's (I16)."""
    charged = []
    for count in (OF_OTHERS, OF_OTHERS + 1, 200):
        bus = HandTurnedBus(TICK)
        publisher = connect(bus)
        readers = [connect(bus, b"SUB k", uid=2) for _ in range(count)]
        slow_sockets(bus, readers, 10_000)
        publisher.send(b"MSG k\0")
        bus.finish()
        bus.use_up(publisher, -QUANTUM // 1_000)
        of_readers = readers[0].protocol.user.lines
        of_readers.deficit = QUANTUM
        publisher.send(b"MSG k\0")
        charged.append(QUANTUM - publisher.protocol.user.lines.deficit)
        assert of_readers.deficit == QUANTUM
        bus.turn()
        assert (of_readers.deficit < QUANTUM) is (count > OF_OTHERS)
        bus.finish()
        assert {len(reader.take()) for reader in readers} == {2}
    assert charged[0] - charged[1] == 10_000 * OF_OTHERS
    assert charged[1] == charged[2]


def test_a_batch_is_charged_with_the_time_that_it_took():
    """A client whose packets take longer waits longer; while its user is alone, nothing is measured."""
    slow = Slow(3_000_000)
    bus = Bus(observers=[slow])
    bus.registry.scheduler.clock = lambda: slow.now
    peer, other = connect(bus), connect(bus, uid=2)
    lines = peer.protocol.user.lines
    peer.send(b"MSG slow\0")
    assert lines.deficit == QUANTUM
    other.send(b"SUB k")
    peer.transport.deliver(b"MSG slow\0", b"MSG slow\0")
    assert lines.deficit == QUANTUM - 3_000_000
    assert slow.now == 6_000_000
    bus.settle()
    assert slow.now == 9_000_000
    assert bus.registry.counters.published == 3


def test_a_large_message_for_many_is_handed_out_in_turns():
    """One message to a thousand clients that read can be seconds of copying: other users are served meanwhile."""
    bus = HandTurnedBus(TICK)
    readers = [connect(bus, b"SUB k", uid=2) for _ in range(200)]
    other, publisher = connect(bus, b"SUB other", uid=3), connect(bus)
    publisher.send(b"MSG k\0".ljust(400 << 10, b"x"))
    got = sum(len(reader.take()) for reader in readers)
    while got < len(readers):
        bus.use_up(other, -QUANTUM // 1_000)
        other.send(b"MSG other\0")
        assert other.take() == [b"MSG other\0"]
        bus.turn()
        more = sum(len(reader.take()) for reader in readers)
        assert more <= QUANTUM // bus.tick + 1  # one at a time
        got += more
    assert got == len(readers)


# --- chores ----------------------------------------------------------------------------------------


def test_sockets_with_room_are_a_chore():
    """While others are active, what waits for a client is sent in turns of its user, one socket after the other."""
    bus = HandTurnedBus(TICK)
    readers, publisher = [connect(bus, b"SUB k", uid=2) for _ in range(8)], connect(bus)
    for reader in readers:
        reader.stall()
    publisher.send(*[b"MSG k\0"] * 3)
    bus.finish()
    bus.use_up(publisher, 0)
    for reader in readers:
        reader.drain()
    assert all(reader.take() == [] for reader in readers)
    served = 0
    while not served:  # the events have left a debt
        bus.turn()
        served = sum(reader.take() == [b"MSG k\0"] * 3 for reader in readers)
    assert served < 8
    bus.finish()
    assert not any(len(reader.protocol.queue) for reader in readers)
    assert bus.registry.counters.dropped == 0


@pytest.mark.parametrize(("order", "least"), [(b"order/stack", 1), (b"order/random", 3)])
def test_a_long_backlog_is_put_in_order_in_turns(order, least):
    """A client's choice of another order takes its user's turns, by the messages that have to get ranks."""
    bus = HandTurnedBus(tick=LONG_LOOK)
    reader, publisher = connect(bus, b"SUB k", uid=2), connect(bus)
    reader.stall()
    count = 3 * ARRANGED_AT_ONCE
    for start in range(0, count, 1_024):
        publisher.send(*(b"MSG k\0%d" % n for n in range(start, start + 1_024)))
        bus.finish()
    reader.send(b"CMSG " + order)
    bus.finish()
    bus.use_up(publisher, 0)
    reader.drain()
    turns = 0
    while not (got := reader.take()):
        bus.turn()
        turns += 1
    bus.finish()
    got += reader.take()
    assert turns >= least
    assert sorted(got) == sorted(b"MSG k\0%d" % n for n in range(count))
    assert order != b"order/stack" or got == [b"MSG k\0%d" % n for n in reversed(range(count))]


# --- readers ---------------------------------------------------------------------------------------


def test_reasons_to_be_paused():
    """A client is read again when no receiver blocks it, few replies wait, no mail, and it does not wait for a turn."""
    bus = HandTurnedBus(tick=1_000)
    publisher = connect(bus)
    protocol = publisher.protocol
    publisher.stall()
    publisher.send(*[b"CMSG !/cred/whoami"] * (MAX_REPLIES + 1))
    assert publisher.transport.is_paused
    protocol.pause_publishing()
    protocol.wait_for_mail()
    protocol.wait_for_mail()
    protocol._wait(protocol._scheduler.wait)
    protocol.resume_publishing()
    protocol.mail_delivered()
    assert publisher.transport.is_paused
    publisher.drain()
    bus.finish()
    assert len(publisher.take()) == MAX_REPLIES + 1
    assert publisher.transport.is_paused
    protocol.mail_delivered()
    assert not protocol.is_paused
    protocol._wait(protocol._scheduler.wait)
    protocol.pause_publishing()
    bus.finish()
    assert publisher.transport.is_paused
    protocol.resume_publishing()
    assert not protocol.is_paused


def test_what_a_dead_client_has_sent_is_handled_in_turns():
    """The packets of a client that has hung up while it waited are all handled; then the connection ends."""
    bus = HandTurnedBus(TICK)
    peer, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    bus.use_up(peer, 0)
    peer.send(*CHURN * 50, *[b"CMSG !/cred/whoami"] * 100, b"MSG k\0last")
    peer.transport.hang_up()
    bus.settle()
    bus.turn()
    assert peer.is_connected
    assert reader.take() == []
    bus.finish()
    assert reader.take() == [b"MSG k\0last"]
    assert not peer.is_connected


@pytest.mark.parametrize("hung_up", [1, 9])
def test_what_was_sent_before_a_client_closed_comes_first(hung_up):
    """Messages of clients that have closed are handled before those of a client of the user that came later (I14)."""
    bus = HandTurnedBus(TICK)
    reader, first = connect(bus, b"SUB k", uid=2), connect(bus)
    bus.use_up(first, 3_000)
    peers = [bus.connect() for _ in range(hung_up)]
    first.send(b"MSG k\0open")
    for number, peer in enumerate(peers):
        peer.send(*CHURN * 10, b"MSG k\0%d" % number)
        peer.transport.hang_up()
        bus.settle()
    late = bus.connect()
    late.send(b"MSG k\0late")
    assert reader.take() == []
    bus.finish()
    got = [packet[6:] for packet in reader.take()]
    assert got == [*(b"%d" % number for number in range(hung_up)), b"open", b"late"]
    assert not any(peer.is_connected for peer in peers)


def test_a_client_that_is_closed_takes_no_turn():
    """After `disconnect_all` no packet of a client is handled, also not one that waited; nothing stays behind."""
    bus = HandTurnedBus(TICK)
    peer, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    bus.use_up(peer, 0)
    peer.send(*CHURN * 1000, b"MSG k\0")
    assert peer.protocol.is_paused
    bus.registry.disconnect_all(sidecars=True)
    bus.settle()
    bus.finish()
    assert reader.take() == []
    assert not bus.registry.clients
    assert len(bus.registry.users) == 0
    assert bus.registry.counters.published == 0


PACKETS = st.sampled_from(("message", "message", "message", "sub", "whoami", "unknown"))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(PACKETS, min_size=1, max_size=40)), max_size=12),
    st.integers(1, LONG_LOOK),
    st.integers(0, 3),
    st.sampled_from([1, OF_OTHERS + 1]),
)
def test_turns_neither_lose_nor_double_nor_reorder(batches, tick, stalls, readers):
    """Whatever several clients of several users send, and however little fits a turn, each packet counts once."""
    bus = HandTurnedBus(tick=tick)
    some = [connect(bus, b"SUB k/", uid=9) for _ in range(readers)]
    peers = [connect(bus, uid=number % 3) for number in range(6)]
    sent: list[list[bytes]] = [[] for _ in peers]
    asked = [0] * len(peers)
    for number, kinds in batches:
        packets = []
        for kind in kinds:
            if kind == "message":
                packets.append(b"MSG k/%d\0%d" % (number, len(sent[number])))
                sent[number].append(packets[-1])
            elif kind == "whoami":
                packets.append(b"CMSG !/cred/whoami")
                asked[number] += 1
            else:
                packets.append(b"SUB x" if kind == "sub" else b"CMSG unknown")
        peers[number].send(*packets)
        if stalls and number % stalls == 0:
            bus.turn()
    bus.finish()
    orders = [reader.take() for reader in some]
    got = orders[0]
    assert orders == [got] * readers
    for number, peer in enumerate(peers):
        assert [packet for packet in got if packet.startswith(b"MSG k/%d\0" % number)] == sent[number]
        assert len(peer.take()) == asked[number]
        assert not peer.protocol.is_paused
    assert len(got) == sum(map(len, sent))
