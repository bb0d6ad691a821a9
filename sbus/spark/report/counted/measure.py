"""Compute the figures of a report from the counts of hours.

Theory of operation
-------------------

The counts of a month are small, and a report asks dozens of questions about them. Spark spends seconds on planning and
compiling each question, whatever the size of the counts, and some more on starting a JVM. So this module does without
Spark: DuckDB computes the aggregates in this process, from the Parquet files of the cube (`sbus.lake.hourly`), and
`sbus.spark.report.analysis.compose` makes the same report of them.

*Memory is bounded*, however many keys there are. DuckDB's buffers have a limit, beyond which it uses the disk. The
percentiles of silences need all pauses of a key, so keys are looked at in parts. What reaches Python is as small as
from Spark.

*The figures are those of the rows*, as `sbus.spark.report.analysis.measure` computes them with Spark, but for payload
sizes, which the counts round. Two programs for one thing must not drift apart: constants and all that follows the
aggregates are shared, and a property test compares the two on random rows.

Rejected: Spark with fewer or interpreted plans (the start of a JVM alone takes longer than all of this); PyArrow alone
(no window functions, and tables must fit into memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from sbus.journal.clock import HOUR
from sbus.lake.hourly import Hourly
from sbus.spark.report.analysis.compose import compose, period_of, windows_of
from sbus.spark.report.analysis.cube import MAX_DEPTH, MAX_LABELS, Windows, choose_depth, traffic_of
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
from sbus.spark.report.analysis.gaps import Journal
from sbus.spark.report.analysis.publishers import MAX_PREFIXES, publishers_of
from sbus.spark.report.analysis.spans import Span
from sbus.spark.report.counted import changes, gaps, silences, store
from sbus.spark.report.counted.sizes import sizes_of

__all__ = ["measure_counted"]


def measure_counted(
    counted: Hourly,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    last: timedelta = timedelta(days=1),
    wanted: Callable[[str], bool] | None = None,
    pattern: str = "",
    depth: int | None = None,
    top: int = 12,
    progress: Callable[[str], None] = lambda step: None,
) -> Report | None:
    """Compute the traffic of a period, compared with an equal period before it.

    :param counted: the counts of all hours of both periods, or more.
    :param start: the start of the period; None: `last` before its end, or the first row if that is later, and at most a
        window earlier.
    :param end: the end of the period (not included); None: the end of the window of the last row.
    :param last: the length of the period if `start` is None.
    :param wanted: says of a key, as text, whether its messages count; gaps always count.
    :param pattern: the same condition as a pattern, for the heading of the report.
    :param depth: the number of segments that make a prefix; None: chosen by the keys.
    :param top: the largest length of a list.
    :param progress: called with the name of each step.
    :returns: None if the windows are not whole hours, so that it takes rows.
    :raises sbus.errors.UsageError: if there are no rows in the period, or the period is not valid.
    """
    progress("period")
    with store.opened(counted) as database:
        bounds = store.load_rows(database, counted)
        windows = windows_of(period_of(lambda: bounds, start, end, last))
        if any(time % HOUR for time in (windows.width, windows.period.start, windows.period.end)):
            return None
        aggregates = _Counts(database, counted, windows, wanted)
        return compose(aggregates, windows, pattern=pattern, depth=depth, top=top, progress=progress)


class _Counts:
    """The aggregates of counts (`sbus.spark.report.analysis.compose.Aggregates`)."""

    def __init__(
        self, database: store.Database, counted: Hourly, windows: Windows, wanted: Callable[[str], bool] | None
    ) -> None:
        self._database = database
        self._counted = counted
        self._windows = windows
        self._wanted = wanted

    def journals(self) -> dict[str, Journal]:
        return gaps.find_journals(self._database, self._windows.both)

    def gaps(self, journals: dict[str, Journal], tail: int) -> list[Gap]:
        return gaps.find_gaps(self._database, journals, self._windows.both, tail)

    def losses(self) -> list[Loss]:
        return gaps.find_losses(self._database, self._windows.period)

    def steps(self) -> list[ClockStep]:
        return gaps.find_steps(self._database, self._windows.period)

    def count(self) -> None:
        store.fill(self._database, self._counted, self._windows, self._wanted)

    def totals(self) -> tuple[tuple[int, int, int], tuple[int, int, int], int, int]:
        n, size, keys, n_before, size_before, keys_before, new, vanished = self._database.execute(
            "SELECT coalesce(sum(n), 0)::BIGINT, coalesce(sum(bytes), 0)::BIGINT, count(*) FILTER (n > 0), "
            "coalesce(sum(n_before), 0)::BIGINT, coalesce(sum(bytes_before), 0)::BIGINT, "
            "count(*) FILTER (n_before > 0), count(*) FILTER (n_before = 0), count(*) FILTER (n = 0) FROM keys"
        ).fetchall()[0]
        return (n, size, keys), (n_before, size_before, keys_before), new, vanished

    def depth(self) -> int:
        found = self._database.execute(
            "SELECT depth, count(*), max(n) / sum(n)::DOUBLE FROM ("
            "  SELECT depth, shortened(key, depth) AS prefix, sum(n)::BIGINT AS n "
            "  FROM keys, (SELECT unnest(range(1, ? + 1)) AS depth) WHERE n > 0 GROUP BY ALL"
            ") GROUP BY depth",
            [MAX_DEPTH],
        )
        return choose_depth(found.fetchall())

    def busiest(self, depth: int) -> Sequence[tuple[str, int]]:
        return self._database.execute(
            "SELECT shortened(key, ?) AS prefix, sum(n)::BIGINT AS total FROM keys WHERE n > 0 GROUP BY prefix "
            f"ORDER BY total DESC, prefix LIMIT {MAX_LABELS}",
            [depth],
        ).fetchall()

    def traffic(self, depth: int, labels: Sequence[str], *, has_before: bool) -> Traffic:
        self._label(depth, labels)
        found = self._database.execute(
            "SELECT now, number, CASE WHEN now THEN label END AS label, sum(n)::BIGINT, sum(bytes)::BIGINT "
            "FROM cube JOIN labelled USING (id) GROUP BY ALL"
        )
        return traffic_of(found.fetchall(), self._windows, labels, has_before=has_before)

    def _label(self, depth: int, labels: Sequence[str]) -> None:
        """Give each key its prefix, if that is one of the labels, or else null."""
        self._database.execute(
            "CREATE OR REPLACE TABLE labelled AS "
            "SELECT id, key, CASE WHEN prefix IN (SELECT unnest($labels::VARCHAR[])) THEN prefix END AS label "
            "FROM (SELECT id, key, shortened(key, $depth) AS prefix FROM keys)",
            {"labels": list(labels), "depth": depth},
        )

    def top(self, order: str, top: int) -> list[tuple[str, int, int]]:
        return self._database.execute(
            f"SELECT key, n, bytes FROM keys WHERE n > 0 ORDER BY {order} DESC, key LIMIT ?", [top]
        ).fetchall()

    def silences(
        self, missing: dict[str, list[Span]], heard: dict[str, int], top: int, intervals: int
    ) -> tuple[list[Silence], int]:
        return silences.find_silences(self._database, self._windows, missing, heard, top, intervals)

    def shapes(self, scopes: Sequence[tuple[str, bool]]) -> Mapping[tuple[str, bool], list[int]]:
        counts = {scope: [0] * self._windows.count for scope in scopes}
        names = list(counts)
        found = self._database.execute(
            "SELECT scope, number, sum(n)::BIGINT FROM cube JOIN ("
            "  SELECT id, scope FROM keys, ("
            "    SELECT unnest(range(len($texts))) AS scope, unnest($texts::VARCHAR[]) AS text, "
            "    unnest($prefixes::BOOLEAN[]) AS is_prefix"
            "  ) WHERE CASE WHEN is_prefix THEN starts_with(key, text) ELSE key = text END"
            ") USING (id) WHERE now GROUP BY ALL",
            {"texts": [text for text, _ in names], "prefixes": [is_prefix for _, is_prefix in names]},
        )
        for scope, number, n in found.fetchall():
            counts[names[scope]][min(number, self._windows.count - 1)] += n
        return counts

    def changes(self, missing: dict[str, list[Span]], depth: int, top: int, counts: tuple[int, int]) -> Changes:
        return changes.compare(self._database, self._windows, missing, depth, top, counts)

    def sizes(self, depth: int, labels: Sequence[str]) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
        self._label(depth, labels)
        found = self._database.execute(
            "SELECT label, size, sum(n)::BIGINT, sum(bytes)::BIGINT "
            f"FROM {store.READ} AS counts JOIN labelled USING (key) "
            "WHERE first >= $start AND first < $until GROUP BY ALL",
            {
                "paths": store.literal(self._counted.counts),
                "start": self._windows.period.start,
                "until": self._windows.period.end,
            },
        )
        return sizes_of(found.fetchall(), labels)

    def publishers(self, depth: int, top: int) -> tuple[list[Publisher], int]:
        self._database.execute(
            "CREATE TABLE published AS SELECT publisher, id, key, sum(n)::BIGINT AS n, sum(bytes)::BIGINT AS bytes "
            f"FROM {store.READ} AS counts JOIN names USING (key) "
            "WHERE first >= $start AND first < $until GROUP BY ALL",
            {
                "paths": store.literal(self._counted.counts),
                "start": self._windows.period.start,
                "until": self._windows.period.end,
            },
        )
        users = self._database.execute(
            "SELECT publisher, sum(n)::BIGINT, sum(bytes)::BIGINT, count(*) FROM published GROUP BY publisher"
        ).fetchall()
        prefixes = self._database.execute(
            "SELECT publisher, prefix, n FROM ("
            "  SELECT publisher, shortened(key, $depth) AS prefix, sum(n)::BIGINT AS n, "
            "  row_number() OVER (PARTITION BY publisher ORDER BY sum(n) DESC, prefix) AS rank "
            "  FROM published GROUP BY publisher, prefix"
            ") WHERE rank <= $most ORDER BY publisher, rank",
            {"depth": depth, "most": MAX_PREFIXES},
        ).fetchall()
        return publishers_of(users, prefixes, top)
