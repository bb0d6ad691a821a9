"""The outbox: order, waiters, reconnecting, and the system calls that send."""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zope.interface.verify import verifyObject

from sbus.client.outbox import Outbox, Pending, send_limit, send_some
from sbus.client.tx import protocol
from sbus.interfaces import IPacketQueue
from sbus.protocol.bundles import MAX_BUNDLE, unbundle
from sbus.syscalls.batch import BATCH, PacketReader
from sbus.syscalls.sockets import max_sendable
from tests.support.examples import examples
from tests.unit.client.fakes import Waiter


class Model:
    """A model: one line of packets and waiters, in which a waiter is due when no packet precedes it."""

    def __init__(self) -> None:
        self.line: list[bytes | Waiter] = []
        self.reported: list[Waiter] = []

    def packets(self) -> list[bytes]:
        return [item for item in self.line if isinstance(item, bytes)]

    def settle(self) -> None:
        while self.line and isinstance(self.line[0], Waiter):
            self.reported.append(self.line.pop(0))  # type: ignore[arg-type]

    def send(self, count: int) -> None:
        for _ in range(count):
            self.line.pop(0)
            self.settle()

    def restart(self, resync: list[bytes]) -> None:
        kept = [item for item in self.line if isinstance(item, Waiter) or item.startswith(b"MSG ")]
        self.line = [*resync, *kept]
        self.settle()


_ACTIONS = ("write", "extend", "wait", "wait", "send", "send", "restart", "publish", "publish", "cancel", "take back")
numbered = st.sampled_from((b"MSG k\0%d", b"SUB %d", b"UNSUB %d", b"CMSG %d"))


@settings(max_examples=examples(300))
@given(st.data())
def test_waiters_complete_when_earlier_packets_are_sent(data: st.DataObject) -> None:
    """A waiter completes when every packet added before it is sent or taken back, over lost connections too."""
    outbox, model = Outbox(), Model()
    waiters: list[Waiter] = []
    publications: list[tuple[Pending, Waiter, list[bytes]]] = []
    number = 0

    def packets(most: int) -> list[bytes]:
        nonlocal number
        made = [kind % (number + i) for i, kind in enumerate(data.draw(st.lists(numbered, max_size=most)))]
        number += len(made)
        return made

    for _ in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from((*_ACTIONS,)))
        if action in ("write", "extend"):
            added = packets(4)
            model.line += added
            if action == "extend":
                outbox.extend(added)
            else:
                for packet in added:
                    outbox.write(packet)
        elif action == "wait":
            waiter = Waiter()
            waiters.append(waiter)
            model.line.append(waiter)
            model.settle()
            outbox.wait(waiter)
        elif action == "publish":
            waiter, messages = Waiter(), [b"MSG k\0%d" % (number + i) for i in range(data.draw(st.integers(1, 3)))]
            number += len(messages)
            waiters.append(waiter)
            outbox.extend(messages)
            publications.append((outbox.wait(waiter, len(messages)), waiter, messages))
            model.line += [*messages, waiter]
        elif action == "cancel":
            if publications:
                pending, waiter, messages = publications.pop(data.draw(st.integers(0, len(publications) - 1)))
                outbox.cancel(pending)
                if not waiter.outcomes:
                    waiters.remove(waiter)
                whole = all(message in model.line for message in messages)
                model.line = [i for i in model.line if i is not waiter and not (whole and i in messages)]
                model.settle()
        elif action == "take back":
            published = {message for _, _, messages in publications for message in messages}
            if others := [packet for packet in model.packets() if packet not in published]:
                packet = data.draw(st.sampled_from(others))
                outbox.take_back(next(p for p in outbox.take(1000) if p == packet))
                model.line.remove(packet)
                model.settle()
        elif action == "send":
            taken = outbox.take(data.draw(st.integers(1, 5)))
            assert taken == model.packets()[: len(taken)]
            sent = data.draw(st.integers(0, len(taken)))
            outbox.ack(taken, sent)
            model.send(sent)
        else:
            resync = [packet for packet in packets(3) if not packet.startswith(b"MSG")]
            outbox.restart(resync, hold=False)
            model.restart(resync)
        assert len(outbox) == len(model.packets())
        assert bool(outbox.packets) == bool(model.packets())
        if data.draw(st.booleans()):  # otherwise what was taken back leaves holes for the next actions
            assert outbox.take(1000) == model.packets()
            assert [waiter for waiter in waiters if waiter.outcomes] == [w for w in waiters if w in model.reported]
    outbox.take(1)
    assert all(waiter.outcomes in ([], [b""]) for waiter in waiters)
    error = OSError()
    outbox.set_exception(error)
    assert all(waiter.outcomes in ([error], [b""]) for waiter in waiters)
    assert (len(outbox), outbox.take(9)) == (0, [])
    late = Waiter()
    outbox.wait(late)
    assert late.outcomes == [b""]


def test_who_waits_for_what_was_taken_back_does_not_wait_for_the_next_connection() -> None:
    """A waiter whose packets were all taken back is due, also if the connection is lost just then."""
    outbox, due, other = Outbox(), Waiter(), Waiter()
    outbox.write(packet := b"MSG k\0taken back")
    outbox.wait(due)
    outbox.write(b"MSG k\0")
    outbox.wait(other)
    outbox.take_back(packet)
    outbox.restart([b"SUB k"], hold=False)
    assert (due.outcomes, other.outcomes) == ([b""], [])


def test_taking_back_is_no_search() -> None:
    """To take many packets back, also while others leave and are added, looks at each one a few times at most."""

    class Counting(deque[bytes]):
        looks = 0

        def __getitem__(self, at: Any) -> Any:
            Counting.looks += 1
            return super().__getitem__(at)

    outbox = Outbox()
    outbox.packets = Counting()
    packets = [b"MSG k\0%d" % number for number in range(900)]
    outbox.extend(packets[:600])
    for packet in packets[100:300]:
        outbox.take_back(packet)
    outbox.extend(packets[600:])
    for packet in packets[500:700]:
        outbox.take_back(packet)
    assert Counting.looks < 3 * 400
    outbox.ack(packets[:10], 10)
    for packet in packets[:20]:  # some have left
        outbox.take_back(packet)
    assert outbox.take(1000) == [*packets[20:100], *packets[300:500], *packets[700:]]


def test_places_are_forgotten() -> None:
    """The outbox remembers no places of packets that have left long ago, even if it is never empty."""
    outbox = Outbox()
    outbox.write(b"MSG k\0")
    for number in range(10_000):
        outbox.write(b"MSG k\0%d" % number)
        outbox.ack(outbox.take(1), 1)
        outbox.take_back(b"MSG k\0none of them")
    assert len(outbox._places) < 2_000


def test_call_that_fails_before_it_sends_takes_nothing_back() -> None:
    """The empty packet, which stands for none, is no hole that another packet has left."""
    outbox = Outbox()
    outbox.extend([packet := b"MSG k\x001", b"MSG k\x002", b"MSG k\x003"])
    outbox.take_back(packet)
    outbox.take_back(b"")
    assert (len(outbox), outbox.take(9)) == (2, [b"MSG k\x002", b"MSG k\x003"])


def test_waiters_may_add_packets_and_wait_again() -> None:
    """A completed waiter may add packets and wait again, from within the call."""
    outbox = Outbox()
    completed: list[int] = []

    class Publisher(Waiter):
        def set_result(self, value: bytes) -> None:
            completed.append(len(completed))
            if len(completed) < 5:
                outbox.write(b"MSG k\0%d" % len(completed))
                outbox.wait(self)

    outbox.write(b"MSG k\0")
    outbox.wait(Publisher())
    while taken := outbox.take(2):
        outbox.ack(taken, len(taken))
    assert completed == [0, 1, 2, 3, 4]


def test_what_may_be_too_long_is_kept_back() -> None:
    """Messages, which the server may not take, are kept back with what follows; packets before them are not."""
    outbox = Outbox()
    outbox.extend([b"SUB a pattern", b"MSG k\0", b"SUB another"])
    outbox.is_held = True
    taken = outbox.take(9)
    assert taken == [b"SUB a pattern"]
    outbox.ack(taken, 1)
    assert (outbox.take(9), len(outbox)) == ([], 2)
    outbox.is_held = False
    assert outbox.take(9) == [b"MSG k\0", b"SUB another"]


def test_what_is_refused_fails() -> None:
    """A call fails if the server takes one of its messages not; none of them is sent, unless one has left."""
    outbox = Outbox()

    def refusal(packet: bytes) -> Exception | None:
        return ValueError(packet) if b"!" in packet else None

    def publish(*packets: bytes) -> Waiter:
        outbox.extend(list(packets))
        outbox.wait(waiter := Waiter(), len(packets))
        return waiter

    begun, whole, refused = publish(b"1", b"2!", b"3"), publish(b"4", b"5"), publish(b"6", b"7!", b"8!")
    outbox.write(b"9!")
    outbox.wait(last := Waiter())
    assert outbox.refuse(lambda _: None) == []
    outbox.ack(outbox.take(1), 1)
    assert [error.args for error in outbox.refuse(refusal)] == [(b"9!",)]
    assert [waiter.outcomes[0].args for waiter in (begun, refused)] == [(b"2!",), (b"7!",)]
    assert outbox.take(9) == [b"3", b"4", b"5"]
    outbox.ack(outbox.take(3), 3)
    assert [waiter.outcomes for waiter in (whole, last)] == [[b""]] * 2
    assert not outbox.packets


def test_nothing_is_forgotten_when_a_transport_gives_up() -> None:
    """An outbox is a transport's queue, and survives the transport."""
    outbox = Outbox()
    assert protocol.__name__  # it says that an outbox is a queue
    assert verifyObject(IPacketQueue, outbox)
    outbox.write(b"MSG k\0")
    outbox.discard_all(outbox.take(1))
    assert outbox.take(5) == [b"MSG k\0"]
    assert not outbox.reject_oversized([b"MSG k\0"], 0)


@pytest.fixture
def ours_and_theirs() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def received(sock: socket.socket) -> list[bytes]:
    """Return the received packets, bundles included."""
    reader, packets = PacketReader(1 << 20), []
    while batch := reader.read(sock)[0]:
        packets += batch
    return packets


@pytest.mark.parametrize("limit", [0, 1000, MAX_BUNDLE])
def test_what_is_taken_is_what_arrives(ours_and_theirs: tuple[socket.socket, socket.socket], limit: int) -> None:
    """The count returned is that of the packets that arrive, also if the socket fills up."""
    ours, theirs = ours_and_theirs
    packets = [b"MSG k\0%d " % i + bytes(i % 300) for i in range(20_000)]
    sent = rounds = 0
    while count := send_some(ours, packets[sent : sent + send_limit(limit)], limit):
        sent += count
        rounds += 1
    assert 0 < sent < len(packets)
    got = received(theirs)
    assert unbundle(list(got)) == packets[:sent]
    assert max(map(len, got)) <= (limit or 1000)
    assert (len(got) < sent / 2) is (limit > 0)


def test_alone_is_plain(ours_and_theirs: tuple[socket.socket, socket.socket]) -> None:
    """A packet that is alone, or does not fit with others, is sent plain."""
    ours, theirs = ours_and_theirs
    assert send_some(ours, [], MAX_BUNDLE) == 0
    assert send_some(ours, [b"alone"], MAX_BUNDLE) == 1
    assert send_some(ours, [bytes(900), b"x", bytes(900)], 500) == 3
    assert received(theirs) == [b"alone", bytes(900), b"x", bytes(900)]


def test_socket_that_takes_no_bundle_so_long(ours_and_theirs: tuple[socket.socket, socket.socket]) -> None:
    """If a bundle does not fit the socket, packets go out singly; one too long by itself raises EMSGSIZE."""
    ours, theirs = ours_and_theirs
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4000)
    packets = [bytes([i]) * 500 for i in range(100)]
    sent = send_some(ours, packets, MAX_BUNDLE)
    assert 0 < sent <= BATCH
    assert received(theirs) == packets[:sent]
    for packets in ([bytes(max_sendable(ours) + 1)], [bytes(max_sendable(ours) + 1), b"x"]):
        with pytest.raises(OSError, match="too long") as raised:
            send_some(ours, packets, MAX_BUNDLE)
        assert raised.value.errno == errno.EMSGSIZE


def test_limits() -> None:
    """With bundles, more packets are sent at once."""
    assert send_limit(0) == BATCH < send_limit(MAX_BUNDLE)


def test_an_interrupted_restart_loses_no_packet() -> None:
    """If a signal handler raises while packets are put aside for the next connection, a second call finds them all."""

    class Interrupting(bytes):
        calls = 0

        def startswith(self, *prefix: Any) -> bool:
            Interrupting.calls += 1
            if Interrupting.calls == 1:
                raise KeyboardInterrupt
            return super().startswith(*prefix)

    outbox = Outbox()
    outbox.extend([b"MSG k\x001", b"SUB k", Interrupting(b"MSG k\x002"), b"MSG k\x003"])
    with pytest.raises(KeyboardInterrupt):
        outbox.restart([b"CMSG new"], hold=False)
    outbox.restart([b"CMSG new"], hold=False)
    assert list(outbox.packets) == [b"CMSG new", b"MSG k\x001", b"MSG k\x002", b"MSG k\x003"]
