"""Measure traffic in windows of time, by the first segments of the key."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sbus.errors import UsageError
from sbus.journal.clock import from_seconds
from sbus.journal.schema import Kind
from sbus.spark.rows import is_message, payload_size

__all__ = ["traffic"]

_PERCENTILES = (0.5, 0.95, 0.99)
_PERCENTILE_ACCURACY = 1000
"""The largest error in rank of a percentile is the inverse of this number."""
_KEY_COUNT_DEVIATION = 0.02
"""The relative standard deviation of the estimated number of keys."""


def traffic(rows: DataFrame, *, window: float = 60.0, depth: int = 1, watermark: float | None = None) -> DataFrame:
    """Measure recorded rows in windows of time and by prefixes of the keys.

    The result has a row for each window and prefix with messages, and these columns:

    * ``time``: the beginning of the window;
    * ``prefix``: the first ``depth`` segments of the keys; null in a window with gaps and without messages;
    * ``messages``, ``bytes`` (of payloads), ``rate`` (messages per second);
    * ``keys``: the number of different keys, an estimate with a standard deviation of 2 %;
    * ``p50``, ``p95``, ``p99``: percentiles of the payload size in bytes (within 0.1 % by rank);
    * ``gaps``: the number of gaps of the recording in this window, for all prefixes together. If it is not 0, messages
      may be missing;
    * ``lost``: the number of messages in these gaps that the bus dropped for the recorder, by its receipts; messages of
      other gaps, and losses of unknown number, are not in it.

    :param rows: rows with the columns ``time``, ``kind``, ``key`` and ``payload`` of a journal; a batch or a stream.
    :param window: the length of a window, in seconds.
    :param depth: the number of segments that make a prefix; with 0 all keys are together.
    :param watermark: seconds by which the rows of one journal can be later than those of another; a stream needs it. A
        window is measured when all journals are that far past its end.
    :raises sbus.errors.UsageError: if the window or the depth is out of range.
    """
    if not 0.001 <= window <= 366 * 86400:
        raise UsageError(f"a window of {window:g} seconds: use 1 ms to 366 days")
    if not 0 <= depth < 2**31:
        raise UsageError(f"a depth of {depth}: use 0 or more, and less than 2^31")
    length = f"{from_seconds(window)} microseconds"
    if watermark is not None:
        rows = rows.withWatermark("time", f"{from_seconds(watermark)} microseconds")
    prefix = F.substring_index("key", "/", depth) if depth else F.lit("")
    size = F.when(is_message(), payload_size())
    dropped = F.substring_index(F.col("payload").cast("string"), " ", 1).try_cast("bigint")
    by_prefix = rows.groupBy(F.window("time", length), F.when(is_message(), prefix).alias("prefix")).agg(
        F.count(size).alias("messages"),
        F.sum(size).alias("bytes"),
        F.approx_count_distinct("key", _KEY_COUNT_DEVIATION).alias("keys"),
        F.percentile_approx(size, _PERCENTILES, _PERCENTILE_ACCURACY).alias("sizes"),
        F.count_if(~is_message() & (F.col("kind") != Kind.CLOCK.value)).alias("gaps"),
        F.sum(F.when(F.col("kind") == Kind.LOST.value, dropped)).alias("lost"),
    )
    # A gap belongs to no key, so each prefix of its window reports it.
    whole = by_prefix.groupBy(F.window("window", length)).agg(
        F.sum("gaps").alias("gaps"),
        F.coalesce(F.sum("lost"), F.lit(0)).alias("lost"),
        F.collect_list(F.struct("prefix", "messages", "bytes", "keys", "sizes")).alias("all"),
    )
    with_messages = F.filter("all", lambda one: one["messages"] > 0)
    return whole.select(
        F.col("window.start").alias("time"), "gaps", "lost", F.explode_outer(with_messages).alias("one")
    ).select(
        "time",
        F.col("one.prefix").alias("prefix"),
        F.coalesce("one.messages", F.lit(0)).alias("messages"),
        F.coalesce("one.bytes", F.lit(0)).alias("bytes"),
        (F.coalesce("one.messages", F.lit(0)) / window).alias("rate"),
        F.coalesce("one.keys", F.lit(0)).alias("keys"),
        *(F.col("one.sizes")[index].alias(f"p{round(100 * p)}") for index, p in enumerate(_PERCENTILES)),
        "gaps",
        "lost",
    )
