"""``/v1/explain``: the clients that would get a message with a key now, those that would not, and why.

Nothing is changed, not even the route cache or the work of a user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sbus.admin.pages import Asked, Pieces, Problem
from sbus.errors import Violation
from sbus.flood import Verdict
from sbus.journal.keytext import as_text
from sbus.protocol.explain import explain as explain_mismatch
from sbus.protocol.keys import SecretKey
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.interfaces import Client, Receiver
from sbus.server.core.observers import redact
from sbus.server.ops.admin_lists import client_of, limit_of
from sbus.server.ops.admin_status import STEP
from sbus.server.ops.viewers import LONGEST_KEY

__all__ = ["explain"]

_COMPARED = 1000
"""Patterns of one client that are compared with the key."""
_BYTES_OF_PATTERN = 100
"""Bytes of patterns and keys that take as long to compare as the rest of it."""
_EXPLAINED = 10
"""Of these, patterns that are explained."""


def explain(registry: SubscriptionRegistry, asked: Asked) -> Pieces:
    """Return the pieces of an explanation.

    :raises Problem: if no message can have the key, or there is no such client.
    """
    limit = limit_of(asked)
    key = asked.need("key").encode("utf-8", "surrogateescape")
    try:
        registry.dialect.check(key)
    except Violation as e:
        raise Problem(400, f"no message can have this key: {e}: ask for another key") from None
    publisher, receiver = (client_of(registry, asked, name) for name in ("publisher", "receiver"))
    return _Explanation(registry, key, publisher, receiver, limit).pieces()


class _Explanation:
    """The rows of one answer.

    :param asked_key: the key as it would be published; the link's name may be in front of it.
    :param publisher: the client that would publish; None: any.
    :param asked_for: the client whose patterns are to be explained; None: none.
    """

    def __init__(
        self,
        registry: SubscriptionRegistry,
        asked_key: bytes,
        publisher: Client | None,
        asked_for: Client | None,
        limit: int,
    ) -> None:
        self._registry = registry
        self._asked_key = asked_key
        self._key = registry.upstream.local(asked_key)
        self._secret = registry.dialect.check(self._key)
        self._publisher = publisher
        self._asked_for = asked_for
        self._limit = limit
        self._others: list[dict[str, Any]] = []
        self._others_total = 0

    def pieces(self) -> Pieces:
        registry = self._registry
        refused = self._refused()
        fields = {
            "key": as_text(redact(registry.dialect, self._asked_key)),
            "is_secret": self._secret is not None,
            "is_refused": refused is not None,
            "refused": refused,
        }
        yield json.dumps(fields)[:-1] + ', "receivers": ['
        found: dict[Receiver, None] = {}
        total, comma = 0, ""
        for step in self._matches():
            if step is None:
                yield ""
                continue
            pattern, receiver = step
            if receiver in found:
                continue
            found[receiver] = None
            row = self._row(receiver, pattern)
            reason = (refused and ("policy", refused)) or self._reason(receiver)
            if reason is not None and not reason[1].startswith("+"):
                self._other(row, *reason)
                continue
            total += 1
            if total <= self._limit:
                row["note"] = None if reason is None else reason[1][1:]
                yield comma + json.dumps(row)
                comma = ",\n"
        if self._secret is not None:
            for step in self._shut_out(self._secret, found):
                if step is None:
                    yield ""
        yield f'], "total": {total}, '
        if self._asked_for is not None and self._asked_for not in found:
            yield from self._compared(self._asked_for)
        others = ",\n".join(map(json.dumps, self._others))
        yield f'"others": [{others}], "others_total": {self._others_total}}}\n'

    def _refused(self) -> str | None:
        """Return why no client would receive the message, or None."""
        permissions, publisher = self._registry.guard.permissions, self._publisher
        if publisher is None:
            return None
        verdict = permissions.publication(publisher.rights, self._key)
        if verdict.is_allowed or not permissions.enforces(verdict):
            return None
        return f"the policy does not let client {publisher.number} publish this key (rule {verdict.rule})"

    def _matches(self) -> Iterator[tuple[bytes, Receiver] | None]:
        """Yield each receiver with a pattern; None between slices."""
        router = self._registry.router
        if self._secret is not None:
            for receiver in router.look_up(self._asked_key):
                yield redact(self._registry.dialect, self._key), receiver
            return
        for step in router.index.walk_open(self._key):
            if step is None:
                yield None
                continue
            pattern, table = step
            for at, receiver in enumerate(list(table)):
                if at % STEP == STEP - 1:
                    yield None
                if receiver is not self._registry.last_values:
                    yield pattern, receiver

    def _reason(self, receiver: Receiver) -> tuple[str, str] | None:
        """Return why a receiver with a matching pattern would not get the message, as a word and in words."""
        registry, queue = self._registry, receiver.queue
        if receiver in registry.router.muted:
            return "departing", "it is departing: its subscriptions are being dropped"
        if queue is None:
            return None
        if receiver is self._publisher and not self._publisher.settings.echo:
            return "echo", "it would publish the message itself, and has chosen echo/off"
        if not queue.is_congested:
            return None
        verdict = queue.settings.soft.always
        if verdict is Verdict.DROP:
            return "congested", "its socket is full, and it has chosen to lose messages then (blocking/soft/discard)"
        if verdict is Verdict.CLOSE:
            return "congested", "its socket is full, and it has chosen to be disconnected then (blocking/soft/error)"
        if verdict is Verdict.KEEP and queue.settings.hard.always is Verdict.DROP and not queue.has_room(1, 1, 1):
            return "queue-full", "its queue is full, and it has chosen to lose messages then (blocking/hard/discard)"
        return None

    def _shut_out(self, secret: SecretKey, found: dict[Receiver, None]) -> Iterator[None]:
        """Note the receivers whose patterns have the text of a secret key, and do not get it."""
        index = self._registry.router.index
        at = 0
        for table in index.secret_holders(secret):
            for holders in list(table.values()):
                for receiver, _ in list(holders):
                    at += 1
                    if receiver not in found:
                        found[receiver] = None
                        self._other(
                            self._row(receiver, None), "credentials", "the key is for other credentials than its own"
                        )
                    if at % STEP == 0:
                        yield None
        for step in index.walk_open(self._key):
            yield None
            if step is None:
                continue
            pattern, subscribers = step
            for receiver in list(subscribers):
                at += 1
                if receiver not in found and receiver is not self._registry.last_values:
                    found[receiver] = None
                    self._other(self._row(receiver, pattern), "secret", "the key is secret: no open pattern reaches it")
                if at % STEP == 0:
                    yield None

    def _compared(self, client: Client) -> Iterator[str]:
        """Compare the patterns of a client that the key does not reach with the key."""
        dialect = self._registry.dialect
        explained: list[tuple[int, str, str]] = []
        looked, longest = 0, 2 * len(self._key) + LONGEST_KEY
        for pattern, (_, secret) in list(islice(client.patterns.items(), _COMPARED)):
            if secret is None:
                pattern = pattern[:longest]  # no key of this length matches the rest after that
            mismatch = explain_mismatch(pattern, self._key, dialect)
            if mismatch is not None:
                shown = as_text(redact(dialect, pattern)[:LONGEST_KEY])
                explained.append((mismatch.key_at, shown, mismatch.reason))
            looked += _BYTES_OF_PATTERN + len(pattern) + len(self._key)
            if looked >= STEP * _BYTES_OF_PATTERN:
                looked = 0
                explained = sorted(explained, reverse=True)[:_EXPLAINED]
                yield ""
        rows = [{"pattern": pattern, "why": why} for _, pattern, why in sorted(explained, reverse=True)[:_EXPLAINED]]
        if all(row.get("client") != client.number for row in self._others):
            text = "none of its patterns matches" if client.patterns else "it has no subscriptions"
            self._other(self._row(client, None), "no-match", text)
        yield f'"compared": {json.dumps(rows)}, '

    def _other(self, row: dict[str, Any], reason: str, text: str) -> None:
        self._others_total += 1
        if len(self._others) < self._limit:
            self._others.append({**row, "reason": reason, "text": text})

    def _row(self, receiver: Receiver, pattern: bytes | None) -> dict[str, Any]:
        queue, listener = receiver.queue, getattr(receiver, "listener", None)
        return {
            "client": getattr(receiver, "number", 0),
            "pid": receiver.peer.pid,
            "uid": receiver.peer.uid,
            "listener": "" if listener is None else listener.name,
            "pattern": None if pattern is None else as_text(pattern[:LONGEST_KEY]),
            "is_congested": queue is not None and queue.is_congested,
            "queue_messages": 0 if queue is None else queue.messages,
            "is_observer": receiver in self._registry.interest.uncounted,
        }
