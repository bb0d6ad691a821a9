"""The highlights of a period, in sentences for a reader with ten seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sbus.report.figures import Change, ClockStep, Gap, Loss, Report, Silence
from sbus.report.page.format import change, duration, moment_near, number, printable_key, rates
from sbus.report.spans import Span, overlap

__all__ = ["Highlight", "cause", "highlights", "loss_cause", "step_text"]

_MAX_SENTENCES = 3
"""Sentences about one kind of highlight; the others are counted."""
_CAUSES = {
    "reconnect": "the connection to the bus was lost",
    "full": "the journal could not be written",
    "lost": "the bus dropped messages for the recorder",
    "damaged": "a part of the journal is damaged",
}
"""Why messages may be missing, by the kind of the row that says so."""


class Highlight(NamedTuple):
    """A sentence.

    :ivar kind: the class of its tag.
    :ivar scope: the key or prefix that it begins with, or None.
    :ivar text: the sentence, or what follows the key.
    :ivar place: the ID of the element of the page that it is about; empty if there is none.
    """

    kind: str
    tag: str
    scope: str | None
    text: str
    place: str = ""


def cause(gap: Gap) -> str:
    """Return why there is a gap, in words."""
    if gap.kind == "start":
        return {
            "stop": "the recorder was stopped",
            "crash": "the recorder crashed, or was killed",
            "new": "the recording began here",
        }.get(gap.ended, "the recorder was not running")
    if gap.kind == "stop":
        return "the recorder is stopped"
    if gap.kind == "end":
        return "no rows since then: check that the recorder runs and the archive is up to date"
    known = _CAUSES.get(gap.kind, printable_key(gap.kind))
    return f"{known}: {printable_key(gap.reason)}" if gap.reason else known


def loss_cause(loss: Loss) -> str:
    """Return why something was lost, in words."""
    return f"{_CAUSES[loss.kind]} ({printable_key(loss.reason)})" if loss.reason else _CAUSES[loss.kind]


def step_text(step: ClockStep) -> str:
    """Return how a clock was set, in words."""
    return f"set {_way(step)}" if step.step else "set"


def _way(step: ClockStep) -> str:
    return f"{'back' if (step.step or 0) < 0 else 'forward'} by {duration(abs(step.step or 0))}"


def highlights(report: Report) -> list[Highlight]:
    """Return what stands out, the most urgent first; never empty."""
    found = [] if report.totals.messages else [_no_messages(report)]
    found += [*_silences(report.silences, report.silence_count, report.period.start), *_interruptions(report)]
    found += [*_losses(report), *_steps(report), *_ahead(report)]
    if report.changes is not None:
        changes = report.changes
        vanished = ("has no messages any more", "have no messages any more")
        found += _appeared("gone", changes.vanished, changes.vanished_count, vanished)
        found += _appeared("new", changes.new, changes.new_count, ("is new", "are new"))
        found += [_moved(c) for c in [*changes.up[:2], *changes.down[:2]]]
    if not found:
        calm = "Nothing stands out: no unusual silence, no gap, and no key appeared, disappeared or changed its rate."
        if report.changes is None:
            calm = "Nothing stands out: no unusual silence and no gap. There is no earlier period to compare with."
        found.append(Highlight("calm", "all calm", None, calm))
    return found


def _no_messages(report: Report) -> Highlight:
    of = f" that matches {printable_key(report.pattern)}" if report.pattern else ""
    text = f"There was no message{of} in this period, though the recorder was running."
    if not report.totals.recorded:
        text = "Nothing was recorded in this period: check that the recorder runs and the archive is up to date."
    return Highlight("loss", "no traffic", None, text)


def _silences(silences: Sequence[Silence], count: int, near: int) -> list[Highlight]:
    found = []
    for place, s in enumerate(silences[:_MAX_SENTENCES]):
        many = f" ({s.keys} keys)" if s.keys > 1 else ""
        how = "fell silent at" if s.end is None else "was silent from"
        till = "" if s.end is None else f" to {moment_near(s.end, near)}"
        still = " and still is" if s.end is None else ""
        text = (
            f"{many} {how} {moment_near(s.start, near)}{till}{still}: "
            f"{duration(s.length)}; a message every {duration(s.interval)} is usual."
        )
        found.append(Highlight("silence", "silent", s.scope, text, f"silence-{place}"))
    if count > _MAX_SENTENCES:
        text = f"{count - _MAX_SENTENCES} more unusual silences are listed below."
        found.append(Highlight("silence", "silent", None, text, "silences"))
    return found


def _interruptions(report: Report) -> list[Highlight]:
    found: dict[str, list[Gap]] = {}
    for gap in report.gaps:
        if gap.is_interruption and gap.end > report.period.start:
            found.setdefault(gap.journal, []).append(gap)
    missing = {journal: _missing(gaps, report.period) for journal, gaps in found.items()}
    ordered = sorted(found, key=lambda journal: (-missing[journal], journal))
    sentences = [
        Highlight("loss", "gap", None, _interrupted(report, journal, found[journal], missing[journal]), "recording")
        for journal in ordered[:_MAX_SENTENCES]
    ]
    if (more := len(ordered) - _MAX_SENTENCES) > 0:
        text = f"{more} more {'recording was' if more == 1 else 'recordings were'} interrupted, listed below."
        sentences.append(Highlight("loss", "gap", None, text, "recording"))
    return sentences


def _missing(gaps: Sequence[Gap], period: Span) -> int:
    """Return the µs of a period that gaps cover."""
    return overlap(period, [Span(gap.start, gap.end) for gap in gaps])


def _interrupted(report: Report, journal: str, gaps: Sequence[Gap], missing: int) -> str:
    """Return the sentence about the gaps of a journal, which is named if there are several."""
    period = report.period
    longest = max(gaps, key=lambda gap: gap.end - gap.start)
    start = max(longest.start, period.start)
    place = f"from {moment_near(start, period.start)} for {duration(longest.end - start)} ({cause(longest)})."
    if len(report.journals) > 1:
        text = f"{printable_key(report.name_of(journal))} was not recorded"
        if len(gaps) == 1:
            return f"{text} {place}"
        return f"{text} for {duration(missing)} in total; the longest time was {place}"
    if len(gaps) == 1:
        return f"The recording was interrupted once: {place}"
    total = f", for {duration(missing)} in total" if missing else ""
    return f"The recording was interrupted {len(gaps)} times{total}; the longest time was {place}"


def _ahead(report: Report) -> list[Highlight]:
    if not report.ahead:
        return []
    rows, them = (f"{number(report.ahead)} rows are", "them") if report.ahead > 1 else ("1 row is", "it")
    text = (
        f"{rows} dated more than an hour after this page was made: a recorder's clock was wrong, or this machine's is. "
        f"The period does not end with {them} unless it was named."
    )
    return [Highlight("loss", "clock", None, text)]


def _losses(report: Report) -> list[Highlight]:
    found = []
    near = report.period.start
    for loss in report.losses[:_MAX_SENTENCES]:
        noun = "message" if loss.kind == "lost" else "row"
        many = f"{number(loss.number)}{' or more' if loss.unknown else ''} {noun}{'' if loss.number == 1 else 's'}"
        if loss.unknown and not loss.number:
            many = f"An unknown number of {noun}s"
        verb = "was" if loss.number == 1 and not loss.unknown else "were"
        what = "lost" if loss.kind == "lost" else "recorded, and cannot be read any more"
        when = f"at {moment_near(loss.first, near)}"
        if loss.times > 1:
            when = f"{number(loss.times)} times from {moment_near(loss.first, near)} to {moment_near(loss.last, near)}"
        text = f"{many} {verb} {what}, {when}: {loss_cause(loss)}."
        found.append(Highlight("loss", "lost", None, text, "losses"))
    if (more := len(report.losses) - _MAX_SENTENCES) > 0:
        text = f"{more} more {'cause' if more == 1 else 'causes'} of losses, listed below."
        found.append(Highlight("loss", "lost", None, text, "losses"))
    return found


def _steps(report: Report) -> list[Highlight]:
    if not report.steps:
        return []
    largest = max(report.steps, key=lambda step: abs(step.step or 0))
    how = step_text(largest)
    if len(report.steps) > 1:
        way = f", {_way(largest)}," if largest.step else ""
        how = f"set {len(report.steps)} times; the largest step{way} was"
    text = (
        f"The recorder's clock was {how} at {moment_near(largest.time, report.period.start)}: "
        "times before and after a step cannot be compared."
    )
    return [Highlight("loss", "clock", None, text, "clocks")]


def _appeared(kind: str, changes: Sequence[Change], count: int, verbs: tuple[str, str]) -> list[Highlight]:
    found = []
    named = 0
    for c in changes[:_MAX_SENTENCES]:
        named += c.keys
        many = f" ({c.keys} keys)" if c.keys > 1 else ""
        sent = f"{number(c.messages)} messages" if c.messages else f"{number(c.before)} messages in the period before"
        found.append(Highlight(kind, kind, c.scope, f"{many} {verbs[c.keys > 1]}: {sent}.", f"changes-{kind}"))
    if count > named:
        noun = "key" if count - named == 1 else "keys"
        text = f"{number(count - named)} more {noun}, listed below."
        found.append(Highlight(kind, kind, None, text, f"changes-{kind}"))
    return found


def _moved(c: Change) -> Highlight:
    arrow = "up" if c.rate > c.rate_before else "down"
    before, now = rates(c.rate_before, c.rate)
    text = f" went {arrow}: {change(c.rate, c.rate_before)}, from {before} to {now}."
    return Highlight("rate", f"rate {arrow}", c.scope, text, f"changes-{arrow}")
