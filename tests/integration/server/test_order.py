"""The order of messages of one user's clients that come and go: who closed before another one connected comes first."""

from __future__ import annotations

import socket

import pytest

from tests.integration.server.test_turns import bundling, sending
from tests.support.harness import Bus, Client, name_of
from tests.support.packets import bundle
from tests.support.waiting import paused

COUNTS = (1, 9, 200, pytest.param(1_000, marks=pytest.mark.slow))
IN_BACKLOG = 100
"""Connections that the kernel keeps for a server that does not accept any."""


def come_and_go(bus: Bus, count: int) -> None:
    """Have clients connect, subscribe, publish their number and close, one after the other."""
    for number in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(name_of(bus.address))
            sock.send(b"SUB */x")
            sock.send(b"MSG w/%d\0" % number)


def old(bus: Bus) -> Client:
    """Return a client that has sent single messages for a while."""
    client = bus.client()
    for _ in range(3):
        client.msg(b"old")
        client.sync()
    return client


def numbers(watcher: Client, count: int) -> list[int]:
    """Return the numbers of the next messages, in their order."""
    return [int(packet[6:-1]) for packet in watcher.receive(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_clients_that_come_and_go(bus, count):
    """Messages of clients that connect, publish and close one after the other are delivered in this order."""
    started = bus()
    watcher = started.client(b"w/")
    come_and_go(started, count)
    assert numbers(watcher, count) == list(range(count))


@pytest.mark.parametrize("count", COUNTS)
def test_clients_that_come_and_go_beside_a_flood(as_root, bus, count):
    """The same while another user floods the server with subscriptions."""
    started = bus("--mode=0777")
    watcher = started.client(b"w/")
    flood = bundle(*[b"SUB flood", b"UNSUB flood"] * 500)
    with sending(*[(bundling(started), flood) for _ in range(2)]):
        come_and_go(started, count)
        assert numbers(watcher, count) == list(range(count))


@pytest.mark.parametrize("count", [1, 9, IN_BACKLOG])
def test_clients_that_the_server_finds_gone(bus, count):
    """The server accepts clients that have left already in their order, and handles them before one that is there."""
    started = bus()
    watcher = started.client(b"w/")
    with paused(started.pid):
        come_and_go(started, count)
        last = Client(started.address)
        last.send(b"MSG w/%d\0" % count)
    with last:
        assert numbers(watcher, count + 1) == list(range(count + 1))


def test_one_that_left_comes_before_one_that_is_there(bus):
    """What a client sent before it closed comes before what another one of its user sent then."""
    started = bus()
    watcher, one, other = started.client(b"w/"), old(started), old(started)
    watcher.sync()  # or the server may be in the middle of reading from the last one
    with paused(started.pid):
        one.send(b"SUB */x")
        one.send(b"MSG w/0\0")
        one.close()
        other.send(b"MSG w/1\0")
    assert numbers(watcher, 2) == [0, 1]


def test_one_that_left_is_read_to_its_end(bus):
    """All that a client sent before it closed comes before what another one of its user sent then."""
    started = bus()
    watcher, one, other = started.client(b"w/"), old(started), old(started)
    watcher.sync()  # or the server may be in the middle of reading from the last one
    with paused(started.pid):
        for number in range(100):
            one.send(b"MSG w/%d\0" % number)
        one.close()
        other.send(b"MSG w/100\0")
    assert numbers(watcher, 101) == list(range(101))
