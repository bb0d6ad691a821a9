"""The recorder beside a bus (``twistd sbus --record``), as a child process.

The recorder is a process of its own, so that waiting for the disk never stops the bus, and it is a client like any
other, so that the server knows nothing about journals. The server gives it two things: it does not count as a client
(the registry's ``sidecar``), and it is disconnected last.

The child's standard input is the bond between the two. It ends when the bus closes it, and also when the bus dies in
any other way. The recorder then receives what the bus has queued for it, closes the journal, and exits.

Supervision: a recorder that exits while the bus runs is started again, after a pause (`sbus.server.child_process`). The
bus serves in the meantime.

Stopping: the bus stops listening, reads what clients have sent, disconnects all of them but the recorder, closes the
recorder's standard input, and waits for it to exit, up to `_STOP_TIMEOUT`. Only then does the bus itself stop.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from twisted.internet import defer
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.logger import Logger

from sbus.daemon.service import MultiService
from sbus.errors import UsageError
from sbus.extras import needs
from sbus.server.child_process import MIN_LIFETIME, ChildProcess, child_environment, restart_delays, supervised_command
from sbus.server.service import BusService
from sbus.syscalls.addresses import Address, connectable_text

__all__ = ["RecordedBus", "recorder_command", "require_recorder", "split_options"]

_STOP_TIMEOUT = 30.0
"""Seconds that the recorder may take to exit before it is killed. It gives up by itself after 20 seconds at most."""


def split_options(text: str) -> list[str]:
    """Split the value of ``--record-options`` into options, as a shell would.

    :raises UsageError: if a quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--record-options={text}: {error}: quote as in a shell") from None


def require_recorder() -> None:
    """Check that the packages of the recorder are installed, without importing them.

    :raises UsageError: if they are not, with the command that installs them.
    """
    with needs("recorder"):
        if find_spec("pyarrow") is None:
            raise ModuleNotFoundError(name="pyarrow")


def recorder_command(
    address: Address, directory: str, *, dialect: str, max_packet: int, options: Sequence[str] = ()
) -> list[bytes]:
    """Return the command that runs the recorder of a bus.

    :param address: the address at which the bus listens.
    :param directory: the directory of the journal.
    :param dialect: the dialect of the bus.
    :param max_packet: the length of the longest packet in bytes.
    :param options: further options of ``twistd sbus-recorder``.
    :raises sbus.errors.AddressError: if no client can connect to this address.
    """
    words = [
        *supervised_command("sbus-recorder"),
        *(f"--socket={connectable_text(address)}", f"--journal={os.path.abspath(directory)}"),
        *(f"--dialect={dialect}", f"--max-packet={max_packet}", *options),
    ]
    return [os.fsencode(word) for word in words]


class RecordedBus(MultiService):
    """A bus and its recorder, which runs while the bus does.

    :param bus: the bus.
    :param command: the command that runs the recorder, from `recorder_command`.
    :param reactor: starts processes and timers; None: the global one.
    """

    log = Logger(namespace="sbus.server")

    def __init__(self, bus: BusService, command: Sequence[bytes], reactor: Any = None) -> None:
        super().__init__()
        if reactor is None:
            from twisted.internet import reactor
        self._reactor = reactor
        self._bus = bus
        self._command = list(command)
        self._recorder: ChildProcess | None = None
        self._started_at = 0.0
        self._delays = restart_delays()
        self._restart: IDelayedCall | None = None
        bus.setServiceParent(self)
        registry = bus.registry
        registry.attached["recorder"] = lambda: registry.is_attached(registry.sidecar)

    def startService(self) -> None:
        """Listen, and start the recorder."""
        super().startService()
        self._reactor.callWhenRunning(self._spawn)  # only a running reactor notices the exit of a child

    def _spawn(self) -> None:
        self._restart = None
        if not self.running or self._recorder is not None:
            return
        recorder = self._recorder = ChildProcess("recorder", self._reactor, self._exited)
        self._started_at = self._reactor.seconds()
        try:
            self._reactor.spawnProcess(recorder, self._command[0], self._command, child_environment())
        except OSError as error:
            self._exited(f"before it started ({error.strerror})")
            return
        self._bus.registry.sidecar = recorder.pid
        self.log.info("recorder {pid} was started", pid=recorder.pid)

    def _exited(self, how: str) -> None:
        recorder, self._recorder = self._recorder, None
        self._bus.registry.sidecar = None
        assert recorder is not None
        if not self.running:
            self.log.info("recorder {pid} has exited {how}", pid=recorder.pid, how=how)
            return
        if self._reactor.seconds() - self._started_at >= MIN_LIFETIME:
            self._delays = restart_delays()
        delay = next(self._delays)
        self.log.error(
            "recorder {pid} has exited {how}, and nothing is recorded: it is started again in {delay:g} s",
            pid=recorder.pid,
            how=how,
            delay=delay,
        )
        self._restart = self._reactor.callLater(delay, self._spawn)

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect all other clients, let the recorder finish, then stop the bus."""
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.running = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        await self._bus.stopListening()
        await deferLater(self._reactor, 0)  # one turn of the reactor reads what clients have sent by now
        self._bus.registry.disconnect_all(sidecars=False)
        if self._recorder is not None:
            await self._recorder.stop(_STOP_TIMEOUT)
        await super().stopService()
