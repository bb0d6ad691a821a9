"""Memory by kind of state: what one client, pattern, message or reply takes, beside what the server counts for it.

The attacking user makes the state, as root and the server's own user may be exempt from limits. It is made twice, and
the growth of the server's RSS by the second time counts: the first time also fills what Python had kept free. What the
server counts are the prices of its account of memory (`sbus.server.bus.memory`), without those of the kernel's part.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.attacks import kernel
from benchmarks.attacks.attacker import WHOAMI, Attacker, receive
from benchmarks.attacks.measure import Installation, Plan, Record, attack_parts
from benchmarks.attacks.processes import Swarm
from benchmarks.attacks.server import Server, serving
from benchmarks.servers import Failed
from sbus.flood.backlogs import PRICE
from sbus.protocol.keys import CURRENT
from sbus.server.asks.interest import watch_memory
from sbus.server.bus.memory import pattern_memory

__all__ = ["KINDS", "Kind", "run"]

_CLIENTS = 450
"""Twice this is below the burst of connections that a user may make."""
_PATTERNS = 10_000
_WATCHERS = 6
_KEYS = 1_000
_HELD: list[socket.socket] = []
"""The sockets of this process that stay open until its end."""
_MESSAGES = 30_000
_MESSAGE_SIZE = 100
_SILENT = 100
_REPLIES = 64
"""Replies that wait for one client, at most, before the server stops reading from it."""
_CLIENT_IN_PROCESS = 1_800
"""Bytes of `sbus.server.bus.memory.CLIENT_MEMORY` that are not the kernel's."""
_TICK = 0.02
_MARGIN = 5.0
_QUIET = 0.2
"""Seconds in which no client can send any more, so that the server has stopped reading from them."""


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    :ivar title: what one item is.
    :ivar make: makes the state, counts its items, reports that it is ready, and keeps it until the deadline.
    :ivar counted: bytes that the server counts for one item.
    :ivar in_kernel: whether each item has its part of the kernel's memory.
    """

    title: str
    make: Callable[[Attacker], None]
    counted: int
    in_kernel: bool = True


def _keep(me: Attacker) -> None:
    me.ready()
    while me.running():
        time.sleep(_TICK)


def _clients(me: Attacker) -> None:
    held = [me.connect() for _ in range(_CLIENTS)]
    for sock in held:
        me.fence(sock)
    me.count(len(held))
    _keep(me)


def _patterns(me: Attacker, prefix: bytes) -> None:
    sock = me.connect()
    for number in range(_PATTERNS):
        me.send_patiently(sock, b"SUB " + prefix + b"%010d/%05d" % (os.getpid(), number))
    me.fence(sock)
    me.count(_PATTERNS)
    _keep(me)


def _watched(me: Attacker, key: bytes) -> None:
    for first in range(0, _WATCHERS * _KEYS, _KEYS):
        sock = me.connect()
        for number in range(first, first + _KEYS):
            me.send_patiently(sock, b"CMSG interest/on\0" + key % (os.getpid(), number))
            receive(sock)
        me.count(_KEYS)
        _HELD.append(sock)
    _keep(me)


def _messages(me: Attacker, order: bytes) -> None:
    """Messages that wait in the server; those in the kernel's buffer do not count."""
    key = b"memory/%d" % os.getpid()
    message = (b"MSG " + key + b"\0").ljust(_MESSAGE_SIZE, b"x")
    receiver, publisher = me.connect(b"CMSG order/" + order, b"SUB " + key), me.connect()
    me.fence(publisher)
    for _ in range(_MESSAGES):
        me.send_patiently(publisher, message)
    me.fence(publisher)
    unread = struct.unpack("@i", fcntl.ioctl(receiver, termios.FIONREAD, bytes(4)))[0]
    me.count(_MESSAGES - unread // _MESSAGE_SIZE)
    _keep(me)


def _replies(me: Attacker, items: int) -> None:
    """Ask on many connections until the server stops reading from them; 64 replies then wait for each."""
    held = [me.connect() for _ in range(_SILENT)]
    moved_at = time.monotonic()
    while time.monotonic() < moved_at + _QUIET:
        for sock in held:
            try:
                while True:
                    sock.send(WHOAMI, socket.MSG_DONTWAIT)
                    moved_at = time.monotonic()
            except BlockingIOError:
                pass
        time.sleep(_TICK)
    me.count(items * len(held))
    _keep(me)


def _price(pattern: bytes) -> int:
    return pattern_memory(pattern, b"/", CURRENT.check(pattern))


def _kinds() -> Iterator[Kind]:
    yield Kind("idle client", _clients, _CLIENT_IN_PROCESS)
    for title, prefix in (("open pattern", b"memory/pattern/"), ("secret pattern", b"!/cred////memory/")):
        yield Kind(title, functools.partial(_patterns, prefix=prefix), _price(prefix + b"%010d/%05d" % (0, 0)))
    key = b"memory/%d/%05d"
    yield Kind("watched key", functools.partial(_watched, key=key), watch_memory(key % (10_000, 0), b"/"))
    for order in (b"queue", b"stack", b"random"):
        title = f"queued message, order/{order.decode()}"
        yield Kind(title, functools.partial(_messages, order=order), _MESSAGE_SIZE + PRICE)
    reply = len(WHOAMI) + 1 + len(b"!/cred/12001/12001/10000") + PRICE
    yield Kind("waiting reply", functools.partial(_replies, items=_REPLIES), reply, in_kernel=False)
    unread = _CLIENT_IN_PROCESS + _REPLIES * reply
    yield Kind("client that reads none of its replies", functools.partial(_replies, items=1), unread)


KINDS = tuple(_kinds())


def run(installation: Installation, kind: Kind, plan: Plan) -> Record:
    """Measure one kind of state; the record has an ``error`` if there are no figures."""
    record: Record = {"memory": kind.title, "server": installation.name, "counted": kind.counted}
    try:
        with (
            serving(installation.command, installation.options, pure=installation.pure) as server,
            _made(server, kind, plan),
        ):
            before, unread = kernel.resident(server.pid), kernel.connections(server.address).unread
            with _made(server, kind, plan) as items:
                record["items"] = items
                record["resident"] = round((kernel.resident(server.pid) - before) / items, 1)
                if kind.in_kernel:
                    record["kernel"] = round((kernel.connections(server.address).unread - unread) / items, 1)
    except (Failed, OSError) as e:  # /proc has nothing about a server that is gone
        record["error"] = str(e)
    return record


@contextlib.contextmanager
def _made(server: Server, kind: Kind, plan: Plan) -> Iterator[int]:
    """Make the state, and keep it for the context; yields the number of items.

    :raises Failed: if it is not made in time.
    """
    seconds = 2 * plan.setup + _MARGIN
    parts = attack_parts([kind.make], server.address, plan.files, time.monotonic() + seconds)
    with Swarm(parts, seconds + _MARGIN) as swarm:
        give_up = time.monotonic() + plan.setup
        while not swarm.is_ready and time.monotonic() < give_up:
            server.check()
            time.sleep(_TICK)
        if not swarm.is_ready or not swarm.board.actions:
            raise Failed(f"the state was not made within {plan.setup:.0f} s")
        yield swarm.board.actions
