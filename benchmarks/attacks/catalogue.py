"""The attacks, by name. Each is a function that an `Attacker` runs from the beginning until its deadline."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.attacks.attacker import LARGEST_PACKET, WHOAMI, Attacker, bundle, filled, receive

__all__ = ["ALL", "ATTACKS", "Attack"]

ALL = "all"
"""The name of all attacks at once."""

Part = Callable[[Attacker], None]

_DONTWAIT = socket.MSG_DONTWAIT
_FLOOD = b"MSG flood/key\0" + bytes(64)
_EVERYTHING = b"SUB "
"""Subscribes to the empty pattern."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    :ivar title: the action of the attacking user.
    :ivar parts: one function for each process.
    :ivar server_files: descriptors that the server may have, if not as usual.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    server_files: int | None = None


# --- connections ----------------------------------------------------------------------------------


def connect_storm(me: Attacker) -> None:
    me.ready()
    while me.running():
        me.connect().close()
        me.count()


def connect_junk(me: Attacker) -> None:
    me.ready()
    while me.running():
        me.connect(b"JUNK that is no packet of this protocol").close()
        me.count()


def half_close(me: Attacker) -> None:
    """Up to 200 connections that sent 2,000 messages to themselves, read none and shut their sending side."""
    held: collections.deque[socket.socket] = collections.deque()
    me.ready()
    while me.running():
        sock = me.connect(b"SUB echo", timeout=0.2)
        with contextlib.suppress(BlockingIOError):
            for _ in range(2_000):
                sock.send(b"MSG echo\0" + bytes(100))
        sock.shutdown(socket.SHUT_WR)
        held.append(sock)
        if len(held) > 200:
            held.popleft().close()
        me.count()


def stopped(me: Attacker) -> None:
    # The sockets of 1,000 stopped processes would differ from these in their PIDs only. But 1,000 interpreters take
    # gigabytes, and their baseline would be 1,000 spinners.
    me.hold(1_000, _EVERYTHING)


def idle(me: Attacker) -> None:
    me.hold(min(15_000, me.most_files - 100))


def descriptors(me: Attacker) -> None:
    me.hold(2_000, timeout=0.1)


# --- subscriptions --------------------------------------------------------------------------------


def subscriptions(me: Attacker) -> None:
    sock = me.connect()
    me.ready()
    while me.running():
        me.send_patiently(sock, b"SUB *")
        me.send_patiently(sock, b"UNSUB *")
        me.count(2)


def _subscriptions_bundled(me: Attacker, pattern: bytes) -> None:
    sock, limit = me.connect_bundling()
    packet, number = filled([b"SUB " + pattern, b"UNSUB " + pattern], limit)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count(number)


def patterns(me: Attacker) -> None:
    """Hold all 16,384 patterns of 14 segments that are ``a`` or ``*``, and publish keys that all of them match."""
    sock, limit = me.connect_bundling(b"CMSG blocking/soft/discard")
    _subscribe(me, sock, limit, (b"/".join(each) + b"/" for each in itertools.product((b"a", b"*"), repeat=14)))
    me.fence(sock)
    publisher, _ = me.connect_bundling()
    me.ready()
    for number in itertools.count(step=100):
        if not me.running():
            return
        keys = (b"a/" * 14 + b"%d-%d" % (os.getpid(), number + i) for i in range(100))
        me.send_patiently(publisher, bundle(b"MSG " + key + b"\0" for key in keys))
        me.count(100)


def _subscribe(me: Attacker, sock: socket.socket, limit: int, patterns: Iterator[bytes]) -> None:
    size = max(1, min(limit, 65_536) // 64)
    while some := list(itertools.islice(patterns, size)):
        me.send_patiently(sock, bundle(b"SUB " + pattern for pattern in some))


# --- keys -----------------------------------------------------------------------------------------


def keys(me: Attacker) -> None:
    """Publish keys that one client subscribes to: the sender, which gets no copy. So routes are all that they cost."""
    sock, _ = me.connect_bundling(b"SUB k/", b"CMSG echo/off")
    me.ready()
    for number in itertools.count(step=1_000):
        if not me.running():
            return
        me.send_patiently(sock, bundle(b"MSG k/%d/%d\0" % (os.getpid(), number + i) for i in range(1_000)))
        me.count(1_000)


def keys_long(me: Attacker) -> None:
    """Publish keys past 1,024 bytes (one of 100,000 segments) that 1,024 patterns match."""
    sock, limit = me.connect_bundling(b"CMSG blocking/soft/discard")
    _subscribe(me, sock, limit, (b"/".join(each) + b"/" for each in itertools.product((b"a", b"*"), repeat=10)))
    me.fence(sock)
    publisher = me.connect()
    me.ready()
    packets = [b"MSG " + b"a/" * 10 + tail + b"\0" for tail in (b"x" * 1_100, b"a/" * 600, b"a/" * 100_000)]
    while me.running():
        for packet in packets:
            me.send_patiently(publisher, packet)
            me.count()


# --- control messages -----------------------------------------------------------------------------


def whoami_read(me: Attacker) -> None:
    sock = me.connect()
    me.ready()
    while me.running():
        for _ in range(60):
            me.send_patiently(sock, WHOAMI)
        for _ in range(60):
            receive(sock)
        me.count(60)


def whoami_unread(me: Attacker) -> None:
    """Ask on 200 connections until each takes no more; then replace the oldest ones."""
    held: collections.deque[socket.socket] = collections.deque()
    while me.running():
        sock = me.connect(timeout=0.05)
        with contextlib.suppress(BlockingIOError):
            for _ in range(2_000):
                sock.send(WHOAMI)
                me.count()
        held.append(sock)
        if len(held) > 200:
            me.ready()
            held.popleft().close()


def order_flips(me: Attacker) -> None:
    """Choose another order on 20 clients, each with a full queue of 65,536 messages of several sizes."""
    receivers = [me.connect(b"CMSG echo/off", b"SUB full") for _ in range(20)]
    publisher, _ = me.connect_bundling()
    for first in range(0, 66_000, 500):
        if not me.running():
            return
        packets = (b"MSG full\0" + bytes((first + i) * 7 % 61) for i in range(500))
        me.send_patiently(publisher, bundle(packets))
    me.fence(publisher)
    me.ready()
    flips = itertools.cycle((b"CMSG order/stack", b"CMSG order/random", b"CMSG order/queue", b"CMSG order/random"))
    while me.running():
        _send_to_all(me, receivers, next(flips))


def _send_to_all(me: Attacker, socks: list[socket.socket], packet: bytes) -> None:
    """Send where there is room, and wait a moment if no socket had any."""
    sent = 0
    for sock in socks:
        with contextlib.suppress(BlockingIOError):
            sock.send(packet, _DONTWAIT)
            sent += 1
    me.count(sent)
    if not sent:
        select.select([], socks, [], 0.1)


def bundle_flips(me: Attacker) -> None:
    sock = me.connect()
    me.ready()
    while me.running():
        for _ in range(16):
            me.send_patiently(sock, b"CMSG bundle/on")
            me.send_patiently(sock, b"CMSG bundle/off")
        for _ in range(32):
            receive(sock)
        me.count(32)


# --- silent readers -------------------------------------------------------------------------------


def flood(me: Attacker) -> None:
    """Publish as fast as the server reads."""
    sock = me.connect()
    me.ready()
    while me.running():
        me.send_patiently(sock, _FLOOD)
        me.count()


def fan_out(me: Attacker) -> None:
    """Publish big bundles to 1,000 silent subscribers of one key."""
    sock, limit = me.connect_bundling()
    packet, number = filled([b"MSG k\0"], limit)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count(number)


def max_packets(me: Attacker) -> None:
    sock = me.connect()
    packet = b"MSG flood/large\0".ljust(LARGEST_PACKET, b"x")
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count()


_MODES: dict[str, tuple[bytes, ...]] = {
    "queue-discard": (b"blocking/soft/queue", b"blocking/hard/discard"),
    "queue-block": (b"blocking/soft/queue", b"blocking/hard/block"),
    "queue-error": (b"blocking/soft/queue", b"blocking/hard/error"),
    "block-discard": (b"blocking/soft/block", b"blocking/hard/discard"),
    "block-block": (b"blocking/soft/block", b"blocking/hard/block"),
    "block-error": (b"blocking/soft/block", b"blocking/hard/error"),
    # With these two there is no queue, so that the hard strategy means nothing.
    "discard": (b"blocking/soft/discard",),
    "error": (b"blocking/soft/error",),
    "stack": (b"blocking/soft/queue", b"blocking/hard/discard", b"order/stack"),
    "random": (b"blocking/soft/queue", b"blocking/hard/discard", b"order/random"),
}


def _silent(number: int, *choices: bytes) -> Part:
    """Connect silent subscribers of everything, with these choices of flood control."""

    def readers(me: Attacker) -> None:
        me.hold(number, *(b"CMSG " + choice for choice in choices), _EVERYTHING)

    return readers


def _catalogue() -> Iterator[Attack]:
    yield Attack("connect-storm", "connect and close", (connect_storm,) * 2)
    yield Attack("connect-junk", "connect, send junk and close", (connect_junk,) * 2)
    yield Attack("half-close", "half-close with unread echoes", (half_close,))
    yield Attack("subs", "SUB and UNSUB *, plain", (subscriptions,))
    yield Attack("subs-bundled", "SUB and UNSUB *, in bundles", (_churn(b"*"),))
    yield Attack("subs-secret", "SUB and UNSUB of a secret pattern, in bundles", (_churn(b"!/cred////x"),))
    yield Attack("patterns", "16,384 patterns of a and *, then new keys", (patterns,))
    yield Attack("keys", "distinct keys", (keys,))
    yield Attack("keys-long", "keys past 1,024 bytes", (keys_long,))
    yield Attack("whoami-read", "whoami, answers read", (whoami_read,))
    yield Attack("whoami-unread", "whoami, answers unread", (whoami_unread,))
    yield Attack("order-flips", "another order for 20 full queues", (order_flips,))
    yield Attack("bundle-flips", "bundles on and off", (bundle_flips,))
    for mode, choices in _MODES.items():
        yield Attack(f"readers-{mode}", f"200 silent readers of everything, {mode}", (_silent(200, *choices), flood))
    yield Attack("fan-out", "big bundles to 1,000 silent subscribers", (_subscribers, fan_out))
    yield Attack("stopped", "1,000 sockets on the empty pattern, never read", (stopped, flood))
    yield Attack("idle", "15,000 idle clients", (idle,))
    yield Attack("descriptors", "all 1,024 descriptors of the server", (descriptors,), server_files=1_024)
    yield Attack("max-packets", "maximal packets to 20 silent readers", (_silent(20), max_packets))


def _churn(pattern: bytes) -> Part:
    return functools.partial(_subscriptions_bundled, pattern=pattern)


def _subscribers(me: Attacker) -> None:
    me.hold(1_000, b"SUB k")


def _with_all(attacks: list[Attack]) -> dict[str, Attack]:
    together = tuple(part for attack in attacks for part in attack.parts)
    return {attack.name: attack for attack in (*attacks, Attack(ALL, "all at once", together))}


ATTACKS = _with_all(list(_catalogue()))
"""Every attack by its name; the last is all at once."""
