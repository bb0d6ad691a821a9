"""Every command that prints, on every kind of output: all of it arrives, or the command fails and says so."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from sbus.cli import streams
from sbus.journal.writer import JournalWriter
from sbus.syscalls.polling import is_readable
from sbus.testing import RunningBus, running_bus
from tests.support import nursery
from tests.support.harness import TIMEOUT, can_fork, script

PICTURE = bytes(range(256)) * 1200
"""A payload that no pipe holds, of 307,200 bytes."""
LIMIT = 65536 + 4096
"""Bytes that fit the file system of a full disk, which takes a write in part."""

BIG = (
    "sub --last --raw --count=1 v/picture",
    "sub --last --json --count=1 v/picture",
    "get --raw v/picture",
    "request answers/picture",
    "journal cat --raw JOURNAL",
    "journal tail --no-follow --json JOURNAL",
    "journal export --format=jsonl JOURNAL",
)
"""Commands that print all of `PICTURE` in some way."""
SMALL = (
    "--help",
    "--version",
    "sub --help",
    "whoami",
    "probe answers/picture",
    "ping --count=1",
    "ping --count=1 --json",
    "match a/* a/b",
    "bench --seconds=0.1 roundtrip",
    "bench --seconds=0.1 --json throughput",
    "status",
    "status --json",
    "clients",
    "clients --json",
    "patterns",
    "users",
    "explain answers/picture",
    "explain --json answers/picture",
    "top --count=1",
    "top --count=1 --json",
    "monitor --count=1 ticks",
    "monitor --count=1 --json ticks",
    "journal ls JOURNAL",
    "journal ls --json JOURNAL",
    "journal verify JOURNAL",
    "journal verify --json JOURNAL",
    "journal repair --dry-run JOURNAL",
)
"""Commands that print a few lines."""
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
_PYTHONS = [
    pytest.param(None, id="forked"),
    pytest.param(_UNBUFFERED, id="unbuffered", marks=pytest.mark.slow),
    pytest.param({}, id="buffered", marks=pytest.mark.slow),
]
"""How a command starts: as a fork, or with Python in the environment of container images or in everyone else's."""
_T = TypeVar("_T")
_expected: dict[str, bytes] = {}


def _in_turn(commands: Sequence[str], kinds: Sequence[_T]) -> list[object]:
    """Pair every command with every kind; all but one kind of a command, another one for the next, are slow.

    All commands print through `sbus.cli.streams`. So each command and each kind of output stay in make test, but not
    every pair of them, and a command without ``--json`` stands for the same one with it.
    """
    plain = [
        command for command in commands if command.replace(" --json", "") not in commands or "--json" not in command
    ]
    return [
        pytest.param(
            command,
            kind,
            marks=[] if command in plain and (place - plain.index(command)) % len(kinds) == 0 else pytest.mark.slow,
        )
        for command in commands
        for place, kind in enumerate(kinds)
    ]


def _name(value: object) -> str | None:
    """Return the test ID of a kind."""
    return getattr(value, "__name__", None)


class World(NamedTuple):
    """What the commands need."""

    bus: RunningBus
    journal: Path

    def start(
        self,
        command: str,
        output: int,
        env: dict[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        before: str = "",
    ) -> subprocess.Popen[str] | nursery.Piped:
        """Start a command, as a fork or in an environment; it first runs the statements `before`."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        environ |= {"SBUS_SOCKET": self.bus.address, "LC_ALL": "C.UTF-8"} | (env or {})
        words = [str(self.journal) if word == "JOURNAL" else word for word in command.split()]
        if env is None and can_fork():
            return nursery.Piped(
                [*script("sbus")[1:], *words],
                ".",
                environ,
                stdin=stdin,
                stdout=output,
                text=True,
                before=before,
            )
        return subprocess.Popen(
            [sys.executable, "-m", "sbus", *words],
            stdin=stdin,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            preexec_fn=lambda: exec(before, globals()),
        )


class Ended(NamedTuple):
    """How a command has ended."""

    status: int | None
    errors: str


def ended(process: subprocess.Popen[str] | nursery.Piped) -> Ended:
    errors = process.communicate(timeout=TIMEOUT)[1]
    return Ended(process.returncode, errors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("outputs")
    with JournalWriter.open(home / "journal") as journal:
        journal.append([(b"v/picture", PICTURE)])
    stopped = threading.Event()
    with (
        running_bus(socket=str(home / "bus"), admin=str(home / "bus.admin"), last_value="v/") as bus,
        bus.connect() as client,
        bus.connect() as responder,
    ):
        client.publish("v/picture", PICTURE)
        client.fence()
        responder.respond("answers/", lambda request: PICTURE)
        responder.fence()

        def live() -> None:
            while not stopped.is_set():
                is_readable(responder, 0.05)
                responder.get_ready()
                client.publish("ticks", b"x")

        thread = threading.Thread(target=live)
        thread.start()
        try:
            yield World(bus, home / "journal")
        finally:
            stopped.set()
            thread.join()


def expected(world: World, command: str, file: Path) -> bytes:
    """Return what a command prints into a file."""
    if command not in _expected:
        with open(file, "wb") as output:
            assert ended(world.start(command, output.fileno())) == (0, "")
        _expected[command] = file.read_bytes()
    return _expected[command]


def collect(fd: int, into: list[bytes], pause: float = 0.0) -> None:
    """Read to the end, in small pieces."""
    while True:
        try:
            piece = os.read(fd, 10_000)
        except OSError:  # EIO: the end of a terminal
            return
        if not piece:
            return
        into.append(piece)
        time.sleep(pause)


def pipe() -> tuple[int, int]:
    return os.pipe()


def nonblocking_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return reader, writer


def small_pipe() -> tuple[int, int]:
    reader, writer = nonblocking_pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def packet_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_DIRECT)


def stream_socket() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def nonblocking_socket() -> tuple[int, int]:
    ours, theirs = stream_socket()
    os.set_blocking(theirs, False)
    return ours, theirs


def nonblocking_terminal() -> tuple[int, int]:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    os.set_blocking(theirs, False)
    return ours, theirs


_KINDS = (pipe, nonblocking_pipe, small_pipe, packet_pipe, stream_socket, nonblocking_socket)


@pytest.mark.parametrize("python", _PYTHONS)
@pytest.mark.parametrize(("command", "kind"), _in_turn(BIG, _KINDS), ids=_name)
def test_everything_arrives(
    world: World, tmp_path: Path, command: str, kind: Callable[[], tuple[int, int]], python: dict[str, str] | None
) -> None:
    """A reader gets every byte, however little its pipe or socket takes at once and in whatever mode that is."""
    reader, writer = kind()
    got: list[bytes] = []
    process = world.start(command, writer, python)
    os.close(writer)
    collect(reader, got)
    assert ended(process) == (0, "")
    os.close(reader)
    output = b"".join(got)
    assert len(output) >= len(PICTURE)
    if "--json" not in command:  # which has the time
        assert output == expected(world, command, tmp_path / "file")


@pytest.mark.parametrize(
    "command",
    [
        "get --raw v/picture",
        pytest.param("journal cat --raw JOURNAL", marks=pytest.mark.slow),
        pytest.param("request answers/picture", marks=pytest.mark.slow),
    ],
)
def test_everything_arrives_on_a_terminal(world: World, command: str) -> None:
    """A terminal that another program has made non-blocking gets every byte."""
    reader, writer = nonblocking_terminal()
    got: list[bytes] = []
    process = world.start(command, writer, _UNBUFFERED)
    os.close(writer)
    collect(reader, got)
    assert ended(process) == (0, "")
    os.close(reader)
    assert b"".join(got).rstrip(b"\n") == PICTURE.rstrip(b"\n")


@pytest.mark.parametrize("python", _PYTHONS[1:])
@pytest.mark.parametrize("command", [*BIG[:1], *(pytest.param(command, marks=pytest.mark.slow) for command in BIG[1:])])
def test_disk_that_takes_a_part(world: World, tmp_path: Path, command: str, python: dict[str, str] | None) -> None:
    """If the output has only room for a part, the command fails and says why."""
    with open(tmp_path / "file", "wb") as file:
        before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))"
        done = ended(world.start(command, file.fileno(), python, before=before))
    assert done == (1, "sbus: standard output: File too large\n")
    assert os.path.getsize(tmp_path / "file") == LIMIT


def fails_on_a_full_disk(world: World, command: str, python: dict[str, str] | None) -> None:
    with open("/dev/full", "wb") as full:
        done = ended(world.start(command, full.fileno(), python))
    assert done == (1, "sbus: standard output: No space left on device\n")


def fails_if_closed(world: World, command: str, python: dict[str, str] | None) -> None:
    with open("/dev/full", "wb") as full:
        # Python has no standard output then.
        done = ended(world.start(command, full.fileno(), python, before="os.close(1); sys.stdout = None"))
    assert done == (1, "sbus: standard output is closed\n")


def ends_without_a_reader(world: World, command: str, python: dict[str, str] | None) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        done = ended(
            world.start(
                command, output.fileno(), python, before="signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})"
            )
        )
    assert done == (-signal.SIGPIPE, "")


_FAILURES = (fails_on_a_full_disk, fails_if_closed, ends_without_a_reader)


@pytest.mark.parametrize("python", _PYTHONS)
@pytest.mark.parametrize(("command", "fails"), _in_turn([*SMALL, *BIG], _FAILURES), ids=_name)
def test_output_that_fails(
    world: World, command: str, fails: Callable[[World, str, dict[str, str]], None], python: dict[str, str]
) -> None:
    """On a full disk, and with a closed output, a command fails with one line; it writes into nothing else.

    Without a reader, a command ends by SIGPIPE, also if its caller blocks that signal.
    """
    fails(world, command, python)
    assert world.bus.is_running


@pytest.mark.parametrize("command", ["get --raw v/picture", "sub --last --raw --count=1 v/picture"])
def test_reader_that_goes(world: World, command: str) -> None:
    """A reader that takes a part and goes ends the command by SIGPIPE, from a pipe and from a socket."""
    for kind in (small_pipe, stream_socket, nonblocking_socket):
        reader, writer = kind()
        process = world.start(command, writer)
        os.close(writer)
        os.read(reader, 100)
        os.close(reader)
        assert ended(process) == (-signal.SIGPIPE, "")


def test_errors_that_nobody_can_read(world: World) -> None:
    """The status is the same if standard error is full, closed, or a pipe without a reader."""
    command = f"{sys.executable} -m sbus -s /nonexistent whoami"
    for errors in ("2>/dev/full", "2>&-", "2> >(:)"):
        done = subprocess.run(["bash", "-c", f"trap '' PIPE; sleep 0.05; {command} {errors}"], stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout) == (1, b"")


def test_errors_in_a_full_pipe(world: World) -> None:
    """What is written to a full non-blocking standard error waits for its reader."""
    reader, writer = nonblocking_pipe()
    filled = 0
    try:
        while True:
            filled += os.write(writer, bytes(4096))
    except BlockingIOError:
        pass
    environ = {**os.environ, "SBUS_SOCKET": "/nonexistent"}
    with subprocess.Popen([sys.executable, "-m", "sbus", "whoami"], stderr=writer, env=environ) as process:
        os.close(writer)
        got: list[bytes] = []
        collect(reader, got)
        assert process.wait(TIMEOUT) == 1
    os.close(reader)
    assert b"".join(got)[filled:].startswith(b"sbus: no bus at /nonexistent")


def test_input_in_any_mode(world: World) -> None:
    """Standard input may be non-blocking: a pause in the middle of a line is not its end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    environ = {**os.environ, "SBUS_SOCKET": world.bus.address}
    with world.bus.connect() as subscriber:
        messages = subscriber.subscribe("lines")
        subscriber.fence()
        with subprocess.Popen(
            [sys.executable, "-m", "sbus", "pub", "--lines", "lines"], stdin=reader, env=environ
        ) as process:
            try:
                os.write(writer, b"one\nt")
                assert messages.get(TIMEOUT).payload == b"one"
                os.write(writer, b"wo\n")
                assert messages.get(TIMEOUT).payload == b"two"
                os.close(writer)
                assert process.wait(TIMEOUT) == 0
            finally:
                process.kill()
    os.close(reader)


@pytest.mark.parametrize("command", ["pub k -", "pub --lines k", "pub -j", "request k -"])
def test_input_that_cannot_be_read(world: World, command: str, tmp_path: Path) -> None:
    """An input that is not open for reading is an error that names it."""
    with open(tmp_path / "file", "wb") as file:
        done = ended(world.start(command, file.fileno(), stdin=file.fileno()))
    assert done == (1, "sbus: standard input: Bad file descriptor\n")
    assert not (tmp_path / "file").read_bytes()


def test_error_at_close(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error that only close(2) reports, as network file systems do, is one of the output."""
    sink = streams._Sink(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY), "standard output", is_vital=True)
    sink.write(b"x")
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", fail)
    sink.check_close()
    monkeypatch.undo()
    assert sink.error is not None
    assert (sink.error.errno, sink.error.filename) == (errno.EDQUOT, "standard output")
    os.close(sink.fileno())
