"""A command that is stopped while it writes a file leaves nothing behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sbus.journal.writer import JournalWriter

EXPORT = """
from sbus.interchange import jsonl
jsonl.write = lambda file, _: file.write(b"half") and stop()
sys.argv = ["sbus", "journal", "export", "--output", "rows.jsonl", "journal"]
from sbus.cli import run
run()
"""
TABLE = """
from sbus.cli.group import LazyGroup
from sbus.cli.tables import open_writer
def invoke(*_):
    with open_writer("rows.csv") as writer:
        writer.write([{"time": 1}])
        stop()
LazyGroup.invoke = invoke
sys.argv = ["sbus", "ping"]
from sbus.cli import run
run()
"""
TWICE = """
unlink = os.unlink
def unlink_later(path):
    stop()
    unlink(path)
def stop_first():
    os.unlink = unlink_later
    stop()
""" + EXPORT.replace("stop()", "stop_first()")
LATE = """
set_handler = signal.signal
def set_later(*arguments):
    signal.signal = set_handler
    stop()
    return set_handler(*arguments)
def stop_late():
    signal.signal = set_later
""" + EXPORT.replace("stop()", "stop_late()")


def run(script: str, name: str, directory: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a script that calls `stop` to send itself a signal."""
    stop = f"import os, signal, sys\ndef stop(): os.kill(os.getpid(), signal.{name})\n"
    command = [*before, sys.executable, "-c", stop + script]
    return subprocess.run(command, cwd=directory, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize("script", [EXPORT, TABLE], ids=["export", "table"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_no_unfinished_file_is_left(script: str, name: str, tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C remove the unfinished file, keep the one that it was to replace, and end the process."""
    JournalWriter.open(tmp_path / "journal").close()
    (tmp_path / "rows.jsonl").write_text("older")
    (tmp_path / "rows.csv").write_text("older")
    done = run(script, name, tmp_path)
    assert (done.returncode, done.stderr) == (-signal.Signals[name], "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "rows.csv", "rows.jsonl"]
    assert {path.read_text() for path in tmp_path.glob("rows.*")} == {"older"}


def test_second_sigterm_does_not_stop_the_removal(tmp_path: Path) -> None:
    """Another SIGTERM while the unfinished file is being removed changes nothing."""
    JournalWriter.open(tmp_path / "journal").close()
    done = run(TWICE, "SIGTERM", tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_sigterm_right_after_the_file_is_in_its_place(tmp_path: Path) -> None:
    """SIGTERM between the end of the block and the old handler ends the process like any other, without a traceback."""
    JournalWriter.open(tmp_path / "journal").close()
    done = run(LATE, "SIGTERM", tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "rows.jsonl"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_first_process_of_a_container_exits_with_the_status_of_the_signal(name: str, tmp_path: Path) -> None:
    """The kernel ignores a signal that PID 1 sends itself: the command exits with 128 plus the signal's number."""
    before = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*before, "true"]).returncode:
        pytest.skip("unshare(1) cannot make a PID namespace here")
    JournalWriter.open(tmp_path / "journal").close()
    done = run(EXPORT, name, tmp_path, *before)
    assert (done.returncode, done.stderr) == (128 + signal.Signals[name], "")
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
