"""Names of users and programs for the numbers of the bus."""

from __future__ import annotations

import functools
import os
import pwd
from collections.abc import Iterable
from typing import Any

__all__ = ["Programs", "user_name"]


@functools.lru_cache(1024)
def user_name(uid: int) -> str:
    """Return the name of a user, or its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


class Programs:
    """The names that the processes of clients give themselves: a hint, since a process chooses its name (proc(5),
    ``comm``).

    Each client is looked up once, when it is first seen: its PID may have another process later.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def add_to(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add ``user`` and ``program`` to rows with ``client``, ``pid`` and ``uid``; forget all other clients."""
        known = {}
        for row in rows:
            number, pid = row.get("client", 0), row.get("pid", 0)
            known[number] = row["program"] = self._known[number] if number in self._known else _comm(pid)
            row["user"] = user_name(row.get("uid", -1))
        self._known = known


def _comm(pid: int) -> str:
    if pid == os.getpid():
        return "sbus web"
    if pid <= 0:
        return ""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(64).rstrip(b"\n").decode("utf-8", "replace")
    except OSError:
        return ""
