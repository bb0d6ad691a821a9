"""``sbus journal``: the commands on journals, without Spark."""

from __future__ import annotations

import click

from sbus.cli.group import LazyGroup

__all__ = ["journal"]

_MODULES = {
    "ls": "sbus.cli.journal.ls",
    "cat": "sbus.cli.journal.cat",
    "tail": "sbus.cli.journal.tail",
    "verify": "sbus.cli.journal.verify",
    "repair": "sbus.cli.journal.repair",
    "release": "sbus.cli.journal.release",
    "export": "sbus.cli.journal.export",
    "import": "sbus.cli.journal.import_",
}


@click.group(
    cls=LazyGroup,
    modules=_MODULES,
    short_help="List, print, follow, verify, repair, export and import journals.",
    epilog="""\
\b
Examples:
  sbus journal ls /var/lib/sbus/journal
  sbus journal cat --pattern='sensors/' --since=2026-01-31 /var/lib/sbus/journal
  sbus journal tail /var/lib/sbus/journal
  sbus journal verify /var/lib/sbus/journal
  sbus journal release /var/lib/sbus/journal alerts
  sbus journal export --output=today.mcap --since=2026-01-31 /var/lib/sbus/journal
  sbus journal import run.mcap ./journal
""",
)
def journal() -> None:
    """List, print, follow, verify, repair, export and import the journals that a recorder writes.

    The recorder may be running. Spark is not needed, only the extra "recorder":
    pip install 'sbusd[recorder]'.
    """
