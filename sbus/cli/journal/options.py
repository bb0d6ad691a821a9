"""The parameters that commands on journals have in common."""

from __future__ import annotations

from functools import partial

import click

from sbus.cli.combined import combined
from sbus.cli.messages import FORMAT_HELP, message_options
from sbus.cli.patterns import RECORDED_PATTERN
from sbus.cli.types import Time

__all__ = ["ROWS_EPILOG", "journal_argument", "journals_option", "pattern_option", "range_options", "row_options"]

ROWS_EPILOG = f"""\
\b
Directives of FORMAT (%n is the row's sequence number):{FORMAT_HELP}

\b
Messages are printed as by "sbus sub"; with --json they have "sender" if the
bus named it to the recorder. A gap is printed as a line that begins
with "# " and the kind of gap; with --json, as an object with "kind" and
"details". --raw and --format skip gaps.
"""

journal_argument = click.argument("directory", metavar="JOURNAL", type=click.Path(file_okay=False))
journals_option = partial(
    click.option,
    "--journal",
    "-j",
    multiple=True,
    metavar="DIR",
    help="Journal to read: a directory, or a quoted pattern such as '/shared/*'; repeatable.",
)
"""Makes the option ``--journal`` of a command that reads several journals; takes more settings of `click.option`."""
pattern_option = click.option(
    "--pattern",
    "-p",
    "patterns",
    type=RECORDED_PATTERN,
    multiple=True,
    metavar="PATTERN",
    help="Take only messages whose key matches PATTERN; repeatable.",
)

_SEQ = click.IntRange(min=0)


range_options = combined(
    click.option(
        "--since",
        type=Time(),
        metavar="TIME",
        help="Skip rows before TIME, such as 2026-01-31T12:00 (UTC) or -15m.",
    ),
    click.option("--until", type=Time(), metavar="TIME", help="Stop before TIME."),
    click.option(
        "--from", "first", type=_SEQ, metavar="SEQ", help="Skip rows before the one with this sequence number."
    ),
    click.option("--to", "last", type=_SEQ, metavar="SEQ", help="Stop after the row with this sequence number."),
)
"""The options that choose rows by their times and numbers."""


row_options = combined(
    journal_argument,
    pattern_option,
    click.option("--gaps", "only_gaps", is_flag=True, help="Print only gaps."),
    click.option("--sender", is_flag=True, help="Print the publisher of each message before its key."),
    message_options(noun="row", moment="recording time"),
)
"""The options that choose rows and their format."""
