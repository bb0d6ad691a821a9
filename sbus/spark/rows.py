"""What a row of a journal says of its message, as expressions of Spark."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from sbus.journal.schema import MESSAGES, Kind

__all__ = ["is_message", "payload_size"]


def is_message() -> Column:
    """Whether a row is a message, with its payload or with a digest of it."""
    return F.col("kind").isin(*sorted(MESSAGES))


def payload_size() -> Column:
    """The bytes in the payload of a message, as the bus delivered it."""
    stated = F.get_json_object(F.col("payload").cast("string"), "$.length").try_cast("bigint")
    return F.when(F.col("kind") == Kind.DIGEST.value, stated).otherwise(F.length("payload").cast("bigint"))
