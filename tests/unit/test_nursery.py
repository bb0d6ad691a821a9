"""The processes that tests fork from one that has imported what the scripts import."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.harness import wait_end
from tests.support.nursery import Forked, Piped, run


def test_a_signal_may_come_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can be reaped between the check that it runs and the signal."""
    process = Forked([str(Path(sys.executable).with_name("twistd")), "--version"], tmp_path, os.environ)
    assert process.wait(20.0) == 0
    with process.stdout:
        assert "twistd" in process.stdout.read()
    monkeypatch.setattr(process, "poll", lambda: None)
    process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script; return its path."""

    def write(text: str) -> str:
        path = tmp_path / "script"
        path.write_text(text)
        return str(path)

    return write


def test_a_script_has_its_own_streams_and_descriptors(script: Callable[[str], str], tmp_path: Path) -> None:
    """It reads the input, writes both outputs, has the arguments and the directory, and inherits what it is passed."""
    text = (
        "import os, sys; print(sys.stdin.read(), sys.argv[1], os.getcwd(), os.read(%d, 9)); print(2, file=sys.stderr)"
    )
    reading, writing = os.pipe()
    os.write(writing, b"passed")
    done = run(
        [script(text % reading), "word"], cwd=tmp_path, env=os.environ, stdin=b"in", pass_fds=[reading], timeout=20.0
    )
    os.close(reading)
    os.close(writing)
    assert done.returncode == 0
    assert done.stdout == b"in word %b b'passed'\n" % os.fsencode(tmp_path)
    assert done.stderr == b"2\n"


def test_a_large_input_arrives_whole(script: Callable[[str], str]) -> None:
    """A signal that ends write(2) before all is written loses no input."""
    text = (
        "import fcntl, os, signal, sys, termios\n"
        "while int.from_bytes(fcntl.ioctl(0, termios.FIONREAD, bytes(4)), sys.byteorder) < 65536: pass\n"
        f"os.kill({os.getpid()}, signal.SIGUSR1)\n"
        "print(len(sys.stdin.buffer.read()))\n"
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        done = run([script(text)], env=os.environ, stdin=bytes(1 << 20), timeout=20.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done.stdout == b"1048576\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(3)", 3, b""),
        ("sys.exit()", 0, b""),
        ("sys.exit('why')", 1, b"why\n"),
        ("os.kill(os.getpid(), 9)", -9, b""),
        ("atexit.register(print, 'late', file=sys.stderr)", 0, b"late\n"),
    ],
)
def test_a_script_ends_as_in_a_process_of_its_own(
    script: Callable[[str], str], end: str, status: int, said: bytes
) -> None:
    """Its status, its last words and what it has registered for the end are those of Python."""
    done = run([script(f"import atexit, os, sys; {end}")], env=os.environ, timeout=20.0)
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", said)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # for the pipes of that start
def test_a_start_that_is_given_up(script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that a time limit interrupts does not hand its process to the next one."""

    def give_up(*args: Any) -> None:
        send(*args)
        raise TimeoutError

    path, send = script("import os; print(os.getpid())"), socket.send_fds
    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", give_up)
        with pytest.raises(TimeoutError):
            Piped([path], ".", os.environ)
    child = Piped([path], ".", os.environ)
    assert int(child.communicate(timeout=20.0)[0]) == child.pid


def test_nothing_outlives_its_tester(script: Callable[[str], str]) -> None:
    """A process whose tester is gone ends with the nursery."""
    # Nothing waits for the ten minutes: they end the script should the nursery not.
    path = script("import time; print('begun', flush=True); time.sleep(600)")
    tester = (
        f"import os; from tests.support.nursery import Piped; child = Piped([{path!r}], '.', os.environ, text=True);"
        "child.stdout.readline(); print(child.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", tester], cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    wait_end(int(done.stdout))


def test_an_exception_is_shown(script: Callable[[str], str]) -> None:
    """An exception ends a script with a traceback and the status 1."""
    done = run([script("1 / 0")], env=os.environ, timeout=20.0)
    assert done.returncode == 1
    assert done.stderr.endswith(b"ZeroDivisionError: division by zero\n")


def test_a_script_uses_pythonpath(script: Callable[[str], str], tmp_path: Path) -> None:
    """Modules and plugins of Twisted below ``PYTHONPATH`` are there for it, and for no other script."""
    folder = tmp_path / "packages"
    (folder / "twisted" / "plugins").mkdir(parents=True)
    path = script("import sys, twisted.plugins; print(sys.path, *twisted.plugins.__path__, sep='\\n')")
    done, other = (run([path], env={**os.environ, "PYTHONPATH": value}, timeout=20.0) for value in (str(folder), ""))
    found, *plugins = done.stdout.decode().splitlines()
    assert repr(str(folder)) in found
    assert str(folder / "twisted" / "plugins") in plugins
    assert os.fsencode(folder) not in other.stdout
    assert b"plugins" in other.stdout
