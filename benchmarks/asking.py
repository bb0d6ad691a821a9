#!/usr/bin/env python3
"""What interest and last values cost the messages of others.

1. *watched*: CPU time of the server for a message from one publisher to one subscriber, with 100 clients that watch
   1,024 keys each (the message's key among them), beside the same without watches.
2. *snapshot*: round trips of a bystander while another client, which reads slowly, gets 10,000 last values, beside the
   same with a client that asks ``whoami`` instead.

Each comparison is made in rounds, the two sides one after the other, and the medians are printed with their ratio. It
needs root for nothing, takes about a minute, and stops by itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.attacks.kernel import cpu  # noqa: E402
from benchmarks.receipts import WHOAMI, ask, connect  # noqa: E402
from sbus.testing import RunningBus, running_bus  # noqa: E402


def fence(sock: socket.socket) -> None:
    """Wait until the server has handled everything; drop what comes before."""
    ask(sock, b"!/cred/whoami")


def watching(bus: RunningBus, clients: int, keys: int) -> list[socket.socket]:
    """Connect clients that watch keys each."""
    socks = []
    for _ in range(clients):
        sock = connect(bus.address)
        for number in range(keys):
            sock.send(b"CMSG interest/on\0key/%d" % number)
            if number % 50 == 49:
                fence(sock)
        fence(sock)
        socks.append(sock)
    return socks


def message_cost(bus: RunningBus, subscriber: socket.socket, messages: int) -> float:
    """Return the server's CPU time for a message from one client to another, in microseconds."""
    with connect(bus.address) as publisher:
        fence(publisher)
        before = cpu(bus.pid)
        for number in range(messages // 64):
            for _ in range(64):
                publisher.send(b"MSG key/1\0%d" % number)
            for _ in range(64):
                subscriber.recv(4096)
        return (cpu(bus.pid) - before) / messages * 1e6


def p99(bus: RunningBus, seconds: float) -> float:
    """Return the 99th percentile of a bystander's round trips, in microseconds."""
    with connect(bus.address) as one:
        one.send(b"SUB mine")
        fence(one)
        times = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            one.send(b"MSG mine\0x")
            one.recv(4096)
            times.append(time.perf_counter() - began)
            time.sleep(0.0005)
    return statistics.quantiles(times, n=100)[98] * 1e6


def slow_reader(bus: RunningBus, seconds: float, request: bytes) -> int:
    """Send a request again and again from a process of its own, and read the answers slowly; return its PID."""
    pid = os.fork()
    if pid:
        return pid
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with connect(bus.address) as sock:
                sock.send(request)
                for number in range(10_001):
                    if number % 10 == 0:
                        time.sleep(0.0005)
                    if sock.recv(4096).startswith(b"CMSG ") or time.monotonic() > end:
                        break
    finally:
        os._exit(0)


def report(what: str, unit: str, plain: list[float], other: list[float]) -> None:
    a, b = statistics.median(plain), statistics.median(other)
    ratios = " ".join(f"{y / x:.2f}" for x, y in zip(plain, other, strict=True))
    print(f"{what}: {a:.2f} -> {b:.2f} {unit}; ratio of medians {b / a:.3f}, of rounds {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each comparison [5]")
    parser.add_argument("--messages", type=int, default=64_000, metavar="N", help="messages of a measurement [64000]")
    parser.add_argument("--secs", type=float, default=2.0, metavar="S", help="seconds of a bystander's round trips [2]")
    options = parser.parse_args()
    with running_bus() as plain, running_bus() as watched:
        socks = watching(watched, 100, 1024)
        costs: tuple[list[float], list[float]] = ([], [])
        subscribers = [connect(bus.address) for bus in (plain, watched)]
        for sock in subscribers:
            sock.send(b"SUB key/*")
            fence(sock)
        for _ in range(3):
            for sock in socks:
                fence(sock)  # the notices of that subscription are no part of the measurement
        for _ in range(options.rounds):
            costs[0].append(message_cost(plain, subscribers[0], options.messages))
            costs[1].append(message_cost(watched, subscribers[1], options.messages))
        report("1 to 1, 102,400 keys watched", "us of CPU a message", *costs)
        for sock in socks:
            sock.close()
    with running_bus(last_value="state/,keys=20000") as bus:
        with connect(bus.address) as publisher:
            for number in range(10_000):
                publisher.send(b"MSG state/%d\0%b" % (number, b"x" * 100))
            fence(publisher)
        trips: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds):
            for side, request in zip(trips, (WHOAMI, b"CMSG last\0state/*"), strict=True):
                pid = slow_reader(bus, options.secs + 0.2, request)
                side.append(p99(bus, options.secs))
                os.waitpid(pid, 0)
        report("bystander's p99, 10,000 values to a slow reader", "us", *trips)


if __name__ == "__main__":
    main()
