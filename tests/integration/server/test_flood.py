"""Flood control: the messages that a receiver gets, by strategy and order, if it does not read; who waits for it."""

from __future__ import annotations

import socket

from tests.integration.server.floods import FOR_EVER, SMALL, bystander_turns, kernel_holds
from tests.support.harness import (
    WHOAMI,
    goes_on,
    is_held_back,
    numbered,
)


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


def first_difference(one: list[bytes], other: list[bytes]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
