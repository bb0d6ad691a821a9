"""The sections of a report's page, one function each; what there is nothing to say about is said in a line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from sbus.spark.report.analysis.figures import Change, Gap, KeyTraffic, Report, Silence
from sbus.spark.report.analysis.spans import Span, overlap
from sbus.spark.report.page.charts import band, histogram_columns, percent, ranges, spark, stacked, strip, time_axis
from sbus.spark.report.page.format import amount, change, duration, moment, moment_near, number, rate
from sbus.spark.report.page.highlights import cause, key
from sbus.spark.report.page.html import Html, Part, el, shown

__all__ = ["changes", "recording", "silences", "sizes", "top_keys", "traffic"]

_TABLE_ROWS = 48
_SECOND = 1_000_000
_COUNTS = ("", " k", " M", " G")
_BYTES = (" B", " kB", " MB", " GB")


def _section(name: str, title: str, note: Part, *content: Part) -> Html:
    return el("section", el("h2", title, id=name), el("p", note, class_="note"), *content, aria_labelledby=name)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Part]], right: str, caption: str) -> Html:
    """:param right: for each column ``r`` (to the right), ``w`` (in one line), ``b`` (a bar) or ``l``."""
    classes = [{"r": "r", "w": "w", "b": "bars"}.get(c) for c in right]
    head = el("tr", [el("th", h, scope="col", class_=c) for h, c in zip(heads, classes, strict=True)])
    body = [
        el(
            "tr",
            [
                el("th", cell, scope="row") if not i else el("td", cell, class_=c)
                for i, (cell, c) in enumerate(zip(row, classes, strict=True))
            ],
        )
        for row in rows
    ]
    table = el("table", el("thead", head), el("tbody", body), aria_label=caption)
    return el("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _windows(figures: Report) -> Span:
    """The time that the charts span: whole windows."""
    traffic = figures.traffic
    return Span(traffic.origin, traffic.origin + traffic.width * len(traffic.messages[0] if traffic.messages else [0]))


def _lost(figures: Report, journal: str | None = None) -> list[Html]:
    whole = _windows(figures)
    return [
        band("band", Span(g.start, g.end), whole, f"Not recorded for {duration(g.end - g.start)}: {cause(g)}")
        for g in figures.gaps
        if journal in (None, g.journal)
    ]


def _label(name: str | None) -> Part:
    return "all other keys" if name is None else key(name)


# --- traffic over time -----------------------------------------------------------------------------


def traffic(figures: Report) -> Html:
    """Messages and bytes over time, by prefix."""
    data = figures.traffic
    if not data.messages:
        return _section("traffic", "Traffic over time", "There was no message in this period.", _empty_strip(figures))
    whole = _windows(figures)
    # The first and the last window may be in the period only in part.
    edges = range(whole.start, whole.end, data.width)
    within = [overlap(figures.period, [Span(at, at + data.width)]) for at in edges]
    seconds = [max(micros, 1) / _SECOND for micros in within]

    def per_second(values: Sequence[int]) -> list[float]:
        return [v / s for v, s in zip(values, seconds, strict=True)]

    charts = []
    for name, title, layers, ghost, units, height in (
        ("messages", "Messages per second", data.messages, data.before, _COUNTS, 250),
        ("bytes", "Payload bytes per second", data.bytes, data.bytes_before, _BYTES, 170),
    ):
        top = max(sum(values) for values in zip(*layers, strict=True))
        most = number(top) if name == "messages" else amount(top)
        told = (
            f"{title} from {moment(whole.start)} to {moment(whole.end)} UTC, stacked by key prefix; "
            f"at most {most} in {duration(data.width)}."
        )
        drawing, axis = stacked([per_second(layer) for layer in layers], ghost and per_second(ghost), told, units)
        charts.append(
            el(
                "figure",
                el("figcaption", title),
                el(
                    "div",
                    axis,
                    drawing,
                    _lost(figures),
                    time_axis(whole),
                    class_="chart",
                    style=f"--h:{height}px",
                    data_of=f"data-{name}",
                    tabindex=0,
                    role="group",
                    aria_label=f"{title}: use the arrow keys to read it",
                ),
                _hover(figures, name, layers, ghost),
            )
        )
    legend: list[Part] = [
        el("li", el("span", class_=f"swatch n{number_}"), _label(name)) for number_, name in enumerate(data.labels)
    ]
    if data.before is not None:
        legend.append(el("li", el("span", class_="swatch ghost"), "all keys, in the period before"))
    if any(g.end > whole.start for g in figures.gaps):
        legend.append(el("li", el("span", class_="swatch lost"), "not recorded"))
    segments = "segment" if figures.depth == 1 else f"{figures.depth} segments"
    note = f"In windows of {duration(data.width)}, by the first {segments} of the key."
    return _section(
        "traffic", "Traffic over time", note, el("ul", legend, class_="legend"), charts, _traffic_table(figures)
    )


def _empty_strip(figures: Report) -> Html:
    return el("div", _lost(figures), class_="strip")


def _hover(figures: Report, name: str, layers: Sequence[Sequence[int]], ghost: Sequence[int] | None) -> Html:
    """What the script tells of each window; the numbers are counts in the window."""
    data = figures.traffic
    say = number if name == "messages" else amount
    times = [
        f"{moment(at)} + {duration(data.width)}"
        for at in range(data.origin, data.origin + data.width * len(layers[0]), data.width)
    ]
    rows = [
        {
            "name": "all other keys" if label is None else shown(label, 60),
            "swatch": f"n{i}",
            "values": [say(v) if v else "" for v in layer],
        }
        for i, (label, layer) in reversed(list(enumerate(zip(data.labels, layers, strict=True))))
    ]
    totals = [say(sum(values)) for values in zip(*layers, strict=True)]
    rows.insert(0, {"name": "together", "swatch": "none", "values": totals})
    if ghost is not None:
        rows.append({"name": "before", "swatch": "ghost", "values": [say(v) for v in ghost]})
    text = json.dumps({"times": times, "rows": rows}, separators=(",", ":"))
    # In a script element nothing is escaped; without these it cannot be ended, nor a comment begun.
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return el("script", Html(safe), type="application/json", id=f"data-{name}")


def _traffic_table(figures: Report) -> Html:
    data = figures.traffic
    count = len(data.messages[0])
    bundle = -(-count // _TABLE_ROWS)
    rows = []
    for at in range(0, count, bundle):
        here = slice(at, at + bundle)
        rows.append([
            moment_near(data.origin + at * data.width, figures.period.start),
            *[number(sum(layer[here])) for layer in data.messages],
            number(sum(sum(layer[here]) for layer in data.messages)),
            amount(sum(sum(layer[here]) for layer in data.bytes)),
        ])  # fmt: skip
    heads = ["from", *[shown(name, 40) if name else "other keys" for name in data.labels], "messages", "payload"]
    title = f"Messages in every {duration(bundle * data.width)}"
    return el("details", el("summary", "The same as a table"), _table(heads, rows, "w" + "r" * (len(heads) - 1), title))


# --- silences and gaps -----------------------------------------------------------------------------


def silences(figures: Report) -> Html:
    """Who fell silent against the usual rhythm."""
    note = (
        "Keys, and whole prefixes, that paused far longer than their rhythm lets expect, and than they did in the "
        "period before. What was not recorded (hatched) is no silence, and does not count."
    )
    if not figures.silences:
        return _section("silences", "Silences", note, el("p", "There were none.", style="margin-top:10px"))
    items = [_silence(s, figures) for s in figures.silences]
    more = figures.silence_count - len(items)
    rest = el("p", f"And {number(more)} more.", class_="note") if more > 0 else None
    axis = el("div", time_axis(_windows(figures)), class_="axis", aria_hidden="true")
    return _section("silences", "Silences", note, el("ul", items, class_="quiet-list"), axis, rest)


def _silence(s: Silence, figures: Report) -> Html:
    start = figures.period.start
    till = "not over" if s.end is None else f"to {moment_near(s.end, start)}"
    said = f"{duration(s.length)}, from {moment_near(s.start, start)} {till}"
    usual = f"usually a message every {duration(s.interval)}"
    if s.longest_before:
        usual += f", and no pause above {duration(s.longest_before)} in the period before"
    if s.unrecorded:
        usual += f"; {duration(s.unrecorded)} of it were not recorded"
    many = f" ({s.keys} keys together)" if s.keys > 1 else ""
    pause = band(
        "pause" + (" open" if s.end is None else ""),
        Span(s.start, figures.period.end if s.end is None else s.end),
        _windows(figures),
        f"Silent: {said}",
    )
    picture = strip(s.activity, f"The rhythm of {shown(s.scope)}: silent {said}", _lost(figures, s.journal), pause)
    whose = f" in journal {s.journal[:8]}" if len(figures.journals) > 1 else ""
    return el(
        "li",
        el("div", el("span", key(s.scope), many + whose), el("strong", said), class_="head"),
        el("div", usual, class_="note"),
        picture,
    )


def recording(figures: Report) -> Html:
    """When nothing was recorded."""
    start = figures.period.start
    gaps = [g for g in figures.gaps if g.end > start]
    note = (
        "Times in which messages may be missing, because nobody wrote them down. They reach from the last row before "
        "to the row that tells of the gap."
    )
    if not gaps:
        return _section(
            "recording", "Gaps of the recording", note, el("p", "There were none.", style="margin-top:10px")
        )
    longest = sorted(gaps, key=lambda g: g.start - g.end)[:_TABLE_ROWS]
    several = len(figures.journals) > 1

    def row(g: Gap) -> list[Part]:
        times: list[Part] = [moment_near(max(g.start, start), start), moment_near(g.end, start)]
        return [*times, duration(g.end - max(g.start, start)), *([g.journal[:8]] if several else []), cause(g)]

    heads = ["from", "to", "length", *(["journal"] if several else []), "why"]
    rows = [row(g) for g in sorted(longest, key=lambda g: g.start)]
    table = _table(heads, rows, "wwr" + "w" * several + "l", "Gaps of the recording")
    more = len(gaps) - len(longest)
    rest = el("p", f"And {number(more)} shorter ones.", class_="note") if more > 0 else None
    return _section("recording", "Gaps of the recording", note, table, rest)


# --- changes ---------------------------------------------------------------------------------------


def changes(figures: Report) -> Html:
    """What is different from the period before."""
    found = figures.changes
    title = "What changed"
    if found is None:
        return _section("changes", title, "Nothing was recorded before this period, so there is nothing to compare.")
    lists = [
        (f"New ({_keys(found.new_count)})", found.new, "new"),
        (f"Gone ({_keys(found.vanished_count)})", found.vanished, "gone"),
        ("More often", found.up, "up"),
        ("Less often", found.down, "down"),
    ]
    columns = [
        el("div", el("h3", name), _change_table(name, some, kind) if some else el("p", "None.", class_="soft"))
        for name, some, kind in lists
    ]
    largest = max([c.rate for c in found.prefixes] + [c.rate_before for c in found.prefixes], default=1) or 1
    rows = [
        [_named(c), rate(c.rate_before), rate(c.rate), _moved(c), _bar(c.rate, largest, f"{rate(c.rate)}")]
        for c in found.prefixes
    ]
    prefixes = _table(["prefix", "before", "now", "change", ""], rows, "lrrrb", "Rates by prefix")
    note = (
        "Against the period of the same length before. The lists leave out rates that changed by less than a quarter, "
        "or by no more than chance would do."
    )
    return _section("changes", title, note, prefixes, el("div", columns, class_="cols"))


def _keys(count: int) -> str:
    return f"{number(count)} key" + ("" if count == 1 else "s")


def _named(c: Change) -> Part:
    return [key(c.scope), el("span", f" {_keys(c.keys)}", class_="soft")] if c.scope.endswith("/") else key(c.scope)


def _moved(c: Change) -> Html:
    class_ = "gone" if not c.messages else "new up" if not c.before else "up" if c.rate > c.rate_before else "down"
    calm = c.messages and c.before and 0.8 < c.rate / c.rate_before < 1.25
    return el("span", "gone" if not c.messages else change(c.rate, c.rate_before), class_="soft" if calm else class_)


def _change_table(title: str, some: Sequence[Change], kind: str) -> Html:
    if kind in ("new", "gone"):
        count = [c.messages or c.before for c in some]
        rows: list[list[Part]] = [[_named(c), number(n)] for c, n in zip(some, count, strict=True)]
        return _table(["key", "messages" if kind == "new" else "messages before"], rows, "lr", title)
    moved: list[list[Part]] = [[_named(c), rate(c.rate_before), rate(c.rate), _moved(c)] for c in some]
    return _table(["key", "before", "now", "change"], moved, "lrrr", title)


def _bar(value: float, largest: float, title: str) -> Html:
    return el("span", class_="bar", style=f"--w:{100 * value / largest:.2f}" if largest else None, title=title)


# --- top keys --------------------------------------------------------------------------------------


def top_keys(figures: Report) -> Html:
    """Who sends most."""
    totals = figures.totals
    seconds = max(totals.recorded / _SECOND, 1e-6)

    def rows(some: Sequence[KeyTraffic], by_bytes: bool) -> list[list[Part]]:
        largest = max([k.bytes if by_bytes else k.messages for k in some], default=1)
        return [
            [
                key(k.key),
                spark(k.shape, f"{number(k.messages)} messages over the period"),
                amount(k.bytes) if by_bytes else number(k.messages),
                _share(k.bytes, totals.bytes) if by_bytes else _share(k.messages, totals.messages),
                amount(k.bytes / k.messages) if by_bytes else rate(k.messages / seconds),
                _bar(k.bytes if by_bytes else k.messages, largest, "its part of the largest"),
            ]
            for k in some
        ]

    return _section(
        "top",
        "Top keys",
        f"Of {number(totals.keys)} keys. The small pictures show how each went on over the period.",
        el("h3", "By messages", style="margin-top:14px"),
        _table(
            ["key", "", "messages", "share", "rate", ""], rows(figures.top_messages, False), "llrrrb", "By messages"
        ),
        el("h3", "By payload bytes", style="margin-top:22px"),
        _table(
            ["key", "", "payload", "share", "a message", ""],
            rows(figures.top_bytes, True),
            "llrrrb",
            "By payload bytes",
        ),
    )


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0
    return f"{share:.{1 if share < 9.95 else 0}f}\N{NARROW NO-BREAK SPACE}%"


# --- sizes -----------------------------------------------------------------------------------------


def sizes(figures: Report) -> Html:
    """How large payloads are."""
    title = "Payload sizes"
    if not figures.histogram:
        return _section("sizes", title, "There was no message in this period.")
    # Octaves on a logarithmic axis; 0 has a place of its own to the left of 1.
    start = 0 if figures.histogram[0][0] > 0 else -1
    low = math.floor(math.log2(figures.histogram[0][0])) if start == 0 else -1
    high = math.ceil(math.log2(figures.histogram[-1][1] + 1))
    span = max(1, high - low)

    def place(size: float) -> float:
        return max(0.0, (math.log2(size) if size >= 1 else -1 + size) - low) / span

    most = max(n for _, _, n in figures.histogram)
    columns = [
        (
            place(a),
            (place(b + 1) if b else place(1)) - place(a),
            n / most,
            f"{amount(a)}" + (f" to {amount(b)}" if b > a else "") + f": {number(n)} message" + ("s" if n != 1 else ""),
        )
        for a, b, n in figures.histogram
    ]
    overall = figures.sizes[0]
    marks = [
        el(
            "div",
            el("span", f"{name} {amount(size)}"),
            class_=f"pct {name}" + (" left" if place(size) > 0.75 else ""),
            style=f"left:{percent(place(size))}",
        )
        for name, size in (("p50", overall.p50), ("p95", overall.p95), ("p99", overall.p99))
    ]
    step = max(1, -(-span // 11))
    labels = [
        el(
            "div",
            "0" if power < 0 else _power(2**power),
            class_="x" + (" odd" if i % 2 else ""),
            style=f"left:{percent((power - low) / span)}",
        )
        for i, power in enumerate(range(low, high + 1, step))
    ]
    told = (
        f"Distribution of {number(overall.messages)} payload sizes: half have at most {amount(overall.p50)}, "
        f"95 % at most {amount(overall.p95)}, 99 % at most {amount(overall.p99)}; "
        f"the largest is {amount(overall.largest)}."
    )
    chart = el(
        "figure",
        el("figcaption", "How many messages have a payload of about this size"),
        el("div", el("div", class_="rule zero", style="bottom:0"), histogram_columns(columns), marks, labels,
           class_="chart hist", role="img", aria_label=told, style="margin-left:8px"),
    )  # fmt: skip
    rows: list[list[Part]] = [
        [
            "all" if s.label is None else key(s.label),
            number(s.messages),
            amount(s.mean),
            amount(s.p50),
            amount(s.p95),
            amount(s.p99),
            amount(s.largest),
            ranges(
                [("p50", place(s.p50)), ("p95", place(s.p95)), ("p99", place(s.p99))],
                f"p50 {amount(s.p50)}, p95 {amount(s.p95)}, p99 {amount(s.p99)}",
            ),
        ]
        for s in figures.sizes
    ]
    heads = ["prefix", "messages", "mean", "p50", "p95", "p99", "largest", "p50 to p99"]
    note = "On a logarithmic scale. p95 is the size that 95 of 100 messages do not exceed."
    return _section("sizes", title, note, chart, _table(heads, rows, "lrrrrrrb", "Payload sizes by prefix"))


def _power(size: int) -> str:
    """A power of two, as people write it: 1, 512, 4 Ki, 1 Mi."""
    for power, unit in ((20, "Mi"), (10, "Ki")):
        if size >= 1 << power:
            return f"{size >> power}\N{NARROW NO-BREAK SPACE}{unit}"
    return str(size)
