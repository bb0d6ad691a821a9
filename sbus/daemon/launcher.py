"""Server processes: start one, wait until it serves, stop it by its process ID.

`sbus.testing` launches ``twistd sbus`` for a test, and ``sbus bench --start`` launches ``sbusd``.

*Ready.* There is no output to wait for: log lines change, and a daemon may print nothing. The caller passes a probe
that does what a client would do, and `ServerProcess.wait_until` calls it every 5 ms until it returns true. Between two
probes the launcher sleeps on the pidfd of the process, so a server that fails to start is reported the moment it ends
and not after the time-out. The probe must check *which* process it reached (``SO_PEERCRED``) if the address may belong
to another server; the launched one then reports that and exits.

*Output.* Standard output and standard error go to one file that the caller opened for reading and writing, never to a
pipe: nothing reads a pipe while a test runs, and a server that logs more than 64 KiB would block. The log is read with
pread(2), which leaves the offset that the server writes at alone. Errors carry the last 4,000 characters.

*Stop.* SIGTERM to the process ID, then wait, then SIGKILL. Never by name: another server may be running. The launcher
reaps every process that it started, so the ID cannot be reused while it is in use here.

*Imports.* The child gets the parent's ``sys.path`` as ``PYTHONPATH``, so that it finds components that are still being
developed. This module imports neither Twisted nor a client.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from sbus.errors import ConnectError, TimedOut
from sbus.syscalls.polling import is_readable

__all__ = ["ServerProcess", "read_log", "twistd_command"]

_PROBE_INTERVAL = 0.005
"""Seconds between two probes of a server that is starting."""
_LOG_TAIL = 4_000
"""Characters of a log that go into the text of an error."""
_TWISTD = """
import _signal as signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from twisted.scripts.twistd import run
sys.argv[0] = 'twistd'
run()
"""
"""Until the service has its own handlers (`sbus.daemon.process`), Ctrl-C ends it at once and without a traceback.
Python's handler raises an exception, which Twisted ignores while it imports plugins."""


def twistd_command(service: str, *options: str, logger: str | None = None) -> list[str]:
    """Return the command that runs a service in the foreground, with this interpreter.

    :param service: its name on the command line of ``twistd``, such as ``sbus``.
    :param logger: the name of its log observer; None for the one of ``twistd``.
    """
    own = ["--nodaemon"] if logger is None else ["--nodaemon", f"--logger={logger}"]
    return [sys.executable, "-P", "-c", _TWISTD, *own, service, *options]


def read_log(output: IO[bytes]) -> str:
    """Return everything that was written to a server's output file so far."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="backslashreplace")


class ServerProcess:
    """A server in a child process, from its start on.

    :param name: what errors call it, such as ``the bus``.
    :param command: program and arguments.
    :param output: file for its standard output and standard error, open for reading and writing; it stays the caller's.
    :param new_session: keep the terminal's signals (Ctrl-C) from it, so that the caller decides when it stops.
    :raises OSError: if the program cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], output: IO[bytes], *, new_session: bool = False) -> None:
        self._name = name
        self._output = output
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=new_session,
        )

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def log_tail(self) -> str:
        """The end of its log, worded to be appended to an error."""
        tail = read_log(self._output)[-_LOG_TAIL:].strip()
        return f"; the end of its log:\n{tail}" if tail else "; it printed nothing"

    def wait_until(self, is_ready: Callable[[], bool], timeout: float) -> None:
        """Wait until a probe returns true; kill the process if that fails.

        :param is_ready: the probe; it must not take longer than the caller is prepared to wait.
        :param timeout: seconds to wait.
        :raises ConnectError: if the process ends, or the time is up, before the probe returns true.
        """
        deadline = time.monotonic() + timeout
        pidfd = os.pidfd_open(self.pid)
        try:
            while not is_ready():
                if self.status is not None:
                    raise ConnectError(f"{self._name} exited with status {self.status} at its start{self.log_tail}")
                if time.monotonic() > deadline:
                    raise ConnectError(f"{self._name} did not accept connections within {timeout:g} s{self.log_tail}")
                is_readable(pidfd, _PROBE_INTERVAL)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(pidfd)

    def stop(self, timeout: float) -> int:
        """Stop it as ``systemctl stop`` would (SIGTERM), and wait for its end.

        :param timeout: seconds to wait before it is killed.
        :returns: its exit status.
        :raises TimedOut: if it had to be killed.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = self.log_tail
            raise TimedOut(f"{self._name} was still running {timeout:g} seconds after SIGTERM{tail}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it (SIGKILL) if it still runs, and wait for its end."""
        self._process.kill()
        self._process.wait()
