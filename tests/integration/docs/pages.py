"""Pages of the documentation, and the tables on them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tests.support import ROOT
from tests.support.harness import Process

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@functools.cache
def all_code() -> str:
    return "".join(path.read_text() for path in (ROOT / "sbus").rglob("*.py"))


def rows(text: str, start: str) -> list[list[str]]:
    """Return the body of the first list-table behind `start`, as a text for each cell."""
    table = text[text.index(start) :]
    table = table[table.index("   * - ") :]
    lines = []
    for line in table.splitlines():
        if line and not line.startswith("   "):
            break
        lines.append(line)
    found = re.split(r"^   \* - ", "\n".join(lines), flags=re.MULTILINE)[1:]
    return [[" ".join(cell.split()) for cell in re.split(r"^     -(?: |$)", row, flags=re.MULTILINE)] for row in found]


def literals(cell: str) -> list[str]:
    return re.findall(r"``(.+?)``", cell)


class Script(Process):
    """A process of any command, not only of twistd."""

    def __init__(self, directory: Path, *command: str | Path, env: dict[str, str | None] | None = None) -> None:
        self.launcher = [*map(str, command)]
        super().__init__(directory, [], env=env)
