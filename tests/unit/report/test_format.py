"""How a report measures spans of time, and how it writes numbers and chooses the labels of axes."""

from __future__ import annotations

from sbus.journal.clock import HOUR, MINUTE, SECOND
from sbus.report.page.format import amount, axis_values, change, duration, number, rate, rates, time_ticks
from sbus.report.spans import Span, merged, nice_width, overlap, without
from tests.unit.report.reports import PERIOD


def test_spans() -> None:
    """Spans are merged, subtracted and measured, whatever their order and overlap."""
    assert merged([Span(5, 9), Span(1, 3), Span(3, 4), Span(8, 12), Span(7, 7)]) == [Span(1, 4), Span(5, 12)]
    assert without(Span(0, 10), [Span(2, 3), Span(8, 20), Span(-5, 1)]) == [Span(1, 2), Span(3, 8)]
    assert without(Span(0, 10), [Span(-1, 11)]) == []
    assert overlap(Span(0, 10), [Span(-5, 2), Span(1, 4), Span(9, 30)]) == 5
    assert nice_width(24 * HOUR) == 5 * MINUTE
    assert nice_width(400 * 365 * 24 * HOUR) * 300 > 400 * 365 * 24 * HOUR


def test_numbers_rates_and_durations() -> None:
    """Numbers, sizes, rates, changes and durations are written with the unit that a reader would choose."""
    plain = [text.replace("\N{NARROW NO-BREAK SPACE}", " ") for text in (
        number(12345), number(1_234_567), amount(0), amount(999), amount(1500), rate(0.5), rate(1234.5), rate(1 / 7200),
        change(150, 100), change(50, 100), change(900, 100), change(1, 0), duration(90 * MINUTE), duration(1500),
        duration(24 * HOUR), duration(3601 * SECOND), duration(2.5 * SECOND),
    )]  # fmt: skip
    assert plain == [
        "12 345", "1.23 M", "0 B", "999 B", "1.50 kB", "30/min", "1.23 k/s", "12/d", "+50 %", "−50 %", "× 9.0", "new",
        "1 h 30 min", "1.5 ms", "24 h", "1 h", "2.5 s",
    ]  # fmt: skip


def test_rates_that_are_compared_have_one_unit() -> None:
    """The unit of the smallest rate is that of all; a rate of 0 has no unit of its own."""
    assert [text.replace("\N{NARROW NO-BREAK SPACE}", " ") for text in rates(2.5, 1 / 30)] == ["150/min", "2/min"]
    assert rates(0, 5) == ["0/s", "5/s"]
    assert rates(0, 0) == ["0/s", "0/s"]
    assert [text.rpartition("/")[2] for text in rates(1e6, 1e-9)] == ["d", "d"]


def test_axes_have_round_ticks() -> None:
    """The labels of axes are round values, and the last is at least the largest value."""
    assert axis_values(16.4) == [0, 5, 10, 15, 20]
    assert axis_values(0) == [0, 1]
    assert axis_values(0.003)[-1] >= 0.003
    found = time_ticks(PERIOD.start, PERIOD.start + 24 * HOUR)
    assert [label for _, label, _ in found][:5] == ["12:00", "15:00", "18:00", "21:00", "Mon 2 Mar"]
