"""Find keys and prefixes that fell silent against their usual rhythm.

A pause longer than a window lies between two windows with messages of the key, so the cube has every such pause
exactly; shorter pauses are not searched. Time in which nothing was recorded is no pause. A pause is a *break* if it is
longer than `_MIN_PAUSE_RATIO` times the 90th percentile of the pauses of the key; else it belongs to its rhythm. A
break counts as a silence if it is longer than each of these:

=================================================  ===================================================================
limit                                              why
=================================================  ===================================================================
`_MIN_PAUSE_RATIO` times the mean around it        A key with less traffic at night has longer pauses then.
`_MIN_RATIO_TO_THIRD` times its third longest      The pauses of both periods count.
`_MIN_RATIO_TO_BEFORE` times its longest before    A key that rests every night is not silent. The pauses of the period
                                                   before count.
what chance makes of messages at random times      The more intervals are looked at, the longer is the longest pause.
                                                   The tail of the pauses is taken as exponential, as of a Poisson
                                                   process, with the scale that the median and the 90th percentile
                                                   show; it is near 0 for regular messages. By chance, `_FALSE_ALARMS`
                                                   pauses of a whole report would be longer.
what chance makes the pauses between bursts        A key whose other breaks take more than a tenth of the time of its
                                                   rhythm comes in *bursts*, and its rhythm is theirs. These pauses
                                                   are taken as exponential, with a mean that the other breaks show,
                                                   the less exactly the fewer they are. With a few bursts nothing is
                                                   a silence.
=================================================  ===================================================================

The pauses before the first message and after the last one are breaks too, if they are that long: of a rest each
night, 48 hours show one and the ends of two. A break that is longer than the key is known to have kept its rhythm is no
silence: the key came once, and left.

Keys and prefixes are looked at in parts of bounded size, so memory does not grow with their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sbus.report.engine.store import Database, add_missing
from sbus.report.engine.windows import MAX_DEPTH, Windows
from sbus.report.figures import Silence
from sbus.report.spans import Span

__all__ = ["find_silences"]

_MIN_PAUSE_RATIO = 8
"""A plant can send an eighth as often at night: the demo's does."""
_MIN_RATIO_TO_BEFORE = 1.5
_MIN_RATIO_TO_THIRD = 3
_STEADY = 0.1
"""The largest ratio of other breaks to the rhythm of a key that does not come in bursts: it failed once or twice."""
_SCALE = math.log(5)
"""The ratio of p90 - p50 to the scale of an exponential tail."""
_FALSE_ALARMS = 0.01
"""Silences of a report that are expected by chance."""
_MIN_SAMPLES = 10
"""Pauses and intervals that a rhythm needs."""
_MAX_CANDIDATES = 500
"""Pauses that are brought to the driver, the longest first."""
_NEIGHBOURS = 8
"""Pauses on either side that a pause is compared with."""
_MAX_PART = 2_000_000
"""Counts of keys and prefixes in a part: about 300 MB."""

_SCOPES = """
CREATE TEMP TABLE texts AS
SELECT id, key AS text, false AS is_prefix FROM keys
UNION ALL
SELECT id, shortened(key, depth), true
FROM keys, (SELECT unnest(range(1, $depth + 1)) AS depth) WHERE len(string_split(key, '/')) > depth
"""

_SCOPE_NAMES = """
CREATE TABLE scopes AS
SELECT row_number() OVER () AS scope, text, is_prefix FROM (SELECT DISTINCT text, is_prefix FROM texts)
"""

_SCOPES_OF = """
CREATE TABLE scopes_of AS SELECT id, scope FROM texts JOIN scopes USING (text, is_prefix)
"""

_PAUSES = """
CREATE OR REPLACE TEMP TABLE pauses AS
WITH spoken AS (
    SELECT journal, scope, now, number, sum(n)::BIGINT AS n, min(first) AS first, max(last) AS last
    FROM cube JOIN scopes_of USING (id)
    WHERE scope % $parts = $part GROUP BY ALL
), followed AS (
    SELECT *, lead(first) OVER (PARTITION BY journal, scope ORDER BY first) AS until FROM spoken
), pauses AS (
    SELECT journal, scope, first, false AS is_first,
        CASE WHEN n > 1 THEN (last - first) / (n - 1) END AS inside,
        last AS start, followed.until AS ended, coalesce(followed.until, heard.until) AS until
    FROM followed LEFT JOIN heard USING (journal)
    UNION ALL
    SELECT journal, scope, $whole, true, NULL, $whole, min(first), min(first) FROM spoken GROUP BY journal, scope
), long AS (
    SELECT pauses.journal, scope, pauses.start,
        coalesce(behind.sum + least(pauses.until, behind.until) - behind.start, 0)
            - coalesce(ahead.sum + least(pauses.start, ahead.until) - ahead.start, 0) AS unrecorded
    FROM (
        SELECT journal, scope, start, pauses.until FROM pauses JOIN (
            SELECT journal, min(start) AS least, max(until) AS most FROM missing GROUP BY journal
        ) USING (journal) WHERE pauses.until - start >= $width AND pauses.until > least AND start < most
    ) AS pauses
    ASOF LEFT JOIN missing AS ahead ON pauses.journal = ahead.journal AND pauses.start >= ahead.start
    ASOF LEFT JOIN missing AS behind ON pauses.journal = behind.journal AND pauses.until >= behind.start
), net AS (
    SELECT pauses.*, coalesce(unrecorded, 0)::BIGINT AS unrecorded,
        (pauses.until - pauses.start - coalesce(unrecorded, 0))::BIGINT AS net
    FROM pauses LEFT JOIN long USING (journal, scope, start)
)
SELECT *, ended IS NOT NULL AND NOT is_first AS is_whole FROM net
"""

_SILENT = f"""
CREATE OR REPLACE TEMP TABLE candidates AS
WITH samples AS (
    SELECT journal, scope, start, ended, inside AS value, NULL::BIGINT AS length FROM pauses
    WHERE inside IS NOT NULL
    UNION ALL
    SELECT journal, scope, start, ended, net::DOUBLE, net FROM pauses WHERE is_whole
), rhythm AS (
    SELECT journal, scope,
        quantile_disc(value, [0.5, 0.9]) AS usual,
        max(length) FILTER (ended < $period) AS longest_before,
        (max(length, 3) FILTER (length IS NOT NULL))[3] AS third,
        max(coalesce(ended, start)) - min(start) AS known
    FROM samples GROUP BY ALL HAVING count(*) >= {_MIN_SAMPLES}
), breaks AS (
    SELECT journal, scope, count(*) FILTER (is_whole) AS breaks, count(*) FILTER (NOT is_whole) AS ends,
        coalesce(sum(net) FILTER (is_whole), 0)::BIGINT AS rest,
        coalesce(sum(net) FILTER (NOT is_whole), 0)::BIGINT AS rest_at_ends
    FROM pauses JOIN rhythm USING (journal, scope) WHERE net > usual[2] * $ratio GROUP BY ALL
), judged AS (
    -- A break that has ended is compared with all others, and one that has not with those that have.
    SELECT *, known - rest AS active,
        CASE WHEN is_whole THEN breaks - 1 + ends ELSE breaks END AS other_breaks,
        CASE WHEN is_whole THEN rest - net + rest_at_ends ELSE rest END AS others
    FROM pauses JOIN rhythm USING (journal, scope) JOIN breaks USING (journal, scope)
    WHERE net >= $width AND until > $period AND net > usual[2] * $ratio AND NOT is_first
)
SELECT journal, scope, first, start, ended, until, unrecorded, net, usual[1] AS interval, longest_before
FROM judged
WHERE net > greatest(
        usual[2] + (usual[2] - usual[1]) / $scale * ln($by_chance), third * $ratio_to_third,
        longest_before * $ratio_to_before
    )
    AND net < active
    AND (others <= active * $steady OR net > others * (pow($by_chance, 1 / other_breaks) - 1))
    -- A key without messages in the period has vanished, which the changes report.
    AND (ended IS NOT NULL OR start >= $period)
"""

_AROUND = f"""
WITH near AS (
    SELECT journal, scope, first, over,
        (sum(over) OVER around - over)::BIGINT / nullif(count(*) OVER around - 1, 0) AS around
    FROM (
        SELECT journal, scope, first, CASE WHEN ended IS NULL THEN 0 ELSE net END AS over
        FROM pauses SEMI JOIN candidates USING (journal, scope) WHERE NOT is_first
    )
    WINDOW around AS (
        PARTITION BY journal, scope ORDER BY first
        ROWS BETWEEN {_NEIGHBOURS} PRECEDING AND {_NEIGHBOURS} FOLLOWING
    )
)
SELECT journals.name, text, is_prefix, start, ended, until, unrecorded, interval, longest_before, net
FROM candidates JOIN near USING (journal, scope, first) JOIN scopes USING (scope)
JOIN journals ON candidates.journal = journals.id
WHERE around IS NULL OR net > around * $ratio
ORDER BY ended IS NOT NULL, net DESC, length(text), text, is_prefix
LIMIT {_MAX_CANDIDATES}
"""


def find_silences(
    database: Database,
    windows: Windows,
    missing: Mapping[str, list[Span]],
    heard: Mapping[str, int],
    top: int,
    intervals: int,
    max_part: int = _MAX_PART,
) -> tuple[list[Silence], int]:
    """Return the silences of the period, and their number.

    :param missing: for each journal, the time in which messages may be missing.
    :param heard: for each journal, the end of its rows in the period (µs).
    :param intervals: the number of intervals between messages that are looked at, of all keys together.
    :param max_part: counts of keys and prefixes to look at together, about.
    """
    add_missing(database, missing)
    database.execute("CREATE TABLE heard (journal BIGINT, until BIGINT)")
    for name, until in heard.items():
        database.execute("INSERT INTO heard SELECT id, ? FROM journals WHERE name = ?", [until, name])
    database.execute(_SCOPES, {"depth": MAX_DEPTH})
    database.execute(_SCOPE_NAMES)
    database.execute(_SCOPES_OF)
    [(rows,)] = database.execute("SELECT count(*) FROM cube JOIN scopes_of USING (id)").fetchall()
    parts = 1 + rows // max_part
    rhythm: dict[str, float] = {
        "width": windows.width,
        "period": windows.period.start,
        "scale": _SCALE,
        "by_chance": _by_chance(intervals),
        "ratio": float(_MIN_PAUSE_RATIO),
        "steady": _STEADY,
        "ratio_to_third": float(_MIN_RATIO_TO_THIRD),
        "ratio_to_before": float(_MIN_RATIO_TO_BEFORE),
    }
    found: list[tuple[Any, ...]] = []
    for part in range(parts):
        database.execute(_PAUSES, {"parts": parts, "part": part, "width": windows.width, "whole": windows.both.start})
        database.execute(_SILENT, rhythm)
        found += database.execute(_AROUND, {"ratio": rhythm["ratio"]}).fetchall()
    found.sort(key=_order)
    return _pick([_silence(row) for row in found[:_MAX_CANDIDATES]], top)


def _order(row: tuple[Any, ...]) -> tuple[bool, int, int, bytes, bool]:
    _, text, is_prefix, _, ended, *_, net = row
    return ended is not None, -net, len(text), text.encode(), is_prefix


def _silence(row: tuple[Any, ...]) -> Silence:
    journal, text, is_prefix, start, ended, until, unrecorded, usual, longest_before, _ = row
    return Silence(journal, text, is_prefix, 1, start, ended, until - start, unrecorded, round(usual), longest_before)


def _pick(candidates: list[Silence], top: int) -> tuple[list[Silence], int]:
    """Return the silences to report, and their number, out of those of keys and of prefixes."""
    found = _merge_prefixes(candidates)
    found.sort(key=lambda s: (s.end is not None, -s.length, s.scope))
    return found[:top], len(found)


def _by_chance(intervals: int) -> float:
    """Return how many pauses as long as p90, or longer, come to one that a report must not take for a silence.

    Keys and their prefixes are looked at, hence `MAX_DEPTH`. Of an exponential tail, P(pause > p90 + x) is
    0.1 exp(-x / scale), so x is the logarithm of this, in scales.
    """
    return max(1.0, 0.1 * intervals * MAX_DEPTH / _FALSE_ALARMS)


def _merge_prefixes(silences: list[Silence]) -> list[Silence]:
    """Leave out keys whose prefix is reported, and prefixes with a single key."""
    found: list[Silence] = []
    taken: set[int] = set()
    by_depth = sorted(range(len(silences)), key=lambda i: (silences[i].scope.count("/"), -silences[i].length))
    for i in by_depth:
        mine = silences[i]
        if i in taken or not mine.is_prefix:
            continue
        below = [
            k
            for k, other in enumerate(silences)
            if k not in taken
            and k != i
            and other.journal == mine.journal
            and other.scope.startswith(mine.scope)
            and _same(mine, other)
        ]
        keys = [k for k in below if not silences[k].is_prefix]
        if len(keys) == 1:
            taken.add(i)  # the prefix is that key
            continue
        taken.update(below)
        found.append(replace(mine, keys=max(1, len(keys))))
        taken.add(i)
    found.extend(s for i, s in enumerate(silences) if i not in taken)
    return found


def _same(prefix: Silence, key: Silence) -> bool:
    """Return whether a key's silence is its prefix's: covers it, and little else."""
    end = prefix.end is None if key.end is None else prefix.end is not None and key.end >= prefix.end
    return end and key.start <= prefix.start and key.length <= 2 * prefix.length
