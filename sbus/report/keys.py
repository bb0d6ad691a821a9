"""Patterns that select recorded keys, which are text."""

from __future__ import annotations

from collections.abc import Callable

from sbus.errors import UsageError
from sbus.journal.keytext import as_text, from_text, printable
from sbus.protocol.keys import OpenPattern
from sbus.protocol.recorded import check_recorded

__all__ = ["checked_pattern", "key_filter"]


def key_filter(pattern: bytes | str) -> Callable[[str], bool] | None:
    """Return a function that says of a key, as text, whether a pattern matches it; None if every key matches.

    :raises sbus.errors.UsageError: as `checked_pattern` does.
    """
    pattern = checked_pattern(pattern)
    if not pattern:
        return None
    matches = OpenPattern(pattern).matches
    return lambda key: matches(from_text(key))


def checked_pattern(pattern: bytes | str) -> bytes:
    """Return a pattern that selects recorded messages, as bytes.

    :raises sbus.errors.UsageError: if the pattern is invalid, selects secrets, which are never recorded, or is not
        UTF-8.
    """
    if isinstance(pattern, str):
        pattern = pattern.encode("utf-8", "surrogateescape")
    check_recorded(pattern)
    try:
        pattern.decode()
    except UnicodeDecodeError:
        # Such a pattern could end inside a character, and the text of a matching key need not begin with its text.
        raise UsageError(f"the pattern {printable(as_text(pattern))} is not text (UTF-8): use one that is") from None
    return pattern
