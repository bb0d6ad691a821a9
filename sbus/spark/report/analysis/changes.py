"""What is different from the period before: keys that are new or gone, and rates that went up or down.

Rates are per second of *recorded* time, so that a loss does not look like less traffic. A rate counts as changed
if it differs by `MIN_RATE_RATIO` and by more than chance would do with so few messages: counts that come by chance
vary with their square root, so the square roots are what is compared.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sbus.spark.report.analysis.cube import MAX_DEPTH, prefix
from sbus.spark.report.analysis.figures import Change, Changes
from sbus.spark.report.analysis.gaps import recorded
from sbus.spark.report.analysis.spans import Span, length

__all__ = ["compare"]

MIN_RATE_RATIO = 1.25
_MIN_ROOT_DIFFERENCE = 2.5
_SECOND = 1_000_000
_MAX_JOURNAL_SETS = 64
_MAX_PREFIXES = 12


def compare(
    keys: DataFrame, periods: tuple[Span, Span], missing: dict[str, list[Span]], depth: int, top: int,
    counts: tuple[int, int],
) -> Changes:  # fmt: skip
    """The changes; at most `top` in each list.

    :param keys: ``key``, ``n``, ``n_before`` and ``journals`` (in which it occurs, sorted, joined by commas).
    :param periods: the one before, and the one that is reported on.
    :param missing: for each journal, when it may lack messages.
    :param counts: how many keys are new, and how many have vanished.
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
    changed = both.where((moved > _MIN_ROOT_DIFFERENCE) & (factor >= MIN_RATE_RATIO)).orderBy(moved.desc(), "key")
    by_prefix = rated.groupBy(prefix("key", depth).alias("key")).agg(
        F.count("*").alias("keys"), *[F.sum(name).alias(name) for name in ("n", "n_before", "rate", "rate_before")]
    )
    scopes = _scopes(rated).persist()
    try:
        return Changes(
            _collect(by_prefix.orderBy(F.greatest("n", "n_before").desc(), "key"), _MAX_PREFIXES),
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
    """Keys, and the prefixes that they are under, each with what is directly above it."""
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
    """What is only here and not there: whole prefixes where nothing under them is, else keys."""
    spread = scopes.where(F.col(there) > 0).select(F.col("scope").alias("above"))
    known = spread.unionByName(spread.sparkSession.range(1).select(F.lit("").alias("above")))
    only = scopes.where(F.col(there) == 0).join(known, "above", "left_semi")
    named = only.withColumn("key", F.when(F.col("keys") == 1, F.col("key")).otherwise(F.col("scope")))
    return named.orderBy(F.col(here).desc(), "key")


def _recorded_seconds(
    keys: DataFrame, periods: tuple[Span, Span], missing: dict[str, list[Span]]
) -> tuple[Column, Column]:
    """For each key the seconds, in the period before and in this one, in which a journal that has it was written."""
    sets = [str(row[0]) for row in keys.select("journals").distinct().limit(_MAX_JOURNAL_SETS).collect()]
    columns = []
    for period in periods:
        seconds = [max(1e-6, length(recorded(period, s.split(","), missing)) / _SECOND) for s in sets]
        pairs = [F.lit(v) for pair in zip(sets, seconds, strict=True) for v in pair]
        whole = (period.end - period.start) / _SECOND
        columns.append(F.coalesce(F.create_map(*pairs)[F.col("journals")], F.lit(whole)) if sets else F.lit(whole))
    return columns[0], columns[1]
