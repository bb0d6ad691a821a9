"""The first look-up of a key against the worst patterns that the limits let a user hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from twisted.internet.task import Clock

from sbus.fair import Scheduler
from sbus.protocol.keys import CURRENT, PeerCredentials
from sbus.routing.cost import MatchCost
from sbus.server.bus.router import Router
from sbus.server.core.limits import Limits

CLIENTS = 16_384
CASES = ("a and *", "prefixes", "long prefixes", "many segments", "one pattern", "secret")


class Receiver:
    """A receiver that is nothing but credentials."""

    def __init__(self, number: int) -> None:
        self.peer = PeerCredentials(pid=10_000 + number, uid=1_000, gid=1_000)


def case(name: str) -> tuple[Iterator[bytes], bytes]:
    """Return the patterns that a user tries to hold, and the key that is looked up."""
    if name == "a and *":
        return (b"/".join(each) + b"/" for each in itertools.product((b"a", b"*"), repeat=11)), b"a/" * 11 + b"k"
    if name == "prefixes":
        return (b"a" * length + b"*" for length in range(600)), b"a" * 1_000
    if name == "long prefixes":
        return (b"a" * length + b"*/*" for length in range(60_000, 60_010)), b"a" * 61_000 + b"/b"
    if name == "many segments":
        return (b"/".join([b"*"] * count) for count in (100, 300, 500, 1_000)), b"/".join([b"a"] * 1_023)
    if name == "one pattern":
        return itertools.repeat(b"k", CLIENTS), b"k"
    return itertools.repeat(b"!/cred////k", CLIENTS), b"!/cred////k"


@pytest.mark.parametrize("users", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_first_look_up(benchmark: Any, name: str, users: int) -> None:
    """A key is looked up; each of 1 or 16 users holds as many of the patterns as the limits allow."""
    limit, router = Limits().max_match_steps, Router(CURRENT, Scheduler(Clock()))
    receivers = [Receiver(number) for number in range(CLIENTS)]
    patterns, key = case(name)
    tried = [(pattern, CURRENT.check(pattern)) for pattern in patterns]
    if tried[0][0] == tried[-1][0]:
        for receiver in receivers:
            router.add(receiver, *tried[0])  # type: ignore[arg-type]
    else:
        # Other users' patterns add steps only if they are others, so each user tries them from another place on.
        held: set[bytes] = set()
        for user in range(users):
            cost = MatchCost()
            at = user * len(tried) // users
            for number, (pattern, secret) in enumerate(tried[at:] + tried[:at]):
                if pattern in held:
                    continue
                cost.add(pattern)
                if cost.steps > limit:
                    cost.remove(pattern)
                    continue
                held.add(pattern)
                router.add(receivers[(number * users + user) % CLIENTS], pattern, secret)  # type: ignore[arg-type]

    def look_up() -> tuple[Any, ...]:
        return router.route(key).receivers

    found = benchmark.pedantic(look_up, setup=router._cache.clear, rounds=15)
    benchmark.extra_info["receivers"] = len(found)
    benchmark.extra_info["allowed_us"] = 1_000 + 0.3 * len(found)
