"""The parameters that commands on journals have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sbus.cli.messages import FORMAT_HELP, message_options
from sbus.cli.patterns import RECORDED_PATTERN

__all__ = ["ROWS_EPILOG", "journal_argument", "row_options"]

F = TypeVar("F", bound=Callable[..., Any])

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


def row_options(command: F) -> F:
    """Give a command the options that choose rows and their format."""
    options = (
        journal_argument,
        click.option(
            "--pattern",
            "-p",
            "patterns",
            type=RECORDED_PATTERN,
            multiple=True,
            metavar="PATTERN",
            help="Print only messages whose key matches PATTERN; repeatable.",
        ),
        click.option("--gaps", "only_gaps", is_flag=True, help="Print only gaps."),
        click.option("--sender", is_flag=True, help="Print who published each message, before its key."),
        message_options(noun="row", moment="recording time"),
    )
    for option in reversed(options):
        command = option(command)
    return command
