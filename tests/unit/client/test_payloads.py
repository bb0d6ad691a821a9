"""Large messages in sealed memory: the agreement, the memory, the packets, and what waits for a connection."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sbus.client.batches import BlockingPayloadBatch
from sbus.client.core import ClientCore, Message
from sbus.client.denials import Denial
from sbus.client.losses import Lost
from sbus.client.outbox import NO_ROOM, Outbox
from sbus.client.payload_sender import PayloadSender
from sbus.client.payloads import Arena, Outgoing, flat, open_attached
from sbus.client.responding import Request, reply_key
from sbus.errors import BufferFull, Closed, InvalidKey, PacketTooLong, UsageError
from sbus.protocol.bundles import MAX_BUNDLE, pack, unbundle
from sbus.protocol.keys import EARLY
from sbus.protocol.packets import Split, build_range
from sbus.syscalls.batch import PacketReader
from sbus.syscalls.memfd import Attached, Memfd, adopt
from tests.support.descriptors import descriptors
from tests.support.examples import examples
from tests.support.packets import sealed
from tests.unit.client.fakes import Waiter
from tests.unit.client.test_core import Sink

ASKED = [b"CMSG payload/on", b"CMSG !/cred/whoami"]
ANSWER = b"CMSG payload/on\x00100 1000"
WHOAMI = b"CMSG !/cred/whoami\0!/cred/1/2/3"


def attached(packet: bytes, *files: Memfd, is_cut: bool = False) -> Attached:
    return Attached.of(packet, adopt([os.dup(file.fileno()) for file in files]), is_cut)


def outgoing(key: bytes, data: bytes) -> Outgoing:
    return Outgoing.of(key, sealed(data), 0, len(data))


def travelling(packets: list[bytes]) -> list[bytes]:
    """Return the packets that go over the socket."""
    return [packet.packet if isinstance(packet, Outgoing) else packet for packet in packets]


@pytest.fixture
def lost() -> list[Lost]:
    return []


@pytest.fixture
def core(lost: list[Lost]) -> ClientCore:
    """A client that has asked for payloads."""
    made = ClientCore(payloads=True, on_truncated=lost.append)
    assert made.resync_packets() == ASKED
    made.connected(1 << 20)
    return made


@pytest.fixture
def agreed(core: ClientCore) -> ClientCore:
    """A client whose server takes payloads of 100 to 1,000 bytes in memory."""
    core.receive([ANSWER, WHOAMI])
    return core


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        yield ends


class TestAgreement:
    """What a client and its server have agreed."""

    def test_nobody_asks_without_the_wish(self) -> None:
        """A client without payloads, or in the early dialect, neither asks nor takes an answer."""
        for core in (ClientCore(), ClientCore(EARLY, payloads=True)):
            assert core.resync_packets() == []
            core.receive([ANSWER])
            assert type(core.publish("k", bytes(500))) is bytes
            assert not core.payloads.is_open

    def test_size_decides(self, agreed: ClientCore) -> None:
        """Payloads from the least size on go into memory; smaller ones are ordinary messages."""
        assert "payload" in agreed.extensions.answered
        assert agreed.publish("k", bytes(99)) == b"MSG k\0" + bytes(99)
        packet = agreed.publish("k", b"x" * 100)
        assert isinstance(packet, Outgoing)
        assert packet.packet == b"FMSG k\x000 100"
        assert packet.memfd.fault() is None
        assert packet.plain() == b"MSG k\0" + b"x" * 100
        assert len(packet) == len(packet.plain())

    def test_any_buffer_is_a_payload(self, agreed: ClientCore) -> None:
        """Large payloads may be of any type with the buffer interface, also one that is not contiguous."""
        for payload in (bytearray(b"ab" * 100), memoryview(b"ab" * 100), memoryview(b"a-b-" * 100)[::2]):
            assert cast(Outgoing, agreed.publish("k", cast(bytes, payload))).plain() == b"MSG k\0" + b"ab" * 100
        with pytest.raises(UsageError, match="bytes, not str"):
            agreed.publish("k", cast(Any, "x" * 1000))

    def test_more_than_the_most_is_refused(self, agreed: ClientCore) -> None:
        """The error for a payload above the limit names the option that raises it."""
        assert isinstance(agreed.publish("k", bytes(1000)), Outgoing)
        with pytest.raises(PacketTooLong, match=r"1001 bytes of payload, and the limit is 1000.*--max-payload"):
            agreed.publish("k", bytes(1001))

    def test_keys_are_checked(self, agreed: ClientCore) -> None:
        """The key of a message in memory has to be a routing key, and has to fit a packet."""
        with pytest.raises(InvalidKey):
            agreed.publish("a\0b", bytes(500))
        with pytest.raises(PacketTooLong):
            agreed.publish(b"k" * (1 << 20), bytes(500))

    def test_first_large_message_waits_for_the_answer(self, core: ClientCore) -> None:
        """Until the answer, a large payload raises what makes a library wait for it; a small one is sent."""
        assert core.payloads.is_open
        assert core.may_learn_limit
        assert core.publish("k", bytes(1000)) == b"MSG k\0" + bytes(1000)
        with pytest.raises(PacketTooLong):
            core.publish("k", bytes(MAX_BUNDLE))
        core.receive([WHOAMI])  # a server without payloads
        assert not core.may_learn_limit
        assert core.publish("k", bytes(MAX_BUNDLE)) == b"MSG k\0" + bytes(MAX_BUNDLE)
        assert core.longest_payload == core.max_packet

    def test_last_agreement_counts_until_the_next(self, agreed: ClientCore) -> None:
        """Without a connection large messages are made as for the server before; the next one may not take them."""
        agreed.disconnected()
        assert isinstance(agreed.publish("k", bytes(500)), Outgoing)
        assert agreed.resync_packets() == ASKED
        agreed.connected(1 << 20)
        assert not agreed.payloads.is_settled
        assert isinstance(agreed.publish("k", bytes(500)), Outgoing)
        agreed.receive([WHOAMI])
        assert agreed.payloads.is_settled
        assert type(agreed.publish("k", bytes(500))) is bytes
        assert agreed.longest_payload == agreed.max_packet

    @pytest.mark.parametrize("answer", [b"", b"1", b"1 2 3", b"-1 5", b"a 5", b"1 " + b"9" * 19])
    def test_malformed_answers_agree_to_nothing(self, core: ClientCore, answer: bytes) -> None:
        """An answer that is not two numbers leaves everything as it is; so does one that was not asked for."""
        core.receive([b"CMSG payload/on\0" + answer, WHOAMI, ANSWER])
        assert type(core.publish("k", bytes(500))) is bytes

    def test_application_cannot_ask_itself(self, agreed: ClientCore) -> None:
        """``control`` refuses what the library does."""
        with pytest.raises(UsageError, match="payloads=True"):
            agreed.control("payload/off")

    def test_many_share_one_memory(self, agreed: ClientCore) -> None:
        """The large messages of one ``publish_many`` are in one memory, as far as one payload may be long."""
        packets = agreed.publish_many([("a", b"1"), ("b", b"2" * 300), ("c", b"3" * 300), ("d", b"4" * 600)])
        assert travelling(packets) == [
            b"MSG a\x001", b"FMSG b\x000 300", b"FMSG c\x00320 300", b"FMSG d\x000 600",
        ]  # fmt: skip
        large = [cast(Outgoing, packet) for packet in packets[1:]]
        assert large[0].memfd is large[1].memfd
        assert large[0].memfd is not large[2].memfd
        assert all(packet.memfd.fault() is None for packet in large)


class TestMemory:
    """The arena: payloads in memory that is then sealed."""

    @settings(max_examples=examples(100), deadline=None)
    @given(st.lists(st.integers(1, 20_000), max_size=12), st.integers(1, 50_000))
    def test_everything_is_where_it_was_put(self, sizes: list[int], most: int) -> None:
        """Payloads keep their bytes, are aligned, and leave no hole in sealed memory."""
        arena = Arena(most)
        places: list[tuple[Memfd, int, bytes]] = []
        for number, size in enumerate(sizes, 1):
            data = bytes([number]) * size
            places.append((*arena.write(memoryview(data)), data))
        arena.seal()
        for memory, offset, data in places:
            assert memory.fault() is None
            assert memory.size <= max(most, len(data))
            assert offset % 64 == 0
            assert memory.read(offset, len(data)) == data


class TestBatch:
    """A batch: what the application makes in it, and its end."""

    def batch(self, core: ClientCore, sent: list[bytes]) -> BlockingPayloadBatch:
        return BlockingPayloadBatch(core, lambda batch: sent.extend(batch.packets()))

    def test_messages_are_sent_in_order_at_the_end(self, agreed: ClientCore) -> None:
        """Views, parts of them, other bytes and empty payloads become messages as they were, in order, at the end."""
        sent: list[bytes] = []
        with self.batch(agreed, sent) as batch:
            view = batch.allocate(500)
            view[:5] = b"hello"
            part = view[1:3]
            batch.publish("a", view)
            batch.publish("b", part)
            batch.publish("c", b"other")
            batch.publish("d", b"")
            view[1:2] = b"u"
            assert sent == []
        assert [packet.plain() if isinstance(packet, Outgoing) else packet for packet in sent] == [
            b"MSG a\0hello" + bytes(495), b"MSG b\0el", b"MSG c\0other", b"MSG d\0",
        ]  # fmt: skip
        with pytest.raises(UsageError, match="has ended"):
            batch.publish("a", b"")
        with pytest.raises(UsageError, match="has ended"):
            batch.allocate(1)

    def test_server_without_payloads_gets_ordinary_messages(self, core: ClientCore) -> None:
        """Without payloads a batch sends the bytes; the error for one that is too long names the packet's limit."""
        core.receive([WHOAMI])
        sent: list[bytes] = []
        with self.batch(core, sent) as batch:
            view = batch.allocate(5)
            view[:] = b"hello"
            batch.publish("a", view)
        assert sent == [b"MSG a\0hello"]
        with pytest.raises(PacketTooLong, match="max-packet"), self.batch(core, sent) as batch:
            batch.publish("a", batch.allocate(1 << 20))

    def test_exception_sends_nothing(self, agreed: ClientCore) -> None:
        """A block that raises sends nothing and leaves no descriptor behind."""
        sent: list[bytes] = []
        before = descriptors()
        batch = self.batch(agreed, sent)
        with batch:
            batch.publish("a", batch.allocate(10))
            batch.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert sent == []
        del batch
        gc.collect()
        assert descriptors() == before

    def test_sizes_and_keys_are_checked_at_once(self, agreed: ClientCore) -> None:
        """What could not be sent is refused where it is made."""
        batch = self.batch(agreed, [])
        with pytest.raises(PacketTooLong, match="--max-payload"):
            batch.allocate(1001)
        with pytest.raises(PacketTooLong, match="--max-payload"):
            batch.publish("a", bytes(1001))
        with pytest.raises(UsageError, match="at least 1 byte"):
            batch.allocate(0)
        with pytest.raises(InvalidKey):
            batch.publish("a\0b", b"x")
        with pytest.raises(UsageError, match="not str"):
            batch.publish("a", cast(Any, "x"))


class TestArrival:
    """Packets that come with memory."""

    @pytest.fixture
    def sink(self, agreed: ClientCore) -> Sink:
        sink = Sink()
        agreed.subscribe("", sink)
        return sink

    def receive(self, core: ClientCore, *packets: bytes) -> None:
        core.receive(open_attached(list(packets)))

    def test_payload_is_a_read_only_view(self, agreed: ClientCore, sink: Sink, lost: list[Lost]) -> None:
        """The payload of a message in memory is a view that nobody can write to; the others stay bytes."""
        self.receive(agreed, b"MSG a\x001", attached(build_range(b"b", 2, 3), sealed(b"0123456")), b"MSG c\x003")
        assert [message.key for message in sink.messages] == [b"a", b"b", b"c"]
        view: Any = sink.messages[1].payload
        assert isinstance(view, memoryview)
        assert bytes(view) == b"234"
        with pytest.raises(TypeError):
            view[0] = 1
        assert "payload=b'234'" in repr(sink.messages[1])
        assert lost == []

    def test_memory_lives_as_long_as_its_last_view(self, agreed: ClientCore, sink: Sink) -> None:
        """All messages of a bundle share one map and its descriptor, which end with the last view."""
        gc.collect()
        before = descriptors()
        memory = sealed(b"ab" * 100)
        [bundle], _ = pack([build_range(b"k", i, 1) for i in range(10)], MAX_BUNDLE, 1)
        self.receive(agreed, attached(bundle, memory))
        del memory
        gc.collect()
        assert len(descriptors()) == len(before) + (sys.version_info < (3, 13))
        assert b"".join(message.payload for message in sink.messages) == b"ab" * 5
        kept = sink.messages.pop().payload
        sink.messages.clear()
        gc.collect()
        assert len(descriptors()) == len(before) + (sys.version_info < (3, 13))
        assert bytes(kept) == b"b"
        del kept
        gc.collect()
        assert descriptors() == before

    def test_what_cannot_be_mapped_is_a_loss_in_its_place(
        self, agreed: ClientCore, sink: Sink, lost: list[Lost]
    ) -> None:
        """Memory that is missing, cut, doubled, unsealed, sparse, too short or no memory is a loss, never a signal."""
        good, unsealed, sparse, empty = sealed(b"x" * 10), Memfd.create(), Memfd.create(), Memfd.create()
        os.write(unsealed.fileno(), b"x" * 10)
        os.ftruncate(sparse.fileno(), 1 << 40)
        sparse.seal()
        empty.seal()
        device = Memfd(os.open("/dev/zero", os.O_RDONLY))
        whole = build_range(b"k", 0, 10)
        bad = [
            whole,
            attached(whole, is_cut=True),
            attached(whole, good, is_cut=True),
            attached(whole, good, good),
            attached(whole, unsealed),
            attached(whole, sparse),
            attached(whole, empty),
            attached(whole, device),
            attached(build_range(b"k", 1, 10), good),
        ]
        before = descriptors()
        for packet in bad:
            self.receive(agreed, b"MSG before\0", packet, b"MSG after\0")
        assert [message.key for message in sink.messages] == [b"before", b"after"] * len(bad)
        assert lost == [Lost(1, 16, None, "payload")] * len(bad)
        del bad, packet
        gc.collect()
        assert len(descriptors()) < len(before)

    def test_ranges_are_checked(self, agreed: ClientCore, sink: Sink, lost: list[Lost]) -> None:
        """A malformed range is a loss of unknown size; other packets with a descriptor are handled as they are."""
        memory = sealed(b"x" * 10)
        for text in (b"", b"1", b"a 1", b"0 0", b"-1 1", b"01 1", b"0 " + b"9" * 30):
            self.receive(agreed, attached(b"FMSG k\0" + text, memory))
        assert lost == [Lost(1, 6, None, "payload")] * 7
        self.receive(agreed, attached(b"MSG k\0plain", memory), attached(b"BNDL", memory))
        assert [message.payload for message in sink.messages] == [b"plain"]

    def test_map_that_fails_is_a_loss(self, agreed: ClientCore, lost: list[Lost]) -> None:
        """If this process has no descriptor left for the map, the message is lost, and the client goes on."""
        taken: list[int] = []
        packet = attached(build_range(b"k", 0, 1), sealed(b"x"))
        packet.files[0].fault()
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        try:
            self.receive(agreed, packet)
        finally:
            for fd in taken:
                os.close(fd)
        assert len(lost) == 1

    def test_requests_and_replies_may_be_large(self) -> None:
        """A request whose payload is a view has its reply key found at the beginning, and only there."""
        view = cast(bytes, memoryview(b"!/cred/1/2/3/sbus/reply/x\0question\0rest"))
        request = Request.received(cast(Any, None), Message(b"k", view))
        assert request.payload == b"question\0rest"
        assert reply_key(cast(bytes, memoryview(bytes(b"x" * 5000 + b"\0")))) is None
        assert Request.received(cast(Any, None), Message(b"k", b"x" * 5000)).payload == b""

    def test_denials_are_as_for_other_messages(self) -> None:
        """A refused message in memory is reported by its key."""
        denied: list[Denial] = []
        core = ClientCore(payloads=True, on_denied=denied.append)
        core.resync_packets()
        core.connected(1 << 20)
        core.receive([ANSWER, b"CMSG denied\0FMSG k rule"])
        assert [(denial.verb, denial.key, denial.rule) for denial in denied] == [(b"FMSG", b"k", "rule")]
        waiter = Waiter()
        core.extensions.denials.expect(b"k", waiter)
        core.receive([b"CMSG denied\0FMSG k rule"])
        [error] = waiter.outcomes
        assert "may not publish 'k' with its payload in sealed memory" in str(error)


class TestSending:
    """The system calls that send packets with memory."""

    def sent(self, sock: socket.socket) -> list[bytes]:
        return PacketReader(1 << 20, descriptors=True).read(sock)[0]

    @pytest.fixture
    def sender(self, agreed: ClientCore) -> PayloadSender:
        return PayloadSender(agreed)

    @pytest.mark.parametrize("limit", [0, MAX_BUNDLE])
    def test_one_memory_goes_with_one_packet(
        self, pair: tuple[socket.socket, socket.socket], agreed: ClientCore, sender: PayloadSender, limit: int
    ) -> None:
        """With bundles the messages of one memory are one packet with one descriptor; order stays in any case."""
        packets = agreed.publish_many([("a", b"1"), ("a", b"2"), *[("b", bytes(200))] * 3, ("c", b"3")])
        packets.append(outgoing(b"d", b"x"))
        agreed.bundle_limit = limit
        assert sender.send_all(pair[0], packets) == len(packets)
        arrived = self.sent(pair[1])
        assert unbundle([bytes(packet) for packet in arrived]) == travelling(packets)
        plain = [bytes, bytes, Attached, Attached, Attached, bytes, Attached]
        assert [type(packet) for packet in arrived] == ([bytes, Attached, bytes, Attached] if limit else plain)
        opened = unbundle(open_attached(arrived))
        assert [isinstance(packet, Split) for packet in opened] == [isinstance(packet, Outgoing) for packet in packets]

    def test_full_socket_takes_nothing(self, pair: tuple[socket.socket, socket.socket], sender: PayloadSender) -> None:
        """A full socket is no error; what it took is counted."""
        packets: list[bytes] = [outgoing(b"k", b"x")] * 1000
        sent = sender.send_all(pair[0], packets)
        assert 0 < sent < 1000
        assert sender.send(pair[0], packets, 0) == 0
        assert self.sent(pair[1])[0] == b"FMSG k\x000 1"
        assert sender.send(pair[0], packets, 0) == 1

    def test_other_errors_are_raised(self, pair: tuple[socket.socket, socket.socket], sender: PayloadSender) -> None:
        """A peer that has gone is an error, as for other packets; too many descriptors under way are none."""
        pair[1].close()
        with pytest.raises(BrokenPipeError):
            sender.send_all(pair[0], [outgoing(b"k", b"x")])
        assert errno.ETOOMANYREFS in NO_ROOM

    def test_server_decides_what_is_sent(self, pair: tuple[socket.socket, socket.socket], core: ClientCore) -> None:
        """Until it is settled nothing is sent in memory; then a server without payloads gets what fits a packet."""
        sender = PayloadSender(core)
        packets: list[bytes] = [outgoing(b"k", b"x" * 300), outgoing(b"k", b"y")]
        assert sender.send_all(pair[0], [b"MSG k\0first", *packets]) == 1
        core.receive([WHOAMI])
        assert sender.send_all(pair[0], packets) == 2
        assert self.sent(pair[1]) == [b"MSG k\0first", b"MSG k\0" + b"x" * 300, b"MSG k\0y"]
        with pytest.raises(PacketTooLong, match="2097158 bytes"):
            sender.send_all(pair[0], [outgoing(b"k", bytes(2 << 20))])


class WaitingPayloads(RuleBasedStateMachine):
    """An outbox with messages in memory over several connections, and a model: a list."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.outbox.is_held = True
        self.line: list[bytes] = []
        self.holds = True
        self.number = 0
        self.descriptors = len(descriptors())

    def teardown(self) -> None:
        self.line = [packet for packet in self.line if not isinstance(packet, Outgoing)]
        self.outbox.set_exception(Closed("the end"))
        gc.collect()
        assert len(descriptors()) == self.descriptors

    def _next(self) -> bytes:
        self.number += 1
        return b"%d" % self.number

    @rule(size=st.integers(1, 300))
    def add_large(self, size: int) -> None:
        packet = outgoing(self._next(), bytes(size))
        self.outbox.extend([packet])
        self.line.append(packet)

    @rule()
    def add_small(self) -> None:
        packet = b"MSG k\0" + self._next()
        self.outbox.write(packet)
        self.line.append(packet)

    @rule(size=st.integers(1, 300))
    def add_and_cancel(self, size: int) -> None:
        self.outbox.extend([outgoing(self._next(), bytes(size))])
        self.outbox.cancel(self.outbox.wait(Waiter(), 1))

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        taken = self.outbox.take(64)
        expected = self.line[:64]
        if self.holds:
            at = next((i for i, packet in enumerate(expected) if packet.startswith(b"MSG")), len(expected))
            expected = expected[:at]
        assert taken == expected
        sent = data.draw(st.integers(0, len(taken)))
        self.outbox.ack(taken, sent)
        del self.line[:sent]

    @rule()
    def reconnect(self) -> None:
        self.outbox.restart([b"CMSG again"], hold=True)
        self.line = [b"CMSG again", *(packet for packet in self.line if not packet.startswith(b"CMSG"))]
        self.holds = True

    @rule()
    def settle(self) -> None:
        self.outbox.is_held = False
        self.holds = False

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.outbox) == len(self.line)


TestWaitingPayloads = WaitingPayloads.TestCase
TestWaitingPayloads.settings = settings(max_examples=examples(100), deadline=None)


def test_buffer_counts_the_payload() -> None:
    """``reconnect_buffer`` counts the bytes of a payload, not those of its packet; a message taken back counts not."""
    outbox = Outbox()
    outbox.extend_within([outgoing(b"k", bytes(600))], 1000)
    with pytest.raises(BufferFull, match="606 bytes wait"):
        outbox.extend_within([outgoing(b"k", bytes(600))], 1000)
    outbox.cancel(outbox.wait(Waiter(), 1))
    outbox.extend_within([outgoing(b"k", bytes(600))], 1000)


def test_flat() -> None:
    """`flat` copies only what has no contiguous bytes."""
    data = bytearray(b"abcd")
    view = flat(data)
    data[0] = 0
    assert bytes(view) == b"\0bcd"
    assert bytes(flat(memoryview(data)[::-1])) == b"dcb\0"
    assert bytes(flat(b"")) == b""
