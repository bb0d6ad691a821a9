"""The server's protocol on fakes: what each packet does, to whom, and what it never does."""

from __future__ import annotations

import pytest

from sbus.errors import CloseReason
from sbus.protocol.keys import EARLY
from sbus.server.bus.protocol import LONG_RUN, BusProtocol
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from tests.support.buses import Bus
from tests.support.packets import message


class Recorder(Observer):
    """Keeps every event, as (name, arguments)."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def connected(self, client):
        self.events.append(("connected", client.number))

    def subscribed(self, client, pattern):
        self.events.append(("subscribed", pattern))

    def unsubscribed(self, client, pattern):
        self.events.append(("unsubscribed", pattern))

    def published(self, client, key, payload):
        self.events.append(("published", key, payload))

    def delivered(self, client, packets, size):
        self.events.append(("delivered", client.number, packets, size))

    def dropped(self, client, packets, size):
        self.events.append(("dropped", client.number, packets, size))

    def violated(self, client, violation, key):
        self.events.append(("violated", violation.reason.name, key))

    def refused(self, peer, reason, listener):
        self.events.append(("refused", peer.uid, reason))

    def closed(self, client, reason):
        self.events.append(("closed", client.number, reason))


def test_delivers_the_published_packet_itself():
    """A receiver gets the published packet byte for byte, NULs in the payload included."""
    bus = Bus()
    a, b = bus.connect(), bus.connect()
    a.send(b"SUB x/*")
    b.send(b"MSG x/1\0pay\0load", b"MSG y\0no", b"MSG x/2\0")
    assert a.take() == [b"MSG x/1\0pay\0load", b"MSG x/2\0"]
    assert b.take() == []


def test_one_copy_for_many_patterns_and_counted_subscriptions():
    """Many matching patterns bring one copy; two SUB of one pattern take two UNSUB."""
    bus = Bus()
    a = bus.connect()
    a.send(b"SUB x", b"SUB x", b"SUB *", b"SUB ", b"MSG x\0")
    assert a.take() == [b"MSG x\0"]
    a.send(b"UNSUB *", b"UNSUB ", b"UNSUB x", b"MSG x\0")
    assert a.take() == [b"MSG x\0"]
    a.send(b"UNSUB x", b"MSG x\0", b"UNSUB x")
    assert a.take() == []
    assert bus.registry.counters.unknown_unsubscriptions == 1


def test_subscribing_and_unsubscribing_in_one_batch():
    """SUB then UNSUB leaves nothing behind."""
    bus = Bus()
    a = bus.connect()
    a.send(b"SUB q", b"UNSUB q", b"SUB q\0ignored", b"UNSUB q\0ignored", b"MSG q\0")
    assert a.take() == []
    assert a.is_connected


@pytest.mark.parametrize("packet", [b"HELLO x", b"MSG no-nul", b"MSG", b"", b"SUBx", b"msg a\0", b"MSG !/x\0"])
def test_a_violation_disconnects_that_client_only(packet):
    """A malformed or reserved packet ends its sender; packets before it count, packets behind it do not."""
    bus = Bus()
    good, bad = bus.connect(), bus.connect()
    good.send(b"SUB ")
    bad.send(b"MSG a\0before", packet, b"MSG a\0after")
    assert good.take() == [b"MSG a\0before"]
    assert not bad.is_connected
    assert good.is_connected
    assert bad.protocol.reason is CloseReason.VIOLATION
    assert bus.registry.counters.violations == 1


def test_ignored_violations_keep_the_client():
    """With ignore_violations the packet is dropped, and the next one counts."""
    bus = Bus(ignore_violations=True)
    a = bus.connect()
    a.send(b"SUB ", b"NONSENSE", b"MSG a\0")
    assert a.take() == [b"MSG a\0"]
    assert a.is_connected


def test_whoami_is_answered_word_for_word():
    """The reply has no slash and no NUL at its end, and needs no subscription."""
    bus = Bus()
    a = bus.connect(uid=1000, gid=100, pid=77)
    a.send(b"CMSG !/cred/whoami", b"CMSG !/cred/whoami\0payload is ignored")
    assert a.take() == [b"CMSG !/cred/whoami\0!/cred/100/1000/77"] * 2


def test_control_messages_are_never_forwarded():
    """Not even to a client that has subscribed to everything; an unknown one is counted."""
    bus = Bus()
    a = bus.connect()
    a.send(b"SUB ", b"CMSG unknown/thing", b"CMSG echo/on")
    assert a.take() == []
    assert bus.registry.counters.unknown_controls == 1


def test_echo_off_spares_the_sender_alone():
    """echo/off keeps own messages from coming back, others still get them; echo/on undoes it."""
    bus = Bus()
    a, b = bus.connect(), bus.connect()
    a.send(b"SUB k", b"CMSG echo/off")
    b.send(b"SUB k")
    a.send(b"MSG k\x001")
    assert (a.take(), b.take()) == ([], [b"MSG k\x001"])
    b.send(b"MSG k\x002")
    assert (a.take(), b.take()) == ([b"MSG k\x002"], [b"MSG k\x002"])
    a.send(b"CMSG echo/on", b"MSG k\x003")
    assert a.take() == [b"MSG k\x003"]


def test_a_publisher_without_echo_is_not_looked_for_among_many_receivers():
    """A lone message is one step for each user, not one for each receiver, if its publisher has no echo."""
    compared = []

    class Compared(BusProtocol):
        __hash__ = BusProtocol.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

    bus = Bus()
    publisher = bus.connect()
    publisher.send(b"CMSG echo/off")
    readers = [bus.connect(uid=2 + n % 5, make=Compared) for n in range(LONG_RUN + 1)]
    for reader in readers:
        reader.send(b"SUB k")
    bus.registry.scheduler.press()
    publisher.send(b"MSG k\0first")
    compared.clear()
    publisher.transport.deliver(b"MSG k\0second")
    assert len(compared) < len(readers) // 10
    bus.settle()
    assert {tuple(reader.take()) for reader in readers} == {(b"MSG k\0first", b"MSG k\0second")}


def test_secrets_reach_only_whom_they_are_for():
    """No wildcard and no other client gets a secret; an empty field stands for the subscriber's own ID."""
    bus = Bus()
    spy, me = bus.connect(uid=1001, gid=101, pid=9), bus.connect(uid=1000, gid=100, pid=8)
    for pattern in (b"SUB ", b"SUB *", b"SUB */", b"SUB */cred/", b"SUB */*/*/*/*/*"):
        spy.send(pattern)
    me.send(b"SUB !/cred////inbox")
    for ids in ("//", "100/1000/8", "/1000/", "//8"):
        spy.send(message(f"!/cred/{ids}/inbox"))
    assert len(me.take()) == 4
    spy.send(message("!/cred/101/1001/9/inbox"), message("!/cred//1001//inbox"))
    assert me.take() == []
    assert spy.take() == []


@pytest.mark.parametrize(
    "pattern",
    [
        b"!/cred/100/1001//x", b"!/cred///9/x", b"!/cred/*///x", b"!/cred/100/1000/8", b"!/cred/", b"!", b"!/",
        b"!/cred/0100///x", b"!/cred/4294967296///x", b"a/!/b", b"!/other/x", b"!/cred////!/cred/1/2",
    ],
)  # fmt: skip
def test_refused_subscriptions_are_violations(pattern):
    """A client that asks for foreign, truncated, wild or malformed credentials is disconnected."""
    bus = Bus()
    me = bus.connect(uid=1000, gid=100, pid=8)
    me.send(b"SUB " + pattern)
    assert not me.is_connected
    assert bus.registry.counters.violations == 1


def test_shared_ids_prove_nothing():
    """A client with PID 0 or an overflow ID gets no secrets, but an answer to whoami."""
    bus = Bus(ignore_violations=True)
    nobody = bus.connect(uid=65534, gid=100, pid=8)
    nobody.send(b"SUB !/cred////x", b"MSG !/cred////x\0", b"CMSG !/cred/whoami")
    assert nobody.take() == [b"CMSG !/cred/whoami\0!/cred/100/65534/8"]


def test_the_early_dialect_has_three_verbs_and_dots():
    """CMSG is an unknown verb there, '.' separates, and a first segment that begins with '!' is reserved."""
    bus = Bus(dialect=EARLY)
    a = bus.connect()
    a.send(b"SUB a.*.c.", b"MSG a.b.c.d.e\0", b"MSG a.b.c\0", b"MSG a/b\0")
    assert a.take() == [b"MSG a.b.c.d.e\0"]
    for bad in (b"CMSG echo/off", b"SUB !x", b"MSG !x.y\0"):
        client = bus.connect()
        client.send(bad)
        assert not client.is_connected


def test_limits_on_clients_and_patterns():
    """One client too many is accepted and closed; one pattern too many is a violation."""
    recorder = Recorder()
    bus = Bus(limits=Limits(max_clients=2, user_clients=2, max_patterns=2, max_pattern_bytes=10), observers=(recorder,))
    a, b, late = bus.connect(), bus.connect(), bus.connect()
    assert not late.is_connected
    assert ("refused", 1000, CloseReason.TOO_MANY_CLIENTS) in recorder.events
    a.send(b"SUB a", b"SUB a", b"SUB b")
    assert a.is_connected
    a.send(b"SUB c")
    assert not a.is_connected
    b.send(b"SUB 0123456789")
    assert b.is_connected
    b.send(b"SUB x")
    assert not b.is_connected
    assert [e[1] for e in recorder.events if e[0] == "violated"] == ["TOO_MANY_PATTERNS", "TOO_MANY_PATTERN_BYTES"]


def test_allowed_users():
    """Only the users named (and the server's own) are admitted."""
    bus = Bus(access=AccessSettings(allowed_users=frozenset((1000,))))
    assert bus.connect(uid=1000).is_connected
    assert not bus.connect(uid=1001).is_connected
    assert bus.registry.counters.refused == 1


@pytest.mark.parametrize(
    ("setting", "limit", "reason"),
    [(b"blocking/soft/error", 10, CloseReason.SOCKET_FULL), (b"blocking/hard/error", 2, CloseReason.QUEUE_FULL)],
)
def test_error_disconnects_the_receiver(setting, limit, reason):
    """A receiver that chose error is disconnected; its publisher and bystanders go on."""
    bus = Bus(limits=Limits(queue_messages=limit))
    reader, bystander, publisher = bus.connect(), bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG " + setting)
    bystander.send(b"SUB k")
    reader.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(5)])
    assert not reader.is_connected
    assert reader.protocol.reason is reason
    assert len(bystander.take()) == 5
    assert publisher.is_connected


def test_replies_do_not_pile_up():
    """A client that asks and does not read is not read from past 64 waiting replies, and gets all in the end."""
    bus = Bus()
    a = bus.connect()
    a.stall()
    a.send(*[b"CMSG !/cred/whoami"] * 200)
    assert a.transport.is_paused
    assert a.protocol.queue.replies <= 66
    a.drain()
    assert len(a.take()) == 200
    assert not a.transport.is_paused


def test_many_replies_in_one_batch_are_sent_on_the_way(monkeypatch):
    """Answers to one batch never gather past 64 before they are sent, so a client that reads is not stopped by them."""
    bus = Bus()
    a = bus.connect()
    flushed = []
    flush = a.transport.flush

    def noted():
        flushed.append(len(a.protocol.queue))
        flush()

    monkeypatch.setattr(a.transport, "flush", noted)
    a.send(*[b"CMSG !/cred/whoami"] * 200)
    assert max(flushed) == 64
    assert len(a.take()) == 200
    assert not a.transport.is_paused


def test_a_publisher_that_leaves_is_heard_to_the_end():
    """What a paused publisher had sent before it left is still delivered."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(message("k", b"2"), message("k", b"3"))
    publisher.transport.end()
    publisher.transport.breakDown()
    bus.settle()
    assert publisher.is_connected
    reader.drain()
    bus.settle()
    assert [packet[6:] for packet in reader.take()] == [b"1", b"2", b"3"]
    assert not publisher.is_connected


def test_a_client_that_receives_no_more_is_subscribed_to_nothing():
    """Not even if it subscribes again; what it publishes still counts."""
    bus = Bus()
    deaf, other = bus.connect(), bus.connect()
    deaf.send(b"SUB k")
    other.send(b"SUB k")
    deaf.transport.breakDown()
    bus.settle()
    deaf.send(b"SUB k", b"MSG k\x001")
    other.send(b"MSG k\x002")
    assert other.take() == [b"MSG k\x001", b"MSG k\x002"]
    assert (deaf.protocol.patterns, bus.registry.counters.routed, bus.registry.counters.dropped) == ({}, 2, 0)


def test_a_client_that_breaks_down_while_its_replies_wait_is_let_go():
    """A dead client that was paused for its replies is closed, not kept for ever."""
    bus = Bus()
    a = bus.connect()
    a.stall()
    a.send(*[b"CMSG !/cred/whoami"] * 100)
    a.transport.end()
    a.transport.breakDown()
    bus.settle()
    assert not a.is_connected
    assert not bus.registry.clients


def test_a_half_closed_client_still_gets_what_waits():
    """End-of-file ends the subscriptions; what was queued before is sent, for the block time-out at most."""
    bus = Bus()
    reader, publisher, stalled = bus.connect(), bus.connect(), bus.connect()
    for client in (reader, stalled):
        client.send(b"SUB k")
        client.stall()
    publisher.send(message("k", b"1"))
    for client in (reader, stalled):
        client.transport.end()
    publisher.send(message("k", b"2"))
    reader.drain()
    assert [packet[6:] for packet in reader.take()] == [b"1"]
    assert not reader.is_connected
    assert stalled.is_connected
    bus.clock.advance(30)
    bus.settle()
    assert not stalled.is_connected


def test_a_half_closed_client_that_reads_is_not_cut_off():
    """The time for what is queued runs from the last byte that the client read, not from its end of file."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    reader.stall()
    reader.transport.unread = 10_000
    publisher.send(message("k", b"1"))
    reader.transport.end()
    for _ in range(20):
        bus.clock.pump([5.0] * 5)
        reader.transport.unread -= 1
    assert reader.is_connected
    bus.clock.pump([5.0] * 9)
    bus.settle()
    assert not reader.is_connected


def test_observers_are_told_and_get_no_secrets():
    """Each event reaches an observer that wants it; secret keys are cut and their payloads withheld."""
    recorder = Recorder()
    bus = Bus(observers=(recorder,))
    a = bus.connect(uid=1000, gid=100, pid=8)
    a.send(b"SUB !/cred////in", b"MSG !/cred/100///in\0secret", b"SUB a", b"MSG a\0open", b"UNSUB a", b"BAD")
    bus.settle()
    assert recorder.events == [
        ("connected", 1),
        ("subscribed", b"!/cred////"),
        ("published", b"!/cred/100///", None),
        ("subscribed", b"a"),
        ("published", b"a", b"open"),
        ("unsubscribed", b"a"),
        ("violated", "UNKNOWN_VERB", b""),
        ("dropped", 1, 2, 36),
        ("closed", 1, CloseReason.VIOLATION),
    ]


def test_delivered_counts_what_the_kernel_took():
    """The delivered event counts packets handed to the kernel, and those only."""
    recorder = Recorder()
    bus = Bus(observers=(recorder,))
    a, b = bus.connect(capacity=2), bus.connect()
    a.send(b"SUB k")
    b.send(*[message("k")] * 5)
    assert [e for e in recorder.events if e[0] == "delivered"] == [("delivered", 1, 2, 14)]


@pytest.mark.parametrize("observers", [(), (Recorder(),)], ids=["past the queue", "through the queue"])
@pytest.mark.parametrize("capacity", [0, 1, 3, 4, 5])
def test_a_batch_that_goes_one_way(observers, capacity):
    """A batch for the same receivers goes to each as far as its socket takes it; the rest waits or is dropped."""
    bus = Bus(limits=Limits(queue_messages=2), observers=observers)
    slow, quick, publisher = bus.connect(), bus.connect(), bus.connect()
    slow.send(b"SUB k")
    quick.send(b"SUB k")
    publisher.send(message("k", b"first"))
    for client in (slow, quick):
        client.take()
    slow.transport.capacity = capacity
    packets = [message("k", b"%d" % n) for n in range(4)]
    publisher.send(*packets)
    assert quick.take() == packets
    assert slow.take() == packets[:capacity]
    waiting = min(2, max(0, 4 - capacity))
    assert slow.protocol.queue.messages == waiting
    counters = bus.registry.counters
    assert (counters.published, counters.routed, counters.dropped) == (5, 10, max(0, 4 - capacity) - waiting)
    publisher.send(message("k", b"behind"))
    slow.drain()
    assert slow.take() == [*packets[capacity:], message("k", b"behind")][:2]


def test_counters_balance():
    """What was routed is what was sent, what was dropped and what waits."""
    bus = Bus(limits=Limits(queue_messages=3))
    a, b, publisher = bus.connect(), bus.connect(), bus.connect()
    for client in (a, b):
        client.send(b"SUB k")
    a.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(10)])
    counters = bus.registry.counters
    assert (counters.published, counters.routed, counters.dropped) == (10, 20, 7)
    assert len(b.take()) == 10
    assert a.protocol.queue.messages == 3
    a.transport.end()
    a.transport.breakDown()
    bus.settle()
    assert counters.dropped == 10
    assert bus.registry.users.budget.bytes == 0


def test_the_program_around_the_bus_can_publish():
    """registry.publish reaches subscribers, also from within a client's batch, and is never blocked."""
    bus = Bus()
    reader = bus.connect()
    reader.send(b"SUB k")
    bus.registry.publish(b"k", b"1")
    assert reader.take() == [b"MSG k\x001"]
    reader.send(b"CMSG blocking/soft/block")
    reader.stall()
    bus.registry.publish(b"k", b"2")
    bus.registry.publish(b"k", b"3")
    reader.drain()
    assert reader.take() == [b"MSG k\x002", b"MSG k\x003"]


def test_stopping_disconnects_everyone_and_can_be_repeated():
    """stopService fires when all are gone; the registry starts again empty."""
    bus = Bus()
    for _ in range(3):
        clients = [bus.connect() for _ in range(3)]
        clients[0].send(b"SUB a")
        done = bus.registry.stopService()
        bus.settle()
        assert done.called
        assert not any(client.is_connected for client in clients)
        assert bus.registry.router.index.is_empty()
        assert not bus.registry.routes
        assert not bus.connect().is_connected
        bus.registry.startService()
