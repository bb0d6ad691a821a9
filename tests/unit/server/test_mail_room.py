"""The room in a mailbox: who may add to it, who waits for it, and where messages without room are lost."""

from __future__ import annotations

from typing import Any

import pytest

from sbus.fair.lines import MAIL_NS
from sbus.flood.backlogs import PRICE
from sbus.protocol.notices import LossReason
from sbus.server.bus.delivery import account_of
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.bus.mail import GAP_GROUPS, LOOK, RUN_MEMORY, Gap
from tests.support.buses import Bus, HandTurnedBus
from tests.unit.server.mailboxes import (
    MANY,
    OTHER,
    PUBLISHER,
    READER,
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
    assert lines.bytes == 64 * (100_006 + PRICE) + RUN_MEMORY


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


def test_what_a_gap_counts_by_receiver_is_paid_for_by_their_user(monkeypatch):
    """A publisher that loses messages for more than `GAP_GROUPS` groups pays for none of the counting by receiver."""
    bus = Bus()
    keys = [b"key/%d" % number for number in range(GAP_GROUPS + 8)]
    readers = readers_of(bus, b"SUB k", count=MANY + len(keys))
    for at, key in enumerate(keys):
        for reader in readers[: MANY + at]:
            reader.send(b"SUB " + key)
    publisher = bus.connect(uid=PUBLISHER)
    scheduler, now = bus.registry.scheduler, [0]
    scheduler.is_busy = True
    lines_of(bus).most_bytes = 10_000
    spread, spreads = Gap._spread, list[int]()

    def slowly(gap, *rest):
        now[0] += 1_000_000
        spreads.append(1)
        spread(gap, *rest)

    monkeypatch.setattr(Gap, "_spread", slowly)
    scheduler.clock = lambda: now[0]
    for key in (b"k", *keys):
        bus.registry.route(key)  # which is paid for apart
    before = publisher.protocol.user.lines.deficit, lines_of(bus).deficit
    for key in (b"k", *keys):
        publisher.transport.deliver(message(key=key, size=4_000))
    assert spreads
    assert publisher.protocol.user.lines.deficit == before[0]
    assert lines_of(bus).deficit == before[1] - len(spreads) * 1_000_000


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
