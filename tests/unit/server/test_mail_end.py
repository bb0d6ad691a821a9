"""The end of clients with mail, and mail beside a plain model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from sbus.errors import CloseReason
from sbus.fair.lines import QUANTUM
from sbus.flood import Verdict
from sbus.protocol.notices import LossReason
from sbus.routing.route import Group
from sbus.server.bus.mail import LOOK, Mail, drop
from sbus.server.core.components import FloodControls
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples
from tests.unit.server.mailboxes import (
    MANY,
    OTHER,
    PUBLISHER,
    READER,
    TICK,
    WHOAMI,
    is_clean,
    kinds,
    lines_of,
    message,
    messages,
    readers_of,
    receipts,
    taken,
    tight_bus,
)

# --- the end --------------------------------------------------------------------------------------


def test_what_waits_for_receivers_that_left_is_accounted_for():
    """A receiver whose connection is lost loses what waits before its end; the others get it."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.transport.deliver(*messages(1, 2))
    readers[0].transport.hang_up()
    bus.clock.advance(0)
    publisher.transport.deliver(message(3))
    bus.settle()
    assert taken(readers[1:]) == [messages(1, 2, 3)] * (MANY - 1)
    counters = bus.registry.counters
    assert counters.dropped == 2 == counters.dropped_by[LossReason.DISCONNECT]
    assert counters.routed == 3 * MANY - 1
    assert readers[0].protocol.lost == 2
    assert is_clean(bus)


def test_a_gap_after_the_end_of_a_receiver_is_none_of_its_losses():
    """Messages that are lost after the end of a receiver in the mail were not meant for it; the others' count."""
    bus = tight_bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(1))
    readers[0].transport.hang_up()
    for number in (2, 3, 4):
        publisher.transport.deliver(message(number, size=4_000))
    assert kinds(bus) == ["Mail", "end", "Mail", "Gap"]
    bus.settle()
    counters = bus.registry.counters
    assert taken(readers[1:]) == [[message(1), message(2, size=4_000)]] * (MANY - 1)
    assert (counters.dropped, readers[0].protocol.lost) == (2 * (MANY - 1) + 1, 1)
    assert counters.routed == 4 * MANY - 3
    assert counters.routed_bytes == counters.routed * len(message(1)) + 4_000 * 3 * (MANY - 1)
    assert is_clean(bus)


@pytest.mark.parametrize("end", ["end", "close"])
def test_a_connection_that_is_lost_before_the_place_of_its_end(end):
    """Messages that are handled after a client has ended are not for it, though its connection is lost before that."""
    bus = HandTurnedBus(1)
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.send(message(1))
    if end == "end":
        readers[0].transport.end()
    else:
        readers[0].protocol.close(CloseReason.VIOLATION)
    publisher.send(message(2))
    readers[0].transport._abort(Failure(ConnectionLost()))
    bus.settle()
    assert not readers[0].is_connected
    assert kinds(bus) == ["Mail", "end", "Mail", "end"]
    bus.finish()
    assert taken(readers[1:]) == [messages(1, 2)] * (MANY - 1)
    counters = bus.registry.counters
    assert readers[0].protocol.lost == 1 == counters.dropped
    assert counters.routed == 2 * MANY - 1
    assert is_clean(bus)


def test_a_stop_accounts_for_everything():
    """When the server stops, mail is dropped in one pass: each receiver gets a last receipt with all that it lost."""
    bus = tight_bus()
    readers = readers_of(bus, b"SUB k", b"CMSG receipts/on", b"CMSG bye/on", count=20)
    publisher = bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    for number in range(30):
        publisher.transport.deliver(message(number, size=1_000))
    readers[0].transport.deliver(WHOAMI)
    assert kinds(bus)[-1] == "reply"
    user = bus.registry.users[READER]
    done = bus.registry.stopService()
    bus.settle()
    assert done.called
    for at, reader in enumerate(readers):
        got = reader.take()
        assert got[-1].startswith(b"CMSG bye\0")
        assert not any(packet.startswith(b"MSG") for packet in got)
        told = receipts(got)
        assert (sum(receipt[0] for receipt in told), sum(receipt[1] for receipt in told)) == (30, 30 * 1_006 + 50)
        assert (told[-1][2], len(told)) == (30, 1)  # those that had found no room, too
        assert (WHOAMI in b"".join(got)) is (at == 0)
    assert bus.registry.counters.dropped == 30 * 20 == bus.registry.counters.dropped_by[LossReason.DISCONNECT]
    assert bus.registry.counters.routed == 30 * 20
    assert (user.memory, user.lines.bytes, user.lines.work, bus.registry.scheduler.mail_copies) == (0, 0, 0, 0)
    assert len(bus.registry.users) == 0


def test_a_stop_in_the_middle_of_an_entry():
    """An observer may stop the service while an entry is delivered: the entry is, and the rest is accounted for."""
    stopped: list[Any] = []

    class Stopping(Observer):
        def dropped(self, client: Any, packets: int, size: int) -> None:
            if not stopped:
                stopped.append(bus.registry.stopService())

    bus = HandTurnedBus(TICK, observers=(Stopping(),))
    readers, publisher = readers_of(bus, b"SUB k", b"CMSG receipts/on"), bus.connect(uid=PUBLISHER)
    user = bus.registry.users[READER]
    readers[0].send(b"CMSG blocking/soft/discard")
    readers[0].stall()
    bus.use_up(publisher, -100_000)
    publisher.send(message(1))
    readers[1].send(WHOAMI)
    publisher.send(message(2), message(3))
    bus.finish()
    assert stopped[0].called
    came = [sum(packet in messages(1, 2, 3) for packet in reader.take()) for reader in readers]
    assert all(came[1:])
    assert [reader.protocol.lost for reader in readers] == [3 - each for each in came]
    assert (user.memory, user.lines.bytes, user.lines.work, bus.registry.scheduler.mail_copies) == (0, 0, 0, 0)
    assert len(bus.registry.users) == 0


def test_entries_that_have_begun_are_dropped_from_there_on():
    """Receivers that have got an entry do not lose it at a stop; a publisher without echo loses nothing of its own."""
    bus = HandTurnedBus(TICK)
    readers = readers_of(bus, count=10 * LOOK)
    publisher = bus.connect(uid=PUBLISHER)
    bus.use_up(publisher, -100_000)
    publisher.send(message(1))
    readers[-1].send(b"CMSG echo/off", message(2))
    bus.finish() if not lines_of(bus).mail else bus.turn()
    came = [len(reader.transport.written) for reader in readers]
    assert 0 < sum(came) < len(readers)
    drop(bus.registry.delivery, bus.registry.users[READER])
    total = [reader.protocol.lost + count for reader, count in zip(readers, came, strict=True)]
    handled = bus.registry.counters.published
    assert total == [*[handled] * (len(readers) - 1), 1]
    assert is_clean(bus)


# --- everything at once ---------------------------------------------------------------------------


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 3), st.integers(1, 5), st.sampled_from([0, 300, 3_000])),
    st.tuples(st.just("publish"), st.integers(0, 3), st.integers(1, 5), st.sampled_from([0, 300, 3_000])),
    st.tuples(st.just("ask"), st.integers(0, MANY - 1)),
    st.tuples(st.just("stall"), st.integers(0, MANY - 1)),
    st.tuples(st.just("drain"), st.integers(0, MANY - 1)),
    st.tuples(st.just("turn")),
)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(STEPS, max_size=60), st.integers(1, QUANTUM * 3 // 5), st.booleans())
@example([*(("stall", at) for at in range(3)), *(("publish", who, 5, 3_000) for who in (2, 0, 2))], 1, False)
def test_mailboxes_of_any_size(steps, tick, blocks):
    """With tiny mailboxes, each message comes in order or is in a receipt, those of the own user all come as long as
    its memory is not full (I5), and mail alone always empties (I15)."""
    bus = HandTurnedBus(tick, limits=Limits(block_timeout=1e9, user_memory=32 * 4_000 + 100_000))
    readers = [bus.connect(uid=READER) for _ in range(MANY)]
    for at, reader in enumerate(readers):
        reader.send(b"SUB k", b"CMSG receipts/on", *([b"CMSG blocking/hard/block"] if blocks and at % 2 else []))
    bus.finish()
    for reader in readers:
        reader.take()
    senders = [bus.connect(uid=PUBLISHER), bus.connect(uid=OTHER), bus.connect(uid=READER), bus.connect(uid=READER)]
    sent: list[list[int]] = [[] for _ in senders]
    asked = [0] * MANY
    numbers = iter(range(1, 10_000))
    user, stalled, size_sent = readers[0].protocol.user, set(), 0
    room = user.memory_limit - user.memory - 10_000  # for what waits besides the mail
    for name, *arguments in steps:
        if name == "publish":
            who, count, size = arguments
            some = [next(numbers) for _ in range(count)]
            sent[who] += some
            size_sent += count * (size + 200)
            senders[who].send(*(message(number, size=size) for number in some))
        elif name == "ask":
            asked[arguments[0]] += 1
            readers[arguments[0]].send(WHOAMI)
        elif name == "stall":
            stalled.add(arguments[0])
            readers[arguments[0]].stall()
        elif name == "drain":
            readers[arguments[0]].drain()
        else:
            bus.turn()
    for reader in readers:
        reader.drain()
    bus.finish()
    for reader in readers:
        reader.drain()
    bus.finish()
    owner = {number: who for who, some in enumerate(sent) for number in some}
    for at, reader in enumerate(readers):
        got = reader.take()
        came = [int(packet[6:].rstrip(b"\0")) for packet in got if packet.startswith(b"MSG")]
        for who, some in enumerate(sent):
            mine = [number for number in came if owner[number] == who]
            assert mine == [number for number in some if number in set(mine)]
            if who > 1 and (len(stalled) + 1) * size_sent < room:
                assert mine == some
        assert sum(receipt[0] for receipt in receipts(got)) == reader.protocol.lost == len(owner) - len(came)
        assert sum(packet.startswith(WHOAMI) for packet in got) == asked[at]
    assert is_clean(bus)
    assert not any(peer.protocol.is_paused for peer in (*readers, *senders))
    assert bus.registry.counters.published == len(owner)


class Failing:
    """A strategy, an order, a policy and an observer in one, each of which raises an exception when it is told to."""

    selector, always, newestFirst, arrival = b"fails", None, None, False
    restrictsPublishing = False

    def __init__(self, fails: list[bool]) -> None:
        self._fails = itertools.cycle(fails)
        self.mayConnect = self.checkSubscription = lambda *_: True

    def _work(self, result: Any) -> Any:
        if next(self._fails):
            raise RuntimeError("broken")
        return result

    def decide(self, queue: Any, packet: bytes) -> Verdict:
        return self._work(Verdict.KEEP)

    def rank(self, arrival: int, size: int, newest_first: bool) -> int:
        return self._work(arrival)

    def mayBlock(self, receiver: Any, publisher: Any) -> bool:
        return self._work(True)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(STEPS, max_size=60), st.integers(1, TICK), st.lists(st.booleans(), min_size=1))
def test_plugins_that_fail(steps, tick, fails):
    """A plugged-in strategy, order or policy that fails costs its client the connection, and nothing stays charged."""
    failing: Any = Failing(fails)
    choices = [b"CMSG soft", b"CMSG hard", b"CMSG order", b"CMSG blocking/hard/block", b"CMSG blocking/soft/block"]
    bus = HandTurnedBus(
        tick,
        credentials=failing,
        controls=FloodControls(
            soft={**FloodControls.built_in().soft, b"soft": failing},
            hard={**FloodControls.built_in().hard, b"hard": failing},
            orders={b"order": failing},
        ),
        limits=Limits(block_timeout=1e9, queue_messages=4, user_memory=32 * 4_000 + 100_000),
    )
    readers = [bus.connect(uid=READER) for _ in range(MANY)]
    for at, reader in enumerate(readers):
        reader.send(b"SUB k", *choices[at % 6 : at % 6 + 1])
    bus.finish()
    senders = [bus.connect(uid=uid) for uid in (PUBLISHER, OTHER, READER, READER)]
    numbers = itertools.count()
    for name, *arguments in steps:
        if name == "publish":
            who, count, size = arguments
            senders[who].send(*(message(next(numbers), size=size) for _ in range(count)))
        elif name == "turn":
            bus.turn()
        elif readers[arguments[0]].is_connected:
            {"ask": lambda peer: peer.send(WHOAMI), "stall": Peer.stall, "drain": Peer.drain}[name](
                readers[arguments[0]]
            )
    for _ in range(2):
        for reader in readers:
            if reader.is_connected:
                reader.drain()
        bus.finish()
    assert is_clean(bus)
    assert all(sender.is_connected and not sender.protocol.is_paused for sender in senders)
    assert bus.registry.counters.published == next(numbers)
    user = bus.registry.users[READER]
    for at, reader in enumerate(readers):
        came = sum(packet.startswith(b"MSG") for packet in reader.take())
        if reader.is_connected:
            assert came + reader.protocol.lost == bus.registry.counters.published
            reader.transport.hang_up()
        else:
            assert at % 6 < 5, "it has chosen nothing that fails"
    for sender in senders:
        sender.transport.hang_up()
    bus.finish()
    bus.finish()
    assert (user.memory, user.queued_bytes, user.connections, user.patterns) == (0, 0, 0, 0)
    assert len(bus.registry.users) == 0


def test_observers_publish_after_the_entry():
    """What an observer publishes in the middle of an entry comes to each receiver after it."""
    told: list[Any] = []

    class Telling(Observer):
        def dropped(self, client: Any, packets: int, size: int) -> None:
            if not told:
                told.append(client)
                bus.registry.publish(b"k", b"told")

    bus = Bus(observers=(Telling(),), limits=Limits(queue_messages=1))
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    readers[0].stall()
    publisher.transport.deliver(*messages(1, 2))
    bus.settle()
    assert taken(readers[1:]) == [[*messages(1, 2), b"MSG k\0told"]] * (MANY - 1)
    assert is_clean(bus)


def test_equal_groups_are_one():
    """A group is one object for all routes with these receivers of a user, so that their messages join."""
    bus = Bus()
    readers_of(bus, b"SUB k", b"SUB j")
    readers_of(bus, b"SUB j", uid=OTHER)
    (one,) = bus.registry.route(b"k").groups
    both = bus.registry.route(b"j").groups
    assert isinstance(one, Group)
    assert one is both[0]
    assert {group.user.uid for group in both} == {READER, OTHER}


def test_the_state_of_mail_is_plain():
    """Entries describe themselves as plain values."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.transport.deliver(message(1))
    readers[0].transport.deliver(WHOAMI)
    entry, letter = lines_of(bus).mail
    assert isinstance(entry, Mail)
    assert letter.describe() == {"client": readers[0].protocol.number, "kind": "reply"}
