"""The page itself: a document that needs nothing but itself, and lets nothing in or out."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources

from sbus.spark.report.analysis.figures import Report
from sbus.spark.report.page import sections
from sbus.spark.report.page.format import amount, change, duration, moment, number
from sbus.spark.report.page.highlights import findings, key
from sbus.spark.report.page.html import Html, el, join, shown
from sbus.version import __version__

__all__ = ["render"]


def render(figures: Report, *, source: str = "", title: str = "Traffic report", now: datetime | None = None) -> str:
    """The report as one HTML document.

    It refers to nothing outside itself, and its own policy forbids it: no address is loaded, no script runs but
    the one that is in it. All text is escaped.

    :param source: where the figures come from, for people to read.
    :param now: what to call the time of its making.
    """
    style, script = (Html(_resource(name)) for name in ("style.css", "script.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    name = f"{title}: {moment(figures.period.start)}"
    document = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="generator", content=f"sbus {__version__}"),
            el("title", name),
            el("style", style),
        ),
        el(
            "body",
            el("main", _body(figures, title)),
            _footer(figures, source, now or datetime.now(UTC)),
            el("script", script),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{document}\n"


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _body(figures: Report, title: str) -> Html:
    period = figures.period
    span = duration(period.end - period.start)
    compared = f", compared with the {span} before" if figures.before else ""
    what = el("p", "Only what ", key(figures.pattern), " matches.", class_="soft") if figures.pattern else None
    return join([
        el(
            "header",
            el("div", "sbus", class_="mark"),
            el("h1", title),
            el("p", f"{moment(period.start)} to {moment(period.end)} UTC ({span}){compared}", class_="soft"),
            what,
            _tiles(figures),
        ),
        el(
            "section",
            el("h2", "What stands out", id="findings"),
            el("ul", [_finding(*found) for found in findings(figures)], class_="findings"),
            aria_labelledby="findings",
        ),
        sections.traffic(figures),
        sections.silences(figures),
        sections.recording(figures),
        sections.changes(figures),
        sections.top_keys(figures),
        sections.sizes(figures),
    ])  # fmt: skip


def _finding(class_: str, tag: str, text: Html) -> Html:
    return el("li", el("span", tag, class_=f"tag {class_}"), text)


def _tiles(figures: Report) -> Html:
    now, before = figures.totals, figures.before
    span = figures.period.end - figures.period.start
    lost = sum(1 for g in figures.gaps if g.is_loss and g.end > figures.period.start)
    share = 100 * now.recorded / span
    exact = "100" if share > 99.995 else f"{min(share, 99.99):.{1 if share < 99.9 else 2}f}"
    interrupted = f"{lost} interruption" + ("" if lost == 1 else "s")
    traffic = figures.traffic
    sums = [sum(values) for values in zip(*traffic.messages, strict=True)] or [0]
    peak = max(sums) / (traffic.width / 1e6)
    changes = figures.changes

    def than(count: float, other: float | None) -> str:
        # The lengths recorded may differ, so rates are compared.
        if not before or other is None or not before.recorded or not now.recorded:
            return ""
        return change(count / now.recorded, other / before.recorded) + " in rate"

    keys_than = f"{number(changes.new_count)} new, {number(changes.vanished_count)} gone" if changes else ""
    tiles = [
        ("Messages", number(now.messages), than(now.messages, before.messages if before else None)),
        ("Payload", amount(now.bytes), than(now.bytes, before.bytes if before else None)),
        ("Keys", number(now.keys), keys_than),
        ("Busiest", f"{number(peak)}/s" if peak >= 100 else f"{peak:.3g}/s", f"within {duration(traffic.width)}"),
        ("Silences", number(figures.silence_count), f"{sum(s.end is None for s in figures.silences)} not over"
         if figures.silence_count else "none unusual"),
        ("Recorded", f"{exact}\N{NARROW NO-BREAK SPACE}%", interrupted if lost else "without a gap"),
    ]  # fmt: skip
    return el(
        "ul",
        [
            el(
                "li",
                el("div", a, class_="what"),
                el("div", b, class_="figure"),
                el("div", c or "\u00a0", class_="than"),
            )
            for a, b, c in tiles
        ],
        class_="tiles",
    )


def _footer(figures: Report, source: str, now: datetime) -> Html:
    journals = f"{len(figures.journals)} journal" + ("" if len(figures.journals) == 1 else "s")
    made = f"Made on {now.astimezone(UTC):%Y-%m-%d %H:%M} UTC by sbus {__version__} from {journals}"
    return el(
        "footer",
        el("p", made, [" in ", el("span", shown(source, 400), class_="key")] if source else None, "."),
        el(
            "p",
            "All times are UTC. Payload bytes do not include keys. Rates are per second of recorded time, so that what "
            "was not recorded does not count as less traffic.",
        ),
        style="max-width:1120px;margin:0 auto;padding:0 24px 36px",
    )
