"""The policy of a bus at the admin socket: the one in force, the clients that it judges, and reloading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

from twisted.internet import defer
from twisted.python.failure import Failure

from sbus.admin.pages import Pieces, Problem
from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.server.bus.registry import SubscriptionRegistry
from sbus.server.core.permissions import is_judged
from sbus.server.ops.admin_status import STEP

__all__ = ["Reloadable", "judged", "policy", "reload"]

_BYTES = 512
"""Bytes of patterns in one piece of an answer, about: less than 0.4 ms, if none of them is UTF-8."""


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
    yield '{"clients": ['
    comma = ""
    for at, client in enumerate(list(registry.clients.values()), 1):
        if at % STEP == 0:
            yield ""
        if not is_judged(client) or client.reason is not None:
            continue
        who = client.identity
        row = {
            "client": client.number,
            "pid": client.peer.pid,
            "uid": who.uid,
            "gid": who.gid,
            "groups": sorted(who.groups),
            "listener": who.listener,
            "is_proven": who.is_proven,
        }
        yield f'{comma}{json.dumps(row)[:-1]}, "patterns": '
        yield from _texts([pattern for pattern, (_, secret) in client.patterns.items() if secret is None])
        yield "}"
        comma = ",\n"
    yield "]}\n"


def _texts(patterns: list[bytes]) -> Iterator[str]:
    """Yield patterns as a list of JSON strings, in pieces: a user chooses how long they are."""
    text, size = "[", 0
    for number, pattern in enumerate(patterns):
        text += ', "' if number else '"'
        start = 0
        while start < len(pattern):
            end = _end_of_piece(pattern, start + _BYTES)
            text += json.dumps(as_text(pattern[start:end]))[1:-1]
            size += end - start
            start = end
            if size >= _BYTES:
                yield text
                text, size = "", 0
        text += '"'
    yield text + "]"


def _end_of_piece(data: bytes, end: int) -> int:
    """Return where to cut bytes, at an index or a little before it, so that no character of UTF-8 is cut."""
    for at in range(end, end - 4, -1):
        if at >= len(data) or data[at] & 0xC0 != 0x80:
            return at
    return end  # no character has so many bytes after its first


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
