"""The recording: its gaps, losses, and steps of clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.report.figures import ClockStep, Gap, Loss, Report
from sbus.report.page.format import duration, exact_share, millis, moment_near, number
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
    """The losses for one cause.

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


class JournalRow(NamedTuple):
    """A journal, by its host if that is known, and how much of the period it was written."""

    name: str
    share: str
    recorded: str


@dataclass(frozen=True, slots=True)
class RecordingSection:
    """The longest gaps, in order; the journals; the losses; and the newest steps of clocks.

    :ivar journals: the least recorded first; empty unless there are several, so that each row names its own.
    :ivar more: how many shorter gaps there are; empty if none.
    """

    journals: list[JournalRow]
    rows: list[GapRow]
    more: str
    losses: list[LossRow]
    steps: list[StepRow]


def recording(report: Report) -> RecordingSection:
    """Return the gaps of the recording."""
    start = report.period.start
    gaps = [g for g in report.gaps if g.end > start and g.is_unrecorded]
    longest = sorted(gaps, key=lambda g: g.start - g.end)[:TABLE_ROWS]
    more = len(gaps) - len(longest)

    def row(g: Gap) -> GapRow:
        begin = max(g.start, start)
        return GapRow(
            moment_near(begin, start),
            moment_near(g.end, start),
            duration(g.end - begin),
            report.name_of(g.journal),
            cause(g),
            millis(begin),
            millis(g.end),
        )

    return RecordingSection(
        rows=[row(g) for g in sorted(longest, key=lambda g: g.start)],
        journals=_journals(report),
        more=number(more) if more > 0 else "",
        losses=[_loss_row(loss, start) for loss in report.losses],
        steps=[_step_row(step, start, report) for step in report.steps[-TABLE_ROWS:]],
    )


def _journals(report: Report) -> list[JournalRow]:
    if len(report.journals) < 2:
        return []
    span = report.period.end - report.period.start
    least = sorted(report.journals.items(), key=lambda each: (each[1].recorded, each[0]))[:TABLE_ROWS]
    return [
        JournalRow(report.name_of(journal), exact_share(found.recorded / span), duration(found.recorded))
        for journal, found in least
    ]


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


def _step_row(step: ClockStep, near: int, report: Report) -> StepRow:
    return StepRow(moment_near(step.time, near), step_text(step), report.name_of(step.journal), millis(step.time))
