"""Services: programs that connect buses, recorders and monitors of root are one user of their own."""

from __future__ import annotations

import os

import pytest

from sbus.fair.lines import QUANTUM
from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.memory import CLIENT_MEMORY
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import Listener
from sbus.server.core.users import SERVICES
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus, HandTurnedBus

OTHER = 7
WORDS = (b"CMSG observer/on", b"CMSG interest/patterns")


@pytest.mark.parametrize("word", WORDS)
def test_a_service_of_root_has_limits(word):
    """A client of root or of the server's user that says what it is leaves that user, with all that it holds."""
    bus = Bus(limits=Limits(max_memory=64 << 20))
    service, other = bus.connect(uid=0, pid=5), bus.connect(uid=0, pid=6)
    users = bus.registry.users
    buffers = users[0].buffers
    service.send(b"CMSG echo/off", b"CMSG bundle/on", word, b"SUB k", b"CMSG !/cred/whoami")
    user = service.protocol.user
    assert user is users[SERVICES]
    assert (user.connections, user.patterns) == (1, 1)
    assert user.memory >= CLIENT_MEMORY
    assert (users[0].connections, users[0].memory, users[0].buffers) == (1, CLIENT_MEMORY, buffers // 2)
    assert user.buffers == buffers // 2
    assert not user.may_hold(16 << 20)
    assert users[0].may_hold(1 << 40)
    assert service.take()[-1] == b"CMSG !/cred/whoami\0!/cred/100/0/5"
    assert not service.protocol.settings.echo
    other.send(b"MSG k\0")
    assert service.take() == [b"MSG k\0"]
    service.transport.end()
    bus.settle()
    assert (user.connections, user.patterns, user.memory, user.buffers) == (0, 0, 0, 0)
    assert [each.uid for each in users.all()] == [0]


@pytest.mark.parametrize("uid", [os.geteuid(), 7])
def test_who_is_a_service(uid):
    """The server's user has services, too; a client of any other user stays with its user."""
    bus = Bus()
    client = bus.connect(uid=uid)
    client.send(b"CMSG observer/on")
    assert client.protocol.user.uid == (SERVICES if uid == os.geteuid() else uid)


def test_a_service_says_so_first():
    """A client that has subscribed, or watches a key, stays with its user: what it holds was charged there."""
    bus = Bus()
    for first in (b"SUB k", b"CMSG interest/on\0k"):
        client = bus.connect(uid=0)
        client.send(first, b"CMSG observer/on")
        assert client.protocol.user.uid == 0
        assert client.protocol.settings.observer
        client.send(b"UNSUB k", b"CMSG interest/off\0k", b"CMSG observer/on")
        assert client.protocol.user.uid == SERVICES


def test_watches_that_are_still_being_dropped():
    """A client whose watches have ended, but are still charged, stays with its user until they are gone."""
    bus = HandTurnedBus()
    client, other = bus.connect(uid=0), bus.connect(uid=OTHER)
    for first in range(0, 1000, 100):
        client.send(*(b"CMSG interest/on\0%d" % n for n in range(first, first + 100)))
        bus.finish()
    bus.use_up(client, -100)
    client.protocol.user.lines._first = 2  # readers come first in the next turn
    client.send(b"CMSG interest/off", b"CMSG observer/on")
    bus.finish()
    assert client.protocol.settings.observer
    user = client.protocol.user
    assert (user.uid, user.patterns, user.memory) == (0, 0, CLIENT_MEMORY)
    client.send(b"CMSG observer/on")
    assert client.protocol.user.uid == SERVICES
    assert other.is_connected


def test_a_service_with_replies_to_read():
    """A client whose socket is full stays with its user, and gets all of its replies."""
    bus = Bus()
    client = bus.connect(uid=0)
    client.stall()
    client.send(b"CMSG !/cred/whoami", b"CMSG observer/on")
    assert client.protocol.user.uid == 0
    client.drain()
    assert client.take() == [b"CMSG !/cred/whoami\0!/cred/100/0/5000", b"CMSG observer/on\0"]


def test_services_may_hold_any_patterns():
    """Services subscribe on behalf of others: no limit of a user's patterns, or of their steps, applies to them."""
    bus = Bus(limits=Limits(user_patterns=4, max_match_steps=16))
    service = bus.connect(uid=0)
    service.send(
        b"CMSG interest/patterns", *(b"SUB k%d" % n for n in range(9)), *(b"SUB */*/*/*/%d" % n for n in range(99))
    )
    assert service.is_connected
    assert service.protocol.user.uid == SERVICES
    assert service.protocol.user.patterns == 108


def test_services_share_their_connections():
    """A service beyond the clients of one user is disconnected, with the reason."""
    bus = Bus(limits=Limits(user_clients=2))
    services = [bus.connect(uid=0) for _ in range(3)]
    for each in services:
        each.send(b"CMSG bye/on", b"CMSG observer/on")
    assert [each.is_connected for each in services] == [True, True, False]
    assert services[2].take()[-1].startswith(b"CMSG bye\0too-many-user-clients ")
    assert len(bus.registry.clients) == 2


def test_places_at_a_socket():
    """The places of a user at a socket follow its client."""
    bus = Bus()
    transport = FakePacketTransport(PeerCredentials(5, 0, 0), clock=bus.clock)
    transport.connect(BusProtocol(bus.registry, Listener("door", max_clients=8)))
    transport.deliver(b"CMSG observer/on")
    counted = bus.registry.members._of_user_at
    assert counted == {("door", SERVICES): 1}
    transport.end()
    bus.settle()
    assert not counted


@pytest.mark.parametrize("is_in_turn", [True, False])
def test_the_time_in_which_a_client_becomes_a_service_is_paid(is_in_turn):
    """No time is lost with the user that the client leaves and that is forgotten: the debt stays with one of them."""
    tick = QUANTUM // 5
    bus = HandTurnedBus(tick)
    bus.use_up(bus.connect(uid=OTHER), 0)
    service = bus.connect(uid=0)
    user = service.protocol.user
    user.lines.deficit = 1
    if is_in_turn:
        bus.registry.scheduler.wait(user.lines, service.protocol)
    service.send(WORDS[0], *[b"CMSG !/cred/whoami"] * 5)
    bus.turn()
    bus.registry.scheduler.may_pass()
    assert service.protocol.user is bus.registry.users[SERVICES]
    assert min(user.lines.deficit, service.protocol.user.lines.deficit) < 0
    if user.lines.deficit < 0:
        assert bus.registry.users[0] is user
    bus.finish()
    assert [each.uid for each in bus.registry.users.all()] == [OTHER, SERVICES]
