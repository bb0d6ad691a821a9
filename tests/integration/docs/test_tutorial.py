"""The commands of the tutorial that need no Spark, run in order in real shells, from a bus to a replay."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.spark.test_tutorial import MESSAGES, TIMEOUT, Shell, blocks, record
from tests.spark.test_tutorial import shell as shell


@pytest.fixture(autouse=True)
def _no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing finds Java."""
    monkeypatch.setenv("JAVA_HOME", os.devnull)


@pytest.mark.slow
def test_without_spark(shell: Shell, tmp_path: Path) -> None:
    """Each command does what the page says, where Java cannot be found."""
    record(shell, tmp_path)
    *_, look = blocks("Record", "Archive and report")
    listing, tail = look.splitlines(keepends=True)
    assert f"{MESSAGES + 1}" in shell.run("bash", "-e", text=listing)
    with shell.start("bash", "-c", f"exec {tail}".replace("/tmp/", f"{tmp_path}/")) as following:
        assert following.stdout
        last = [next(following.stdout) for _ in range(10)]
        following.send_signal(signal.SIGINT)
        assert following.wait(TIMEOUT) == -signal.SIGINT
    assert all(re.search(r"sensors/(kitchen|attic)/temperature (21|14)\.\d$", line) for line in last), last

    archive, report = blocks("Archive and report", "Replay")
    assert re.search(rf"\b{MESSAGES + 1} rows", shell.run("bash", "-e", text=archive))
    shell.run("bash", "-e", text=report)
    assert "sensors/kitchen/temperature" in (tmp_path / "report.html").read_text().replace("<wbr>", "")

    [replay] = blocks("Replay", "With Spark")
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
