"""Turns over real sockets: a flood by one user, plain or of wildcards, leaves the messages of another flowing."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.harness import Bus, Client
from tests.support.packets import bundle

FLOODER, OTHER = (12_001, 12_001), (12_002, 12_002)
BOUND = 2.0
"""Seconds that a round trip may take. Without turns and without a limit on wildcards each took up to a minute."""


def bundling(bus: Bus) -> Client:
    """Return a client of the flooding user that may send bundles."""
    client = bus.client(user=FLOODER)
    client.send(b"CMSG bundle/on")
    assert client.recv().startswith(b"CMSG bundle/on\0")
    return client


@contextmanager
def sending(*pairs: tuple[Client, bytes]) -> Iterator[None]:
    """Send to each client's connection the same packet again and again, until the block ends."""
    over = threading.Event()

    def flood(client: Client, packet: bytes) -> None:
        with suppress(OSError):
            while not over.is_set():
                client.send(packet)

    threads = [threading.Thread(target=flood, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()


def longest_round_trip(client: Client, count: int = 50) -> float:
    """Return the seconds of the longest of so many round trips of messages."""
    longest = 0.0
    for number in range(count):
        packet = b"MSG mine/%d\0" % number
        began = time.monotonic()
        client.send(packet)
        assert client.recv() == packet
        longest = max(longest, time.monotonic() - began)
    return longest


@pytest.mark.parametrize("pattern", [b"*", b"!/cred////x"])
def test_a_flood_of_subscriptions(as_root, bus, pattern):
    """While one user sends bundles of SUB and UNSUB, another one's round trips stay short; SIGTERM ends the bus."""
    started = bus("--mode=0777")
    other = started.client(b"mine/*", user=OTHER)
    packet = bundle(*[b"SUB " + pattern, b"UNSUB " + pattern] * 2000)
    with sending(*[(bundling(started), packet) for _ in range(3)]):
        assert longest_round_trip(other) < BOUND
        began = time.monotonic()
        started.kill(signal.SIGTERM)
        assert other.has_ended()
        assert time.monotonic() - began < 5 * BOUND


def test_many_wildcards(as_root, bus):
    """16,384 patterns of a and * are refused, their client is disconnected, and others' new keys are found quickly."""
    started = bus("--mode=0777")
    other = started.client(b"mine/*", user=OTHER)
    flooder = started.client(user=FLOODER)
    with suppress(OSError):
        for parts in itertools.product((b"a", b"*"), repeat=14):
            flooder.send(b"SUB " + b"/".join(parts))
    assert flooder.has_ended()
    assert longest_round_trip(other) < BOUND
    started.wait_log("violation by client 2, .*: the wildcards of this user's patterns .* use fewer of them")


def test_a_client_with_many_patterns_leaves(as_root, bus):
    """While the 16,384 patterns of a client that has left are dropped, another user's messages flow."""
    started = bus("--mode=0777")
    other = started.client(b"mine/*", user=OTHER)
    flooder = started.client(*(b"%d/x" % number for number in range(16_384)), user=FLOODER)
    flooder.close()
    assert longest_round_trip(other) < BOUND
    started.wait_log("client 2 disconnected: ")
