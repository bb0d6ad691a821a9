"""Start the demo's processes in order, and always end them in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sbus.errors import SbusError

__all__ = ["Process", "python", "running"]

_STEP_TIMEOUT = 15.0
"""Seconds for a process to end after SIGTERM."""


class Process:
    """A child process in its own session.

    Ctrl-C on the terminal does not end it out of order.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Check that the process is running.

        :raises sbus.errors.SbusError: if it has ended; the text has the end of its log.
        """
        if self._process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-600:].strip()
            raise SbusError(f"the {self.name} has ended with status {self._process.returncode}; its log:\n{tail}")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End the process in order, and wait for it."""
        self._process.terminate()
        try:
            self._process.wait(_STEP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()


def python(*arguments: str) -> list[str]:
    """Return the command that runs Python with these arguments, and nothing of the current directory."""
    return [sys.executable, "-P", *arguments]


@contextlib.contextmanager
def running(name: str, command: list[str], log: Path) -> Iterator[Process]:
    """Run a process for the length of the block."""
    process = Process(name, command, log)
    try:
        yield process
    finally:
        process.end()
