"""The busiest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.report.figures import KeyTraffic, Report
from sbus.report.page.charts import Bar, Drawing, bar_of, sparkline
from sbus.report.page.format import amount, number, rate, share

__all__ = ["TopSection", "top_keys"]


class TopRow(NamedTuple):
    """A key of a ranking."""

    key: str
    drawing: Drawing
    amount: str
    share: str
    each: str
    bar: Bar


@dataclass(frozen=True, slots=True)
class TopSection:
    """The busiest keys, by messages and by payload bytes."""

    keys: str
    by_messages: list[TopRow]
    by_bytes: list[TopRow]


def top_keys(report: Report) -> TopSection:
    """Return the busiest keys."""
    totals = report.totals

    def row(k: KeyTraffic, largest: int, by_bytes: bool) -> TopRow:
        return TopRow(
            k.key,
            sparkline(k.shape, f"{number(k.messages)} messages over the period"),
            amount(k.bytes) if by_bytes else number(k.messages),
            share(k.bytes, totals.bytes) if by_bytes else share(k.messages, totals.messages),
            amount(k.bytes / k.messages) if by_bytes else rate(k.rate),
            bar_of(k.bytes if by_bytes else k.messages, largest, "relative to the largest"),
        )

    most_messages = max([k.messages for k in report.top_messages], default=1)
    most_bytes = max([k.bytes for k in report.top_bytes], default=1)
    return TopSection(
        keys=number(totals.keys),
        by_messages=[row(k, most_messages, False) for k in report.top_messages],
        by_bytes=[row(k, most_bytes, True) for k in report.top_bytes],
    )
