"""``sbus journal export``: rows of a journal in a file for other programs."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from sbus.cli.journal.formats import format_option, load_format
from sbus.cli.journal.options import journal_argument, pattern_option, range_options
from sbus.cli.output import explained_writing, pluralize
from sbus.cli.stopping import unwinding
from sbus.distribution import needs
from sbus.errors import UsageError
from sbus.ownership import replacing

__all__ = ["export"]

_MODE = 0o600
"""The permissions of a new file, which its owner alone can read, as a journal."""


@click.command(
    short_help="Write rows to a file for other programs.",
    epilog="""\
\b
Examples:
  sbus journal export --output=today.mcap --since=2026-01-31 /var/lib/sbus/journal
  sbus journal export --output=rows.parquet --pattern='sensors/' /var/lib/sbus/journal
  sbus journal export --format=jsonl /var/lib/sbus/journal | gzip > rows.jsonl.gz
""",
)
@journal_argument
@format_option
@click.option("--output", "-o", metavar="FILE", help="File to write.  [default: standard output]")
@pattern_option
@range_options
@click.option("--no-sender", is_flag=True, help="Leave out the publisher of each message.")
def export(
    directory: str,
    format_: str | None,
    output: str | None,
    patterns: tuple[bytes, ...],
    since: datetime | None,
    until: datetime | None,
    first: int | None,
    last: int | None,
    no_sender: bool,
) -> None:
    """Write rows of a journal to a file: MCAP for Foxglove and rosbag2, JSON lines, or Parquet.

    The file has every byte of every key and payload, who published it, and the gaps between the
    messages; "sbus journal import" makes a journal of it again. It is in its place once it is
    complete. MCAP needs the extra "mcap": pip install 'sbusd[mcap]'.
    """
    module = load_format(format_, output)
    with needs("recorder"):
        from sbus.interchange.rows import Selection
    chosen = Selection(directory, patterns, sender=not no_sender)
    chosen.limit(since, until, first, last)
    if output is None:
        if sys.stdout.isatty() and not module.IS_TEXT:
            raise UsageError("a terminal cannot show this format: name a file (--output)")
        module.write(sys.stdout.buffer, chosen)
        sys.stdout.buffer.flush()
        return
    with (
        unwinding(),
        explained_writing("the rows", output, "name another file (--output)"),
        replacing(output, _MODE) as file,
    ):
        rows = module.write(file, chosen)
    click.echo(f"{output}: {pluralize(rows, 'row')}", err=True)
