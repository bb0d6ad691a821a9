"""What stands out in a period, in sentences: what somebody who has ten seconds should know."""

from __future__ import annotations

from collections.abc import Sequence

from sbus.spark.report.analysis.figures import Change, Gap, Report, Silence
from sbus.spark.report.page.format import change, duration, moment_near, number, rate
from sbus.spark.report.page.html import Html, Part, el, join, shown

__all__ = ["cause", "findings", "key"]

_EACH = 3
"""How many of a kind are told one by one."""


def key(scope: str) -> Html:
    """A key or prefix, such that it may be broken behind its slashes, and shows what cannot be printed."""
    parts = shown(scope).split("/")
    broken: list[Part] = [parts[0]]
    for part in parts[1:]:
        broken += ["/", el("wbr"), part]
    return el("span", broken if scope else "(empty key)", class_="key")


def cause(gap: Gap) -> str:
    """Why there is a gap, in words."""
    if gap.kind == "start":
        return {
            "stop": "the recorder was stopped",
            "crash": "the recorder crashed, or was killed",
            "new": "the recording began here",
        }.get(gap.ended, "the recorder was not running")
    if gap.kind == "stop":
        return "the recorder is stopped"
    if gap.kind == "end":
        return "no rows since: is the recorder running, and is the archive up to date?"
    told = {"reconnect": "the connection to the bus was lost", "full": "the journal could not be written"}
    known = told.get(gap.kind, gap.kind)
    return f"{known}: {shown(gap.reason)}" if gap.reason else known


def findings(figures: Report) -> list[tuple[str, str, Html]]:
    """(class, tag, sentence) each, the most urgent first; never empty."""
    found = [
        *_silences(figures.silences, figures.silence_count, figures.period.start),
        *_losses(figures),
    ]
    if figures.changes is not None:
        changes = figures.changes
        found += _appeared(
            "gone",
            "gone",
            changes.vanished,
            changes.vanished_count,
            ("has not been heard at all", "have not been heard at all"),
        )
        found += _appeared("new", "new", changes.new, changes.new_count, ("is new", "are new"))
        found += [_moved(c) for c in [*changes.up[:2], *changes.down[:2]]]
    if not found:
        calm = "Nothing stands out: no unusual silence, nothing lost, and no key came, went or changed its rate."
        if figures.changes is None:
            calm = (
                "Nothing stands out: no unusual silence and nothing lost. There is no earlier period to compare with."
            )
        found.append(("calm", "all calm", el("span", calm)))
    return found


def _silences(silences: Sequence[Silence], count: int, near: int) -> list[tuple[str, str, Html]]:
    found = []
    for s in silences[:_EACH]:
        many = f" ({s.keys} keys)" if s.keys > 1 else ""
        how = "fell silent at" if s.end is None else "was silent from"
        till = "" if s.end is None else f" to {moment_near(s.end, near)}"
        still = " and is so still" if s.end is None else ""
        found.append((
            "silence", "silent",
            el("span", key(s.scope), f"{many} {how} {moment_near(s.start, near)}{till}{still}: "
               f"{duration(s.length)}, where a message every {duration(s.interval)} is usual."),
        ))  # fmt: skip
    if count > _EACH:
        found.append(("silence", "silent", el("span", f"{count - _EACH} more unusual silences: see below.")))
    return found


def _losses(figures: Report) -> list[tuple[str, str, Html]]:
    losses = [g for g in figures.gaps if g.is_loss and g.end > figures.period.start]
    if not losses:
        return []
    longest = max(losses, key=lambda g: g.end - g.start)
    start = max(longest.start, figures.period.start)
    missing = figures.period.end - figures.period.start - figures.totals.recorded
    times = "once" if len(losses) == 1 else f"{len(losses)} times"
    text = f"The recording was interrupted {times}"
    if len(losses) > 1:
        text += f", for {duration(missing)} together; the longest" if missing else "; the longest"
    else:
        text += ":"
    text += f" from {moment_near(start, figures.period.start)} for {duration(longest.end - start)} ({cause(longest)})."
    return [("loss", "gap", el("span", text))]


def _appeared(
    class_: str, tag: str, changes: Sequence[Change], count: int, verbs: tuple[str, str]
) -> list[tuple[str, str, Html]]:
    found = []
    told = 0
    for c in changes[:_EACH]:
        told += c.keys
        many = f" ({c.keys} keys)" if c.keys > 1 else ""
        sent = f"{number(c.messages)} messages" if c.messages else f"{number(c.before)} messages in the period before"
        found.append((class_, tag, el("span", key(c.scope), f"{many} {verbs[c.keys > 1]}: {sent}.")))
    if count > told:
        noun = "key" if count - told == 1 else "keys"
        found.append((class_, tag, el("span", f"{number(count - told)} more {noun}: see below.")))
    return found


def _moved(c: Change) -> tuple[str, str, Html]:
    arrow = "up" if c.rate > c.rate_before else "down"
    text = f" went {arrow}: {change(c.rate, c.rate_before)}, from {rate(c.rate_before)} to {rate(c.rate)}."
    return "rate", f"rate {arrow}", join(el("span", key(c.scope), text))
