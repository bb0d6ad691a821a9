"""Compare a period with the one before: new and vanished keys, changed rates.

Rates are per second of *recorded* time, so that a loss does not look like less traffic. A rate counts as changed if it
differs by the factor `MIN_RATE_RATIO` and by more than chance explains. Random counts vary with their square root, and
the difference of two square roots has the same spread for all counts, so square roots are compared.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sbus.journal.clock import to_seconds
from sbus.spark.report.analysis.cube import MAX_DEPTH, prefix
from sbus.spark.report.analysis.figures import Change, Changes
from sbus.spark.report.analysis.gaps import recorded
from sbus.spark.report.analysis.spans import Span, length

__all__ = [
    "MAX_JOURNAL_SETS",
    "MAX_PREFIXES",
    "MIN_RATE_RATIO",
    "MIN_ROOT_DIFFERENCE",
    "compare",
    "seconds_recorded",
]

MIN_RATE_RATIO = 1.25
"""The factor between two rates from which on the change is reported."""
MIN_ROOT_DIFFERENCE = 2.5
"""The difference between the square roots of two counts that chance hardly explains."""
MAX_JOURNAL_SETS = 64
"""Sets of journals for which recorded time is computed exactly; keys of other sets count the whole period."""
MAX_PREFIXES = 12
"""Prefixes whose rates are compared."""


def compare(
    keys: DataFrame, periods: tuple[Span, Span], missing: dict[str, list[Span]], depth: int, top: int,
    counts: tuple[int, int],
) -> Changes:  # fmt: skip
    """Return the changes; each list has at most `top` of them.

    :param keys: ``key``, ``n``, ``n_before``, and ``journals``: the journals of the key, sorted and joined by commas.
    :param periods: the period before, and the period of the report.
    :param missing: for each journal, the time in which messages may be missing.
    :param counts: the numbers of new and of vanished keys.
    """
    before, now = _recorded_seconds(keys, periods, missing)
    rated = keys.select(
        "key",
        F.lit(1).alias("keys"),
        "n",
        "n_before",
        now.alias("seconds"),
        (F.col("n") / now).alias("rate"),
        (F.col("n_before") / before).alias("rate_before"),
    )
    both = rated.where("n > 0 AND n_before > 0")
    moved = F.abs(F.sqrt(F.col("rate_before") * F.col("seconds")) - F.sqrt("n"))
    factor = F.greatest(F.try_divide("rate", "rate_before"), F.try_divide("rate_before", "rate"))
    changed = both.where((moved > MIN_ROOT_DIFFERENCE) & (factor >= MIN_RATE_RATIO)).orderBy(moved.desc(), "key")
    by_prefix = rated.groupBy(prefix("key", depth).alias("key")).agg(
        F.count("*").alias("keys"), *[F.sum(name).alias(name) for name in ("n", "n_before", "rate", "rate_before")]
    )
    scopes = _scopes(rated).persist()
    try:
        return Changes(
            _collect(by_prefix.orderBy(F.greatest("n", "n_before").desc(), "key"), MAX_PREFIXES),
            _collect(_only(scopes, "n", "n_before"), top),
            counts[0],
            _collect(_only(scopes, "n_before", "n"), top),
            counts[1],
            _collect(changed.where("rate > rate_before"), top),
            _collect(changed.where("rate < rate_before"), top),
        )
    finally:
        scopes.unpersist()


def _collect(changes: DataFrame, top: int) -> list[Change]:
    columns = changes.select("key", "keys", "n", "n_before", "rate", "rate_before")
    return [Change(*row) for row in columns.limit(top).collect()]


def _scopes(rated: DataFrame) -> DataFrame:
    """Sum the rates of keys and their prefixes.

    ``above`` is the next shorter prefix.
    """
    segments = F.size(F.split("key", "/"))
    depths = F.sequence(F.lit(1), F.least(segments, F.lit(MAX_DEPTH + 1)))
    below = segments > F.col("depth")
    scope = F.when(below & (F.col("depth") <= MAX_DEPTH), F.expr("concat(substring_index(key, '/', depth), '/')"))
    above = F.when(F.col("depth") > 1, F.expr("concat(substring_index(key, '/', depth - 1), '/')")).otherwise("")
    each = rated.withColumn("depth", F.explode(depths))
    each = each.withColumn("scope", F.coalesce(scope, "key")).withColumn("above", above)
    return each.groupBy("scope", "above").agg(
        F.min("key").alias("key"),
        *[F.sum(name).alias(name) for name in ("keys", "n", "n_before", "rate", "rate_before")],
    )


def _only(scopes: DataFrame, here: str, there: str) -> DataFrame:
    """Return what occurs in one period only.

    That is a prefix if all keys below it do, or else the keys.
    """
    spread = scopes.where(F.col(there) > 0).select(F.col("scope").alias("above"))
    known = spread.unionByName(spread.sparkSession.range(1).select(F.lit("").alias("above")))
    only = scopes.where(F.col(there) == 0).join(known, "above", "left_semi")
    named = only.withColumn("key", F.when(F.col("keys") == 1, F.col("key")).otherwise(F.col("scope")))
    return named.orderBy(F.col(here).desc(), "key")


def _recorded_seconds(
    keys: DataFrame, periods: tuple[Span, Span], missing: dict[str, list[Span]]
) -> tuple[Column, Column]:
    """Return for each key the seconds in which its journals were written.

    There is one number for the period before and one for this one.
    """
    sets = [str(row[0]) for row in keys.select("journals").distinct().limit(MAX_JOURNAL_SETS).collect()]
    columns = []
    for period in periods:
        seconds = [seconds_recorded(journals, period, missing) for journals in sets]
        pairs = [F.lit(v) for pair in zip(sets, seconds, strict=True) for v in pair]
        whole = to_seconds(period.end - period.start)
        columns.append(F.coalesce(F.create_map(*pairs)[F.col("journals")], F.lit(whole)) if sets else F.lit(whole))
    return columns[0], columns[1]


def seconds_recorded(journals: str, period: Span, missing: dict[str, list[Span]]) -> float:
    """Return the seconds of a period in which at least one of some journals, joined by commas, was written."""
    return max(1e-6, to_seconds(length(recorded(period, journals.split(","), missing))))
