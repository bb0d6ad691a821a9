"""The policy of a bus at the admin socket: the one in force, the clients that it judges, and reloading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from twisted.internet import defer
from twisted.python.failure import Failure

from sbus.admin.pages import Pieces, Problem
from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.permissions import is_judged
from sbus.server.ops.admin_lists import listed
from sbus.server.ops.admin_status import STEP

__all__ = ["Reloadable", "judged", "policy", "reload"]

_MOST_PATTERNS = 256
"""Patterns in one piece of an answer."""


class Reloadable(Protocol):
    """The files of a policy.

    :ivar path: the file or the directory.
    """

    path: str

    async def reload(self) -> int: ...


def policy(registry: SubscriptionRegistry, files: Reloadable | None) -> Pieces:
    """Answer with the policy in force.

    :raises Problem: if there is none.
    """
    found = registry.guard.permissions.policy
    if found is None or files is None:
        raise _nothing()
    yield json.dumps(
        {
            "generation": found.generation,
            "mode": "audit" if found.is_audit else "enforce",
            "default": "deny" if found.is_closed else "allow",
            "rules": len(found.rules),
            "path": files.path,
            "files": list(found.files),
            "digest": found.digest,
        }
    )


def judged(registry: SubscriptionRegistry) -> Pieces:
    """Answer with all clients whom a policy judges, and their open patterns."""
    yield from listed("clients", _rows(registry))


def _rows(registry: SubscriptionRegistry) -> Iterator[dict[str, Any] | None]:
    for at, client in enumerate(list(registry.clients.values()), 1):
        if at % STEP == 0:
            yield None
        if not is_judged(client) or client.reason is not None:
            continue
        who = client.identity
        patterns = [pattern for pattern, (_, secret) in client.patterns.items() if secret is None]
        row = {
            "client": client.number,
            "pid": client.peer.pid,
            "uid": who.uid,
            "gid": who.gid,
            "groups": sorted(who.groups),
            "listener": who.listener,
            "is_proven": who.is_proven,
        }
        for start in range(0, len(patterns) or 1, _MOST_PATTERNS):
            yield {**row, "patterns": list(map(as_text, patterns[start : start + _MOST_PATTERNS]))}


def reload(files: Reloadable | None) -> Pieces:
    """Answer when the policy is in force, or with its mistakes."""
    if files is None:
        raise _nothing()
    answer: dict[str, object] = {}

    def fail(failure: Failure) -> None:
        failure.trap(UsageError)
        answer["problem"] = failure.getErrorMessage()

    reloading = defer.Deferred.fromCoroutine(files.reload())
    reloading.addCallbacks(lambda generation: answer.update(generation=generation), fail)
    while not answer:
        yield None
    yield json.dumps(answer)


def _nothing() -> Problem:
    return Problem(404, "the bus has no policy: start it with --policy=FILE")
