"""Readers of the attacking user, silent or eager, and a flood for them: the parts of many attacks."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterable, Iterator

from benchmarks.attacks.attack import Part
from benchmarks.attacks.attacker import Attacker, receive_now

__all__ = ["EVERYTHING", "PACE", "connect_many", "draining", "flood", "resting", "silent"]

EVERYTHING = b"SUB "
"""Subscribes to the empty pattern."""

_FLOOD = b"MSG flood/key\0" + bytes(64)
_AT_ONCE = 950
"""Connections of one user that come at once: the server accepts 1,000 (`sbus.server.bus.admission`)."""
PACE = 0.0052
"""Seconds from one connection to the next beyond these: the server accepts 200 a second, and refuses the others. It is
the pace of the attack, and waits for nothing."""
_TICK = 0.1


def flood(me: Attacker) -> None:
    """Publish as fast as the server reads."""
    sock = me.connect()
    me.ready()
    while me.running():
        me.send_patiently(sock, _FLOOD)
        me.count()


def silent(number: int, *choices: bytes) -> Part:
    """Connect silent subscribers of everything, with these choices of flood control."""

    def readers(me: Attacker) -> None:
        me.hold(number, *(b"CMSG " + choice for choice in choices), EVERYTHING)

    return readers


def connect_many(me: Attacker, number: int, packets: Iterable[tuple[bytes, ...]]) -> Iterator[socket.socket]:
    """Connect clients at the pace at which the server accepts them.

    :param packets: what each of them sends first.
    """
    for index, each in enumerate(itertools.islice(packets, number)):
        yield me.connect(*each)
        if index + 1 >= _AT_ONCE:
            time.sleep(PACE)


def resting(number: int, *packets: bytes) -> Part:
    """Connect clients that send these packets and never read."""

    def clients(me: Attacker) -> None:
        held = list(connect_many(me, number, itertools.repeat(packets)))
        me.count(len(held))
        me.ready()
        while me.running():
            time.sleep(_TICK)

    return clients


def draining(number: int, *choices: tuple[bytes, ...], groups: int = 0) -> Part:
    """Connect readers that, one after the other, read all that their sockets hold.

    :param number: the number of readers.
    :param choices: those of the first reader, of the second one, and so on, again and again; by default none.
    :param groups: the number of groups. Each reader subscribes to the bystanders' key and its group's key; with 0, to
        everything.
    """

    def packets() -> Iterator[tuple[bytes, ...]]:
        for index, each in enumerate(itertools.cycle(choices or ((),))):
            patterns = (b"SUB by/bulk", b"SUB group/%d" % (index % groups)) if groups else (EVERYTHING,)
            yield (*(b"CMSG " + choice for choice in each), *patterns)

    def readers(me: Attacker) -> None:
        held = list(connect_many(me, number, packets()))
        me.ready()
        while me.running():
            for sock in held:
                with contextlib.suppress(BlockingIOError):
                    while receive_now(sock):
                        me.count()

    return readers
