"""Patterns on the command line: each command refuses what is forbidden, and reports what matches no key."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from sbus.protocol.keys import CURRENT, Dialect

if TYPE_CHECKING:
    from sbus.protocol.explain import Mismatch

__all__ = ["RECORDED_PATTERN", "show_mismatch", "warn_of_impossible"]


def warn_of_impossible(patterns: Iterable[bytes], dialect: Dialect = CURRENT) -> None:
    """Report patterns that no key can match, or with other systems' wildcards, on standard error; they are allowed."""
    from sbus.protocol.explain import hints

    for line in hints(patterns, dialect):
        click.echo(f"sbus: {line}", err=True)


def show_mismatch(pattern: bytes, key: bytes, mismatch: Mismatch) -> list[str]:
    """Return four lines: the pattern and the key, each with a caret under the place where matching stops."""
    from sbus.cli.output import escape

    return [
        line
        for text, at in ((pattern, mismatch.pattern_at), (key, mismatch.key_at))
        for line in (escape(text), " " * len(escape(text[:at])) + "^")
    ]


class _RecordedPattern(click.ParamType[bytes]):
    """A pattern that selects recorded messages, byte for byte.

    A forbidden or secret one is an error, as for the recorder.
    """

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        from sbus.protocol.recorded import check_recorded

        pattern = os.fsencode(value)
        check_recorded(pattern)
        if ctx is None or not ctx.resilient_parsing:
            warn_of_impossible([pattern])
        return pattern


RECORDED_PATTERN = _RecordedPattern()
