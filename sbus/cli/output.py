"""Output for people: text that cannot harm a terminal, plurals, progress."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

import click

from sbus.errors import SbusError, StorageError
from sbus.journal.keytext import printable

__all__ = [
    "Nothing",
    "Progress",
    "describe_os_error",
    "escape",
    "has_colors",
    "pluralize",
    "printable_text",
    "speaks_utf8",
]


class Nothing(SbusError):
    """The command has found nothing, and exits with status 3."""


_NAMED_ESCAPES = str.maketrans({"\n": "\\n", "\t": "\\t", "\r": "\\r"})


def has_colors() -> bool:
    """Return whether standard output may be coloured (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def speaks_utf8() -> bool:
    """Return whether standard output is encoded in UTF-8."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def escape(data: bytes, *, ascii_only: bool = False) -> str:
    """Return bytes as text that is safe to print and can be converted back.

    Printable UTF-8 is kept. A backslash is doubled; newline, tab and return become ``\\n``, ``\\t``, ``\\r``; every
    other byte becomes ``\\xNN``. The ``%b`` of printf(1) reverses this.

    :param ascii_only: for terminals that do not use UTF-8.
    """
    text = data.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = text.translate(_NAMED_ESCAPES)
    return printable(text, ascii_only=ascii_only)


def printable_text(text: str) -> str:
    """Return text of an answer that is safe to print on this terminal."""
    return printable(text, ascii_only=not speaks_utf8())


def describe_os_error(error: OSError) -> str:
    """Return what the kernel has refused, and why, in one line."""
    if not error.strerror:
        return str(error)
    if not error.filename or isinstance(error.filename, int):
        return error.strerror
    return f"{printable_text(os.fsdecode(error.filename))}: {error.strerror}"


@contextlib.contextmanager
def explained_writing(what: str, path: str, remedy: str, *, only_full: bool = False) -> Iterator[None]:
    """Translate what the kernel refuses in the block to an error with the remedy.

    :param what: what is written, such as ``the report``.
    :param path: where to.
    :param remedy: what to do instead, such as ``name another file``.
    :param only_full: whether to translate only the errors of a full disk, because the block also reads.
    :raises StorageError: for an `OSError`.
    :raises BrokenPipeError: if it is a pipe whose reader has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        if only_full and not is_full:
            raise
        room = "make room there, or " if is_full else ""
        raise StorageError(f"cannot write {what} to {path}: {e.strerror}: {room}{remedy}") from e


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``2,000 rows``, ``3 batches``."""
    if count != 1:
        noun += "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}"


class Progress:
    """A line on standard error that the next one replaces, if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = False

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._is_terminal:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)
            self._is_shown = True

    def clear(self) -> None:
        """Remove the line, so that other output takes its place."""
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._is_shown = False
