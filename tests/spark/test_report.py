"""The report: its figures are what was recorded, and its page is safe, whole and shown by a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import functions as F

from sbus.cli.main import cli
from sbus.cli.spark.report import report
from sbus.errors import UsageError
from sbus.journal.keytext import as_text
from sbus.protocol.keys import matches_open
from sbus.spark.jobs.tables import key_matches, load_rows
from sbus.spark.report import measure, render
from sbus.spark.report.analysis.figures import Report
from sbus.spark.report.analysis.spans import Span, merged, nice_width, overlap, without
from sbus.spark.report.page.format import amount, change, duration, number, rate, ticks, time_ticks
from sbus.spark.report.page.highlights import findings
from sbus.spark.report.page.html import el, shown
from tests.support.journals import NewJournal

_SECOND = 1_000_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE
_START = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * _SECOND
_EVIL = "</script><img src=x onerror=alert(1)>&\"'\x1b\u202e"
_JOURNAL = "ab" * 16


def _rows() -> Iterator[tuple[int, str, str, bytes]]:
    """Four hours: two that are reported on, and the two before; a message of each key every 10 s."""

    def every(key: str, *parts: tuple[float, float], step: float = 10, size: int = 8) -> None:
        """Between these hours, the period's start being 0."""
        for start, end in parts:
            at = _START + round(start * _HOUR)
            while at < _START + end * _HOUR:
                found.append((at, "message", key, bytes(size)))
                at += round(step * _SECOND)

    found: list[tuple[int, str, str, bytes]] = []
    found.append((_START - 2 * _HOUR, "start", "", b'{"ended":"new"}'))
    every("plant/steady", (-2, 2))
    every("plant/stops", (-2, 1.5))
    every("plant/pauses", (-2, 0.5), (0.9, 2))
    every("plant/rests", (-2, -1.5), (-1, 0.5), (1, 2))
    every("hall/a", (-2, 1.6))
    every("hall/b", (-2, 1.6))
    every("more/often", (-2, 0), step=60)
    every("more/often", (0, 2), step=20, size=1000)
    every("gone/one", (-2, -0.1))
    every("gone/two", (-2, -0.1), step=60)
    every("office", (0.2, 0.3))
    every("once", (1.7, 1.7001))
    every(_EVIL, (1.9, 2), step=1)
    lost = Span(_START + round(1.1 * _HOUR), _START + round(1.2 * _HOUR))
    kept = [row for row in found if not lost.start <= row[0] < lost.end]
    kept.append((lost.end, "reconnect", "", json.dumps({"reason": "its <queue> was full"}).encode()))
    # At the same moment, the gap first.
    return iter(sorted(kept, key=lambda row: (row[0], row[1] == "message")))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A lake with these rows."""
    hours: dict[int, list[Any]] = {}
    for seq, (time, kind, key, payload) in enumerate(_rows()):
        hours.setdefault(time // _HOUR, []).append((_JOURNAL, seq, time, kind, key, payload))
    types = pa.schema([
        ("journal", pa.utf8()), ("seq", pa.int64()), ("time", pa.timestamp("us", tz="UTC")), ("kind", pa.utf8()),
        ("key", pa.utf8()), ("payload", pa.binary()),
    ])  # fmt: skip
    directory = tmp_path_factory.mktemp("lake")
    for hour, found in hours.items():
        at = directory / f"{datetime.fromtimestamp(hour * 3600, UTC):date=%Y-%m-%d/hour=%H}"
        at.mkdir(parents=True)
        columns = [
            pa.array(values).cast(kind) for values, kind in zip(zip(*found, strict=True), types.types, strict=True)
        ]
        pq.write_table(pa.Table.from_arrays(columns, schema=types), at / "0000000000.parquet")
    return directory


class _Made(NamedTuple):
    """What the command has made, and said."""

    figures: Report
    path: Path
    told: str


@pytest.fixture(scope="module")
def made(spark: Any, lake: Any, tmp_path_factory: pytest.TempPathFactory) -> _Made:
    """``sbus spark report`` on the lake, once for all tests, as it takes seconds."""
    found: list[Report] = []

    def remember(*args: Any, **settings: Any) -> Report:
        found.append(measure(*args, **settings))
        return found[-1]

    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(spark), "stop", lambda self: None)  # it is everybody's
        patch.setattr("sbus.spark.report.measure", remember)
        arguments = ["--lake", str(lake), "--since=2026-03-01T12:00", "--until=2026-03-01T14:00", "--output", str(path)]
        told = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert told.exit_code == 0
    return _Made(found[0], path, told.output)


@pytest.fixture(scope="module")
def figures(made: _Made) -> Report:
    return made.figures


@pytest.fixture(scope="module")
def page(figures: Report) -> str:
    return render(figures, source="/srv/<lake>", now=datetime(2026, 3, 2, tzinfo=UTC))


# --- figures ---------------------------------------------------------------------------------------


def test_totals_are_those_of_the_rows(figures: Report) -> None:
    """Messages, bytes and keys of both periods are counted, gaps are not."""
    for total, start in ((figures.totals, _START), (figures.before, _START - 2 * _HOUR)):
        mine = [r for r in _rows() if r[1] == "message" and start <= r[0] < start + 2 * _HOUR]
        assert total is not None
        assert (total.messages, total.bytes) == (len(mine), sum(len(r[3]) for r in mine))
        assert total.keys == len({r[2] for r in mine})


def test_traffic_has_every_message_once(figures: Report) -> None:
    """The windows and prefixes of the plot add up to the totals, and there are at most 300 windows."""
    traffic = figures.traffic
    assert sum(map(sum, traffic.messages)) == figures.totals.messages
    assert sum(map(sum, traffic.bytes)) == figures.totals.bytes
    assert figures.before is not None
    assert sum(traffic.before or ()) == figures.before.messages
    assert 100 < len(traffic.messages[0]) <= 300
    assert len(traffic.labels) == len(traffic.messages)


def test_top_keys_are_in_order(figures: Report) -> None:
    """The key with most messages, and the one with most bytes, come first, with how they went on."""
    counts = [k.messages for k in figures.top_messages]
    assert counts == sorted(counts, reverse=True)
    assert figures.top_messages[0].key == "plant/steady"
    assert figures.top_bytes[0].key == "more/often"
    assert figures.top_bytes[0].bytes == 1000 * figures.top_bytes[0].messages
    assert all(20 < len(k.shape) <= 60 for k in figures.top_messages)


def test_sizes_are_exact(figures: Report) -> None:
    """Percentiles and the histogram are those of the payloads."""
    overall = figures.sizes[0]
    assert (overall.label, overall.p50, overall.p99, overall.largest) == (None, 8, 1000, 1000)
    assert overall.messages == figures.totals.messages
    assert sum(n for _, _, n in figures.histogram) == overall.messages
    assert all(low <= high for low, high, _ in figures.histogram)
    [large] = [(low, high) for low, high, _ in figures.histogram if low > 8]
    assert large[0] <= 1000 <= large[1]


def test_silences_are_told_from_loss_and_from_habit(figures: Report) -> None:
    """Who stops, or pauses unusually long, is silent; what was not recorded, rests always, or came once, is not."""
    found = {s.scope: s for s in figures.silences}
    assert found.keys() == {"plant/stops", "plant/pauses", "hall/"}
    assert figures.silence_count == 3
    stops, pauses, hall = found["plant/stops"], found["plant/pauses"], found["hall/"]
    assert stops.end is None
    assert stops.start == _START + round(1.5 * _HOUR) - 10 * _SECOND
    assert stops.interval == 10 * _SECOND
    assert (pauses.start, pauses.end) == (_START + 30 * _MINUTE - 10 * _SECOND, _START + 54 * _MINUTE)
    assert pauses.unrecorded == 0
    assert pauses.longest_before == 10 * _SECOND
    assert hall.keys == 2
    assert len(hall.activity) == len(figures.traffic.messages[0])


def test_a_key_may_end_as_a_prefix_does(spark: Any, new_journal: NewJournal) -> None:
    """It is counted without the keys that begin like it, and is silent where they are not."""
    journal = new_journal()
    for at in range(0, 7200, 10):
        keys = [b"a/", b"a/b"] if at < 4000 else [b"a/b"]
        journal.append([(key, b"") for key in keys], _START + at * _SECOND)
    journal.sync()
    found = measure(load_rows(spark, journals=[journal.directory]))
    assert {top.key: (top.messages, sum(top.shape)) for top in found.top_messages} == {
        "a/": (400, 400),
        "a/b": (720, 720),
    }
    assert [(s.scope, s.is_prefix, sum(s.activity)) for s in found.silences] == [("a/", False, 400)]


def test_gaps_reach_from_the_row_before_to_the_one_that_tells(figures: Report) -> None:
    """The time that was not recorded is known, with its reason, and taken off the recorded time."""
    [gap] = [g for g in figures.gaps if g.is_loss]
    assert (gap.start, gap.end) == (_START + 66 * _MINUTE - 10 * _SECOND, _START + 72 * _MINUTE)
    assert (gap.kind, gap.reason) == ("reconnect", "its <queue> was full")
    # The last row came ten seconds before the period's end, or later: that is no gap.
    assert figures.totals.recorded == 2 * _HOUR - (gap.end - gap.start)


def test_changes_are_by_recorded_time(figures: Report) -> None:
    """New and vanished keys are found, by prefix where all of it is; a loss of messages is no lower rate."""
    changes = figures.changes
    assert changes is not None
    # The last one has slashes in it.
    assert {c.scope for c in changes.new} == {"office", "once", _EVIL.partition("/")[0] + "/"} or {
        c.scope for c in changes.new
    } == {"office", "once", _EVIL}
    assert [(c.scope, c.keys) for c in changes.vanished] == [("gone/", 2)]
    assert (changes.new_count, changes.vanished_count) == (3, 2)
    [up] = changes.up
    assert up.scope == "more/often"
    assert up.rate / up.rate_before == pytest.approx(3, rel=0.02)
    steady = [c for c in changes.down if c.scope == "plant/steady"]
    assert steady == []


def test_an_empty_period_is_an_error_that_says_so(spark: Any, lake: Any) -> None:
    """Without any row, and with ends that are swapped, it is said what is wrong."""
    now = datetime(2026, 3, 1, tzinfo=UTC)
    rows = load_rows(spark, lake=str(lake))
    with pytest.raises(UsageError, match="no rows"):
        measure(rows.where("false"))
    with pytest.raises(UsageError, match="swapped"):
        measure(rows, start=now, end=now - timedelta(hours=1))
    with pytest.raises(UsageError, match="before the year 1"):
        measure(rows, start=datetime(1, 1, 1, tzinfo=UTC))
    with pytest.raises(UsageError, match="time zone"):
        measure(rows, start=now.replace(tzinfo=None), end=now)
    # There are rows before the last of these.
    for start in (datetime(2020, 1, 1, tzinfo=UTC), datetime(2026, 3, 1, 14, tzinfo=UTC)):
        with pytest.raises(UsageError, match=rf"no rows between .* {start:%Y, %H}:00 and .* UTC: name another period"):
            measure(rows, start=start, end=start + timedelta(hours=1))


def test_patterns_match_as_the_bus_does(spark: Any) -> None:
    """The condition on text finds the same keys as the bus's rules on bytes."""
    keys = [b"", b"a", b"a/", b"a/b", b"a/bc", b"a/b/c", b"a/b/c/", b"a/b/c/d", b"a/\n/c", b"x.y", b"a\\b/c", b"\xff/b",
            "é/b".encode(), b"a*", b"a/*", b"axx", b"/", b"/a", b"\\E/b", b"a//c"]  # fmt: skip
    patterns = [b"", b"a", b"a/", b"*", b"*/", b"a*", b"a/*", b"a/b*", b"a/*/c", b"a/*/c/", b"a/*b", b"x.*", b"a\\*/c",
                "é*/b".encode(), b"/", b"*/b", b"a**", b"\\E/", b"**/b", b"x?y"]  # fmt: skip
    text = spark.createDataFrame([(as_text(key),) for key in keys], "key string")
    found = text.select([F.collect_list(F.when(key_matches(p), F.col("key"))) for p in patterns]).collect()[0]
    for pattern, matched in zip(patterns, found, strict=True):
        assert sorted(matched) == sorted(as_text(key) for key in keys if matches_open(pattern, key)), pattern
    with pytest.raises(UsageError, match="secret"):
        key_matches("!/cred////x")
    with pytest.raises(UsageError, match="not text"):
        key_matches(b"\xc3*")


# --- the page --------------------------------------------------------------------------------------


class _Structure(HTMLParser):
    """Checks that elements nest, and gathers what the page refers to, what it runs and what it says."""

    VOID = frozenset({"meta", "wbr", "br", "hr", "img", "input", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "action", "data", "xlink:href", "srcset"):
                self.references.append(f"{name}={value}")
            assert "url(" not in (value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.said.append(data)


def test_page_is_well_formed_and_refers_to_nothing(page: str) -> None:
    """All elements are closed in order, nothing is loaded, and nothing but the page's own script may run."""
    structure = _Structure(page)
    assert structure.references == []
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert len(set(structure.ids)) == len(structure.ids)
    assert {"svg", "table", "details", "h1", "h2"} <= structure.tags
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert len(structure.scripts) == 3  # two with data, one that runs
    for data in structure.scripts[:2]:
        assert json.loads(data)["rows"]


def test_page_escapes_keys(page: str) -> None:
    """A key is text wherever it stands: no tag of it comes to be, and what cannot be seen is made visible."""
    structure = _Structure(page)
    assert "img" not in structure.tags
    assert "\x1b" not in page
    assert "\u202e" not in page
    text = "".join(structure.said)
    assert r"<img src=x onerror=alert(1)>&" in text
    assert r"\x1b\xe2\x80\xae" in text
    assert "its <queue> was full" in text
    assert "/srv/<lake>" in text


def test_page_tells_what_stands_out(figures: Report, page: str) -> None:
    """The findings name the silences, the loss, and what is new and gone."""
    told = {(tag, text.partition("</span>")[0]) for _, tag, text in findings(figures)}
    assert {tag for tag, _ in told} >= {"silent", "gap", "gone", "new", "rate up"}
    text = "".join(_Structure(page).said)
    for part in ("plant/stops fell silent at 13:29:50", "hall/ (2 keys) fell silent", "gone/ (2 keys) have not been"):
        assert part in text


def test_a_browser_shows_it(page: str, tmp_path: Any) -> None:
    """Headless Chromium lays the page out, wide and narrow, and runs its script, which its policy allows."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    file = tmp_path / "report.html"
    # What the script makes, and whether anything sticks out to the side, is written where the dump shows it.
    probe = (
        "<script>document.title = [document.querySelectorAll('.cursor').length, document.images.length, "
        "document.documentElement.scrollWidth <= innerWidth, document.querySelector('.chart svg').clientWidth > 200]"
        "</script></body>"
    )
    allowed = page.replace("</body>", probe)
    start, end = allowed.index("script-src"), allowed.index(";", allowed.index("script-src"))
    file.write_text(allowed[:start] + "script-src &#x27;unsafe-inline&#x27;" + allowed[end:], "utf-8")
    for width in (1200, 500):
        assert "<title>2,0,true,true</title>" in _dump(browser, file, tmp_path / f"profile-{width}", width)
    # As it is, without the probe: its own script runs.
    file.write_text(page, "utf-8")
    assert _dump(browser, file, tmp_path / "profile", 1200).count('class="cursor"') == 2


def _dump(browser: str, file: Any, profile: Any, width: int) -> str:
    """The document as it is in a browser when its scripts have run."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--disable-dev-shm-usage",
               f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom", f"file://{file}"]  # fmt: skip
    environ = {**os.environ, "HOME": str(file.parent)}
    return subprocess.run(command, capture_output=True, timeout=60, check=True, env=environ, text=True).stdout


def test_command_writes_the_page(made: _Made) -> None:
    """It is a file for its owner alone, put there when it is complete; what was found is said."""
    assert f"{made.figures.totals.messages:,} messages of {made.figures.totals.keys} keys" in made.told
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(made.path.parent) == [made.path.name]
    assert "plant/stops fell silent" in "".join(_Structure(made.path.read_text("utf-8")).said)
    told = CliRunner().invoke(report, ["--since=2026-01-01", "--last=1h"])
    assert isinstance(told.exception, UsageError)


@pytest.mark.parametrize(
    "period", [["--since=0001-01-01", "--until=2027-01-01"], ["--until=2027-01-01", "--last=1000000d"]]
)
def test_a_period_that_no_calendar_holds_is_refused(period: list[str]) -> None:
    """In a line, before Spark is started."""
    told = CliRunner().invoke(cli, ["spark", "report", "--lake=x", *period])
    assert (told.exit_code, told.output.count("\n")) == (2, 1)
    assert "before the year 1" in told.output


def test_page_without_a_period_before(figures: Report) -> None:
    """Where nothing was recorded before, it says so and compares nothing."""
    text = "".join(_Structure(render(replace(figures, before=None, changes=None, pattern="plant/"))).said)
    assert "Nothing was recorded before this period" in text
    assert "compared with" not in text
    assert "Only what plant/ matches." in text


# --- parts -----------------------------------------------------------------------------------------


def test_spans() -> None:
    """Spans are merged, taken away from each other, and measured."""
    assert merged([Span(5, 9), Span(1, 3), Span(3, 4), Span(8, 12), Span(7, 7)]) == [Span(1, 4), Span(5, 12)]
    assert without(Span(0, 10), [Span(2, 3), Span(8, 20), Span(-5, 1)]) == [Span(1, 2), Span(3, 8)]
    assert without(Span(0, 10), [Span(-1, 11)]) == []
    assert overlap(Span(0, 10), [Span(-5, 2), Span(1, 4), Span(9, 30)]) == 5
    assert nice_width(24 * _HOUR) == 5 * _MINUTE
    assert nice_width(400 * 365 * 24 * _HOUR) * 300 > 400 * 365 * 24 * _HOUR


def test_wording() -> None:
    """Figures are written as people say them."""
    plain = [text.replace("\N{NARROW NO-BREAK SPACE}", " ") for text in (
        number(12345), number(1_234_567), amount(0), amount(999), amount(1500), rate(0.5), rate(1234.5), rate(1 / 7200),
        change(150, 100), change(50, 100), change(900, 100), change(1, 0), duration(90 * _MINUTE), duration(1500),
        duration(24 * _HOUR), duration(3601 * _SECOND), duration(2.5 * _SECOND),
    )]  # fmt: skip
    assert plain == [
        "12 345", "1.23 M", "0 B", "999 B", "1.50 kB", "30/min", "1.23 k/s", "12/d", "+50 %", "−50 %", "× 9.0", "new",
        "1 h 30 min", "1.5 ms", "24 h", "1 h", "2.5 s",
    ]  # fmt: skip


def test_axes_have_round_ticks() -> None:
    """Values and times on axes are round, and reach beyond the largest value."""
    assert ticks(16.4) == [0, 5, 10, 15, 20]
    assert ticks(0) == [0, 1]
    assert ticks(0.003)[-1] >= 0.003
    found = time_ticks(_START, _START + 24 * _HOUR)
    assert [label for _, label, _ in found][:5] == ["12:00", "15:00", "18:00", "21:00", "Mon 2 Mar"]


def test_markup_is_escaped_where_it_comes_in() -> None:
    """Children and attributes are text unless an element was made of them."""
    assert el("p", "<b>", el("i", '"'), title='"<', hidden=True, id=None) == (
        '<p title="&quot;&lt;" hidden>&lt;b&gt;<i>&quot;</i></p>'
    )
    assert len(shown("x" * 1000)) < 200
