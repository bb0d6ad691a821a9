#!/usr/bin/env python3
"""Measure what the admin socket takes from a bus with many clients: the longest slice of an answer, by page.

    python benchmarks/admin.py [--clients N] [--patterns N]

The bus has fake transports, and each page is made as the admin socket makes it, piece by piece; a slice is closed after
0.5 ms. The answers share one slice in a turn, so the longest slice is how much longer a turn takes. The figures are CPU
time, which other programs on the machine do not change.
"""

from __future__ import annotations

import argparse
import gc
import time

from twisted.internet.task import Clock

from sbus.admin.answers import SLICE
from sbus.admin.pages import Asked
from sbus.protocol.keys import PeerCredentials
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.protocol import BusProtocol
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.credentials import AccessSettings, KernelPolicy
from sbus.server.core.limits import Limits
from sbus.server.ops.admin_pages import pages
from sbus.testing import FakePacketTransport

_PAGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("/metrics", {}),
    ("/v1/status", {}),
    ("/v1/clients", {"sort": "queue", "limit": "1000"}),
    ("/v1/users", {}),
    ("/v1/patterns", {"limit": "1000"}),
    ("/v1/last", {"limit": "1000"}),
    ("/v1/explain", {"key": "a/b/c", "limit": "1000"}),
    ("/v1/explain", {"key": "other", "receiver": "1"}),
)


def bus_with(clients: int, patterns: int) -> SubscriptionRegistry:
    """Return a bus with clients of many users, each with patterns; a tenth of them is behind."""
    clock = Clock()
    limits = Limits(max_clients=clients + 1, user_patterns=clients * patterns + 1)
    registry = SubscriptionRegistry(
        KernelPolicy().make(AccessSettings()), clock, limits=limits, last_values=(LastValueRule(b"a/"),)
    )
    registry.startService()
    for number in range(clients):
        peer = PeerCredentials(10_000 + number, 1000 + number % 500, 100)
        transport = FakePacketTransport(peer, clock=clock, capacity=0 if number % 10 == 0 else None)
        protocol = BusProtocol(registry)
        transport.connect(protocol)
        registry.subscribe(protocol, b"a/*/c")
        for at in range(1, patterns):
            registry.subscribe(protocol, b"b/%d/%d" % (number % 1000, at))
    for key in range(10_000):
        registry.last_values.keep([b"MSG a/%d\0value" % key], None)  # type: ignore[union-attr]
    registry.publish(b"a/b/c", b"x")
    return registry


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=16_384)
    parser.add_argument("--patterns", type=int, default=4)
    options = parser.parse_args()
    registry = bus_with(options.clients, options.patterns)
    found = pages(registry)
    gc.collect()
    gc.freeze()
    print(f"{options.clients} clients with {options.patterns} patterns each, milliseconds")
    print(f"{'page':44} {'slices':>7} {'longest':>8} {'all':>8} {'bytes':>9}")
    for path, parameters in _PAGES:
        longest, total, slices, size = 1e9, 0.0, 0, 0
        for _ in range(3):  # the best of three: a slice can be interrupted
            pieces = found["GET", path][0](Asked(parameters))
            worst, total, slices, size = 0.0, 0.0, 0, 0
            is_over = False
            while not is_over:
                began = time.thread_time()
                while time.thread_time() - began < SLICE:
                    piece = next(pieces, False)
                    if piece is False:
                        is_over = True
                        break
                    size += len(piece or "")  # type: ignore[arg-type]
                took = time.thread_time() - began
                worst, total, slices = max(worst, took), total + took, slices + 1
            longest = min(longest, worst)
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        print(f"{path + ('?' + query if query else ''):44} {slices:7} {1e3 * longest:8.2f} {1e3 * total:8.1f} {size:9}")


if __name__ == "__main__":
    main()
