"""The marks that several sections share in their charts: the time that they span, and gaps of the recording."""

from __future__ import annotations

from sbus.report.figures import Gap, Report
from sbus.report.page.charts import Band, band
from sbus.report.page.format import duration
from sbus.report.page.highlights import cause
from sbus.report.spans import Span, merged, without

__all__ = ["TABLE_ROWS", "gap_bands", "windows_of"]

TABLE_ROWS = 48
"""Rows of a table about times: two for each hour of a day."""


def windows_of(report: Report) -> Span:
    """Return the time that the charts span: whole windows."""
    traffic = report.traffic
    return Span(traffic.origin, traffic.origin + traffic.width * len(traffic.messages[0] if traffic.messages else [0]))


def gap_bands(report: Report, journal: str | None = None) -> list[Band]:
    """Mark the gaps of one journal, or of all.

    Of several journals, a gap of one does not look like a time in which nothing was recorded: its style is ``part``.
    """
    whole = windows_of(report)
    is_one = journal is not None or len(report.journals) < 2
    bands = [_band_of(report, gap, whole, is_one) for gap in report.gaps if journal in (None, gap.journal)]
    if not is_one:
        recorded = merged(span for name in report.journals for span in without(whole, _unrecorded(report, name)))
        bands += [
            band("band", span, whole, f"Nothing was recorded for {duration(span.end - span.start)}")
            for span in without(whole, recorded)
        ]
    return [one for one in bands if one is not None]


def _band_of(report: Report, gap: Gap, whole: Span, is_one: bool) -> Band | None:
    span, length = Span(gap.start, gap.end), duration(gap.end - gap.start)
    if not gap.is_unrecorded:
        return band("band lossy", span, whole, f"Messages were lost within {length}: {cause(gap)}")
    if is_one:
        return band("band", span, whole, f"Not recorded for {length}: {cause(gap)}")
    title = f"{report.name_of(gap.journal)} was not recorded for {length}: {cause(gap)}"
    return band("band part", span, whole, title)


def _unrecorded(report: Report, journal: str) -> list[Span]:
    return [Span(gap.start, gap.end) for gap in report.gaps if gap.journal == journal and gap.is_unrecorded]
