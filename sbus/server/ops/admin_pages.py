"""The pages of the admin socket: their answers about a bus. docs/admin.rst documents them.

Each page is a generator of small pieces, so that `sbus.admin.answers` can spread them over turns of the reactor. Pages
copy the tables that they walk: a bus changes between two turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sbus.admin.access import METRICS
from sbus.admin.pages import EVENTS, Asked, Page, Pieces, Problem
from sbus.errors import CloseReason
from sbus.journal.keytext import as_text
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.counters import word_of
from sbus.server.core.interfaces import Client
from sbus.server.core.users import User
from sbus.server.ops.admin_events import events
from sbus.server.ops.admin_explain import explain
from sbus.server.ops.admin_lists import Best, limit_of, listed
from sbus.server.ops.admin_patterns import last, patterns
from sbus.server.ops.admin_policy import Reloadable, judged, policy, reload
from sbus.server.ops.admin_status import STEP, status
from sbus.server.ops.metrics import Metrics
from sbus.server.ops.tap import Tap

__all__ = ["pages"]

_JSON = "application/json"
_NAMED = 16
"""Receivers that are named for each publisher that they block."""

_SORTS: dict[str, Callable[[Client], float]] = {
    "number": lambda client: client.number,
    "queue": lambda client: 0 if client.queue is None else client.queue.size,
    "lost": lambda client: client.lost,
    "memory": lambda client: client.memory(),
    "patterns": lambda client: len(client.patterns),
}


def pages(registry: SubscriptionRegistry, files: Reloadable | None = None) -> dict[tuple[str, str], tuple[Page, str]]:
    """Return the pages of a bus, by method and path, each with its content type.

    :param files: the files of the bus's policy, if it has one.
    """
    metrics, tap = Metrics(registry), Tap(registry)
    return {
        ("GET", METRICS): (lambda _: metrics.pieces(), "text/plain; version=0.0.4; charset=utf-8"),
        ("GET", "/v1/status"): (lambda _: _status(registry), _JSON),
        ("GET", "/v1/clients"): (lambda asked: _clients(registry, asked), _JSON),
        ("GET", "/v1/closed"): (lambda asked: _closed(registry, asked), _JSON),
        ("GET", "/v1/users"): (lambda asked: _users(registry), _JSON),
        ("GET", "/v1/patterns"): (lambda asked: patterns(registry, asked), _JSON),
        ("GET", "/v1/last"): (lambda asked: last(registry, asked), _JSON),
        ("GET", "/v1/explain"): (lambda asked: explain(registry, asked), _JSON),
        ("GET", "/v1/events"): (lambda asked: events(registry, tap, asked), EVENTS),
        ("POST", "/v1/disconnect"): (lambda asked: _disconnect(registry, asked), _JSON),
        ("GET", "/v1/policy"): (lambda _: policy(registry, files), _JSON),
        ("GET", "/v1/policy/clients"): (lambda _: judged(registry), _JSON),
        ("POST", "/v1/policy/reload"): (lambda _: reload(files), _JSON),
    }


def _status(registry: SubscriptionRegistry) -> Pieces:
    for figures in status(registry):
        yield "" if figures is None else json.dumps(figures) + "\n"


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
    limit, sort = limit_of(asked), asked.parameters.get("sort", "number")
    if sort not in _SORTS:
        raise Problem(400, f"sort={sort[:20]}: use one of {', '.join(_SORTS)}")
    key = _SORTS[sort]
    clients = list(registry.clients.values())
    best: Best[Client] = Best(limit)
    for at, client in enumerate(clients, 1):
        best.add(key(client), client)
        if at % STEP == 0:
            yield ""
    yield from listed("clients", (_client(registry, client) for _, client in best.ranked()), total=len(clients))


def _closed(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    limit = limit_of(asked)
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
    yield from listed("closed", rows, total=len(registry.closed))


def _users(registry: SubscriptionRegistry) -> Pieces:
    denied: dict[int, dict[str, int]] = {}
    for row in registry.users.denied.latest():
        denied.setdefault(row.uid, {})[row.rule] = row.count
    users = registry.users.all()
    yield from listed("users", (_user(registry, user) | {"denied": denied.get(user.uid, {})} for user in users))


def _user(registry: SubscriptionRegistry, user: User) -> dict[str, Any]:
    share = None if user.is_exempt else user.share
    return {
        "uid": user.uid,
        "clients": user.connections,
        "clients_limit": share and share.clients.most,
        "patterns": user.patterns,
        "patterns_limit": share.patterns.most if share is not None and user.has_pattern_limits else None,
        "queues": user.queues,
        "queue_bytes": user.queued_bytes,
        "memory_bytes": user.memory,
        "memory_limit_bytes": share and share.memory.most,
        "accepts_left": share and registry.admission.rates.left(user.uid),
        "accepts_limit": share and share.accepts.most,
        "limits_from": share and {name: limit.source for name, limit in share._asdict().items()},
        "is_exempt": user.is_exempt,
    }


def _disconnect(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    text = asked.need("client")
    client = registry.clients.get(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
    if client is None:
        raise Problem(404, f"there is no client {text[:20]}: sbus clients lists them")
    client.close(CloseReason.OPERATOR)
    yield json.dumps({"client": client.number})
