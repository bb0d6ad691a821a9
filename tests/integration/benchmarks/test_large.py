"""The benchmark of large messages: two ends of a bus, and of a relay, in turn."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.harness import TIMEOUT


@pytest.mark.slow
def test_it_measures() -> None:
    """Every message arrives, and each way has its line."""
    size = ("--rounds=1", "--secs=0.02", "--sizes", "100000")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "large.py", *size], capture_output=True, text=True, timeout=5 * TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:4] for line in done.stdout.splitlines() if line.startswith("| 100,000")]
    assert [name.strip() for _, name, _ in lines] == ["relay", "sbus"]
    assert all(rate.strip() for *_, rate in lines)
