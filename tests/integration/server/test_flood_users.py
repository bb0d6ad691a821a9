"""Flood control between users, over all queues together, and for receivers that block for too long."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from tests.integration.server.floods import FOR_EVER, SMALL, bystander_turns, kernel_holds
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

SHORTLY = "--block-timeout=0.3"


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
