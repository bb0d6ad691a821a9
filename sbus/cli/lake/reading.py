"""``sbus lake ls``, ``check`` and ``history``."""

from __future__ import annotations

import itertools
import json
from typing import TypedDict

import click

from sbus.cli.lake.options import lake_argument, open_lake
from sbus.cli.output import Progress, pluralize, printable_text
from sbus.cli.tables import format_table
from sbus.errors import LakeError
from sbus.journal import clock

__all__ = ["check", "history", "ls"]


class _Day(TypedDict):
    date: str
    hours: int
    files: int
    rows: int
    bytes: int
    rows_ahead: int
    compact_hours: int


@click.command(short_help="List days with their files, rows and bytes.")
@lake_argument
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per day.")
@click.pass_context
def ls(ctx: click.Context, location: str, state: str | None, output_json: bool) -> None:
    """List the days of a lake (UTC) with their hours, files, rows and bytes.

    An hour is compact if it is one file, or files of which at most one is small. Days that begin
    more than an hour from now are marked: the clock of a recorder was wrong, or this machine's is.

    A file that is damaged is reported, without its rows, and the exit status is 1.
    """
    table = open_lake(location, state)
    from sbus.lake.maintenance import by_hour
    from sbus.lake.merge import Limits
    from sbus.lake.table import Hour, open_parquet

    cells = [["date", "hours", "compact", "files", "rows", "bytes"]]
    total = ahead = damaged = 0
    latest = Hour.of(clock.to_datetime(clock.now() + clock.HOUR))
    for date, group in itertools.groupby(by_hour(table.files()), lambda each: each[0].date):
        hours = [files for _, files in group]
        rows = rows_ahead = 0
        for file in itertools.chain(*hours):
            try:
                with open_parquet(table, file) as parquet:
                    rows += parquet.metadata.num_rows
                    rows_ahead += parquet.metadata.num_rows if file.hour > latest else 0
            except FileNotFoundError:
                pass  # compaction has just replaced it
            except LakeError as e:
                click.echo(printable_text(f"sbus: {e}"), err=True)
                damaged += 1
        day: _Day = {
            "date": date,
            "hours": len(hours),
            "files": sum(map(len, hours)),
            "rows": rows,
            "bytes": sum(file.size for files in hours for file in files),
            "rows_ahead": rows_ahead,
            "compact_hours": sum(sum(file.size < Limits().min_bytes for file in files) <= 1 for files in hours),
        }
        total += rows
        ahead += rows_ahead
        if output_json:
            click.echo(json.dumps(day))
        else:
            numbers = day["hours"], day["compact_hours"], day["files"], day["rows"], day["bytes"]
            cells.append([f"{date} (ahead)" if rows_ahead else date, *map(str, numbers)])
    if not output_json:
        click.echo(f"{table.location}: format {table.format}, {pluralize(total, 'row')}")
        if len(cells) > 1:
            click.echo("\n".join(format_table(cells, "<>")))
        if ahead:
            click.echo(
                f"{pluralize(ahead, 'row')} ahead of this machine's clock, by an hour or more: the clock of a recorder "
                "was wrong, or this one is"
            )
    if damaged:
        ctx.exit(1)


@click.command(short_help="Check that every row is there once.")
@lake_argument
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(ctx: click.Context, location: str, state: str | None, output_json: bool) -> None:
    """Read a lake, and check that every file is readable, every row in its hour, and none there twice.

    Each problem is printed. Rows that are missing between others are counted: after "forget", or a
    loss that was allowed, that is no fault. The exit status is 0 if there is no problem, else 1.
    """
    table = open_lake(location, state)
    from sbus.lake.check import Findings
    from sbus.lake.check import check as run

    progress = Progress()
    found = Findings()
    for found in run(table):
        progress.show(f"{pluralize(found.files, 'file')}, {pluralize(found.rows, 'row')}")
    progress.clear()
    if output_json:
        click.echo(
            json.dumps({"files": found.files, "rows": found.rows, "problems": found.problems, "missing": found.holes})
        )
    else:
        for problem in found.problems:
            click.echo(printable_text(problem))
        for journal, missing in found.holes.items():
            holes = pluralize(missing, "row")
            click.echo(f"journal {journal}: {holes} missing between others, as after 'forget' or --allow-loss")
        outcome = pluralize(len(found.problems), "problem") if found.problems else "no problems"
        click.echo(f"{table.location}: {pluralize(found.files, 'file')}, {pluralize(found.rows, 'row')}: {outcome}")
    if found.problems:
        ctx.exit(1)


@click.command(short_help="Print the changes to a lake.")
@lake_argument
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per change.")
def history(location: str, state: str | None, output_json: bool) -> None:
    """Print what happened to a lake, the newest last.

    Of plain Parquet, that is compaction, "prune" and "forget". Delta's log has each batch as well,
    with its version, which readers of Delta can go back to.
    """
    table = open_lake(location, state)
    for event in table.history():
        if output_json:
            click.echo(
                json.dumps({"version": event.version, "time": event.time, "what": event.what, "note": event.note})
            )
        else:
            version = "" if event.version is None else f"version {event.version}  "
            moment = clock.format_utc(clock.from_seconds(event.time))
            click.echo(printable_text(f"{moment}  {version}{event.what}  {event.note}".rstrip()))
