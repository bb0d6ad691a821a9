"""The audit log: the clients' packets that a policy refuses or audits.

.. rubric:: Theory of operation

`AuditLog` is notified of each refusal, and of each packet allowed under a rule with ``audit = true``. A line is an
event of `twisted.logger` with these fields, so a log in JSON has them one by one:

=======================================  ==============================================================================
field                                    meaning
=======================================  ==============================================================================
``number``, ``listener``                 the connection, and the label of its socket
``pid``, ``uid``, ``gid``, ``groups``    its peer, as the kernel noted it at connect(2); the first 32 groups
``executable``                           the program of that process, or None (`sbus.syscalls.processes`)
``verb``, ``key``                        ``MSG`` or ``SUB``, and the key or pattern, escaped, cut, and without secrets
``rule``, ``where``, ``generation``      the rule that decides, its file and line, and how often the policy was loaded
``verdict``                              ``denied``, ``would-deny`` (``mode = "audit"``) or ``allowed``
``times``                                messages that were allowed together; else 1
=======================================  ==============================================================================

For each verdict, verb and rule, a user gets eight lines at once, and then sums (`sbus.daemon.log_limiter`). So the log
and memory do not grow with the clients' activity: clients cannot add kinds of lines, and keys occur only in lines. A
refusal that gets no line costs a few look-ups: nothing is formatted, and the kernel is not asked.

The kernel is asked for the program when a line is written, once for each connection, as that needs a descriptor for a
moment. If there is none, the line has no program; the client is not affected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from twisted.logger import LogLevel

from sbus.daemon.log_limiter import LimitedLogger, LogLimiter
from sbus.errors import CloseReason
from sbus.protocol.keys import CURRENT, Dialect
from sbus.server.core.observers import Observer
from sbus.server.ops.log_observer import peer_fields

__all__ = ["FIRSTS", "AuditLog"]

FIRSTS = 8
"""Lines of one user for one verdict, verb and rule at once: enough to see whether one program does it, or several."""
_MOST_GROUPS = 32
"""Groups in a line. A process may have 65,536 of them, and their numbers would fill a line."""
_LONGEST_PATH = 256
"""Characters of a program's path in a line: its owner chooses the path, which may have 4,095 bytes."""


class AuditLog(Observer):
    """Writes the audit log.

    :param limiter: decides which lines there are.
    :param dialect: the revision of the protocol, which says how to show a key.
    :param owner_of: returns the UID that a UID counts as.
    :param generation: returns how often the policy in force was loaded; 0 if there is none.
    """

    def __init__(
        self,
        limiter: LogLimiter,
        dialect: Dialect = CURRENT,
        owner_of: Callable[[int], int] | None = None,
        generation: Callable[[], int] = int,
    ) -> None:
        self._limiter = limiter
        self._log = LimitedLogger("sbus.audit", limiter)
        self._dialect = dialect
        self._owner_of = owner_of or (lambda uid: uid)
        self._generation = generation
        self._executables: dict[Any, str | None] = {}

    def denied(self, client: Any, verb: bytes, key: bytes, verdict: Any, is_enforced: bool) -> None:
        self._report(LogLevel.warn, "denied" if is_enforced else "would-deny", client, verb, key, verdict, 1)

    def audited(self, client: Any, verb: bytes, key: bytes, verdict: Any, count: int) -> None:
        self._report(LogLevel.info, "allowed", client, verb, key, verdict, count)

    def closed(self, client: Any, reason: CloseReason) -> None:
        self._executables.pop(client, None)

    def _report(
        self, level: LogLevel, word: str, client: Any, verb: bytes, key: bytes, verdict: Any, times: int
    ) -> None:
        kind = _kind(word, verb, verdict.rule)
        if not self._limiter.wants(self._owner_of(client.peer.uid), kind, level, times, FIRSTS):
            return
        executable = self._executable(client)
        self._log.emit(
            level,
            "{verdict}: client {number}, {peer}{program}: {verb} {key!r}{often}, rule {rule}{place}, generation "
            "{generation}",
            verdict=word,
            number=client.number,
            groups=sorted(client.identity.groups)[:_MOST_GROUPS],
            executable=executable,
            program="" if executable is None else f" ({executable!r})",
            verb=verb.decode("ascii", "backslashreplace"),
            key=self._dialect.shown(key),
            rule=verdict.rule,
            where=verdict.where,
            place=verdict.where and f" ({verdict.where})",
            generation=self._generation(),
            kind=kind,
            times=times,
            often="" if times == 1 else f" {times} times",
            firsts=FIRSTS,
            **peer_fields(client.peer, client.listener, self._owner_of),
        )

    def _executable(self, client: Any) -> str | None:
        """Return the program of a client, escaped; the kernel is asked once for each connection."""
        if client not in self._executables:
            path = None if client.transport is None else client.transport.peer_executable()
            self._executables[client] = None if path is None else _shown(path)
        return self._executables[client]


@functools.lru_cache(1024)
def _kind(word: str, verb: bytes, rule: str) -> str:
    """Return the kind of an event; there are as many as rules, times six."""
    return f"{word} ({verb.decode('ascii', 'backslashreplace')}, rule {rule})"


def _shown(path: str) -> str:
    cut = path if len(path) <= _LONGEST_PATH else f"...{path[-_LONGEST_PATH:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut)
