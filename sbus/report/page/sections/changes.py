"""The changes against the period before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sbus.report.figures import Change, Report
from sbus.report.page.charts import Bar, bar_of
from sbus.report.page.format import change, exact_share, number, rate, rates

__all__ = ["ChangesSection", "changes"]


class ChangeRow(NamedTuple):
    """A key or prefix, its rates or its messages, and how much they changed.

    :ivar keys: the number of keys under a prefix, in words; empty for a key.
    :ivar style: the class of the change.
    """

    scope: str
    keys: str
    messages: str
    before: str
    now: str
    moved: str
    style: str
    bar: Bar


class ChangeList(NamedTuple):
    """One of the lists; rates or messages."""

    title: str
    kind: str
    rows: list[ChangeRow]


@dataclass(frozen=True, slots=True)
class ChangesSection:
    """Rates by prefix, and the lists of new, gone, more and less frequent keys.

    :ivar caveat: what makes the rates too low; empty if nothing does.
    """

    caveat: str
    prefixes: list[ChangeRow]
    lists: list[ChangeList]


def changes(report: Report) -> ChangesSection | None:
    """Return the changes against the period before; None if nothing was recorded then."""
    found = report.changes
    if found is None:
        return None
    largest = max([c.rate for c in found.prefixes] + [c.rate_before for c in found.prefixes], default=1) or 1
    lists = [
        (f"New ({_key_count(found.new_count)})", "new", found.new),
        (f"Gone ({_key_count(found.vanished_count)})", "gone", found.vanished),
        ("More often", "up", found.up),
        ("Less often", "down", found.down),
    ]
    caveat = (
        f" {exact_share(report.lost_share)} of the messages were lost, so rates are too low."
        if report.lost_share
        else ""
    )
    return ChangesSection(
        caveat,
        [_change(c, largest) for c in found.prefixes],
        [ChangeList(title, kind, [_change(c, largest) for c in some]) for title, kind, some in lists],
    )


def _key_count(count: int) -> str:
    return f"{number(count)} key" + ("" if count == 1 else "s")


def _change(c: Change, largest: float) -> ChangeRow:
    style = "gone" if not c.messages else "new up" if not c.before else "up" if c.rate > c.rate_before else "down"
    if c.messages and c.before and 0.8 < c.rate / c.rate_before < 1.25:
        style = "soft"
    before, now = rates(c.rate_before, c.rate)
    return ChangeRow(
        c.scope,
        _key_count(c.keys) if c.scope.endswith("/") else "",
        number(c.messages or c.before),
        before,
        now,
        "gone" if not c.messages else change(c.rate, c.rate_before),
        style,
        bar_of(c.rate, largest, rate(c.rate)),
    )
