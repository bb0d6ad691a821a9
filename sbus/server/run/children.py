"""A bus with its sidecar: a child process that starts with the bus and stops before it.

A sidecar serves the bus itself: the recorder (`sbus.server.run.recorder`) or the link to the master
(`sbus.server.run.link`). It is a client like any other, with two privileges: it does not count as a client, and it is
disconnected last.

Supervision: a process that exits while the bus runs is started again, after a pause that doubles from
`_FIRST_RESTART_DELAY` to `_MAX_RESTART_DELAY` and starts over once a child has run for `_MIN_LIFETIME`. The bus serves
in the meantime. The child's standard input is the bond between the two. It ends when the bus closes it, and also when
the bus dies in any other way (`sbus.daemon.supervised`).

Stopping: the bus stops listening, reads the packets that clients have sent, and disconnects all of them but the
sidecars. Then it closes its sidecar's standard input and waits for the exit, up to `SidecarBus.stop_timeout`. Only then
does the bus itself stop.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from twisted.internet import defer
from twisted.internet.error import ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IDelayedCall, IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from sbus.daemon.launcher import twistd_command
from sbus.daemon.service import MultiService, Service
from sbus.server.run.service import BusService

__all__ = ["ChildProcess", "SidecarBus", "child_environment", "restart_delays", "supervised_command"]

_FIRST_RESTART_DELAY, _MAX_RESTART_DELAY = 0.5, 30.0
"""Seconds before a child is started again: the first delay, and the one that no delay exceeds."""
_MIN_LIFETIME = 60.0
"""Seconds that a child must have run for the next delay to be the first one again."""
_MAX_LINE_BYTES = 4096
"""Bytes of output without a line end that are logged as a line."""


def supervised_command(service: str) -> list[str]:
    """Return the beginning of the command that runs a service of ``twistd`` as a child; its options follow."""
    return twistd_command(service, "--supervised", logger="sbus.daemon.supervised.observer")


def child_environment() -> dict[str, str]:
    """Return the environment for a child: it finds the same packages, wherever this process has found them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NOTIFY_SOCKET", None)  # only the bus notifies systemd
    return environment


class ChildProcess(ProcessProtocol):
    """A child process: logs its output, and reports its exit.

    :param name: its name in the log, such as ``recorder``.
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


class SidecarBus(MultiService):
    """A bus and a sidecar, a child process that runs while the bus does.

    :cvar sidecar: the sidecar's name in the log.
    :cvar uid: the UID that the sidecar counts as.
    :cvar without: the part that the bus lacks while the sidecar does not run, for the log.
    :cvar stop_timeout: seconds that the sidecar may take to exit before it is killed.
    :param bus: the bus.
    :param service: the service that runs: the bus, or the bus with another sidecar.
    :param command: the command that runs the sidecar.
    :param reactor: starts processes and timers; None: the global one.
    """

    sidecar: ClassVar[str]
    uid: ClassVar[int]
    without: ClassVar[str]
    stop_timeout: ClassVar[float]

    log = Logger(namespace="sbus.server")

    def __init__(
        self, bus: BusService, service: Service | MultiService, command: Sequence[bytes], reactor: Any = None
    ) -> None:
        super().__init__()
        if reactor is None:
            from twisted.internet import reactor
        self._reactor = reactor
        self._bus = bus
        service.setServiceParent(self)
        self._command = list(command)
        self._child: ChildProcess | None = None
        self._started_at = 0.0
        self._delays = restart_delays()
        self._restart: IDelayedCall | None = None
        bus.registry.attached[self.sidecar] = self.is_attached

    def is_attached(self) -> bool:
        """Return whether the sidecar is connected."""
        return self._bus.registry.members.is_attached(self.uid)

    def startService(self) -> None:
        """Listen, and start the sidecar."""
        super().startService()
        self._reactor.callWhenRunning(self._spawn)  # only a running reactor notices the exit of a child

    def _spawn(self) -> None:
        self._restart = None
        if not self.running or self._child is not None:
            return
        child = self._child = ChildProcess(self.sidecar, self._reactor, self._exited)
        self._started_at = self._reactor.seconds()
        try:
            self._reactor.spawnProcess(child, self._command[0], self._command, child_environment())
        except OSError as error:
            self._exited(f"before it started ({error.strerror})")
            return
        self._bus.registry.members.sidecars[child.pid] = self.uid
        self.log.info("{sidecar} {pid} was started", sidecar=self.sidecar, pid=child.pid)

    def _exited(self, how: str) -> None:
        child, self._child = self._child, None
        assert child is not None
        self._bus.registry.members.sidecars.pop(child.pid, None)
        if not self.running:
            self.log.info("{sidecar} {pid} has exited {how}", sidecar=self.sidecar, pid=child.pid, how=how)
            return
        if self._reactor.seconds() - self._started_at >= _MIN_LIFETIME:
            self._delays = restart_delays()
        delay = next(self._delays)
        self.log.error(
            "{sidecar} {pid} has exited {how}, and {without}: it is started again in {delay:g} s",
            sidecar=self.sidecar,
            pid=child.pid,
            how=how,
            without=self.without,
            delay=delay,
        )
        self._restart = self._reactor.callLater(delay, self._spawn)

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect all other clients, let the sidecar finish, then stop the bus."""
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.running = False
        await self._bus.stopListening()
        await deferLater(self._reactor, 0)  # one turn of the reactor reads all that clients have sent by now
        self._bus.registry.disconnect_all(sidecars=False)
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        if self._child is not None:
            await self._child.stop(self.stop_timeout)
        await super().stopService()
