"""The cube: messages per journal, key and window.

Nearly all figures of a report are computed from it.

Spark reads the rows once for it and keeps it on the executors; its size is at most keys times windows. What goes to the
driver is bounded: windows times labels, or the top of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from sbus.spark.report.analysis.figures import KeyTraffic, Sizes, Traffic
from sbus.spark.report.analysis.spans import Span

__all__ = [
    "MAX_DEPTH",
    "MAX_LABELS",
    "Windows",
    "choose_depth",
    "count_keys",
    "find_depth",
    "find_sizes",
    "find_top",
    "find_traffic",
    "half_octaves",
    "of_all_publishers",
    "prefix",
    "shapes",
    "total",
    "traffic_of",
    "with_shape",
]

MAX_LABELS = 7
"""Prefixes with a colour of their own; all other keys share one."""
_MAX_SHAPE_COUNTS = 60
"""Counts in the small picture of a key."""
MAX_DEPTH = 4
"""Segments of the longest prefix."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a period.

    The period before has the same ones, shifted by its length.

    :ivar width: the length of a window, in µs.
    """

    period: Span
    width: int

    @property
    def origin(self) -> int:
        """The beginning of the first window.

        It is a multiple of the width, at or before the start of the period.
        """
        return self.period.start // self.width * self.width

    @property
    def count(self) -> int:
        """The number of windows."""
        return -(-(self.period.end - self.origin) // self.width)

    @property
    def both(self) -> Span:
        """The period and the one before it."""
        return Span(2 * self.period.start - self.period.end, self.period.end)


def count_keys(messages: DataFrame, windows: Windows) -> DataFrame:
    """Count messages by publisher, journal, key and window.

    :param messages: of both periods ``publisher``, ``journal``, ``key``, ``us`` (a time in the window), ``n``,
        ``bytes``, ``first`` and ``last``; each row is a message, or several of one window.
    :returns: ``publisher``, ``journal``, ``key``, ``now`` (false for the period before), ``window`` (its number),
        ``n``, ``bytes``, ``first`` and ``last`` (times in µs).
    """
    span = windows.period.end - windows.period.start
    now = F.col("us") >= windows.period.start
    shifted = F.when(now, F.col("us")).otherwise(F.col("us") + span)
    window = F.floor((shifted - windows.origin) / windows.width).cast("int")
    return _sum(messages, "publisher", "journal", "key", now.alias("now"), window.alias("window"))


def of_all_publishers(counts: DataFrame) -> DataFrame:
    """Return the cube, from what `count_keys` has returned."""
    return _sum(counts, "journal", "key", "now", "window")


def _sum(counts: DataFrame, *by: str | Column) -> DataFrame:
    return counts.groupBy(*by).agg(
        F.sum("n").alias("n"),
        F.sum("bytes").alias("bytes"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    )


def prefix(key: str, depth: int) -> Column:
    """Return the first segments of a key, with a final ``/`` if more follow.

    A key without more segments is returned whole.
    """
    short = F.substring_index(key, "/", depth)
    return F.when(F.length(short) < F.length(key), F.concat(short, F.lit("/"))).otherwise(F.col(key))


def find_depth(keys: DataFrame) -> int:
    """Choose the number of segments of a prefix: the fewest that tell keys apart well.

    That is at least three prefixes, none of them with more than 60 % of the messages.

    :param keys: ``key`` and ``n``.
    """
    each = keys.select(
        "n", F.explode(F.array(*[F.struct(F.lit(d).alias("depth"), prefix("key", d).alias("p"))
                                 for d in range(1, MAX_DEPTH + 1)])).alias("at")
    )  # fmt: skip
    by_prefix = each.groupBy("at.depth", "at.p").agg(F.sum("n").alias("n"))
    by_depth = by_prefix.groupBy("depth").agg(F.count("*").alias("prefixes"), (F.max("n") / F.sum("n")).alias("share"))
    return choose_depth([(row.depth, row.prefixes, row.share) for row in by_depth.collect()])


def choose_depth(found: Sequence[tuple[int, int, float]]) -> int:
    """Choose by the number of prefixes at each depth, and the share of the busiest: (depth, prefixes, share)."""
    for depth, prefixes, share in sorted(found):
        if prefixes >= 3 and share <= 0.6:
            return depth
    return min(sorted(found), key=lambda each: each[2])[0] if found else 1


def label_of(key: str, depth: int, labels: Sequence[str]) -> Column:
    """Return the prefix of a key if it is one of the labels, or else null."""
    label = prefix(key, depth)
    return F.when(label.isin(list(labels)), label)


def find_traffic(cube: DataFrame, windows: Windows, depth: int, labels: Sequence[str], *, has_before: bool) -> Traffic:
    """Sum messages and bytes by window and label."""
    label = F.when(F.col("now"), label_of("key", depth, labels))
    counted = cube.groupBy("now", "window", label.alias("label")).agg(F.sum("n").alias("n"), F.sum("bytes").alias("b"))
    rows = [(row.now, row.window, row.label, row.n, row.b) for row in counted.collect()]
    return traffic_of(rows, windows, labels, has_before=has_before)


def traffic_of(
    rows: Sequence[tuple[bool, int, str | None, int, int]], windows: Windows, labels: Sequence[str], *, has_before: bool
) -> Traffic:
    """Arrange sums of messages and bytes: (whether it is this period, window, label, messages, bytes)."""
    names: list[str | None] = list(labels)
    if any(now and label is None for now, _, label, _, _ in rows):
        names.append(None)
    at = {name: i for i, name in enumerate(names)}
    messages, sizes = ([[0] * windows.count for _ in names] for _ in range(2))
    before, bytes_before = [0] * windows.count, [0] * windows.count
    for now, number, label, n, size in rows:
        window = min(number, windows.count - 1)
        if now:
            messages[at[label]][window] += n
            sizes[at[label]][window] += size
        else:
            before[window] += n
            bytes_before[window] += size
    return Traffic(
        windows.width,
        windows.origin,
        names,
        messages,
        sizes,
        before if has_before else None,
        bytes_before if has_before else None,
    )


def find_top(keys: DataFrame, order: str, top: int) -> list[tuple[str, int, int]]:
    """Return the keys with the largest values: (key, messages, bytes) each.

    :param keys: ``key``, ``n`` and ``bytes`` of the period.
    :param order: the column to order by.
    """
    rows = keys.where("n > 0").orderBy(F.col(order).desc(), "key").limit(top).select("key", "n", "bytes").collect()
    return [(row.key, row.n, row.bytes) for row in rows]


def with_shape(found: tuple[str, int, int], counts: list[int]) -> KeyTraffic:
    """Complete the traffic of a key with its shape, given its messages per window."""
    bundle = max(1, -(-len(counts) // _MAX_SHAPE_COUNTS))
    shape = [sum(counts[at : at + bundle]) for at in range(0, len(counts), bundle)]
    if shorter := len(counts) % bundle:
        shape[-1] = round(shape[-1] * bundle / shorter)
    return KeyTraffic(*found, shape)


def shapes(cube: DataFrame, windows: Windows, scopes: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], list[int]]:
    """Return the messages per window of each scope.

    A scope is (key or prefix with its final ``/``, whether it is a prefix).
    """
    counts = {scope: [0] * windows.count for scope in scopes}
    names = list(counts)
    if not names:
        return counts
    within = [F.col("key").startswith(s) if is_prefix else F.col("key") == s for s, is_prefix in names]
    hits = F.array_compact(F.array(*[F.when(hit, F.lit(i)) for i, hit in enumerate(within)]))
    each = cube.where("now").select(F.explode(hits).alias("scope"), "window", "n")
    for row in each.groupBy("scope", "window").agg(F.sum("n").alias("n")).collect():
        counts[names[row.scope]][min(row.window, windows.count - 1)] += row.n
    return counts


def find_sizes(
    messages: DataFrame, depth: int, labels: Sequence[str]
) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
    """Return the payload sizes of all messages and of each label, and a histogram.

    :param messages: ``key``, ``size``, ``n`` and ``bytes`` of the messages of the period; a row can be several messages
        of one size.
    """
    labelled = messages.select(label_of("key", depth, labels).alias("label"), "size", "n", "bytes")
    # One pass over the messages; there are few sizes.
    sized = labelled.groupBy("label", "size").agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes"))
    sized = sized.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        rolled = sized.rollup("label").agg(
            F.grouping("label").alias("all"),
            F.sum("n").alias("n"),
            (F.sum("bytes") / F.sum("n")).alias("mean"),
            F.expr("percentile(size, array(0.5, 0.95, 0.99), n)").alias("p"),
            F.max("size").alias("largest"),
        )
        rows = {(row.all, row.label): row for row in rolled.collect()}
        # Half octaves: 1, 2, 3, 4-5, 6-7, 8-11, ...; -1 for empty payloads.
        half_octave = F.when(F.col("size") > 0, F.floor(2 * F.log2("size") + 1e-9)).otherwise(-1)
        bins = sized.groupBy(half_octave.cast("int").alias("bin")).agg(F.sum("n").alias("n")).orderBy("bin").collect()
    finally:
        sized.unpersist()
    order = [(1, None), *((0, label) for label in labels)]
    sizes = [
        Sizes(label, row.n, row.mean, round(row.p[0]), round(row.p[1]), round(row.p[2]), row.largest)
        for label, row in ((key[1], rows.get(key)) for key in order)
        if row is not None and row.n
    ]
    return sizes, half_octaves((row.bin, row.n) for row in bins)


def half_octaves(bins: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return a histogram, given the number and the messages of each bin, in order."""
    return [(*_bounds(number), n) for number, n in bins]


def _bounds(number: int) -> tuple[int, int]:
    """Return the smallest and the largest size in a bin of the histogram."""
    if number < 0:
        return 0, 0
    edges = [-int(-(2 ** (n / 2)) // 1) if n % 2 else 2 ** (n // 2) for n in (number, number + 1)]
    return edges[0], edges[1] - 1


def total(keys: DataFrame) -> tuple[tuple[int, int, int], tuple[int, int, int], int, int]:
    """Return the totals of both periods, and the numbers of new and vanished keys.

    A total is (messages, bytes, keys).

    :param keys: ``n``, ``bytes``, ``n_before``, ``bytes_before``.
    """
    row = keys.agg(
        F.sum("n").alias("n"),
        F.sum("bytes").alias("b"),
        F.expr("count_if(n > 0)").alias("keys"),
        F.sum("n_before").alias("n0"),
        F.sum("bytes_before").alias("b0"),
        F.expr("count_if(n_before > 0)").alias("keys0"),
        F.expr("count_if(n_before = 0)").alias("new"),
        F.expr("count_if(n = 0)").alias("vanished"),
    ).collect()[0]
    return (row.n or 0, row.b or 0, row.keys), (row.n0 or 0, row.b0 or 0, row.keys0), row.new, row.vanished
