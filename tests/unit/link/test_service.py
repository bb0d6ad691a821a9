"""The service of a link: real sockets to two buses, whose other clients are fakes, on a reactor turned by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbus.link.core import CLOSELY, Side
from sbus.link.service import HIGH_WATER, LinkService
from sbus.protocol.bundles import pack
from sbus.seqpacket.endpoints import SeqpacketServerEndpoint
from sbus.server.core.limits import Limits
from sbus.server.core.users import LINK
from sbus.server.run.service import BusFactory
from tests.support.buses import Bus, Peer
from tests.support.examples import examples
from tests.support.reactors import HandTurnedReactor

BLOCK = bytes(16_000)
"""A payload that fills sockets and queues with few messages."""
BATCH_BYTES = 2 << 20
"""More than the link reads before it looks at its queue again: a batch of bundles with that payload."""


class Linked:
    """Two buses and a link between them, all in one process."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.clock = HandTurnedReactor()
        limits = limits or Limits(queue_messages=200, block_timeout=30.0)
        addresses = leaf, root = str(directory / "leaf"), str(directory / "root")
        self.below, self.above = (Bus(clock=self.clock, name=address, limits=limits) for address in addresses)
        self.below.registry.members.sidecars[os.getpid()] = LINK
        self._ports: list[Any] = []
        for bus, address in zip((self.below, self.above), addresses, strict=True):
            endpoint = SeqpacketServerEndpoint(self.clock, address)
            endpoint.listen(BusFactory(bus.registry)).addCallback(self._ports.append)
        self.link = LinkService(self.clock, leaf, root, [b""], [b""])
        self.link.startService()
        self.settle(1.0)

    def close(self) -> None:
        """Close all sockets."""
        if self.link.running:
            self.link.stopService()
        for bus in (self.below, self.above):
            bus.registry.disconnect_all(sidecars=True)
        for port in self._ports:
            port.stopListening()
        self.settle(10.0)

    def settle(self, seconds: float = 0.0) -> None:
        for _ in range(40):
            self.clock.advance(seconds / 40)
            self.clock.turn()

    def client(self, bus: Bus, *patterns: bytes, **ids: Any) -> Peer:
        """A client whose subscriptions are in force on both sides."""
        client = bus.connect(**ids)
        client.send(*(b"SUB " + pattern for pattern in patterns))
        self.settle()
        client.take()
        return client

    def waiting(self, side: Side) -> int:
        """The bytes that wait in the link for one of the buses."""
        connection = self.link.connections[side]
        assert connection is not None
        return sum(map(len, connection.queue.take(len(connection.queue))))

    def of_link(self, bus: Bus) -> Any:
        """The link as a client of a bus."""
        [client] = [each for each in bus.registry.clients.values() if each.peer.pid == os.getpid()]
        return client


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., Linked]]:
    """Make two buses and a link."""
    made: list[Linked] = []

    def start(limits: Limits | None = None) -> Linked:
        made.append(Linked(tmp_path, limits))
        return made[-1]

    yield start
    for linked in made:
        linked.close()


def test_it_starts_again(join):
    """A link that was stopped links again when it is started, and again after a loss."""
    linked = join()
    link = linked.link
    for _ in range(2):
        assert link.core.is_up
        link.stopService()
        linked.settle(1.0)
        assert not link.core.is_up
        link.startService()
        linked.settle(1.0)
    linked.above.registry.disconnect_all(sidecars=True)
    linked.settle(0.0)
    assert not link.core.is_up
    linked.settle(1.0)
    above, below = linked.client(linked.above, b"a"), linked.client(linked.below)
    below.send(b"MSG a\0")
    linked.settle(0.1)
    assert above.take() == [b"MSG a\0"]


def test_it_is_a_sidecar_and_a_user_of_its_own(join):
    """The link counts neither as a client nor as its UID; other clients count, also those of its UID."""
    linked = join(Limits(max_clients=1))
    assert linked.of_link(linked.below).user.uid == LINK
    empty = linked.below.registry.when_empty()
    client = linked.below.connect(uid=os.getuid())
    assert client.is_connected
    assert client.protocol.user.uid == os.getuid()
    assert not linked.below.connect(pid=6).is_connected
    client.transport.hang_up()
    linked.settle()
    assert empty.called


def test_slow_master_harms_nobody_below(join):
    """A master that reads nothing costs the bus below no message of another client; each loss is counted, none doubled.

    The link's queue is bounded; then the bus queues for the link, and drops, as for any client.
    """
    linked = join()
    near, far = linked.client(linked.below, b"x"), linked.client(linked.above, b"x")
    publisher = linked.below.connect()
    master = linked.of_link(linked.above)
    master.pause_publishing()
    sent = [b"MSG x\0%d " % number + BLOCK for number in range(1500)]
    for packet in sent:
        publisher.send(packet)
        linked.clock.turn()
    assert near.take() == sent
    linked.settle()
    link = linked.of_link(linked.below)
    assert link.lost > 0
    assert link.queue.messages == 100  # half of it: the rest is for other users
    assert HIGH_WATER < linked.waiting(Side.ABOVE) < HIGH_WATER + BATCH_BYTES
    master.resume_publishing()
    linked.settle()
    got = far.take()
    assert len(got) + link.lost == len(sent)
    assert len(set(got)) == len(got)
    assert got == [packet for packet in sent if packet in set(got)]
    linked.settle(2.0)
    assert linked.below.registry.upstream.lost == (link.lost, 0)
    assert linked.waiting(Side.ABOVE) == 0


def test_slow_bus_below_stops_the_reading_from_the_master(join):
    """While the link has no turn below, the master queues and drops for it, and the link holds a bounded part."""
    linked = join()
    low = linked.client(linked.below, b"x")
    publisher = linked.client(linked.above)
    link = linked.of_link(linked.below)
    link.pause_publishing()
    sent = [b"MSG x\0%d " % number + BLOCK for number in range(1000)]
    for packet in sent:
        publisher.send(packet)
        linked.clock.turn()
    linked.settle()
    assert low.take() == []
    above = linked.of_link(linked.above)
    assert above.lost > 0
    assert linked.waiting(Side.BELOW) < HIGH_WATER + BATCH_BYTES
    link.resume_publishing()
    linked.settle()
    got = low.take()
    assert len(got) + above.lost == len(sent)
    assert got == [packet for packet in sent if packet in set(got)]


@pytest.mark.parametrize("way", ["up", "down"])
def test_flood_of_one_user_costs_another_one_nothing(join, way):
    """While the other bus reads nothing, a user that floods the link loses its own messages, and no other user one.

    The receivers there of what was lost are told the exact number, and nobody else.
    """
    linked = join()
    one, other = (linked.below, linked.above) if way == "up" else (linked.above, linked.below)
    loud, calm, untold = (linked.client(other, pattern) for pattern in (b"x/flood", b"x/calm", b"x/flood"))
    for reader in (loud, calm):
        reader.send(b"CMSG receipts/on")
        assert reader.take() == [b"CMSG receipts/on\0"]
    flood, quiet = one.connect(uid=1001), one.connect(uid=1002)
    stuck = linked.of_link(other)
    stuck.pause_publishing()
    for number in range(1500):
        flood.send(b"MSG x/flood\0" + BLOCK)
        if not number % 50:
            quiet.send(b"MSG x/calm\0%d" % number)
        linked.clock.turn()
    linked.settle()
    lost = linked.of_link(one).lost
    assert lost > 500
    stuck.resume_publishing()
    linked.settle()
    assert calm.take() == [b"MSG x/calm\0%d" % number for number in range(0, 1500, 50)]
    packets = loud.take()
    receipts = [packet.partition(b"\0")[2].split(b" ") for packet in packets if packet.startswith(b"CMSG lost\0")]
    assert sum(int(messages) for messages, *_ in receipts) == lost == 1500 - (len(packets) - len(receipts))
    assert sum(int(size) for _, size, *_ in receipts) == lost * (len(b"MSG x/flood\0") + len(BLOCK))
    assert int(receipts[-1][2]) == lost
    assert {why for *_, why in receipts} == {b"share"}
    assert untold.take() == [packet for packet in packets if packet.startswith(b"MSG ")]


@pytest.mark.parametrize("way", ["up", "down"])
def test_messages_of_many_keys_are_taken_in_parts(join, way, monkeypatch: pytest.MonkeyPatch):
    """However many new keys a batch has, the link looks at a few packets at a time, and none is lost or overtaken."""
    linked = join(Limits(queue_messages=10_000))
    one, other = (linked.below, linked.above) if way == "up" else (linked.above, linked.below)
    publisher, reader = linked.client(one), linked.client(other, b"x/")
    taken = []
    core = linked.link.core
    received = core.received

    def watched(side: Side, packets: list[bytes], now: float) -> bool:
        result = received(side, packets, now)
        taken.append(len(packets) - core.left)
        return result

    monkeypatch.setattr(core, "received", watched)
    sent = [b"MSG x/%d\0" % number for number in range(2_000)]
    publisher.send(*sent)
    linked.settle()
    linked.settle()
    assert reader.take() == sent
    assert max(taken) <= CLOSELY + 1  # and the publisher's name
    assert sum(taken) == 1 + 2_000  # the publisher's name comes first


def test_link_that_the_bus_disconnects_comes_back(join):
    """A link that is shed, or disconnected by an operator, joins again and carries messages."""
    linked = join()
    low, high = linked.client(linked.below, b"x"), linked.client(linked.above, b"x")
    for bus in (linked.below, linked.above):
        linked.of_link(bus).transport.abortConnection()
        linked.settle(30.0)
        low.send(b"MSG x\0")
        linked.settle()
        assert low.take()[-1:] == high.take()[-1:] == [b"MSG x\0"]


def test_the_first_of_several_long_messages_is_logged(join, monkeypatch: pytest.MonkeyPatch):
    """Messages that are too long for the other bus are taken out of a batch and counted; the log has the first one."""
    link = join().link
    logged: list[str] = []
    monkeypatch.setattr(link, "log", logged.append)
    connection = link.connections[Side.ABOVE]
    connection.limit = 50
    packets = [b"MSG k\0", b"MSG k\0" + bytes(60), b"CMSG " + bytes(99), b"MSG k\0" + bytes(90), b"MSG k\0."]
    link.drop_long(connection, packets)
    assert packets == [b"MSG k\0", b"CMSG " + bytes(99), b"MSG k\0."]
    assert link.core.lost[Side.ABOVE] == 2
    assert len(logged) == 1
    assert "it has 66 bytes" in logged[0]


def test_bundle_behind_the_answer_that_agrees_to_it(join):
    """A bundle that is read together with that answer is taken whole: no packet of it is left to the transport.

    What was left came again after the next pause, or kept the connection from ending with its peer.
    """
    linked = join()
    high = linked.client(linked.above, b"x")
    connection = linked.link.connections[Side.BELOW]
    assert connection is not None
    packets = [b"CMSG bundle/on\0" + b"65536", *pack([b"MSG x\0%d" % n for n in range(5)], 65_536, 64)[0]]
    assert len(packets) == 2
    assert connection.packetsReceived(packets) == len(packets) == 6
    linked.settle()
    assert len(high.take()) == 5


def test_stop_passes_on_what_is_queued(join):
    """A link that stops brings up what was published before, within its time, and its Deferred fires."""
    linked = join()
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
    with TemporaryDirectory() as directory, ExitStack() as stack:
        linked = Linked(Path(directory), Limits(queue_messages=50, block_timeout=1e6))
        stack.callback(linked.close)
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


@settings(max_examples=examples(40), deadline=None)
@example([("pause above", 1), *[("flood", 120), ("calm", 1), ("settle", 1)] * 12, ("go on above", 1), ("flood", 90)])
@given(
    st.lists(
        st.tuples(st.sampled_from(["flood", "calm", "pause above", "go on above", "settle"]), st.integers(1, 120)),
        max_size=30,
    )
)
def test_receivers_know_what_the_link_has_lost(steps):
    """Whatever stands still, and whoever publishes: got and told is what was published, for each key, at any time."""
    with TemporaryDirectory() as directory, ExitStack() as stack:
        linked = Linked(Path(directory), Limits(queue_messages=50, block_timeout=1e6))
        stack.callback(linked.close)
        readers = {key: linked.client(linked.above, b"x/" + key) for key in (b"flood", b"calm")}
        for reader in readers.values():
            reader.send(b"CMSG receipts/on")
            reader.take()
        publishers = {b"flood": linked.below.connect(uid=1001), b"calm": linked.below.connect(uid=1002)}
        above = linked.of_link(linked.above)
        sent = dict.fromkeys(readers, 0)
        for what, count in [*steps, ("go on above", 1), ("settle", 1)]:
            if what == "settle":
                linked.settle()
            elif (key := what.encode()) in sent:
                numbers = range(sent[key], sent[key] + count)
                publishers[key].send(*(b"MSG x/%b\0%d " % (key, number) + BLOCK for number in numbers))
                sent[key] += count
            else:
                (above.pause_publishing if what.startswith("pause") else above.resume_publishing)()
        linked.settle()
        for key, reader in readers.items():
            told = last = got = 0
            for packet in reader.take():
                words = packet.partition(b"\0")[2].split(b" ")
                if packet.startswith(b"CMSG lost"):
                    told += int(words[0])
                    continue
                number = int(words[0])
                assert got == 0 or number > last
                got, last = got + 1, number
                assert number + 1 - got <= told
            assert got + told == sent[key]
