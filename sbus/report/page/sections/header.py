"""The header: the period in words, and the leading figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.journal.clock import to_seconds
from sbus.report.figures import Report
from sbus.report.page.format import amount, change, duration, exact_share, millis, moment, number

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
    traffic = report.traffic
    sums = [sum(values) for values in zip(*traffic.messages, strict=True)] or [0]
    peak = max(sums) / to_seconds(traffic.width)  # the largest column of the chart
    changes = report.changes

    def than(rate: float, other: float) -> str:
        # The lengths recorded may differ, so rates are compared.
        return change(rate, other) + " in rate" if before and before.recorded and now.recorded else ""

    keys_than = f"{number(changes.new_count)} new, {number(changes.vanished_count)} gone" if changes else ""
    return [
        Tile("Messages", number(now.messages), than(now.rate, before.rate if before else 0)),
        Tile("Payload", amount(now.bytes), than(now.byte_rate, before.byte_rate if before else 0)),
        Tile("Keys", number(now.keys), keys_than),
        Tile("Busiest", f"{number(peak)}/s" if peak >= 100 else f"{peak:.3g}/s", f"within {duration(traffic.width)}"),
        Tile("Silences", number(report.silence_count), f"{sum(s.end is None for s in report.silences)} still silent"
             if report.silence_count else "no unusual ones"),
        _recorded_tile(report),
        *_lost_tile(report),
    ]  # fmt: skip


def _recorded_tile(report: Report) -> Tile:
    """Return the part of the time that was recorded, the mean of the journals, and the missing parts."""
    span = report.period.end - report.period.start
    shares = {journal: found.recorded / span for journal, found in report.journals.items()}
    interruptions = sum(1 for g in report.gaps if g.is_interruption and g.end > report.period.start)
    notes = ["without gaps" if not report.losses else "no interruption"]
    if interruptions:
        notes = [f"{interruptions} interruption" + ("" if interruptions == 1 else "s")]
    least = min(shares, key=lambda journal: shares[journal], default="")
    if len(shares) > 1 and exact_share(shares[least]) != exact_share(1):
        notes = [f"{report.name_of(least)}: {exact_share(shares[least])}"]
    if report.lost_share:
        notes.append(f"{_lost(report)} lost")
    return Tile("Recorded", exact_share(sum(shares.values()) / max(1, len(shares))), "; ".join(notes))


def _lost_tile(report: Report) -> list[Tile]:
    """Return the tile of lost messages, if there are any."""
    losses = report.losses
    if not losses:
        return []
    unknown = sum(loss.unknown for loss in losses)
    times = sum(loss.times for loss in losses)
    value = number(sum(loss.number for loss in losses)) + (" or more" if unknown else "")
    notes = [f"{_lost(report)} of all"] if report.lost_share else []
    notes.append("reported once" if times == 1 else f"reported {number(times)} times")
    return [Tile("Lost messages", value, "; ".join(notes))]


def _lost(report: Report) -> str:
    """Return the part of the messages that was lost; not all of them, if some were recorded."""
    return exact_share(min(report.lost_share, 0.9999) if report.totals.messages else report.lost_share)
