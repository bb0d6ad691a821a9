"""What a server prints."""

from __future__ import annotations

from tests.support.harness import run, twistd


def output_of(*arguments: str) -> str:
    """Run twistd, which must succeed; return its output."""
    result = run([*twistd(), *arguments], env={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout
