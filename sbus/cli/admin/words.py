"""Figures for people: spans of time, sizes, and the rows of tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import click

from sbus.cli.output import printable_text
from sbus.cli.tables import format_table
from sbus.syscalls.names import user_name

__all__ = ["echo_table", "format_ago", "format_bytes", "format_span", "name_of"]

_NAMES = {-1: "(recorder)", -2: "(link)", -3: "(services)"}
"""Users of the server's own processes (`sbus.server.core.users`), by UID."""


def format_span(seconds: float) -> str:
    """Return a span of time with its two largest units, such as ``3h 20m``."""
    rest = int(max(seconds, 0))
    days, rest = divmod(rest, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def format_ago(at: float) -> str:
    """Return the span of time since a moment."""
    return format_span(time.time() - at)


def format_bytes(size: float) -> str:
    """Return a size with a binary unit, such as ``1.5 MiB``."""
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while abs(size) >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def name_of(uid: int) -> str:
    """Return the name of a user, or nothing if it has none."""
    return _NAMES.get(uid, "") if uid < 0 else user_name(uid)


def echo_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows under the names of their columns.

    :param columns: for each column its side, ``<`` or ``>``.
    """
    cells = [list(columns), *([_cell(row[name]) for name in columns] for row in rows)]
    for line in format_table(cells, "".join(columns.values())):
        click.echo(line)


def _cell(value: object) -> str:
    return "-" if value in (None, "", []) else printable_text(str(value))
