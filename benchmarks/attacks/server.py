"""The server under attack, as a process of its own: started, measured from outside, and stopped."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.attacks import kernel
from benchmarks.attacks.attacker import master_of
from benchmarks.attacks.processes import die_with_parent
from benchmarks.policies import policy
from benchmarks.servers import Failed

__all__ = ["POLICY", "Ending", "Server", "Usage", "serving"]

_CROWDS = "--user-clients=4096"
"""Lets one user have thousands of clients, which the bus has to bear with this option."""
POLICY = "--policy"
"""Stands for the option that gives the server a policy, which refuses everybody ``denied/``."""
_RULES = 1_000
_PRIVATE = 1_000
"""Patterns to which the policy lets nobody subscribe."""
_START_TIMEOUT = 15.0
_POLL = 0.01


class Usage(NamedTuple):
    """The resources that a server has used so far.

    :ivar at: the time, in seconds of the monotonic clock.
    :ivar cpu: seconds.
    :ivar log: bytes.
    """

    at: float
    cpu: float
    log: int


class Ending(NamedTuple):
    """The end of a server.

    :ivar shut: seconds from SIGTERM until no client was connected; None if that did not happen.
    :ivar gone: seconds from SIGTERM until the process was gone; None if it had to be killed.
    :ivar status: the exit status, negative for a signal; None if it had to be killed.
    """

    shut: float | None
    gone: float | None
    status: int | None


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.address = address
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Return if the server runs.

        :raises Failed: if it has ended by itself; the text quotes its last words.
        """
        if (status := self._process.poll()) is not None:
            raise Failed(f"the server has ended by itself (status {status}): {self.last_words()}")

    def last_words(self) -> str:
        """Return the end of the server's log, in one line."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 300))
            return " ".join(file.read().decode(errors="replace").split())

    def usage(self) -> Usage:
        """
        :raises Failed: if the server has ended by itself.
        """
        self.check()
        return Usage(time.monotonic(), kernel.cpu(self.pid), self.log.stat().st_size)

    def stop(self, patience: float) -> Ending:
        """Send SIGTERM and wait for the end; kill the process after `patience` seconds."""
        begun = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        shut = None
        while (passed := time.monotonic() - begun) < patience:
            status = self._process.poll()
            if shut is None and (status is not None or kernel.connections(self.address).open == 0):
                shut = time.monotonic() - begun
            if status is not None:
                return Ending(shut, time.monotonic() - begun, status)
            # To list many sockets takes time; it should not take a CPU.
            looked = time.monotonic() - begun - passed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(_POLL, 4 * looked))
        self.kill()
        return Ending(shut, None, None)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    options: Sequence[str] = (),
    *,
    pure: bool = False,
    files: int | None = None,
    linked: bool = False,
) -> Iterator[Server]:
    """Start a server in a temporary directory, with a socket for every user; kill it at the end if it still runs.

    :param command: the twistd to start.
    :param options: more options of ``twistd sbus``; ``{address}`` in them stands for the server's address.
    :param pure: run without the compiled helpers.
    :param files: the descriptors that it may have, if not as many as this process.
    :param linked: start a master for it, too, and a link that carries everything.
    :raises Failed: if it does not start.
    """
    environment = {**os.environ, **({"SBUS_PURE": "1"} if pure else {})}
    # Where descriptors are few, the limit of a user is the usual one.
    crowds = [_CROWDS] if files is None else []
    with tempfile.TemporaryDirectory(prefix="sbus-attacks-") as folder, contextlib.ExitStack() as stack:
        os.chmod(folder, 0o711)
        address = f"{folder}/bus"
        own = [*crowds, *(option.replace("{address}", address) for option in options)]
        if POLICY in own:
            Path(f"{address}.toml").write_text(policy(_RULES, _PRIVATE))
            own[own.index(POLICY)] = f"--policy={address}.toml"
        if linked:
            master = stack.enter_context(_running(command, master_of(address), crowds, environment, files))
            own += [f"--upstream={master.address}", "--upstream-out=", "--upstream-in="]
        yield stack.enter_context(_running(command, address, own, environment, files))


@contextlib.contextmanager
def _running(
    command: Sequence[str], address: str, options: Sequence[str], environment: dict[str, str], files: int | None
) -> Iterator[Server]:
    def prepare() -> None:
        die_with_parent()
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    log = Path(f"{address}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "-n", "--pidfile=", "sbus", f"--socket={address}", "--mode=0777", *options],
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=prepare,
        )
    server = Server(process, address, log)
    try:
        _await_start(server)
        yield server
    finally:
        server.kill()


def _await_start(server: Server) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        while time.monotonic() < deadline:
            server.check()
            with contextlib.suppress(OSError):
                sock.connect(server.address)
                return
            time.sleep(_POLL)
    raise Failed(f"the server did not listen within {_START_TIMEOUT:.0f} s: {server.last_words()}")
