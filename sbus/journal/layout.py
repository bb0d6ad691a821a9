"""Which files a journal has, and what their names tell: the order, first row and time of every segment."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

from sbus.errors import JournalError
from sbus.journal.schema import FORMAT

__all__ = [
    "ARROWS",
    "CLOSED",
    "IDENTITY",
    "INDEX",
    "LOCK",
    "Segment",
    "identity",
    "is_journal",
    "list_segments",
    "read_object",
]

IDENTITY = "journal.json"
LOCK = "lock"
ARROWS, INDEX, CLOSED = ".arrows", ".idx", ".json"
"""The three files of a segment."""

_BASE = re.compile(r"(\d{16})-(\d{16})")


class Segment(NamedTuple):
    """A segment, as its names tell.

    :ivar directory: of the journal.
    :ivar first_seq: of its first row, whether that may be read yet or not.
    :ivar first_time: when that row was written, µs since 1970.
    :ivar closed: whether it is closed; a closed segment never changes.
    """

    directory: str
    first_seq: int
    first_time: int
    closed: bool

    @property
    def name(self) -> str:
        return f"{self.first_seq:016}-{self.first_time:016}"

    def path(self, suffix: str = ARROWS) -> str:
        return os.path.join(self.directory, self.name + suffix)

    @classmethod
    def named(cls, directory: str, name: str, *, closed: bool) -> Segment | None:
        """The segment of this base name, or None if it is not one of a segment."""
        match = _BASE.fullmatch(name)
        return cls(directory, int(match[1]), int(match[2]), closed) if match else None


def list_segments(directory: str) -> list[Segment]:
    """The segments of a journal, oldest first; nothing but the directory is read.

    :raises JournalError: if it is not there.
    """
    # A segment that is closed while its directory is read may be missed as closed, but never as a segment.
    names = _names(directory)
    present = set(names)
    found = [
        segment
        for name in names
        if name.endswith(ARROWS)
        and (base := name.removesuffix(ARROWS))
        and (segment := Segment.named(directory, base, closed=base + CLOSED in present))
    ]
    found.sort()
    return found


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise JournalError(f"{directory}: there is no such journal") from None


def is_journal(directory: str) -> bool:
    """Whether there is a journal in this directory."""
    return os.path.exists(os.path.join(directory, IDENTITY))


def identity(directory: str) -> str:
    """The id of the journal in a directory.

    :raises JournalError: if there is none, or one that this version cannot read.
    """
    path = os.path.join(directory, IDENTITY)
    try:
        told = read_object(path)
    except FileNotFoundError:
        raise JournalError(
            f"{directory}: this is no journal (it has no {IDENTITY}): name the directory that the recorder writes"
        ) from None
    if told.get("format") != FORMAT:
        raise JournalError(
            f"{directory}: a journal of format {told.get('format')!r}, but this version of sbus knows {FORMAT} only"
        )
    if not isinstance(told.get("id"), str):
        raise JournalError(f"{path}: it names no journal id: restore it from a copy")
    return str(told["id"])


def read_object(path: str) -> dict[str, Any]:
    """The JSON object in a file.

    :raises FileNotFoundError: if there is no such file.
    :raises JournalError: if it holds something else.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        told = json.loads(data)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise JournalError(f"{path}: it is damaged (no JSON object): restore it from a copy")
    return told
