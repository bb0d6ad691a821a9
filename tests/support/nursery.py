"""Run ``twistd``, ``sbusd`` and ``sbus`` as forks of a process that has imported them, which saves most CPU time.

The child is a process like any other: it has its own arguments, environment, directory, umask and standard streams,
runs the installed script, and ends as the script ends, short of taking its modules apart. Only the imports are those of
its parent, which imports what the scripts need and does nothing else. A test about how a process starts (what Python
itself reads in the environment) starts Python itself; so do all tests while coverage is measured.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NoReturn

import twisted.plugin

_ROOT = Path(__file__).resolve().parent.parent.parent
_WITH_ARROW = {"archive", "compact", "journal", "lake", "replay", "report", "sbus-recorder"}
"""Words of a command line that import Arrow. A nursery of its own imports it for them: few tests need it."""
_LARGEST = 1 << 17
_MOST_DESCRIPTORS = 100
_numbers = itertools.count()
"""The numbers of requests."""


class _Child:
    """A process from the nursery.

    :param command: a Python script, or ``-c`` and a program, with its arguments.
    :param streams: descriptors for its standard input, output and error.
    :param pass_fds: more descriptors that it inherits, under the same numbers.
    :param before: statements that it runs first.
    :param within: a command that starts its nursery, as which user for example.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str | Path,
        env: Mapping[str, str],
        streams: Sequence[int],
        pass_fds: Sequence[int] = (),
        umask: int = -1,
        before: str = "",
        within: Sequence[str] = (),
    ) -> None:
        self._ended, status = os.pipe()
        try:
            number = next(_numbers)
            what = [number, [*command], os.fspath(cwd), {**env}, [0, 1, 2, *pass_fds], umask, before]
            request = json.dumps(what).encode()
            is_plain = env.get("SBUS_PURE", "0") not in ("", "0")
            nursery = _nursery(not _WITH_ARROW.isdisjoint(command), is_plain, *within)
            socket.send_fds(nursery, [request], [status, *streams, *pass_fds])
            answered = -1
            while answered != number:  # else it answers a start that was given up, as at a time limit
                answer = nursery.recv(100)
                assert answer, "the nursery has ended: see its error above"
                answered, self.pid = map(int, answer.split())
        finally:
            os.close(status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None as long as the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status, which is negative for a signal."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
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


class Forked(_Child):
    """A process without input, with the methods of `subprocess.Popen` that the tests use.

    :ivar stdout: the process's standard output and error.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str | Path,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        umask: int = -1,
        within: Sequence[str] = (),
    ) -> None:
        output, into = os.pipe()
        try:
            with open(os.devnull) as nothing:
                super().__init__(command, cwd, env, (nothing.fileno(), into, into), pass_fds, umask, within=within)
        finally:
            os.close(into)
        self.stdout: IO[str] = os.fdopen(output, errors="backslashreplace")


class Piped(_Child):
    """A process with streams of its own, with the methods of `subprocess.Popen` that the tests use.

    :param stdin, stdout, stderr: as for `subprocess.Popen`.
    :param text: whether the ends of its pipes here are text.
    :param before: statements that the process runs first.
    """

    def __init__(
        self,
        command: Sequence[str | bytes | Path],
        cwd: str | Path,
        env: Mapping[str, str],
        *,
        stdin: int | IO[Any] | socket.socket = subprocess.PIPE,
        stdout: int | IO[Any] | socket.socket = subprocess.PIPE,
        stderr: int | IO[Any] | socket.socket = subprocess.PIPE,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        umask: int = -1,
        before: str = "",
        within: Sequence[str] = (),
    ) -> None:
        pipes: list[IO[Any] | None] = []
        with contextlib.ExitStack() as theirs:
            descriptors: list[int] = []
            for stream in (stdin, stdout, stderr):
                ours: IO[Any] | None = None
                if stream == subprocess.PIPE:
                    reading, writing = os.pipe()
                    mine, its = (reading, writing) if descriptors else (writing, reading)
                    mode = "r" if descriptors else "w"
                    ours = os.fdopen(mine, mode) if text else os.fdopen(mine, mode + "b", buffering=0)
                    theirs.callback(os.close, its)
                elif stream == subprocess.DEVNULL:
                    its = os.open(os.devnull, os.O_RDWR)
                    theirs.callback(os.close, its)
                else:
                    its = stream if isinstance(stream, int) else stream.fileno()
                pipes.append(ours)
                descriptors.append(its)
            words = [os.fsdecode(word) for word in command]
            super().__init__(words, Path(cwd).resolve(), env, descriptors, pass_fds, umask, before, within)
        self.stdin, self.stdout, self.stderr = pipes

    def communicate(self, stdin: bytes = b"", timeout: float | None = None) -> tuple[Any, Any]:
        """Write the input, read both outputs to their ends, and wait for the process; kill it after the time-out."""
        outputs = [file if file and not file.closed else None for file in (self.stdout, self.stderr)]
        with ThreadPoolExecutor(2) as readers:
            both = [file and readers.submit(file.read) for file in outputs]
            try:
                if self.stdin and not self.stdin.closed:
                    left = memoryview(stdin)
                    with contextlib.suppress(BrokenPipeError), self.stdin:
                        while left:  # a signal can end a write before all is written
                            left = left[self.stdin.write(left) :]
                self.wait(timeout)
            finally:
                self.kill()
            found = [each and each.result() for each in both]
        for file in outputs:
            if file:
                file.close()
        return found[0], found[1]


def run(
    command: Sequence[str | bytes | Path],
    *,
    cwd: str | Path = ".",
    env: Mapping[str, str],
    stdin: bytes = b"",
    pass_fds: Sequence[int] = (),
    timeout: float | None = None,
    within: Sequence[str] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run a script of Python's to its end, as `subprocess.run` does with ``capture_output``."""
    child = Piped(command, cwd, env, pass_fds=pass_fds, within=within)
    output, errors = child.communicate(stdin, timeout)
    assert child.returncode is not None
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


@functools.cache
def _nursery(with_arrow: bool, is_plain: bool, *within: str) -> socket.socket:
    """Start a process that forks, directly or through another command; it ends with this process.

    :param is_plain: whether it uses no compiled module of sbus.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    with theirs:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", __name__, str(theirs.fileno()), *(["arrow"] if with_arrow else [])],
            cwd=_ROOT,
            env={**os.environ, "PYTHONWARNINGS": "default", "SBUS_PURE": "1" if is_plain else "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not that of this process: a child's buffer is its own
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


_get_cache = functools.cache(twisted.plugin.getCache)


def _import_all(with_arrow: bool) -> None:
    """Import the modules that the scripts import, and those that `runpy` imports to run them."""
    import pkgutil  # noqa: F401

    import click
    import twisted.internet.epollreactor
    import twisted.scripts.twistd
    from twisted.application.service import IServiceMaker

    import sbus.cli.main
    import sbus.link.twistd
    import sbus.queue.twistd
    import sbus.recorder.twistd
    import sbus.server.run.sbusd
    import sbus.server.run.service
    import sbus.server.run.twistd

    # A bus looks for plugins five times as it starts, and Twisted would read its list from the disk each time.
    twisted.plugin.getCache = _get_cache
    list(twisted.plugin.getPlugins(IServiceMaker))
    commands, context = sbus.cli.main.cli, click.Context(sbus.cli.main.cli)
    for name in commands.list_commands(context):
        if with_arrow or name not in ("journal", "lake", "spark"):
            commands.get_command(context, name)
    if with_arrow:
        with contextlib.suppress(ImportError):  # some trees have no Arrow
            import sbus.cli.journal.rows
            import sbus.recorder.metrics
            import sbus.recorder.service
    assert "twisted.internet.reactor" not in sys.modules, "the children would share a reactor"


_status: int | None = None
"""How a child ends."""


def _leave() -> None:
    """End a child before the interpreter takes its modules apart, which costs more than all the rest of a short one."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


def _use_pythonpath(text: str) -> None:
    """Do what Python and Twisted do with ``PYTHONPATH`` when they start."""
    import twisted.plugins

    if folders := [folder for folder in text.split(os.pathsep) if folder and folder not in sys.path]:
        sys.path[1:1] = folders
        _get_cache.cache_clear()
        found = twisted.plugin.pluginPackagePaths(twisted.plugins.__name__)
        twisted.plugins.__path__[:] = dict.fromkeys([*found, *twisted.plugins.__path__])


def _run(request: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Become a script."""
    _, command, cwd, env, numbers, umask, before = json.loads(request)
    free = max(numbers) + 1  # first out of the way of each other's numbers
    for number, descriptor in zip(numbers, [fcntl.fcntl(d, fcntl.F_DUPFD, free) for d in descriptors], strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            try:
                os.close(int(name))
            except OSError:
                continue  # it was the one that listed them
    os.chdir(cwd)
    if umask >= 0:
        os.umask(umask)
    os.environ.clear()
    os.environ.update(env)
    exec(before, globals())
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])  # empty for a program given with -c, as in Python
    _use_pythonpath(env.get("PYTHONPATH", ""))
    global _status
    _status = 1
    try:
        if command[0] == "-c":
            program = command.pop(1)
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(program, module.__dict__)
        else:
            runpy.run_path(command[0], run_name="__main__")
        _status = 0
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            raise
        _status = e.code or 0
    sys.exit(_status)


def main() -> None:
    """Fork on request, and report how the children end."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    atexit.register(_leave)  # the first one is called last
    _import_all(with_arrow="arrow" in sys.argv[2:])
    gc.collect()
    gc.freeze()  # else the collector of each child would look at all of it, and so copy it
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
            request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, _MOST_DESCRIPTORS)
            if not request:
                for child in children:  # a failed test, or one that was killed, has left it
                    os.kill(child, signal.SIGKILL)
                return
            child = os.fork()
            if not child:
                requests.detach()  # all descriptors are closed
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run(request, descriptors[1:])
            children[child], *streams = descriptors
            for descriptor in streams:
                os.close(descriptor)
            requests.send(b"%d %d" % (json.loads(request)[0], child))


if __name__ == "__main__":
    main()
