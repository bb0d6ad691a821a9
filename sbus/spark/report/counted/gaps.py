"""Find gaps, losses and steps of clocks as `sbus.spark.report.analysis.gaps` does, in a database of rows."""

from __future__ import annotations

import json
import re
from typing import Any

from sbus.spark.report.analysis import gaps as rules
from sbus.spark.report.analysis.figures import ClockStep, Gap, Loss
from sbus.spark.report.analysis.gaps import Journal, Mark
from sbus.spark.report.analysis.spans import Span
from sbus.spark.report.counted.store import Database

__all__ = ["find_gaps", "find_journals", "find_losses", "find_steps"]

_ROWS_AT_ONCE = 4096


def find_journals(database: Database, whole: Span) -> dict[str, Journal]:
    """Return each journal that has rows in a time, by its ID."""
    found = database.execute(
        "SELECT journal, min(us), max(us), min(seq), max(2 * seq + (kind = 'stop')::BIGINT) FROM rows "
        "WHERE us >= ? AND us < ? GROUP BY journal",
        whole,
    )
    return {
        journal: Journal(Span(first, last), seq, bool(end % 2)) for journal, first, last, seq, end in found.fetchall()
    }


def find_gaps(database: Database, journals: dict[str, Journal], whole: Span, tail: int) -> list[Gap]:
    """Return the gaps within a time, the oldest first."""
    newest = database.execute(
        "SELECT journal, seq, us, kind, payload FROM rows "
        "WHERE kind NOT IN ('message', 'digest', 'clock') AND us >= ? AND us < ? "
        f"ORDER BY kind IN ('lost', 'damaged'), us DESC LIMIT {rules.MAX_GAPS}",
        whole,
    )
    found = [Mark(journal, seq, us, kind, _text(payload)) for journal, seq, us, kind, payload in newest.fetchall()]
    beside = database.execute(
        "SELECT journal, seq, us FROM rows WHERE us >= ? AND us < ? AND seq IN (SELECT unnest(?::BIGINT[]))",
        [*whole, rules.beside_marks(found)],
    )
    times = {(journal, seq): us for journal, seq, us in beside.fetchall()}
    return rules.gaps_of(found, times, journals, whole, tail)


def find_losses(database: Database, period: Span) -> list[Loss]:
    """Return what was lost in a period, by cause; however many rows report it, all of them count."""
    found: dict[tuple[str, str], list[int]] = {}
    database.execute(
        "SELECT kind, us, payload FROM rows WHERE kind IN ('lost', 'damaged') AND us >= ? AND us < ?", period
    )
    while rows := database.fetchmany(_ROWS_AT_ONCE):
        for kind, us, payload in rows:
            reason, number = _loss(kind, _text(payload))
            sums = found.setdefault((kind, reason), [0, 0, 0, us, us])
            sums[0] += number or 0
            sums[1] += 1
            sums[2] += number is None
            sums[3:] = min(sums[3], us), max(sums[4], us)
    losses = [Loss(kind, reason, *sums) for (kind, reason), sums in found.items()]
    losses.sort(key=lambda loss: (-loss.number, -loss.times, loss.kind, loss.reason.encode()))
    return losses[: rules.MAX_LOSSES]


def _loss(kind: str, payload: str) -> tuple[str, int | None]:
    """Return the reason, and the number of messages or rows."""
    if kind == "damaged":
        return "", _whole_number(_field(payload, "rows"))
    fields = payload.split(" ")
    return (fields[3][: rules.MAX_REASON], _whole_number(fields[0])) if len(fields) == 4 else ("", None)


def find_steps(database: Database, period: Span) -> list[ClockStep]:
    """Return the steps of clocks in a period, in order."""
    found = database.execute(
        "SELECT journal, us, payload FROM rows WHERE kind = 'clock' AND us >= ? AND us < ? "
        f"ORDER BY us DESC, seq DESC LIMIT {rules.MAX_STEPS}",
        period,
    ).fetchall()
    return [
        ClockStep(journal, us, rules.micros_of(_field(_text(payload), "step"))) for journal, us, payload in found[::-1]
    ]


def _text(payload: bytes | None) -> str:
    return (payload or b"").decode("utf-8", "replace")


def _field(payload: str, name: str) -> str | None:
    """Return a number or a text of a JSON object, as text."""
    try:
        details: Any = json.loads(payload)
    except ValueError:
        return None
    value = details.get(name) if isinstance(details, dict) else None
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _whole_number(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None
