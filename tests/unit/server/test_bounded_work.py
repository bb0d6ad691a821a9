"""Bounded work: a client whose user has spent its balance stops inside its batch, and goes on in later turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock

from sbus.routing.cache import LONGEST_KEY
from sbus.seqpacket.pacing import BUNDLES_PER_READ
from sbus.server.bus import protocol
from sbus.server.bus.protocol import OVERDRAFT
from sbus.server.core import turns
from sbus.server.core.limits import MAX_REPLIES
from sbus.server.core.observers import Observer
from sbus.server.core.prices import (
    COPIED_KIB,
    COPIES,
    LOOK_UP_STEPS,
    PACKET,
    READ,
    REORDERED,
    REPLY,
    SUBSCRIPTION,
    UNSHARED,
    subscription_work,
)
from sbus.server.core.turns import CONTENDED_BUDGET, CROWD, TURN_BUDGET
from sbus.syscalls.batch import BATCH
from tests.support.buses import Bus, Peer
from tests.support.examples import examples


class Looking(Observer):
    """Wants to see each message, so that none takes the fast path."""

    def published(self, client: object, key: bytes, payload: bytes | None) -> None:
        pass


class Turned(Bus):
    """A bus that takes the turns of its users only when a test says so."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.calls: list = []
        self.registry.turns._reactor = self
        self.cpu = 0
        self.registry.turns.cpu = lambda: self.cpu  # nanoseconds

    def seconds(self) -> float:
        return 0.0

    def callLater(self, _delay: float, call) -> None:
        self.calls.append(call)

    def turn(self) -> bool:
        """Take one turn; return whether another one is due."""
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        self.settle()
        return bool(self.calls)


def connect(bus: Bus, *packets: bytes, uid: int = 1000) -> Peer:
    """Connect a client that has sent these packets, with a full balance."""
    peer = bus.connect(uid=uid)
    if packets:
        peer.send(*packets)
    peer.protocol.user.work_left = TURN_BUDGET
    return peer


@pytest.mark.parametrize(
    ("packets", "work"),
    [
        ([b"MSG nobody\0"] * 3, 1 + 3 // COPIES),
        ([b"MSG k\0"] * 3, 1 + 3 * 2 // COPIES),
        ([b"MSG k\0", b"CMSG unknown"], 1 + 2 // COPIES + PACKET),
        ([b"SUB a", b"SUB a", b"UNSUB a"], 3 * (PACKET + SUBSCRIPTION)),
        ([b"CMSG !/cred/whoami"], PACKET + REPLY),
        ([b"SUB a/b*/c", b"UNSUB a/b*/c"], 2 * (PACKET + subscription_work(b"a/b*/c", b"/"))),
        ([b"NONSENSE"], PACKET),
    ],
)
def test_prices(packets, work):
    """Each kind of packet has its price, on the fast path and beside it; a first look-up costs a little more."""
    bus = Bus(ignore_violations=True)
    connect(bus, b"SUB k", uid=2)
    peer = connect(bus, *packets)
    peer.send(*packets)
    assert work <= TURN_BUDGET - peer.protocol.user.work_left <= work + 2


@pytest.mark.parametrize("observers", [[], [Looking()]])
@pytest.mark.parametrize("count", [1, 3])
def test_large_messages_have_a_price(count, observers):
    """The bytes of a message beyond the first KiB are work, once, for its reader's user as well."""
    bus = Bus(observers=observers)
    reader, publisher = connect(bus, b"SUB k", uid=2), connect(bus)
    publisher.send(b"MSG k\0")
    balances = publisher.protocol.user, reader.protocol.queue.copies
    for size in (1 << 10, 101 << 10):
        for balance in balances:
            balance.work_left = TURN_BUDGET
        publisher.send(*[b"MSG k\0".ljust(size, b"x")] * count)
        spent = [TURN_BUDGET - balance.work_left for balance in balances]
        kib = count * (size - 1024) // 1024
        assert kib + kib // COPIED_KIB <= spent[0] < kib + kib // COPIED_KIB + 20
        assert kib // COPIED_KIB <= spent[1] < kib // COPIED_KIB + 10


def test_a_large_message_that_is_refused_has_a_price():
    """The bytes of a message that breaks a rule are work, too."""
    peer = connect(Bus(ignore_violations=True))
    peer.send(b"MSG !/cred/x\0".ljust(101 << 10, b"x"))
    assert TURN_BUDGET - peer.protocol.user.work_left == PACKET + 101


def test_a_large_message_for_many_is_handed_out_in_turns():
    """One message to a thousand clients that read can be seconds of copying: other users are served meanwhile."""
    bus = Turned()
    readers = [connect(bus, b"SUB k", uid=2) for _ in range(200)]
    other, publisher = connect(bus, b"SUB other", uid=3), connect(bus)
    publisher.send(b"MSG k\0".ljust(400 << 10, b"x"))
    got = sum(len(reader.take()) for reader in readers)
    assert TURN_BUDGET // (400 // COPIED_KIB) <= got < len(readers)
    while got < len(readers):
        other.send(b"MSG other\0")
        assert other.take() == [b"MSG other\0"]
        bus.turn()
        got += sum(len(reader.take()) for reader in readers)
    assert got == len(readers)


def test_look_ups_and_forgotten_routes_have_a_price():
    """Whoever makes the router work pays for its steps, and for the routes that the cache forgets."""
    bus = Bus()
    peer = connect(bus, *(b"SUB a/" + b"b" * n + b"*" for n in range(100)))
    peer.send(b"MSG a/" + b"b" * 200 + b"\0")
    assert TURN_BUDGET - peer.protocol.user.work_left > 100 // LOOK_UP_STEPS
    other = connect(bus, *(b"MSG key/%d\0" % n for n in range(1000)), uid=2)
    other.send(b"SUB */")
    assert TURN_BUDGET - other.protocol.user.work_left > 1000 * 160 // LOOK_UP_STEPS


def test_new_keys_have_a_price():
    """A message with a key that was never seen costs several times what one with a known key does."""
    bus = Bus()
    peer = connect(bus)
    spent = []
    for _ in range(2):
        peer.protocol.user.work_left = TURN_BUDGET
        peer.send(*(b"MSG key/%d\0" % n for n in range(100)))
        spent.append(TURN_BUDGET - peer.protocol.user.work_left)
    assert spent[0] >= 100 * 5
    assert spent[1] <= 100


def test_new_keys_make_runs(monkeypatch):
    """Messages with new keys are delivered together, as those with known keys are."""
    bus = Bus()
    reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus)
    runs: list[int] = []
    deliver = bus.registry.deliver

    def count(packets, *rest):
        runs.append(len(packets))
        return deliver(packets, *rest)

    monkeypatch.setattr(bus.registry, "deliver", count)
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
    bus.registry._router._cache._max_keys = 3
    messages = [b"MSG k/%d\0" % n for n in range(10)]
    publisher.send(*messages)
    assert reader.take() == messages


def test_keys_that_are_looked_up_ahead_are_not_forgotten_in_vain():
    """A batch with more new keys than the cache has room for looks each up about once, not again for each message."""
    bus = Turned()
    publisher = bus.connect()
    publisher.send(b"CMSG bundle/on")
    bus.registry._router._cache._max_keys = 300
    publisher.send(*[b"MSG k/%d\0" % n for n in range(1000)])
    while bus.turn():
        pass
    assert 1000 <= bus.registry._router.misses <= 1500


def test_a_new_key_that_costs_more_than_the_balance():
    """At least one message goes on after its key was looked up, however large the debt is then."""
    bus = Turned()
    reader, publisher = connect(bus, b"SUB k/", uid=2), bus.connect()
    bus.registry._router.steps = 1_000_000
    publisher.send(b"MSG k/1\0", b"MSG k/2\0")
    assert reader.take() == [b"MSG k/1\0"]
    assert publisher.protocol.reason is None
    while bus.turn():
        pass
    assert reader.take() == [b"MSG k/2\0"]


def test_learning_new_keys_ends_with_the_balance():
    """A batch of new keys looks up no more of them than its user can pay for in a turn."""
    bus = Turned()
    publisher = bus.connect()
    bus.registry.turns.crowd = CROWD  # other users send
    publisher.protocol.user.work_left = 50
    publisher.send(*[b"MSG key/%d\0" % n for n in range(100)])
    assert bus.registry._router.misses <= 10
    while bus.turn():
        pass
    assert bus.registry._router.misses == 100


def test_a_batch_stops_where_the_balance_is_spent():
    """A batch of subscriptions goes on turn by turn, and another user is served between two turns."""
    bus = Turned()
    flooder, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    flooder.send(*[b"SUB *", b"UNSUB *"] * 2000, b"MSG k\0end")
    rounds = 0
    while flooder.protocol.is_paused:
        assert reader.take() == []
        reader.send(b"MSG k\0mine")
        assert reader.take() == [b"MSG k\0mine"]
        bus.turn()
        rounds += 1
    assert reader.take() == [b"MSG k\0end"]
    assert rounds >= 4000 * (PACKET + SUBSCRIPTION) // TURN_BUDGET


def test_a_run_with_many_receivers_is_taken_apart():
    """A batch that costs more than the balance and the overdraft is delivered in parts; all others, at once."""
    balance, price = 23, (1 + 10) / COPIES
    most = 1 + int((balance + OVERDRAFT) / price)
    for count, is_paused in ((4, False), (5, False), (most, False), (most + 1, True)):
        bus = Turned()
        publisher = connect(bus)
        publisher.send(b"MSG k\0")
        readers = [connect(bus, b"SUB k", uid=2) for _ in range(10)]
        publisher.send(b"MSG k\0")
        publisher.protocol.user.work_left = balance
        publisher.send(*(b"MSG k\0%d" % n for n in range(count)))
        assert publisher.protocol.is_paused is is_paused
        while bus.turn():
            pass
        for reader in readers:
            assert reader.take() == [b"MSG k\0", *(b"MSG k\0%d" % n for n in range(count))]


@pytest.mark.parametrize(("readers", "is_paused"), [(64, False), (2 * 64, True)])
def test_a_user_alone_keeps_its_batches_whole(readers, is_paused):
    """While no other user sends, a batch to 64 receivers ends a turn whole; one to 128 is taken apart."""
    bus = Turned()
    publisher, peers = connect(bus), [connect(bus, b"SUB k") for _ in range(readers)]
    publisher.send(b"MSG k\0")
    for _ in range(2):  # the price of the first batch is not known yet
        publisher.protocol.user.work_left = 1
        publisher.send(*[b"MSG k\0"] * BATCH)
        was_paused = publisher.protocol.is_paused
        while bus.turn():
            pass
    assert was_paused is is_paused
    assert {len(peer.take()) for peer in peers} == {1 + 2 * BATCH}


def test_a_user_alone_waits_for_no_turn():
    """While no other user sends, batches follow each other without a turn between them; then they need turns again."""
    bus = Turned()
    publisher, stranger = connect(bus), connect(bus, uid=2)
    readers = [connect(bus, b"SUB k") for _ in range(64)]
    publisher.send(b"MSG k\0")
    for _ in range(10):
        publisher.send(*[b"MSG k\0"] * BATCH)
    assert not bus.calls
    stranger.send(b"MSG other\0")
    for _ in range(3):
        publisher.send(*[b"MSG k\0"] * BATCH)
    assert bus.calls
    while bus.turn():
        pass
    assert {len(reader.take()) for reader in readers} == {1 + 13 * BATCH}


def test_the_clients_of_one_user_are_topped_up_once_in_a_pass():
    """Of many clients that have much to send, all in one pass, most wait for turns, though no other user sends."""
    bus = Turned()
    publishers = [connect(bus) for _ in range(10)]
    readers = [connect(bus, b"SUB k") for _ in range(64)]
    publishers[0].send(b"MSG k\0")
    for publisher in publishers:
        publisher.transport.passes = bus.passes + 1
        publisher.transport.deliver(*[b"MSG k\0"] * BATCH)
    assert sum(publisher.protocol.is_paused for publisher in publishers) >= 5
    while bus.turn():
        pass
    assert {len(reader.take()) for reader in readers} == {1 + 10 * BATCH}


@pytest.mark.parametrize(("readers", "is_topped_up"), [(32, True), (128, False)])
def test_a_budget_on_the_spot_pays_for_a_whole_batch(readers, is_topped_up):
    """A message to so many receivers that a batch of them is more than a turn is paid for in turns."""
    bus = Turned()
    publisher = connect(bus)
    for _ in range(readers):
        connect(bus, b"SUB k")
    publisher.send(b"MSG k\0")
    publisher.protocol.user.work_left = 1
    publisher.send(b"MSG k\0")
    assert (publisher.protocol.user.work_left > 0) is is_topped_up


@pytest.mark.parametrize("routes", [1, 2])
def test_a_batch_with_several_routes_is_not_taken_apart(routes):
    """While no other user sends, each receiver gets its part of a batch in one piece, and nobody waits."""
    bus = Turned()
    publisher = connect(bus)
    readers = [connect(bus, b"SUB k%d" % (number % routes)) for number in range(32 * routes)]
    batch = [b"MSG k%d\0" % (number * routes // BATCH) for number in range(BATCH)]
    for _ in range(10):
        publisher.send(*batch)
        assert not publisher.protocol.is_paused
        assert {len(reader.take()) for reader in readers} == {BATCH // routes}
    assert not bus.calls


def test_one_user_that_comes_and_goes_is_alone():
    """A bus with one user counts as one user's, however often the last of its clients leaves and the next one comes."""
    bus = Turned()
    for _ in range(3):
        client = connect(bus)
        client.send(b"MSG k\0")
        assert bus.registry.turns.crowd == 0
        client.transport.end()
        while bus.turn():
            pass


def test_clients_of_one_user_take_turns():
    """Of many clients that could use up a turn alone, each gets its turns, and none waits forever."""
    bus = Turned()
    peers = [connect(bus) for _ in range(40)]
    for peer in peers:
        peer.send(*[b"SUB *", b"UNSUB *"] * 1000)
    done = []
    while bus.turn():
        done = [peer for peer in peers if not peer.protocol.is_paused]
        if done:
            break
    left = [len(peer.transport._arrived) for peer in peers]
    assert max(left) - min(left) <= 2 * TURN_BUDGET // SUBSCRIPTION
    assert sum(count < 2000 for count in left) == 40


def test_three_reasons_to_be_paused():
    """A client is read again when no receiver blocks it, few replies wait, and it does not wait for its turn."""
    bus = Turned()
    publisher, blocker = connect(bus), connect(bus, b"SUB k", b"CMSG blocking/soft/block")
    publisher.stall()
    blocker.stall()
    publisher.send(*[b"CMSG !/cred/whoami"] * (MAX_REPLIES + 1))
    assert publisher.transport.is_paused
    publisher.protocol.pause_publishing()
    publisher.protocol._wait_for_turn(False)
    publisher.protocol.resume_publishing()
    assert publisher.transport.is_paused
    publisher.drain()
    assert publisher.transport.is_paused
    bus.turn()
    assert not publisher.transport.is_paused
    publisher.protocol._wait_for_turn(False)
    publisher.protocol.pause_publishing()
    bus.turn()
    assert publisher.transport.is_paused
    publisher.protocol.resume_publishing()
    assert not publisher.protocol.is_paused


def test_what_a_dead_client_has_sent_is_handled_in_turns():
    """The packets of a client that has hung up while it waited are all handled; then the connection ends."""
    bus = Turned()
    peer, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    peer.send(*[b"SUB *", b"UNSUB *"] * 1000, *[b"CMSG !/cred/whoami"] * 100, b"MSG k\0last")
    peer.transport.hang_up()
    bus.settle()
    assert peer.is_connected
    assert reader.take() == []
    while bus.turn():
        pass
    assert reader.take() == [b"MSG k\0last"]
    assert not peer.is_connected


def test_a_client_that_is_closed_takes_no_turn():
    """After `disconnect_all` no packet of a client is handled, also not one that waited; nothing stays behind."""
    bus = Turned()
    peer, reader = connect(bus), connect(bus, b"SUB k", uid=2)
    peer.send(*[b"SUB *", b"UNSUB *"] * 1000, b"MSG k\0")
    assert peer.protocol.is_paused
    bus.registry.disconnect_all(sidecars=True)
    bus.settle()
    while bus.turn():
        pass
    assert reader.take() == []
    assert not bus.registry.clients
    assert not bus.registry.turns._waiting
    assert bus.registry.counters.published == 0


PACKETS = st.sampled_from(("message", "message", "message", "sub", "whoami", "unknown"))


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(PACKETS, min_size=1, max_size=40)), max_size=12),
    st.integers(1, 200),
    st.integers(0, 3),
)
def test_turns_neither_lose_nor_double_nor_reorder(batches, budget, stalls):
    """Whatever several clients of several users send, and however small a turn is, each packet counts once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "TURN_BUDGET", budget)
        bus = Turned()
        reader = connect(bus, b"SUB k/", uid=9)
        peers = [connect(bus, uid=number % 3) for number in range(6)]
        for peer in peers:
            peer.protocol.user.work_left = budget
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
        for _ in range(100_000):
            if not bus.turn():
                break
        got = reader.take()
        for number, peer in enumerate(peers):
            assert [packet for packet in got if packet.startswith(b"MSG k/%d\0" % number)] == sent[number]
            assert len(peer.take()) == asked[number]
            assert not peer.protocol.is_paused
        assert len(got) == sum(map(len, sent))


def test_a_debt_outlives_the_connection():
    """A user that reconnects finds its debt, and one that does not is forgotten when the debt is paid."""
    bus = Turned()
    debtor = connect(bus, uid=7)
    user = debtor.protocol.user
    user.work_left = -5 * TURN_BUDGET
    user.copies.work_left = -2 * TURN_BUDGET
    for _ in range(3):
        debtor.transport.loseConnection()
        bus.settle()
        debtor = bus.connect(uid=7)
        assert debtor.protocol.user is user
        assert user.work_left < -4 * TURN_BUDGET
    debtor.transport.loseConnection()
    bus.settle()
    turns_taken = 0
    while bus.turn():
        turns_taken += 1
        assert bus.registry.users[7] is user
    assert 5 <= turns_taken <= 12
    assert len(bus.registry.users) == 0
    assert not bus.registry.turns._waiting


def test_the_order_of_a_long_backlog_has_a_price():
    """To choose another order costs by the messages that have to be put into it; the same order again costs nothing."""
    bus = Bus()
    reader, publisher = connect(bus, b"SUB k", uid=2), connect(bus)
    reader.stall()
    publisher.send(*[b"MSG k\0"] * 600)
    for packet, work in ((b"CMSG order/stack", 600 // REORDERED), (b"CMSG order/stack", 0)):
        reader.protocol.user.work_left = TURN_BUDGET
        reader.send(packet)
        assert work <= TURN_BUDGET - reader.protocol.user.work_left <= work + 3 * PACKET


def test_reads_of_a_stream_without_a_packet_are_work():
    """A client whose bytes come one by one spends its user's turn, is not read from, and goes on in the next turn."""
    bus = Bus()
    client = bus.connect()
    user = client.protocol.user
    user.work_left = CONTENDED_BUDGET
    report = client.transport.on_vain_read
    assert report is not None
    report(CONTENDED_BUDGET - 1)
    assert not client.protocol.is_paused
    report(1)
    assert client.protocol.is_paused
    client.send(b"CMSG !/cred/whoami")
    assert len(client.take()) == 1
    assert not client.protocol.is_paused


def test_a_user_whose_reads_complete_no_packet_has_a_small_part_of_the_time():
    """A client that has taken more than its user's part rests, whatever the balance, and then waits for a turn."""
    clock = Clock()
    bus = Turned(clock=clock)
    first, client = bus.connect(), bus.connect()
    for each, took in ((first, 50_000), (client, 100_000)):
        each.protocol.user.work_left = took + 1
        assert each.transport.on_vain_read is not None
        each.transport.on_vain_read(took)
        assert each.protocol.is_paused is (each is client)
    clock.advance(1.99)
    assert client.protocol.is_paused
    client.send(b"CMSG !/cred/whoami")
    assert client.take() == []
    clock.advance(0.01)
    bus.turn()
    assert len(client.take()) == 1
    assert not client.protocol.is_paused


def test_to_reconnect_is_no_way_out_of_a_rest():
    """A user who has spent its part rests again as soon as it is back."""
    clock = Clock()
    bus = Turned(clock=clock)
    for is_resting in (False, True):
        client = bus.connect()
        assert client.transport.on_vain_read is not None
        client.transport.on_vain_read(50_000)
        assert (client.protocol._rest is not None) is is_resting
        client.transport.abortConnection()
        bus.settle()
        while bus.turn():
            pass
        assert len(bus.registry.users) == 0


def test_a_client_that_has_gone_does_not_rest():
    """One whose socket the server cannot write to is read from at once: it has probably left."""
    clock = Clock()
    bus = Turned(clock=clock)
    client = bus.connect()
    assert client.transport.on_vain_read is not None
    client.transport.on_vain_read(1_000_000)
    assert client.protocol.is_paused
    client.protocol.writeConnectionLost()
    assert clock.getDelayedCalls() == []
    while bus.turn():
        pass
    assert not client.protocol.is_paused


def test_a_client_that_rests_can_leave():
    """Its timer is cancelled, and nothing is left of it."""
    clock = Clock()
    bus = Bus(clock=clock)
    client = bus.connect()
    assert client.transport.on_vain_read is not None
    client.transport.on_vain_read(1_000_000)
    (rest,) = [call for call in clock.getDelayedCalls() if call.active()]
    client.transport.abortConnection()
    bus.settle()
    assert not client.is_connected
    assert not rest.active()


def test_bundles_are_read_in_the_turns_of_their_user():
    """A client of bundles that has had no turn waits behind the others; one that could do nothing in it comes first."""
    bus = Turned()
    others, client = [bus.connect() for _ in range(2)], bus.connect()
    client.send(b"CMSG bundle/on")
    user = client.protocol.user
    user.work_left = 0
    for other in others:
        assert other.transport.on_vain_read is not None
        other.transport.on_vain_read(1)
    before_read = client.transport.before_read
    assert before_read is not None
    before_read()
    assert client.protocol.is_paused
    line = bus.registry.turns._waiting[user, False]
    assert list(line.others) == [other.protocol for other in (*others, client)]
    user.work_left = -CONTENDED_BUDGET // 2
    line.others.clear()
    client.protocol.take_turn()
    before_read()
    assert list(line.first) == [client.protocol]


def test_a_read_among_others_has_a_price():
    """A thousand clients with one message each spend their user's balance with the reads, and the others wait."""
    bus = Turned()
    clients = [bus.connect() for _ in range(3)]
    user = clients[0].protocol.user
    user.work_left = 2 * READ
    for client in clients:
        assert client.transport.before_read is not None
        client.transport.before_read()
    assert [client.protocol.is_paused for client in clients] == [False, False, True]
    assert user.work_left == 0


def test_packets_that_are_read_without_the_compiled_helper_have_a_price(monkeypatch):
    """Each is paid for once, also if it is kept until a later turn."""
    paid: list[int] = []
    for price in (0, 3):
        monkeypatch.setattr(protocol, "READING", price)
        bus = Turned()
        client = bus.connect()
        user = client.protocol.user
        user.work_left = first = 20 + 5 * price
        client.send(*[b"SUB k"] * 5)
        assert client.protocol.is_paused
        second, user.work_left = user.work_left, 1_000
        client.protocol.take_turn()
        bus.settle()
        assert not client.protocol.is_paused
        paid.append(first - second + 1_000 - user.work_left)
    assert paid == [5 * (PACKET + SUBSCRIPTION), 5 * (PACKET + SUBSCRIPTION + 3)]


def test_the_messages_of_a_bundle_were_not_read_one_by_one(monkeypatch):
    """No more packets are paid for than one read finds."""
    paid: list[int] = []
    for price in (0, 3):
        monkeypatch.setattr(protocol, "READING", price)
        client = connect(Turned(), b"CMSG bundle/on")
        client.protocol.packetsReceived([b"MSG nobody\0"] * 600)
        paid.append(TURN_BUDGET - client.protocol.user.work_left)
    assert paid[1] - paid[0] == 3 * BUNDLES_PER_READ


def test_what_is_read_of_a_paused_client_that_has_left_has_a_price(monkeypatch):
    """The read itself, and without the compiled helper each packet."""
    for price in (0, 3):
        monkeypatch.setattr(protocol, "READING", price)
        client = connect(Turned())
        assert client.transport.on_kept is not None
        client.transport.on_kept([b"SUB k"] * 100)
        assert client.protocol.user.work_left == TURN_BUDGET - READ - 100 * price


def test_a_stream_client_that_could_not_read_comes_first():
    """A stream client that finds the balance spent before a read goes on before those that have spent it."""
    bus = Turned()
    spender, other, plain = (bus.connect() for _ in range(3))
    setattr(other.transport, "partial_limit", lambda: 1)  # noqa: B010
    user = spender.protocol.user
    user.work_left = 0
    assert plain.transport.before_read is not None
    plain.transport.before_read()
    assert spender.transport.on_vain_read is not None
    assert other.transport.before_read is not None
    spender.transport.on_vain_read(1)
    other.transport.before_read()
    line = bus.registry.turns._waiting[user, False]
    assert (list(line.first), list(line.others)) == ([other.protocol], [plain.protocol, spender.protocol])


def test_a_stream_client_that_spends_the_balance_by_itself_comes_behind_the_others():
    """One whose messages cost a turn each does not keep its user's other clients from theirs."""
    bus = Turned()
    plain, stream = bus.connect(), bus.connect()
    setattr(stream.transport, "partial_limit", lambda: 1)  # noqa: B010
    user = stream.protocol.user
    bus.registry.turns.crowd = CROWD  # other users send
    user.work_left = 1
    stream.transport.deliver(b"MSG k\0" + bytes(10_000))
    assert user.work_left < 0
    for peer in (plain, stream):
        assert peer.transport.before_read is not None
        peer.transport.before_read()
    line = bus.registry.turns._waiting[user, False]
    assert (list(line.first), list(line.others)) == ([], [plain.protocol, stream.protocol])


@pytest.mark.parametrize("order", [b"order/queue", b"order/stack", b"order/random"])
def test_a_message_that_is_ranked_is_work(order):
    """A message costs a late receiver's user little at the end of a queue, and one unit when it is ranked."""
    bus = Turned()
    reader, publisher = connect(bus, b"SUB k", b"CMSG " + order, uid=2), connect(bus)
    reader.stall()
    publisher.send(b"MSG k\0")
    copies = reader.protocol.queue.copies
    copies.work_left = 0
    bus.registry.turns.crowd = CROWD
    publisher.send(*[b"MSG k\0"] * 1_000)
    assert reader.protocol.queue.is_late
    bus.registry.delivery.catch_up(reader.protocol)
    assert 1_000 // UNSHARED <= -copies.work_left < 1_000 // UNSHARED + 40
    copies.work_left = 1
    reader.drain()
    assert len(reader.take()) == 1_001
    assert (1 - copies.work_left >= 1_001) is (order == b"order/random")


def test_an_index_of_the_keys_in_a_queue_is_work():
    """The first message after a client has chosen the newest of each key costs it the reading of its queue."""
    bus = Bus()
    reader, publisher = connect(bus, b"SUB k/", uid=2), connect(bus)
    reader.stall()
    publisher.send(*[b"MSG k/%d\0" % n for n in range(800)])
    reader.send(b"CMSG blocking/soft/latest")
    copies = reader.protocol.queue.copies
    for least in (800 // 4, 0):
        copies.work_left = TURN_BUDGET
        publisher.protocol.user.work_left = TURN_BUDGET
        publisher.send(b"MSG k/0\0new")
        assert least <= TURN_BUDGET - copies.work_left < least + 20


def test_segments_of_a_subscription_are_work():
    """A pattern of a thousand wildcards, whose subscription takes 3 ms, is no cheaper than a turn; a short one is."""
    assert subscription_work(b"/".join([b"*"] * 1_000), b"/") > 3_000
    assert subscription_work(b"/".join([b"a"] * 1_000), b"/") > 1_000
    assert subscription_work(b"/".join([b"a"] * 10), b"/") < 20


def test_a_turn_is_charged_with_the_time_that_it_took():
    """A client whose packets take longer than their price waits longer; one that has never waited is not measured."""

    class Slow(Observer):
        def published(self, client, key, payload) -> None:
            bus.cpu += 3_000_000

    bus = Turned(observers=[Slow()])
    peer = connect(bus)
    peer.send(b"MSG slow\0")
    assert peer.protocol.user.work_left > TURN_BUDGET - 100
    peer.protocol.user.work_left = 0
    peer.send(b"MSG slow\0")
    assert not bus.turn()
    assert bus.cpu == 6_000_000
    assert peer.protocol.user.work_left == TURN_BUDGET - 3_000


def test_after_a_turn_that_took_longer_than_its_price_turns_are_shorter(monkeypatch):
    """Runs cost as many times their price as in the last turn, until a turn is short again."""
    bus = Turned()
    publisher, readers = connect(bus), [connect(bus, b"SUB k") for _ in range(200)]
    publisher.send(b"MSG k\0")
    pay = protocol.BusProtocol._pay
    copy = 1_500

    def slowly(self, receivers, count) -> None:
        bus.cpu += copy * len(receivers) * count
        pay(self, receivers, count)

    monkeypatch.setattr(protocol.BusProtocol, "_pay", slowly)
    bus.registry.turns._alone = turns._ALONE
    publisher.protocol.user.work_left = -1
    publisher.send(*[b"MSG k\0"] * 200)
    lengths = []
    while bus.calls:
        before = bus.cpu
        bus.turn()
        if bus.cpu > before:
            lengths.append((bus.cpu - before) // 1_000)
    price = copy * 200 // 1_000
    assert lengths[0] > 2.5 * TURN_BUDGET
    assert all(length <= TURN_BUDGET + OVERDRAFT + 2 * price for length in lengths[1:])
    assert min(lengths[1:-1]) > 0.8 * TURN_BUDGET
    copy = 1
    publisher.send(*[b"MSG k\0"] * 200)
    while bus.turn():
        pass
    assert publisher.protocol._dearness == 1
    assert {len(reader.take()) for reader in readers} == {1 + 400}


def test_what_was_given_on_the_spot_in_a_turn_was_paid_in_it(monkeypatch):
    """Runs count as dear as they were, twice their price, though the balance was topped up meanwhile."""
    bus = Turned()
    publisher = connect(bus)
    for _ in range(32):
        connect(bus, b"SUB k")
    publisher.send(b"MSG k\0")
    pay = protocol.BusProtocol._pay

    def slowly(self, receivers, count) -> None:
        bus.cpu += 1_000 * len(receivers) * count  # twice the price of a copy
        pay(self, receivers, count)

    monkeypatch.setattr(protocol.BusProtocol, "_pay", slowly)
    user = publisher.protocol.user
    publisher.protocol._has_turn, user.work_left = True, 10
    publisher.transport.passes = bus.passes + 1
    publisher.transport.deliver(*[b"MSG k\0"] * BATCH)
    assert 1.5 < publisher.protocol._dearness < 2.5
    assert user.work_left == TURN_BUDGET - bus.cpu // 1_000
