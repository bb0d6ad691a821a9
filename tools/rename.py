"""Apply the table of renames, tools/renames.txt, to the tree; or check that no old name is left.

    python tools/rename.py            # rewrite the files in place
    python tools/rename.py --check    # print each old name that is left; the exit status is 1 if there is one

Each row of the table is ``KIND OLD NEW``, and applies to the files named by the last ``in`` row above it (paths and
glob patterns). What OLD must be to count:

module   a dotted module name, in every text file
word     a whole word: in code, strings, comments and prose
name     an identifier in code, or a word in double or single backticks
func     an identifier in code that is not an attribute
attr     an attribute or a method: ``.old``, ``def old``, ``"old"`` in a ``__slots__``, or the same in backticks

``word`` is for names that are no English words, ``name`` and ``attr`` for those that are.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "renames.txt"
_TEXT = (".py", ".pyi", ".pyx", ".rst", ".toml", ".txt", ".inc", ".service")
_SKIPPED = ("tools/rename", "changes/", "CHANGELOG.rst", "docs/performance/")
_STRING = r"(?P<string>[rbf]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'))"
_CODE = re.compile(rf"{_STRING}|(?P<comment>#[^\n]*)|(?P<name>[A-Za-z_]\w*)", re.ASCII)
_QUOTED = re.compile(r"(``[^`]+``|`[^`]+`)")
_FIELD = re.compile(r"\{[^{}]*\}")
_FOREIGN = ("_future", "defer", "pytest", "asyncio", "threading", "signal", "subprocess", "os", "shutil", "time")
"""Modules whose attributes belong to other projects."""


class Row(NamedTuple):
    kind: str
    old: str
    new: str
    scope: tuple[str, ...]

    def covers(self, path: str) -> bool:
        return any(path == s or path.startswith(s + "/") or fnmatch.fnmatch(path, s) for s in self.scope)


def read_table(text: str) -> Iterator[Row]:
    scope: tuple[str, ...] = ()
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["in"]:
            scope = tuple(words[1:])
        elif words:
            kind, old, new = words
            yield Row(kind, old, new, ("*",) if kind == "module" else scope)


def rewrite(path: str, text: str, rows: list[Row]) -> str:
    """The text of a file with every row that covers it applied, all in one pass: names may trade places."""
    by_kind = {
        kind: {row.old: row.new for row in rows if row.kind == kind}
        for kind in ("module", "word", "name", "func", "attr")
    }
    everywhere = by_kind["module"] | by_kind["word"]
    if everywhere:
        olds = "|".join(map(re.escape, sorted(everywhere, key=len, reverse=True)))
        text = re.sub(rf"(?<!\w)({olds})(?!\w)", lambda m: everywhere[m[1]], text)
    names, funcs, attrs = by_kind["name"], by_kind["func"], by_kind["attr"]
    quoted = names | funcs | attrs
    if not quoted:
        return text
    if not path.endswith((".py", ".pyi", ".pyx")):
        return _in_backticks(text, quoted)

    def code(match: re.Match[str]) -> str:
        token = match[0]
        if match["string"]:
            if token[1:-1] in quoted and _is_listed(text, match):
                return token[0] + quoted[token[1:-1]] + token[-1]
            if "f" in token[:2]:
                return _FIELD.sub(lambda field: _CODE.sub(code, field[0]), token)
            return _in_backticks(token, quoted)
        if match["comment"]:
            return _in_backticks(token, quoted)
        before = text[max(0, match.start() - 40) : match.start()]
        if before.endswith(tuple(f"{module}." for module in _FOREIGN)):
            return token
        if token in attrs and (before.endswith(".") or before.endswith("def ")):
            return attrs[token]
        if token in funcs and not before.endswith("."):
            return funcs[token]
        return names.get(token, token)

    return _CODE.sub(code, text)


def _is_listed(text: str, match: re.Match[str]) -> bool:
    """Whether a string is an item of ``__slots__`` or ``__all__``."""
    lists = [
        (text.rfind(f"{name} = ", 0, match.start()), close) for name, close in (("__slots__", ")"), ("__all__", "]"))
    ]
    return any(start >= 0 and close not in text[start : match.start()] for start, close in lists)


def _in_backticks(text: str, names: dict[str, str]) -> str:
    return _QUOTED.sub(lambda q: re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m[0], m[0]), q[0]), text)


def main() -> int:
    check = "--check" in sys.argv[1:]
    rows = list(read_table(TABLE.read_text()))
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    left = 0
    for path in sorted(set(listed.stdout.split("\n"))):
        if path.startswith(_SKIPPED) or not (path.endswith(_TEXT) or path in ("Makefile", ".ci/run")):
            continue
        if not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text()
        new = rewrite(path, text, [row for row in rows if row.covers(path)])
        if new == text:
            continue
        left += 1
        if check:
            for number, (was, is_) in enumerate(zip(text.splitlines(), new.splitlines(), strict=True), 1):
                if was != is_:
                    print(f"{path}:{number}: an old name (tools/renames.txt): {was.strip()}")
        else:
            (ROOT / path).write_text(new)
    return 1 if check and left else 0


if __name__ == "__main__":
    sys.exit(main())
