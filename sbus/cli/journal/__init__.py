"""``sbus journal``: look into what was recorded, check it and follow it, with nothing but Arrow."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from sbus.cli.options import AS_BYTES
from sbus.cli.output import FORMAT_HELP
from sbus.cli.spark.job import Time
from sbus.cli.sub import printer
from sbus.extras import needs

__all__ = ["journal"]

_DIRECTORY = click.argument("directory", metavar="JOURNAL", type=click.Path(file_okay=False))
_FORMATS = "".join(f"\n  {line}" for line in FORMAT_HELP.splitlines())


@click.group(
    short_help="Look into journals, check and follow them.",
    epilog="""\
\b
Examples:
  sbus journal ls /var/lib/sbus/journal
  sbus journal cat --pattern='sensors/' --since=2026-01-31 /var/lib/sbus/journal
  sbus journal tail /var/lib/sbus/journal
  sbus journal verify /var/lib/sbus/journal
""",
)
def journal() -> None:
    """Look into what a recorder has written, without Spark. It may go on writing meanwhile.

    It needs the extra "recorder" (pip install 'sbus[recorder]').
    """


@journal.command(short_help="List segments and consumers.")
@click.argument("directories", metavar="JOURNAL...", nargs=-1, required=True)
@click.option("--json", "output_json", is_flag=True, help="Print an object a journal.")
def ls(directories: tuple[str, ...], output_json: bool) -> None:
    """List the segments of journals: rows, bytes, times, gaps, and whether they are closed; and who consumes them.

    A JOURNAL is a directory or a pattern of several.
    """
    with needs("recorder"):
        from sbus.cli.journal.ls import as_json, as_text
        from sbus.journal.reader import find_journals
    for number, directory in enumerate(find_journals(directories)):
        if output_json:
            click.echo(as_json(directory))
        else:
            click.echo(("\n" if number else "") + as_text(directory))


def _row_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--time", "with_time", is_flag=True, help="Print before each message when it was recorded."),
        click.option("--format", "output_format", metavar="FORMAT", help="Print what FORMAT says; see below."),
        click.option("--raw", "output_raw", is_flag=True, help="Print the payloads of messages alone."),
        click.option("--json", "output_json", is_flag=True, help="Print an object a row."),
        click.option("--gaps", "only_gaps", is_flag=True, help="Print gaps alone."),
        click.option(
            "--pattern",
            "-p",
            "patterns",
            type=AS_BYTES,
            multiple=True,
            metavar="PATTERN",
            help="Messages whose key matches.",
        ),
        _DIRECTORY,
    ):
        command = option(command)
    return command


_ROWS_HELP = f"""\
\b
In a FORMAT (%n is the row's seq):{_FORMATS}

\b
Messages are printed as by "sbus sub". A row that tells of a gap is a line that
begins with "# " and its kind; with --json it has "kind" and "details"; --raw
and --format leave it out.
"""


@journal.command(short_help="Print rows.", epilog=_ROWS_HELP)
@click.option("--to", "last", type=click.IntRange(min=0), metavar="SEQ", help="Up to this row, which is printed too.")
@click.option("--from", "first", type=click.IntRange(min=0), metavar="SEQ", help="From this row on.")
@click.option("--until", type=Time(), help="Before this time.")
@click.option("--since", type=Time(), help="From this time on (UTC, or say which zone).")
@_row_options
def cat(
    directory: str,
    patterns: tuple[bytes, ...],
    only_gaps: bool,
    output_json: bool,
    output_raw: bool,
    output_format: str | None,
    with_time: bool,
    since: datetime | None,
    until: datetime | None,
    first: int | None,
    last: int | None,
) -> None:
    """Print the rows of a journal: messages, and gaps between them."""
    show = printer(output_json, output_raw, output_format, with_time)
    with needs("recorder"):
        from sbus.cli.journal.rows import Rows
    rows = Rows(
        directory, show, patterns, only_gaps, is_json=output_json, has_gaps=not output_raw and not output_format
    )
    start, end = rows.between(since, until, first, last)
    rows.copy(start, end, sys.stdout.buffer)


@journal.command(short_help="Print the last rows, and follow.", epilog=_ROWS_HELP)
@click.option("--no-follow", is_flag=True, help="End after the rows that are there.")
@click.option(
    "--rows",
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many rows from the end.",
)
@_row_options
def tail(
    directory: str,
    patterns: tuple[bytes, ...],
    only_gaps: bool,
    output_json: bool,
    output_raw: bool,
    output_format: str | None,
    with_time: bool,
    count: int,
    no_follow: bool,
) -> None:
    """Print the last rows of a journal, and then each row as soon as it is safe on the disk."""
    show = printer(output_json, output_raw, output_format, with_time)
    with needs("recorder"):
        from sbus.cli.journal.rows import Rows
    rows = Rows(
        directory, show, patterns, only_gaps, is_json=output_json, has_gaps=not output_raw and not output_format
    )
    rows.tail(count, sys.stdout.buffer, follow=not no_follow)


@journal.command(short_help="Check every checksum, row and summary.")
@_DIRECTORY
@click.option("--json", "output_json", is_flag=True, help="Print an object a segment.")
@click.pass_context
def verify(ctx: click.Context, directory: str, output_json: bool) -> None:
    """Check a journal: checksums, row numbers, times and summaries. What is wrong is printed, and the status is 1."""
    with needs("recorder"):
        from sbus.cli.journal.ls import check
    if not check(directory, output_json):
        ctx.exit(1)
