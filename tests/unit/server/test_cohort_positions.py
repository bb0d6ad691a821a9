"""Cohorts beside a plain model: whatever clients and sockets do, each message is got, lost and told, or replaced.

The model knows nothing of cohorts, of lateness and of queues: it notes what each receiver is offered, in the order in
which the server has handled it. At the end that is compared with what came, and nothing may be left over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from twisted.internet import error
from twisted.python.failure import Failure

from sbus.errors import CloseReason
from sbus.flood import Verdict, orders
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus import blocks, cohort_delivery, cohorts, delivery, late
from sbus.server.bus.late import LONGEST_WAIT
from sbus.server.bus.unrouted import is_unrouted
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.interfaces import Receiver
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.core.turns import CROWD
from tests.support.buses import Bus, Peer, kept, mask_memory
from tests.support.examples import examples

READERS = 6
PUBLISHERS = 3
PATTERNS = (b"k", b"j", b"i", b"*")
KEYS = PATTERNS[:3]
CHOICES = (
    b"blocking/soft/queue",
    b"blocking/soft/discard",
    b"blocking/soft/block",
    b"blocking/soft/latest",
    b"blocking/soft/error",
    b"blocking/hard/discard",
    b"blocking/hard/block",
    b"blocking/hard/error",
    b"order/queue",
    b"order/stack",
    b"order/random",
    b"bundle/on",
    b"bundle/off",
    b"echo/off",
    b"echo/on",
    b"observer/on",
    b"observer/off",
)
_REORDERED = (b"order/stack", b"order/random")
_LOSSY = (b"blocking/soft/discard", b"blocking/soft/error", b"blocking/hard/error")


class SlowTurns(Bus):
    """A bus whose users take turns only when a test says so; other timers go by its clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turns: list[Callable[[], None]] = []
        self.registry.turns._reactor = self

    def callLater(self, delay: float, call: Callable[[], None]) -> None:
        if delay:
            self.clock.callLater(delay, call)
        else:
            self.turns.append(call)

    def turn(self) -> None:
        """Take one turn."""
        turns, self.turns = self.turns, []
        for call in turns:
            call()
        self.settle()


class Client:
    """A client that subscribes, with what it was offered and what it has got."""

    def __init__(self, bus: Bus, uid: int) -> None:
        self.peer: Peer = bus.connect(uid=uid)
        self.draining = self.peer.protocol._draining
        self.offered: list[tuple[bytes, object]] = []  # with the publisher
        self.chosen: set[bytes] = set()
        self.was_slow = False
        self.was_aborted = False
        self.written: list[bytes] = []

    def take(self) -> None:
        self.written += self.peer.take()

    def got(self) -> list[bytes]:
        """Return the messages that have come."""
        return [packet for packet in self.written if packet.startswith(b"MSG ") and not packet.startswith(b"MSG kept")]


class Echoing(Observer):
    """Publishes when something is delivered next, if it was told to."""

    publish: Callable[[], None] | None = None

    def delivered(self, client: object, messages: int, size: int) -> None:
        publish, self.publish = self.publish, None
        if publish is not None:
            publish()


class Model:
    """The bus, its clients, and what they were offered.

    :ivar has_room: whether no queue is ever full.
    """

    def __init__(self, limits: Limits, across_users: bool, has_observer: bool) -> None:
        self.echoing = Echoing()
        self.has_observer = has_observer
        self.bus = SlowTurns(
            limits=limits,
            access=AccessSettings(block_across_users=across_users),
            observers=[self.echoing] if has_observer else [],
            last_values=(LastValueRule(b"kept/"),),
        )
        registry = self.bus.registry
        self.late = registry.delivery._late
        self.numbers = itertools.count()
        self.unrouted = 0
        self.joined = self.masked = False
        self.has_room = True
        self._deliver, registry.deliver = registry.deliver, self._noted
        self.publishers = [self.bus.connect(uid=uid) for uid in range(1, PUBLISHERS + 1)]
        self.publishers[0].send(b"MSG kept/1\0one", b"MSG kept/2\0two")
        self.by_protocol: dict[object, Client] = {}
        self.all: list[Client] = []
        self.readers = [self.connect(slot) for slot in range(READERS)]

    def connect(self, slot: int) -> Client:
        client = Client(self.bus, 2 + slot % 2)
        self.by_protocol[client.peer.protocol] = client
        self.all.append(client)
        return client

    def _noted(
        self, packets: list[bytes], receivers: tuple[Receiver, ...], publisher: Any, at_once: bool = False, /
    ) -> int:
        takers = [each for each in receivers if each.queue is not None and not each.queue.is_deaf]
        nobody = is_unrouted(receivers, self.bus.registry.interest.observers)
        count = self._deliver(packets, receivers, publisher, at_once)
        for taker in takers:
            self.by_protocol[taker].offered += [(packet, publisher) for packet in packets[:count]]
        self.unrouted += count if nobody else 0
        return count

    def packets(self, key: bytes, count: int) -> list[bytes]:
        numbers = itertools.islice(self.numbers, count)
        return [b"MSG %s\0%d %s" % (key, number, b"x" * (number % 7)) for number in numbers]

    # --- steps ---------------------------------------------------------------------------------

    def publish(self, who: int, key: int, count: int) -> None:
        senders = [*self.publishers, *(reader.peer for reader in self.readers)]
        peer = senders[who % len(senders)]
        if peer.is_connected and not peer.transport._peer_ended:
            peer.send(*self.packets(KEYS[key % 3], count))

    def echo(self, who: int, key: int, count: int) -> None:
        """Have the next delivery make the program around the bus publish."""
        if self.has_observer:
            self.echoing.publish = lambda: self.bus.registry.publish(
                KEYS[key % 3], self.packets(b"", 1)[0].partition(b"\0")[2]
            )

    def spend(self, who: int, key: int, count: int) -> None:
        self.publishers[1 + who % 2].protocol.user.copies.work_left = -count * 10
        self.bus.registry.turns.crowd = CROWD

    def stall(self, who: int, key: int, count: int) -> None:
        reader = self.readers[who % READERS]
        reader.was_slow = True
        reader.peer.transport.capacity = key

    def drain(self, who: int, key: int, count: int) -> None:
        reader = self.readers[who % READERS]
        if reader.was_slow and reader.peer.is_connected:
            reader.peer.drain(count)

    def free(self, who: int, key: int, count: int) -> None:
        reader = self.readers[who % READERS]
        if reader.peer.is_connected:
            reader.peer.drain()

    def _tell(self, who: int, packet: bytes) -> Client:
        reader = self.readers[who % READERS]
        if reader.peer.is_connected and not reader.peer.transport._peer_ended:
            reader.peer.send(packet)
        return reader

    def select(self, who: int, key: int, count: int) -> None:
        choice = CHOICES[count % len(CHOICES)]
        self._tell(who, b"CMSG " + choice).chosen.add(choice)

    def receipts(self, who: int, key: int, count: int) -> None:
        reader = self.readers[who % READERS]
        if not reader.offered:  # the sum of all receipts is to be the sum of all losses
            self._tell(who, b"CMSG receipts/on").chosen.add(b"receipts/on")

    def fence(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"CMSG !/cred/whoami")

    def last(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"CMSG last\0kept/").was_slow = True

    def subscribe(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"SUB " + PATTERNS[key % 4])

    def unsubscribe(self, who: int, key: int, count: int) -> None:
        self._tell(who, b"UNSUB " + PATTERNS[key % 4])

    def end(self, who: int, key: int, count: int) -> None:
        """End a connection, one way or another; mostly the client comes back as a new one."""
        reader = self.readers[who % READERS]
        peer = reader.peer
        if peer.is_connected and not peer.transport._peer_ended:
            reader.was_slow = True
            if key == 0:
                peer.transport.end()
            elif key == 1:
                reader.was_aborted = True
                peer.transport.hang_up()
            elif key == 2:
                reader.was_aborted = True
                peer.transport._abort(Failure(error.ConnectionLost()))
            else:
                peer.protocol.close(CloseReason.VIOLATION)
        self.bus.settle()
        if count % 4:
            self.readers[who % READERS] = self.connect(who % READERS)

    def turn(self, who: int, key: int, count: int) -> None:
        self.bus.turn()

    def wait(self, who: int, key: int, count: int) -> None:
        self.bus.clock.advance(LONGEST_WAIT)

    def finish(self, rounds: int) -> None:
        """Have all sockets take everything, for a bounded number of turns.

        In the middle one more message comes: receivers that lose messages while their sockets are full are in a cohort
        until they find that theirs has room.
        """
        for at in range(rounds):
            if at == rounds // 2:
                for key in KEYS:
                    self.publishers[0].send(*self.packets(key, 1))
            for client in self.all:
                if client.peer.is_connected:
                    client.peer.drain()
            self.bus.turn()
            self.bus.clock.advance(LONGEST_WAIT)

    # --- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        """Check what holds between any two steps."""
        found, of = self.late, self.late.cohorts.of
        everything = [cohort for group in found.cohorts._by_user.values() for cohort in group.values()]
        assert set(everything) == set(of.values())
        assert found.cohorts.bytes == sum(cohort.blocks.size for cohort in everything)
        for user, group in found.cohorts._by_user.items():
            assert group
            assert all(
                (cohort.user, cohort.can_block, cohort.replaces) == (user, *kind) for kind, cohort in group.items()
            )
        assert sum(len(cohort.members) for cohort in everything) == len(of)
        for cohort in everything:
            self.joined, self.masked = True, self.masked or cohort.blocks.mask_count > 0
            positions = list(cohort.members.values())
            assert positions == sorted(positions)
            assert cohort.blocks.start <= positions[0]
            assert positions[-1] <= cohort.end
            assert cohort.due <= cohort.end
            assert cohort.blocks.size == sum(map(len, kept(cohort))) + mask_memory(cohort.blocks)
            assert not cohort.waiting() or found._has_timer
        for receiver, cohort in of.items():
            queue = receiver.queue
            assert queue is not None
            assert receiver in cohort.members
            assert receiver.user is cohort.user
            assert queue.is_late
            assert not queue.is_clear
            assert not queue.pending
            if not queue.is_held:
                assert cohort.can_block is queue.can_block
                assert cohort.replaces is (queue.settings.soft.always is Verdict.REPLACE)
        clients = [client.peer.protocol for client in self.all]
        assert found.bytes == sum(protocol.queue.late_bytes for protocol in clients)
        for protocol in clients:
            if protocol.queue.is_late:
                line = found._lines[protocol.user]
                assert protocol in of or protocol in line.receivers or protocol in line.congested
                assert not line.congested or found._has_timer
                assert not line.receivers or line.is_waiting
            else:
                assert protocol.queue.late_bytes == 0

        for client in self.all:
            self._check_draining(client)

    def _check_draining(self, client: Client) -> None:
        """Check that a client whose socket takes packets gets what waits, or has it coming in a turn."""
        queue = client.peer.protocol.queue
        draining = client.draining
        line = self.bus.registry.turns._waiting.get((queue.copies, False))
        assert draining._is_waiting is (line is not None and draining in line.others)
        if not client.peer.is_connected:
            assert not draining._is_waiting
        elif client.peer.transport.capacity is None and queue.messages and not queue.is_held:
            assert draining._is_waiting

    def check_end(self) -> None:
        """Check that everything has come or is accounted for, and that nothing is left."""
        for client in self.all:
            client.take()
            self._check_client(client)
        registry = self.bus.registry
        assert registry.counters.dropped == sum(client.peer.protocol.lost for client in self.all)
        assert registry.counters.unrouted == self.unrouted
        assert registry.backpressure.held == 0
        assert not any(peer.protocol.is_paused for peer in self.publishers)
        members = self.late.cohorts.of
        assert (self.late.bytes, self.late.cohorts.bytes) == (0, 0)
        if all(member.patterns for member in members):  # without a subscription, no message lets it find room
            self._check_empty()
        for client in self.all:
            if client.peer.is_connected:
                client.peer.transport.hang_up()
        self.finish(4)
        self._check_empty()

    def _check_empty(self) -> None:
        found = self.late
        assert (found.bytes, found.cohorts.bytes, found.cohorts.of) == (0, 0, {})
        assert (found.cohorts._by_user, found._lines) == ({}, {})
        assert self.bus.registry.turns._waiting == {}
        budget = self.publishers[0].protocol.user.budget
        assert (budget.bytes, budget.messages, budget.queues, budget.users) == (0, 0, 0, 0)
        for user in {client.peer.protocol.user for client in self.all}:
            connected = [each for each in self.bus.registry.clients.values() if each.user is user]
            assert user.memory == sum(each.memory() for each in connected)

    def _check_client(self, client: Client) -> None:
        protocol, chosen = client.peer.protocol, client.chosen
        queue = protocol.queue
        got = client.got()
        offered = [packet for packet, _ in client.offered]
        assert not Counter(got) - Counter(offered), "something has come twice, or to a client that it was not for"
        assert len(offered) == len(got) + protocol.lost + queue.conflated
        assert not client.peer.is_connected or len(queue) == 0
        is_there = client.peer.is_connected or not client.was_slow
        if is_there and (not client.was_slow or not chosen & set(_LOSSY)) and self.has_room:
            assert protocol.lost == 0
        if b"blocking/soft/latest" not in chosen:
            assert queue.conflated == 0
        elif is_there and protocol.lost == 0:
            newest = {packet.partition(b"\0")[0]: packet for packet in offered}
            assert set(newest.values()) <= set(got)
        if b"receipts/on" in chosen and not client.was_aborted:
            told = [packet for packet in client.written if packet.startswith(b"CMSG lost\0")]
            numbers = [tuple(map(int, packet.partition(b"\0")[2].split()[:3])) for packet in told]
            assert sum(number[0] for number in numbers) == protocol.lost
            assert not numbers or numbers[-1][2] == protocol.lost
        if not chosen & set(_REORDERED):
            self._check_order(client, offered)

    def _check_order(self, client: Client, offered: list[bytes]) -> None:
        """Check the order of each publisher, of all publishers, and of receipts."""
        replaces = b"blocking/soft/latest" in client.chosen
        place = {packet: at for at, packet in enumerate(offered)}
        publisher = dict(client.offered)
        # In the place of a replaced message stands its key's newest; what observers publish comes into a run's middle.
        lines: dict[object, list[int]] = {}
        for packet in client.got():
            key = packet.partition(b"\0")[0] if replaces else None
            lines.setdefault((key, publisher[packet] if self.has_observer else None), []).append(place[packet])
        for places in lines.values():
            assert places == sorted(places)
        if b"receipts/on" in client.chosen and not replaces and not self.has_observer:
            passed = 0
            for packet in client.written:
                if packet.startswith(b"CMSG lost\0"):
                    passed += int(packet.partition(b"\0")[2].split()[0])
                elif packet in place:
                    assert place[packet] <= passed, "a gap comes before its receipt"
                    passed += 1


def _steps() -> st.SearchStrategy[tuple[str, int, int, int]]:
    names = [
        *["publish"] * 8,
        *["stall", "turn", "wait"] * 3,
        *["spend", "drain", "select", "subscribe"] * 2,
        "unsubscribe",
        "free",
        "receipts",
        "fence",
        "last",
        "end",
        "echo",
    ]
    return st.tuples(
        st.sampled_from(names), st.integers(0, PUBLISHERS + READERS - 1), st.integers(0, 3), st.integers(1, 40)
    )


def _sizes() -> Iterator[tuple[Any, str, st.SearchStrategy[Any]]]:
    """Return what a bus has much of, with small numbers to try."""
    yield late, "MANY", st.sampled_from((1, 2, 4))
    yield late, "_CATCH_UPS", st.sampled_from((1, 16))
    yield delivery, "FLUSHED_AT_ONCE", st.sampled_from((2, 512))
    yield late, "MOST_BYTES", st.sampled_from((200, 16 << 20))
    yield late, "MOST_PACKETS", st.sampled_from((10, 2_048))
    yield cohort_delivery, "_MOST_SHARED", st.sampled_from((8, 64, 8_192))
    yield cohort_delivery, "_LEAST_REPLACED", st.sampled_from((5, 2_048))
    yield cohort_delivery, "_COHORT_WORTH_DECIDING", st.sampled_from((20, 2_048))
    yield late, "WORTH_DECIDING", st.sampled_from((10, 512))
    yield blocks, "_MOST_DIGESTS", st.sampled_from((1, 64))
    yield cohorts, "_MOST_WINDOWS", st.sampled_from((1, 4))
    yield cohorts, "_MASK_WEIGHT", st.sampled_from((0, 16))
    yield late, "_MUCH", st.sampled_from((1, 2_048))
    yield blocks, "_BLOCK", st.sampled_from(((4, 200), (1_024, 256 << 10)))
    yield blocks, "_LEAST", st.sampled_from(((2, 100), (512, 64 << 10)))
    yield orders, "_LONG", st.sampled_from((2, 64))
    yield cohort_delivery, "CONTENDED_BUDGET", st.sampled_from((0, 500))
    yield delivery, "_SENDS_FOR", st.sampled_from((0, 100))


SIZES = [(module, name, value) for module, name, value in _sizes()]


@settings(max_examples=examples(600), deadline=None)
@given(
    sizes=st.tuples(*(values for _, _, values in SIZES)),
    queue_messages=st.sampled_from((4, 30, 65_536)),
    total=st.sampled_from((2_000, 256 << 20)),
    across_users=st.booleans(),
    has_observer=st.booleans(),
    beginnings=st.lists(
        st.tuples(st.integers(0, len(CHOICES) - 1), st.integers(0, 3), st.booleans()),
        min_size=READERS,
        max_size=READERS,
    ),
    steps=st.lists(_steps(), max_size=70),
)
@example(  # a snapshot ends while messages wait for its client in a cohort, and its strategies hold again
    sizes=(1, 1, 2, 200, 10, 8, 5, 20, 10, 1, 1, 0, 1, (4, 200), (2, 100), 2, 0, 0),
    queue_messages=4,
    total=2_000,
    across_users=False,
    has_observer=False,
    beginnings=[(0, 0, False), (0, 0, False), (3, 0, False), (0, 0, False), (0, 0, False), (0, 0, False)],
    steps=[("last", 8, 0, 1), ("publish", 0, 0, 1), ("free", 8, 0, 1)],
)
@example(  # a run is for none of those whose turn is next, who only move on
    sizes=(1, 1, 2, 200, 10, 8, 5, 20, 10, 1, 1, 0, 1, (4, 200), (2, 100), 2, 0, 0),
    queue_messages=4,
    total=2_000,
    across_users=False,
    has_observer=False,
    beginnings=[(0, 0, False), (0, 0, False), (0, 0, False), (0, 0, False), (0, 0, False), (1, 0, False)],
    steps=[("publish", 0, 0, 1), ("turn", 0, 0, 1), ("unsubscribe", 5, 0, 1), ("publish", 0, 0, 1)],
)
def test_each_message_is_got_or_lost_and_told_and_nothing_is_left(
    sizes: tuple[Any, ...],
    queue_messages: int,
    total: int,
    across_users: bool,
    has_observer: bool,
    beginnings: list[tuple[int, int, bool]],
    steps: list[tuple[str, int, int, int]],
) -> None:
    """However receivers form cohorts, nothing comes twice or is lost untold, and everybody goes on."""
    with ExitStack() as patches:
        for (module, name, _), value in zip(SIZES, sizes, strict=True):
            patches.enter_context(mock.patch.object(module, name, value))
        for module in (delivery, cohort_delivery):
            patches.enter_context(mock.patch.object(module, "MANY", sizes[0]))
        limits = Limits(block_timeout=1e9, queue_messages=queue_messages, total_queue_bytes=total)
        model = Model(limits, across_users, has_observer)
        model.has_room = queue_messages > 1_000 and total > 1 << 20
        for slot, (choice, pattern, has_receipts) in enumerate(beginnings):
            if has_receipts:
                model.receipts(slot, 0, 0)
            model.select(slot, 0, choice)
            model.subscribe(slot, pattern, 0)
            model.stall(slot, 0, 0)
        for name, who, key, count in steps:
            getattr(model, name)(who, key, count)
            model.check()
        event(f"a cohort was formed: {model.joined}, masks: {model.masked}")
        model.finish(4 * len(steps) + 8)
        model.check_end()
