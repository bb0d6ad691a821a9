"""``/v1/patterns`` and ``/v1/last``: the patterns of clients, and the values that are kept."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sbus.admin.pages import Asked, Pieces, Problem
from sbus.journal.keytext import as_text
from sbus.protocol.keys import OpenPattern
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Client
from sbus.server.core.observers import redact
from sbus.server.ops.admin_lists import Best, client_of, limit_of, listed
from sbus.server.ops.admin_status import STEP
from sbus.server.ops.viewers import LONGEST_HEAD, LONGEST_KEY

__all__ = ["last", "patterns"]

_DEFAULT_HEAD = 256
_AT_ONCE = 1024
"""Patterns of one client that are copied at once."""


def patterns(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    """List the patterns of all clients, or of one, the most wanted first."""
    limit = limit_of(asked)
    prefix = asked.parameters.get("prefix", "").encode("utf-8", "surrogateescape")
    client = client_of(registry, asked, "client")
    clients = list(registry.clients.values()) if client is None else [client]
    return _patterns(registry, clients, prefix, limit, client is not None)


def _patterns(
    registry: SubscriptionRegistry, clients: list[Client], prefix: bytes, limit: int, is_one: bool
) -> Iterator[str]:
    best: Best[tuple[bytes, bool]] = Best(limit)
    index, looked = registry.router.index, 0
    keeper = registry.last_values  # it subscribes to the patterns of --last-value, and is no client
    for client in clients:
        looked += 1
        for pattern, is_secret in _of(client):
            looked += 1
            if looked >= STEP:
                looked = 0
                yield ""
            if not pattern.startswith(prefix):
                continue
            count = 1
            if not is_secret:
                try:
                    subscribers = index.open_subscribers(pattern)
                    first = next(receiver for receiver in subscribers if receiver is not keeper)
                except (KeyError, StopIteration):
                    continue
                if not is_one and first is not client:
                    continue  # it is listed with its first subscriber
                count = len(subscribers) - (keeper in subscribers)
            best.add(count, (pattern, is_secret))
    rows = (
        {
            "pattern": as_text(redact(registry.dialect, pattern)[:LONGEST_KEY]),
            "is_secret": is_secret,
            "subscribers": count,
        }
        for count, (pattern, is_secret) in best.ranked()
    )
    yield from listed("patterns", rows, total=best.total)


def _of(client: Client) -> Iterator[tuple[bytes, bool]]:
    """Yield the patterns of a client, and whether each is secret; those that come meanwhile may be missing."""
    done = 0
    while chunk := list(islice(client.patterns.items(), done, done + _AT_ONCE)):
        for pattern, (_, secret) in chunk:
            yield pattern, secret is not None
        done += len(chunk)


def last(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    """List the kept messages, the newest first; the values for root and the server's user alone."""
    values = registry.last_values
    if values is None:
        raise Problem(404, "this bus keeps no last values: start it with --last-value=PATTERN")
    limit, head = limit_of(asked), asked.number("head", _DEFAULT_HEAD, 0, LONGEST_HEAD)
    pattern = OpenPattern(
        asked.parameters.get("pattern", "").encode("utf-8", "surrogateescape"), registry.dialect.separator
    )

    def rows() -> Iterator[dict[str, Any] | None]:
        left = limit
        for at, key in enumerate(reversed(values.keys()), 1):
            if at % STEP == 0:
                yield None
            if not pattern.matches(key):
                continue
            found = values.value(key)
            if found is None:
                continue
            if not left:
                return
            left -= 1
            packet, uid = found
            begin = 5 + len(key)
            yield {
                "key": as_text(key[:LONGEST_KEY]),
                "uid": uid,
                "size": len(packet) - begin,
                "head": base64.b64encode(packet[begin : begin + head]).decode() if asked.is_owner else None,
            }

    return listed("last", rows(), total=len(values), memory_bytes=values.memory)
