"""Replay with Spark, which sorts the rows of a lake or of many journals: see `sbus.replay`.

Spark sorts the rows by time, journal and sequence number, on disk if they do not fit into memory. It divides them into
ordered parts of about 32 MiB and at most 500,000 rows, and `toLocalIterator` brings the parts to this process one after
the other, the next one while one is being published. So memory is bounded by two parts however much is replayed, and
only this process connects to the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sbus.client.blocking import Bus
from sbus.journal.schema import Kind
from sbus.replay import Replay, Row, Total, publish

__all__ = ["replay"]

_MAX_PART_BYTES = 32 * 1024 * 1024
"""Bytes of keys and payloads in a part that Spark hands over at once, about."""
_MAX_PART_ROWS = 500_000
"""Rows in such a part."""


def replay(rows: DataFrame, bus: Bus, *, part_bytes: int = _MAX_PART_BYTES, **choices: Any) -> Replay:
    """Publish recorded messages again, and wait until the bus has handled them.

    They are ordered by time, journal and sequence number.

    :param rows: rows with the columns of a journal; keys as text or as bytes; rows of other kinds are gaps, or digests.
    :param bus: the connection to publish with.
    :param part_bytes: about how many bytes Spark hands over at once.
    :param choices: `speed`, `prefix`, `stop` and `progress`, as for `sbus.replay.publish`, whose errors it has.
    """
    is_message = F.col("kind") == Kind.MESSAGE.value
    us = F.unix_micros("time")
    found = rows.agg(
        F.count_if(is_message),
        F.count("*"),
        F.sum(F.length("payload") + F.length("key")),
        F.min(F.when(is_message, us)),
        F.max(F.when(is_message, us)),
    ).collect()[0]
    messages, count, size, first, last = found
    parts = max(1, -(-(size or 0) // part_bytes), -(-count // _MAX_PART_ROWS))
    order = ("us", "journal", "seq")
    columns = rows.select(us.alias("us"), "journal", "seq", "kind", "key", "payload")

    def ordered() -> Iterator[Row]:
        sorted_rows = columns.repartitionByRange(parts, *order).sortWithinPartitions(*order)
        return sorted_rows.select("us", "kind", "key", "payload").toLocalIterator(prefetchPartitions=True)

    return publish(ordered, Total(messages, first, last) if messages else None, bus, **choices)
