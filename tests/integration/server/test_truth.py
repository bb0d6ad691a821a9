"""What clients learn of losses and of their end, over real sockets: receipts, bye, latest, and the orderly close."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from sbus.protocol.bundles import pack, unbundle
from tests.support.harness import WHOAMI, Client, goes_on, numbered

SMALL = "--max-packet=1024"
SESSION = Path(__file__).with_name("data") / "session.jsonl"
"""A session of the cookbook's C client, and of a raw client behind it, recorded before there were extensions.

Each line is a connection, what happened on it, and the packet (Latin-1).
"""


def losses(packets: list[bytes]) -> list[tuple[int, int, int, str]]:
    """Return the receipts among packets: messages, bytes, messages in all, cause."""
    found = [p.removeprefix(b"CMSG lost\0").decode().split(" ") for p in packets if p.startswith(b"CMSG lost\0")]
    return [(int(messages), int(size), int(total), why) for messages, size, total, why in found]


def to_the_end(client: Client) -> list[bytes]:
    """Return all packets up to end-of-file; a reset fails."""
    client.sock.settimeout(10)
    packets = []
    while packet := client.sock.recv(1 << 20):
        packets.append(packet)
    return packets


def flood(publisher: Client, count: int, key: bytes = b"flood", size: int = 0) -> list[bytes]:
    packets = numbered(key, count, size)
    for packet in packets:
        publisher.send(packet)
    publisher.sync()
    return packets


class TestBye:
    """Why a client is disconnected."""

    def test_violation(self, lease):
        """The reason and one line of text come before the end, after what was delivered; the input is discarded."""
        started = lease()
        client = started.client(b"k")
        client.cmsg(b"bye/on", b"bye/on")
        assert client.sync() == [b"CMSG bye/on\0"] * 2
        client.msg(b"k", b"before")
        started.client().sync()  # the message is in the client's socket now
        client.send(b"NONSENSE")
        for packet in numbered(b"k", 100):
            if not push(client, packet):
                break
        message, bye = to_the_end(client)
        assert message == b"MSG k\0before"
        assert bye == b"CMSG bye\0violation the client broke the protocol: unknown message type"

    def test_plain_clients_see_nothing_new(self, lease):
        """A client that asked for nothing reads what was delivered to it, then end-of-file and no reset."""
        started = lease()
        client = started.client(b"k")
        client.msg(b"k", b"before")
        started.client().sync()
        client.send(b"NONSENSE")
        for packet in numbered(b"k", 100):
            if not push(client, packet):
                break
        assert to_the_end(client) == [b"MSG k\0before"]

    @pytest.mark.parametrize(
        ("strategy", "option", "reason"),
        [
            (b"blocking/soft/error", "--queue-messages=1000", b"socket-full"),
            (b"blocking/hard/error", "--queue-messages=100", b"queue-full"),
            (b"blocking/soft/block", "--block-timeout=0.3", b"blocked-too-long"),
        ],
    )
    def test_full_socket(self, lease, strategy, option, reason):
        """The reason goes past a full socket, behind one receipt for all that waited: nothing is unaccounted for."""
        started = lease(SMALL, option)
        reader = started.client(b"flood")
        reader.cmsg(b"bye/on", b"receipts/on", strategy)
        assert reader.sync() == [b"CMSG bye/on\0001024", b"CMSG receipts/on\0"]  # the limit is not the usual one
        packets = flood(started.client(), 2000)
        started.wait_log(r"client \d+ disconnected")
        *got, bye = to_the_end(reader)
        assert bye.startswith(b"CMSG bye\0" + reason + b" ")
        assert b"\n" not in bye
        ((lost, size, total, why),) = losses(got)
        del got[-1]
        assert (why, total) == ("disconnect", lost)
        assert got == packets[: len(got)]
        # What was published after its end is not for it.
        assert len(got) + lost <= len(packets)
        assert size == sum(map(len, packets[len(got) : len(got) + lost]))
        assert lost > 0
        assert goes_on(started)

    def test_server_stops(self, bus):
        """Every client that asked learns that the server stops."""
        started = bus()
        clients = [started.client(b"k") for _ in range(3)]
        for client in clients[:2]:
            client.cmsg(b"bye/on")
            client.sync()
        clients[1].cmsg(b"bye/off")
        assert clients[1].sync() == [b"CMSG bye/off\0"]
        clients[2].sync()
        assert started.stop() == 0
        assert to_the_end(clients[0]) == [b"CMSG bye\0server-stopped the server is stopping"]
        assert to_the_end(clients[1]) == to_the_end(clients[2]) == []

    def test_early_dialect(self, bus):
        """The early dialect has no control messages, so it has none of this."""
        started = bus("--dialect=early")
        with Client(started.address) as client:
            client.cmsg(b"bye/on")
            assert to_the_end(client) == []

    def test_many_hostile_clients(self, bus):
        """Clients that read nothing, owe packets and asked for everything do not delay the end of the server."""
        count = min(500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        started = bus(SMALL)
        clients = [started.client(b"flood") for _ in range(count)]
        for client in clients:
            client.cmsg(b"bye/on", b"receipts/on", b"blocking/soft/discard")
        for client in clients:
            client.sync()
        publisher = started.client()
        for _ in range(50):
            publisher.send(b"MSG flood\0" + bytes(900))
        publisher.sync()
        for client in clients:
            client.send(b"NONSENSE")
            for _ in range(70):
                push(client, b"MSG k\0")
        before = started.cpu() + children()
        assert started.stop(signal.SIGTERM) == 0
        assert children() - before < 2  # seconds of its CPU: other load on the machine does not count
        assert all(to_the_end(client)[-1].startswith(b"CMSG bye\0") for client in clients)
        for client in clients:
            client.close()


def children() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def push(client: Client, packet: bytes) -> bool:
    """Send without waiting; return whether the packet was sent and more may be."""
    try:
        return client.push(packet)
    except OSError:
        return False


class TestReceipts:
    """What was lost, and where."""

    @pytest.mark.parametrize("bundled", [False, True])
    @pytest.mark.parametrize("strategy", [b"blocking/soft/discard", b"blocking/soft/queue"])
    def test_places(self, lease, strategy, bundled):
        """A reader that reads now and then finds each gap told before it, and all of it accounted for."""
        started = lease(SMALL if not bundled else "--max-packet=70000", "--queue-messages=150")
        reader = started.client(b"flood")
        reader.cmsg(b"receipts/on", strategy)
        assert reader.sync() == [b"CMSG receipts/on\0"]
        if bundled:
            reader.cmsg(b"bundle/on")
            reader.sync()
        publisher = started.client()
        published, got = [], []
        for burst in range(8):
            packets = numbered(b"flood", 1500, 100)
            published += [packet + b"%d" % burst for packet in packets]
            for packet in published[-1500:]:
                publisher.send(packet)
            publisher.sync()
            for _ in range(3 + 20 * burst):
                if reader.has_input():
                    got += unbundle([reader.recv()])
        got += unbundle(Synced(reader).rest())
        messages = [packet for packet in got if packet.startswith(b"MSG ")]
        told = losses(got)
        assert len(published) == len(messages) + sum(each[0] for each in told)
        assert sum(each[1] for each in told) == sum(map(len, set(published) - set(messages)))
        assert told[-1][2] == len(published) - len(messages)
        assert {why for _, _, _, why in told} == {"discard" if b"discard" in strategy else "queue-full"}
        index = {packet: at for at, packet in enumerate(published)}
        so_far = passed = 0
        for packet in got:
            if packet in index:
                assert so_far >= index[packet] - passed
                passed += 1
            elif packet.startswith(b"CMSG lost\0"):
                so_far += losses([packet])[0][0]

    def test_many_readers_and_modes(self, lease):
        """Readers with every combination of strategies each account for every message."""
        started = lease(SMALL, "--queue-messages=120", "--total-queue-bytes=60000")
        readers = []
        for soft in (b"queue", b"discard", b"latest"):
            for order in (b"queue", b"stack", b"random"):
                reader = started.client(b"flood")
                reader.cmsg(b"receipts/on", b"blocking/soft/" + soft, b"order/" + order)
                reader.sync()
                readers.append((soft, order, reader))
        published = flood(started.client(), 3000, size=50)
        for soft, order, reader in readers:
            got = Synced(reader).rest()
            messages = [packet for packet in got if packet.startswith(b"MSG ")]
            lost = sum(each[0] for each in losses(got))
            if (soft, order) == (b"latest", b"queue"):
                assert messages[-1] == published[-1]
                assert lost == 0
            else:
                assert len(messages) + lost == len(published)

    def test_off(self, lease):
        """After receipts/off nothing more is told; what was lost before the first receipts/on counts in the total."""
        started = lease(SMALL)
        reader, publisher = started.client(b"flood"), started.client()
        reader.cmsg(b"blocking/soft/discard")
        reader.sync()
        first = flood(publisher, 1000)
        lost = len(first) - len(reader.sync())
        reader.cmsg(b"receipts/on")
        reader.sync()
        second = flood(publisher, 1000)
        got = Synced(reader).rest()
        told = losses(got)
        assert sum(each[0] for each in told) == len(second) - sum(p.startswith(b"MSG ") for p in got)
        assert told[-1][2] == lost + sum(each[0] for each in told)
        reader.cmsg(b"receipts/off")
        assert reader.sync() == [b"CMSG receipts/off\0"]
        flood(publisher, 1000)
        assert losses(reader.sync()) == []


class Synced:
    """A reader, as far as the server has got: its own message comes back as the last one."""

    def __init__(self, reader: Client) -> None:
        self._reader = reader

    def rest(self) -> list[bytes]:
        """Return everything up to the reply to a question asked now, and what its queue still held."""
        self._reader.send(WHOAMI)
        packets: list[bytes] = []
        while not any(part.startswith(WHOAMI + b"\0") for part in packets):
            packets += unbundle([self._reader.recv()])
        # Under other orders than the queue's the reply comes first: ask until nothing else comes.
        while True:
            self._reader.send(WHOAMI)
            more: list[bytes] = []
            while not any(part.startswith(WHOAMI + b"\0") for part in more):
                more += unbundle([self._reader.recv()])
            packets += more
            if len(more) == 1:
                return [packet for packet in packets if not packet.startswith(WHOAMI)]


class TestLatest:
    """Only the newest message of each key."""

    def test_slow_reader_gets_each_newest_value(self, lease):
        """A reader at a tenth of the publisher's speed gets the newest value of every one of 1,000 keys."""
        started = lease(SMALL, "--queue-messages=1000")
        reader, publisher = started.client(b"k/"), started.client()
        reader.cmsg(b"receipts/on", b"blocking/soft/latest")
        reader.sync()
        got: list[bytes] = []
        sent = 0
        for value in range(30):
            for number in range(1000):
                publisher.send(b"MSG k/%d\0%d" % (number, value))
                sent += 1
                if not number % 10 and reader.has_input():
                    got.append(reader.recv())
        publisher.sync()
        got += Synced(reader).rest()
        assert losses(got) == []
        newest = dict(packet[4:].split(b"\0") for packet in got)
        assert newest == {b"k/%d" % number: b"29" for number in range(1000)}
        assert len(got) < sent / 2

    def test_hard_limit(self, lease):
        """A new key that finds no room is dropped with its receipt; keys that wait are still replaced."""
        started = lease(SMALL, "--queue-messages=10")
        reader, publisher = started.client(b"k/"), started.client()
        reader.cmsg(b"receipts/on", b"blocking/soft/latest")
        reader.sync()
        for value in range(3):
            for number in range(2000):
                publisher.send(b"MSG k/%d\0%d" % (number, value))
        publisher.sync()
        got = Synced(reader).rest()
        messages = [packet for packet in got if packet.startswith(b"MSG ")]
        told = losses(got)
        assert told[0][3] == "queue-full"
        conflated = 6000 - len(messages) - sum(each[0] for each in told)
        assert conflated == 20
        assert sum(packet.endswith(b"\x002") for packet in messages) == 10


def test_recorded_session_of_a_c_client(bus):
    """A client that asks for none of this sees the same bytes as before there was any of it."""
    started = bus(SMALL)
    clients: dict[int, Client] = {}
    for line in SESSION.read_text().splitlines():
        number, event, text = json.loads(line)
        if event == "open":
            clients[number] = started.client()
            continue
        client = clients[number]
        ids = client.credentials.removeprefix(b"!/cred/").decode()
        packet = text.replace("{gid}/{uid}/{pid}", ids).encode("latin-1")
        if event == "send":
            client.send(packet)
        elif event == "recv":
            assert client.recv() == packet
        elif event == "close":
            client.close()
        else:
            assert to_the_end(client) == []
    assert started.stop() == 0


def test_bundles_of_a_publisher_are_published_one_by_one(lease):
    """A receipt counts messages, also if they came in bundles."""
    started = lease("--max-packet=70000", "--queue-messages=50")
    reader, publisher = started.client(b"flood"), started.client()
    reader.cmsg(b"receipts/on")
    reader.sync()
    publisher.cmsg(b"bundle/on")
    publisher.sync()
    packets = numbered(b"flood", 20_000, 100)
    for bundle in pack(packets, 65_536, len(packets))[0]:
        publisher.send(bundle)
    publisher.sync()
    got = Synced(reader).rest()
    messages = [packet for packet in got if packet.startswith(b"MSG ")]
    assert len(messages) + sum(each[0] for each in losses(got)) == len(packets)
