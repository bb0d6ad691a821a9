"""Memory: what is charged to whom, and the limits of a user and of all."""

from __future__ import annotations

import pytest

from sbus.errors import CloseReason
from sbus.flood.backlogs import PRICE
from sbus.seqpacket.send_buffer import START
from sbus.server.bus import memory
from sbus.server.bus.mail import ENTRY_MEMORY, LOSS_MEMORY, RUN_MEMORY
from sbus.server.bus.memory import CLIENT_MEMORY, KEPT_PACKET
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.limits import MAX_REPLIES, Limits
from tests.support.buses import HandTurnedBus, Peer
from tests.unit.server.charges import LARGE, WHOAMI, bus_with, message, price

UID = 1000

# --- what is charged ------------------------------------------------------------------------------


def test_a_connection_is_charged_while_it_lasts():
    """A connection without anything has a price, for its user and for the bus."""
    bus = bus_with()
    peer = bus.connect(uid=7)
    user, account = bus.registry.users[7], bus.registry.users.budget.memory
    assert (user.memory, account.held, account.users) == (CLIENT_MEMORY, CLIENT_MEMORY, 1)
    assert (user.buffers, bus.registry.memory.buffers) == (START, START)
    peer.transport.end()
    bus.settle()
    assert (user.memory, account.held, account.users, user.buffers) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("pattern", "bytes_"),
    [
        (b"", 490),
        (b"a", 492),
        (b"a/b", 490 + 150 + 6),
        (b"a/", 490 + 150 + 4),
        (b"a*/b", 490 + 150 + 8 + 2 * 410 + 4),
        (b"!/cred////x", 490 + 600 + 3 * 11),
        (b"!/cred////x/*", 490 + 600 + 150 + 3 * 13 + 2 * 410 + 3),
    ],
)
def test_price_of_a_pattern(pattern, bytes_):
    """A pattern costs by its segments and bytes; more if it is secret, and more if it has wildcards."""
    assert price(pattern) == bytes_


def test_a_pattern_is_charged_once():
    """The second SUB of the same pattern is free, and the last UNSUB gives all back."""
    bus = bus_with()
    peer = bus.connect(uid=7)
    user = bus.registry.users[7]
    peer.send(b"SUB a/b", b"SUB a/b", b"SUB !/cred////x")
    assert peer.protocol.pattern_memory == price(b"a/b") + price(b"!/cred////x")
    assert user.memory == CLIENT_MEMORY + peer.protocol.pattern_memory == peer.protocol.memory()
    peer.send(b"UNSUB a/b", b"UNSUB !/cred////x")
    assert user.memory == CLIENT_MEMORY + price(b"a/b")
    peer.send(b"UNSUB a/b", b"UNSUB a/b")
    assert user.memory == CLIENT_MEMORY


def test_packets_that_are_kept_are_charged():
    """What was read of a publisher that is blocked is charged until it was handled, or the publisher is gone."""
    bus = bus_with()
    reader, publisher, other = bus.connect(uid=UID), bus.connect(uid=UID), bus.connect(uid=UID)
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    reader.send(b"MSG k\0")
    for sender in (publisher, other):
        sender.send(b"MSG k\0", b"MSG k\0one", b"MSG other\0")  # the first one blocks
        assert sender.protocol.memory() == CLIENT_MEMORY + 2 * KEPT_PACKET + len(b"MSG k\0oneMSG other\0")
    other.transport.abortConnection()
    bus.settle()
    assert other.protocol.memory() == CLIENT_MEMORY
    reader.drain()
    assert publisher.protocol.memory() == CLIENT_MEMORY
    assert bus.registry.users[UID].memory == reader.protocol.memory() + CLIENT_MEMORY


def test_mail_is_charged_to_its_receivers_user():
    """Messages that wait for a user's receivers are its memory, once however many receivers, until they have come."""
    for receivers in (9, 20):
        bus = bus_with()
        readers, publisher = [bus.connect(uid=7) for _ in range(receivers)], bus.connect(uid=UID)
        for reader in readers:
            reader.send(b"SUB k")
        user = bus.registry.users[7]
        before, of_publisher = user.memory, publisher.protocol.memory()
        publisher.transport.deliver(message(b"k", 1_000))
        first = user.memory - before
        assert 1_006 < first < 2_000
        publisher.transport.deliver(message(b"k", 1_000))  # it joins
        assert user.memory - before == first + 1_006 + PRICE + RUN_MEMORY
        assert bus.registry.users[UID].memory == of_publisher
        bus.settle()
        assert [len(reader.take()) for reader in readers] == [2] * receivers
        assert user.memory == before


def test_gaps_are_charged_to_the_receivers_user():
    """Losses that wait for their place take memory: each gap as an entry, and each group in it."""
    bus = bus_with()
    readers, publisher = [bus.connect(uid=7) for _ in range(9)], bus.connect(uid=UID)
    for reader in readers:
        reader.send(b"SUB k")
    user = bus.registry.users[7]
    user.lines.add(UID, 1 << 40, 1 << 40)  # no room
    bus.registry.scheduler.is_busy = True
    before = user.memory
    for reader in readers:  # a letter ends each gap
        without = user.memory
        publisher.transport.deliver(message(b"k", 1_000), message(b"k", 1_000))
        assert user.memory - without == ENTRY_MEMORY + LOSS_MEMORY
        reader.transport.deliver(b"CMSG !/cred/whoami")
    bus.settle()
    assert [reader.protocol.lost for reader in readers] == [18] * 9
    assert user.memory == before


def test_mail_takes_a_part_of_its_users_memory():
    """Mail holds a thirty-second of its user's memory at most; beyond that, messages of others are lost, and told."""
    bus = bus_with(user_memory=32 * 100_000)
    readers, publisher = [bus.connect(uid=7) for _ in range(9)], bus.connect(uid=UID)
    for reader in readers:
        reader.send(b"SUB k")
    user = bus.registry.users[7]
    before = user.memory
    for _ in range(60):
        publisher.transport.deliver(message(b"k", 5_000))
    assert 40_000 < user.lines.bytes <= 100_000
    bus.settle()
    lost = bus.registry.counters.dropped
    assert 0 < lost < 9 * 60
    assert sum(len(reader.take()) for reader in readers) == 9 * 60 - lost
    assert user.memory == before


def test_the_kernel_is_asked_where_buffers_matter():
    """What the kernel holds is charged once the send buffers could hold more than an eighth of a limit."""
    bus = bus_with(user_memory=memory.SAMPLED_PART * START)
    peer = bus.connect(uid=UID)
    peer.transport.unread = 5000
    bus.clock.advance(1)
    assert peer.protocol.memory() == CLIENT_MEMORY
    other = bus.connect(uid=UID)
    bus.clock.advance(1)
    assert (peer.protocol.memory(), other.protocol.memory()) == (CLIENT_MEMORY + 5000, CLIENT_MEMORY)
    peer.transport.unread = 3000
    bus.clock.pump([0.05] * 4)
    assert bus.registry.users[UID].memory == 2 * CLIENT_MEMORY + 3000
    other.transport.end()
    peer.transport.end()
    bus.clock.pump([0.05] * 4)
    assert bus.registry.users.budget.memory.held == 0
    assert not bus.clock.getDelayedCalls()


# --- the limit of a user --------------------------------------------------------------------------


def test_a_subscription_past_the_limit_of_its_user():
    """It ends the client, with the reason for a user's limit; one to the byte is kept."""
    bus = bus_with(user_memory=2 * CLIENT_MEMORY + price(b"a"))
    peer, other = bus.connect(uid=UID), bus.connect(uid=UID)
    peer.send(b"SUB a")
    assert peer.is_connected
    other.send(b"SUB b")
    assert not other.is_connected
    assert other.protocol.reason is CloseReason.USER_LIMIT
    assert bus.registry.counters.violations == 1


def test_a_connection_past_the_limit_of_its_user():
    """It is refused; other users, root and the server's user are not concerned."""
    bus = bus_with(user_memory=CLIENT_MEMORY)
    assert bus.connect(uid=UID).is_connected
    refused = bus.connect(uid=UID)
    assert not refused.is_connected
    assert refused.protocol.reason is CloseReason.USER_MEMORY
    assert bus.connect(uid=UID + 1).is_connected
    assert bus.connect(uid=0).is_connected
    assert bus.connect(uid=0).is_connected
    assert bus.registry.users[UID].memory == CLIENT_MEMORY


def test_replies_past_the_limit_of_the_user():
    """A client with a reply to read is not read from until it has read that reply."""
    bus = bus_with(user_memory=CLIENT_MEMORY + price(b"a") + 100)
    peer = bus.connect(uid=UID)
    peer.send(b"SUB a")
    peer.stall()
    for _ in range(3):
        peer.send(WHOAMI)
    assert peer.transport.is_paused
    assert peer.protocol.queue.replies == 2 < MAX_REPLIES
    peer.drain()
    assert not peer.transport.is_paused
    assert len(peer.take()) == 3


def test_replies_in_the_mail_are_charged():
    """Replies that wait for mail are memory of their client, and past the limit of its user, it is not read from."""
    bus = HandTurnedBus(limits=Limits(max_memory=LARGE, user_memory=1 << 20))
    publisher, readers = bus.connect(uid=UID), [bus.connect(uid=7) for _ in range(3)]
    for reader in readers:
        reader.send(b"SUB k")
    bus.finish()
    user, asking = bus.registry.users[7], readers[0]
    before = user.memory
    bus.use_up(asking, 10_000)
    bus.use_up(publisher, -1_000)
    publisher.send(b"MSG k\0")
    user.lines.deficit = 1_000_000_000
    with_mail = user.memory
    for _ in range(20):
        asking.send(b"CMSG probe\0" + b"x" * 100_000)
    charged = user.memory - with_mail - asking.protocol._kept
    assert asking.protocol.waiting_replies == 11
    assert 1_100_000 < charged < 1_100_000 + 11 * 1_000
    assert asking.protocol.memory() == CLIENT_MEMORY + price(b"k") + charged + asking.protocol._kept
    assert asking.transport.is_paused
    bus.finish()
    assert len(asking.take()) == 21
    assert user.memory == before


def test_a_notice_after_the_end_is_not_charged():
    """A notice for a client that has left, and whose end waits for mail, is dropped: nothing is given back twice."""
    bus = HandTurnedBus()
    publisher, readers = bus.connect(uid=UID), [bus.connect(uid=7) for _ in range(3)]
    for reader in readers:
        reader.send(b"SUB k")
    bus.finish()
    bus.use_up(readers[0], 10_000)
    bus.use_up(publisher, -1_000)
    publisher.send(b"MSG k\0")
    readers[0].transport.hang_up()
    bus.settle()
    assert readers[0].protocol.user.lines.waits([readers[0].protocol])
    readers[0].protocol.notify(b"interest/pattern", b"+ 1 p")
    bus.finish()
    assert bus.registry.users.budget.memory.held == sum(each.memory() for each in bus.registry.clients.values())


@pytest.mark.parametrize("end", ["answer", "loss", "no more reading"])
def test_replies_that_are_held_back_are_charged(end):
    """Replies that wait for the name of the bus at its master are memory of their client, until they have gone."""
    bus = bus_with(user_memory=1 << 20, secrets_go_up=True)
    link, peer = bus.connect(uid=0), bus.connect(uid=UID)
    peer.send(WHOAMI)
    for _ in range(20):
        peer.send(b"CMSG probe\0" + b"x" * 100_000)
    user, kept = peer.protocol.user, peer.protocol._kept
    assert peer.transport.is_paused
    assert 1_100_000 < user.memory - kept - CLIENT_MEMORY < 1_100_000 + 11 * 1_000
    assert user.memory == peer.protocol.memory()
    if end == "loss":
        peer.transport.abortConnection()
    elif end == "no more reading":
        peer.transport.breakDown()
        bus.settle()
        assert user.memory == peer.protocol.memory() == CLIENT_MEMORY
    link.send(b"CMSG link/path\0" + b"f" * 32 + b" above", b"CMSG link/up\0!/cred/1/2/3")
    bus.settle()
    if end == "answer":
        assert len(peer.take()) == 21
        assert user.memory == peer.protocol.memory() == CLIENT_MEMORY
    assert bus.registry.users.budget.memory.held == sum(each.memory() for each in bus.registry.clients.values())


def test_a_send_buffer_grows_within_the_limit():
    """A buffer grows while it, and all buffers of the user full, are within the limit; what it has is given back."""
    bus = bus_with(user_memory=3 * START + 1000)
    peer, other = bus.connect(uid=UID), bus.connect(uid=UID)
    assert peer.transport.may_grow is not None
    assert other.transport.may_grow is not None
    assert not peer.transport.may_grow(START + 1001)
    assert peer.transport.may_grow(START)
    assert not other.transport.may_grow(START)
    assert bus.registry.memory.buffers == 3 * START
    peer.transport.end()
    bus.settle()
    assert bus.registry.users[UID].buffers == START
    assert other.transport.may_grow(START)


# --- the limit for all ----------------------------------------------------------------------------


def large_patterns(peer: Peer, name: bytes, count: int) -> None:
    peer.send(*[b"SUB %b%04d" % (name, n) for n in range(count)])


def test_the_largest_holder_is_shed():
    """At the limit the largest client of the largest user goes, with a reason and a line that says what it held."""
    lines = []
    bus = bus_with(max_memory=16 * 20_000)  # the limit is 300,000: a sixteenth is for the route cache
    bus.registry.memory.log = type("Log", (), {"warn": lambda self, text, **fields: lines.append(fields)})()
    small, middle, large = bus.connect(uid=1), bus.connect(uid=2), bus.connect(uid=2)
    large_patterns(small, b"s", 150)
    large_patterns(middle, b"m", 160)
    large_patterns(large, b"l", 200)
    assert (small.is_connected, middle.is_connected, large.is_connected) == (True, True, True)
    held = [peer.protocol.memory() for peer in (small, middle, large)]
    assert sum(held) == bus.registry.users.budget.memory.held < 300_000
    large_patterns(small, b"t", 60)
    assert (small.is_connected, middle.is_connected, large.is_connected) == (True, True, False)
    assert large.protocol.reason is CloseReason.OUT_OF_MEMORY
    ((line),) = lines
    assert (line["number"], line["size"], line["of_user"]) == (large.protocol.number, held[2], held[1] + held[2])
    assert bus.registry.users.budget.memory.held == small.protocol.memory() + middle.protocol.memory()


def test_a_client_that_only_drains_is_shed():
    """A client that has shut down writing, and reads its queue slowly, counts as any other."""
    bus = bus_with(max_memory=16 * 20_000)
    drained, reader, publisher = bus.connect(uid=1), bus.connect(uid=2), bus.connect(uid=3)
    for peer in (drained, reader):
        peer.send(b"SUB %d" % peer.protocol.peer.uid)
        peer.stall()
    for _ in range(17):
        publisher.send(b"MSG 1\0" + bytes(10_000))
    drained.transport.end()
    bus.settle()
    account = bus.registry.users.budget.memory
    assert drained.is_connected
    for _ in range(12):
        publisher.send(b"MSG 2\0" + bytes(10_000))
    bus.settle()
    assert (drained.is_connected, reader.is_connected) == (False, True)
    assert account.held <= account.limit


def test_no_more_than_needed_is_shed():
    """Clients go until a sixteenth is free, one after the other; what is about to be free counts already."""
    bus = bus_with(max_memory=16 * 20_000)
    peers = [bus.connect(uid=1) for _ in range(10)]
    for number, peer in enumerate(peers):
        large_patterns(peer, b"%02d" % number, 38)
    account = bus.registry.users.budget.memory
    assert all(peer.is_connected for peer in peers)
    each = peers[0].protocol.memory()
    assert 9 * each < 300_000 < 12 * each
    for number in range(10, 13):
        peers.append(bus.connect(uid=2))
        large_patterns(peers[-1], b"%02d" % number, 38)
    gone = [peer for peer in peers if not peer.is_connected]
    assert len(gone) in (2, 3)
    assert all(peer.protocol.peer.uid == 1 for peer in gone)
    assert account.held == (13 - len(gone)) * each <= 300_000


def test_a_client_that_has_shut_down_writing_is_shed_too():
    """It holds its queue as long as it reads, so its memory is not about to be free."""
    bus = bus_with(max_memory=16 * 200_000)
    reader, publisher = bus.connect(uid=1), bus.connect(uid=1)
    reader.send(b"SUB k")
    reader.stall()
    publisher.send(*[message(b"k", 10_000)] * 200)
    reader.transport.end()
    bus.settle()
    assert reader.is_connected
    other, second = bus.connect(uid=2), bus.connect(uid=2)
    other.send(b"SUB j")
    other.stall()
    second.send(*[message(b"j", 10_000)] * 120)
    assert (reader.is_connected, other.is_connected) == (False, True)
    assert reader.protocol.reason is CloseReason.OUT_OF_MEMORY
    assert other.protocol.lost == 0
    assert bus.registry.users.budget.memory.held < 3_000_000


class Counted(BusProtocol):
    """A connection that knows how often it was weighed."""

    weighed = 0

    def memory(self) -> int:
        self.weighed += 1
        return super().memory()


def test_only_the_largest_users_clients_are_weighed():
    """To shed clients costs nothing for those of users who hold less, however many they are."""
    bus = bus_with(max_memory=16 * 60_000)
    idle = [bus.connect(uid=1, make=Counted) for _ in range(40)]
    large = [bus.connect(uid=2, make=Counted) for _ in range(3)]
    for number, peer in enumerate(large):
        large_patterns(peer, b"%02d" % number, 450)
    assert [peer.is_connected for peer in large] == [True, True, False]
    assert {peer.protocol.weighed for peer in idle if isinstance(peer.protocol, Counted)} == {0}
    assert all(peer.is_connected for peer in idle)


def test_kept_packets_shed_at_once():
    """A single turn can keep more packets than fit, so the limit is looked at for each batch that is kept."""
    bus = bus_with(max_memory=16 * 20_000)
    reader = bus.connect(uid=UID)
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    peak = []
    account = bus.registry.users.budget.memory
    for _ in range(20):
        publisher = bus.connect(uid=UID)
        publisher.transport.deliver(b"MSG k\0", b"MSG !/x\0" + bytes(50_000))
        peak.append(account.held)
    bus.settle()
    assert max(peak) < 16 * 20_000 + 60_000
    assert reader.is_connected
    assert account.held <= 300_000


# --- the route cache ------------------------------------------------------------------------------


def test_the_route_cache_is_bounded():
    """Keys that were looked up take no more than a sixteenth of the limit."""
    bus = bus_with(max_memory=1 << 20)
    publisher = bus.connect(uid=UID)
    sizes = []
    for number in range(400):
        publisher.send(b"MSG %0500d\0" % number)
        sizes.append(bus.registry.router._cache.memory())
    assert 60_000 < max(sizes) <= (1 << 20) // 16
