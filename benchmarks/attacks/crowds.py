"""Attacks on many bystanders at once, and those in which several users, or the bystander's own one, take part."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

from benchmarks.attacks.attack import Attack, Crowd, Part
from benchmarks.attacks.attacker import Attacker, receive_now
from benchmarks.attacks.processes import ATTACKER, BYSTANDER, ROOT, User, attackers
from benchmarks.attacks.readers import EVERYTHING, connect_many, draining, flood, resting

__all__ = ["crowds"]

_TWELVE = Crowd(12)
_DONTWAIT = socket.MSG_DONTWAIT
_READERS: dict[str, Callable[[int], Part]] = {
    "silent": lambda number: resting(number, EVERYTHING),
    "eager": draining,
}
_MANY_SMALL = itertools.product(((1, 1), (12, 1), (12, 2), (40, 1), (40, 2), (40, 16)), (250, 1_000, 3_900), _READERS)
"""The bystanders and their users, the readers, and how these read."""
_USUAL = {
    ((1, 1), 3_900, "silent"),
    ((12, 1), 250, "silent"),
    ((12, 1), 3_900, "silent"),
    ((12, 1), 3_900, "eager"),
    ((40, 16), 3_900, "silent"),
    ((40, 16), 1_000, "eager"),
}
"""Those of these rows that are measured if no names are given."""
_DEAD = 900
"""Receivers in *dead*: the server accepts 1,000 connections of one user at once."""
_LAST_WORDS = 270
"""Messages of each of them."""
_IDLE = 800
"""Idle clients of each user in *relieve*."""
_FILLED = 4
"""Silent receivers of each user in *relieve*."""
_FILLING = 16_384
"""Bytes of each message to these."""
_SLOW = 0.005
"""Seconds between two messages that the receiver in *held* reads."""


def _topics(number: int) -> Part:
    """Publish to each of the bystanders' topics in turn."""

    def publish(me: Attacker) -> None:
        sock = me.connect()
        me.ready()
        for topic in itertools.cycle(range(number)):
            if not me.running():
                return
            me.send_patiently(sock, b"MSG by/topic/%d\0" % topic + bytes(64))
            me.count()

    return publish


def flip(me: Attacker) -> None:
    """End and renew a subscription to the bystanders' keys."""
    sock = me.connect(b"SUB by/")
    me.ready()
    while me.running():
        me.send_patiently(sock, b"UNSUB by/")
        me.send_patiently(sock, b"SUB by/")
        me.count(2)


def dead(me: Attacker) -> None:
    """Connect receivers of everything, have each send messages, and close all of them at the same time; begin again."""
    while me.running():
        held = list(connect_many(me, _DEAD, itertools.repeat((EVERYTHING,))))
        for sock in held:
            with contextlib.suppress(OSError):
                for _ in range(_LAST_WORDS):
                    sock.send(b"MSG last-words\0", _DONTWAIT)
        for sock in held:
            sock.close()
        me.ready()
        me.count(len(held))


def fill(me: Attacker) -> None:
    """Hold idle clients, and fill the queues of silent receivers; those that the server ends are replaced."""
    idle = [me.connect() for _ in range(_IDLE)]
    key = b"fill/%d" % os.getpid()
    message = b"MSG " + key + b"\0" + bytes(_FILLING)
    publisher = me.connect()
    poll = select.poll()
    held: dict[int, socket.socket] = {}
    me.ready()
    while me.running():
        for number, _ in poll.poll(0):
            poll.unregister(number)
            held.pop(number).close()
        while len(held) < _FILLED:
            sock = me.connect(b"SUB " + key)
            held[sock.fileno()] = sock
            poll.register(sock, 0)
        try:
            me.send_patiently(publisher, message)
        except ConnectionError:
            publisher = me.connect()
        me.count()
    del idle  # not before


def slow_service(me: Attacker) -> None:
    """Read 200 messages a second, and block who publishes more."""
    sock = me.connect(b"CMSG blocking/hard/block", b"SUB by/ping", b"SUB held/")
    me.ready()
    while me.running():
        with contextlib.suppress(BlockingIOError):
            receive_now(sock)
            me.count()
        time.sleep(_SLOW)


def flood_service(me: Attacker) -> None:
    """Publish short messages to that receiver, as fast as the server reads; the set-up is over when it stops."""
    sock = me.connect()
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while me.running():
        if not poll.poll(100):
            me.ready()
            continue
        me.send_patiently(sock, b"MSG held/x\0")
        me.count()


def knock(me: Attacker) -> None:
    """Connect to the admin socket and close."""
    me.ready()
    while me.running():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(f"{me.address}.admin")
                me.count()


def _many_small() -> Iterator[Attack]:
    for (clients, users), number, kind in _MANY_SMALL:
        yield Attack(
            f"many-small-{clients}-{users}-{number}-{kind}",
            f"{number:,} {kind} readers of everything, beside {clients} bystanders of {users} users",
            (_READERS[kind](number),),
            crowd=Crowd(clients, users),
            is_usual=((clients, users), number, kind) in _USUAL,
        )


def _held(number: int) -> Attack:
    flooders: tuple[User, ...] = (ATTACKER,) if number == 1 else attackers(number)
    return Attack(
        "held" if number == 1 else f"held-{number}",
        f"{number} floods to a slow service with hard block, to which the bystander sends 20 messages a second",
        (slow_service, *(flood_service,) * number),
        users=(ROOT, *flooders),
        spinners=1,
        rate=20.0,
        size=500,
        secs=5.0,  # in which the flooder's messages go out at least four times
        has_throughput=False,
        server_options=("--queue-messages=200",),
    )


def crowds() -> Iterator[Attack]:
    """Return these attacks. Where nothing else is said, the bystanders are twelve."""
    for number in (1, 33, 257):
        yield Attack(
            f"one-key-{number}",
            f"a flood to {number} keys of the bystanders",
            (_topics(number),),
            crowd=Crowd(12, 1, number),
        )
    for number in (8, 16):
        yield Attack(
            f"eager-{number}", f"{number} readers that read all the time", (draining(number), flood), crowd=_TWELVE
        )
    yield Attack(
        "sibling",
        "a flood by the bystander's own user to 64 readers that read all the time",
        (draining(64), flood),
        users=(BYSTANDER, BYSTANDER),
        has_throughput=False,
    )
    yield from _many_small()
    yield Attack(
        "flip",
        "3,900 silent clients on the bystanders' keys, one of which ends and renews its subscription",
        (resting(3_899, b"SUB by/"), flip),
        crowd=_TWELVE,
    )
    yield Attack(
        "dead", f"{_DEAD} receivers of everything that send {_LAST_WORDS} messages each and die", (dead,), crowd=_TWELVE
    )
    yield Attack(
        "relieve",
        f"five users that fill --max-memory=64M together, with {5 * _IDLE:,} idle clients",
        (fill,) * 5,
        users=attackers(5),
        crowd=_TWELVE,
        server_options=("--max-memory=64M",),
    )
    yield _held(1)
    yield _held(40)
    yield Attack(
        "admin-storm",
        "connect to the admin socket and close",
        (knock, knock),
        scrapes=True,
        server_options=("--admin=auto", f"--admin-group={BYSTANDER.gid},metrics"),
    )
