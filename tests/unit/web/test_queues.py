"""What the page makes of the answers of queues: any client may give some, and many."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.task import Clock

from sbus.client.core import Message
from sbus.web.queues import MOST_QUEUES, ask_queues

JOBS = {"ready": 1, "waiting": 0, "delayed": 0, "out": 0, "dead": 0}


def answer(name: str, **changes: Any) -> bytes:
    """Return the answer of a queue's service."""
    found = {"queue": name, "jobs": JOBS, "workers": [], "problem": None, **changes}
    return b"+" + json.dumps(found).encode()


class FakeBus:
    """A connection on which some answers come at once; those after the end of the subscription are counted."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.missed = 0
        self.is_open = False

    async def has_subscribers(self, key: bytes) -> bool:
        return True

    async def whoami(self) -> bytes:
        return b"!/cred/1/2/3"

    def subscribe(self, pattern: bytes, callback: Callable[[Message], object]) -> FakeBus:
        self.callback, self.is_open = callback, True
        return self

    async def publish(self, key: bytes, payload: bytes) -> None:
        for each in self.answers:
            if self.is_open:
                self.callback(Message(b"k", each))
            else:
                self.missed += 1

    def close(self) -> None:
        self.is_open = False


def ask(bus: FakeBus) -> list[dict[str, Any]]:
    """Return what the page shows."""
    clock = Clock()
    asking: Any = defer.Deferred.fromCoroutine(ask_queues(clock, bus))  # type: ignore[arg-type]
    clock.advance(1)
    assert not bus.is_open
    found: list[dict[str, Any]] = asking.result
    return found


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"-no",
        b"+[]",
        b"+" + b"[" * 10_000,
        answer("b", jobs={**JOBS, "ready": float("inf")}),
        answer("b", jobs={**JOBS, "dead": float("nan")}),
        answer("b", workers=7),
        answer("b", workers=[[]] * 99_000),
    ],
    ids=["empty", "failure", "list", "deep", "inf", "nan", "number", "long"],
)
def test_answers_that_are_none_are_passed_over(other: bytes) -> None:
    """An answer that no service would give hides none that one gives."""
    shown = {"queue": "a", "jobs": JOBS, "workers": 100, "problem": ""}
    workers = [{"name": f"!/cred/{2**22}/{2**32 - 2}/{2**32 - 2}", "credit": 4096, "jobs": 4096}] * 100
    assert ask(FakeBus([other, answer("a", workers=workers)])) == [shown]


def test_a_flood_of_answers_is_not_kept() -> None:
    """After the answers that a page shows, the subscription ends."""
    bus = FakeBus([answer(f"{number:03}") for number in range(MOST_QUEUES + 20)])
    assert [queue["queue"] for queue in ask(bus)] == [f"{number:03}" for number in range(MOST_QUEUES)]
    assert bus.missed == 20
