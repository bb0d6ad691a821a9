"""Services, workers and buses that are killed under load, and what becomes of the jobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.queue_chaos import suffer


def check(directory: Path, spawn: Callable[..., Any], seed: int, kills: list[str], **load: float) -> None:
    """Kill processes, and compare what became of the jobs with the promises."""
    outcome = suffer(directory, spawn, seed, kills, "ordered=key", **load)
    print(outcome)
    assert outcome.confirmed
    assert not outcome.lost
    assert not outcome.disordered
    assert len(outcome.shared) <= outcome.expired
    assert not outcome.dead


def test_kills(directory: Path, spawn: Callable[..., Any]) -> None:
    """Each confirmed job is done, by one worker at a time and in the order of its key, whatever is killed."""
    check(directory, spawn, 1, ["worker", "service"], rate=300.0, pause=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills(directory: Path, spawn: Callable[..., Any], seed: int) -> None:
    """The same with the bus, too, more kills, and more jobs."""
    kills = random.Random(seed).choices(["worker", "service", "bus"], [2, 1, 1], k=20)
    check(directory, spawn, seed, kills)
