"""``sbus lake``: look after the lakes that ``sbus archive`` writes, without Spark."""

from __future__ import annotations

import click

from sbus.cli.group import LazyGroup

__all__ = ["lake"]

_MODULES = {
    "ls": "sbus.cli.lake.reading",
    "check": "sbus.cli.lake.reading",
    "history": "sbus.cli.lake.reading",
    "compact": "sbus.cli.lake.changing",
    "prune": "sbus.cli.lake.changing",
    "forget": "sbus.cli.lake.changing",
    "vacuum": "sbus.cli.lake.changing",
}


@click.group(
    cls=LazyGroup,
    modules=_MODULES,
    short_help="List, check, compact and prune lakes.",
    epilog="""\
\b
Examples:
  sbus lake ls /srv/lake
  sbus lake compact /srv/lake
  sbus lake prune --keep-days=90 /srv/lake
  sbus lake forget --key='people/jo/' /srv/lake
""",
)
def lake() -> None:
    """List, check, compact and prune the lakes that sbus archive writes.

    The archive and readers may be running. Spark is not needed, only the extra "recorder", or
    "delta" for a lake in Delta's format: pip install 'sbusd[delta]'.
    """
