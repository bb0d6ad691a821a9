"""A real bus for a test: ``twistd sbus`` in a process of its own, there when the test begins and gone after it.

::

    with running_bus(dialect="early", max_packet=1000) as bus:
        run_my_program("--socket", bus.address)
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from sbus.client.blocking import Bus, connect
from sbus.errors import ConnectError, Disconnected, TimedOut, UsageError
from sbus.syscalls.sockets import peer_credentials
from sbus.testing.clients import RecordingClient

__all__ = ["OptionValue", "RunningBus", "command_line", "running_bus"]

OptionValue: TypeAlias = str | int | float | bool | Sequence[str | int] | None
"""What an option of ``twistd sbus`` may be set to from Python, see `command_line`."""

_TWISTD = "from twisted.scripts.twistd import run; run()"
_RETRY = 0.005
"""Seconds between two attempts to connect to a server that is starting."""
_SHOWN = 4_000
"""Characters of a log that go into an error."""


def command_line(options: dict[str, OptionValue]) -> list[str]:
    """Options of ``twistd sbus`` as on its command line.

    ``block_timeout=2`` is ``--block-timeout=2``; True is an option without a value (``reuse=True``);
    False and None leave it out; a list repeats it; the number of a ``mode`` is written in octal.
    """
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif name == "mode" and isinstance(value, int):
            words.append(f"{option}={value:o}")
        elif isinstance(value, (str, int, float)):
            words.append(f"{option}={value}")
        else:
            words += [f"{option}={item}" for item in value]
    return words


class RunningBus:
    """A bus that a process of its own serves; made by `running_bus`.

    :ivar address: where it listens; the same after a `restart`.
    :ivar options: what it was started with, see `command_line`.
    """

    def __init__(self, address: str, options: dict[str, OptionValue], timeout: float) -> None:
        self.address = address
        self.options: dict[str, OptionValue] = {}
        self._set_options(options)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (`running_bus` closes it)
        self._log: str | None = None

    @property
    def pid(self) -> int:
        """The process's ID, for signals.

        :raises sbus.errors.UsageError: if it was stopped or killed.
        """
        if self._process is None:
            raise UsageError("the bus is not running: start it again with restart()")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process, and it has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that the server has printed so far, also before it was restarted."""
        if self._log is not None:
            return self._log
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="backslashreplace")

    def start(self, **options: OptionValue) -> None:
        """Start it again after `stop` or `kill`, and wait until it accepts connections.

        :param options: those that are to change.
        :raises sbus.errors.ConnectError: if it does not come up; the text has the end of its log.
        """
        if self._process is not None:
            raise UsageError("the bus is running already: stop it first, or use restart()")
        self._set_options(options)
        command = [sys.executable, "-c", _TWISTD, "--nodaemon", "--pidfile=", "sbus", f"--socket={self.address}"]
        # The server finds what the test can import: components that are being written, above all.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [*command, *command_line(self.options)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_accepting(self._process, time.monotonic() + self._timeout)
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """End it as ``systemctl stop`` would (SIGTERM), and wait for that; its socket is removed.

        :raises sbus.errors.Disconnected: if it had ended already, by itself, or ends with another status
            than 0: it has failed.
        :raises sbus.errors.TimedOut: if it does not end; it is killed then.
        """
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is not None:
                raise Disconnected(f"the bus has ended by itself, with status {process.returncode}{self._tail()}")
            process.terminate()
            try:
                status = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                raise TimedOut(f"the bus was still there {self._timeout} s after SIGTERM{self._tail()}") from None
            if status:
                raise Disconnected(f"the bus has ended with status {status} instead of 0{self._tail()}")
        finally:
            self._end()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL): clients lose their connections, and its socket is left over."""
        self._end()

    def restart(self, **options: OptionValue) -> None:
        """Start it again, at the same address; stop it before, if it is running.

        :param options: those that are to change.
        :raises: as `stop` and `start`.
        """
        self.stop()
        self.start(**{"reuse": True, **options})

    def connect(self, **settings: Any) -> Bus:
        """Connect a blocking client, to be used in a ``with`` statement.

        :param settings: as for `sbus.client.blocking.connect`; dialect and limit are the server's.
        """
        return connect(self.address, **{**self._settings(), **settings})

    def record(self, *patterns: bytes | str, **settings: Any) -> RecordingClient:
        """Connect a client that records what the patterns match, to be used in a ``with`` statement."""
        return RecordingClient(self.address, *patterns, **{**self._settings(), **settings})

    # --- how -----------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"dialect": str(self.options.get("dialect") or "current")}
        if self.options.get("max_packet"):
            settings["max_packet"] = int(str(self.options["max_packet"]))
        return settings

    def _set_options(self, options: dict[str, OptionValue]) -> None:
        if options.get("auto_close"):
            raise UsageError("auto_close would end the bus with the connection that finds out whether it accepts any")
        self.options.update(options)

    def _wait_accepting(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        pidfd = os.pidfd_open(process.pid)
        try:
            while not self._accepts(process.pid, deadline):
                if process.poll() is not None:
                    raise ConnectError(f"the bus ended with status {process.returncode} at its start{self._tail()}")
                if time.monotonic() > deadline:
                    raise ConnectError(f"the bus did not accept connections in time{self._tail()}")
                select.select([pidfd], [], [], _RETRY)
        finally:
            os.close(pidfd)

    def _accepts(self, pid: int, deadline: float) -> bool:
        try:
            with connect(self.address, timeout=0, dialect=str(self.options.get("dialect") or "current")) as bus:
                # Somebody else may be serving at this address; then ours is about to say so, and to end.
                if peer_credentials(bus.socket).pid != pid:
                    return False
                bus.fence(max(0.0, deadline - time.monotonic()))
        except ConnectError:
            return False
        except (Disconnected, TimedOut):
            # A policy that lets nobody in, not even us, is in force. Of time-outs the caller will know.
            return time.monotonic() <= deadline
        return True

    def _tail(self) -> str:
        log = self.log[-_SHOWN:].strip()
        return f"; the end of its log:\n{log}" if log else ", without a word"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _close(self) -> None:
        """End it whatever state it is in; its log stays."""
        self._end()
        self._log = self.log
        self._output.close()


@contextlib.contextmanager
def running_bus(socket: str | None = None, *, timeout: float = 10.0, **options: OptionValue) -> Iterator[RunningBus]:
    """A bus that serves as long as the block lasts.

    It is there, and accepts connections, when the block begins. At the end it is stopped, by its
    process ID, and nothing of it stays.

    :param socket: where it is to listen; by default in a temporary directory of its own.
    :param timeout: seconds that its start and its end may take.
    :param options: those of ``twistd sbus``, written as Python names: ``max_packet=1000``, see `command_line`.
    :raises sbus.errors.ConnectError: if it does not come up; the text has the end of its log.
    :raises sbus.errors.Disconnected: at the end of the block, if the server had failed within it.
    """
    directory = None
    if socket is None:
        directory = tempfile.mkdtemp(prefix="sbus-")  # short, as a socket's path has 107 bytes at most
        socket = os.path.join(directory, "bus")
    bus = None
    try:
        bus = RunningBus(socket, options, timeout)
        bus.start()
        yield bus
        bus.stop()
    finally:
        if bus is not None:
            bus._close()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
