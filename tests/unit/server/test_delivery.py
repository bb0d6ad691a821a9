"""Delivery: which receivers get a message at once, receivers that are no sockets, and whose messages a batch holds."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from sbus.errors import CloseReason
from sbus.fair.scheduler import CROWD
from sbus.flood import Outcome, Until
from sbus.flood.receipts import Receipt
from sbus.policy import load
from sbus.protocol.keys import PeerCredentials, SecretKey
from sbus.protocol.notices import LossReason
from sbus.routing.route import Groups, Route
from sbus.server.bus.delivery import AT_ONCE_KIB
from sbus.server.bus.handover import AT_ONCE, OF_OTHERS
from sbus.server.bus.protocol import FANOUT_BUDGET
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.syscalls.batch import send_packets
from tests.support.buses import Bus, Peer
from tests.support.costs import called, calls
from tests.support.reactors import received


class LocalSubscriber:
    """A subscriber inside the program with a limited inbox: when it is full, it blocks publishers or loses messages."""

    queue = direct = naming = None
    transport = None

    def __init__(self, registry: SubscriptionRegistry, room: int, uid: int = 1000, blocks: bool = True) -> None:
        self.registry = registry
        self.peer = PeerCredentials(1, uid, 100)
        self.user = registry.users.connect(uid)
        self.patterns: dict[bytes, tuple[int, SecretKey | None]] = {}
        self.pattern_bytes = 0
        self.pattern_memory = 0
        self.lost = 0
        self.can_block = blocks
        self.room = room
        self.inbox: list[bytes] = []
        self.flushes = 0
        self.closed: CloseReason | None = None

    def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
        free = self.room - len(self.inbox)
        if len(packets) < free or (len(packets) == free and not may_block):
            self.inbox += packets
            return None
        if may_block:
            self.inbox += packets
            return Outcome(block=Until.EMPTY)
        self.inbox += packets[:free]
        lost = packets[free:]
        return Outcome(dropped=len(lost), dropped_bytes=sum(map(len, lost)))

    def flush(self) -> None:
        self.flushes += 1

    def close(self, reason: CloseReason) -> None:
        self.closed = reason

    def take(self) -> list[bytes]:
        """Empty the inbox."""
        taken, self.inbox = self.inbox, []
        self.registry.delivery.drained(self, has_room=True, is_empty=True)
        return taken


def messages(count: int) -> list[bytes]:
    return [b"MSG k\0%d" % n for n in range(count)]


def test_a_local_subscriber_gets_messages():
    """It gets what matches its patterns, by clients and by the program, and is flushed when each batch ends."""
    bus = Bus()
    local = LocalSubscriber(bus.registry, 100)
    bus.registry.subscribe(local, b"k")
    publisher = bus.connect()
    publisher.send(*messages(3), b"MSG other\0", *messages(2))
    assert local.flushes
    assert local.take() == [*messages(3), *messages(2)]
    bus.registry.publish(b"k", b"from within")
    assert local.take() == [b"MSG k\0from within"]
    bus.registry.unsubscribe(local, b"k")
    publisher.send(*messages(1))
    assert local.take() == []
    assert local.lost == 0


def test_a_local_subscriber_blocks_its_publishers():
    """A publisher that it blocks is not read from until it has drained, and loses nothing."""
    bus = Bus()
    local = LocalSubscriber(bus.registry, 3)
    bus.registry.subscribe(local, b"k")
    publisher, other = bus.connect(), bus.connect()
    publisher.send(*messages(4))
    publisher.send(*messages(2))
    assert publisher.transport.is_paused
    assert not other.transport.is_paused
    assert local.take() == messages(4)
    bus.settle()
    assert not publisher.transport.is_paused
    assert local.take() == messages(2)


def test_a_local_subscriber_blocks_its_own_user_only():
    """Toward publishers that it may not block, and toward the program, it loses messages, which are counted."""

    class Losses(Observer):
        def dropped(self, client: Any, packets: int, size: int) -> None:
            seen.append((client, packets, size))

    seen: list[Any] = []
    bus = Bus(observers=(Losses(),))
    local = LocalSubscriber(bus.registry, 3, uid=1000)
    bus.registry.subscribe(local, b"k")
    stranger = bus.connect(uid=1001)
    stranger.send(*messages(5))
    assert not stranger.transport.is_paused
    assert local.take() == messages(3)
    for _ in range(4):
        bus.registry.publish(b"k", b"")
    assert local.lost == bus.registry.counters.dropped == 3
    assert seen == [(local, 2, 14), (local, 1, 6)]


def test_a_local_subscriber_that_blocks_too_long_is_closed():
    """The block time-out holds for it too: it is closed, and its publishers go on."""
    bus = Bus()
    local = LocalSubscriber(bus.registry, 1)
    bus.registry.subscribe(local, b"k")
    publisher = bus.connect()
    publisher.send(*messages(1))
    assert publisher.transport.is_paused
    bus.clock.advance(30)
    bus.settle()
    assert local.closed is CloseReason.BLOCKED_TOO_LONG
    assert not publisher.transport.is_paused


def test_a_local_subscriber_that_fails_is_closed_alone():
    """An exception of one receiver is logged and costs no other its messages."""
    bus = Bus()

    class Broken(LocalSubscriber):
        def enqueue(self, packets: list[bytes], may_block: bool) -> Outcome | None:
            raise RuntimeError("broken")

    broken, local = Broken(bus.registry, 1), LocalSubscriber(bus.registry, 10)
    for each in (broken, local):
        bus.registry.subscribe(each, b"k")
    bus.connect().send(*messages(2))
    assert broken.closed is CloseReason.SERVER_ERROR
    assert local.take() == messages(2)
    assert bus.registry.clients[1].number == 1


def test_what_an_observer_publishes_in_the_middle_of_a_batch():
    """It is handled when the batch is over: the client's messages are settled in its name, the program's in none."""

    class Telling(Observer):
        def published(self, client: Any, key: bytes, payload: bytes | None) -> None:
            if payload == b"1":
                bus.registry.publish(b"k", b"extra")

    bus = Bus(observers=(Telling(),), limits=Limits(queue_messages=5))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(*messages(3))
    assert publisher.protocol.is_paused
    reader.drain()
    assert reader.take() == [*messages(3), b"MSG k\0extra"]
    assert reader.protocol.lost == 0


@pytest.fixture
def plain():
    """Returns two ends of a pair of sockets; the first one takes so many packets, or is broken for ``room=None``."""
    pairs = []

    def make(room: int | None) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs.append(pair)
        theirs.setblocking(False)
        if room is None:
            theirs.close()
        elif room < 10:
            while send_packets(ours, [b"."] * 64):
                pass
            for _ in range(room):
                theirs.recv(100)
        return pair

    yield make
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("rooms", [(10,), (None,), (3,), (10, None, 3)])
def test_a_run_for_plain_sockets(plain, rooms):
    """Each socket gets what it takes in one step, and the rest, or all if it fails, goes through the queue."""
    bus = Bus()
    publisher, readers = bus.connect(), [bus.connect() for _ in rooms]
    for reader in readers:
        reader.send(b"SUB k")
    publisher.send(*messages(1))
    assert [reader.take() for reader in readers] == [messages(1) for _ in rooms]
    pairs = [plain(room) for room in rooms]
    for reader, (ours, _) in zip(readers, pairs, strict=True):
        reader.transport.plain_socket = ours
    publisher.send(*messages(10))
    assert publisher.transport.read_limit == FANOUT_BUDGET // len(rooms)
    for reader, (_, theirs), room in zip(readers, pairs, rooms, strict=True):
        got = [] if room is None else [packet for packet in received(theirs) if packet != b"."]
        assert got == messages(10)[: room or 0]
        assert reader.take() == messages(10)[room or 0 :]


@pytest.mark.parametrize("subscribers", [1, 2])
def test_what_goes_through_the_queue_of_a_plain_socket(plain, subscribers):
    """A run that is not all there is to send waits for the flush, and what waits goes first."""
    bus = Bus()
    readers = [bus.connect() for _ in range(subscribers)]
    ends = []
    for reader in readers:
        reader.send(b"SUB k")
        reader.transport.plain_socket, theirs = plain(10)
        ends.append(theirs)
    route: Route[Any] = Route(tuple(reader.protocol for reader in readers), Groups())
    delivery = bus.registry.delivery
    delivery.deliver(messages(1), route, None)
    delivery.deliver(messages(2)[1:], route, None, True)
    assert [received(theirs) for theirs in ends] == [[]] * subscribers
    delivery.flush()
    assert [reader.take() for reader in readers] == [messages(2)] * subscribers


@pytest.mark.parametrize("subscribers", [1, 2])
def test_who_observes_deliveries_sees_those_of_plain_sockets(plain, subscribers):
    """With an observer of deliveries nothing goes past the queues, so that it is told of each."""
    seen = []

    class Telling(Observer):
        def delivered(self, client: Any, packets: int, size: int) -> None:
            seen.append((client, packets, size))

    bus = Bus(observers=[Telling()])
    readers = [bus.connect() for _ in range(subscribers)]
    for reader in readers:
        reader.send(b"SUB k")
        reader.transport.plain_socket, _ = plain(10)
    route: Route[Any] = Route(tuple(reader.protocol for reader in readers), Groups())
    bus.registry.delivery.deliver(messages(1), route, None, True)
    bus.registry.delivery.flush()
    assert seen == [(receiver, 1, len(messages(1)[0])) for receiver in route.receivers]


def test_a_receiver_publishes_as_it_is_served(monkeypatch):
    """What a receiver in this process publishes meanwhile comes before or behind the batch, and nothing is lost."""
    bus = Bus()
    first, second, publisher = bus.connect(), bus.connect(), bus.connect()
    for reader in (first, second):
        reader.send(b"SUB k")
    try_send = first.transport.try_send

    def answer(packets: list[bytes], cache: Any = None) -> int:
        monkeypatch.undo()
        bus.registry.publish(b"k", b"extra")
        second.stall()
        return try_send(packets, cache)

    publisher.send(*messages(1))
    monkeypatch.setattr(first.transport, "try_send", answer)
    publisher.send(*messages(2))
    assert first.take() == [b"MSG k\x000", b"MSG k\0extra", b"MSG k\x000", b"MSG k\x001"]
    second.drain()
    assert second.take() == [b"MSG k\x000", b"MSG k\0extra", b"MSG k\x000", b"MSG k\x001"]
    assert second.protocol.lost == 0


def test_no_client_is_kept_after_its_batch():
    """Between batches delivery refers to no publisher, so that a client that has left is freed."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    publisher.send(b"MSG k\0", b"CMSG !/cred/whoami", b"MSG k\0")
    assert bus.registry.delivery._publisher is None
    assert bus.registry.delivery.touched == []


@pytest.mark.parametrize("strategy", [b"blocking/soft/block", b"blocking/hard/block"])
def test_a_receiver_that_leaves_blocks_nobody(strategy):
    """However a receiver that blocks goes, its publishers go on, and nothing of it is kept."""
    bus = Bus(limits=Limits(queue_messages=1))
    for way in ("end", "breakDown", "abortConnection"):
        reader, publisher = bus.connect(), bus.connect()
        reader.send(b"SUB k", b"CMSG " + strategy)
        reader.stall()
        publisher.send(*messages(3))
        assert publisher.transport.is_paused
        getattr(reader.transport, way)()
        if way == "end":
            reader.drain()
        bus.settle()
        assert not publisher.transport.is_paused
        publisher.transport.end()
        if way == "breakDown":
            reader.transport.end()
        bus.settle()
        assert not bus.registry.clients
        assert not bus.registry.delivery._blocking
        assert bus.registry.users.budget.bytes == 0


# --- at once, or by mail ---------------------------------------------------------------------------


def readers_of(bus: Bus, uid: int, count: int) -> list[Peer]:
    """Connect subscribers to ``k``."""
    readers = [bus.connect(uid=uid) for _ in range(count)]
    for reader in readers:
        reader.send(b"SUB k")
    return readers


@pytest.mark.parametrize(
    ("uid", "count", "size", "is_at_once"),
    [
        (1, OF_OTHERS + 1, 0, True),
        (2, OF_OTHERS, 0, True),
        (2, OF_OTHERS + 1, 0, False),
        (1, AT_ONCE + 1, 0, False),
        (1, 8, AT_ONCE_KIB << 7, False),
        (1, 7, AT_ONCE_KIB << 7, True),
        (2, 2, AT_ONCE_KIB << 9, False),
    ],
)
def test_who_gets_a_message_at_once(uid, count, size, is_at_once):
    """While several users are active, the publisher copies for its own receivers, and for few of another user."""
    bus = Bus(limits=Limits(user_clients=AT_ONCE + 2))
    publisher, readers = bus.connect(uid=1), readers_of(bus, uid, count)
    bus.registry.scheduler.is_busy = True
    packet = b"MSG k\0" + bytes(size)
    publisher.transport.deliver(packet)
    assert {len(reader.take()) for reader in readers} == {int(is_at_once)}
    assert bus.registry.scheduler.mail_copies == (0 if is_at_once else count)
    assert bus.registry.counters.routed == count
    bus.settle()
    assert {len(reader.take()) for reader in readers} == {int(not is_at_once)}
    assert bus.registry.scheduler.mail_copies == 0
    assert bus.registry.counters.routed == count


def test_a_user_alone_needs_no_mail():
    """While nobody else is active, all receivers of all users get a message at once, and nothing is measured."""
    bus = Bus()
    readers, publisher = readers_of(bus, 2, 100), bus.connect(uid=1)
    for _ in range(CROWD + 2):  # the readers have subscribed lately
        publisher.send(b"MSG k\0")
    for reader in readers:
        reader.take()
    assert not bus.registry.scheduler.is_busy

    def look() -> int:
        raise AssertionError("nobody waits for this")

    bus.registry.scheduler.clock = look
    publisher.transport.deliver(b"MSG k\0")
    assert {len(reader.take()) for reader in readers} == {1}


def test_a_message_for_several_users():
    """Each user's receivers get it one way or the other, and in the order of publishing."""
    bus = Bus()
    few, many, publisher = readers_of(bus, 2, OF_OTHERS), readers_of(bus, 3, OF_OTHERS + 1), bus.connect(uid=1)
    own = readers_of(bus, 1, 20)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(*messages(3))
    assert [reader.take() for reader in (*few, *own)] == [messages(3)] * (OF_OTHERS + 20)
    assert [reader.take() for reader in many] == [[]] * (OF_OTHERS + 1)
    many[0].transport.deliver(b"UNSUB k")  # few are left, and they wait for what comes before
    publisher.transport.deliver(b"MSG k\0last")
    assert [reader.take() for reader in many] == [[]] * (OF_OTHERS + 1)
    bus.settle()
    assert [reader.take() for reader in many] == [messages(3), *[[*messages(3), b"MSG k\0last"]] * OF_OTHERS]


@pytest.mark.parametrize("readers", [OF_OTHERS + 1, 400])
@pytest.mark.parametrize("has_echo", [True, False])
def test_to_append_costs_a_publisher_the_same(readers, has_echo):
    """A message for many receivers of another user costs its publisher as much as one for a few of them (I4)."""
    costs = []
    for count in (OF_OTHERS + 1, readers):
        bus = Bus(limits=Limits(user_clients=count))
        readers_of(bus, 2, count)
        publisher = bus.connect(uid=1)
        bus.registry.scheduler.is_busy = True
        route = bus.registry.route(b"k")
        bus.registry.deliver(messages(1), route, publisher.protocol, False, has_echo)
        costs.append(calls(bus.registry.deliver, messages(1), route, publisher.protocol, False, has_echo))
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("count", "is_busy"), [(OF_OTHERS, False), (OF_OTHERS + 1, True)])
def test_receivers_that_do_not_keep_up_make_their_user_active(count, is_busy):
    """More than a few congested receivers of another user make that user active, although it sends nothing."""
    bus = Bus()
    for _ in range(count):
        reader = bus.connect(uid=7)
        reader.send(b"SUB k")
        reader.stall()
    publisher = bus.connect(uid=8)
    bus.registry.scheduler.crowd = 0
    bus.registry.scheduler.is_busy = False
    publisher.send(b"MSG k\0one")
    bus.registry.scheduler.crowd = 0
    bus.registry.scheduler.is_busy = False
    publisher.send(b"MSG k\0two")
    assert bus.registry.scheduler.is_busy is is_busy


# --- outlets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def outlet(plain):
    """A bus with a reader on a plain socket and a publisher; and what finds out where the publisher's messages go."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    reader.transport.plain_socket, _ = plain(10)
    publisher.send(*messages(1))
    find_outlet = publisher.transport.find_outlet
    assert find_outlet is not None
    return bus, reader, publisher, lambda head=b"MSG k\0": find_outlet(head)


def test_the_outlet_of_messages(outlet):
    """Messages with one receiver go on to its socket, and count as published and routed."""
    bus, reader, _, find = outlet
    sock, on_sent = find()
    assert sock is reader.transport.plain_socket
    counters = bus.registry.counters
    published, size, routed = counters.published, counters.published_bytes, counters.routed
    on_sent(3, 60_000)
    assert (counters.published, counters.published_bytes, counters.routed) == (published + 3, size + 60_000, routed + 3)


@pytest.mark.parametrize("head", [b"CMSG k\0", b"MSG other\0", b"SUB k\0", b"FMSG k\0", b"MSG \0", b"\0"])
def test_what_has_no_outlet(outlet, head):
    """Anything but messages with a key that is known is handled."""
    assert outlet[3](head) is None


def _tap(bus, reader, publisher):
    bus.registry.open_tap(SimpleNamespace(deliver=None, deliver_payload=None, dropped=lambda *_: None))


def _alone_without_echo(bus, reader, publisher):
    publisher.transport.plain_socket = reader.transport.plain_socket
    publisher.send(b"SUB k", b"CMSG echo/off")
    reader.send(b"UNSUB k")
    publisher.send(*messages(1))


def _return_to(bus, reader, publisher):
    bus.connect(uid=7).send(*messages(1))
    bus.registry.scheduler.crowd = 0
    bus.registry.scheduler.is_busy = False


@pytest.mark.parametrize(
    "change",
    [
        lambda bus, reader, publisher: bus.connect().send(b"SUB *"),
        lambda bus, reader, publisher: reader.send(b"UNSUB k"),
        lambda bus, reader, publisher: publisher.send(b"SUB k"),
        lambda bus, reader, publisher: publisher.send(b"SUB k", b"CMSG echo/off"),
        lambda bus, reader, publisher: reader.send(b"CMSG sender/on"),
        lambda bus, reader, publisher: reader.protocol.close(CloseReason.VIOLATION),
        lambda bus, reader, publisher: publisher.protocol.close(CloseReason.VIOLATION),
        lambda bus, reader, publisher: publisher.protocol.pause_publishing(),
        lambda bus, reader, publisher: reader.protocol.queue.pending.append(b"MSG k\0first"),
        lambda bus, reader, publisher: bus.connect(uid=7).send(*messages(1)),
        lambda bus, reader, publisher: setattr(reader.transport, "plain_socket", None),
        lambda bus, reader, publisher: setattr(reader.protocol.queue, "head", Receipt(1, 5, LossReason.QUEUE_FULL)),
        _alone_without_echo,
        lambda bus, reader, publisher: reader.send(b"CMSG observer/on"),
        lambda bus, reader, publisher: bus.registry.delivery.touched.append(reader.protocol),
        lambda bus, reader, publisher: bus.registry.router.muted.update({reader.protocol: None}),
        _return_to,
        _tap,
    ],
    ids=[
        "another receiver", "no receiver", "itself", "itself without echo", "senders", "the receiver leaves",
        "the publisher leaves", "the publisher is blocked", "something waits", "another user", "no socket",
        "a receipt waits", "itself alone without echo", "an observer", "something is to be flushed",
        "the receiver has left", "another user was last", "a tap",
    ],
)  # fmt: skip
def test_when_messages_have_no_outlet(outlet, change):
    """Whatever a message has to be looked at for closes the outlet."""
    bus, reader, publisher, find = outlet
    assert find() is not None
    change(bus, reader, publisher)
    bus.settle()
    assert find() is None


def test_a_congested_receiver_has_no_outlet(outlet):
    """While something waits for a receiver, messages come after it; when it is gone, they go on again."""
    _, reader, publisher, find = outlet
    plain_socket, reader.transport.plain_socket = reader.transport.plain_socket, None
    reader.stall()
    publisher.send(*messages(1))
    reader.transport.plain_socket = plain_socket
    assert find() is None
    reader.transport.capacity = None
    reader.drain()
    publisher.send(*messages(1))
    assert find() is not None


@pytest.fixture
def opened(plain):
    """Starts a bus with settings; its reader has a plain socket. Returns what finds the outlet of the publisher."""

    def start(*keys, **settings):
        bus = Bus(**settings)
        reader, publisher = bus.connect(), bus.connect()
        reader.send(*(b"SUB " + key for key in keys))
        reader.transport.plain_socket, _ = plain(10)
        publisher.send(b"MSG %b\0" % keys[0])
        for key in keys:
            bus.registry.publish(key, b"")
        publisher.send(b"MSG %b\0" % keys[0])
        find_outlet = publisher.transport.find_outlet
        assert find_outlet is not None
        return lambda key: find_outlet(b"MSG %b\0" % key)

    return start


def test_a_program_that_counts_deliveries_sees_each_message(opened):
    """Nothing goes past it."""

    class Counting(Observer):
        def delivered(self, client, packets, size):
            pass

    assert opened(b"k")(b"k") is not None
    assert opened(b"k", observers=(Counting(),))(b"k") is None


def _policy(tmp_path, rule):
    path = tmp_path / "policy.toml"
    path.write_text(f'version = 1\n[[rule]]\nname = "all"\nusers = [1000]\n{rule}\n')
    return load(str(path))


def test_a_forbidden_key_has_no_outlet(opened, tmp_path):
    """Also if it has one receiver, and others may publish it: the route is known, and what is forbidden stays so."""
    find = opened(b"open/a", b"closed/a", policy=_policy(tmp_path, 'deny_publish = ["closed/"]'))
    assert find(b"open/a") is not None
    assert find(b"closed/a") is None


def test_who_is_read_at_a_rate_has_no_outlet(opened, tmp_path):
    """Each message is counted."""
    assert opened(b"k", policy=_policy(tmp_path, "max_rate = 1_000"))(b"k") is None


# --- what a message costs (I12) ------------------------------------------------------------------


@pytest.mark.parametrize("messages", [1, 64])
@pytest.mark.parametrize("receivers", [1, 8])
def test_the_calls_of_a_lone_batch(messages, receivers):
    """While nobody else is active, a batch takes the same few calls in the server, however many messages it has."""
    bus = Bus()
    readers = [bus.connect() for _ in range(receivers)]
    publisher = bus.connect()
    for reader in readers:
        reader.send(b"SUB k")
    publisher.send(b"MSG k\0")
    packets = [b"MSG k\0%d" % number for number in range(messages)]
    done = called("/sbus/server/", publisher.protocol.packetsReceived, packets)
    assert done == ["packetsReceived", "deliver", "hand", *["_send_at_once"] * (receivers > 1)]
    assert all(reader.take()[1:] == packets for reader in readers)
