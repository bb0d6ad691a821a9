"""The server's protocol on fakes: what each packet does, to whom, and what it never does."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.logger import globalLogPublisher

from sbus.errors import CloseReason
from sbus.protocol import bundles
from sbus.protocol.keys import EARLY
from sbus.server.bus import protocol
from sbus.server.bus.backpressure import Backpressure
from sbus.server.bus.handover import OF_OTHERS
from sbus.server.bus.protocol import MAX_RUN
from sbus.server.core.credentials import AccessSettings
from sbus.server.core.limits import Limits
from sbus.server.core.observers import Observer
from sbus.server.ops.log_observer import LogObserver
from tests.support.buses import Bus
from tests.support.costs import calls
from tests.support.packets import bundle


def message(key: str, payload: bytes = b"x") -> bytes:
    return b"MSG %b\0%b" % (key.encode(), payload)


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


def test_block_stops_the_publisher_inside_its_batch():
    """Packets that were read from a publisher before it was blocked are kept, and go on in order afterwards."""
    bus = Bus()
    reader, other, publisher = bus.connect(), bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    other.send(b"SUB k")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(*[message("k", b"%d" % n) for n in range(2, 10)])
    assert publisher.transport.is_paused
    assert len(other.take()) < 9
    before = len(other.transport.written)
    reader.drain()
    got = [packet[6:] for packet in reader.take()]
    assert got == [b"%d" % n for n in range(1, 10)]
    assert not publisher.transport.is_paused
    assert len(other.transport.written) > before


@pytest.mark.parametrize("total", [None, 24])
@pytest.mark.parametrize("batch", [1, 2, 3, 10, 40])
def test_a_full_queue_stops_the_publisher_at_the_same_message(batch, total):
    """Where a queue with hard/block fills up does not depend on how many messages come at a time."""
    messages = [message("k", b"%02d" % n) for n in range(40)]
    limits = {"total_queue_bytes": total * len(messages[0])} if total else {"queue_messages": 10}
    bus = Bus(limits=Limits(**limits))
    first, second, publisher = bus.connect(), bus.connect(), bus.connect()
    for reader in (first, second):
        reader.send(b"SUB k", b"CMSG blocking/hard/block")
        reader.stall()
    publisher.send(messages[0])
    for at in range(1, 40, batch):
        publisher.send(*messages[at : at + batch])
    assert publisher.transport.is_paused
    assert [reader.protocol.queue.messages for reader in (first, second)] == [11, 11]
    for _ in range(10):
        first.drain()
        second.drain()
    assert first.take() == second.take() == messages
    assert not publisher.transport.is_paused


def test_messages_for_receivers_that_can_block_cost_by_the_batch():
    """While there is room for a batch, it costs as much as for receivers that do not block."""
    costs = []
    for count in (2, 60):
        bus = Bus()
        reader, publisher = bus.connect(), bus.connect()
        reader.send(b"SUB k", b"CMSG blocking/hard/block")
        reader.stall()
        publisher.send(message("k"))
        costs.append(calls(bus.registry.deliver, [message("k")] * count, bus.registry.route(b"k"), publisher.protocol))
        assert reader.protocol.queue.messages == 1 + count
    assert costs[0] == costs[1]


def test_block_acts_as_queue_toward_other_users():
    """A receiver does not block a publisher of another user; messages beyond its limit are dropped."""
    bus = Bus(limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(uid=1000), bus.connect(uid=1001)
    reader.send(b"SUB k", b"CMSG blocking/soft/block", b"CMSG blocking/hard/error")
    reader.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(5)])
    assert not publisher.transport.is_paused
    assert reader.is_connected
    reader.drain()
    assert len(reader.take()) == 3
    assert reader.protocol.lost == 2


def test_a_receiver_that_blocks_too_long_is_disconnected():
    """After the block time-out without a packet leaving its queue, the publishers go on without it."""
    bus = Bus()
    reader, publisher, other = bus.connect(), bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    other.send(b"SUB k")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(message("k", b"2"))
    bus.clock.advance(29.9)
    assert reader.is_connected
    assert publisher.transport.is_paused
    reader.drain(0)
    bus.clock.advance(0.2)
    bus.settle()
    assert not reader.is_connected
    assert reader.protocol.reason is CloseReason.BLOCKED_TOO_LONG
    assert not publisher.transport.is_paused
    assert [packet[6:] for packet in other.take()] == [b"1", b"2"]


def test_a_client_that_blocks_itself_is_disconnected():
    """Blocking on one's own messages ends by the time-out; it does not hang."""
    bus = Bus()
    narcissus = bus.connect()
    narcissus.send(b"SUB k", b"CMSG blocking/soft/block")
    narcissus.stall()
    narcissus.send(message("k"))
    bus.clock.advance(30.1)
    bus.settle()
    assert not narcissus.is_connected
    assert not bus.registry.clients


def test_two_clients_that_block_each_other_end():
    """Neither reads, so the time-out ends at least one of them; nothing hangs."""
    bus = Bus()
    a, b = bus.connect(), bus.connect()
    a.send(b"SUB a", b"CMSG blocking/soft/block")
    b.send(b"SUB b", b"CMSG blocking/soft/block")
    a.stall()
    b.stall()
    a.send(message("b"), message("b"))
    b.send(message("a"), message("a"))
    assert a.transport.is_paused
    assert b.transport.is_paused
    bus.clock.advance(30.1)
    bus.settle()
    assert not (a.is_connected and b.is_connected)
    assert not any(peer.transport.is_paused for peer in (a, b) if peer.is_connected)


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


def test_a_change_of_strategy_unblocks_the_publishers():
    """A receiver that chooses another strategy unblocks the publishers that it blocked with the one before."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(message("k", b"1"))
    publisher.send(message("k", b"2"))
    assert publisher.transport.is_paused
    reader.send(b"CMSG blocking/soft/queue")
    assert not publisher.transport.is_paused
    publisher.send(message("k", b"3"))
    assert not publisher.transport.is_paused
    reader.drain()
    assert [packet[6:] for packet in reader.take()] == [b"1", b"2", b"3"]


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


@pytest.mark.parametrize(("receivers", "read_limit"), [(0, 48), (1, 48), (2, 24), (8, 6), (64, 4)])
def test_share_of_a_publisher(receivers, read_limit):
    """The more receivers there are, the less of a publisher is read in one go while others want to be read too."""
    bus = Bus()
    for _ in range(receivers):
        bus.connect().send(b"SUB k")
    publisher = bus.connect()
    publisher.send(message("k"))
    publisher.send(*[message("k")] * 10)
    assert publisher.transport.read_limit == read_limit


def test_share_of_a_publisher_to_a_congested_receiver():
    """A receiver with a full socket counts as one, whatever the last run was."""
    bus = Bus()
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    for _ in range(8):
        bus.connect().send(b"SUB many")
    reader.stall()
    for key in ("k", "many"):  # from now on their routes are known
        publisher.send(message(key))
    publisher.send(*[message("many")] * 8)
    assert publisher.transport.read_limit == 6
    publisher.send(*[message("k")] * 8)
    assert publisher.transport.read_limit == 48
    reader.drain()
    assert reader.take() == [message("k")] * 9


def test_share_of_a_publisher_whose_messages_go_by_mail():
    """What goes into mail is made no copies of yet, whatever the last run was."""
    bus = Bus()
    for _ in range(64):
        bus.connect().send(b"SUB many")
    for _ in range(OF_OTHERS + 1):
        bus.connect(uid=1001).send(b"SUB k")
    publisher = bus.connect()
    for key in ("k", "many"):  # from now on their routes are known
        publisher.send(message(key))
    publisher.send(*[message("many")] * 8)
    assert publisher.transport.read_limit == 4
    publisher.send(*[message("k")] * 8)
    assert publisher.transport.read_limit == 48


def test_whose_messages_a_blocking_receiver_keeps(monkeypatch):
    """What a congested receiver keeps is noted by publisher, as long as it may block that one."""
    noted = []

    def note(self, publisher, receiver, *figures):
        noted.append((publisher, figures))

    monkeypatch.setattr(Backpressure, "kept", note)
    bus = Bus()
    reader, publisher, stranger = bus.connect(), bus.connect(), bus.connect(uid=1001)
    reader.send(b"CMSG blocking/hard/block", b"SUB k")
    reader.stall()
    publisher.send(message("k", b"first"))
    noted.clear()
    publisher.send(message("k", bytes(94)))
    stranger.send(message("k", bytes(94)))
    assert noted == [(publisher.protocol, (1, 100, 2))]


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


def test_drops_are_logged_in_sums_without_payloads():
    """The first loss is logged at once, the others in one line for each client after the interval."""
    events: list[Any] = []
    observer: Any = events.append
    globalLogPublisher.addObserver(observer)
    try:
        clock = Clock()
        log = LogObserver(clock)
        bus = Bus(limits=Limits(queue_messages=1), observers=(log,))
        reader, publisher = bus.connect(), bus.connect()
        reader.send(b"SUB k")
        reader.stall()
        for _ in range(50):
            publisher.send(message("k", b"sensitive"))
        lines = [e for e in events if "messages" in e]
        assert [e["messages"] for e in lines] == [1]
        clock.advance(10)
        lines = [e for e in events if "messages" in e]
        assert [e["messages"] for e in lines] == [1, 48]
        assert lines[1]["uid"] == 1000
        assert lines[1]["total"] == 49
        assert "sensitive" not in repr(lines)
        log.stop()
    finally:
        globalLogPublisher.removeObserver(observer)


@pytest.fixture
def logged():
    """What the log got, as (number, numbers of events in a sum)."""
    events: list[Any] = []
    observer: Any = events.append
    globalLogPublisher.addObserver(observer)

    def take() -> list[Any]:
        lines = [event.get("number") or event["events"] for event in events]
        events.clear()
        return lines

    yield take
    globalLogPublisher.removeObserver(observer)


def test_violations_are_logged_in_sums(logged):
    """The first violations of a user are logged at once, the others in one line after the interval, and at the end."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(ignore_violations=True, observers=(log,))
    first, second = bus.connect(), bus.connect(uid=1001)
    logged()
    first.send(*[b"nonsense"] * 500)
    second.send(b"nonsense")
    lines = logged()
    ones = len(lines) - 1
    assert lines == [1] * ones + [2]
    assert 8 < ones < 50
    clock.advance(10)
    assert logged() == [f"{500 - ones} violations (UNKNOWN_VERB)"]
    second.send(b"nonsense")
    assert logged() == [2]
    first.send(*[b"nonsense"] * 500)
    ones = len(logged())
    first.transport.end()
    bus.settle()
    assert logged() == [1]
    log.stop()
    assert logged() == [f"{500 - ones} violations (UNKNOWN_VERB)"]
    assert clock.getDelayedCalls() == []


def test_reconnecting_evades_no_sum(logged):
    """A user that connects anew for each violation is one user in the log."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(observers=(log,))
    for _ in range(1_000):
        bus.connect().send(b"nonsense")
    assert len(logged()) < 50
    clock.advance(10)
    (line,) = logged()
    for kind in ("clients connected", "violations (UNKNOWN_VERB)", "clients disconnected (VIOLATION)"):
        assert kind in line
    log.stop()


def test_a_range_of_uids_is_one_user_in_the_log(logged):
    """UIDs that count as one owner's share the lines of one user; each line names the UID itself."""
    clock = Clock()
    log = LogObserver(clock, owner_of=lambda uid: 1_000 if uid >= 100_000 else uid)
    bus = Bus(observers=(log,))
    lines = []
    for uid in range(100_000, 100_100):
        bus.connect(uid=uid).send(b"nonsense")
        lines += logged()
    assert len(lines) < 30
    clock.advance(10)
    (line,) = logged()
    assert "clients disconnected (VIOLATION)" in line
    lost = [bus.connect(uid=uid) for uid in range(100_000, 100_010)]
    log.stop()
    logged()
    for client in lost:
        log.dropped(client.protocol, 1, 1)
    assert len(logged()) == 1
    log.stop()


def test_losses_of_many_clients_are_few_lines(logged):
    """Where a thousand clients lose messages, the first loss has a line, and so has the sum of most of them."""
    clock = Clock()
    log = LogObserver(clock)
    bus = Bus(observers=(log,), limits=Limits(user_clients=1_000))
    clients = [bus.connect() for _ in range(1_000)]
    log.stop()
    logged()
    for client in clients:
        log.dropped(client.protocol, 2, 100)
    assert logged() == [1]
    clock.advance(10)
    assert 1 < len(logged()) < 50
    clock.advance(10)
    found = [line for line in logged() if isinstance(line, str)]
    assert len(found) == 1
    assert "messages dropped" in found[0]
    log.stop()


# --- what is published meanwhile -------------------------------------------------------------------


def telling_bus(event: str, key: bytes = b"more", most: int = 1, **settings: Any) -> Bus:
    """A bus whose program publishes for each event of one kind with client 1 in it, up to `most` messages."""
    left = most

    def tell(self, client, *_):
        nonlocal left
        if left and client.number == 1:
            left -= 1
            bus.registry.publish(key, b"")

    bus = Bus(observers=(type("Telling", (Observer,), {event: tell})(),), **settings)
    return bus


def test_what_the_program_publishes_from_an_observer_blocks_no_publisher():
    """Not even the client whose message is being handled is blocked, and no client loses its connection."""
    bus = telling_bus("published", most=5)
    publisher, reader = bus.connect(), bus.connect()
    reader.send(b"SUB more", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(*[b"MSG k\0"] * 5)
    assert not publisher.protocol.is_paused
    bus.clock.advance(60)
    bus.settle()
    assert reader.is_connected
    reader.drain()
    assert reader.take() == [b"MSG more\0"] * 5


def test_what_a_client_has_published_before_that_is_still_its_own():
    """A publisher is blocked for its own messages, whatever the program publishes between them."""
    bus = telling_bus("published")
    publisher, reader = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"SUB more", b"CMSG blocking/soft/block")
    reader.stall()
    publisher.send(b"MSG k\x001", b"MSG k\x002")
    assert publisher.protocol.is_paused
    reader.drain()
    assert not publisher.protocol.is_paused
    assert sorted(reader.take()) == [b"MSG k\x001", b"MSG k\x002", b"MSG more\0"]


@pytest.mark.parametrize("by", ["a client", "the program"])
@pytest.mark.parametrize("capacity", range(5))
def test_publishing_when_something_was_delivered(by, capacity):
    """It is sent at once, or waits with the rest; nothing is lost, and the accounts are right."""
    bus = telling_bus("delivered", most=3)
    reader, other, publisher = bus.connect(), bus.connect(), bus.connect()
    for client in (reader, other):
        client.send(b"SUB k", b"SUB more")
    reader.transport.capacity = capacity
    packets = [message("k", b"%d" % n) for n in range(4)]
    for n, packet in enumerate(packets):
        if by == "a client":
            publisher.send(packet)
        else:
            bus.registry.publish(b"k", b"%d" % n)
        assert reader.protocol.queue.pending == []
        assert packet in other.take()
    reader.drain()
    got = reader.take()
    assert [packet for packet in got if packet != b"MSG more\0"] == packets
    assert got.count(b"MSG more\0") == 3
    assert (reader.protocol.queue.messages, reader.protocol.queue.size) == (0, 0)
    assert (bus.registry.users.budget.bytes, bus.registry.counters.dropped) == (0, 0)


@pytest.mark.parametrize("order", [b"queue", b"stack", b"random"])
@pytest.mark.parametrize("hard", [b"error", b"discard"])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_publishing_when_a_full_queue_was_read(order, hard, taken):
    """A message that an observer publishes finds the room that the delivered ones have left; the accounts are right."""
    bus = telling_bus("delivered", key=b"k", most=1, limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k", b"CMSG blocking/hard/" + hard, b"CMSG order/" + order)
    reader.stall()
    publisher.send(*[message("k", b"%d" % n) for n in range(3)])
    queue = reader.protocol.queue
    assert queue.messages == 3
    reader.drain(taken)
    assert reader.is_connected
    assert (queue.messages, reader.protocol.lost) == (3 - taken + 1, 0)
    reader.drain()
    assert len(reader.take()) == 4
    assert (queue.messages, queue.size, bus.registry.users.budget.bytes) == (0, 0, 0)


def test_publishing_when_something_was_dropped():
    """The receivers behind the one that has lost a message get it all the same."""
    bus = telling_bus("dropped", limits=Limits(queue_messages=1))
    stalled, *others = (bus.connect() for _ in range(4))
    publisher = bus.connect()
    for reader in (stalled, *others):
        reader.send(b"SUB k", b"SUB more")
    stalled.stall()
    publisher.send(message("k"))
    for _ in range(3):
        publisher.send(message("k"), b"SUB else", message("k"))  # which is no run, so that it goes through the queues
    for reader in others:
        got = reader.take()
        assert (got.count(message("k")), got.count(b"MSG more\0")) == (7, 1)


def test_flood_control_hears_of_what_a_socket_did_not_take_in_one_turn(monkeypatch):
    """However little of its queue a transport sends at a time, what its socket does not take counts as waiting."""
    bus = Bus(limits=Limits(queue_messages=2))
    reader, publisher = bus.connect(), bus.connect()
    reader.send(b"SUB k")
    taken_in_all = 0

    def flush():
        nonlocal taken_in_all
        taken = reader.protocol.queue.take(2)
        sent = min(len(taken), 5 - taken_in_all)
        taken_in_all += sent
        reader.protocol.queue.ack(taken, sent)

    monkeypatch.setattr(reader.transport, "flush", flush)
    publisher.send(*[b"MSG k\0"] * 9, b"SUB else")
    assert taken_in_all == 5
    assert (reader.protocol.queue.messages, bus.registry.counters.dropped) == (2, 2)


# --- bundles ---------------------------------------------------------------------------------------


def test_a_bundle_behind_the_question_is_sent_in_slices(monkeypatch):
    """However much is read with the question, what it brings is sent on before it is more than a slice."""
    bus = Bus(limits=Limits(queue_messages=3))
    reader, publisher = bus.connect(capacity=0), bus.connect()
    reader.send(b"SUB k")
    longest = 0

    def watched(packets, *more):
        nonlocal longest
        longest = max(longest, len(packets))
        return deliver(packets, *more)

    deliver = bus.registry.deliver
    monkeypatch.setattr(bus.registry, "deliver", lambda packets, *more: watched(packets, *more[:2]))
    publisher.send(b"MSG k\0", b"CMSG bundle/on", bundle(*[b"MSG k\0"] * 3 * MAX_RUN))
    assert longest <= MAX_RUN
    assert (reader.protocol.queue.messages, bus.registry.counters.dropped) == (3, 3 * MAX_RUN - 2)


def test_asking_for_bundles_again_and_again_costs_no_more_each_time(monkeypatch):
    """What is behind the question is looked at when its turn comes, and not at every question."""
    looked_at = 0

    def counted(packets):
        nonlocal looked_at
        looked_at += len(packets)
        return unbundle(packets)

    unbundle = bundles.unbundle
    monkeypatch.setattr(protocol, "unbundle", counted)
    bus = Bus()
    client = bus.connect()
    pairs = [b"CMSG bundle/on", b"CMSG bundle/off"] * 100
    client.send(*pairs, b"CMSG bundle/on", bundle(*pairs, b"MSG a\0"), b"SUB x", b"MSG x\0")
    assert client.is_connected
    assert client.take()[-1] == b"MSG x\0"
    assert looked_at <= 2
