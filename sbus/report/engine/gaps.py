"""Find the gaps of a recording, so that a loss is not reported as silence; and count lost messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from sbus.client.losses import parse_lost
from sbus.journal.clock import from_seconds
from sbus.report.engine.store import Database
from sbus.report.figures import ClockStep, Gap, Loss
from sbus.report.spans import Span, merged, without

__all__ = [
    "MAX_GAPS",
    "Journal",
    "Mark",
    "find_gaps",
    "find_journals",
    "find_losses",
    "find_steps",
    "gaps_of",
    "recorded",
    "spans_of",
]

MAX_GAPS = 2000
"""Gaps that a report takes into account; of more, the newest interruptions, then the newest losses beside them."""
_MAX_LOSSES = 20
"""Causes of losses; of more, those with the largest numbers."""
_MAX_REASON = 100
"""Characters of the reason of a loss."""
_MAX_STEPS = 100
"""Steps of clocks; of more, the newest."""
_ROWS_AT_ONCE = 4096


class Journal(NamedTuple):
    """The facts about a journal that its rows of a time show.

    :ivar extent: the time from the first of them to the last.
    :ivar first_seq: the number of the first.
    :ivar is_stopped: whether the last one says that the recorder was stopped.
    :ivar host: the host that the newest version of sbus among those that archived them knows; empty: none knows one.
    """

    extent: Span
    first_seq: int
    is_stopped: bool
    host: str = ""


class Mark(NamedTuple):
    """A row that is not a message.

    :ivar us: its time, in µs.
    :ivar details: its payload as text.
    """

    journal: str
    seq: int
    us: int
    kind: str
    details: str | None


def find_journals(database: Database, whole: Span) -> dict[str, Journal]:
    """Return each journal that has rows in a time, by its ID."""
    found = database.execute(
        "SELECT journal, min(us), max(us), min(seq), max(2 * seq + (kind = 'stop')::BIGINT), "
        "coalesce(max(host), '') FROM rows "
        "WHERE us >= ? AND us < ? GROUP BY journal",
        whole,
    )
    return {
        journal: Journal(Span(first, last), seq, bool(end % 2), host)
        for journal, first, last, seq, end, host in found.fetchall()
    }


def find_gaps(database: Database, journals: dict[str, Journal], whole: Span, tail: int) -> list[Gap]:
    """Return the gaps within a time, the oldest first.

    A gap lasts from the row before it to the row that reports it.

    :param tail: µs without a row, at the end, from which on a journal counts as not written.
    """
    # A loss can have thousands of rows, which must not displace an interruption: its time would seem silent.
    newest = database.execute(
        "SELECT journal, seq, us, kind, payload FROM rows "
        "WHERE kind NOT IN ('message', 'digest', 'clock') AND us >= ? AND us < ? "
        f"ORDER BY kind IN ('lost', 'damaged'), us DESC LIMIT {MAX_GAPS}",
        whole,
    )
    found = [Mark(journal, seq, us, kind, _text(payload)) for journal, seq, us, kind, payload in newest.fetchall()]
    numbers = [seq for mark in found for seq in (mark.seq - 1, _last(mark, _details(mark.details)) + 1)]
    beside = database.execute(
        "SELECT journal, seq, us FROM rows WHERE us >= ? AND us < ? AND seq IN (SELECT unnest(?::BIGINT[]))",
        [*whole, numbers],
    )
    return gaps_of(found, {(journal, seq): us for journal, seq, us in beside.fetchall()}, journals, whole, tail)


def gaps_of(
    found: Iterable[Mark], times: dict[tuple[str, int], int], journals: dict[str, Journal], whole: Span, tail: int
) -> list[Gap]:
    """Return the gaps within a time, the oldest first; see `find_gaps`.

    :param times: the times of the rows beside the marks (µs), by journal and number.
    """
    found = sorted(found, key=lambda row: (row.us, row.seq))
    details_of = {(row.journal, row.seq): _details(row.details) for row in found}
    ends = {(row.journal, row.seq): _last(row, details_of[row.journal, row.seq]) + 1 for row in found}
    gaps = []
    for row in found:
        details = details_of[row.journal, row.seq]
        if row.kind == "stop":
            continue  # the gap ends with the next start
        ended = str(details.get("ended", ""))
        begin = whole.start if ended == "new" else times.get((row.journal, row.seq - 1), whole.start)
        end, reason = row.us, str(details.get("reason", ""))
        if row.kind == "lost":
            begin = min(begin, row.us - 1)  # a loss counts, also between two messages of the same microsecond
            reason = _dropped(row.details)
        elif row.kind == "damaged":
            # The damaged rows are those up to the row behind them.
            end = max(row.us + 1, times.get((row.journal, ends[row.journal, row.seq]), row.us))
            number = details.get("rows", 0)
            reason = f"{number:,} rows" if isinstance(number, int) else ""
        gaps.append(Gap(row.journal, begin, end, row.kind, ended, reason))
    for journal, (extent, first_seq, is_stopped, _) in journals.items():
        if is_stopped:
            gaps.append(Gap(journal, extent.end, whole.end, "stop", "", ""))
        elif whole.end - extent.end > tail:
            gaps.append(Gap(journal, extent.end, whole.end, "end", "", ""))
        if first_seq == 0 and not any(g.journal == journal and g.start == whole.start for g in gaps):
            gaps.append(Gap(journal, whole.start, extent.start, "start", "new", ""))
    return sorted((g for g in gaps if g.end > g.start), key=lambda g: (g.start, g.end))


def find_losses(database: Database, period: Span) -> list[Loss]:
    """Return the losses of a period, by cause; however many rows report them, all of them count."""
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
    return losses[:_MAX_LOSSES]


def _loss(kind: str, payload: str) -> tuple[str, int | None]:
    """Return the reason, and the number of messages or rows."""
    if kind == "damaged":
        return "", _whole_number(_field(payload, "rows"))
    fields = payload.split(" ")
    return (fields[3][:_MAX_REASON], _whole_number(fields[0])) if len(fields) == 4 else ("", None)


def find_steps(database: Database, period: Span) -> list[ClockStep]:
    """Return the steps of clocks in a period, in order."""
    found = database.execute(
        "SELECT journal, us, payload FROM rows WHERE kind = 'clock' AND us >= ? AND us < ? "
        f"ORDER BY us DESC, seq DESC LIMIT {_MAX_STEPS}",
        period,
    ).fetchall()
    return [ClockStep(journal, us, _micros_of(_field(_text(payload), "step"))) for journal, us, payload in found[::-1]]


def _text(payload: bytes | None) -> str:
    return (payload or b"").decode("utf-8", "replace")


def _field(payload: str, name: str) -> str | None:
    """Return a number or a text of a JSON object, as text."""
    value = _details(payload).get(name)
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _whole_number(text: str | None) -> int | None:
    if text is None or not re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", text):
        return None
    number = int(text)
    return number if -(2**63) <= number < 2**63 else None


def _micros_of(seconds: str | None) -> int | None:
    """Return a step of a clock in µs; None if it is no number."""
    try:
        return None if seconds is None else from_seconds(float(seconds))
    except (ValueError, OverflowError):
        return None


def _last(row: Mark, details: dict[str, object]) -> int:
    """Return the number of the last row that a row stands for."""
    last = details.get("last") if row.kind == "damaged" else None
    return last if isinstance(last, int) else int(row.seq)


def _dropped(receipt: str | None) -> str:
    """Return the number of messages and the reason in the bus's receipt, in words."""
    lost = parse_lost((receipt or "").encode())
    if lost is None:
        return ""
    return lost.why if lost.messages is None else f"{lost.messages:,} ({lost.why})"


def _details(payload: str | None) -> dict[str, object]:
    try:
        details = json.loads(payload or "{}")
    except (ValueError, RecursionError):
        return {}
    return details if isinstance(details, dict) else {}


def spans_of(gaps: Iterable[Gap]) -> dict[str, list[Span]]:
    """Return the time that the gaps of each journal cover."""
    spans: dict[str, list[Span]] = {}
    for gap in gaps:
        spans.setdefault(gap.journal, []).append(Span(gap.start, gap.end))
    return {journal: merged(found) for journal, found in spans.items()}


def recorded(whole: Span, journals: Iterable[str], missing: dict[str, list[Span]]) -> list[Span]:
    """Return the time in which at least one of the journals was written."""
    return merged(span for journal in journals for span in without(whole, missing.get(journal, [])))
