"""Parse, bundle, match, route and queue: the steps without input and output."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from sbus.flood import DEFAULT_SETTINGS, ORDERS, QueueLimits, Run, SendQueue, SharedBudget, UserShare
from sbus.protocol.bundles import MAX_BUNDLE, pack, unbundle
from sbus.protocol.keys import CURRENT, PeerCredentials, matches
from sbus.protocol.packets import build, parse
from sbus.routing.cache import RouteCache
from sbus.routing.route import Route
from sbus.routing.runs import next_run
from sbus.routing.trie import PatternIndex
from sbus.syscalls.batch import BATCH

PEER = PeerCredentials(pid=4000, uid=1000, gid=1000)
KEY = b"sensors/kitchen/temperature"
MESSAGE = b"MSG " + KEY + b"\0" + b"x" * 64


def test_calibration(benchmark: Any) -> None:
    """Plain Python that has nothing to do with sbus; how long it takes tells machines apart."""

    def work() -> int:
        found: dict[bytes, int] = {}
        for i in range(200):
            key = b"%d/%d" % (i % 10, i)
            found[key.partition(b"/")[0]] = len(key)
        return len(found)

    assert benchmark(work) == 10


# --- parse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packet", [MESSAGE, b"SUB " + KEY, b"CMSG echo/off"], ids=["MSG", "SUB", "CMSG"])
def test_parse(benchmark: Any, packet: bytes) -> None:
    """A packet is taken apart."""
    assert benchmark(parse, packet).key in packet


def test_build(benchmark: Any) -> None:
    """A packet is put together."""
    assert benchmark(build, b"MSG", KEY, b"x" * 64) == MESSAGE


def test_run_of_one_key(benchmark: Any) -> None:
    """A batch of messages that all go the same way is seen as such."""
    receivers = (object(),)
    assert benchmark(next_run, [MESSAGE] * BATCH, 0, BATCH, {KEY: receivers}) == (receivers, BATCH)


def test_run_of_many_keys(benchmark: Any) -> None:
    """The same with a key of its own for each message."""
    receivers = (object(),)
    keys = [b"sensors/%d" % i for i in range(BATCH)]
    packets = [build(b"MSG", key, b"x" * 64) for key in keys]
    assert benchmark(next_run, packets, 0, BATCH, dict.fromkeys(keys, receivers)) == (receivers, BATCH)


# --- bundles --------------------------------------------------------------------------------------


def test_pack(benchmark: Any) -> None:
    """As many messages as one bundle holds are put together."""
    messages = [MESSAGE] * (MAX_BUNDLE // (len(MESSAGE) + 4))
    bundles, counts = benchmark(pack, messages, MAX_BUNDLE, BATCH)
    assert counts == [len(messages)]
    assert len(bundles) == 1


def test_unbundle(benchmark: Any) -> None:
    """A bundle is taken apart."""
    messages = [MESSAGE] * (MAX_BUNDLE // (len(MESSAGE) + 4))
    bundles, _ = pack(messages, MAX_BUNDLE, BATCH)
    assert benchmark(unbundle, bundles) == messages


# --- match ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [KEY, b"sensors/", b"sensors/*/temp*"], ids=["plain", "below", "wildcards"])
def test_match(benchmark: Any, pattern: bytes) -> None:
    """The plain reference matches one pattern with one key."""
    assert benchmark(matches, pattern, KEY)


def test_check_secret(benchmark: Any) -> None:
    """A secret key is taken apart and checked."""
    secret = benchmark(CURRENT.check, b"!/cred/1000/1000/4000/inbox")
    assert secret is not None
    assert secret.rest == b"inbox"


# --- route ----------------------------------------------------------------------------------------


def crowded() -> PatternIndex[int]:
    """An index with 10,000 patterns, five of which match the key."""
    index: PatternIndex[int] = PatternIndex()
    for i in range(2500):
        for pattern in (b"other/%d/", b"sensors/room%d/*", b"sensors/*/x%d", b"sensors/kit%d*"):
            index.subscribe(i, pattern % i, None, PEER)
    for i, pattern in enumerate((KEY, b"sensors/", b"sensors/*/temperature", b"sensors/kitchen/", b"")):
        index.subscribe(10_000 + i, pattern, None, PEER)
    return index


def test_route_hit(benchmark: Any) -> None:
    """A key that was used before is found in the cache."""
    cache: RouteCache[int] = RouteCache()
    cache.remember(KEY, None, (1, 2, 3))
    assert benchmark(cache.routes.get, KEY) == (1, 2, 3)


def test_route_miss(benchmark: Any) -> None:
    """A key is looked up among 10,000 patterns."""
    assert len(benchmark(crowded().route, KEY, None)) == 5


def test_route_distinct_keys(benchmark: Any) -> None:
    """A key that was never used is checked, looked up and remembered, while the cache is full time and again."""
    index = crowded()
    cache: RouteCache[int] = RouteCache()
    numbers = count()

    def route() -> Route[int]:
        key = b"sensors/kitchen/%d" % next(numbers)
        return cache.remember(key, CURRENT.check(key), index.route(key, None))

    assert len(benchmark(route).receivers) == 3
    assert len(cache.routes) <= 16_384


@pytest.mark.parametrize("pattern", [b"inbox/%d", b"sensors/*/x%d"], ids=["plain", "wildcard"])
def test_subscribe(benchmark: Any, pattern: bytes) -> None:
    """A client subscribes and unsubscribes among 10,000 patterns, and the cache forgets what that touches."""
    index = crowded()
    cache: RouteCache[int] = RouteCache()
    numbers = count(100_000)

    def change() -> None:
        mine = pattern % next(numbers)
        index.subscribe(1, mine, None, PEER)
        cache.forget(mine, None, PEER)
        index.unsubscribe(1, mine, None, PEER)
        cache.forget(mine, None, PEER)
        cache.remember(KEY, None, (1, 2, 3))

    benchmark(change)
    assert len(index.route(KEY, None)) == 5


# --- queue ----------------------------------------------------------------------------------------


class Reader:
    """The owner of a queue that loses nothing."""

    def on_drained(self, has_room: bool, is_empty: bool, *lost: int) -> None:
        assert not any(lost)  # two numbers in versions without `on_lost`

    def on_lost(self, losses: object) -> None:
        raise AssertionError(losses)


def test_queue_free(benchmark: Any) -> None:
    """A batch passes through a queue whose socket takes everything."""
    queue = SendQueue(Reader(), QueueLimits(), UserShare(SharedBudget()))
    packets = [MESSAGE] * BATCH

    def pass_through() -> None:
        queue.pending += packets
        taken = queue.take(BATCH)
        queue.ack(taken, len(taken))

    benchmark(pass_through)
    assert len(queue) == 0


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.selector.decode().partition("/")[2])
def test_queue_congested(benchmark: Any, order: Any) -> None:
    """A batch comes and a batch goes while a thousand messages wait."""
    queue = SendQueue(Reader(), QueueLimits(), UserShare(SharedBudget()))
    packets = [MESSAGE] * BATCH
    queue.configure(DEFAULT_SETTINGS.with_order(order))
    queue.pending += [MESSAGE] * 1000
    queue.ack(queue.take(1), 0)
    queue.settle(may_block=False)

    def pass_through() -> None:
        queue.admit(Run(packets), False)
        taken = queue.take(BATCH)
        queue.ack(taken, len(taken))

    benchmark(pass_through)
    assert queue.messages == 1000
