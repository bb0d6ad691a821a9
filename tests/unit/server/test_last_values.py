"""Last values: what is kept, for whom it is pushed out, and that a snapshot and what follows have no gap."""

from __future__ import annotations

import gc
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.errors import CloseReason, UsageError, ViolationReason
from sbus.fair.lines import QUANTUM
from sbus.protocol.bundles import MAGIC, unbundle
from sbus.protocol.keys import matches
from sbus.server.asks.last_values import VALUE_OVERHEAD, LastValueRule, LastValues, parse_rule
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

READER = 1000
TICK = 100_000
"""Nanoseconds between two looks at the clock, where the test turns the bus."""
EVERYTHING = (LastValueRule(b""),)


def done(pattern: bytes) -> bytes:
    return b"CMSG last/done\0" + pattern


def values(bus: Bus) -> LastValues:
    assert bus.registry.last_values is not None
    return bus.registry.last_values


def test_the_newest_value_of_each_key():
    """A late client gets the newest message of each matching key, the oldest publication first, then live messages."""
    bus = Bus(last_values=(LastValueRule(b"state/"),))
    one, late = bus.connect(), bus.connect()
    one.send(b"MSG state/a\x001", b"MSG state/b\x002", b"MSG other\x003", b"MSG state/a\x004", b"MSG state/c/d\x005")
    late.send(b"CMSG last\0state/*", b"CMSG !/cred/whoami")
    assert late.take()[:3] == [b"MSG state/b\x002", b"MSG state/a\x004", done(b"state/*")]
    one.send(b"MSG state/a\x006", b"MSG state/c/d\x007")
    assert late.take() == [b"MSG state/a\x006"]
    late.send(b"UNSUB state/*")
    one.send(b"MSG state/a\x008")
    assert late.take() == []


def test_a_snapshot_without_memory_is_no_subscription():
    """A request for which the client's user has no memory is refused whole, if violations are ignored too."""
    bus = Bus(last_values=EVERYTHING, limits=Limits(user_memory=100_000), ignore_violations=True)
    one, late = bus.connect(uid=0), bus.connect(uid=READER)
    one.send(*(b"MSG %d\x00x" % number for number in range(10_000)))
    late.send(b"CMSG last\0", b"CMSG !/cred/whoami")
    one.send(b"MSG k\0live")
    assert not late.protocol.patterns
    assert [packet for packet in late.take() if not packet.startswith(b"CMSG !/cred/whoami")] == []


@pytest.mark.parametrize("is_subscribed", [False, True])
def test_a_snapshot_has_room_beside_its_subscription(is_subscribed):
    """A user has memory for both, or gets neither: the pattern alone leaves too little for the snapshot."""
    bus = Bus(last_values=EVERYTHING, limits=Limits(user_memory=700_000), ignore_violations=True)
    one, late = bus.connect(uid=0), bus.connect(uid=READER)
    one.send(*(b"MSG %d\x00x" % number for number in range(10_000)))
    pattern = b"a/" * 3_900
    late.stall()
    if is_subscribed:
        late.send(b"SUB " + pattern)
    before = dict(late.protocol.patterns)
    late.send(b"CMSG last\0" + pattern)
    assert late.protocol.user.may_hold(0)
    assert late.protocol.patterns == before
    assert bus.registry.counters.violations_by[ViolationReason.USER_MEMORY] == 1


def test_an_empty_payload_deletes():
    """A message without payload is delivered, and its key is not kept any more."""
    bus = Bus(last_values=EVERYTHING)
    one, other = bus.connect(), bus.connect()
    other.send(b"SUB a")
    one.send(b"MSG a\x001", b"MSG a\0", b"MSG b\0")
    assert other.take() == [b"MSG a\x001", b"MSG a\0"]
    assert len(values(bus)) == 0
    one.send(b"CMSG last\0")
    assert one.take() == [done(b"")]


def test_without_last_values():
    """A bus that keeps nothing subscribes all the same, and answers with last/done alone; so it does for secrets."""
    for bus in (Bus(), Bus(last_values=EVERYTHING)):
        client, other = bus.connect(pid=77), bus.connect()
        if bus.registry.last_values is None:
            other.send(b"MSG a\x001")
            client.send(b"CMSG last\0a")
            assert client.take() == [done(b"a")]
        other.send(b"MSG !/cred////x\x001", b"MSG a\x002")
        client.take()
        client.send(b"CMSG last\0!/cred////x")
        assert client.take() == [done(b"!/cred////x")]
        other.send(b"MSG !/cred////x\x003")
        assert client.take() == [b"MSG !/cred////x\x003"]


def test_the_checks_of_a_subscription():
    """A pattern that SUB may not name is a violation; a request without the NUL is unknown."""
    bus = Bus(last_values=EVERYTHING)
    one, two = bus.connect(), bus.connect()
    one.send(b"CMSG last\0!/cred//1//x")
    assert not one.is_connected
    two.send(b"CMSG last")
    assert two.take() == []
    assert bus.registry.counters.unknown_controls == 1


def test_own_values_come_whatever_the_echo():
    """A snapshot has the client's own messages also after echo/off."""
    bus = Bus(last_values=EVERYTHING)
    client = bus.connect()
    client.send(b"CMSG echo/off", b"MSG a\x001", b"CMSG last\0", b"MSG a\x002")
    assert client.take() == [b"MSG a\x001", done(b"")]
    client.send(b"CMSG last\0b", b"CMSG last\0a")
    assert client.take() == [done(b"b"), b"MSG a\x002", done(b"a")]


def test_keeping_is_no_interest():
    """Kept keys have no subscriber for that: neither for interest, nor for probe, nor in the counters."""
    bus = Bus(last_values=EVERYTHING)
    client = bus.connect()
    client.send(b"CMSG interest/on\0a", b"CMSG probe\0a", *[b"MSG a\0x"] * 5)
    assert client.take() == [b"CMSG interest\x000 a", b"CMSG probe\x000 a"]
    assert bus.registry.counters.routed == 0
    assert bus.registry.counters.published == 5


def test_the_user_with_most_loses_the_oldest():
    """A user who fills the store pushes out own values, and not those of a user who has less."""
    bus = Bus(last_values=(LastValueRule(b"", keys=10, bytes=1000),))
    one, two = bus.connect(uid=1), bus.connect(uid=2)
    two.send(b"MSG two/a\0x", b"MSG two/b\0x")
    one.send(*(b"MSG one/%d\0x" % n for n in range(100)))
    two.send(b"CMSG last\0")
    assert two.take() == [
        b"MSG two/a\0x",
        b"MSG two/b\0x",
        *(b"MSG one/%d\0x" % n for n in range(92, 100)),
        done(b""),
    ]
    one.send(b"MSG one/large\0" + b"x" * 900)
    assert values(bus).keys() == [b"two/a", b"two/b", *(b"one/%d" % n for n in range(95, 100)), b"one/large"]
    assert values(bus).memory == 914 + 5 * 12 + 22 + 8 * VALUE_OVERHEAD
    one.send(b"MSG two/a\0" + b"x" * 2000)
    assert len(values(bus)) == 7
    assert values(bus).memory == 914 + 5 * 12 + 11 + 7 * VALUE_OVERHEAD


@pytest.mark.parametrize("pattern", [b"!/cred////x", b"!/x", b"a/!"])
def test_no_secrets_are_kept(pattern):
    """A rule for secret keys is refused with the reason."""
    with pytest.raises(UsageError, match="--last-value="):
        Bus(last_values=(LastValueRule(pattern),))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("state/", LastValueRule(b"state/")),
        ("", LastValueRule(b"")),
        ("a,b/,keys=5", LastValueRule(b"a,b/", keys=5)),
        ("a,keys=,bytes=1K", None),
        ("a,bytes=1K,keys=7", LastValueRule(b"a", keys=7, bytes=1024)),
        ("a,size=5,keys=2,bytes=3M", LastValueRule(b"a,size=5", keys=2, bytes=3 << 20)),
        ("a,keys=0", None),
        ("a,keys=1,keys=2", None),
        ("a,bytes=-1", None),
        ("a,bytes=10Q", None),
    ],
)
def test_the_option(text, rule):
    """--last-value is split from the right, so that a pattern may have commas; a bad limit names the remedy."""
    if rule is not None:
        assert parse_rule(text) == rule
    else:
        with pytest.raises(UsageError, match=r"give each limit once, above 0: PATTERN,keys=10000,bytes=16M"):
            parse_rule(text)


def test_unkept_keys_stay_on_the_fast_path():
    """A route says whether its key is kept: one that is not kept has the same route as without last values."""
    bus = Bus(last_values=(LastValueRule(b"kept/"),))
    one = bus.connect()
    one.send(b"SUB *", b"MSG a\0", b"MSG kept/a\0x", b"MSG kept/b\0x")
    assert bus.registry.fast_path
    assert bus.registry.routes[b"a"].receivers == (one.protocol,)
    assert bus.registry.routes[b"kept/a"] is bus.registry.routes[b"kept/b"]


@pytest.mark.parametrize("soft", [b"queue", b"discard", b"error", b"block", b"latest"])
@pytest.mark.parametrize("order", [b"queue", b"stack", b"random"])
def test_what_waited_then_the_snapshot_then_the_rest(soft, order):
    """Whatever the client has chosen: what waited comes first, then the snapshot, then each live message."""
    bus = Bus(last_values=(LastValueRule(b"k/"),))
    one, late = bus.connect(uid=2), bus.connect()
    late.send(b"SUB before", b"CMSG order/" + order)
    one.send(*(b"MSG k/%d\0x" % n for n in range(300)))
    late.stall()
    one.send(b"MSG before\x001")
    late.send(b"CMSG blocking/soft/" + soft)
    late.transport.deliver(b"CMSG last\0k/", b"CMSG !/cred/whoami", b"MSG said\0later")
    live = [b"MSG k/%d\0y" % n for n in range(200)]
    one.send(*live[:100])
    assert late.protocol.is_paused
    late.drain(50)
    one.send(*live[100:])
    snapshot = [b"MSG k/%d\0x" % n for n in range(300)]
    late.drain(1000)
    got = late.take()
    assert got[:302] == [b"MSG before\x001", *snapshot, done(b"k/")]
    assert sorted(packet for packet in got[302:] if packet.startswith(b"MSG")) == sorted(live)
    assert [packet for packet in got[302:] if packet.startswith(b"CMSG")] == [got[-1]]
    assert late.is_connected
    assert not late.protocol.is_paused
    one.send(b"MSG k/1\0z")
    assert late.take() == [b"MSG k/1\0z"]
    assert bus.registry.users.budget.bytes == 0
    assert late.protocol.user.queues == 0


def test_nothing_is_copied_for_a_client_that_does_not_read():
    """A client that asks and does not read holds references: its queue has nothing, and no bytes are counted."""
    bus = Bus(last_values=EVERYTHING)
    one, late = bus.connect(uid=2), bus.connect()
    one.send(*(b"MSG %d\0x" % n for n in range(1000)))
    late.stall()
    late.send(b"CMSG last\0")
    assert late.protocol.front is not None
    assert len(late.protocol.front._pulled) <= 256
    assert late.protocol.queue.messages == 0
    late.transport.hang_up()
    bus.settle()
    assert not late.is_connected
    assert late.protocol.user.queues == 0


@pytest.mark.parametrize("count", [100, 1000])
def test_what_a_snapshot_holds_is_memory_of_its_user(count):
    """A snapshot that nobody reads counts its references, then the values that were replaced; its end gives it back."""
    bus = Bus(last_values=EVERYTHING, limits=Limits(queue_messages=1))
    one, late = bus.connect(uid=2), bus.connect()
    for first in range(0, count, 50):
        one.send(*(b"MSG %d\0" % n + bytes(1_000) for n in range(first, first + 50)))
    late.stall()
    before = late.protocol.memory()
    late.send(b"CMSG last\0")
    assert 16 * count <= late.protocol.memory() - before < 40 * count + 2_000
    for turn in range(1_000_000 // (count * 1_000)):
        for first in range(0, count, 50):
            one.send(*(b"MSG %d\0%d" % (n, turn) + bytes(1_000) for n in range(first, first + 50)))
    assert late.protocol.memory() - before > 700 * count
    late.transport.hang_up()
    bus.settle()
    assert values(bus)._images == {}
    assert late.protocol.user.memory == 0


def test_snapshots_are_no_work_of_the_garbage_collector():
    """A snapshot that waits has no object for each value, and one that is over leaves no cycle of references."""
    bus = Bus(last_values=EVERYTHING)
    one, late = bus.connect(uid=2), bus.connect()
    for first in range(0, 1_000, 50):
        one.send(*(b"MSG %d\0x" % n for n in range(first, first + 50)))
    late.stall()
    gc.collect()
    gc.disable()
    try:
        late.send(b"CMSG last\0")
        kept = set(map(id, values(bus)._values.values()))
        tuples = [each for each in gc.get_objects() if type(each) is tuple]
        assert len([each for each in tuples if not kept.isdisjoint(map(id, each))]) < 10
        late.drain()
        for _ in range(100):
            late.send(b"CMSG last\x001*")
        assert late.take().count(done(b"1*")) == 100
        assert gc.collect() < 100
    finally:
        gc.enable()


def test_unread_snapshots_end_at_the_limit_of_their_user():
    """A user whose snapshots hold more replaced values than its memory allows loses those clients."""
    bus = Bus(last_values=EVERYTHING, limits=Limits(user_memory=500_000, queue_messages=1))
    one, late = bus.connect(uid=2), bus.connect()
    for turn in range(2):
        for first in range(0, 100, 10):
            one.send(*(b"MSG %d\0%d" % (n, turn) + bytes(10_000) for n in range(first, first + 10)))
        if not turn:
            late.stall()
            late.send(b"CMSG last\0")
    bus.clock.advance(2)
    bus.settle()
    assert late.protocol.reason is CloseReason.USER_LIMIT
    assert values(bus)._images == {}
    assert one.is_connected


def test_a_client_over_its_limit_is_disconnected_once():
    """While the end of such a client waits in its mail, further replaced values put nothing more there."""
    bus = HandTurnedBus(TICK, last_values=EVERYTHING, limits=Limits(user_memory=500_000))
    one, late, other = bus.connect(uid=2), bus.connect(), bus.connect(uid=3)
    readers = [late, *(bus.connect() for _ in range(3))]
    for reader in readers:
        reader.send(b"SUB m")
    one.send(*(b"MSG %d\0" % n + bytes(10_000) for n in range(60)))
    bus.finish()
    late.stall()
    late.send(b"CMSG last\0")
    bus.finish()
    bus.use_up(late, 100_000)
    one.protocol.user.lines.deficit = 1 << 40
    one.send(b"MSG m\0")
    for _ in range(5):
        one.send(*(b"MSG %d\0" % n + bytes(10_000) for n in range(60)))
    assert late.protocol.reason is CloseReason.USER_LIMIT
    assert late.protocol.user.lines.letters == {late.protocol: 1}
    bus.finish()
    assert not late.is_connected
    assert other.is_connected


def test_a_client_that_stops_reading_is_read_again():
    """A client whose socket takes nothing more gets no snapshot; what it sends is handled."""
    bus = Bus(last_values=EVERYTHING)
    one, late = bus.connect(uid=2), bus.connect()
    one.send(b"SUB said", *(b"MSG %d\0x" % n for n in range(1000)))
    late.stall()
    late.transport.deliver(b"CMSG last\0", b"MSG said\0later")
    late.transport.breakDown()
    bus.settle()
    assert one.take() == [b"MSG said\0later"]


def test_a_snapshot_takes_turns_of_its_user():
    """A large snapshot takes several turns of its user; in between others are served."""
    bus = HandTurnedBus(TICK, last_values=(LastValueRule(b"", keys=20_000),))
    one, late, other = bus.connect(uid=2), bus.connect(), bus.connect(uid=3)
    for start in range(0, 10_000, 50):
        one.send(*(b"MSG %d\0x" % n for n in range(start, start + 50)))
        bus.finish()
    bus.use_up(other, 0)
    late.send(b"CMSG last\0*")
    turns = answers = 0
    got: list[bytes] = []
    while not got or got[-1] != done(b"*"):
        other.send(b"CMSG !/cred/whoami")
        bus.turn()
        answers += len(other.take())
        more = late.take()
        assert len(more) <= 2_000
        got, turns = got + more, turns + 1
    assert got == [*(b"MSG %d\0x" % n for n in range(10_000)), done(b"*")]
    assert turns > 20
    assert answers >= turns // 3


def test_long_keys_and_patterns_are_work_of_the_asking_user():
    """Kept keys of many segments cost who asks nothing more; a pattern of many segments takes a turn for each few keys,
    so that the bus serves others in between."""
    bus = HandTurnedBus(TICK, last_values=EVERYTHING)
    one, late, other = bus.connect(uid=2), bus.connect(), bus.connect(uid=3)
    for n in range(20):
        one.send(b"MSG %d/" % n + b"a/" * 150_000 + b"\0x")
        bus.finish()
    began = time.process_time()
    for n in range(20):
        late.send(b"CMSG last\0%d/b" % n)
        bus.finish()
    assert time.process_time() - began < 1  # splitting the keys takes 4 s
    assert late.take() == [done(b"%d/b" % n) for n in range(20)]
    late.send(b"CMSG last\0" + (pattern := b"0/" + b"a/" * 3000))
    turns = 0
    while done(pattern) not in late.take():
        bus.use_up(other, 0)
        bus.turn()
        turns += 1
    assert turns > 3


@pytest.mark.parametrize("how", ["hang_up", "abortConnection", "breakDown"])
def test_a_client_leaves_while_its_snapshot_waits_for_a_turn(how):
    """Nothing stays behind of a client that disconnects in the middle."""
    bus = HandTurnedBus(TICK, last_values=EVERYTHING)
    one, late = bus.connect(uid=2), bus.connect()
    one.send(*(b"MSG %d\0x" % n for n in range(1000)))
    bus.finish()
    late.send(b"CMSG last\0")
    assert late.protocol.user.lines.chores
    getattr(late.transport, how)()
    bus.settle()
    bus.finish()
    late.transport.end()
    bus.settle()
    bus.finish()
    assert not values(bus)._images
    assert len(bus.registry.users) == 1


class Model:
    """The store as the protocol describes it, one value after the other."""

    def __init__(self, rules: tuple[LastValueRule, ...]) -> None:
        self.rules = rules
        self.values: list[tuple[bytes, bytes, int, LastValueRule]] = []

    def publish(self, key: bytes, packet: bytes, uid: int) -> None:
        rule = next((rule for rule in self.rules if matches(rule.pattern, key)), None)
        self.values = [value for value in self.values if value[0] != key]
        if rule is None or packet.endswith(b"\0") or len(packet) > rule.bytes:
            return
        self.values.append((key, packet, uid, rule))
        while True:
            mine = [value for value in self.values if value[3] is rule]
            sizes: Counter[int] = Counter()
            counts = Counter(value[2] for value in mine)
            for _, kept, owner, _ in mine:
                sizes[owner] += len(kept)
            by = sizes if sizes.total() > rule.bytes else counts if len(mine) > rule.keys else None
            if by is None:
                return
            most = {owner for owner in by if by[owner] == max(by.values())}
            # Among users with equally much, the one with a value for the longest time in a row: the store's order.
            oldest = {owner: next(value for value in mine if value[2] == owner) for owner in most}
            assert oldest
            self.tied = len(most) > 1
            if self.tied:
                raise Tied
            self.values.remove(oldest[most.pop()])


class Tied(Exception):
    """Two users have equally much: which one loses is not specified."""


KEYS = st.sampled_from([b"s/a", b"s/b", b"s/c/d", b"t", b"u"])
PUBLISH = st.tuples(st.just("publish"), KEYS, st.sampled_from([b"", b"x", b"y" * 9, b"z" * 30]), st.integers(1, 2))
STEPS = st.one_of(
    PUBLISH,
    PUBLISH,
    PUBLISH,
    st.tuples(st.just("stall")),
    st.tuples(st.just("drain"), st.integers(0, 6)),
    st.tuples(st.just("ask"), st.sampled_from([b"s/", b"s/*", b"t", b"", b"nothing"])),
    st.tuples(st.just("turn")),
)


def unbundled(packets: list[bytes]) -> list[bytes]:
    return unbundle(packets) if any(packet.startswith(MAGIC) for packet in packets) else packets


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(STEPS, max_size=60),
    st.sampled_from([b"queue", b"stack", b"random"]),
    st.sampled_from([b"queue", b"block", b"latest", b"discard"]),
    st.sampled_from([(LastValueRule(b"s/", keys=2, bytes=60), LastValueRule(b"*", bytes=40)), EVERYTHING]),
    st.booleans(),
    st.sampled_from([0, 8]),
)
def test_no_gap_and_nothing_twice(steps, order, soft, rules, is_poor, others):
    """Publications in any order around requests: each request gets the store as it was, then each live message once,
    also if messages for the client and others of its user wait in the mail."""
    bus = HandTurnedBus(TICK, last_values=rules)
    publishers = {uid: bus.connect(uid=uid) for uid in (1, 2)}
    reader: Peer = bus.connect(uid=READER)
    for _ in range(others):
        bus.connect(uid=READER).send(b"SUB ")
    reader.send(b"CMSG order/" + order, b"CMSG blocking/soft/" + soft)
    bus.finish()
    reader.take()
    model = Model(rules)
    subscribed: list[bytes] = []
    expected: list[list[bytes]] = [[]]  # live messages, then a snapshot, live messages, a snapshot, ...
    optional: Counter[bytes] = Counter()  # messages that the strategy may drop or replace
    try:
        for step in steps:
            if step[0] == "publish":
                _, key, payload, uid = step
                payload += b"%d" % len(expected[-1]) if payload else b""
                packet = b"MSG %b\0%b" % (key, payload)
                model.publish(key, packet, uid)
                if any(matches(pattern, key) for pattern in subscribed):
                    expected[-1].append(packet)
                    if (others or reader.protocol.front is None) and soft != b"queue":
                        optional[packet] += 1
                publishers[uid].protocol.user.lines.deficit = QUANTUM
                publishers[uid].send(packet)
            elif step[0] == "stall":
                reader.stall()
            elif step[0] == "drain":
                reader.drain(step[1])
            elif step[0] == "turn":
                if is_poor:
                    bus.use_up(reader, 1)
                bus.turn()
            elif not reader.protocol.is_paused and reader.protocol.front is None:
                pattern = step[1]
                subscribed.append(pattern)
                snapshot = [packet for key, packet, _, _ in model.values if matches(pattern, key)]
                expected += [[*snapshot, done(pattern)], []]
                reader.send(b"CMSG last\0" + pattern)
                while reader.protocol._is_waiting:
                    bus.turn()
    except Tied:
        return
    reader.drain()
    bus.finish()
    got = reader.take()
    for number, part in enumerate(expected):
        if number % 2:
            assert got[: len(part)] == part
            del got[: len(part)]
            continue
        # Live messages end where the next snapshot begins: find its end, and cut its length off.
        following = expected[number + 1] if number + 1 < len(expected) else None
        end = len(got) if following is None else got.index(following[-1]) + 1 - len(following)
        live, got = got[:end], got[end:]
        missing = Counter(part) - Counter(live)
        assert not Counter(live) - Counter(part)
        assert not missing - optional
        if order == b"queue" and soft == b"queue":
            assert live == part
    assert got == []
    assert not reader.protocol.is_paused
    assert reader.protocol.user.queues == 0
    assert bus.registry.users.budget.bytes == 0
    assert values(bus).memory == sum(len(v[1]) + VALUE_OVERHEAD for v in model.values)


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_receipt_before_a_snapshot_counts_all_losses(has_sent):
    """The total in a receipt that waits when a snapshot is asked for is that of the connection."""
    bus = Bus(last_values=(LastValueRule(b"kept/"),), limits=Limits(queue_messages=1))
    publisher, reader = bus.connect(), bus.connect()
    publisher.send(b"MSG kept/1\0value")
    reader.send(b"CMSG receipts/on", b"SUB k")
    if has_sent:
        reader.stall()
        publisher.send(*[b"MSG k\0"] * 3)
        reader.drain()
    reader.take()
    reader.stall()
    publisher.send(*[b"MSG k\0"] * 4)
    reader.send(b"CMSG last\0kept/")
    publisher.send(*[b"MSG k\0"] * 5)
    reader.drain()
    told = [packet.partition(b"\0")[2].split() for packet in reader.take() if packet.startswith(b"CMSG lost\0")]
    before = 2 if has_sent else 0
    assert [(int(lost), int(total)) for lost, _, total, _ in told] == [(3, before + 3), (4, before + 7)]
