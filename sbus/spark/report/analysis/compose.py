"""Compose a report from aggregates: their order, and what one needs of another, whatever computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Protocol

from sbus.errors import UsageError
from sbus.journal.clock import format_utc, from_datetime, from_seconds
from sbus.spark.report.analysis import cube as cubes
from sbus.spark.report.analysis.figures import (
    Changes,
    ClockStep,
    Gap,
    Loss,
    Publisher,
    Report,
    Silence,
    Sizes,
    Totals,
    Traffic,
)
from sbus.spark.report.analysis.gaps import Journal, lost, recorded
from sbus.spark.report.analysis.spans import Span, length, nice_width

__all__ = ["Aggregates", "compose", "period_of", "windows_of"]

_MAX_WINDOWS = 300
"""Windows of a period."""
_MIN_LABEL_SHARE = 0.01
"""The least share of the messages of a prefix with a colour of its own: less cannot be seen."""
_MIN_TIME = -62_135_596_800_000_000
"""The beginning of the year 1, in µs since the epoch: the earliest time of a `datetime`."""

_Total = tuple[int, int, int]
"""Messages, bytes, keys."""


class Aggregates(Protocol):
    """What a report asks of the rows of its period and of the one before; they are called in this order."""

    def journals(self) -> dict[str, Journal]:
        """Return each journal that has rows, by its ID."""

    def gaps(self, journals: dict[str, Journal], tail: int) -> list[Gap]:
        """Return the gaps of both periods, as `sbus.spark.report.analysis.gaps.find_gaps` does."""

    def losses(self) -> list[Loss]:
        """Return what was lost in the period, by cause."""

    def steps(self) -> list[ClockStep]:
        """Return the steps of clocks in the period."""

    def count(self) -> None:
        """Count the messages of both periods, for all that follows."""

    def totals(self) -> tuple[_Total, _Total, int, int]:
        """Return the totals of both periods, and the numbers of new and vanished keys."""

    def depth(self) -> int:
        """Choose the number of segments of a prefix."""

    def busiest(self, depth: int) -> Sequence[tuple[str, int]]:
        """Return the prefixes of the period with the most messages, at most `cube.MAX_LABELS`, and these."""

    def traffic(self, depth: int, labels: Sequence[str], *, has_before: bool) -> Traffic:
        """Sum messages and bytes by window and label."""

    def top(self, order: str, top: int) -> list[tuple[str, int, int]]:
        """Return the keys with the most ``n`` or ``bytes``: (key, messages, bytes)."""

    def silences(
        self, missing: dict[str, list[Span]], heard: dict[str, int], top: int, intervals: int
    ) -> tuple[list[Silence], int]:
        """Return the silences of the period, as `sbus.spark.report.analysis.silences.find_silences` does."""

    def shapes(self, scopes: Sequence[tuple[str, bool]]) -> Mapping[tuple[str, bool], list[int]]:
        """Return the messages per window of each key or prefix."""

    def changes(self, missing: dict[str, list[Span]], depth: int, top: int, counts: tuple[int, int]) -> Changes:
        """Return the changes, as `sbus.spark.report.analysis.changes.compare` does."""

    def sizes(self, depth: int, labels: Sequence[str]) -> tuple[list[Sizes], list[tuple[int, int, int]]]:
        """Return the payload sizes of all messages of the period and of each label, and a histogram."""

    def publishers(self, depth: int, top: int) -> tuple[list[Publisher], int]:
        """Return the users with the most messages, and how many there are."""


def compose(
    aggregates: Aggregates, windows: cubes.Windows, *, pattern: str, depth: int | None, top: int,
    progress: Callable[[str], None],
) -> Report:  # fmt: skip
    """Return the report of a period.

    :param pattern: the messages that count, for the heading.
    :param depth: the number of segments that make a prefix; None: chosen by the keys.
    :param top: the largest length of a list.
    :param progress: called with the name of each step.
    :raises sbus.errors.UsageError: if there are no rows in the period.
    """
    period, whole = windows.period, windows.both
    progress("gaps")
    journals = aggregates.journals()
    extents = {journal: found.extent for journal, found in journals.items()}
    if not any(extent.end >= period.start for extent in extents.values()):
        # The page would report that nothing stands out.
        raise UsageError(
            f"there are no rows between {format_utc(period.start, 'seconds')} and {format_utc(period.end, 'seconds')}: "
            "name another period, or archive the one that was recorded first"
        )
    gaps = aggregates.gaps(journals, 2 * windows.width)
    missing = lost(gaps)
    losses, steps = aggregates.losses(), aggregates.steps()

    progress("traffic")
    aggregates.count()
    before = Span(whole.start, period.start)
    now_total, before_total, new, vanished = aggregates.totals()
    has_before = length(recorded(before, extents, missing)) > 0 and any(e.start < before.end for e in extents.values())
    if depth is None:
        depth = aggregates.depth()
    labels = [label for label, n in aggregates.busiest(depth) if n >= _MIN_LABEL_SHARE * now_total[0]]
    traffic = aggregates.traffic(depth, labels, has_before=has_before)
    progress("top keys")
    top_messages = aggregates.top("n", top)
    top_bytes = aggregates.top("bytes", top)
    progress("silences")
    heard = {journal: min(period.end, extent.end) for journal, extent in extents.items()}
    silences, silence_count = aggregates.silences(missing, heard, top, now_total[0] + before_total[0])
    scopes = [(key, False) for key, _, _ in top_messages + top_bytes]
    scopes += [(silence.scope, silence.is_prefix) for silence in silences]
    shapes = aggregates.shapes(scopes)
    progress("changes")
    changes = aggregates.changes(missing, depth, top, (new, vanished)) if has_before else None
    progress("payload sizes")
    sizes, histogram = aggregates.sizes(depth, labels)
    progress("publishers")
    publishers, publisher_count = aggregates.publishers(depth, top)
    return Report(
        period,
        pattern,
        depth,
        Totals(*now_total, length(recorded(period, extents, missing))),
        Totals(*before_total, length(recorded(before, extents, missing))) if has_before else None,
        traffic,
        [cubes.with_shape(found, shapes[found[0], False]) for found in top_messages],
        [cubes.with_shape(found, shapes[found[0], False]) for found in top_bytes],
        sizes,
        histogram,
        [replace(silence, activity=shapes[silence.scope, silence.is_prefix]) for silence in silences],
        silence_count,
        extents,
        gaps,
        changes,
        losses,
        steps,
        publishers,
        publisher_count,
    )


def windows_of(period: Span) -> cubes.Windows:
    """Return the windows of a period."""
    return cubes.Windows(period, nice_width(period.end - period.start, _MAX_WINDOWS))


def period_of(
    bounds: Callable[[], tuple[int, int] | None], start: datetime | None, end: datetime | None, most: timedelta
) -> Span:
    """Return the period of the report, in µs.

    An end that is not given is that of a whole window: a sliver of one would be compared with whole ones.

    :param bounds: returns the least and the greatest time of the rows (µs), None if there are none; called if an end is
        not given.
    :raises sbus.errors.UsageError: if there are no rows, or the period is not valid.
    """
    first: int | None = _micros(start)
    last: int | None = _micros(end)
    if first is None or last is None:
        found = bounds()
        if found is None:
            raise UsageError(
                "there are no rows to report on: record, and archive, first; or read another lake or journal"
            )
        if last is None:
            last = found[1] + 1
        if first is None:
            first = max(found[0], last - from_seconds(most.total_seconds()))
    if last <= first:
        raise UsageError(
            "the period ends before it begins: nothing was recorded in it, or its two ends are swapped; check both"
        )
    width = nice_width(last - first, _MAX_WINDOWS)
    if end is None:
        last = -(-last // width) * width
    if start is None:
        first = first // width * width
    if 2 * first - last < _MIN_TIME:
        raise UsageError(
            "the period before this one, as long as it, would begin before the year 1: report on a shorter one"
        )
    return Span(first, last)


def _micros(time: datetime | None) -> int | None:
    if time is None:
        return None
    if time.tzinfo is None:
        raise UsageError(f"{time} has no time zone: add one, as in {time.isoformat()}Z")
    return from_datetime(time)
