"""Full garbage collections are rare, and still take place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from sbus.daemon.garbage import INTERVAL, RareCollections


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Keep full collections apart, by a clock that the test sets, until the test is over."""
    before, clock = gc.get_threshold(), Clock()
    gc.set_threshold(100, 5, 5)
    gc.freeze()  # a full collection is due when what is not frozen has grown by a quarter since the last one
    gc.collect()
    rare = RareCollections(clock)
    gc.callbacks.append(rare)
    yield clock
    gc.callbacks.remove(rare)
    gc.set_threshold(*before)


def collections(made: int) -> int:
    """Return the number of full collections while a number of lists is made, and kept."""
    before = gc.get_stats()[2]["collections"]
    kept: list[Any] = [[] for _ in range(made)]
    assert len(kept) == made
    return gc.get_stats()[2]["collections"] - before


def test_full_collections_are_rare(clock: Clock) -> None:
    """However many objects are made, none takes place before its time; then one does."""
    assert collections(20_000) == 0
    clock.now += INTERVAL - 1
    assert collections(20_000) == 0
    clock.now += 1
    assert collections(40_000) == 1
    assert collections(20_000) == 0
    clock.now += 10 * INTERVAL
    assert collections(80_000) == 1


def test_young_objects_are_collected(clock: Clock) -> None:
    """The collections of young objects go on meanwhile."""
    before = [each["collections"] for each in gc.get_stats()]
    collections(20_000)
    young, middle, full = (each["collections"] - was for each, was in zip(gc.get_stats(), before, strict=True))
    assert young > 100
    assert middle > 20
    assert full == 0


def test_an_explicit_collection_counts(clock: Clock) -> None:
    """After a full collection by `gc.collect`, the next one waits for the whole interval, too."""
    clock.now += INTERVAL
    gc.collect()
    assert collections(20_000) == 0
