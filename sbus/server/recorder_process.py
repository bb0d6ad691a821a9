"""A bus that has itself recorded: its recorder is a child process, watched over, and stopped in order with the bus.

A process of its own, so that waiting for the disk never stops the bus; and a client like others, so that the server
knows nothing of journals. The two hold on to each other by the child's standard input: when that ends, which it does
however the bus ends, the recorder takes what the bus still has for it, and ends.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from twisted.internet import defer
from twisted.internet.error import ProcessDone, ProcessExitedAlready
from twisted.internet.interfaces import IProcessTransport
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from sbus.daemon.service import MultiService
from sbus.errors import UsageError
from sbus.extras import needs
from sbus.server.service import BusService
from sbus.syscalls.addresses import Address, connectable_text

__all__ = ["RecordedBus", "recorder_command", "require_recorder", "split_options"]

_TWISTD = "from twisted.scripts.twistd import run; run()"
_STOP_TIMEOUT = 30.0
"""Seconds that the recorder may take for its end; it gives up by itself before that."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the recorder is started again; each time twice as long."""
_LASTING = 60.0
"""Seconds after which a recorder counts as one that works, so that the pauses begin anew."""
_LONGEST_LINE = 4096


def split_options(text: str) -> list[str]:
    """The options of the recorder, from the words after ``--record-options=``.

    :raises UsageError: if a quotation mark is missing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--record-options={text}: {error}: quote as in a shell") from None


def require_recorder() -> None:
    """Find out whether there is what a recorder needs, without loading it.

    :raises UsageError: if there is not.
    """
    with needs("recorder"):
        if find_spec("pyarrow") is None:
            raise ModuleNotFoundError(name="pyarrow")


def recorder_command(
    address: Address, directory: str, *, dialect: str, max_packet: int, options: Sequence[str] = ()
) -> list[bytes]:
    """The command that records a bus.

    :param address: where the bus listens.
    :param directory: of the journal.
    :param options: more options of ``twistd sbus-recorder``.
    :raises sbus.errors.AddressError: if it could not connect to this address.
    """
    words = [
        *(sys.executable, "-P", "-c", _TWISTD, "--nodaemon", "--pidfile="),
        *("--logger=sbus.recorder.supervised.observer", "sbus-recorder", "--supervised"),
        *(f"--socket={connectable_text(address)}", f"--journal={os.path.abspath(directory)}"),
        *(f"--dialect={dialect}", f"--max-packet={max_packet}", *options),
    ]
    return [os.fsencode(word) for word in words]


class _Recorder(ProcessProtocol):
    """The child process.

    :param ended: called with how it ended, in words.
    :ivar pid: its ID.
    """

    transport: IProcessTransport

    _log = Logger(namespace="sbus.server")

    def __init__(self, reactor: Any, ended: Callable[[str], Any]) -> None:
        self._reactor = reactor
        self._ended = ended
        self._rest = b""
        self._gone: list[defer.Deferred[None]] = []
        self.pid = 0

    def connectionMade(self) -> None:
        self.pid = self.transport.pid

    def outReceived(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > _LONGEST_LINE:
            self._tell(self._rest)
            self._rest = b""

    errReceived = outReceived

    def _tell(self, line: bytes) -> None:
        """What it says, with the level that it has given (`sbus.recorder.supervised.observer`)."""
        text = line.decode(errors="backslashreplace")
        match = re.match(r"(debug|info|warn|error|critical): ", text)
        level = LogLevel.levelWithName(match[1]) if match else LogLevel.error
        self._log.emit(level, "recorder: {text}", text=text[match.end() :] if match else text)

    def processEnded(self, reason: Failure) -> None:
        if self._rest:
            self._tell(self._rest)
        how = "with status 0" if reason.check(ProcessDone) else _how(reason.value)
        self._ended(how)
        gone, self._gone = self._gone, []
        for deferred in gone:
            deferred.callback(None)

    async def stop(self) -> None:
        """Have it end, and wait for that."""
        gone: defer.Deferred[None] = defer.Deferred()
        self._gone.append(gone)
        limit = self._reactor.callLater(_STOP_TIMEOUT, self._kill)
        self.transport.closeStdin()
        await gone
        if limit.active():
            limit.cancel()

    def _kill(self) -> None:
        self._log.error("recorder {pid} does not end: it is killed", pid=self.pid)
        try:
            self.transport.signalProcess("KILL")
        except ProcessExitedAlready:
            pass


def _how(ended: Any) -> str:
    return f"by signal {ended.signal}" if ended.signal is not None else f"with status {ended.exitCode}"


class RecordedBus(MultiService):
    """A bus and its recorder, which runs whenever the bus does.

    :param command: starts the recorder, see `recorder_command`.
    """

    log = Logger(namespace="sbus.server")

    def __init__(self, bus: BusService, command: Sequence[bytes], reactor: Any = None) -> None:
        super().__init__()
        if reactor is None:
            from twisted.internet import reactor
        self._reactor = reactor
        self._bus = bus
        self._command = list(command)
        self._recorder: _Recorder | None = None
        self._started = 0.0
        self._pauses = _pauses()
        self._timer: Any = None
        bus.setServiceParent(self)

    def startService(self) -> None:
        """Listen, and start the recorder."""
        super().startService()
        self._reactor.callWhenRunning(self._spawn)  # whoever waits for children does so from then on

    def _spawn(self) -> None:
        self._timer = None
        if not self.running or self._recorder is not None:
            return
        # The recorder finds what we have found, wherever that was.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        recorder = self._recorder = _Recorder(self._reactor, self._ended)
        self._started = self._reactor.seconds()
        try:
            self._reactor.spawnProcess(recorder, self._command[0], self._command, environment)
        except OSError as error:
            self._ended(f"before it began ({error.strerror})")
            return
        self._bus.registry.sidecar = recorder.pid
        self.log.info("recorder {pid} was started", pid=recorder.pid)

    def _ended(self, how: str) -> None:
        recorder, self._recorder = self._recorder, None
        self._bus.registry.sidecar = None
        assert recorder is not None
        if not self.running:
            self.log.info("recorder {pid} has ended {how}", pid=recorder.pid, how=how)
            return
        if self._reactor.seconds() - self._started >= _LASTING:
            self._pauses = _pauses()
        pause = next(self._pauses)
        self.log.error(
            "recorder {pid} has ended {how}, and nothing is recorded: it is started again in {pause:g} s",
            pid=recorder.pid,
            how=how,
            pause=pause,
        )
        self._timer = self._reactor.callLater(pause, self._spawn)

    def stopService(self) -> defer.Deferred[None]:
        """Disconnect everyone but the recorder, then have it take what is left and end, then stop the bus."""
        return defer.Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._bus.stopListening()
        await deferLater(self._reactor, 0)  # what clients had sent by now is read
        self._bus.registry.disconnect_all(sidecars=False)
        if self._recorder is not None:
            await self._recorder.stop()
        await super().stopService()


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
