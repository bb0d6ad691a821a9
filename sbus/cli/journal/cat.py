"""``sbus journal cat``: print rows of a journal."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from sbus.cli.journal.options import ROWS_EPILOG, row_options
from sbus.cli.messages import MessageFormat
from sbus.cli.types import Time
from sbus.distribution import needs

__all__ = ["cat"]

_SEQ = click.IntRange(min=0)


@click.command(short_help="Print rows.", epilog=ROWS_EPILOG)
@row_options
@click.option(
    "--since", type=Time(), metavar="TIME", help="Skip rows before TIME, such as 2026-01-31T12:00 (UTC) or -15m."
)
@click.option("--until", type=Time(), metavar="TIME", help="Stop before TIME.")
@click.option("--from", "first", type=_SEQ, metavar="SEQ", help="Skip rows before the one with this sequence number.")
@click.option("--to", "last", type=_SEQ, metavar="SEQ", help="Stop after the row with this sequence number.")
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
    start, end = rows.range_of(since, until, first, last)
    rows.print_range(start, end, sys.stdout.buffer)
