"""The pictures of a report: shapes in small SVGs that stretch, with labels in HTML on top that do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sbus.spark.report.analysis.spans import Span
from sbus.spark.report.page.format import ticks, time_ticks
from sbus.spark.report.page.html import Html, Part, el, join

__all__ = ["HEIGHT", "band", "histogram_columns", "percent", "ranges", "spark", "stacked", "strip", "time_axis"]

HEIGHT = 1000
"""Units from the bottom of a drawing to its top."""


def percent(value: float) -> str:
    """A position or a length in CSS."""
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def _svg(width: int, title: str, *shapes: Part) -> Html:
    return el(
        "svg",
        el("title", title),
        *shapes,
        viewBox=f"0 0 {width} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )


def _steps(values: Iterable[int]) -> str:
    """A line of steps, one unit wide each, from left to right; values are heights. The pen is at the first."""
    path = []
    at = None
    run = 0
    for value in values:
        if at is not None and value != at:
            path.append(f"h{run}v{at - value}")
            run = 0
        at = value
        run += 1
    return "".join(path) + (f"h{run}" if run else "")


def _area(lower: Sequence[int], upper: Sequence[int]) -> str:
    """The outline of what is between two lines of steps."""
    back = []
    at = None
    run = 0
    for value in reversed(lower):
        if at is not None and value != at:
            back.append(f"h-{run}v{at - value}")
            run = 0
        at = value
        run += 1
    return (
        f"M0 {HEIGHT - upper[0]}{_steps(upper)}V{HEIGHT - lower[-1]}"
        + "".join(back)
        + (f"h-{run}" if run else "")
        + "z"
    )


def stacked(
    layers: Sequence[Sequence[float]], ghost: Sequence[float] | None, title: str, units: Sequence[str]
) -> tuple[Html, Html]:
    """Layers on top of each other, the first at the bottom, and a dashed line.

    :param layers: for each, a value in each window.
    :param ghost: what the line shows.
    :param title: what is to be seen, in words.
    :param units: names of a unit, a thousand, a million... of them.
    :returns: the drawing, and the labels of its vertical axis with their rules (which go below it).
    """
    count = len(layers[0])
    sums = [sum(values) for values in zip(*layers, strict=True)]
    top_ticks = ticks(max([*sums, *(ghost or [])], default=0))
    largest = top_ticks[-1]
    lower = [0] * count
    total = [0.0] * count
    shapes = []
    for number, layer in enumerate(layers):
        total = [t + v for t, v in zip(total, layer, strict=True)]
        upper = [round(HEIGHT * t / largest) for t in total]
        if upper != lower:
            shapes.append(el("path", class_=f"area n{number}", d=_area(lower, upper)))
        lower = upper
    if ghost is not None:
        heights = [round(HEIGHT * v / largest) for v in ghost]
        shapes.append(el("path", class_="ghost-line", d=f"M0 {HEIGHT - heights[0]}{_steps(heights)}"))
    rules = [el("div", class_="rule" if t else "rule zero", style=f"bottom:{percent(t / largest)}") for t in top_ticks]
    labels = [
        el("div", _tick(t, largest, units), class_="y", style=f"bottom:{percent(t / largest)}", aria_hidden="true")
        for t in top_ticks
    ]
    return _svg(count, title, shapes), join([rules, labels])


def _tick(value: float, largest: float, units: Sequence[str]) -> str:
    power = 0
    while largest >= 1000 and power < len(units) - 1:
        largest /= 1000
        value /= 1000
        power += 1
    return f"{value:.6g}{units[power]}" if value else "0"


def time_axis(span: Span) -> Html:
    """Labels of round times below a drawing that spans this time."""
    found = time_ticks(*span)
    length = span.end - span.start
    return join(
        el(
            "div",
            label,
            class_="x"
            + (" first" if at == span.start else "")
            + (" day" if is_day else " odd" if (number % 2 and not is_day) else ""),
            style=f"left:{percent((at - span.start) / length)}",
            aria_hidden="true",
        )
        for number, (at, label, is_day) in enumerate(found)
        if 0.01 < (at - span.start) / length < 0.985 or at == span.start
    )


def band(class_: str, part: Span, whole: Span, title: str) -> Html:
    """Part of a time, marked in a drawing that spans the whole of it."""
    length = whole.end - whole.start
    start, end = max(part.start, whole.start), min(part.end, whole.end)
    if end <= start:
        return Html()
    style = f"left:{percent((start - whole.start) / length)};width:{percent((end - start) / length)}"
    return el("div", class_=class_, style=style, title=title, role="img", aria_label=title)


def spark(values: Sequence[int], title: str) -> Html:
    """A small picture of how something went on."""
    return el("span", _heights(values, title), class_="spark")


def strip(values: Sequence[int], title: str, *marks: Part) -> Html:
    """The rhythm of something in a line, with marks over it. Few messages are shown larger than they are."""
    largest = max(values, default=0)
    scaled = [(v / largest) ** 0.5 * 1000 if largest else 0 for v in values]
    return el("div", _heights([round(v) for v in scaled], title), *marks, class_="strip")


def _heights(values: Sequence[int], title: str) -> Html:
    largest = max([1, *values])
    heights = [max(round(HEIGHT * v / largest), 60 if v else 0) for v in values]
    return _svg(len(values), title, el("path", d=_area([0] * len(heights), heights)))


def histogram_columns(bins: Sequence[tuple[float, float, float, str]]) -> Html:
    """Columns: left edge, width and height (of 1), and what each says."""
    return join(
        el(
            "div",
            class_="col",
            style=f"left:{percent(left)};width:calc({percent(width)} - 1px);height:{percent(height)}",
            title=title,
        )
        for left, width, height, title in bins
    )


def ranges(points: Sequence[tuple[str, float]], title: str) -> Html:
    """Dots on a line from the first to the last: (class, position of 1) each."""
    first, last = points[0][1], points[-1][1]
    line = el("i", style=f"left:{percent(first)};width:{percent(last - first)}")
    dots = [el("b", class_=name, style=f"left:{percent(at)}") for name, at in reversed(points)]
    return el("span", line, *dots, class_="range", title=title, role="img", aria_label=title)
