"""The lines of a TOML file: `tomllib` returns values without their places, and an error has to name one.

The text has been parsed before, so it is valid, and finding places needs no more than its tokens: strings, comments,
brackets, and what stands between them. A newline within a string or within brackets does not end a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["Places"]

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # a multi-line string may end with two quotes of its own
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}\n=.]"
    r"|[^\s\[\]{}=.,\"'\#]+",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)")
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r"}


class Places:
    """Where the tables of a file begin, and the keys in them.

    :ivar top: key → line, of what stands before the first header. The keys of ``[name]`` are no part of it.
    :ivar tables: name of an array of tables → one dictionary for each ``[[name]]``: key → line. The key ``""`` is the
        header itself; a key of several parts counts by its first one.
    """

    def __init__(self, text: str) -> None:
        self.top: dict[str, int] = {}
        self.tables: dict[str, list[dict[str, int]]] = {}
        here = self.top
        for line, path, brackets in _statements(text):
            if not brackets:
                here.setdefault(path[0], line)
            elif brackets == 2 and len(path) == 1:
                here = {"": line}
                self.tables.setdefault(path[0], []).append(here)
            else:
                owner = self.tables[path[0]][-1] if path[0] in self.tables else self.top
                owner.setdefault(path[1] if owner is not self.top else path[0], line)
                here = {}


def _statements(text: str) -> Iterator[tuple[int, list[str], int]]:
    """Yield the line, the parts of the key, and the brackets of each header (1 or 2) and each assignment (0)."""
    line = 1
    depth = brackets = 0
    path: list[str] = []
    is_value = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        first = token[0]
        if first == "\n":
            line += 1
            if not depth:
                if brackets:
                    yield line - 1, path, brackets
                path, brackets, is_value = [], 0, False
        elif first in "[{":
            if is_value:
                depth += 1
            else:
                brackets += 1
        elif first in "]}":
            depth -= is_value
        elif is_value:
            line += token.count("\n")
        elif first == "=":
            yield line, path, 0
            is_value = True
        elif first not in "#.":
            path.append(_name(token))
    if brackets:
        yield line, path, brackets


def _name(token: str) -> str:
    """Return the key that a token stands for."""
    if token[0] == "'":
        return token[1:-1]
    if token[0] == '"':
        return _ESCAPE.sub(_unescape, token[1:-1])
    return token


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(match[3], match[3])
