"""The figures of a report are those of the rows, and the page shows them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import sbus.report as report_package
from sbus.cli.main import cli
from sbus.cli.report import report
from sbus.errors import UsageError
from sbus.lake.plain import PlainTable
from sbus.report import LakeRows, measure, render
from sbus.report.engine.gaps import MAX_GAPS, find_gaps, find_losses
from sbus.report.engine.store import opened
from sbus.report.figures import ClockStep, Loss, Report
from sbus.report.page.highlights import highlights
from sbus.report.spans import Span, length, merged
from tests.support.pages import PageStructure
from tests.support.reports import ListedRows

_SECOND = 1_000_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE
_START = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * _SECOND
_EVIL = "</script><img src=x onerror=alert(1)>&\"'\x1b\u202e"
_JOURNAL = "ab" * 16
_RECEIPTS = 25
_LOST = _START + 90 * _MINUTE


def _rows() -> Iterator[tuple[int, str, str, bytes]]:
    """Four hours of rows, the last two of them for the report; most keys have a message every 10 s."""

    def every(key: str, *parts: tuple[float, float], step: float = 10, size: int = 8) -> None:
        """Messages between pairs of hours, counted from the start of the period."""
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
    every("edge/", (-2, 1.2))
    every("edge/below", (-2, 2), step=20)
    every("office", (0.2, 0.3))
    every("once", (1.7, 1.7001))
    every(_EVIL, (1.9, 2), step=1)
    found.append((_START - _HOUR, "lost", "", b"9 90 9 queue-full"))
    found += [(_LOST + n, "lost", "", b"2 20 %d queue-full" % (2 * n + 11)) for n in range(_RECEIPTS)]
    found.append((_LOST + _SECOND, "lost", "", b"? ? ? several"))
    found.append((_START + _HOUR, "damaged", "", b'{"rows": 5}'))
    found.append((_START + _HOUR, "clock", "", b'{"step": -3600.0}'))
    lost = Span(_START + round(1.1 * _HOUR), _START + round(1.2 * _HOUR))
    kept = [row for row in found if not lost.start <= row[0] < lost.end]
    kept.append((lost.end, "reconnect", "", json.dumps({"reason": "its <queue> was full"}).encode()))
    # At the same moment, the gap first.
    return iter(sorted(kept, key=lambda row: (row[0], row[1] == "message")))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    """The result of the command."""

    figures: Report
    path: Path
    output: str


@pytest.fixture(scope="module")
def made(lake: Path, tmp_path_factory: pytest.TempPathFactory) -> _Made:
    """``sbus report`` on the lake, once for all tests."""
    found: list[Report] = []

    def remember(*args: Any, **settings: Any) -> Report:
        found.append(measure(*args, **settings))
        return found[-1]

    path = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_package, "measure", remember)
        arguments = ["--lake", str(lake), "--since=2026-03-01T12:00", "--until=2026-03-01T14:00", "--output", str(path)]
        result = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return _Made(found[0], path, result.output)


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
    """The keys with the most messages and the most bytes come first, each with its shape."""
    counts = [k.messages for k in figures.top_messages]
    assert counts == sorted(counts, reverse=True)
    assert figures.top_messages[0].key == "plant/steady"
    assert figures.top_bytes[0].key == "more/often"
    assert figures.top_bytes[0].bytes == 1000 * figures.top_bytes[0].messages
    assert all(20 < len(k.shape) <= 60 for k in figures.top_messages)


def test_sizes_are_exact(figures: Report) -> None:
    """The percentiles and the histogram match the payloads."""
    overall = figures.sizes[0]
    assert (overall.label, overall.p50, overall.p99, overall.largest) == (None, 8, 1000, 1000)
    assert overall.messages == figures.totals.messages
    assert sum(n for _, _, n in figures.histogram) == overall.messages
    assert all(low <= high for low, high, _ in figures.histogram)
    [large] = [(low, high) for low, high, _ in figures.histogram if low > 8]
    assert large[0] <= 1000 <= large[1]


def test_silences_differ_from_loss_and_habit(figures: Report) -> None:
    """A key that stops or pauses unusually long is silent; one that rests regularly or came once is not."""
    found = {s.scope: s for s in figures.silences}
    assert found.keys() == {"plant/stops", "plant/pauses", "hall/", "edge/"}
    assert figures.silence_count == 4
    stops, pauses, hall = found["plant/stops"], found["plant/pauses"], found["hall/"]
    assert stops.end is None
    assert stops.start == _START + round(1.5 * _HOUR) - 10 * _SECOND
    assert stops.interval == 10 * _SECOND
    assert (pauses.start, pauses.end) == (_START + 30 * _MINUTE - 10 * _SECOND, _START + 54 * _MINUTE)
    assert pauses.unrecorded == 0
    assert pauses.longest_before == 10 * _SECOND
    assert hall.keys == 2
    assert len(hall.activity) == len(figures.traffic.messages[0])


def test_a_key_may_end_as_a_prefix_does(figures: Report) -> None:
    """A key that ends with a slash is counted apart from the keys below it, and can be silent alone."""
    sent = Counter(key for time, kind, key, _ in _rows() if kind == "message" and time >= _START)
    mine = {top.key: (top.messages, sum(top.shape)) for top in figures.top_messages if top.key.startswith("edge/")}
    assert mine == {key: (sent[key], sent[key]) for key in ("edge/", "edge/below")}
    [silence] = [s for s in figures.silences if s.scope == "edge/"]
    assert (silence.is_prefix, sum(silence.activity)) == (False, sent["edge/"])


def test_gaps_reach_from_the_row_before_to_the_one_that_tells(figures: Report) -> None:
    """A gap has its time and reason, and is subtracted from the recorded time."""
    [gap] = [g for g in figures.gaps if g.is_interruption]
    assert (gap.start, gap.end) == (_START + 66 * _MINUTE - 10 * _SECOND, _START + 72 * _MINUTE)
    assert (gap.kind, gap.reason) == ("reconnect", "its <queue> was full")
    # The last row came ten seconds before the period's end, or later: that is no gap.
    missing = merged(Span(g.start, g.end) for g in figures.gaps if g.start >= _START and g.is_unrecorded)
    assert figures.totals.recorded == 2 * _HOUR - length(missing)
    assert length(missing) - (gap.end - gap.start) <= 20 * _SECOND


def test_changes_are_by_recorded_time(figures: Report) -> None:
    """New and vanished keys are reported, by prefix if the whole prefix is new or gone; a gap does not lower a rate."""
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


def test_an_empty_period_is_an_error_that_says_so(lake: Path) -> None:
    """A period without rows, with swapped ends or without a time zone is an error that names the remedy."""
    now = datetime(2026, 3, 1, tzinfo=UTC)
    rows = LakeRows(PlainTable(lake))
    with pytest.raises(UsageError, match="no rows"):
        measure(ListedRows([]))
    with pytest.raises(UsageError, match="swapped"):
        measure(rows, start=now, end=now - timedelta(hours=1))
    with pytest.raises(UsageError, match="before the year 1"):
        measure(rows, start=datetime(1, 1, 1, tzinfo=UTC))
    with pytest.raises(UsageError, match="time zone"):
        measure(rows, start=now.replace(tzinfo=None), end=now)
    # There are rows before the last of these.
    for start in (datetime(2020, 1, 1, tzinfo=UTC), datetime(2026, 3, 1, 14, tzinfo=UTC)):
        with pytest.raises(UsageError, match=f"no rows between {start:%Y-%m-%dT%H}:00:00Z and .*: name another"):
            measure(rows, start=start, end=start + timedelta(hours=1))


def test_losses_are_counted_by_cause(figures: Report) -> None:
    """The report counts what the rows of the period say was lost, by the bus's reasons, and has the clock's steps."""
    assert figures.losses == [
        Loss("lost", "queue-full", 2 * _RECEIPTS, _RECEIPTS, 0, _LOST, _LOST + _RECEIPTS - 1),
        Loss("damaged", "", 5, 1, 0, _START + _HOUR, _START + _HOUR),
        Loss("lost", "several", 0, 1, 1, _LOST + _SECOND, _LOST + _SECOND),
    ]
    assert figures.steps == [ClockStep(_JOURNAL, _START + _HOUR, -_HOUR)]


def test_more_losses_than_gaps_are_listed() -> None:
    """All losses are counted; the oldest ones are not listed as gaps, and displace no interruption."""
    count, at, span = MAX_GAPS + 10, 5, Span(0, _HOUR)
    with opened() as database:
        database.execute(
            "CREATE TABLE rows AS SELECT ? AS journal, i AS seq, i * ? AS us, "
            "if(i = ?, 'reconnect', 'lost') AS kind, '1 2 3 queue-full'::BLOB AS payload FROM range(?) AS numbers(i)",
            [_JOURNAL, _SECOND, at, count],
        )
        listed = [gap.end // _SECOND for gap in find_gaps(database, {}, span, _HOUR)]
        [loss] = find_losses(database, span)
    assert listed == [at, *range(count - MAX_GAPS + 1, count)]
    assert (loss.number, loss.times) == (count - 1, count - 1)


# --- the page --------------------------------------------------------------------------------------


def test_page_is_well_formed_and_refers_to_nothing(page: str) -> None:
    """Elements nest, nothing is loaded, and only the page's own script is allowed to run."""
    structure = PageStructure(page)
    assert all(reference.startswith("href=#") for reference in structure.references)
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert len(set(structure.ids)) == len(structure.ids)
    assert {"svg", "table", "details", "h1", "h2"} <= structure.tags
    assert "default-src 'none'" in page
    assert len(structure.scripts) == 3  # two with data, one that runs
    for data in structure.scripts[:2]:
        assert json.loads(data)["rows"]


def test_page_escapes_keys(page: str) -> None:
    """A key stays text everywhere on the page, and unprintable characters are made visible."""
    structure = PageStructure(page)
    assert "img" not in structure.tags
    assert "\x1b" not in page
    assert "\u202e" not in page
    text = structure.text
    assert r"<img src=x onerror=alert(1)>&" in text
    assert r"\x1b\xe2\x80\xae" in text
    assert "its <queue> was full" in text
    assert "/srv/<lake>" in text


def test_page_tells_what_stands_out(figures: Report, page: str) -> None:
    """The highlights name the silences, the gap, and new and vanished keys."""
    assert {one.tag for one in highlights(figures)} >= {"silent", "gap", "lost", "clock", "gone", "new", "rate up"}
    text = PageStructure(page).text
    for part in ("plant/stops fell silent at 13:29:50", "hall/ (2 keys) fell silent", "gone/ (2 keys) have no"):
        assert part in text


def test_command_writes_the_page(made: _Made) -> None:
    """The command writes a complete file that only its owner can read, and prints a summary."""
    assert f"{made.figures.totals.messages:,} messages of {made.figures.totals.keys} keys" in made.output
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(made.path.parent) == [made.path.name]
    assert "plant/stops fell silent" in PageStructure(made.path.read_text("utf-8")).text
    result = CliRunner().invoke(report, ["--since=2026-01-01", "--last=1h"])
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize(
    "period", [["--since=0001-01-01", "--until=2027-01-01"], ["--until=2027-01-01", "--last=1000000d"]]
)
def test_a_period_that_no_calendar_holds_is_refused(lake: Path, period: list[str]) -> None:
    """A period outside of the calendar is refused in one line."""
    result = CliRunner().invoke(cli, ["report", f"--lake={lake}", *period])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "before the year 1" in result.output
