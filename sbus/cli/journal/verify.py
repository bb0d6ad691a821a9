"""``sbus journal verify``: check a journal's files."""

from __future__ import annotations

import json

import click

from sbus.cli.journal.options import journal_argument
from sbus.cli.output import pluralize, printable_text
from sbus.distribution import needs

__all__ = ["verify"]


@click.command(short_help="Verify checksums, rows and summaries.")
@journal_argument
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per segment, then one with a summary.")
@click.pass_context
def verify(ctx: click.Context, directory: str, output_json: bool) -> None:
    """Verify the checksums, sequence numbers, times and summaries of a journal.

    Each problem is printed. The exit status is 0 if there is none, else 1.
    """
    with needs("recorder"):
        from sbus.journal.verify import verify as verify_segments
    # Problems of the journal as a whole; `verify_segments` adds them while it goes through the segments.
    general: list[str] = []
    rows = segments = problems = 0
    for found in verify_segments(directory, general.append):
        segments += 1
        rows += found.rows
        problems += len(found.problems)
        if output_json:
            click.echo(json.dumps({"segment": found.segment.name, "rows": found.rows, "problems": found.problems}))
        else:
            for problem in found.problems:
                click.echo(printable_text(problem))
    problems += len(general)
    if output_json:
        click.echo(json.dumps({"segments": segments, "rows": rows, "problems": general}))
    else:
        for problem in general:
            click.echo(printable_text(problem))
        outcome = pluralize(problems, "problem") if problems else "no problems"
        summary = f"{pluralize(segments, 'segment')}, {pluralize(rows, 'row')}: {outcome}"
        click.echo(printable_text(f"{directory}: {summary}"))
    if problems:
        ctx.exit(1)
