"""Starts twistd in a fork of a process that has imported it already: half a second of CPU time less for each test.

The child is a process like any other: it has its own arguments, environment, directory and standard streams, runs the
script ``twistd``, and ends as the script ends. Only the imports are those of its parent, which imports what a twistd
needs and does nothing else. A test about how a process starts (its environment, its descriptors, its umask) starts
Python itself; so do all tests while coverage is measured.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, NoReturn

_ROOT = Path(__file__).resolve().parent.parent.parent
_LARGEST = 1 << 17


class Forked:
    """A process from the nursery, with the methods of `subprocess.Popen` that the tests use.

    :param command: a script of Python's and its arguments.
    :ivar stdout: the process's standard output and error.
    """

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        output, into = os.pipe()
        self._ended, status = os.pipe()
        try:
            request = json.dumps([[*command], os.fspath(cwd), {**env}]).encode()
            nursery = _nursery()
            socket.send_fds(nursery, [request], [into, status])
            answer = nursery.recv(100)
            assert answer, "the nursery has ended: see its error above"
            self.pid = int(answer)
        finally:
            os.close(into)
            os.close(status)
        self.stdout: IO[str] = os.fdopen(output, errors="backslashreplace")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None as long as the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status, which is negative for a signal."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("twistd", timeout or 0.0)
        return status

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._ended >= 0:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                self.returncode = int(os.read(self._ended, 100))
                os.close(self._ended)
                self._ended = -1
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has been reaped, and its status is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _nursery() -> socket.socket:
    """Start the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=_ROOT,
            env={**os.environ, "PYTHONWARNINGS": "default"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not that of this process: a child's buffer is its own
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _import_all() -> None:
    """Import what a twistd imports."""
    import twisted.internet.epollreactor
    import twisted.scripts.twistd  # noqa: F401
    from twisted.application.service import IServiceMaker
    from twisted.plugin import getPlugins

    import sbus.link.twistd
    import sbus.recorder.twistd
    import sbus.server.run.service
    import sbus.server.run.twistd  # noqa: F401

    list(getPlugins(IServiceMaker))
    assert "twisted.internet.reactor" not in sys.modules, "the children would share a reactor"


def _run(request: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Become a twistd."""
    command, cwd, env = json.loads(request)
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                continue  # it was the one that listed them
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    from twisted.scripts.twistd import run

    sys.exit(run())


def main() -> None:
    """Fork on request, and report how the children end."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready = wait([requests.fileno(), read])
        if read in ready:
            os.read(read, 1000)
            while children and (pid := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                _, status = os.waitpid(pid.si_pid, 0)
                into = children.pop(pid.si_pid)
                os.write(into, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(into)
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 2)
            if not request:
                return
            child = os.fork()
            if not child:
                requests.detach()  # all descriptors are closed
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(request, descriptors)
            os.close(descriptors[0])
            children[child] = descriptors[1]
            requests.send(b"%d" % child)


if __name__ == "__main__":
    main()
