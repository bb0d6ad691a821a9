"""Traffic: how much of what there was, by time and by the first segments of the key."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sbus.errors import UsageError
from sbus.journal.schema import Kind

__all__ = ["traffic"]

_PERCENTILES = (0.5, 0.95, 0.99)
_ACCURACY = 1000
"""Of percentiles: they are off by one in so many places at most."""
_DEVIATION = 0.02
"""Of the number of keys: the standard deviation from the true one."""


def traffic(rows: DataFrame, *, window: float = 60.0, depth: int = 1, watermark: float | None = None) -> DataFrame:
    """Measure what was recorded, in windows of time and by prefixes of the keys.

    The result has these columns, and a row for each window and prefix that there are messages of:

    * ``time``: when the window begins;
    * ``prefix``: what the keys have in common, ``depth`` segments; null in a window that has gaps and no message;
    * ``messages``, ``bytes`` (of payloads), ``rate`` (messages a second);
    * ``keys``: how many different ones, with a standard deviation of 2 %;
    * ``p50``, ``p95``, ``p99``: so many per cent of the payloads have at most so many bytes (within 0.1 %);
    * ``gaps``: how many breaks the recording had in this window, whatever the prefix. Where it is not 0, messages may
      be missing.

    :param rows: with the columns ``time``, ``kind``, ``key`` and ``payload`` of a journal; a batch or a stream.
    :param window: seconds.
    :param depth: segments of the key that make a prefix; with 0 all keys are together.
    :param watermark: seconds that rows of one journal may come later than those of another; a stream must have it. A
        window is measured when all journals are so far past its end.
    :raises UsageError: for a window or depth that cannot be.
    """
    if not 0.001 <= window <= 366 * 86400:
        raise UsageError(f"a window of {window:g} seconds: use 1 ms to 366 days")
    if not 0 <= depth < 2**31:
        raise UsageError(f"a depth of {depth}: use 0 or more, and less than 2^31")
    length = f"{round(window * 1_000_000)} microseconds"
    if watermark is not None:
        rows = rows.withWatermark("time", f"{round(watermark * 1_000_000)} microseconds")
    is_message = F.col("kind") == Kind.MESSAGE.value
    prefix = F.substring_index("key", "/", depth) if depth else F.lit("")
    size = F.when(is_message, F.length("payload"))
    by_prefix = rows.groupBy(F.window("time", length), F.when(is_message, prefix).alias("prefix")).agg(
        F.count(size).alias("messages"),
        F.sum(size).alias("bytes"),
        F.approx_count_distinct("key", _DEVIATION).alias("keys"),
        F.percentile_approx(size, _PERCENTILES, _ACCURACY).alias("sizes"),
        F.count_if(~is_message).alias("gaps"),
    )
    # A gap belongs to no key, so it is told with every prefix of its window.
    whole = by_prefix.groupBy(F.window("window", length)).agg(
        F.sum("gaps").alias("gaps"),
        F.collect_list(F.struct("prefix", "messages", "bytes", "keys", "sizes")).alias("all"),
    )
    with_messages = F.filter("all", lambda one: one["messages"] > 0)
    return whole.select(
        F.col("window.start").alias("time"), "gaps", F.explode_outer(with_messages).alias("one")
    ).select(
        "time",
        F.col("one.prefix").alias("prefix"),
        F.coalesce("one.messages", F.lit(0)).alias("messages"),
        F.coalesce("one.bytes", F.lit(0)).alias("bytes"),
        (F.coalesce("one.messages", F.lit(0)) / window).alias("rate"),
        F.coalesce("one.keys", F.lit(0)).alias("keys"),
        *(F.col("one.sizes")[index].alias(f"p{round(100 * p)}") for index, p in enumerate(_PERCENTILES)),
        "gaps",
    )
