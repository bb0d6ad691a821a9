"""The commands of the tutorial that need Spark; `tests.integration.docs.test_tutorial` runs those that do not."""

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
from tests.integration.docs.pages import page
from tests.support.waiting import wait_until

TIMEOUT = 400
"""Seconds for a command on a busy machine, such as one that starts three Java machines on two cores."""
MESSAGES = 40
"""Messages that the tutorial publishes."""


def blocks(start: str, end: str | None = None) -> list[str]:
    """Return the commands of the page from one heading to before another."""
    text = page("pipeline/1-tutorial.rst")
    text = text[text.index(f"\n{start}\n") : None if end is None else text.index(f"\n{end}\n")]
    found = re.findall(r"(?:::|\.\. code-block:: \w+)\n\n((?:    .*\n|\n)+)", text)
    return [re.sub("^    ", "", block, flags=re.MULTILINE).rstrip("\n") + "\n" for block in found]


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


def record(shell: Shell, directory: Path) -> None:
    """Start the bus of the page, and publish its messages; each is then in the journal."""
    bus, publish, _ = blocks("Record", "Archive and report")
    shell.run("bash", "-e", text=bus)
    assert (directory / "tutorial.sock").is_socket()
    shell.run("bash", "-e", text=publish)
    until(lambda: has_rows(directory / "journal", MESSAGES + 1))


@pytest.mark.slow
def test_with_spark(shell: Shell, tmp_path: Path) -> None:
    """Spark reads the journal and the lake of the page as it says."""
    record(shell, tmp_path)
    archive, _ = blocks("Archive and report", "Replay")
    shell.run("bash", "-e", text=archive)
    [ask] = blocks("Query", "Measure")
    averages = dict(re.findall(r"\|sensors/(\w+)/temperature *\| *([\d.]+) *\|", shell.run(sys.executable, text=ask)))
    assert {room: float(value) // 1 for room, value in averages.items()} == {"kitchen": 21, "attic": 14}
    [traffic] = blocks("Measure")
    assert set(re.findall(r"sensors/(\w+)", shell.run("bash", "-e", text=traffic))) >= {"kitchen", "attic"}
