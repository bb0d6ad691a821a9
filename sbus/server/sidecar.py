"""A bus and one sidecar, which starts with the bus and stops before it: a child process, or a part of the bus.

A sidecar serves the bus itself: the recorder (`sbus.server.recorder_process`) or the link to the master
(`sbus.server.link_process`, `sbus.server.link_inside`). It is a client like any other, with two privileges: it does not
count as a client, and it is disconnected last.

Supervision: a process that exits while the bus runs is started again, after a pause (`sbus.server.child_process`). The
bus serves in the meantime.

Stopping: the bus stops listening, reads what clients have sent, disconnects all of them but the sidecars, and ends its
sidecar. For a process, it closes standard input and waits for the exit, up to `SidecarBus.stop_timeout`. Only then does
the bus itself stop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger

from sbus.daemon.service import MultiService, Service
from sbus.server.child_process import MIN_LIFETIME, ChildProcess, child_environment, restart_delays
from sbus.server.service import BusService

__all__ = ["AttendedBus", "SidecarBus"]


class AttendedBus(MultiService, ABC):
    """A bus and a sidecar of any kind, which runs while the bus does.

    :param bus: the bus.
    :param service: the service that runs: the bus, or the bus with another sidecar.
    :param reactor: has the timers; None: the global one.
    """

    def __init__(self, bus: BusService, service: Service | MultiService, reactor: Any = None) -> None:
        super().__init__()
        if reactor is None:
            from twisted.internet import reactor
        self._reactor = reactor
        self._bus = bus
        service.setServiceParent(self)

    @abstractmethod
    async def _stop_sidecar(self) -> None:
        """Have the sidecar take what the bus has queued for it, and end."""

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect all other clients, let the sidecar finish, then stop the bus."""
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.running = False
        await self._bus.stopListening()
        await deferLater(self._reactor, 0)  # one turn of the reactor reads what clients have sent by now
        self._bus.registry.disconnect_all(sidecars=False)
        await self._stop_sidecar()
        await super().stopService()


class SidecarBus(AttendedBus):
    """A bus and a sidecar that is a child process.

    :cvar sidecar: the sidecar's name in the log.
    :cvar without: what the bus lacks while the sidecar does not run, for the log.
    :cvar stop_timeout: seconds that the sidecar may take to exit before it is killed.
    :param bus: the bus.
    :param service: the service that runs: the bus, or the bus with another sidecar.
    :param command: the command that runs the sidecar.
    :param reactor: starts processes and timers; None: the global one.
    """

    sidecar: ClassVar[str]
    without: ClassVar[str]
    stop_timeout: ClassVar[float]

    log = Logger(namespace="sbus.server")

    def __init__(
        self, bus: BusService, service: Service | MultiService, command: Sequence[bytes], reactor: Any = None
    ) -> None:
        super().__init__(bus, service, reactor)
        self._command = list(command)
        self._child: ChildProcess | None = None
        self._started_at = 0.0
        self._delays = restart_delays()
        self._restart: IDelayedCall | None = None

    @abstractmethod
    def _set_pid(self, pid: int | None) -> None:
        """Note in the registry which process is the sidecar; None: there is none."""

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
        self._set_pid(child.pid)
        self.log.info("{sidecar} {pid} was started", sidecar=self.sidecar, pid=child.pid)

    def _exited(self, how: str) -> None:
        child, self._child = self._child, None
        self._set_pid(None)
        assert child is not None
        if not self.running:
            self.log.info("{sidecar} {pid} has exited {how}", sidecar=self.sidecar, pid=child.pid, how=how)
            return
        if self._reactor.seconds() - self._started_at >= MIN_LIFETIME:
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

    async def _stop_sidecar(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        if self._child is not None:
            await self._child.stop(self.stop_timeout)
