"""The figures of a bus in one object, as ``/v1/status`` and the event ``status`` show them.

Every figure is at hand: only `largest_queue` looks at each client, in slices, and only while a receiver is congested.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sbus.server.bus.registry import SubscriptionRegistry
from sbus.syscalls.batch import COMPILED
from sbus.version import __version__

__all__ = ["STARTED_AT", "STEP", "largest_queue", "status"]

STEP = 32
"""Clients or patterns looked at for one piece of an answer: less than 0.1 ms."""

_DENIED = 20
"""Users and rules whose last refusals are in the status."""
STARTED_AT = time.time()
"""When this process was started, in seconds since the epoch."""


def status(registry: SubscriptionRegistry) -> Iterator[dict[str, Any] | None]:
    """Yield None after each step of looking at the clients, then the figures of a bus.

    docs/admin.rst documents the figures.
    """
    for largest in largest_queue(registry):
        yield None if largest is None else _figures(registry, largest)


def _figures(registry: SubscriptionRegistry, largest: int) -> dict[str, Any]:
    budget, shares = registry.users.budget, registry.users.shares
    last_values = registry.last_values
    attached = {name: bool(is_up()) for name, is_up in sorted(registry.attached.items())}
    return {
        "time": time.time(),
        "version": __version__,
        "is_compiled": COMPILED,
        "pid": os.getpid(),
        "started_at": STARTED_AT,
        "clients": len(registry.clients),
        "clients_limit": registry.limits.max_clients,
        "users": len(registry.users),
        "queues": budget.queues,
        "queue_messages": budget.messages,
        "queue_bytes": budget.bytes,
        "queue_largest_bytes": largest,
        "queue_limit_bytes": budget.limit,
        "payload_files": budget.payload_files,
        "memory_bytes": budget.memory.held,
        "memory_limit_bytes": budget.memory.limit,
        "limits_per_user": {
            "clients": registry.limits.user_clients,
            "clients_of": {
                str(uid): share.clients.most
                for uid, share in shares.of_some.items()
                if share.clients is not shares.of_most.clients
            },
            "accepts_per_second": registry.limits.user_accepts,
            "patterns": registry.limits.user_patterns,
            "payload_files": registry.limits.user_payloads,
            "match_steps": registry.limits.max_match_steps,
            "memory_bytes": budget.memory.user_limit,
        },
        "held_publishers": registry.backpressure.held,
        "held_seconds": registry.backpressure.held_seconds,
        "cached_routes": len(registry.routes),
        "last_values": None if last_values is None else len(last_values),
        "has_recorder": attached.get("recorder"),
        "attached": attached,
        "counters": registry.counters.as_dict(),
        "denied": [asdict(row) for row in registry.users.denied.latest(_DENIED)],
    }


def largest_queue(registry: SubscriptionRegistry) -> Iterator[int | None]:
    """Yield None while clients are looked at, in steps, and last the bytes of the longest queue."""
    largest = 0
    if registry.users.budget.queues:
        clients = list(registry.clients.values())
        for at in range(0, len(clients), STEP):
            for client in clients[at : at + STEP]:
                if client.queue is not None and client.queue.size > largest:
                    largest = client.queue.size
            yield None
    yield largest
