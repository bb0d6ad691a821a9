"""Traffic over time: messages and bytes by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sbus.journal.clock import to_seconds
from sbus.report.figures import Report
from sbus.report.page.charts import HEIGHT, Band, Drawing, TimeTick, ValueTick, stacked, time_axis
from sbus.report.page.format import amount, duration, millis, moment, moment_near, number, printable_key
from sbus.report.page.marks import TABLE_ROWS, gap_bands, windows_of

__all__ = ["TrafficSection", "traffic"]

_COUNT_UNITS = ("", " k", " M", " G")
_BYTE_UNITS = (" B", " kB", " MB", " GB")


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
    :ivar marks: the style of each kind of mark in the charts, and its meaning.
    :ivar table: None if there was no message.
    """

    note: str
    labels: list[str | None]
    has_before: bool
    marks: list[tuple[str, str]]
    charts: list[TrafficChart]
    times: list[TimeTick]
    gaps: list[Band]
    table: TrafficTable | None


def traffic(report: Report) -> TrafficSection:
    """Return messages and bytes over time, by prefix."""
    data = report.traffic
    whole = windows_of(report)
    gaps = gap_bands(report)
    if not data.messages:
        return TrafficSection("There were no messages in this period.", [], False, [], [], [], gaps, None)
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
        marks=_marks(gaps),
        charts=charts,
        times=time_axis(whole),
        gaps=gaps,
        table=_traffic_table(report),
    )


def _marks(gaps: Sequence[Band]) -> list[tuple[str, str]]:
    """Return the legend of the marks that there are."""
    meanings = (
        ("band", "lost", "not recorded"),
        ("band part", "lost part", "one of the hosts not recorded"),
        ("band lossy", "lossy", "messages lost"),
    )
    return [(swatch, text) for style, swatch, text in meanings if any(gap.style == style for gap in gaps)]


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
        "start": millis(data.origin),
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
    bundle = -(-count // TABLE_ROWS)
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
