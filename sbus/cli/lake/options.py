"""Options of several commands of ``sbus lake``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sbus.distribution import needs

if TYPE_CHECKING:
    from sbus.lake.table import Table

__all__ = ["lake_argument", "open_lake"]

F = TypeVar("F", bound=Callable[..., Any])


def lake_argument(command: F) -> F:
    """Give a command the lake, and the option ``--state``."""
    command = click.option(
        "--state",
        metavar="DIR",
        help="State directory of a lake in object storage.  [default: below ~/.local/state/sbus]",
    )(command)
    return click.argument("location", metavar="LAKE")(command)


def open_lake(location: str, state: str | None) -> Table:
    """Open a lake that exists.

    :raises sbus.errors.LakeError: if there is none.
    """
    with needs("recorder"):
        from sbus.lake.opening import open_existing
    return open_existing(location, state)
