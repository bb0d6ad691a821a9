"""Payloads in sealed memory on a bus without sockets: accounts, quotas, and a model with every strategy and order."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.flood import PayloadMessage
from sbus.protocol.controls import HARD, ORDER, SOFT, choices
from sbus.protocol.packets import LEAST_PAYLOAD
from sbus.server import Observer
from sbus.server.core.limits import Limits
from sbus.server.ops.tap import Run, Tap
from sbus.syscalls.memfd import Attached, Memfd, adopt
from tests.support.buses import Bus, HandTurnedBus, Peer
from tests.support.descriptors import descriptors
from tests.support.examples import examples

ON = b"CMSG payload/on"
ANSWER = b"%b\0%d %d" % (ON, LEAST_PAYLOAD, Limits().max_payload)


def attached(packet: bytes, payload: bytes) -> Attached:
    """Return a packet as it comes with sealed memory."""
    memfd = Memfd.create()
    os.write(memfd.fileno(), payload)
    memfd.seal()
    return Attached.of(packet, adopt([os.dup(memfd.fileno())]), False)


def fmsg(key: bytes, payload: bytes) -> Attached:
    """Return an FMSG with its memory."""
    return attached(b"FMSG %b\x000 %d" % (key, len(payload)), payload)


def asking(bus: Bus, *packets: bytes, uid: int = 1000) -> Peer:
    """Connect a client that asks for payloads, and then sends packets."""
    client = bus.connect(uid)
    client.send(ON, *packets)
    assert client.take()[0] == ANSWER
    return client


def plain(packet: bytes) -> bytes:
    """Return what a receiver has as a plain message."""
    return bytes(packet.plain()) if isinstance(packet, PayloadMessage) else bytes(packet)


def files(bus: Bus) -> int:
    return bus.registry.users.budget.payload_files


def test_a_message_in_memory_counts_as_the_same_message_with_its_bytes() -> None:
    """Counters, queues and receipts have its full length; the counters of payloads have it, too."""
    bus = Bus()
    reader, publisher = asking(bus, b"SUB k"), asking(bus)
    reader.stall()
    publisher.send(fmsg(b"k", b"x" * 1000))
    counters, queue = bus.registry.counters, reader.protocol.queue
    assert (counters.published, counters.published_bytes, counters.routed_bytes) == (1, 1006, 1006)
    assert (counters.payloads, counters.payload_bytes) == (1, 1000)
    assert (queue.messages, queue.size) == (1, 1006)
    reader.drain()
    assert [plain(packet) for packet in reader.take()] == [b"MSG k\0" + b"x" * 1000]


def test_waiting_memory_is_charged_once_to_its_publisher() -> None:
    """However many receivers wait, a file and its size count once, and not at all when the last one has it."""
    bus = Bus()
    readers = [asking(bus, b"SUB k", uid=uid) for uid in (2000, 2000, 3000)]
    publisher = asking(bus)
    user = publisher.protocol.user
    before = user.memory
    for reader in readers:
        reader.stall()
    publisher.send(fmsg(b"k", b"x" * 5000))
    assert (files(bus), user.payloads.files, user.payloads.bytes, user.memory - before) == (1, 1, 5000, 5000)
    for reader in readers:
        reader.drain()
        reader.take()
    assert (files(bus), user.payloads.files, user.payloads.bytes, user.memory - before) == (0, 0, 0, 0)
    assert not user.payloads.receivers


def test_parts_of_receivers() -> None:
    """The receivers of the first user get half of the files, and leave some for those of each other user."""
    bus = Bus(limits=Limits(user_payloads=8))
    publisher = asking(bus)
    readers = []
    for uid, part in ((2000, 4), (3000, 1), (4000, 1), (5000, 1)):
        readers.append(asking(bus, b"SUB %d" % uid, uid=uid))
        readers[-1].stall()
        for _ in range(9):
            publisher.send(fmsg(b"%d" % uid, b"x"))
        assert (readers[-1].protocol.queue.messages, readers[-1].protocol.queue.lost) == (part, 9 - part)
    assert files(bus) == 7
    readers[0].transport.hang_up()
    bus.settle()
    assert files(bus) == 3


def test_a_gap_is_none_of_a_publisher_without_echo() -> None:
    """Payloads that find no room in the mail of their publisher's own user are no losses of the publisher itself."""
    bus = Bus(limits=Limits(user_payloads=1))
    readers = [asking(bus, b"SUB k", uid=2000) for _ in range(3)]
    publisher = asking(bus, b"SUB k", b"CMSG echo/off", b"CMSG receipts/on", uid=2000)
    publisher.take()
    stranger = bus.connect(uid=3000)
    bus.registry.scheduler.is_busy = True
    stranger.transport.deliver(b"MSG k\0of another user")  # from now on the receivers wait
    publisher.transport.deliver(fmsg(b"k", b"x" * 1000), fmsg(b"k", b"y" * 1000))
    bus.settle()
    assert publisher.take() == [b"MSG k\0of another user"]
    assert [len(reader.take()) for reader in readers] == [2, 2, 2]
    assert (publisher.protocol.lost, [reader.protocol.lost for reader in readers]) == (0, [1, 1, 1])
    counters = bus.registry.counters
    assert (counters.routed, counters.dropped) == (4 + 2 * 3, 3)


def test_half_of_the_memory_of_a_user() -> None:
    """What waits of a user's payloads takes at most half of the memory that the user may hold.

    The receivers of the first user get half of that, and leave some for those of each other user.
    """
    bus = Bus(limits=Limits(user_memory=8 << 20))
    publisher = asking(bus)
    for uid, part in ((2000, 2), (3000, 1), (4000, 1), (5000, 0)):
        reader = asking(bus, b"SUB %d" % uid, uid=uid)
        reader.stall()
        for _ in range(3):
            publisher.send(fmsg(b"%d" % uid, b"x" * (900 << 10)))
        assert (reader.protocol.queue.messages, reader.protocol.queue.lost) == (part, 3 - part)


def test_a_user_who_comes_back_has_the_same_quota() -> None:
    """Payloads of a user who has left count when the user is back."""
    bus = Bus(limits=Limits(user_payloads=4))
    reader = asking(bus, b"SUB k", uid=2000)
    reader.stall()
    for _ in range(2):
        publisher = asking(bus)
        for _ in range(4):
            publisher.send(fmsg(b"k", b"x"))
        publisher.transport.hang_up()
        bus.settle()
    assert reader.protocol.queue.messages == 2


def test_a_receiver_that_blocks_takes_one_message_past_the_quota() -> None:
    """Under soft block the message is kept, and its publisher is paused until it is sent."""
    bus = Bus(limits=Limits(user_payloads=1))
    reader, publisher = asking(bus, b"SUB k", b"CMSG blocking/soft/block"), asking(bus)
    reader.stall()
    publisher.send(fmsg(b"k", b"0"))
    publisher.send(*(fmsg(b"k", b"%d" % number) for number in range(1, 5)))
    assert (reader.protocol.queue.messages, publisher.transport.is_paused) == (1, True)
    reader.drain()
    assert [plain(packet) for packet in reader.take()] == [b"MSG k\0%d" % number for number in range(5)]


def test_latest_replaces_a_message_of_either_kind() -> None:
    """A payload takes the place of a plain message of its key, and the other way round; its memory is given back."""
    bus = Bus()
    reader, publisher = asking(bus, b"SUB ", b"CMSG blocking/soft/latest"), asking(bus)
    reader.stall()
    publisher.send(b"MSG a\x001", b"MSG b\x001", fmsg(b"c", b"1"), fmsg(b"a", b"2"), b"MSG c\x002", fmsg(b"b", b"2"))
    assert files(bus) == 2
    reader.drain()
    assert [plain(packet) for packet in reader.take()] == [b"MSG a\x002", b"MSG b\x002", b"MSG c\x002"]


def test_mail_holds_memory_too() -> None:
    """A message that goes by mail holds its memory until it is delivered; without room for it, it is lost."""
    bus = HandTurnedBus(limits=Limits(user_payloads=4))
    readers = [asking(bus, b"SUB k", uid=2000) for _ in range(4)]
    others = bus.connect(2000)
    others.send(b"SUB k")
    publisher = asking(bus)
    bus.use_up(others, 1)
    for number in range(3):
        publisher.send(fmsg(b"k", b"%d" % number))
    assert files(bus) == 2
    bus.finish()
    expected = [b"MSG k\x000", b"MSG k\x001"]
    for reader in (*readers, others):
        assert [plain(packet) for packet in reader.take()] == expected
        assert reader.protocol.lost == 1
    assert files(bus) == 0


def test_what_was_lost_on_its_way_is_dropped() -> None:
    """A descriptor that the kernel has not passed on is nobody's fault: the message is counted and dropped."""
    bus = Bus()
    reader, publisher = asking(bus, b"SUB k"), asking(bus)
    packet = Attached.of(b"FMSG k\x000 1", (), True)
    publisher.send(packet, b"MSG k\0after")
    assert reader.take() == [b"MSG k\0after"]
    assert bus.registry.counters.payloads_missing == 1
    assert publisher.is_connected


@pytest.mark.parametrize("files", [1, 2])
def test_a_range_above_the_limit(files: int) -> None:
    """A payload above --max-payload is a violation, and so are several descriptors."""
    bus = Bus(limits=Limits(max_payload=100))
    client = bus.connect()
    client.send(ON)
    assert client.take() == [b"CMSG payload/on\x00262144 100"]
    packet = fmsg(b"k", b"x" * (100 + files % 2))
    packet.files *= files
    client.send(packet)
    assert not client.is_connected


class Notes(Observer):
    """Notes what is published."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes | None]] = []

    def published(self, client: object, key: bytes, payload: bytes | None) -> None:
        self.seen.append((key, payload))


def test_observers_see_what_fits_a_packet() -> None:
    """An observer gets the bytes of a payload that fits a packet, and None for a longer one."""
    observer = Notes()
    bus = Bus(observers=(observer,))
    asking(bus).send(fmsg(b"k", b"abc"), fmsg(b"k", b"x" * 500_000))
    assert observer.seen == [(b"k", b"abc"), (b"k", None)]


class Unreadable(Memfd):
    """Memory whose pages are in the swap, while there is no memory to read them back."""

    __slots__ = ()

    def read(self, offset: int, length: int) -> bytes:
        raise OSError(errno.ENOMEM, "no memory")


def test_without_memory_for_a_copy_only_those_who_need_one_lose_the_message() -> None:
    """The publisher stays, and is not to blame; observers see no payload."""
    observer = Notes()
    bus = Bus(observers=(observer,))
    reader, other, publisher = asking(bus, b"SUB k"), bus.connect(), asking(bus)
    other.send(b"CMSG receipts/on", b"SUB k")
    other.take()
    for is_readable in (True, False):
        packet = fmsg(b"k", b"payload")
        if not is_readable:
            packet.files = (Unreadable(os.dup(packet.files[0].fileno())),)
        publisher.send(packet)
    assert len(reader.take()) == 2
    assert other.take() == [b"MSG k\0payload", b"CMSG lost\x001 13 1 too-large"]
    assert observer.seen == [(b"k", b"payload"), (b"k", None)]
    publisher.send(b"MSG k\0on")
    assert other.take() == [b"MSG k\0on"]


class Look:
    """A viewer that keeps runs."""

    def __init__(self) -> None:
        self.sizes: list[tuple[bytes, int]] = []

    def note(self, run: Run) -> None:
        self.sizes += [(bytes(packet), len(packet)) for packet in run.packets]


def test_a_tap_sees_the_length() -> None:
    """Operators who look see the key and the length of a payload in memory, and keep none of it."""
    bus = Bus()
    tap, look = Tap(bus.registry), Look()
    reader, publisher = asking(bus, b"SUB k"), asking(bus)
    tap.add(look)
    publisher.send(fmsg(b"k", b"x" * 5000))
    tap.remove(look)
    publisher.send(fmsg(b"k", b"unseen"))
    assert look.sizes == [(b"MSG k\0", 5006)]
    assert len(reader.take()) == 2


# --- a model ---------------------------------------------------------------------------------------

USERS = (1000, 2000, 3000)
STRATEGIES = [
    *(b"CMSG %b/%b" % (SOFT, word.encode()) for word in choices(SOFT)),
    *(b"CMSG %b/%b" % (HARD, word.encode()) for word in choices(HARD)),
    *(b"CMSG %b/%b" % (ORDER, word.encode()) for word in choices(ORDER)),
]
kinds = st.fixed_dictionaries(
    {
        "uid": st.sampled_from(USERS),
        "asks": st.lists(st.sampled_from([ON, b"CMSG sender/on", b"CMSG receipts/on"]), unique=True),
        "choices": st.lists(st.sampled_from(STRATEGIES), max_size=3),
    }
)
steps = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1), st.lists(st.integers(0, 30_000), min_size=1, max_size=5)),
    st.tuples(st.just("stall"), st.integers(0, 3)),
    st.tuples(st.just("drain"), st.integers(0, 3), st.integers(1, 6)),
    st.tuples(st.just("off"), st.integers(0, 3)),
    st.tuples(st.just("busy"), st.integers(0, 3)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
)


class Model:
    """A bus, two publishers, some receivers, and what each of these is owed."""

    def __init__(self, receivers: Sequence[dict[str, object]]) -> None:
        self.bus = HandTurnedBus(limits=Limits(user_payloads=3, queue_messages=6, max_packet=20_000))
        self.publishers = [self.bus.connect(uid) for uid in (1000, 3000)]
        for publisher in self.publishers:
            publisher.send(ON)
        self.receivers: list[Peer] = []
        self.owed: list[list[bytes]] = []
        self.got: list[list[bytes]] = []
        self.named: list[bytes] = []
        self.authors: dict[bytes, bytes] = {}
        self.number = 0
        for kind in receivers:
            peer = self.bus.connect(kind["uid"])  # type: ignore[arg-type]
            peer.send(*kind["asks"], b"SUB ", *kind["choices"])  # type: ignore[misc]
            peer.take()
            self.receivers.append(peer)
            self.named.append(b"")
            self.owed.append([])
            self.got.append([])
        self.bus.finish()  # a receiver that had to wait for its user's turn is subscribed now, too

    def publish(self, at: int, sizes: list[int]) -> None:
        """Publish messages; an even size is that of a payload in memory."""
        packets: list[bytes] = []
        for size in sizes:
            self.number += 1
            key, payload = b"%d" % (size % 3), b"%d;" % self.number + b"x" * size
            for owed, receiver in zip(self.owed, self.receivers, strict=True):
                if receiver.is_connected:
                    owed.append(b"MSG %b\0%b" % (key, payload))
            packets.append(b"MSG %b\0%b" % (key, payload[:19_000]) if size % 2 else fmsg(key, payload))
            if size % 2:
                for owed, receiver in zip(self.owed, self.receivers, strict=True):
                    if receiver.is_connected:
                        owed[-1] = packets[-1]
            self.authors[packets[-1] if size % 2 else b"MSG %b\0%b" % (key, payload)] = self.publishers[
                at
            ].protocol.signature.notice
        if self.publishers[at].is_connected and not self.publishers[at].transport.is_paused:
            self.publishers[at].send(*packets)
        else:
            for owed, receiver in zip(self.owed, self.receivers, strict=True):
                if receiver.is_connected:
                    del owed[-len(packets) :]
        self.read()

    def read(self) -> None:
        """Take what has arrived at all receivers; the last notice before a message names its publisher."""
        for at, receiver in enumerate(self.receivers):
            for packet in receiver.take():
                if packet.startswith(b"CMSG sender\0"):
                    self.named[at] = packet
                elif not packet.startswith(b"CMSG "):
                    self.got[at].append(plain(packet))
                    if receiver.protocol.settings.sender:
                        assert self.authors[plain(packet)] == self.named[at]

    def check(self) -> None:
        """Whoever is connected has got, waits for, or has lost all that it is owed, and nothing else."""
        self.bus.finish()
        self.read()
        held = sum(len(peer.transport._arrived) for peer in self.publishers)
        for owed, got, receiver in zip(self.owed, self.got, self.receivers, strict=True):
            assert set(got) <= set(owed)
            assert len(set(got)) == len(got)
            protocol = receiver.protocol
            if receiver.is_connected and not held:
                queue = protocol.queue
                assert len(got) + queue.messages + protocol.lost + queue.conflated == len(owed)
            settings = protocol.settings
            if settings.order.arrival and settings.soft.selector != b"blocking/soft/latest":
                numbers = [int(packet.partition(b"\0")[2].partition(b";")[0]) for packet in got]
                assert numbers == sorted(numbers)

    def close(self) -> None:
        """Everybody leaves: no memory, no file and no charge is left."""
        for peer in (*self.receivers, *self.publishers):
            if peer.is_connected:
                peer.transport.hang_up()
        self.bus.settle()
        self.bus.finish()
        for publisher in self.publishers:
            share = publisher.protocol.user.payloads
            assert (share.files, share.bytes, share.receivers) == (0, 0, {})
        assert files(self.bus) == 0
        assert self.bus.registry.users.budget.memory.held == 0


@settings(max_examples=examples(100), deadline=None)
@given(receivers=st.lists(kinds, min_size=1, max_size=4), script=st.lists(steps, max_size=25))
def test_nothing_is_lost_untold_or_left_behind(receivers, script) -> None:
    """Published = delivered + waiting + lost + conflated, the bytes are right, and at the end nothing is left."""
    gc.collect()
    before = descriptors()
    model = Model(receivers)
    for kind, at, *rest in script:
        if kind == "publish":
            model.publish(at, rest[0])
        else:
            peer = model.receivers[at % len(model.receivers)]
            if not peer.is_connected:
                continue
            if kind == "stall":
                peer.stall()
            elif kind == "drain":
                peer.drain(rest[0])
            elif kind == "busy":
                model.bus.use_up(peer, 1)
            elif kind == "off":
                peer.send(b"CMSG payload/off")
            else:
                peer.transport.hang_up()
                model.bus.settle()
        model.read()
        model.check()
    model.close()
    assert set(descriptors()) <= set(before)
