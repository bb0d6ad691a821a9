"""``sbus journal tail``: print the last rows of a journal, and follow it."""

from __future__ import annotations

import sys

import click

from sbus.cli.journal.options import ROWS_EPILOG, row_options
from sbus.cli.messages import MessageFormat
from sbus.distribution import needs

__all__ = ["tail"]


@click.command(short_help="Print the last rows, and follow.", epilog=ROWS_EPILOG)
@row_options
@click.option(
    "--rows",
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Rows to print from the end.",
)
@click.option("--no-follow", is_flag=True, help="Exit after these rows.")
def tail(
    directory: str,
    patterns: tuple[bytes, ...],
    only_gaps: bool,
    sender: bool,
    message_format: MessageFormat,
    count: int,
    no_follow: bool,
) -> None:
    """Print the last rows of a journal, and follow new ones.

    Each new row is printed once it is safely on the disk.
    """
    with needs("recorder"):
        from sbus.cli.journal.rows import Rows
    rows = Rows(directory, message_format, patterns, only_gaps, sender)
    rows.print_tail(count, sys.stdout.buffer, follow=not no_follow)
