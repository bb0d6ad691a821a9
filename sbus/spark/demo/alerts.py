"""The demo's streaming query: reads a journal as it grows, and publishes alerts."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from sbus.spark.jobs.paths import url

__all__ = ["find_hot", "start"]


def find_hot(rows: DataFrame, *, limit: float, window: float) -> DataFrame:
    """Return an alert for each bearing whose mean temperature in a window is too high.

    The columns are ``key`` and ``payload``.

    :param rows: the rows of a journal, as a table or a stream.
    :param limit: the highest temperature without an alert, in degrees Celsius.
    :param window: the length of a window, in seconds.
    """
    parts = F.split("key", "/")
    readings = rows.where("kind = 'message'").select(
        "time",
        parts[1].alias("site"),
        parts[2].alias("machine"),
        F.expr("try_cast(cast(payload AS string) AS double)").alias("degrees"),
    )
    seconds = F.unix_micros("time") / 1e6
    means = (
        readings.withWatermark("time", "500 milliseconds")
        .groupBy(F.window("time", f"{round(window * 1000)} milliseconds"), "site", "machine")
        .agg(F.avg("degrees").alias("mean"), F.regr_slope(F.col("degrees"), seconds).alias("slope"))
    )
    report = F.struct(
        F.round("mean", 1).alias("degrees"), F.round("slope", 2).alias("rise"), F.col("window.end").alias("until")
    )
    return means.where(F.col("mean") > limit).select(
        F.concat_ws("/", F.lit("alerts"), "site", "machine", F.lit("bearing")).alias("key"),
        F.to_json(report).alias("payload"),
    )


def start(
    spark: SparkSession, journal: str, socket: str, checkpoint: str, *, limit: float, window: float
) -> StreamingQuery:
    """Start the query, which publishes alerts until it is stopped.

    It reads the journal as it grows.
    """
    rows = (
        spark.readStream.format("sbus")
        .option("journal", journal)
        .option("pattern", "plant/*/*/bearing/temperature")
        .load()
    )
    return (
        find_hot(rows, limit=limit, window=window)
        .writeStream.format("sbus")
        .option("socket", socket)
        .option("checkpointLocation", url(checkpoint))
        .outputMode("append")
        .trigger(processingTime="500 milliseconds")
        .start()
    )
