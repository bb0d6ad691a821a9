"""The commands of the tutorial, run in order in real shells, from a bus to a replay."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sbus.errors import SbusError
from sbus.journal.reader import JournalReader
from tests.integration.docs.test_docs import page
from tests.support.waiting import wait_until

TIMEOUT = 300
"""Seconds for a command on a busy machine."""
MESSAGES = 200
"""Messages that the tutorial publishes."""


def blocks() -> Iterator[str]:
    """The commands of the page, from the start of the bus on."""
    text = page("pipeline/1-tutorial.rst")
    text = text[text.index("\nRecord\n") :]
    for found in re.finditer(r"(?:::|\.\. code-block:: \w+)\n\n((?:    .*\n|\n)+)", text):
        yield re.sub("^    ", "", found[1], flags=re.MULTILINE).rstrip("\n") + "\n"


class Shell:
    """Runs commands as a reader would, in a directory in place of /tmp."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "SBUS_SOCKET": str(directory / "tutorial.sock"),
        }

    def start(self, *command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self._directory,
            env=self._environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, text: str = "") -> str:
        """Return the output of a command, which must succeed."""
        running = self.start(*command, stdin=subprocess.PIPE)
        output, _ = running.communicate(text.replace("/tmp/", f"{self._directory}/"), TIMEOUT)
        assert running.returncode == 0, output
        return output


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell; a bus that was started in it ends with the test."""
    yield Shell(tmp_path)
    with (tmp_path / "twistd.pid").open() as file:
        os.kill(int(file.read()), signal.SIGTERM)
    until(lambda: not (tmp_path / "twistd.pid").exists())


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition that other processes bring about."""
    wait_until(is_so, timeout=TIMEOUT, pause=0.05)


def has_rows(journal: Path, number: int) -> bool:
    try:
        return JournalReader(os.fspath(journal)).end() >= number
    except SbusError:
        return False  # it is just being made


@pytest.mark.slow
def test_all_commands(shell: Shell, tmp_path: Path) -> None:
    """Each command does what the page says."""
    bus, publish, look, archive, report, replay, ask, traffic = blocks()
    shell.run("bash", "-e", text=bus)
    assert (tmp_path / "tutorial.sock").is_socket()
    until(lambda: has_rows(tmp_path / "journal", 1))  # the recorder has begun
    shell.run("bash", "-e", text=publish)
    until(lambda: has_rows(tmp_path / "journal", MESSAGES + 1))

    listing, tail = look.splitlines(keepends=True)
    assert f"{MESSAGES + 1}" in shell.run("bash", "-e", text=listing)
    with shell.start("bash", "-c", f"exec {tail}".replace("/tmp/", f"{tmp_path}/")) as following:
        assert following.stdout
        last = [next(following.stdout) for _ in range(10)]
        following.send_signal(signal.SIGINT)
        assert following.wait(TIMEOUT) == -signal.SIGINT
    assert all(re.search(r"sensors/(kitchen|attic)/temperature (21|14)\.\d$", line) for line in last), last

    assert re.search(rf"\b{MESSAGES + 1} rows", shell.run("bash", "-e", text=archive))
    shell.run("bash", "-e", text=report)
    assert "sensors/kitchen/temperature" in (tmp_path / "report.html").read_text().replace("<wbr>", "")

    seen = 0
    with shell.start("bash", "-c", replay.replace("/tmp/", f"{tmp_path}/")) as again:
        assert again.stdout
        for line in again.stdout:
            seen += line.startswith("again/sensors/")
            if seen == MESSAGES:
                break
        assert again.wait(TIMEOUT) == 0
        os.killpg(again.pid, signal.SIGTERM)  # the subscriber, which goes on
    assert seen == MESSAGES

    averages = dict(re.findall(r"\|sensors/(\w+)/temperature *\| *([\d.]+) *\|", shell.run(sys.executable, text=ask)))
    assert {room: float(value) // 1 for room, value in averages.items()} == {"kitchen": 21, "attic": 14}
    assert set(re.findall(r"sensors/(\w+)", shell.run("bash", "-e", text=traffic))) >= {"kitchen", "attic"}
