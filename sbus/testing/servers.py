"""A real bus for a test: ``twistd sbus`` in a separate process.

It accepts connections when the test begins, and it is gone when the test ends::

    with running_bus(dialect="early", max_packet=1000) as bus:
        run_my_program("--socket", bus.address)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from sbus.client.blocking import Bus, connect
from sbus.daemon.launcher import ServerProcess, read_log, twistd_command
from sbus.daemon.values import size
from sbus.errors import ConnectError, Disconnected, TimedOut, UsageError
from sbus.syscalls.socket_directory import new_socket_directory
from sbus.syscalls.sockets import peer_credentials
from sbus.testing.clients import RecordingClient

__all__ = ["OptionValue", "RunningBus", "command_line", "running_bus"]

OptionValue: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str | int | os.PathLike[str]] | None
"""The value of an option of ``twistd sbus``, written in Python; see `command_line`."""


def command_line(options: dict[str, OptionValue]) -> list[str]:
    """Return options of ``twistd sbus`` as arguments of its command line.

    ``block_timeout=2`` becomes ``--block-timeout=2``. True adds an option without a value (``reuse=True``), False and
    None omit it, a list repeats it, and a numeric ``mode`` is written in octal.
    """
    arguments = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(option)
        elif name == "mode" and isinstance(value, int):
            arguments.append(f"{option}={value:o}")
        elif isinstance(value, (str, int, float, os.PathLike)):
            arguments.append(f"{option}={value}")
        else:
            arguments += [f"{option}={item}" for item in value]
    return arguments


class RunningBus:
    """A bus in a separate process; `running_bus` makes it.

    :ivar address: where it listens; the same after a `restart`.
    :ivar options: the options of its server, see `command_line`.
    """

    def __init__(self, address: str, options: dict[str, OptionValue], timeout: float) -> None:
        self.address = address
        self.options: dict[str, OptionValue] = {}
        self._set_options(options)
        self._timeout = timeout
        self._server: ServerProcess | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (`running_bus` closes it)
        self._final_log: str | None = None

    @property
    def pid(self) -> int:
        """The process ID of the server, for sending it signals.

        :raises sbus.errors.UsageError: if it was stopped or killed.
        """
        if self._server is None:
            raise UsageError("the bus is not running: start it again with restart()")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._server is not None and self._server.status is None

    @property
    def log(self) -> str:
        """Everything that the server has printed, including before a restart."""
        return read_log(self._output) if self._final_log is None else self._final_log

    def start(self, **options: OptionValue) -> None:
        """Start it again after `stop` or `kill`, and wait until it accepts connections.

        :param options: the options to change.
        :raises sbus.errors.ConnectError: if it does not come up; the text has the end of its log.
        """
        if self._server is not None:
            raise UsageError("the bus is running already: stop it first, or use restart()")
        self._set_options(options)
        command = twistd_command("sbus", f"--socket={self.address}", *command_line(self.options))
        server = ServerProcess("the bus", command, self._output)
        deadline = time.monotonic() + self._timeout
        server.wait_until(lambda: self._accepts(server.pid, deadline), self._timeout)
        self._server = server

    def stop(self) -> None:
        """Stop it as ``systemctl stop`` would (SIGTERM), and wait; it removes its socket.

        :raises sbus.errors.Disconnected: if it had ended by itself, or exits with a status other than 0.
        :raises sbus.errors.TimedOut: if it does not end in time; it is killed then.
        """
        server = self._server
        if server is None:
            return
        try:
            if server.status is not None:
                raise Disconnected(f"the bus ended by itself, with status {server.status}{server.log_tail}")
            status = server.stop(self._timeout)
            if status:
                raise Disconnected(f"the bus exited with status {status} instead of 0{server.log_tail}")
        finally:
            self._server = None

    def kill(self) -> None:
        """Kill it (SIGKILL), as a crash would.

        Clients lose their connections, and the socket stays behind.
        """
        server, self._server = self._server, None
        if server is not None:
            server.kill()

    def restart(self, **options: OptionValue) -> None:
        """Start it again at the same address, after stopping it if it is running.

        :param options: the options to change.
        :raises: as `stop` and `start`.
        """
        self.stop()
        self.start(**{"reuse": True, **options})

    def connect(self, **settings: Any) -> Bus:
        """Connect a blocking client; use it in a ``with`` statement.

        :param settings: as for `sbus.client.blocking.connect`; dialect and packet limit default to the server's.
        """
        return connect(self.address, **{**self._client_settings(), **settings})

    def record(self, *patterns: bytes | str, **settings: Any) -> RecordingClient:
        """Connect a client that records the messages that the patterns match.

        Use it in a ``with`` statement.
        """
        return RecordingClient(self.address, *patterns, **{**self._client_settings(), **settings})

    # --- internals -----------------------------------------------------------------------------

    def _client_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"dialect": str(self.options.get("dialect") or "current")}
        if self.options.get("max_packet"):
            settings["max_packet"] = size("max-packet")(str(self.options["max_packet"]))
        return settings

    def _set_options(self, options: dict[str, OptionValue]) -> None:
        if options.get("auto_close"):
            raise UsageError("auto_close would stop the bus when the connection that tests whether it accepts any ends")
        self.options.update(options)

    def _accepts(self, pid: int, deadline: float) -> bool:
        """Probe the server: connect, and make a round trip."""
        try:
            with connect(self.address, timeout=0, dialect=str(self.options.get("dialect") or "current")) as bus:
                # Another server may be listening at this address; ours is then about to report that and exit.
                if peer_credentials(bus.socket).pid != pid:
                    return False
                bus.fence(max(0.0, deadline - time.monotonic()))
        except ConnectError:
            return False
        except (Disconnected, TimedOut):
            # A policy that refuses this user's connections is in force; the launcher reports a time-out.
            return time.monotonic() <= deadline
        return True

    def _close(self) -> None:
        """End it in whatever state it is; its log stays readable."""
        self.kill()
        self._final_log = self.log
        self._output.close()


@contextlib.contextmanager
def running_bus(socket: str | None = None, *, timeout: float = 10.0, **options: OptionValue) -> Iterator[RunningBus]:
    """Run a bus for the duration of a block.

    The bus accepts connections when the block begins. At its end the server is stopped by its process ID, and all of
    its files are removed.

    :param socket: where it listens; by default in a new temporary directory.
    :param timeout: seconds that its start and its stop may take.
    :param options: options of ``twistd sbus`` as Python names, such as ``max_packet=1000``; see `command_line`.
    :raises sbus.errors.ConnectError: if it does not come up; the text has the end of its log.
    :raises sbus.errors.Disconnected: at the end of the block, if the server failed within it.
    """
    directory = None
    if socket is None:
        directory = new_socket_directory()
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
