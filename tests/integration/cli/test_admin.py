"""The commands of operators, as processes against a real server."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import pwd
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from sbus.admin.pages import Asked, Problem
from sbus.cli.admin.connection import Admin
from sbus.cli.main import cli
from sbus.cli.options import Target
from sbus.server.ops.admin_events import events
from sbus.syscalls.polling import is_readable
from sbus.testing import RunningBus, running_bus
from tests.support.harness import run, script
from tests.support.waiting import wait_until


@contextmanager
def bus_with_admin(directory: Path, **options: Any) -> Iterator[RunningBus]:
    """Run a bus whose admin socket is at the default place."""
    path = str(directory / "bus")
    with running_bus(socket=path, admin=path + ".admin", **options) as bus:
        yield bus


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBus]:
    """A bus for several tests."""
    with bus_with_admin(tmp_path_factory.mktemp("admin")) as running:
        yield running


def environment(bus: RunningBus, **more: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("SBUS_ADMIN", "SBUS_SOCKET")}
    return {**environ, "SBUS_SOCKET": bus.address, **more}


def sbus(bus: RunningBus, *arguments: str, status: int = 0, **environ: str) -> tuple[str, str]:
    """Run a command; return its output and its errors."""
    done = run([*script("sbus"), *arguments], env={"SBUS_ADMIN": None, "SBUS_SOCKET": bus.address, **environ})
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_a_full_backlog(tmp_path: Path) -> None:
    """A command waits for its place if others connect more quickly than the bus accepts."""
    path = str(tmp_path / "admin")
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as other:
        door.bind(path)
        door.listen(0)
        other.connect(path)

        def accept() -> None:
            with door.accept()[0], door.accept()[0] as asked:
                asked.recv(4096)
                asked.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\nConnection: close\r\n\r\n{"is_late": true}')

        late = threading.Timer(0.1, accept)
        late.daemon = True
        late.start()
        assert Admin(Target(), path).get("/v1/status") == {"is_late": True}
        late.join()


@contextmanager
def answering(directory: Path, answer: bytes) -> Iterator[str]:
    """A socket that answers one request with these bytes, and closes; yields its path."""
    path = str(directory / "admin")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()

        def accept() -> None:
            with door.accept()[0] as asked:
                asked.recv(4096)
                asked.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield path
        thread.join()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"Content-Length: 100\r\n\r\n{", "has closed the connection at .* in the middle of its answer: it may have"),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", "in the middle of its answer"),
        (b"Content-Length: 2\r\n\r\n{x", r"is not JSON \(status 200\): name the admin socket"),
    ],
)
def test_part_of_an_answer(tmp_path: Path, answer: bytes, error: str) -> None:
    """If the bus ends while it answers, or the socket belongs to another program, the error is one line."""
    with answering(tmp_path, b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + answer) as path:
        done = run([*script("sbus"), "status", "--admin", path], env={"SBUS_ADMIN": None})
    assert done.returncode == 1
    assert re.fullmatch(f"sbus: .*{error}.*\n", done.stderr)


def test_status(bus: RunningBus) -> None:
    """The figures for people, or the answer of the bus."""
    output, _ = sbus(bus, "status")
    assert "clients" in output
    found = json.loads(sbus(bus, "status", "--json")[0])
    assert found["clients"] >= 0
    assert (
        f"at most {found['limits_per_user']['clients']:,} clients, 200 connections a second, 32,768 patterns" in output
    )


def test_lists(bus: RunningBus) -> None:
    """Clients, patterns and users are tables; each is the bus's answer with --json."""
    with bus.record("lists/*") as _, bus.connect() as publisher:
        publisher.fence()
        found = json.loads(sbus(bus, "clients", "--json", "--sort=patterns")[0])
        number = found["clients"][0]["client"]
        lines = sbus(bus, "clients")[0].splitlines()
        assert lines[0].split()[:4] == ["client", "pid", "uid", "user"]
        me = [str(number), str(os.getpid()), str(os.getuid()), pwd.getpwuid(os.getuid()).pw_name]
        assert any(line.split()[:4] == me for line in lines[1:])
        shown = [line.split()[:4] for line in sbus(bus, "top", "--count=1")[0].splitlines()]
        assert ["client", "pid", "uid", "user"] in shown
        assert me in shown
        assert "lists/*" in sbus(bus, "patterns", "lists/")[0]
        assert "lists/*" in sbus(bus, "patterns", "--client", str(number))[0]
        assert json.loads(sbus(bus, "patterns", "none", "--json")[0])["patterns"] == []
        assert str(os.getuid()) in sbus(bus, "users")[0].splitlines()[1].split()
        assert json.loads(sbus(bus, "users", "--json")[0])["users"]


def test_explain(bus: RunningBus) -> None:
    """It says who would get a message; the status is 3 if none would."""
    with bus.record("explained/*"):
        output, _ = sbus(bus, "explain", "explained/1")
        assert "1 client would get it" in output
        assert "by explained/*" in output
        number = output.partition("+ client ")[2].split()[0]
        output, error = sbus(bus, "explain", "other", "--receiver", number, status=3)
        assert "none of its patterns matches" in output
        output, _ = sbus(bus, "explain", "explained/1/2", "--receiver", number, status=3)
        matched = sbus(bus, "match", "explained/*", "explained/1/2", status=1)[0].splitlines()
        assert [line.strip() for line in output.splitlines()[-4:]] == [line.strip() for line in matched[1:]]
        at = output.splitlines()[-4].index("explained")
        assert output.splitlines()[-1].index("^") - at == len("explained/1")
        assert "nobody would receive it" in error
    _, error = sbus(bus, "explain", "!/bad", status=2)
    assert "reserved" in error


def test_disconnect(bus: RunningBus) -> None:
    """An operator disconnects a client, and the list of closed connections says so; a second time there is none."""
    with bus.record("gone/*"):
        number = sbus(bus, "explain", "gone/1")[0].partition("+ client ")[2].split()[0]
        assert sbus(bus, "disconnect", number)[0] == f"client {number} is disconnected\n"
        for _ in range(50):
            if any(line.split()[0] == number for line in sbus(bus, "clients", "--closed")[0].splitlines()[1:]):
                break
        line = next(each for each in sbus(bus, "clients", "--closed")[0].splitlines() if each.split()[0] == number)
        assert line.endswith("operator")
        _, error = sbus(bus, "disconnect", number, status=1)
        assert f"there is no client {number}" in error


def test_monitor_as_a_member_of_the_admin_group(tmp_path: Path) -> None:
    """The refusal speaks of the command line, and names what such a user may see."""
    with pytest.raises(Problem) as refusal:
        events(mock.Mock(), mock.Mock(), Asked({"monitor": ""}, is_owner=False))
    detail = json.dumps({"detail": str(refusal.value)}).encode()
    with answering(tmp_path, b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(detail), detail)) as path:
        done = CliRunner().invoke(cli, ["monitor", "", "--admin", path])
    assert done.exit_code == 1
    assert done.stderr == (
        "sbus: only root and the server's user may see what is published: run it as one of them, or look at "
        "--unrouted\n"
    )


def test_where_the_socket_is(bus: RunningBus, tmp_path: Path) -> None:
    """A command looks at --admin, then at $SBUS_ADMIN, then at the path of the bus; errors name the remedy."""
    path = bus.address + ".admin"
    assert sbus(bus, "status", "--admin", path, SBUS_ADMIN="/nowhere", SBUS_SOCKET="/nowhere")
    assert sbus(bus, "status", SBUS_ADMIN=path, SBUS_SOCKET="/nowhere")
    assert sbus(bus, "status", "--socket", bus.address, SBUS_ADMIN="/nowhere")
    _, error = sbus(bus, "status", SBUS_ADMIN="/nowhere", status=1)
    assert error == (
        "sbus: no admin socket at /nowhere: No such file or directory: start the bus with --admin, or say where the "
        "socket is (--admin, SBUS_ADMIN)\n"
    )
    assert "give --admin=PATH" in sbus(bus, "status", SBUS_SOCKET="@abstract", status=2)[1]
    assert "append .admin" in sbus(bus, "status", "--admin", bus.address, status=1)[1]


def test_serve_has_an_admin_socket(tmp_path: Path) -> None:
    """``sbus serve`` opens the admin socket beside the bus, and commands find it there; both go with the bus."""
    address = str(tmp_path / "bus")
    command = [sys.executable, "-m", "sbus", "serve", f"--socket={address}"]
    serving = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: os.path.exists(address + ".admin"))
        ask = [sys.executable, "-m", "sbus", "--socket", address, "status", "--json"]
        done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
        assert json.loads(done.stdout)["pid"] == serving.pid
    finally:
        serving.terminate()
        serving.wait(20)
    assert not list(tmp_path.iterdir())


def test_monitor(bus: RunningBus) -> None:
    """Each message comes with its publisher and its receivers; a secret one without its payload."""
    command = [sys.executable, "-m", "sbus", "monitor", "--count=3"]
    running = subprocess.Popen(command, env=environment(bus), stdout=subprocess.PIPE, text=True)
    stop = threading.Event()

    def publish() -> None:
        with bus.connect() as publisher:
            while not stop.wait(0.05):
                publisher.publish("seen/\x1b[31m", b"pay\nload")
                publisher.publish(f"!/cred///{os.getpid()}/hidden", b"secret")

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        output, _ = running.communicate(timeout=30)
    finally:
        stop.set()
        thread.join()
    lines = output.splitlines()
    assert len(lines) == 3
    open_line = next(line for line in lines if "seen/" in line)
    assert "\\x1b[31m" in open_line
    assert "to nobody  pay\\nload" in open_line
    assert f"pid {os.getpid()} uid {os.getuid()}" in open_line
    secret = next(line for line in lines if "seen/" not in line)
    assert "(secret)" in secret
    assert "hidden" not in output


def test_monitor_of_a_link(bus: RunningBus) -> None:
    """Of what a link passes on, the author on the other bus is shown too."""
    command = [sys.executable, "-m", "sbus", "monitor", "--count=1", "linked"]
    running = subprocess.Popen(command, env=environment(bus), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with bus.connect() as link:
        link.control("link/sender", b"5 !/cred/0/0/9/!/cred/100/1000/42")
        while not is_readable(running.stdout, 0.05):
            link.publish("linked", b"x")
    output, _ = running.communicate(timeout=30)
    assert f"pid {os.getpid()} uid {os.getuid()} for client 5 pid 42 uid 1000 of another bus  to " in output


def test_monitor_of_a_bus_that_stops(tmp_path: Path) -> None:
    """The monitor ends with an error when the bus does; with --json each message is a line of JSON."""
    with bus_with_admin(tmp_path) as bus:
        command = [sys.executable, "-m", "sbus", "monitor", "--json", "a/*"]
        running = subprocess.Popen(command, env=environment(bus), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert running.stdout is not None
        with bus.connect() as publisher:
            while not is_readable(running.stdout, 0.05):
                publisher.publish("a/b", b"\xff")
        message = json.loads(running.stdout.readline())
        assert (message["key"], base64.b64decode(message["head"])) == ("a/b", b"\xff")
        sender, publisher = message["sender"], message["publisher"]
        assert (sender["number"], sender["pid"], sender["chain"]) == (publisher["client"], os.getpid(), None)
        assert (sender["gid"], sender["uid"]) == (os.getegid(), os.geteuid())
    _, error = running.communicate(timeout=30)
    assert running.returncode == 1
    assert b"the bus has ended the stream" in error


def test_top_without_a_terminal(bus: RunningBus) -> None:
    """Without a terminal, top prints each update; with --json, a line of JSON with rates."""
    output, _ = sbus(bus, "top", "-n", "1")
    assert "clients" in output
    assert "\x1b" not in output
    lines = sbus(bus, "top", "--json", "-n", "2", "--delay=0.1")[0].splitlines()
    assert json.loads(lines[0])["rates"] == {}
    assert json.loads(lines[1])["rates"]["published"] >= 0


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, bus: RunningBus, *arguments: str, columns: int = 100, lines: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sbus", *arguments],
            env=environment(bus, TERM="xterm", NO_COLOR=""),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until the text is there."""
        end = time.monotonic() + 20
        while text not in self.seen:
            assert time.monotonic() < end, (text, self.seen)
            if is_readable(self._ours, 0.2):
                self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Wait for the end; return the status."""
        while self.process.poll() is None:
            if is_readable(self._ours, 0.1):
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
        if is_readable(self._ours, 0):
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.theirs) == self.before
        os.close(self.theirs)
        os.close(self._ours)
        return self.process.returncode


def test_top_on_a_terminal(bus: RunningBus) -> None:
    """Top takes the screen; keys sort, filter, pause and quit; the terminal is as before at the end."""
    with bus.record("top/*"):
        terminal = Terminal(bus, "top", "--delay=0.2")
        terminal.wait_for("\x1b[?1049h")
        terminal.wait_for("s sort (queue)")
        assert str(os.getpid()) in terminal.seen
        terminal.press("s")
        terminal.wait_for("s sort (lost)")
        terminal.press("/")
        terminal.wait_for("filter: _")
        for key in ("n", "o", "x", "\x7f", "p", "e"):
            terminal.press(key)
        terminal.wait_for("filter: nope_")
        terminal.press("\r")
        terminal.wait_for("(nope; Esc: all)")
        terminal.press(" ")
        terminal.wait_for("PAUSED")
        assert str(os.getpid()) not in terminal.seen.rpartition("\x1b[H")[2]
        terminal.press("\x1b")
        terminal.wait_for(str(os.getpid()))
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.seen.endswith("\x1b[?25h\x1b[?1049l")


def test_top_in_a_small_terminal(bus: RunningBus) -> None:
    """Top never writes more than the terminal has, and stops after -n updates."""
    terminal = Terminal(bus, "top", "-n", "2", "--delay=0.1", columns=30, lines=6)
    assert terminal.end() == 0
    screens = terminal.seen.split("\x1b[H")[1:]
    assert len(screens) == 2
    for screen in screens:
        assert screen.count("\r\n") <= 5


def test_top_ends_on_ctrl_c(bus: RunningBus) -> None:
    """Ctrl-C ends top as a signal does, and leaves the terminal as it was."""
    terminal = Terminal(bus, "top")
    terminal.wait_for("q quit")
    os.kill(terminal.process.pid, 2)
    assert terminal.end() == -2
    assert "\x1b[?1049l" in terminal.seen


@pytest.mark.parametrize("command", ["clients", "top", "web"])
def test_a_path_that_was_forgotten(command: str) -> None:
    """An option behind ``--admin`` is not taken for its path."""
    done = CliRunner().invoke(cli, [command, "--admin", "--json"])
    assert done.exit_code == 2
    assert "'--json' is an option: give a path before it" in done.output
