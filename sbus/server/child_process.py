"""Processes that a bus starts beside it: the recorder, and the link to its master.

The child's standard input is the bond between the two. It ends when the bus closes it, and also when the bus dies in
any other way (`sbus.daemon.supervised`). A child that exits while the bus runs is started again, after a pause that
doubles from `_FIRST_RESTART_DELAY` to `_MAX_RESTART_DELAY` and starts over once a child has run for `MIN_LIFETIME`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet import defer
from twisted.internet.error import ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

__all__ = ["MIN_LIFETIME", "ChildProcess", "child_environment", "restart_delays", "supervised_command"]

_TWISTD = "from twisted.scripts.twistd import run; run()"
_FIRST_RESTART_DELAY, _MAX_RESTART_DELAY = 0.5, 30.0
"""Seconds before a child is started again: the first delay, and the one that no delay exceeds."""
MIN_LIFETIME = 60.0
"""Seconds that a child must have run for the next delay to be the first one again."""
_MAX_LINE_BYTES = 4096
"""Bytes of output without a line end that are logged as a line."""


def supervised_command(service: str) -> list[str]:
    """Return the beginning of the command that runs a service of ``twistd`` as a child; its options follow."""
    return [
        *(sys.executable, "-P", "-c", _TWISTD, "--nodaemon", "--pidfile="),
        *("--logger=sbus.daemon.supervised.observer", service, "--supervised"),
    ]


def child_environment() -> dict[str, str]:
    """Return the environment for a child: it finds the same packages, wherever this process has found them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NOTIFY_SOCKET", None)  # only the bus notifies systemd
    return environment


class ChildProcess(ProcessProtocol):
    """A child process: logs its output, and reports its exit.

    :param name: what the log calls it, such as ``recorder``.
    :param on_exit: called with how it exited, such as ``with status 1``.
    :ivar pid: the process ID; 0 before it is started.
    """

    transport: IProcessTransport

    _log = Logger(namespace="sbus.server")

    def __init__(self, name: str, reactor: Any, on_exit: Callable[[str], object]) -> None:
        self._name = name
        self._reactor = reactor
        self._on_exit = on_exit
        self._partial_line = b""
        self._waiters: list[defer.Deferred[None]] = []
        self.pid = 0

    def connectionMade(self) -> None:
        self.pid = self.transport.pid

    def outReceived(self, data: bytes) -> None:
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._log_line(line)
        if len(self._partial_line) > _MAX_LINE_BYTES:
            self._log_line(self._partial_line)
            self._partial_line = b""

    errReceived = outReceived

    def _log_line(self, line: bytes) -> None:
        """Log a line with the level that it begins with; without one, as an error.

        See `sbus.daemon.supervised`.
        """
        text = line.decode(errors="backslashreplace")
        match = re.match(r"(debug|info|warn|error|critical): ", text)
        level = LogLevel.levelWithName(match[1]) if match else LogLevel.error
        self._log.emit(level, "{name}: {text}", name=self._name, text=text[match.end() :] if match else text)

    def processEnded(self, reason: Failure) -> None:
        if self._partial_line:
            self._log_line(self._partial_line)
        self._on_exit(_describe_exit(reason.value))
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.callback(None)

    async def stop(self, timeout: float) -> None:
        """Close the standard input and wait for the exit; kill after `timeout` seconds."""
        exited: defer.Deferred[None] = defer.Deferred()
        self._waiters.append(exited)
        deadline = self._reactor.callLater(timeout, self._kill, timeout)
        self.transport.closeStdin()
        await exited
        if deadline.active():
            deadline.cancel()

    def _kill(self, timeout: float) -> None:
        self._log.error(
            "{name} {pid} did not exit within {seconds:g} s: killing it", name=self._name, pid=self.pid, seconds=timeout
        )
        try:
            self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            pass


def _describe_exit(reason: BaseException | None) -> str:
    if not isinstance(reason, ProcessTerminated):
        return "with status 0"
    return f"by signal {reason.signal}" if reason.signal is not None else f"with status {reason.exitCode}"


def restart_delays() -> Iterator[float]:
    """Yield the seconds before each restart, without end."""
    delay = _FIRST_RESTART_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _MAX_RESTART_DELAY)
