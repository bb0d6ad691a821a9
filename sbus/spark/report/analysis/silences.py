"""Find keys and prefixes that fell silent against their usual rhythm.

A pause longer than a window lies between two windows with messages of the key, so the cube
(`sbus.spark.report.analysis.cube`) has every such pause exactly; shorter pauses are not searched. A pause counts as a
silence if, without the time in which nothing was recorded, it is longer than each of these:

* `MIN_PAUSE_RATIO` times the 90th percentile of the pauses of the key;
* `MIN_PAUSE_RATIO` times the mean of the pauses around it, because a key with less traffic at night has longer pauses
  then;
* `MIN_RATIO_TO_THIRD` times its third longest pause, because a key that comes in bursts pauses often; and
* what chance makes of messages at random times: the more intervals are looked at, the longer is the longest of them.
  The tail of the pauses is taken as exponential, as of a Poisson process, with the scale that the median and the 90th
  percentile of the key's pauses show. Of regular messages that scale is near 0. A silence is longer than all but
  `_FALSE_ALARMS` pauses of a whole report would be by chance;
* `MIN_RATIO_TO_BEFORE` times its longest pause in the period before, because a key that rests every night is not
  silent.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sbus.spark.report.analysis.cube import MAX_DEPTH, Windows
from sbus.spark.report.analysis.figures import Silence
from sbus.spark.report.analysis.spans import Span

__all__ = [
    "MAX_CANDIDATES",
    "MAX_RATIO_TO_KNOWN",
    "MIN_PAUSE_RATIO",
    "MIN_RATIO_TO_BEFORE",
    "MIN_RATIO_TO_THIRD",
    "MIN_SAMPLES",
    "NEIGHBOURS",
    "SCALE",
    "chance_factor",
    "find_silences",
    "pick",
]

MIN_PAUSE_RATIO = 5
MIN_RATIO_TO_BEFORE = 1.5
MIN_RATIO_TO_THIRD = 3
SCALE = math.log(5)
"""The ratio of p90 - p50 to the scale of an exponential tail."""
_FALSE_ALARMS = 0.01
"""Silences of a report that are expected by chance."""
MIN_SAMPLES = 10
"""Pauses and intervals that a rhythm needs."""
MAX_CANDIDATES = 500
"""Pauses that are brought to the driver, the longest first."""
MAX_RATIO_TO_KNOWN = 4
"""The largest ratio of a pause to the whole known time of a key: a key that came once and left has no rhythm."""
NEIGHBOURS = 8
"""Pauses on either side that a pause is compared with."""


def find_silences(
    cube: DataFrame, windows: Windows, lost: dict[str, list[Span]], heard: dict[str, int], top: int, intervals: int
) -> tuple[list[Silence], int]:
    """Return the silences of the period, and their number.

    Those that are not over come first, then the longest.

    Their activity is not filled in. Keys that fell silent together are reported as their prefix, if no other key under
    it had messages.

    :param lost: for each journal, the time in which messages may be missing.
    :param heard: for each journal, the end of its rows in the period (µs).
    :param intervals: the number of intervals between messages that are looked at, of all keys together.
    """
    rows = _candidates(_pauses(cube, windows, lost, heard), windows, intervals).collect()
    return pick([_silence(row) for row in rows], top)


def pick(candidates: list[Silence], top: int) -> tuple[list[Silence], int]:
    """Return the silences to report, and their number, out of those of keys and of prefixes."""
    found = _merge_prefixes(candidates)
    found.sort(key=lambda s: (s.end is not None, -s.length, s.scope))
    return found[:top], len(found)


def chance_factor(intervals: int) -> float:
    """Return how many times the scale of its pauses the longest one of a key is, by chance, above their p90."""
    # P(pause > p90 + x) is 0.1 exp(-x / scale).
    return math.log(max(1.0, 0.1 * intervals * MAX_DEPTH / _FALSE_ALARMS))


def _pauses(cube: DataFrame, windows: Windows, lost: dict[str, list[Span]], heard: dict[str, int]) -> DataFrame:
    """Return every pause between windows, and the last one, which has not ended."""
    segments = F.size(F.split("key", "/"))
    prefixes = [F.when(segments > d, _scope(F.concat(F.substring_index("key", "/", d), F.lit("/")), is_prefix=True))
                for d in range(1, MAX_DEPTH + 1)]  # fmt: skip
    scopes = F.explode(F.array_compact(F.array(*prefixes, _scope(F.col("key"), is_prefix=False)))).alias("scope")
    each = cube.select("journal", scopes, "now", "window", "n", "first", "last")
    spoken = each.groupBy("journal", "scope", "now", "window").agg(
        F.sum("n").alias("n"), F.min("first").alias("first"), F.max("last").alias("last")
    )
    order = Window.partitionBy("journal", "scope").orderBy("first")
    until = F.from_json(F.lit(json.dumps(heard)), "map<string,bigint>")[F.col("journal")]
    following = F.lead("first").over(order)
    pauses = spoken.select(
        "journal",
        "scope",
        "n",
        "first",
        F.when(F.col("n") > 1, (F.col("last") - F.col("first")) / (F.col("n") - 1)).alias("inner"),
        F.col("last").alias("start"),
        following.alias("end"),
        F.coalesce(following, until).alias("until"),
    )
    missing = F.from_json(F.lit(json.dumps(lost)), "map<string,array<array<bigint>>>")[F.col("journal")]
    unrecorded = F.when(
        F.col("until") - F.col("start") >= windows.width,
        F.aggregate(
            F.coalesce(missing, F.array()),
            F.lit(0).cast("bigint"),
            lambda sum_, s: (
                sum_ + F.greatest(F.lit(0), F.least(F.col("until"), s[1]) - F.greatest(F.col("start"), s[0]))
            ),
        ),
    ).otherwise(0)
    around = order.rowsBetween(-NEIGHBOURS, NEIGHBOURS)
    ended = F.when(F.col("end").isNotNull(), F.col("net")).otherwise(0)
    return (
        pauses.withColumn("unrecorded", unrecorded)
        .withColumn("net", F.col("until") - F.col("start") - F.col("unrecorded"))
        .withColumn("around", F.try_divide(F.sum(ended).over(around) - ended, F.count("*").over(around) - 1))
    )


def _scope(text: Column, *, is_prefix: bool) -> Column:
    """Return a key or a prefix as a struct.

    A key that ends with ``/`` differs from the prefix of the same text.
    """
    return F.struct(text.alias("text"), F.lit(is_prefix).alias("is_prefix"))


def _candidates(pauses: DataFrame, windows: Windows, intervals: int) -> DataFrame:
    """Return the pauses that are silences, at most `MAX_CANDIDATES`."""
    ended = F.col("end").isNotNull()
    earlier = ended & (F.col("end") < windows.period.start)
    # A busy key is known by its mean interval in each window, and by the pauses between windows.
    inner = F.struct(F.col("inner").alias("value"), F.lit(False).alias("is_pause"))
    pause = F.struct(F.when(ended, F.col("net").cast("double")).alias("value"), F.lit(True).alias("is_pause"))
    samples = pauses.select(
        "journal", "scope", earlier.alias("earlier"), "start", "end", F.explode(F.array(inner, pause)).alias("sample")
    ).where("sample.value IS NOT NULL")
    is_pause = F.col("sample.is_pause")
    length = F.when(is_pause, F.col("sample.value").cast("bigint"))
    rhythm = samples.groupBy("journal", "scope").agg(
        F.percentile_approx("sample.value", [0.5, 0.9]).alias("usual"),
        F.count("*").alias("samples"),
        F.max(F.when(F.col("earlier"), length)).alias("longest_before"),
        # There is at most one for each window.
        F.try_element_at(F.sort_array(F.collect_list(length), False), F.lit(3)).alias("third"),
        (F.max(F.coalesce("end", "start")) - F.min("start")).alias("known"),
    )
    scale = (F.col("usual")[1] - F.col("usual")[0]) / SCALE
    usual = F.greatest(
        F.col("usual")[1] + scale * chance_factor(intervals),
        F.col("usual")[1] * MIN_PAUSE_RATIO,
        F.col("around") * MIN_PAUSE_RATIO,
        F.col("third") * MIN_RATIO_TO_THIRD,
        F.col("longest_before") * MIN_RATIO_TO_BEFORE,
    )
    return (
        pauses.where((F.col("net") >= windows.width) & (F.col("until") > windows.period.start))
        .join(rhythm.where(F.col("samples") >= MIN_SAMPLES), ["journal", "scope"])
        .where((F.col("net") > usual) & (F.col("net") < F.col("known") * MAX_RATIO_TO_KNOWN))
        # A key without messages in the period has vanished, which the changes report.
        .where(ended | (F.col("start") >= windows.period.start))
        .orderBy(ended, F.col("net").desc(), F.length("scope.text"), "scope")
        .limit(MAX_CANDIDATES)
    )


def _silence(row: object) -> Silence:
    r = row.asDict()  # type: ignore[attr-defined]
    return Silence(
        r["journal"],
        r["scope"].text,
        r["scope"].is_prefix,
        1,
        r["start"],
        r["end"],
        r["until"] - r["start"],
        r["unrecorded"],
        round(r["usual"][0]),
        r["longest_before"],
    )


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
