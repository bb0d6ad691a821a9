"""Find the gaps of a recording, so that a loss is not reported as silence; and count what was lost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sbus.client.losses import parse_lost
from sbus.journal.clock import from_seconds
from sbus.spark.report.analysis.figures import ClockStep, Gap, Loss
from sbus.spark.report.analysis.spans import Span, merged, without

__all__ = [
    "MAX_GAPS",
    "MAX_LOSSES",
    "MAX_STEPS",
    "Journal",
    "Mark",
    "beside_marks",
    "extents",
    "find_gaps",
    "find_journals",
    "find_losses",
    "find_steps",
    "gaps_of",
    "lost",
    "micros_of",
    "recorded",
]

MAX_GAPS = 2000
"""Gaps that a report takes into account; of more, the newest interruptions, then the newest losses beside them."""
MAX_LOSSES = 20
"""Causes of losses; of more, those with the largest numbers."""
MAX_REASON = 100
"""Characters of the reason of a loss."""
MAX_STEPS = 100
"""Steps of clocks; of more, the newest."""


class Journal(NamedTuple):
    """The time from a journal's first row to its last.

    It has the number of the first row, and whether the last one says that the recorder was stopped.
    """

    extent: Span
    first_seq: int
    is_stopped: bool


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


def find_journals(rows: DataFrame) -> dict[str, Journal]:
    """Return each journal that has rows, by its ID."""
    return {
        str(journal): Journal(Span(first, last), seq, bool(end % 2))
        for journal, first, last, seq, end in extents(rows).collect()
    }


def extents(rows: DataFrame) -> DataFrame:
    """Return for each journal the least and greatest time, the least number, and the last number with its kind.

    There is nothing but numbers in the result: with a string, Spark would sort all rows instead of hashing them.
    """
    return rows.groupBy("journal").agg(
        F.min("us"), F.max("us"), F.min("seq"), F.max(2 * F.col("seq") + (F.col("kind") == "stop").cast("long"))
    )


def find_gaps(rows: DataFrame, journals: dict[str, Journal], whole: Span, tail: int) -> list[Gap]:
    """Return the gaps within a time, the oldest first.

    A gap lasts from the row before it to the row that reports it.

    :param rows: all rows of that time and no others: ``journal``, ``seq``, ``us``, ``kind``, ``payload``.
    :param tail: µs without a row, at the end, from which on a journal counts as not written.
    """
    marks = rows.where("kind NOT IN ('message', 'digest', 'clock')").select(
        "journal", "seq", "us", "kind", F.col("payload").cast("string")
    )
    # A loss can have thousands of rows, which must not displace an interruption: its time would seem silent.
    is_loss = F.col("kind").isin("lost", "damaged")
    found = [Mark(*row) for row in marks.orderBy(is_loss, F.col("us").desc()).limit(MAX_GAPS).collect()]
    beside = rows.where(F.col("seq").isin(beside_marks(found)))
    times = {(row.journal, row.seq): row.us for row in beside.select("journal", "seq", "us").collect()} if found else {}
    return gaps_of(found, times, journals, whole, tail)


def beside_marks(found: Iterable[Mark]) -> list[int]:
    """Return the numbers of the rows before and behind the marks."""
    return [seq for mark in found for seq in (mark.seq - 1, _last(mark, _details(mark.details)) + 1)]


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
    for journal, (extent, first_seq, is_stopped) in journals.items():
        if is_stopped:
            gaps.append(Gap(journal, extent.end, whole.end, "stop", "", ""))
        elif whole.end - extent.end > tail:
            gaps.append(Gap(journal, extent.end, whole.end, "end", "", ""))
        if first_seq == 0 and not any(g.journal == journal and g.start == whole.start for g in gaps):
            gaps.append(Gap(journal, whole.start, extent.start, "start", "new", ""))
    return sorted((g for g in gaps if g.end > g.start), key=lambda g: (g.start, g.end))


def find_losses(rows: DataFrame, period: Span) -> list[Loss]:
    """Return what was lost in a period, by cause; however many rows report it, all of them count.

    :param rows: ``us``, ``kind`` and ``payload``.
    """
    payload = F.col("payload").cast("string")
    fields = F.split(payload, " ")
    is_receipt = F.size(fields) == 4
    dropped = F.when(is_receipt, fields[0]).try_cast("bigint")
    damaged = F.get_json_object(payload, "$.rows").try_cast("bigint")
    is_lost = F.col("kind") == "lost"
    found = (
        rows.where(F.col("kind").isin("lost", "damaged") & (F.col("us") >= period.start) & (F.col("us") < period.end))
        .select(
            "kind",
            "us",
            F.when(is_lost & is_receipt, F.substring(fields[3], 1, MAX_REASON)).otherwise("").alias("reason"),
            F.when(is_lost, dropped).otherwise(damaged).alias("number"),
        )
        .groupBy("kind", "reason")
        .agg(
            F.coalesce(F.sum("number"), F.lit(0)).alias("number"),
            F.count("*").alias("times"),
            F.count_if(F.col("number").isNull()).alias("unknown"),
            F.min("us").alias("first"),
            F.max("us").alias("last"),
        )
    )
    order = F.col("number").desc(), F.col("times").desc(), "kind", "reason"
    return [Loss(*row) for row in found.orderBy(*order).limit(MAX_LOSSES).collect()]


def find_steps(rows: DataFrame, period: Span) -> list[ClockStep]:
    """Return the steps of clocks in a period, in order.

    :param rows: ``journal``, ``seq``, ``us``, ``kind`` and ``payload``.
    """
    found = (
        rows.where((F.col("kind") == "clock") & (F.col("us") >= period.start) & (F.col("us") < period.end))
        .select("journal", "seq", "us", F.get_json_object(F.col("payload").cast("string"), "$.step").alias("step"))
        .orderBy(F.col("us").desc(), F.col("seq").desc())
        .limit(MAX_STEPS)
        .collect()
    )
    return [ClockStep(row.journal, row.us, micros_of(row.step)) for row in reversed(found)]


def micros_of(seconds: str | None) -> int | None:
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
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def lost(gaps: Iterable[Gap]) -> dict[str, list[Span]]:
    """Return for each journal the time in which messages may be missing."""
    spans: dict[str, list[Span]] = {}
    for gap in gaps:
        spans.setdefault(gap.journal, []).append(Span(gap.start, gap.end))
    return {journal: merged(found) for journal, found in spans.items()}


def recorded(whole: Span, journals: Iterable[str], missing: dict[str, list[Span]]) -> list[Span]:
    """Return the time in which at least one of the journals was written."""
    return merged(span for journal in journals for span in without(whole, missing.get(journal, [])))
