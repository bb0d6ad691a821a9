"""Bundles and flood control: whatever is put together, cut off and taken apart, receivers get what plain packets give.

Two buses are driven alike. On one of them everything travels in bundles, and each socket takes as many of these as
the test says. The other has plain packets only, and its sockets take exactly as many messages at each flush.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.protocol.bundles import BundleCache, pack, unbundle
from sbus.protocol.keys import PeerCredentials
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.limits import Limits
from sbus.testing import FakePacketTransport
from tests.support.buses import Bus, Peer
from tests.support.examples import examples

SHARE = 50
BUNDLES = 3


class Socket(FakePacketTransport):
    """A socket that takes as many packets as `takes` says.

    :ivar takes: how many packets it takes of those that are offered, at each flush.
    """

    takes: Callable[[list[bytes]], int]

    def flush(self) -> None:
        if not self._is_writable():
            self.queue.discard_all()
            return
        while taken := self.queue.take(SHARE):
            sent = self.try_send(taken)
            self.queue.ack(taken, sent)
            if sent < len(taken) and len(self.queue):
                return

    def try_send(self, packets: list[bytes], cache: BundleCache | None = None) -> int:
        if not self._is_writable():
            return 0
        return self.takes(packets)


class Bundled:
    """A socket that takes a number of bundles, and whose peer takes them apart."""

    def __init__(self, socket: Socket, limit: int, most: int = 1 << 30) -> None:
        self._socket = socket
        self._limit = limit
        self.room = most
        self.log: list[int] = []

    def __call__(self, packets: list[bytes]) -> int:
        bundles, counts = pack(packets, self._limit, min(BUNDLES, self.room))
        self.room -= len(bundles)
        assert sum(counts) == len(packets) or len(bundles) in (0, BUNDLES) or not self.room
        self._socket.written += unbundle(bundles)
        self.log.append(sum(counts))
        return sum(counts)


class Replayed:
    """A plain socket that takes as many packets as a bundled one did."""

    def __init__(self, socket: Socket, log: list[int]) -> None:
        self._socket = socket
        self._log = iter(log)

    def __call__(self, packets: list[bytes]) -> int:
        count = next(self._log)
        assert count <= len(packets)
        self._socket.written += packets[:count]
        return count


def connect(bus: Bus, uid: int) -> tuple[Peer, Socket]:
    socket = Socket(PeerCredentials(5000 + uid, 1000, 100), clock=bus.clock)
    socket.takes = Bundled(socket, 100)
    protocol = BusProtocol(bus.registry)
    socket.connect(protocol)
    bus.settle()
    return Peer(bus, socket, protocol), socket


def drain(bus: Bus, socket: Socket) -> None:
    """The peer reads: the socket is writable again, also when what was left out is all that waits."""
    socket.flush()
    bus.settle()


choices = st.fixed_dictionaries(
    {
        "soft": st.sampled_from(["queue", "discard", "block", "error"]),
        "hard": st.sampled_from(["discard", "block", "error"]),
        "order": st.sampled_from(["queue", "stack", "random"]),
        "echo": st.sampled_from(["on", "off"]),
    }
)
message = st.tuples(st.sampled_from([b"a", b"b", b"both", b"c"]), st.integers(0, 40))
publication = st.tuples(
    st.just("publish"), st.integers(0, 1), st.lists(message, min_size=1, max_size=12), st.integers(1, 5)
)
reading = st.tuples(st.just("read"), st.integers(0, 1), st.integers(0, 3))
question = st.tuples(st.just("ask"), st.integers(0, 1))
steps = st.lists(publication | reading | question, max_size=14)


class Script:
    """One course of events, played on either bus."""

    def __init__(self, chosen: list[dict[str, str]], limits: tuple[int, int, int], room: int, limit: int) -> None:
        messages, size, total = limits
        self.bus = Bus(limits=Limits(queue_messages=messages, queue_bytes=size, total_queue_bytes=total))
        self.readers: list[tuple[Peer, Socket]] = []
        self.publishers = [connect(self.bus, 20 + i)[0] for i in range(2)]
        self.limit = limit
        self._blocks = any("block" in choice.values() for choice in chosen)
        self.published: tuple[list[bytes], list[bytes]] = ([], [])
        for i, choice in enumerate(chosen):
            peer, socket = connect(self.bus, i)
            kinds = ("blocking/soft/%(soft)s", "blocking/hard/%(hard)s", "order/%(order)s", "echo/%(echo)s")
            peer.send(*[b"CMSG " + (kind % choice).encode() for kind in kinds])
            peer.send(b"SUB both", b"SUB a" if i == 0 else b"SUB b")
            socket.takes = Bundled(socket, limit, room)
            self.readers.append((peer, socket))

    def play(self, course: list[Any], *, bundles: bool) -> list[list[bytes]]:
        number = 0
        for step in course:
            if step[0] == "publish":
                packets = [b"MSG %b\0%d." % (key, number + i) + bytes(size) for i, (key, size) in enumerate(step[2])]
                number += len(packets)
                # Which of several publishers goes on first when a receiver lets them go is left to chance.
                publisher = 0 if self._blocks else step[1]
                self.published[publisher].extend(packets)
                if bundles:
                    some = [packets[i : i + step[3]] for i in range(0, len(packets), step[3])]
                    arrived = [packet for part in some for packet in pack(part, self.limit, 99)[0]]
                    packets = unbundle(arrived)
                self.publishers[publisher].send(*packets)
            elif step[0] == "ask":
                self.readers[step[1]][0].send(b"CMSG !/cred/whoami")
            else:
                socket = self.readers[step[1]][1]
                if isinstance(socket.takes, Bundled):
                    socket.takes.room += step[2]
                drain(self.bus, socket)
        for _ in range(100):
            for _, socket in self.readers:
                if isinstance(socket.takes, Bundled):
                    socket.takes.room = 1 << 30
                drain(self.bus, socket)
        return [socket.written for _, socket in self.readers]


@settings(max_examples=examples(150))
@given(
    st.lists(choices, min_size=2, max_size=2),
    st.tuples(st.integers(1, 12), st.integers(50, 400), st.integers(60, 700)),
    st.integers(0, 4),
    st.integers(20, 120),
    steps,
)
def test_bundles_give_what_plain_packets_give(
    chosen: list[dict[str, str]], limits: tuple[int, int, int], room: int, limit: int, course: list[Any]
) -> None:
    """Every receiver gets the same in the same order, loses the same, and ends as it would, whatever it chose."""
    one = Script(chosen, limits, room, limit)
    bundled = one.play(course, bundles=True)
    two = Script(chosen, limits, room, limit)
    for (_, socket), (_, played) in zip(two.readers, one.readers, strict=True):
        assert isinstance(played.takes, Bundled)
        socket.takes = Replayed(socket, played.takes.log)
    assert two.play(course, bundles=False) == bundled
    for (peer, _), (other, _), got, choice in zip(one.readers, two.readers, bundled, chosen, strict=True):
        assert peer.is_connected == other.is_connected
        assert peer.protocol.lost == other.protocol.lost
        messages = [packet for packet in got if packet.startswith(b"MSG ")]
        keys = (b"MSG both\0", b"MSG a\0" if got is bundled[0] else b"MSG b\0")
        wanted = [[packet for packet in published if packet.startswith(keys)] for published in one.published]
        assert len(set(messages)) == len(messages)
        assert set(messages) <= {packet for published in wanted for packet in published}
        if peer.is_connected:
            assert len(messages) + peer.protocol.lost == sum(map(len, wanted))
            if choice["order"] == "queue":
                for published in wanted:  # what came of each publisher's messages came in their order
                    came = [packet for packet in published if packet in messages]
                    assert came == [packet for packet in messages if packet in published]
    assert one.bus.registry.counters.as_dict() == two.bus.registry.counters.as_dict()
