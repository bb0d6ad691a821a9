"""A command that is stopped while it writes a file leaves nothing behind."""

from __future__ import annotations

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
from sbus.cli.tables import open_writer
with open_writer("rows.csv") as writer:
    writer.write([{"time": 1}])
    stop()
"""


@pytest.mark.parametrize("script", [EXPORT, TABLE], ids=["export", "table"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_no_unfinished_file_is_left(script: str, name: str, tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C remove the unfinished file, keep the one that it was to replace, and end the process."""
    JournalWriter.open(tmp_path / "journal").close()
    (tmp_path / "rows.jsonl").write_text("older")
    (tmp_path / "rows.csv").write_text("older")
    stop = f"import os, signal, sys\ndef stop(): os.kill(os.getpid(), signal.{name})\n"
    done = subprocess.run([sys.executable, "-c", stop + script], cwd=tmp_path, timeout=60)
    assert done.returncode == -signal.Signals[name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "rows.csv", "rows.jsonl"]
    assert {path.read_text() for path in tmp_path.glob("rows.*")} == {"older"}
