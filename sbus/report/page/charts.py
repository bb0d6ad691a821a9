"""The geometry of the report's charts: outlines and positions, without markup.

A shape is an SVG that stretches with the page; the labels around it are HTML, which does not stretch. The templates
turn what these functions return into markup (``templates/macros.html.j2``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sbus.report.page.format import axis_values, time_ticks
from sbus.report.spans import Span

__all__ = [
    "HEIGHT",
    "Band",
    "Bar",
    "Drawing",
    "Outline",
    "TimeTick",
    "ValueTick",
    "activity_strip",
    "band",
    "bar_of",
    "percent",
    "sparkline",
    "stacked",
    "time_axis",
]

HEIGHT = 1000
"""Units from the bottom of a drawing to its top; it is as wide as it has values."""
_MIN_HEIGHT = 60
"""Units of the lowest step of a small picture that is not zero, so that one message can be seen."""


class Outline(NamedTuple):
    """One path of a drawing.

    :ivar style: the class that gives its colour; empty for the default one.
    :ivar data: the value of the attribute ``d``.
    """

    style: str
    data: str


class Drawing(NamedTuple):
    """An SVG.

    :ivar width: in units, one for each value.
    :ivar title: what it shows, in words.
    """

    width: int
    title: str
    outlines: list[Outline]


class ValueTick(NamedTuple):
    """A label of the vertical axis, with a rule at its height (a length in CSS)."""

    label: str
    bottom: str
    is_zero: bool


class TimeTick(NamedTuple):
    """A label of the horizontal axis, with its distance from the left edge in CSS."""

    label: str
    left: str
    style: str


class Band(NamedTuple):
    """A marked part of the time that a drawing spans; positions are CSS lengths."""

    style: str
    left: str
    width: str
    title: str


def percent(value: float) -> str:
    """Return a position or a length, as a part of 1, as a percentage in CSS."""
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def _runs(values: Iterable[int], direction: str = "") -> str:
    """Return the commands that draw a line of steps, one unit wide each.

    The line begins where the pen is.

    :param values: heights; the pen is at the first.
    :param direction: ``-`` to go from right to left.
    """
    path = []
    last: int | None = None
    run = 0
    for value in values:
        if last is not None and value != last:
            path.append(f"h{direction}{run}v{last - value}")
            run = 0
        last = value
        run += 1
    return "".join(path) + (f"h{direction}{run}" if run else "")


def _area(lower: Sequence[int], upper: Sequence[int]) -> str:
    """Return the outline of the area between two lines of steps."""
    back = _runs(reversed(lower), "-")
    return f"M0 {HEIGHT - upper[0]}{_runs(upper)}V{HEIGHT - lower[-1]}{back}z"


def stacked(
    layers: Sequence[Sequence[float]], before: Sequence[float] | None, title: str, units: Sequence[str]
) -> tuple[Drawing, list[ValueTick]]:
    """Draw layers on top of each other, the first at the bottom.

    A dashed line shows the period before.

    :param layers: for each, a value in each window.
    :param before: the values of the dashed line.
    :param units: the names of one unit, a thousand, a million... of them.
    :returns: the drawing, and its vertical axis.
    """
    count = len(layers[0])
    sums = [sum(values) for values in zip(*layers, strict=True)]
    values = axis_values(max([*sums, *(before or [])], default=0))
    largest = values[-1]
    lower = [0] * count
    total = [0.0] * count
    outlines = []
    for number, layer in enumerate(layers):
        total = [t + v for t, v in zip(total, layer, strict=True)]
        upper = [round(HEIGHT * t / largest) for t in total]
        if upper != lower:
            outlines.append(Outline(f"area n{number}", _area(lower, upper)))
        lower = upper
    if before is not None:
        heights = [round(HEIGHT * v / largest) for v in before]
        outlines.append(Outline("ghost-line", f"M0 {HEIGHT - heights[0]}{_runs(heights)}"))
    ticks = [ValueTick(_axis_label(v, largest, units), percent(v / largest), not v) for v in values]
    return Drawing(count, title, outlines), ticks


def _axis_label(value: float, largest: float, units: Sequence[str]) -> str:
    power = 0
    while largest >= 1000 and power < len(units) - 1:
        largest /= 1000
        value /= 1000
        power += 1
    return f"{value:.6g}{units[power]}" if value else "0"


def time_axis(span: Span) -> list[TimeTick]:
    """Return labels of round times for a drawing that spans this time.

    Labels at its edges are left out.
    """
    length = span.end - span.start
    ticks = []
    for number, (at, label, is_day) in enumerate(time_ticks(*span)):
        is_first = at == span.start
        if 0.01 < (at - span.start) / length < 0.985 or is_first:
            style = (" first" if is_first else "") + (" day" if is_day else " odd" if number % 2 else "")
            ticks.append(TimeTick(label, percent((at - span.start) / length), style))
    return ticks


def band(style: str, part: Span, whole: Span, title: str) -> Band | None:
    """Mark part of a time; None if it is outside of what the drawing spans."""
    length = whole.end - whole.start
    start, end = max(part.start, whole.start), min(part.end, whole.end)
    if end <= start:
        return None
    return Band(style, percent((start - whole.start) / length), percent((end - start) / length), title)


def sparkline(values: Sequence[int], title: str) -> Drawing:
    """Draw a small picture of counts over time, the largest at full height."""
    largest = max([1, *values])
    heights = [max(round(HEIGHT * v / largest), _MIN_HEIGHT if v else 0) for v in values]
    return Drawing(len(values), title, [Outline("", _area([0] * len(heights), heights))])


def activity_strip(values: Sequence[int], title: str) -> Drawing:
    """Draw counts over time by their square roots, so that small counts stay visible."""
    largest = max(values, default=0)
    roots = [(v / largest) ** 0.5 * 1000 if largest else 0 for v in values]
    return sparkline([round(v) for v in roots], title)


class Bar(NamedTuple):
    """A bar in a table.

    Its width is a percentage, empty if there is nothing to compare with.
    """

    width: str
    title: str


def bar_of(value: float, largest: float, title: str) -> Bar:
    """Return the bar of a value."""
    return Bar(f"{100 * value / largest:.2f}" if largest else "", title)
