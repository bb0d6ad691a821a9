"""Mail: what waits for the receivers of one user comes in the order of handling, or is accounted for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from sbus.errors import CloseReason
from sbus.fair.lines import MAIL_NS, QUANTUM
from sbus.flood import Outcome, Verdict
from sbus.protocol.notices import LossReason
from sbus.routing.route import FIRST_NS, Group
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.delivery import account_of
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.bus.mail import GAP_GROUPS, JOINED, LOOK, Gap, Letter, Mail, drop
from sbus.server.core.components import FloodControls
from sbus.server.core.limits import MAX_REPLIES, Limits
from sbus.server.core.observers import Observer
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.examples import examples

MANY = OF_OTHERS + 7
READER, PUBLISHER, OTHER = 2, 1, 3
TICK = QUANTUM // 5
WHOAMI = b"CMSG !/cred/whoami"


def message(number: int = 0, key: bytes = b"k", size: int = 0) -> bytes:
    return b"MSG %b\0%d" % (key, number) + bytes(size)


def messages(*numbers: int) -> list[bytes]:
    return [message(number) for number in numbers]


def readers_of(bus: Bus, *packets: bytes, count: int = MANY, uid: int = READER) -> list[Peer]:
    """Connect clients that have sent these packets; then several users are active."""
    readers = [bus.connect(uid=uid) for _ in range(count)]
    for reader in readers:
        reader.send(*(packets or (b"SUB k",)))
        reader.take()
    bus.registry.scheduler.is_busy = True
    return readers


def lines_of(bus: Bus, uid: int = READER) -> Any:
    return bus.registry.users[uid].lines


def kinds(bus: Bus, uid: int = READER) -> list[str]:
    """Return what stands in a user's mail."""
    return [entry.kind if isinstance(entry, Letter) else type(entry).__name__ for entry in lines_of(bus, uid).mail]


def taken(readers: list[Peer]) -> list[list[bytes]]:
    return [reader.take() for reader in readers]


def is_clean(bus: Bus, uid: int = READER) -> bool:
    """Return whether nothing of any mail is left, in no account."""
    lines, scheduler = lines_of(bus, uid), bus.registry.scheduler
    is_empty = not (lines.mail or lines.waiting or lines.letters or lines._shares or lines.held)
    return is_empty and (lines.work, lines.bytes, scheduler.mail_copies, scheduler.mail_bytes) == (0, 0, 0, 0)


# --- entries -------------------------------------------------------------------------------------


def test_messages_for_one_group_join():
    """Messages for the same receivers are one entry, whoever published them, until it begins or has enough."""
    bus = Bus()
    readers = readers_of(bus)
    one, two = bus.connect(uid=PUBLISHER), bus.connect(uid=OTHER)
    one.transport.deliver(message(1))
    two.transport.deliver(message(2))
    one.transport.deliver(message(3))
    assert kinds(bus) == ["Mail"]
    assert lines_of(bus).mail[0].describe() == {
        "packets": messages(1, 2, 3),
        "receivers": [reader.protocol.number for reader in readers],
    }
    assert bus.registry.scheduler.mail_copies == 3 * MANY
    bus.settle()
    assert taken(readers) == [messages(1, 2, 3)] * MANY
    assert is_clean(bus)


def test_keys_of_one_group_join():
    """Messages with different keys for the same receivers are one entry; those for others begin another one."""
    bus = Bus()
    readers = readers_of(bus, b"SUB k", b"SUB j")
    extra = readers_of(bus, b"SUB j", count=1)
    publisher = bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    for key in (b"k", b"j", b"k"):
        publisher.transport.deliver(message(key=key))
    assert kinds(bus) == ["Mail"] * 3
    extra[0].transport.deliver(b"UNSUB j")
    publisher.transport.deliver(message(1, b"j"), message(2, b"k"))
    assert kinds(bus) == ["Mail"] * 3
    bus.settle()
    expected = [message(0, b"k"), message(0, b"j"), message(0, b"k"), message(1, b"j"), message(2, b"k")]
    assert taken(readers) == [expected] * MANY
    assert taken(extra) == [[message(0, b"j")]]
    assert is_clean(bus)


def test_an_entry_has_a_most():
    """An entry takes `JOINED` messages: what one receiver takes of it is a step."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    for _ in range(17):
        publisher.transport.deliver(*[message()] * 64)
    assert [len(entry.packets) for entry in lines_of(bus).mail] == [JOINED, 64]
    bus.settle()
    assert taken(readers) == [[message()] * 17 * 64] * MANY


def test_an_entry_stops_after_any_receiver():
    """An entry hands over to some receivers between two looks at the clock, and goes on where it stopped."""
    bus = HandTurnedBus(TICK)
    readers, publisher = readers_of(bus, count=10 * LOOK), bus.connect(uid=PUBLISHER)
    bus.use_up(publisher, -QUANTUM // 1_000)
    lines_of(bus).deficit = 0
    publisher.send(message(1))
    got = [0]
    while got[-1] < len(readers):
        bus.registry.scheduler.crowd = 9
        bus.turn()
        got.append(got[-1] + sum(map(len, taken(readers))))
        left = len(readers) - got[-1]
        assert bus.registry.scheduler.mail_copies == left
        if left:
            assert lines_of(bus).mail[0].describe()["receivers"] == [
                reader.protocol.number for reader in readers[got[-1] :]
            ]
    assert all(0 < after - before <= 5 * LOOK for before, after in itertools.pairwise(got[1:]))
    assert len(got) > 3
    bus.finish()
    assert is_clean(bus)


@pytest.mark.parametrize(("count", "size", "step"), [(1, 0, LOOK), (JOINED, 0, 1), (256, 0, 4), (1, 64 << 10, 3)])
def test_what_is_handed_over_between_two_looks(count, size, step):
    """Between two looks at the clock are so many receivers that their copies, and the bytes of these, are few (I7)."""
    bus = Bus()
    readers, publisher = readers_of(bus, count=3 * LOOK), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    for _ in range(0, count, 64):
        publisher.transport.deliver(*[message(size=size)] * min(count, 64))
    (entry,) = lines_of(bus).mail
    assert not entry.run(0)
    assert sum(bool(reader.transport.written) for reader in readers) == step
    bus.settle()
    assert {len(reader.take()) for reader in readers} == {count}


def test_a_message_that_comes_while_an_entry_has_begun():
    """It does not join, and comes to each receiver after the entry."""
    bus = HandTurnedBus(TICK)
    readers, publisher = readers_of(bus, count=10 * LOOK), bus.connect(uid=PUBLISHER)
    bus.use_up(publisher, -100_000)
    publisher.send(message(1))
    bus.turn()
    assert 0 < sum(len(reader.transport.written) for reader in readers) < len(readers)
    publisher.send(message(2))
    assert kinds(bus) == ["Mail", "Mail"]
    bus.finish()
    assert taken(readers) == [messages(1, 2)] * len(readers)


def test_few_receivers_that_wait_get_mail():
    """A message for one of the receivers that wait goes into the mail, too; for others of the user it comes at once."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    readers[0].send(b"SUB one")
    other = readers_of(bus, b"SUB one-more", count=1)
    publisher.transport.deliver(message(1), message(2, b"one"), message(3, b"one-more"))
    assert taken(readers) == [[]] * MANY
    assert taken(other) == [[message(3, b"one-more")]]
    bus.settle()
    assert taken(readers) == [[message(1), message(2, b"one")], *[[message(1)]] * (MANY - 1)]


def test_a_subscription_is_of_its_moment():
    """A newcomer gets no earlier message that waits; a receiver that unsubscribes gets those that wait for it."""
    bus = Bus()
    readers, publisher, newcomer = readers_of(bus), bus.connect(uid=PUBLISHER), bus.connect(uid=READER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(1))
    newcomer.transport.deliver(b"SUB k")
    readers[0].transport.deliver(b"UNSUB k")
    publisher.transport.deliver(message(2))
    bus.settle()
    assert taken([*readers, newcomer]) == [messages(1), *[messages(1, 2)] * (MANY - 1), messages(2)]


def test_the_time_of_a_copy_is_learnt():
    """What an entry has taken says how much work the next ones are."""
    bus = HandTurnedBus(TICK)
    _, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    lines = lines_of(bus)
    before = lines.ns
    for _ in range(30):
        bus.use_up(publisher, -QUANTUM // 1_000)
        publisher.send(message())
        bus.finish()
    assert lines.ns > 4 * before  # a tick or two for nine copies


def test_the_time_of_an_entry_that_was_interrupted_is_learnt_whole():
    """What a copy takes is the same whether the entry was delivered at one go or in three."""
    learnt = []
    for until in (1 << 62, 0):
        bus = HandTurnedBus(1_000)
        _, publisher = readers_of(bus, count=3 * LOOK), bus.connect(uid=PUBLISHER)
        bus.use_up(publisher, -QUANTUM)
        publisher.send(message())
        lines = lines_of(bus)
        while not lines.mail[0].run(until):
            assert until == 0
        learnt.append(lines.ns)
    assert learnt[0] == learnt[1] < FIRST_NS  # 83 ns


def test_an_exception_of_one_receiver_costs_no_other(monkeypatch):
    """The client whose strategy fails is disconnected; the others get the entry, and nothing stays behind."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    readers[3].stall()
    publisher.send(message(0))
    taken(readers)

    def fail(*_: object) -> Outcome | None:
        raise RuntimeError("broken")

    monkeypatch.setattr(type(readers[3].protocol.queue), "admit_each", fail)
    readers[3].send(b"CMSG blocking/hard/error")
    readers[3].protocol.queue.configure(readers[3].protocol.settings)
    monkeypatch.setattr(type(readers[3].protocol.queue), "admit", fail)
    publisher.send(message(1))
    assert not readers[3].is_connected
    assert taken(readers[:3] + readers[4:]) == [messages(1)] * (MANY - 1)
    assert is_clean(bus)


# --- letters -------------------------------------------------------------------------------------


def test_letters_have_their_place():
    """Replies, notices and choices come where the client asked, among the messages that wait."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    reader = readers[0]
    publisher.transport.deliver(message(1))
    reader.transport.deliver(WHOAMI, b"CMSG probe\0k")
    publisher.transport.deliver(message(2))
    reader.transport.deliver(b"CMSG receipts/on", b"CMSG bundle/on")
    publisher.transport.deliver(message(3))
    assert kinds(bus) == ["Mail", "reply", "reply", "Mail", "choice", "reply", "choice", "Mail"]
    assert reader.take() == []
    bus.settle()
    got = reader.take()
    assert [packet.partition(b"\0")[0] for packet in got] == [
        b"MSG k",
        WHOAMI,
        b"CMSG probe",
        b"MSG k",
        b"CMSG receipts/on",
        b"CMSG bundle/on",
        b"MSG k",
    ]
    assert taken(readers[1:]) == [messages(1, 2, 3)] * (MANY - 1)
    assert is_clean(bus)


def test_a_choice_concerns_what_comes_after_it():
    """A strategy that is chosen while messages wait is in force for those that were published after the choice."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    reader = readers[0]
    reader.stall()
    publisher.transport.deliver(message(1), message(2))
    reader.transport.deliver(b"CMSG blocking/soft/discard")
    publisher.transport.deliver(message(3))
    bus.settle()
    assert (reader.protocol.queue.messages, reader.protocol.lost) == (2, 1)
    reader.drain()
    assert reader.take() == messages(1, 2)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (b"CMSG blocking/soft/discard", b"CMSG blocking/soft/queue", [message(1), message(3)]),
        (b"CMSG blocking/soft/queue", b"CMSG blocking/soft/discard", [message(1), message(2)]),
        (b"CMSG blocking/soft/discard", b"CMSG payload/on", [message(1), b"CMSG payload/on"]),
        (b"CMSG payload/on", b"CMSG blocking/soft/discard", [message(1), b"CMSG payload/on", message(2)]),
    ],
)
def test_a_choice_is_in_force_until_the_place_of_the_next_one(first, second, expected):
    """Of several choices that wait in the mail, each concerns the messages between it and the next one."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    reader = readers[0]
    reader.stall()
    publisher.transport.deliver(message(1))
    reader.transport.deliver(first)
    publisher.transport.deliver(message(2))
    reader.transport.deliver(second)
    publisher.transport.deliver(message(3))
    bus.settle()
    reader.drain()
    assert [packet[:15] if packet.startswith(b"CMSG") else packet for packet in reader.take()] == expected
    assert taken(readers[1:]) == [messages(1, 2, 3)] * (MANY - 1)
    assert is_clean(bus)


def test_a_snapshot_has_its_place():
    """Values come where the client asked for them: after what waited, before what was published since."""
    bus = Bus(last_values=(LastValueRule(b"k"),))
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.send(message(0))
    taken(readers)
    publisher.transport.deliver(message(1))
    readers[0].transport.deliver(b"CMSG last\0k", WHOAMI)
    publisher.transport.deliver(message(2))
    assert kinds(bus) == ["Mail", "snapshot", "Mail"]
    assert readers[0].protocol.is_paused
    bus.settle()
    assert readers[0].take()[:4] == [message(1), message(1), b"CMSG last/done\0k", message(2)]
    assert not readers[0].protocol.is_paused
    assert taken(readers[1:]) == [messages(1, 2)] * (MANY - 1)


def test_replies_that_wait_in_the_mail_stop_their_client():
    """A client that asks on while mail waits is not read past `MAX_REPLIES`, and gets all replies in the end."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    publisher.transport.deliver(message())
    readers[0].transport.deliver(*[WHOAMI] * 200)
    assert readers[0].protocol.is_paused
    assert kinds(bus).count("reply") == MAX_REPLIES + 1 == readers[0].protocol.waiting_replies
    bus.settle()
    got = readers[0].take()
    assert (got[0], len(got)) == (message(), 201)
    assert not readers[0].protocol.is_paused
    assert is_clean(bus)


def test_a_service_changes_its_user_at_its_place():
    """A client of root that becomes a service while mail waits gets that first, as root's; it is not read meanwhile."""
    bus = Bus()
    readers, publisher = readers_of(bus, uid=0), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(1))
    readers[0].transport.deliver(b"UNSUB k", b"CMSG observer/on", WHOAMI)
    assert readers[0].protocol.user.uid == 0
    assert readers[0].protocol.is_paused
    bus.settle()
    assert readers[0].take() == [message(1), b"CMSG observer/on\0", WHOAMI + b"\0!/cred/100/0/5000"]
    assert readers[0].protocol.user.uid < 0
    assert is_clean(bus, 0)


@pytest.mark.parametrize("how", ["hang_up", "abortConnection"])
def test_a_service_that_leaves_before_its_place(how):
    """A client that is gone when its turn to become a service comes stays with its user, and nothing is left of it."""
    bus = Bus()
    readers, publisher = readers_of(bus, uid=0), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(1))
    readers[0].transport.deliver(b"CMSG interest/patterns", b"UNSUB k", b"CMSG observer/on")
    getattr(readers[0].transport, how)()
    bus.settle()
    assert not readers[0].is_connected
    assert [user.uid for user in bus.registry.users.all()] == [0, PUBLISHER]
    assert (bus.registry.users[0].connections, bus.registry.users.connections) == (MANY - 1, MANY)
    assert is_clean(bus, 0)


def test_a_letter_that_fails_ends_its_client_alone():
    """An exception in a letter is logged, and closes the client that it was for."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)

    def fail() -> None:
        raise RuntimeError("broken")

    publisher.transport.deliver(message(1))
    assert bus.registry.delivery.post(readers[0].protocol, "reply", fail)
    publisher.transport.deliver(message(2))
    bus.settle()
    assert [reader.is_connected for reader in readers] == [False, *[True] * (MANY - 1)]
    assert taken(readers[1:]) == [messages(1, 2)] * (MANY - 1)
    assert is_clean(bus)


# --- echo ----------------------------------------------------------------------------------------


def test_no_echo():
    """A publisher without echo among the receivers does not get its own messages, and those of others it does."""
    bus = Bus()
    few = readers_of(bus, count=3)
    readers = readers_of(bus)
    one, two = readers[0], readers[1]
    one.transport.deliver(b"CMSG echo/off")
    stranger = bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(message(1))  # from now on the receivers wait, so own messages go into the mail, too
    one.transport.deliver(message(2), message(3))
    two.transport.deliver(message(4))
    one.transport.deliver(message(5))
    bus.settle()
    assert one.take() == messages(1, 4)
    assert taken([*few, *readers[1:]]) == [messages(1, 2, 3, 4, 5)] * (MANY + 2)
    assert bus.registry.counters.routed == 5 * (MANY + 3) - 3
    assert is_clean(bus)


# --- room ----------------------------------------------------------------------------------------


def tight_bus(**limits: Any) -> Bus:
    """A bus whose users have room for 10,000 bytes of mail each."""
    return Bus(limits=Limits(block_timeout=30.0, user_memory=320_000, **limits))


def receipts(packets: list[bytes]) -> list[tuple[int, int, int, bytes]]:
    """Return messages, bytes, total and cause of each receipt."""
    found = []
    for packet in packets:
        if packet.startswith(b"CMSG lost\0"):
            lost, size, total, why = packet.partition(b"\0")[2].split(b" ", 3)
            found.append((int(lost), int(size), int(total), why))
    return found


def test_messages_without_room_leave_a_gap():
    """Messages of another user that find no room are lost for that user alone, and each receiver gets a receipt at
    the place, with the cause."""
    bus = tight_bus()
    readers, publisher = readers_of(bus, b"SUB k", b"CMSG receipts/on"), bus.connect(uid=PUBLISHER)
    quiet = readers_of(bus, b"SUB k", uid=OTHER, count=OF_OTHERS)
    bus.registry.scheduler.is_busy = True
    large = [message(number, size=1_000) for number in range(30)]
    for packet in large:
        publisher.transport.deliver(packet)
    assert kinds(bus) == ["Mail", "Gap"]
    assert not publisher.protocol.is_paused
    bus.settle()
    (got, *others) = taken(readers)
    assert others == [got] * (MANY - 1)
    assert taken(quiet) == [large] * OF_OTHERS
    came = [packet for packet in got if packet.startswith(b"MSG")]
    lost = 30 - len(came)
    assert lost > 0
    (receipt,) = receipts(got)
    assert receipt == (lost, sum(map(len, large[len(came) :])), lost, LossReason.SHARE.value.encode())
    assert [reader.protocol.lost for reader in readers] == [lost] * MANY
    assert bus.registry.counters.dropped == lost * MANY == bus.registry.counters.dropped_by[LossReason.SHARE]
    assert is_clean(bus)


def test_a_gap_is_where_the_messages_were_lost():
    """A receipt stands after what came before the loss; after the gap, messages find room again, and follow it."""
    bus = tight_bus()
    readers, one, two = (
        readers_of(bus, b"SUB k", b"CMSG receipts/on"),
        bus.connect(uid=PUBLISHER),
        bus.connect(uid=OTHER),
    )
    bus.registry.scheduler.is_busy = True
    one.transport.deliver(message(1, size=4_000))
    one.transport.deliver(message(2, size=4_000))
    two.transport.deliver(message(3))
    readers[0].transport.deliver(WHOAMI)
    one.transport.deliver(message(4, size=4_000))
    assert kinds(bus) == ["Mail", "Gap", "Mail", "reply", "Gap"]
    assert lines_of(bus).mail[1].describe() == {"lost": [(reader.protocol.number, 1) for reader in readers]}
    assert bus.registry.scheduler.mail_copies == 4 * MANY
    bus.settle()
    got = readers[0].take()
    assert [packet[:10] for packet in got] == [
        b"MSG k\x001\0\0\0",
        b"CMSG lost\0",
        message(3),
        WHOAMI[:10],
        b"CMSG lost\0",
    ]
    assert [receipt[:3] for receipt in receipts(got)] == [(1, 4_007, 1), (1, 4_007, 2)]
    assert is_clean(bus)


def test_a_gap_takes_each_receiver_once():
    """However many groups a gap began with, its user works for each receiver once."""
    bus = tight_bus()
    leaving = GAP_GROUPS + 4
    readers = readers_of(bus, b"SUB k", b"CMSG receipts/on", count=leaving + MANY)
    publisher = bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(size=4_000))
    for number in range(leaving):
        publisher.transport.deliver(message(size=4_000))
        readers[number].transport.deliver(b"UNSUB k")
    gap = lines_of(bus).mail[1]
    assert isinstance(gap, Gap)
    assert len(gap._groups) == GAP_GROUPS
    bus.settle()
    lost = [receipts(each) for each in taken(readers)]
    assert {len(each) for each in lost} == {1}
    assert [each[0][0] for each in lost] == [*range(1, leaving + 1), *[leaving] * MANY]
    assert is_clean(bus)


def test_a_gap_stops_after_each_group_and_some_receivers():
    """A gap looks at the clock after each group and after `LOOK` receivers, whose receipts are sent by then (I7)."""
    bus = Bus()
    readers = readers_of(bus, b"SUB k", b"SUB j", b"CMSG receipts/on", count=100)
    readers += readers_of(bus, b"SUB j", b"CMSG receipts/on", count=1)
    publisher = bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    lines_of(bus).most_bytes = 10_000
    publisher.transport.deliver(message(size=4_000))
    for key in (b"k", b"j", b"k"):
        publisher.transport.deliver(message(key=key, size=4_000))
    gap = lines_of(bus).mail[1]
    told = []
    for _ in range(3):
        assert not gap.run(0)
        told.append(sum(bool(reader.transport.written) for reader in readers))
    assert told == [0, 0, LOOK]
    bus.settle()
    assert [reader.protocol.lost for reader in readers] == [*[3] * 100, 1]
    assert is_clean(bus)


def test_an_empty_share_takes_a_run_of_any_size():
    """A message larger than the mailbox comes all the same, if its user has nothing there."""
    bus = tight_bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message(size=50_000))
    bus.settle()
    assert taken(readers) == [[message(size=50_000)]] * MANY
    assert bus.registry.counters.dropped == 0


def test_a_flood_leaves_room_for_the_next_user():
    """However much one user publishes, the first message of another one finds room."""
    bus = tight_bus()
    readers, flood = readers_of(bus), bus.connect(uid=10)
    others = [bus.connect(uid=uid) for uid in range(11, 21)]
    bus.registry.scheduler.is_busy = True
    flood.transport.deliver(*[message(0, size=500)] * 64)
    for number, other in enumerate(others, 1):
        other.transport.deliver(message(number))
        flood.transport.deliver(*[message(0, size=500)] * 64)
    bus.settle()
    got = [packet for packet in readers[0].take() if len(packet) < 100]
    assert got == messages(*range(1, 11))


def test_authors_that_a_link_names_share_a_mailbox():
    """A flood that comes through a link leaves room for the messages of the link's other authors."""
    bus = tight_bus()
    readers, link = readers_of(bus), bus.connect(uid=0)
    bus.registry.scheduler.is_busy = True
    author = b"CMSG link/sender\0%d !/cred/1/0/7/!/cred/1/%d/9"
    link.transport.deliver(author % (1, 10), *[message(0, size=500)] * 64)
    for number in range(1, 11):
        link.transport.deliver(author % (2, 10 + number), message(number))
        link.transport.deliver(author % (1, 10), *[message(0, size=500)] * 64)
    bus.settle()
    got = [packet for packet in readers[0].take() if len(packet) < 100]
    assert got == messages(*range(1, 11))
    assert bus.registry.counters.dropped > 0
    assert is_clean(bus)


def test_authors_with_one_owner_share_one_part():
    """One user with many subordinate UIDs on another bus has one part of a mailbox, not one for each UID."""
    bus = Bus(owner_of=lambda uid: 7 if uid >= 100_000 else uid)
    link = bus.connect(uid=0)
    accounts = []
    for uid in (7, 100_000, 100_001, 8):
        link.send(b"CMSG link/sender\0%d !/cred/1/0/7/!/cred/1/%d/9" % (uid, uid))
        accounts.append(account_of(link.protocol))
    assert accounts[0] == accounts[1] == accounts[2] != accounts[3]
    assert link.protocol.signature.notice == b"CMSG sender\x008 !/cred/1/0/7/!/cred/1/8/9"


def test_a_user_who_has_left_and_comes_back_still_pays_for_its_mail():
    """A user without connections is forgotten while its messages wait in another's mail: they count as before (I9).

    Each time, it would have had a part of its own, of which the first messages may be of any size.
    """
    bus = HandTurnedBus(20_000)
    readers, publisher = readers_of(bus), None
    lines, users = lines_of(bus), bus.registry.users
    bus.use_up(readers[0], 400_000)
    for _ in range(5):
        publisher = bus.connect(uid=PUBLISHER)
        publisher.send(*[b"MSG k\0" + bytes(100_000)] * 64)
        publisher.transport.hang_up()
        bus.settle()
        while PUBLISHER in users._users:
            bus.registry.scheduler.press()
            bus.turn()
        assert len(lines._shares) == 1
    assert lines.bytes == 64 * 100_006


def test_a_lone_publisher_has_half_of_the_time():
    """Mail of one publisher's user is estimated to take half of `MAIL_NS` at most (I9)."""
    bus = Bus()
    _, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    lines = lines_of(bus)
    lines.ns = 20_000
    bus.registry.scheduler.is_busy = True
    for _ in range(3_000):
        publisher.transport.deliver(message())
    assert MAIL_NS // 2 - MANY * 20_000 <= lines.work <= MAIL_NS // 2
    bus.settle()
    assert bus.registry.counters.dropped > 0
    assert is_clean(bus)


def test_a_gap_with_many_groups():
    """Losses of more than `GAP_GROUPS` groups are counted by receiver, and each receiver learns exactly its own."""
    bus = Bus()
    readers, publisher = readers_of(bus, b"SUB all", b"CMSG receipts/on", count=MANY + 2), bus.connect(uid=PUBLISHER)
    keys = [b"key/%d" % number for number in range(GAP_GROUPS + 44)]
    expected = [1] * len(readers)
    for number, key in enumerate(keys):
        # Each key has other receivers, at least nine of them, in another order.
        for at in range(len(readers)):
            if (number >> (at % 11)) % 2 == 0 or at < MANY:
                readers[at].send(b"SUB " + key)
    for reader in readers:
        reader.take()
    bus.registry.scheduler.is_busy = True
    lines_of(bus).most_bytes = 10_000
    publisher.transport.deliver(b"MSG all\0" + bytes(9_000))
    publisher.transport.deliver(b"MSG all\0" + bytes(9_000))
    groups: set[Any] = set()
    for key in keys:
        route = bus.registry.route(key)
        groups.update(route.groups)
        for at, reader in enumerate(readers):
            expected[at] += reader.protocol in route.receivers
        publisher.transport.deliver(b"MSG %b\0" % key + bytes(2_000))
    gap = lines_of(bus).mail[-1]
    assert isinstance(gap, Gap)
    for reader, count in zip(readers, expected, strict=True):
        number = reader.protocol.number
        assert sum(lost for receiver, lost in gap.describe()["lost"] if receiver == number) == count
    bus.settle()
    assert [reader.protocol.lost for reader in readers] == expected
    assert [receipts(reader.take())[-1][2] for reader in readers] == expected
    assert is_clean(bus)


def test_an_own_user_waits_for_room():
    """Messages for the publisher's own user that find no room are not handled: the client waits, and loses nothing."""
    bus = tight_bus()
    readers, stranger = readers_of(bus), bus.connect(uid=OTHER)
    publisher = bus.connect(uid=READER)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(message(0))  # its receivers wait
    numbers = range(1, 31)
    for number in numbers:
        publisher.transport.deliver(message(number, size=1_000))
    assert publisher.protocol.is_paused
    assert lines_of(bus).held
    handled = bus.registry.counters.published
    assert 1 < handled < 31
    stranger.transport.deliver(message(99))
    bus.settle()
    assert not publisher.protocol.is_paused
    got = [int(packet[6:].rstrip(b"\0")) for packet in readers[0].take()]
    assert [number for number in got if number != 99] == [0, *numbers]
    assert got.index(99) == handled
    assert {len(reader.take()) for reader in readers[1:]} == {32}
    assert bus.registry.counters.dropped == 0
    assert is_clean(bus)


@pytest.mark.parametrize("how", ["hang_up", "abortConnection"])
def test_an_own_publisher_that_waits_for_room_and_leaves(how):
    """What it has sent before it closed is handled before it is gone; what was reset is not, and nobody waits on."""
    bus = tight_bus()
    readers, stranger = readers_of(bus), bus.connect(uid=OTHER)
    publisher, after = bus.connect(uid=READER), bus.connect(uid=READER)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(message(0))
    for number in range(1, 31):
        publisher.transport.deliver(message(number, size=1_000))
    assert lines_of(bus).held
    getattr(publisher.transport, how)()
    after.transport.deliver(message(77))
    bus.settle()
    assert not publisher.is_connected
    got = [int(packet[6:].rstrip(b"\0")) for packet in readers[0].take()]
    if how == "hang_up":
        assert got == [*range(31), 77]
    else:
        assert got == [*range(len(got) - 1), 77]
    assert is_clean(bus)


# --- publishers that may be blocked ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [b"blocking/soft/block", b"blocking/hard/block"])
def test_a_publisher_that_may_be_blocked_waits_for_its_entry(strategy):
    """Where a receiver of a waiting group may block the publisher, that is paused until the entry is delivered, and
    then as the receiver says."""
    bus = Bus(limits=Limits(block_timeout=30.0, queue_messages=3))
    readers, stranger = readers_of(bus), bus.connect(uid=OTHER)
    readers[0].send(b"CMSG " + strategy)
    publisher = bus.connect(uid=READER)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(message(0))
    publisher.transport.deliver(*messages(1, 2, 3, 4, 5))
    assert publisher.protocol.is_paused
    stranger.transport.deliver(message(6))
    assert not stranger.protocol.is_paused
    assert kinds(bus) == ["Mail", "Mail", "Mail"]
    bus.settle()
    assert not publisher.protocol.is_paused
    assert taken(readers) == [messages(0, 1, 2, 3, 4, 5, 6)] * MANY

    readers[0].stall()
    stranger.transport.deliver(message(0))
    publisher.transport.deliver(*messages(1, 2, 3, 4, 5))
    bus.settle()
    assert publisher.protocol.is_paused
    assert readers[0].protocol.queue.messages in (5, 6)  # its limit, and one entry
    readers[0].drain()
    assert not publisher.protocol.is_paused
    assert bus.registry.counters.dropped == 0
    assert is_clean(bus)


def test_a_paused_publisher_that_leaves():
    """Its entry is delivered all the same, and then its end."""
    bus = Bus()
    readers, stranger = readers_of(bus), bus.connect(uid=OTHER)
    readers[0].send(b"CMSG blocking/hard/block")
    publisher = bus.connect(uid=READER)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(message(0))
    publisher.transport.deliver(*messages(1, 2))
    publisher.transport.abortConnection()
    bus.settle()
    assert taken(readers) == [messages(0, 1, 2)] * MANY
    assert not publisher.is_connected
    assert is_clean(bus)


# --- the end -------------------------------------------------------------------------------------


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
    lines = lines_of(bus)
    mail = tuple(lines.mail)
    lines.mail.clear()
    drop(bus.registry.delivery, lines, mail)
    total = [reader.protocol.lost + count for reader, count in zip(readers, came, strict=True)]
    handled = bus.registry.counters.published
    assert total == [*[handled] * (len(readers) - 1), 1]
    assert is_clean(bus)


# --- everything at once ----------------------------------------------------------------------------

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
