"""Who publishes what: the messages of each user, and their prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sbus.lake.cube import PROGRAM, UNKNOWN
from sbus.spark.report.analysis.cube import prefix
from sbus.spark.report.analysis.figures import Publisher

__all__ = ["MAX_PREFIXES", "find_publishers", "publisher", "publishers_of"]

MAX_PREFIXES = 3
"""The maximal number of prefixes for each user."""


def publisher(rows: DataFrame) -> Column:
    """Return the column with the publisher of each message, as the counts of a lake have it.

    :param rows: rows of a journal, with or without the columns of publishers.
    """
    if "sender_uid" not in rows.columns:
        return F.lit(UNKNOWN).cast("long")
    others = F.when(F.col("sender_number") == 0, PROGRAM).otherwise(UNKNOWN)
    return F.coalesce("sender_uid", others.cast("long"))


def find_publishers(messages: DataFrame, depth: int, top: int) -> tuple[list[Publisher], int]:
    """Return the users with the most messages, and the number of users.

    :param messages: ``publisher``, ``key``, ``n`` and ``bytes`` of the messages of the period.
    :param depth: the number of segments of a prefix.
    """
    by_key = messages.groupBy("publisher", "key").agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes")).persist()
    try:
        users = by_key.groupBy("publisher").agg(F.sum("n"), F.sum("bytes"), F.count("*")).collect()
        by_prefix = by_key.groupBy("publisher", prefix("key", depth).alias("prefix")).agg(F.sum("n").alias("n"))
        order = Window.partitionBy("publisher").orderBy(F.col("n").desc(), "prefix")
        ranked = by_prefix.withColumn("rank", F.row_number().over(order)).where(F.col("rank") <= MAX_PREFIXES)
        prefixes = ranked.orderBy("publisher", "rank").select("publisher", "prefix", "n").collect()
    finally:
        by_key.unpersist()
    return publishers_of(map(tuple, users), map(tuple, prefixes), top)


def publishers_of(
    users: Iterable[tuple[int, int, int, int]], prefixes: Iterable[tuple[int, str, int]], top: int
) -> tuple[list[Publisher], int]:
    """Arrange the counts; return nothing if no publisher is known.

    :param users: the publisher, and its messages, bytes and keys.
    :param prefixes: the publisher, a prefix and its messages, the busiest first.
    """
    named: dict[int, list[tuple[str, int]]] = {}
    for uid, text, n in prefixes:
        named.setdefault(uid, []).append((text, n))
    found = [Publisher(uid, n, size, keys, named[uid]) for uid, n, size, keys in users]
    if all(each.uid == UNKNOWN for each in found):
        return [], 0
    found.sort(key=lambda each: (-each.messages, each.uid))
    return found[:top], len(found)
