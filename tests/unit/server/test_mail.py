"""Mail: what waits for the receivers of one user comes in the order of handling, or is accounted for."""

from __future__ import annotations

import itertools

import pytest

from sbus.fair.lines import QUANTUM
from sbus.flood import Outcome
from sbus.routing.route import FIRST_NS
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.mail import JOINED, LETTER_MEMORY, LOOK
from sbus.server.core.limits import MAX_REPLIES, Limits
from tests.support.buses import Bus, HandTurnedBus
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
    taken,
)

# --- entries --------------------------------------------------------------------------------------


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


# --- letters --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("choice", [b"CMSG blocking/soft/discard", b"CMSG order/stack", b"CMSG bundle/on"])
def test_choices_that_wait_in_the_mail_stop_and_charge_their_client(choice):
    """While mail waits, a client that keeps choosing is not read past `MAX_REPLIES`; its user pays for the choices."""
    bus = Bus()
    readers, publisher = readers_of(bus), bus.connect(uid=PUBLISHER)
    client = readers[0].protocol
    before = client.user.memory
    publisher.transport.deliver(message())
    with_mail = client.user.memory
    readers[0].transport.deliver(*[choice] * 200)
    assert client.is_paused
    assert kinds(bus).count("choice") == MAX_REPLIES + 1
    assert client.user.memory - with_mail == (MAX_REPLIES + 1) * LETTER_MEMORY + client._kept
    bus.settle()
    assert not client.is_paused
    assert is_clean(bus)
    assert client.user.memory == before


def test_notices_of_interest_beyond_those_in_the_mail_follow_them():
    """Once its mail is empty, a client gets the notices for which `MAX_REPLIES` left no room there."""
    bus = Bus()
    keys = [b"x/%d" % number for number in range(MAX_REPLIES + 9)]
    watcher, *_ = readers_of(bus)
    watcher.send(*[b"CMSG interest/on\0" + key for key in keys])
    watcher.take()
    publisher, other = bus.connect(uid=PUBLISHER), bus.connect(uid=OTHER)
    bus.registry.scheduler.is_busy = True
    publisher.transport.deliver(message())
    other.transport.deliver(b"SUB x/*")
    lines_of(bus)._serve_chores(1, lambda: 0, 0)
    assert kinds(bus).count("reply") == MAX_REPLIES
    bus.settle()
    bus.clock.pump([0.0] * 9)
    first, *notices = watcher.take()
    assert first == message()
    assert sorted(notices) == sorted(b"CMSG interest\0001 " + key for key in keys)
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


# --- echo -----------------------------------------------------------------------------------------


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


# --- publishers that may be blocked ---------------------------------------------------------------


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
