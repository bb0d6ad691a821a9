#!/usr/bin/env python3
"""Measure a link between two buses beside one bus: throughput, CPU for each message, round trips, and idleness.

    python benchmarks/links.py [--only trips] [--starts 1] [--rounds 5] [--messages 1000000] [--trips 1000] [--priority]

One run has a bus, and a master with a bus below it. In each round a client sends through the one bus, and then through
the link: bundles, and plain packets. The client publishes and reads in one process, and is never more
than two chunks ahead, so nothing is dropped. The ratios of one round are taken, then their median.
How well the addresses of processes suit each other is the luck of a start, and round trips depend on it: ``--starts``
starts all processes that many times, and the medians are those of all starts.
On a busy machine, ``--priority`` gives all processes real-time priority while something is measured (root).
Under ``setarch -R`` all processes have one layout of addresses: the difference is what branch prediction loses between
processes at random ones.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.attacks.kernel import cpu
from benchmarks.measure import rotated
from benchmarks.receipts import ask, connect
from sbus.protocol.bundles import MAGIC, pack
from sbus.protocol.packets import SUB, build
from sbus.syscalls.polling import is_readable
from sbus.testing import RunningBus, running_bus

CHUNK = 8192
SIZE = 64
KEY = b"bench/k"
THERE, BACK = b"trip/there", b"trip/back"
_WHOAMI = b"!/cred/whoami"


class Failed(Exception):
    """Something was lost, or took too long."""


def child_of(server: RunningBus) -> int:
    """Return the PID of a bus's link."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise Failed("the bus has no link")


def count(packet: bytes) -> int:
    """Return the number of messages in a packet, which all have `SIZE` bytes."""
    return (len(packet) - 4) // (4 + SIZE) if packet[:4] == MAGIC else 1


def wait_crossing(publisher: socket.socket, reader: socket.socket, key: bytes) -> None:
    """Wait until messages with a key arrive at a reader that is subscribed to it.

    Messages keep their order, so once the newest probe has arrived, none is still under way.

    :raises Failed: if none arrives within 20 s.
    """
    end = time.monotonic() + 20
    for number in itertools.count():
        probe = b"MSG %b\0probe %d" % (key, number)
        publisher.send(probe)
        while is_readable(reader, 0.1):
            if reader.recv(1 << 17).endswith(probe):  # a bundle ends with its last message
                return
        if time.monotonic() > end:
            break
    raise Failed("no message arrives")


def flow(reader: socket.socket, publisher: socket.socket, messages: int, bundled: bool) -> float:
    """Send messages, and read them all; return the seconds that it took."""
    chunk = [(b"MSG " + KEY + b"\0").ljust(SIZE, b".")] * CHUNK
    packets = pack(chunk, 65_536, CHUNK)[0] if bundled else chunk
    buffer = bytearray(1 << 17)
    sent = got = at = 0
    publisher.setblocking(False)
    reader.setblocking(False)
    began = time.perf_counter()
    while got < messages:
        is_stuck = True
        if sent < messages and sent - got < 2 * CHUNK:
            try:
                for _ in range(16):
                    sent += count(packets[at])
                    publisher.send(packets[at])
                    at = (at + 1) % len(packets)
                    is_stuck = False
            except BlockingIOError:
                sent -= count(packets[at])
        try:
            for _ in range(64):
                size = reader.recv_into(buffer)
                got += (size - 4) // (4 + SIZE) if buffer[:4] == MAGIC else 1
                is_stuck = False
        except BlockingIOError:
            pass
        if is_stuck:
            is_far_ahead = sent - got >= 2 * CHUNK or sent >= messages
            poll = select.poll()
            poll.register(reader, select.POLLIN)
            if not is_far_ahead:
                poll.register(publisher, select.POLLOUT)
            if not poll.poll(10_000):
                raise Failed(f"{sent - got} messages were lost")
    took = time.perf_counter() - began
    publisher.setblocking(True)
    reader.setblocking(True)
    return took


@contextmanager
def priority(pids: Iterable[int]) -> Iterator[None]:
    """Give this process and others real-time priority."""
    everybody = (0, *pids)
    for pid in everybody:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for pid in everybody:
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def pinned(pids: Iterable[int]) -> Iterator[None]:
    """Run this process and others on one CPU: elsewhere the scheduler decides more than the servers do."""
    everybody, cpus = (0, *pids), os.sched_getaffinity(0)
    for pid in everybody:
        os.sched_setaffinity(pid, {min(cpus)})
    try:
        yield
    finally:
        for pid in everybody:
            os.sched_setaffinity(pid, cpus)


def trip(one: socket.socket, other: socket.socket, trips: int) -> float:
    """Return the median of the seconds that a message and its answer take."""
    there, back = b"MSG " + THERE + b"\0", b"MSG " + BACK + b"\0"
    times = []
    for _ in range(trips):
        began = time.perf_counter()
        one.send(there)
        other.recv(1 << 17)
        other.send(back)
        one.recv(1 << 17)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def prepared(address: str, *patterns: bytes, bundled: bool) -> socket.socket:
    """Return a connected client whose subscriptions are in force."""
    sock = connect(address)
    if bundled:
        ask(sock, b"bundle/on")
    for pattern in patterns:
        sock.send(build(SUB, pattern))
    ask(sock, _WHOAMI)
    return sock


class Installation(NamedTuple):
    """What is measured: ``bus`` is one bus, and ``link`` two buses with a link.

    :ivar ends: the addresses of the reader's bus and of the publisher's.
    :ivar servers: the processes' IDs by their part.
    """

    ends: dict[str, tuple[str, str]]
    servers: dict[str, dict[str, int]]

    @property
    def pids(self) -> list[int]:
        """All processes."""
        return [pid for group in self.servers.values() for pid in group.values()]


@contextmanager
def installed() -> Iterator[Installation]:
    """Run a bus, and a master with a bus below it."""
    with (
        running_bus() as bus,
        running_bus() as master,
        running_bus(upstream=master.address, upstream_out="", upstream_in="") as below,
    ):
        yield Installation(
            {"bus": (bus.address, bus.address), "link": (below.address, master.address)},
            {
                "bus": {"bus": bus.pid},
                "link": {"master": master.pid, "below": below.pid, "link": child_of(below)},
            },
        )


def measure_flow(found: Installation, rounds: int, messages: int, *, bundled: bool, prioritized: bool) -> None:
    """Print messages a second, and the CPU time of each."""
    rates: dict[str, list[float]] = {name: [] for name in found.ends}
    costs: dict[str, dict[str, list[float]]] = {
        name: {server: [] for server in group} for name, group in found.servers.items()
    }
    for number in range(rounds):
        for name in rotated(list(found.ends), number):
            below, above = found.ends[name]
            with (
                prepared(below, KEY, bundled=bundled) as reader,
                prepared(above, bundled=bundled) as publisher,
            ):
                wait_crossing(publisher, reader, KEY)
                before = {server: cpu(pid) for server, pid in found.servers[name].items()}
                with priority(found.pids) if prioritized else nullcontext():
                    rates[name].append(messages / flow(reader, publisher, messages, bundled))
                for server, pid in found.servers[name].items():
                    costs[name][server].append((cpu(pid) - before[server]) / messages * 1e6)
    for name in found.ends:
        shown = ", ".join(f"{server} {statistics.median(cost):.3f}" for server, cost in costs[name].items())
        total = [sum(of_round) for of_round in zip(*costs[name].values(), strict=True)]
        print(
            f"{'bundles' if bundled else 'plain'}, {name}: {statistics.median(rates[name]):,.0f}/s, "
            f"×{ratio(rates[name], rates['bus']):.2f}; "
            f"CPU µs a message: {shown}; together ×{ratio(total, costs['bus']['bus']):.2f}",
            flush=True,
        )


def measure_trips(
    found: Installation, rounds: int, count: int, trips: dict[str, list[float]], *, prioritized: bool
) -> None:
    """Measure round trips, all on one CPU.

    :param trips: the times are added to it, in seconds, by what is measured.
    """
    for number in range(rounds):
        for name in rotated(list(found.ends), number):
            below, above = found.ends[name]
            with (
                prepared(below, BACK, bundled=False) as one,
                prepared(above, THERE, bundled=False) as other,
            ):
                wait_crossing(one, other, THERE)
                wait_crossing(other, one, BACK)
                with pinned(found.pids), priority(found.pids) if prioritized else nullcontext():
                    trips.setdefault(name, []).append(trip(one, other, count))


def show_trips(trips: dict[str, list[float]]) -> None:
    """Print the medians of round trips, and the range of the ratios."""
    for name, times in trips.items():
        ratios = [a / b for a, b in zip(times, trips["bus"], strict=True)]
        print(
            f"round trip on one CPU, {name}: {statistics.median(times) * 1e6:.0f} µs, "
            f"×{statistics.median(ratios):.2f} (×{min(ratios):.2f} to ×{max(ratios):.2f})",
            flush=True,
        )


def measure_idle(found: Installation) -> None:
    """Print the CPU time of processes without traffic."""
    time.sleep(3)
    before = {(name, server): cpu(pid) for name, group in found.servers.items() for server, pid in group.items()}
    time.sleep(5)
    shown = ", ".join(
        f"{name} {server} {cpu(found.servers[name][server]) - spent:.2f}" for (name, server), spent in before.items()
    )
    print(f"idle for 5 s: CPU s: {shown}")


def ratio(values: list[float], others: list[float]) -> float:
    """Return the median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["flow", "trips", "idle"])
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--trips", type=int, default=1_000)
    parser.add_argument("--priority", action="store_true")
    options = parser.parse_args()
    parts = [options.only] if options.only else ["flow", "trips", "idle"]
    trips: dict[str, list[float]] = {}
    for _ in range(options.starts):
        with installed() as found:
            if "flow" in parts:
                for bundled, messages in ((True, options.messages), (False, options.messages // 5)):
                    measure_flow(found, options.rounds, messages, bundled=bundled, prioritized=options.priority)
            if "trips" in parts:
                measure_trips(found, options.rounds, options.trips, trips, prioritized=options.priority)
            if "idle" in parts:
                measure_idle(found)
    show_trips(trips)


if __name__ == "__main__":
    main()
