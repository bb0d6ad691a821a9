"""Flood control: messages for a reader that does not read, with bystanders that are not disturbed.

Most buses here have a small ``--max-packet``, so that the kernel's buffer of a socket holds few
messages and the server's queues are what counts.
"""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from tests.support.harness import (
    OTHER_USER,
    THIRD_USER,
    WHOAMI,
    Bus,
    Client,
    goes_on,
    is_held_back,
    numbered,
)
from tests.support.waiting import paused

SMALL = "--max-packet=1024"
FOR_EVER = "--block-timeout=600"
SHORTLY = "--block-timeout=0.3"


def kernel_holds(bus: Bus, size: int = 0) -> int:
    """How many messages of a size the kernel holds for a client that does not read."""
    with Client(bus.address) as reader, Client(bus.address) as publisher:
        reader.sub(b"probe")
        reader.cmsg(b"blocking/soft/discard")
        reader.sync()
        for packet in numbered(b"probe", 200, size):
            publisher.send(packet)
        publisher.sync()
        count = len(reader.sync())
    assert 0 < count < 100
    bus.wait_log(r"dropped \d+ messages")
    return count


class TestSoft:
    """What happens when a reader's socket is full."""

    def test_queue(self, lease):
        """blocking/soft/queue, the default, keeps what the socket does not take."""
        started = lease(SMALL)
        readers = [started.client(b"flood"), started.client(b"flood")]
        readers[1].cmsg(b"blocking/soft/discard", b"blocking/soft/queue")
        readers[1].sync()
        publisher = started.client()
        packets = numbered(b"flood", 2000)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        assert goes_on(started)
        for reader in readers:
            assert reader.sync() == packets
        assert started.dropped() == 0

    def test_discard(self, lease):
        """blocking/soft/discard drops what the socket does not take, for that client alone, and counts it."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/discard")
        reader.sync()
        other = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 1000)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        assert goes_on(started)
        got = reader.sync()
        assert 0 < len(got) < 100
        assert got == packets[: len(got)]
        assert other.sync() == packets
        later = publisher.msg(b"flood", b"later")
        publisher.sync()
        assert reader.sync() == [later]
        reader.close()
        started.wait_log(rf"client {started.nth(1)} disconnected")
        assert started.dropped() == 1000 - len(got)

    def test_error(self, lease):
        """blocking/soft/error disconnects the client, and no other, as soon as its socket is full."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/error")
        reader.sync()
        other = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 1000)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        started.wait_log(rf"warn: client {started.nth(1)} disconnected: pid \d+ uid \d+ gid \d+: its socket was full")
        got = reader.rest()
        assert 0 < len(got) < 100
        assert got == packets[: len(got)]
        assert other.sync() == packets
        assert goes_on(started)

    def test_error_spares_who_reads(self, lease):
        """A client that chose soft/error and keeps reading stays."""
        started = lease(SMALL)
        reader = started.client(b"calm")
        reader.cmsg(b"blocking/soft/error")
        for packet in numbered(b"calm", 200):
            reader.send(packet)
            assert reader.sync() == [packet]

    def test_block(self, lease):
        """blocking/soft/block keeps everything, and blocks the publisher until the reader's queue is empty."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander = started.client(), started.client()
        sent = 0
        for packet in numbered(b"flood", 10_000):
            if not publisher.push(packet):
                break
            sent += 1
        assert 0 < sent < 10_000
        assert is_held_back(publisher, bystander, b"MSG to/nobody\0")
        assert goes_on(started)
        assert reader.receive(sent) == numbered(b"flood", sent)
        assert publisher.sync() == []
        later = publisher.msg(b"flood", b"later")
        assert reader.recv() == later
        assert started.dropped() == 0

    def test_block_holds_nobody_else(self, lease):
        """Other publishers are not blocked, and all clients still receive, the blocked publisher included."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander, other = started.client(b"mail"), started.client(), started.client(b"other")
        assert is_held_back(publisher, bystander, b"MSG flood\0")
        for n in range(100):
            mail = other.msg(b"mail", b"%d" % n)
            assert publisher.recv() == mail
            packet = bystander.msg(b"other", b"%d" % n)
            assert other.recv() == packet

    def test_block_holds_every_publisher(self, lease):
        """Each publisher that sends to a congested reader is blocked, and none of their messages is lost."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood/*")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        bystander = started.client()
        publishers = [started.client() for _ in range(5)]
        for who, publisher in enumerate(publishers):
            for packet in numbered(b"flood/%d" % who, 100):
                publisher.send(packet)
            publisher.send(WHOAMI)
        for _ in range(30):
            bystander.sync()
        assert not any(publisher.has_input() for publisher in publishers)
        got = reader.receive(500)
        for who in range(5):
            assert [p for p in got if p.startswith(b"MSG flood/%d" % who)] == numbered(b"flood/%d" % who, 100)
        for publisher in publishers:
            assert publisher.recv().startswith(WHOAMI)

    def test_block_then_another_mode(self, lease):
        """A reader that chooses another strategy unblocks the publishers that it blocked."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander = started.client(), started.client()
        assert is_held_back(publisher, bystander, b"MSG flood\0")
        reader.cmsg(b"blocking/soft/discard")
        assert publisher.sync() == []

    def test_block_then_unsubscribe(self, lease):
        """UNSUB by a reader that does not read stops the flood to it; what waits is kept and delivered."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        publisher.send(WHOAMI)
        reader.unsub(b"flood")
        got = reader.sync()
        assert got == numbered(b"flood", len(got))
        assert publisher.recv().startswith(WHOAMI)

    def test_block_then_leave(self, lease):
        """When the reader leaves, the publisher that it blocked continues."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        other = started.client(b"flood")
        publisher, bystander = started.client(), started.client()
        assert is_held_back(publisher, bystander, b"MSG flood\0")
        reader.close()
        assert publisher.sync() == []
        assert goes_on(started)
        publisher.msg(b"flood", b"last")
        publisher.sync()
        assert other.sync()[-1] == b"MSG flood\0last"

    def test_held_back_publisher_closes(self, lease):
        """A publisher's messages arrive even if it closes while it is blocked."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        sent = 0
        with started.client() as publisher:
            publisher.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200_000)
            while publisher.push(b"MSG flood\0%d" % sent):
                sent += 1
        assert goes_on(started)
        assert reader.receive(sent) == [b"MSG flood\0%d" % n for n in range(sent)]
        assert reader.sync() == []
        assert started.dropped() == 0

    def test_bystander_of_a_block(self, lease):
        """Another receiver of the same messages gets each exactly once when the publisher is unblocked."""
        started = lease(SMALL, FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        other = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 200)
        for packet in packets:
            publisher.send(packet)
        first = other.recv()
        assert first == packets[0]
        assert reader.receive(200) == packets
        assert other.receive(199) == packets[1:]
        assert other.sync() == []


class TestHard:
    """What happens when a reader's queue is at its limit."""

    def test_discard(self, bus):
        """blocking/hard/discard, the default, drops what comes when the queue is full, and keeps the rest."""
        started = bus(SMALL, "--queue-messages=100")
        held = kernel_holds(started)
        reader = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 1000)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        assert goes_on(started)
        before = started.dropped()
        got = reader.sync()
        assert got == packets[: len(got)]
        assert len(got) == held + 100
        later = publisher.msg(b"flood", b"later")
        publisher.sync()
        assert reader.sync() == [later]
        started.stop()
        assert started.dropped() - (200 - held) == 1000 - len(got)
        assert before > 0

    def test_discard_by_bytes(self, lease):
        """The limit in bytes counts whole packets."""
        started = lease(SMALL, "--queue-bytes=10000")
        held = kernel_holds(started, 500)
        reader = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 100, 500)
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        assert reader.sync() == packets[: held + 20]

    def test_error(self, lease):
        """blocking/hard/error disconnects the client whose queue is full, and no other."""
        started = lease(SMALL, "--queue-messages=100")
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/hard/error")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        assert publisher.sync() == []
        assert reader.sync() == numbered(b"flood", 100)
        for packet in numbered(b"flood", 1000):
            publisher.send(packet)
        assert publisher.sync() == []
        started.wait_log(rf"client {started.nth(1)} disconnected: pid \d+ uid \d+ gid \d+: its queue was full")
        got = reader.rest()
        assert got == numbered(b"flood", 1000)[: len(got)]
        assert goes_on(started)

    def test_block(self, lease):
        """blocking/hard/block lets the queue fill up first, then blocks the publisher, and loses nothing."""
        started = lease(SMALL, "--queue-messages=100", FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/hard/block")
        reader.sync()
        publisher, bystander = started.client(), started.client()
        for packet in numbered(b"flood", 90):
            publisher.send(packet)
        assert publisher.sync() == [], "it is not held back before the queue is full"
        sent = 90
        while publisher.push(b"MSG flood\0%d " % sent):
            sent += 1
            assert sent < 10_000
        assert is_held_back(publisher, bystander, b"MSG to/nobody\0")
        assert goes_on(started)
        assert reader.receive(sent) == numbered(b"flood", sent)
        assert publisher.sync() == []
        assert started.dropped() == 0

    def test_block_until_the_low_water_mark(self, lease):
        """hard/block unblocks publishers when the queue is down to a quarter, not before."""
        started = lease(SMALL, "--queue-messages=100", FOR_EVER)
        held = kernel_holds(started)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/hard/block")
        reader.sync()
        publisher, bystander = started.client(), started.client()
        fill = held + 101
        for packet in numbered(b"flood", fill):
            publisher.send(packet)
        publisher.send(WHOAMI)
        for _ in range(5):
            bystander.sync()
        reader.receive(fill - 25 - 3 * held)
        for _ in range(5):
            bystander.sync()
        assert not publisher.has_input()
        reader.receive(3 * held - 1)
        assert publisher.recv().startswith(WHOAMI)
        assert reader.sync()[-1] == numbered(b"flood", fill)[-1]

    def test_soft_block_toward_a_full_queue(self, lease):
        """soft/block with hard/error: the soft strategy blocks, so the server never asks the hard one."""
        started = lease(SMALL, "--queue-messages=5", FOR_EVER)
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/hard/error", b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 200):
            publisher.send(packet)
        assert reader.receive(200) == numbered(b"flood", 200)

    def test_the_newest_setting_wins(self, lease):
        """Of several settings of one kind the last one counts."""
        started = lease(SMALL, "--queue-messages=100")
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/error", b"blocking/soft/discard", b"blocking/soft/queue")
        reader.cmsg(b"blocking/hard/error", b"blocking/hard/block", b"blocking/hard/discard")
        reader.cmsg(b"order/random", b"order/stack", b"order/queue")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 1000):
            publisher.send(packet)
        assert publisher.sync() == []
        got = reader.sync()
        assert 100 < len(got) < 200
        assert got == numbered(b"flood", len(got))


class TestOrders:
    """The order in which a queue is sent."""

    def test_queue(self, lease):
        """order/queue: first in, first out; replies in their place among the messages."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        publisher = started.client()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        publisher.sync()
        reader.send(WHOAMI)
        bystander_turns(started)
        for packet in numbered(b"flood", 100, start=100):
            publisher.send(packet)
        publisher.sync()
        got = reader.receive(201)
        assert got[:100] == numbered(b"flood", 100)
        assert got[100].startswith(WHOAMI)
        assert got[101:] == numbered(b"flood", 100, start=100)

    def test_stack(self, lease):
        """order/stack: what waits goes last in, first out; replies go first, in the order asked."""
        started = lease(SMALL)
        held = kernel_holds(started)
        reader = started.client(b"flood")
        reader.cmsg(b"order/stack")
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 300)
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        reader.send(WHOAMI)
        reader.send(WHOAMI + b"\0again")
        bystander_turns(started)
        got = reader.receive(302)
        assert got[:held] == packets[:held]
        assert [p[:18] for p in got[held : held + 2]] == [WHOAMI, WHOAMI]
        assert got[held + 2 :] == packets[held:][::-1]

    def test_random(self, lease):
        """order/random: the largest packet first; of equal ones the first in."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        reader.cmsg(b"order/random")
        reader.sync()
        publisher = started.client()
        packets = [b"MSG flood\0%04d" % n + b"." * (n * 37 % 11 * 50) for n in range(300)]
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        got = reader.receive(300)
        held = first_difference(got, packets)
        assert 0 < held < 50
        assert got[held:] == sorted(packets[held:], key=lambda p: (-len(p), p))

    def test_random_after_stack(self, lease):
        """order/random keeps the order/stack chosen before it for packets of equal size."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        reader.cmsg(b"order/stack", b"order/random")
        reader.sync()
        publisher = started.client()
        packets = [b"MSG flood\0%04d" % n + b"." * (n % 3 * 100) for n in range(300)]
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        got = reader.receive(300)
        held = first_difference(got, packets)
        assert 0 < held < 50
        assert got[held:] == sorted(packets[held:], key=lambda p: (len(p), p))[::-1]

    def test_changed_while_messages_wait(self, lease):
        """A new order holds for what waits too."""
        started = lease(SMALL)
        held = kernel_holds(started)
        reader = started.client(b"flood")
        publisher = started.client()
        packets = numbered(b"flood", 300)
        for packet in packets:
            publisher.send(packet)
        publisher.sync()
        reader.cmsg(b"order/stack")
        bystander_turns(started)
        assert reader.receive(300) == packets[:held] + packets[held:][::-1]

    def test_back_in_time(self, lease):
        """order/queue after order/stack brings back the order of arrival."""
        started = lease(SMALL)
        reader = started.client(b"flood")
        publisher = started.client()
        for packet in numbered(b"flood", 300):
            publisher.send(packet)
        publisher.sync()
        reader.cmsg(b"order/stack", b"order/random", b"order/queue")
        bystander_turns(started)
        assert reader.sync() == numbered(b"flood", 300)

    def test_in_time_there_is_no_order_but_arrival(self, lease):
        """What can be sent at once goes in the order of arrival, whatever order was chosen."""
        started = lease()
        for order in (b"order/stack", b"order/random", b"order/queue"):
            reader = started.client(b"calm")
            reader.cmsg(order)
            packets = [reader.msg(b"calm", b"." * n) for n in range(50)]
            assert reader.receive(50) == packets
            reader.close()


def bystander_turns(bus: Bus, turns: int = 5) -> None:
    """Wait until the server has handled everything that it was sent before."""
    with Client(bus.address) as client:
        for _ in range(turns):
            client.sync()


def first_difference(one: list[bytes], other: list[bytes]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


class TestTimeout:
    """A client that blocks others and reads nothing for the whole block time-out is disconnected."""

    @pytest.mark.parametrize("mode", [b"blocking/soft/block", b"blocking/hard/block"])
    def test_reader_that_does_not_read(self, lease, mode):
        """The receiver is disconnected after the time-out, and the publisher goes on."""
        started = lease(SMALL, SHORTLY, "--queue-messages=10")
        reader = started.client(b"flood")
        reader.cmsg(mode)
        reader.sync()
        publisher = started.client()
        began = time.monotonic()
        for packet in numbered(b"flood", 100):
            publisher.send(packet)
        assert publisher.sync() == []
        assert time.monotonic() - began >= 0.3
        started.wait_log(rf"warn: client {started.nth(1)} disconnected: .*: it blocked publishers and received nothing")
        got = reader.rest()
        assert got == numbered(b"flood", len(got))
        assert goes_on(started)

    def test_slow_reader(self, lease):
        """A receiver that takes a little now and then is left alone, however long it takes in all."""
        started = lease(SMALL, "--block-timeout=2")
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        for packet in numbered(b"flood", 150):
            publisher.send(packet)
        got: list[bytes] = []
        began = time.monotonic()
        while (lasted := time.monotonic() - began) < 2.5:
            if len(got) < lasted / 2.5 * 120:
                got += reader.receive(10)
            else:
                time.sleep(0.02)
        got += reader.receive(150 - len(got))
        assert got == numbered(b"flood", 150)
        assert publisher.sync() == []

    @pytest.mark.parametrize("closing", [False, True], ids=["blocking", "half-closed"])
    def test_reader_of_a_few_messages(self, lease, closing):
        """A receiver that takes a few small messages a second stays, although its socket never becomes writable."""
        started = lease("--max-packet=16384", "--block-timeout=1")
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/queue" if closing else b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        packets = numbered(b"flood", 1000)
        sent = 0
        while sent < len(packets):
            if publisher.push(packets[sent]):
                sent += 1
            elif not publisher.waits_for_room(0.3):
                break
        assert goes_on(started)
        if closing:
            reader.sock.shutdown(socket.SHUT_WR)
        got: list[bytes] = []
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            got += reader.receive(1)
            time.sleep(0.2)
        assert len(got) < 30
        got += reader.receive(sent - len(got))
        assert got == packets[:sent]
        assert started.log.count("received nothing") == 0

    def test_two_that_block_each_other(self, lease):
        """Two clients that block each other do not hang: the time-out ends it, and the others never notice."""
        started = lease(SMALL, SHORTLY)
        one, two = started.client(b"to/one"), started.client(b"to/two")
        for client in (one, two):
            client.cmsg(b"blocking/soft/block")
            client.sync()
        with paused(started.pid):
            for packet in numbered(b"to/two", 100):
                assert one.push(packet)
            for packet in numbered(b"to/one", 100):
                assert two.push(packet)
        assert goes_on(started)
        started.wait_log("it blocked publishers and received nothing for the whole block time-out")
        assert any(ends(client) for client in (one, two))
        assert goes_on(started)

    def test_ring(self, lease):
        """Three clients that block each other in a ring, with hard/block, do not stand still either."""
        started = lease(SMALL, SHORTLY, "--queue-messages=10")
        ring = [started.client(b"ring/%d" % n) for n in range(3)]
        for client in ring:
            client.cmsg(b"blocking/hard/block")
            client.sync()
        with paused(started.pid):
            for n, client in enumerate(ring):
                for packet in numbered(b"ring/%d" % ((n + 1) % 3), 200):
                    assert client.push(packet)
        started.wait_log("it blocked publishers and received nothing for the whole block time-out")
        assert any(ends(client) for client in ring)
        assert goes_on(started)

    @pytest.mark.parametrize("mode", [b"blocking/soft/block", b"blocking/hard/block"])
    def test_one_that_blocks_itself(self, lease, mode):
        """A client that publishes to itself and does not read is disconnected after the time-out."""
        started = lease(SMALL, SHORTLY, "--queue-messages=10")
        client = started.client(b"self")
        client.cmsg(mode)
        client.sync()
        with paused(started.pid):
            for packet in numbered(b"self", 200):
                assert client.push(packet)
        assert goes_on(started)
        started.wait_log(rf"client {started.nth(1)} disconnected: .*: it blocked publishers")
        got = client.rest()
        assert got == numbered(b"self", len(got))

    def test_one_that_blocks_itself_and_reads(self, lease):
        """A client that publishes to itself, blocking, and then reads, gets everything."""
        started = lease(SMALL, FOR_EVER)
        client = started.client(b"self")
        client.cmsg(b"blocking/soft/block")
        client.sync()
        for packet in numbered(b"self", 200):
            assert client.push(packet)
        assert client.receive(200) == numbered(b"self", 200)
        assert client.sync() == []


def ends(client: Client) -> bool:
    """Read everything, and return whether the connection ends then (an unblocked client is still served)."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(WHOAMI)
    while packet := client.recv():
        if packet.startswith(WHOAMI):
            return False
    return True


class TestUsers:
    """On a bus of several users no user stops another."""

    def publish(self, bus: Bus, publisher: Client, count: int = 500) -> None:
        for packet in numbered(b"flood", count):
            publisher.send(packet)

    @pytest.mark.parametrize("mode", [b"blocking/soft/block", b"blocking/hard/block"])
    def test_other_user_is_not_held_back(self, as_root, lease, mode):
        """Toward another user's publishers a blocking receiver acts as queue with hard/discard."""
        started = lease(SMALL, FOR_EVER, "--mode=0777", "--queue-messages=50")
        held = kernel_holds(started)
        reader = started.client(b"flood", user=OTHER_USER)
        reader.cmsg(mode)
        reader.sync()
        publisher = started.client(user=THIRD_USER)
        packets = numbered(b"flood", 500)
        for packet in packets:
            publisher.send(packet)
        assert publisher.sync() == []
        assert reader.sync() == packets[: held + 50]

    def test_root_as_publisher_is_not_held_back(self, as_root, lease):
        """Not even the server's own user has to wait for another user's reader."""
        started = lease(SMALL, FOR_EVER, "--mode=0777", "--queue-messages=50")
        reader = started.client(b"flood", user=OTHER_USER)
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher = started.client()
        self.publish(started, publisher)
        assert publisher.sync() == []

    def test_own_user_is_held_back(self, as_root, lease):
        """A receiver blocks its own user's publishers, while other users' publishers continue."""
        started = lease(SMALL, FOR_EVER, "--mode=0777", "--queue-messages=1000")
        reader = started.client(b"flood", b"mine", user=OTHER_USER)
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        own, stranger = started.client(user=OTHER_USER), started.client(user=THIRD_USER)
        for packet in numbered(b"mine", 100):
            own.send(packet)
        own.send(WHOAMI)
        self.publish(started, stranger, 100)
        assert stranger.sync() == []
        assert not own.has_input()
        got = reader.receive(200)
        assert [p for p in got if p.startswith(b"MSG mine")] == numbered(b"mine", 100)
        assert [p for p in got if p.startswith(b"MSG flood")] == numbered(b"flood", 100)
        assert own.recv().startswith(WHOAMI)

    def test_root_holds_anyone_back(self, as_root, lease):
        """A receiver that runs as root, or as the server's user, can block every publisher."""
        started = lease(SMALL, FOR_EVER, "--mode=0777")
        reader = started.client(b"flood")
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander = started.client(user=OTHER_USER), started.client()
        assert is_held_back(publisher, bystander, b"MSG flood\0")

    def test_only_the_user_with_most_in_the_queue_is_held(self, as_root, lease):
        """A user who publishes now and then is not held by a queue that another one has filled; nothing is lost."""
        started = lease(SMALL, FOR_EVER, "--mode=0777", "--queue-messages=1000")
        reader = started.client(b"flood", b"calm")
        reader.cmsg(b"blocking/hard/block")
        reader.sync()
        flooder, bystander = started.client(user=OTHER_USER), started.client()
        calm = started.client(user=THIRD_USER)
        assert is_held_back(flooder, bystander, b"MSG flood\0")
        for packet in numbered(b"calm", 300):
            calm.send(packet)
        assert calm.sync() == []
        assert is_held_back(calm, bystander, b"MSG calm\0")  # until it has most itself
        got = reader.sync()
        assert [p for p in got if p.startswith(b"MSG calm")][:300] == numbered(b"calm", 300)

    def test_server_user_holds_anyone_back(self, become, bus, directory):
        """That the server's user is not root makes no difference."""
        directory.chmod(0o777)
        started = bus(SMALL, FOR_EVER, "--mode=0777", before=become)
        reader = started.client(b"flood", user=OTHER_USER)
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander = started.client(user=THIRD_USER), started.client()
        assert is_held_back(publisher, bystander, b"MSG flood\0")

    def test_block_across_users(self, as_root, lease):
        """With --block-across-users a receiver can also block other users' publishers."""
        started = lease(SMALL, FOR_EVER, "--mode=0777", "--block-across-users")
        reader = started.client(b"flood", user=OTHER_USER)
        reader.cmsg(b"blocking/soft/block")
        reader.sync()
        publisher, bystander = started.client(user=THIRD_USER), started.client()
        assert is_held_back(publisher, bystander, b"MSG flood\0")
        reader.cmsg(b"blocking/soft/discard")
        assert publisher.sync() == []


class TestAllQueuesTogether:
    """--total-queue-bytes, and the fair share of it."""

    def test_hog_is_limited(self, lease):
        """At the total limit, only clients whose queues exceed a fair share lose messages."""
        started = lease(SMALL, "--total-queue-bytes=100000")
        held = kernel_holds(started, 500)
        hog, modest = started.client(b"hog"), started.client(b"modest")
        publisher = started.client()
        for packet in numbered(b"hog", 1000, 500):
            publisher.send(packet)
        for packet in numbered(b"modest", 50, 500):
            publisher.send(packet)
        assert publisher.sync() == []
        assert modest.sync() == numbered(b"modest", 50, 500)
        assert hog.sync() == numbered(b"hog", 1000, 500)[: held + 175]

    def test_share_of_many_clients(self, as_root, lease):
        """A user's many clients share that user's part; another user's single client keeps half of the whole."""
        started = lease(SMALL, "--total-queue-bytes=100000", "--mode=0777")
        held = kernel_holds(started, 500)
        crowd = [started.client(b"crowd", user=OTHER_USER) for _ in range(5)]
        single = started.client(b"single", user=THIRD_USER)
        publisher = started.client()
        for packet in numbered(b"crowd", 200, 500):
            publisher.send(packet)
        for packet in numbered(b"single", 200, 500):
            publisher.send(packet)
        assert publisher.sync() == []
        got = single.sync()
        assert got == numbered(b"single", 200, 500)[: held + 87]
        for client in crowd:
            lot = client.sync()
            assert lot == numbered(b"crowd", len(lot), 500)
            assert len(lot) >= held + 17  # a fifth of the user's half of seven eighths

    def test_room_comes_back(self, lease):
        """What is delivered, or lost with a client, no longer counts."""
        started = lease(SMALL, "--total-queue-bytes=100000")
        publisher = started.client()
        for _ in range(3):
            leaver, reader = started.client(b"flood"), started.client(b"flood")
            for packet in numbered(b"flood", 90, 500):
                publisher.send(packet)
            publisher.sync()
            leaver.close()
            assert reader.sync() == numbered(b"flood", 90, 500)
            reader.close()
            bystander_turns(started)

    def test_hard_strategy_of_the_hog(self, lease):
        """At the limit of all queues the hard strategy of the largest queue's client applies."""
        started = lease(SMALL, "--total-queue-bytes=100000")
        hog = started.client(b"hog")
        hog.cmsg(b"blocking/hard/error")
        hog.sync()
        publisher = started.client()
        for packet in numbered(b"hog", 1000, 500):
            publisher.send(packet)
        assert publisher.sync() == []
        started.wait_log(rf"client {started.nth(1)} disconnected: .*: its queue was full")


class TestManyStalledReaders:
    """Bystanders on a bus where nearly all clients stall."""

    def test_every_mode_at_once(self, lease):
        """One reader of each mode stalls; the others get everything, and discarding readers delay no client."""
        started = lease(SMALL, "--queue-messages=20", SHORTLY)
        modes = [
            (soft, hard, order)
            for soft in (b"queue", b"discard", b"block", b"error")
            for hard in (b"discard", b"block", b"error")
            for order in (b"queue", b"stack", b"random")
        ]
        stalled = []
        for soft, hard, order in modes:
            client = started.client(b"flood")
            client.cmsg(b"blocking/soft/" + soft, b"blocking/hard/" + hard, b"order/" + order)
            client.sync()
            stalled.append(client)
        reader, publisher = started.client(b"flood"), started.client()
        packets = numbered(b"flood", 500)
        for start in range(0, 500, 10):
            for packet in packets[start : start + 10]:
                publisher.send(packet)
            assert reader.receive(10) == packets[start : start + 10]
        assert goes_on(started)
        assert publisher.sync() == []
        ended = 0
        for client, (soft, hard, _) in zip(stalled, modes, strict=True):
            misbehaved = drains_and_ends(client, packets)
            assert misbehaved == (soft in (b"block", b"error") or (soft == b"queue" and hard != b"discard"))
            ended += misbehaved
        assert len(started.wait_log("warn: .* disconnected", 24)) == ended == 24


def drains_and_ends(client: Client, packets: list[bytes]) -> bool:
    """Read everything, check that each message is known and comes once; return whether the connection ends."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(WHOAMI)
    got = []
    while packet := client.recv():
        if packet.startswith(WHOAMI):
            break
        got.append(packet)
    assert len(set(got)) == len(got)
    assert set(got) <= set(packets)
    return not packet
