"""Parts of clusters: an interpreter for executors, and what their servers log."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.waiting import wait_until

TIMEOUT = 600.0
"""Seconds for a step of a cluster on a busy machine."""
BROUGHT = (
    "pyarrow",
    "pyspark",
    "py4j",
    "numpy",
    "packaging",
    "six",
    "dateutil",
    "pandas",
    "pytz",
    "tzdata",
    "zstandard",
)


def bare_python(home: Path) -> Path:
    """Make an interpreter in a directory, with Spark and Arrow, and without this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    theirs = next((home / "lib").glob("python*/site-packages"))
    for path in Path(sysconfig.get_path("platlib")).iterdir():
        if re.split(r"[-.]", path.name)[0] in BROUGHT:
            (theirs / path.name).symlink_to(path)
    interpreter = home / "bin/python"
    run = subprocess.run([interpreter, "-c", "import pyarrow, pyspark, sbus"], capture_output=True, text=True, cwd="/")
    assert "No module named 'sbus'" in run.stderr
    return interpreter


def wait_for_log(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """Wait until a process has logged a line that matches; return the group of the pattern."""

    def look() -> re.Match[str] | None:
        ended = process.poll() is not None
        found = re.search(pattern, log.read_text())
        assert found or not ended, log.read_text()
        return found

    found = wait_until(look, timeout=TIMEOUT)
    assert found
    return found[1]
