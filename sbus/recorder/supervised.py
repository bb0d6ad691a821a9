"""The recorder as the child of a bus: it ends when its standard input does, and logs what its parent can read.

The parent holds the other end of the pipe. So the recorder ends in order when the parent wants it to, and also when the
parent is killed; and a signal to all processes of a group (Ctrl-C, systemd) cannot end it before the bus.
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

__all__ = ["StdinWatcher", "observer"]


def _tell(event: LogEvent) -> None:
    level: Any = event.get("log_level", LogLevel.info)
    namespace = event.get("log_namespace", "")
    if level < LogLevel.warn and not namespace.startswith("sbus"):
        return  # twistd's own words: the parent has said as much
    lines = [formatEvent(event)]
    if "log_failure" in event:
        lines.append(event["log_failure"].getTraceback())
    for line in "\n".join(lines).splitlines():
        print(f"{level.name}: {line}", file=sys.__stderr__, flush=True)  # twistd has its own sys.stderr logged


directlyProvides(_tell, ILogObserver)


def observer() -> Callable[[LogEvent], None]:
    """The observer for ``twistd --logger``: on standard error a line begins with its level."""
    return _tell


@implementer(IReadDescriptor)
class StdinWatcher(Service):
    """Calls when standard input ends; until then the signals that stop a process are left to the parent.

    :param call: what to call then.
    """

    def __init__(self, reactor: Any, call: Callable[[], Any]) -> None:
        self._reactor = reactor
        self._call = call

    def startService(self) -> None:
        super().startService()
        self._reactor.callWhenRunning(self._begin)

    def _begin(self) -> None:
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
            self._call()

    def connectionLost(self, reason: Failure) -> None:
        """The pipe is gone, or the reactor is (`IReadDescriptor`)."""
        self._reactor.removeReader(self)
        self._call()

    def logPrefix(self) -> str:
        return "recorder"
