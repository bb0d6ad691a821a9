"""The benchmark of policies: it loads one, and reloads it beside round trips."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.harness import TIMEOUT


@pytest.mark.slow
def test_it_measures(as_root: None) -> None:
    """It prints what loading takes, and the longest round trip of each reload."""
    size = ("--rules=20", "--clients=3", "--patterns=30", "--reloads=2", "--seconds=0.7")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "policy.py", *size], capture_output=True, text=True, timeout=5 * TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert re.fullmatch(r"to load 20 rules: \d\.\d\d s \(median of 3\)", first)
    assert re.fullmatch(r"until it is in force: \d\.\d\d s \(median of 2\)", second)
    assert re.search(r" of 2 reloads; [\d.]+ before each: [\d.]+ [\d.]+$", third)
