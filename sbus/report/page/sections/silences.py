"""Keys and prefixes that fell silent."""

from __future__ import annotations

from dataclasses import dataclass

from sbus.report.figures import Report, Silence
from sbus.report.page.charts import Band, Drawing, TimeTick, activity_strip, band, time_axis
from sbus.report.page.format import duration, millis, moment_near, number, printable_key
from sbus.report.page.marks import gap_bands, windows_of
from sbus.report.spans import Span

__all__ = ["SilenceSection", "silences"]


@dataclass(frozen=True, slots=True)
class SilenceItem:
    """One silence: key, time, usual rhythm, and a picture.

    The picture marks the pause and the gaps.

    :ivar start: in ms since the epoch.
    :ivar end: likewise; None if it is not over.
    """

    scope: str
    qualifier: str
    when: str
    usual: str
    drawing: Drawing
    marks: list[Band]
    start: int
    end: int | None


@dataclass(frozen=True, slots=True)
class SilenceSection:
    """The silences that are shown.

    :ivar more: how many are not; empty if none.
    """

    items: list[SilenceItem]
    times: list[TimeTick]
    more: str


def silences(report: Report) -> SilenceSection:
    """Return the keys and prefixes that fell silent against their usual rhythm."""
    more = report.silence_count - len(report.silences)
    return SilenceSection(
        items=[_silence(s, report) for s in report.silences],
        times=time_axis(windows_of(report)) if report.silences else [],
        more=number(more) if more > 0 else "",
    )


def _silence(s: Silence, report: Report) -> SilenceItem:
    start = report.period.start
    till = "not over" if s.end is None else f"to {moment_near(s.end, start)}"
    when = f"{duration(s.length)}, from {moment_near(s.start, start)} {till}"
    usual = f"usually a message every {duration(s.interval)}"
    if s.longest_before:
        usual += f"; the longest pause in the period before was {duration(s.longest_before)}"
    if s.unrecorded:
        usual += f"; {duration(s.unrecorded)} of the pause were not recorded"
    many = f" ({s.keys} keys together)" if s.keys > 1 else ""
    whose = f" on {report.name_of(s.journal)}" if len(report.journals) > 1 else ""
    pause = band(
        "pause" + (" open" if s.end is None else ""),
        Span(s.start, report.period.end if s.end is None else s.end),
        windows_of(report),
        f"Silent: {when}",
    )
    drawing = activity_strip(s.activity, f"The rhythm of {printable_key(s.scope)}: silent {when}")
    marks = gap_bands(report, s.journal) + ([pause] if pause is not None else [])
    end = None if s.end is None else millis(s.end)
    return SilenceItem(s.scope, many + whose, when, usual, drawing, marks, millis(s.start), end)
