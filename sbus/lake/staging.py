"""Write rows of journals to Parquet files by hour, with bounded memory.

Theory of operation
-------------------

Each journal yields its rows in order, in pieces of one hour. `stage` takes the pieces of all journals hour by hour, so
a file has sorted rows, one journal after the other, and few files are open at a time.

1. *Cut.* Nearly every batch of rows lies within one hour, and is one piece. Any other is cut where the hour changes.
2. *Merge.* The journal whose next piece has the earliest hour comes next. So an hour is complete before the next one
   begins, unless a clock was set back.
3. *Write.* Pieces of an hour are collected until they have `Limits.group_bytes`, and become a row group. A file ends at
   `Limits.max_bytes`; the hour continues in another file. If more than `_MAX_OPEN` hours are open, because clocks were
   set, the least recently used one is closed; if more of its rows follow, they get another file.

Memory is bounded by one row group for each open hour, and one batch for each journal.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sbus.journal.clock import HOUR
from sbus.journal.keytext import as_text_array
from sbus.lake.encoding import RowWriter
from sbus.lake.merge import Limits
from sbus.lake.table import Hour

__all__ = ["LIMITS", "as_stored", "stage"]

LIMITS = Limits(group_bytes=32 << 20)
"""Smaller row groups than those of compaction, which merges these files. Measured on a million rows of 4,000 keys in
one hour: a peak of 44 MiB of Arrow instead of 79, and files 1.8 % larger; with 16 MiB 26 MiB, and 7 % larger."""

_MAX_OPEN = 4
"""Maximum number of open hours; journals whose clocks differ need several. Each costs a row group of memory."""

_NAMES = pa.dictionary(pa.int32(), pa.utf8())
"""The type of columns of names. A row group may have rows of more than 127 journals, which is the most for int8."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stage(directory: Path, journals: Sequence[Iterable[pa.RecordBatch]], limits: Limits = LIMITS) -> None:
    """Write rows to files in subdirectories ``date=…/hour=…``.

    :param directory: an empty directory that no other process uses.
    :param journals: the rows of each journal, in order, with the columns of a journal.
    :raises OSError: if a file cannot be written, as on a full disk.
    """
    pieces = [_by_hour(rows) for rows in journals]
    waiting = [(hour, number, rows) for number, each in enumerate(pieces) for hour, rows in itertools.islice(each, 1)]
    heapq.heapify(waiting)
    hours: OrderedDict[int, RowWriter] = OrderedDict()
    begun: Counter[int] = Counter()
    try:
        while waiting:
            hour, number, rows = waiting[0]
            if hour not in hours:
                if len(hours) == _MAX_OPEN:
                    _, oldest = hours.popitem(last=False)
                    oldest.finish()
                hours[hour] = _new_writer(directory, hour, begun, limits)
            hours.move_to_end(hour)
            hours[hour].write(rows)
            following = next(pieces[number], None)
            if following is None:
                heapq.heappop(waiting)
            else:
                heapq.heapreplace(waiting, (following[0], number, following[1]))
        for writer in hours.values():
            writer.finish()
    finally:
        for writer in hours.values():
            writer.close()


def _by_hour(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield pieces of one hour each, with its number since the epoch."""
    for rows in batches:
        times = rows.column("time").cast(pa.int64())
        extent = pc.min_max(times)
        first, last = extent["min"].as_py() // HOUR, extent["max"].as_py() // HOUR
        if first == last:
            yield first, rows
            continue
        hours = pc.run_end_encode(pc.floor_temporal(rows.column("time"), unit="hour").cast(pa.int64()))
        start = 0
        for micros, end in zip(hours.values.to_pylist(), hours.run_ends.to_pylist(), strict=True):
            yield micros // HOUR, rows.slice(start, end - start)
            start = end


def _new_writer(directory: Path, hour: int, begun: Counter[int], limits: Limits) -> RowWriter:
    """Return a writer of the rows of an hour.

    :param hour: hours since the epoch.
    :param begun: the number of files begun for each hour; the writer counts its files there.
    """
    place = directory / Hour.of(_EPOCH + timedelta(hours=hour)).directory

    def new_path() -> Path:
        place.mkdir(parents=True, exist_ok=True)
        begun[hour] += 1
        return place / f"part-{begun[hour] - 1:05}.parquet"

    # After a clock was set back, rows of an earlier journal may follow later ones.
    return RowWriter(
        new_path, limits.group_bytes, lambda size: size >= limits.max_bytes, joined=as_stored, is_sorted=False
    )


def as_stored(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return rows of journals with the columns of a lake: keys as text, and every column nullable, as in Spark."""
    columns: dict[str, pa.ChunkedArray] = {}
    for name in batches[0].schema.names:
        column = pa.chunked_array([batch.column(name) for batch in batches])
        if name == "key":
            column = pa.chunked_array([as_text_array(chunk) for chunk in column.chunks])
        elif pa.types.is_dictionary(column.type):
            column = column.cast(_NAMES)
        columns[name] = column
    return pa.table(columns).unify_dictionaries()
