"""The helpers with which tests wait: a process that stands still."""

from __future__ import annotations

import signal
import subprocess

from tests.support.waiting import paused


def test_paused_process_may_end() -> None:
    """The body may end the process and collect its status."""
    process = subprocess.Popen(["sleep", "60"])
    with paused(process.pid):
        process.kill()
        assert process.wait(timeout=20.0) == -signal.SIGKILL
