"""Parameter types: what options accept, and the values that they become."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest

from sbus.cli.types import BYTES, COUNT, RATE, SECONDS, Duration, Number, Size, Speed, Time


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("10", 10.0), ("1.5m", 90.0), ("1h", 3600.0)])
def test_durations(text: str, seconds: float) -> None:
    """A time is a number with a unit; without one it is in seconds."""
    assert Duration().convert(text, None, None) == pytest.approx(seconds)
    assert Duration().convert(seconds, None, None) == seconds


def test_short_durations() -> None:
    """A time below the least one is refused, and the text says which is."""
    with pytest.raises(click.BadParameter, match=r"give a time of 0\.001 seconds or more, such as 500ms"):
        Duration(0.001).convert("0", None, None)


def test_long_durations() -> None:
    """A time above the longest one is refused, and the text says which is."""
    with pytest.raises(click.BadParameter, match=r"give a time from 0\.1 to 60 seconds"):
        Duration(0.1, 60.0).convert("2m", None, None)
    assert Duration().convert("1000000000", None, None) == 1e9
    with pytest.raises(click.BadParameter, match=r"give a time from 0 to 1e\+15 seconds, such as 500ms"):
        Duration().convert("9" * 400, None, None)


def test_counts() -> None:
    """What is not a number is called so; there is never more to count than 64 bits have room for."""
    assert COUNT("7") == 7
    assert COUNT("9" * 30) == 2**63 - 1
    with pytest.raises(click.BadParameter, match="is not a valid number"):
        COUNT("seven")


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("2026-01-31T12:00:00.5", datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC)),
        ("2026-01-31T12:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
    ],
)
def test_times(text: str, time: datetime) -> None:
    """A time is in UTC unless it names a zone."""
    assert Time().convert(text, None, None) == time
    assert Time().convert(time, None, None) is time


@pytest.mark.parametrize(("text", "seconds"), [("-90s", 90.0), ("-1.5h", 5400.0), ("-7d", 604_800.0), ("-0s", 0.0)])
def test_times_before_now(text: str, seconds: float) -> None:
    """A time may be told by how long ago it was."""
    before = datetime.now(UTC)
    time = Time().convert(text, None, None)
    assert before - timedelta(seconds=seconds, milliseconds=1) <= time <= datetime.now(UTC) - timedelta(seconds=seconds)
    assert time.tzinfo is UTC


@pytest.mark.parametrize(
    "text",
    ["-1", "-", "-h", "--1h", "- 1h", "+1h", "1h", "-1y", "-999999999d"],
)
def test_impossible_times_before_now(text: str) -> None:
    """A time before now has a sign, a number and a unit, and is in the years 1 to 9999."""
    with pytest.raises(click.BadParameter, match="is not a time"):
        Time().convert(text, None, None)


@pytest.mark.parametrize("text", ["noon", "2026-02-30", "0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00"])
def test_impossible_times(text: str) -> None:
    """Text that is not a time, or not one of the years 1 to 9999, is refused."""
    with pytest.raises(click.BadParameter, match="is not a time"):
        Time().convert(text, None, None)


def test_numbers() -> None:
    """NaN is in no range: as an age, it would be neither too old nor too young."""
    assert Number(min=0)("0.5") == 0.5
    for type_ in (Number(min=0), RATE):
        with pytest.raises(click.BadParameter, match="'nan' is not a number"):
            type_("nan")


@pytest.mark.parametrize(("text", "speed"), [("1", 1.0), ("0.5", 0.5), ("max", 0.0)])
def test_speeds(text: str, speed: float) -> None:
    """A speed is a factor; 0 stands for ``max``."""
    assert Speed().convert(text, None, None) == speed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0.5", 0.5), ("5m", 300.0), ("20ms", 0.02), (".2", 0.2), ("1000000000", 1e9), ("1000000000s", 1e9)],
)
def test_time_limits(text: str, seconds: float) -> None:
    """A time limit is a number of seconds, or a number with a unit."""
    assert SECONDS.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "0s", ""])
def test_impossible_time_limits(text: str) -> None:
    """A time limit is above 0."""
    with pytest.raises(click.BadParameter, match="is not a time above 0: write it as 90, 90s"):
        SECONDS.convert(text, None, None)


@pytest.mark.parametrize("text", ["1000000000000001", "11574074075d", "9" * 400])
def test_long_time_limits(text: str) -> None:
    """A time limit that is too long is refused with the longest one."""
    with pytest.raises(click.BadParameter, match=r"is not a time above 0 and up to 1e\+15 seconds: write it as"):
        SECONDS.convert(text, None, None)


def test_bytes() -> None:
    """A key is the argument byte for byte, in any encoding."""
    assert BYTES("\udcff/é") == b"\xff/\xc3\xa9"


@pytest.mark.parametrize(("text", "size"), [("64", 64), ("512K", 1 << 19), ("1MiB", 1 << 20)])
def test_sizes(text: str, size: int) -> None:
    """A size is a number of bytes, or a number with a unit."""
    assert Size(64).convert(text, None, None) == size
    assert Size(64).convert(size, None, None) == size


@pytest.mark.parametrize("text", ["63", "0", "-1", "1.5M", "many", ""])
def test_impossible_sizes(text: str) -> None:
    """A size that is too small, or no size at all, is refused."""
    with pytest.raises(click.BadParameter, match="is not a size of 64 bytes or more: write it as"):
        Size(64).convert(text, None, None)


@pytest.mark.parametrize(("text", "error"), [("many", "is not a size of 0 bytes"), ("5K", "is more than 4096 bytes")])
def test_bounded_sizes(text: str, error: str) -> None:
    """A size may be 0 where that makes sense, and may have a largest value."""
    assert Size(0, 4096).convert("0", None, None) == 0
    assert Size(0, 4096).convert("4K", None, None) == 4096
    with pytest.raises(click.BadParameter, match=error):
        Size(0, 4096).convert(text, None, None)
