"""Programs of the documentation, and what they print."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.integration.docs.pages import EXAMPLES
from tests.support import harness
from tests.support.harness import TIMEOUT

COOKBOOK = EXAMPLES / "cookbook"
COMPILER = shutil.which("cc") or shutil.which("gcc")


def run(name: str, *arguments: object, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    command = [*(before or []), sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return harness.run(command, timeout=2 * TIMEOUT)


def output(name: str, *arguments: object, before: list[str] | None = None) -> str:
    """Run an example, which must succeed, and return its output."""
    done = run(name, *arguments, before=before)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout
