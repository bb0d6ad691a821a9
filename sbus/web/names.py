"""Names of users and programs for the numbers of the bus."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from sbus.syscalls import names

__all__ = ["Programs", "user_name"]


def user_name(uid: int) -> str:
    """Return the name of a user, or its number if it has none."""
    return names.user_name(uid) or str(uid)


class Programs:
    """The names that the processes of clients give themselves.

    Each client is looked up once, when it is first seen: its PID may have another process later.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def add_to(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add ``user`` and ``program`` to rows with ``client``, ``pid`` and ``uid``; forget all other clients."""
        known = {}
        for row in rows:
            number, pid = row.get("client", 0), row.get("pid", 0)
            known[number] = row["program"] = self._known[number] if number in self._known else _program(pid)
            row["user"] = user_name(row.get("uid", -1))
        self._known = known


def _program(pid: int) -> str:
    return "sbus web" if pid == os.getpid() else names.program_name(pid)
