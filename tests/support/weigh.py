"""Weigh state of a bus: ``python -m tests.support.weigh KIND...`` prints what was charged for it, and what RSS grew by.

The state is made twice, and the second time counts: the first one fills what Python keeps free.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

from sbus.flood import QueueLimits
from sbus.seqpacket.send_buffer import SendBuffer
from sbus.seqpacket.transport import PacketTransport
from sbus.server.asks.last_values import LastValueRule
from sbus.server.bus.protocol import BusProtocol
from sbus.server.core.limits import Limits
from tests.support.buses import Bus, Peer
from tests.support.reactors import HandTurnedReactor, socket_pair

MANY = 1 << 40
ITEMS = 5_000
"""Items of a few bytes."""
LARGER_ITEMS = 2_000
"""Items of some hundred bytes."""

bus = Bus(
    limits=Limits(
        max_memory=MANY,
        user_memory=MANY,
        max_patterns=MANY,
        user_patterns=MANY,
        max_pattern_bytes=MANY,
        max_match_steps=MANY,
        queue_messages=MANY,
        queue_bytes=MANY,
        total_queue_bytes=MANY,
    )
)
assert isinstance(bus.registry.limits.queue, QueueLimits)
held: list[object] = []


def patterns(form: bytes) -> Callable[[int], None]:
    peer = bus.connect(uid=1000)

    def make(start: int) -> None:
        for number in range(start, start + LARGER_ITEMS, 50):
            peer.send(*[b"SUB " + form % n for n in range(number, number + 50)])
        bus.clock.pump([0.0] * 300)

    return make


def messages(order: bytes, size: int, has_read: bool = False) -> Callable[[int], None]:
    """Messages that wait for a receiver.

    :param has_read: whether it has read one, for which the others got ranks.
    """
    publisher = bus.connect(uid=1000)

    def make(start: int) -> None:
        reader = bus.connect(uid=1000)
        reader.stall()
        reader.send(b"CMSG order/" + order, b"SUB %d" % start)
        for number in range(0, ITEMS, 50):
            publisher.send(*[b"MSG %d\0" % start + b"%05d" % n + bytes(size) for n in range(number, number + 50)])
            bus.clock.pump([0.0])
        if has_read:
            reader.drain(1)
            reader.stall()

    return make


def named(publishers: int) -> Callable[[int], None]:
    """Messages for a receiver that asks who publishes, of which each has a name.

    :param publishers: different ones for each 50 messages, which leave.
    """

    def make(start: int) -> None:
        reader = bus.connect(uid=1000)
        reader.stall()
        reader.send(b"CMSG sender/on", b"CMSG order/stack", b"SUB %d" % start)
        reader.drain(1)
        reader.stall()
        for first in range(0, ITEMS, 50 // publishers):
            publisher = bus.connect(uid=1000)
            publisher.send(*[b"MSG %d\0" % start + b"%05d" % n for n in range(first, first + 50 // publishers)])
            publisher.transport.hang_up()
            bus.clock.pump([0.0])

    return make


def mail(publish: int, choose: int, readers: int = 3) -> Callable[[int], None]:
    """Messages and choices that wait in the mail of readers.

    :param publish: messages in each run.
    :param choose: choices of each reader.
    """
    peers, publisher = [bus.connect(uid=1000) for _ in range(readers)], bus.connect(uid=2000)
    for peer in peers:
        peer.send(b"SUB k")
    bus.registry.scheduler.is_busy = True

    def make(start: int) -> None:
        for first in range(0, ITEMS if publish else 1, publish or 1):
            publisher.transport.deliver(*[b"MSG k\0%05d" % n for n in range(first, first + (publish or 1))])
        for peer in peers:
            peer.transport.deliver(*[b"CMSG order/stack", b"CMSG order/queue"] * (choose // 2))

    return make


def gaps(groups: int) -> Callable[[int], None]:
    """Messages that found no room in the mail, for each group of readers, again after each reply."""
    peers, publisher = [bus.connect(uid=1000) for _ in range(200)], bus.connect(uid=2000)
    for number, peer in enumerate(peers):
        peer.send(*[b"SUB %d" % key for key in range(groups) if key != number])
    user = bus.registry.users[1000]
    user.lines.add(2000, MANY, MANY)
    bus.registry.scheduler.is_busy = True

    def make(start: int) -> None:
        for peer in islice(cycle(peers), 1_000 // groups):
            publisher.transport.deliver(*[b"MSG %d\0" % key for key in range(groups)])
            peer.transport.deliver(b"CMSG !/cred/whoami")

    return make


def replies(start: int) -> None:
    for _ in range(ITEMS // 60):
        peer = bus.connect(uid=1000)
        peer.stall()
        peer.send(*[b"CMSG !/cred/whoami"] * 60)


def connections(start: int) -> None:
    reactor = HandTurnedReactor()
    for _ in range(1500):
        ours, theirs = socket_pair()
        transport = PacketTransport(reactor, ours, send_buffer=SendBuffer(ours, 409_600))
        transport.start(BusProtocol(bus.registry))
        held.append((transport, theirs))
    held.append(reactor)


def kept(start: int) -> None:
    """Packets of publishers that one receiver blocks."""
    reader, first = bus.connect(uid=1000), bus.connect(uid=1000)
    reader.stall()
    reader.send(b"CMSG blocking/soft/block", b"SUB %d" % start)
    first.send(b"MSG %d\0" % start)
    for _ in range(40):
        publisher: Peer = bus.connect(uid=1000)
        publisher.send(b"MSG %d\0" % start, *[b"MSG other/%d\0%0100d" % (n, n) for n in range(500)])


def watched(key: bytes) -> Callable[[int], None]:
    def make(start: int) -> None:
        for first in range(start, start + LARGER_ITEMS // key.count(b"/"), 50):
            peer = bus.connect(uid=1000)
            peer.send(*[b"CMSG interest/on\0" + key % n for n in range(first, first + 50)])
            bus.clock.pump([0.0] * 300)
            peer.take()

    return make


def latest(key: bytes) -> Callable[[int], None]:
    publisher = bus.connect(uid=1000)

    def make(start: int) -> None:
        reader = bus.connect(uid=1000)
        reader.stall()
        reader.send(b"CMSG blocking/soft/latest", b"SUB %d/" % start)
        for first in range(start, start + LARGER_ITEMS, 50):
            publisher.send(*[b"MSG %d/" % start + key % n + b"\0x" for n in range(first, first + 50)])
            bus.clock.pump([0.0])

    return make


def snapshots() -> Callable[[int], None]:
    """Snapshots that nobody reads, of values that are replaced each time."""
    limits = replace(bus.registry.limits, queue_messages=1)  # what comes after a snapshot does not count
    kept = Bus(limits=limits, last_values=(LastValueRule(b""),))
    bus.registry = kept.registry
    publisher = kept.connect(uid=1000)

    def make(start: int) -> None:
        for turn in range(4):
            reader = kept.connect(uid=1000)
            reader.stall()
            for first in range(0, 2_000, 50):
                publisher.send(*[b"MSG %d\0" % n + b"%d" % turn + bytes(1_000) for n in range(first, first + 50)])
                kept.clock.pump([0.0] * 4)
            reader.send(b"CMSG last\0")
            held.append(reader)
        for first in range(0, 2_000, 50):
            publisher.send(*[b"MSG %d\0" % n + bytes(1_000) for n in range(first, first + 50)])
            kept.clock.pump([0.0] * 4)

    return make


KINDS: dict[str, Callable[[], Callable[[int], None]]] = {
    "open": lambda: patterns(b"memory/pattern/%08d"),
    "one-segment": lambda: patterns(b"%08d"),
    "deep": lambda: patterns(b"%08d/a/b/c/d/e/f/g"),
    "long": lambda: patterns(b"m/%0500d"),
    "wildcard": lambda: patterns(b"m/%08d/*"),
    "secret": lambda: patterns(b"!/cred////memory/%08d"),
    "secret-long": lambda: patterns(b"!/cred////m/%0500d"),
    "named": lambda: named(1),
    "named-each": lambda: named(50),
    "mail": lambda: mail(1, 0),
    "mail-runs": lambda: mail(50, 0),
    "choices": lambda: mail(0, 30, 160),
    "gaps": lambda: gaps(20),
    "gaps-of-one": lambda: gaps(1),
    "ranked": lambda: messages(b"random", 100, has_read=True),
    "replies": lambda: replies,
    "connections": lambda: connections,
    "kept": lambda: kept,
    "watched": lambda: watched(b"memory/%08d"),
    "watched-deep": lambda: watched(b"%08d" + b"/x" * 200),
    "latest": lambda: latest(b"memory/%08d"),
    "latest-long": lambda: latest(b"memory/%02000d"),
    "snapshots": snapshots,
    **{
        f"{order}-{size}": lambda order=order, size=size: messages(order.encode(), size)  # type: ignore[misc]
        for order in ("queue", "stack", "random")
        for size in (0, 100, 3000)
    },
}


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def weigh(kind: str) -> tuple[int, int]:
    """Return what is charged for many of a kind, and what this process grows by, in bytes."""
    make = KINDS[kind]()
    account = bus.registry.users.budget.memory
    make(0)
    gc.collect()
    before = account.held, resident()
    make(ITEMS)
    return account.held - before[0], resident() - before[1]


def main() -> None:
    """Weigh the kinds that are named, each in a process of its own."""
    gc.freeze()
    for kind in sys.argv[1:]:
        child = os.fork()
        if not child:
            print(kind, *weigh(kind), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(f"{kind}: {status}")


if __name__ == "__main__":
    main()
