"""Check a lake: every file is readable, every row is in its hour, and no row is there twice.

The numbers of rows are kept as ranges, so memory grows with the holes in a lake and not with its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import pyarrow as pa
import pyarrow.compute as pc

from sbus.errors import LakeError
from sbus.journal.clock import HOUR, from_datetime
from sbus.lake.merge import Limits, iter_rows
from sbus.lake.table import DataFile, Hour, Table, lost_rows, open_parquet

__all__ = ["Findings", "check"]

_MAX_REPORTED = 10
"""Ranges of rows that are reported of each journal."""


@dataclass(slots=True)
class Findings:
    """The result of a check.

    :ivar files: files that were read.
    :ivar rows: rows in these.
    :ivar problems: the problems, one line each.
    :ivar holes: rows that are missing between others, for each journal; that is no fault after `forget` or a loss that
        was allowed. Where a ``damaged`` row stands for rows, none is missing.
    """

    files: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    holes: dict[str, int] = field(default_factory=dict)


def check(table: Table) -> Iterator[Findings]:
    """Read a lake, and yield the result so far after each hour; the last time, the whole result.

    :raises sbus.errors.LakeError: if the table itself cannot be read.
    """
    found = Findings()
    ranges: dict[str, list[tuple[int, int]]] = {}
    for hour, files in itertools.groupby(table.files(), attrgetter("hour")):
        part, of_hour = _check_hour(table, hour, list(files))
        found.files += part.files
        found.rows += part.rows
        found.problems += part.problems
        for journal, parts in of_hour.items():
            ranges[journal] = _joined(sorted(ranges.get(journal, []) + parts))
        yield found
    for journal, parts in sorted(ranges.items()):
        twice, missing = _compare(sorted(parts))
        found.problems += [
            f"journal {journal}: rows {start} to {end - 1} are there twice: restore the lake from a copy"
            for start, end in twice[:_MAX_REPORTED]
        ]
        if missing:
            found.holes[journal] = missing
    yield found


def _check_hour(
    table: Table, hour: Hour, files: Sequence[DataFile]
) -> tuple[Findings, dict[str, list[tuple[int, int]]]]:
    """Read the files of an hour; if they are replaced meanwhile, the new ones."""
    found = Findings(len(files))
    ranges: dict[str, list[tuple[int, int]]] = {}
    for file in files:
        try:
            found.rows += _read(table, file, ranges, found.problems)
        except LakeError as e:
            found.problems.append(str(e))
        except OSError as e:
            if isinstance(e, FileNotFoundError):
                now = table.files()
                if now and file.name not in {each.name for each in now}:
                    return _check_hour(table, hour, [each for each in now if each.hour == hour])
            why = " ".join(str(e).split())
            found.problems.append(f"{file.name}: it cannot be read ({why}): restore it from a copy")
    return found, ranges


def _read(table: Table, file: DataFile, ranges: dict[str, list[tuple[int, int]]], problems: list[str]) -> int:
    first = from_datetime(file.hour.start)
    rows = outside = 0
    with open_parquet(table, file) as parquet:
        for batch in iter_rows(parquet, Limits()):
            rows += batch.num_rows
            times = batch.column("time").cast(pa.int64())
            outside += pc.sum(pc.or_(pc.less(times, first), pc.greater_equal(times, first + HOUR))).as_py() or 0
            journals = batch.column("journal").dictionary_encode()
            for index, journal in enumerate(journals.dictionary.to_pylist()):
                seqs = batch.column("seq")
                if len(journals.dictionary) > 1:
                    seqs = seqs.filter(pc.equal(journals.indices, index))
                ranges.setdefault(journal, []).extend(_ranges(seqs))
            for lost in lost_rows(batch):
                if lost.rows > 1:  # the ``damaged`` row itself has the first number
                    ranges[lost.journal].append((lost.first_seq + 1, lost.first_seq + lost.rows))
    if outside:
        problems.append(f"{file.name}: {outside} of {rows} rows are of another hour")
    return rows


def _ranges(seqs: pa.Array) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers, each with the number after its last."""
    breaks = pc.indices_nonzero(pc.not_equal(pc.subtract(seqs[1:], seqs[:-1]), 1)).to_pylist()
    starts, ends = [0, *(at + 1 for at in breaks)], [*breaks, len(seqs) - 1]
    return [(seqs[start].as_py(), seqs[end].as_py() + 1) for start, end in zip(starts, ends, strict=True)]


def _joined(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch; those that overlap stay apart."""
    joined = [parts[0]]
    for start, end in parts[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _compare(parts: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Return the ranges that are there twice, and the number of rows that are missing."""
    twice: list[tuple[int, int]] = []
    missing = 0
    last = parts[0][0]
    for start, end in parts:
        if start < last:
            twice.append((start, min(end, last)))
        missing += max(0, start - last)
        last = max(last, end)
    return twice, missing
