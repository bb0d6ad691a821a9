"""``sbus record``: a recorder in the foreground, for those who do not have ``twistd`` at hand."""

from __future__ import annotations

import os

import click

from sbus.cli.options import Target, connection_options, pass_target
from sbus.daemon.launcher import twistd_command

__all__ = ["record"]


@click.command(
    short_help="Record a bus in the foreground.",
    context_settings={"ignore_unknown_options": True},
    epilog="""\
\b
Examples:
  sbus record --journal=journal
  sbus record --journal=/var/lib/sbus/journal --pattern=sensors/ --keep-days=30
""",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION OF TWISTD SBUS-RECORDER]...")
@connection_options
@pass_target
def record(target: Target, options: tuple[str, ...]) -> None:
    """Record a bus in a journal until Ctrl-C: twistd --nodaemon sbus-recorder.

    It takes all options of twistd sbus-recorder (twistd sbus-recorder --help); --journal=DIRECTORY is required.
    It goes on while the bus comes and goes. To read the journal: sbus journal.
    """
    command = twistd_command(
        "sbus-recorder",
        f"--socket={target.address}",
        f"--dialect={target.dialect}",
        f"--max-packet={target.max_packet}",
        *options,
    )
    os.execv(command[0], command)
