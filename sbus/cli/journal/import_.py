"""``sbus journal import``: a journal of the rows in files."""

from __future__ import annotations

import os

import click

from sbus.cli.journal.formats import format_option, load_format
from sbus.cli.output import explained_writing, pluralize
from sbus.distribution import needs
from sbus.errors import UsageError

__all__ = ["import_"]


@click.command(
    "import",
    short_help="Make a journal of the rows in files.",
    epilog="""\
\b
Examples:
  sbus journal import run.mcap ./journal
  sbus journal import bag/bag_0.mcap bag/bag_1.mcap ./journal
  zcat rows.jsonl.gz | sbus journal import --format=jsonl /dev/stdin ./journal
""",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.argument("directory", metavar="JOURNAL", type=click.Path(file_okay=False))
@format_option
@click.option(
    "--host", default="", metavar="NAME", help="Name of the machine that the rows come from.  [default: unknown]"
)
def import_(files: tuple[str, ...], directory: str, format_: str | None, host: str) -> None:
    """Make a new journal of the rows in files, one file after the other.

    The files come from "sbus journal export", "sbus sub --json", Foxglove, rosbag2, or another
    program: a topic becomes a key, byte for byte, and a message a payload. JOURNAL must be new: it
    is there once it is complete, and can then be printed, archived, replayed and reported on.
    """
    if len(set(map(os.path.realpath, files))) < len(files):
        raise UsageError("a file is named twice: its rows would be there twice")
    modules = [load_format(format_, file) for file in files]
    with needs("recorder"):
        from sbus.interchange.importing import append, new_journal
    rows = 0
    with (
        explained_writing("the journal", directory, "name another directory", only_full=True),
        new_journal(directory, host, lambda text: click.echo(f"sbus: {text}", err=True)) as writer,
    ):
        for module, file in zip(modules, files, strict=True):
            rows += append(writer, module.read(file), file)
    click.echo(f"{directory}: {pluralize(rows, 'row')}", err=True)
