"""The page of a report, rendered from fixed figures: it is whole, escapes everything, and a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.journal.clock import DAY, HOUR, MINUTE, SECOND, from_datetime
from sbus.lake.cube import PROGRAM, UNKNOWN
from sbus.report.figures import Publisher, Report, Totals, Traffic
from sbus.report.page.charts import HEIGHT
from sbus.report.page.format import axis_values, printable_key
from sbus.report.page.highlights import highlights
from sbus.report.page.render import render
from sbus.report.page.sections.header import header
from sbus.report.page.sections.publishers import publishers as publishers_of_page
from sbus.report.page.sections.traffic import traffic
from sbus.report.spans import Span
from tests.support.pages import PageStructure
from tests.unit.report.reports import HOSTILE, PERIOD, calm_report, hostile_report, lossy_report, new_report


def page_of(report: Report) -> str:
    return render(report, source="/srv/lake", now=datetime(2026, 3, 2, 9, 30, tzinfo=UTC))


@pytest.mark.parametrize(
    "report",
    [new_report(), calm_report(), hostile_report(), lossy_report()],
    ids=["usual", "calm", "hostile", "lossy"],
)
def test_a_page_is_well_formed_and_refers_to_nothing(report: Report) -> None:
    """Elements nest, ids are unique, nothing is loaded, and only the page's own script is allowed to run."""
    page = page_of(report)
    structure = PageStructure(page)
    targets = {reference.removeprefix("href=#") for reference in structure.references}
    assert targets <= set(structure.ids), "a finding leads to its place in the page, and nothing leads out of it"
    assert len(set(structure.ids)) == len(structure.ids)
    assert {"svg", "table", "details", "h1", "h2"} <= structure.tags
    assert "default-src 'none'" in page
    assert len(structure.scripts) == 3  # two with data, one that runs
    for data in structure.scripts[:2]:
        assert json.loads(data)["rows"]


def test_hostile_text_stays_text() -> None:
    """Tags, quotes and template syntax in keys and reasons are escaped, wherever they stand; none is evaluated."""
    page = page_of(hostile_report())
    structure = PageStructure(page)
    assert "img" not in structure.tags
    assert 'alert(1)"' not in page
    assert "49" not in structure.text.replace("549", "")
    assert not set("\x1b\u202e") & set(page)
    # In running text a key can be broken behind each slash, which a browser does not show.
    shown = printable_key(HOSTILE)
    assert structure.text.count(shown) >= 12
    assert r"\x1b\xe2\x80\xae" in structure.text
    for data in structure.scripts[:2]:
        assert "<" not in data
        assert json.loads(data)["rows"][-2]["name"] == printable_key(HOSTILE, 60)


def test_title_and_source_stay_text() -> None:
    """What the operator says on the command line is escaped as well."""
    page = render(new_report(), title="<b>&'\"", source="/srv/<lake>'\"")
    assert "<b>&'\"" in PageStructure(page).text
    assert "/srv/<lake>'\"" in PageStructure(page).text


def test_figures_of_the_page() -> None:
    """The header, the tables and the charts show the figures that they were given."""
    page = page_of(new_report())
    text = PageStructure(page).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "Sun 1 Mar 2026, 12:00 to Sun 1 Mar 2026, 14:00 UTC (2 h), compared with the 2 h before" in text
    for figure in ("1 260", "10.1 kB", "95 %", "1 interruption", "+38 % in rate", "× 3.0"):
        assert figure in text, figure
    assert "Made on 2026-03-02 09:30 UTC by sbus" in text
    assert page.count("<svg ") == 2 + 1 + 3  # the charts, a silence, the top keys
    # Twelve messages a minute for an hour and a half, then six.
    [data, _] = map(json.loads, PageStructure(page).scripts[:2])
    assert data["rows"][0] == {"name": "total", "swatch": "none", "values": ["12"] * 90 + ["6"] * 30}
    assert len(data["times"]) == 120


def test_highlights() -> None:
    """Silences, losses, new and vanished keys and changed rates get a sentence each; a calm period gets one."""
    found = highlights(new_report())
    assert [one.tag for one in found] == ["silent", "gap", "gone", "new", "rate up"]
    assert [one.scope for one in found] == ["plant/stops", None, "gone/", "office", "plant/steady"]
    assert [one.tag for one in highlights(calm_report())] == ["all calm"]


def test_losses_are_shown_with_their_numbers() -> None:
    """How many messages were lost, when and why: in the tile, a sentence for each cause and a table; so is a clock that
    was set. None of them counts as an interruption.
    """
    report = lossy_report()
    assert [(one.tag, one.text) for one in highlights(report)] == [
        (
            "lost",
            "1\N{NARROW NO-BREAK SPACE}024 messages were lost, 2 times from 12:30 to 12:31: the bus dropped "
            "messages for the recorder (queue-full).",
        ),
        (
            "lost",
            "10 rows were recorded, and cannot be read any more, at 12:30: a part of the journal is damaged.",
        ),
        (
            "lost",
            "An unknown number of messages were lost, at 12:30: the bus dropped messages for the recorder (discard).",
        ),
        (
            "clock",
            "The recorder's clock was set 2 times; the largest step, back by 2\N{NARROW NO-BREAK SPACE}h, was at "
            "12:31: times before and after a step cannot be compared.",
        ),
    ]
    text = PageStructure(page_of(report)).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    for part in (
        "Lost messages1 034 or more44.8 % of all; reported 4 times",
        "no interruption; 44.8 % lost",
        "set forward by 2 s",
        "set back by 2 h",
    ):
        assert part in text, part
    assert "Lost messages" not in PageStructure(page_of(calm_report())).text
    once = replace(report, steps=report.steps[1:])
    assert "clock was set back by 2\N{NARROW NO-BREAK SPACE}h at 12:31: times before" in highlights(once)[-1].text
    unknown = replace(report, steps=[replace(step, step=None) for step in report.steps])
    assert "clock was set 2 times; the largest step was at 12:30: times before" in highlights(unknown)[-1].text


def test_who_publishes_what() -> None:
    """Each user has a row with its part of the messages and its busiest prefixes; without any, there is no section."""
    publishers = [
        Publisher(0, 630, 5040, 1, [("plant/steady", 600), ("plant/stops", 30)]),
        Publisher(4_294_967_290, 315, 2520, 1, [("plant/stops", 315)]),
        Publisher(PROGRAM, 200, 100, 1, [("office", 200)]),
        Publisher(UNKNOWN, 115, 10, 1, [("", 115)]),
    ]
    found = publishers_of_page(replace(new_report(), publishers=publishers, publisher_count=6))
    assert found is not None
    assert [(row.name, row.messages, row.share.replace("\N{NARROW NO-BREAK SPACE}", " ")) for row in found.rows] == [
        ("root (0)", "630", "50 %"),
        ("4294967290", "315", "25 %"),
        ("the program around the bus", "200", "16 %"),
        ("not known", "115", "9.1 %"),
    ]
    text = PageStructure(page_of(replace(new_report(), publishers=publishers, publisher_count=6))).text
    for part in (
        "Who publishes what",
        "root (0)",
        "plant/steady (600), plant/stops (30)",
        "(empty key) (115)",
        "2 more",
    ):
        assert part in text, part
    assert publishers_of_page(new_report()) is None
    assert "Who publishes what" not in PageStructure(page_of(new_report())).text


def test_a_period_without_messages_is_not_calm() -> None:
    """If there was no message at all, the first sentence says so, and whether the recorder ran."""
    silent = replace(
        calm_report(),
        totals=Totals(0, 0, 0, 60_000_000, 0.0, 0.0),
        traffic=Traffic(MINUTE, PERIOD.start, [], [], [], None, None),
    )
    (found,) = highlights(silent)
    assert (found.tag, found.kind) == ("no traffic", "loss")
    assert "though the recorder was running" in found.text
    (found,) = highlights(replace(silent, totals=Totals(0, 0, 0, 0, 0.0, 0.0)))
    assert "Nothing was recorded" in found.text


def test_a_rate_that_falls_is_neither_good_nor_bad() -> None:
    """The tag of a changed rate has no colour of good news."""
    (style,) = re.findall(r"\.tag\.rate \{ color: var\(--(\w+)\)", page_of(calm_report()))
    assert style == "soft"


def heights(path: str, width: int) -> list[int]:
    """Return the height of each column of an area whose lower edge is 0."""
    at, found = 0, list[int]()
    for command, value in re.findall(r"([MhvV])(-?\d+(?: -?\d+)?)", path):
        if command == "M":
            at = HEIGHT - int(value.split()[1])
        elif command == "v":
            at -= int(value)
        elif command == "h":
            found += [at] * int(value)
        else:
            break
    assert len(found) == width
    return found


@given(
    counts=st.lists(st.lists(st.integers(0, 10**7), min_size=3, max_size=3), min_size=1, max_size=40),
    width=st.sampled_from([SECOND // 2, SECOND, MINUTE, HOUR]),
    start=st.integers(0, 10**9),
    sliver=st.integers(1, 10**6),
)
def test_columns_times_width_are_the_messages(counts: list[list[int]], width: int, start: int, sliver: int) -> None:
    """Whatever part of the first and the last window the period has: the columns times the width are the messages, the
    highest one is the "Busiest" of the header, and it is drawn as such.
    """
    origin = (PERIOD.start // width) * width
    layers = [list(layer) for layer in zip(*counts, strict=True)]
    end = origin + width * (len(counts) - 1) + min(sliver, width)
    period = Span(min(origin + start % width, end - 1), end)
    total = sum(map(sum, counts))
    report = replace(
        calm_report(),
        period=period,
        totals=Totals(total, total, 3, period.end - period.start, 1.0, 1.0),
        traffic=Traffic(width, origin, ["a", "b", None], layers, layers, None, None),
    )
    chart = traffic(report).charts[0]
    assert sum(chart.columns) * width / SECOND == pytest.approx(total)
    busiest = next(tile for tile in header(report).tiles if tile.name == "Busiest")
    assert max(chart.columns) == pytest.approx(max(map(sum, counts)) * SECOND / width)
    shown = busiest.value.removesuffix("/s").replace("\N{NARROW NO-BREAK SPACE}", "")
    if shown[-1] not in "MGT":
        assert float(shown) == pytest.approx(max(chart.columns), rel=0.01)
    # One layer has all messages: the outline of the sum.
    alone = replace(report, traffic=Traffic(width, origin, [None], [[sum(c) for c in counts]], layers[:1], None, None))
    drawn = traffic(alone).charts[0]
    if total:
        found = heights(drawn.drawing.outlines[0].data, len(counts))
        scale = axis_values(max(drawn.columns))[-1]
        assert found == [pytest.approx(HEIGHT * column / scale, abs=0.51) for column in drawn.columns]


def test_a_page_without_a_period_before() -> None:
    """If nothing was recorded before the period, the page says so and compares nothing."""
    text = PageStructure(page_of(calm_report())).text
    assert "Nothing was recorded before this period" in text
    assert "compared with" not in text
    assert "Only keys that plant/ matches." in text


def test_a_long_key_is_shortened() -> None:
    """The middle of a long key is left out."""
    assert len(printable_key("x" * 1000)) < 200


PROBE = (Path(__file__).parent / "data" / "probe.js").read_text("utf-8")
FRAME = """<!DOCTYPE html><title></title><script>onmessage = (e) => {{ document.title = e.data; }};</script>
<iframe src="{}" style="width:375px;height:3000px;border:0"></iframe>"""


@pytest.mark.parametrize("width", ["window", pytest.param("phone", marks=pytest.mark.slow)])
def test_a_browser_shows_it(tmp_path: Path, width: str) -> None:
    """Headless Chromium lays the page out, and runs its script: zoom, filter, links, local times.

    Nothing is cut at the width of a phone.
    """
    browser = _browser()
    page = page_of(new_report())
    file, frame = tmp_path / "report.html", tmp_path / "frame.html"
    probed = page.replace("</body>", f"<script>{PROBE}</script></body>")
    start, end = probed.index("script-src"), probed.index(";", probed.index("script-src"))
    file.write_text(probed[:start] + "script-src 'unsafe-inline'" + probed[end:], "utf-8")
    frame.write_text(FRAME.format(file.name), "utf-8")
    # A window has 500 pixels at least, a frame can be as narrow as a phone.
    dumped = _dump(browser, file if width == "window" else frame, tmp_path / "profile", 1200)
    found = re.search("<title>(.*?)</title>", dumped, re.DOTALL)
    assert found
    assert found[1].split(" | ") == [
        *("2 cursors", "0 images", "wide", "cut:", "windows 120,120"),
        "zoomed 30,30 From Sun 1 Mar 2026, 12:30 to 13:00:00 UTC.",
        *("closer 16,16", "whole 120,120 true", "filtered 3 to 1, all true, fewer true", "again 3 true"),
        *("links lead", "here 3 true"),
    ]


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (0, ("GMT+2 to Mon, Oct 26, 00:00 GMT+1 in your", "02:30:00 GMT+2 to 02:30:00 GMT+1 here")),
        pytest.param(
            7, ("Sat, Oct 31, 23:00 to Mon, Nov 2, 00:00 in your", "01:30:00 to 02:30:00 here"), marks=pytest.mark.slow
        ),
    ],
    ids=["changed", "usual"],
)
@pytest.mark.slow
def test_local_times_in_the_night_of_a_clock_change(tmp_path: Path, days: int, expected: Sequence[str]) -> None:
    """An hour comes twice, so each local time names its zone; on other days none does.

    The page's own policy lets its own script run.
    """
    start = from_datetime(datetime(2026, 10, 24, 22, tzinfo=UTC)) + days * DAY
    silence = replace(
        new_report().silences[0], start=start + 2 * HOUR + 30 * MINUTE, end=start + 3 * HOUR + 30 * MINUTE
    )
    file = tmp_path / "report.html"
    file.write_text(page_of(replace(new_report(), period=Span(start, start + 25 * HOUR), silences=[silence])), "utf-8")
    page = _dump(_browser(), file, tmp_path / "profile", 1200, "Europe/Berlin")
    for part in expected:
        assert part in page, re.findall(r"[^>]*(?: here|in your)[^<]*", page)
    assert page.count('class="cursor"') == 2


def _browser() -> str:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return browser or pytest.skip("no Chromium is installed: apt-get install chromium")


def _dump(browser: str, file: Path, profile: Path, width: int, zone: str = "Asia/Tokyo") -> str:
    """The document as a browser has it after its scripts have run."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--disable-dev-shm-usage",
               f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom", f"file://{file}"]  # fmt: skip
    environ = {**os.environ, "HOME": str(file.parent), "TZ": zone}
    return subprocess.run(command, capture_output=True, timeout=60, check=True, env=environ, text=True).stdout
