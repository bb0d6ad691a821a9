"""What every daemon does in the same way: descriptors, pid files, logs that others rotate, and signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sbus.syscalls.polling import is_readable
from tests.support.harness import TIMEOUT, Bus, Client, Process, environment_with, run, script, twistd, wait_end
from tests.support.waiting import wait_until

TWISTD = {
    "sbus": ["sbus", "--socket=own"],
    "sbus-recorder": ["sbus-recorder", "--socket=bus", "--journal=journal"],
    "sbus-link": ["sbus-link", "--socket=bus", "--upstream=nowhere"],
    "sbus-queue": ["sbus-queue", "--socket=bus", "--directory=.", "--queue=jobs=jobs/"],
    "sbus-nats": ["sbus-nats", "--socket=bus", "--nats=nats://127.0.0.1:1", "--out=out/"],
}
"""The services of twistd, each with a command line that runs without anything else."""
CLOSED = ["0<&-", "1>&-", "2>&-", "0<&- 1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"]
WEB = """
import sys, sbus.web.process
sbus.web.process.load = dict
sys.argv[1:1] = ["web"]
from sbus.cli import run
run()
"""
"""``sbus web`` without its page, which not every tree has built."""

Start = Callable[..., int]


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Start a daemon by its command, in a shell if redirections are given; return its process ID from ``pid``."""
    file = directory / "pid"

    def begin(command: Sequence[str], redirections: str = "", status: int = 0) -> int:
        if redirections:
            command = redirected(redirections, command)
            assert subprocess.run(command, cwd=directory, env=environment_with({})).returncode == status
        else:
            assert run(command, directory).returncode == status
        return int(file.read_text())

    yield begin
    if file.exists() and (text := file.read_text()):
        os.kill(int(text), signal.SIGKILL)


def as_daemon(name: str, *flags: str) -> list[str]:
    if name == "sbusd":
        return [*script("sbusd"), "-a", "own", "-p", "pid", *flags]
    return [*twistd(), "--pidfile=pid", "--logfile=log", *TWISTD[name], *flags]


def redirected(redirections: str, command: Sequence[str]) -> list[str]:
    """Return a command with redirections, such as ``0<&-``."""
    return ["sh", "-c", f'exec {redirections}; exec "$@"', "sh", *command]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    wait_end(pid)


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        # Both do it in sbus.daemon, so make test has each way with one of them.
        pytest.param(name, closed, marks=[] if number % 2 == quick else pytest.mark.slow)
        for quick, name in enumerate(("sbusd", "sbus"))
        for number, closed in enumerate(CLOSED)
    ],
)
def test_a_bus_with_closed_descriptors(directory: Path, start: Start, name: str, closed: str) -> None:
    """A bus that is started without standard descriptors serves, and /dev/null has their numbers."""
    pid = start(as_daemon(name), closed)
    with Client(directory / "own") as client:
        assert client.sync() == []
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)] == [os.devnull] * 2
    stop(pid)
    assert not (directory / "own").exists()


@pytest.mark.parametrize("closed", [*(pytest.param(each, marks=pytest.mark.slow) for each in CLOSED[:-1]), CLOSED[-1]])
@pytest.mark.slow
def test_a_recorder_with_closed_descriptors(
    bus: Callable[..., Bus], directory: Path, start: Start, closed: str
) -> None:
    """A recorder that is started without standard descriptors records.

    With some of them only, it is slow: twistd starts it as it starts a bus, which is tested with each.
    """
    pytest.importorskip("pyarrow")
    bus()
    pid = start(as_daemon("sbus-recorder"), closed)
    wait_until(lambda: "recording" in (directory / "log").read_text())
    with Client(directory / "bus") as client:
        client.msg(b"closed", b"payload")
        client.sync()
    stop(pid)
    done = run([*script("sbus"), "journal", "cat", "journal"], directory)
    assert "closed" in done.stdout


def test_a_reactor_with_closed_descriptors(directory: Path) -> None:
    """A reactor that twistd has made before the service can do anything is refused, with the remedy."""
    command = [*twistd(), "--reactor=epoll", "--pidfile=", "sbus", "--socket=own"]
    done = run(redirected("0<&-", command), directory)
    assert done.returncode == 1
    assert "redirect them (</dev/null" in done.stderr


@pytest.mark.parametrize(
    ("name", "how"),
    [
        # All daemons share sbus.daemon, so make test has each way with one of them, and each of them with one way.
        pytest.param(name, how, marks=[] if name == "sbus" or how == quick else pytest.mark.slow)
        for name, quick in zip(TWISTD, ("mv", "mv", "rm", "mv", "create"), strict=True)
        for how in ("mv", "rm", "create")
    ],
)
def test_another_program_rotates_the_log(
    bus: Callable[..., Bus], directory: Path, start: Start, name: str, how: str
) -> None:
    """After SIGUSR1 the log is at its path again, when another program has moved or removed it."""
    if name == "sbus-recorder":
        pytest.importorskip("pyarrow")
    if name == "sbus-nats":
        pytest.importorskip("nats")
    bus()
    pid = start(as_daemon(name))
    log = directory / "log"
    (log.unlink if how == "rm" else lambda: log.rename(directory / "log.old"))()
    if how == "create":
        log.touch(0o640)
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: log.exists() and "SIGUSR1: the log goes on here" in log.read_text())
    os.kill(pid, signal.SIGUSR2)
    wait_until(lambda: log.read_text().count("\n") > 1)
    stop(pid)
    assert "Server Shut Down" in log.read_text()
    assert not (directory / "log.1").exists(), "a file that was empty is not rotated"


@pytest.mark.parametrize("name", ["sbusd", "sbus", "sbus-web"])
def test_a_redirected_log_is_rotated(bus: Callable[..., Bus], directory: Path, name: str) -> None:
    """A log that the shell has redirected to a file is at its path again, too."""
    started = bus()
    command = {
        "sbusd": [sys.executable, "-m", "sbus.server.run.sbusd", "-fa", "own"],
        "sbus": [*twistd(), "-n", "sbus", "--socket=own"],
        "sbus-web": [sys.executable, "-c", WEB, f"--socket={started.address}", "--unix=own"],
    }[name]
    log = directory / "log"
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=directory, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        kind = socket.SOCK_STREAM if name == "sbus-web" else socket.SOCK_SEQPACKET
        with socket.socket(socket.AF_UNIX, kind) as probe:
            wait_until(lambda: process.poll() is not None or not probe.connect_ex(str(directory / "own")))
        if name != "sbus-web":
            with Client(directory / "own") as client:
                client.sync()
        log.rename(directory / "old")
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: process.poll() is not None or log.exists())
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)
        assert log.exists()
    finally:
        process.kill()
        process.wait()


def test_the_owner_cannot_make_a_new_log(as_root: None, directory: Path, start: Start) -> None:
    """Without the right to make a new log, after --uid=, the bus says so in the old one, and goes on."""
    directory.chmod(0o755)
    command = as_daemon("sbus")
    command[len(twistd()) : len(twistd())] = ["--uid=65534", "--gid=65534"]
    pid = start(command)
    (directory / "log").rename(directory / "moved")
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1: cannot open the log again: Permission denied" in (directory / "moved").read_text())
    stop(pid)


def test_after_a_drop_of_privileges(as_root: None, directory: Path, start: Start) -> None:
    """A bus that became another user leaves files that it may not remove, and starts again all the same."""
    directory.chmod(0o755)
    command = as_daemon("sbus")
    command[len(twistd()) : len(twistd())] = ["--uid=65534", "--gid=65534"]
    for _ in range(3):
        pid = start(command)
        with Client(directory / "own") as client:
            assert client.sync() == []
        stop(pid)
        assert (directory / "own").exists()
        assert (directory / "pid").read_text() == ""


@pytest.mark.parametrize("name", ["sbusd", *TWISTD])
def test_stale_pid_files(bus: Callable[..., Bus], directory: Path, start: Start, name: str) -> None:
    """A killed daemon starts again with the same pid file, whatever process has its number now; a live one is named."""
    if name == "sbus-recorder":
        pytest.importorskip("pyarrow")
    if name == "sbus-nats":
        pytest.importorskip("nats")
    bus()
    flags = ["-r"] if name == "sbusd" else []
    pid = start(as_daemon(name, *flags))
    second = run(as_daemon(name, *flags), directory)
    assert second.returncode == 1
    assert re.search(f"pid file .*/pid is that of process {pid}, which runs|in use by a server", second.stderr)
    os.kill(pid, signal.SIGKILL)
    wait_end(pid)
    (directory / "pid").write_text(f"{os.getpid()}")
    os.utime(directory / "pid", (1_000_000_000, 1_000_000_000))
    stop(start(as_daemon(name, *flags)))
    assert not (directory / "pid").exists()


def test_no_pid_file_unless_asked_for(bus: Callable[..., Bus], directory: Path, spawn: Callable[..., Process]) -> None:
    """Services of one directory start beside each other, in a directory that nobody may write to."""
    pytest.importorskip("pyarrow")
    bus()
    place = directory / "place"
    place.mkdir()
    (place / "twistd.pid").write_text("1\n")  # that of a container's first process, after a crash
    server = spawn(Process, place, ["-n", "sbus", f"--socket={directory}/own"])
    recorder = spawn(Process, place, ["-n", "sbus-recorder", "--journal=../journal", "--socket=../bus"])
    server.wait_log("listens on")
    recorder.wait_log("recording")
    assert os.listdir(place) == ["twistd.pid"]
    assert (server.stop(), recorder.stop()) == (0, 0)
    assert (place / "twistd.pid").read_text() == "1\n"


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["sbusd", "sbus"])
def test_a_daemon_lets_its_caller_read_to_the_end(directory: Path, start: Start, name: str, kind: str) -> None:
    """A caller that reads the daemon's output to its end does not wait for the daemon: Ansible, ssh, subprocess."""
    reading, writing = os.pipe() if kind == "pipe" else [each.detach() for each in socket.socketpair()]
    try:
        command, environ = as_daemon(name), environment_with({})
        subprocess.run(command, cwd=directory, env=environ, stdout=writing, stderr=writing, check=True)
    finally:
        os.close(writing)
    pid = int((directory / "pid").read_text())
    with open(reading, "rb", buffering=0) as output:
        assert is_readable(output, TIMEOUT)
        assert output.read(100) == b""
    stop(pid)


def test_a_daemon_keeps_a_log(directory: Path, start: Start) -> None:
    """A standard error that is a file stays the daemon's log."""
    pid = start([*as_daemon("sbusd"), "--log-level=debug"], "2>>error")
    with Client(directory / "own") as client:
        client.sync()
    wait_until(lambda: "client 1 connected" in (directory / "error").read_text())
    stop(pid)


def test_default_level(bus: Callable[..., Bus], directory: Path, start: Start) -> None:
    """By default the log has the start and the stop, no clients, and a short prefix before each text."""
    pid = start(as_daemon("sbus"))
    with Client(directory / "own") as client:
        client.sync()
    stop(pid)
    lines = (directory / "log").read_text().splitlines()
    assert any("sbus listens on" in line for line in lines)
    assert not any("connected" in line for line in lines)
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} info: ", line) for line in lines)
