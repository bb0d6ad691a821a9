"""Queues on the bus, as their services answer; any client could answer in their place."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from twisted.internet.task import deferLater

from sbus.client.dispatch import Message
from sbus.client.queues import ALL_QUEUES
from sbus.client.tx import Bus

__all__ = ["MOST_QUEUES", "ask_queues"]

MOST_QUEUES = 100
"""Queues that a page shows, and answers that are read."""
_MOST_BYTES = 16 << 10
"""Bytes of an answer: a service names at most 100 workers in it."""
_WAIT = 0.5
"""Seconds in which services answer."""
_STATES = ("ready", "waiting", "delayed", "out", "dead")

Json = dict[str, Any]


async def ask_queues(reactor: Any, bus: Bus) -> list[Json]:
    """Return what each service says of its queue, by name; nothing is sent if there is none."""
    if not await bus.has_subscribers(ALL_QUEUES):
        return []
    answers: list[bytes] = []
    key = await bus.whoami() + b"/sbus/reply/queues"

    def take(answer: Message) -> None:
        answers.append(answer.payload[1 : _MOST_BYTES + 1])  # a longer one is malformed after the cut
        if len(answers) == MOST_QUEUES:
            subscription.close()

    subscription = bus.subscribe(key, take)
    try:
        await bus.publish(ALL_QUEUES, key + b"\0")
        await deferLater(reactor, _WAIT)
    finally:
        subscription.close()
    queues: dict[str, Json] = {}
    for answer in answers:
        with suppress(ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
            queue = _queue(json.loads(answer))
            queues[queue["queue"]] = queue
    return [queues[name] for name in sorted(queues)]


def _queue(answer: Json) -> Json:
    """Return what the page shows of an answer."""
    return {
        "queue": str(answer["queue"])[:64],
        "jobs": {state: int(answer["jobs"][state]) for state in _STATES},
        "workers": len(answer["workers"]),
        "problem": str(answer["problem"] or "")[:200],
    }
