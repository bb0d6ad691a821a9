"""Tables of Spark's catalog: ``CREATE TABLE … USING sbus OPTIONS (…)`` or ``LOCATION …``.

Spark 4.3 gives a source in Python the options of such a table when it is created, and none when it is read. It keeps
the columns with their comments, though, and hands them over at each read. So the options are kept in the comment of the
first column, where ``DESCRIBE TABLE`` shows them, too. An INSERT has the comments as well if Spark has to convert a
column for it (`sbus.spark.datasource.writer.table_columns`).

Spark does not ask the source when a table is created with columns of its own, nor pass on comments when a stream is
written to a table; then there are no options. A read lacks its journal and a write its bus, and fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructType

__all__ = ["recall", "remember", "table_options"]

_PREFIX = "sbus "
_PROPERTIES = frozenset(
    {"provider", "owner", "comment", "collation", "external", "is_managed_location", "location", "table_type"}
)
"""What Spark says about a table beside its options."""


def table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a table that is being created; None if these are the options of anything else.

    Spark gives each option twice, the second time as ``option.NAME``.
    """
    named = {name.lower(): value for name, value in options.items()}
    if "provider" not in named:
        return None
    if "location" in named and "journal" not in named:
        named.setdefault("path", named["location"])
    if "journal" in named or "socket" in named:
        named.pop("path", None)  # the place of a managed table, where nothing is
    return {name: value for name, value in named.items() if name not in _PROPERTIES and not name.startswith("option.")}


def remember(columns: StructType | str, options: Mapping[str, str]) -> StructType | str:
    """Return the columns of a table with its options.

    :param columns: the columns, or their DDL.
    """
    comment = _PREFIX + json.dumps(dict(options))
    if isinstance(columns, str):
        first, rest = columns.split(",", 1)
        quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
        return f"{first} COMMENT '{quoted}',{rest}"
    kept = StructType()
    for number, column in enumerate(columns):
        metadata = None if number else {"comment": comment}
        kept = kept.add(column.name, column.dataType, column.nullable, metadata)
    return kept


def recall(columns: StructType) -> dict[str, str]:
    """Return the options that `remember` has put into these columns; none if there are none."""
    for column in columns:
        comment = str((column.metadata or {}).get("comment", ""))
        if comment.startswith(_PREFIX + "{"):
            options: dict[str, str] = json.loads(comment.removeprefix(_PREFIX))
            return options
    return {}
