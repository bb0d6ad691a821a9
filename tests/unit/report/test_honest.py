"""Figures that could mislead: each case has a golden page, whose text is in ``golden``.

A golden page that is not there is written, and the test fails: look at it, and keep it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path

import pytest

from sbus.journal.clock import DAY, HOUR, MINUTE, SECOND, from_datetime, to_datetime
from sbus.report import Report, measure, render
from sbus.spark.demo.plant import SILENT_KEY, SITES, Site
from sbus.version import __version__
from tests.support.pages import PageStructure
from tests.support.reports import ListedRow, ListedRows, numbered

GOLDEN = Path(__file__).parent / "golden"
START = from_datetime(datetime(2026, 3, 2, tzinfo=UTC))
ONE, TWO = "11" * 16, "22" * 16

Event = tuple[int, str, str | dict[str, object] | bytes]


@dataclass(frozen=True)
class Case:
    """Rows, and the period of their report; it is made an hour after its end."""

    rows: list[ListedRow]
    start: int
    end: int
    hosts: dict[str, str]
    names_end: bool = True

    @cached_property
    def measured(self) -> Report:
        """Its report."""
        return measure(
            ListedRows(self.rows, self.hosts),
            start=to_datetime(self.start),
            end=to_datetime(self.end) if self.names_end else None,
            now=to_datetime(self.end + HOUR),
        )


def every(key: str, step: int, start: int, end: int) -> Iterator[Event]:
    """A message at each step."""
    return ((at, "message", key) for at in range(start, end, step))


@cache
def two_hosts() -> Case:
    """Two hosts, of which one was not recorded for 12 of 24 hours."""
    before, end = START - DAY, START + DAY
    stopped, started = START + 6 * HOUR, START + 18 * HOUR
    first: list[Event] = [(before, "start", {"ended": "new"}), *every("pump-1/flow", MINUTE, before + 1, end)]
    first += every("status", 5 * MINUTE, before + 1, end)
    second: list[Event] = [(before, "start", {"ended": "new"})]
    for since, until in ((before + 1, stopped), (started + 1, end)):
        second += every("pump-3/flow", MINUTE, since, until)
        second += every("status", 5 * MINUTE, since, until)
    second += [(stopped, "stop", {}), (started, "start", {"ended": "stop"})]
    return Case([*numbered(ONE, first), *numbered(TWO, second)], START, end, {ONE: "pump-1", TWO: "pump-3"})


@cache
def year_2100() -> Case:
    """One row is dated 2100."""
    end = START + DAY
    events = [(START - DAY, "start", {"ended": "new"}), *every("pump-1/flow", MINUTE, START - DAY + 1, end)]
    rows = numbered(ONE, events)
    late = from_datetime(datetime(2100, 1, 1, tzinfo=UTC))
    return Case([*rows, ListedRow(ONE, len(rows), late, "message", "pump-1/flow", b"")], START, end, {}, False)


@cache
def losses() -> Case:
    """Of 3.001 million messages, the bus dropped 3 million for the recorder."""
    end, step = START + DAY, DAY // 1000
    events: list[Event] = [(START - DAY, "start", {"ended": "new"})]
    events += every("pump-1/flow", step, START - DAY + 1, end)
    events += [(at, "lost", b"3000 24000 3000 queue-full") for at in range(START + step // 2, end, step)]
    return Case(numbered(ONE, events), START, end, {ONE: "pump-1"})


@cache
def bursts(seed: int = 6) -> Case:
    """The demo: scanners that come in bursts, cameras that are slow at night, and one sensor that fails."""
    seconds, step = 80, 0.05
    events: list[Event] = [(START - 1, "start", {"ended": "new"})]
    sites = [Site(name, float(seconds), seed) for name in SITES]
    for number in range(round(seconds / step)):
        begin, until = number * step, (number + 1) * step
        for site in sites:
            events += [(START + round(until * SECOND), "message", str(key)) for key, _ in site.messages(begin, until)]
    end = START + seconds * SECOND
    return Case(numbered(ONE, events), (START + end) // 2, end, {ONE: "pump-1"})


@cache
def clock_change() -> Case:
    """The night in which Berlin's clocks go back: what rests from 22 to 6 o'clock rests an hour longer."""
    start, end = (from_datetime(datetime(2026, 10, *at, tzinfo=UTC)) for at in ((24, 22), (25, 23)))
    events: list[Event] = [(2 * start - end, "start", {"ended": "new"})]
    # From 6 to 22 o'clock: at first two hours ahead of UTC, then one.
    for day, hour in ((23, 4), (24, 4), (25, 5)):
        at = from_datetime(datetime(2026, 10, day, hour, tzinfo=UTC))
        events += every("press/state", 10 * MINUTE, max(at, 2 * start - end + 1), at + 16 * HOUR)
    events += every("press/uptime", 10 * MINUTE, 2 * start - end + 1, end)
    return Case(numbered(ONE, events), start, end, {ONE: "press"})


def text_of(page: str) -> str:
    """The text that a reader sees, and what the marks in the charts say."""
    lines = [" ".join(line.split()) for line in PageStructure(page).text.splitlines()]
    marks = dict.fromkeys(re.findall(r'<div class="(?:band|pause)[^"]*"[^>]* title="([^"]*)"', page))
    return "\n".join([*filter(None, lines), "", *marks, ""]).replace(__version__, "VERSION")


@pytest.mark.parametrize(
    "case",
    [two_hosts, *(pytest.param(case, marks=pytest.mark.slow) for case in (year_2100, losses, bursts, clock_change))],
)
def test_golden_pages(case: Callable[[], Case]) -> None:
    """The page says what it said when somebody looked at it."""
    made = case()
    page = render(made.measured, source="/srv/lake", now=to_datetime(made.end + HOUR))
    golden = GOLDEN / f"{case.__name__}.txt"
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text_of(page), "utf-8")
        pytest.fail(f"{golden} is new: look at it")
    assert text_of(page) == golden.read_text("utf-8")


def test_a_host_that_was_not_recorded_leaves_the_others_as_they_are() -> None:
    """Recorded time is by journal, so no rate changes; the host is named; the hatch is that of its journal."""
    found = two_hosts().measured
    assert [round(recording.recorded / HOUR) for recording in found.journals.values()] == [24, 12]
    assert found.changes is not None
    assert (found.changes.up, found.changes.down, found.silences) == ([], [], [])
    for key in found.top_messages:
        assert key.rate == pytest.approx(1 / 60 if key.key != "status" else 2 / 300, rel=0.01)
    assert found.totals.rate == pytest.approx(2 / 60 + 2 / 300, rel=0.01)


def test_what_was_not_recorded_is_neither_new_nor_gone() -> None:
    """Of a host that was recorded in one of the periods alone, no key is new or gone; of the other one they are."""
    before, end = START - DAY, START + DAY
    first: list[Event] = [(before, "start", {"ended": "new"}), *every("a/old", MINUTE, before + 1, START)]
    first += [*every("a/stays", MINUTE, before + 1, end), *every("a/new", MINUTE, START, end)]
    second: list[Event] = [(before, "start", {"ended": "new"}), *every("b/key", MINUTE, before + 1, START - 1)]
    second.append((START - 1, "stop", {}))
    third: list[Event] = [(START, "start", {"ended": "new"}), *every("c/key", MINUTE, START + 1, end)]
    rows = [*numbered(ONE, first), *numbered(TWO, second), *numbered("33" * 16, third)]
    found = Case(rows, START, end, {}).measured.changes
    assert found is not None
    assert ([each.scope for each in found.new], found.new_count) == (["a/new"], 1)
    assert ([each.scope for each in found.vanished], found.vanished_count) == (["a/old"], 1)


def test_a_period_ends_before_what_is_ahead_of_the_clock() -> None:
    """One row of a recorder with a wrong clock does not stretch the period to its time."""
    found = year_2100().measured
    assert (found.period.end, found.ahead) == (START + DAY, 1)
    assert found.totals.messages == 24 * 60


@pytest.mark.slow
def test_losses_are_no_interruption() -> None:
    """However many messages the bus drops, the time was recorded, and rates are those of what was recorded."""
    found = losses().measured
    assert found.totals.recorded >= DAY - 4 * MINUTE
    assert found.lost_share == pytest.approx(3_000_000 / 3_001_000)
    assert found.totals.rate == pytest.approx(1000 / 86_400, rel=0.01)


@pytest.mark.parametrize(
    "phase", [0, 9, 18, *(pytest.param(phase, marks=pytest.mark.slow) for phase in range(24) if phase % 9)]
)
def test_a_rest_each_night_is_no_silence(phase: int) -> None:
    """Whatever time of the day a report begins at: 48 hours show one night and the ends of two, or two nights."""
    start = START + phase * HOUR
    events: list[Event] = [(start - DAY, "start", {"ended": "new"})]
    for day in range(-2, 3):
        begin = START + day * DAY + 6 * HOUR
        events += every("press/state", 10 * MINUTE, max(begin, start - DAY + 1), min(begin + 16 * HOUR, start + DAY))
    events += every("press/uptime", 10 * MINUTE, start - DAY + 1, start + DAY)
    assert Case(numbered(ONE, events), start, start + DAY, {}).measured.silences == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4, 5, 6, 7))])
def test_bursts_are_no_silences(seed: int) -> None:
    """In the demo, whatever its dice say, one sensor falls silent; scanners and cameras do not."""
    found = bursts(seed).measured
    assert [silence.scope for silence in found.silences] == [SILENT_KEY]
