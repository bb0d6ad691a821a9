"""Options of several commands of ``sbus lake``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sbus.cli.combined import combined
from sbus.distribution import needs

if TYPE_CHECKING:
    from sbus.lake.table import Table

__all__ = ["lake_argument", "open_lake", "state_option"]

state_option = click.option(
    "--state",
    metavar="DIR",
    help="State directory of a lake in object storage.  [default: below ~/.local/state/sbus]",
)
lake_argument = combined(click.argument("location", metavar="LAKE"), state_option)
"""The lake, and the option ``--state``."""


def open_lake(location: str, state: str | None) -> Table:
    """Open a lake that exists.

    :raises sbus.errors.LakeError: if there is none.
    """
    with needs("recorder"):
        from sbus.lake.opening import open_existing
    return open_existing(location, state)
