"""A service as a child process of the bus, such as the recorder: it stops when its standard input ends.

The parent holds the other end of the pipe. The child therefore stops in order when the parent closes the pipe, and
also when the parent is killed. Its log goes to standard error, for the parent to read. It ignores SIGTERM and SIGINT,
so that a signal to the whole process group (Ctrl-C, systemd) cannot end it before the bus.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from twisted.logger import ILogObserver, LogEvent, LogLevel, formatEvent
from twisted.python.failure import Failure
from zope.interface import directlyProvides, implementer

from sbus.daemon.service import Service

__all__ = ["SUPERVISED_FLAG", "StdinWatcher", "observer"]

SUPERVISED_FLAG = [
    "supervised",
    None,
    "For a parent process: stop when standard input ends, ignore SIGTERM and SIGINT, and log to standard error with "
    "the level at the start of each line",
]
"""The option of ``twistd`` for a service that may be a child process of the bus (`twisted.python.usage`)."""


def _write(event: LogEvent) -> None:
    level: Any = event.get("log_level", LogLevel.info)
    namespace = event.get("log_namespace", "")
    if level < LogLevel.warn and not namespace.startswith("sbus"):
        return  # twistd's lines about starting and stopping; the parent logs its own
    lines = [formatEvent(event)]
    if "log_failure" in event:
        lines.append(event["log_failure"].getTraceback())
    for line in "\n".join(lines).splitlines():
        # Not sys.stderr: twistd replaces it by one that logs.
        print(f"{level.name}: {line}", file=sys.__stderr__, flush=True)


directlyProvides(_write, ILogObserver)


def observer() -> Callable[[LogEvent], None]:
    """Return the observer for ``twistd --logger``.

    Each line on standard error begins with its level.
    """
    return _write


@implementer(IReadDescriptor)
class StdinWatcher(Service):
    """Calls a function when standard input ends; ignores SIGTERM and SIGINT.

    :param reactor: watches standard input.
    :param on_end: called when it ends.
    """

    def __init__(self, reactor: Any, on_end: Callable[[], object]) -> None:
        self._reactor = reactor
        self._on_end = on_end

    def startService(self) -> None:
        super().startService()
        self._reactor.callWhenRunning(self._watch)

    def _watch(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._reactor.addReader(self)

    def stopService(self) -> None:
        super().stopService()
        self._reactor.removeReader(self)

    def fileno(self) -> int:
        return 0

    def doRead(self) -> None:
        try:
            ended = not os.read(0, 4096)
        except BlockingIOError:
            return
        if ended:
            self._reactor.removeReader(self)
            self._on_end()

    def connectionLost(self, reason: Failure) -> None:
        """Handle an error of the pipe, or the end of the reactor (`IReadDescriptor`)."""
        self._reactor.removeReader(self)
        self._on_end()

    def logPrefix(self) -> str:
        return "stdin"
