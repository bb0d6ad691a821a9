"""Names and numbers of users and processes."""

from __future__ import annotations

import functools
import pwd

__all__ = ["is_number", "program_name", "user_name"]


def is_number(text: str) -> bool:
    """Return whether a text is a UID or a GID rather than a name: a decimal number, possibly too large."""
    return text.isascii() and text.isdigit() and len(text) <= 10


@functools.lru_cache(1024)
def user_name(uid: int) -> str:
    """Return the name of a user; empty if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


def program_name(pid: int) -> str:
    """Return the name that a process gives itself (proc(5), ``comm``); empty if it has ended. It is a hint."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
