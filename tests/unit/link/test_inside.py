"""A link in its bus's process: joined in memory to a bus, here at both ends, with the rules of any client."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from zope.interface import implementer

from sbus.link.core import CLOSELY, Side
from sbus.link.service import CLOSE_LOOK, HIGH_WATER, LinkService
from sbus.protocol.bundles import pack
from sbus.protocol.keys import PeerCredentials
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.seqpacket.interfaces import IPeerGate
from sbus.seqpacket.pair import CAPACITY
from sbus.seqpacket.pair_endpoint import PairEndpoint
from sbus.server.core.limits import Limits
from sbus.server.core.listeners import INSIDE
from sbus.server.core.users import LINK
from sbus.server.run.link_inside import BusWithLink
from sbus.server.run.service import BusFactory, BusService
from tests.support.buses import Bus, Peer
from tests.support.examples import examples
from tests.support.reactors import HandTurnedReactor

OWN = PeerCredentials(77, 0, 1)
WHOAMI = b"CMSG !/cred/whoami"
BLOCK = bytes(16_000)
"""A payload that fills inboxes and queues with few messages."""


@implementer(IPeerGate)
class Closed(Factory):
    """A factory that admits no connection."""

    noisy = False

    def admits(self, peer: PeerCredentials) -> bool:
        return False


class Linked:
    """Two buses and a link between them, all in one process and without sockets."""

    def __init__(self, limits: Limits | None = None, **options: Any) -> None:
        self.clock = HandTurnedReactor()
        limits = limits or Limits(queue_messages=200, block_timeout=30.0)
        secrets = options.get("secrets", False)
        self.below, self.above = (
            Bus(clock=self.clock, name=name, limits=limits, secrets_go_up=secrets and name == "leaf")
            for name in ("leaf", "root")
        )
        ends = [
            PairEndpoint(self.clock, BusFactory(bus.registry, INSIDE), lambda: OWN) for bus in (self.below, self.above)
        ]
        self.link = LinkService(self.clock, ends[0], ends[1], [b""], [b""], label="link: ", **options)
        ends[0].held, ends[0].held_limit = self.link.held, 2 * HIGH_WATER
        self.link.startService()
        self.settle()

    def settle(self, seconds: float = 0.0) -> None:
        for _ in range(40):
            self.clock.advance(seconds / 40)

    def client(self, bus: Bus, *patterns: bytes, **ids: Any) -> Peer:
        """A client whose subscriptions are in force on both sides."""
        client = bus.connect(**ids)
        client.send(*(b"SUB " + pattern for pattern in patterns))
        self.settle()
        client.take()
        return client

    def of_link(self, bus: Bus) -> Any:
        """The link as a client of a bus."""
        [client] = [each for each in bus.registry.clients.values() if each.listener is INSIDE]
        return client

    @property
    def lost(self) -> int:
        """The messages that either bus, or the link, has dropped on their way across."""
        return sum(self.of_link(bus).lost for bus in (self.below, self.above))


def name_of(client: Peer) -> bytes:
    client.send(WHOAMI)
    return client.take()[-1].partition(b"\0")[2]


def test_messages_cross_and_the_name_is_a_chain():
    """Messages go up and down once, not back, and a client's name begins with that of the process of its bus."""
    linked = Linked()
    low, high = linked.client(linked.below, b"x", pid=5), linked.client(linked.above, b"x")
    low.send(b"MSG x\0up")
    high.send(b"MSG x\0down")
    linked.settle()
    assert low.take() == high.take() == [b"MSG x\0up", b"MSG x\0down"]
    assert name_of(low) == b"!/cred/1/0/77/!/cred/100/1000/5"
    assert linked.below.registry.upstream.is_up


def test_secrets_go_up_and_come_down():
    """With secrets, a client's whole name is an address above, and an answer to a name above goes up."""
    linked = Linked(secrets=True)
    low, high = linked.client(linked.below, pid=5), linked.client(linked.above, b"!/cred////in", pid=6)
    name = name_of(low)
    low.send(b"SUB " + name + b"/in")
    high.send(b"MSG " + name + b"/in\0hello")
    linked.settle()
    assert low.take() == [b"MSG " + name + b"/in\0hello"]
    low.send(b"MSG !/cred/100/1000/6/in\0yes")
    linked.settle()
    assert high.take()[-1:] == [b"MSG !/cred/100/1000/6/in\0yes"]


def test_it_is_a_sidecar_and_a_user_of_its_own():
    """The link counts neither as a client nor as its UID, and is known by its listener; other clients count."""
    linked = Linked(Limits(max_clients=1))
    link = linked.of_link(linked.below)
    assert link.user.uid == LINK
    empty = linked.below.registry.when_empty()
    client = linked.below.connect(pid=OWN.pid, uid=0)
    assert client.is_connected
    assert client.protocol.user.uid == 0
    assert not linked.below.connect(pid=6).is_connected
    client.transport.hang_up()
    linked.settle()
    assert empty.called


def test_slow_master_harms_nobody_below():
    """A master that reads nothing costs the bus below no message of another client; each loss is counted, none doubled.

    The link's queue and inbox are bounded; then the bus queues for the link, and drops, as for any client.
    """
    linked = Linked()
    near, far = linked.client(linked.below, b"x"), linked.client(linked.above, b"x")
    publisher = linked.below.connect()
    master = linked.of_link(linked.above)
    master.pause_publishing()
    sent = [b"MSG x\0%d " % number + BLOCK for number in range(1500)]
    for packet in sent:
        publisher.send(packet)
    assert near.take() == sent
    linked.settle()
    link = linked.of_link(linked.below)
    assert link.lost > 0
    assert link.queue.messages == 200
    assert HIGH_WATER < linked.link.held() < HIGH_WATER + 2 * CAPACITY
    link.sample_kernel()
    assert link.user.memory > HIGH_WATER
    master.resume_publishing()
    linked.settle()
    got = far.take()
    assert len(got) + link.lost == len(sent)
    assert Counter(got).most_common(1)[0][1] == 1
    assert got == [packet for packet in sent if packet in set(got)]
    linked.settle(2.0)
    assert linked.below.registry.upstream.lost == (link.lost, 0)
    assert linked.link.held() == 0


def test_slow_bus_below_stops_the_reading_from_the_master():
    """While the link has no turn below, the master queues and drops for it, and the link holds a bounded part."""
    linked = Linked()
    low = linked.client(linked.below, b"x")
    publisher = linked.client(linked.above)
    link = linked.of_link(linked.below)
    link.pause_publishing()
    sent = [b"MSG x\0%d " % number + BLOCK for number in range(1000)]
    for packet in sent:
        publisher.send(packet)
    linked.settle()
    assert low.take() == []
    above = linked.of_link(linked.above)
    assert above.lost > 0
    assert linked.link.held() < HIGH_WATER + 2 * CAPACITY
    link.resume_publishing()
    linked.settle()
    got = low.take()
    assert len(got) + above.lost == len(sent)
    assert got == [packet for packet in sent if packet in set(got)]


def test_batches_for_the_link_are_not_handled_inside_the_bus():
    """A batch that arrives for the link while the bus delivers is handled after that, and the other way round."""
    states: list[tuple[bool, list[Any]]] = []
    linked = Linked()
    delivery = linked.below.registry.delivery
    linked.link.charge = lambda *_: states.append((delivery._flushing, delivery.touched))
    low, high = linked.client(linked.below, b"x"), linked.client(linked.above, b"x")
    states.clear()
    low.send(*[b"MSG x\0%d" % number for number in range(100)])
    high.send(*[b"MSG x\0%d" % number for number in range(100)])
    linked.settle()
    assert states
    assert all(state == (False, []) for state in states)
    assert len(low.take()) == len(high.take()) == 200


def test_what_comes_down_is_paid_for():
    """Messages from above are work of the link's user, which waits for its turn as any other if it has none left."""
    linked = Linked()
    low, high = linked.client(linked.below, b"x"), linked.client(linked.above)
    link = linked.of_link(linked.below)
    link.user.work_left = -10_000
    before = linked.below.registry.turns.waited
    high.send(b"MSG x\0")
    assert linked.below.registry.turns.waited > before
    linked.settle()
    assert low.take() == [b"MSG x\0"]


def test_carrying_is_paid_for():
    """The link reports each batch; one that goes up costs its user copies, and one that comes down costs it work."""
    batches: Counter[Side] = Counter()
    linked = Linked(charge=lambda side, _, count: batches.update({side: count}))
    low, high = linked.client(linked.below), linked.client(linked.above, b"x")
    linked.client(linked.below, b"y")
    batches.clear()
    low.send(*[b"MSG x\0"] * 30)
    high.send(*[b"MSG y\0"] * 20)
    linked.settle()
    assert batches == {Side.BELOW: 30 + CLOSE_LOOK, Side.ABOVE: 20 + CLOSE_LOOK}  # each key is new
    bus = BusService(SeqpacketServerEndpoint(linked.clock, "/nowhere"), clock=linked.clock)
    owner = BusWithLink(bus, bus, "/nowhere/else", reactor=linked.clock)
    owner._charge(Side.BELOW, 1, 80)  # there is no link yet
    link = linked.of_link(linked.below)
    bus.registry.upstream.link = link
    link.user.work_left = link.user.copies.work_left = 100
    owner._charge(Side.BELOW, 1, 80)
    assert (link.user.work_left, link.user.copies.work_left) == (100, 89)
    owner._charge(Side.ABOVE, 1, 160)
    assert (link.user.work_left, link.user.copies.work_left) == (79, 89)


def test_lone_messages_are_paid_for_in_sums():
    """A message with a known key crosses without delay if it comes alone, and the link pays for some at a time."""
    paid: list[tuple[Side, int, int]] = []
    linked = Linked(charge=lambda *args: paid.append(args))
    low, high = linked.client(linked.below, b"y"), linked.client(linked.above, b"x")
    carried = linked.link.core.carried
    paid.clear()
    for way, (publisher, reader, packet) in zip(
        (Side.BELOW, Side.ABOVE), ((low, high, b"MSG x\0"), (high, low, b"MSG y\0")), strict=True
    ):
        publisher.send(packet)
        linked.settle()
        assert paid == [(way, 1, 1 + CLOSE_LOOK)]
        paid.clear()
        before = carried[way]
        for number in range(64):
            publisher.send(packet)
            if way is Side.BELOW:
                assert carried[way] == before + number + 1  # in the call of its bus
            linked.settle()
        assert len(reader.take()) == 65
        assert carried[way] == before + 64
        assert paid == [(way, 32, 32)] * 2
        paid.clear()


def test_patterns_weigh_more_with_the_link_inside():
    """What the link knows of a pattern is charged with it, and given back with it; the link never sees a secret one."""
    clock: Any = Clock()
    bus = BusService(SeqpacketServerEndpoint(clock, "/nowhere"), clock=clock)
    alone = bus.registry.pattern_weight
    BusWithLink(bus, bus, "/nowhere/else", reactor=clock)
    charged = []
    for weight in (alone, bus.registry.pattern_weight):
        other = Bus()
        other.registry.pattern_weight = weight
        client = other.connect()
        for pattern in (b"a/b", b"!/cred////k"):
            before = client.protocol.user.memory
            client.send(b"SUB " + pattern)
            charged.append(client.protocol.user.memory - before)
            client.send(b"UNSUB " + pattern)
            assert client.protocol.user.memory == before
    assert charged[2:] == [3 * charged[0], charged[1]]
    assert charged[1] > 0


@pytest.mark.parametrize("way", ["up", "down"])
def test_messages_of_many_keys_are_taken_in_parts(way, monkeypatch: pytest.MonkeyPatch):
    """However many new keys a batch has, the link looks at a few packets at a time, and none is lost or overtaken."""
    batches: Counter[Side] = Counter()
    linked = Linked(Limits(queue_messages=10_000), charge=lambda side, _, count: batches.update({side: count}))
    one, other = (linked.below, linked.above) if way == "up" else (linked.above, linked.below)
    publisher, reader = linked.client(one), linked.client(other, b"x/")
    looks = []
    core = linked.link.core
    received = core.received

    def watched(*args: Any) -> bool:
        result = received(*args)
        looks.append(core.closely)
        return result

    monkeypatch.setattr(core, "received", watched)
    batches.clear()
    sent = [b"MSG x/%d\0" % number for number in range(2_000)]
    publisher.send(*sent)
    linked.settle()
    linked.settle()
    assert reader.take() == sent
    assert max(looks) == CLOSELY
    assert sum(looks) == 2_000
    assert sum(batches.values()) == 2_000 * (1 + CLOSE_LOOK)


def test_link_that_the_bus_disconnects_comes_back():
    """A link that is shed, or disconnected by an operator, joins again and carries messages."""
    linked = Linked()
    low, high = linked.client(linked.below, b"x"), linked.client(linked.above, b"x")
    for bus in (linked.below, linked.above):
        linked.of_link(bus).transport.abortConnection()
        linked.settle(30.0)
        low.send(b"MSG x\0")
        linked.settle()
        assert low.take()[-1:] == high.take()[-1:] == [b"MSG x\0"]


def test_bundle_behind_the_answer_that_agrees_to_it():
    """A bundle that is read together with that answer is taken whole: no packet of it is left to the transport.

    What was left came again after the next pause, or kept the connection from ending with its peer.
    """
    linked = Linked()
    high = linked.client(linked.above, b"x")
    connection = linked.link.connections[Side.BELOW]
    assert connection is not None
    packets = [b"CMSG bundle/on\0" + b"65536", *pack([b"MSG x\0%d" % n for n in range(5)], 65_536, 64)[0]]
    assert len(packets) == 2
    assert connection.packetsReceived(packets) == len(packets) == 6
    linked.settle()
    assert len(high.take()) == 5


def test_a_bus_that_admits_no_connection():
    """The log has one line with the reason, and the link tries again."""
    clock = HandTurnedReactor()
    link = LinkService(clock, PairEndpoint(clock, Closed(), lambda: OWN), PairEndpoint(clock, Closed(), lambda: OWN))
    with capturedLogs() as events:
        link.startService()
        clock.advance(10)
    assert [formatEvent(event) for event in events] == [
        f"no link: {bus} cannot be connected to: it admits no connection now: its log says why; trying again"
        for bus in ("the bus below", "the master")
    ]
    assert clock.getDelayedCalls()
    link.stopService()


def test_stop_passes_on_what_is_queued():
    """A link that stops brings up what was published before, within its time, and its Deferred fires."""
    linked = Linked()
    high, low = linked.client(linked.above, b"x"), linked.below.connect()
    master = linked.of_link(linked.above)
    master.pause_publishing()
    sent = [b"MSG x\0%d " % number + BLOCK for number in range(100)]
    low.send(*sent)
    linked.below.registry.disconnect_all(sidecars=False)
    stopped = linked.link.stopService()
    linked.settle()
    assert not stopped.called
    master.resume_publishing()
    linked.settle()
    assert stopped.called
    assert high.take() == sent
    assert [call for call in linked.clock.getDelayedCalls() if call.func == linked.link._abort] == []


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["up", "down", "pause above", "go on above", "pause below", "go on below", "settle"]),
        st.integers(1, 120),
    ),
    max_size=30,
)


@settings(max_examples=examples(40), deadline=None)
@given(_STEPS)
def test_every_message_arrives_once_or_is_counted(steps):
    """Whatever stands still for a while: each message arrives once, in order, or is counted as lost."""
    linked = Linked(Limits(queue_messages=50, block_timeout=1e6))
    low, high = linked.client(linked.below, b"down"), linked.client(linked.above, b"up")
    one, two = linked.below.connect(), linked.above.connect()
    links = {"below": linked.of_link(linked.below), "above": linked.of_link(linked.above)}
    sent: dict[str, list[bytes]] = {"up": [], "down": []}
    for what, count in [*steps, ("go on below", 1), ("go on above", 1), ("settle", 1)]:
        if what in sent:
            packets = [b"MSG %b\0%d " % (what.encode(), len(sent[what]) + n) + BLOCK for n in range(count)]
            sent[what] += packets
            (one if what == "up" else two).send(*packets)
        elif what == "settle":
            linked.settle()
        else:
            word, _, where = what.rpartition(" ")
            (links[where].pause_publishing if word == "pause" else links[where].resume_publishing)()
    linked.settle()
    for way, reader, link in (("up", high, links["below"]), ("down", low, links["above"])):
        numbers = [int(packet.partition(b"\0")[2].split(b" ")[0]) for packet in reader.take()]
        assert numbers == sorted(set(numbers))
        assert len(numbers) + link.lost == len(sent[way])
