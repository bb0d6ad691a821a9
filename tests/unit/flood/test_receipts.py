"""Receipts and conflation: every message that does not arrive is accounted for, exactly and at its place."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sbus.flood import HARD_STRATEGIES, ORDERS, SOFT_STRATEGIES
from sbus.flood.receipts import MERGE
from sbus.protocol.keys import PeerCredentials
from sbus.protocol.notices import LossReason
from sbus.server.limits import Limits
from sbus.server.protocol import BusProtocol
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus, Peer

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
        snapshot = self.queue.snapshot()
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


choices = st.tuples(
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
TestReceipts.settings = settings(max_examples=150, stateful_step_count=25)
