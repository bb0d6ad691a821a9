"""Who sent this: what the server says of publishers to those that ask, and who may speak for others."""

from __future__ import annotations

import pytest

from sbus.flood import SIGNED
from sbus.protocol.notices import LONGEST_SENDER
from sbus.server.asks.last_values import LastValueRule
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.costs import calls
from tests.unit.server.test_upstream import P, link_to

ON = b"CMSG sender/on"
ANSWER = b"CMSG sender/on\0"


def notice(peer: Peer, prefix: bytes = b"") -> bytes:
    credentials = peer.transport.credentials
    own = b"!/cred/%d/%d/%d" % (credentials.gid, credentials.uid, credentials.pid)
    return b"CMSG sender\0%d %b" % (peer.protocol.number, prefix + own)


def reader_of(bus: Bus, *packets: bytes) -> Peer:
    reader = bus.connect(uid=2)
    reader.send(ON, b"SUB k", *packets)
    assert reader.take() == [ANSWER]
    return reader


def test_each_change_of_publisher_is_told():
    """Runs of one publisher share a notice, its own messages are named, too, and asking again is answered again."""
    bus = Bus()
    reader, one, two = reader_of(bus), bus.connect(uid=3), bus.connect(uid=3)
    one.send(b"MSG k\x001", b"MSG k\x002")
    one.send(b"MSG k\x003")
    two.send(b"MSG k\x004")
    reader.send(b"MSG k\x005", ON, b"MSG k\x006")
    bus.registry.publish(b"k", b"7")
    assert reader.take() == [
        *[notice(one), b"MSG k\x001", b"MSG k\x002", b"MSG k\x003"],
        *[notice(two), b"MSG k\x004", notice(reader), b"MSG k\x005"],
        *[ANSWER, b"MSG k\x006", b"CMSG sender\x000 -", b"MSG k\x007"],
    ]
    reader.send(b"CMSG sender/off")
    one.send(b"MSG k\x008")
    assert reader.take() == [b"CMSG sender/off\0", b"MSG k\x008"]


def test_numbers_never_come_again():
    """Each connection has another number, also after others have left."""
    bus = Bus()
    numbers = []
    for _ in range(3):
        peer = bus.connect()
        numbers.append(peer.protocol.number)
        peer.transport.hang_up()
        bus.settle()
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("order", [b"order/queue", b"order/stack", b"order/random"])
def test_what_waits_comes_before_the_answer(order: bytes):
    """Nobody knows who has published what waits already: it leaves before the answer, under every order."""
    bus = Bus()
    reader, one, two = bus.connect(uid=2), bus.connect(uid=3), bus.connect(uid=4)
    reader.send(b"SUB k", b"CMSG " + order)
    reader.stall()
    one.send(b"MSG k\x001", b"MSG k\x002")
    reader.send(ON, b"SUB j")
    two.send(b"MSG k\x003")
    reader.drain(2)
    one.send(b"MSG k\x004", b"MSG j\x005")
    reader.drain()
    got = reader.take()
    at = got.index(ANSWER)
    assert set(got[:at]) == {b"MSG k\x001", b"MSG k\x002"}
    assert {notice(two), notice(one), b"MSG k\x003", b"MSG k\x004"} == set(got[at + 1 :])
    for message, publisher in ((b"MSG k\x003", two), (b"MSG k\x004", one)):
        assert got[got.index(message) - 1] == notice(publisher)
    one.send(b"MSG j\x006")
    assert reader.take()[-1] == b"MSG j\x006"


def test_a_message_in_the_place_of_another_has_its_own_name():
    """Under latest, a newer message takes the place of one of another publisher."""
    bus = Bus()
    reader, one, two = reader_of(bus, b"CMSG blocking/soft/latest", b"SUB j"), bus.connect(), bus.connect()
    reader.stall()
    one.send(b"MSG k\x001", b"MSG j\x001")
    two.send(b"MSG k\x002")
    reader.drain()
    assert reader.take() == [notice(two), b"MSG k\x002", notice(one), b"MSG j\x001"]


@pytest.mark.parametrize("asked", [ON, b"CMSG last\0kept/", b"CMSG blocking/soft/latest", b"CMSG blocking/soft/block"])
def test_what_waits_is_signed_once(asked: bytes):
    """A request costs as much however many messages wait: 65,536 of them took 30 to 70 ms, each time."""
    costs = []
    for waiting in (10, 2_000):
        bus = Bus(last_values=(LastValueRule(b"kept/"),))
        reader, one = reader_of(bus), bus.connect(uid=3)
        reader.stall()
        for _ in range(waiting // 10):
            one.send(*[b"MSG k\x001"] * 10)
        if b"latest" in asked:
            reader.send(asked, b"CMSG blocking/soft/queue")
        costs.append(calls(reader.send, asked))
    assert costs[1] < costs[0] * 2


def test_a_kept_value_remembers_its_publisher():
    """A snapshot names publishers, those that have left and the program around the bus among them."""
    bus = Bus(last_values=(LastValueRule(b"kept/"),))
    gone, one = bus.connect(uid=3), bus.connect(uid=4)
    gone.send(b"MSG kept/a\x001")
    name = notice(gone)
    gone.transport.hang_up()
    bus.settle()
    one.send(b"MSG kept/b\x002")
    bus.registry.publish(b"kept/c", b"3")
    reader, other = bus.connect(uid=2), bus.connect(uid=2)
    reader.send(ON, b"CMSG last\0kept/", b"MSG kept/d\x004")
    assert reader.take() == [
        *[ANSWER, name, b"MSG kept/a\x001", notice(one), b"MSG kept/b\x002", b"CMSG sender\x000 -", b"MSG kept/c\x003"],
        *[b"CMSG last/done\0kept/", notice(reader), b"MSG kept/d\x004"],
    ]
    other.send(b"CMSG last\0kept/")
    assert [packet[:9] for packet in other.take()] == [*[b"MSG kept/"] * 4, b"CMSG last"]


def test_mail_of_several_publishers():
    """Messages in the mail of the receiver's user have their names, also those of publishers that have left."""
    bus = HandTurnedBus()
    readers = [reader_of(bus) for _ in range(4)]
    plain = bus.connect(uid=2)
    plain.send(b"SUB k")
    one, two = bus.connect(uid=3), bus.connect(uid=3)
    names = notice(one), notice(two)
    bus.use_up(readers[0], 100)
    one.send(b"MSG k\x001", b"MSG k\x002")
    two.send(b"MSG k\x003")
    two.transport.hang_up()
    one.send(b"MSG k\x004")
    assert readers[0].protocol.user.lines.mail
    bus.finish()
    for reader in readers:
        assert reader.take() == [
            *[names[0], b"MSG k\x001", b"MSG k\x002", names[1], b"MSG k\x003", names[0], b"MSG k\x004"]
        ]
    assert plain.take() == [b"MSG k\0%d" % number for number in range(1, 5)]


def test_mail_of_many_publishers_costs_a_receiver_one_step(monkeypatch):
    """However often the publishers take turns: each change cost a system call, ten times as long in all."""
    bus = HandTurnedBus()
    readers = [reader_of(bus) for _ in range(4)]
    one, two = bus.connect(uid=3), bus.connect(uid=4)
    bus.use_up(readers[0], 100)
    for _ in range(4):
        one.send(b"MSG k\x001")
        two.send(b"MSG k\x002")
    assert len(readers[0].protocol.user.lines.mail) == 1
    transport, flushed = readers[0].transport, 0

    def flush() -> None:
        nonlocal flushed
        flushed += 1
        type(transport).flush(transport)

    monkeypatch.setattr(transport, "flush", flush)
    monkeypatch.setattr(transport, "try_send", None)
    bus.finish()
    assert readers[0].take() == [notice(one), b"MSG k\x001", notice(two), b"MSG k\x002"] * 4
    assert flushed == 1


def test_mail_for_a_shared_queue_is_each_publishers():
    """Users that share a link's queue have their parts also of what one entry of mail brings."""
    bus = HandTurnedBus(limits=Limits(queue_messages=8))
    links = [bus.connect(uid=0) for _ in range(3)]
    for link in links:
        link.send(ON, b"CMSG link/lost", b"SUB k")
        link.take()
        link.stall()
    flood, quiet = bus.connect(uid=3), bus.connect(uid=4)
    bus.registry.publish(b"k", b"first")  # what the sockets leave makes the queues wait
    bus.finish()
    bus.use_up(links[0], 100)
    for _ in range(6):
        flood.send(b"MSG k\x001")
    quiet.send(b"MSG k\x002")
    assert len(links[0].protocol.user.lines.mail) == 1
    bus.finish()
    for link in links:
        link.drain()
        bus.finish()
        assert link.take() == [
            *[b"CMSG sender\x000 -", b"MSG k\0first", notice(flood), b"MSG k\x001", b"MSG k\x001"],
            *[notice(quiet), b"MSG k\x002"],
        ]
        assert link.protocol.lost == 4


def test_a_message_too_long_for_the_socket():
    """The receipt of a message that no socket takes stands in its place, and the next one is named."""
    bus = Bus()
    reader, one, two = reader_of(bus), bus.connect(), bus.connect()
    reader.send(b"CMSG receipts/on")
    reader.take()
    reader.transport.longest = 60
    reader.stall()
    one.send(b"MSG k\0" + b"x" * 60)
    two.send(b"MSG k\x002")
    reader.drain()
    assert reader.take() == [notice(one), b"CMSG lost\x001 66 1 too-large", notice(two), b"MSG k\x002"]


def test_names_that_wait_weigh():
    """What a receiver makes wait counts toward its user's memory, the names included."""
    weights = []
    for asks in (False, True):
        bus = Bus()
        reader, one = bus.connect(uid=2), bus.connect(uid=3)
        reader.send(b"SUB k", *([ON] if asks else []))
        reader.stall()
        before = reader.protocol.user.memory
        one.send(*[b"MSG k\x001"] * 10)
        weights.append(reader.protocol.user.memory - before)
        reader.drain()
        assert reader.protocol.user.memory == before
    assert weights[1] - weights[0] == 10 * SIGNED


def test_a_service_is_told_senders_still():
    """A client of root that says what it is after it has asked belongs to another user, with another queue."""
    bus = Bus()
    service, one = bus.connect(uid=0), bus.connect(uid=3)
    service.send(ON, b"CMSG observer/on", b"SUB k")
    service.stall()
    one.send(b"MSG k\x001")
    service.drain()
    assert service.take()[2:] == [notice(one), b"MSG k\x001"]
    service.transport.hang_up()
    bus.settle()
    assert service.protocol not in service.protocol.user.askers


# --- links -------------------------------------------------------------------------------------


def test_a_link_names_the_author():
    """The messages of a link have the name that it gives, from there on, until it gives another or none."""
    bus = Bus()
    reader, link = reader_of(bus), bus.connect(uid=0)
    author = b"7 !/cred/0/0/9/!/cred/1/2/3"
    link.send(
        b"MSG k\x001", b"CMSG link/sender\0" + author, b"MSG k\x002", b"MSG k\x003", b"CMSG link/sender", b"MSG k\x004"
    )
    link.send(b"CMSG link/sender\x000 -", b"MSG k\x005", b"CMSG link/sender\x007 nonsense", b"MSG k\x006")
    assert reader.take() == [
        *[notice(link), b"MSG k\x001", b"CMSG sender\0" + author, b"MSG k\x002", b"MSG k\x003"],
        *[notice(link), b"MSG k\x004", b"CMSG sender\x000 -", b"MSG k\x005"],
        *[notice(link), b"MSG k\x006"],  # and not the program's, which it named last
    ]
    assert bus.registry.counters.unknown_controls == 1


@pytest.mark.parametrize(
    ("uid", "payload"),
    [
        (3, b"7 !/cred/1/2/3"),  # of a client that is no link
        (3, b""),
        (0, b"7 !/cred/1/2"),
        (0, b"x !/cred/1/2/3"),
        (0, b"7 !/cred/1/2/3/more"),
        (0, b"7 "),
        (0, b"0 - "),
        (0, b"-1 !/cred/1/2/3"),
        (0, b"7 !/cred/1/2/3\n"),
        (0, b"1 " + b"!/cred/1/2/3/" * (LONGEST_SENDER // 13) + b"!/cred/1/2/3"),
    ],
)
def test_nobody_names_itself(uid: int, payload: bytes):
    """Of others than links, and malformed, it is an unknown control message; so is a sender that a client sends."""
    bus = Bus()
    reader, liar = reader_of(bus), bus.connect(uid=uid)
    liar.send(b"CMSG link/sender\0" + payload, b"CMSG sender\0" + payload, b"MSG k\0CMSG sender\x001 !/cred/0/0/1")
    assert reader.take() == [notice(liar), b"MSG k\0CMSG sender\x001 !/cred/0/0/1"]
    assert bus.registry.counters.unknown_controls == 2
    assert liar.is_connected


def test_names_below_a_master():
    """A client's name begins with the link's name above, from when that is known, also if it changes."""
    bus = Bus()
    reader, one = reader_of(bus), bus.connect(uid=3)
    one.send(b"MSG k\x001")
    link = link_to(bus)
    one.send(b"MSG k\x002")
    link.send(b"CMSG link/sender\x008 !/cred/5/6/7", b"CMSG link/up\0" + P + b"4", b"MSG k\x003")
    one.send(b"MSG k\x004")
    assert reader.take() == [
        *[notice(one), b"MSG k\x001", notice(one, P + b"/"), b"MSG k\x002"],
        *[b"CMSG sender\x008 !/cred/5/6/7", b"MSG k\x003", notice(one, P + b"4/"), b"MSG k\x004"],
    ]


@pytest.mark.parametrize("is_behind", [False, True])
def test_no_notice_comes_before_the_answer(is_behind: bool):
    """The answer waits for no reply that the link holds back, whether something waits for the socket or not."""
    bus = Bus()
    link_to(bus)
    reader, one = bus.connect(uid=2), bus.connect(uid=3)
    reader.send(b"SUB k")
    if is_behind:
        reader.stall()
        one.send(b"MSG k\x000")
    reader.send(b"CMSG !/cred/whoami", ON)
    reader.drain()
    one.send(b"MSG k\x001")
    assert reader.take() == [b"MSG k\x000"] * is_behind + [ANSWER, notice(one, P + b"/"), b"MSG k\x001"]


# --- permissions -------------------------------------------------------------------------------


def test_without_senders():
    """With --no-sender only root, and the server's user, may ask."""
    bus = Bus(public_senders=False)
    other, root, one = bus.connect(uid=3), bus.connect(uid=0), bus.connect(uid=4)
    other.send(ON, b"SUB k")
    root.send(ON, b"SUB k")
    one.send(b"MSG k\x001")
    assert other.take() == [b"MSG k\x001"]
    assert root.take() == [ANSWER, notice(one), b"MSG k\x001"]
    assert bus.registry.counters.unknown_controls == 1
