"""Attacks on a link: the attacking user's clients are on two buses, and one of the bystander's pair is on each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from benchmarks.attacks.attack import Attack
from benchmarks.attacks.attacker import Attacker, bundle, filled, receive

__all__ = ["links"]

_RATE = 50.0
"""The pair's round trips a second, each across the link and back."""
_PATTERNS = 13_500
"""Patterns of each of two clients: 27,000 of the 32,768 that a user may have."""


def _flood(me: Attacker, is_above: bool) -> None:
    """Publish bundles as fast as the bus reads."""
    sock, limit = me.connect_bundling(is_above=is_above)
    packet, number = filled([b"MSG flood/key\0" + bytes(64)], limit)
    me.ready()
    while me.running():
        me.send_patiently(sock, packet)
        me.count(number)


def _read(me: Attacker, is_above: bool) -> None:
    """Have the flood cross, and read what comes."""
    sock, _ = me.connect_bundling(b"SUB flood/", is_above=is_above)
    me.ready()
    while me.running():
        with contextlib.suppress(BlockingIOError):
            receive(sock)


def _patterns(me: Attacker) -> None:
    """Subscribe below to what nobody publishes, leave, and begin again."""
    while me.running():
        socks = []
        for number in range(2):
            sock, _ = me.connect_bundling()
            socks.append(sock)
            for first in range(0, _PATTERNS, 500):
                me.send_patiently(sock, bundle(b"SUB many/%d/%d/*/x" % (number, first + i) for i in range(500)))
                me.count(500)
        for sock in socks:
            me.fence(sock)
        me.ready()
        for sock in socks:
            sock.close()


def links() -> Iterator[Attack]:
    """Return the attacks on a link between two buses."""
    linked = functools.partial(Attack, rate=_RATE, has_throughput=False, is_linked=True)
    for way, source_is_above in (("up", False), ("down", True)):
        parts = tuple(
            functools.partial(part, is_above=is_above)
            for part, is_above in ((_read, not source_is_above), (_flood, source_is_above))
        )
        yield linked(f"link-flood-{way}", f"two buses: a flood of bundles that crosses the link, {way}", parts)
    yield linked("link-patterns", "two buses: 27,000 patterns below that come and go", (_patterns,))
