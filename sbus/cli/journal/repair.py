"""``sbus journal repair``: make a damaged journal readable, and report the lost rows."""

from __future__ import annotations

import contextlib
import json

import click

from sbus.cli.journal.options import journal_argument
from sbus.cli.output import explained_writing, pluralize, printable_text
from sbus.distribution import needs
from sbus.journal import clock

__all__ = ["repair"]

_ROWS_LOST = 3
"""The exit status if rows are lost."""


@click.command(
    short_help="Make a damaged journal readable; report lost rows.",
    epilog="""\
\b
Exit status:
  0  nothing was damaged, or every row could be kept
  1  the journal cannot be repaired, or a recorder writes it
  3  it is repaired, but rows are lost

\b
Examples:
  sbus journal repair --dry-run /var/lib/sbus/journal
  for journal in /shared/journals/*; do sbus journal repair "$journal"; done
""",
)
@journal_argument
@click.option("--dry-run", is_flag=True, help="Change nothing; print the repairs. The recorder may be running.")
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per damaged segment.")
@click.pass_context
def repair(ctx: click.Context, directory: str, dry_run: bool, output_json: bool) -> None:
    """Make a damaged journal readable again, and say which rows are lost.

    Every row that can be read stays, with its sequence number. One row of the kind "damaged" stands
    for the rows of each batch that cannot be read. What was damaged is copied into the directory
    "damaged" of the journal.

    Stop the recorder of the journal first, and start it again afterwards; a recorder that a bus runs
    (--record) stops with the bus. JOURNAL is one directory: repair several journals one by one.
    """
    with needs("recorder"):
        from sbus.journal.lock import locked
        from sbus.journal.repair import repair as repair_segments
    segments = lost = 0
    with (
        explained_writing(
            "the repair", directory, "copy the journal to another disk, and repair again", only_full=True
        ),
        contextlib.nullcontext() if dry_run else locked(directory),
    ):
        for found in repair_segments(directory, dry_run=dry_run):
            segments += 1
            rows = sum(part.rows for part in found.lost)
            lost += rows
            if output_json:
                fields = {
                    "segment": found.segment.name,
                    "lost": [part._asdict() for part in found.lost],
                    "kept": found.kept,
                }
                click.echo(json.dumps(fields))
                continue
            where = printable_text(found.segment.path())
            for part in found.lost:
                click.echo(
                    f"{where}: {pluralize(part.rows, 'row')} lost: {part.first_seq} to "
                    f"{part.first_seq + part.rows - 1}, of about {clock.format_utc(part.min_time)} to "
                    f"{clock.format_utc(part.max_time)}"
                )
            if not found.lost:
                click.echo(f"{where}: damaged, but no row is lost")
            for path in found.kept:
                click.echo(printable_text(f"  kept what was there: {path}"))
    if not output_json:
        would = "would be " if dry_run else ""
        outcome = f"{pluralize(segments, 'segment')} {would}repaired, {pluralize(lost, 'row')} lost"
        click.echo(printable_text(f"{directory}: {outcome if segments else 'nothing is damaged'}"))
    if lost:
        ctx.exit(_ROWS_LOST)
