"""Compute the figures of a report from rows, with Spark.

Spark passes over the rows, and keeps the cube (`sbus.spark.report.analysis.cube`) for all that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from sbus.spark.report.analysis import cube as cubes
from sbus.spark.report.analysis import gaps as gap
from sbus.spark.report.analysis.changes import compare
from sbus.spark.report.analysis.compose import compose, period_of, windows_of
from sbus.spark.report.analysis.figures import (
    Changes,
    ClockStep,
    Gap,
    Loss,
    Publisher,
    Report,
    Silence,
    Sizes,
    Traffic,
)
from sbus.spark.report.analysis.publishers import find_publishers, publisher
from sbus.spark.report.analysis.silences import find_silences
from sbus.spark.report.analysis.spans import Span
from sbus.spark.rows import is_message, payload_size

__all__ = ["measure"]


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
    :raises sbus.errors.UsageError: if there are no rows in the period, or the period is not valid.
    """
    progress("period")
    windows = windows_of(period_of(lambda: _bounds(rows), start, end, last))
    with closing(_Rows(rows, windows, wanted)) as aggregates:
        return compose(aggregates, windows, pattern=pattern, depth=depth, top=top, progress=progress)


def _bounds(rows: DataFrame) -> tuple[int, int] | None:
    row = rows.agg(F.min(F.unix_micros("time")), F.max(F.unix_micros("time"))).collect()[0]
    return None if row[0] is None else (row[0], row[1])


class _Rows:
    """The aggregates of rows (`sbus.spark.report.analysis.compose.Aggregates`)."""

    _published: DataFrame
    """The cube with a ``publisher`` in each row."""
    _cube: DataFrame
    _keys: DataFrame
    """``key``, ``n`` and ``bytes`` of the period, ``n_before`` and ``bytes_before``, and ``journals``."""

    def __init__(self, rows: DataFrame, windows: cubes.Windows, wanted: Column | None) -> None:
        self._windows = windows
        whole = windows.both
        self._rows = rows.where(
            (F.col("time") >= F.timestamp_micros(F.lit(whole.start)))
            & (F.col("time") < F.timestamp_micros(F.lit(whole.end)))
        ).withColumn("us", F.unix_micros("time"))
        messages = _messages(self._rows)
        self._messages = messages if wanted is None else messages.where(wanted)
        self._cached: list[DataFrame] = []

    def close(self) -> None:
        """Give the memory of the executors back."""
        while self._cached:
            self._cached.pop().unpersist()

    def journals(self) -> dict[str, gap.Journal]:
        return gap.find_journals(self._rows)

    def gaps(self, journals: dict[str, gap.Journal], tail: int) -> list[Gap]:
        return gap.find_gaps(self._rows, journals, self._windows.both, tail)

    def losses(self) -> list[Loss]:
        return gap.find_losses(self._rows, self._windows.period)

    def steps(self) -> list[ClockStep]:
        return gap.find_steps(self._rows, self._windows.period)

    def count(self) -> None:
        self._published = self._cache(cubes.count_keys(self._messages, self._windows))
        self._cube = self._cache(cubes.of_all_publishers(self._published))
        self._keys = self._cache(_by_key(self._cube))

    def _cache(self, frame: DataFrame) -> DataFrame:
        self._cached.append(frame.persist(StorageLevel.MEMORY_AND_DISK))
        return self._cached[-1]

    def totals(self) -> tuple[tuple[int, int, int], tuple[int, int, int], int, int]:
        return cubes.total(self._keys)

    def depth(self) -> int:
        return cubes.find_depth(self._keys.where("n > 0"))

    def busiest(self, depth: int) -> Sequence[tuple[str, int]]:
        by_prefix = self._keys.where("n > 0").groupBy(cubes.prefix("key", depth).alias("p")).agg(F.sum("n").alias("n"))
        largest = by_prefix.orderBy(F.col("n").desc(), "p").limit(cubes.MAX_LABELS)
        return [(row.p, row.n) for row in largest.collect()]

    def traffic(self, depth: int, labels: Sequence[str], *, has_before: bool) -> Traffic:
        return cubes.find_traffic(self._cube, self._windows, depth, labels, has_before=has_before)

    def top(self, order: str, top: int) -> list[tuple[str, int, int]]:
        return cubes.find_top(self._keys, order, top)

    def silences(
        self, missing: dict[str, list[Span]], heard: dict[str, int], top: int, intervals: int
    ) -> tuple[list[Silence], int]:
        return find_silences(self._cube, self._windows, missing, heard, top, intervals)

    def shapes(self, scopes: Sequence[tuple[str, bool]]) -> Mapping[tuple[str, bool], list[int]]:
        return cubes.shapes(self._cube, self._windows, scopes)

    def changes(self, missing: dict[str, list[Span]], depth: int, top: int, counts: tuple[int, int]) -> Changes:
        period = self._windows.period
        periods = Span(self._windows.both.start, period.start), period
        return compare(self._keys, periods, missing, depth, top, counts)

    def sizes(self, depth: int, labels: Sequence[str]) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
        period = self._messages.where(F.col("us") >= self._windows.period.start)
        return cubes.find_sizes(period, depth, labels)

    def publishers(self, depth: int, top: int) -> tuple[list[Publisher], int]:
        return find_publishers(self._published.where("now"), depth, top)


def _messages(rows: DataFrame) -> DataFrame:
    """Return each message as counts of one.

    :param rows: the columns of a journal, and ``us``.
    :returns: ``journal``, ``key``, ``us``, ``publisher``, ``size``, ``n``, ``bytes``, ``first``, ``last``.
    """
    size = payload_size()
    return rows.where(is_message()).select(
        "journal",
        "key",
        "us",
        publisher(rows).alias("publisher"),
        size.alias("size"),
        F.lit(1).cast("long").alias("n"),
        size.alias("bytes"),
        F.col("us").alias("first"),
        F.col("us").alias("last"),
    )


def _by_key(cube: DataFrame) -> DataFrame:
    """Sum each key's messages and bytes in both periods, and collect its journals."""
    now = F.col("now")
    sums = [
        F.sum(F.when(now if later else ~now, F.col(name)).otherwise(0)).alias(name if later else f"{name}_before")
        for later in (True, False)
        for name in ("n", "bytes")
    ]
    return cube.groupBy("key").agg(*sums, F.array_join(F.array_sort(F.collect_set("journal")), ",").alias("journals"))
