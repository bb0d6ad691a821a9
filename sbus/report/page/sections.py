"""The sections of the page: one function each, with the data for its template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sbus.journal.clock import to_seconds
from sbus.report.figures import Change, ClockStep, Gap, KeyTraffic, Loss, Report, Silence
from sbus.report.spans import Span
from sbus.report.page.charts import (
    HEIGHT,
    Band,
    Drawing,
    TimeTick,
    ValueTick,
    activity_strip,
    band,
    percent,
    sparkline,
    stacked,
    time_axis,
)
from sbus.report.page.format import (
    amount,
    change,
    duration,
    moment,
    moment_near,
    number,
    printable_key,
    rate,
    rates,
)
from sbus.report.page.highlights import cause, loss_cause, step_text

__all__ = [
    "Bar",
    "bar_of",
    "changes",
    "header",
    "recording",
    "share",
    "silences",
    "sizes",
    "top_keys",
    "traffic",
]

_TABLE_ROWS = 48
_COUNT_UNITS = ("", " k", " M", " G")
_BYTE_UNITS = (" B", " kB", " MB", " GB")


def _millis(micros: int) -> int:
    """Return a time as the page's script takes it, in ms since the epoch."""
    return micros // 1000


def _windows(report: Report) -> Span:
    """Return the time that the charts span: whole windows."""
    traffic = report.traffic
    return Span(traffic.origin, traffic.origin + traffic.width * len(traffic.messages[0] if traffic.messages else [0]))


def _gap_bands(report: Report, journal: str | None = None) -> list[Band]:
    """Mark the gaps of one journal, or of all."""
    whole = _windows(report)
    bands = [
        band("band", Span(g.start, g.end), whole, f"Not recorded for {duration(g.end - g.start)}: {cause(g)}")
        for g in report.gaps
        if journal in (None, g.journal)
    ]
    return [one for one in bands if one is not None]


class Bar(NamedTuple):
    """A bar in a table.

    Its width is a percentage, empty if there is nothing to compare with.
    """

    width: str
    title: str


def bar_of(value: float, largest: float, title: str) -> Bar:
    """Return the bar of a value."""
    return Bar(f"{100 * value / largest:.2f}" if largest else "", title)


# --- header ----------------------------------------------------------------------------------------


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
    return Header(text, report.pattern, _tiles(report), _millis(period.start), _millis(period.end))


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


# --- traffic over time -----------------------------------------------------------------------------


class HoverRow(NamedTuple):
    """A line of the box beside the pointer.

    It has a name, the class of its colour, and a text for each window.
    """

    name: str
    swatch: str
    values: list[str]


@dataclass(frozen=True, slots=True)
class TrafficChart:
    """A chart of something per second, over time.

    :ivar height: in pixels.
    :ivar columns: the height of each column, in the unit of the chart: it times the width is what the window had.
    :ivar hover: what the script shows of each window; the numbers are counts in the window.
    """

    name: str
    title: str
    height: int
    drawing: Drawing
    axis: list[ValueTick]
    columns: list[float]
    hover: dict[str, object]


@dataclass(frozen=True, slots=True)
class TrafficTable:
    """The charts as a table: the prefixes, and a time and counts in each row."""

    title: str
    prefixes: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class TrafficSection:
    """Messages and bytes over time, by prefix.

    :ivar labels: the prefix of each colour; None for all other keys.
    :ivar table: None if there was no message.
    """

    note: str
    labels: list[str | None]
    has_before: bool
    has_gaps: bool
    charts: list[TrafficChart]
    times: list[TimeTick]
    gaps: list[Band]
    table: TrafficTable | None


def traffic(report: Report) -> TrafficSection:
    """Return messages and bytes over time, by prefix."""
    data = report.traffic
    whole = _windows(report)
    gaps = _gap_bands(report)
    if not data.messages:
        return TrafficSection("There were no messages in this period.", [], False, False, [], [], gaps, None)
    # A window that is in the period only in part counts as a whole one: else one message in a sliver is a peak.
    seconds = to_seconds(data.width)

    def per_second(values: Sequence[int]) -> list[float]:
        return [value / seconds for value in values]

    charts = []
    for name, title, layers, before, units, height in (
        ("messages", "Messages per second", data.messages, data.before, _COUNT_UNITS, 250),
        ("bytes", "Payload bytes per second", data.bytes, data.bytes_before, _BYTE_UNITS, 170),
    ):
        top = max(sum(values) for values in zip(*layers, strict=True))
        most = number(top) if name == "messages" else amount(top)
        description = (
            f"{title} from {moment(whole.start)} to {moment(whole.end)} UTC, stacked by key prefix; "
            f"at most {most} in {duration(data.width)}."
        )
        drawing, axis = stacked(
            [per_second(layer) for layer in layers], before and per_second(before), description, units
        )
        columns = per_second([sum(values) for values in zip(*layers, strict=True)])
        hover = _hover(report, name, layers, before, units)
        charts.append(TrafficChart(name, title, height, drawing, axis, columns, hover))
    segments = "segment" if report.depth == 1 else f"{report.depth} segments"
    return TrafficSection(
        note=f"In windows of {duration(data.width)}"
        + (
            f", by the first {segments} of the key."
            if data.labels != [None]
            else ". No key or prefix has 1 % of the messages, so all keys have one colour."
        ),
        labels=data.labels,
        has_before=data.before is not None,
        has_gaps=any(g.end > whole.start for g in report.gaps),
        charts=charts,
        times=time_axis(whole),
        gaps=gaps,
        table=_traffic_table(report),
    )


def _hover(
    report: Report, name: str, layers: Sequence[Sequence[int]], before: Sequence[int] | None, units: Sequence[str]
) -> dict[str, object]:
    """Return what the script needs of a chart: texts for each window, and numbers to draw a part of it."""
    data = report.traffic
    text = number if name == "messages" else amount
    times = [
        f"{moment(at)} + {duration(data.width)}"
        for at in range(data.origin, data.origin + data.width * len(layers[0]), data.width)
    ]
    rows = [HoverRow("total", "none", [text(sum(values)) for values in zip(*layers, strict=True)])]
    for i, (label, layer) in reversed(list(enumerate(zip(data.labels, layers, strict=True)))):
        shown = (
            ("all other keys" if len(data.labels) > 1 else "all keys") if label is None else printable_key(label, 60)
        )
        rows.append(HoverRow(shown, f"n{i}", [text(v) if v else "" for v in layer]))
    if before is not None:
        rows.append(HoverRow("before", "ghost", [text(v) for v in before]))
    return {
        "times": times,
        "rows": [row._asdict() for row in rows],
        "start": _millis(data.origin),
        "width": data.width / 1000,
        "height": HEIGHT,
        "units": units,
        "labels": [None if label is None else printable_key(label) for label in data.labels],
        "layers": layers,
        "before": before,
    }


def _traffic_table(report: Report) -> TrafficTable:
    data = report.traffic
    count = len(data.messages[0])
    bundle = -(-count // _TABLE_ROWS)
    rows = []
    for at in range(0, count, bundle):
        here = slice(at, at + bundle)
        rows.append([
            moment_near(data.origin + at * data.width, report.period.start),
            *[number(sum(layer[here])) for layer in data.messages],
            number(sum(sum(layer[here]) for layer in data.messages)),
            amount(sum(sum(layer[here]) for layer in data.bytes)),
        ])  # fmt: skip
    prefixes = [printable_key(name, 40) if name else "other keys" for name in data.labels]
    return TrafficTable(f"Messages per {duration(bundle * data.width)}", prefixes, rows)


# --- silences and gaps -----------------------------------------------------------------------------


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
        times=time_axis(_windows(report)) if report.silences else [],
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
    whose = f" in journal {s.journal[:8]}" if len(report.journals) > 1 else ""
    pause = band(
        "pause" + (" open" if s.end is None else ""),
        Span(s.start, report.period.end if s.end is None else s.end),
        _windows(report),
        f"Silent: {when}",
    )
    drawing = activity_strip(s.activity, f"The rhythm of {printable_key(s.scope)}: silent {when}")
    marks = _gap_bands(report, s.journal) + ([pause] if pause is not None else [])
    end = None if s.end is None else _millis(s.end)
    return SilenceItem(s.scope, many + whose, when, usual, drawing, marks, _millis(s.start), end)


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
    longest = sorted(gaps, key=lambda g: g.start - g.end)[:_TABLE_ROWS]
    more = len(gaps) - len(longest)

    def row(g: Gap) -> GapRow:
        begin = max(g.start, start)
        return GapRow(
            moment_near(begin, start),
            moment_near(g.end, start),
            duration(g.end - begin),
            g.journal[:8],
            cause(g),
            _millis(begin),
            _millis(g.end),
        )

    return RecordingSection(
        rows=[row(g) for g in sorted(longest, key=lambda g: g.start)],
        has_journals=len(report.journals) > 1,
        more=number(more) if more > 0 else "",
        losses=[_loss_row(loss, start) for loss in report.losses],
        steps=[_step_row(step, start) for step in report.steps[-_TABLE_ROWS:]],
    )


def _loss_row(loss: Loss, near: int) -> LossRow:
    return LossRow(
        loss_cause(loss),
        number(loss.number) + (" or more" if loss.unknown else ""),
        number(loss.times),
        moment_near(loss.first, near),
        moment_near(loss.last, near),
        _millis(loss.first),
        _millis(loss.last),
    )


def _step_row(step: ClockStep, near: int) -> StepRow:
    return StepRow(moment_near(step.time, near), step_text(step), step.journal[:8], _millis(step.time))


# --- changes ---------------------------------------------------------------------------------------


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
    """Rates by prefix, and the lists of new, gone, more and less frequent keys."""

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
    return ChangesSection(
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


# --- top keys --------------------------------------------------------------------------------------


class TopRow(NamedTuple):
    """A key of a ranking."""

    key: str
    drawing: Drawing
    amount: str
    share: str
    each: str
    bar: Bar


@dataclass(frozen=True, slots=True)
class TopSection:
    """The busiest keys, by messages and by payload bytes."""

    keys: str
    by_messages: list[TopRow]
    by_bytes: list[TopRow]


def top_keys(report: Report) -> TopSection:
    """Return the busiest keys."""
    totals = report.totals
    seconds = max(to_seconds(totals.recorded), 1e-6)

    def row(k: KeyTraffic, largest: int, by_bytes: bool) -> TopRow:
        return TopRow(
            k.key,
            sparkline(k.shape, f"{number(k.messages)} messages over the period"),
            amount(k.bytes) if by_bytes else number(k.messages),
            share(k.bytes, totals.bytes) if by_bytes else share(k.messages, totals.messages),
            amount(k.bytes / k.messages) if by_bytes else rate(k.messages / seconds),
            bar_of(k.bytes if by_bytes else k.messages, largest, "relative to the largest"),
        )

    most_messages = max([k.messages for k in report.top_messages], default=1)
    most_bytes = max([k.bytes for k in report.top_bytes], default=1)
    return TopSection(
        keys=number(totals.keys),
        by_messages=[row(k, most_messages, False) for k in report.top_messages],
        by_bytes=[row(k, most_bytes, True) for k in report.top_bytes],
    )


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent."""
    percentage = 100 * part / whole if whole else 0
    return f"{percentage:.{1 if percentage < 9.95 else 0}f}\N{NARROW NO-BREAK SPACE}%"


# --- sizes -----------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the histogram; positions are lengths in CSS."""

    left: str
    width: str
    height: str
    title: str


class Mark(NamedTuple):
    """A percentile in the histogram, its label, and the side that the label is on."""

    name: str
    label: str
    left: str
    style: str


class Dots(NamedTuple):
    """The percentiles of a row as dots on a line, as (name, position), largest first."""

    left: str
    width: str
    dots: list[tuple[str, str]]
    title: str


class SizeRow(NamedTuple):
    """The payload sizes under a prefix (None: of all messages)."""

    label: str | None
    cells: list[str]
    dots: Dots


@dataclass(frozen=True, slots=True)
class SizeSection:
    """The histogram of payload sizes and their percentiles by prefix."""

    description: str
    columns: list[Column]
    marks: list[Mark]
    ticks: list[TimeTick]
    rows: list[SizeRow]


def sizes(report: Report) -> SizeSection | None:
    """Return the sizes of payloads; None if there were no messages."""
    if not report.histogram:
        return None
    # Octaves on a logarithmic axis; 0 has a place of its own to the left of 1.
    start = 0 if report.histogram[0][0] > 0 else -1
    low = math.floor(math.log2(report.histogram[0][0])) if start == 0 else -1
    high = math.ceil(math.log2(report.histogram[-1][1] + 1))
    span = max(1, high - low)

    def place(size: float) -> float:
        return max(0.0, (math.log2(size) if size >= 1 else -1 + size) - low) / span

    most = max(n for _, _, n in report.histogram)
    columns = [
        Column(
            percent(place(a)),
            percent((place(b + 1) if b else place(1)) - place(a)),
            percent(n / most),
            f"{amount(a)}" + (f" to {amount(b)}" if b > a else "") + f": {number(n)} message" + ("s" if n != 1 else ""),
        )
        for a, b, n in report.histogram
    ]
    overall = report.sizes[0]
    marks = [
        Mark(name, f"{name} {amount(size)}", percent(place(size)), " left" if place(size) > 0.75 else "")
        for name, size in (("p50", overall.p50), ("p95", overall.p95), ("p99", overall.p99))
    ]
    ticks = [
        TimeTick("0" if power < 0 else _power(2**power), percent((power - low) / span), " odd" if i % 2 else "")
        for i, power in enumerate(range(low, high + 1, max(1, -(-span // 11))))
    ]
    description = (
        f"Distribution of {number(overall.messages)} payload sizes: half are at most {amount(overall.p50)}, "
        f"95 % at most {amount(overall.p95)}, 99 % at most {amount(overall.p99)}; "
        f"the largest is {amount(overall.largest)}."
    )
    rows = [
        SizeRow(
            s.label,
            [number(s.messages), *map(amount, (s.mean, s.p50, s.p95, s.p99, s.largest))],
            Dots(
                percent(place(s.p50)),
                percent(place(s.p99) - place(s.p50)),
                [(name, percent(place(size))) for name, size in (("p99", s.p99), ("p95", s.p95), ("p50", s.p50))],
                f"p50 {amount(s.p50)}, p95 {amount(s.p95)}, p99 {amount(s.p99)}",
            ),
        )
        for s in report.sizes
    ]
    return SizeSection(description, columns, marks, ticks, rows)


def _power(size: int) -> str:
    """Return a power of two as people write it: 1, 512, 4 Ki, 1 Mi."""
    for power, unit in ((20, "Mi"), (10, "Ki")):
        if size >= 1 << power:
            return f"{size >> power}\N{NARROW NO-BREAK SPACE}{unit}"
    return str(size)
