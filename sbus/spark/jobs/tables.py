"""Load recorded rows from journals or from a lake, and select keys by a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.errors import UsageError
from sbus.journal.clock import format_utc, from_datetime
from sbus.journal.keytext import as_text
from sbus.report.keys import checked_pattern
from sbus.spark.jobs.lake import Lake

__all__ = ["key_matches", "load_rows"]


def load_rows(
    spark: SparkSession,
    *,
    journals: Sequence[str] = (),
    lake: str | None = None,
    state: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Return the rows of journals or a lake as a journal's columns, keys as text.

    :param journals: paths and globs of journals; or
    :param lake: the directory, or the URL, of a lake.
    :param state: the state directory of a lake in object storage.
    :param since: leave out the rows before this time.
    :param until: leave out the rows at or after this time.
    :raises sbus.errors.UsageError: if neither journals nor a lake are given, or both.
    """
    if bool(journals) == (lake is not None):
        raise UsageError("nothing to read, or two things: use either --lake=DIR or --journal=DIR (one or several)")
    if lake is not None:
        return Lake(lake, state=state).read(spark, since, until)
    reader = spark.read.format("sbus").option("journal", "\n".join(journals))
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            reader = reader.option(name, format_utc(from_datetime(moment), "microseconds"))
    return reader.load()


def key_matches(pattern: bytes | str) -> Column:
    """Return the condition that a key, as text, matches this pattern on the bus.

    :raises sbus.errors.UsageError: if the pattern is invalid, selects secrets, which are never recorded, or is not
        UTF-8.
    """
    pattern = checked_pattern(pattern)
    if not pattern:
        return F.lit(True)
    parts = as_text(pattern).split("/")
    below = not parts[-1]
    if below:
        parts.pop()
    # A star matches up to the next slash and never backtracks, hence the possessive "*+".
    expression = "/".join("[^/]*+".join(map(_quoted, part.split("*"))) for part in parts)
    if below:
        expression += "/(?s:.*)"
    return F.col("key").rlike(rf"\A(?:{expression})\z")


def _quoted(literal: str) -> str:
    """Quote text for a regular expression of Java."""
    return "\\Q" + literal.replace("\\E", "\\E\\\\E\\Q") + "\\E" if literal else ""
