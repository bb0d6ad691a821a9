"""Server processes: ready, failed, too slow, stopped and killed; with shell scripts in the place of servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbus.daemon.launcher import ServerProcess, read_log, twistd_command
from sbus.errors import ConnectError, TimedOut
from sbus.server.run.children import supervised_command
from tests.support import ROOT

TIMEOUT = 30.0


@pytest.fixture
def output() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def sh(script: str, output: IO[bytes], *arguments: str | Path) -> ServerProcess:
    """Start a shell script as the server."""
    return ServerProcess("the server", ["sh", "-c", script, "sh", *map(str, arguments)], output)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ready(output: IO[bytes], tmp_path: Path) -> None:
    """The launcher waits until the probe succeeds; what the server prints by then is in its log."""
    socket = tmp_path / "socket"
    server = sh('echo starting; echo trouble >&2; touch "$1"; exec sleep 60', output, socket)
    server.wait_until(socket.exists, TIMEOUT)
    assert server.status is None
    assert read_log(output) == "starting\ntrouble\n"
    assert server.stop(TIMEOUT) == -signal.SIGTERM
    assert is_gone(server.pid)


@pytest.mark.parametrize("service", [twistd_command("sbus"), supervised_command("sbus-recorder")], ids=["bus", "child"])
def test_interrupted_before_it_serves(output: IO[bytes], tmp_path: Path, service: list[str]) -> None:
    """Ctrl-C ends a service that is being imported without a traceback, even if the import ignores exceptions."""
    scripts = tmp_path / "twisted" / "scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "twisted" / "__init__.py").touch()
    (scripts / "twistd.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
def run():
    print("it serves")
""")
    command = ["env", "--default-signal=INT", *service]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=TIMEOUT)
    assert (done.returncode, read_log(output)) == (-signal.SIGINT, "")


def test_exits_at_its_start(output: IO[bytes]) -> None:
    """A server that exits before it is ready is reported at once, with its status and the end of its log."""
    server = sh("echo 'the address is taken'; exit 3", output)
    began = time.monotonic()
    with pytest.raises(
        ConnectError, match=r"the server exited with status 3 at its start; the end of its log:\nthe address is taken$"
    ):
        server.wait_until(lambda: False, TIMEOUT)
    assert time.monotonic() - began < TIMEOUT / 2


def test_prints_nothing(output: IO[bytes]) -> None:
    """A server that exits in silence is reported as such."""
    with pytest.raises(ConnectError, match="exited with status 1 at its start; it printed nothing"):
        sh("exit 1", output).wait_until(lambda: False, TIMEOUT)


def test_too_slow(output: IO[bytes]) -> None:
    """A server that is not ready in time is killed and reported."""
    server = sh("exec sleep 60", output)
    with pytest.raises(ConnectError, match=r"the server did not accept connections within 0\.01 s"):
        server.wait_until(lambda: False, 0.01)
    assert server.status == -signal.SIGKILL


def test_a_probe_that_raises(output: IO[bytes]) -> None:
    """An error of the probe reaches the caller, and the server does not outlive it."""

    def probe() -> bool:
        raise ZeroDivisionError

    server = sh("exec sleep 60", output)
    with pytest.raises(ZeroDivisionError):
        server.wait_until(probe, TIMEOUT)
    assert is_gone(server.pid)


def test_ignores_sigterm(output: IO[bytes], tmp_path: Path) -> None:
    """A server that ignores SIGTERM is killed when the time is up, and that is an error."""
    ready = tmp_path / "ready"
    server = sh("""trap '' TERM; touch "$1"; while :; do sleep 0.01; done""", output, ready)
    server.wait_until(ready.exists, TIMEOUT)
    with pytest.raises(TimedOut, match=r"the server was still running 0\.05 seconds after SIGTERM"):
        server.stop(0.05)
    assert is_gone(server.pid)


def test_the_log_is_cut(output: IO[bytes]) -> None:
    """An error has the end of a long log, and bytes that are not UTF-8 do no harm."""
    server = sh(r"head -c 9000 /dev/zero | tr '\0' x; printf '\377 the end'", output)
    with pytest.raises(ConnectError, match=r"x\\xff the end$") as caught:
        server.wait_until(lambda: False, TIMEOUT)
    assert 4_000 < len(str(caught.value)) < 4_200


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["stop", "kill", "end"]), min_size=1, max_size=4))
def test_any_order_of_ends(steps: list[str]) -> None:
    """However a server is stopped, killed or ends by itself, and however often: it is reaped, its status stays."""
    with tempfile.TemporaryFile() as output:
        server = sh("exec sleep 60", output)
        statuses = []
        for step in steps:
            if step == "stop":
                assert server.stop(TIMEOUT) == server.status
            elif step == "kill":
                server.kill()
            elif server.status is None:
                os.kill(server.pid, signal.SIGKILL)
                os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
            statuses.append(server.status)
        assert statuses[0] in (-signal.SIGTERM, -signal.SIGKILL)
        assert set(statuses) == {statuses[0]}
        assert is_gone(server.pid)


def test_the_command_of_a_service(output: IO[bytes]) -> None:
    """The command runs this interpreter's ``twistd`` in the foreground, and needs no script on the path."""
    server = ServerProcess("twistd", twistd_command("sbus", "--version"), output)
    with pytest.raises(ConnectError, match=r"status 0 at its start; the end of its log:\nsbus \d"):
        server.wait_until(lambda: False, TIMEOUT)


def test_imports() -> None:
    """The launcher and the parsers of values load neither Twisted nor a client."""
    script = "import sys, sbus.daemon.launcher, sbus.daemon.values; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"twisted", "zope"})
    assert "sbus.client" not in loaded


@pytest.mark.parametrize("directory_is_first", [False, True])
def test_nothing_of_the_current_directory_is_run(
    output: IO[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory_is_first: bool
) -> None:
    """A service that is launched runs no file of the current directory that has the name of a module it needs."""
    for name in ("twisted", "zope", "sitecustomize", "signal"):
        (tmp_path / f"{name}.py").write_text("print('hijacked', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    if directory_is_first:
        monkeypatch.syspath_prepend("")
    server = ServerProcess("twistd", twistd_command("sbus", "--version"), output)
    with pytest.raises(ConnectError, match=r"status 0 at its start; the end of its log:\nsbus \d"):
        server.wait_until(lambda: False, TIMEOUT)
    assert "hijacked" not in read_log(output)


def test_every_python_is_started_without_the_current_directory() -> None:
    """Wherever this package starts an interpreter, ``-P`` keeps the current directory off its path."""
    sources = {path: path.read_text() for path in (ROOT / "sbus").rglob("*.py")}
    started = [path for path, text in sources.items() if re.search(r"sys\.executable,", text)]
    assert len(started) >= 4
    assert [path for path in started if re.search(r'sys\.executable,(?! "-P")', sources[path])] == []
