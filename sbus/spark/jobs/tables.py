"""What was recorded, as rows, wherever it is: in journals, or in a lake; and which of them a pattern means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sbus.errors import UsageError, Violation
from sbus.journal.keytext import as_text
from sbus.protocol.keys import CURRENT, Dialect
from sbus.spark.jobs.lake import Lake

__all__ = ["key_matches", "load_rows"]


def load_rows(
    spark: SparkSession,
    *,
    journals: Sequence[str] = (),
    lake: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """The rows of journals or of a lake, with the columns of a journal and keys as text.

    :param journals: paths and globs; or
    :param lake: a directory.
    :param since: rows before it are left out.
    :param until: this one, and what comes after it, is left out.
    :raises sbus.errors.UsageError: if neither is given, or both.
    """
    if bool(journals) == (lake is not None):
        raise UsageError("say what to read: --lake=DIR, or --journal=DIR (one or several)")
    if lake is not None:
        return Lake(lake).read(spark, since, until)
    reader = spark.read.format("sbus").option("journal", "\n".join(journals))
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            reader = reader.option(name, moment.astimezone(UTC).isoformat())
    return reader.load()


def key_matches(pattern: bytes | str, dialect: Dialect = CURRENT, column: str = "key") -> Column:
    """The condition that a key, as text, is one that the bus would deliver to this pattern.

    :raises sbus.errors.UsageError: for a pattern that nobody may use, that is for secrets, which are never recorded,
        or that is not text.
    """
    if isinstance(pattern, str):
        pattern = pattern.encode("utf-8", "surrogateescape")
    try:
        if dialect.check(pattern):
            raise UsageError("secret messages are never recorded, so a pattern for them finds nothing")
        pattern.decode()
    except Violation as e:
        raise UsageError(f"the pattern {as_text(pattern)}: {e}") from None
    except UnicodeDecodeError:
        # A pattern could then end within a character of a key, whose text would not begin with the pattern's.
        raise UsageError(f"the pattern {as_text(pattern)} is not text (UTF-8)") from None
    if not pattern:
        return F.lit(True)
    separator = dialect.separator.decode()
    parts = as_text(pattern).split(separator)
    below = not parts[-1]
    if below:
        parts.pop()
    # A star takes all up to the next separator and gives nothing back: "*+".
    segment = f"[^{re.escape(separator)}]*+"
    expression = re.escape(separator).join(segment.join(map(_quoted, part.split("*"))) for part in parts)
    if below:
        expression += f"{re.escape(separator)}(?s:.*)"
    return F.col(column).rlike(rf"\A(?:{expression})\z")


def _quoted(literal: str) -> str:
    """Text that stands for itself in a regular expression of Java's."""
    return "\\Q" + literal.replace("\\E", "\\E\\\\E\\Q") + "\\E" if literal else ""
