"""What several sections mark in their charts: the time that they span, and gaps of the recording."""

from __future__ import annotations

from sbus.report.figures import Report
from sbus.report.page.charts import Band, band
from sbus.report.page.format import duration
from sbus.report.page.highlights import cause
from sbus.report.spans import Span

__all__ = ["TABLE_ROWS", "gap_bands", "windows_of"]

TABLE_ROWS = 48
"""Rows of a table about times: two for each hour of a day."""


def windows_of(report: Report) -> Span:
    """Return the time that the charts span: whole windows."""
    traffic = report.traffic
    return Span(traffic.origin, traffic.origin + traffic.width * len(traffic.messages[0] if traffic.messages else [0]))


def gap_bands(report: Report, journal: str | None = None) -> list[Band]:
    """Mark the gaps of one journal, or of all."""
    whole = windows_of(report)
    bands = [
        band("band", Span(g.start, g.end), whole, f"Not recorded for {duration(g.end - g.start)}: {cause(g)}")
        for g in report.gaps
        if journal in (None, g.journal)
    ]
    return [one for one in bands if one is not None]
