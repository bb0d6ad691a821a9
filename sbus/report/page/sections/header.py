"""The header: the period in words, and the leading figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sbus.journal.clock import to_seconds
from sbus.report.figures import Loss, Report
from sbus.report.page.format import amount, change, duration, millis, moment, number

__all__ = ["Header", "Tile", "header"]


class Tile(NamedTuple):
    """One figure of the header: its name, its value, and what it is compared with."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Header:
    """The period in words and in ms since the epoch, the pattern if there is one, and the leading figures."""

    period: str
    pattern: str
    tiles: list[Tile]
    start: int
    end: int


def header(report: Report) -> Header:
    """Return the period in words and the tiles."""
    period = report.period
    span = duration(period.end - period.start)
    compared = f", compared with the {span} before" if report.before else ""
    text = f"{moment(period.start)} to {moment(period.end)} UTC ({span}){compared}"
    return Header(text, report.pattern, _tiles(report), millis(period.start), millis(period.end))


def _tiles(report: Report) -> list[Tile]:
    now, before = report.totals, report.before
    span = report.period.end - report.period.start
    losses = sum(1 for g in report.gaps if g.is_interruption and g.end > report.period.start)
    share = 100 * now.recorded / span
    exact = "100" if share > 99.995 else f"{min(share, 99.99):.{1 if share < 99.9 else 2}f}"
    interrupted = f"{losses} interruption" + ("" if losses == 1 else "s")
    traffic = report.traffic
    sums = [sum(values) for values in zip(*traffic.messages, strict=True)] or [0]
    peak = max(sums) / to_seconds(traffic.width)  # the largest column of the chart
    changes = report.changes

    def than(count: float, other: float | None) -> str:
        # The lengths recorded may differ, so rates are compared.
        if not before or other is None or not before.recorded or not now.recorded:
            return ""
        return change(count / now.recorded, other / before.recorded) + " in rate"

    keys_than = f"{number(changes.new_count)} new, {number(changes.vanished_count)} gone" if changes else ""
    return [
        Tile("Messages", number(now.messages), than(now.messages, before.messages if before else None)),
        Tile("Payload", amount(now.bytes), than(now.bytes, before.bytes if before else None)),
        Tile("Keys", number(now.keys), keys_than),
        Tile("Busiest", f"{number(peak)}/s" if peak >= 100 else f"{peak:.3g}/s", f"within {duration(traffic.width)}"),
        Tile("Silences", number(report.silence_count), f"{sum(s.end is None for s in report.silences)} still silent"
             if report.silence_count else "no unusual ones"),
        Tile("Recorded", f"{exact}\N{NARROW NO-BREAK SPACE}%", interrupted if losses else "without gaps"),
        *_lost_tile(report.losses),
    ]  # fmt: skip


def _lost_tile(losses: Sequence[Loss]) -> list[Tile]:
    """Return the tile of what was lost, if anything was."""
    if not losses:
        return []
    unknown = sum(loss.unknown for loss in losses)
    times = sum(loss.times for loss in losses)
    value = number(sum(loss.number for loss in losses)) + (" or more" if unknown else "")
    return [Tile("Lost messages", value, "reported once" if times == 1 else f"reported {number(times)} times")]
