"""Find silences as `sbus.spark.report.analysis.silences` does, in a database of counts.

Keys and prefixes are looked at in parts of bounded size, so memory does not grow with their number.
"""

from __future__ import annotations

from typing import Any

from sbus.spark.report.analysis import silences as rules
from sbus.spark.report.analysis.cube import MAX_DEPTH, Windows
from sbus.spark.report.analysis.figures import Silence
from sbus.spark.report.analysis.spans import Span
from sbus.spark.report.counted.store import Database, add_missing

__all__ = ["find_silences"]

_MAX_PART = 2_000_000
"""Counts of keys and prefixes in a part: about 300 MB."""

_SCOPES = """
CREATE TABLE scopes_of AS
SELECT id, key AS text, false AS is_prefix FROM keys
UNION ALL
SELECT id, shortened(key, depth), true
FROM keys, (SELECT unnest(range(1, $depth + 1)) AS depth) WHERE len(string_split(key, '/')) > depth
"""

_SCOPE_NAMES = """
CREATE TABLE scopes AS
SELECT row_number() OVER () AS scope, text, is_prefix FROM (SELECT DISTINCT text, is_prefix FROM scopes_of)
"""

_PAUSES = f"""
CREATE OR REPLACE TEMP TABLE pauses AS
WITH spoken AS (
    SELECT journal, scope, now, number, sum(n)::BIGINT AS n, min(first) AS first, max(last) AS last
    FROM cube JOIN scopes_of USING (id) JOIN scopes USING (text, is_prefix)
    WHERE scope % $parts = $part GROUP BY ALL
), followed AS (
    SELECT *, lead(first) OVER (PARTITION BY journal, scope ORDER BY first) AS until FROM spoken
), pauses AS (
    SELECT journal, scope, first,
        CASE WHEN n > 1 THEN (last - first) / (n - 1) END AS inside,
        last AS start, followed.until AS ended, coalesce(followed.until, heard.until) AS until
    FROM followed LEFT JOIN heard USING (journal)
), long AS (
    SELECT pauses.journal, scope, pauses.start,
        coalesce(behind.sum + least(pauses.until, behind.until) - behind.start, 0)
            - coalesce(ahead.sum + least(pauses.start, ahead.until) - ahead.start, 0) AS unrecorded
    FROM (SELECT journal, scope, start, until FROM pauses WHERE until - start >= $width) AS pauses
    ASOF LEFT JOIN missing AS ahead ON pauses.journal = ahead.journal AND pauses.start >= ahead.start
    ASOF LEFT JOIN missing AS behind ON pauses.journal = behind.journal AND pauses.until >= behind.start
), net AS (
    SELECT pauses.*, coalesce(unrecorded, 0)::BIGINT AS unrecorded,
        (pauses.until - pauses.start - coalesce(unrecorded, 0))::BIGINT AS net
    FROM pauses LEFT JOIN long USING (journal, scope, start)
)
SELECT *, (sum(over) OVER around - over)::BIGINT / nullif(count(*) OVER around - 1, 0) AS around
FROM (SELECT *, CASE WHEN ended IS NULL THEN 0 ELSE net END AS over FROM net)
WINDOW around AS (
    PARTITION BY journal, scope ORDER BY first
    ROWS BETWEEN {rules.NEIGHBOURS} PRECEDING AND {rules.NEIGHBOURS} FOLLOWING
)
"""

_SILENT = f"""
WITH samples AS (
    SELECT journal, scope, start, ended, inside AS value, NULL::BIGINT AS length FROM pauses
    WHERE inside IS NOT NULL
    UNION ALL
    SELECT journal, scope, start, ended, net::DOUBLE, net FROM pauses WHERE ended IS NOT NULL
), rhythm AS (
    SELECT journal, scope,
        quantile_disc(value, [0.5, 0.9]) AS usual,
        max(length) FILTER (ended < $period) AS longest_before,
        (max(length, 3) FILTER (length IS NOT NULL))[3] AS third,
        max(coalesce(ended, start)) - min(start) AS known
    FROM samples GROUP BY ALL HAVING count(*) >= {rules.MIN_SAMPLES}
)
SELECT journals.name, text, is_prefix, start, ended, until, unrecorded, usual[1], longest_before, net
FROM pauses JOIN rhythm USING (journal, scope) JOIN scopes USING (scope)
JOIN journals ON pauses.journal = journals.number
WHERE net >= $width AND until > $period
    AND net > greatest(
        usual[2] + (usual[2] - usual[1]) / $scale * $by_chance, usual[2] * $ratio, around * $ratio,
        third * $ratio_to_third, longest_before * $ratio_to_before
    )
    AND net < known * $ratio_to_known
    -- A key without messages in the period has vanished, which the changes report.
    AND (ended IS NOT NULL OR start >= $period)
ORDER BY ended IS NOT NULL, net DESC, length(text), text, is_prefix
LIMIT {rules.MAX_CANDIDATES}
"""


def find_silences(
    database: Database,
    windows: Windows,
    missing: dict[str, list[Span]],
    heard: dict[str, int],
    top: int,
    intervals: int,
) -> tuple[list[Silence], int]:
    """Return the silences of the period, and their number.

    :param missing: for each journal, the time in which messages may be missing.
    :param heard: for each journal, the end of its rows in the period (µs).
    :param intervals: the number of intervals between messages that are looked at, of all keys together.
    """
    add_missing(database, missing)
    database.execute("CREATE TABLE heard (journal BIGINT, until BIGINT)")
    for name, until in heard.items():
        database.execute("INSERT INTO heard SELECT number, ? FROM journals WHERE name = ?", [until, name])
    database.execute(_SCOPES, {"depth": MAX_DEPTH})
    database.execute(_SCOPE_NAMES)
    [(rows,)] = database.execute("SELECT count(*) FROM cube JOIN scopes_of USING (id)").fetchall()
    parts = 1 + rows // _MAX_PART
    rhythm: dict[str, float] = {
        "width": windows.width,
        "period": windows.period.start,
        "scale": rules.SCALE,
        "by_chance": rules.chance_factor(intervals),
        "ratio": float(rules.MIN_PAUSE_RATIO),
        "ratio_to_third": float(rules.MIN_RATIO_TO_THIRD),
        "ratio_to_before": float(rules.MIN_RATIO_TO_BEFORE),
        "ratio_to_known": rules.MAX_RATIO_TO_KNOWN,
    }
    found: list[tuple[Any, ...]] = []
    for part in range(parts):
        database.execute(_PAUSES, {"parts": parts, "part": part, "width": windows.width})
        found += database.execute(_SILENT, rhythm).fetchall()
    found.sort(key=_order)
    return rules.pick([_silence(row) for row in found[: rules.MAX_CANDIDATES]], top)


def _order(row: tuple[Any, ...]) -> tuple[bool, int, int, bytes, bool]:
    _, text, is_prefix, _, ended, *_, net = row
    return ended is not None, -net, len(text), text.encode(), is_prefix


def _silence(row: tuple[Any, ...]) -> Silence:
    journal, text, is_prefix, start, ended, until, unrecorded, usual, longest_before, _ = row
    return Silence(journal, text, is_prefix, 1, start, ended, until - start, unrecorded, round(usual), longest_before)
