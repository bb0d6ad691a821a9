"""The attacks, by name. Each is a function that an `Attacker` runs from the beginning until its deadline."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import select
import socket
import time
from collections.abc import Iterator

from benchmarks.attacks.attack import ALL, Attack, Part
from benchmarks.attacks.attacker import LARGEST_PACKET, WHOAMI, Attacker, bundle, filled, receive, receive_now
from benchmarks.attacks.crowds import crowds
from benchmarks.attacks.links import links
from benchmarks.attacks.payloads import payloads
from benchmarks.attacks.readers import EVERYTHING, draining, flood, silent
from benchmarks.attacks.server import POLICY

__all__ = ["ATTACKS"]

_DONTWAIT = socket.MSG_DONTWAIT


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
    me.hold(1_000, EVERYTHING)


def idle(me: Attacker) -> None:
    me.hold(min(15_000, me.most_files - 100))


def mass_close(me: Attacker) -> None:
    """Connect 2,000 clients, and close all of them at the same time, each with last words; begin again."""
    while me.running():
        held: list[socket.socket] = []
        while me.running() and len(held) < 2_000:
            held.append(me.connect(b"SUB last-words"))
        me.ready()
        for sock in held:
            for _ in range(5):
                with contextlib.suppress(OSError):
                    sock.send(b"MSG last-words/none\0", _DONTWAIT)
        for sock in held:
            sock.close()
        me.count(len(held))


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


# --- what nobody may do ---------------------------------------------------------------------------


def denied(me: Attacker) -> None:
    sock, _ = me.connect_bundling(b"CMSG denied/on")
    me.ready()
    for number in itertools.count(step=500):
        if not me.running():
            return
        me.send_patiently(sock, bundle(b"MSG denied/%d\0" % (number + i) for i in range(500)))
        me.count(500)


def judged_subs(me: Attacker) -> None:
    """Subscribe to a pattern that a policy has to compare with a thousand of its own, and stop."""
    sock, limit = me.connect_bundling(b"CMSG denied/on")
    packet, number = filled([b"SUB a*/*/p", b"UNSUB a*/*/p", b"SUB area/*/p*/"], limit)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count(number)


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
        poll = select.poll()
        for sock in socks:
            poll.register(sock, select.POLLOUT)
        poll.poll(100)


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


# --- extensions -----------------------------------------------------------------------------------


def bye_storm(me: Attacker) -> None:
    """Ask for byes, leave a message unread, break the protocol, and never read why the server disconnects."""
    held: collections.deque[socket.socket] = collections.deque(maxlen=500)
    me.ready()
    while me.running():
        held.append(me.connect(b"CMSG bye/on", b"CMSG receipts/on", b"SUB bye", b"MSG bye\0", b"JUNK"))
        me.count()


def flipping(setting: bytes, first: bytes) -> Part:
    """Choose a setting on and off for 20 silent readers of everything, which have made another choice first."""

    def flips(me: Attacker) -> None:
        receivers = [me.connect(b"CMSG " + first, EVERYTHING) for _ in range(20)]
        me.ready()
        for choice in itertools.cycle((b"CMSG %b/on" % setting, b"CMSG %b/off" % setting)):
            if not me.running():
                return
            _send_to_all(me, receivers, choice)

    return flips


def flood_keys(me: Attacker) -> None:
    """Publish to 20,000 keys in turn, in bundles."""
    sock, _ = me.connect_bundling()
    me.ready()
    for number in itertools.count(step=500):
        if not me.running():
            return
        me.send_patiently(sock, bundle(b"MSG many/%d\0" % ((number + i) % 20_000) for i in range(500)))
        me.count(500)


def watchers(me: Attacker) -> None:
    """Watch 1,024 keys on each of 8 clients, and read nothing."""
    held = []
    for _ in range(8):
        sock, limit = me.connect_bundling()
        size = max(1, limit // 64)
        for first in range(0, 1_024, size):
            keys = range(first, min(first + size, 1_024))
            me.send_patiently(sock, bundle(b"CMSG interest/on\0watched/%d" % key for key in keys))
        held.append(sock)
    me.ready()
    while me.running():
        time.sleep(0.1)


def interest_churn(me: Attacker) -> None:
    """Subscribe to patterns that match watched keys, and end these subscriptions, in bundles."""
    sock, limit = me.connect_bundling(b"CMSG blocking/soft/discard")
    me.ready()
    for number in itertools.count():
        if not me.running():
            return
        pattern = b"watched/%d*" % (number % 1_000)
        packet, count = filled([b"SUB " + pattern, b"UNSUB " + pattern], min(limit, 4_000))
        me.send_patiently(sock, packet)
        me.count(count)


def watch_flips(me: Attacker) -> None:
    """Watch a key of 1,024 segments and stop watching it, in bundles whose answers are read."""
    sock, _ = me.connect_bundling()
    key = b"/" * 1_023
    packet, count = filled([b"CMSG interest/on\0" + key, b"CMSG interest/off\0" + key], 60_000)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count(count)
        with contextlib.suppress(BlockingIOError):
            while True:
                receive_now(sock)


def probes(me: Attacker) -> None:
    """Ask about a key that 1,000 clients are subscribed to."""
    sock, _ = me.connect_bundling()
    packet, count = filled([b"CMSG probe\0k"], 1_000)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        receive(sock)
        me.count(count)


def snapshots(me: Attacker) -> None:
    """Ask for all last values on 500 clients that never read."""
    me.hold(500, b"CMSG last\0")


def replace_values(me: Attacker) -> None:
    """Replace 10,000 last values again and again."""
    sock, _ = me.connect_bundling()
    me.ready()
    for number in itertools.count(step=40):
        if not me.running():
            return
        packets = (b"MSG last/%d\0" % ((number + i) % 10_000) + bytes(1_000) for i in range(40))
        me.send_patiently(sock, bundle(packets))
        me.count(40)


def stream_halves(me: Attacker) -> None:
    """Hold 500 stream clients, each with nearly all of a maximal frame sent."""
    held = []
    frame = LARGEST_PACKET.to_bytes(4, "little") + bytes(LARGEST_PACKET - 1)
    for _ in range(500):
        if not me.running():
            return
        sock = me.connect_stream()
        held.append(sock)
        with contextlib.suppress(BlockingIOError):
            sock.sendall(frame)
        me.count()
    me.ready()
    while me.running():
        time.sleep(0.1)


def stream_drips(me: Attacker) -> None:
    """Send single bytes of a maximal frame on 500 stream clients."""
    held = []
    for _ in range(500):
        sock = me.connect_stream()
        sock.send(LARGEST_PACKET.to_bytes(4, "little"))
        held.append(sock)
    me.ready()
    while me.running():
        _send_to_all(me, held, b"x")


# --- silent readers -------------------------------------------------------------------------------


def flood_groups(me: Attacker) -> None:
    """Publish to each group of readers in turn."""
    sock = me.connect()
    me.ready()
    for number in itertools.count():
        if not me.running():
            return
        me.send_patiently(sock, b"MSG group/%d\0" % (number % _GROUPS))
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
    "latest": (b"blocking/soft/latest",),
    "receipts": (b"receipts/on", b"blocking/soft/discard"),
}
_EAGER: dict[str, tuple[str, tuple[bytes, ...]]] = {
    "block": ("block-discard", (b"blocking/soft/block",)),
    "full-block": ("queue-block", (b"blocking/hard/block",)),
    "discard": ("discard", (b"blocking/soft/discard",)),
    "latest": ("latest", (b"blocking/soft/latest",)),
    "bundles": ("with bundles", (b"bundle/on",)),
}
_GROUPS = 64
"""Groups of readers in *eager-groups*."""
_MIXED = ((b"order/stack",), (b"order/random",), (b"blocking/soft/latest",))


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
        yield Attack(f"readers-{mode}", f"200 silent readers of everything, {mode}", (silent(200, *choices), flood))
    yield Attack("fan-out", "big bundles to 1,000 silent subscribers", (_subscribers, fan_out))
    yield Attack("stopped", "1,000 sockets on the empty pattern, never read", (stopped, flood))
    yield Attack("idle", "15,000 idle clients", (idle,))
    yield Attack("descriptors", "all 1,024 descriptors of the server", (descriptors,), server_files=1_024)
    yield Attack("mass-close", "2,000 clients that leave at the same time", (mass_close,))
    yield Attack("drains", "800 readers that let their sockets get full, then drain them", (draining(800), flood))
    for name, (mode, choices) in _EAGER.items():
        yield Attack(
            f"eager-{name}", f"1,000 readers that read all the time, {mode}", (draining(1_000, choices), flood)
        )
    yield Attack("eager-most", "3,900 readers that read all the time", (draining(3_900), flood))
    yield Attack("eager-mixed", "the same, with stack, random, latest", (draining(3_900, *_MIXED), flood))
    yield Attack(
        "eager-groups",
        f"3,900 such readers in {_GROUPS} groups, each with a key of its own",
        (draining(3_900, *_MIXED, groups=_GROUPS), flood_groups),
    )
    asking = (b"sender/on",)
    yield Attack(
        "eager-senders", "200 readers that ask for senders and read all the time", (draining(200, asking), flood)
    )
    yield Attack("silent-senders", "200 silent readers that ask for senders", (silent(200, *asking), flood))
    yield Attack(
        "sender-flips", "senders on and off for 20 readers with a backlog", (flipping(b"sender", b"order/stack"), flood)
    )
    yield Attack(
        "denied",
        "refused messages with distinct keys, in bundles; denials that nobody reads",
        (denied,),
        server_options=(POLICY,),
    )
    yield Attack(
        "judged-subs", "patterns that take long to judge, in bundles", (judged_subs,), server_options=(POLICY,)
    )
    yield Attack("bye-storm", "byes that nobody reads", (bye_storm,))
    yield Attack(
        "receipt-flips",
        "receipts on and off for 20 readers that lose",
        (flipping(b"receipts", b"blocking/soft/discard"), flood),
    )
    yield Attack("latest-keys", "20,000 keys to 20 silent readers of the newest", (_latest, flood_keys))
    yield Attack("interest-churn", "8,192 watched keys, and patterns that come and go", (watchers, interest_churn))
    yield Attack("watch-flips", "watch a key of 1,024 segments, and stop", (watch_flips,))
    yield Attack("probes", "probes of a key with 1,000 subscribers", (_subscribers, probes))
    yield Attack(
        "snapshots",
        "500 unread snapshots of last values that are replaced",
        (snapshots, replace_values),
        server_options=_KEEP_LAST,
    )
    yield Attack("stream-halves", "500 half-sent maximal frames", (stream_halves,), server_options=_STREAM)
    yield Attack("stream-drips", "single bytes to 500 stream clients", (stream_drips,), server_options=_STREAM)
    yield Attack("max-packets", "maximal packets to 20 silent readers", (silent(20), max_packets))


_KEEP_LAST = ("--last-value=last/",)
_STREAM = ("--stream=door={address}-stream,mode=0777",)


def _latest(me: Attacker) -> None:
    me.hold(20, b"CMSG blocking/soft/latest", EVERYTHING)


def _churn(pattern: bytes) -> Part:
    return functools.partial(_subscriptions_bundled, pattern=pattern)


def _subscribers(me: Attacker) -> None:
    me.hold(1_000, b"SUB k")


def _with_all(attacks: list[Attack]) -> dict[str, Attack]:
    together = tuple(part for attack in attacks if attack.is_plain for part in attack.parts)
    everything = Attack(ALL, "all at once", together, server_options=(*_KEEP_LAST, *_STREAM, POLICY))
    return {attack.name: attack for attack in (*attacks, everything)}


ATTACKS = _with_all([*_catalogue(), *payloads(), *crowds(), *links()])
"""Every attack by its name; the last is all at once."""
