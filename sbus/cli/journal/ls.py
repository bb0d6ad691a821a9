"""``sbus journal ls``: the segments and consumers of journals."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, TypedDict

import click

from sbus.cli.output import describe_os_error, printable_text
from sbus.cli.tables import format_table
from sbus.distribution import needs
from sbus.errors import JournalError
from sbus.journal import clock

if TYPE_CHECKING:
    from sbus.journal.layout import Segment

__all__ = ["ls"]


class _SegmentInfo(TypedDict):
    """The part of a segment that readers may see.

    Times are µs since the epoch; gaps are counted by kind.
    """

    name: str
    first_seq: int
    closed: bool
    rows: int
    bytes: int
    min_time: int
    max_time: int
    gaps: dict[str, int]


class _JournalInfo(TypedDict):
    """A journal.

    ``end`` is the sequence number after its last row; the value of a consumer is that of its next row.
    """

    directory: str
    id: str
    start: int
    end: int
    segments: list[_SegmentInfo]
    consumers: dict[str, int]


@click.command(short_help="List segments and consumers.")
@click.argument("directories", metavar="JOURNAL...", nargs=-1, required=True)
@click.option("--json", "output_json", is_flag=True, help="Print one JSON object per journal.")
@click.pass_context
def ls(ctx: click.Context, directories: tuple[str, ...], output_json: bool) -> None:
    """List the segments and consumers of journals.

    A JOURNAL is a directory, or a quoted pattern such as '/shared/*' for several. A segment is
    listed with its rows, bytes, times and gaps, and with "open" while the recorder writes to it.

    A journal that is damaged, or that this user may not read, is reported; the others are listed,
    and the exit status is 1.
    """
    with needs("recorder"):
        from sbus.journal.reader import find_journals
    listed = damaged = 0
    for directory in find_journals(directories):
        try:
            journal = _describe(directory)
        except (JournalError, OSError) as e:
            text = describe_os_error(e) if isinstance(e, OSError) else str(e)
            click.echo(printable_text(f"sbus: {text}"), err=True)
            damaged += 1
            continue
        if output_json:
            click.echo(json.dumps(journal))
        else:
            click.echo(("\n" if listed else "") + _format(journal))
        listed += 1
    if damaged:
        ctx.exit(1)


def _format(journal: _JournalInfo) -> str:
    """Return a table of the segments, and a line for each consumer."""
    start, end = journal["start"], journal["end"]
    rows = f"rows {start} to {end - 1}" if start < end else "no rows"
    table = [["first row", "rows", "bytes", "from (UTC)", "to (UTC)", "gaps", ""]]
    for segment in journal["segments"]:
        times = (clock.to_datetime(micros) for micros in (segment["min_time"], segment["max_time"]))
        table.append(
            [
                str(segment["first_seq"]),
                str(segment["rows"]),
                str(segment["bytes"]),
                *(f"{time:%Y-%m-%d %H:%M:%S}" for time in times),
                ", ".join(f"{count} {kind}" for kind, count in segment["gaps"].items()) or "-",
                "" if segment["closed"] else "open",
            ]
        )
    directory = printable_text(journal["directory"])
    lines = [f"{directory}: journal {journal['id']}, {rows}", *format_table(table, ">>><")]
    for name, position in journal["consumers"].items():
        lines.append(f"consumer {printable_text(name)}: next row {position}, {max(0, end - position)} rows left")
    return "\n".join(lines)


def _describe(directory: str) -> _JournalInfo:
    from sbus.journal.consumers import consumers
    from sbus.journal.reader import JournalReader

    reader = JournalReader(directory)
    segments = []
    for segment in reader.segments():
        try:
            segments.append(_describe_segment(segment))
        except FileNotFoundError:
            pass  # retention has just deleted it
    return {
        "directory": directory,
        "id": reader.id,
        "start": reader.start(),
        "end": reader.end(),
        "segments": segments,
        "consumers": consumers(directory),
    }


def _describe_segment(segment: Segment) -> _SegmentInfo:
    from sbus.journal.index import read_index
    from sbus.journal.schema import GAPS
    from sbus.journal.summary import read_summary

    kinds: Counter[str]
    if segment.closed:
        summary = read_summary(segment)
        rows, size, kinds = summary.rows, summary.size, Counter(summary.kinds)
        min_time, max_time = summary.min_time, summary.max_time
    else:
        index = read_index(segment)
        kinds = Counter()
        for batch in index.batches:
            kinds[batch.kind] += batch.rows
        last = index.last
        rows, size = kinds.total(), last.end if last else 0
        min_time, max_time = segment.first_time, last.max_time if last else segment.first_time
    return {
        "name": segment.name,
        "first_seq": segment.first_seq,
        "closed": segment.closed,
        "rows": rows,
        "bytes": size,
        "min_time": min_time,
        "max_time": max_time,
        "gaps": {kind: count for kind, count in kinds.items() if kind in GAPS},
    }
