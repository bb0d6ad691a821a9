"""Receipts and conflation: every message that does not arrive is accounted for, exactly and at its place."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.errors import CloseReason
from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES, SharedBudget
from sbus.flood.receipts import MERGE
from sbus.protocol.bundles import unbundle
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import LossReason
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.limits import Limits
from sbus.syscalls.sockets import max_sendable
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus, Peer
from tests.support.costs import calls
from tests.support.examples import examples
from tests.support.reactors import Recorder, received
from tests.support.transports import World, flood_controlled
from tests.unit.flood.connection import BATCH, ORDER, SOFT, Connection, DropOldest

LONGEST = 60
"""Bytes that the sockets of the tests take at most."""


class WideTransport(FakePacketTransport):
    """A transport that takes as many packets at once as one with bundles does."""

    def flush(self) -> None:
        if not self._is_writable():
            self.queue.discard_all()
            return
        while taken := self.queue.take(2048):
            sent = 0
            while sent < len(taken) and self.capacity != 0:
                packet = taken[sent]
                if self.longest is not None and len(packet) > self.longest:
                    assert self.queue.reject_oversized(taken, sent)
                    if taken[sent] is not packet:
                        continue
                else:
                    self._take(packet)
                sent += 1
            self.queue.ack(taken, sent)
            if sent < len(taken) and len(self.queue):
                return


def receipt(packet: bytes) -> tuple[int, int, int, str] | None:
    """Return the numbers of messages, of bytes and of all losses, and the cause; None if it is no receipt."""
    if not packet.startswith(b"CMSG lost\0"):
        return None
    messages, size, total, why = packet.removeprefix(b"CMSG lost\0").decode().split(" ")
    return int(messages), int(size), int(total), why


class Reader:
    """A receiver with receipts, and all that was published to it."""

    def __init__(self, bus: Bus, uid: int, transport: FakePacketTransport, choice: tuple[str, str, str]) -> None:
        protocol = BusProtocol(bus.registry)
        transport.connect(protocol)
        bus.settle()
        self.peer = Peer(bus, transport, protocol)
        soft, hard, self.order = choice
        self.is_latest = soft == "latest" and self.order == "queue"
        for control in (f"blocking/soft/{soft}", f"blocking/hard/{hard}", f"order/{self.order}", "receipts/on"):
            self.peer.send(b"CMSG " + control.encode())
        self.peer.send(b"SUB all", b"SUB %d" % uid, b"SUB some/")
        assert self.peer.take() == [b"CMSG receipts/on\0"]
        self.published: list[bytes] = []
        self.delivered: list[bytes] = []

    def read(self) -> None:
        self.delivered += self.peer.take()

    @property
    def queue(self) -> Any:
        return self.peer.protocol.queue

    def check(self) -> None:
        """What was published is delivered, waits, is in a receipt, or was conflated; every number agrees."""
        self.read()
        messages = [packet for packet in self.delivered if packet.startswith(b"MSG ")]
        told = [found for packet in self.delivered if (found := receipt(packet))]
        snapshot = self.queue.describe()
        waiting = [packet for is_reply, packet in snapshot["packets"] if not is_reply]
        untold = snapshot["receipts"]
        assert len(set(messages + waiting)) == len(messages) + len(waiting)
        lost = sum(each[0] for each in told) + sum(messages for _, messages, _, _ in untold)
        assert len(self.published) == len(messages) + len(waiting) + lost + self.queue.conflated
        assert self.queue.lost == lost
        if self.peer.is_connected:
            assert self.peer.protocol.lost == lost
        so_far = 0
        for count, _, total, why in told:
            so_far += count
            assert count > 0
            assert total == so_far
            assert why in {reason.value for reason in LossReason}
        if not self.is_latest:
            gone = set(self.published) - set(messages) - set(waiting)
            size = sum(each[1] for each in told) + sum(size for _, _, size, _ in untold)
            assert size == sum(map(len, gone))
        # One more than the rule says may stand in front, for what was dropped on its way to the socket.
        assert len(untold) <= len(waiting) // MERGE + 2
        if self.order == "queue" and not self.is_latest:
            self.check_places(told)

    def check_places(self, told: list[tuple[int, int, int, str]]) -> None:
        """A receipt stands at its gap, or less than MERGE messages before it, and never behind it."""
        index = {packet: i for i, packet in enumerate(self.published)}
        at = [index[packet] for packet in self.delivered if packet in index]
        assert at == sorted(at)
        places: list[int] = []  # of each lost message: how many messages stood before its receipt
        passed = 0
        for packet in self.delivered:
            if (found := receipt(packet)) is not None:
                places += [passed] * found[0]
            elif packet in index:
                assert len(places) >= index[packet] - passed  # told >= missing
                passed += 1
        arrived = set(at)
        gaps, before = [], 0
        for i in range(max(at, default=-1) + 1):
            if i in arrived:
                before += 1
            else:
                gaps.append(before)
        for place, gap in zip(places, gaps, strict=False):
            assert place <= gap < place + MERGE


most = st.just(("queue", "discard", "queue"))
choices = most | st.tuples(
    *(
        st.sampled_from([each.selector.rpartition(b"/")[2].decode() for each in kind])
        for kind in (SOFT_STRATEGIES, HARD_STRATEGIES, ORDERS)
    )
)


class ReceiptMachine(RuleBasedStateMachine):
    """Receivers of two users with every choice, plain and bundled, and every way to lose a message."""

    @initialize(
        chosen=st.lists(choices, min_size=3, max_size=3),
        messages=st.sampled_from((3, 80, 1000)),
        size=st.sampled_from((150, 2000, 1 << 20)),
        total=st.sampled_from((400, 5000, 1 << 20)),
        wide=st.lists(st.booleans(), min_size=3, max_size=3),
    )
    def start(self, chosen, messages, size, total, wide):
        self.bus = Bus(limits=Limits(queue_messages=messages, queue_bytes=size, total_queue_bytes=total))
        self.publishers = [self.bus.connect(uid=uid) for uid in (0, 1001)]
        self.readers = []
        for number, (choice, is_wide) in enumerate(zip(chosen, wide, strict=True)):
            kind = WideTransport if is_wide else FakePacketTransport
            peer = PeerCredentials(6000 + number, 1000 + number // 2, 100)
            transport = kind(peer, clock=self.bus.clock, longest=LONGEST)
            self.readers.append(Reader(self.bus, number, transport, choice))
        self.number = 0
        self.asked = [0, 0, 0]

    @rule(
        who=st.integers(0, 1),
        key=st.sampled_from([b"all", b"0", b"1", b"2", b"some/x", b"some/y"]),
        count=st.sampled_from((1, 2, 5, 70, 200)),
        padding=st.sampled_from((0, 10, 30)),
    )
    def publish(self, who, key, count, padding):
        packets = []
        for _ in range(count):
            self.number += 1
            packets.append((b"MSG %b\0%06d" % (key, self.number)).ljust(padding * (1 + self.number % 2), b"."))
        self.send(who, key, packets)

    @rule(who=st.integers(0, 1), count=st.integers(1, 3))
    def publish_oversized(self, who, count):
        packets = []
        for i in range(3 * count):
            self.number += 1
            packets.append((b"MSG all\0%06d" % self.number).ljust(LONGEST + 1 if i % 3 == 1 else 0, b"."))
        self.send(who, b"all", packets)

    def send(self, who, key, packets):
        publisher = self.publishers[who]
        if publisher.protocol.is_paused:
            return
        for at in range(0, len(packets), 64):
            if publisher.protocol.is_paused:
                break
            batch = packets[at : at + 64]
            before = publisher.protocol
            publisher.send(*batch)
            handled = len(batch) - len(publisher.transport._arrived)
            publisher.transport._arrived.clear()  # what a blocked publisher has not got rid of was never published
            assert before.reason is None
            for number, reader in enumerate(self.readers):
                if reader.peer.is_connected and (key in (b"all", b"%d" % number) or key.startswith(b"some/")):
                    reader.published += batch[:handled]

    @rule(who=st.integers(0, 2), packets=st.sampled_from((0, 0, 0, 1, 2, 10, 66, 500)))
    def read(self, who, packets):
        transport = self.readers[who].peer.transport
        transport.capacity = 0
        self.readers[who].peer.drain(packets)

    @rule(who=st.integers(0, 2), packets=st.sampled_from((1, 5, 100)))
    def make_room(self, who, packets):
        """The reader reads, and the server has not noticed yet."""
        transport = self.readers[who].peer.transport
        transport.capacity = (transport.capacity or 0) + packets

    @rule(who=st.integers(0, 2), control=st.sampled_from([b"soft/discard", b"soft/queue", b"hard/discard"]))
    def set_choice(self, who, control):
        """Choose another strategy, except that a reader with latest keeps it."""
        if self.readers[who].peer.is_connected and not self.readers[who].is_latest:
            self.readers[who].peer.send(b"CMSG blocking/" + control)

    @rule(who=st.integers(0, 2))
    def ask(self, who):
        if self.asked[who] < 60 and self.readers[who].peer.is_connected:
            self.asked[who] += 1
            self.readers[who].peer.send(b"CMSG !/cred/whoami")

    @invariant()
    def all_is_accounted_for(self):
        for reader in getattr(self, "readers", ()):
            if reader.peer.is_connected:
                reader.check()

    def teardown(self):
        for reader in getattr(self, "readers", ()):
            if reader.peer.is_connected:
                reader.peer.drain()
                reader.check()
                assert reader.queue.head is None
                assert not reader.queue.is_congested
                assert len(reader.queue) == 0
        if hasattr(self, "bus"):
            assert self.bus.registry.users.budget.bytes == 0
            counters = self.bus.registry.counters
            assert counters.dropped == sum(counters.dropped_by.values())


TestReceipts = ReceiptMachine.TestCase
TestReceipts.settings = settings(max_examples=examples(150), stateful_step_count=25)


# --- one thing at a time -------------------------------------------------------------------------


def connection(**choices: Any) -> Connection:
    """Return a receiver with receipts."""
    made = Connection(**choices)
    made.queue.configure(replace(made.queue.settings, receipts=True))
    return made


def drop(receiver: Connection, *packets: bytes) -> None:
    """Have messages dropped behind everything that waits."""
    soft = receiver.queue.settings.soft
    receiver.set_strategies(soft=SOFT["discard"])
    receiver.stall(*packets)
    receiver.set_strategies(soft=soft)


def lost(messages: int, size: int, total: int, why: str) -> bytes:
    return b"CMSG lost\0%d %d %d %b" % (messages, size, total, why.encode())


M = [b"MSG k\0%04d" % i for i in range(300)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("room", [0, 10, 1000])
def test_the_64th_message_ends_a_receipt(is_first, room):
    """A receipt takes up losses while 63 messages stand behind it, and not when 64 do."""
    receiver = connection()
    before = [] if is_first else M[:1]
    if before:
        receiver.stall(*before)
    drop(receiver, b"xx")
    receiver.stall(*M[1:64])
    drop(receiver, b"yyy", b"z")
    receiver.stall(M[64])
    drop(receiver, b"v")
    receiver.stall(M[65])
    drop(receiver, b"w")
    receiver.flush(room)
    told = [lost(3, 6, 3, "discard"), *M[1:65], lost(2, 2, 5, "discard"), M[65]]
    receiver.drain()
    assert receiver.delivered == before + told
    assert receiver.lost == [5, 8]
    assert len(receiver.queue) == 0


def test_a_receipt_alone_is_no_congestion():
    """Under discard each flush offers the receipt, then what has come, exactly as without receipts."""
    receiver = connection(soft="discard")
    receiver.publish(M[0], M[1], M[2])
    assert receiver.flush(1) == [M[0]]
    assert not receiver.queue.is_congested
    assert len(receiver.queue) == 1
    assert receiver.flush(0) == []
    receiver.publish(M[3])
    assert receiver.flush(1) == [lost(2, 20, 2, "discard")]
    receiver.publish(M[4])
    assert receiver.flush(2) == [lost(1, 10, 3, "discard"), M[4]]
    assert receiver.moves == [(True, True)] * 2
    assert len(receiver.queue) == 0


@pytest.mark.parametrize("order", ["stack", "random"])
def test_other_orders_have_sums(order):
    """Where there is no place, one receipt with the sum of all losses goes before everything else."""
    receiver = connection(order=order, messages=3)
    receiver.stall(*M[:3])
    receiver.queue.write(b"reply")
    receiver.publish(M[3])
    drop(receiver, b"x")
    assert receiver.drain()[:2] == [lost(2, 11, 2, "several"), b"reply"]


def test_a_new_order_sums_up():
    """Receipts that lose their places with a new order go first, as one."""
    receiver = connection()
    receiver.stall(M[0])
    drop(receiver, b"x")
    receiver.stall(*M[1:70])
    drop(receiver, b"y")
    receiver.set_order(ORDER["stack"])
    assert receiver.drain() == [lost(2, 2, 2, "discard"), *reversed(M[:70])]


def test_what_a_strategy_drops():
    """A receipt for what a strategy drops at the front goes first."""

    receiver = connection(messages=3)
    receiver.set_strategies(hard=DropOldest(30))
    receiver.stall(*M[:5])
    assert receiver.drain() == [lost(2, 20, 2, "queue-full"), *M[2:5]]


def test_causes():
    """Each limit is a cause of its own, and different ones together are several."""
    budget = SharedBudget(50)  # 25 for each user
    other = connection(budget=budget, user="other")
    other.stall(*M[:3])
    receiver = connection(messages=3, budget=budget, user="one")
    receiver.stall(*M[:4])
    receiver.drain()
    assert receiver.delivered[-1] == lost(2, 20, 2, "share")
    other.drain()
    receiver.stall(*M[:4])
    drop(receiver, b"x")
    assert receiver.drain()[-1] == lost(2, 11, 4, "several")


@pytest.mark.parametrize("is_congested", [True, False])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 4, 9])
def test_oversized(is_congested, room):
    """The receipt of a message that no socket takes stands in its place, however much is sent at once."""
    receiver = connection()
    big = bytes(100)
    receiver.publish(M[0], big, M[1], big, M[2])
    receiver.queue.write(b"reply")
    if is_congested:
        receiver.flush(0)
    for capacity in (room, 99):
        while taken := receiver.queue.take(BATCH):
            sent = 0
            while sent < len(taken):
                if taken[sent] is big:
                    assert receiver.queue.reject_oversized(taken, sent)
                    continue
                if not capacity:
                    break
                receiver.delivered.append(taken[sent])
                sent += 1
                capacity -= 1
            receiver.ack(taken, sent)
            if sent < len(taken):
                break
    assert receiver.delivered == [
        M[0], lost(1, 100, 1, "too-large"), M[1], lost(1, 100, 2, "too-large"), M[2], b"reply"
    ]  # fmt: skip
    assert receiver.lost == [2, 200]
    assert (len(receiver.queue), receiver.budget.bytes) == (0, 0)


@pytest.mark.parametrize("limit", [0, 4000])
def test_oversized_on_a_real_socket(limit):
    """Also among packets in one system call, or in bundles, the receipt comes where the message would have."""
    world = World()
    recorder = Recorder()
    peer = world.connect(recorder)
    queue, _ = flood_controlled(recorder.transport, SOFT["queue"])
    queue.configure(replace(queue.settings, receipts=True))
    if limit:
        recorder.transport.start_bundling(limit)
        recorder.transport.flush()
    recorder.transport.getHandle().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4000)
    big = bytes(max_sendable(recorder.transport.getHandle()) + 1)
    queue.pending += [*M[:100], big, *M[100:200], big, *M[200:]]
    recorder.transport.flush()
    got = []
    for _ in range(100):
        world.turn()
        got += received(peer)
    one = [lost(1, len(big), total, "too-large") for total in (1, 2)]
    assert unbundle(got) == [*M[:100], one[0], *M[100:200], one[1], *M[200:]]
    assert len(queue) == 0
    world.close()


def test_last_receipt():
    """The last receipt has all that waits and all that was not told, in any state of the queue."""
    receiver = connection(messages=4)
    receiver.publish(*M[:3])
    assert receiver.queue.last_receipt() == lost(3, 30, 3, "disconnect")
    assert receiver.queue.last_receipt() is None
    receiver.stall(*M[:6])
    receiver.flush(1)
    assert receiver.queue.last_receipt() == lost(5, 50, 8, "disconnect")
    assert receiver.lost == [8, 80]
    assert len(receiver.queue) == 0


def test_nothing_goes_past_a_receipt():
    """A message that could go straight to the socket waits for the receipt before it."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/discard", b"CMSG receipts/on")
    reader.take()
    reader.stall()
    publisher.send(*M[:2])
    reader.transport.capacity = 10  # it has read, and the server has not noticed yet
    publisher.send(M[2])
    assert reader.take() == [lost(2, 20, 2, "discard"), M[2]]
    publisher.send(M[3])
    assert reader.take() == [M[3]]
    assert bus.registry.counters.dropped_by[LossReason.DISCARD] == 2


# --- latest --------------------------------------------------------------------------------------


def key(name: str, value: object) -> bytes:
    return f"MSG {name}\0{value}".encode()


def test_latest_replaces_in_place():
    """A message takes the place of the waiting one of its key; it counts as conflated, not as lost."""
    receiver = connection(soft="latest", messages=3)
    receiver.stall(key("a", 1), key("b", 1), key("a", 2))
    receiver.queue.write(b"reply")
    receiver.publish(key("c", 1), key("b", 22), key("a", 3), key("d", 1))
    assert receiver.queue.conflated == 3
    assert receiver.lost == [1, len(key("d", 1))]
    assert receiver.flush(1) == [key("a", 3)]
    receiver.publish(key("a", 4))
    assert receiver.drain() == [
        key("b", 22), b"reply", key("c", 1), lost(1, 7, 1, "queue-full"), key("a", 4)
    ]  # fmt: skip
    assert receiver.budget.bytes == 0


@pytest.mark.parametrize("hard", ["discard", "block", "error"])
def test_latest_without_room_for_the_difference(hard):
    """If the difference in bytes does not fit, the hard strategy decides about the new one, and the old one stays."""
    receiver = connection(soft="latest", hard=hard, size=20)
    receiver.stall(key("a", 1), key("b", 1))
    receiver.publish(key("a", "x" * 10))
    if hard == "error":
        assert receiver.closed is CloseReason.QUEUE_FULL
        return
    receiver.publish(key("b", 2))
    got = receiver.drain()
    assert got[:2] == [key("a", 1), key("b", 2)]
    assert receiver.blocks == [False] * (hard == "block")
    assert got[2:] == ([key("a", "x" * 10)] if hard == "block" else [lost(1, 16, 1, "queue-full")])


@pytest.mark.parametrize("order", ["stack", "random"])
def test_latest_with_another_order(order):
    """Another order than the queue's makes it act as queue; back in order, messages are replaced again."""
    receiver = connection(soft="latest", order=order)
    receiver.stall(key("a", 1), key("a", 2))
    assert receiver.queue.messages == 2
    receiver.set_order(ORDER["queue"])
    receiver.flush(0)
    receiver.publish(key("a", 3))
    assert receiver.drain() == [key("a", 1), key("a", 3)]


def test_latest_is_bounded_by_the_number_of_keys():
    """A reader that never reads costs one message and one place in the index for each key, however many come."""
    receiver = connection(soft="latest")
    for value in range(50):
        receiver.stall(*[key(f"k{number}", value) for number in range(100)])
    assert (receiver.queue.messages, receiver.queue.conflated) == (100, 4900)
    for number in range(1000):  # keys that come and go
        receiver.publish(key(f"other{number}", 0))
        receiver.flush(1)
    assert receiver.queue._keys is not None
    assert len(receiver.queue._keys._places) < 500
    assert len(receiver.drain()) == 100


@pytest.mark.parametrize("begin", ["choose", "change the order"])
def test_latest_reads_what_waits_when_it_is_chosen(begin):
    """A message costs no more if many messages wait for its receivers, which would all read theirs in one step."""
    receiver = connection(soft="queue" if begin == "choose" else "latest", order="stack")
    receiver.stall(*[key(f"k{number}", 0) for number in range(1000)])
    receiver.set_order(ORDER["queue"])
    if begin == "choose":
        receiver.flush(0)
        receiver.set_strategies(soft=SOFT["latest"])
    else:
        receiver.flush(0)
    assert calls(receiver.publish, key("k7", 1)) < 150
    assert receiver.queue.conflated == 1


def test_choosing_again_and_again_reads_each_message_once():
    """A receiver that flips between its strategies cannot have the server read its backlog again and again."""
    receiver = connection()
    receiver.stall(*[key(f"k{number}", 0) for number in range(1000)])

    def flip() -> None:
        for _ in range(20):
            receiver.set_strategies(soft=SOFT["queue"])
            receiver.set_strategies(soft=SOFT["latest"])
            receiver.publish(key("k0", 1))

    flip()
    assert calls(flip) < 4_000
    assert receiver.queue.conflated == 40
