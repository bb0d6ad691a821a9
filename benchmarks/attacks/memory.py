"""Memory by kind of state: what one client, pattern, message or reply takes, beside what the server counts for it.

The state is made by the attacking user, as root and the server's own user may be exempt from limits. The server's
RSS before and after says what the state takes. What the server counts is known from the documentation: the bytes of
patterns, and the bytes of packets.
"""

from __future__ import annotations

import fcntl
import functools
import struct
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.attacks import kernel
from benchmarks.attacks.attacker import WHOAMI, Attacker
from benchmarks.attacks.measure import Installation, Plan, Record, attack_parts
from benchmarks.attacks.processes import Swarm
from benchmarks.attacks.server import serving
from benchmarks.servers import Failed

__all__ = ["KINDS", "Kind", "run"]

_CLIENTS = 500
_PATTERNS = 10_000
_MESSAGES = 30_000
_MESSAGE = b"MSG memory/queued\0" + bytes(82)
_ASKING = 200
_REPLIES = 64
"""Replies that wait for one client, at most, before the server stops reading from it."""
_TICK = 0.02


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    :ivar title: what one item is.
    :ivar make: makes the state, counts its items, reports that it is ready, and keeps it until the deadline.
    :ivar counted: bytes that the server counts for one item.
    """

    title: str
    make: Callable[[Attacker], None]
    counted: int


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
        me.send_patiently(sock, b"SUB " + prefix + b"%05d" % number)
    me.fence(sock)
    me.count(_PATTERNS)
    _keep(me)


def _messages(me: Attacker, *, order: bytes) -> None:
    """Messages that wait in the server; those in the kernel's buffer do not count."""
    receiver, publisher = me.connect(b"CMSG order/" + order, b"SUB memory/queued"), me.connect()
    me.fence(publisher)
    for _ in range(_MESSAGES):
        me.send_patiently(publisher, _MESSAGE)
    me.fence(publisher)
    unread = struct.unpack("@i", fcntl.ioctl(receiver, termios.FIONREAD, bytes(4)))[0]
    me.count(_MESSAGES - unread // len(_MESSAGE))
    _keep(me)


def _replies(me: Attacker) -> None:
    """Ask until the server stops reading; 64 replies then wait for each client."""
    held = [me.connect(timeout=0.05) for _ in range(_ASKING)]
    for sock in held:
        try:
            while True:
                sock.send(WHOAMI)
        except BlockingIOError:
            me.count(_REPLIES)
    _keep(me)


def _kinds() -> Iterator[Kind]:
    yield Kind("idle client", _clients, 0)
    for title, prefix in (("open pattern", b"memory/pattern/"), ("secret pattern", b"!/cred////memory/")):
        yield Kind(title, functools.partial(_patterns, prefix=prefix), len(prefix) + 5)
    for order in (b"queue", b"stack", b"random"):
        title = f"queued message, order/{order.decode()}"
        yield Kind(title, functools.partial(_messages, order=order), len(_MESSAGE))
    yield Kind("waiting reply", _replies, len(WHOAMI) + 1 + len(b"!/cred/12001/12001/10000"))


KINDS = tuple(_kinds())


def run(installation: Installation, kind: Kind, plan: Plan) -> Record:
    """Measure one kind of state; the record has an ``error`` if there are no figures."""
    record: Record = {"memory": kind.title, "server": installation.name, "counted": kind.counted}
    try:
        with serving(installation.command, installation.options, pure=installation.pure) as server:
            before = kernel.resident(server.pid)
            deadline = time.monotonic() + plan.setup
            parts = attack_parts([kind.make], server.address, plan.files, deadline + 1)
            with Swarm(parts, plan.setup + 2) as swarm:
                while not swarm.is_ready and time.monotonic() < deadline:
                    server.check()
                    time.sleep(_TICK)
                if not (items := swarm.board.actions):
                    raise Failed(f"the state was not made within {plan.setup:.0f} s")
                record["items"] = items
                record["resident"] = round((kernel.resident(server.pid) - before) / items, 1)
                record["kernel"] = round(kernel.connections(server.address).unread / items, 1)
    except Failed as e:
        record["error"] = str(e)
    return record
