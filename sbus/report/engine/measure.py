"""Measure a period: from the rows of a source to the figures of its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sbus.errors import LakeError, UsageError
from sbus.journal import clock
from sbus.journal.clock import HOUR, format_utc, from_datetime, from_seconds
from sbus.report.engine import store
from sbus.report.engine.aggregates import Aggregates
from sbus.report.engine.changes import compare, count_rates
from sbus.report.engine.gaps import Journal, find_gaps, find_journals, find_losses, find_steps, recorded, spans_of
from sbus.report.engine.silences import find_silences
from sbus.report.engine.sources import Extent, Source
from sbus.report.engine.windows import Windows, windows_of, with_shape
from sbus.report.figures import Loss, Recording, Report
from sbus.report.spans import Span, length

__all__ = ["measure"]

_AHEAD = HOUR
"""µs by which a row may be ahead of this machine's clock: the clocks of two hosts differ, though seldom by minutes."""
_MIN_LABEL_SHARE = 0.01
"""The least share of the messages of a prefix with its own colour: less cannot be seen."""
_MIN_TIME = -62_135_596_800_000_000
"""The beginning of the year 1, in µs since the epoch: the earliest time of a `datetime`."""
_ATTEMPTS = 3
"""Attempts to read a lake, of which compaction may replace some files meanwhile."""


def measure(
    source: Source,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    last: timedelta = timedelta(days=1),
    wanted: Callable[[str], bool] | None = None,
    pattern: str = "",
    depth: int | None = None,
    top: int = 12,
    now: datetime | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Compute the traffic of a period, compared with an equal period before it.

    :param start: the start of the period; None: `last` before its end, or the first row if that is later, and at most a
        window earlier.
    :param end: the end of the period (not included); None: the end of the window of the last row that is not ahead of
        the clock.
    :param last: the length of the period if `start` is None.
    :param wanted: says of a key, as text, whether its messages count; gaps always count.
    :param pattern: the same condition as a pattern, for the heading of the report.
    :param depth: the number of segments that make a prefix; None: chosen by the keys.
    :param top: the largest length of a list.
    :param now: the time of this machine's clock.
    :param progress: called with the name of each step.
    :raises sbus.errors.UsageError: if there are no rows in the period, or the period is not valid.
    :raises sbus.errors.StorageError: if there is no room for the work.
    """
    latest = (clock.now() if now is None else from_datetime(now)) + _AHEAD
    for _ in range(_ATTEMPTS):
        progress("period")
        try:
            extent = source.extent(latest)
            windows = windows_of(_period(extent, start, end, last))
            with store.opened() as database:
                progress("rows")
                _load(database, source, windows)
                found = _compose(database, windows, wanted, pattern, depth, top, progress)
                return replace(found, ahead=extent.ahead)
        except FileNotFoundError:
            continue
    raise LakeError("the files of the lake were replaced while they were read: try again when its compaction is done")


def _load(database: store.Database, source: Source, windows: Windows) -> None:
    """Read the counts of hours if they are enough, or else the rows."""
    period = windows.period
    if not any(time % HOUR for time in (windows.width, period.start, period.end)):
        with source.counted(period) as counts:
            if counts is not None:
                store.load_counts(database, counts, windows)
                return
    store.load_rows(database, source.rows(windows.both), windows)


def _compose(
    database: store.Database,
    windows: Windows,
    wanted: Callable[[str], bool] | None,
    pattern: str,
    depth: int | None,
    top: int,
    progress: Callable[[str], None],
) -> Report:
    period, whole = windows.period, windows.both
    before = Span(whole.start, period.start)
    progress("gaps")
    journals = find_journals(database, whole)
    extents = {journal: found.extent for journal, found in journals.items()}
    if not any(extent.end >= period.start for extent in extents.values()):
        # The page would report that nothing stands out.
        raise UsageError(
            f"there are no rows between {format_utc(period.start, 'seconds')} and {format_utc(period.end, 'seconds')}: "
            "name another period, or archive the one that was recorded first"
        )
    gaps = find_gaps(database, journals, whole, 2 * windows.width)
    unrecorded = spans_of(gap for gap in gaps if gap.is_unrecorded)
    losses, steps = find_losses(database, period), find_steps(database, period)

    progress("traffic")
    aggregates = Aggregates(database, windows)
    store.select_keys(database, wanted)
    times = {
        journal: (length(recorded(before, [journal], unrecorded)), length(recorded(period, [journal], unrecorded)))
        for journal in journals
    }
    count_rates(database, times)
    any_journal = [length(recorded(span, extents, unrecorded)) for span in (before, period)]
    before_total, now_total = aggregates.totals((any_journal[0], any_journal[1]))
    has_before = any_journal[0] > 0 and any(extent.start < before.end for extent in extents.values())
    if depth is None:
        depth = aggregates.depth()
    labels = [label for label, n in aggregates.busiest(depth) if n >= _MIN_LABEL_SHARE * now_total.messages]
    progress("top keys")
    top_messages, top_bytes = aggregates.top("n", top), aggregates.top("bytes", top)
    progress("silences")
    heard = {journal: min(period.end, extent.end) for journal, extent in extents.items()}
    intervals = now_total.messages + before_total.messages
    silences, silence_count = find_silences(database, windows, spans_of(gaps), heard, top, intervals)
    scopes = [(key, False) for key, *_ in top_messages + top_bytes]
    scopes += [(silence.scope, silence.is_prefix) for silence in silences]
    shapes = aggregates.shapes(scopes)
    progress("changes")
    changes = compare(database, depth, top, aggregates.appeared()) if has_before else None
    progress("payload sizes")
    sizes, histogram = aggregates.sizes(depth, labels)
    progress("publishers")
    publishers, publisher_count = aggregates.publishers(depth, top)
    return Report(
        period,
        pattern,
        depth,
        now_total,
        before_total if has_before else None,
        aggregates.traffic(depth, labels, has_before=has_before),
        [with_shape(found, shapes[found[0], False]) for found in top_messages],
        [with_shape(found, shapes[found[0], False]) for found in top_bytes],
        sizes,
        histogram,
        [replace(silence, activity=shapes[silence.scope, silence.is_prefix]) for silence in silences],
        silence_count,
        _recordings(journals, times),
        gaps,
        changes,
        losses,
        _lost_share(losses, aggregates.messages()),
        steps,
        publishers,
        publisher_count,
    )


def _recordings(journals: Mapping[str, Journal], times: Mapping[str, tuple[int, int]]) -> dict[str, Recording]:
    return {name: Recording(found.host, found.extent, times[name][1]) for name, found in sorted(journals.items())}


def _lost_share(losses: Sequence[Loss], messages: int) -> float:
    """Return the part of all messages that the bus is known to have dropped for the recorder."""
    lost = sum(loss.number for loss in losses if loss.kind == "lost")
    return lost / (lost + messages) if lost else 0.0


def _period(extent: Extent, start: datetime | None, end: datetime | None, most: timedelta) -> Span:
    """Return the period of the report, in µs.

    An end that is not given is that of a whole window: a sliver of one would be compared with whole ones.

    :param extent: the time of all rows.
    :raises sbus.errors.UsageError: if there are no rows, or the period is not valid.
    """
    first: int | None = _micros(start)
    last: int | None = _micros(end)
    if first is None or last is None:
        if extent.first is None or extent.last is None:
            raise UsageError(_nothing(extent))
        if last is None:
            last = extent.last + 1
        if first is None:
            first = max(extent.first, last - from_seconds(most.total_seconds()))
    if last <= first:
        raise UsageError(
            "the period ends before it begins: nothing was recorded in it, or its two ends are swapped; check both"
        )
    width = windows_of(Span(first, last)).width
    if end is None:
        last = -(-last // width) * width
    if start is None:
        first = first // width * width
    if 2 * first - last < _MIN_TIME:
        raise UsageError(
            "the period before this one, as long as it, would begin before the year 1: report on a shorter one"
        )
    return Span(first, last)


def _nothing(extent: Extent) -> str:
    if extent.ahead:
        return (
            f"all {extent.ahead:,} rows are more than an hour ahead of this machine's clock: set the clock, or name "
            "the period (--since and --until)"
        )
    return "there are no rows to report on: record, and archive, first; or read another lake or journal"


def _micros(time: datetime | None) -> int | None:
    if time is None:
        return None
    if time.tzinfo is None:
        raise UsageError(f"{time} has no time zone: add one, as in {time.isoformat()}Z")
    return from_datetime(time)
