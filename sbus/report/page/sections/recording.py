"""The recording: its gaps, what was lost, and steps of clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.report.figures import ClockStep, Gap, Loss, Report
from sbus.report.page.format import duration, millis, moment_near, number
from sbus.report.page.highlights import cause, loss_cause, step_text
from sbus.report.page.marks import TABLE_ROWS

__all__ = ["RecordingSection", "recording"]


class GapRow(NamedTuple):
    """A gap of the recording; the journal is named if there are several.

    :ivar begin: when it begins, in ms since the epoch.
    :ivar finish: when it ends, likewise.
    """

    start: str
    end: str
    length: str
    journal: str
    cause: str
    begin: int
    finish: int


class LossRow(NamedTuple):
    """What was lost for one cause.

    :ivar begin: when it was first reported, in ms since the epoch.
    :ivar finish: when it was last reported, likewise.
    """

    cause: str
    number: str
    times: str
    first: str
    last: str
    begin: int
    finish: int


class StepRow(NamedTuple):
    """A step of the clock of a journal; `at` is in ms since the epoch."""

    time: str
    text: str
    journal: str
    at: int


@dataclass(frozen=True, slots=True)
class RecordingSection:
    """The longest gaps, in order; what was lost; and the newest steps of clocks.

    :ivar has_journals: whether there are several journals, so that each row names its own.
    :ivar more: how many shorter ones there are; empty if none.
    """

    rows: list[GapRow]
    has_journals: bool
    more: str
    losses: list[LossRow]
    steps: list[StepRow]


def recording(report: Report) -> RecordingSection:
    """Return the gaps of the recording."""
    start = report.period.start
    gaps = [g for g in report.gaps if g.end > start]
    longest = sorted(gaps, key=lambda g: g.start - g.end)[:TABLE_ROWS]
    more = len(gaps) - len(longest)

    def row(g: Gap) -> GapRow:
        begin = max(g.start, start)
        return GapRow(
            moment_near(begin, start),
            moment_near(g.end, start),
            duration(g.end - begin),
            g.journal[:8],
            cause(g),
            millis(begin),
            millis(g.end),
        )

    return RecordingSection(
        rows=[row(g) for g in sorted(longest, key=lambda g: g.start)],
        has_journals=len(report.journals) > 1,
        more=number(more) if more > 0 else "",
        losses=[_loss_row(loss, start) for loss in report.losses],
        steps=[_step_row(step, start) for step in report.steps[-TABLE_ROWS:]],
    )


def _loss_row(loss: Loss, near: int) -> LossRow:
    return LossRow(
        loss_cause(loss),
        number(loss.number) + (" or more" if loss.unknown else ""),
        number(loss.times),
        moment_near(loss.first, near),
        moment_near(loss.last, near),
        millis(loss.first),
        millis(loss.last),
    )


def _step_row(step: ClockStep, near: int) -> StepRow:
    return StepRow(moment_near(step.time, near), step_text(step), step.journal[:8], millis(step.time))
