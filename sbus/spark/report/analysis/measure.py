"""Compute the figures of a report from rows.

This module sets the order of the aggregates, and caches rows for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from sbus.errors import UsageError
from sbus.journal.clock import HOUR, format_utc, from_datetime, from_seconds
from sbus.spark.report.analysis import cube as cubes
from sbus.spark.report.analysis.changes import compare
from sbus.spark.report.analysis.figures import Report, Totals
from sbus.spark.report.analysis.gaps import find_gaps, find_journals, find_losses, find_steps, lost, recorded
from sbus.spark.report.analysis.silences import find_silences
from sbus.spark.report.analysis.spans import Span, length, nice_width

__all__ = ["Hourly", "counts_of", "measure"]

_MAX_WINDOWS = 300
"""Windows of a period."""
_MIN_LABEL_SHARE = 0.01
"""The least share of the messages of a prefix with a colour of its own: less cannot be seen."""
_MIN_TIME = -62_135_596_800_000_000
"""The beginning of the year 1, in µs since the epoch: the earliest time of a `datetime`."""


@dataclass(frozen=True, slots=True)
class Hourly:
    """Rows that are counted by the hour.

    :ivar counts: as `counts_of` returns them; a row stands for messages of one hour, key and size.
    :ivar rows: rows that are not messages, those beside them, and of each journal those with the least and greatest
        time and number, with the columns of a journal.
    """

    counts: DataFrame
    rows: DataFrame


def counts_of(rows: DataFrame) -> DataFrame:
    """Return each message as counts of one.

    :param rows: the columns of a journal, and ``us``.
    :returns: ``journal``, ``key``, ``us``, ``size``, ``n``, ``bytes``, ``first``, ``last``.
    """
    size = F.length("payload").cast("long")
    return rows.where("kind = 'message'").select(
        "journal",
        "key",
        "us",
        size.alias("size"),
        F.lit(1).cast("long").alias("n"),
        size.alias("bytes"),
        F.col("us").alias("first"),
        F.col("us").alias("last"),
    )


def _within(column: str, span: Span) -> Column:
    return (F.col(column) >= span.start) & (F.col(column) < span.end)


def measure(
    rows: DataFrame,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    last: timedelta = timedelta(days=1),
    wanted: Column | None = None,
    pattern: str = "",
    depth: int | None = None,
    top: int = 12,
    progress: Callable[[str], None] = lambda step: None,
    hourly: Hourly | None = None,
) -> Report:
    """Compute the traffic of a period, compared with an equal period before it.

    Spark does the work; what reaches this process is bounded by the number of windows (at most 300), by `top`, and by a
    few prefixes.

    :param rows: rows with the columns of a journal, keys as text.
    :param start: the start of the period; None: `last` before its end, or the first row if that is later, and at most a
        window earlier.
    :param end: the end of the period (not included); None: the end of the window of the last row.
    :param last: the length of the period if `start` is None.
    :param wanted: the condition on ``key`` for the messages that count; gaps always count.
    :param pattern: the same condition as a pattern, for the heading of the report.
    :param depth: the number of segments that make a prefix; None: chosen by the keys.
    :param top: the largest length of a list.
    :param progress: called with the name of each step.
    :param hourly: counts of the same rows; used if the windows are whole hours.
    :raises sbus.errors.UsageError: if there are no rows in the period, or the period is not valid.
    """
    progress("period")
    period = _period(rows if hourly is None else hourly.rows, start, end, last)
    windows = cubes.Windows(period, nice_width(period.end - period.start, _MAX_WINDOWS))
    whole = windows.both
    if hourly is not None and any(time % HOUR for time in (windows.width, period.start, period.end)):
        hourly = None
    if hourly is not None:
        rows = hourly.rows
    us = F.unix_micros("time")
    within = rows.where(
        (F.col("time") >= F.timestamp_micros(F.lit(whole.start)))
        & (F.col("time") < F.timestamp_micros(F.lit(whole.end)))
    ).withColumn("us", us)
    messages = counts_of(within) if hourly is None else hourly.counts.where(_within("us", whole))
    if wanted is not None:
        messages = messages.where(wanted)

    progress("gaps")
    journals = find_journals(within)
    extents = {journal: found.extent for journal, found in journals.items()}
    if not any(extent.end >= period.start for extent in extents.values()):
        # The page would report that nothing stands out.
        raise UsageError(
            f"there are no rows between {format_utc(period.start, 'seconds')} and {format_utc(period.end, 'seconds')}: "
            "name another period, or archive the one that was recorded first"
        )
    gaps = find_gaps(within, journals, whole, 2 * windows.width)
    missing = lost(gaps)
    losses, steps = find_losses(within, period), find_steps(within, period)

    progress("traffic")
    cube = cubes.count_keys(messages, windows).persist(StorageLevel.MEMORY_AND_DISK)
    keys = _by_key(cube).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        before = Span(whole.start, period.start)
        now_total, before_total, new, vanished = cubes.total(keys)
        has_before = length(recorded(before, extents, missing)) > 0 and any(
            e.start < before.end for e in extents.values()
        )
        if depth is None:
            depth = cubes.find_depth(keys.where("n > 0"))
        by_prefix = keys.where("n > 0").groupBy(cubes.prefix("key", depth).alias("p")).agg(F.sum("n").alias("n"))
        largest = by_prefix.orderBy(F.col("n").desc(), "p").limit(cubes.MAX_LABELS).collect()
        labels = [row.p for row in largest if row.n >= _MIN_LABEL_SHARE * now_total[0]]
        traffic = cubes.find_traffic(cube, windows, depth, labels, has_before=has_before)
        progress("top keys")
        top_messages = cubes.find_top(keys, "n", top)
        top_bytes = cubes.find_top(keys, "bytes", top)
        progress("silences")
        heard = {journal: min(period.end, extent.end) for journal, extent in extents.items()}
        intervals = now_total[0] + before_total[0]
        silences, silence_count = find_silences(cube, windows, missing, heard, top, intervals)
        scopes = [(key, False) for key, _, _ in top_messages + top_bytes]
        scopes += [(silence.scope, silence.is_prefix) for silence in silences]
        shapes = cubes.shapes(cube, windows, scopes)
        progress("changes")
        changes = compare(keys, (before, period), missing, depth, top, (new, vanished)) if has_before else None
        progress("payload sizes")
        sizes, histogram = cubes.find_sizes(messages.where(F.col("us") >= period.start), depth, labels)
    finally:
        keys.unpersist()
        cube.unpersist()
    return Report(
        period,
        pattern,
        depth,
        Totals(*now_total, length(recorded(period, extents, missing))),
        Totals(*before_total, length(recorded(before, extents, missing))) if has_before else None,
        traffic,
        [cubes.with_shape(found, shapes[found[0], False]) for found in top_messages],
        [cubes.with_shape(found, shapes[found[0], False]) for found in top_bytes],
        sizes,
        histogram,
        [replace(silence, activity=shapes[silence.scope, silence.is_prefix]) for silence in silences],
        silence_count,
        extents,
        gaps,
        changes,
        losses,
        steps,
    )


def _period(rows: DataFrame, start: datetime | None, end: datetime | None, most: timedelta) -> Span:
    """Return the period of the report, in µs.

    An end that is not given is that of a whole window: a sliver of one would be compared with whole ones.
    """
    first: int | None = _micros(start)
    last: int | None = _micros(end)
    if first is None or last is None:
        row = rows.agg(F.min(F.unix_micros("time")), F.max(F.unix_micros("time"))).collect()[0]
        if row[0] is None:
            raise UsageError(
                "there are no rows to report on: record, and archive, first; or read another lake or journal"
            )
        if last is None:
            last = row[1] + 1
        if first is None:
            first = max(row[0], last - from_seconds(most.total_seconds()))
    if last <= first:
        raise UsageError(
            "the period ends before it begins: nothing was recorded in it, or its two ends are swapped; check both"
        )
    width = nice_width(last - first, _MAX_WINDOWS)
    if end is None:
        last = -(-last // width) * width
    if start is None:
        first = first // width * width
    if 2 * first - last < _MIN_TIME:
        raise UsageError(
            "the period before this one, as long as it, would begin before the year 1: report on a shorter one"
        )
    return Span(first, last)


def _micros(time: datetime | None) -> int | None:
    if time is None:
        return None
    if time.tzinfo is None:
        raise UsageError(f"{time} has no time zone: add one, as in {time.isoformat()}Z")
    return from_datetime(time)


def _by_key(cube: DataFrame) -> DataFrame:
    """Sum each key's messages and bytes in both periods, and collect its journals."""
    now = F.col("now")
    sums = [
        F.sum(F.when(now if later else ~now, F.col(name)).otherwise(0)).alias(name if later else f"{name}_before")
        for later in (True, False)
        for name in ("n", "bytes")
    ]
    return cube.groupBy("key").agg(*sums, F.array_join(F.array_sort(F.collect_set("journal")), ",").alias("journals"))
