"""The sizes of payloads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sbus.report.figures import Report
from sbus.report.page.charts import TimeTick, percent
from sbus.report.page.format import amount, number

__all__ = ["SizeSection", "sizes"]


class Column(NamedTuple):
    """A column of the histogram; positions are lengths in CSS."""

    left: str
    width: str
    height: str
    title: str


class Mark(NamedTuple):
    """A percentile in the histogram, its label, and the side that the label is on."""

    name: str
    label: str
    left: str
    style: str


class Dots(NamedTuple):
    """The percentiles of a row as dots on a line, as (name, position), largest first."""

    left: str
    width: str
    dots: list[tuple[str, str]]
    title: str


class SizeRow(NamedTuple):
    """The payload sizes under a prefix (None: of all messages)."""

    label: str | None
    cells: list[str]
    dots: Dots


@dataclass(frozen=True, slots=True)
class SizeSection:
    """The histogram of payload sizes and their percentiles by prefix."""

    description: str
    columns: list[Column]
    marks: list[Mark]
    ticks: list[TimeTick]
    rows: list[SizeRow]


def sizes(report: Report) -> SizeSection | None:
    """Return the sizes of payloads; None if there were no messages."""
    if not report.histogram:
        return None
    # Octaves on a logarithmic axis; 0 has a place of its own to the left of 1.
    start = 0 if report.histogram[0][0] > 0 else -1
    low = math.floor(math.log2(report.histogram[0][0])) if start == 0 else -1
    high = math.ceil(math.log2(report.histogram[-1][1] + 1))
    span = max(1, high - low)

    def place(size: float) -> float:
        return max(0.0, (math.log2(size) if size >= 1 else -1 + size) - low) / span

    most = max(n for _, _, n in report.histogram)
    columns = [
        Column(
            percent(place(a)),
            percent((place(b + 1) if b else place(1)) - place(a)),
            percent(n / most),
            f"{amount(a)}" + (f" to {amount(b)}" if b > a else "") + f": {number(n)} message" + ("s" if n != 1 else ""),
        )
        for a, b, n in report.histogram
    ]
    overall = report.sizes[0]
    marks = [
        Mark(name, f"{name} {amount(size)}", percent(place(size)), " left" if place(size) > 0.75 else "")
        for name, size in (("p50", overall.p50), ("p95", overall.p95), ("p99", overall.p99))
    ]
    ticks = [
        TimeTick("0" if power < 0 else _power(2**power), percent((power - low) / span), " odd" if i % 2 else "")
        for i, power in enumerate(range(low, high + 1, max(1, -(-span // 11))))
    ]
    description = (
        f"Distribution of {number(overall.messages)} payload sizes: half are at most {amount(overall.p50)}, "
        f"95 % at most {amount(overall.p95)}, 99 % at most {amount(overall.p99)}; "
        f"the largest is {amount(overall.largest)}."
    )
    rows = [
        SizeRow(
            s.label,
            [number(s.messages), *map(amount, (s.mean, s.p50, s.p95, s.p99, s.largest))],
            Dots(
                percent(place(s.p50)),
                percent(place(s.p99) - place(s.p50)),
                [(name, percent(place(size))) for name, size in (("p99", s.p99), ("p95", s.p95), ("p50", s.p50))],
                f"p50 {amount(s.p50)}, p95 {amount(s.p95)}, p99 {amount(s.p99)}",
            ),
        )
        for s in report.sizes
    ]
    return SizeSection(description, columns, marks, ticks, rows)


def _power(size: int) -> str:
    """Return a power of two as people write it: 1, 512, 4 Ki, 1 Mi."""
    for power, unit in ((20, "Mi"), (10, "Ki")):
        if size >= 1 << power:
            return f"{size >> power}\N{NARROW NO-BREAK SPACE}{unit}"
    return str(size)
