"""The pages of the admin socket: what they answer about a bus. docs/operations.rst documents them.

Each page is a generator of small pieces, so that `sbus.admin.server` can spread them over turns of the reactor. Pages
copy the tables that they walk: a bus changes between two turns.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sbus.admin.access import METRICS
from sbus.admin.pages import EVENTS, Asked, Page, Pieces, Problem
from sbus.errors import CloseReason, Violation
from sbus.journal.keytext import as_text
from sbus.protocol.keys import matches
from sbus.server.admin_events import events
from sbus.server.admin_status import STEP, largest_queue, status
from sbus.server.counters import word_of
from sbus.server.interfaces import Client, Receiver
from sbus.server.metrics import render
from sbus.server.registry import SubscriptionRegistry
from sbus.server.tap import Tap

__all__ = ["pages"]

_JSON = "application/json"
_MOST = 1000
_DEFAULT = 100
_NAMED = 16
"""Receivers that are named for each publisher that they block."""

_SORTS: dict[str, Callable[[Client], float]] = {
    "number": lambda client: -client.number,
    "queue": lambda client: 0 if client.queue is None else client.queue.size,
    "lost": lambda client: client.lost,
    "memory": lambda client: client.memory(),
    "patterns": lambda client: len(client.patterns),
}


def pages(registry: SubscriptionRegistry) -> dict[tuple[str, str], tuple[Page, str]]:
    """Return the pages of a bus, by method and path, each with its content type."""
    tap = Tap(registry)
    return {
        ("GET", METRICS): (lambda _: render(registry), "text/plain; version=0.0.4; charset=utf-8"),
        ("GET", "/v1/status"): (lambda _: _status(registry), _JSON),
        ("GET", "/v1/clients"): (lambda asked: _clients(registry, asked), _JSON),
        ("GET", "/v1/closed"): (lambda asked: _closed(registry, asked), _JSON),
        ("GET", "/v1/users"): (lambda asked: _users(registry), _JSON),
        ("GET", "/v1/explain"): (lambda asked: _explain(registry, asked), _JSON),
        ("GET", "/v1/events"): (lambda asked: events(registry, tap, asked), EVENTS),
        ("POST", "/v1/disconnect"): (lambda asked: _disconnect(registry, asked), _JSON),
    }


def _limit(asked: Asked) -> int:
    return asked.number("limit", _DEFAULT, 1, _MOST)


def _listed(name: str, rows: Iterable[Mapping[str, Any]], **fields: Any) -> Iterator[str]:
    yield json.dumps(fields)[:-1] + (", " if fields else "") + f'"{name}": ['
    comma = ""
    for row in rows:
        yield comma + json.dumps(row)
        comma = ",\n"
    yield "]}\n"


def _status(registry: SubscriptionRegistry) -> Pieces:
    largest = 0
    for found in largest_queue(registry):
        if found is None:
            yield ""
        else:
            largest = found
    yield json.dumps(status(registry, largest)) + "\n"


def _client(registry: SubscriptionRegistry, client: Client) -> dict[str, Any]:
    queue, settings = client.queue, client.settings
    blockers = registry.backpressure.receivers_blocking(client)
    return {
        "client": client.number,
        "pid": client.peer.pid,
        "uid": client.peer.uid,
        "gid": client.peer.gid,
        "listener": client.listener.name,
        "connected_at": client.connected_at,
        "patterns": len(client.patterns),
        "queue_messages": 0 if queue is None else queue.messages,
        "queue_bytes": 0 if queue is None else queue.size,
        "memory_bytes": client.memory(),
        "lost_messages": client.lost,
        "conflated_messages": client.conflated,
        "soft_strategy": _last_word(settings.soft.selector),
        "hard_strategy": _last_word(settings.hard.selector),
        "order": _last_word(settings.order.selector),
        "is_observer": settings.observer,
        "blocked_by": sorted(getattr(each, "number", 0) for each in blockers)[:_NAMED],
        "is_congested": queue is not None and queue.is_congested,
        "is_paused": client.is_paused,
    }


def _last_word(selector: bytes) -> str:
    return as_text(selector).rpartition("/")[2]


def _clients(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    limit, sort = _limit(asked), asked.parameters.get("sort", "number")
    if sort not in _SORTS:
        raise Problem(400, f"sort={sort[:20]}: use one of {', '.join(_SORTS)}")
    key = _SORTS[sort]
    clients = list(registry.clients.values())
    best: list[tuple[float, int, Client]] = []
    for at in range(0, len(clients), STEP):
        best = heapq.nlargest(limit, [*best, *((key(c), -c.number, c) for c in clients[at : at + STEP])])
        yield ""
    yield from _listed("clients", (_client(registry, client) for _, _, client in best), total=len(clients))


def _closed(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    limit = _limit(asked)
    rows = (
        {
            "client": each.number,
            "pid": each.peer.pid,
            "uid": each.peer.uid,
            "gid": each.peer.gid,
            "listener": each.listener,
            "connected_at": each.connected_at,
            "closed_at": each.closed_at,
            "reason": word_of(each.reason),
            "text": each.reason.value,
            "lost_messages": each.lost,
            "conflated_messages": each.conflated,
        }
        for each in list(registry.closed)[:limit]
    )
    yield from _listed("closed", rows, total=len(registry.closed))


def _users(registry: SubscriptionRegistry) -> Pieces:
    rows = (
        {
            "uid": user.uid,
            "clients": user.connections,
            "patterns": user.patterns,
            "queues": user.queues,
            "queue_bytes": user.queued_bytes,
            "memory_bytes": user.memory,
            "is_exempt": user.is_exempt,
        }
        for user in registry.users.all()
    )
    yield from _listed("users", rows)


def _explain(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    """Say who would get a message of this key now, by which pattern."""
    limit = _limit(asked)
    key = asked.need("key").encode("utf-8", "surrogateescape")
    try:
        is_secret = registry.dialect.check(key) is not None
        receivers = registry.route(key)
    except Violation as e:
        raise Problem(400, f"no message can have this key: {e}: ask for another key") from None
    registry.routing_work()  # not for the next client to pay
    return _listed(
        "receivers",
        (row for receiver in receivers[:limit] if (row := _receiver(registry, receiver, key)) is not None),
        key=registry.dialect.shown(key),
        is_secret=is_secret,
        total=len(receivers),
    )


def _receiver(registry: SubscriptionRegistry, receiver: Receiver, key: bytes) -> dict[str, Any]:
    queue = receiver.queue
    found: list[str] = []
    for at, pattern in enumerate(receiver.patterns):
        if at == _MOST:
            break
        if matches(pattern, key, registry.dialect, receiver.peer):
            found.append(registry.dialect.shown(pattern))
            break
    return {
        "client": getattr(receiver, "number", 0),
        "pid": receiver.peer.pid,
        "uid": receiver.peer.uid,
        "pattern": found[0] if found else None,
        "is_congested": queue is not None and queue.is_congested,
        "gets_own_messages": queue is None or queue.settings.echo,
    }


def _disconnect(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    text = asked.need("client")
    client = registry.clients.get(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
    if client is None:
        raise Problem(404, f"there is no client {text[:20]}: sbus clients lists them")
    client.close(CloseReason.OPERATOR)
    yield json.dumps({"client": client.number})
