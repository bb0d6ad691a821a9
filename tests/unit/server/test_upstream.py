"""What a bus knows of the link to its master: names, secrets, fences and the path, and who may speak of them."""

from __future__ import annotations

import pytest
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from sbus.errors import CloseReason
from sbus.flood.receipts import KEYS, LONGEST_KEY, Receipt
from sbus.protocol.notices import LossReason
from sbus.server.asks.upstream import FORMER, PATIENCE
from sbus.server.bus.mail import LETTER_MEMORY
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, Peer
from tests.unit.server.mailboxes import PUBLISHER, READER, is_clean, kinds, message, readers_of

P = b"!/cred/1/2/3"
WHOAMI = b"CMSG !/cred/whoami"
OWN = b"!/cred/100/1000/7"


def link_to(bus: Bus, prefix: bytes = P, uid: int = 0) -> Peer:
    """A link that has come up."""
    link = bus.connect(uid=uid, pid=99)
    link.send(b"CMSG echo/off", b"CMSG interest/patterns")
    link.send(b"CMSG link/path\0" + b"f" * 32 + b" above", b"CMSG link/up\0" + prefix)
    link.take()
    return link


def whoami(peer: Peer) -> bytes:
    peer.send(WHOAMI)
    (reply,) = peer.take()
    return reply.partition(b"\0")[2]


def number_of(link: Peer, pattern: bytes) -> bytes:
    """The number by which a link has learnt of a pattern."""
    (number,) = [p.split(b" ")[2] for p in link.take() if p.endswith(b" " + pattern)]
    return number


def test_names_are_chained():
    """Below a master a client's name is P, then its own credentials; without one it is these alone."""
    bus = Bus()
    client = bus.connect(pid=7)
    assert whoami(client) == OWN
    link_to(bus)
    assert whoami(client) == P + b"/" + OWN


def test_what_begins_with_p_is_local():
    """A key or a pattern that begins with P means the rest on this bus; the packet stays as it is."""
    bus = Bus()
    link, client, other = link_to(bus), bus.connect(pid=7), bus.connect(pid=8)
    client.send(b"SUB " + P + b"/" + OWN + b"/inbox")
    packet = b"MSG " + P + b"/" + OWN + b"/inbox\0hello"
    for sender in (link, other):
        sender.send(packet)
        assert client.take() == [packet]
    other.send(b"MSG " + OWN + b"/inbox\0plain")
    assert client.take() == [b"MSG " + OWN + b"/inbox\0plain"]
    client.send(b"UNSUB " + OWN + b"/inbox")
    link.send(packet)
    assert client.take() == []
    assert bus.registry.counters.unknown_unsubscriptions == 0


@pytest.mark.parametrize("pattern", [b"!/cred/1/2/4/" + OWN + b"/x", P + b"/!/cred/100/1000/8/x", P + b"/x", P + b"/"])
def test_foreign_first_links_are_violations(pattern):
    """A pattern whose first link is neither P nor one's own, or behind P somebody else's, is a violation."""
    bus = Bus()
    link_to(bus)
    client = bus.connect(pid=7)
    client.send(b"SUB " + pattern)
    assert not client.is_connected


def test_open_keys_are_not_reached_through_p():
    """P in front of an open key does not lead to its subscribers."""
    bus = Bus()
    link = link_to(bus)
    client = bus.connect()
    client.send(b"SUB ", b"SUB x")
    link.send(b"MSG " + P + b"/x\0")
    assert client.take() == []


def test_former_names_keep_their_meaning():
    """After P has changed, its last values mean P on this bus, for as long as the server runs."""
    bus = Bus()
    link, client = link_to(bus), bus.connect(pid=7)
    client.send(b"SUB " + P + b"/" + OWN + b"/x")
    for number in range(FORMER):
        link.send(b"CMSG link/up\0!/cred/1/2/%d" % (10 + number))
    link.send(b"MSG " + P + b"/" + OWN + b"/x\0old")
    assert client.take() == [b"MSG " + P + b"/" + OWN + b"/x\0old"]
    assert whoami(client) == b"!/cred/1/2/%d/" % (9 + FORMER) + OWN
    link.send(b"CMSG link/up\0!/cred/1/2/99")
    link.send(b"MSG " + P + b"/" + OWN + b"/x\0too old")
    assert client.take() == []


def test_secrets_have_one_destination():
    """If secrets go up, a key without P is for the link alone, and dropped while there is none."""
    bus = Bus(secrets_go_up=True)
    client, other = bus.connect(pid=7), bus.connect(pid=8)
    client.send(b"SUB " + OWN + b"/x")
    other.send(b"MSG " + OWN + b"/x\0nowhere")
    assert client.take() == []
    assert bus.registry.upstream.dropped_secrets == 1
    link = link_to(bus)
    up = b"MSG " + OWN + b"/x\0up"
    other.send(up)
    assert (client.take(), link.take()) == ([], [up])
    local = b"MSG " + P + b"/" + OWN + b"/x\0here"
    other.send(local)
    assert (client.take(), link.take()) == ([local], [])
    link.send(up)
    assert (client.take(), link.take()) == ([], [])
    other.send(b"MSG " + P + b"/x\0to the link")
    assert link.take() == []
    link.send(b"CMSG link/down")
    other.send(up)
    assert link.take() == []
    assert bus.registry.upstream.dropped_secrets == 2


def test_a_secret_of_the_program_is_dropped_once():
    """A secret message of the program around the bus counts once if there is no link."""
    bus = Bus(secrets_go_up=True)
    bus.registry.publish(OWN + b"/x", b"")
    bus.settle()
    assert bus.registry.upstream.dropped_secrets == 1


def test_cached_routes_are_forgotten_with_p():
    """A route that was cached before P was known is not used afterwards."""
    bus = Bus()
    odd, client = bus.connect(uid=2, gid=1, pid=3), bus.connect(pid=7)
    odd.send(b"SUB " + P + b"/")
    client.send(b"SUB " + OWN + b"/x")
    packet = b"MSG " + P + b"/" + OWN + b"/x\0"
    client.send(packet)
    assert odd.take() == [packet]
    link_to(bus)
    client.send(packet)
    assert (odd.take(), client.take()) == ([], [packet])


def test_whoami_waits_for_p_if_secrets_go_up():
    """Until P is known a name would be worth nothing, so whoami and what is asked behind it wait; messages do not."""
    bus = Bus(secrets_go_up=True)
    client, other = bus.connect(pid=7), bus.connect()
    client.send(b"SUB a", WHOAMI, b"CMSG probe\0a", WHOAMI)
    other.send(b"MSG a\0")
    assert client.take() == [b"MSG a\0"]
    bus.clock.advance(100)
    assert client.take() == []
    link_to(bus)
    name = WHOAMI + b"\0" + P + b"/" + OWN
    assert client.take() == [name, b"CMSG probe\0001 a", name]


def test_waiting_replies_are_bounded():
    """A client whose replies wait is not read from when they are many."""
    bus = Bus(secrets_go_up=True)
    client, other = bus.connect(pid=7), bus.connect()
    other.send(b"SUB a")
    client.send(*[WHOAMI] * 70, b"MSG a\0")
    assert other.take() == []
    assert client.protocol.is_paused
    link_to(bus)
    assert len(client.take()) == 70
    assert other.take() == [b"MSG a\0"]


def test_replies_that_wait_are_none_of_a_client_that_has_stopped_reading():
    """A client that shuts down reading while many of its replies wait is read on, and leaves."""
    bus = Bus(secrets_go_up=True)
    client, other = bus.connect(uid=7), bus.connect()
    other.send(b"SUB a")
    client.send(*[WHOAMI] * 70, b"MSG a\0", *[WHOAMI] * 70, b"MSG a\0")
    client.transport.breakDown()
    bus.settle()
    assert other.take() == [b"MSG a\0"] * 2
    client.transport.end()
    bus.settle()
    assert list(bus.registry.clients.values()) == [other.protocol]


def test_whoami_is_a_fence_through_the_tree():
    """The reply waits for the link's word about the client's own subscriptions; other clients' replies do not wait."""
    bus = Bus()
    link, client, other = link_to(bus), bus.connect(), bus.connect()
    client.send(b"SUB a/b", WHOAMI)
    assert client.take() == []
    other.send(WHOAMI)
    assert len(other.take()) == 1
    number = number_of(link, b"a/b")
    link.send(b"CMSG link/fence\0%d" % (int(number) - 1))
    assert client.take() == []
    link.send(b"CMSG link/fence\0" + number)
    assert len(client.take()) == 1
    other.send(b"SUB a/b", WHOAMI)
    assert len(other.take()) == 1


def test_fence_ends_after_a_second_or_with_the_link():
    """A master that does not answer delays a reply by a second; a link that goes releases it."""
    bus = Bus()
    link, client = link_to(bus), bus.connect()
    client.send(b"SUB a", WHOAMI)
    bus.clock.advance(PATIENCE - 0.01)
    assert client.take() == []
    bus.clock.advance(0.02)
    assert len(client.take()) == 1
    client.send(b"SUB b", WHOAMI)
    assert client.take() == []
    link.send(b"CMSG link/down")
    assert len(client.take()) == 1
    link.send(b"CMSG link/up\0" + P)
    client.send(b"SUB c", WHOAMI)
    link.transport.hang_up()
    bus.settle()
    assert len(client.take()) == 1


def test_a_client_that_half_closes_waits_for_no_fence():
    """A client that shuts down writing gets the replies that wait for the link, and then the end."""
    bus = Bus()
    link = link_to(bus)
    client = bus.connect(pid=7)
    client.send(b"SUB a", WHOAMI, b"CMSG probe\0a")
    assert client.take() == []
    client.transport.end()
    bus.settle()
    assert client.take() == [WHOAMI + b"\0" + P + b"/" + OWN, b"CMSG probe\0001 a"]
    assert not client.is_connected
    assert link.is_connected


def test_subscription_taken_back_needs_no_fence():
    """A pattern that the client has unsubscribed from holds no reply back."""
    bus = Bus()
    link_to(bus)
    client = bus.connect()
    client.send(b"SUB a", b"UNSUB a", WHOAMI)
    assert len(client.take()) == 1
    assert not bus.registry.upstream._fresh


@pytest.mark.parametrize(
    "packet",
    [
        b"CMSG link/up\0" + P,
        b"CMSG link/down",
        b"CMSG link/fence\0" + b"9" * 5,
        b"CMSG link/lost\0001 2",
        b"CMSG link/lost",
        b"CMSG link/gap\0001 9 k",
    ],
)
def test_ordinary_clients_are_no_links(packet):
    """From other users than root and the server's, and from a client that is not the link, they are unknown."""
    bus = Bus()
    client = bus.connect(uid=12345)
    client.send(packet)
    assert bus.registry.counters.unknown_controls == 1
    assert bus.registry.upstream.link is None
    link_to(bus)
    client.send(packet)
    assert bus.registry.counters.unknown_controls == 2
    assert client.is_connected
    assert whoami(client).startswith(P)


def test_there_is_one_link():
    """A second link is disconnected; when the first has gone, another one may come."""
    bus = Bus()
    link = link_to(bus)
    second = bus.connect(uid=0)
    second.send(b"CMSG bye/on", b"CMSG link/up\0!/cred/1/1/1")
    assert not second.is_connected
    assert second.take()[-1] == b"CMSG bye\0second-link " + CloseReason.SECOND_LINK.value.encode()
    assert CloseReason.NOT_ALLOWED.value not in CloseReason.SECOND_LINK.value
    assert whoami(bus.connect()).startswith(P)
    link.transport.hang_up()
    bus.settle()
    assert not bus.registry.upstream.is_up
    link_to(bus, b"!/cred/1/1/1")
    assert whoami(bus.connect()).startswith(b"!/cred/1/1/1/")


def test_losses_of_all_links_are_counted():
    """A link reports its own losses; the bus adds up those of one link after the other."""
    bus = Bus()
    link = link_to(bus)
    link.send(b"CMSG link/lost\0003 4", b"CMSG link/lost\0005 4")
    assert bus.registry.upstream.lost == (5, 4)
    link.transport.hang_up()
    bus.settle()
    link_to(bus).send(b"CMSG link/lost\0001 0")
    assert bus.registry.upstream.lost == (6, 4)
    link_to(bus).send(b"CMSG link/lost\0nonsense")


def test_what_a_link_has_lost_is_told_after_a_choice_that_waits():
    """A client whose choice of receipts waits in the mail gets a receipt for messages that the link loses later."""
    bus = Bus()
    link, publisher = link_to(bus), bus.connect(uid=PUBLISHER)
    told, *_ = readers_of(bus, b"SUB k")
    publisher.transport.deliver(message(1))
    told.transport.deliver(b"CMSG receipts/on")
    link.transport.deliver(b"CMSG link/gap\0003 30 k")
    bus.settle()
    assert told.take() == [message(1), b"CMSG receipts/on\0", b"CMSG lost\0003 30 3 share"]
    assert is_clean(bus)


def test_what_a_link_has_lost_is_charged_while_it_waits_in_the_mail():
    """Losses that a link reports while mail waits take the memory of their receivers' user."""
    bus = Bus()
    link, publisher = link_to(bus), bus.connect(uid=PUBLISHER)
    readers = readers_of(bus, b"CMSG receipts/on", b"SUB k")
    user = bus.registry.users[READER]
    before = user.memory
    publisher.transport.deliver(message(1))
    with_mail = user.memory
    link.transport.deliver(*[b"CMSG link/gap\0003 30 k"] * 10)
    assert kinds(bus).count("loss") == 10 * len(readers)
    assert user.memory - with_mail == 10 * len(readers) * LETTER_MEMORY
    bus.settle()
    assert is_clean(bus)
    assert user.memory == before


def test_what_a_link_has_lost_is_nothing_to_a_client_that_has_left():
    """A client that has left while mail waits for it is in the routes until then: a loss brings it no letter."""
    bus = Bus()
    link, publisher = link_to(bus), bus.connect(uid=PUBLISHER)
    gone, *others = readers_of(bus, b"CMSG receipts/on", b"SUB k")
    publisher.transport.deliver(message(1))
    gone.protocol.connectionLost(Failure(ConnectionDone()))
    link.transport.deliver(b"CMSG link/gap\0003 30 k")
    assert kinds(bus) == ["Mail", "end", *["loss"] * len(others)]
    bus.settle()
    assert is_clean(bus)


def test_what_a_link_has_lost_is_told_to_the_receivers_of_the_key():
    """They get a receipt at its place, if they have asked for receipts; the bus has dropped nothing itself."""
    bus = Bus()
    link = link_to(bus)
    link.send(b"SUB a/")
    told, other, silent = (bus.connect() for _ in range(3))
    for client, packets in (
        (told, (b"CMSG receipts/on", b"SUB a/*")),
        (other, (b"CMSG receipts/on", b"SUB b")),
        (silent, (b"SUB a/x",)),
    ):
        client.send(*packets)
        client.take()
    link.send(b"MSG a/x\0001", b"CMSG link/gap\0003 30 a/x", b"CMSG link/gap\0002 9 a/y z", b"MSG a/x\0002")
    assert [packet for packet in told.take() if packet.startswith(b"CMSG")] == [
        b"CMSG lost\0003 30 3 share",
        b"CMSG lost\0002 9 5 share",
    ]
    assert other.take() == []
    assert silent.take() == [b"MSG a/x\0001", b"MSG a/x\0002"]
    assert bus.registry.counters.dropped == 0
    assert told.protocol.lost == 0
    for nonsense in (b"", b"1 2", b"x 2 a/x", b"1 2 ", b"0 0 a/x", b"1 2 !/x"):
        link.send(b"CMSG link/gap\0" + nonsense)
    assert link.is_connected
    assert told.take() == []


def test_receipt_for_a_loss_of_a_link_waits_for_its_place():
    """A receiver that does not read gets it behind what waits."""
    bus = Bus()
    link, client = link_to(bus), bus.connect()
    client.send(b"CMSG receipts/on", b"SUB a")
    client.take()
    client.stall()
    link.send(*[b"MSG a\0%d" % number for number in range(70)], b"CMSG link/gap\0003 30 a", b"MSG a\0end")
    client.drain()
    packets = client.take()
    assert packets[70:] == [b"CMSG lost\0003 30 3 share", b"MSG a\0end"]


def test_queue_of_a_link_is_shared():
    """After ``link/lost`` without a payload, receipts to a link name the keys of what a user has lost in its queue."""
    bus = Bus(limits=Limits(queue_messages=8))
    link, flood, quiet = bus.connect(uid=0), bus.connect(uid=1001), bus.connect(uid=1002)
    link.send(b"CMSG sender/on", b"CMSG receipts/on", b"CMSG link/lost", b"SUB a/")
    link.take()
    link.stall()
    flood.send(b"MSG a/0\0")  # what the socket leaves makes the queue one that waits
    for number in range(9):
        flood.send(b"MSG a/%d\0" % (number % 2))
    quiet.send(b"MSG a/q\0")
    link.drain()
    packets = link.take()
    (receipt,) = [packet for packet in packets if packet.startswith(b"CMSG lost")]
    head, *keys = receipt.split(b"\0")[1:]
    assert head.split(b" ")[0] == b"6"
    assert sorted(keys) == [b"3 24 a/0", b"3 24 a/1"]
    assert [packet for packet in packets if packet.startswith(b"MSG")].count(b"MSG a/q\0") == 1


def test_receipt_names_a_bounded_number_of_keys():
    """Past that, and for long keys, the number alone is told."""
    receipt = Receipt(0, 0, LossReason.SHARE)
    receipt.note_keys([b"MSG " + b"k" * (LONGEST_KEY + 1) + b"\0", *(b"MSG %d\0" % n for n in range(KEYS + 9))])
    assert list(receipt.keys) == [b"%d" % number for number in range(KEYS)]


def test_path_is_told_and_told_again():
    """Anybody learns the buses up to the root, a line for each, and learns of every change."""
    bus = Bus(name="leaf")
    own = f"{bus.registry.upstream.identity} leaf".encode()
    client = bus.connect(uid=12345)
    client.send(b"CMSG link/path\0forged")
    assert client.take() == [b"CMSG link/path\0" + own]
    link = link_to(bus)
    assert client.take() == [b"CMSG link/path\0" + own + b"\n" + b"f" * 32 + b" above"]
    link.transport.hang_up()
    bus.settle()
    assert client.take() == [b"CMSG link/path\0" + own]


def test_one_timer_reminds_of_a_path():
    """However often the path changes, a client that does not read costs one look a second; it gets the last path."""
    bus = Bus(name="leaf")
    client, link = bus.connect(uid=12345), link_to(bus)
    client.stall()
    client.send(b"CMSG link/path", *[WHOAMI] * 70)
    before = len(bus.clock.getDelayedCalls())
    for change in range(20):
        link.send(b"CMSG link/path\0%032x above" % change)
    assert len(bus.clock.getDelayedCalls()) == before + 1
    client.drain()
    bus.clock.advance(1)
    bus.settle()
    assert client.take()[-1].endswith(b"\n%032x above" % 19)
    assert len(bus.clock.getDelayedCalls()) == before


def test_chain_tells_a_new_name():
    """After chain/on a client is told its new name when P changes, and nobody else is told anything."""
    bus = Bus()
    client, silent = bus.connect(pid=7), bus.connect()
    client.send(b"CMSG chain/on")
    assert client.take() == [b"CMSG chain/on\0"]
    link = link_to(bus)
    assert client.take() == [b"CMSG chain\0" + P + b"/" + OWN]
    link.send(b"CMSG link/up\0" + P)
    assert client.take() == []
    client.send(b"CMSG chain/off")
    link.send(b"CMSG link/up\0!/cred/9/9/9")
    assert client.take() == [b"CMSG chain/off\0"]
    assert silent.take() == []


def test_link_without_a_name_leaves_secrets_here():
    """A link whose credentials prove nothing at the master reports no P: names are plain, and secrets stay here."""
    bus = Bus(secrets_go_up=True)
    client = bus.connect(pid=7)
    client.send(b"SUB " + OWN + b"/x", WHOAMI)
    link = link_to(bus, b"")
    assert client.take() == [WHOAMI + b"\0" + OWN]
    client.send(b"MSG " + OWN + b"/x\0")
    assert (client.take(), link.take()) == ([b"MSG " + OWN + b"/x\0"], [])


def test_a_bridge_has_no_name_and_no_fences():
    """A bridge that is up changes neither names nor secrets, and no reply waits for it."""
    bus = Bus()
    bridge, client = bus.connect(uid=0), bus.connect(pid=7)
    bridge.send(b"CMSG interest/patterns", b"CMSG link/path\0", b"CMSG link/up")
    upstream = bus.registry.upstream
    assert (upstream.is_up, upstream.is_chained) == (True, False)
    client.send(b"SUB a", WHOAMI)
    assert client.take() == [WHOAMI + b"\0" + OWN]
    bridge.send(b"CMSG link/down")
    assert not upstream.is_up
    bridge.send(b"CMSG link/up")
    bridge.transport.hang_up()
    bus.settle()
    assert not upstream.is_up
    link_to(bus)
    client.send(b"SUB b", WHOAMI)
    assert client.take() == []
    bus.clock.advance(PATIENCE)
    assert client.take() == [WHOAMI + b"\0" + P + b"/" + OWN]
