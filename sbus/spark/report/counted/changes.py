"""Compare a period with the one before as `sbus.spark.report.analysis.changes` does, in a database of counts."""

from __future__ import annotations

from sbus.journal.clock import to_seconds
from sbus.spark.report.analysis import changes as rules
from sbus.spark.report.analysis.cube import MAX_DEPTH, Windows
from sbus.spark.report.analysis.figures import Change, Changes
from sbus.spark.report.analysis.spans import Span
from sbus.spark.report.counted.store import Database

__all__ = ["compare"]

_RATED = """
CREATE TABLE rated AS
SELECT key, n, n_before, coalesce(now, $whole) AS seconds, n / coalesce(now, $whole) AS rate,
    n_before / coalesce(before, $whole) AS rate_before
FROM keys LEFT JOIN seconds USING (journals)
"""

_SUMS = "sum(n)::BIGINT AS n, sum(n_before)::BIGINT AS n_before, fsum(rate) AS rate, fsum(rate_before) AS rate_before"

_SCOPES = f"""
CREATE TABLE scope_sums AS
SELECT scope, above, min(key) AS key, count(*) AS keys, {_SUMS}
FROM (
    SELECT *, CASE WHEN depth <= $depth THEN shortened(key, depth) ELSE key END AS scope,
        CASE WHEN depth > 1 THEN shortened(key, depth - 1) ELSE '' END AS above
    FROM (SELECT *, unnest(range(1, least(len(string_split(key, '/')), $depth + 1) + 1)) AS depth FROM rated)
)
GROUP BY scope, above
"""

_COLUMNS = "keys, n, n_before, rate, rate_before"

_BY_PREFIX = f"""
SELECT shortened(key, $depth) AS scope, count(*) AS keys, {_SUMS}
FROM rated GROUP BY scope ORDER BY greatest(sum(n), sum(n_before)) DESC, scope LIMIT {rules.MAX_PREFIXES}
"""


def compare(
    database: Database, windows: Windows, missing: dict[str, list[Span]], depth: int, top: int, counts: tuple[int, int]
) -> Changes:
    """Return the changes; each list has at most `top` of them.

    :param missing: for each journal, the time in which messages may be missing.
    :param counts: the numbers of new and of vanished keys.
    """
    period = windows.period
    before = Span(windows.both.start, period.start)
    sets = database.execute(f"SELECT DISTINCT journals FROM keys ORDER BY 1 LIMIT {rules.MAX_JOURNAL_SETS}").fetchall()
    database.execute("CREATE TABLE seconds (journals VARCHAR, before DOUBLE, now DOUBLE)")
    for (journals,) in sets:
        seconds = [rules.seconds_recorded(journals, each, missing) for each in (before, period)]
        database.execute("INSERT INTO seconds VALUES (?, ?, ?)", [journals, *seconds])
    database.execute(_RATED, {"whole": to_seconds(period.end - period.start)})
    database.execute(_SCOPES, {"depth": MAX_DEPTH})
    return Changes(
        _listed(database, _BY_PREFIX, {"depth": depth}),
        _only(database, "n", "n_before", top),
        counts[0],
        _only(database, "n_before", "n", top),
        counts[1],
        _changed(database, ">", top),
        _changed(database, "<", top),
    )


def _listed(database: Database, query: str, parameters: dict[str, float]) -> list[Change]:
    return [Change(*row) for row in database.execute(query, parameters).fetchall()]


def _changed(database: Database, sign: str, top: int) -> list[Change]:
    return _listed(
        database,
        f"""
        SELECT key, 1, n, n_before, rate, rate_before
        FROM (SELECT *, abs(sqrt(rate_before * seconds) - sqrt(n)) AS moved FROM rated WHERE n > 0 AND n_before > 0)
        WHERE moved > $difference AND greatest(rate / rate_before, rate_before / rate) >= $ratio
            AND rate {sign} rate_before
        ORDER BY moved DESC, key LIMIT $top
        """,
        {"difference": rules.MIN_ROOT_DIFFERENCE, "ratio": rules.MIN_RATE_RATIO, "top": top},
    )


def _only(database: Database, here: str, there: str, top: int) -> list[Change]:
    """Return what occurs in one period only: a prefix if all keys below it do, or else the keys."""
    return _listed(
        database,
        f"""
        SELECT CASE WHEN keys = 1 THEN key ELSE scope END AS named, {_COLUMNS} FROM scope_sums
        WHERE {there} = 0 AND (above = '' OR above IN (SELECT scope FROM scope_sums WHERE {there} > 0))
        ORDER BY {here} DESC, named LIMIT $top
        """,
        {"top": top},
    )
