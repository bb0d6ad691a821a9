"""Compare a period with the one before: new and vanished keys, changed rates.

Rates are per second of *recorded* time, so that a loss does not look like less traffic. Each journal counts by its own:
of two hosts of which one was not recorded for half a day, the rates of the other stay as they are. Keys that were not
recorded in one of the periods are neither new nor gone in the other.

A rate counts as changed if it differs by the factor `MIN_RATE_RATIO` and by more than chance explains. Random counts
vary with their square root, and the difference of two square roots has the same spread for all counts, so square roots
are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from sbus.journal.clock import to_seconds
from sbus.report.engine.store import Database
from sbus.report.engine.windows import MAX_DEPTH
from sbus.report.figures import Change, Changes

__all__ = ["compare", "count_rates"]

MIN_RATE_RATIO = 1.25
"""The factor between two rates from which on the change is reported."""
MIN_ROOT_DIFFERENCE = 2.5
"""The difference between the square roots of two counts that chance hardly explains."""
_MAX_PREFIXES = 12
"""Prefixes whose rates are compared."""

_RATED = """
CREATE TABLE rated AS
SELECT id, key, n, n_before, rate, rate_before, byte_rate, byte_rate_before, is_heard, was_heard
FROM keys JOIN (
    SELECT id,
        coalesce(fsum(n / recorded) FILTER (now), 0) AS rate,
        coalesce(fsum(n / recorded_before) FILTER (NOT now), 0) AS rate_before,
        coalesce(fsum(bytes / recorded) FILTER (now), 0) AS byte_rate,
        coalesce(fsum(bytes / recorded_before) FILTER (NOT now), 0) AS byte_rate_before,
        bool_or(is_heard) AS is_heard, bool_or(was_heard) AS was_heard
    FROM (SELECT journal, id, now, sum(n) AS n, sum(bytes) AS bytes FROM cube GROUP BY ALL)
    JOIN seconds USING (journal) GROUP BY id
) USING (id)
"""

_SUMS = "sum(n)::BIGINT AS n, sum(n_before)::BIGINT AS n_before, fsum(rate) AS rate, fsum(rate_before) AS rate_before"

_SCOPES = f"""
CREATE TABLE scope_sums AS
SELECT scope, above, min(key) AS key, count(*) AS keys, bool_and(is_heard) AS is_heard,
    bool_and(was_heard) AS was_heard, {_SUMS}
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
FROM rated GROUP BY scope ORDER BY greatest(sum(n), sum(n_before)) DESC, scope LIMIT {_MAX_PREFIXES}
"""


def count_rates(database: Database, recorded: Mapping[str, tuple[int, int]]) -> None:
    """Make the table ``rated``: the rates of each key in both periods, and whether its journals were written in them.

    :param recorded: for each journal the µs in which it was written, in the period before and in this one.
    """
    database.execute(
        "CREATE TABLE seconds "
        "(journal BIGINT, recorded_before DOUBLE, recorded DOUBLE, was_heard BOOLEAN, is_heard BOOLEAN)"
    )
    for number, name in database.execute("SELECT id, name FROM journals").fetchall():
        before, now = recorded.get(name, (0, 0))
        # A message in a time that does not count as recorded: its rate is unknown, but not infinite.
        seconds = [max(1e-6, to_seconds(time)) for time in (before, now)]
        database.execute("INSERT INTO seconds VALUES (?, ?, ?, ?, ?)", [number, *seconds, before > 0, now > 0])
    database.execute(_RATED)


def compare(database: Database, depth: int, top: int, counts: tuple[int, int]) -> Changes:
    """Return the changes; each list has at most `top` of them.

    :param counts: the numbers of new and of vanished keys.
    """
    database.execute(_SCOPES, {"depth": MAX_DEPTH})
    return Changes(
        _listed(database, _BY_PREFIX, {"depth": depth}),
        _only(database, ("n", "n_before", "was_heard"), top),
        counts[0],
        _only(database, ("n_before", "n", "is_heard"), top),
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
        FROM (
            -- n / rate is the recorded time of the key.
            SELECT *, abs(sqrt(rate_before * n / rate) - sqrt(n)) AS moved FROM rated WHERE n > 0 AND n_before > 0
        )
        WHERE moved > $difference AND greatest(rate / rate_before, rate_before / rate) >= $ratio
            AND rate {sign} rate_before
        ORDER BY moved DESC, key LIMIT $top
        """,
        {"difference": MIN_ROOT_DIFFERENCE, "ratio": MIN_RATE_RATIO, "top": top},
    )


def _only(database: Database, names: tuple[str, str, str], top: int) -> list[Change]:
    """Return what occurs in one period only: a prefix if all keys below it do, or else the keys.

    :param names: the columns of the messages in that period and in the other one, and whether that was recorded.
    """
    here, there, is_known = names
    return _listed(
        database,
        f"""
        SELECT CASE WHEN keys = 1 THEN key ELSE scope END AS named, {_COLUMNS} FROM scope_sums
        WHERE {there} = 0 AND {is_known}
            AND (above = '' OR above IN (SELECT scope FROM scope_sums WHERE {there} > 0 OR NOT {is_known}))
        ORDER BY {here} DESC, named LIMIT $top
        """,
        {"top": top},
    )
