"""The command ``sbus`` as a process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sbus.syscalls.polling import is_readable
from tests.support import nursery
from tests.support.harness import (
    TIMEOUT,
    Bus,
    can_fork,
    name_of,
)


def command(name: str) -> list[str]:
    """Return the command line that runs a command with this interpreter."""
    script = Path(sys.executable).with_name(name)
    return (
        [str(script)]
        if script.exists()
        else [sys.executable, "-m", {"sbus": "sbus.cli", "sbusd": "sbus.server.run.sbusd"}[name]]
    )


def environment(bus: Bus | None = None, **changes: str) -> dict[str, str]:
    """Return an environment for a command, without the variables that name a bus."""
    ours = {k: v for k, v in os.environ.items() if k not in ("SBUS_SOCKET", "XDG_RUNTIME_DIR", "NO_COLOR")}
    ours |= {"SBUS_SOCKET": str(bus.address)} if bus else {}
    return ours | {"LC_ALL": "C.UTF-8", "TERM": "xterm"} | changes


def complaints(errors: str) -> str:
    """Standard error of sbusd without the line that it always has in plain Python."""
    return "".join(line for line in errors.splitlines(keepends=True) if "the compiled helper is not in use" not in line)


class Sbus:
    """A running ``sbus``; its standard error is a pipe."""

    def __init__(self, bus: Bus | None, *arguments: str | bytes | Path, **how: Any) -> None:
        changes = how.pop("env", {})
        env = environment(bus, **changes)
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
        self.process: subprocess.Popen[Any] | nursery.Piped
        if len(command("sbus")) == 1 and can_fork(changes) and "preexec_fn" not in how:
            self.process = nursery.Piped([*command("sbus"), *arguments], ".", env, **how)
        else:
            # Without buffers, so that `line` leaves the rest for `end`.
            self.process = subprocess.Popen([*command("sbus"), *arguments], env=env, bufsize=0, **how)

    def __enter__(self) -> Sbus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def output(self) -> IO[bytes]:
        """Its standard output."""
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        """The next line of standard output."""
        return self.output.readline().decode()

    def wait_subscribed(self) -> Sbus:
        """Wait until ``sub --verbose`` says that it has subscribed."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline().decode()
        assert line.startswith("sbus: subscribed to "), line
        return self

    def end(self, number: int | None = None) -> tuple[int, bytes, str]:
        """Wait for the end, after sending a signal if given; return the status and the rest of both outputs."""
        if number is not None:
            self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=TIMEOUT)
        assert self.process.returncode is not None
        return self.process.returncode, output or b"", (errors or b"").decode()


def sbus(
    bus: Bus | None, *arguments: str | bytes | Path, stdin: bytes = b"", status: int = 0, **env: str
) -> tuple[bytes, str]:
    """Run ``sbus`` to its end; return standard output and standard error."""
    line, environ = [*command("sbus"), *arguments], environment(bus, **env)
    if len(command("sbus")) == 1 and can_fork(env):
        done = nursery.run(line, stdin=stdin, timeout=TIMEOUT, env=environ)
    else:
        done = subprocess.run(line, input=stdin, capture_output=True, timeout=TIMEOUT, env=environ)
    assert done.returncode == status, (done.stdout, done.stderr.decode())
    return done.stdout, done.stderr.decode()


def failure(bus: Bus | None, *arguments: str | bytes | Path, status: int = 1, **how: Any) -> str:
    """Run ``sbus`` and expect it to fail with one line on standard error; return that line."""
    output, errors = sbus(bus, *arguments, status=status, **how)
    assert output == b""
    assert errors.startswith("sbus: ")
    assert errors.count("\n") == 1
    return errors.rstrip("\n")


def misuse(*arguments: str | bytes) -> str:
    """Run ``sbus`` and expect wrong usage; return standard error."""
    output, errors = sbus(None, *arguments, status=2)
    assert output == b""
    return errors


def follow(bus: Bus, *arguments: str | bytes, **how: Any) -> Sbus:
    """Run ``sbus sub``, and wait until its subscriptions are in force."""
    return Sbus(bus, "sub", "--verbose", *arguments, **how).wait_subscribed()


class Terminal:
    """A pseudo-terminal with a command in its foreground."""

    def __init__(self, bus: Bus | None, *arguments: str, **env: str) -> None:
        self.fd, theirs = pty.openpty()
        self.running = Sbus(
            bus,
            *arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=env,
        )
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.__exit__()
        os.close(self.fd)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read_until(self, pattern: str) -> str:
        """Read until the pattern occurs in the text read so far; return that text."""
        while not re.search(pattern, self.text):
            assert is_readable(self.fd, TIMEOUT), f"no {pattern!r} in {self.text!r}"
            assert self._read(), f"no {pattern!r} in {self.text!r}"
        return self.text

    def end(self) -> int:
        """Read until the process has ended; return its exit status."""
        while self._read():
            pass
        return self.running.process.wait(TIMEOUT)

    def _read(self) -> bool:
        try:
            data = os.read(self.fd, 65536)
        except OSError as e:
            if e.errno != errno.EIO:
                raise
            return False  # no process has the other side open
        self.text += data.decode()
        return bool(data)


@contextlib.contextmanager
def fake_server() -> Iterator[tuple[str, socket.socket]]:
    """Yield the address and the listening socket of a server that the test plays."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = f"@sbus-test-{os.urandom(8).hex()}"
        listener.bind(name_of(address))
        listener.listen()
        listener.settimeout(TIMEOUT)
        yield address, listener


def hear(peer: socket.socket) -> bytes:
    """Return the next packet from the client of a fake server, which ignores requests for bundles."""
    while (packet := peer.recv(99)) in (b"CMSG bundle/on", b"CMSG bye/on", b"CMSG denied/on"):
        pass
    return packet
