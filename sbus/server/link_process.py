"""The link of a bus to its master (``twistd sbus --upstream``), as a child process.

The link is a client of both buses (`sbus.link`), and serves the bus as the recorder does: it does not count as a
client, it is a user of its own, and it is disconnected last. The bus starts it, and again when it exits, and serves
meanwhile.

Stopping: the bus disconnects all other clients, closes the link's standard input, and waits until the link has passed
on what was queued for it, up to `_STOP_TIMEOUT`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger

from sbus.daemon.service import MultiService, Service
from sbus.server.child_process import MIN_LIFETIME, ChildProcess, child_environment, restart_delays, supervised_command
from sbus.server.service import BusService
from sbus.syscalls.addresses import Address, connectable_text

__all__ = ["LinkedBus", "link_command"]

_STOP_TIMEOUT = 10.0
"""Seconds that the link may take to exit before it is killed. It gives up by itself after 5 seconds."""


def link_command(
    address: Address,
    upstream: str,
    out: Sequence[bytes],
    into: Sequence[bytes],
    *,
    secrets: bool,
    max_packet: int,
) -> list[bytes]:
    """Return the command that runs the link of a bus.

    :param address: the address at which the bus listens.
    :param upstream: the address of its master.
    :param out: the patterns that may go up.
    :param into: the patterns that may come down.
    :param secrets: whether secret messages go up.
    :param max_packet: the length of the longest packet in bytes.
    :raises sbus.errors.AddressError: if no client can connect to the bus's address.
    """
    if upstream.startswith("/") or not upstream.startswith("@"):
        upstream = os.path.abspath(upstream)
    words: list[str | bytes] = [
        *supervised_command("sbus-link"),
        *(f"--socket={connectable_text(address)}", f"--upstream={upstream}", f"--max-packet={max_packet}"),
        *(b"--upstream-out=" + pattern for pattern in out),
        *(b"--upstream-in=" + pattern for pattern in into),
    ]
    if secrets:
        words.append("--upstream-secrets")
    return [os.fsencode(word) for word in words]


class LinkedBus(MultiService):
    """A bus and its link, which runs while the bus does.

    :param bus: the bus.
    :param service: the bus with what else it has, such as a recorder: this is what runs.
    :param command: the command that runs the link, from `link_command`.
    :param reactor: starts processes and timers; None: the global one.
    """

    log = Logger(namespace="sbus.server")

    def __init__(self, bus: BusService, service: Service | MultiService, command: Sequence[bytes], reactor: Any = None):
        super().__init__()
        if reactor is None:
            from twisted.internet import reactor
        self._reactor = reactor
        self._bus = bus
        self._command = list(command)
        self._link: ChildProcess | None = None
        self._started_at = 0.0
        self._delays = restart_delays()
        self._restart: IDelayedCall | None = None
        service.setServiceParent(self)
        upstream = bus.registry.upstream
        bus.registry.attached["link"] = lambda: upstream.is_up

    def startService(self) -> None:
        """Listen, and start the link."""
        super().startService()
        self._reactor.callWhenRunning(self._spawn)  # only a running reactor notices the exit of a child

    def _spawn(self) -> None:
        self._restart = None
        if not self.running or self._link is not None:
            return
        link = self._link = ChildProcess("link", self._reactor, self._exited)
        self._started_at = self._reactor.seconds()
        try:
            self._reactor.spawnProcess(link, self._command[0], self._command, child_environment())
        except OSError as error:
            self._exited(f"before it started ({error.strerror})")
            return
        self._bus.registry.link_sidecar = link.pid
        self.log.info("link {pid} was started", pid=link.pid)

    def _exited(self, how: str) -> None:
        link, self._link = self._link, None
        self._bus.registry.link_sidecar = None
        assert link is not None
        if not self.running:
            self.log.info("link {pid} has exited {how}", pid=link.pid, how=how)
            return
        if self._reactor.seconds() - self._started_at >= MIN_LIFETIME:
            self._delays = restart_delays()
        delay = next(self._delays)
        self.log.error(
            "link {pid} has exited {how}, and nothing crosses: it is started again in {delay:g} s",
            pid=link.pid,
            how=how,
            delay=delay,
        )
        self._restart = self._reactor.callLater(delay, self._spawn)

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect all other clients, let the link finish, then stop the bus."""
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.running = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        await self._bus.stopListening()
        await deferLater(self._reactor, 0)  # one turn of the reactor reads what clients have sent by now
        self._bus.registry.disconnect_all(sidecars=False)
        if self._link is not None:
            await self._link.stop(_STOP_TIMEOUT)
        await super().stopService()
