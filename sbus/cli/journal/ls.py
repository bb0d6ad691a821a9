"""How ``sbus journal ls`` and ``verify`` tell of a journal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from sbus.cli.options import pluralize
from sbus.journal.consumers import consumers
from sbus.journal.index import read_index
from sbus.journal.layout import Segment
from sbus.journal.reader import JournalReader
from sbus.journal.schema import Kind
from sbus.journal.summary import read_summary
from sbus.journal.verify import verify

__all__ = ["as_json", "as_text", "check"]


def as_json(directory: str) -> str:
    """A journal as a JSON object."""
    return json.dumps(_told(directory))


def as_text(directory: str) -> str:
    """A journal as a table of its segments, and a line for each consumer."""
    told = _told(directory)
    rows = f"rows {told['start']} to {told['end'] - 1}" if told["start"] < told["end"] else "no rows"
    lines = [f"{directory}: journal {told['id']}, {rows}"]
    table = [["first row", "rows", "bytes", "from (UTC)", "to (UTC)", "gaps", ""]]
    for segment in told["segments"]:
        gaps = ", ".join(f"{count} {kind}" for kind, count in segment["gaps"].items())
        times = (datetime.fromtimestamp(segment[name] / 1e6, UTC) for name in ("min_time", "max_time"))
        table.append(
            [
                str(segment["first_seq"]),
                str(segment["rows"]),
                str(segment["bytes"]),
                *(f"{time:%Y-%m-%d %H:%M:%S}" for time in times),
                gaps or "-",
                "" if segment["closed"] else "open",
            ]
        )
    lines += _aligned(table)
    for name, following in told["consumers"].items():
        lines.append(f"{name} has taken what is before row {following}: {max(0, told['end'] - following)} are left")
    return "\n".join(lines)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = 3  # columns on the right
    return [
        "  ".join(
            cell.rjust(width) if at < numbers else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _told(directory: str) -> dict[str, Any]:
    reader = JournalReader(directory)
    segments = []
    for segment in reader.segments():
        try:
            segments.append(_segment(segment))
        except FileNotFoundError:
            pass  # deleted by retention just now
    return {
        "directory": directory,
        "id": reader.id,
        "start": reader.start(),
        "end": reader.end(),
        "segments": segments,
        "consumers": consumers(directory),
    }


def _segment(segment: Segment) -> dict[str, Any]:
    """What readers may see of it."""
    told: dict[str, Any] = {"name": segment.name, "first_seq": segment.first_seq, "closed": segment.closed}
    kinds: Counter[str]
    if segment.closed:
        summary = read_summary(segment)
        times = summary.min_time, summary.max_time
        rows, size, kinds = summary.rows, summary.size, Counter(summary.kinds)
    else:
        index = read_index(segment)
        kinds = Counter()
        for batch in index.batches:
            kinds[batch.kind] += batch.rows
        rows, size = kinds.total(), index.sync.end if index.sync else 0
        times = segment.first_time, index.sync.max_time if index.sync else segment.first_time
    gaps = {kind: count for kind, count in kinds.items() if kind != Kind.MESSAGE}
    return told | {"rows": rows, "bytes": size, "min_time": times[0], "max_time": times[1], "gaps": gaps}


def check(directory: str, output_json: bool) -> bool:
    """Verify a journal and print what is found; returns whether all is well."""
    general: list[str] = []
    rows = segments = wrong = 0
    for found in verify(directory, general.append):
        segments += 1
        rows += found.rows
        wrong += len(found.problems)
        if output_json:
            click.echo(json.dumps({"segment": found.segment.name, "rows": found.rows, "problems": found.problems}))
        else:
            for problem in found.problems:
                click.echo(problem)
    wrong += len(general)
    if output_json:
        click.echo(json.dumps({"segments": segments, "rows": rows, "problems": general}))
    else:
        for problem in general:
            click.echo(problem)
        outcome = pluralize(wrong, "problem") if wrong else "all is well"
        click.echo(f"{directory}: {pluralize(segments, 'segment')}, {pluralize(rows, 'row')}: {outcome}")
    return not wrong
