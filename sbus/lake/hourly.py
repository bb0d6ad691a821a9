"""The counts of a time: those of closed hours from the cube, and of the others made for one reader.

A report of a month reads nothing else (`sbus.lake.cube` says what counts have). Rows that were archived after an hour
had closed are in files with other names, so their hour is counted again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sbus.lake.cube import build, update
from sbus.lake.maintenance import by_hour, is_closed
from sbus.lake.table import DataFile, Hour, Table

__all__ = ["Hourly", "hourly"]


@dataclass(frozen=True, slots=True)
class Hourly:
    """Parquet files of one or several hours each.

    :ivar counts: paths of files with ``journal``, ``key``, ``size``, ``publisher``, ``n``, ``bytes``, ``first``,
        ``last``; times are in µs, and a row stands for the messages of an hour, key, size and publisher.
    :ivar rows: paths of files with rows that are not messages, those beside them, and of each journal and hour those
        with the least and greatest time and number, with the columns of a journal.
    """

    counts: Sequence[str]
    rows: Sequence[str]


@contextmanager
def hourly(table: Table, start: datetime, end: datetime) -> Iterator[Hourly | None]:
    """Count the hours of a lake that are not counted yet; yield the counts of all, readable within the block.

    The hours are those of a period, and of the period of the same length before it.

    :param start: the start of the period, a full hour of UTC.
    :param end: its end (not included), likewise.
    :returns: yields None if there are no hours, the lake's state cannot be written, or its files change meanwhile.
    :raises sbus.errors.LakeError: if the lake is damaged.
    """
    begin = start - (end - start)
    with ExitStack() as stack:
        found = None
        with suppress(OSError):
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="sbus-counts-"))
            hours = {hour: files for hour, files in by_hour(table.files()) if begin <= hour.start < end}
            found = _count(table, hours, Path(work))
        yield found


def _count(table: Table, hours: dict[Hour, list[DataFile]], work: Path) -> Hourly | None:
    if not hours:
        return None
    settled = table.state.settled()
    now = time.time()
    closed = {
        hour: files
        for hour, files in hours.items()
        if is_closed(files, now) and all((file.batch or 0) <= settled for file in files)
    }
    made = update(table, closed)
    for number, (hour, files) in enumerate(hours.items()):
        if hour not in made:
            made[hour] = str(work / f"{number}.counts.parquet"), str(work / f"{number}.rows.parquet")
            build(table, files, work, made[hour])
    return Hourly([counts for counts, _ in made.values()], [rows for _, rows in made.values()])
