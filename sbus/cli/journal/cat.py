"""``sbus journal cat``: print rows of a journal."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from sbus.cli.journal.options import ROWS_EPILOG, range_options, row_options
from sbus.cli.messages import MessageFormat
from sbus.distribution import needs

__all__ = ["cat"]


@click.command(short_help="Print rows.", epilog=ROWS_EPILOG)
@row_options
@range_options
def cat(
    directory: str,
    patterns: tuple[bytes, ...],
    only_gaps: bool,
    sender: bool,
    message_format: MessageFormat,
    since: datetime | None,
    until: datetime | None,
    first: int | None,
    last: int | None,
) -> None:
    """Print the rows of a journal: messages, and the gaps between them."""
    with needs("recorder"):
        from sbus.cli.journal.rows import Rows
    rows = Rows(directory, message_format, patterns, only_gaps, sender)
    rows.limit(since, until, first, last)
    rows.print_chosen(sys.stdout.buffer)
