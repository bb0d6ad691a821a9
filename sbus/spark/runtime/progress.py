"""How far a streaming query is behind the journals that it reads.

Spark asks the source for the newest offset with each report (``latestOffset`` in a query's progress), so the difference
to the rows that were read is the lag. Sources in Python cannot have metrics in Spark 4.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["lag"]

_ID = re.compile("[0-9a-f]{32}")


def lag(progress: Any) -> dict[str, int]:
    """Return how many rows a query has yet to read, by the ID of the journal.

    :param progress: a report of the query, such as ``query.lastProgress`` or that of a `StreamingQueryListener`; None
        before the first one.
    :returns: 0 for a journal that is read to its end; no journals for a query that reads none with ``format("sbus")``.
    """
    if progress is None:
        return {}
    report = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    rows: dict[str, int] = {}
    for source in report["sources"]:
        end, latest = _offset(source.get("endOffset")), _offset(source.get("latestOffset"))
        rows |= {journal_id: max(0, seq - end[journal_id]) for journal_id, seq in latest.items() if journal_id in end}
    return rows


def _offset(value: Any) -> dict[str, int]:
    """Return the journals of an offset, which is text in some forms of a report; other sources have none."""
    offset = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    return {key: seq for key, seq in offset.items() if _ID.fullmatch(key)} if isinstance(offset, dict) else {}
