"""``sbusd`` as a process, used like the original daemon."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from sbus.version import __version__
from tests.integration.cli.commands import command, complaints
from tests.support import nursery
from tests.support.harness import OTHER_USER, TIMEOUT, Client, can_fork, wait_end

USAGE = "usage: sbusd [-a address] [-f | -p pidfile] [-u user] ... [-cgor]\n"

Started: TypeAlias = "subprocess.Popen[str] | nursery.Piped"
Start = Callable[..., Started]


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Start an ``sbusd``; the fixture ends it by its process ID if the test does not."""
    started: list[Started] = []

    def start(*arguments: str | Path, **how: Any) -> Started:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        line = [*command("sbusd"), *arguments]
        process: Started
        if len(command("sbusd")) == 1 and can_fork():
            process = nursery.Piped(line, directory, os.environ, text=True, **(pipes | how))
        else:
            process = subprocess.Popen(line, cwd=directory, text=True, **(pipes | how))
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def output_of(process: Started) -> str:
    """Return its output until it closes standard output, which means that it listens."""
    assert process.stdout is not None
    return process.stdout.read()


def errors_of(process: Started) -> str:
    assert process.stderr is not None
    return complaints(process.stderr.read())


def use(address: str | Path) -> Client:
    """Connect, and make a hundred round trips, as the original's own test does."""
    client = Client(address)
    client.sub(b"test/", b"discard")
    client.unsub(b"discard")
    client.msg(b"discard", b"not caught")
    packets = [client.msg(b"test/%d" % number, b"%d" % number) for number in range(100)]
    assert client.receive(100) == packets
    for number in range(100):
        packet = client.msg(b"test/%d" % number)
        assert client.recv() == packet
    assert not client.has_input()
    return client


def stop(process: Started, number: int = signal.SIGINT) -> None:
    """Stop it by a signal: status 0, and nothing on standard error."""
    process.send_signal(number)
    assert process.wait(TIMEOUT) == 0
    assert errors_of(process) == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_path(start: Start, directory: Path, number: int) -> None:
    """In the foreground it closes standard output when it listens, serves, and leaves no file when it stops."""
    process = start("-f", "-a", "bus")
    assert output_of(process) == ""
    with use(directory / "bus"):
        stop(process, number)
    assert list(directory.iterdir()) == []


def test_log_level(start: Start, directory: Path) -> None:
    """With a lower level than ``warn``, it also logs where it listens."""
    process = start("-f", "-a", "bus", "--log-level=info")
    assert output_of(process) == ""
    with use(directory / "bus"):
        process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    assert process.stderr is not None
    assert "sbus listens on" in process.stderr.read()


ABOUT_TO_SLEEP = """
import ctypes, operator, os, select, sys
from functools import partial

poller = select.epoll

class Poll:
    def __init__(self, *size):
        self.poller = poller(*size)

    def __getattr__(self, name):
        return getattr(self.poller, name)

    def poll(self, timeout, most):
        if 0 <= timeout < 1:
            return self.poller.poll(timeout, most)
        # The interpreter handles signals between its own steps; there is none between these two calls.
        calls = [partial(ctypes.CDLL(None).kill, os.getpid(), {number}), partial(self.poller.poll, timeout, most)]
        return list(map(operator.call, calls))[1]

select.epoll = Poll
from {module} import {function}
sys.exit({function}())
"""
"""A program in which a signal comes whenever the reactor is about to wait for long."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        ("sbus.server.run.sbusd", "main", ["-fa", "bus"]),
        ("twisted.scripts.twistd", "run", ["-n", "--pidfile=", "sbus", "--socket=bus"]),
    ],
    ids=["sbusd", "twistd"],
)
def test_signal_at_the_last_moment(
    directory: Path, number: int, module: str, function: str, arguments: list[str]
) -> None:
    """A signal between the reactor's last step and its sleep stops the process as any other does."""
    program = ABOUT_TO_SLEEP.format(number=int(number), module=module, function=function)
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=directory, check=True, timeout=TIMEOUT)
    assert list(directory.iterdir()) == []


def test_random_abstract_address(start: Start) -> None:
    """A random abstract address is printed with all of its 108 bytes, and accepts connections."""
    process = start("-fa/dev/unix/abstract")
    line = output_of(process)
    prefix, _, digits = line.rstrip("\n").rpartition("/")
    assert prefix == "/dev/unix/abstract"
    assert line.endswith("\n")
    assert len(bytes.fromhex(digits)) == 108
    assert digits.startswith("00")
    with use(line.strip()):
        stop(process)


def test_abstract_address(start: Start) -> None:
    """A given abstract address is padded with NULs, and nothing is printed."""
    name = os.urandom(8).hex()
    process = start("-fa", f"/dev/unix/abstract/00{name}")
    assert output_of(process) == ""
    with use(f"/dev/unix/abstract/00{name}{'00' * 99}"):
        stop(process)


@pytest.mark.parametrize("listening", [True, False], ids=["listening", "bound"])
def test_passed_socket(start: Start, directory: Path, listening: bool) -> None:
    """An inherited socket is served; its path stays, and -g has no effect."""
    with bound_socket(directory / "bus", listening) as passed:
        process = start("-fga", f"/dev/fd/{passed.fileno()}", pass_fds=[passed.fileno()])
    assert output_of(process) == ""
    assert process.stderr is not None
    assert "-g and -o have no effect" in process.stderr.readline()
    with use(directory / "bus"):
        stop(process)
    assert (directory / "bus").exists()


@pytest.mark.parametrize("place", ["stdin", "stdout"])
def test_socket_in_standard_place(start: Start, directory: Path, place: str) -> None:
    """A socket inherited as standard input or output is served, and its descriptor is replaced by /dev/null."""
    with bound_socket(directory / "bus", listening=True) as passed:
        process = start("-fa", f"/dev/fd/{int(place == 'stdout')}", **{place: passed})
    with use(directory / "bus"):
        assert [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (0, 1)] == [os.devnull] * 2
        stop(process)


def bound_socket(path: Path, listening: bool) -> socket.socket:
    passed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed.bind(str(path))
    if listening:
        passed.listen(1)
    return passed


def test_modes(start: Start, directory: Path) -> None:
    """The mode is 0700; -g adds the group, -o others, whatever the umask is."""
    for flags, mode in (("-f", 0o700), ("-fg", 0o770), ("-fo", 0o707), ("-fgo", 0o777)):
        process = start(f"{flags}a", "bus", umask=0o077)
        assert output_of(process) == ""
        assert stat.S_IMODE((directory / "bus").stat().st_mode) == mode
        stop(process)


def test_reuse(start: Start, directory: Path) -> None:
    """-r replaces an empty regular file and a leftover socket, and nothing else; without -r neither is replaced."""
    path = directory / "bus"

    def refused(*arguments: str) -> str:
        process = start("-fa", "bus", *arguments)
        output, errors = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, output) == (1, "")
        assert errors.startswith(f"sbusd: {path} ")
        assert errors.count("\n") == 1
        assert "--" not in errors  # the options of twistd sbus
        return errors

    def taken() -> None:
        process = start("-fra", "bus")
        assert output_of(process) == ""
        with use(path):
            stop(process)
        assert not path.exists()

    path.touch(0)
    assert "is not a socket" in refused()
    taken()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_over:
        left_over.bind(str(path))
    assert "start with -r to replace it" in refused()
    taken()
    path.write_text("x")
    assert "is not a socket" in refused("-r")
    assert path.read_text() == "x"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alive:
        alive.bind(str(path))
        alive.listen()
        assert "choose another address (-a)" in refused("-r")
        Client(path).close()


def test_auto_close(start: Start, directory: Path) -> None:
    """With -c it stops when the last client has left, and not before the first has come."""
    process = start("-fca", "bus")
    assert output_of(process) == ""
    with use(directory / "bus"), Client(directory / "bus") as other:
        other.sync()
    assert process.wait(TIMEOUT) == 0
    assert errors_of(process) == ""
    assert not (directory / "bus").exists()


def test_second_daemon_is_no_client(start: Start, directory: Path) -> None:
    """A second daemon that finds the address in use does not count as a client of the first."""
    process = start("-fca", "bus")
    assert output_of(process) == ""
    second = start("-fca", "bus")
    assert second.wait(TIMEOUT) == 1
    assert "is in use by a server that is running" in errors_of(second)
    Client(directory / "bus").close()
    assert process.wait(TIMEOUT) == 0


def test_signals_while_stopping(start: Start, directory: Path) -> None:
    """Further signals, and the end of the last client, do not disturb an orderly stop."""
    process = start("-fca", "bus")
    assert output_of(process) == ""
    with use(directory / "bus"):
        process.send_signal(signal.SIGTERM)
        stop(process)


def test_signal_at_start(start: Start, directory: Path) -> None:
    """A signal that arrives before it serves also stops it cleanly."""
    process = start("-fa", "bus")
    output_of(process)
    stop(process, signal.SIGTERM)
    assert not (directory / "bus").exists()


def test_users(start: Start, directory: Path, as_root: None) -> None:
    """With -u only those users, by name or UID, and the daemon's own may connect."""
    process = start("-foa", "bus", "-u", str(OTHER_USER[0]), "-u", "nobody")
    output_of(process)
    directory.chmod(0o755)
    with use(directory / "bus"), Client(directory / "bus", user=OTHER_USER) as other:
        assert other.sync() == []
        with Client(directory / "bus", user=(12003, 12003)) as refused:
            assert refused.has_ended()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0
    assert "refused a connection from pid" in errors_of(process)


def test_clients_of_users(start: Start, directory: Path, as_root: None) -> None:
    """With --user-clients a user has as many clients as for all, or as its own option says; standard error says why."""
    process = start("-foa", "bus", "--user-clients=1", f"--user-clients={OTHER_USER[0]}=2")
    output_of(process)
    directory.chmod(0o755)
    for user, most in ((OTHER_USER, 2), ((12003, 12003), 1)):
        with contextlib.ExitStack() as clients:
            for _ in range(most):
                assert clients.enter_context(Client(directory / "bus", user=user)).sync() == []
            assert clients.enter_context(Client(directory / "bus", user=user)).has_ended()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0
    errors = errors_of(process)
    assert "(--user-clients=12001=2)" in errors
    assert "(--user-clients=1)" in errors


@pytest.mark.parametrize(
    "arguments",
    [["-x"], ["-a"], ["-p"], ["-u"], ["extra"], ["-f", "--", "extra"], ["--nonsense"], ["-fa", "bus", "-z"]],
    ids=" ".join,
)
def test_usage(start: Start, arguments: list[str]) -> None:
    """A wrong command line prints the original's usage, with status 1."""
    process = start(*arguments)
    assert process.communicate(timeout=TIMEOUT) == ("", USAGE)
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--log-level=loud"], "--log-level=loud: use debug or info or warn"),
        (["-u", "no-such-user"], "-u no-such-user: there is no such user"),
        (["-u", "1" * 5000], "there is no such user"),
        (["-a", "/nonexistent/bus"], "make the directory /nonexistent first, or choose another address (-a)"),
        (["-fa", "/dev/fd/77"], "descriptor 77 is not an open socket"),
        (["-fa", "x" * 200], "at most 107"),
        (["-a", "bus", "-p", "/nonexistent/pid"], "cannot write the pid file /nonexistent/pid: No such file"),
    ],
)
def test_cannot_start(start: Start, directory: Path, arguments: list[str], said: str) -> None:
    """An error at the start is reported in one line on standard error, also before it becomes a daemon; status 1."""
    process = start(*arguments)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, output) == (1, "")
    assert errors.startswith("sbusd: ")
    assert said in errors
    assert errors.count("\n") == 1
    assert list(directory.iterdir()) == []


# --- as a daemon ----------------------------------------------------------------------------------


@pytest.fixture
def daemon(start: Start, directory: Path) -> Iterator[Callable[..., int]]:
    """Start a daemon and return its process ID; the file ``error`` has its standard error."""
    pids = []

    def daemon(*arguments: str) -> int:
        with (directory / "error").open("w") as errors:
            process = start("-a", "bus", "-p", "pid", *arguments, stderr=errors)
        assert output_of(process) == ""
        assert process.wait(TIMEOUT) == 0
        pid = int((directory / "pid").read_text())
        pids.append(pid)
        return pid

    yield daemon
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        wait_end(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_daemon(daemon: Callable[..., int], directory: Path, number: int) -> None:
    """The command exits once the daemon serves; a signal stops the daemon and removes all of its files."""
    pid = daemon()
    with Client(directory / "bus") as client:
        assert peer_pid(client) == pid
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(status[3]) not in (
        pid,
        os.getsid(0),
    )  # neither a session leader, which could acquire a terminal, nor in this session
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)] == [os.devnull] * 2
    assert stat.S_IMODE((directory / "pid").stat().st_mode) == 0o644
    with use(directory / "bus"):
        os.kill(pid, number)
        wait_end(pid)
    assert [path.name for path in directory.iterdir()] == ["error"]
    assert complaints((directory / "error").read_text()) == ""


def test_daemon_ignores_hangup(daemon: Callable[..., int], directory: Path) -> None:
    """A daemon ignores SIGHUP."""
    pid = daemon()
    os.kill(pid, signal.SIGHUP)
    use(directory / "bus").close()
    os.kill(pid, signal.SIGTERM)
    wait_end(pid)
    assert not (directory / "pid").exists()


def test_pid_file(daemon: Callable[..., int], start: Start, directory: Path) -> None:
    """An existing pid file is refused; -r replaces it if it names a process that has ended."""
    first = daemon()
    os.kill(first, signal.SIGKILL)
    wait_end(first)

    def refused(*arguments: str) -> None:
        process = start("-a", "other", "-p", "pid", *arguments)
        assert "the pid file" in process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 1
        assert not (directory / "other").exists()

    refused()
    second = daemon("-r")
    assert second != first
    refused("-r")
    os.kill(second, signal.SIGTERM)
    wait_end(second)
    (directory / "pid").write_text("not a number")
    refused("-r")


def test_no_pid_file(start: Start, directory: Path) -> None:
    """/dev/null means no pid file; -c stops the daemon."""
    process = start("-ca", "bus", "-p", "/dev/null")
    assert output_of(process) == ""
    assert process.wait(TIMEOUT) == 0
    client = use(directory / "bus")
    pid = peer_pid(client)
    client.close()
    wait_end(pid)
    assert list(directory.iterdir()) == []
    assert Path("/dev/null").is_char_device()


def peer_pid(client: Client) -> int:
    """Return the process ID of the listener at the other end."""
    return int.from_bytes(client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")


def test_closed_descriptors(directory: Path) -> None:
    """When it starts with closed standard descriptors, its sockets do not take their numbers."""
    with bound_socket(directory / "bus", listening=True) as passed:
        number = passed.fileno()
        script = f'exec "$@" -fa /dev/fd/{number} <&- >&- 2>&-'
        process = subprocess.Popen(["sh", "-c", script, "sh", *command("sbusd")], pass_fds=[number])
    try:
        with use(directory / "bus"):
            assert [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)] == [os.devnull] * 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version(option: str) -> None:
    """``--help`` and ``--version`` print what they promise on standard output, and succeed."""
    command = [sys.executable, "-m", "sbus.server.run.sbusd", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
    if option == "--version":
        assert done.stdout == f"sbus {__version__}\n"
    else:
        described = set(re.findall(r"^  (-\w) ", done.stdout, re.MULTILINE))
        assert done.stdout.startswith("usage: sbusd [-a address]")
        assert described == {f"-{letter}" for letter in "acfgopru"}
