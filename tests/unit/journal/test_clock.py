"""Conversions of times: exact both ways, aware of zones, and printed in one form."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbus.journal import clock

_FIRST, _LAST = (
    clock.from_datetime(datetime.min.replace(tzinfo=UTC)),
    clock.from_datetime(datetime.max.replace(tzinfo=UTC)),
)
_NOON = clock.from_datetime(datetime(2026, 1, 31, 12, tzinfo=UTC))


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1")
        time.tzset()
        yield
    time.tzset()


@given(micros=st.integers(_FIRST, _LAST))
def test_a_datetime_and_back_is_exact(micros: int) -> None:
    """Every µs of the years 1 to 9999 survives the way to a `datetime` and back."""
    assert clock.from_datetime(clock.to_datetime(micros)) == micros


@given(micros=st.integers(_NOON - 50 * 365 * clock.DAY, _NOON + 74 * 365 * clock.DAY))
def test_seconds_and_back_are_exact_in_our_days(micros: int) -> None:
    """Every µs of the years 1976 to 2099 survives the way to seconds in a float and back."""
    assert clock.from_seconds(clock.to_seconds(micros)) == micros


def test_now_is_the_time_of_the_system() -> None:
    """`now` is the clock of the system, in µs."""
    before = time.time_ns() // 1000
    assert before <= clock.now() <= time.time_ns() // 1000


def test_units() -> None:
    """The units are multiples of a µs."""
    units = [timedelta(microseconds=unit) for unit in (clock.SECOND, clock.MINUTE, clock.HOUR, clock.DAY)]
    assert units == [timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)]


def test_a_zone_is_converted_and_none_means_utc() -> None:
    """A time without a zone is in UTC, wherever the machine stands; another zone is converted."""
    noon = clock.to_datetime(_NOON)
    assert clock.as_utc(datetime(2026, 1, 31, 12)) == noon
    converted = clock.as_utc(datetime(2026, 1, 31, 13, tzinfo=timezone(timedelta(hours=1))))
    assert (converted, converted.tzinfo) == (noon, UTC)


@pytest.mark.parametrize("text", ["2026-01-31T12:00:00", "2026-01-31T12:00:00Z", "2026-01-31 13:00+01:00"])
def test_parse(text: str, berlin: None) -> None:
    """ISO 8601 with a zone, or without one for UTC, whatever the zone of the machine."""
    assert clock.from_datetime(clock.parse(text)) == _NOON


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01"])
def test_parse_refuses(text: str) -> None:
    """A text that is no time is an error."""
    with pytest.raises(ValueError, match=r"isoformat|month"):
        clock.parse(text)


def test_a_datetime_without_a_zone_is_refused() -> None:
    """A `datetime` without a zone could be many moments."""
    with pytest.raises(TypeError):
        clock.from_datetime(datetime(2026, 1, 31))


def test_formats(berlin: None) -> None:
    """UTC ends with Z; the local time ends with its offset; both are cut off at the precision, not rounded."""
    assert clock.format_utc(_NOON + 1_999) == "2026-01-31T12:00:00.001Z"
    assert clock.format_utc(_NOON, "seconds") == "2026-01-31T12:00:00Z"
    assert clock.format_local(_NOON + 1_999) == "2026-01-31T13:00:00.001+01:00"
    assert clock.format_local(_NOON, "minutes") == "2026-01-31T13:00+01:00"
